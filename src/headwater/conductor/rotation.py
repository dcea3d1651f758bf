"""Where requests go by a policy that looks at nothing: to one instance after the other, in as little time as can be.

Theory of operation. A request is a Ride, from `take` until it has ended or was refused; the same object is what
`explained` tells of it afterwards, without the job. Each model has a line of its instances, in the order of their
numbers, as `core.rivals.RoundRobin` has them, of which each takes its turn:

    take      the next that is alive, not draining, large enough, and not left out        -> sent
              nobody, but somebody was there a moment ago: it waits (`nobody`)            -> sent, refused or dropped
    lost      the next one that it was not lost with; `retries` times                     -> sent, or refused
    finished  counted

Of instances with roles, one after the other computes and one after the other answers. There is no admission, no load,
no key: what is counted here are requests, and where they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.conductor.asking import tokens_of
from headwater.conductor.counts import Counts
from headwater.conductor.earning import Earning
from headwater.conductor.headers import said
from headwater.conductor.job import ANSWERING, DONE, SENT, WAITING, How, Job, Refusal, Refused, Sent, Target
from headwater.conductor.loads import Loads
from headwater.conductor.nobody import GRACE_AGAIN_S, RETRY_S, refusal_of
from headwater.conductor.patience import patience_s
from headwater.conductor.registry import Roster
from headwater.conductor.signals import Signals
from headwater.conductor.tallies import Tallies
from headwater.conductor.timers import Timer, Timers
from headwater.core.loads import LoadBook, Published
from headwater.core.policies import POLICIES
from headwater.core.rates import USUAL
from headwater.fleet import Instance, Parts, Role
from headwater.fleetfile.model import FleetFile

BOTH, PREFILL, DECODE = Role.BOTH, Role.PREFILL, Role.DECODE


def suffices(file: FleetFile) -> bool:
    """Whether nothing needs to be looked at: neither for the policy, nor for what was promised to anybody."""
    about = file.conductor
    if getattr(POLICIES[about.policy], "needs_loads", True):
        return False
    slos = [file.slo, *(it.slo for it in file.tenants)]
    return not about.admission or all(it.ttft_s is None and it.tpot_s is None for it in slos)


class Ride(msgspec.Struct, eq=False):
    """One request. Times are of the loop's clock."""

    job: Job | None
    """None once it is over: nothing of a prompt is remembered."""
    sent: Sent | None
    refused: Refused | None
    request: str
    model: str
    tenant: str
    tokens: int
    counted: How
    arrived_s: float
    routed_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    at: Target | None = None
    """None while it is at no instance."""
    tries: list[list[str]] = msgspec.field(default_factory=list)
    """The names of the two instances, and why it was lost there."""
    excluded: set[int] | None = None
    waits: bool = False
    answered: bool = False
    outcome: str = "waiting"
    answered_tokens: int = 0
    cached_tokens: int | None = None

    def told(self) -> dict[str, Any]:
        """As `explaining` tells it; there are no candidates and no seconds."""
        took: dict[str, Any] = {}
        if self.first_s:
            took["first_token_s"] = self.first_s - self.routed_s
            if self.ended_s and self.answered_tokens > 1:
                took["per_token_s"] = (self.ended_s - self.first_s) / (self.answered_tokens - 1)
        if self.ended_s:
            took["whole_s"] = self.ended_s - self.arrived_s
            took["answered_tokens"] = self.answered_tokens
            took["cached_tokens"] = self.cached_tokens
        tries = [
            {"instance": it[0], "decode": it[1], "candidates": []} | ({"lost": it[2]} if len(it) > 2 else {})
            for it in self.tries
        ]
        return {
            "request": self.request,
            "model": self.model,
            "tenant": self.tenant,
            "prompt_tokens": self.tokens,
            "counted": str(self.counted),
            "outcome": self.outcome,
            "tries": tries,
            "took": took,
        }


