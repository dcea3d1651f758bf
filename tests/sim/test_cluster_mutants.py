"""Each mutant breaks one guard of a cluster, of the core or of the drivers around it, and the seeds must notice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from headwater.core.announcing import Announcing, Batch, Stamp
from headwater.core.cache import Cache
from headwater.core.directory import Records
from headwater.core.movement import OWNER, Move, Movement
from headwater.sim.cluster import Cluster, ClusterError, ClusterParts
from headwater.sim.cluster_exports import SimulatedExports
from headwater.sim.cluster_faults import ClusterFaults
from headwater.sim.cluster_life import Asked
from headwater.sim.cluster_node import ClusterNode
from headwater.sim.cluster_oracle import Checksum
from headwater.sim.cluster_reads import Transfer
from headwater.types import ABSENT, Announced, Beat, ChunkKey, Member, Outcome, Reservation, Stored, TicketKind, Tier

SEEDS = 100
Changes = tuple[dict[str, Any], dict[str, Any]]
"""What is otherwise than the seed has drawn it: of the plan, and of the faults."""
NOTHING = dict.fromkeys((it.name for it in fields(ClusterFaults)), 0.0)
LATE: Changes = (
    {"slots": 12, "lease_s": 0.05, "tick_s": 0.05, "bytes_s": 1e5, "stems": 4, "chunk_s": 0.01, "drift": 0.0},
    {"stalls": 0.6, "floods": 0.6, "kills": 0.0, "directory_is_away": 0.0, "pauses": 0.0, "leaves": 0.0},
)
LAGS: Changes = (
    {"nodes": 3, "slots": 12, "chunk_s": 0.01, "stems": 8},
    {"directory_lags": 0.2, "clears": 0.3, "drops": 0.05, "islands": 0.2, "directory_is_empty": 0.0, "kills": 0.0},
)
SLOW: Changes = ({"latency_s": 0.3, "slots": 12, "stems": 8}, {"slow_hosts": 0.5, "floods": 0.6, "clears": 0.3})
HARSH = {
    "KeepsOldLives": ({}, {"kills": 0.3}),
    "LeavesEarly": (LATE[0] | {"one_sided": 1.0}, LATE[1]),
    "LendsForEver": ({"one_sided": 1.0}, {"drops": 0.05}),
    "NeverExpires": ({"one_sided": 1.0}, {"drops": 0.05}),
    "ServesAnybody": ({"slots": 12}, {"kills": 0.3, "islands": 0.2}),
    "TakesSilenceForDeath": ({}, {"pauses": 0.3}),
    "BelievesLateBytes": (LATE[0] | {"one_sided": 1.0}, LATE[1]),
    "StreamsLate": (LATE[0] | {"one_sided": 0.0}, LATE[1]),
    "IgnoresSerials": ({"nodes": 5, "requests": 40, "rush_s": 0.6}, {**NOTHING, "directory_lags": 0.1}),
    "JoinsWithoutLeaving": LAGS,
    "TakesAnySerial": SLOW,
}
"""Where such trouble is rare, worlds that are full of it."""


class ServesAnybody(SimulatedExports):
    """Whoever listens at an address answers, whom the reader takes it for or not."""

    def expects(self, asked: Asked) -> bool:
        return True


class LendsWithoutLease(SimulatedExports):
    """What a peer reads may leave and be overwritten meanwhile."""

    def _lend(self, asked: Asked) -> tuple[int, list[int], float]:
        ticket, places, deadline_s = super()._lend(asked)
        self.give_back(ticket)
        return 0, places, deadline_s


class LendsForEver(SimulatedExports):
    """A reader that never says that it is through keeps its loan."""

    def _lend(self, asked: Asked) -> tuple[int, list[int], float]:
        ticket, places, deadline_s = super()._lend(asked)
        self.give_back(ticket)
        node = self._node
        parts = [(0, key) for key in asked.keys]
        ticket, places = node.cache.hold(OWNER, TicketKind.LOAD, 0, parts, math.inf)
        return ticket, places, deadline_s


class StreamsLate(SimulatedExports):
    """A stream that outlived its lease says nothing of it."""

    def is_late(self, deadline_s: float) -> bool:
        return False


class BelievesBytes(Transfer):
    """The reader does not look at checksums."""

    def is_right(self, content: Checksum, checksum: Checksum | None) -> bool:
        return True


class BelievesLateBytes(Transfer):
    """The reader does not look at the loan's deadline once the bytes are there."""

    def is_in_time(self, deadline_s: float) -> bool:
        return True


class LeavesEarly(Transfer):
    """A call ends at its deadline, whatever still comes in."""

    def abandon(self) -> None:
        self._abandoned = True
        self._end({}, Outcome.FAILED)


