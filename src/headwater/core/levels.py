"""The tiers below HOST as the core sees them: what each can do, what waits for it, and what it has done.

A *level* is one tier below HOST, nearest first: the DISK tier, whose book-keeping is a `Cache` of our own, or a REMOTE
tier, which is shared and only asked. Whatever happens there is a *command*: decided here, carried out by a driver with
threads (or by the simulator), and reported with `Movement.ended`.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headwater.core.cache import Cache
from headwater.core.cost import TierSpeed
from headwater.core.health import Breaker, Health
from headwater.core.waiting import Waiting
from headwater.types import ABSENT, ChunkKey, Outcome, Tier, Usage

BATCH_BYTES = 8 << 20
QUEUE_KEYS_MAX = 65_536
KNOWN_KEYS_MAX = 65_536
WATERMARK = 0.9
ASKING_MAX = 2
"""Questions to one level that are under way at a time; others wait and go together."""


class Admission(enum.Enum):
    """What a level takes: nothing; everything; only what was used again; or everything while there is room, then the
    latter."""

    NONE = "none"
    ALL = "all"
    REUSED = "reused"
    AUTO = "auto"


class Verb(enum.Enum):
    """What a command asks of a tier."""

    READ = "read"
    WRITE = "write"
    HOLDS = "holds"
    DELETE = "delete"
    USAGE = "usage"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class Part:
    """One KV group's part of a chunk in a command: its slot in HOST, and on DISK; ABSENT where it has none. `space` is
    for questions about several namespaces at once. `anew` says that what a REMOTE tier has under its name is of no use
    and is to be replaced."""

    group: int
    key: ChunkKey
    parent: bytes = b""
    address: int = ABSENT
    place: int = ABSENT
    space: int = ABSENT
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do on a level, by `until_s`; the driver reports its end once, whatever happens."""

    number: int
    level: int
    verb: Verb
    space: int
    parts: tuple[Part, ...]
    size_bytes: int
    until_s: float
    background: bool = False
    """Nobody waits for it."""


@dataclass(slots=True)
class Sums:
    """What a level has done since the node started. `hit_tokens` were brought up for requests and were there when they
    were over; `dropped_chunks` left HOST before their turn to go down came, or found no room in the queue or below."""

    read_bytes: int = 0
    read_chunks: int = 0
    written_bytes: int = 0
    written_chunks: int = 0
    hit_tokens: int = 0
    dropped_chunks: int = 0
    declined: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)


