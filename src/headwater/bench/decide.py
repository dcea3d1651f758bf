"""How long one routing decision takes: who holds how much of a prompt, and which instance is the best for it.

Every instance holds `blocks` blocks of chains as long as the prompt. All chains begin with the same eighth, as with one
system prompt, so that every instance holds something of every prompt; the rest of a chain is held by `HOLDERS` of them.
What is measured is everything between a prompt's keys and a choice, not the making of the keys. Between two decisions
the loads change as in a live fleet: what was chosen waits there, and as much is done elsewhere.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence

from headwater._kernels.index import make_table
from headwater.core.prefix import PrefixIndex
from headwater.core.routing import Headwater
from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Fleet, Instance, Place
from headwater.ports import RoutingPolicy
from headwater.types import KEY_BYTES, Tier

BLOCK_TOKENS = 16
HOLDERS = 10
SHARED_PART = 8
BUSY_TOKENS, CAPACITY_TOKENS = 40_000, 1 << 20
TIMES = EngineTimes(16.5e-3, 1.5e-5, 4.2e-10, decode_fixed_s=5.7e-3, decode_request_s=2e-5, decode_kv_s=5e-8)


def chain_keys(chain: int, count: int) -> list[bytes]:
    """The keys of one chain, which are no hashes but as good as some: the first ones are every chain's."""
    shared = count // SHARED_PART
    first = chain + 1 << 64
    return [(at + 1 if at < shared else first + at).to_bytes(KEY_BYTES, "little") for at in range(count)]


def filled_index(workers: int, blocks: int, chain_blocks: int) -> tuple[PrefixIndex, int]:
    """The index, and how many chains there are."""
    each = max(blocks // chain_blocks, 1)
    chains = max(workers * each // HOLDERS, 1)
    index = PrefixIndex(2 * chains * chain_blocks, KEY_BYTES, make_table)
    for chain in range(chains):
        keys = chain_keys(chain, chain_blocks)
        for copy in range(min(HOLDERS, workers)):
            index.stored(Place(Tier.DEVICE, (chain * HOLDERS + copy) % workers), keys)
    return index, chains


def busy_fleet(workers: int, draw: random.Random) -> Fleet:
    """Instances that all do something."""
    instances = {}
    for number in range(workers):
        waiting, running = draw.randrange(1, 5), draw.randrange(1, 9)
        it = instances[number] = Instance(number, TIMES, CAPACITY_TOKENS, node=number // 8)
        it.waiting_requests, it.waiting_tokens = waiting, waiting * draw.randrange(100, 8000)
        it.running_requests, it.running_tokens = running, running * draw.randrange(100, 8000)
    return Fleet(instances, kv_bytes_per_token=131_072)


def decide_samples(
    workers: int = 1000,
    blocks: int = 10_000,
    prompt_tokens: int = 4096,
    calls: int = 500,
    policy: RoutingPolicy | None = None,
    seed: int = 1,
) -> list[float]:
    """The seconds of each of `calls` decisions on such a fleet."""
    draw, policy = random.Random(seed), policy or Headwater()
    index, chains = filled_index(workers, blocks, prompt_tokens // BLOCK_TOKENS)
    fleet = busy_fleet(workers, draw)
    samples = []
    gc.collect()
    gc.freeze()
    try:
        for number in range(calls):
            keys = chain_keys(draw.randrange(chains), prompt_tokens // BLOCK_TOKENS)
            samples.append(_decide(index, policy, fleet, f"r{number}", prompt_tokens, keys))
            done = fleet.instances[draw.randrange(workers)]
            done.waiting_requests, done.waiting_tokens = 1, draw.randrange(BUSY_TOKENS)
    finally:
        gc.unfreeze()
    return samples


def _decide(
    index: PrefixIndex, policy: RoutingPolicy, fleet: Fleet, name: str, tokens: int, keys: Sequence[bytes]
) -> float:
    """One decision, and what follows of it; its seconds."""
    began_s = time.perf_counter()
    ask = Ask(name, tokens, keys, BLOCK_TOKENS)
    choice = policy.choose(ask, index.find(keys, BLOCK_TOKENS), fleet)
    took_s = time.perf_counter() - began_s
    assert choice is not None, "nobody can serve the prompt"
    it = fleet.instances[choice.prefill]
    it.waiting_requests += 1
    it.waiting_tokens += tokens - choice.cached_tokens
    policy.routed(ask, choice, fleet)
    return took_s
