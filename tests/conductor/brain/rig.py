"""A brain with a clock that tests move, a sight that believes what it is told, a fleet that serves by step times."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import count
from typing import Any

from headwater.conductor.brain import FleetBrain
from headwater.conductor.counts import Counts
from headwater.conductor.http.exchange import Headers, Origin, Request, Sink
from headwater.conductor.job import How, Job, Kind, Lens, Parsed, Refusal, Target, Tokenised
from headwater.conductor.registry import Roster
from headwater.core.rates import Rates
from headwater.enginetimes import EngineTimes
from headwater.fleet import Held, Place
from headwater.fleetfile.model import ConductorSpec, FleetFile, InstanceSpec, Limits, Slo, TenantSpec, Times
from headwater.types import Tier
from tests.conductor.relays import headers_in

TIMES = EngineTimes(0.010, 1e-4, decode_fixed_s=5e-3, decode_request_s=1e-4, decode_kv_s=1e-8, step_tokens=4096)
BLOCK = 16
NOBODY = TenantSpec("")


class Due:
    """A timer of the clock below."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """See `Timer`."""
        self.call = None


class MadeTimers:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._order = count()
        self._due: list[tuple[float, int, Due]] = []

    def time(self) -> float:
        """See `Timers`."""
        return self.now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Due:
        """See `Timers`."""
        it = Due(callback)
        heapq.heappush(self._due, (self.now + max(delay, 0.0), next(self._order), it))
        return it

    def step(self) -> bool:
        """The next thing that is due happens; False if there is none."""
        while self._due:
            when, _, it = heapq.heappop(self._due)
            if it.call is not None:
                self.now = max(self.now, when)
                call, it.call = it.call, None
                call()
                return True
        return False

    def run(self, seconds: float) -> None:
        """So much time passes."""
        until = self.now + seconds
        while True:
            while self._due and self._due[0][2].call is None:
                heapq.heappop(self._due)
            if not self._due or self._due[0][0] > until:
                break
            self.step()
        self.now = until

    def pending(self) -> int:
        """How many calls are due."""
        return sum(it.call is not None for _, _, it in self._due)


class MadeSight:
    """Knows what was sent where, and nothing else; keys are of one lens, BLOCK tokens each."""

    def __init__(self) -> None:
        self.places: dict[bytes, set[int]] = {}
        self.extra: Held = {}
        self.forgotten: list[int] = []
        self.most: int | None = None
        self.in_store: bool | None = None
        self._known: tuple[object, str, Sequence[Lens]] = (None, "", ())

    def lenses(self, model: str, salt: str, ids: Sequence[int], *, again: bool = False) -> Sequence[Lens]:
        """See `Sight`."""
        if self._known[0] is ids and self._known[1] == model + salt:
            return self._known[2]
        digest, keys = sha256(f"{model}/{salt}".encode()), []
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            digest.update(repr(ids[at : at + BLOCK]).encode())
            keys.append(digest.digest()[:16])
        self._known = ids, model + salt, [Lens(keys, BLOCK)]
        return self._known[2]

    def held(self, model: str, lenses: Sequence[Lens]) -> Held:
        """See `Sight`."""
        found = dict(self.extra)
        keys = lenses[0].keys
        if keys:
            for number in self.places.get(keys[0], ()):
                until = 0
                while until < len(keys) and number in self.places.get(keys[until], ()):
                    until += 1
                found[Place(Tier.DEVICE, number)] = until * BLOCK
        return found

    def expect(self, number: int, lenses: Sequence[Lens]) -> None:
        """See `Sight`."""
        for lens in lenses:
            for key in lens.keys:
                if self.most is not None and len(self.places) >= self.most:
                    self.places.pop(next(iter(self.places)))
                self.places.setdefault(key, set()).add(number)

    def unexpect(self, number: int, lenses: Sequence[Lens]) -> None:
        """See `Sight`."""
        for lens in lenses:
            for key in lens.keys:
                self.places.get(key, set()).discard(number)

    def stored(self, number: int, model: str, lenses: Sequence[Lens]) -> bool | None:
        """See `Sight`."""
        return self.in_store

    def left(self, number: int) -> None:
        """See `Sight`."""
        self.forgotten.append(number)
        for places in self.places.values():
            places.discard(number)

    def state(self) -> dict[str, Any]:
        """See `Sight`."""
        return {}


class MadeExchange:
    """What of an exchange the brain looks at."""

    def __init__(self, body: bytes, headers: Headers) -> None:
        self.request = Request("POST", "/v1/completions", "", headers, body, "127.0.0.1", dict(headers))
        self.started = self.closed = False


def headers_of(target: Target) -> dict[bytes, bytes]:
    """The headers of a target."""
    return dict(headers_in(target.lines))


class Client:
    """One request, and what the brain said of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.targets: list[Target] = []
        self.refusal: Refusal | None = None
        self.on_sent: Callable[[Client], None] = lambda it: None

    def sent(self, job: Job, target: Target) -> None:
        """It was sent."""
        assert self.refusal is None and job is self.job
        self.targets.append(target)
        self.on_sent(self)

    def refused(self, job: Job, refusal: Refusal) -> None:
        """It was refused."""
        assert self.refusal is None and job is self.job
        self.refusal = refusal

    @property
    def at(self) -> int:
        """Where it was sent last."""
        return self.targets[-1].prefill

    @property
    def waits(self) -> bool:
        """Whether nothing was said yet."""
        return not self.targets and self.refusal is None


