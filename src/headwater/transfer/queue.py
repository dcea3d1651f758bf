"""Transfers that wait for their turn: so many go to one peer at a time, and one that a slow peer keeps waiting ends at
its deadline and not after it."""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from headwater.transfer.transfer import Transfer
from headwater.types import Outcome

THREADS_MAX = 128
Work = Callable[[], list[Outcome]]


@dataclass(slots=True, eq=False)
class _Job:
    """One transfer, and what carries it out."""

    peer: int
    transfer: Transfer
    work: Work


class TransferQueue:
    """Threads that carry transfers out, in the order in which they came, as far as their peers have room. Any thread
    may call anything."""

    def __init__(self, name: str, per_peer: int) -> None:
        self._per_peer = per_peer
        self._most = max(min(8 * per_peer, THREADS_MAX), per_peer)
        self._inside = threading.local()
        self._pool = ThreadPoolExecutor(self._most, name, initializer=self._enter)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, deque[_Job]] = OrderedDict()
        self._running: dict[int, int] = {}
        self._total = 0
        self._timer = _Timer(f"{name}-deadlines", self._enter)

    def __repr__(self) -> str:
        return f"TransferQueue({self._total} under way, {sum(map(len, self._waiting.values()))} wait)"

    @property
    def is_inside(self) -> bool:
        """Whether the caller is one of these threads."""
        return getattr(self._inside, "entered", False)

    def submit(self, peer: int, transfer: Transfer, until_s: float, items: int, work: Work) -> None:
        """Carry a transfer out when its turn has come; one whose turn has not come in time has failed."""
        job = _Job(peer, transfer, work)
        with self._lock:
            begins = self._has_room(peer)
            if begins:
                self._count(peer, 1)
            else:
                self._waiting.setdefault(peer, deque()).append(job)
        if begins:
            self._begin(job)
        else:
            self._timer.add(until_s, transfer, items)

    def close(self) -> None:
        """Wait for all threads; transfers whose turn has not come yet have been cancelled by the caller."""
        with self._lock:
            self._waiting.clear()
        self._timer.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _enter(self) -> None:
        self._inside.entered = True

    def _has_room(self, peer: int) -> bool:
        return self._total < self._most and self._running.get(peer, 0) < self._per_peer

    def _count(self, peer: int, change: int) -> None:
        self._total += change
        now = self._running.pop(peer, 0) + change
        if now:
            self._running[peer] = now

    def _begin(self, job: _Job) -> None:
        try:
            begun = self._pool.submit(_carry, job)
        except RuntimeError:  # the process is ending
            job.transfer.abort()
            return
        begun.add_done_callback(lambda it: self._end(job, it))

    def _end(self, job: _Job, begun: Future[list[Outcome]]) -> None:
        with self._lock:
            self._count(job.peer, -1)
            following = self._next()
            if following is not None:
                self._count(following.peer, 1)
        if following is not None:
            self._begin(following)
        _settle(job.transfer, begun)

    def _next(self) -> _Job | None:
        """Whose turn it is: peers take turns, too."""
        for peer in list(self._waiting):
            if not self._has_room(peer):
                continue
            jobs = self._waiting.pop(peer)
            while jobs:
                job = jobs.popleft()
                if not job.transfer.done():
                    if jobs:
                        self._waiting[peer] = jobs
                    return job
        return None


class _Timer:
    """Ends transfers whose turn has not come by their deadline. Its thread begins with the first that waits."""

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        self._name, self._enter = name, enter
        self._due: list[tuple[float, int, Transfer, int]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, until_s: float, transfer: Transfer, items: int) -> None:
        """End this one then, if it has not begun."""
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            heapq.heappush(self._due, (until_s, next(self._numbers), transfer, items))
            if self._due[0][2] is transfer:
                self._changed.notify()

    def close(self) -> None:
        """No more of that."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._enter()
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                _, _, transfer, items = heapq.heappop(self._due)
            transfer.expire(items)


def _carry(job: _Job) -> list[Outcome]:
    if not job.transfer.begin():
        raise CancelledError
    return job.work()


def _settle(transfer: Transfer, begun: Future[list[Outcome]]) -> None:
    """The thread that carried a transfer out is through with it."""
    if not transfer.running():
        transfer.abort()
        return
    error = begun.exception()
    if transfer.ending and (error is not None or Outcome.FAILED in begun.result()):
        error = CancelledError()
    if error is not None:
        transfer.set_exception(error)
    else:
        transfer.set_result(begun.result())
