"""What becomes of a request: the policy's choice and admission's verdict, its turn, and why it was refused.

Theory of operation.

    take      none of its model waits: choose, decide        ADMIT -> sent       WAIT -> its turn   REJECT -> refused
              somebody waits: it has to wait as well, and those who wait are asked again
    its turn  asked again in the order of `Turns`, with a new choice, when a request has ended or when the verdict said;
              until one has to wait on                       ADMIT -> sent       too late -> refused
    again     it was lost: chosen anew, and not held up by admission: its client has been promised an answer
                                                             -> sent, or refused

Nothing is remembered here of a request that is over.
"""

from __future__ import annotations

from headwater.conductor.asking import Asking, as_it_fits
from headwater.conductor.choosing import Choosing
from headwater.conductor.counts import Counts
from headwater.conductor.explaining import Try
from headwater.conductor.flight import Flight
from headwater.conductor.job import Phase, Refusal
from headwater.conductor.nobody import GRACE_AGAIN_S, RETRY_S, refusal_of
from headwater.conductor.timers import Timers
from headwater.conductor.turns import Turns
from headwater.conductor.underway import UnderWay
from headwater.conductor.waiting import ASK_AGAIN_S, Waiting
from headwater.core.admission import Admission, Outcome, Verdict
from headwater.core.shares import work_tokens
from headwater.fleet import Choice


class Deciding:
    """Of one worker. Each flight that it takes is sent or refused once, unless it is dropped while it waits."""

    def __init__(
        self,
        asking: Asking,
        choosing: Choosing,
        admission: Admission | None,
        turns: Turns,
        under_way: UnderWay,
        counts: Counts,
        timers: Timers,
        most: int,
    ) -> None:
        """`most` requests are at instances at a time."""
        self._asking, self._choosing, self._fleet = asking, choosing, choosing.fleet
        self._admission, self._turns, self._under_way = admission, turns, under_way
        self._counts, self._timers, self._most = counts, timers, most
        self._waiting = Waiting(turns, timers, has_room=self.has_room, route=self._route, late=self._late)

    def __repr__(self) -> str:
        return f"Deciding({self._turns!r})"

    def has_room(self) -> bool:
        """Whether one more may be sent to instances at all."""
        return len(self._under_way) < self._most

    def take(self, flight: Flight) -> None:
        """A request has come."""
        if self._admission is not None and self._turns.waiting(flight.ask.model):
            if self._wait(flight, self._choosing.choose(flight, self._timers.time()).choice):
                self._waiting.ask(flight.ask.model)
        else:
            self._route(flight)

    def again(self, flight: Flight) -> None:
        """It was lost where it was."""
        self._route(flight)

    def drop(self, name: str) -> None:
        """A request that waits is not wanted any more; nothing if it does not wait."""
        flight = self._turns.find(name)
        if flight is not None:
            self._turns.leave(flight)
            self.over(flight, "dropped")

    def refuse(self, flight: Flight, refusal: Refusal) -> None:
        """It is not served."""
        self._turns.leave(flight)
        self.over(flight, refusal.code)
        flight.refused(flight.job, refusal)

    def over(self, flight: Flight, outcome: str) -> None:
        """It has ended, and how."""
        job, record = flight.job, flight.record
        job.phase = Phase.DONE
        self._counts.add("outcomes", outcome)
        if record is not None:
            record.outcome, record.first_s, record.computed_s = outcome, flight.first_s, flight.computed_s
            record.answered_tokens, record.cached_tokens = job.answered_tokens, job.cached_tokens
            record.found_tokens = job.found_tokens
            record.ended_s = self._timers.time()

    def room(self) -> None:
        """Something has ended somewhere, or an instance has come or gone: those who wait are asked soon."""
        self._waiting.soon()

    def _route(self, flight: Flight) -> bool:
        """Send or refuse a request; False if it waits, or waits on."""
        now, job = self._timers.time(), flight.job
        if flight.waits:
            job.held = self._asking.held(job)
        chosen = self._choosing.choose(flight, now)
        choice = chosen.choice
        if choice is None:
            return self._nobody(flight, now)
        admission, waited_s = self._admission, max(now - job.arrived_s, 0.0)
        verdict = None
        if admission is not None and not flight.losses:
            verdict = admission.decide(flight.ask, choice, self._fleet, waited_s)
            if verdict.outcome is Outcome.WAIT:
                if not flight.waits and not self._wait(flight, choice):
                    return True
                self._waiting.later(max(verdict.after_s or 0.0, ASK_AGAIN_S))
                return False
            if verdict.outcome is Outcome.REJECT:
                self._counts.add("rejected", verdict.reason.value)
                self.refuse(flight, _rejection(verdict))
                return True
        if flight.waits:
            self._turns.leave(flight)
        self._under_way.send(flight, Try(choice, verdict, waited_s), chosen, now)
        return True

    def _nobody(self, flight: Flight, now: float) -> bool:
        """No instance can serve it: say why, or wait for one that was there a moment ago."""
        instances, health = self._fleet.instances.values(), self._choosing.health
        ask = as_it_fits(flight.ask, instances, flight.excluded)
        if ask is not None:
            flight.ask = flight.job.ask = ask
            return self._route(flight)
        refusal = refusal_of(flight.job, flight.ask.tokens, instances, flight.excluded, health, now)
        if refusal is not None:
            self.refuse(flight, refusal)
            return True
        if flight.waits or self._wait(flight, None):
            self._waiting.later(GRACE_AGAIN_S)
            return False
        return True

    def _wait(self, flight: Flight, choice: Choice | None) -> bool:
        """Have it wait for its turn; False if it was refused, as there are too many."""
        ask, turns = flight.ask, self._turns
        if turns.is_full():
            loser = turns.giving_way(ask.tenant) or flight
            self._counts.add("limited", "waiting")
            self.refuse(loser, Refusal(429, "overloaded", "too many requests wait", RETRY_S))
            if loser is flight:
                return False
        cached = choice.cached_tokens + choice.fetched_tokens if choice is not None else 0
        self._waiting.push(flight, work_tokens(ask.tokens - cached, ask.output_tokens))
        flight.job.phase = Phase.WAITING
        return True

    def _late(self, flight: Flight) -> None:
        alive = any(it.alive and it.model == flight.ask.model for it in self._fleet.instances.values())
        self._counts.add("limited", "late")
        self.refuse(flight, Refusal(429 if alive else 503, "overloaded", "it waited too long", RETRY_S))


def _rejection(verdict: Verdict) -> Refusal:
    """What a client is told of a verdict."""
    if verdict.after_s is None:
        return Refusal(429, "slo_unreachable", "no instance would meet its latency target, even if idle")
    return Refusal(429, "overloaded", "its latency target cannot be met now", max(verdict.after_s, ASK_AGAIN_S))