class Line:
    """One model's instances and whose turn was last, by index: of those that compute, and of those that only answer."""

    __slots__ = ("at", "decode_at", "instances")

    def __init__(self, instances: list[Instance], last: int) -> None:
        """`last` is the number of the instance that was chosen last."""
        self.instances = instances
        self.at = self.decode_at = sum(it.number <= last for it in instances) - 1

    def next(self, tokens: int, excluded: set[int] | None) -> Instance | None:
        """Who computes a prompt of so many tokens, or does all of it."""
        instances, at = self.instances, self.at
        for _ in instances:
            at += 1
            if at >= len(instances):
                at = 0
            it = instances[at]
            if not it.alive or it.draining or it.capacity_tokens < tokens or it.role is DECODE:
                continue
            if excluded is None or it.number not in excluded:
                self.at = at
                return it
        return None

    def next_decode(self, tokens: int, excluded: set[int] | None) -> Instance | None:
        """Who answers what another has computed."""
        instances = self.instances
        for step in range(1, len(instances) + 1):
            at = (self.decode_at + step) % len(instances)
            it = instances[at]
            able = it.alive and not it.draining and it.role is not PREFILL and it.capacity_tokens >= tokens
            if able and (excluded is None or it.number not in excluded):
                self.decode_at = at
                return it
        return None


