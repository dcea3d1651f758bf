"""What a tier below DEVICE keeps, in the trace's units: by last use, or by one of the rules of `core`.

By last use a store is a pool that requests never hold anything of: the ends of prompts leave before their beginnings.
By a rule of `core` every unit is an entry of its own, and only those leave after which nothing is kept.
"""

from __future__ import annotations

from typing import Protocol

from headwater.core.keeping import Keeping
from headwater.core.learned import Learned
from headwater.fleet import Place
from headwater.sim.fleet.pool import Held, Path, Pool

NOBODY = -1


class Store(Protocol):
    """One place. `told` is as a pool's: a list that each change of a run is appended to, if it is one."""

    place: Place
    told: list[tuple[int, int, int]] | None

    def holds(self, path: Path) -> int:
        """How many leading units."""

    def put(self, path: Path, units: int) -> None:
        """So many leading units are written, as far as they fit."""

    def used(self, path: Path, device: int) -> None:
        """A prompt was prefilled, with so many leading units on DEVICE."""


class LastUsed:
    """Keeps what was used or written last."""

    def __init__(self, place: Place, units: int) -> None:
        self.place = place
        self._pool = Pool(units)

    def __repr__(self) -> str:
        return f"<LastUsed {self.place.tier.value} {self.place.number}: {self._pool!r}>"

    @property
    def told(self) -> list[tuple[int, int, int]] | None:
        """See Store."""
        return self._pool.told

    @told.setter
    def told(self, told: list[tuple[int, int, int]] | None) -> None:
        self._pool.told = told

    def holds(self, path: Path) -> int:
        """See Store."""
        return self._pool.leading(path)

    def put(self, path: Path, units: int) -> None:
        """See Store."""
        held = Held(path)
        self._pool.grow(held, min(units, self._pool.capacity))
        self._pool.release(held)

    def used(self, path: Path, device: int) -> None:
        """See Store. What DEVICE served counts as used as well."""
        if found := self.holds(path):
            self.put(path, found)


class Kept:
    """Keeps what a rule of `core` says."""

    def __init__(self, place: Place, units: int, rule: Learned) -> None:
        self.place = place
        self.told: list[tuple[int, int, int]] | None = None
        self._rule = rule
        self._demand = rule if isinstance(rule, Keeping) else None
        self._runs: dict[int, list[int]] = {}
        """The entries of each run's units, from its first on."""
        self._names: list[tuple[int, int]] = [(NOBODY, 0)] * units
        """Which run each entry is of, and the entry that it hangs on."""
        self._hanging = [0] * units
        """How many entries hang on each."""
        self._free = list(range(units - 1, -1, -1))

    def __repr__(self) -> str:
        used = len(self._names) - len(self._free)
        return f"<Kept {self.place.tier.value} {self.place.number}: {used} of {len(self._names)}, {self._rule!r}>"

    def holds(self, path: Path) -> int:
        """See Store."""
        found = 0
        for run, units in path:
            here = len(self._runs.get(run, ()))
            if here < units:
                return found + here
            found += units
        return found

    def put(self, path: Path, units: int) -> None:
        """See Store."""
        parent = NOBODY
        for run, length in path:
            entries = self._runs.get(run)
            if entries is None:
                entries = self._runs[run] = []
            before = len(entries)
            for at in range(before, min(length, units)):
                if at:
                    parent = entries[-1]
                entry = self._free.pop() if self._free else self._make_room(parent)
                if entry is None:
                    units = 0
                    break
                entries.append(entry)
                self._names[entry] = (run, parent)
                if parent != NOBODY:
                    self._hanging[parent] += 1
                self._rule.insert(entry, _key(run, at), parent)
            self._tell(run, before, len(entries))
            if not entries:
                del self._runs[run]
            units -= length
            if units <= 0:
                return
            parent = entries[length - 1]

    def used(self, path: Path, device: int) -> None:
        """See Store."""
        at = 0
        for run, length in path:
            entries = self._runs.get(run, [])
            for index in range(length):
                on_device = at < device
                if index < len(entries):
                    if on_device and self._demand is not None:
                        self._demand.met(entries[index])
                    else:
                        self._rule.access(entries[index])
                elif self._demand is not None:
                    self._demand.absent(_key(run, index), on_device)
                at += 1

    def _make_room(self, parent: int) -> int | None:
        """The entry of a unit that leaves; not the one that the next will hang on."""
        hanging = self._hanging
        entry = self._rule.victim(lambda it: not hanging[it] and it != parent)
        if entry is None:
            return None
        run, above = self._names[entry]
        entries = self._runs[run]
        assert entries[-1] == entry, f"{run=}: a unit in the middle left"
        entries.pop()
        if above != NOBODY:
            hanging[above] -= 1
        self._tell(run, len(entries) + 1, len(entries))
        if not entries:
            del self._runs[run]
        return entry

    def _tell(self, run: int, before: int, after: int) -> None:
        if self.told is not None and before != after:
            self.told.append((run, before, after))


def _key(run: int, index: int) -> bytes:
    """A name for a unit whose first bytes are spread evenly, as those of real keys are."""
    return ((run << 20 | index) * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big")


def make_store(place: Place, units: int, keeping: str, late: bool, ghosts: int) -> Store:
    """A store of so many units that keeps by `lru`, `core/learned` or, as `demand`, `core/keeping`, which follows
    `ghosts` more units than twice what the store has. `late`: what is saved was about to be evicted."""
    if keeping == "lru":
        return LastUsed(place, units)
    rule = Learned() if keeping == "learned" else Keeping(late=late, ghosts=ghosts + 2 * units)
    return Kept(place, units, rule)
