"""Eviction that keeps the last copy of a chunk in the cluster for last.

Theory of operation. Around any policy: of the next few victims that it would choose, the first leaves that others hold
as well. Those before it are *spared*: for the policy they are in use, so that they stay first in line.

    candidate    others hold it                                   -> leaves
                 spared already, and its time is not over         -> refused again
                 its time is over, or as many are spared as may,
                 or enough were looked at in vain                 -> leaves
                 else                                             -> spared: refused

At most an eighth of the entries are spared (or `SPARED_LEAST`), for at most as many victims: so much longer than its
turn does a last copy stay. How many are looked at doubles with luck, up to `LOOKS_MAX`, and halves without, so that
where next to nothing is held twice the policy's order is kept. As long as nothing is, the policy is alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headwater.core.queues import NONE

if TYPE_CHECKING:
    from headwater.ports import EvictionPolicy

LOOKS_MAX = 16
SPARED_SHARE, SPARED_LEAST = 8, 64


class Copies:
    """How many other members hold a chunk, as far as answers to announcements said; for all policies of a node."""

    def __init__(self, keys_max: int = 1 << 20) -> None:
        self._max = keys_max
        self._others: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._others)

    def __repr__(self) -> str:
        return f"Copies({len(self)} chunks are held elsewhere)"

    def told(self, others: Mapping[bytes, int]) -> None:
        """So many others hold these chunks, by key."""
        for key, count in others.items():
            self._others.pop(key, None)
            if count > 0:
                self._others[key] = count
        while len(self._others) > self._max:
            self._others.popitem(last=False)

    def others(self, key: bytes) -> int:
        """How many others hold a chunk; 0 where nothing is known."""
        return self._others.get(key, 0)


class SpreadEviction:
    """An eviction policy that lets chunks go first of which there are other copies."""

    def __init__(self, inner: EvictionPolicy, copies: Copies) -> None:
        """Takes ownership of `inner`."""
        self._inner, self._copies = inner, copies
        self._keys: list[bytes] = []
        self._spared: dict[int, int] = {}
        """The number of the victim instead of which an entry was spared."""
        self._looks = LOOKS_MAX
        self._victims = 0
        self.preferred = 0
        """Victims that left before a last copy."""

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return f"SpreadEviction({self._inner!r}, {len(self._spared)} spared, {self.preferred} preferred)"

    def insert(self, entry: int, key: bytes, parent: int = NONE) -> None:
        """See `ports.EvictionPolicy`."""
        self._keys.extend([b""] * (entry + 1 - len(self._keys)))
        self._keys[entry] = key
        self._inner.insert(entry, key, parent)

    def access(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        self._spared.pop(entry, None)
        self._inner.access(entry)

    def remove(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        self._spared.pop(entry, None)
        self._inner.remove(entry)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """See `ports.EvictionPolicy`."""
        found = self._scan(evictable) if self._copies else None
        if found is None:
            found = self._inner.victim(evictable)
        if found is not None:
            self._victims += 1
            self._spared.pop(found, None)
        return found

    def _scan(self, evictable: Callable[[int], bool]) -> int | None:
        """The policy's next victim that may leave and is not spared; None if it has none."""
        spared, spared_max = self._spared, max(len(self) // SPARED_SHARE, SPARED_LEAST)
        looks = 0

        def leaves(entry: int) -> bool:
            nonlocal looks
            if not evictable(entry):
                return False
            if self._copies.others(self._keys[entry]):
                return True
            if entry in spared:
                return self._victims - spared[entry] >= spared_max
            if looks >= self._looks or len(spared) >= spared_max:
                return True
            looks += 1
            spared[entry] = self._victims
            return False

        found = self._inner.victim(leaves)
        if found is not None and self._copies.others(self._keys[found]):
            self.preferred += bool(spared)
            self._looks = min(2 * self._looks, LOOKS_MAX)
        elif looks:
            self._looks = max(self._looks // 2, 1)
        return found