class BrainRig:
    """A brain over so many instances, each of which serves what it gets (`serve`), or nothing (`quiet`)."""

    def __init__(
        self,
        count_: int = 2,
        *,
        times: EngineTimes = TIMES,
        admission: bool = True,
        limits: Limits | None = None,
        wait_s: float = 30.0,
        tenants: tuple[TenantSpec, ...] = (),
        slo: Slo | None = None,
        capacity_tokens: int | None = 1 << 20,
        quiet: bool = False,
        retries: int = 2,
        explained: int = 1000,
        policy: str = "headwater",
        name: str = "a",
        **brain: Any,
    ) -> None:
        self.timers = brain.pop("timers", None) or MadeTimers()
        brain.setdefault("prior", Rates(times, measured=True))
        about = ConductorSpec(
            policy=policy,
            admission=admission,
            retries=retries,
            explained=explained,
            limits=limits or Limits(),
            times=Times(wait_s=wait_s),
        )
        specs = tuple(spec(f"i{number}", capacity_tokens=capacity_tokens) for number in range(count_))
        self.file = FleetFile("fleet.yaml", (), specs, about, slo or Slo(), tenants)
        self.roster, self.sight, self.counts = Roster(self.file, times), MadeSight(), Counts()
        self.brain = FleetBrain(self.file, self.roster, self.sight, self.counts, self.timers, name=name, **brain)
        self.times, self.quiet = times, quiet
        self.free_s: dict[int, float] = {}
        self.computed: dict[int, list[int]] = {}
        """The tokens that each instance computed, by request."""
        self.truly: dict[int, set[bytes]] = {}
        self.decoding: dict[int, int] = {}
        self._names = count()

    def job(
        self,
        ids: Sequence[int] | None,
        *,
        tenant: TenantSpec = NOBODY,
        output: int = 20,
        stream: bool = True,
        headers: Headers | None = None,
        body: bytes = b"{}",
        **parsed: Any,
    ) -> Job:
        """A job as `app` makes it."""
        how = How.LOCAL if ids is not None else How.NONE
        asked = Parsed(Kind.COMPLETION, {}, parsed.pop("model", "m"), stream=stream, max_tokens=output, **parsed)
        exchange: Any = MadeExchange(body, headers or [])
        name = f"r{next(self._names)}"
        return Job(name, exchange, tenant, asked, self.timers.time(), tokenised=Tokenised(ids, how))

    def take(self, ids: Sequence[int] | None, **job: Any) -> Client:
        """A request comes."""
        client = Client(self.job(ids, **job))
        if not self.quiet:
            client.on_sent = self._serve
        self.brain.take(client.job, client.sent, client.refused)
        return client

    def lose(self, client: Client, why: str = "refused") -> None:
        """Its instance fails it."""
        self.brain.lost(client.job, client.at, why, client.sent, client.refused)

    def start(self, client: Client) -> None:
        """Its first token comes."""
        client.job.answered_tokens = max(client.job.answered_tokens, 1)
        self.brain.started(client.job)

    def finish(self, client: Client, tokens: int = 20, *, whole: bool = True) -> None:
        """It ends."""
        client.job.answered_tokens = tokens
        self.brain.finished(client.job, whole=whole)

    def _serve(self, client: Client) -> None:
        """Prefill one after the other, but everything cached in one batch; decode together."""
        job, number = client.job, client.at
        ids = job.tokenised.ids if job.tokenised is not None else None
        tokens = job.ask.tokens if job.ask is not None else 1
        keys = job.lenses[0].keys if job.lenses else ()
        mine, cached = self.truly.setdefault(number, set()), 0
        while cached < len(keys) and keys[cached] in mine:
            cached += 1
        mine.update(keys)
        computed = max(tokens - cached * BLOCK, 1) if ids is not None else tokens
        self.computed.setdefault(number, []).append(computed)
        job.cached_tokens = tokens - computed
        busy_s = max(self.free_s.get(number, 0.0) - self.timers.now, 0.0)
        own_s = self.times.prefill_s(computed) - (self.times.prefill_fixed_s if busy_s else 0.0)
        self.free_s[number] = self.timers.now + busy_s + own_s
        self.timers.call_later(busy_s + own_s, lambda: self._first(client, number))

    def _first(self, client: Client, number: int) -> None:
        self.decoding[number] = self.decoding.get(number, 0) + 1
        self.start(client)
        tokens = client.job.parsed.max_tokens or 20
        step_s = self.times.decode_s(self.decoding[number], self.decoding[number] * 1000)
        self.timers.call_later(step_s * (tokens - 1), lambda: self._end(client, number, tokens))

    def _end(self, client: Client, number: int, tokens: int) -> None:
        self.decoding[number] -= 1
        self.finish(client, tokens)

    def is_still(self) -> bool:
        """Whether all books are empty."""
        brain = self.brain
        brain.loads.refresh(self.timers.now + 1.0)
        totals = [
            (it.waiting_requests, it.waiting_tokens, it.running_requests, it.running_tokens)
            for it in brain.fleet.instances.values()
        ]
        serving = brain.admission.serving if brain.admission is not None else 0
        idle = all(not any(each) for each in totals)
        return idle and not brain.under_way and not len(brain.turns) and not serving


