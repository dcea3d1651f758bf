"""Looks after reads that make no progress: another holder may be quicker, and nobody waits for a node that is paused.

A read that has neither ended nor made progress in the time that its peer usually needs has *stalled*. It is aborted
when there is somewhere else to go and the budget for hedges allows it, and after `GIVE_UP_S` without progress, whoever
else there is.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headwater.core.links import Begun, Peers
from headwater.ports import Link

GIVE_UP_S = 1.0


@dataclass(slots=True)
class Watched:
    """A read under way, and what became of the watch over it."""

    begun: Begun
    link: Link
    has_others: bool
    moved_s: float
    """When it was last seen to make progress."""
    moved_bytes: int
    over: bool = False
    aborted: bool = False
    stalled: bool = False
    gave_up: bool = False
    """Nothing came for `GIVE_UP_S`: whoever is there does not work now."""


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    watched: Watched = field(compare=False)


class StallWatch:
    """One thread for all reads of a node. `lock` is that of the `Peers`."""

    def __init__(self, peers: Peers, lock: threading.Lock) -> None:
        self._peers, self._lock = peers, lock
        self._due: list[_Due] = []
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="headwater-stalls", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, begun: Begun, link: Link, *, has_others: bool) -> Iterator[Watched]:
        """Watch a read for as long as this block lasts."""
        now = time.monotonic()
        watched = Watched(begun, link, has_others, now, link.moved_bytes())
        with self._changed:
            heapq.heappush(self._due, _Due(now + min(begun.stall_s, GIVE_UP_S), watched))
            if self._due[0].watched is watched:
                self._changed.notify()
        try:
            yield watched
        finally:
            with self._changed:
                watched.over = True

    def close(self) -> None:
        """End the thread; reads under way are not watched any more."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._ending:
                now = time.monotonic()
                while self._due and (self._due[0].at_s <= now or self._due[0].watched.over):
                    watched = heapq.heappop(self._due).watched
                    if not watched.over:
                        self._look(watched, now)
                wait_s = self._due[0].at_s - time.monotonic() if self._due else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)

    def _look(self, watched: Watched, now: float) -> None:
        """A read is late. Called with the condition held, so that the link cannot be given to another meanwhile."""
        moved_bytes = watched.link.moved_bytes()
        if moved_bytes != watched.moved_bytes:
            watched.moved_bytes, watched.moved_s = moved_bytes, now
            heapq.heappush(self._due, _Due(now + min(watched.begun.stall_s, GIVE_UP_S), watched))
            return
        with self._lock:
            self._peers.stalled(watched.begun, now, random.random())
            watched.stalled = True
            watched.gave_up = now - watched.moved_s >= GIVE_UP_S
            goes_on = watched.gave_up or (watched.has_others and self._peers.may_go_on(watched.begun))
        if goes_on:
            watched.aborted = True
            watched.link.abort()
            return
        again_s = min(now + watched.begun.stall_s, watched.moved_s + GIVE_UP_S)
        heapq.heappush(self._due, _Due(max(again_s, now + 0.01), watched))