class Rotation:
    """See `parts.Brain`. One to a worker, called in its loop only."""

    def __init__(
        self, file: FleetFile, roster: Roster, counts: Counts, timers: Timers, *, name: str, serial: int = 0
    ) -> None:
        """`name` and `serial` as in `FleetBrain`: other Conductors are told of no loads."""
        about = file.conductor
        self._limits, self._retries, self._explained = about.limits, about.retries, about.explained
        self._wait_s = about.times.wait_s
        self._roster, self._counts, self._numbers, self._timers = roster, counts, counts.numbers, timers
        self.loads = Loads(LoadBook(name, serial=serial), roster)
        self.earning = Earning(roster.instances())
        self._tallies = Tallies(counts, roster)
        self._rides: dict[str, Ride] = {}
        """Those that are at instances, by their jobs' ids."""
        self._waiting: dict[str, Ride] = {}
        self._memory: OrderedDict[str, Ride] = OrderedDict()
        self._at: dict[int, int] = {}
        self._lines: dict[str, Line] = {}
        self._last: dict[str, int] = {}
        self._targets: dict[tuple[int, int], tuple[Target, tuple[str, str]]] = {}
        self._alarm: Timer | None = None
        roster.watch(self._joined, self._left, self._leaving)

    def __repr__(self) -> str:
        return f"Rotation({len(self._rides)} under way, {len(self._waiting)} wait)"

    @property
    def under_way(self) -> int:
        """How many requests are at instances."""
        return len(self._rides)

    # ---- requests

    def take(self, job: Job, sent: Sent, refused: Refused) -> None:
        """See `parts.Brain`."""
        if len(self._rides) >= self._limits.requests:
            self._counts.add("limited", "requests")
            refused(job, Refusal(503, "overloaded", "too many requests are in progress", RETRY_S))
            return
        parsed, tokenised = job.parsed, job.tokenised
        how = tokenised.how if tokenised is not None else How.NONE
        ride = Ride(job, sent, refused, job.id, parsed.model, job.tenant.name, tokens_of(job), how, job.arrived_s)
        memory = self._memory
        memory[job.id] = ride
        if len(memory) > self._explained:
            memory.popitem(last=False)
        self._route(ride, job, self._timers.time())

    def _route(self, ride: Ride, job: Job, now: float) -> None:
        """Send it, refuse it or have it wait."""
        line = self._lines.get(ride.model) or self._line(ride.model)
        excluded, earning = ride.excluded, self.earning
        # Nobody is turned away for how long a prompt was guessed to be.
        tokens = ride.tokens + job.answered_tokens if ride.counted is not How.NONE else 1
        if earning.earned and (slow := earning.slow(now)):
            excluded = slow | excluded if excluded is not None else slow
        it = line.next(tokens, excluded)
        if it is None and excluded is not ride.excluded:  # rather one that is slow to come back than nobody
            excluded = ride.excluded
            it = line.next(tokens, excluded)
        other = it if it is None or it.role is BOTH else line.next_decode(tokens, excluded)
        if it is None or other is None:
            self._nobody(ride, job, now)
            return
        if ride.waits:
            self._stop_waiting(ride)
        prefill, decode = it.number, other.number
        if earning.earned:
            earning.sent(prefill, decode, now)
        known = self._targets.get((prefill, decode))
        ride.at, names = known if known is not None else self._target(prefill, decode)
        ride.tries.append([*names])
        ride.routed_s, ride.first_s, ride.outcome = now, 0.0, "sent"
        self._rides[ride.request] = ride
        self._at[prefill] += 1
        if decode != prefill:
            self._at[decode] += 1
        job.phase, job.routed_s = SENT, now
        job.tries += 1
        assert ride.sent is not None, f"{ride.request} is over"
        ride.sent(job, ride.at)

    def drop(self, job: Job) -> None:
        """See `parts.Brain`."""
        ride = self._waiting.get(job.id)
        if ride is not None:
            self._stop_waiting(ride)
            self._over(ride, job, "dropped")

    def started(self, job: Job) -> None:
        """See `parts.Brain`."""
        ride = self._rides.get(job.id)
        if ride is None or ride.first_s or not job.parsed.stream:
            return
        now = ride.first_s = self._timers.time()
        if not ride.answered:
            ride.answered, job.first_s, job.phase = True, now, ANSWERING
            self._counts.observe("ttft_seconds", now - ride.arrived_s)

    def patience_s(self, job: Job) -> float:
        """See `parts.Brain`: nothing was learned, so as long as everything that was sent there takes a slow one."""
        ride = self._rides.get(job.id)
        assert ride is not None and ride.at is not None, f"{job.id} is nowhere"
        number = ride.at.prefill
        tokens = sum(it.tokens for it in self._rides.values() if it.at is not None and it.at.prefill == number)
        return patience_s(Parts(), USUAL, USUAL, tokens)

    def prefilled(self, job: Job, why: str, then: Callable[[], None]) -> None:
        """See `parts.Brain`; nobody looks where the KV is."""
        ride = self._rides.get(job.id)
        if ride is None or ride.at is None:
            return
        if why and self.earning.health is not None:
            self.earning.health.trouble(ride.at.prefill, why)
        then()

    def progressed(self, job: Job) -> None:
        """See `parts.Brain`."""

    def lost(self, job: Job, number: int, why: str, sent: Sent, refused: Refused) -> None:
        """See `parts.Brain`."""
        ride = self._rides.get(job.id)
        if ride is None:
            return
        if self.earning.health is not None:
            self.earning.health.trouble(number, why)
        at = self._land(ride)
        ride.tries[-1].append(why)
        ride.excluded = (ride.excluded or set()) | {number}
        ride.sent, ride.refused = sent, refused
        if len(ride.tries) > self._retries:
            self._refuse(ride, job, Refusal(502, "instance_lost", "the instances that served it failed", None))
        else:
            self._route(ride, job, self._timers.time())
        self._ended(at)

    def finished(self, job: Job, *, whole: bool) -> None:
        """See `parts.Brain`. Nothing if it is over already."""
        ride = self._rides.get(job.id)
        if ride is None:
            return
        at = self._land(ride)
        now = job.ended_s = self._over(ride, job, "whole" if whole else "cut")
        if ride.first_s or whole:
            steps = job.answered_tokens - 1
            if whole and ride.first_s and steps > 0 and job.parsed.n == 1 and ride.excluded is None:
                self._counts.observe("tpot_seconds", (now - ride.first_s) / steps)
            self._tallies.computed(at.prefill, ride.tokens, job.cached_tokens or 0, 0)
            if at.decode != at.prefill:
                self._tallies.computed(at.decode, 0, 0, 0)
        if not self._at[at.prefill] or at.decode != at.prefill:
            self._ended(at)

    def explained(self, request: str) -> dict[str, Any] | None:
        """See `parts.Brain`."""
        ride = self._memory.get(request)
        return ride.told() if ride is not None else None

    # ---- the end

    def _land(self, ride: Ride) -> Target:
        """It is at no instance any more; where it was."""
        at, ride.at = ride.at, None
        assert at is not None, f"{ride.request} is nowhere"
        del self._rides[ride.request]
        self._at[at.prefill] -= 1
        if at.decode != at.prefill:
            self._at[at.decode] -= 1
        return at

    def _over(self, ride: Ride, job: Job, outcome: str) -> float:
        job.phase, ride.outcome = DONE, outcome
        ride.answered_tokens, ride.cached_tokens = job.answered_tokens, job.cached_tokens
        ride.job = ride.sent = ride.refused = None
        self._numbers["outcomes", outcome] += 1
        now = ride.ended_s = self._timers.time()
        return now

    def _ended(self, at: Target) -> None:
        """The last one may have left an instance that is to go."""
        self.depart(at.prefill)
        if at.decode != at.prefill:
            self.depart(at.decode)

    def _refuse(self, ride: Ride, job: Job, refusal: Refusal) -> None:
        refused = ride.refused
        if ride.waits:
            self._stop_waiting(ride)
        self._over(ride, job, refusal.code)
        assert refused is not None, f"{ride.request} is over"
        refused(job, refusal)

    # ---- those who wait for somebody to come back

    def _nobody(self, ride: Ride, job: Job, now: float) -> None:
        instances, excluded = self._roster.instances().values(), ride.excluded or set()
        refusal = refusal_of(job, ride.tokens, instances, excluded, self.earning.health, now)
        if refusal is None and not ride.waits and len(self._waiting) >= self._limits.waiting:
            self._counts.add("limited", "waiting")
            refusal = Refusal(429, "overloaded", "too many requests wait", RETRY_S)
        if refusal is None and now - ride.arrived_s >= self._wait_s:
            self._counts.add("limited", "late")
            refusal = Refusal(503, "overloaded", "it waited too long", RETRY_S)
        if refusal is not None:
            self._refuse(ride, job, refusal)
            return
        ride.waits, job.phase = True, WAITING
        self._waiting[ride.request] = ride
        if self._alarm is None:
            self._alarm = self._timers.call_later(GRACE_AGAIN_S, self._ask_again)

    def _stop_waiting(self, ride: Ride) -> None:
        ride.waits = False
        del self._waiting[ride.request]

    def _ask_again(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        now = self._timers.time()
        for ride in list(self._waiting.values()):
            if len(self._rides) >= self._limits.requests:
                break
            if ride.job is not None and ride.waits:
                self._route(ride, ride.job, now)
        if self._waiting and self._alarm is None:
            self._alarm = self._timers.call_later(GRACE_AGAIN_S, self._ask_again)

    # ---- instances

    def _line(self, model: str) -> Line:
        """Made anew when instances have come or gone; nobody's for a model that there is not."""
        instances = [it for it in self._roster.instances().values() if it.model == model]
        line = Line(sorted(instances, key=lambda it: it.number), self._last.get(model, -1))
        for it in instances:
            self._at.setdefault(it.number, 0)
        if instances:
            self._lines[model] = line
        return line

    def _target(self, prefill: int, decode: int) -> tuple[Target, tuple[str, str]]:
        spec, names = self._roster.spec(decode), self._roster.names
        first = names[prefill].encode() if prefill != decode else b""
        lines = said(spec.name.encode(), "device=0", first, (spec.node or "").encode())
        made = Target(prefill, decode, lines), (names[prefill], names[decode])
        self._targets[prefill, decode] = made
        return made

    def told(self, number: int, signals: Signals, asked_s: float) -> None:
        """What an engine said of itself."""
        it = self._roster.instances().get(number)
        if it is None:
            return
        if signals.capacity_tokens is not None and self._roster.spec(number).capacity_tokens is None:
            it.capacity_tokens = signals.capacity_tokens
        if signals.waiting is not None and signals.running is not None:
            it.waiting_requests, it.running_requests = signals.waiting, signals.running

    def changed(self, number: int, alive: bool) -> None:
        """An instance has gone or has come back; `alive` is written already."""
        self._counts.add("instances_changed", "back" if alive else "out")
        self.earning.changed(number, alive, self._timers.time())
        if alive and self._waiting:
            self._ask_again()

    def heard(self, message: Published) -> None:
        """Another Conductor's loads, which matter to nobody here."""

    def depart(self, number: int) -> None:
        """Let an instance go that was unregistered, once nothing of ours is under way there."""
        if not self._at.get(number) and self._roster.leaving(number):
            self._roster.release(number)

    def _leaving(self, number: int) -> None:
        self._timers.call_later(0.0, lambda: self.depart(number))

    def _joined(self, number: int) -> None:
        self._forget_lines()

    def _left(self, number: int) -> None:
        self.earning.left(number)
        self._tallies.left(number)
        self._at.pop(number, None)
        self._forget_lines()

    def _forget_lines(self) -> None:
        for model, line in self._lines.items():
            self._last[model] = line.instances[line.at].number if line.at >= 0 else -1
        self._lines.clear()
        self._targets.clear()

    def state(self) -> dict[str, Any]:
        """See `parts.Brain`."""
        waiting: dict[str, int] = {}
        now = self._timers.time()
        for ride in self._waiting.values():
            waiting[ride.tenant] = waiting.get(ride.tenant, 0) + 1
        health = self.earning.health
        return {
            "policy": "round_robin",
            "under_way": len(self._rides),
            "waiting": waiting,
            "instances": [self._tallies.state(it, self._at.get(it, 0), health, now) for it in self._roster.instances()],
        }
