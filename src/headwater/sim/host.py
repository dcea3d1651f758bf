"""One simulated host: its node, its memory, its time, and how long things take there.

This is all that an instance knows of the world around it. Everything random is drawn from the world's one source,
in the order of events, so that equal seeds tell equal stories.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from headwater.core.cache import Cache
from headwater.sim.faults import Faults
from headwater.sim.memory import Memory
from headwater.sim.node import SimulatedNode
from headwater.sim.oracle import Oracle
from headwater.sim.schedule import Process, Schedule
from headwater.sim.tiering import Below, Parts, SimulatedTiering
from headwater.sim.workload import Plan
from headwater.types import TicketKind

Resume = Callable[[Any], None]
Wait = Callable[[Resume], None]
"""Something to wait for: called once with what to call when it is there."""


class Host:
    """What processes of one host share."""

    def __init__(self, cache: Cache, rng: random.Random, faults: Faults, plan: Plan, parts: Parts) -> None:
        self.rng, self.faults, self.plan = rng, faults, plan
        self.schedule, self._parts = Schedule(), parts
        self.below = Below(plan)
        self.reads = self.evicted = 0
        self._tierings: list[SimulatedTiering] = []
        self._last_word_s: dict[str, float] = {}
        self._boot(cache)

    def _boot(self, cache: Cache) -> None:
        self.cache, self.memory = cache, Memory(self.below.cleared)
        self.oracle = Oracle(cache, self.memory, self.plan)
        self.node = SimulatedNode(
            cache, self.below, self.memory, self.oracle, self.schedule, self.rng, self.faults, self.plan, self._parts
        )
        self._judged = (0, 0)

    def restart(self, cache: Cache) -> None:
        """The node is killed and started again, with an empty HOST tier; what is below is still there."""
        self.schedule.note("the node is killed and started again")
        self.reads, self.evicted = self.reads + self.oracle.reads, self.evicted + self.oracle.evicted
        self._tierings.append(self.node.tiering)
        self.node.die()
        # What was pending is forgotten, and may come back.
        pending = {space for level in self.node.tiering.levels for space in level.clearing}
        for ticket in [it for it, space in self.below.cleared.items() if space in pending]:
            del self.below.cleared[ticket]
        self._boot(cache)
        self.node.tiering.recover()
        self.node.settle()

    def moved(self, verb: str) -> int:
        """Chunks' parts that were `written` to or `read` from lower tiers."""
        levels = [level for it in (*self._tierings, self.node.tiering) for level in it.levels]
        return sum(it.sums.written_chunks if verb == "written" else it.sums.read_chunks for it in levels)

    @property
    def begun(self) -> int:
        """Fetches that were begun."""
        return sum(it.fetches.begun for it in (*self._tierings, self.node.tiering))

    @property
    def cut(self) -> int:
        """Fetches that took longer than could pay."""
        return sum(it.fetches.cut for it in (*self._tierings, self.node.tiering))

    @property
    def has_levels(self) -> bool:
        """Whether the node has tiers below HOST."""
        return self.plan.has_levels

    @property
    def now(self) -> float:
        """The one time of this host."""
        return self.schedule.clock.now()

    def step(self) -> None:
        """Let the next event happen, then judge all that it can have changed."""
        if not self.schedule.step():
            return
        calls, writes = self._judged
        self._judged = (self.oracle.calls, self.memory.writes)
        # The cache is passive: without a call it is as it was when it was judged last.
        if self.oracle.calls != calls:
            self.node.settle()
            self.oracle.check()
            self.node.judge_below()
        if self._judged != (calls, writes):
            self.oracle.check_bytes()

    def message_s(self) -> float:
        """How long a message takes; some are overtaken."""
        if self.rng.random() < self.faults.message_is_late:
            return self.rng.uniform(0.5, 4.0)
        return self.rng.uniform(0.0002, 0.004)

    def copy_s(self, kind: TicketKind) -> float:
        """How long the copy of one part takes."""
        slow = self.faults.read_is_slow if kind is TicketKind.LOAD else self.faults.write_is_slow
        return self.rng.uniform(1.0, 5.0) if self.rng.random() < slow else self.rng.uniform(0.005, 0.06)

    def copy_fails(self) -> bool:
        """Whether the copy of one part fails."""
        return self.rng.random() < self.faults.copy_fails

    def changes_its_mind(self) -> bool:
        """Whether a scheduler gives a reservation back."""
        return self.rng.random() < self.faults.changes_of_mind

    def sleep(self, process: Process) -> Wait:
        """Wait for as long as a step of computing takes."""
        return lambda resume: self.schedule.after(self.rng.uniform(0.01, 0.3), "", lambda: resume(None), process)

    def pause(self, process: Process) -> Wait:
        """Wait for a moment before asking again."""
        return lambda resume: self.schedule.after(self.rng.uniform(0.005, 0.04), "", lambda: resume(None), process)

    def ask(self, owner: str, scheduler: Process, call: Callable[[], Any], resume: Resume) -> None:
        """A call from a scheduler to the node and its answer back."""

        def arrive() -> None:
            answer = call()
            self.schedule.after(self.message_s(), "", lambda: resume(answer), scheduler)

        self.tell(owner, "", arrive)

    def tell(self, owner: str, what: str, act: Callable[[], None]) -> None:
        """A message to the node that nobody waits for."""
        delay_s = self.message_s()
        self._last_word_s[owner] = max(self._last_word_s.get(owner, 0.0), self.now + delay_s)
        self.schedule.after(delay_s, what, act)

    def worker_is_done(self, owner: str, ticket: int, rank: int, failed: Collection[int]) -> None:
        """A worker's last word about a ticket, perhaps twice."""

        def arrive() -> None:
            self.node.done(owner, ticket, rank, failed)
            if ticket not in self.cache.tickets:
                self.oracle.stopped(ticket)

        self.tell(owner, "", arrive)
        if self.rng.random() < self.faults.message_repeats:
            delay_s = self.rng.choice((0.0, self.rng.uniform(0.0, 2.0)))
            self.schedule.after(delay_s, "", lambda: self.tell(owner, "", arrive))

    def last_word_s(self, owner: str) -> float:
        """When the last message arrives that an owner has sent so far."""
        return self._last_word_s.get(owner, 0.0)
