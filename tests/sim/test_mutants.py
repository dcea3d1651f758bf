"""A guard whose removal breaks nothing is not tested: each mutant breaks one rule, and the simulator must notice.

Most are the cache with one rule taken out; the last ones break the contract on the engines' side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from headwater.core.cache import Cache, Share, Space, Ticket
from headwater.core.entries import NONE, State
from headwater.core.eviction import LRU, SMALL
from headwater.core.pool import Pool
from headwater.sim.instance import Instance
from headwater.sim.tiering import Parts
from headwater.sim.worker import Job, Worker
from headwater.sim.world import PARTS, SimulationError, World
from headwater.types import ABSENT, ChunkKey, Loadable, Reservation, Stored, TicketKind, Tier

SEEDS = 60


class NoLease(Cache):
    """A load names slots and holds nothing."""

    def load(
        self, owner: str, space: int, keys: Sequence[ChunkKey], first: int, shards: Collection[int], now: float
    ) -> Loadable:
        found = super().load(owner, space, keys, first, shards, now)
        if found.ticket:
            for row in self.tickets[found.ticket].rows:
                self.entries.leases[row] -= 1
            self.tickets[found.ticket].rows.clear()
        return found


class ShortLease(Cache):
    """Leases end before the deadline that the reader was told."""

    def load(
        self, owner: str, space: int, keys: Sequence[ChunkKey], first: int, shards: Collection[int], now: float
    ) -> Loadable:
        found = super().load(owner, space, keys, first, shards, now)
        if found.ticket:
            self.tickets[found.ticket].deadline_s = now + 0.05
        return found


class CommitsFailedChunks(Cache):
    """What a shard says about failed chunks is not heard."""

    def done(self, owner: str, ticket_id: int, shard: int, failed: Collection[int], now: float) -> bool:
        return super().done(owner, ticket_id, shard, (), now)


class AnnouncesAtReserve(Cache):
    """Announced before commit."""

    def reserve(
        self,
        owner: str,
        space: int,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        lacking: Collection[tuple[int, int]],
        shards: Collection[int],
        now: float,
        until_s: float | None = None,
    ) -> Reservation:
        granted = super().reserve(owner, space, parent, keys, lacking, shards, now, until_s)
        new = tuple(key for key, place in zip(keys, granted.addresses[0], strict=False) if place != ABSENT)
        if new:
            size = self.spaces[space].slot_bytes[0] * len(new)
            self._changes.append(Stored(space, 0, new, Tier.HOST, size))
        return granted


class AnnouncesFailedChunks(Cache):
    """What could not be written is announced as if it had been."""

    def _finish(self, number: int, *, commit: bool) -> None:
        ticket = self.tickets[number]
        bad = [
            row
            for row, at in zip(ticket.rows, ticket.chunk_of, strict=False)
            if at in ticket.failed and self.entries.state[row] == State.RESERVED
        ]
        for row in bad:
            entries, space = self.entries, self.entries.space[row]
            size = self.spaces[space].slot_bytes[entries.group[row]]
            self._changes.append(Stored(space, entries.group[row], (entries.keys[row],), Tier.HOST, size))
        super()._finish(number, commit=commit)


class EvictsSilently(Cache):
    """Evictions are not announced."""

    def _remove(self, row: int, reason: str) -> None:
        super()._remove(row, reason)
        if reason == "evicted":
            self._changes.pop()


class EvictsLeased(Cache):
    """Leased chunks are victims like all others."""

    def _evictable(self, row: int) -> bool:
        held, self.entries.leases[row] = self.entries.leases[row], 0
        evictable = super()._evictable(row)
        self.entries.leases[row] = held
        return evictable


class EvictsParents(Cache):
    """A chunk may leave before those that hang on it."""

    def _evictable(self, row: int) -> bool:
        entries = self.entries
        return entries.state[row] == State.READY and not entries.leases[row] and row != self._shield


class OrphansChildren(Cache):
    """A chunk may leave before those that hang on it, which stay as if nothing had happened."""

    def _evictable(self, row: int) -> bool:
        entries = self.entries
        return entries.state[row] == State.READY and not entries.leases[row] and row != self._shield

    def _remove(self, row: int, reason: str) -> None:
        for child in list(self.entries.children(row)):
            self.entries.detach(child)
        super()._remove(row, reason)


class NoShield(Cache):
    """Room for a chunk may be made by evicting its own parent."""

    def _evictable(self, row: int) -> bool:
        self._shield = NONE
        return super()._evictable(row)


class FreesQuarantined(Cache):
    """A late writer's slot is given away at once."""

    def _quarantine(self, ticket: Ticket) -> None:
        super()._quarantine(ticket)
        for row in ticket.rows:
            if self.entries.state[row] == State.DOOMED:
                self._drop(row)
        ticket.rows.clear()
        ticket.chunk_of.clear()


