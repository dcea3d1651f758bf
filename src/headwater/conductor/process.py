"""One worker process as its parent sees it: started with its `Start`, watched, ended. See `starting`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from headwater.conductor.starting import READY, REPLACED, Start, write_start
from headwater.config import child_environment
from headwater.errors import ResourceError
from headwater.fleetfile.model import FleetFile


class Worker:
    """A running worker. Made in the parent's loop, which tells when it is ready and when it has ended: no threads."""

    def __init__(
        self,
        command: Sequence[str],
        fleet: FleetFile,
        row: int,
        folder: Path,
        quotas: int,
        lifeline: int,
        environment: Mapping[str, str | None],
        listening: tuple[int, ...] = (),
    ) -> None:
        """Start it; it inherits `quotas`, `lifeline` and `listening`, descriptors of ours. Raises ResourceError."""
        loop = asyncio.get_running_loop()
        self.row, self.fleet = row, fleet
        self.ready: asyncio.Future[bool] = loop.create_future()
        """True once it takes requests; False if it ended before."""
        self.ended: asyncio.Future[int] = loop.create_future()
        """Its exit code; -N for signal N."""
        self.ready_s = 0.0
        """When it became ready, on the loop's clock."""
        self._said = b""
        self._ready_read, ready = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        start = write_start(Start(row, str(folder), quotas, ready, lifeline, fleet, listening))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=start,
                pass_fds=(quotas, ready, lifeline, *listening),
                env=child_environment(environment),
                process_group=0,  # Ctrl-C at a terminal is for the parent
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            os.close(self._ready_read)
            raise ResourceError(f"a worker could not be started: {error.strerror}") from error
        finally:
            os.close(start)
            os.close(ready)
        loop.add_reader(self._pidfd, self._has_ended)
        loop.add_reader(self._ready_read, self._speaks)

    def __repr__(self) -> str:
        return f"Worker(row {self.row}, pid {self.pid})"

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def drain(self) -> None:
        """Have it end in order, within its `drain_s`."""
        self._send(signal.SIGTERM)

    def replaced(self) -> None:
        """Have it end in order, within its `roll_s`. It has to be ready."""
        self._send(REPLACED)

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if not self.ended.done():
            signal.pidfd_send_signal(self._pidfd, number)

    def _speaks(self) -> None:
        data = os.read(self._ready_read, 64)
        self._said += data
        if self._said.startswith(READY) and not self.ready.done():
            self.ready_s = asyncio.get_running_loop().time()
            self.ready.set_result(True)
        if not data or len(self._said) >= len(READY):
            self._listen_no_more()

    def _listen_no_more(self) -> None:
        if self._ready_read >= 0:
            asyncio.get_running_loop().remove_reader(self._ready_read)
            os.close(self._ready_read)
            self._ready_read = -1

    def _has_ended(self) -> None:
        code = self._process.wait()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._ready_read >= 0:
            self._speaks()  # what it said in its last moment
        self._listen_no_more()
        if not self.ready.done():
            self.ready.set_result(False)
        self.ended.set_result(code)
