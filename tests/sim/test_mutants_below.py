"""The same for what moves between tiers: each mutant breaks one rule of it, and the simulator must notice."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import pytest

from headwater.core.cache import Cache, Share
from headwater.core.entries import State
from headwater.core.fetch import Answer, Fetch, Fetches
from headwater.core.levels import Level, Part, Verb
from headwater.core.movement import OWNER, Ended, Move, Movement
from headwater.core.pool import Pool
from headwater.sim.tiering import Parts
from headwater.sim.world import World
from headwater.types import ABSENT, ChunkKey, Cleared, Outcome, Removed, Reservation, Stored, TicketKind, Usage
from tests.sim.test_mutants import Mutant

SEEDS = 250


class ReleasesHostEarly(Movement):
    """What goes down is not leased while it is read."""

    def _write_from(self, level: Level, space: int, key: ChunkKey, now: float, *, again: bool) -> None:
        super()._write_from(level, space, key, now, again=again)
        for move in self._moves.values():
            if move.command.verb is Verb.WRITE and move.host_ticket:
                self.host.release(OWNER, move.host_ticket)
                move.host_ticket = 0


class ReleasesDiskEarly(Movement):
    """What is brought up from DISK is not leased while it is read."""

    def read(
        self,
        level_number: int,
        space: int,
        keys: Sequence[ChunkKey],
        wanted: Sequence[tuple[int, ChunkKey]],
        parent: ChunkKey | None,
        now: float,
        ended: Ended,
    ) -> Move | None:
        move = super().read(level_number, space, keys, wanted, parent, now, ended)
        disk = self.levels[level_number].disk
        if move is not None and move.disk_ticket and disk is not None:
            disk.release(OWNER, move.disk_ticket)
            move.disk_ticket = 0
        return move


class CommitsFailedReads(Movement):
    """Whatever became of a read, its chunks are taken for right."""

    def arrived(self, move: Move, outcomes: Sequence[Outcome], now: float) -> set[ChunkKey]:
        return super().arrived(move, [Outcome.DONE] * len(outcomes), now)


class CommitsFailedWrites(Movement):
    """Whatever became of a write, its chunks are taken for written."""

    def _written(self, move: Move, outcomes: list[Outcome], now: float) -> None:
        super()._written(move, [Outcome.DONE] * len(outcomes), now)


class KeepsWrong(Movement):
    """What a read found wrong stays on DISK."""

    def _drop(self, level: Level, space: int, part: Part, outcome: Outcome, now: float) -> None:
        pass


class KeepsRefused(Movement):
    """What nobody has the key of stays on DISK, and is never written anew."""

    def _drop(self, level: Level, space: int, part: Part, outcome: Outcome, now: float) -> None:
        if outcome is not Outcome.REFUSED:
            super()._drop(level, space, part, outcome, now)


class UsesBadPlacesAgain(Pool):
    """A slot whose bytes went bad is the next one that is used."""

    def condemn(self, address: int) -> None:
        pass


class AsksWithoutBounds(Movement):
    """Every question goes out at once."""

    def _ask_waiting(self, number: int, now: float) -> None:
        self.levels[number].asking = 0
        super()._ask_waiting(number, now)


class LeaksDiskLeases(Movement):
    """A read that failed as a whole keeps its leases on DISK."""

    def arrived(self, move: Move, outcomes: Sequence[Outcome], now: float) -> set[ChunkKey]:
        if set(outcomes) == {Outcome.FAILED}:
            move.disk_ticket = 0
        return super().arrived(move, outcomes, now)


class LeaksReservations(Movement):
    """A write that failed as a whole keeps its slots on DISK."""

    def _written(self, move: Move, outcomes: list[Outcome], now: float) -> None:
        if set(outcomes) == {Outcome.FAILED}:
            move.disk_ticket = 0
        super()._written(move, outcomes, now)


class ForgetsWhatWasUnderWay(Movement):
    """When a level as a whole does not work, nobody is told what became of its commands."""

    def ended(self, number: int, result: Sequence[Outcome] | Usage | None, now: float, jitter: float) -> None:
        if result is None:
            self._moves[number].ended = None
        super().ended(number, result, now, jitter)


class ClearsHostOnly(Movement):
    """An operator's clear leaves the lower tiers alone."""

    def clear(self, space: int, now: float) -> Cleared:
        return Cleared(self.host.clear(space, OWNER), sum(map(len, self.host.spaces[space].index)))


