"""The other processes of a measurement: a real node, and the bare echo that a call to it is compared with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headwater.bench.machine import bind
from headwater.config import child_environment
from headwater.demo.processes import uninterrupted
from headwater.errors import UnavailableError
from headwater.node.client import fetch_status

START_S = 30.0
STOP_S = 10.0
POLL_S = 0.002
NODE_COMMAND = (sys.executable, "-m", "headwater", "node")
ECHO_COMMAND = (sys.executable, "-m", "headwater.bench.echo")


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that serves us: where, and who it is."""

    address: str
    pid: int
    start_s: float
    """From starting the process until its first answer."""

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, to the nanosecond."""
        spent = 0
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            spent += int((thread / "schedstat").read_text(encoding="ascii").split()[0])
        return spent / 1e9

    def memory_bytes(self) -> int:
        """Resident memory that is its own: no files, no shared memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise UnavailableError(f"process {self.pid} is gone")


@contextmanager
def node_process(
    host_memory: int, *, prefault: bool = True, settings: Mapping[str, str] | None = None
) -> Iterator[Peer]:
    """A `headwater node` with so many bytes, on a socket of its own; it is gone when the context ends. `settings` are
    further variables of its environment.

    Raises UnavailableError with its last words if it does not serve within START_S.
    """
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        address = f"unix:{directory}/node.sock"
        variables = {
            "HEADWATER_NODE_SOCKET": address,
            "HEADWATER_NODE_HOST_MEMORY": str(host_memory),
            "HEADWATER_NODE_PREFAULT": "true" if prefault else "false",
            "HEADWATER_NODE_METRICS": "off",
            "HEADWATER_LOG_LEVEL": "warning",
            # "Cold" is what was used longest ago; the default policy may keep it.
            "HEADWATER_NODE_EVICTION": "lru",
            **(settings or {}),
        }
        started_s = time.monotonic()
        with _process(NODE_COMMAND, variables, Path(directory)) as process:
            while not _answers(address):
                _wait(process, started_s, Path(directory))
            yield Peer(address, process.pid, time.monotonic() - started_s)


@contextmanager
def echo_process() -> Iterator[Peer]:
    """A process that sends back what one connection sends it: the bare round trip of a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        path = f"{directory}/echo.sock"
        started_s = time.monotonic()
        with _process((*ECHO_COMMAND, path), {}, Path(directory)) as process:
            while not os.path.exists(path):
                _wait(process, started_s, Path(directory))
            yield Peer(path, process.pid, time.monotonic() - started_s)


def connect_echo(peer: Peer) -> socket.socket:
    """A blocking connection to an echo process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(peer.address)
    return connection


@contextmanager
def _process(command: Sequence[str], settings: Mapping[str, str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = None
    try:
        with open(directory / "log", "wb") as log, uninterrupted():
            environment = child_environment(settings)
            process = subprocess.Popen(list(command), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        yield process
    finally:
        if process is not None:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        fetch_status(address, 1.0)
    except UnavailableError:
        return False
    return True


def _wait(process: subprocess.Popen[bytes], started_s: float, directory: Path) -> None:
    """Wait a moment for a process that does not serve yet; raises UnavailableError if it never will."""
    if process.poll() is not None or time.monotonic() - started_s > START_S:
        words = (directory / "log").read_text(encoding="utf-8", errors="replace").strip()[-1000:]
        raise UnavailableError(f"{process.args!r} does not serve: {words or 'it says nothing'}")
    time.sleep(POLL_S)


@contextmanager
def pinned(peers: Sequence[Peer], ours: int, theirs: int) -> Iterator[None]:
    """Bind this process to one core and the peers to another, or to the same one, while the context lasts."""
    before = os.sched_getaffinity(0)
    try:
        bind(os.getpid(), {ours})
        for peer in peers:
            bind(peer.pid, {theirs})
        yield
    finally:
        bind(os.getpid(), before)
        for peer in peers:
            bind(peer.pid, before)