class CommitsLate(Cache):
    """A save may commit after its deadline."""

    def done(self, owner: str, ticket_id: int, shard: int, failed: Collection[int], now: float) -> bool:
        return super().done(owner, ticket_id, shard, failed, min(now, 0.0))


class CommitsOnClose(Cache):
    """What a dead owner was writing is kept."""

    def close(self, owner: str) -> int:
        held = [number for number, ticket in self.tickets.items() if ticket.owner == owner]
        for number in held:
            self._finish(number, commit=True)
        return len(held)


class CommitsOnRelease(Cache):
    """A save that is given up is kept."""

    def release(self, owner: str, ticket_id: int) -> bool:
        ticket = self.tickets.get(ticket_id)
        if ticket is None or ticket.owner != owner:
            return False
        self._finish(ticket_id, commit=True)
        return True


class OneShardIsEnough(Cache):
    """A chunk is readable once its first shard is written."""

    def done(self, owner: str, ticket_id: int, shard: int, failed: Collection[int], now: float) -> bool:
        ticket = self.tickets.get(ticket_id)
        if ticket is not None and ticket.owner == owner and shard in ticket.shards_left:
            ticket.shards_left = {shard}
        return super().done(owner, ticket_id, shard, failed, now)


class AnyDoneCounts(Cache):
    """Each `done` counts for the next shard: a repeated message counts twice."""

    def done(self, owner: str, ticket_id: int, shard: int, failed: Collection[int], now: float) -> bool:
        ticket = self.tickets.get(ticket_id)
        if ticket is not None and ticket.shards_left and shard not in ticket.shards_left:
            shard = min(ticket.shards_left)
        return super().done(owner, ticket_id, shard, failed, now)


class LosesADone(Cache):
    """The last shard's done is dropped."""

    def done(self, owner: str, ticket_id: int, shard: int, failed: Collection[int], now: float) -> bool:
        ticket = self.tickets.get(ticket_id)
        if ticket is not None and ticket.kind is TicketKind.SAVE and ticket.shards_left == {shard} and shard:
            return False
        return super().done(owner, ticket_id, shard, failed, now)


class MatchesReserved(Cache):
    """A chunk is found while it is still being written."""

    def match(self, space: int, keys: Sequence[ChunkKey]) -> int:
        it = self.spaces[space]
        if it.main is None:
            return super().match(space, keys)
        return next((at for at, key in enumerate(keys) if key not in it.index[it.main]), len(keys))


class IgnoresCompanions(Cache):
    """Windows and states are taken for granted where the full-attention group has its chunks."""

    def match(self, space: int, keys: Sequence[ChunkKey]) -> int:
        it = self.spaces[space]
        if it.main is None:
            return super().match(space, keys)
        return next((at for at, key in enumerate(keys) if not self._ready(it, it.main, key)), len(keys))


class ForgetsOwnersOnClose(Cache):
    """A dead owner's tickets stay."""

    def close(self, owner: str) -> int:
        return 0


