"""Virtual time: events in order, and the processes that they happen to.

An event of a process that has died does not happen; an event of a process that is paused (SIGSTOP) happens when
it is resumed. Messages that are under way belong to no process: they arrive whatever became of the sender.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Act = Callable[[], None]


class VirtualClock:
    """A `ports.Clock` that goes on only when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """See `ports.Clock`."""
        return self._now

    def advance(self, time_s: float) -> None:
        """Let it be `time_s`; time never goes back."""
        assert time_s >= self._now, f"from {self._now} back to {time_s}"
        self._now = time_s


@dataclass(slots=True, eq=False)
class Process:
    """Something that can die or be paused."""

    name: str
    alive: bool = True
    paused_until_s: float = 0.0


Event = tuple[float, int, str, Act, Process | None]
"""When, in the order in which they were planned where that is the same; what happens, and to whom."""


class Schedule:
    """The events to come and the log of those that were."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log: list[str] = []
        self.events = 0
        self._heap: list[Event] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def after(self, delay_s: float, what: str, act: Act, process: Process | None = None) -> None:
        """Plan an event; an empty `what` keeps it out of the log."""
        self._number += 1
        heapq.heappush(self._heap, (self.clock.now() + delay_s, self._number, what, act, process))

    def note(self, what: str) -> None:
        """Add a line to the log."""
        self.log.append(f"{self.clock.now():9.4f}  {what}")

    def step(self) -> bool:
        """Let the next event happen; False if that process is dead or paused, so that nothing did."""
        time_s, number, what, act, process = heapq.heappop(self._heap)
        if process is not None:
            if not process.alive:
                return False
            if process.paused_until_s > time_s:
                heapq.heappush(self._heap, (process.paused_until_s, number, what, act, process))
                return False
        self.clock.advance(time_s)
        self.events += 1
        if what:
            self.note(what)
        act()
        return True
