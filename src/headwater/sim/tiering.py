"""The lower tiers of a simulated node: the same core as in `node.tiering`, with carriers of virtual time.

`settle` has the order of the real one: ends, uses, what HOST announced, reads, orders, the journal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.core.cache import Cache
from headwater.core.eviction import POLICIES
from headwater.core.fetch import Fetches
from headwater.core.history import History
from headwater.core.levels import Admission, Command, Level
from headwater.core.movement import Movement
from headwater.core.pool import Pool
from headwater.sim.below import HEADER_PAGES, Disk, Remote, Row
from headwater.sim.carrier import Result, SimulatedCarrier
from headwater.sim.disk_oracle import DiskOracle
from headwater.sim.faults import Faults
from headwater.sim.memory import Memory
from headwater.sim.oracle import Oracle
from headwater.sim.schedule import Schedule
from headwater.sim.workload import Plan
from headwater.types import PAGE_BYTES, ChunkKey, Cleared, Stored, Tier

MakeCache = Callable[..., Cache]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a world is made of; tests replace a part by one that is broken on purpose."""

    cache: MakeCache = Cache
    pool: type[Pool] = Pool
    disk_cache: MakeCache = Cache
    level: type[Level] = Level
    movement: type[Movement] = Movement
    fetches: type[Fetches] = Fetches


class Below:
    """What outlives a node: its disk and the remotes."""

    def __init__(self, plan: Plan) -> None:
        self.disk = Disk() if plan.disk_slabs else None
        self.cleared = dict[int, int]()
        """Tickets whose bytes were there when their namespace was cleared, and its number."""
        self.remotes = [Remote(plan.remote_pages, evicts=plan.remotes_evict) for _ in range(plan.remotes)]


