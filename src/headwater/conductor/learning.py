"""What ended requests teach: how fast their instances are, and how long answers are.

Lines are drawn anew with each outcome, which takes longer than routing a request: of a busy instance, only one in
`EVERY_S` is looked at.
"""

from __future__ import annotations

from headwater.conductor.asking import output_kind
from headwater.conductor.flight import Flight
from headwater.conductor.registry import Roster
from headwater.core.predictions import Outputs
from headwater.core.rates import WINDOW, Rates

EVERY_S = 0.2


class Learning:
    """Writes the instances' `times`."""

    def __init__(self, roster: Roster, rates: Rates, outputs: Outputs) -> None:
        self._roster, self.rates, self._outputs = roster, rates, outputs
        self._next_s: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def joined(self, number: int) -> None:
        """A new instance is taken to be like its kind."""
        self._roster.instances()[number].times = self.rates.times(number, self._roster.spec(number).model)

    def left(self, number: int) -> None:
        """Its number may be given to another."""
        self.rates.left(number)
        self._next_s.pop(number, None)
        self._seen.pop(number, None)

    def ended(self, flight: Flight, now: float, *, whole: bool) -> None:
        """A request ended; it is still in the instances' loads."""
        job, choice = flight.job, flight.choice
        assert choice is not None, f"{flight.name} is nowhere"
        # A stream that was moved is no answer of its own, nor are several in one.
        if whole and job.parsed.n == 1 and not flight.losses:
            self._outputs.observe(job.tenant.name, output_kind(job), job.answered_tokens)
        if not flight.first_s:
            return
        numbers = {choice.prefill, choice.decode}
        if all(now < self._next_s.get(it, 0.0) for it in numbers) or job.parsed.n > 1 or flight.losses:
            return
        self._prefill(flight, choice.prefill, now)
        self._decode(flight, choice.decode, now)
        for it in numbers:
            seen = self._seen[it] = self._seen.get(it, 0) + 1
            if seen > WINDOW:
                self._next_s[it] = now + EVERY_S
            self._apply(it)

    def _prefill(self, flight: Flight, number: int, now: float) -> None:
        job, choice = flight.job, flight.choice
        assert choice is not None
        computed_s = flight.computed_s if choice.prefill != choice.decode else flight.first_s
        if choice.fetched_tokens or not computed_s:
            return  # how long these took is not only the engine's business
        cached = job.cached_tokens if job.cached_tokens is not None else choice.cached_tokens
        requests, tokens = flight.queued
        seconds = computed_s - job.routed_s
        kind = self._roster.spec(number).model
        self.rates.prefilled(number, kind, flight.ask.tokens - cached, cached, seconds, now, tokens, requests)

    def _decode(self, flight: Flight, number: int, now: float) -> None:
        steps = flight.job.answered_tokens - 1
        if steps <= 0:
            return
        it, (requests, kv_tokens) = self._roster.instances()[number], flight.decoders
        requests = max((requests + it.running_requests + 1) // 2, 1)
        kv_tokens = (kv_tokens + it.running_tokens) // 2
        kind = self._roster.spec(number).model
        self.rates.decoded(number, kind, requests, kv_tokens, (now - flight.first_s) / steps)

    def _apply(self, number: int) -> None:
        instances, kind = self._roster.instances(), self._roster.spec(number).model
        times = self.rates.times(number, kind)
        if instances[number].times is times:
            return
        for it in instances.values():
            if self._roster.spec(it.number).model == kind:
                it.times = self.rates.times(it.number, kind)
