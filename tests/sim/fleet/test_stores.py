"""Stores by each rule against a plain set of units: never too many, never a hole, and every change told."""

from __future__ import annotations

import random

import pytest

from headwater.core.keeping import Keeping
from headwater.fleet import Place
from headwater.sim.fleet.pool import Path
from headwater.sim.fleet.stores import Kept, make_store
from headwater.types import Tier

# A tree: run 0 forks into 1 and 2, run 1 into 3 and 4; run 5 stands alone.
PATHS: tuple[Path, ...] = (
    ((0, 3), (1, 4), (3, 5)),
    ((0, 3), (1, 4), (3, 2)),
    ((0, 3), (1, 4), (4, 3)),
    ((0, 3), (2, 6)),
    ((0, 2),),
    ((5, 7),),
)
PLACE = Place(Tier.REMOTE, 0)


@pytest.mark.parametrize("keeping", ["lru", "learned", "demand"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("units", [1, 5, 12, 40])
def test_what_is_told_is_what_is_held(keeping: str, late: bool, units: int) -> None:
    draw = random.Random(units)
    store = make_store(PLACE, units, keeping, late, 64)
    store.told = []
    runs: dict[int, int] = {}
    for _ in range(1500):
        path = draw.choice(PATHS)
        total = sum(length for _, length in path)
        before = store.holds(path)
        store.used(path, draw.randint(0, total))
        assert store.holds(path) == before
        store.put(path, total)
        assert store.holds(path) == min(total, units)
        for run, old, new in store.told:
            assert runs.get(run, 0) == old
            runs[run] = new
        store.told.clear()
        assert sum(runs.values()) <= units
        for other in PATHS:
            leading = 0
            for run, length in other:
                leading += min(runs.get(run, 0), length)
                if runs.get(run, 0) < length:
                    break
            assert store.holds(other) == leading


class Heard(Keeping):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(late=False)
        self.notes: list[str] = []

    def access(self, entry: int) -> None:
        self.notes.append("access")

    def met(self, entry: int) -> None:
        self.notes.append("met")

    def absent(self, key: bytes, held: bool) -> None:
        self.notes.append("elsewhere" if held else "computed")


def test_a_rule_hears_of_every_unit_and_who_served_it() -> None:
    rule = Heard()
    store = Kept(PLACE, 10, rule)
    store.put(((0, 3), (1, 4)), 5)
    store.used(((0, 3), (1, 4)), 4)
    assert rule.notes == ["met"] * 4 + ["access"] + ["computed"] * 2
    rule.notes.clear()
    store.used(((0, 3), (1, 4)), 6)
    assert rule.notes == ["met"] * 5 + ["elsewhere", "computed"]