class HugeBatches(Movement):
    """Batches are as long as the prompt."""

    def _chain(self, level: Level, space: int, key: ChunkKey, *, again: bool) -> list[ChunkKey]:
        keep, level.batch_bytes = level.batch_bytes, 1 << 40
        found = super()._chain(level, space, key, again=again)
        level.batch_bytes = keep
        return found


class TakesEverything(Level):
    """What was used once goes down, whatever the level was told to take."""

    def wants(self, space: int, group: int, key: ChunkKey, *, used: bool) -> bool:
        return super().wants(space, group, key, used=True)


class Impatient(Fetches):
    """Requests wait for as long as it takes."""

    def __init__(self, movement: Movement) -> None:
        super().__init__(movement, 100.0, 1000.0)


class HoldsForEver(Fetches):
    """What was brought up is never let go."""

    def _hold(self, fetch: Fetch, chunks: int, now: float) -> None:
        parts = [(group, key) for group in range(len(fetch.sources)) for key in fetch.keys[:chunks]]
        self._host.hold("", TicketKind.PIN, fetch.space, parts, math.inf)


class PromisesTheTarget(Fetches):
    """The answer is what will be there, not what is."""

    def ask(
        self, owner: str, request: str, space: int, keys: Sequence[ChunkKey], tokens_s: float | None, now: float
    ) -> Answer:
        answer = super().ask(owner, request, space, keys, tokens_s, now)
        fetch = self._fetches.get((owner, request))
        return answer if fetch is None else Answer(max(answer.chunks, fetch.target), answer.waiting)


class ReadsWithoutBounds(Fetches):
    """As many reads as there are."""

    def _has_room(self, level: Level) -> bool:
        return True


class FreesWhatIsRead(Fetches):
    """A cancelled request's slots are given back while they are written to."""

    def _give_up(self, fetch: Fetch, why: str, now: float) -> None:
        for move in self._movement._moves.values():
            if move.command.verb is Verb.READ and move.command.parts[0].key in fetch.keys:
                self._host.release(OWNER, move.host_ticket)
        super()._give_up(fetch, why, now)


class WaitsAgain(Fetches):
    """A final answer is not final."""

    def ask(
        self, owner: str, request: str, space: int, keys: Sequence[ChunkKey], tokens_s: float | None, now: float
    ) -> Answer:
        answer = super().ask(owner, request, space, keys, tokens_s, now)
        return Answer(answer.chunks, waiting=answer.chunks < len(keys))


class DoesNotHold(Cache):
    """`hold` names rows and leases none."""

    def hold(
        self, owner: str, kind: TicketKind, space: int, parts: Iterable[tuple[int, ChunkKey]], until_s: float
    ) -> tuple[int, list[int]]:
        ticket, places = super().hold(owner, kind, space, parts, until_s)
        if ticket:
            for row in self.tickets[ticket].rows:
                self.entries.leases[row] -= 1
            self.tickets[ticket].rows.clear()
        return ticket, places


class HoldsReserved(Cache):
    """`hold` takes what is still being written for readable."""

    def hold(
        self, owner: str, kind: TicketKind, space: int, parts: Iterable[tuple[int, ChunkKey]], until_s: float
    ) -> tuple[int, list[int]]:
        parts = list(parts)
        ticket, places = super().hold(owner, kind, space, parts, until_s)
        for at, (group, key) in enumerate(parts):
            row = self.spaces[space].index[group].get(key)
            if places[at] == ABSENT and row is not None:
                places[at] = self.entries.address[row]
        return ticket, places