def spec(name: str, *, url: str | None = None, served_name: str = "m", **more: Any) -> InstanceSpec:
    """An instance of a test."""
    return replace(InstanceSpec(name, "model", served_name, url=url or "http://127.0.0.1:9"), **more)


def prompt(seed: int, tokens: int = 900) -> list[int]:
    """Ids of a prompt of its own."""
    return [seed * 100_000 + at for at in range(tokens)]


class MadeUpstreams:
    """Instances that answer GETs as a test says."""

    def __init__(self, timers: MadeTimers) -> None:
        self.timers = timers
        self.answers: dict[int, dict[str, tuple[int, bytes] | str | None]] = {}
        """By port and path: status and body, why it is lost, or None for no answer at all."""
        self.asked: list[tuple[float, int, str]] = []
        self.open = self.most = self.aborted = 0
        self.after_s = 0.01

    def call(
        self, origin: Origin, method: str, path: str, headers: Headers, body: bytes, sink: Sink, *, first_s: float
    ) -> MadeCall:
        """See `Upstreams`."""
        assert method == "GET" and first_s > 0
        self.asked.append((self.timers.now, origin.port, path))
        self.open += 1
        self.most = max(self.most, self.open)
        call = MadeCall(self, sink, self.answers.get(origin.port, {}).get(path, (200, b"")))
        self.timers.call_later(self.after_s, call.answer)
        return call

    def close(self, origin: Origin) -> None:
        """See `Upstreams`."""


class MadeCall:
    """One GET."""

    def __init__(self, upstreams: MadeUpstreams, sink: Sink, said: tuple[int, bytes] | str | None) -> None:
        self._upstreams, self._sink, self._said = upstreams, sink, said
        self._over = False

    def answer(self) -> None:
        """What the instance does."""
        if self._over or self._said is None:
            return
        if isinstance(self._said, str):
            self._end()
            self._sink.lost(self._said, sent=False)
            return
        status, body = self._said
        self._sink.head(status, [])
        for at in range(0, len(body), 1 << 16):
            if not self._over:
                self._sink.data(body[at : at + (1 << 16)])
        if not self._over:
            self._end()
            self._sink.end()

    def _end(self) -> None:
        self._over = True
        self._upstreams.open -= 1

    def pause(self) -> None:
        """See `Call`."""

    def resume(self) -> None:
        """See `Call`."""

    def abort(self) -> None:
        """See `Call`."""
        if not self._over:
            self._end()
            self._upstreams.aborted += 1
