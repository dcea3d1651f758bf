"""The policy's choice for one request, with what a policy does not know: whom to leave out, and who computes the same.

Instances are hidden from the policy that the request was lost with, those that have come back lately and have not
earned it (`earning`), and those that computed no prompt in time (`patience`). Rather one of these than nobody.

Of a pair, the decode instance does both where it would not find a chunk more by what the other computes: the rest of a
prompt is computed there anyhow, as nodes hold whole chunks, and in a chat it holds most of what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from headwater.conductor.alike import PATIENCE, Alike
from headwater.conductor.asking import coarsest
from headwater.conductor.earning import Earning, Health
from headwater.conductor.flight import Flight
from headwater.conductor.loads import Loads
from headwater.conductor.patience import Tardy
from headwater.core.routing import Headwater, Row, batched_s, choice_of
from headwater.fleet import Choice, Fleet, Place, Role
from headwater.ports import RoutingPolicy
from headwater.types import Tier


class Chosen(msgspec.Struct, eq=False):
    """A choice, None if nobody can serve it; who was hidden; what our policy weighed, if that is everything; whether
    others who compute the same decided it; whether two would have been one too many."""

    choice: Choice | None
    hidden: Collection[int]
    weighed: Sequence[Row] | None
    gathered: bool = False
    needless: bool = False


def _nobody() -> float:
    return float("inf")


class Choosing:
    """Asks the policy. Who is hidden is so only while it is asked."""

    def __init__(self, policy: RoutingPolicy, fleet: Fleet, loads: Loads) -> None:
        self.policy, self.fleet, self._loads = policy, fleet, loads
        self._ours = policy if isinstance(policy, Headwater) else None
        self.alike = Alike()
        self.earning = Earning(fleet.instances)
        self.tardy = Tardy()
        self.waiting_s: Callable[[], float] = _nobody
        """Since when anybody waits for admission; infinity if nobody does."""
        self.kv_bytes_per_token: Callable[[str], int] | None = None
        """Of a model, for `fleet`; None: that has it already."""

    @property
    def health(self) -> Health | None:
        """Who knows how instances are."""
        return self.earning.health

    @health.setter
    def health(self, health: Health) -> None:
        self.earning.health = health

    def choose(self, flight: Flight, now: float) -> Chosen:
        """Where to send it now."""
        fleet = self.fleet
        fleet.now = now
        if self.kv_bytes_per_token is not None:
            fleet.kv_bytes_per_token = self.kv_bytes_per_token(flight.ask.model)
        self._loads.refresh(now)
        out: Collection[int] = flight.excluded
        if self.tardy.left_out:
            out = flight.excluded | self.tardy.now(now)
        hidden = out
        if self.earning.earned:
            hidden = self.earning.slow(now).union(out)
        choice = self._without(flight, hidden) if hidden else self.policy.choose(flight.ask, flight.job.held, fleet)
        if choice is None and len(hidden) > len(out):
            hidden = out
            choice = self._without(flight, hidden)
        if choice is None:
            choice = self._alone(flight, hidden)
        if choice is None and len(out) > len(flight.excluded):
            hidden = flight.excluded
            choice = self._without(flight, hidden) or self._alone(flight, hidden)
        chosen = Chosen(choice, hidden, self._ours.weighed if self._ours is not None else None)
        if choice is not None and len(self.alike):
            gathered = self._gather(flight, choice, hidden, now)
            if gathered is not choice:
                chosen.choice, chosen.gathered = gathered, True
        choice = chosen.choice
        if choice is not None and choice.prefill != choice.decode and not self._hands_over(flight, choice):
            it = fleet.instances[choice.decode]
            chosen.choice, chosen.needless = choice_of(flight.ask, flight.job.held, fleet, it, it), True
        return chosen

    def sent(self, flight: Flight, choice: Choice, now: float) -> None:
        """A request was sent there."""
        self.alike.lead(flight.name, flight.ask.keys, flight.ask.tokens, choice)
        if self.earning.earned:
            self.earning.sent(choice.prefill, choice.decode, now)
        if self.tardy.left_out:
            self.tardy.sent(choice.prefill, now)

    def changed(self, number: int, alive: bool, now: float) -> None:
        """An instance has gone or has come back."""
        self.earning.changed(number, alive, now)
        self.tardy.forget(number)

    def left(self, number: int) -> None:
        """Its number may be given to another."""
        self.earning.left(number)
        self.tardy.forget(number)
        self.policy.left(number)

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

    def _hands_over(self, flight: Flight, choice: Choice) -> bool:
        """Whether the decode instance finds a chunk at least of what the prefill instance computes."""
        job, node = flight.job, self.fleet.instances[choice.decode].node
        if not job.lenses:
            return True
        places = [Place(Tier.DEVICE, choice.decode), Place(Tier.REMOTE, 0)]
        if node is not None:
            places += [Place(Tier.HOST, node), Place(Tier.DISK, node)]
        chunks = coarsest(job.lenses)
        return len(chunks.keys) * chunks.tokens - max(job.held.get(it, 0) for it in places) >= chunks.tokens

    def _alone(self, flight: Flight, hidden: Collection[int]) -> Choice | None:
        """In a fleet with roles, where nobody is left for one leg or nothing leads from one to the other: an instance
        that does both, whatever its role."""
        ones = [(it, it.role) for it in self.fleet.instances.values() if it.role is not Role.BOTH]
        if not ones:
            return None
        for it, _ in ones:
            it.role = Role.BOTH
        try:
            return self._without(flight, hidden)
        finally:
            for it, role in ones:
                it.role = role

    def _gather(self, flight: Flight, choice: Choice, hidden: Collection[int], now: float) -> Choice:
        """Where the same is being computed already, if it is so at enough places and soon done there."""
        ask, instances = flight.ask, self.fleet.instances
        since_s = min(flight.job.arrived_s, self.waiting_s(), now)
        places = self.alike.places(ask.keys, ask.block_tokens, ask.tokens, since_s)
        if places is None or choice.prefill in places:
            return choice
        others = {number for number, it in instances.items() if number not in places and it.role is not Role.DECODE}
        own = self._without(flight, others.union(hidden))
        if own is None:
            return choice
        queue_s = own.parts.queue_s
        ttft_s = own.parts.ttft_s - queue_s + batched_s(instances[own.prefill], queue_s)
        if ask.ttft_slo_s is not None and ttft_s > ask.ttft_slo_s:
            return choice
        return own if ttft_s <= PATIENCE * choice.parts.ttft_s else choice
