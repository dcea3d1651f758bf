"""What a node tells the directory: what its tiers commit and lose, in batches with serial numbers, in order.

Theory of operation. What the directory has, and the batch that is under way, and the queue make up the truth: each
chunk and tier is in the queue at most once, with what became of it last.

    OUTSIDE   no number yet                                                      the driver joins -> joined()
    BEHIND    it has not what we told it: it does not know our number, has       the driver leaves and joins
              another serial or generation, refuses a batch, or a queue was full -> joined()
    MEMBER    joined(): a walk over the inventory feeds the queue step by step, while changes go in as they come;
              then changes alone

In OUTSIDE and BEHIND nothing is queued: the walk will find what is there. A new number is the way out of BEHIND because
nobody can tell what the old one still stands for: chunks that left while the directory was away, or that came back
with an old copy of it. What entries say of a number that has ended counts for nothing.

A failed batch may have been applied. It is sent again with the same serial until it is acknowledged or refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from headwater.types import Announced, Beat, Changed, Stored, Tier, chunk_name

BATCH_CHANGES = 512
QUEUE_LIMIT = 65_536
Inventory = Iterator[Sequence[Announced]]
"""What is there, in steps of about BATCH_CHANGES, some of which may be empty. A step is true when it is drawn, and all
changes up to then were fed before; what comes later may be in a later step or not."""


class Standpoint(enum.Enum):
    """How we stand to the directory, which says what the driver has to do next."""

    OUTSIDE = "outside"
    """Join."""
    BEHIND = "behind"
    """Leave, though it may not know us, then join."""
    MEMBER = "member"
    """Send batches."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What `Directory.announce` is to be called with."""

    number: int
    serial: int
    changes: tuple[Announced, ...]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What was acknowledged when a beat was sent; its answer is compared with that."""

    number: int
    serial: int


class Announcing:
    """One node's side, for one thread; one batch is under way at a time. `inventory` begins a walk over what `tiers`
    hold: of others nothing is announced."""

    def __init__(
        self,
        inventory: Callable[[], Inventory],
        limit: int = QUEUE_LIMIT,
        tiers: Collection[Tier] = (Tier.HOST, Tier.DISK),
    ) -> None:
        self._inventory, self._limit, self._tiers = inventory, limit, tiers
        self.standpoint = Standpoint.OUTSIDE
        self.number = 0
        """Ours in the directory; 0 before the first join."""
        self.walks = 0
        """How often the whole inventory was announced anew."""
        self.overflows = 0
        self._had: set[int] = set()
        self._serial = 0
        self._generation: str | None = None
        self._walk: Inventory | None = None
        self._sent: Batch | None = None
        # Whether it is there now, and whether the directory is known not to have it while it is queued.
        self._queue: dict[tuple[bytes, Tier], tuple[bool, bool]] = {}

    def __repr__(self) -> str:
        walking = ", walking" if self._walk is not None else ""
        return f"Announcing({self.standpoint.value}, number {self.number}, {len(self._queue)} queued{walking})"

    def __len__(self) -> int:
        """How many changes are queued or under way."""
        return len(self._queue) + (len(self._sent.changes) if self._sent else 0)

    @property
    def is_settled(self) -> bool:
        """Whether the directory has been told everything."""
        return self.standpoint is Standpoint.MEMBER and self._walk is None and not len(self)

    def changed(self, change: Changed) -> None:
        """A tier has committed or lost chunks.

        A chunk is stored before it is removed, and removed from DISK when the last disk that had it has lost it.
        """
        if change.tier not in self._tiers or self.standpoint is not Standpoint.MEMBER:
            return
        present = isinstance(change, Stored)
        for key in change.keys:
            self._put(chunk_name(change.group, key), change.tier, present)
        if len(self._queue) > self._limit:
            self.overflows += 1
            self._fall_behind()

    def batch(self) -> Batch | None:
        """What to send now; the same again after a failure. None if there is nothing: while this walks over the
        inventory, that may only be so for this step."""
        if self.standpoint is not Standpoint.MEMBER:
            return None
        if self._sent is None:
            if self._walk is not None and len(self._queue) < BATCH_CHANGES:
                self._step()
            if not self._queue:
                return None
            first = list(islice(self._queue, BATCH_CHANGES))
            changes = tuple(Announced(name, tier, self._queue.pop((name, tier))[0]) for name, tier in first)
            self._sent = Batch(self.number, self._serial + 1, changes)
        return self._sent

    def acknowledged(self, batch: Batch) -> None:
        """The directory has applied a batch."""
        if batch is self._sent:
            self._serial, self._sent = batch.serial, None

    def refused(self, batch: Batch) -> None:
        """The directory does not take a batch: it does not know us, or lost what came before."""
        if batch is self._sent:
            self._fall_behind()

    def stamp(self) -> Stamp:
        """To be taken before a beat is sent."""
        return Stamp(self.number, self._serial)

    def beaten(self, beat: Beat | None, stamp: Stamp) -> None:
        """The directory has answered a beat."""
        if stamp.number != self.number or self.standpoint is not Standpoint.MEMBER:
            return
        if beat is None:
            self._fall_behind()
            return
        self._generation = self._generation or beat.generation
        latest = self._sent.serial if self._sent else self._serial
        if beat.generation != self._generation or not stamp.serial <= beat.serial <= latest:
            self._fall_behind()

    def joined(self, number: int) -> None:
        """The directory has given us a number; everything is announced under it."""
        self.number = number
        if number in self._had:
            # It has forgotten that we left, and knows what that number stood for some time ago.
            self._fall_behind()
            return
        self._had.add(number)
        self._forget()
        self.standpoint = Standpoint.MEMBER
        self._walk = self._inventory()
        self.walks += 1

    def _put(self, name: bytes, tier: Tier, present: bool) -> None:
        earlier = self._queue.get((name, tier))
        if earlier == (True, True) and not present:
            del self._queue[name, tier]
        elif earlier is not None:
            self._queue[name, tier] = present, earlier[1] and present
        else:
            # Of DISK there may be several, and of what the walk has yet to reach nobody knows whether it was told.
            self._queue[name, tier] = present, present and tier is Tier.HOST and self._walk is None

    def _step(self) -> None:
        assert self._walk is not None
        step = next(self._walk, None)
        if step is None:
            self._walk = None
            return
        for it in step:
            self._queue.setdefault((it.name, it.tier), (it.present, False))

    def _fall_behind(self) -> None:
        self._forget()
        self.standpoint = Standpoint.BEHIND

    def _forget(self) -> None:
        self._queue.clear()
        self._sent = self._walk = self._generation = None
        self._serial = 0