class Level:
    """One tier below HOST: its limits, health and speeds, and the chunks that wait to go down to it."""

    def __init__(
        self,
        name: str,
        tier: Tier,
        admission: Admission = Admission.AUTO,
        disk: Cache | None = None,
        readers: int = 2,
        writers: int = 1,
        moving_bytes_max: int = 256 << 20,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """`readers` and `writers` are how many reads and writes the driver carries out at once, each of `batch_bytes`
        or of one chunk; once `moving_bytes_max` bytes are leased or reserved for one of the two, no more are begun."""
        assert (tier is Tier.DISK) == (disk is not None), f"{name}: {tier}"
        self.name, self.tier, self.admission, self.disk = name, tier, admission, disk
        self.readers, self.writers = readers, writers
        self.moving_bytes_max, self.batch_bytes = moving_bytes_max, batch_bytes
        self.breaker = Breaker()
        self.reading, self.writing = TierSpeed(readers), TierSpeed(writers)
        self.queue = Waiting()
        self.spaces: dict[int, int] = {}
        """The DISK tier's number of a namespace, by its number in HOST."""
        self.reads = self.writes = self.reading_bytes = self.writing_bytes = 0
        self.stuck = 0
        """Reads under way that should have ended long ago: each keeps one of the driver's threads."""
        self.asking = 0
        """Questions under way."""
        self.clearing: OrderedDict[int, None] = OrderedDict()
        """Namespaces that a REMOTE tier has yet to delete: nothing of theirs is asked for, read or written."""
        self.is_clearing = False
        self.clear_from_s = 0.0
        """A CLEAR is under way: one at a time."""
        self.usage = Usage(None, None)
        self.full_until_s = 0.0
        self.usage_at_s = 0.0
        self.asking_usage = False
        self.sums = Sums()
        self.on_known: Callable[[int, int, ChunkKey, bool], None] = _nobody
        """Told of parts (namespace, group, key) that a REMOTE tier has from now on, or has lost, as far as this node
        knows. Those that this node only has no room to remember are not lost."""
        self._known: OrderedDict[tuple[int, int, ChunkKey], None] = OrderedDict()
        self._useless: OrderedDict[tuple[int, int, ChunkKey], None] = OrderedDict()

    def __repr__(self) -> str:
        return (
            f"Level({self.name}, {self.health.value}, {len(self.queue)} chunks queued, "
            f"{self.reads} reads and {self.writes} writes under way)"
        )

    @property
    def well(self) -> bool:
        """Whether it may be used."""
        return self.health is Health.WELL

    @property
    def health(self) -> Health:
        """What its breaker says; sick as long as no thread is left that could read from it."""
        return Health.SICK if self.stuck >= self.readers else self.breaker.state

    @property
    def fill(self) -> float:
        """How full it is, 0 to 1; 0 where nobody knows."""
        if self.disk is not None:
            return self.disk.pool.taken_bytes / max(self.disk.pool.capacity_bytes, 1)
        if not self.usage.capacity_bytes or self.usage.used_bytes is None:
            return 0.0
        return self.usage.used_bytes / self.usage.capacity_bytes

    def has(self, space: int, group: int, key: ChunkKey) -> bool:
        """Whether a part is there, or on its way down, as far as this node knows."""
        if self.disk is None:
            return (space, group, key) in self._known
        return space in self.spaces and key in self.disk.spaces[self.spaces[space]].index[group]

    def serves(self, space: int, group: int, key: ChunkKey) -> bool:
        """Whether the DISK tier can be read for a part; REMOTE tiers are asked."""
        if self.disk is None or space not in self.spaces:
            return False
        return self.disk.is_ready(self.spaces[space], group, key)

    def serves_which(self, space: int, group: int, keys: Sequence[ChunkKey]) -> list[bool] | None:
        """The same for many chunks; None where it is none of them."""
        if self.disk is None or space not in self.spaces:
            return None
        return self.disk.which_ready(self.spaces[space], group, keys)

    def know(self, space: int, group: int, key: ChunkKey) -> None:
        """A REMOTE tier has a part: it need not go there again."""
        if (space, group, key) not in self._known:
            self.on_known(space, group, key, True)
        self._known[space, group, key] = None
        self._known.move_to_end((space, group, key))
        if len(self._known) > KNOWN_KEYS_MAX:
            self._known.popitem(last=False)
        self._useless.pop((space, group, key), None)

    def unknow(self, space: int, group: int, key: ChunkKey) -> None:
        """A REMOTE tier has lost a part."""
        if (space, group, key) in self._known:
            del self._known[space, group, key]
            self.on_known(space, group, key, False)

    def distrust(self, space: int, group: int, key: ChunkKey) -> None:
        """What a REMOTE tier has of a part is of no use, even if it should say that it is there."""
        self.unknow(space, group, key)
        self._useless[space, group, key] = None
        if len(self._useless) > KNOWN_KEYS_MAX:
            self._useless.popitem(last=False)

    def is_useless(self, space: int, group: int, key: ChunkKey) -> bool:
        """Whether what a REMOTE tier has of a part was found to be of no use, and has not been written anew since."""
        return (space, group, key) in self._useless

    def forget_all(self) -> None:
        """A REMOTE tier may have lost everything."""
        lost, self._known = self._known, OrderedDict()
        for part in lost:
            self.on_known(*part, False)

    def known(self) -> Iterator[tuple[int, int, ChunkKey]]:
        """What a REMOTE tier has, as far as this node remembers."""
        return iter(self._known)

    def wants(self, space: int, group: int, key: ChunkKey, *, used: bool) -> bool:
        """Whether a chunk should go down to this level; `used` says that it was used again."""
        if self.admission is Admission.NONE:
            return False
        if self.has(space, group, key) or (self.disk is not None and space not in self.spaces):
            return False
        if space in self.clearing:  # what HOST has is offered again afterwards
            return False
        if self.admission is Admission.ALL or used:
            return True
        return self.admission is Admission.AUTO and self.fill < WATERMARK

    def enqueue(self, space: int, key: ChunkKey) -> None:
        """A chunk waits to go down; the oldest of the tenant with most of them gives way when too many do."""
        if (space, key) in self.queue:
            return
        self.queue[space, key] = False
        if len(self.queue) > QUEUE_KEYS_MAX:
            self.queue.drop_one()
            self.sums.dropped_chunks += 1

    def put_first(self, space: int, key: ChunkKey, *, again: bool) -> None:
        """A chunk goes down next; `again` says that it found no room before."""
        self.queue.put_first((space, key), again=again)


def _nobody(space: int, group: int, key: ChunkKey, there: bool) -> None:
    """Nobody wants to know."""
