"""One process group that is started, asked, ended: what `supervise` does with a `plan.Process`."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from headwater.config import child_environment
from headwater.errors import UnavailableError
from headwater.node.client import fetch_status
from headwater.up.plan import Probe

PROBE_S = 1.0
LOG_BYTES = 8 << 20
"""A log that is longer is copied to NAME.log.1 and begins anew."""
TAIL_BYTES, TAIL_LINES = 8192, 15
PROC = Path("/proc")
TRACKER = b"multiprocessing.resource_tracker"
TRACKER_S, TRACKER_STEP_S = 10.0, 0.01
"""On a machine that is busy with the next engine's start they take a while."""


class Log:
    """The file that a process's output goes to, bounded: what is old is lost."""

    def __init__(self, path: Path, most_bytes: int = LOG_BYTES) -> None:
        self.path, self._most_bytes = path, most_bytes

    def open(self) -> int:
        """A descriptor that writes at the end, wherever that is by then. Others cannot read the file."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def bound(self) -> None:
        """Begin anew if it has become too long. Who writes goes on; a line of that moment may be lost."""
        with suppress(FileNotFoundError):
            if self.path.stat().st_size > self._most_bytes:
                shutil.copyfile(self.path, self._old)
                os.truncate(self.path, 0)

    def tail(self) -> str:
        """Its last lines."""
        try:
            with self.path.open("rb") as source:
                source.seek(max(0, source.seek(0, os.SEEK_END) - TAIL_BYTES))
                text = source.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    @property
    def _old(self) -> Path:
        path = self.path.with_name(self.path.name + ".1")
        path.touch(mode=0o600)
        return path


class Child:
    """A process, and all that it starts itself: one group."""

    def __init__(self, command: tuple[str, ...], changes: Mapping[str, str | None], log: Log) -> None:
        """Start it; raises UnavailableError if there is no such program."""
        output = log.open()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(changes),
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"{command[0]}: {error.strerror}") from error
        finally:
            os.close(output)

    @property
    def group(self) -> int:
        """The group's number, which is its first process's."""
        return self._process.pid

    def code(self) -> int | None:
        """How the first process ended; None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """A signal for the first process: what it started itself is its own business."""
        if self.code() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the whole group at once, also what is left of one whose first process has ended.

        Python's resource trackers go last, and by themselves: nobody else takes away the shared memory of those whom
        they belong to, some hundred megabytes for a vLLM.
        """
        trackers = [pid for pid in members(self.group) if TRACKER in _read(pid, "cmdline")]
        if trackers:
            for pid in members(self.group):
                if pid not in trackers:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._process.wait()
            deadline_s = time.monotonic() + TRACKER_S
            while any(_read(pid, "cmdline") for pid in trackers) and time.monotonic() < deadline_s:
                time.sleep(TRACKER_STEP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self._process.wait()

    def is_gone(self) -> bool:
        """Whether nobody of the group is left."""
        if self.code() is None:
            return False
        try:
            os.killpg(self.group, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # somebody else's group by now
            return True
        return False


def members(group: int) -> list[int]:
    """The processes of a group."""
    pids = [int(it.name) for it in PROC.iterdir() if it.name.isdigit()]
    return [pid for pid in pids if _read(pid, "stat").rpartition(b")")[2].split()[2:3] == [b"%d" % group]]


def _read(pid: int, name: str) -> bytes:
    """What the kernel says of a process; nothing if it has ended."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def is_ready(probe: Probe) -> bool:
    """Ask once; within PROBE_S."""
    try:
        if probe.kind == "node":
            fetch_status(probe.address)
            return True
        if probe.kind == "redis":
            return _pings(probe.address)
        return _answers(probe.address)
    except (OSError, UnavailableError, http.client.HTTPException):
        return False


def _pings(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PROBE_S)
        link.connect(path)
        link.sendall(b"PING\r\n")
        return link.recv(64).startswith(b"+PONG")


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PROBE_S)
    try:
        connection.request("GET", parts.path, headers={"Connection": "close"})
        return connection.getresponse().status == http.client.OK
    finally:
        connection.close()
