"""Queues of entry numbers, and the place where entries wait that are in use when their turn to leave comes.

An entry whose turn comes while it is not evictable (leased, or with a resident child) is *parked*: it stays first
in line, and leaves as soon as it may, unless it is used again. Without that, the start of a chain that was saved
piece by piece (older than its end, which must go first) would be taken for young each time its turn comes, and what
is really young would leave in its place.

    old ── queue ──► young        the oldest entry is evictable: it leaves
      └──► parked                 it is in use: it waits here, and is asked again before all others
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

NONE = -1


class Queues:
    """Doubly linked queues over entry numbers, 9 bytes an entry; each entry is in at most one queue."""

    def __init__(self, count: int) -> None:
        self._older, self._younger = array("i"), array("i")
        self._queue = array("b")
        self._oldest, self._youngest = [NONE] * count, [NONE] * count
        self.sizes = [0] * count

    def queue_of(self, entry: int) -> int:
        """The queue that an entry is in, or NONE."""
        return self._queue[entry] if entry < len(self._queue) else NONE

    def push(self, queue: int, entry: int) -> None:
        """Add an entry at the young end."""
        while len(self._queue) <= entry:
            self._older.append(NONE)
            self._younger.append(NONE)
            self._queue.append(NONE)
        assert self._queue[entry] == NONE, f"entry {entry} is in queue {self._queue[entry]} already"
        last = self._youngest[queue]
        self._older[entry], self._younger[entry] = last, NONE
        if last == NONE:
            self._oldest[queue] = entry
        else:
            self._younger[last] = entry
        self._youngest[queue] = entry
        self._queue[entry] = queue
        self.sizes[queue] += 1

    def take(self, entry: int) -> None:
        """Remove an entry from its queue."""
        queue = self._queue[entry]
        assert queue != NONE, f"entry {entry} is in no queue"
        older, younger = self._older[entry], self._younger[entry]
        if older == NONE:
            self._oldest[queue] = younger
        else:
            self._younger[older] = younger
        if younger == NONE:
            self._youngest[queue] = older
        else:
            self._older[younger] = older
        self._queue[entry] = NONE
        self.sizes[queue] -= 1

    def oldest(self, queue: int) -> int:
        """The entry at the old end, or NONE."""
        return self._oldest[queue]

    def youngest(self, queue: int) -> int:
        """The entry at the young end, or NONE."""
        return self._youngest[queue]

    def older(self, entry: int) -> int:
        """The next entry towards the old end of its queue, or NONE."""
        return self._older[entry]

    def younger(self, entry: int) -> int:
        """The next entry towards the young end of its queue, or NONE."""
        return self._younger[entry]


YOUNG_LOOKS, OLD_LOOKS = 64, 4


class Parked:
    """The entries of one queue whose turn has come while they were in use.

    At the young end are the ancestors of what left last, in the pieces in which they were saved: most likely one of
    them may leave next. The rest is gone through bit by bit.
    """

    def __init__(self, queues: Queues, queue: int) -> None:
        self._queues, self._queue = queues, queue
        self._next = NONE

    def __len__(self) -> int:
        return self._queues.sizes[self._queue]

    def park(self, entry: int) -> None:
        """Let an entry wait that is in no queue."""
        self._queues.push(self._queue, entry)

    def take(self, evictable: Callable[[int], bool]) -> int | None:
        """Take out an entry that may leave by now, looking only at a few."""
        queues = self._queues
        entry = queues.youngest(self._queue)
        for _ in range(YOUNG_LOOKS):
            if entry == NONE:
                return None
            if evictable(entry):
                queues.take(entry)
                return entry
            entry = queues.older(entry)
        return self.take_old(evictable)

    def take_any(self, evictable: Callable[[int], bool]) -> int | None:
        """Take out an entry that may leave, if there is one."""
        return self.take_old(evictable, len(self))

    def take_old(self, evictable: Callable[[int], bool], looks: int = OLD_LOOKS) -> int | None:
        """Take out an entry that may leave by now, looking at the next few of a round through all."""
        queues = self._queues
        for _ in range(looks):
            entry = self._next
            if entry == NONE or queues.queue_of(entry) != self._queue:
                entry = queues.oldest(self._queue)
            self._next = queues.younger(entry)
            if evictable(entry):
                queues.take(entry)
                return entry
        return None
