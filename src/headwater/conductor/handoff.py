"""Between the two legs of a pair: the prompt's KV is to be in the store before the decode instance is asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headwater.conductor.counts import Counts
from headwater.conductor.flight import Flight
from headwater.conductor.parts import Sight
from headwater.conductor.timers import Timers

HANDOFF_S, HANDOFF_LOOK_S = 0.5, 1e-3
"""A decode instance is asked once the KV of its prompt is in the store, where a node tells us; but not later than so,
nor than it takes to compute it."""


class HandOff:
    """Looks for it, less and less often."""

    def __init__(self, sight: Sight, counts: Counts, timers: Timers) -> None:
        self._sight, self._counts, self._timers = sight, counts, timers

    def begin(self, flight: Flight, then: Callable[[], None]) -> None:
        """The first leg is over: `then` is called when the second may begin, at once or later, unless the flight's
        `handing` is cancelled before."""
        assert flight.choice is not None, f"{flight.name} is nowhere"
        until_s = self._timers.time() + min(HANDOFF_S, flight.choice.parts.prefill_s)
        self._look(flight, until_s, HANDOFF_LOOK_S, then)

    def _look(self, flight: Flight, until_s: float, look_s: float, then: Callable[[], None]) -> None:
        flight.handing = None
        choice, job, now = flight.choice, flight.job, self._timers.time()
        assert choice is not None, f"{flight.name} is nowhere"
        stored = self._sight.stored(choice.prefill, job.parsed.model, job.lenses)
        if stored is False and now < until_s:
            again = partial(self._look, flight, until_s, 2 * look_s, then)
            flight.handing = self._timers.call_later(min(look_s, until_s - now), again)
            return
        if stored is not None:
            self._counts.add("handoffs", "stored" if stored else "late")
        then()
