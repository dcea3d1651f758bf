"""The limit of a Python proxy: reads requests and answers with httptools, passes bytes on, decides nothing.

    python -m headwater.bench.proxy_splice PORT UPSTREAM_PORT

No limits, no errors, no deadlines, no back-pressure, no headers taken out: what is left when everything that makes a
proxy usable is left out.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from typing import cast

import httptools
import uvloop


class Upstream(asyncio.Protocol):
    """A connection to the engine; answers go straight to the client."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass it on, and notice the end."""
        assert self.client is not None
        self.client.transport.write(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """The parser has seen the end of an answer."""
        self._parser = httptools.HttpResponseParser(self)
        assert self.client is not None
        self.client.ended(self)


class Client(asyncio.Protocol):
    """A connection of a client."""

    def __init__(self, port: int, idle: deque[Upstream]) -> None:
        self._port, self._idle = port, idle
        self._parser = httptools.HttpRequestParser(self)
        self._pieces: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Collect a request."""
        self._pieces.append(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """The parser has seen all of a request: it is sent as it came."""
        self._parser = httptools.HttpRequestParser(self)
        request = b"".join(self._pieces)
        self._pieces = []
        if self._idle:
            self._send(self._idle.pop(), request)
        else:
            task = asyncio.get_running_loop().create_task(self._connect(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, request: bytes) -> None:
        _, upstream = await asyncio.get_running_loop().create_connection(Upstream, "127.0.0.1", self._port)
        self._send(upstream, request)

    def _send(self, upstream: Upstream, request: bytes) -> None:
        upstream.client = self
        upstream.transport.write(request)

    def ended(self, upstream: Upstream) -> None:
        """The answer is complete."""
        self._idle.append(upstream)


async def serve(port: int, upstream: int) -> None:
    """Until SIGTERM."""
    loop = asyncio.get_running_loop()
    idle: deque[Upstream] = deque()
    server = await loop.create_server(lambda: Client(upstream, idle), "127.0.0.1", port, backlog=4096)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
