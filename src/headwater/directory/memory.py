"""The directory of one host: `core.directory.Records` behind a lock, for the nodes of one process."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from headwater.core.directory import FORGET_S, SILENT_S, Records
from headwater.errors import UnavailableError
from headwater.types import Announced, Beat, Listed, Member, Replica, Standing

SWEEP_ENTRIES = 1024


class MemoryDirectory:
    """See `ports.Directory`. `sick` makes every call fail; `now` tells the time by which silence is measured."""

    def __init__(
        self, silent_s: float = SILENT_S, forget_s: float = FORGET_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.sick = False
        self._now, self._limits = now, (silent_s, forget_s)
        self._lock = threading.Lock()
        self.records = self._empty()

    def __repr__(self) -> str:
        return f"MemoryDirectory({self.records!r})"

    def join(self, member: Member, until_s: float) -> int:
        """See `Directory`."""
        self._check(until_s)
        with self._lock:
            return self.records.join(member, self._now())

    def beat(self, number: int, standing: Standing, report: bytes, until_s: float) -> Beat | None:
        """See `Directory`."""
        self._check(until_s)
        with self._lock:
            return self.records.beat(number, standing, report, self._now())

    def announce(self, number: int, serial: int, changes: Sequence[Announced], until_s: float) -> bytes:
        """See `Directory`."""
        self._check(until_s)
        with self._lock:
            return self.records.announce(number, serial, changes, self._now())

    def locate(self, names: Sequence[bytes], until_s: float) -> list[tuple[Replica, ...]]:
        """See `Directory`."""
        self._check(until_s)
        with self._lock:
            return self.records.locate(names, self._now())

    def members(self, until_s: float) -> list[Listed]:
        """See `Directory`."""
        self._check(until_s)
        with self._lock:
            return self.records.members(self._now())

    def leave(self, number: int, until_s: float) -> None:
        """See `Directory`."""
        self._check(until_s)
        with self._lock:
            self.records.leave(number, self._now())

    def sweep(self, until_s: float) -> bool:
        """Drop what ended lives have left behind, until then at most; whether there is more to do."""
        self._check(until_s)
        while time.monotonic() < until_s:
            with self._lock:
                if not self.records.sweep(SWEEP_ENTRIES, self._now()):
                    return False
        return True

    def forget_all(self) -> None:
        """Lose everything, as a server that is started anew does."""
        with self._lock:
            self.records = self._empty()

    def close(self) -> None:
        """See `Directory`."""

    def _empty(self) -> Records:
        return Records(secrets.token_hex(8), *self._limits)

    def _check(self, until_s: float) -> None:
        if self.sick or time.monotonic() >= until_s:
            raise UnavailableError(f"the directory {'is away' if self.sick else 'was asked too late'}")
