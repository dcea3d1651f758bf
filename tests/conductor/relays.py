"""A relay between fake clients and fake engines, over real connections: what its tests have in common."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from headwater._kernels.events import Writer
from headwater.conductor import bodies
from headwater.conductor.counts import Counts
from headwater.conductor.http.exchange import Headers, Listener, Origin, Request
from headwater.conductor.http.upstream import UpstreamPool
from headwater.conductor.job import How, Job, Kind, Refusal, Refused, Sent, Target, Tokenised
from headwater.conductor.parts import Brain, Registry, Tenants
from headwater.conductor.relay import Relay
from headwater.fleet import Instance
from headwater.fleetfile.model import InstanceSpec, Limits, TenantSpec, Times
from tests.conductor.engine import Engine

DEADLINE_S = 10.0
PATHS = {Kind.CHAT: "/v1/chat/completions", Kind.COMPLETION: "/v1/completions"}
TIMES = Times(connect_s=2.0, first_s=5.0, silent_s=5.0)


class Client:
    """A fake `Exchange`: what was sent, and a client that can leave or read slowly."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started = self.closed = self.aborted = False
        self.status = 0
        self.headers: Headers = []
        self.sent: list[bytes] = []
        self.size_bytes = 0
        self.changed = asyncio.Event()
        self.listener: Listener | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.sent)

    @property
    def text(self) -> str:
        """All text of the first choice."""
        out = ""
        for event in self.events():
            for choice in event.get("choices") or ():
                out += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        return out

    def events(self) -> list[dict[str, Any]]:
        """The stream's events, without [DONE]; the stream is well formed."""
        parts = self.body.replace(b"\r\n", b"\n").split(b"\n\n")
        assert parts[-1] == b"", f"a torn event: {parts[-1][-80:]!r}"
        assert all(it.startswith((b"data: ", b":")) for it in parts[:-1]), parts
        return [json.loads(it[6:]) for it in parts[:-1] if it.startswith(b"data: ") and it != b"data: [DONE]"]

    @property
    def ended_well(self) -> bool:
        """One [DONE], at the end."""
        return self.closed and self.body.endswith(b"data: [DONE]\n\n") and self.body.count(b"data: [DONE]") == 1

    def watch(self, listener: Listener | None) -> None:
        self.listener = listener
        if listener is not None and self.closed:
            listener.gone()

    def answer(self, status: int, headers: Headers, body: bytes, lines: bytes = b"") -> None:
        assert not self.started, "an answer was sent twice"
        self.start(status, headers, lines)
        self.send(body)
        self.end()

    def start(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        assert not self.started, "an answer was sent twice"
        self.headers = [*headers, *headers_in(lines)]
        assert all(name == name.lower() for name, _ in self.headers)
        self.started = True
        self.status = status
        self.changed.set()

    def send(self, data: bytes) -> None:
        assert self.started, "a body without a head"
        if not self.closed:
            self.sent.append(data)
            self.size_bytes += len(data)
            self.changed.set()

    def channel(self) -> Writer:
        return Writer(Channel(self), -1)

    def end(self) -> None:
        self.closed = True
        self.changed.set()

    def abort(self) -> None:
        self.aborted = self.closed = True
        self.changed.set()

    def leave(self) -> None:
        """The client goes away."""
        self.closed = True
        if self.listener is not None:
            self.listener.gone()

    async def until(self, seen: Callable[[], object]) -> None:
        """Wait until something was sent that fits."""
        async with asyncio.timeout(DEADLINE_S):
            while not seen():
                self.changed.clear()
                await self.changed.wait()

    async def ended(self) -> None:
        """Wait for the end."""
        await self.until(lambda: self.closed)


def headers_in(lines: bytes) -> Headers:
    """Header lines, taken apart."""
    assert not lines or lines.endswith(b"\r\n")
    parts = [it.split(b": ", 1) for it in lines.split(b"\r\n")[:-1]]
    return [(name, value) for name, value in parts]


class Channel:
    """Takes chunks apart again."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def write(self, data: bytes) -> None:
        size, _, rest = data.partition(b"\r\n")
        assert rest[-2:] == b"\r\n", data
        assert int(size, 16) == len(rest) - 2, data
        self._client.send(rest[:-2])

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Brain_(Brain):
    """Sends to the instances in turn, as often as it is told to; says what it was told."""

    def __init__(self, targets: Sequence[Target], retries: int = 2) -> None:
        self.targets = list(targets)
        self.retries = retries
        self.told: list[str] = []
        self.holds = False
        """Whether those that are lost wait."""
        self.waiting: list[tuple[Sent, Refused]] = []
        self.patient_s = 60.0
        self.hands_over = True
        self.waiting_to_hand_over: Callable[[], None] | None = None

    def take(self, job: Job, sent: Sent, refused: Refused) -> None:
        sent(job, self.targets[0])

    def drop(self, job: Job) -> None:
        self.told.append("drop")

    def started(self, job: Job) -> None:
        self.told.append("started")

    def patience_s(self, job: Job) -> float:
        return self.patient_s

    def prefilled(self, job: Job, why: str, then: Callable[[], None]) -> None:
        self.told.append(f"prefilled {why}".rstrip())
        self.waiting_to_hand_over = then
        if self.hands_over:
            then()

    def progressed(self, job: Job) -> None:
        assert "finished" not in self.told[-1:], "told of a request that was over"

    def lost(self, job: Job, number: int, why: str, sent: Sent, refused: Refused) -> None:
        assert number == self.targets[0].decode
        self.told.append(f"lost {why}")
        self.targets.pop(0)
        self.retries -= 1
        if self.holds:
            self.waiting.append((sent, refused))
        elif self.targets and self.retries >= 0:
            sent(job, self.targets[0])
        else:
            refused(job, Refusal(502, "instance_lost", "the instances that served it failed"))

    def finished(self, job: Job, *, whole: bool) -> None:
        self.told.append("finished whole" if whole else "finished")

    def explained(self, request: str) -> dict[str, Any] | None:
        return None

    def state(self) -> dict[str, Any]:
        return {}


class Roster_(Registry):
    """Instances by number."""

    def __init__(self, engines: Sequence[Engine], **options: Any) -> None:
        self._ports = [it.port for it in engines]
        self.specs = [InstanceSpec(f"i{at}", "toy", "toy", **options) for at in range(len(engines))]

    def spec(self, number: int) -> InstanceSpec:
        return self.specs[number]

    def origin(self, number: int) -> Origin:
        return Origin("127.0.0.1", self._ports[number])

    def instances(self) -> Mapping[int, Instance]:
        return {}

    def by_name(self, name: str) -> int | None:
        return None


class Tenants_(Tenants):
    """Counts who left."""

    def __init__(self) -> None:
        self.left = 0
        self.tokens = 0

    def who(self, authorization: bytes | None) -> TenantSpec | None:
        return None

    def enter(self, tenant: TenantSpec, now: float) -> float | None:
        return None

    def used(self, tenant: TenantSpec, tokens: int, now: float) -> None:
        self.tokens += tokens

    def leave(self, tenant: TenantSpec) -> None:
        self.left += 1

    def salt(self, tenant: TenantSpec, salt: str) -> str:
        return salt


@dataclass
class House:
    """A relay with its engines."""

    engines: list[Engine]
    relay: Relay
    brain: Brain_
    tenants: Tenants_
    counts: Counts
    pool: UpstreamPool
    jobs: list[Job] = field(default_factory=list)

    def ask(self, kind: Kind = Kind.CHAT, headers: Headers | None = None, salt: str = "", **fields: Any) -> Client:
        """Send a request on its way."""
        if kind is Kind.CHAT:
            fields.setdefault("messages", [{"role": "user", "content": "hello there"}])
        else:
            fields.setdefault("prompt", "hello there")
        body = json.dumps({"model": "toy", **fields}).encode()
        told = [(b"content-type", b"application/json"), *(headers or [])]
        request = Request("POST", PATHS[kind], "", told, body, "", dict(told))
        parsed = bodies.read(request, Limits())
        client = Client(request)
        job = Job(f"r{len(self.jobs)}", client, TenantSpec("t"), parsed, 0.0, salt=salt)
        job.tokenised = Tokenised(None, How.NONE, "none")
        self.jobs.append(job)
        self.relay.start(job, self.brain.targets[0])
        return client

    def counted(self, name: str) -> dict[str, float]:
        """A counter's labels."""
        return {label: value for (known, label), value in self.counts.numbers.items() if known == name}

    async def settled(self) -> None:
        """Everything is over: nothing runs at any engine, and all was told once."""
        async with asyncio.timeout(DEADLINE_S):
            while self.relay.under_way or any(it.running for it in self.engines):
                await asyncio.sleep(0)
        assert self.tenants.left == len(self.jobs)
        assert sum("finished" in it for it in self.brain.told) == len(self.jobs), self.brain.told


@asynccontextmanager
async def house(
    count: int = 2,
    *,
    limits: Limits | None = None,
    times: Times = TIMES,
    migrate: bool = True,
    prefill: int | None = None,
    spec: Mapping[str, Any] | None = None,
    retries: int = 2,
    **options: Any,
) -> AsyncIterator[House]:
    """So many equal engines, and a relay before them; requests go to them in their order. `prefill`: by this one."""
    engines = [Engine(**options) for _ in range(count)]
    for it in engines:
        await it.start()
    counts, most = Counts(), limits or Limits()
    pool = UpstreamPool(most, times, counts)
    lines = b"x-headwater-instance: i\r\n"
    targets = [Target(at if prefill is None else prefill, at, lines) for at in range(count) if at != prefill]
    brain, tenants = Brain_(targets, retries), Tenants_()
    registry = Roster_(engines, **(spec or {}))
    relay = Relay(pool, registry, brain, tenants, counts, most, times, time.monotonic, migrate=migrate)
    try:
        yield House(engines, relay, brain, tenants, counts, pool)
    finally:
        await pool.stop()
        for it in engines:
            await it.stop()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """A test's coroutine, within a deadline."""

    async def within() -> None:
        async with asyncio.timeout(3 * DEADLINE_S):
            await coroutine

    asyncio.run(within())


async def straight(toy: Any, kind: Kind, fields: Mapping[str, Any], **options: Any) -> Client:
    """What one engine that never fails answers through the relay."""
    async with house(1, toy=toy, **options) as it:
        client = it.ask(kind, **fields)
        await client.ended()
        await it.settled()
        return client


def small(**limits: int) -> Limits:
    """Limits, but for these."""
    return replace(Limits(), **limits)