class KeepsNothing(Cache):
    """An owner that comes back on a new connection loses also the tickets that it knows."""

    def keep(self, owner: str, known: Collection[int]) -> int:
        return super().keep(owner, ())


class KeepsEverything(Cache):
    """Tickets of which an owner was never told stay."""

    def keep(self, owner: str, known: Collection[int]) -> int:
        return 0


class KeepsForAll(Cache):
    """An owner's word ends the tickets of others as well."""

    def keep(self, owner: str, known: Collection[int]) -> int:
        return sum(
            super(KeepsForAll, self).keep(other, known)
            for other in dict.fromkeys(it.owner for it in self.tickets.values())
        )


class ForgetsReleases(Cache):
    """A release is answered and not carried out."""

    def release(self, owner: str, ticket_id: int) -> bool:
        ticket = self.tickets.get(ticket_id)
        return ticket is not None and ticket.owner == owner


class ReleasesTwice(Cache):
    """The end of a load ends somebody else's lease as well."""

    def _finish(self, number: int, *, commit: bool) -> None:
        ticket = self.tickets[number]
        if ticket.kind is TicketKind.LOAD:
            for row in ticket.rows:
                self.entries.leases[row] -= self.entries.leases[row] > 1
        super()._finish(number, commit=commit)


class TrustsAnyOwner(Cache):
    """A ticket's number is enough to end it."""

    def done(self, owner: str, ticket_id: int, shard: int, failed: Collection[int], now: float) -> bool:
        ticket = self.tickets.get(ticket_id)
        return super().done(ticket.owner if ticket else owner, ticket_id, shard, failed, now)

    def release(self, owner: str, ticket_id: int) -> bool:
        ticket = self.tickets.get(ticket_id)
        return super().release(ticket.owner if ticket else owner, ticket_id)


class UsesNumbersAgain(Cache):
    """Ticket numbers are the lowest that are free, so that a late message ends another ticket."""

    def _open(self, *args: object) -> int:
        self._next_ticket = next(number for number in range(1, 10_000) if number not in self.tickets)
        return super()._open(*args)  # type: ignore[arg-type]


class NoCascade(Cache):
    """What hangs on a chunk that failed stays findable."""

    def _doom(self, row: int) -> None:
        for child in list(self.entries.children(row)):
            self.entries.detach(child)
        super()._doom(row)


class LeavesIndexBehind(Cache):
    """A key stays in the index when its chunk is evicted."""

    def _hide(self, row: int) -> None:
        space = self.spaces[self.entries.space[row]]
        index, key = space.index[self.entries.group[row]], self.entries.keys[row]
        super()._hide(row)
        if self.entries.state[row] == State.READY:
            index[key] = row


class NeverExpires(Cache):
    """A lease without an end is held for ever."""

    def expire(self, now: float) -> int:
        return 0


class CountsTwice(Cache):
    """Lookups are counted as if each were asked twice."""

    def count_lookup(self, space: int, asked: int, hit: int) -> None:
        super().count_lookup(space, 2 * asked, hit)


class FailsWhenFull(Cache):
    """No room is made: what is stored first stays for ever."""

    def _make_room(self, slot_bytes: int, wants: Share) -> bool:
        return False


class PlacesOverFirstGroup(Cache):
    """The second KV group is placed where the first one is."""

    def _place(self, space: int, it: Space, group: int, key: ChunkKey, parent: int) -> int | None:
        row = super()._place(space, it, group, key, parent)
        if row is not None and group and key in it.index[0]:
            self.entries.address[row] = self.entries.address[it.index[0][key]]
        return row


class TakesTakenSlots(Pool):
    """A full pool gives away a slot that is taken."""

    def allocate(self, slot_bytes: int, entry: int) -> int | None:
        address = super().allocate(slot_bytes, entry)
        if address is not None:
            return address
        slabs = [slab for slab, size in enumerate(self._slot_bytes) if size == slot_bytes]
        return self._slab_address[slabs[0]] if slabs else None


