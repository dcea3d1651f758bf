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


YOUNG_LOOKS, OLD_LOOKS = 8, 4


def take_parked(queues: Queues, parked: int, evictable: Callable[[int], bool]) -> int | None:
    """Take an entry out of the parked queue that may leave by now, looking only at a few.

    At the young end are the ancestors of what left last; the old end is gone through bit by bit.
    """
    entry = queues.youngest(parked)
    for _ in range(YOUNG_LOOKS):
        if entry == NONE:
            return None
        if evictable(entry):
            queues.take(entry)
            return entry
        entry = queues.older(entry)
    return take_rotating(queues, parked, evictable, OLD_LOOKS)


def take_rotating(queues: Queues, queue: int, evictable: Callable[[int], bool], looks: int) -> int | None:
    """Take the first evictable one of the `looks` oldest entries; the others go to the young end."""
    for _ in range(looks):
        entry = queues.oldest(queue)
        queues.take(entry)
        if evictable(entry):
            return entry
        queues.push(queue, entry)
    return None


RECENT, PARKED = 0, 1


class LRU:
    """Least recently used leaves first."""

    def __init__(self) -> None:
        self._queues = Queues(2)

    def __len__(self) -> int:
        return sum(self._queues.sizes)

    def __repr__(self) -> str:
        return f"LRU({len(self)} entries, {self._queues.sizes[PARKED]} of them parked)"

    def insert(self, entry: int, key: bytes) -> None:
        """See `ports.EvictionPolicy`."""
        self._queues.push(RECENT, entry)

    def access(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        self._queues.take(entry)
        self._queues.push(RECENT, entry)

    def remove(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        if self._queues.queue_of(entry) != NONE:
            self._queues.take(entry)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """See `ports.EvictionPolicy`."""
        queues = self._queues
        found = take_parked(queues, PARKED, evictable)
        while found is None and queues.sizes[RECENT]:
            entry = queues.oldest(RECENT)
            queues.take(entry)
            if evictable(entry):
                return entry
            queues.push(PARKED, entry)
        if found is None:
            found = take_rotating(queues, PARKED, evictable, queues.sizes[PARKED])
        return found


SMALL, MAIN, SMALL_PARKED, MAIN_PARKED = 0, 1, 2, 3
PARKED_OF = (SMALL_PARKED, MAIN_PARKED)


class S3FIFO:
    """Three FIFO queues that keep one-hit wonders from flushing what is used again.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023: new entries start in a small
    queue (a tenth of all), move to the main queue when used again while there, and are remembered as ghosts
    when they leave it unused; a ghost that comes back starts in the main queue. Counters saturate at 3.
    """

    def __init__(self, small_share: float = 0.1) -> None:
        self._queues = Queues(4)
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
        if self._queues.queue_of(entry) in PARKED_OF:
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
        for origin, parked in enumerate(PARKED_OF):
            found = take_parked(queues, parked, evictable)
            if found is not None:
                return self._leave(found, origin)
        while queues.sizes[SMALL] or queues.sizes[MAIN]:
            small = queues.sizes[SMALL] + queues.sizes[SMALL_PARKED]
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
                queues.push(PARKED_OF[origin], entry)
        for origin, parked in enumerate(PARKED_OF):
            found = take_rotating(queues, parked, evictable, queues.sizes[parked])
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