class SimulatedTiering:
    """One life of a node's lower tiers."""

    def __init__(
        self,
        host: Cache,
        below: Below,
        memory: Memory,
        oracle: Oracle,
        schedule: Schedule,
        rng: random.Random,
        faults: Faults,
        plan: Plan,
        parts: Parts,
    ) -> None:
        """`host` knows all namespaces already."""
        self._host, self._below, self._oracle = host, below, oracle
        self._schedule, self._rng = schedule, rng
        self._ends: list[tuple[Command, Result]] = []
        self._used: list[tuple[int, Sequence[ChunkKey]]] = []
        self.history, self.levels = History(), list[Level]()
        self.disk_oracle: DiskOracle | None = None
        self.moved = True
        """Something was done to a lower tier since somebody set this to False."""
        admission = Admission(plan.admission)
        limit, batch = plan.moving_pages * PAGE_BYTES, plan.batch_pages * PAGE_BYTES
        tiers: list[Disk | Remote] = []
        if below.disk is not None:
            cache = self._open_disk(plan, below.disk, parts)
            self.levels.append(parts.level("disk", Tier.DISK, admission, cache, 2, 2, limit, batch))
            self.levels[-1].spaces.update((number, number) for number in range(len(host.spaces)))
            tiers.append(below.disk)
        for number, remote in enumerate(below.remotes):
            self.levels.append(parts.level(f"remote{number}", Tier.REMOTE, admission, None, 2, 1, limit, batch))
            tiers.append(remote)
        self.carriers = [
            SimulatedCarrier(
                tier, host, memory, oracle, schedule, rng, faults, plan.latency_s, plan.bytes_s, self._ended
            )
            for tier in tiers
        ]
        self.movement = parts.movement(host, self.levels, self.history)
        self.fetches = parts.fetches(self.movement)

    def _open_disk(self, plan: Plan, disk: Disk, parts: Parts) -> Cache:
        slab_bytes = (plan.slab_pages + HEADER_PAGES) * PAGE_BYTES
        pool = parts.pool([plan.disk_slabs * slab_bytes], slab_bytes)
        cache = parts.disk_cache(pool, POLICIES[plan.policy], 60.0, 60.0, 0, Tier.DISK)
        for space in self._host.spaces:
            sizes = [size + HEADER_PAGES * PAGE_BYTES for size in space.slot_bytes]
            cache.add_space(space.namespace, space.layout, sizes)
        self.disk_oracle = DiskOracle(cache, disk, self._oracle.above, self._below.cleared)
        return cache

    def clear(self, space: int) -> Cleared:
        """See `node.tiering.Tiering.clear`."""
        now = self._schedule.clock.now()
        self._hand_over()
        if self._below.disk is not None:
            self._below.disk.retired[space] = self._below.disk.retired.get(space, 0) + 1
        return self.fetches.clear(space, now)

    def recover(self) -> None:
        """Take in what an earlier life left on the disk."""
        if self.disk_oracle is None or self._below.disk is None:
            return
        cache, disk = self.disk_oracle.cache, self._below.disk
        rows = disk.crash(self._rng.random())
        for number in range(len(cache.spaces)):
            those = [(place, row) for place, row in rows if row.name[0] == number]
            took = cache.restore(number, [(row.name[1], row.name[2], row.parent, place) for place, row in those])
            disk.note([(place, None) for (place, _), there in zip(those, took, strict=True) if not there])
            self.disk_oracle.restored([row for (_, row), there in zip(those, took, strict=True) if there])

    def loaded(self, space: int, keys: Sequence[ChunkKey]) -> None:
        """These chunks were leased to be read."""
        if self.levels:
            self._used.append((space, keys))

    def settle(self) -> None:
        """Let everything that has happened have its effects."""
        self.moved |= bool(self._ends)
        now = self._schedule.clock.now()
        ends, self._ends = self._ends, []
        for command, result in ends:
            self.movement.ended(command.number, result, now, self._rng.random())
            if self.disk_oracle is not None and isinstance(result, list):
                self.disk_oracle.judge_end(command, result)
        for space, keys in self._used:
            self.movement.used(space, keys, now)
        self._used.clear()
        changes = self._oracle.hear()
        if changes:
            self.movement.heard(changes, now)
        self.fetches.go_on(now)
        self._hand_over()

    def _hand_over(self) -> None:
        for command in self.movement.take_commands():
            self.moved = True
            self._oracle.judge_order(command, self.levels[command.level])
            self.carriers[command.level].order(command)
        self._journal()

    def tick(self) -> None:
        """About twice a second."""
        now = self._schedule.clock.now()
        if self._below.disk is not None:
            self._below.disk.write_journal()
        self.movement.tick(now, self._rng.random())
        self.fetches.tick(now)
        self.settle()

    def judge_remotes(self) -> None:
        """A REMOTE tier that is said to have deleted a namespace has nothing of what was there before."""
        remotes = [level for level in self.levels if level.disk is None]
        for level, remote in zip(remotes, self._below.remotes, strict=True):
            for (space, _, key), content in remote.parts.items():
                old = {it[4] for it in content if isinstance(it, tuple)} & self._below.cleared.keys()
                assert not old or space in level.clearing, f"{level.name} has {key.hex()[:6]}, which was cleared"

    @property
    def busy(self) -> bool:
        """Whether something goes on by itself."""
        now = self._schedule.clock.now()
        queued = any(it.queue and it.well and now >= it.full_until_s for it in self.levels)
        clearing = any(it.clearing for it in self.levels)
        return bool(self._ends) or not self.movement.idle or queued or clearing or self.fetches.active > 0

    def _ended(self, command: Command, result: Result) -> None:
        self._ends.append((command, result))
        self._oracle.calls += 1

    def _journal(self) -> None:
        if self.disk_oracle is None or self._below.disk is None:
            return
        cache = self.disk_oracle.cache
        for change in self.disk_oracle.hear():
            if not isinstance(change, Stored):
                self.history.removed(change, self._schedule.clock.now())
                self._below.disk.note([(place, None) for place in change.places])
                continue
            space, size = change.namespace, cache.spaces[change.namespace].slot_bytes[change.group]
            for key, place in zip(change.keys, change.places, strict=True):
                parent = cache.parent_of(space, key) or b""
                self._below.disk.note([(place, Row(self._below.disk.named((space, change.group, key)), parent, size))])
