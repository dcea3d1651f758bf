"""How much of a recorded workload is served from the cache, by eviction policy and size.

    python -m headwater.sim.eviction_replay conversation_trace.jsonl

A trace is read by `headwater.traces`, its blocks have 512 tokens, and a hit is the leading run of those that are held.
The real core plays it: one request after the other, without compute delay, each loading what is held and saving the
rest, in one go or, as with chunked prefill, `--piece` blocks at a time. Policies run as they
ship (S3-FIFO with a tenth as its small queue, as in its paper).

`opt` is what no policy can surpass: it knows the future, and of what it holds the block leaves that is used again
last (Belady). A block is never used again before the one that it hangs on, so that it takes leaves only.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headwater.core.cache import Cache
from headwater.core.eviction import POLICIES
from headwater.core.pool import Pool
from headwater.errors import ConfigError
from headwater.traces.model import Trace
from headwater.traces.read import read
from headwater.types import KEY_BYTES, PAGE_BYTES, ChunkKey, KVGroup, KVLayout, Namespace

BLOCK_TOKENS = 512
WHOLE = 1 << 30
"""A piece as large as any prompt."""
CAPACITIES = (1_000, 5_859, 10_000, 20_000, 39_062, 97_656)
"""In blocks: 0.5 to 50 million tokens."""
OPT = "opt"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its length and the keys of its started blocks."""

    tokens: int
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a trace; `hit_rate` is tokens served from the cache / tokens asked for."""

    policy: str
    capacity: int
    requests: int
    hit_rate: float


def prompts(trace: Trace) -> list[Prompt]:
    """The prompts of a trace; raises ConfigError if it says nothing about their contents."""
    if trace.block_tokens != BLOCK_TOKENS or not all(it.blocks for it in trace.requests):
        raise ConfigError(f"{trace.name}: not every request has blocks of {BLOCK_TOKENS} tokens; name another trace")
    keys = {it: _key(it) for request in trace.requests for it in request.blocks}
    return [Prompt(it.input_tokens, tuple(keys[block] for block in it.blocks)) for it in trace.requests]


def _key(number: int) -> ChunkKey:
    """As evenly spread as the keys of real chunks."""
    return ChunkKey(hashlib.sha256(number.to_bytes(8, "little")).digest()[:KEY_BYTES])


def replay(requests: Sequence[Prompt], policy: str, capacity: int, piece: int = WHOLE) -> Replayed:
    """Play a trace through a cache of `capacity` blocks, each of one page, saving `piece` blocks at a time."""
    layout = KVLayout(BLOCK_TOKENS, (KVGroup(BLOCK_TOKENS, PAGE_BYTES, (1,)),))
    cache = Cache(Pool([capacity * PAGE_BYTES], capacity * PAGE_BYTES), POLICIES[policy], load_s=1.0, save_s=1.0)
    space = cache.add_space(Namespace("trace", "none", "none", layout.fingerprint()), layout)
    asked = hit = 0
    for request in requests:
        asked += request.tokens
        hit += min(_serve(cache, space, request.keys, piece) * BLOCK_TOKENS, request.tokens)
        cache.take_changes()
    return Replayed(policy, capacity, len(requests), hit / asked if asked else 0.0)


def clairvoyant(requests: Sequence[Prompt], capacity: int) -> Replayed:
    """The most that a cache of `capacity` blocks can serve of a trace."""
    never = len(requests)
    used_next: dict[ChunkKey, int] = {}
    uses: list[list[int]] = []
    for number in range(never - 1, -1, -1):
        keys = requests[number].keys
        uses.append([used_next.get(key, never) for key in keys])
        used_next.update(dict.fromkeys(keys, number))
    held: dict[ChunkKey, int] = {}
    latest: list[tuple[int, int, ChunkKey]] = []
    asked = hit = 0
    for request, used_again in zip(requests, reversed(uses), strict=True):
        found = next((at for at, key in enumerate(request.keys) if key not in held), len(request.keys))
        asked += request.tokens
        hit += min(found * BLOCK_TOKENS, request.tokens)
        for depth, (key, again) in enumerate(zip(request.keys, used_again, strict=True)):
            held[key] = again
            heapq.heappush(latest, (-again, -depth, key))
        while len(held) > capacity:
            again, _, key = heapq.heappop(latest)
            if held.get(key) == -again:
                del held[key]
    return Replayed(OPT, capacity, len(requests), hit / asked if asked else 0.0)


def _serve(cache: Cache, space: int, keys: Sequence[ChunkKey], piece: int) -> int:
    """Load what is held of one prompt and save the rest; how many blocks were held."""
    found = cache.load("replay", space, keys, 0, (0,), 0.0)
    for start in range(found.chunks, len(keys), piece):
        part, parent = keys[start : start + piece], keys[start - 1] if start else None
        granted = cache.reserve("replay", space, parent, part, frozenset(), (0,), 0.0)
        if granted.ticket:
            cache.done("replay", granted.ticket, 0, (), 0.0)
        if granted.covered < len(part):
            break
    if found.ticket:
        cache.done("replay", found.ticket, 0, (), 0.0)
    return found.chunks


def as_table(results: Sequence[Replayed]) -> str:
    """Results as a Markdown table: a row for each capacity, a column for each policy, in brackets its share of opt."""
    policies = list(dict.fromkeys(it.policy for it in results))
    rates = {(it.capacity, it.policy): it.hit_rate for it in results}
    lines = [
        f"| blocks | tokens | {' | '.join(policies)} |",
        f"|--:|--:|{'--:|' * len(policies)}",
    ]
    for capacity in dict.fromkeys(it.capacity for it in results):
        most = rates.get((capacity, OPT), 0.0)
        shares = {it: f" ({rates[capacity, it] / most:.0%})" for it in policies if most and it != OPT}
        cells = " | ".join(f"{rates[capacity, policy]:.4f}{shares.get(policy, '')}" for policy in policies)
        lines.append(f"| {capacity:,} | {capacity * BLOCK_TOKENS / 1e6:.1f} M | {cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m headwater.sim.eviction_replay", description="Hit rates of a recorded workload by policy."
    )
    parser.add_argument("trace", help="a .jsonl trace, plain or gzip")
    policies = [*sorted(POLICIES), OPT]
    parser.add_argument("--policies", nargs="+", choices=policies, default=policies)
    parser.add_argument("--capacities", nargs="+", type=int, default=list(CAPACITIES), metavar="BLOCKS")
    parser.add_argument("--piece", type=int, default=WHOLE, metavar="BLOCKS", help="save so many blocks at a time")
    parser.add_argument("--json", action="store_true", help="write the results as JSON")
    options = parser.parse_args(arguments)
    try:
        requests = prompts(read(options.trace, block_tokens=BLOCK_TOKENS).trace)
    except ConfigError as error:
        parser.error(str(error))
    results = []
    for capacity in options.capacities:
        for policy in options.policies:
            if policy == OPT:
                results.append(clairvoyant(requests, capacity))
            else:
                results.append(replay(requests, policy, capacity, options.piece))
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{len(results)} of {len(options.capacities) * len(options.policies)} replays")
    sys.stdout.write((json.dumps([asdict(it) for it in results]) if options.json else as_table(results)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
