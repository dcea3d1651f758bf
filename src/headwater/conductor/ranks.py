"""Which data-parallel rank of an engine gets a request: the one that holds its prefix, unless others wait there.

An engine with several ranks has as many caches behind one address, and sends requests to whichever rank has the fewest,
unless a header names one. It is named only where that saves something: the rank at which what is left to compute, and
what we have sent there ourselves, are the least, if it holds more than another does. All else is left to the engine,
which knows its ranks' loads better than we do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.conductor.job import Lens

HEADER = b"x-data-parallel-rank"
REQUEST_TOKENS = 512
"""A request under way counts like so many tokens to compute."""

ByRank = Callable[[int, Sequence[Lens]], Sequence[int]]
"""How many leading tokens each rank of an instance holds; nothing where it has one rank or nobody knows."""


class Ranks:
    """Counts what was sent to ranks by name. An instance's counts go with its last request."""

    def __init__(self, by_rank: ByRank) -> None:
        self._by_rank = by_rank
        self._under_way: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def take(self, number: int, lenses: Sequence[Lens]) -> int | None:
        """The rank that a request is sent to, which is counted there until `ended`; None: the engine may choose."""
        held = self._by_rank(number, lenses)
        if not held or max(held) == min(held):
            return None
        costs = [REQUEST_TOKENS * self._under_way.get((number, rank), 0) - it for rank, it in enumerate(held)]
        rank = costs.index(min(costs))
        if held[rank] == min(held):
            return None
        self._under_way[number, rank] = self._under_way.get((number, rank), 0) + 1
        return rank

    def ended(self, number: int, rank: int) -> None:
        """A request that was counted there has ended."""
        left = self._under_way[number, rank] - 1
        if left:
            self._under_way[number, rank] = left
        else:
            del self._under_way[number, rank]
