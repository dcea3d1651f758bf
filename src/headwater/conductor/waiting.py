"""When those who wait for admission are asked again, and when they have waited too long: one timer for all.

Theory of operation. They are asked in the order of `Turns`, each model's by themselves, until one of these has to wait
on; when that is done again is the earliest of what anybody has asked for with `later`:

    a verdict, or nobody alive       when it said
    a request has ended              in a moment: several end at once
    the first one's deadline         whoever is late then is refused

Nobody is asked while somebody is: who is sent or refused just now may call from within.
"""

from __future__ import annotations

from collections.abc import Callable

from headwater.conductor.flight import Flight
from headwater.conductor.timers import Timer, Timers
from headwater.conductor.turns import Turns

ASK_AGAIN_S = 1e-3
"""Those who wait are asked again after at least so long."""


class Waiting:
    """Calls `route`, which is False of a flight that has to wait on, and `late` of those whose time is over."""

    def __init__(
        self,
        turns: Turns,
        timers: Timers,
        *,
        has_room: Callable[[], bool],
        route: Callable[[Flight], bool],
        late: Callable[[Flight], None],
    ) -> None:
        """`has_room`: whether one more may be sent to instances at all."""
        self._turns, self._timers = turns, timers
        self._has_room, self._route, self._late = has_room, route, late
        self._asks = False
        self._alarm: Timer | None = None
        self._alarm_s = float("inf")

    def __repr__(self) -> str:
        return f"Waiting({self._turns!r})"

    def push(self, flight: Flight, work: float) -> None:
        """It waits from now on; there must be room."""
        now = self._timers.time()
        self._turns.push(flight, work, now)
        deadline_s = self._turns.deadline_s()
        if deadline_s is not None:
            self.later(max(deadline_s - now, 0.0))

    def ask(self, model: str) -> None:
        """Those who wait for a model, in the order that is fair, until one has to wait on."""
        if self._asks:  # from within, by somebody who was sent or refused just now
            self.later(ASK_AGAIN_S)
            return
        self._asks = True
        try:
            while self._has_room():
                flight = self._turns.pop(model, self._timers.time())
                if flight is None:
                    return
                if not self._route(flight):
                    if flight.waits:
                        self._turns.put_back(flight)
                    return
        finally:
            self._asks = False

    def soon(self) -> None:
        """There may be room for somebody now."""
        if len(self._turns):
            self.later(ASK_AGAIN_S)

    def later(self, after_s: float) -> None:
        """Ask them all again, after so long at the latest."""
        when_s = self._timers.time() + after_s
        if when_s < self._alarm_s:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_s, self._alarm = when_s, self._timers.call_later(after_s, self._wake)

    def _wake(self) -> None:
        self._alarm, self._alarm_s = None, float("inf")
        now = self._timers.time()
        for flight in self._turns.late(now):
            self._late(flight)
        for model in self._turns.models():
            self.ask(model)
        deadline_s = self._turns.deadline_s()
        if deadline_s is not None:
            self.later(max(deadline_s - now, ASK_AGAIN_S))
