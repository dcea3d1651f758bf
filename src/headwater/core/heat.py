"""Which chunks are read most by others, and by how many: the few hot ones among any number, in bounded memory.

Space-saving (Metwally, Agrawal, El Abbadi, ICDT 2005) with forgetting: what is counted fades by half in `half_s`. When
the table is full, its lower half leaves at once, and newcomers start from the highest count that left, which is kept
as their error: a rate is never overstated, and what is read more often than once in (half the table) reads stays.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from headwater.core.placing import Chain

RESCALE = 2.0**64
READER_BITS = 64


class _Count:
    __slots__ = ("before", "error", "now", "parent", "size_bytes", "turn", "weight")

    def __init__(self, floor: float, turn: int) -> None:
        self.weight = self.error = floor
        self.size_bytes = 0
        self.parent = b""
        self.now = self.before = 0
        """Readers of this turn and the one before, a bit for each number modulo 64."""
        self.turn = turn


class Heat:
    """Rates of reads by chunk name. Told the time, which never goes back."""

    def __init__(self, names_max: int = 4096, half_s: float = 10.0) -> None:
        assert names_max >= 2 and half_s > 0, f"{names_max=}, {half_s=}"
        self._max, self._half_s = names_max, half_s
        self._counts: dict[bytes, _Count] = {}
        self._floor = 0.0
        self._start_s = 0.0

    def __repr__(self) -> str:
        return f"Heat({len(self)} names of at most {self._max})"

    def __len__(self) -> int:
        return len(self._counts)

    def served(self, reader: int, names: Sequence[bytes], sizes: Sequence[int], now: float) -> None:
        """A peer has read these chunks, in the order of its prompt."""
        weight, turn = self._weight(now), self._turn(now)
        parent = b""
        for name, size_bytes in zip(names, sizes, strict=True):
            it = self._counts.get(name)
            if it is None:
                if len(self) >= self._max:
                    self._halve()
                it = self._counts[name] = _Count(self._floor, turn)
            it.weight += weight
            it.size_bytes = size_bytes
            it.parent = it.parent or parent
            _turn_to(it, turn)
            it.now |= 1 << reader % READER_BITS
            parent = name

    def rate(self, name: bytes, now: float) -> float:
        """Reads a second, never overstated."""
        one, it = self._weight(now), self._counts.get(name)
        return (it.weight - it.error) / one * math.log(2) / self._half_s if it is not None else 0.0

    def readers(self, name: bytes, now: float) -> int:
        """How many others have read it lately; at most 64, and not overstated."""
        it = self._counts.get(name)
        if it is None:
            return 0
        _turn_to(it, self._turn(now))
        return (it.now | it.before).bit_count()

    def forget(self, names: Sequence[bytes]) -> None:
        """These left, or are not to be counted any more."""
        for name in names:
            self._counts.pop(name, None)

    def chains(self, least_rate: float, least_readers: int, now: float, chains_max: int = 64) -> list[Chain]:
        """The hot runs of chunks, hottest first; each from the first hot chunk to one that no hot one follows."""
        rates = {name: self.rate(name, now) for name in self._counts}
        hot = {it for it, rate in rates.items() if rate >= least_rate and self.readers(it, now) >= least_readers}
        ends = hot - {self._counts[it].parent for it in hot}
        found: list[Chain] = []
        for end in heapq.nlargest(chains_max, sorted(ends), key=rates.__getitem__):
            run: dict[bytes, None] = {}
            at = end
            while at in hot and at not in run:
                run[at] = None
                at = self._counts[at].parent
            names = tuple(reversed(run))
            found.append(Chain(names, tuple(self._counts[it].size_bytes for it in names), rates[end]))
        return found

    def _turn(self, now: float) -> int:
        return math.floor(now / self._half_s)

    def _weight(self, now: float) -> float:
        """What one read counts at this time: later ones count more, which is what makes earlier ones fade."""
        weight = math.exp2(min((now - self._start_s) / self._half_s, 512.0))
        if weight > RESCALE:
            for it in self._counts.values():
                it.weight /= weight
                it.error /= weight
            self._floor /= weight
            self._start_s, weight = now, 1.0
        return weight

    def _halve(self) -> None:
        """Only the upper half stays."""
        order = sorted(self._counts.items(), key=lambda it: it[1].weight, reverse=True)
        self._floor = max(self._floor, order[self._max // 2][1].weight)
        self._counts = dict(order[: self._max // 2])


def _turn_to(it: _Count, turn: int) -> None:
    """Forget the readers of earlier turns than the last."""
    if turn != it.turn:
        it.before = it.now if turn == it.turn + 1 else 0
        it.now, it.turn = 0, turn
