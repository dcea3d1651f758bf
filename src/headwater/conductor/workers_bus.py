"""The bus between the workers of one Conductor: ZMQ over Unix sockets in a directory that nobody else can enter.

Each worker publishes at `folder`/INDEX and listens to all others', whether they are there yet or not: ZMQ connects
again by itself. Two of its threads do so, however many workers there are. A receiver that does not keep up misses
messages; the next ones repeat what they said.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import zmq

from headwater.conductor.folder import private_folder
from headwater.conductor.sharing import MESSAGE_BYTES, Received
from headwater.errors import ConfigError

WORKERS_MAX = 256
QUEUE = 512
"""Messages for a receiver that is busy; as ZMQ counts, at least half as many are kept."""
ONCE = 64
"""Messages read before anybody else in the loop has a turn."""
PATH_BYTES = 100
"""What the address of a Unix socket can hold, less a little."""


class WorkersBus:
    """See `Bus`. `folder` is made by the first worker that comes, within the parent's own."""

    local = True

    def __init__(self, folder: Path, index: int, workers: int, loop: asyncio.AbstractEventLoop) -> None:
        """Worker `index` of so many. Raises ConfigError."""
        private_folder(folder, "the workers' bus")
        if not 0 <= index < workers <= WORKERS_MAX or len(os.fsencode(folder)) > PATH_BYTES:
            raise ConfigError(f"{folder}: worker {index} of {workers}: at most {WORKERS_MAX}, and a shorter path")
        self._folder, self._index, self._workers, self._loop = folder, index, workers, loop
        self._context = zmq.Context(io_threads=1)
        self._sends, self._hears = self._context.socket(zmq.PUB), self._context.socket(zmq.SUB)
        for each in (self._sends, self._hears):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.SNDHWM, QUEUE)
            each.setsockopt(zmq.RCVHWM, QUEUE)
            each.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        self._hears.setsockopt(zmq.SUBSCRIBE, b"")
        self._hears.setsockopt(zmq.RECONNECT_IVL, 100)
        self._hears.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._received: Received | None = None
        self._again: asyncio.Handle | None = None

    def start(self, received: Received) -> None:
        """See `Bus`. Raises ConfigError."""
        self._received = received
        try:
            self._sends.bind(f"ipc://{self._folder}/{self._index}")
            os.chmod(self._folder / str(self._index), 0o600)
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(f"{self._folder}/{self._index}: {error.strerror}") from error
        for other in range(self._workers):
            if other != self._index:
                self._hears.connect(f"ipc://{self._folder}/{other}")
        self._loop.add_reader(int(self._hears.getsockopt(zmq.FD)), self._drain)
        self._drain()

    def send(self, message: bytes) -> None:
        """See `Bus`."""
        if self._received is not None:
            with suppress(zmq.Again):
                self._sends.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """See `Bus`."""
        if self._received is not None:
            self._received = None
            self._loop.remove_reader(int(self._hears.getsockopt(zmq.FD)))
            (self._folder / str(self._index)).unlink(missing_ok=True)  # ZMQ leaves it
        if self._again is not None:
            self._again.cancel()
        self._hears.close()
        # Our last message has a moment to leave.
        self._sends.close(linger=50)
        self._context.term()

    def _drain(self) -> None:
        """All that has come. The descriptor tells of news once only, so nothing may be left without a call to come."""
        self._again = None
        for _ in range(ONCE):
            if self._received is None:
                return
            try:
                message = self._hears.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._received(message)
        self._again = self._loop.call_soon(self._drain)
