"""What the tests of HTTP share: a loop for one test, a handler that notes what it got, a transport of memory, and an
instance that plays a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import uvloop

from headwater.conductor.counts import Counts
from headwater.conductor.http.connection import Connection
from headwater.conductor.http.exchange import Exchange, Headers, Origin, Quick, Reply, WholeAnswer
from headwater.conductor.http.server import HttpServer
from headwater.conductor.http.upstream import UpstreamPool
from headwater.fleetfile.model import Limits, Times

LIMITS = Limits(body_bytes=256 << 10, header_bytes=16 << 10, headers=32, connections=1200)
TIMES = Times()
WITHIN_S = 10.0


def looped(test: Coroutine[Any, Any, None], within_s: float = 60.0) -> None:
    """Run a test's body in a loop of its own; no task may be left."""

    async def bounded() -> None:
        async with asyncio.timeout(within_s):
            await test
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others

    uvloop.run(bounded())


async def until(fact: Callable[[], object], within_s: float = WITHIN_S) -> float:
    """Let the loop run until the fact holds; how long that took."""
    begun_s = time.monotonic()
    while not fact():
        assert time.monotonic() - begun_s < within_s, f"not so within {within_s} s"
        await asyncio.sleep(0)
    return time.monotonic() - begun_s


async def passing(seconds: float) -> None:
    """Let time pass for the one who is tested."""
    due_s = time.monotonic() + seconds
    await until(lambda: time.monotonic() > due_s)


class Watcher:
    """A listener that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def gone(self) -> None:
        """See `Listener`."""
        self.told.append("gone")

    def full(self) -> None:
        """See `Listener`."""
        self.told.append("full")

    def drained(self) -> None:
        """See `Listener`."""
        self.told.append("drained")


class Handler:
    """Answers at once with what it was asked, but for paths that begin with /hold, which wait for the test, and
    /refused, which are refused at their head."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.admitted: list[str] = []
        self.held: list[Exchange] = []
        self.watchers: list[Watcher] = []

    def admit(self, method: str, path: str, headers: Headers) -> Reply | None:
        """See `parts.Handler`."""
        self.admitted.append(path)
        return Reply(401, [(b"x-method", method.encode())], b"no") if path.startswith("/refused") else None

    def handle(self, exchange: Exchange) -> None:
        """See `parts.Handler`."""
        request = exchange.request
        self.requests.append(request)
        if request.path.startswith("/hold"):
            watcher = Watcher()
            self.held.append(exchange)
            self.watchers.append(watcher)
            exchange.watch(watcher)
        else:
            exchange.answer(200, [(b"x-path", request.path.encode())], request.body or b"nothing")


@asynccontextmanager
async def serving(
    limits: Limits = LIMITS, tls: Any = None, **times: float
) -> AsyncIterator[tuple[HttpServer, Handler]]:
    """A server for this block."""
    handler = Handler()
    server = HttpServer(handler, limits, replace(TIMES, **times), Counts(), tls)
    await server.start("127.0.0.1", 0, reuse_port=False)
    try:
        yield server, handler
    finally:
        await server.close()
        assert server.connections == 0


class Memory:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.shut = self.closing = self.aborted = self.paused = False
        self.connection: Connection

    def write(self, data: bytes) -> None:
        """See asyncio."""
        assert not self.shut, "written after our side was shut"
        self.written += data

    def writelines(self, parts: Any) -> None:
        """See asyncio."""
        self.write(b"".join(parts))

    def get_extra_info(self, name: str) -> Any:
        """See asyncio."""
        return ("127.0.0.1", 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """See asyncio."""

    def get_write_buffer_size(self) -> int:
        """See asyncio."""
        return 0

    def is_closing(self) -> bool:
        """See asyncio."""
        return self.closing

    def can_write_eof(self) -> bool:
        """See asyncio."""
        return True

    def write_eof(self) -> None:
        """See asyncio."""
        self.shut = True

    def pause_reading(self) -> None:
        """See asyncio."""
        self.paused = True

    def resume_reading(self) -> None:
        """See asyncio."""
        self.paused = False

    def close(self) -> None:
        """See asyncio."""
        self.closing = True

    def abort(self) -> None:
        """See asyncio."""
        if not self.aborted:
            self.closing = self.aborted = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    @property
    def over(self) -> bool:
        """Whether nothing more can be asked on it."""
        return self.shut or self.closing


def connected(server: HttpServer) -> tuple[Connection, Memory]:
    """A connection whose other end is the test."""
    connection, transport = Connection(server), Memory()
    transport.connection = connection
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport


def request(path: str = "/", body: bytes = b"", more: str = "", method: str = "POST") -> bytes:
    """A good request."""
    return f"{method} {path} HTTP/1.1\r\nHost: a\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(port: int, data: bytes, *, ssl: Any = None) -> bytes:
    """Everything that the server says to this until it closes, or has said nothing more for its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=ssl)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], bytes]:
    """One answer with a length or chunks."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
    first, *lines = head[:-4].split(b"\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
    body = b""
    if b"content-length" in headers:
        body = await asyncio.wait_for(reader.readexactly(int(headers[b"content-length"])), WITHIN_S)
    elif headers.get(b"transfer-encoding") == b"chunked":
        while size := int(await asyncio.wait_for(reader.readline(), WITHIN_S), 16):
            body += (await asyncio.wait_for(reader.readexactly(size + 2), WITHIN_S))[:-2]
        await reader.readline()
    return int(first.split()[1]), headers, body


class Sink:
    """Takes an instance's answer, and notes all of it."""

    quick: Quick | None = None
    whole: WholeAnswer | None = None

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self.outcome = ""
        self.sent = False
        self.calls: list[str] = []

    def head(self, status: int, headers: Headers) -> None:
        """See `Sink`."""
        self.calls.append("head")
        self.status, self.headers = status, headers

    def data(self, data: bytes) -> None:
        """See `Sink`."""
        assert data
        self.calls.append("data")
        self.body += data

    def end(self) -> None:
        """See `Sink`."""
        assert not self.outcome
        self.outcome = "end"

    def lost(self, why: str, *, sent: bool) -> None:
        """See `Sink`."""
        assert not self.outcome
        self.outcome, self.sent = why, sent


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Instance:
    """Plays a script on each connection; what it was sent is in `heads`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.heads: list[bytes] = []
        self.closed = 0
        self.server: asyncio.Server

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        self.writers.append(writer)
        try:
            await self.script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed += 1
            writer.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """A whole request; its head."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length: "):
            await reader.readexactly(int(line[16:]))
    return head


@asynccontextmanager
async def instance(script: Script) -> AsyncIterator[tuple[Instance, Origin]]:
    """An instance for this block."""
    it = Instance(script)
    server = it.server = await asyncio.start_server(it.talk, "127.0.0.1", 0, limit=1 << 20)
    try:
        yield it, Origin("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for writer in it.writers:
            writer.transport.abort()
        await until(lambda: it.closed == it.connections)
        await server.wait_closed()


@asynccontextmanager
async def pooled(limits: Limits = LIMITS, **times: float) -> AsyncIterator[UpstreamPool]:
    """A pool for this block."""
    pool = UpstreamPool(limits, replace(TIMES, **times), Counts())
    try:
        yield pool
    finally:
        await pool.stop()
        assert pool.connections == 0
