"""Notifications that have come and were not yet taken: bounded, for threads and for event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from headwater.errors import RefusedError


@dataclass(frozen=True, slots=True)
class Notification:
    """What a peer wanted us to know."""

    peer: str
    topic: str
    body: bytes


class Inbox:
    """A queue of at most so many notifications and bytes; who would add one more is told that it is full."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._bytes = 0
        self._waiting: deque[Notification] = deque()
        self._changed = threading.Condition()
        self._loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, it: Notification) -> None:
        """Add one; raises RefusedError when there is no room, so that its sender knows that it was not taken."""
        with self._changed:
            full = len(self._waiting) >= self._most or self._bytes + len(it.body) > self._most_bytes
            if full or self._closed:
                most = f"at most {self._most} that nobody has taken, of {self._most_bytes} bytes in all"
                raise RefusedError("notifications", most, "one more", "take them, or send it again later")
            self._waiting.append(it)
            self._bytes += len(it.body)
            self._wake()

    def take(self, wait_s: float | None) -> Iterator[Notification]:
        """Each one as it comes, until none has come for `wait_s` seconds (None: for ever) or the inbox is closed."""
        while True:
            until_s = None if wait_s is None else time.monotonic() + wait_s
            with self._changed:
                while not self._waiting and not self._closed:
                    left_s = None if until_s is None else until_s - time.monotonic()
                    if left_s is not None and left_s <= 0.0:
                        return
                    self._changed.wait(left_s)
                if not self._waiting:
                    return
                it = self._pop()
            yield it

    async def atake(self) -> AsyncIterator[Notification]:
        """The same for a coroutine, until the inbox is closed."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._changed:
            self._loops.append(entry)
        try:
            while True:
                with self._changed:
                    entry[1].clear()
                    it = self._pop() if self._waiting else None
                    if it is None and self._closed:
                        return
                if it is None:
                    await entry[1].wait()
                else:
                    yield it
        finally:
            with self._changed:
                self._loops.remove(entry)

    def close(self) -> None:
        """Nothing more comes in; what is there can still be taken."""
        with self._changed:
            self._closed = True
            self._wake()

    def _pop(self) -> Notification:
        it = self._waiting.popleft()
        self._bytes -= len(it.body)
        return it

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, event in self._loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)
