"""Quotas that all workers of one host share: one page of anonymous memory, inherited by each worker.

Theory of operation. A *slot* belongs to one tenant, found by a digest of its name. It holds two clocks (requests,
tokens) and one cell for each worker's *row*: how many requests of that tenant are in progress there.

    slot:  | name (2 words) | requests' clock | tokens' clock | row 0 | row 1 | ... |

- A worker writes its own row only; what is in progress is the sum of the rows. The parent clears the row of a worker
  that died, so nothing leaks, however it died.
- A clock is the theoretical arrival time of GCRA (ITU-T I.371): spending moves it forward by cost / rate, time catches
  up with it, and what is ahead of now may be a minute at most. That is a token bucket of a minute's quota: a whole
  minute may be spent at once, and then as much as comes back.
- Looking and taking are one step under a lock of the kernel's (POSIX, of this process), which ends with its owner. A
  worker that is stopped while it has the lock would stop the others: they wait LOCK_S, then go on without the lock for
  CARELESS_S and may be over by one request a worker meanwhile. That is counted in `careless`.
- Slots of tenants that are not asked for any more are given to others once their rows are zero and their clocks in the
  past: then they are as good as new.

Times are of CLOCK_MONOTONIC, which is the same in all processes of a host, in nanoseconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from itertools import count
from time import monotonic, sleep
from typing import NamedTuple

from headwater.errors import ResourceError

SLOTS = 2048
ROWS = 256
MINUTE_S = 60.0
DEBT_S = 3600
"""Who has spent more tokens than an hour gives back starts afresh then."""
FULL_S = 1.0
"""When to come back if too much is in progress: nobody knows when something ends."""
LOCK_S = 0.25
"""Whoever has the lock needs microseconds, but may lose its core within them: on a busy host for tens of ms."""
YIELDS = 20
PAUSE_S = 0.0002
CARELESS_S = 1.0
_MAGIC = 0x6864_7771_7461_0001
_MINUTE = 60_000_000_000
_HEAD = 3
_WORD = 8
_FIXED = 4
_REQUESTS, _TOKENS, _ROWS = 2, 3, 4


class Quota(NamedTuple):
    """What one tenant may do; None: as much as it likes."""

    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


UNLIMITED = Quota()


class Wait(NamedTuple):
    """Too much: which quota, and in how many seconds there is room again."""

    reason: str
    seconds: float


class QuotaPage:
    """The page as one process sees it. `create` in the parent, `open` in each worker (by the inherited descriptor)."""

    def __init__(self, descriptor: int, row: int | None) -> None:
        """Map it; the page owns the descriptor from now on. Raises ResourceError if it is no such page."""
        size = os.fstat(descriptor).st_size
        self.descriptor = descriptor
        self.careless = 0
        self._own = _ROWS + (row or 0)
        self._slots: dict[str, tuple[int, int, int]] = {}
        self._careless_until = 0.0
        if size < _HEAD * _WORD:
            raise ResourceError(f"descriptor {descriptor} has {size} bytes: it is no page of quotas")
        self._memory = mmap.mmap(descriptor, size)
        self._cells = memoryview(self._memory).cast("q")
        magic, self._rows, self._count = self._cells[:_HEAD]
        self._stride = _FIXED + self._rows
        fits = 0 < self._rows <= ROWS and size == (_HEAD + self._count * self._stride) * _WORD
        if magic != _MAGIC or not fits or (row is not None and not 0 <= row < self._rows):
            self.close()
            raise ResourceError(f"descriptor {descriptor} is no page of quotas with a row {row}")

    @classmethod
    def create(cls, rows: int, slots: int = SLOTS) -> QuotaPage:
        """A new page for so many workers, in the parent; its descriptor may be passed on."""
        if not 0 < rows <= ROWS:
            raise ResourceError(f"{rows} workers: a page of quotas has room for 1 to {ROWS}")
        descriptor = os.memfd_create("headwater-quotas", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, (_HEAD + slots * (_FIXED + rows)) * _WORD)
        os.pwrite(descriptor, b"".join(it.to_bytes(_WORD, "little") for it in (_MAGIC, rows, slots)), 0)
        return cls(descriptor, None)

    @classmethod
    def open(cls, descriptor: int, row: int) -> QuotaPage:
        """The page in a worker, which writes this row."""
        return cls(descriptor, row)

    def close(self) -> None:
        """Unmap it. May be called again."""
        if self.descriptor >= 0:
            self._cells.release()
            self._memory.close()
            os.close(self.descriptor)
            self.descriptor = -1

    def clear(self, row: int) -> None:
        """A worker is gone, with all that was in progress there. For the parent, before that row has another worker."""
        locked = self._lock()
        try:
            for start in range(_HEAD, len(self._cells), self._stride):
                self._cells[start + _ROWS + row] = 0
        finally:
            self._unlock(locked)

    def enter(self, name: str, quota: Quota, now: float) -> Wait | None:
        """One more request in progress; None if it is taken."""
        if quota is UNLIMITED and self._enter_again(name):
            return None
        at = int(now * 1e9)
        locked = self._lock()
        try:
            start = self._find(name, at)
            wait = None if quota is UNLIMITED else self._judge(start, quota, at)
            if wait is None:
                self._cells[start + self._own] += 1
                if quota.requests_per_minute:
                    self._spend(start + _REQUESTS, quota.requests_per_minute, 1, at)
            return wait
        finally:
            self._unlock(locked)

    def _enter_again(self, name: str) -> bool:
        """Count a request of a tenant without quotas that has others in progress here. Without the lock, as in `leave`:
        that costs more than anything else here."""
        start = self._known(name)
        if start is None or self._cells[start + self._own] <= 0:
            return False
        self._cells[start + self._own] += 1
        return True

    def leave(self, name: str) -> None:
        """One request less in progress. Without the lock: nobody else writes our cell, or takes a slot we are in."""
        start = self._known(name)
        if start is not None:
            cell = start + self._own
            self._cells[cell] = max(0, self._cells[cell] - 1)

    def used(self, name: str, quota: Quota, tokens: int, now: float) -> None:
        """Tokens that were spent. They are known when it is too late to refuse: what is too much is paid back first, up
        to DEBT_S of waiting."""
        if not quota.tokens_per_minute or tokens <= 0:
            return
        at = int(now * 1e9)
        locked = self._lock()
        try:
            self._spend(self._find(name, at) + _TOKENS, quota.tokens_per_minute, tokens, at)
        finally:
            self._unlock(locked)

    def in_progress(self, name: str) -> int:
        """Requests of this tenant at all workers, as far as this process has seen the tenant."""
        start = self._known(name)
        return 0 if start is None else sum(self._rows_of(start))

    def _judge(self, start: int, quota: Quota, at: int) -> Wait | None:
        """Which quota is spent, the one that takes longest first."""
        waits = []
        if quota.concurrency is not None and sum(self._rows_of(start)) >= quota.concurrency:
            waits.append(Wait("concurrency", FULL_S))
        if quota.requests_per_minute is not None:
            seconds = self._until(start + _REQUESTS, quota.requests_per_minute, at)
            waits.append(Wait("requests_per_minute", seconds))
        if quota.tokens_per_minute is not None:
            seconds = self._until(start + _TOKENS, quota.tokens_per_minute, at)
            waits.append(Wait("tokens_per_minute", seconds))
        longest = max(waits, key=_seconds, default=None)
        return longest if longest is not None and longest.seconds > 0 else None

    def _until(self, clock: int, per_minute: int, at: int) -> float:
        """How long until one more fits in; 0 if it does now."""
        if per_minute <= 0:
            return MINUTE_S
        ahead = max(0, self._cells[clock] - at) + _MINUTE // per_minute - _MINUTE
        return max(0, ahead) / 1e9

    def _spend(self, clock: int, per_minute: int, cost: int, at: int) -> None:
        spent = max(self._cells[clock], at) + cost * _MINUTE // per_minute
        self._cells[clock] = min(spent, at + DEBT_S * 1_000_000_000)

    def _known(self, name: str) -> int | None:
        """The slot that a tenant was last seen in, if it is still its own."""
        seen = self._slots.get(name)
        if seen is None:
            return None
        start, first, second = seen
        return start if self._cells[start] == first and self._cells[start + 1] == second else None

    def _find(self, name: str, at: int) -> int:
        """A tenant's slot, a new one if it has none; under the lock. Slots change hands while nobody is in them."""
        known = self._known(name)
        if known is not None:
            return known
        wanted = _digest(name)
        starts = range(_HEAD, len(self._cells), self._stride)
        named = ((start, (self._cells[start], self._cells[start + 1])) for start in starts)
        start = next((start for start, words in named if words in (wanted, (0, 0))), -1)
        if start < 0:
            start = next((start for start in starts if self._idle(start, at)), -1)
        if start < 0:
            raise ResourceError(f"more than {self._count} tenants have requests in progress: use fewer tenants")
        if (self._cells[start], self._cells[start + 1]) != wanted:
            self._cells[start + _REQUESTS], self._cells[start + _TOKENS] = 0, 0
            self._cells[start], self._cells[start + 1] = wanted
        self._slots[name] = (start, *wanted)
        return start

    def _idle(self, start: int, at: int) -> bool:
        late = max(self._cells[start + _REQUESTS], self._cells[start + _TOKENS])
        return late <= at and not any(self._rows_of(start))

    def _rows_of(self, start: int) -> memoryview[int]:
        return self._cells[start + _ROWS : start + _ROWS + self._rows]

    def _unlock(self, locked: bool) -> None:
        if locked:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        """Whether we have the lock; not if who has it does not give it back."""
        patient = monotonic() >= self._careless_until
        deadline_s = monotonic() + (LOCK_S if patient else 0.0)
        for attempt in count():
            try:
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if monotonic() >= deadline_s:
                    break
                if attempt < YIELDS:
                    os.sched_yield()
                else:
                    sleep(PAUSE_S)
        if patient:
            self._careless_until = monotonic() + CARELESS_S
        self.careless += 1
        return False


def _seconds(wait: Wait) -> float:
    return wait.seconds


def _digest(name: str) -> tuple[int, int]:
    """Two words for a name; not secret, only short."""
    it = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return int.from_bytes(it[:8], "little", signed=True), int.from_bytes(it[8:], "little", signed=True)
