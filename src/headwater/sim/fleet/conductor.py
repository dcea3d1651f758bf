"""One of those that route: a policy and what it is told, who is admitted, and who waits for a turn."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headwater.core.admission import Admission, Outcome
from headwater.core.loads import LoadBook
from headwater.core.predictions import Predictions
from headwater.core.shares import QUANTUM, Shares, work_tokens
from headwater.fleet import Choice, Instance
from headwater.ports import RoutingPolicy
from headwater.sim.fleet.clock import Clock
from headwater.sim.fleet.flight import Carrier, Flight
from headwater.sim.fleet.results import Ending
from headwater.sim.fleet.sight import Sight
from headwater.sim.fleet.stage import Stage

ASK_AGAIN_S = 1e-3
"""Who is told to wait is asked again after at least so long."""


def needs_held(policy: RoutingPolicy) -> bool:
    """Whether a policy looks at who holds what; one that does not may say so by an attribute of that name."""
    return bool(getattr(policy, "needs_held", True))


class Conductor:
    """Alone, it sees loads as they are, or as late as news of them are. Of several, each knows its own requests and
    what the others publish now and then."""

    def __init__(
        self, name: str, policy: RoutingPolicy, stage: Stage, clock: Clock, sight: Sight, flights: Carrier, alone: bool
    ) -> None:
        self.policy = policy
        self.book = None if alone else LoadBook(name, flight_s=0.0)
        self.fleet = stage.fleet(stage.live if alone else stage.instances())
        about = stage.config.admission
        share = {} if about.long_share is None else {"long_share": about.long_share}
        self.admission = Admission(Predictions(), **share) if about.enabled else None
        self._shares = Shares(quantum=about.quantum or QUANTUM)
        self._asked_s = math.inf
        """When those who wait are asked again."""
        self._tiers = stage.tiers if stage.tiers.stores or stage.config.link else None
        self._retries, self._load = stage.config.retries, stage.config.load
        self._clock, self._sight, self._flights = clock, sight, flights
        self._needs_held = needs_held(policy)

    def __repr__(self) -> str:
        return f"<Conductor {self.policy!r}, {len(self._shares)} wait>"

    # ---- requests

    def take(self, flight: Flight) -> None:
        """A request has come: route it, now or when it is its turn."""
        if self.admission is not None and len(self._shares):
            self._push(flight, self._choose(flight))
            self._ask_again()
        else:
            self._route(flight, 0.0)

    def take_again(self, flight: Flight) -> None:
        """A request was lost with an instance: route it anew, if that was not too often yet."""
        flight.retries += 1
        if flight.retries > self._retries:
            self._flights.fail(flight)
        else:
            self._route(flight, 0.0)

    def _choose(self, flight: Flight) -> Choice | None:
        now, fleet = self._clock.now, self.fleet
        fleet.now = now
        if self.book is not None:
            self.book.fill(fleet.instances, now)
        if self._tiers is not None:
            self._tiers.refresh(now)
        held = self._sight.held(flight.number) if self._needs_held else {}
        return self.policy.choose(flight.ask, held, fleet)

    def _route(self, flight: Flight, waited_s: float) -> bool:
        """Route a request if it is admitted; False if it is to wait."""
        choice = self._choose(flight)
        admission = self.admission
        if admission is None or flight.retries:
            if choice is None:
                self._flights.fail(flight)
            else:
                self._send(flight, choice, waited_s)
            return True
        verdict = admission.decide(flight.ask, choice, self.fleet, waited_s)
        if verdict.outcome is Outcome.WAIT:
            if waited_s == 0.0:
                self._push(flight, choice)
            self._ask_later(verdict.after_s or 0.0)
            return False
        if verdict.outcome is Outcome.REJECT:
            self._flights.end(flight, Ending.REJECTED if choice is not None else Ending.FAILED)
            return True
        assert choice is not None
        self._send(flight, choice, waited_s)
        admission.admitted(flight.ask, choice, verdict, self.fleet)
        return True

    def _send(self, flight: Flight, choice: Choice, waited_s: float) -> None:
        job = self._flights.prepare(flight, choice, waited_s)
        ask, book = flight.ask, self.book
        if book is not None:
            book.routed(ask, choice, self._clock.now)
            book.fill(self.fleet.instances, self._clock.now)
        self.policy.routed(ask, choice, self.fleet)
        self._flights.send(flight, job, choice)

    # ---- turns

    def _push(self, flight: Flight, choice: Choice | None) -> None:
        cached = choice.cached_tokens + choice.fetched_tokens if choice is not None else 0
        ask = flight.ask
        self._shares.push(ask, work_tokens(ask.tokens - cached, ask.output_tokens), self._clock.now)

    def _ask_later(self, after_s: float) -> None:
        when_s = self._clock.now + max(after_s, ASK_AGAIN_S)
        if when_s < self._asked_s:
            self._asked_s = when_s
            self._clock.at(when_s, self._ask_again_at, when_s)

    def _ask_again_at(self, when_s: float) -> None:
        if self._asked_s == when_s:
            self._asked_s = math.inf
            self._ask_again()

    def _ask_again(self) -> None:
        """Those who wait, in the order that is fair, until one has to wait on."""
        now = self._clock.now
        while (ask := self._shares.pop(now)) is not None:
            flight = self._flights.flying[int(ask.request)]
            waited_s = max(now - flight.arrival_s / self._load, 1e-9)
            if not self._route(flight, waited_s):
                self._shares.put_back(ask)
                return

    # ---- what it hears

    def hear_first(self, flight: Flight) -> None:
        """A request's first token came."""
        now = self._clock.now
        if self.book is not None:
            self.book.prefilled(flight.ask.request, now)
        if self.admission is not None:
            self.admission.started(flight.ask.request, now)

    def hear_end(self, flight: Flight, choice: Choice, tokens: int | None) -> None:
        """A request ended; None: without all its tokens."""
        self.policy.finished(flight.ask, choice)
        if self.book is not None:
            self.book.finished(flight.ask.request, self._clock.now)
        if self.admission is not None:
            self.admission.finished(flight.ask.request, tokens, self._clock.now)

    def left(self, instance: int) -> None:
        """An instance has died."""
        self.policy.left(instance)
        if self.book is not None:
            self.book.left(instance)
        if self.admission is not None:
            self.admission.left(instance)


def exchange(conductors: Iterable[Conductor], now: float) -> None:
    """Each tells all others its loads."""
    everybody = list(conductors)
    for one in everybody:
        assert one.book is not None
        message = one.book.publish()
        for other in everybody:
            if other is not one and other.book is not None:
                other.book.heard(message, now)


def views(conductors: Iterable[Conductor], live: dict[int, Instance], number: int) -> list[Instance]:
    """An instance as it is, and in everybody's eyes."""
    return [live[number], *(one.fleet.instances[number] for one in conductors if one.book is not None)]
