"""The policy's choice for one request, with what a policy does not know: whom to leave out, and who computes the same.

Instances are hidden from the policy that the request was lost with, and those that have come back lately and have not
earned it: each request that is sent anywhere earns such an instance a part of what is its share, and each that it gets
costs a whole one. Rather one of the latter than nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from headwater.conductor.alike import Alike, soon
from headwater.conductor.flight import Flight
from headwater.conductor.loads import Loads
from headwater.core.routing import Headwater, Row
from headwater.fleet import Choice, Fleet, Role
from headwater.ports import RoutingPolicy

EARNED_MOST = 2.0


class Health(Protocol):
    """What is asked of `Polling`."""

    def trouble(self, number: int, why: str) -> None:
        """A request was lost there."""

    def share(self, number: int, now: float) -> float:
        """How much of its usual share of requests an instance may have."""

    def out_s(self, number: int, now: float) -> float | None:
        """For how long it has been away; None if it is not."""

    def state(self, number: int) -> dict[str, Any]:
        """For `headwater fleet`."""


class Chosen:
    """A choice, None if nobody can serve it; who was hidden; whether others who compute the same decided it; what our
    policy weighed, if that is everything."""

    __slots__ = ("choice", "gathered", "hidden", "weighed")

    def __init__(self, choice: Choice | None, hidden: Collection[int], weighed: Sequence[Row] | None) -> None:
        self.choice, self.hidden, self.weighed = choice, hidden, weighed
        self.gathered = False


def _nobody() -> float:
    return float("inf")


class Choosing:
    """Asks the policy. Who is hidden is so only while it is asked."""

    def __init__(self, policy: RoutingPolicy, fleet: Fleet, loads: Loads) -> None:
        self.policy, self.fleet, self._loads = policy, fleet, loads
        self._ours = policy if isinstance(policy, Headwater) else None
        self.alike = Alike()
        self.health: Health | None = None
        self.waiting_s: Callable[[], float] = _nobody
        """Since when anybody waits for admission; infinity if nobody does."""
        self.kv_bytes_per_token: Callable[[str], int] | None = None
        """Of a model, for `fleet`; None: that has it already."""
        self._earned: dict[int, float] = {}
        """Of instances that have come back lately, how many requests they may have."""

    def choose(self, flight: Flight, now: float) -> Chosen:
        """Where to send it now."""
        fleet = self.fleet
        fleet.now = now
        if self.kv_bytes_per_token is not None:
            fleet.kv_bytes_per_token = self.kv_bytes_per_token(flight.ask.model)
        self._loads.refresh(now)
        hidden: Collection[int] = self._hidden(flight, now) if self._earned else flight.excluded
        choice = self._without(flight, hidden) if hidden else self.policy.choose(flight.ask, flight.job.held, fleet)
        if choice is None and len(hidden) > len(flight.excluded):
            hidden = flight.excluded
            choice = self._without(flight, hidden)
        chosen = Chosen(choice, hidden, self._ours.weighed if self._ours is not None else None)
        if choice is not None and len(self.alike):
            gathered = self._gather(flight, choice, hidden, now)
            if gathered is not choice:
                chosen.choice, chosen.gathered = gathered, True
        return chosen

    def sent(self, flight: Flight, choice: Choice, now: float) -> None:
        """A request was sent there."""
        self.alike.lead(flight.name, flight.ask.keys, flight.ask.tokens, choice)
        if not self._earned or self.health is None:
            return
        alive = sum(it.alive for it in self.fleet.instances.values())
        for number, earned in self._earned.items():
            spent = number in (choice.prefill, choice.decode)
            self._earned[number] = min(earned + self.health.share(number, now) / max(alive, 1), EARNED_MOST) - spent

    def changed(self, number: int, alive: bool, now: float) -> None:
        """An instance has gone or has come back."""
        self._earned.pop(number, None)
        if alive and self.health is not None and self.health.share(number, now) < 1.0:
            self._earned[number] = 0.0

    def left(self, number: int) -> None:
        """Its number may be given to another."""
        self._earned.pop(number, None)
        self.policy.left(number)

    def _hidden(self, flight: Flight, now: float) -> Collection[int]:
        slow = set()
        for number in list(self._earned):
            if self.health is None or self.health.share(number, now) >= 1.0:
                del self._earned[number]
            elif self._earned[number] < 1.0:
                slow.add(number)
        return flight.excluded | slow

    def _without(self, flight: Flight, hidden: Collection[int]) -> Choice | None:
        instances = self.fleet.instances
        away = [it for number in hidden if (it := instances.get(number)) is not None and it.alive]
        for it in away:
            it.alive = False
        try:
            return self.policy.choose(flight.ask, flight.job.held, self.fleet)
        finally:
            for it in away:
                it.alive = True

    def _gather(self, flight: Flight, choice: Choice, hidden: Collection[int], now: float) -> Choice:
        """Where the same is being computed already, if it is so at enough places and soon done there."""
        ask, instances = flight.ask, self.fleet.instances
        places = self.alike.places(ask.keys, ask.block_tokens, ask.tokens, min(now, self.waiting_s()))
        if places is None or choice.prefill in places:
            return choice
        others = {number for number, it in instances.items() if number not in places and it.role is not Role.DECODE}
        own = self._without(flight, others.union(hidden))
        if own is None or (ask.ttft_slo_s is not None and own.parts.ttft_s > ask.ttft_slo_s):
            return choice
        return own if soon(instances[own.prefill], own, choice) else choice
