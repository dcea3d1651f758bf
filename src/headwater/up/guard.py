"""A process that outlives `headwater up` by a moment, and ends what was started if `up` was killed.

Theory of operation. `up` holds the writing end of this process's standard input. It says `add GROUP` after it has
started a process group and `drop GROUP` after all of that group are gone. The input ends when `up` is gone, whatever
the reason: then every group on the list is killed. A process that was started in the moment before its `add` was said,
or that has left its group, has MARK in its environment, and is found by that. No signal of a terminal reaches the
guard: it is a session of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from headwater.config import child_environment

MARK = "_HEADWATER_UP"
ROUNDS = 40
ROUND_S = 0.05
PROC = Path("/proc")


class Guard:
    """The guard as `up` sees it."""

    def __init__(self, mark: str) -> None:
        """Start it. `mark` is in the environment of all that is to be guarded, as MARK."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.up.guard", mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment({}),
            cwd="/",
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """A process group was started."""
        self._tell(f"add {group}")

    def drop(self, group: int) -> None:
        """Nobody of that group is left."""
        self._tell(f"drop {group}")

    def close(self) -> None:
        """All are gone: end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # without its guard the fleet goes on
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())


def marked(mark: str) -> Iterable[int]:
    """The processes of ours that have this mark, but this one."""
    wanted = f"{MARK}={mark}".encode()
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def end_all(groups: Iterable[int], mark: str) -> None:
    """Kill these groups and whoever has the mark, until none is left."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(ROUNDS):
        left = list(marked(mark))
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(ROUND_S)


def main() -> None:
    """Watch standard input until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        verb, _, group = line.strip().partition(" ")
        if verb == "add":
            groups.add(int(group))
        else:
            groups.discard(int(group))
    end_all(groups, sys.argv[1])


if __name__ == "__main__":
    main()
