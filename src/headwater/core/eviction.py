"""Which resident chunk leaves next: LRU and S3-FIFO behind one Protocol (`ports.EvictionPolicy`).

Both are told by the caller what is evictable (not leased, no resident child). An entry whose turn comes while it
is not evictable is *parked*: it stays first in line, and leaves as soon as it may, unless it is used again. Without
that, the start of a chain that was saved piece by piece (older than its end, which must go first) would be taken
for young each time its turn comes, and what is really young would leave in its place.

    old ── queue ──► young        the oldest entry is evictable: it leaves
      └──► parked                 it is in use: it waits here, and is asked again before all others
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
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
        return self._take_old(evictable, OLD_LOOKS)

    def take_any(self, evictable: Callable[[int], bool]) -> int | None:
        """Take out an entry that may leave, if there is one."""
        return self._take_old(evictable, len(self))

    def _take_old(self, evictable: Callable[[int], bool], looks: int) -> int | None:
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


class LRU:
    """Least recently used leaves first."""

    def __init__(self) -> None:
        self._queues = Queues(2)
        self._parked = Parked(self._queues, 1)

    def __len__(self) -> int:
        return sum(self._queues.sizes)

    def __repr__(self) -> str:
        return f"LRU({len(self)} entries, {len(self._parked)} of them parked)"

    def insert(self, entry: int, key: bytes) -> None:
        """See `ports.EvictionPolicy`."""
        self._queues.push(0, entry)

    def access(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        self._queues.take(entry)
        self._queues.push(0, entry)

    def remove(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        if self._queues.queue_of(entry) != NONE:
            self._queues.take(entry)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """See `ports.EvictionPolicy`."""
        found = self._parked.take(evictable)
        if found is not None:
            return found
        while self._queues.sizes[0]:
            entry = self._queues.oldest(0)
            self._queues.take(entry)
            if evictable(entry):
                return entry
            self._parked.park(entry)
        return self._parked.take_any(evictable)


SMALL, MAIN = 0, 1


class S3FIFO:
    """Three FIFO queues that keep one-hit wonders from flushing what is used again.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023: new entries start in a small
    queue (a tenth of all), move to the main queue when used again while there, and are remembered as ghosts
    when they leave it unused; a ghost that comes back starts in the main queue. Counters saturate at 3.
    """

    def __init__(self, small_share: float = 0.1) -> None:
        self._queues = Queues(4)
        self._parked = (Parked(self._queues, 2), Parked(self._queues, 3))
        self._small_share = small_share
        self._uses = array("b")
        self._keys: list[bytes] = []
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return sum(self._queues.sizes)

    def __repr__(self) -> str:
        small, main, *parked = self._queues.sizes
        return f"S3FIFO(small={small}, main={main}, parked={parked}, ghosts={len(self._ghosts)})"

    def insert(self, entry: int, key: bytes) -> None:
        """See `ports.EvictionPolicy`."""
        while len(self._uses) <= entry:
            self._uses.append(0)
            self._keys.append(b"")
        self._uses[entry], self._keys[entry] = 0, key
        known = key in self._ghosts
        if known:
            del self._ghosts[key]
        self._queues.push(MAIN if known else SMALL, entry)

    def access(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        if self._queues.queue_of(entry) > MAIN:
            # Its turn has come already: this use is what saves it, so that nothing is left to count.
            self._queues.take(entry)
            self._queues.push(MAIN, entry)
        else:
            self._uses[entry] = min(self._uses[entry] + 1, 3)

    def remove(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        if self._queues.queue_of(entry) != NONE:
            self._queues.take(entry)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """See `ports.EvictionPolicy`."""
        queues = self._queues
        for origin, parked in enumerate(self._parked):
            found = parked.take(evictable)
            if found is not None:
                return self._leave(found, origin)
        while queues.sizes[SMALL] or queues.sizes[MAIN]:
            small = queues.sizes[SMALL] + len(self._parked[SMALL])
            wants_small = small > self._small_share * len(self) or not queues.sizes[MAIN]
            origin = SMALL if queues.sizes[SMALL] and wants_small else MAIN
            entry = queues.oldest(origin)
            queues.take(entry)
            if self._uses[entry]:
                self._uses[entry] = 0 if origin == SMALL else self._uses[entry] - 1
                queues.push(MAIN, entry)
            elif evictable(entry):
                return self._leave(entry, origin)
            else:
                self._parked[origin].park(entry)
        for origin, parked in enumerate(self._parked):
            found = parked.take_any(evictable)
            if found is not None:
                return self._leave(found, origin)
        return None

    def _leave(self, entry: int, origin: int) -> int:
        if origin == SMALL:
            self._ghosts[self._keys[entry]] = None
            if len(self._ghosts) > len(self):
                self._ghosts.popitem(last=False)
        return entry


POLICIES: dict[str, Callable[[], LRU | S3FIFO]] = {"lru": LRU, "s3fifo": S3FIFO}
