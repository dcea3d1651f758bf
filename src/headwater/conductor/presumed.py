"""First tokens that nobody tells of: when they are taken to have come, with one timer for all.

A timer for each request would cost more than what it does, and nearly all would be cancelled. Names are kept
until their time, not requests: whose request has ended by then is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from headwater.conductor.timers import Timer, Timers

EARLY_S, AGAIN_S = 1e-3, 5e-3
"""A sweep takes what is due by then; the next one is not sooner."""


class Presumed:
    """Calls `due(name, when_s)` for each, soon after `when_s`."""

    def __init__(self, timers: Timers, due: Callable[[str, float], object]) -> None:
        self._timers, self._due = timers, due
        self._heap: list[tuple[float, str]] = []
        self._alarm: Timer | None = None
        self._alarm_s = float("inf")

    def __repr__(self) -> str:
        return f"Presumed({len(self._heap)} to come)"

    def add(self, name: str, when_s: float, now: float) -> None:
        """One more."""
        heappush(self._heap, (when_s, name))
        if when_s < self._alarm_s:
            self._set(when_s, now)

    def clear(self) -> None:
        """Nobody waits for any of them."""
        self._heap.clear()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm, self._alarm_s = None, float("inf")

    def _set(self, when_s: float, now: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_s, self._alarm = when_s, self._timers.call_later(max(when_s - now, 0.0), self._sweep)

    def _sweep(self) -> None:
        self._alarm, self._alarm_s = None, float("inf")
        heap, now = self._heap, self._timers.time()
        while heap and heap[0][0] <= now + EARLY_S:
            when_s, name = heappop(heap)
            self._due(name, when_s)
        if heap:
            self._set(max(heap[0][0], now + AGAIN_S), now)
