"""Listens for clients, keeps count of their connections, and looks at their deadlines about once a second."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from headwater.conductor.counts import Counts
from headwater.conductor.http.answers import Heads
from headwater.conductor.http.connection import Connection
from headwater.conductor.parts import Handler
from headwater.errors import ConfigError
from headwater.fleetfile.model import Limits, Times

BACKLOG = 1024
SWEEP_S = 1.0
RETRY_AFTER_S = 1
REFUSED_MAX, REFUSED_SHARE = 256, 8
"""Connections beyond the limit that are told so at a time, and one in so many of the limit; those beyond are cut."""


class HttpServer:
    """HTTP/1.1 for one handler. All methods are called in the loop."""

    def __init__(
        self, handler: Handler, limits: Limits, times: Times, counts: Counts, tls: ssl.SSLContext | None = None
    ) -> None:
        self.handler, self.limits, self.times, self.counts = handler, limits, times, counts
        self.heads = Heads()
        self.draining = False
        """Nothing new is taken, and every answer is its connection's last."""
        self.buffered_bytes = 0
        """Of bodies that connections hold, but for small ones."""
        self.port = 0
        """Where it listens, once it does."""
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self._closed = False
        self._connections: set[Connection] = set()
        self._refused = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._timer: asyncio.TimerHandle | None = None
        shortest_s = min(times.header_s, times.body_s, times.keep_alive_s, times.stalled_s)
        self._sweep_s = max(0.02, min(SWEEP_S, shortest_s / 4))

    async def start(
        self, host: str, port: int, *, reuse_port: bool = False, listening: Sequence[socket.socket] = ()
    ) -> None:
        """Listen, on `listening` where others have bound them; raises ConfigError where that address cannot be had."""
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self.later = self._loop.call_soon
        handshake_s = self.times.header_s if self._tls else None
        own: dict[str, Any] = {"host": host, "port": port, "reuse_port": reuse_port or None}
        places: list[dict[str, Any]] = [{"sock": it} for it in listening] or [own]
        try:
            for place in places:
                server = await self._loop.create_server(
                    lambda: Connection(self), **place, backlog=BACKLOG,
                    ssl=self._tls, ssl_handshake_timeout=handshake_s,
                )  # fmt: skip
                self._servers.append(server)
        except OSError as error:
            raise ConfigError(f"conductor.listen={host}:{port}: {error.strerror or error}; choose another") from error
        self.port = int(self._servers[0].sockets[0].getsockname()[1])
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)

    async def drain(self, deadline_s: float) -> bool:
        """Take nothing new, and wait up to so many seconds for what is in progress; whether all of it ended."""
        self.draining = True
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.leave()
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Cut what is left, and end."""
        self.draining = self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.transport.abort()
        await self._empty.wait()
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def opened(self, connection: Connection) -> None:
        """A client has connected: take it, or tell it to come back."""
        self._connections.add(connection)
        self._empty.clear()
        self.counts.set("http_connections", len(self._connections))
        if self._closed:
            connection.transport.abort()
        elif self.draining:  # it was taken just before
            connection.leave()
        elif len(self._connections) - self._refused > self.limits.connections:
            connection.refused = True
            self._refused += 1
            self.counts.add("http_connections_refused")
            if self._refused > min(REFUSED_MAX, self.limits.connections // REFUSED_SHARE + 1):
                connection.transport.abort()
            else:
                headers = [(b"retry-after", b"%d" % RETRY_AFTER_S)]
                connection.refuse(503, "there are too many connections", "overloaded", headers)

    def closed(self, connection: Connection) -> None:
        """A client's connection has ended."""
        self._connections.discard(connection)
        if connection.refused:
            self._refused -= 1
        self.counts.set("http_connections", len(self._connections))
        if not self._connections:
            self._empty.set()

    def _sweep(self) -> None:
        now = self.time()
        self.heads.tick()
        self.counts.set("http_buffered_bytes", self.buffered_bytes)
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)
        for connection in list(self._connections):
            connection.sweep(now)
