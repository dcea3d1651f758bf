"""Which resident chunk leaves next: LRU and S3-FIFO here, `learned.Learned`, all behind `ports.EvictionPolicy`.

They are told by the caller what is evictable (not leased, no resident child); what is not evictable when its turn
comes is parked (`queues.py`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable

from headwater.core.learned import Learned
from headwater.core.queues import NONE, Parked, Queues


class LRU:
    """Least recently used leaves first."""

    def __init__(self) -> None:
        self._queues = Queues(2)
        self._parked = Parked(self._queues, 1)

    def __len__(self) -> int:
        return sum(self._queues.sizes)

    def __repr__(self) -> str:
        return f"LRU({len(self)} entries, {len(self._parked)} of them parked)"

    def insert(self, entry: int, key: bytes, parent: int = NONE) -> None:
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

    def insert(self, entry: int, key: bytes, parent: int = NONE) -> None:
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


POLICIES: dict[str, Callable[[], LRU | S3FIFO | Learned]] = {"learned": Learned, "lru": LRU, "s3fifo": S3FIFO}
