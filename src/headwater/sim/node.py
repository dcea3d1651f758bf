"""The node as the simulator has it: the core, a tick, and the oracle beside every answer."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from headwater.core.cache import Cache
from headwater.sim.faults import Faults
from headwater.sim.oracle import Oracle
from headwater.sim.schedule import Schedule
from headwater.types import ChunkKey, Loadable, Reservation


class SimulatedNode:
    """Drives a cache as the real node does: one call at a time, and `expire` now and then."""

    def __init__(self, cache: Cache, oracle: Oracle, schedule: Schedule, rng: random.Random, faults: Faults) -> None:
        self.cache, self.oracle = cache, oracle
        self.calls = 0
        self._schedule, self._rng, self._faults = schedule, rng, faults
        self._plan_tick()

    @property
    def now(self) -> float:
        """The node's time."""
        return self._schedule.clock.now()

    def match(self, owner: str, space: int, keys: Sequence[ChunkKey], *, counts: bool) -> int:
        """See `Cache.match`; `counts` marks a request's first lookup."""
        self.calls += 1
        hit = self.cache.match(space, keys)
        self.oracle.judge_match(space, keys, hit)
        if counts:
            self.cache.count_lookup(space, len(keys), hit)
            self.oracle.count_lookup(space, len(keys), hit)
        self._schedule.note(f"{owner} match {_named(keys)} -> {hit}")
        return hit

    def load(self, owner: str, space: int, keys: Sequence[ChunkKey], first: int, ranks: Collection[int]) -> Loadable:
        """See `Cache.load`."""
        self.calls += 1
        found = self.cache.load(owner, space, keys, first, ranks, self.now)
        self.oracle.judge_load(owner, space, keys, first, found)
        self._schedule.note(f"{owner} load {_named(keys)} from {first} -> #{found.ticket} {found.chunks}")
        return found

    def reserve(
        self,
        owner: str,
        space: int,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        lacking: Collection[tuple[int, int]],
    ) -> Reservation:
        """See `Cache.reserve`."""
        shards = range(self.cache.spaces[space].layout.shards)
        self.calls += 1
        granted = self.cache.reserve(owner, space, parent, keys, lacking, shards, self.now)
        self.oracle.judge_reserve(owner, space, keys, granted, self.now)
        self._schedule.note(f"{owner} reserve {_named(keys)} -> #{granted.ticket} {granted.covered}")
        return granted

    def done(self, owner: str, ticket: int, shard: int, failed: Collection[int]) -> bool:
        """See `Cache.done`."""
        self.calls += 1
        answer = self.cache.done(owner, ticket, shard, failed, self.now)
        self.oracle.judge_done(ticket, self.now)
        self._schedule.note(f"{owner} done #{ticket} shard {shard} failed {sorted(failed)} -> {answer}")
        return answer

    def release(self, owner: str, ticket: int) -> bool:
        """See `Cache.release`."""
        self.calls += 1
        answer = self.cache.release(owner, ticket)
        self._schedule.note(f"{owner} release #{ticket} -> {answer}")
        return answer

    def keep(self, owner: str, known: Collection[int]) -> None:
        """See `Cache.keep`."""
        self.calls += 1
        count = self.cache.keep(owner, known)
        self._schedule.note(f"{owner} knows {sorted(known)} -> {count} tickets freed")

    def close(self, owner: str) -> None:
        """No process of an owner is left."""
        self.calls += 1
        count = self.cache.close(owner)
        self._schedule.note(f"{owner} is gone -> {count} tickets freed")

    def clear(self, space: int) -> None:
        """See `Cache.clear`."""
        self.calls += 1
        self._schedule.note(f"clear {space} -> {self.cache.clear(space)}")

    def _plan_tick(self) -> None:
        stalls = self._rng.random() < self._faults.tick_stalls
        delay_s = self._rng.uniform(2.0, 8.0) if stalls else self._rng.uniform(0.05, 1.0)
        self._schedule.after(delay_s, "", self._tick)

    def _tick(self) -> None:
        self.calls += 1
        late = self.cache.expire(self.now)
        self.oracle.judge_tick(self.now)
        if late:
            self._schedule.note(f"tick -> {late} tickets are late")
        # What is quarantined waits for its writers, not for the tick; without those, nothing will come any more.
        if len(self._schedule) or any(not it.quarantined for it in self.cache.tickets.values()):
            self._plan_tick()


def _named(keys: Sequence[ChunkKey]) -> str:
    return "+".join(key.hex()[:4] for key in keys) or "nothing"
