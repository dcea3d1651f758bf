"""Which member takes a copy: the words of placement, and the one rule by which all of it picks a target.

An order says: pull this run of chunks, in this order. It has whole prefixes, because a chunk is of no use without
those before it; the one that pulls leaves out what it has. Bytes are counted for what it is thought not to have.
"""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Holders = Mapping[bytes, Collection[int]]
"""Who holds a chunk, by name, as located: members' numbers, our own among them or not."""

FULL = 0.9
"""A member that is fuller has no free room; what it takes makes it evict."""
SETTLE_S = 10.0
"""By then a member's report has what it was told to pull."""


class Reason(enum.Enum):
    """Why a copy is made."""

    HOT = "hot"
    REPLICAS = "replicas"
    DRAIN = "drain"
    REBALANCE = "rebalance"


@dataclass(frozen=True, slots=True)
class Chain:
    """Chunks of one prompt in its order, with their bytes, and what the last one is worth: its uses a second."""

    names: tuple[bytes, ...]
    sizes: tuple[int, ...]
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class Room:
    """A member as a place for copies. `load` is how busy its link is, 0 to 1; `takes` is false while it drains or is
    silent; `zone` is empty where the operator has said nothing."""

    number: int
    capacity_bytes: int
    used_bytes: int
    zone: str = ""
    load: float = 0.0
    takes: bool = True

    @property
    def fill(self) -> float:
        """How full it is, 0 to 1."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """Ask `target` to pull these chunks; `size_bytes` is what it is thought not to hold."""

    target: int
    names: tuple[bytes, ...]
    size_bytes: int
    reason: Reason


class Purse:
    """Bytes that may be spent: `bytes_s` a second, saved up for one second at the most. The last order before it is
    empty may be larger than what is left; the debt is waited for."""

    def __init__(self, bytes_s: float, now: float = 0.0) -> None:
        self._bytes_s, self._left, self._at_s = bytes_s, bytes_s, now

    def fill(self, now: float, scale: float = 1.0) -> None:
        """Time has passed, in which this share of the rate was ours."""
        gained = max(now - self._at_s, 0.0) * self._bytes_s * scale
        self._left = min(self._left + gained, self._bytes_s)
        self._at_s = max(now, self._at_s)

    def spend(self, size_bytes: int) -> bool:
        """Whether so many bytes may be spent; they are, then."""
        if self._left <= 0:
            return False
        self._left -= size_bytes
        return True

    @property
    def empty(self) -> bool:
        """Whether nothing may be spent."""
        return self._left <= 0


@dataclass(slots=True)
class Grants:
    """What was ordered lately, for which there is room no more though reports do not say so yet."""

    share: float
    """Of a target's capacity that may be filled with copies in `SETTLE_S` when it has no free room."""
    _given: dict[int, int] = field(default_factory=dict)
    _log: deque[tuple[float, int, int]] = field(default_factory=deque)

    def add(self, target: int, size_bytes: int, now: float) -> None:
        """An order was given."""
        self._log.append((now, target, size_bytes))
        self._given[target] = self._given.get(target, 0) + size_bytes

    def settle(self, now: float) -> None:
        """Forget what reports have by now."""
        while self._log and self._log[0][0] <= now - SETTLE_S:
            _, target, size_bytes = self._log.popleft()
            self._given[target] -= size_bytes
            if not self._given[target]:
                del self._given[target]

    def given(self, number: int) -> int:
        """Bytes ordered for a member that its report has not yet."""
        return self._given.get(number, 0)

    def room_bytes(self, room: Room) -> int:
        """How much more it may be given."""
        free = FULL * room.capacity_bytes - room.used_bytes
        return int(max(free, self.share * room.capacity_bytes)) - self.given(room.number)


def missing_bytes(chain: Chain, number: int, holders: Holders) -> int:
    """What a member would have to pull."""
    sizes = zip(chain.names, chain.sizes, strict=True)
    return sum(size_bytes for name, size_bytes in sizes if number not in holders.get(name, ()))


def whole_copies(names: Sequence[bytes], holders: Holders) -> set[int]:
    """Members that hold all of these."""
    sets = [set(holders.get(it, ())) for it in names]
    return set.intersection(*sets) if sets else set()


def pick(
    chain: Chain,
    rooms: Iterable[Room],
    holders: Holders,
    grants: Grants,
    besides: Collection[int],
    zones: Collection[str],
) -> tuple[Room, int] | None:
    """The member that takes a chain, and the bytes that it does not hold yet: in a zone without a copy if it can be,
    then where most of it is, the link is least busy and most is free. All who ask with equal reports pick the same."""
    best: tuple[tuple[bool, int, bytes], Room, int] | None = None
    total = max(sum(chain.sizes), 1)
    for room in rooms:
        if not room.takes or room.number in besides:
            continue
        lacks = missing_bytes(chain, room.number, holders)
        if not lacks or lacks > grants.room_bytes(room):
            continue
        fill = (room.used_bytes + grants.given(room.number)) / max(room.capacity_bytes, 1)
        # Tenths, so that small differences in reports do not decide.
        busy = round(10 * lacks / total) + round(10 * min(room.load, 1.0)) + round(10 * min(fill, 1.0))
        mixed = hashlib.blake2b(chain.names[-1] + room.number.to_bytes(8, "little"), digest_size=8).digest()
        key = room.zone in zones, busy, mixed
        if best is None or key < best[0]:
            best = key, room, lacks
    return (best[1], best[2]) if best is not None else None
