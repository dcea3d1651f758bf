"""A parent's control API and its workers in one loop, with parts that say what a test likes."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from headwater.conductor.control.parent import Control
from headwater.conductor.control.worker import WorkerControl, socket_path
from headwater.conductor.counts import Counts
from headwater.conductor.http.exchange import Origin
from headwater.conductor.quota_page import QuotaPage
from headwater.conductor.tenants import KeyedTenants, key_row
from headwater.enginetimes import EngineTimes
from headwater.errors import RefusedError
from headwater.fleet import Instance
from headwater.fleetfile.model import ConductorSpec, InstanceSpec, TenantSpec
from headwater.metrics.conductor import render

WITHIN_S = 10.0


def drive(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine, and let what it closed be closed."""

    async def all_of_it() -> None:
        await asyncio.wait_for(main(), 60)
        await asyncio.sleep(0)

    asyncio.run(all_of_it())


async def until(fact: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Let the loop run until the fact holds."""
    deadline_s = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline_s, "not so in time"
        await asyncio.sleep(0)


class Brain:
    """What a test says."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.known: dict[str, dict[str, Any]] = {}

    def state(self) -> dict[str, Any]:
        return self.said

    def explained(self, request: str) -> dict[str, Any] | None:
        return self.known.get(request)


class Sight:
    """Says what it was asked."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.held: dict[str, dict[str, Any]] = {}

    def state(self) -> dict[str, Any]:
        return self.said

    def query(self, model: str, ids: Sequence[int], salt: str = "") -> dict[str, dict[str, Any]]:
        self.asked.append((model, tuple(ids), salt))
        return self.held

    def query_by_hash(self, hashes: Sequence[int | bytes]) -> dict[str, dict[str, Any]]:
        self.asked.append(tuple(hashes))
        return self.held


class Registry:
    """Instances by number, as `registry.Roster` has them."""

    def __init__(self) -> None:
        self.specs: dict[int, InstanceSpec] = {}
        self.here: dict[int, Instance] = {}

    def add(self, spec: InstanceSpec) -> int:
        number = len(self.specs)
        self.specs[number] = spec
        times = EngineTimes.__new__(EngineTimes)
        self.here[number] = Instance(number, times, 1000, model=spec.served_name)
        return number

    def spec(self, number: int) -> InstanceSpec:
        return self.specs[number]

    def origin(self, number: int) -> Origin:
        return Origin("127.0.0.1", 1)

    def instances(self) -> Mapping[int, Instance]:
        return self.here

    def by_name(self, name: str) -> int | None:
        return next((number for number, it in self.specs.items() if it.name == name), None)

    def register(self, spec: InstanceSpec, stamp: int) -> int:
        if len(self.specs) >= 4:
            raise RefusedError("instances", "at most 4", "one more", "unregister some")
        return self.add(spec)

    def unregister(self, name: str, stamp: int) -> int | None:
        number = self.by_name(name)
        if number is not None:
            self.here[number].draining = True
        return number


class Worker:
    """One worker with its parts."""

    def __init__(self, row: int, tenants: Sequence[TenantSpec]) -> None:
        self.row, self.ready, self.drained, self.left = row, True, 0, list[int]()
        self.brain, self.sight, self.registry, self.counts = Brain(), Sight(), Registry(), Counts()
        self.registry.add(InstanceSpec("i0", "m", "m"))
        self.page = QuotaPage.create(1)
        self.tenants = KeyedTenants(tenants, self.page, "a secret of the tests, long enough")
        self.control = WorkerControl(
            row,
            brain=self.brain,  # type: ignore[arg-type]
            sight=self.sight,  # type: ignore[arg-type]
            registry=self.registry,
            tenants=self.tenants,
            tokens=lambda: {"models": {"m": {"mode": "local", "verified": True}}},
            counts=self.counts,
            is_ready=lambda: self.ready,
            drain=self._drain,
            leaves=self.left.append,
        )

    def _drain(self) -> None:
        self.drained += 1


class Got(NamedTuple):
    """An answer."""

    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.text)
        assert isinstance(found, dict)
        return found

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Rig:
    """The parent and its workers."""

    def __init__(self, control: Control, workers: list[Worker], client: aiohttp.ClientSession) -> None:
        self.control, self.workers, self._client = control, workers, client
        self.drained = 0

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Got:
        """Ask the parent. A body that is no bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes | io.BytesIO) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._client.request(method, self.control.url + path, data=data, headers=named) as answer:
            return Got(answer.status, await answer.text(), answer.headers)

    async def heard(self) -> None:
        """Until every worker was heard."""
        await until(lambda: all(beat is not None for beat in self.control.workers.beats().values()))


@asynccontextmanager
async def rig(folder: Path, workers: int = 2, *, tenants: Sequence[TenantSpec] = (), **spec: Any) -> AsyncIterator[Rig]:
    """A parent on a free port with so many workers, all heard."""
    drains: list[int] = []
    control = Control(ConductorSpec(control="127.0.0.1:0", **spec), folder, render, lambda: drains.append(1))
    made = [Worker(row, tenants) for row in range(workers)]
    async with aiohttp.ClientSession() as client:
        it = Rig(control, made, client)
        try:
            for worker in made:
                await worker.control.start(folder)
                control.workers.started(worker.row)
            await control.start()
            await it.heard()
            yield it
        finally:
            it.drained = len(drains)
            await control.close()
            for worker in made:
                await worker.control.close()
                worker.page.close()


@asynccontextmanager
async def stuck(folder: Path, row: int) -> AsyncIterator[None]:
    """A worker that takes connections and never says a word."""
    waiting: list[asyncio.StreamWriter] = []
    server = await asyncio.start_unix_server(lambda _, writer: waiting.append(writer), socket_path(folder, row))
    try:
        yield
    finally:
        server.close()
        for writer in waiting:
            writer.transport.abort()
        await asyncio.sleep(0)


def tenant(name: str, key: str) -> TenantSpec:
    """A tenant with one key."""
    return TenantSpec(name, (key_row(key),))
