"""A TCP proxy that does to a connection what networks do: for tests of whoever must notice.

    with FaultProxy("127.0.0.1", port) as proxy:
        ... connect to proxy.address ...
        proxy.arm(Fault(Kind.CORRUPT, Way.BACK, at_byte=100))    # the 100th byte from now on, towards the asker
        ... use the connection ...
        assert proxy.hit.wait(1)

One thread runs it. A fault hits the next connection, or the one that is open, whose bytes reach its place first in its
direction; it hits once. Which bit is flipped comes from the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any

CHUNK_BYTES = 64 << 10


class Kind(enum.Enum):
    """What happens."""

    CORRUPT = "corrupt"
    """One bit of one byte is another."""
    TRUNCATE = "truncate"
    """Nothing comes after that byte: the connection ends, as it does when a process dies."""
    DUPLICATE = "duplicate"
    """`size_bytes` come twice."""
    DROP = "drop"
    """`size_bytes` are left out."""
    REORDER = "reorder"
    """`size_bytes` come after as many that followed them."""
    DELAY = "delay"
    """What follows comes `delay_s` later."""
    STALL = "stall"
    """Nothing more goes this way, and nobody is told: a half-open connection."""


class Way(enum.Enum):
    """Which direction."""

    OUT = "towards who listens"
    BACK = "towards who connected"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, in which direction, and at which byte, counted from when the fault is armed."""

    kind: Kind
    way: Way
    at_byte: int = 0
    size_bytes: int = 64
    delay_s: float = 0.0


class FaultProxy:
    """Listens on a free loopback port and passes everything on to one address, but for its faults."""

    def __init__(self, host: str, port: int, seed: int = 0) -> None:
        self.hit = threading.Event()
        self.passed = dict.fromkeys(Way, 0)
        """Bytes that went through."""
        self._target = host, port
        self._rng = random.Random(seed)
        self._fault: Fault | None = None
        self._left = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def arm(self, fault: Fault | None) -> None:
        """From now on, this fault and no other."""

        async def change() -> None:
            self._fault, self._left = fault, fault.at_byte if fault else 0
            self.hit.clear()

        self._do(change())

    def cut(self) -> None:
        """End all connections."""

        async def abort() -> None:
            for it in list(self._writers):
                it.transport.abort()

        self._do(abort())

    def close(self) -> None:
        """End all connections and the thread."""

        async def stop() -> None:
            self._server.close()
            for it in list(self._writers):
                it.transport.abort()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._do(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
            ends.append(far_writer)
            self._writers.add(far_writer)
            pumps = (self._pump(reader, far_writer, Way.OUT), self._pump(far_reader, writer, Way.BACK))
            await asyncio.gather(*pumps)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for it in ends:
                it.transport.abort()
                self._writers.discard(it)
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            fault = self._fault
            if fault is not None and fault.way is way:
                if self._left >= len(chunk):
                    self._left -= len(chunk)
                else:
                    at, self._fault = self._left, None
                    chunk = await self._strike(fault, chunk, at, reader, writer)
            self.passed[way] += len(chunk)
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()

    async def _strike(
        self, fault: Fault, chunk: bytes, at: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        """What goes on instead of this chunk."""
        size = fault.size_bytes
        before, after = chunk[:at], chunk[at:]
        if fault.kind in (Kind.DUPLICATE, Kind.DROP, Kind.REORDER):
            while len(after) < 2 * size and (more := await reader.read(CHUNK_BYTES)):
                after += more
        self.hit.set()
        match fault.kind:
            case Kind.CORRUPT:
                return before + bytes([after[0] ^ 1 << self._rng.randrange(8)]) + after[1:]
            case Kind.DUPLICATE:
                return before + after[:size] + after
            case Kind.DROP:
                return before + after[size:]
            case Kind.REORDER:
                return before + after[size : 2 * size] + after[:size] + after[2 * size :]
            case Kind.TRUNCATE:
                writer.write(before)
                await writer.drain()
                raise ConnectionResetError
            case Kind.DELAY:
                writer.write(before)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.Event().wait(), fault.delay_s)
                return after
            case Kind.STALL:
                writer.write(before)
                await asyncio.Event().wait()
        raise AssertionError(fault)
