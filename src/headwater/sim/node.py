"""The node as the simulator has it: the core, a tick, and the oracle beside every answer."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from headwater.core.cache import Cache
from headwater.core.fetch import Answer
from headwater.sim.faults import Faults
from headwater.sim.memory import Memory
from headwater.sim.oracle import Oracle
from headwater.sim.schedule import Schedule
from headwater.sim.tiering import Below, Parts, SimulatedTiering
from headwater.sim.workload import Plan
from headwater.types import ChunkKey, Loadable, Reservation, TicketKind


class SimulatedNode:
    """Drives a cache as the real node does: one call at a time, and `expire` now and then."""

    def __init__(
        self,
        cache: Cache,
        below: Below,
        memory: Memory,
        oracle: Oracle,
        schedule: Schedule,
        rng: random.Random,
        faults: Faults,
        plan: Plan,
        parts: Parts,
    ) -> None:
        self.cache, self.oracle = cache, oracle
        self._schedule, self._rng, self._faults, self._plan = schedule, rng, faults, plan
        self._alive, self._below = True, below
        self.tiering = SimulatedTiering(cache, below, memory, oracle, schedule, rng, faults, plan, parts)
        self._plan_tick()

    def judge_below(self) -> None:
        """Judge the lower tiers, if something was done to them."""
        if self.tiering.disk_oracle is not None and self.tiering.moved:
            self.tiering.disk_oracle.check()
        if self.tiering.moved:
            self.tiering.judge_remotes()
        self.tiering.moved = False

    def die(self) -> None:
        """kill -9."""
        self._alive = False
        for carrier in self.tiering.carriers:
            carrier.alive = False

    def settle(self) -> None:
        """What follows whatever has happened: moves between tiers begin and end."""
        self.tiering.settle()

    @property
    def now(self) -> float:
        """The node's time."""
        return self._schedule.clock.now()

    def match(self, owner: str, space: int, keys: Sequence[ChunkKey], *, counts: bool) -> int:
        """See `Cache.match`; `counts` marks a request's first lookup."""
        hit = self.cache.match(space, keys)
        self.oracle.judge_match(space, keys, hit)
        if counts:
            self._count(space, keys, hit)
        self._schedule.note(f"{owner} match {_named(keys)} -> {hit}")
        self.oracle.calls += 1
        return hit

    def ask(self, owner: str, request: str, space: int, keys: Sequence[ChunkKey]) -> Answer:
        """See `Fetches.ask`; the last answer counts as the request's lookup."""
        begun = self.tiering.fetches.begun
        answer = self.tiering.fetches.ask(owner, request, space, keys, self._plan.tokens_s, self.now)
        self.oracle.judge_ask((owner, request), space, keys, answer, self.now)
        if not answer.waiting:
            self._count(space, keys, answer.chunks)
        said = "waits" if answer.waiting else "final"
        self._schedule.note(f"{owner} ask {request} {_named(keys)} -> {answer.chunks} {said}")
        # Who asks again and waits on has changed nothing.
        self.oracle.calls += self.tiering.fetches.begun > begun or not answer.waiting
        return answer

    def forget(self, owner: str, request: str) -> None:
        """See `Fetches.forget`."""
        count = self.tiering.fetches.forget(owner, [request], self.now)
        self.oracle.forget((owner, request))
        self._schedule.note(f"{owner} forgets {request} -> {count}")
        self.oracle.calls += 1

    def pin(self, space: int, keys: Sequence[ChunkKey], for_s: float) -> None:
        """See `Cache.hold`."""
        groups = range(len(self.cache.spaces[space].layout.groups))
        parts = [(group, key) for group in groups for key in keys]
        ticket, places = self.cache.hold("", TicketKind.PIN, space, parts, self.now + for_s)
        self.oracle.judge_pin(space, parts, places, ticket, self.now + for_s)
        self._schedule.note(f"pin {_named(keys)} for {for_s:.3f} s -> #{ticket}")
        self.oracle.calls += 1

    def prefetch(self, space: int, keys: Sequence[ChunkKey]) -> None:
        """See `Fetches.prefetch`."""
        name = f"prefetch {_named(keys[-1:])}"
        self._schedule.note(f"{name} -> {self.tiering.fetches.prefetch('', name, space, keys, self.now)}")
        self.oracle.calls += 1

    def evict(self, space: int, keys: Sequence[ChunkKey], *, below: bool) -> None:
        """See `Movement.evict`."""
        count = self.tiering.movement.evict(space, keys, self.now, below)
        self.tiering.moved = True
        self._schedule.note(f"evict {_named(keys)} {below=} -> {count}")
        self.oracle.calls += 1

    def spill(self, space: int) -> None:
        """See `Cache.clear`."""
        self._schedule.note(f"HOST loses {space} -> {self.cache.clear(space)}")
        self.oracle.calls += 1

    def _count(self, space: int, keys: Sequence[ChunkKey], hit: int) -> None:
        self.cache.count_lookup(space, len(keys), hit)
        self.oracle.count_lookup(space, len(keys), hit)

    def load(self, owner: str, space: int, keys: Sequence[ChunkKey], first: int, ranks: Collection[int]) -> Loadable:
        """See `Cache.load`."""
        found = self.cache.load(owner, space, keys, first, ranks, self.now)
        self.oracle.judge_load(owner, space, keys, first, found)
        self._schedule.note(f"{owner} load {_named(keys)} from {first} -> #{found.ticket} {found.chunks}")
        self.tiering.loaded(space, keys[: found.chunks])
        self.oracle.calls += 1
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
        granted = self.cache.reserve(owner, space, parent, keys, lacking, shards, self.now)
        self.oracle.judge_reserve(owner, space, keys, granted, self.now)
        self._schedule.note(f"{owner} reserve {_named(keys)} -> #{granted.ticket} {granted.covered}")
        self.oracle.calls += 1
        return granted

    def done(self, owner: str, ticket: int, shard: int, failed: Collection[int]) -> bool:
        """See `Cache.done`."""
        answer = self.cache.done(owner, ticket, shard, failed, self.now)
        self.oracle.judge_done(ticket, self.now)
        self._schedule.note(f"{owner} done #{ticket} shard {shard} failed {sorted(failed)} -> {answer}")
        self.oracle.calls += 1
        return answer

    def release(self, owner: str, ticket: int) -> bool:
        """See `Cache.release`."""
        answer = self.cache.release(owner, ticket)
        self._schedule.note(f"{owner} release #{ticket} -> {answer}")
        self.oracle.calls += 1
        return answer

    def keep(self, owner: str, known: Collection[int]) -> None:
        """See `Cache.keep`."""
        count = self.cache.keep(owner, known)
        self._schedule.note(f"{owner} knows {sorted(known)} -> {count} tickets freed")
        self.oracle.calls += 1

    def close(self, owner: str) -> None:
        """No process of an owner is left."""
        self.tiering.fetches.forget_owner(owner, self.now)
        count = self.cache.close(owner)
        self._schedule.note(f"{owner} is gone -> {count} tickets freed")
        self.oracle.calls += 1

    def clear(self, space: int) -> None:
        """See `Movement.clear`."""
        cleared = self.tiering.clear(space)
        self._below.cleared |= dict.fromkeys(self.oracle.judge_clear(space, cleared), space)
        self._schedule.note(f"clear {space} -> {cleared}")
        self.tiering.moved = True
        self.oracle.calls += 1

    def _plan_tick(self) -> None:
        stalls = self._rng.random() < self._faults.tick_stalls
        delay_s = self._rng.uniform(2.0, 8.0) if stalls else self._rng.uniform(0.05, 1.0)
        self._schedule.after(delay_s, "", self._tick)

    def _tick(self) -> None:
        if not self._alive:
            return
        late = self.cache.expire(self.now)
        self.oracle.judge_tick(self.now)
        if late:
            self._schedule.note(f"tick -> {late} tickets are late")
        self.oracle.calls += 1
        self.tiering.tick()
        # What is quarantined waits for its writers, not for the tick; without those, nothing will come any more.
        held = any(not it.quarantined for it in self.cache.tickets.values())
        if len(self._schedule) or held or self.tiering.busy:
            self._plan_tick()


def _named(keys: Sequence[ChunkKey]) -> str:
    return "+".join(key.hex()[:4] for key in keys) or "nothing"
