"""How large a cache must be for a wanted hit rate on a trace: the exact curve of one shared LRU, in one pass.

LRU caches of all sizes hold the same blocks in the same order, the smaller one fewer (Mattson et al., "Evaluation
techniques for storage hierarchies", 1970). So a block hits in each cache of at least its *stack distance*: how many
blocks were used since it was, itself included. Blocks of a request are used leaf first, as headwater evicts: what comes
before a block is always used after it and never leaves before it, so that a prefix hits as far as its blocks do.

Time is one number a use; `_Uses` counts the newest uses after a time: a flag for each time, sums for each bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from headwater.errors import ConfigError
from headwater.traces.model import Trace

BUCKET = 2048


class _Uses:
    """The times at which blocks were last used."""

    def __init__(self, times: int) -> None:
        self._flags = bytearray(times)
        self._sums = [0] * (times // BUCKET + 1)

    def add(self, time: int) -> None:
        self._flags[time] = 1
        self._sums[time // BUCKET] += 1

    def drop(self, time: int) -> None:
        self._flags[time] = 0
        self._sums[time // BUCKET] -= 1

    def since(self, time: int) -> int:
        """How many there are from `time` on."""
        bucket = time // BUCKET
        return self._flags.count(1, time, (bucket + 1) * BUCKET) + sum(self._sums[bucket + 1 :])


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hit tokens by cache size: with room for `blocks[i]` blocks, `hit_tokens[i]` of `input_tokens` hit."""

    block_tokens: int
    input_tokens: int
    blocks: tuple[int, ...]
    hit_tokens: tuple[int, ...]

    @property
    def most(self) -> float:
        """The hit rate of a cache that never evicts."""
        return self.hit_tokens[-1] / self.input_tokens if self.blocks else 0.0

    def rate(self, blocks: int) -> float:
        """The hit rate of a cache of so many blocks."""
        index = bisect_left(self.blocks, blocks + 1)
        return self.hit_tokens[index - 1] / self.input_tokens if index else 0.0

    def blocks_for(self, rate: float) -> int | None:
        """The fewest blocks that reach a hit rate; None if no cache does."""
        if rate <= 0:
            return 0
        index = bisect_left(self.hit_tokens, rate * self.input_tokens - 1e-9)
        return self.blocks[index] if index < len(self.blocks) else None


def hit_curve(trace: Trace) -> HitCurve:
    """The curve of one LRU cache that all requests share, each in it as soon as it arrives. Raises ConfigError for a
    trace without blocks."""
    if not any(it.blocks for it in trace.requests):
        raise ConfigError(
            f"--trace {trace.name}: it has lengths and arrivals but no block hashes, which say what is shared; "
            "use one with hash_ids"
        )
    uses = _Uses(sum(len(it.blocks) for it in trace.requests))
    last: dict[int, int] = {}
    gained: dict[int, int] = {}
    now = 0
    for request in trace.requests:
        left = request.input_tokens
        for block in request.blocks:
            before = last.get(block)
            if before is None:
                break
            needed = uses.since(before)
            tokens = min(trace.block_tokens, left)
            left -= tokens
            gained[needed] = gained.get(needed, 0) + tokens
        for block in reversed(request.blocks):
            if (earlier := last.get(block)) is not None:
                uses.drop(earlier)
            last[block] = now
            uses.add(now)
            now += 1
    blocks = sorted(gained)
    total, sums = 0, []
    for it in blocks:
        total += gained[it]
        sums.append(total)
    return HitCurve(trace.block_tokens, sum(it.input_tokens for it in trace.requests), tuple(blocks), tuple(sums))
