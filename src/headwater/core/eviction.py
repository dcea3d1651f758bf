"""Which resident chunk leaves next: LRU and S3-FIFO behind one Protocol (`ports.EvictionPolicy`).

Both are told by the caller what is evictable (not leased, no resident child). An entry that comes up for
eviction while it is not evictable is in use: it goes to the young end and the search goes on, so a search is
constant time on average and a parent never leaves before its child.
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


class LRU:
    """Least recently used leaves first."""

    def __init__(self) -> None:
        self._queues = Queues(1)

    def __len__(self) -> int:
        return self._queues.sizes[0]

    def __repr__(self) -> str:
        return f"LRU({len(self)} entries)"

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
        for _ in range(len(self)):
            entry = self._queues.oldest(0)
            self._queues.take(entry)
            if evictable(entry):
                return entry
            self._queues.push(0, entry)
        return None


SMALL, MAIN = 0, 1


class S3FIFO:
    """Three FIFO queues that keep one-hit wonders from flushing what is used again.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023: new entries start in a small
    queue (a tenth of all), move to the main queue when used again while there, and are remembered as ghosts
    when they leave it unused; a ghost that comes back starts in the main queue. Counters saturate at 3.
    """

    def __init__(self, small_share: float = 0.1) -> None:
        self._queues = Queues(2)
        self._small_share = small_share
        self._uses = array("b")
        self._keys: list[bytes] = []
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return sum(self._queues.sizes)

    def __repr__(self) -> str:
        return f"S3FIFO(small={self._queues.sizes[SMALL]}, main={self._queues.sizes[MAIN]}, ghosts={len(self._ghosts)})"

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
        self._uses[entry] = min(self._uses[entry] + 1, 3)

    def remove(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        if self._queues.queue_of(entry) != NONE:
            self._queues.take(entry)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """See `ports.EvictionPolicy`."""
        # A queue is spent once all of its entries in a row were found in use. Counts only fall during a
        # search, so it ends.
        in_use = [0, 0]
        while True:
            small, main = self._queues.sizes
            open_small, open_main = in_use[SMALL] < small, in_use[MAIN] < main
            if not (open_small or open_main):
                return None
            wants_small = small > self._small_share * (small + main)
            queue = SMALL if open_small and (wants_small or not open_main) else MAIN
            entry = self._queues.oldest(queue)
            self._queues.take(entry)
            if self._uses[entry]:
                self._uses[entry] = 0 if queue == SMALL else self._uses[entry] - 1
                self._queues.push(MAIN, entry)
                in_use[MAIN] = 0
            elif evictable(entry):
                if queue == SMALL:
                    self._remember(self._keys[entry])
                return entry
            else:
                self._queues.push(queue, entry)
                in_use[queue] += 1

    def _remember(self, key: bytes) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > len(self):
            self._ghosts.popitem(last=False)


POLICIES: dict[str, Callable[[], LRU | S3FIFO]] = {"lru": LRU, "s3fifo": S3FIFO}
