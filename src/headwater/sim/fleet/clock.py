"""The time of a simulated fleet, and everything that is to happen but for arrivals and the ends of engines' passes."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any

Call = Callable[..., None]


class Clock:
    """`now` is the time. `ends` has (when, number) of the engines' passes, also of those that end sooner by now;
    `agenda` has (when, serial number, what, with what), so that of two at one instant the first planned comes first."""

    __slots__ = ("_chores", "_serial", "agenda", "ends", "left", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: list[tuple[float, int]] = []
        self.agenda: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self.left = True
        """Requests are to arrive."""
        self._serial = 0
        self._chores = 0

    def __repr__(self) -> str:
        return f"<Clock {self.now:.6f}: {len(self.ends)} passes, {len(self.agenda)} on the agenda>"

    def at(self, when_s: float, call: Call, *arguments: Any) -> None:
        """Do something at a time."""
        self._serial += 1
        heappush(self.agenda, (when_s, self._serial, call, arguments))

    def chore(self, step_s: float, call: Call) -> None:
        """Do something now and then, as long as anything else happens."""
        self._chores += 1
        self.at(self.now + step_s, self._do, step_s, call)

    def _do(self, step_s: float, call: Call) -> None:
        self._chores -= 1
        call()
        if self.left or self.ends or len(self.agenda) > self._chores:
            self.chore(step_s, call)
