"""A TCP relay that does to what it passes on what bad networks and bad boxes do: seeded, and named."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

READ_BYTES = 64 << 10
CLOSE_S = 5.0
Toxic = Callable[[bytes, random.Random], list[bytes] | None]
"""What becomes of a piece of a stream: the pieces to pass on, or None to end the connection here."""


def nothing(data: bytes, draw: random.Random) -> list[bytes]:
    """As it was."""
    return [data]


def flip(data: bytes, draw: random.Random) -> list[bytes]:
    """One bit is wrong."""
    at = draw.randrange(len(data))
    return [data[:at] + bytes((data[at] ^ 1 << draw.randrange(8),)) + data[at + 1 :]]


def truncate(data: bytes, draw: random.Random) -> list[bytes] | None:
    """Some bytes are lost in the middle."""
    cut = draw.randrange(len(data))
    return [data[:cut], data[cut + draw.randrange(1, 9) :]]


def end(data: bytes, draw: random.Random) -> list[bytes] | None:
    """The connection ends in the middle."""
    return None


def duplicate(data: bytes, draw: random.Random) -> list[bytes]:
    """A piece comes twice."""
    return [data, data]


def reorder(data: bytes, draw: random.Random) -> list[bytes]:
    """Two halves of a piece change places."""
    half = len(data) // 2
    return [data[half:], data[:half]]


class Foul:
    """The relay: in front of `target`, at `address`; `toxic`, `share` and `delay_s` may be changed at any time."""

    def __init__(self, target: Callable[[], tuple[str, int]], seed: int) -> None:
        self.toxic: Toxic = nothing
        self.share = 0.1
        """Of the pieces, so many are touched."""
        self.delay_s = 0.0
        self.touched = 0
        """Pieces that were not passed on as they were."""
        self._target, self._draw = target, random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where to connect."""
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name="foul")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(CLOSE_S)
        self._socket.close()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            near, _ = await self._loop.sock_accept(self._socket)
            task = self._loop.create_task(self._serve(near))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, near: socket.socket) -> None:
        far = socket.socket()
        for it in (near, far):
            it.setblocking(False)
        with near, far, suppress(OSError):
            await self._loop.sock_connect(far, self._target())
            ways = [self._loop.create_task(self._pass(*way)) for way in ((near, far), (far, near))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := await self._loop.sock_recv(source, READ_BYTES):
                pieces = self.toxic(data, self._draw) if self._draw.random() < self.share else [data]
                self.touched += pieces != [data]
                if self.delay_s:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.Event().wait(), self.delay_s)
                if pieces is None:
                    return
                for it in pieces:
                    await self._loop.sock_sendall(target, it)