class Overlaps(Pool):
    """Slots of a slab that is cut anew overlap: they are half as far apart as they should be."""

    def allocate(self, slot_bytes: int, entry: int) -> int | None:
        address = super().allocate(slot_bytes, entry)
        if address is None or slot_bytes == 4096:
            return address
        start = self._slab_address[self.slab(address)]
        return start + (address - start) // 2


class TouchlessLRU(LRU):
    """Entries in use are dropped from the queue instead of going to its young end."""

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        for _ in range(len(self)):
            entry = self._queues.oldest(SMALL)
            self._queues.take(entry)
            if evictable(entry):
                return entry
        return None


def with_touchless_lru(pool: Pool, _: object, load_s: float, save_s: float, epoch: int, **quotas: Any) -> Cache:
    """A cache with that policy."""
    return Cache(pool, TouchlessLRU, load_s, save_s, epoch, **quotas)


class TrustingWorker(Worker):
    """A reader that does not look at the deadline after its copy."""

    def is_in_time(self, job: Job) -> bool:
        return True


class TrustingInstance(Instance):
    worker_type = TrustingWorker


class EagerInstance(Instance):
    """A scheduler that releases its saves while its workers may still write."""

    def write(self, granted: Reservation, keys: list[ChunkKey]) -> list[Job]:
        jobs = super().write(granted, keys)
        if self.host.rng.random() < 0.3:
            self.release(granted.ticket)
        return jobs


class HastyWorld(World):
    """A node that takes the end of one connection for the death of all processes behind it."""

    def scheduler_died(self, instance: Instance) -> None:
        self.node.close(instance.owner)


@dataclass(frozen=True)
class Mutant:
    """What is broken in a world."""

    parts: Parts = PARTS
    instance_type: type[Instance] = Instance
    world_type: type[World] = World

    def play(self, seed: int) -> str | None:
        """What the simulator says about it."""
        try:
            self.world_type(seed, self.parts, self.instance_type).play()
        except SimulationError as error:
            return str(error)
        return None


CACHES: list[type[Cache]] = [
    NoLease,
    ShortLease,
    CommitsFailedChunks,
    AnnouncesAtReserve,
    AnnouncesFailedChunks,
    EvictsSilently,
    EvictsLeased,
    EvictsParents,
    OrphansChildren,
    NoShield,
    FreesQuarantined,
    CommitsLate,
    CommitsOnClose,
    CommitsOnRelease,
    OneShardIsEnough,
    AnyDoneCounts,
    LosesADone,
    MatchesReserved,
    IgnoresCompanions,
    ForgetsOwnersOnClose,
    KeepsNothing,
    KeepsEverything,
    KeepsForAll,
    ForgetsReleases,
    ReleasesTwice,
    TrustsAnyOwner,
    UsesNumbersAgain,
    NoCascade,
    LeavesIndexBehind,
    NeverExpires,
    CountsTwice,
    FailsWhenFull,
    PlacesOverFirstGroup,
]

MUTANTS: dict[str, Mutant] = {
    **{it.__name__: Mutant(Parts(cache=it)) for it in CACHES},
    "TakesTakenSlots": Mutant(Parts(pool=TakesTakenSlots)),
    "Overlaps": Mutant(Parts(pool=Overlaps)),
    "TouchlessLRU": Mutant(Parts(cache=with_touchless_lru)),
    "TrustingReaders": Mutant(instance_type=TrustingInstance),
    "EagerScheduler": Mutant(instance_type=EagerInstance),
    "HastyNode": Mutant(world_type=HastyWorld),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    said = next((said for seed in range(SEEDS) if (said := mutant.play(seed))), None)
    assert said, f"{name} went unnoticed for {SEEDS} seeds"
    print(said)
