"""The bus between Conductors on several hosts: a pub/sub channel of the Redis or Valkey server of the directory.

Theory of operation. Two connections, as a connection that listens cannot say anything in RESP2, and one task:

    connect    both, log in, subscribe             within CONNECT_S, or pause and try again
    serve      messages come and go                every PING_S both are asked for a sign of life
    lost       closed, silent for SILENT_S, or nonsense            -> a pause, longer each time, up to PAUSE_MOST_S

Nothing is kept for a server that is away: what was not said is said anew a moment later. Who can log in to the server
can send us anything; see `sharing` for what comes of it. The user needs +publish, +subscribe and the channel, besides
`tiers.resp.RIGHTS`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from headwater.conductor.counts import Counts
from headwater.conductor.resp_messages import Replies, Reply
from headwater.conductor.sharing import MESSAGE_BYTES, Received
from headwater.errors import ProtocolError
from headwater.tiers.endpoint import Endpoint
from headwater.tiers.resp import ServerError, command

CONNECT_S = 2.0
PING_S = 2.0
SILENT_S = 6.0
PAUSE_S, PAUSE_MOST_S = 0.2, 5.0
UNSENT_BYTES = 4 * MESSAGE_BYTES
"""What waits for a slow server; beyond that messages are dropped."""


class DirectoryBus:
    """See `Bus`. Made and used in a running loop."""

    local = False

    def __init__(self, endpoint: Endpoint, cluster: str, counts: Counts) -> None:
        self._endpoint, self._counts = endpoint, counts
        self._channel = f"headwater:{cluster}:conductors".encode()
        self._received: Received | None = None
        self._says: _Link | None = None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"DirectoryBus({self._endpoint.name}, {'connected' if self._says is not None else 'not connected'})"

    @property
    def is_connected(self) -> bool:
        """Whether messages go anywhere at the moment."""
        return self._says is not None

    def start(self, received: Received) -> None:
        """See `Bus`."""
        self._received = received
        self._task = asyncio.get_running_loop().create_task(self._run(), name="headwater-directory-bus")

    def send(self, message: bytes) -> None:
        """See `Bus`."""
        if self._says is None or not self._says.send(b"PUBLISH", self._channel, message):
            self._counts.add("shared", "unsent")

    def close(self) -> None:
        """See `Bus`; the connections are closed once `closed` returns."""
        self._received = None
        if self._task is not None:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait until nothing is left of it."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        pause_s, draw = PAUSE_S, random.Random()
        loop = asyncio.get_running_loop()
        while True:
            since_s = loop.time()
            await self._serve()
            if loop.time() - since_s > PAUSE_MOST_S:
                pause_s = PAUSE_S
            await asyncio.sleep(pause_s * (1 + draw.random()) / 2)
            pause_s = min(2 * pause_s, PAUSE_MOST_S)

    async def _serve(self) -> None:
        """Connect, and stay until one of the two connections is lost."""
        links: list[_Link] = []
        try:
            with suppress(OSError, TimeoutError, ProtocolError):
                async with asyncio.timeout(CONNECT_S):
                    links.append(says := await self._connect(self._answered))
                    links.append(hears := await self._connect(self._heard))
                    hears.send(b"SUBSCRIBE", self._channel)
                self._says = says
                while not says.lost.done() and not hears.lost.done():
                    for link in links:
                        link.send(b"PING")
                    await asyncio.wait([says.lost, hears.lost], timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
                    if any(link.silent_s() > SILENT_S for link in links):
                        break
        finally:
            self._says = None
            for link in links:
                link.close()
        self._counts.add("shared", "disconnected")

    async def _connect(self, heard: Callable[[Reply], None]) -> _Link:
        it, loop = self._endpoint, asyncio.get_running_loop()
        link = _Link(loop, heard)
        if it.path:
            await loop.create_unix_connection(lambda: link, it.path)
        elif it.tls is not None:
            await loop.create_connection(lambda: link, it.host, it.port, ssl=it.tls, server_hostname=it.host)
        else:
            await loop.create_connection(lambda: link, it.host, it.port)
        if it.password or it.user:
            link.send(b"AUTH", *([it.user.encode()] if it.user else []), it.password.encode())
        return link

    def _answered(self, reply: Reply) -> None:
        """What the server says to what we say: an error means that it is of no use to us."""
        if isinstance(reply, ServerError):
            raise ProtocolError(f"{self._endpoint.name} refuses: {reply.code}")

    def _heard(self, reply: Reply) -> None:
        if isinstance(reply, ServerError):
            raise ProtocolError(f"{self._endpoint.name} refuses: {reply.code}")
        if isinstance(reply, list) and len(reply) == 3 and reply[0] == b"message" and self._received is not None:
            message = reply[2]
            if isinstance(message, bytes):
                self._received(message)


class _Link(asyncio.Protocol):
    """One connection; `lost` is done when it is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, heard: Callable[[Reply], None]) -> None:
        self._loop, self._heard = loop, heard
        self._replies = Replies()
        self._transport: asyncio.Transport | None = None
        self._came_s = loop.time()
        self.lost: asyncio.Future[None] = loop.create_future()

    def send(self, *words: bytes) -> bool:
        """Send a command; False if it was dropped."""
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > UNSENT_BYTES:
            return False
        transport.write(command(*words))
        return True

    def silent_s(self) -> float:
        """For how long nothing has come."""
        return self._loop.time() - self._came_s

    def close(self) -> None:
        """Let go of it at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # A stream's; uvloop's are of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._came_s = self._loop.time()
        try:
            for reply in self._replies.take(data):
                self._heard(reply)
        except ProtocolError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)
