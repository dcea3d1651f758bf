"""How a worker process is started and ended: what its parent gives it, and what it says back.

    parent                                            worker (python -m headwater.conductor.worker)
    standard input: a file in memory with `Start` ──► `read_start`; nothing of it is in command line or environment.
                                                      Listens on `listening`, which its parent has bound, and for its
                                                      parent at `directory`/worker-ROW.sock
    waits READY_S                                 ◄── `say_ready`: one line, `ready`, on the descriptor `ready`
    REPLACED (a signal)                           ──► takes no more connections, ends its streams within `roll_s`,
                                                      exits with 0
    SIGTERM                                       ──► the same within `drain_s`, also after REPLACED
    (dies)                                        ──► the descriptor `lifeline` comes to its end: the same as SIGTERM
    waits for that long and GRACE_S, then SIGKILL

A worker's exit code is 0 after a drain, 2 for what will not be better the next time (a configuration that cannot be
used), anything else for a death that may be made good by another start.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

import msgspec

from headwater.errors import ConfigError
from headwater.fleetfile.model import FleetFile

READY = b"ready\n"
READY_S = 30.0
GRACE_S = 5.0
"""After `drain_s` or `roll_s`, until a worker is killed."""
HOPELESS = 2
"""Exit code."""
START_BYTES = 64 << 20
REPLACED = signal.SIGUSR1
ROWS_EACH = 4
"""Rows for each of the workers that there are to be: beside the present one, so many less one may drain."""


class Start(msgspec.Struct, frozen=True):
    """What one worker is given. Descriptors are numbers in the worker."""

    row: int
    """Of the page of quotas, and in the name of its socket. One that replaces another has a row of its own."""
    directory: str
    """The parent's private folder."""
    quotas: int
    """The page that `quota_page.QuotaPage.open` maps."""
    ready: int
    lifeline: int
    fleet: FleetFile
    """Resolved: every instance has a `url`. Its `secret` is never empty."""
    listening: tuple[int, ...] = ()
    """Sockets for clients (`listening`); none: it binds one of its own at `fleet.conductor.listen`."""

    def __repr__(self) -> str:
        return f"Start(row {self.row} in {self.directory})"


def write_start(start: Start) -> int:
    """A descriptor from which `read_start` reads it: memory, so that nobody waits for the other."""
    descriptor = os.memfd_create("headwater-start", os.MFD_CLOEXEC)
    data = msgspec.json.encode(start)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as target:
            target.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_start() -> Start:
    """What the parent gave to this process. Raises ConfigError without any of it."""
    data = sys.stdin.buffer.read(START_BYTES + 1)
    try:
        return msgspec.json.decode(data[:START_BYTES], type=Start)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError("standard input holds no worker's start; `headwater conductor FILE` starts workers") from None


def say_ready(start: Start) -> None:
    """Tell the parent that requests are taken. A parent that is gone is noticed by the lifeline."""
    with suppress(BrokenPipeError):
        os.write(start.ready, READY)
    os.close(start.ready)
