"""Shared memory that nobody uses any more: what a run has left behind, while other tests have theirs."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

FOLDER = "/dev/shm"
NAME = re.compile(rf"{FOLDER}/([^/\s]+)")


def orphans() -> set[str]:
    """Names in /dev/shm that no process has open or mapped."""
    names = set(os.listdir(FOLDER))  # first: what is made while we look has somebody who holds it
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                names.difference_update(NAME.findall((process / "maps").read_text()))
            names.difference_update(_open_in(process))
    return names


def _open_in(process: Path) -> list[str]:
    found: list[str] = []
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                found += NAME.findall(os.readlink(link))
    return found
