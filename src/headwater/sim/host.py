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
from headwater.types import TicketKind

Resume = Callable[[Any], None]
Wait = Callable[[Resume], None]
"""Something to wait for: called once with what to call when it is there."""


class Host:
    """What processes of one host share."""

    def __init__(self, cache: Cache, rng: random.Random, faults: Faults) -> None:
        self.cache, self.rng, self.faults = cache, rng, faults
        self.schedule, self.memory = Schedule(), Memory()
        self.oracle = Oracle(cache, self.memory)
        self.node = SimulatedNode(cache, self.oracle, self.schedule, rng, faults)
        self._last_word_s: dict[str, float] = {}
        self._judged = (0, 0)

    @property
    def now(self) -> float:
        """The one time of this host."""
        return self.schedule.clock.now()

    def step(self) -> None:
        """Let the next event happen, then judge all that it can have changed."""
        if not self.schedule.step():
            return
        calls, writes = self._judged
        self._judged = (self.node.calls, self.memory.writes)
        # The cache is passive: without a call it is as it was when it was judged last.
        if self.node.calls != calls:
            self.oracle.check()
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
