"""What requests teach: how fast their instances are, and how long answers are.

Lines are drawn anew with each outcome, which takes longer than routing a request: of a busy instance, only one in
`EVERY_S` is looked at. They are looked at when a request has ended and all is known of it; but of an instance whose
speed is a guess, as soon as there is anything: at the first token, and while an answer comes. Answers that teach
nothing of it, as those in one piece, are counted (`trials`).
"""

from __future__ import annotations

from math import inf

from headwater.conductor.asking import output_kind
from headwater.conductor.flight import Flight
from headwater.conductor.job import Job
from headwater.conductor.registry import Roster
from headwater.core.predictions import Outputs
from headwater.core.rates import WINDOW, Rates
from headwater.core.trials import count_ended, guesses_decode, guesses_prefill

EVERY_S = 0.2
ANSWERS, ANSWERS_EVERY_S = 256, 0.02
"""After so many answers of one kind, only one in so long is looked at."""
KINDS_MAX = 1024


class Learning:
    """Writes the instances' `times`."""

    def __init__(self, roster: Roster, rates: Rates, outputs: Outputs) -> None:
        self._roster, self.rates, self._outputs = roster, rates, outputs
        self._next_s: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._rare: dict[tuple[str, str], list[float]] = {}
        """Of tenants and kinds of requests, how many answers were looked at, and when the next one is."""

    def joined(self, number: int) -> None:
        """A new instance is taken to be like its kind, which is a guess."""
        it = self._roster.instances()[number]
        it.times = self.rates.times(number, self._roster.spec(number).model)
        it.prefill_learned_s = it.decode_learned_s = inf if self.rates.measured else -inf

    def started(self, flight: Flight, now: float) -> None:
        """Its first token came from its instance."""
        choice = flight.choice
        assert choice is not None, f"{flight.name} is nowhere"
        if guesses_prefill(self._roster.instances()[choice.prefill]) and not flight.losses:
            self._prefill(flight, choice.prefill, now)
            flight.taught = True
            self._apply(choice.prefill, now)

    def progressed(self, flight: Flight, now: float) -> None:
        """More of its answer came, and not the first token just now."""
        choice = flight.choice
        assert choice is not None, f"{flight.name} is nowhere"
        if guesses_decode(self._roster.instances()[choice.decode]) and self._is_one_answer(flight):
            self._decode(flight, choice.decode, now)
            self._apply(choice.decode, now)

    def left(self, number: int) -> None:
        """Its number may be given to another."""
        self.rates.left(number)
        self._next_s.pop(number, None)
        self._seen.pop(number, None)

    def ended(self, flight: Flight, now: float, *, whole: bool) -> None:
        """A request ended; it is still in the instances' loads."""
        job, choice = flight.job, flight.choice
        assert choice is not None, f"{flight.name} is nowhere"
        if whole:
            instances = self._roster.instances()
            for it in {choice.prefill, choice.decode}:
                count_ended(instances[it])
        if not self._is_one_answer(flight):
            return
        if whole:
            self._answered(job, now)
        next_s = self._next_s
        if not (flight.first_s or flight.computed_s) or now < min(
            next_s.get(choice.prefill, 0.0), next_s.get(choice.decode, 0.0)
        ):
            return
        numbers = {choice.prefill, choice.decode}
        self._prefill(flight, choice.prefill, now)
        if flight.first_s:
            self._decode(flight, choice.decode, now)
        for it in numbers:
            seen = self._seen[it] = self._seen.get(it, 0) + 1
            if seen > WINDOW:
                self._next_s[it] = now + EVERY_S
            self._apply(it, now)

    @staticmethod
    def _is_one_answer(flight: Flight) -> bool:
        """A stream that was moved is no answer of its own, nor are several in one."""
        return not flight.losses and flight.job.parsed.n == 1

    def _answered(self, job: Job, now: float) -> None:
        """Lengths of which many are known are looked at now and then, those of each tenant and kind by themselves."""
        name, kind = job.tenant.name, output_kind(job)
        rare = self._rare.get((name, kind))
        if rare is None:
            if len(self._rare) >= KINDS_MAX:
                self._rare.clear()
            rare = self._rare[name, kind] = [0, 0.0]
        if now >= rare[1]:
            self._outputs.observe(name, kind, job.answered_tokens)
            rare[0] += 1
            if rare[0] > ANSWERS:
                rare[1] = now + ANSWERS_EVERY_S

    def _prefill(self, flight: Flight, number: int, now: float) -> None:
        job, choice = flight.job, flight.choice
        assert choice is not None
        computed_s = flight.computed_s if choice.prefill != choice.decode else flight.first_s
        if choice.fetched_tokens or not computed_s or flight.taught:
            return  # how long these took is not only the engine's business
        if not flight.ask.counted and job.parsed.media:
            return  # nobody knows how long that prompt is
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

    def _apply(self, number: int, now: float) -> None:
        instances, kind = self._roster.instances(), self._roster.spec(number).model
        times, target = self.rates.times(number, kind), instances[number]
        prefill, decode = self.rates.known(number)
        if prefill and target.prefill_learned_s < now:
            target.prefill_learned_s = now
        if decode and target.decode_learned_s < now:
            target.decode_learned_s = now
        if target.times is times:
            return
        for it in instances.values():
            if self._roster.spec(it.number).model == kind:
                it.times = self.rates.times(it.number, kind)
