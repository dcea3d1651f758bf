"""A network in virtual time: calls from one host to whoever listens at an address, and all that becomes of them.

A message takes its turn on its sender's wire, then the way's latency. It is lost without a word where the way is cut
(a partition: one way or both), and the connection breaks, which both ends learn, where a message is dropped or nobody
listens. A call ends once at its caller: with an answer, broken, or by its own time; what comes after that is unheard.
Hosts have clocks of their own, which start anywhere and go a little wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headwater.sim.schedule import Process, Schedule

Answered = Callable[[Any], None]
Serve = Callable[[Any, Answered], None]
"""What the listener does with a request; it answers at once or later, at most once."""


class LocalClock:
    """A host's monotonic clock: `ports.Clock` with an offset and a rate of its own."""

    def __init__(self, schedule: Schedule, offset_s: float, rate: float) -> None:
        self._schedule, self._offset_s, self.rate = schedule, offset_s, rate

    def now(self) -> float:
        """See `ports.Clock`."""
        return self._offset_s + self._schedule.clock.now() * self.rate

    def true_s(self, local_s: float) -> float:
        """How long something really takes that takes so long by this clock."""
        return max(local_s, 0.0) / self.rate


@dataclass(slots=True, eq=False)
class Host:
    """A machine: its clock, and its wire, on which messages wait for each other."""

    name: str
    clock: LocalClock
    latency_s: float
    bytes_s: float
    slow: float = 1.0
    """How many times slower than that it is at the moment."""
    free_s: float = 0.0


@dataclass(slots=True, eq=False)
class Listener:
    """Who serves at an address."""

    host: Host
    process: Process
    server: Any


@dataclass(slots=True)
class Network:
    """All hosts and the ways between them."""

    schedule: Schedule
    rng: random.Random
    drops: float = 0.0
    """The share of messages whose connection breaks."""
    listeners: dict[str, Listener] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    """Ways, from host to host, on which nothing arrives."""
    messages: int = 0
    lost: int = 0

    def is_cut(self, one: Host, other: Host) -> bool:
        """Whether nothing comes through, one way or the other."""
        return bool({(one.name, other.name), (other.name, one.name)} & self.cut)

    def call(
        self,
        source: Host,
        process: Process,
        address: str,
        size_bytes: int,
        serve: Serve,
        reply_bytes: Callable[[Any], int],
        answered: Answered,
        wait_s: float,
    ) -> None:
        """Ask who listens at `address`; `answered` is told what it says within `wait_s` (true time), else None."""
        is_open = [True]

        def end(answer: Any) -> None:
            if is_open:
                is_open.clear()
                answered(answer)

        def arrive() -> None:
            listener = self.listeners.get(address)
            if listener is None:
                self._back(source, process, source, 0, lambda: end(None))
                return
            here = listener.host

            def reply(answer: Any) -> None:
                self._back(here, process, source, reply_bytes(answer), lambda: end(answer), lambda: end(None))

            self._happen(listener.process, lambda: serve(listener.server, reply))

        self.schedule.after(wait_s, "", lambda: end(None), process)
        target = self.listeners.get(address)
        self._way(source, target.host if target else source, size_bytes, arrive, lambda: end(None), process)

    def _back(
        self,
        source: Host,
        process: Process,
        target: Host,
        size_bytes: int,
        arrive: Callable[[], None],
        broken: Callable[[], None] | None = None,
    ) -> None:
        self._way(source, target, size_bytes, lambda: self._happen(process, arrive), broken or arrive, process)

    def _happen(self, process: Process, act: Callable[[], None]) -> None:
        """A message has arrived; who is paused takes it up later."""
        if process.paused_until_s > self.schedule.clock.now():
            self.schedule.after(0.0, "", act, process)
        elif process.alive:
            act()

    def _way(
        self,
        source: Host,
        target: Host,
        size_bytes: int,
        arrive: Callable[[], None],
        broken: Callable[[], None],
        caller: Process,
    ) -> None:
        """One message."""
        self.messages += 1
        begin_s = max(self.schedule.clock.now(), source.free_s)
        slow = source.slow * target.slow
        source.free_s = begin_s + size_bytes / source.bytes_s * slow
        latency_s = (source.latency_s + target.latency_s) * slow * self.rng.uniform(0.5, 1.0)
        delay_s = source.free_s + latency_s - self.schedule.clock.now()
        if (source.name, target.name) in self.cut:
            self.lost += 1
            return
        if self.drops and self.rng.random() < self.drops:
            self.lost += 1
            self.schedule.after(delay_s, "", broken, caller)
            return
        self.schedule.after(delay_s, "", arrive)
