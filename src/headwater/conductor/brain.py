"""Where requests go: the policy's choice, admission's verdict, and the books of what is under way.

Theory of operation. A request is a flight here, from `take` until it is finished, refused or dropped:

    take      none of its model waits: choose, decide        ADMIT -> sent       WAIT -> its turn   REJECT -> refused
              somebody waits: it has to wait as well, and those who wait are asked again
    its turn  asked again in the order of `Turns`, with a new choice, when a request has ended or when the verdict said;
              until one has to wait on                       ADMIT -> sent       too late -> refused
    sent      in all books: loads, policy, admission, sight  started, progressed
    prefilled of a pair, the first leg is over: decoding from now on; the second leg begins when its KV can be found
    lost      out of all books; chosen anew, without the instances that it was lost with, and not held up by admission:
              its client has been promised an answer         -> sent, or refused
    finished  out of all books; its times and tokens are learned from

Nothing here waits, and nothing is remembered of a request that is over but what `explained` tells. The core's parts are
called as the simulator calls them, in the same order: what it says of a policy is what happens here.

A request whose answer comes in one piece tells nobody when its first token came: it is taken to have come when it was
said to, and nothing is learned from it but how long its answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headwater.conductor.asking import Asking
from headwater.conductor.choosing import Choosing, Chosen
from headwater.conductor.counts import Counts
from headwater.conductor.explaining import Explained, Record, Try
from headwater.conductor.flight import Flight
from headwater.conductor.job import How, Job, Phase, Refusal, Refused, Sent, Target
from headwater.conductor.learning import Learning
from headwater.conductor.loads import STEP_TOKENS, Loads
from headwater.conductor.nobody import GRACE_AGAIN_S, RETRY_S, refusal_of
from headwater.conductor.orders import Orders, Prefetch
from headwater.conductor.parts import Sight
from headwater.conductor.presumed import Presumed
from headwater.conductor.registry import Roster
from headwater.conductor.signals import Signals
from headwater.conductor.tallies import Tallies
from headwater.conductor.timers import Timer, Timers
from headwater.conductor.turns import Turns
from headwater.core.admission import Admission, Outcome, Verdict
from headwater.core.loads import LoadBook, Published
from headwater.core.policies import POLICIES
from headwater.core.predictions import Outputs, Predictions
from headwater.core.rates import USUAL, Rates
from headwater.core.shares import work_tokens
from headwater.fleet import Choice, Fleet, Place, Role
from headwater.fleetfile.model import FleetFile
from headwater.ports import RoutingPolicy

ASK_AGAIN_S = 1e-3
"""Those who wait are asked again after at least so long."""
HANDOFF_S, HANDOFF_LOOK_S = 0.5, 1e-3
"""A decode instance is asked once the KV of its prompt is in the store, where a node tells us; but not later than so,
nor than it takes to compute it."""
HEADERS_MOST = 4096
"""Of so many targets the headers are kept."""


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
        self._limits, self._retries = about.limits, about.retries
        self._roster, self._sight, self._counts, self._timers = roster, sight, counts, timers
        self.policy = policy or POLICIES[about.policy]()
        self.fleet = Fleet(roster.instances())
        self.loads = Loads(LoadBook(name, serial=serial), roster)
        self.admission = Admission(Predictions()) if about.admission else None
        self._outputs = Outputs()
        needs_held = bool(getattr(self.policy, "needs_held", True))
        self._asking = Asking(file, sight, self._outputs, needs_held=needs_held)
        self.learning = Learning(roster, prior or Rates(USUAL), self._outputs)
        weights = {it.name: it.weight for it in file.tenants}
        self.turns = Turns(weights, about.limits.waiting, about.times.wait_s)
        self.explanations = Explained(roster, about.explained)
        self.choosing = Choosing(self.policy, self.fleet, self.loads)
        self.choosing.waiting_s = self.turns.waiting_s
        self.earning = self.choosing.earning
        self._orders = Orders(prefetch, counts) if prefetch is not None else None
        self._tallies = Tallies(counts, roster)
        self._flights: dict[str, Flight] = {}
        """Those that were sent somewhere."""
        self._at: dict[int, int] = {}
        """How many of them are at an instance, in either role."""
        self._labels: dict[int, tuple[bytes, bytes]] = {}
        self._headers_made: dict[tuple[int, int, int, int, Place | None], Mapping[bytes, bytes]] = {}
        self._presumed = Presumed(timers, self._presume)
        self._asks = False
        self._alarm: Timer | None = None
        self._alarm_s = float("inf")
        roster.watch(self._joined, self._left, self._leaving)
        for number in roster.instances():
            self._joined(number)

    def __repr__(self) -> str:
        return f"FleetBrain({self.policy.name}, {len(self._flights)} under way, {self.turns!r})"

    @property
    def under_way(self) -> int:
        """How many requests are at instances."""
        return len(self._flights)

    # ---- requests

    def take(self, job: Job, sent: Sent, refused: Refused) -> None:
        """See `parts.Brain`."""
        if len(self._flights) >= self._limits.requests:
            self._counts.add("refused", "requests")
            refused(Refusal(503, "overloaded", "too many requests are in progress", RETRY_S))
            return
        flight = self._asking.flight(job, sent, refused)
        counted = job.tokenised.how if job.tokenised is not None else How.NONE
        flight.record = Record(job.id, flight.ask, counted, job.arrived_s)
        self.explanations.begin(flight.record)
        if self.admission is not None and self.turns.waiting(flight.ask.model):
            if self._wait(flight, self.choosing.choose(flight, self._timers.time()).choice):
                self._ask_again(flight.ask.model)
        else:
            self._route(flight)

    def drop(self, job: Job) -> None:
        """See `parts.Brain`."""
        ask = job.ask
        flight = self.turns.find(ask.request) if ask is not None else None
        if flight is not None:
            self.turns.leave(flight)
            self._over(flight, "dropped")

    def started(self, job: Job) -> None:
        """See `parts.Brain`."""
        flight = self._flights.get(job.ask.request) if job.ask is not None else None
        if flight is None or flight.first_s or not job.parsed.stream:
            return
        now = flight.first_s = self._timers.time()
        if not flight.computed_s:
            self._begin(flight, now)
        if self.admission is not None:
            self.admission.started(flight.name, now)
        if not flight.answered:
            flight.answered, job.first_s, job.phase = True, now, Phase.ANSWERING
            self._tallies.started(flight, now)

    def prefilled(self, job: Job, why: str, then: Callable[[], None]) -> None:
        """See `parts.Brain`."""
        flight = self._flights.get(job.ask.request) if job.ask is not None else None
        if flight is None or flight.choice is None:
            return
        now, number = self._timers.time(), flight.choice.prefill
        flight.handed = True
        if why:
            if self.choosing.health is not None:
                self.choosing.health.trouble(number, why)
            self._sight.unexpect(number, job.lenses)
            self.choosing.alike.lost(flight.name)
            then()
            return
        flight.computed_s = now
        self._begin(flight, now)
        self._hand_off(flight, now + min(HANDOFF_S, flight.choice.parts.prefill_s), HANDOFF_LOOK_S, then)

    def _hand_off(self, flight: Flight, until_s: float, look_s: float, then: Callable[[], None]) -> None:
        """Wait for the prompt's KV to be in the store; looked for less and less often."""
        flight.handing = None
        choice, job, now = flight.choice, flight.job, self._timers.time()
        assert choice is not None, f"{flight.name} is nowhere"
        stored = self._sight.stored(choice.prefill, job.parsed.model, job.lenses)
        if stored is False and now < until_s:
            again = partial(self._hand_off, flight, until_s, 2 * look_s, then)
            flight.handing = self._timers.call_later(min(look_s, until_s - now), again)
            return
        if stored is not None:
            self._counts.add("handoffs", "stored" if stored else "late")
        then()

    def _begin(self, flight: Flight, now: float) -> None:
        """It decodes from now on, as far as we know."""
        flight.presumed_s, choice = 0.0, flight.choice
        assert choice is not None, f"{flight.name} is nowhere"
        self.loads.prefilled(flight.name, choice, now)
        self.choosing.alike.started(flight.name, now)
        it = self.fleet.instances[choice.decode]
        flight.decoders = it.running_requests + 1, it.running_tokens + flight.ask.tokens

    def _presume(self, name: str, when_s: float) -> None:
        """A first token is taken to have come, unless its request has ended, or was sent anew since."""
        flight = self._flights.get(name)
        if flight is not None and flight.presumed_s == when_s:
            self._begin(flight, self._timers.time())

    def progressed(self, job: Job) -> None:
        """See `parts.Brain`."""
        flight = self._flights.get(job.ask.request) if job.ask is not None else None
        if flight is None or flight.choice is None or job.answered_tokens - flight.counted_tokens < STEP_TOKENS:
            return
        flight.counted_tokens = job.answered_tokens
        self.loads.progressed(flight.name, flight.choice, job.answered_tokens, self._timers.time())

    def lost(self, job: Job, number: int, why: str, sent: Sent, refused: Refused) -> None:
        """See `parts.Brain`."""
        flight = self._flights.get(job.ask.request) if job.ask is not None else None
        if flight is None or flight.choice is None:
            return
        if self.choosing.health is not None:
            self.choosing.health.trouble(number, why)
        choice, begun = flight.choice, flight.first_s > 0
        self._land(flight, None, self._timers.time())
        if not begun:
            if not flight.handed:
                self._sight.unexpect(choice.prefill, job.lenses)
            if choice.decode != choice.prefill:
                self._sight.unexpect(choice.decode, job.lenses)
        self.choosing.alike.lost(flight.name)
        self._counts.add("lost", why)
        flight.losses += 1
        flight.excluded.add(number)
        flight.sent, flight.refused = sent, refused
        if flight.record is not None:
            flight.record.tries[-1].lost = why
        if flight.losses > self._retries:
            self._refuse(flight, Refusal(502, "instance_lost", "the instances that served it failed", None))
        else:
            self._ask_for_the_rest(flight)
            self._route(flight)
        self._ended(choice)

    def finished(self, job: Job, *, whole: bool) -> None:
        """See `parts.Brain`. Nothing if it is over already."""
        flight = self._flights.get(job.ask.request) if job.ask is not None else None
        if flight is None or flight.choice is None:
            return
        now, choice = self._timers.time(), flight.choice
        job.ended_s = now
        if whole and flight.presumed_s:
            self._begin(flight, now)  # answered sooner than it was said to begin
        if flight.first_s or whole:
            self.learning.ended(flight, now, whole=whole)
            self._tallies.ended(flight, choice, now, whole=whole)
        else:
            self.choosing.alike.lost(flight.name)
        self._land(flight, job.answered_tokens if whole and not flight.losses else None, now)
        self._over(flight, "whole" if whole else "cut")
        self._ended(choice)

    def explained(self, request: str) -> dict[str, Any] | None:
        """See `parts.Brain`."""
        return self.explanations.get(request)

    # ---- the verdict

    def _route(self, flight: Flight) -> bool:
        """Send or refuse a request; False if it waits, or waits on."""
        now, job = self._timers.time(), flight.job
        if flight.waits:
            job.held = self._asking.held(job)
        chosen = self.choosing.choose(flight, now)
        choice = chosen.choice
        if choice is None:
            return self._nobody(flight, now)
        admission, waited_s = self.admission, max(now - job.arrived_s, 0.0)
        if admission is None or flight.losses:
            self._send(flight, Try(choice, None, waited_s), chosen, now)
            return True
        verdict = admission.decide(flight.ask, choice, self.fleet, waited_s)
        if verdict.outcome is Outcome.WAIT:
            if not flight.waits and not self._wait(flight, choice):
                return True
            self._ask_later(max(verdict.after_s or 0.0, ASK_AGAIN_S))
            return False
        if verdict.outcome is Outcome.REJECT:
            self._counts.add("rejected", verdict.reason.value)
            self._refuse(flight, _rejection(verdict))
            return True
        self._send(flight, Try(choice, verdict, waited_s), chosen, now)
        return True

    def _nobody(self, flight: Flight, now: float) -> bool:
        """No instance can serve it: say why, or wait for one that was there a moment ago."""
        refusal = refusal_of(
            flight.job, flight.ask.tokens, self.fleet.instances.values(), flight.excluded, self.choosing.health, now
        )
        if refusal is not None:
            self._refuse(flight, refusal)
            return True
        if flight.waits or self._wait(flight, None):
            self._ask_later(GRACE_AGAIN_S)
            return False
        return True

    def _send(self, flight: Flight, it: Try, chosen: Chosen, now: float) -> None:
        job, ask, choice, fleet = flight.job, flight.ask, it.choice, self.fleet
        if flight.waits:
            self.turns.leave(flight)
        target = fleet.instances[choice.prefill]
        flight.queued = target.waiting_requests, target.waiting_tokens
        flight.choice, flight.first_s, flight.counted_tokens = choice, 0.0, 0
        flight.handed, flight.computed_s = False, 0.0
        if flight.record is not None:
            flight.record.routed_s, flight.record.outcome = now, "sent"
            it.gathered, it.output_tokens = chosen.gathered, ask.output_tokens
            self.explanations.chose(flight.record, it, job.held, fleet, self.policy, chosen.hidden, chosen.weighed)
        self.loads.routed(ask, choice, now)
        self.policy.routed(ask, choice, fleet)
        if it.verdict is not None and self.admission is not None:
            self.admission.admitted(ask, choice, it.verdict, fleet)
        self._sight.expect(choice.prefill, job.lenses)
        if choice.decode != choice.prefill:
            self._sight.expect(choice.decode, job.lenses)
        self.choosing.sent(flight, choice, now)
        self._flights[flight.name] = flight
        at = self._at
        at[choice.prefill] = at.get(choice.prefill, 0) + 1
        if choice.decode != choice.prefill:
            at[choice.decode] = at.get(choice.decode, 0) + 1
        if choice.prefill == choice.decode and target.role is not Role.BOTH:
            self._counts.add("unpaired")
        if self._orders is not None:
            self._orders.sent(job, choice, target, now)
        if not job.parsed.stream:
            flight.presumed_s = now + choice.parts.ttft_s
            self._presumed.add(flight.name, flight.presumed_s, now)
        job.choice, job.phase, job.routed_s = choice, Phase.SENT, now
        job.tries += 1
        flight.sent(Target(choice.prefill, choice.decode, self._headers(choice)))

    def _headers(self, choice: Choice) -> Mapping[bytes, bytes]:
        key = (choice.prefill, choice.decode, choice.cached_tokens, choice.fetched_tokens, choice.source)
        headers = self._headers_made.get(key)
        if headers is None:
            if len(self._headers_made) >= HEADERS_MOST:
                self._headers_made.clear()
            headers = self._headers_made[key] = self._make_headers(choice)
        return headers

    def _make_headers(self, choice: Choice) -> Mapping[bytes, bytes]:
        instance, node = self._labels[choice.decode]
        reuse = f"device={choice.cached_tokens}"
        if choice.source is not None:
            reuse = f"{reuse}, {choice.source.tier.name.lower()}={choice.fetched_tokens}"
        headers = {b"x-headwater-instance": instance, b"x-headwater-reuse": reuse.encode()}
        if choice.prefill != choice.decode:
            headers[b"x-headwater-prefill"] = self._labels[choice.prefill][0]
        if node:
            headers[b"x-headwater-node"] = node
        return headers

    # ---- the end

    def _land(self, flight: Flight, tokens: int | None, now: float) -> None:
        """Take it out of all books; `tokens` as in `Admission.finished`."""
        choice, flight.presumed_s = flight.choice, 0.0
        assert choice is not None, f"{flight.name} is nowhere"
        if flight.handing is not None:
            flight.handing.cancel()
            flight.handing = None
        self.policy.finished(flight.ask, choice)
        self.loads.finished(flight.name, choice, now)
        if self.admission is not None:
            self.admission.finished(flight.name, tokens, now)
        del self._flights[flight.name]
        if not self._flights:
            self._presumed.clear()
        self._at[choice.prefill] -= 1
        if choice.decode != choice.prefill:
            self._at[choice.decode] -= 1
        flight.choice = None

    def _ended(self, choice: Choice) -> None:
        """Something is over there: there may be room now, or the last one has left."""
        if not self._at.get(choice.prefill):
            self.depart(choice.prefill)
        if choice.decode != choice.prefill:
            self.depart(choice.decode)
        if len(self.turns):
            self._ask_later(ASK_AGAIN_S)

    def _refuse(self, flight: Flight, refusal: Refusal) -> None:
        self.turns.leave(flight)
        self._over(flight, refusal.code)
        flight.refused(refusal)

    def _over(self, flight: Flight, outcome: str) -> None:
        job, record = flight.job, flight.record
        job.phase = Phase.DONE
        self._counts.add("outcomes", outcome)
        if record is not None:
            record.outcome, record.first_s, record.computed_s = outcome, flight.first_s, flight.computed_s
            record.answered_tokens, record.cached_tokens = job.answered_tokens, job.cached_tokens
            record.ended_s = self._timers.time()

    def _ask_for_the_rest(self, flight: Flight) -> None:
        """What was answered already is a part of the prompt for whoever goes on."""
        answered, whole = flight.job.answered_tokens, flight.asked
        if answered:
            tokens, left = whole.tokens + answered, max(whole.output_tokens - answered, 1)
            flight.ask = flight.job.ask = replace(whole, tokens=tokens, output_tokens=left)

    # ---- turns

    def _wait(self, flight: Flight, choice: Choice | None) -> bool:
        """Have it wait for its turn; False if it was refused, as there are too many."""
        ask, turns = flight.ask, self.turns
        if turns.is_full():
            loser = turns.giving_way(ask.tenant) or flight
            self._counts.add("refused", "waiting")
            self._refuse(loser, Refusal(429, "overloaded", "too many requests wait", RETRY_S))
            if loser is flight:
                return False
        cached = choice.cached_tokens + choice.fetched_tokens if choice is not None else 0
        turns.push(flight, work_tokens(ask.tokens - cached, ask.output_tokens), self._timers.time())
        flight.job.phase = Phase.WAITING
        deadline_s = turns.deadline_s()
        if deadline_s is not None:
            self._ask_later(max(deadline_s - self._timers.time(), 0.0))
        return True

    def _ask_again(self, model: str) -> None:
        """Those who wait, in the order that is fair, until one has to wait on."""
        if self._asks:  # from within, by somebody who was sent or refused just now
            self._ask_later(ASK_AGAIN_S)
            return
        self._asks = True
        try:
            while len(self._flights) < self._limits.requests:
                flight = self.turns.pop(model, self._timers.time())
                if flight is None:
                    return
                if not self._route(flight):
                    if flight.waits:
                        self.turns.put_back(flight)
                    return
        finally:
            self._asks = False

    def _ask_later(self, after_s: float) -> None:
        when_s = self._timers.time() + after_s
        if when_s < self._alarm_s:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_s, self._alarm = when_s, self._timers.call_later(after_s, self._wake)

    def _wake(self) -> None:
        self._alarm, self._alarm_s = None, float("inf")
        now = self._timers.time()
        for flight in self.turns.late(now):
            alive = any(it.alive and it.model == flight.ask.model for it in self.fleet.instances.values())
            self._counts.add("refused", "late")
            self._refuse(flight, Refusal(429 if alive else 503, "overloaded", "it waited too long", RETRY_S))
        for model in self.turns.models():
            self._ask_again(model)
        deadline_s = self.turns.deadline_s()
        if deadline_s is not None:
            self._ask_later(max(deadline_s - now, ASK_AGAIN_S))

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
        if len(self.turns):
            self._ask_later(ASK_AGAIN_S)

    def heard(self, message: Published) -> None:
        """Another Conductor's loads."""
        self.loads.heard(message, self._timers.time())

    def depart(self, number: int) -> None:
        """Let an instance go that was unregistered, once nothing of ours is under way there."""
        if not self._at.get(number) and self._roster.leaving(number):
            self._roster.release(number)

    def _leaving(self, number: int) -> None:
        """Not at once: whoever unregistered it may want to know what it was."""
        self._timers.call_later(0.0, partial(self.depart, number))

    def _joined(self, number: int) -> None:
        spec = self._roster.spec(number)
        self._labels[number] = spec.name.encode(), (spec.node or "").encode()
        self._headers_made.clear()
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
        self._labels.pop(number, None)
        self._at.pop(number, None)

    def state(self) -> dict[str, Any]:
        """See `parts.Brain`."""
        now = self._timers.time()
        self.loads.refresh(now)
        return {
            "policy": self.policy.name,
            "under_way": len(self._flights),
            "waiting": self.turns.tenants(),
            "instances": [
                self._tallies.state(it, self._at.get(it, 0), self.choosing.health, now) for it in self.fleet.instances
            ],
        }


def _rejection(verdict: Verdict) -> Refusal:
    """What a client is told of a verdict."""
    if verdict.after_s is None:
        return Refusal(429, "slo_unreachable", "no instance would meet its latency target, even if idle")
    return Refusal(429, "overloaded", "its latency target cannot be met now", max(verdict.after_s, ASK_AGAIN_S))