class AnnouncesEarly(ClusterNode):
    """What is only reserved is announced."""

    def reserve(self, request: str, parent: ChunkKey | None, keys: Sequence[ChunkKey]) -> Reservation:
        got = super().reserve(request, parent, keys)
        early = tuple(key for key, it in zip(keys, got.addresses[0], strict=False) if it != ABSENT)
        self.announcing.changed(Stored(0, 0, early, Tier.HOST, 0))
        return got


class JoinsWithoutLeaving(ClusterNode):
    """Who has fallen behind joins again under the number that it has."""

    def _beat(self) -> None:
        if self.announcing.standpoint.value == "behind":
            self.directory(lambda records, now: self.cluster.directory.join(self.member, records, now), 1, self._joined)
        else:
            super()._beat()


class KeepsCalm(Announcing):
    """The directory does not know us, and that is all right."""

    def beaten(self, beat: Beat | None, stamp: Stamp) -> None:
        if beat is not None:
            super().beaten(beat, stamp)

    def refused(self, batch: Batch) -> None:
        self.acknowledged(batch)


class IgnoresSerials(Announcing):
    """Whatever batch the directory has last is taken for the right one."""

    def beaten(self, beat: Beat | None, stamp: Stamp) -> None:
        super().beaten(None if beat is None else replace(beat, serial=self._serial), stamp)


class SaysNothingAnew(Announcing):
    """Who has joined announces what comes, and not what is there."""

    def joined(self, number: int) -> None:
        super().joined(number)
        self._walk = None


class HidesLosses(Announcing):
    """What left is not announced."""

    def _put(self, name: bytes, tier: Tier, present: bool) -> None:
        if present:
            super()._put(name, tier, present)


class TakesSilenceForDeath(Records):
    """Who has not been heard of for a while is no member any more."""

    def _settle(self, now: float) -> None:
        super()._settle(now)
        for number in list(self._silent):
            self._end(number)


class TakesAnySerial(Records):
    """A batch is applied whenever it arrives."""

    def announce(self, number: int, serial: int, changes: Sequence[Announced], now: float) -> bytes:
        if number in self._lives:
            self._lives[number].serial = serial - 1
        return super().announce(number, serial, changes, now)


class KeepsOldLives(Records):
    """A new life of a name does not end the one before."""

    def join(self, member: Member, now: float) -> int:
        known = self._numbers.pop(member.name, None)
        if known is not None and self._lives[known].member.epoch == member.epoch:
            self._numbers[member.name] = known
        return super().join(member, now)

    def _end(self, number: int) -> None:
        self._numbers.setdefault(self._lives[number].member.name, number)
        super()._end(number)


class CommitsFailedReads(Movement):
    """Whatever became of a read, its chunks are taken for right."""

    def arrived(self, move: Move, outcomes: Sequence[Outcome], now: float) -> set[ChunkKey]:
        return super().arrived(move, [Outcome.DONE] * len(outcomes), now)


class NeverExpires(Cache):
    """A lease that nobody gives back is held for ever."""

    def expire(self, now: float) -> int:
        return 0


MUTANTS: dict[str, ClusterParts] = {
    **{it.__name__: ClusterParts(exports=it) for it in (ServesAnybody, LendsWithoutLease, LendsForEver, StreamsLate)},
    **{it.__name__: ClusterParts(transfer=it) for it in (BelievesBytes, BelievesLateBytes, LeavesEarly)},
    **{it.__name__: ClusterParts(node=it) for it in (AnnouncesEarly, JoinsWithoutLeaving)},
    **{it.__name__: ClusterParts(announcing=it) for it in (KeepsCalm, IgnoresSerials, SaysNothingAnew, HidesLosses)},
    **{it.__name__: ClusterParts(records=it) for it in (TakesSilenceForDeath, TakesAnySerial, KeepsOldLives)},
    "CommitsFailedReads": ClusterParts(movement=CommitsFailedReads),
    "NeverExpires": ClusterParts(cache=NeverExpires),
}


def says(parts: ClusterParts, seed: int, changes: Changes = ({}, {})) -> str | None:
    """What the simulator says about it."""
    drawn = Cluster(seed)
    plan, faults = replace(drawn.plan, **changes[0]), replace(drawn.faults, **changes[1])
    try:
        Cluster(seed, parts, plan, faults).play()
    except ClusterError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    changes = HARSH.get(name, ({}, {}))
    said = next((said for seed in range(SEEDS) if (said := says(MUTANTS[name], seed, changes))), None)
    assert said, f"{name} went unnoticed for {SEEDS} seeds"
    print(said)


@pytest.mark.parametrize("name", HARSH)
def test_the_real_core_stands_the_worlds_that_are_full_of_trouble(name: str) -> None:
    assert [said for seed in range(4) if (said := says(ClusterParts(), seed, HARSH[name]))] == []
