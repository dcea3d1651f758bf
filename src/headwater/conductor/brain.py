"""The books of one worker: what is taken, what is under way, what is learned of what has ended.

Theory of operation. A request is a flight here, from `take` until it is finished, refused or dropped:

    take      decided on (`deciding`): sent, refused, or it waits for its turn
    sent      in all books (`underway`)                      started, progressed
    prefilled of a pair, the first leg is over: decoding from now on; the second leg begins when its KV can be found
    lost      out of all books; decided on anew, without the instances that it was lost with -> sent, or refused
    finished  out of all books; its times and tokens are learned from

Nothing here waits, and nothing is remembered of a request that is over but what `explained` tells. The core's parts are
called as the simulator calls them, in the same order: what it says of a policy is what happens here.

Of a request whose answer comes in one piece nothing is learned but how long its answer is: its time says nothing of how
much of it was prefill. A few of them end what a guess may keep out (`core/trials`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from headwater.conductor.asking import Asking
from headwater.conductor.choosing import Choosing
from headwater.conductor.counts import Counts
from headwater.conductor.deciding import Deciding
from headwater.conductor.explaining import Explained, record_of
from headwater.conductor.flight import Flight
from headwater.conductor.handoff import HandOff
from headwater.conductor.job import How, Job, Phase, Refusal, Refused, Sent
from headwater.conductor.learning import Learning
from headwater.conductor.loads import STEP_TOKENS, Loads
from headwater.conductor.nobody import RETRY_S
from headwater.conductor.orders import Prefetch
from headwater.conductor.parts import Sight
from headwater.conductor.patience import SILENT, patience_s
from headwater.conductor.registry import Roster
from headwater.conductor.signals import Signals
from headwater.conductor.tallies import Tallies
from headwater.conductor.timers import Timers
from headwater.conductor.turns import Turns
from headwater.conductor.underway import UnderWay
from headwater.core.admission import Admission
from headwater.core.loads import LoadBook, Published
from headwater.core.policies import POLICIES
from headwater.core.predictions import Outputs, Predictions
from headwater.core.rates import USUAL, Rates
from headwater.fleet import Fleet
from headwater.fleetfile.model import FleetFile
from headwater.ports import RoutingPolicy


class FleetBrain:
    """See `parts.Brain`. One to a worker, called in its loop only.

    `fleet.links` belong to whoever watches nodes, who may change them at any time.
    """

    def __init__(
        self,
        file: FleetFile,
        roster: Roster,
        sight: Sight,
        counts: Counts,
        timers: Timers,
        *,
        name: str,
        serial: int = 0,
        policy: RoutingPolicy | None = None,
        prior: Rates | None = None,
        prefetch: Prefetch | None = None,
    ) -> None:
        """`name` is that of one life of this worker among all Conductors; `serial` as in `LoadBook`."""
        about = file.conductor
        self._retries = about.retries
        self._roster, self._sight, self._counts, self._timers = roster, sight, counts, timers
        self.policy = policy or POLICIES[about.policy]()
        self.fleet = Fleet(roster.instances())
        self.loads = Loads(LoadBook(name, serial=serial), roster)
        self.admission = Admission(Predictions()) if about.admission else None
        outputs = Outputs()
        needs_held = bool(getattr(self.policy, "needs_held", True))
        self._asking = asking = Asking(file, sight, outputs, needs_held=needs_held)
        self.learning = Learning(roster, prior or Rates(USUAL), outputs)
        weights = {it.name: it.weight for it in file.tenants}
        self.turns = Turns(weights, about.limits.waiting, about.times.wait_s)
        self.explanations = Explained(roster, about.explained)
        self.choosing = Choosing(self.policy, self.fleet, self.loads)
        self.choosing.waiting_s = self.turns.waiting_s
        self.earning = self.choosing.earning
        self._tallies = Tallies(counts, roster)
        self._under_way = UnderWay(
            roster, sight, counts, timers, self.choosing, self.loads, self.admission, self.explanations, prefetch
        )
        self._hand_off = HandOff(sight, counts, timers)
        self._deciding = Deciding(
            asking, self.choosing, self.admission, self.turns, self._under_way, counts, timers, about.limits.requests
        )
        roster.watch(self._joined, self._left, self._leaving)
        for number in roster.instances():
            self._joined(number)

    def __repr__(self) -> str:
        return f"FleetBrain({self.policy.name}, {len(self._under_way)} under way, {self.turns!r})"

    @property
    def under_way(self) -> int:
        """How many requests are at instances."""
        return len(self._under_way)

    # ---- requests

    def take(self, job: Job, sent: Sent, refused: Refused) -> None:
        """See `parts.Brain`."""
        if not self._deciding.has_room():
            self._counts.add("limited", "requests")
            refused(job, Refusal(503, "overloaded", "too many requests are in progress", RETRY_S))
            return
        flight = self._asking.flight(job, sent, refused)
        counted = job.tokenised.how if job.tokenised is not None else How.NONE
        flight.record = record_of(job.id, flight.ask, counted, job.arrived_s)
        self.explanations.begin(flight.record)
        self._deciding.take(flight)

    def drop(self, job: Job) -> None:
        """See `parts.Brain`."""
        if job.ask is not None:
            self._deciding.drop(job.ask.request)

    def started(self, job: Job) -> None:
        """See `parts.Brain`."""
        flight = self._under_way.find(job)
        if flight is None or flight.first_s or not job.parsed.stream:
            return
        now = flight.first_s = self._timers.time()
        if not flight.computed_s:
            self._under_way.begin(flight, now)
        if self.admission is not None:
            self.admission.started(flight.name, now)
        self.learning.started(flight, now)
        if not flight.answered:
            flight.answered, job.first_s, job.phase = True, now, Phase.ANSWERING
            self._tallies.started(flight, now)

    def patience_s(self, job: Job) -> float:
        """See `parts.Brain`."""
        flight = self._under_way.find(job)
        assert flight is not None and flight.choice is not None, f"{job.id} is nowhere"
        choice, prior = flight.choice, self.learning.rates.prior
        tokens = flight.queued[1] + flight.ask.tokens - choice.cached_tokens
        return patience_s(choice.parts, self.fleet.instances[choice.prefill].times, prior, tokens)

    def prefilled(self, job: Job, why: str, then: Callable[[], None]) -> None:
        """See `parts.Brain`."""
        flight = self._under_way.find(job)
        if flight is None or flight.choice is None:
            return
        now, number = self._timers.time(), flight.choice.prefill
        flight.handed = True
        # Not before: who asks the same meanwhile is to meet the first at the prefill instance.
        self._sight.expect(flight.choice.decode, job.lenses)
        if why:
            if self.choosing.health is not None:
                self.choosing.health.trouble(number, why)
            if why in SILENT:
                self.choosing.tardy.late(number, now)
            if flight.record is not None:
                flight.record.tries[-1].prefill_lost = why
            self._sight.unexpect(number, job.lenses)
            self.choosing.alike.lost(flight.name)
            then()
            return
        self.choosing.tardy.forget(number)
        flight.computed_s = now
        self._under_way.begin(flight, now)
        self._hand_off.begin(flight, then)

    def progressed(self, job: Job) -> None:
        """See `parts.Brain`."""
        flight = self._under_way.find(job)
        if flight is None or flight.choice is None or job.answered_tokens - flight.counted_tokens < STEP_TOKENS:
            return
        flight.counted_tokens, now = job.answered_tokens, self._timers.time()
        if flight.first_s:
            self.learning.progressed(flight, now)
        self.loads.progressed(flight.name, flight.choice, job.answered_tokens, now)

    def lost(self, job: Job, number: int, why: str, sent: Sent, refused: Refused) -> None:
        """See `parts.Brain`."""
        flight = self._under_way.find(job)
        if flight is None or flight.choice is None:
            return
        if self.choosing.health is not None:
            self.choosing.health.trouble(number, why)
        choice, begun = flight.choice, flight.first_s > 0
        self._under_way.land(flight, None, self._timers.time())
        if not begun:
            if not flight.handed:
                self._sight.unexpect(choice.prefill, job.lenses)
            if choice.decode != choice.prefill:
                self._sight.unexpect(choice.decode, job.lenses)
        self.choosing.alike.lost(flight.name)
        flight.losses += 1
        flight.excluded.add(number)
        flight.sent, flight.refused = sent, refused
        if flight.record is not None:
            flight.record.tries[-1].lost = why
        if flight.losses > self._retries:
            self._deciding.refuse(flight, Refusal(502, "instance_lost", "the instances that served it failed", None))
        else:
            self._ask_for_the_rest(flight)
            self._deciding.again(flight)
        self._under_way.settle(choice)
        self._deciding.room()

    def finished(self, job: Job, *, whole: bool) -> None:
        """See `parts.Brain`. Nothing if it is over already."""
        flight = self._under_way.find(job)
        if flight is None or flight.choice is None:
            return
        now, choice = self._timers.time(), flight.choice
        job.ended_s = now
        if whole and flight.presumed_s:
            self._under_way.begin(flight, now)  # answered sooner than it was said to begin
        if flight.first_s or whole:
            self.learning.ended(flight, now, whole=whole)
            self._tallies.ended(flight, choice, now, whole=whole)
        else:
            self.choosing.alike.lost(flight.name)
        self._under_way.land(flight, job.answered_tokens if whole and not flight.losses else None, now)
        self._deciding.over(flight, "whole" if whole else "cut")
        self._under_way.settle(choice)
        self._deciding.room()

    def explained(self, request: str) -> dict[str, Any] | None:
        """See `parts.Brain`."""
        return self.explanations.get(request)

    def _ask_for_the_rest(self, flight: Flight) -> None:
        """What was answered already is a part of the prompt for whoever goes on."""
        answered, whole = flight.job.answered_tokens, flight.asked
        if answered:
            tokens, left = whole.tokens + answered, max(whole.output_tokens - answered, 1)
            flight.ask = flight.job.ask = replace(whole, tokens=tokens, output_tokens=left)

    # ---- instances

    def told(self, number: int, signals: Signals, asked_s: float) -> None:
        """What an engine said of itself."""
        it = self.fleet.instances.get(number)
        if it is None:
            return
        if signals.capacity_tokens is not None and self._roster.spec(number).capacity_tokens is None:
            it.capacity_tokens = signals.capacity_tokens
        if signals.waiting is not None and signals.running is not None:
            self.loads.told(number, signals.waiting, signals.running, asked_s, self._timers.time())

    def changed(self, number: int, alive: bool) -> None:
        """An instance has gone or has come back; `alive` is written already."""
        self._counts.add("instances_changed", "back" if alive else "out")
        self.choosing.changed(number, alive, self._timers.time())
        self._deciding.room()

    def heard(self, message: Published) -> None:
        """Another Conductor's loads."""
        self.loads.heard(message, self._timers.time())

    def depart(self, number: int) -> None:
        """Let an instance go that was unregistered, once nothing of ours is under way there."""
        self._under_way.depart(number)

    def _leaving(self, number: int) -> None:
        """Not at once: whoever unregistered it may want to know what it was."""
        self._timers.call_later(0.0, partial(self.depart, number))

    def _joined(self, number: int) -> None:
        self._under_way.joined(number)
        self.learning.joined(number)

    def _left(self, number: int) -> None:
        """Nobody remembers anything by this number any more."""
        self.choosing.left(number)
        self.loads.left(number)
        if self.admission is not None:
            self.admission.left(number)
        self._sight.left(number)
        self.learning.left(number)
        self._tallies.left(number)
        self._under_way.left(number)

    def state(self) -> dict[str, Any]:
        """See `parts.Brain`."""
        now = self._timers.time()
        self.loads.refresh(now)
        return {
            "policy": self.policy.name,
            "under_way": len(self._under_way),
            "waiting": self.turns.tenants(),
            "instances": [
                self._tallies.state(it, self._under_way.at(it), self.choosing.health, now)
                for it in self.fleet.instances
            ],
        }
