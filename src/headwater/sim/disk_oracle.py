"""What must be true of a DISK tier's index, found from its announcements and from the bytes that are in the slots."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from headwater.core.cache import Cache
from headwater.core.entries import State
from headwater.core.levels import Command, Verb
from headwater.sim.below import Disk, Name, Row
from headwater.sim.memory import Memory, part_of
from headwater.types import ABSENT, Changed, ChunkKey, Outcome, Stored


class DiskOracle:
    """Judges one life of a DISK tier's index; raises AssertionError where something is wrong."""

    def __init__(
        self, cache: Cache, disk: Disk, above: Mapping[ChunkKey, ChunkKey], cleared: Collection[int] = ()
    ) -> None:
        """`above` is the chunk before a chunk, as prompts had it; `cleared` are tickets whose bytes must be gone."""
        self.cache, self._above, self._cleared = cache, above, cleared
        self._disk = disk
        self._held: set[Name] = set()
        self._lost: set[ChunkKey] = set()
        self._bad: int | None = None
        """The first place that was found bad: there is always room to quarantine one."""
        self.sums = {"stored": 0, "evicted": 0, "deleted": 0, "wrong": 0}

    def restored(self, rows: Iterable[Row]) -> None:
        """The index took these in from the journal."""
        rows = list(rows)
        self._held.update(row.name for row in rows)
        self.sums["stored"] += len(rows)
        known = {row.name[2] for row in rows}
        self._lost.update(ChunkKey(row.parent) for row in rows if row.parent not in known)
        self._lost.update(known)  # a companion may have lost its chunk

    def hear(self) -> list[Changed]:
        """Take the announcements in, and hand them on."""
        changes = self.cache.take_changes()
        for change in changes:
            names = {(change.namespace, change.group, key) for key in change.keys}
            assert len(change.places) == len(names), f"{len(change.places)} places of {len(names)} chunks"
            if isinstance(change, Stored):
                assert not names & self._held, "something on DISK was announced twice"
                self._held |= names
                self.sums["stored"] += len(names)
                continue
            assert names <= self._held, "the removal of something was announced that was never on DISK"
            self._held -= names
            of = change.reason if change.reason in self.sums else "wrong"
            self.sums[of] += len(names)
            if of == "wrong":
                self._lost.update(change.keys)
        return changes

    def judge_end(self, command: Command, outcomes: Sequence[Outcome]) -> None:
        """What a read found wrong is not there any more."""
        for part, outcome in zip(command.parts, outcomes, strict=True):
            if self._bad is None and part.place != ABSENT and outcome in (Outcome.CORRUPT, Outcome.DAMAGED):
                self._bad = part.place
            if part.place == ABSENT or command.verb is not Verb.READ or outcome in (Outcome.DONE, Outcome.FAILED):
                continue
            row = self.cache.spaces[command.space].index[part.group].get(part.key)
            stays = row is not None and self.cache.entries.address[row] == part.place
            assert not stays, f"{part.key.hex()[:6]} was {outcome.value} on DISK and is still to be found there"

    def check(self) -> None:
        """The index's own invariants, its announcements, its tree, its sums."""
        cache = self.cache
        cache.check()
        stored, *left = self.sums.values()
        if self._bad is not None:
            used = any(
                state not in (State.FREE, State.DOOMED) and 0 <= self._bad - address < cache.pool.slot_bytes(address)
                for state, address in zip(cache.entries.state, cache.entries.address, strict=True)
            )
            assert not used, f"the place {self._bad:x} was found bad and is used again"
        assert stored - sum(left) == len(self._held), "stored - evicted - deleted - dropped is not what is on DISK"
        for number, space in enumerate(cache.spaces):
            for group, index in enumerate(space.index):
                ready = {key for key, row in index.items() if cache.entries.state[row] == State.READY}
                told = {key for in_space, of_group, key in self._held if (in_space, of_group) == (number, group)}
                assert ready == told, "announced and readable chunks on DISK differ"
            if space.main is not None:
                self._check_tree(space.index, space.main)

    def _check_tree(self, indexes: Sequence[Mapping[ChunkKey, int]], main: int) -> None:
        """What a chunk hangs on is there, unless it was lost."""
        for group, index in enumerate(indexes):
            for key in index:
                above = self._above.get(key) if group == main else key
                there = above is None or above in indexes[main] or above in self._lost
                assert there, f"{key.hex()[:6]} is on DISK without what it hangs on"

    def check_bytes(self) -> None:
        """What is findable is right, or somebody damaged it since and a read finds out."""
        memory = Memory(self._cleared)
        for number, group, key in self._held:
            space = self.cache.spaces[number]
            row = space.index[group][key]
            place = self.cache.entries.address[row]
            outcome, content = self._disk.read(place, self._disk.named((number, group, key)), space.slot_bytes[group])
            if outcome is not Outcome.DONE:
                assert place in self._disk.unsure, f"{key.hex()[:6]} is on DISK and its bytes are {outcome.value}"
                continue
            pages = range(len(content))
            memory.put(pages, content)
            for shard in range(space.layout.shards):
                flaw = memory.flaw(part_of(space.layout, key, group, shard, 0))
                assert flaw is None, f"a chunk on DISK is not what its header says: {flaw}"

    def check_quiet(self) -> None:
        """Nothing moves: nothing may be held."""
        assert not self.cache.tickets, f"tickets on DISK are left: {sorted(self.cache.tickets)}"
        assert not any(self.cache.entries.leases), "leases on DISK are left"
        left = [State(it) for it in self.cache.entries.state if it not in (State.FREE, State.READY)]
        assert not left, f"rows on DISK are left in {left}"