class IgnoresShares(Cache):
    """Anybody gives room to anybody."""

    def _givers(self, wants: Share) -> list[Share]:
        return [*(it for it in self.shares.values() if it is not wants), wants]


class WithdrawsLeased(Cache):
    """The slot of what turned out wrong is free at once, although somebody reads it."""

    def _withdraw(self, row: int, reason: str) -> None:
        self.entries.leases[row] = 0
        super()._withdraw(row, reason)


class IgnoresParents(Cache):
    """On DISK a chunk may be stored without the chunk before it."""

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
        return super().reserve(owner, space, None, keys, lacking, shards, now, until_s)


class OrphansOnDisk(Cache):
    """On DISK a chunk may leave before those that hang on it."""

    def _evictable(self, row: int) -> bool:
        return self.entries.state[row] == State.READY and not self.entries.leases[row] and row != self._shield

    def _remove(self, row: int, reason: str) -> None:
        for child in list(self.entries.children(row)):
            self.entries.detach(child)
        super()._remove(row, reason)


class RestoresSilently(Cache):
    """What is restored never leaves again."""

    def restore(self, space: int, parts: Sequence[tuple[int, ChunkKey, bytes, int]]) -> list[bool]:
        took = super().restore(space, parts)
        for row in self.spaces[space].index[0].values():
            self.spaces[space].share.policy.remove(row)
        return took


class AnnouncesBeforeWrite(Cache):
    """The journal is told of a chunk when its slot is reserved."""

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
        for key, place in zip(keys, granted.addresses[0], strict=False):
            if place != ABSENT:
                size = self.spaces[space].slot_bytes[0]
                self._changes.append(Stored(space, 0, (key,), self.tier, size, (place,)))
        return granted


class LeavesJournalBehind(Cache):
    """The journal is not told what left the DISK tier."""

    def _remove(self, row: int, reason: str) -> None:
        super()._remove(row, reason)
        self._changes = [it for it in self._changes if not isinstance(it, Removed)]


MUTANTS: dict[str, Mutant] = {
    **{
        it.__name__: Mutant(Parts(movement=it))
        for it in (
            ReleasesHostEarly,
            ReleasesDiskEarly,
            CommitsFailedReads,
            CommitsFailedWrites,
            KeepsWrong,
            KeepsRefused,
            AsksWithoutBounds,
            LeaksDiskLeases,
            LeaksReservations,
            ForgetsWhatWasUnderWay,
            ClearsHostOnly,
            HugeBatches,
        )
    },
    **{
        it.__name__: Mutant(Parts(fetches=it))
        for it in (
            Impatient,
            HoldsForEver,
            PromisesTheTarget,
            ReadsWithoutBounds,
            FreesWhatIsRead,
            WaitsAgain,
        )
    },
    **{it.__name__: Mutant(Parts(cache=it)) for it in (DoesNotHold, HoldsReserved, IgnoresShares)},
    **{
        it.__name__: Mutant(Parts(disk_cache=it))
        for it in (
            WithdrawsLeased,
            IgnoresParents,
            OrphansOnDisk,
            RestoresSilently,
            AnnouncesBeforeWrite,
            LeavesJournalBehind,
        )
    },
    "UsesBadPlacesAgain": Mutant(Parts(pool=UsesBadPlacesAgain)),
    "TakesEverything": Mutant(Parts(level=TakesEverything)),
}


def levelled() -> Iterator[int]:
    """The seeds of worlds that have something below HOST."""
    return (seed for seed in range(SEEDS) if World(seed).plan.has_levels)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    said = next((said for seed in levelled() if (said := mutant.play(seed))), None)
    assert said, f"{name} went unnoticed for {SEEDS} seeds"
    print(said)
