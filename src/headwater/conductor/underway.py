"""The requests that are at instances, and all the books that they are in.

Theory of operation. Of a flight that was sent:

    send      in all books: loads, policy, admission, sight, who computes alike; then its `sent` is called
    begin     it decodes from now on, as far as we know. A request whose answer comes in one piece tells nobody when its
              first token came: it is taken to have come when it was said to
    land      out of all books, once for each `send`
    settle    nothing more is said of where it was: who has left, and has nothing under way any more, is let go

The core's parts are called as the simulator calls them, in the same order.
"""

from __future__ import annotations

from headwater.conductor.choosing import Choosing, Chosen
from headwater.conductor.counts import Counts
from headwater.conductor.explaining import Explained, Try
from headwater.conductor.flight import Flight
from headwater.conductor.headers import Said
from headwater.conductor.job import SENT, Job, Target
from headwater.conductor.loads import Loads
from headwater.conductor.orders import Orders, Prefetch
from headwater.conductor.parts import Sight
from headwater.conductor.presumed import Presumed
from headwater.conductor.registry import Roster
from headwater.conductor.timers import Timers
from headwater.core.admission import Admission
from headwater.fleet import Choice, Role


class UnderWay:
    """Those of one worker. Whoever calls `send` has seen to it that the flight waits nowhere."""

    def __init__(
        self,
        roster: Roster,
        sight: Sight,
        counts: Counts,
        timers: Timers,
        choosing: Choosing,
        loads: Loads,
        admission: Admission | None,
        explanations: Explained,
        prefetch: Prefetch | None,
    ) -> None:
        self._roster, self._sight, self._counts, self._timers = roster, sight, counts, timers
        self._choosing, self._policy, self._fleet = choosing, choosing.policy, choosing.fleet
        self._loads, self._admission, self._explanations = loads, admission, explanations
        self._orders = Orders(prefetch, counts) if prefetch is not None else None
        self._said = Said()
        self._presumed = Presumed(timers, self._presume)
        self.flights: dict[str, Flight] = {}
        """By name; only to be read."""
        self._at: dict[int, int] = {}
        """How many of them are at an instance, in either role."""

    def __repr__(self) -> str:
        return f"UnderWay({len(self.flights)} requests)"

    def __len__(self) -> int:
        return len(self.flights)

    def find(self, job: Job) -> Flight | None:
        """A job's flight; None if it is at no instance."""
        return self.flights.get(job.ask.request) if job.ask is not None else None

    def at(self, number: int) -> int:
        """How many are at an instance, in either role."""
        return self._at.get(number, 0)

    def send(self, flight: Flight, it: Try, chosen: Chosen, now: float) -> None:
        """It goes where `it` says."""
        job, ask, choice, fleet = flight.job, flight.ask, it.choice, self._fleet
        target = fleet.instances[choice.prefill]
        flight.queued = target.waiting_requests, target.waiting_tokens
        flight.choice, flight.first_s, flight.counted_tokens = choice, 0.0, 0
        flight.handed, flight.computed_s, flight.taught = False, 0.0, False
        if flight.record is not None:
            flight.record.routed_s, flight.record.outcome = now, "sent"
            it.gathered, it.needless, it.output_tokens = chosen.gathered, chosen.needless, ask.output_tokens
            self._explanations.chose(flight.record, it, job.held, fleet, self._policy, chosen.hidden, chosen.weighed)
        self._loads.routed(ask, choice, now)
        self._policy.routed(ask, choice, fleet)
        if it.verdict is not None and self._admission is not None:
            self._admission.admitted(ask, choice, it.verdict, fleet)
        self._sight.expect(choice.prefill, job.lenses)
        self._choosing.sent(flight, choice, now)
        self.flights[flight.name] = flight
        at = self._at
        at[choice.prefill] = at.get(choice.prefill, 0) + 1
        if choice.decode != choice.prefill:
            at[choice.decode] = at.get(choice.decode, 0) + 1
        if choice.prefill == choice.decode and target.role is not Role.BOTH:
            self._counts.add("unpaired", "needless" if chosen.needless else "alone")
        if self._orders is not None:
            self._orders.sent(job, choice, target, now)
        if not job.parsed.stream:
            flight.presumed_s = now + choice.parts.ttft_s
            self._presumed.add(flight.name, flight.presumed_s, now)
        job.choice, job.phase, job.routed_s = choice, SENT, now
        job.tries += 1
        flight.sent(job, Target(choice.prefill, choice.decode, self._said.of(choice)))

    def begin(self, flight: Flight, now: float) -> None:
        """It decodes from now on, as far as we know."""
        flight.presumed_s, choice = 0.0, flight.choice
        assert choice is not None, f"{flight.name} is nowhere"
        self._loads.prefilled(flight.name, choice, now)
        self._choosing.alike.started(flight.name, now)
        it = self._fleet.instances[choice.decode]
        flight.decoders = it.running_requests + 1, it.running_tokens + flight.ask.tokens

    def _presume(self, name: str, when_s: float) -> None:
        """A first token is taken to have come, unless its request has ended, or was sent anew since."""
        flight = self.flights.get(name)
        if flight is not None and flight.presumed_s == when_s:
            self.begin(flight, self._timers.time())

    def land(self, flight: Flight, tokens: int | None, now: float) -> None:
        """Take it out of all books; `tokens` as in `Admission.finished`."""
        choice, flight.presumed_s = flight.choice, 0.0
        assert choice is not None, f"{flight.name} is nowhere"
        if flight.handing is not None:
            flight.handing.cancel()
            flight.handing = None
        self._policy.finished(flight.ask, choice)
        self._loads.finished(flight.name, choice, now)
        if self._admission is not None:
            self._admission.finished(flight.name, tokens, now)
        del self.flights[flight.name]
        if not self.flights:
            self._presumed.clear()
        self._at[choice.prefill] -= 1
        if choice.decode != choice.prefill:
            self._at[choice.decode] -= 1
        flight.choice = None

    def settle(self, choice: Choice) -> None:
        """Something has landed there, and its end was told to all: the last one may have left."""
        if not self._at.get(choice.prefill):
            self.depart(choice.prefill)
        if choice.decode != choice.prefill:
            self.depart(choice.decode)

    def depart(self, number: int) -> None:
        """Let an instance go that was unregistered, once nothing of ours is under way there."""
        if not self._at.get(number) and self._roster.leaving(number):
            self._roster.release(number)

    def joined(self, number: int) -> None:
        """An instance is there."""
        self._said.joined(number, self._roster.spec(number))

    def left(self, number: int) -> None:
        """Its number may be given to another."""
        self._said.left(number)
        self._at.pop(number, None)
