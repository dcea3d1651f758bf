"""How much of a recorded workload is served from the cache, by eviction policy and size.

    python -m headwater.sim.eviction_replay conversation_trace.jsonl

A trace has a JSON object a line with `input_length` (tokens) and `hash_ids`, one number for each started block of
512 tokens; equal numbers mean the same block after the same blocks, so a hit is the leading run of numbers that
are held. This is the format of the traces published with "Mooncake: Trading More Storage for Less Computation for
Serving LLM Chatbots", FAST 2025. The real core plays them: one request after the other, without compute delay,
each loading what is held and saving the rest, in one go or, as with chunked prefill, `--piece` blocks at a time.
Policies run as they ship (S3-FIFO with a tenth as its small queue, as in its paper).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from headwater.core.cache import Cache
from headwater.core.eviction import POLICIES
from headwater.core.pool import Pool
from headwater.types import KEY_BYTES, PAGE_BYTES, ChunkKey, KVGroup, KVLayout, Namespace

BLOCK_TOKENS = 512
WHOLE = 1 << 30
"""A piece as large as any prompt."""
CAPACITIES = (1_000, 5_859, 10_000, 20_000, 39_062, 97_656)
"""In blocks: 0.5 to 50 million tokens."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
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


def read_trace(lines: Iterable[str]) -> list[TraceRequest]:
    """The requests of a trace; raises ValueError for a line that is not one, naming it."""
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            tokens, ids = int(fields["input_length"]), fields["hash_ids"]
            keys = tuple(ChunkKey(int(it).to_bytes(KEY_BYTES, "little")) for it in ids)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"line {number} is no request of a trace: {error!r}") from error
        if not 0 < tokens <= len(keys) * BLOCK_TOKENS:
            raise ValueError(f"line {number}: {tokens} tokens in {len(keys)} blocks")
        requests.append(TraceRequest(tokens, keys))
    return requests


def replay(requests: Sequence[TraceRequest], policy: str, capacity: int, piece: int = WHOLE) -> Replayed:
    """Play a trace through a cache of `capacity` blocks, each of one page, saving `piece` blocks at a time."""
    layout = KVLayout(BLOCK_TOKENS, (KVGroup(BLOCK_TOKENS, PAGE_BYTES, (1,)),))
    cache = Cache(Pool([capacity * PAGE_BYTES], capacity * PAGE_BYTES), POLICIES[policy](), load_s=1.0, save_s=1.0)
    space = cache.add_space(Namespace("trace", "none", "none", layout.fingerprint()), layout)
    asked = hit = 0
    for request in requests:
        asked += request.tokens
        hit += min(_serve(cache, space, request.keys, piece) * BLOCK_TOKENS, request.tokens)
        cache.take_changes()
    return Replayed(policy, capacity, len(requests), hit / asked if asked else 0.0)


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
    """Results as a Markdown table: a row for each capacity, a column for each policy."""
    policies = list(dict.fromkeys(it.policy for it in results))
    rates = {(it.capacity, it.policy): it.hit_rate for it in results}
    lines = [
        f"| blocks | tokens | {' | '.join(policies)} |",
        f"|--:|--:|{'--:|' * len(policies)}",
    ]
    for capacity in dict.fromkeys(it.capacity for it in results):
        cells = " | ".join(f"{rates[capacity, policy]:.4f}" for policy in policies)
        lines.append(f"| {capacity:,} | {capacity * BLOCK_TOKENS / 1e6:.1f} M | {cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m headwater.sim.eviction_replay", description="Hit rates of a recorded workload by policy."
    )
    parser.add_argument("trace", type=argparse.FileType("r", encoding="utf-8"), help="a .jsonl trace")
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=sorted(POLICIES))
    parser.add_argument("--capacities", nargs="+", type=int, default=list(CAPACITIES), metavar="BLOCKS")
    parser.add_argument("--piece", type=int, default=WHOLE, metavar="BLOCKS", help="save so many blocks at a time")
    parser.add_argument("--json", action="store_true", help="write the results as JSON")
    options = parser.parse_args(arguments)
    with options.trace as lines:
        requests = read_trace(lines)
    results = []
    for capacity in options.capacities:
        for policy in options.policies:
            results.append(replay(requests, policy, capacity, options.piece))
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{len(results)} of {len(options.capacities) * len(options.policies)} replays")
    sys.stdout.write((json.dumps([asdict(it) for it in results]) if options.json else as_table(results)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
