"""What one worker tells its parent, over a Unix socket that only this user can open: in the worker's own loop.

GET /beat                   a few words for the probes, asked often
GET /state  /explain/ID     for people and for metrics
POST /register /unregister /query /query_by_hash   Mooncake's indexer API
POST /drain                 take no more requests
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from headwater.conductor.control import indexer
from headwater.conductor.control.publishers import ChangingRegistry, Publishers
from headwater.conductor.control.replies import Rejected, errors_as_json, read_body, reply
from headwater.conductor.counts import Counts
from headwater.conductor.parts import Brain, Sight
from headwater.fleetfile.model import TenantSpec

BACKLOG = 64


class Asking(Protocol):
    """What `tenants.KeyedTenants` offers beside `parts.Tenants`."""

    def named(self, name: str) -> TenantSpec | None:
        """The tenant of that name."""

    def salt(self, tenant: TenantSpec, salt: str) -> str:
        """See `parts.Tenants`."""

    def state(self) -> dict[str, Any]:
        """By tenant what is in progress and what was refused."""


class SightHere(Sight, indexer.Indexed, Protocol):
    """The worker's sight."""


def socket_path(directory: Path, row: int) -> Path:
    """Where the worker with this row listens, in the parent's private runtime directory."""
    return directory / f"worker-{row}.sock"


class WorkerControl:
    """The socket of one worker. `is_ready` tells whether it takes requests, `drain` makes it take no
    more, `leaves` is told the number of an instance that was unregistered; `tokens` says how prompts are tokenised."""

    def __init__(
        self,
        row: int,
        *,
        brain: Brain,
        sight: SightHere,
        registry: ChangingRegistry,
        tenants: Asking,
        tokens: Callable[[], dict[str, Any]],
        counts: Counts,
        is_ready: Callable[[], bool],
        drain: Callable[[], None],
        leaves: Callable[[int], None],
    ) -> None:
        self._row, self._brain, self._sight, self._registry = row, brain, sight, registry
        self._tenants, self._tokens, self._counts = tenants, tokens, counts
        self._is_ready, self._drain = is_ready, drain
        self._publishers = Publishers(registry, time.time_ns, leaves)
        self._draining = False
        self._path: Path | None = None
        application = web.Application(middlewares=[errors_as_json], client_max_size=indexer.QUERY_BYTES)
        application.add_routes(
            [
                web.get("/beat", self._beat),
                web.get("/state", self._state),
                web.get("/explain/{id}", self._explain),
                web.post("/register", self._register),
                web.post("/unregister", self._unregister),
                web.post("/query", self._query),
                web.post("/query_by_hash", self._query_by_hash),
                web.post("/drain", self._start_drain),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, directory: Path) -> None:
        """Listen. A socket that a worker before us left behind is taken away."""
        path = socket_path(directory, self._row)
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            listening.bind(str(path))
            os.chmod(path, 0o600)  # nobody can connect before it listens
            await self._runner.setup()
            await web.SockSite(self._runner, listening, backlog=BACKLOG).start()
        except BaseException:
            listening.close()
            raise
        self._path = path

    async def close(self) -> None:
        """Listen no more. May be called again."""
        await self._runner.cleanup()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def beat(self) -> dict[str, Any]:
        """What the probes need to know."""
        instances = self._registry.instances().values()
        return {
            "worker": self._row,
            "pid": os.getpid(),
            "ready": self._is_ready() and not self._draining,
            "draining": self._draining or not self._is_ready(),
            "alive": sum(it.alive and not it.draining for it in instances),
            "instances": len(instances),
        }

    async def _beat(self, _: web.Request) -> web.Response:
        return reply(self.beat())

    async def _state(self, _: web.Request) -> web.Response:
        return reply(
            self.beat()
            | {
                "brain": self._brain.state(),
                "sight": self._sight.state(),
                "tenants": self._tenants.state(),
                "tokens": self._tokens(),
                "counts": self._counts.state(),
            }
        )

    async def _explain(self, request: web.Request) -> web.Response:
        found = self._brain.explained(request.match_info["id"])
        if found is None:
            raise Rejected(404, "not_remembered", "this worker remembers no such request")
        return reply({"worker": self._row, "explained": found})

    async def _register(self, request: web.Request) -> web.Response:
        publisher = indexer.read(await read_body(request, indexer.REGISTER_BYTES), indexer.Publisher)
        self._publishers.register(publisher)
        return reply({"status": "registered successfully", "instance_id": publisher.instance_id})

    async def _unregister(self, request: web.Request) -> web.Response:
        gone = indexer.read(await read_body(request, indexer.REGISTER_BYTES), indexer.Gone)
        removed = list(self._publishers.unregister(gone))
        return reply({"status": "unregistered successfully", "removed_instances": removed})

    async def _query(self, request: web.Request) -> web.Response:
        asked = indexer.read(await read_body(request, indexer.QUERY_BYTES), indexer.Query)
        salt = self._salt(asked.tenant_id, asked.cache_salt)
        found = self._sight.query(asked.model, asked.token_ids, salt)
        return reply({asked.tenant_id: _only(found, asked.instance_id)})

    async def _query_by_hash(self, request: web.Request) -> web.Response:
        asked = indexer.read(await read_body(request, indexer.QUERY_BYTES), indexer.HashQuery)
        self._salt(asked.tenant_id, None)
        found = self._sight.query_by_hash(indexer.hashes_of(asked))
        serving = {name: it for name, it in found.items() if self._serves(name, asked.model)}
        return reply({asked.tenant_id: _only(serving, asked.instance_id)})

    async def _start_drain(self, _: web.Request) -> web.Response:
        if not self._draining:
            self._draining = True
            self._drain()
        return reply(self.beat())

    def _serves(self, instance: str, model: str) -> bool:
        number = self._registry.by_name(instance)
        return number is not None and self._registry.spec(number).served_name == model

    def _salt(self, tenant: str, salt: str | None) -> str:
        """What engines got as `cache_salt` for such requests. Engines that others route to know no tenants of ours:
        for those the tenant is `default`, and the salt is what it is."""
        known = self._tenants.named(tenant)
        if known is None and tenant != indexer.DEFAULT_TENANT:
            raise Rejected(404, "no_such_tenant", "the fleet file has no such tenant", "tenant_id")
        return salt or "" if known is None else self._tenants.salt(known, salt or "")


def _only(found: dict[str, dict[str, Any]], instance: str | None) -> dict[str, dict[str, Any]]:
    return {name: it for name, it in found.items() if instance in (None, name)}
