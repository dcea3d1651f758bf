"""What must be true of a simulated cluster, found without asking the code that is judged.

Every chunk that an instance computes is an *attempt* with a number of its own, and its payload is the expansion of
(key, attempt): half of a slot tells for itself whose bytes it holds and whether the other half is of the same copy.
From that each reader's bytes are judged, and, after every event, all that a node says is readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.core.cache import Cache
from headwater.core.entries import State
from headwater.sim.oracle import Violation
from headwater.types import Changed, ChunkKey, Stored

Half = tuple[ChunkKey, int]
"""Half of a chunk's bytes: of which key, computed in which attempt; ROTTEN if they are nobody's."""
ROTTEN = -1
Checksum = tuple[Half | None, Half | None]
"""What a checksum says of a payload: all of it."""


def must(holds: bool, otherwise: str) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(otherwise)


class SlotMemory:
    """One life's HOST memory: two halves a slot. `claims` says who may write to a slot, until it has stopped."""

    def __init__(self) -> None:
        self._halves: dict[int, list[Half | None]] = {}
        self._claims: dict[int, str] = {}
        self.writes = 0

    def claim(self, writer: str, places: Iterable[int]) -> None:
        """These slots were given to a writer."""
        for place in places:
            other = self._claims.get(place)
            must(other is None, f"slot {place:x} was given to {writer} while {other} may write there")
            self._claims[place] = writer

    def stopped(self, writer: str) -> None:
        """A writer says that it touches its slots no more."""
        for place in [it for it, owner in self._claims.items() if owner == writer]:
            del self._claims[place]

    def write(self, writer: str, place: int, half: int, content: Half | None) -> None:
        """Half a slot is written."""
        owner = self._claims.get(place)
        must(owner == writer, f"{writer} writes to slot {place:x}, which is {owner or 'nobody'}'s")
        self._halves.setdefault(place, [None, None])[half] = content
        self.writes += 1

    def read(self, place: int, half: int) -> Half | None:
        """What is in half a slot at this moment."""
        return self._halves.get(place, (None, None))[half]

    def flaw(self, place: int, key: ChunkKey) -> str | None:
        """What is wrong with a chunk's bytes; None if they are right."""
        first, second = self._halves.get(place, (None, None))
        if first is None or second is None:
            return "unwritten"
        if first[0] != key or second[0] != key:
            return f"the bytes of {first[0].hex()[:6]} and {second[0].hex()[:6]}"
        if ROTTEN in (first[1], second[1]):
            return "rotten"
        return None if first == second else f"torn between attempts {first[1]} and {second[1]}"


class NodeOracle:
    """Judges one life of a node."""

    def __init__(self, name: str, cache: Cache, memory: SlotMemory) -> None:
        self._name, self._cache, self._memory = name, cache, memory
        self.held: set[ChunkKey] = set()
        """What the node has said is readable."""

    def heard(self, changes: Sequence[Changed]) -> None:
        """HOST announces these changes."""
        for change in changes:
            keys = set(change.keys)
            if isinstance(change, Stored):
                must(not keys & self.held, f"{self._name} announces twice")
                self.held |= keys
            else:
                must(keys <= self.held, f"{self._name} loses what it never had")
                self.held -= keys

    def check(self) -> None:
        """After every event that touched the node: its books balance, and what is readable holds the right bytes."""
        cache = self._cache
        cache.check()
        index, state, address = cache.spaces[0].index[0], cache.entries.state, cache.entries.address
        ready = {key: row for key, row in index.items() if state[row] == State.READY}
        must(ready.keys() == self.held, f"{self._name}: announced and readable chunks differ")
        for key, row in ready.items():
            flaw = self._memory.flaw(address[row], key)
            if flaw is not None:
                raise Violation(f"{self._name}: {key.hex()[:6]} is readable and is {flaw}")

    def check_quiet(self) -> None:
        """Nobody does anything any more: nothing is held."""
        cache = self._cache
        must(not cache.tickets, f"{self._name}: tickets are open and nobody uses them: {cache.tickets}")
        must(not any(cache.entries.leases), f"{self._name}: leases are left")
