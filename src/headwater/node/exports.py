"""What a node lends to its peers: chunks in HOST, which it leases for as long as the peer reads them.

Theory of operation. A connection's thread asks; the loop finds the chunks and leases them (a LOAD ticket in nobody's
name); the thread sends them straight from the node's memory and gives the loan back; the loop ends the ticket. Nothing
of the core is touched outside the loop, and no byte is moved inside it.

    lend ─► the namespace is known here, and laid out alike?     no: nothing is here / refused
         ─► parts on DISK only: brought up first, with all before them, as far as there is time
         ─► hold ─► Loan … give_back ─► release

A chunk's checksum is kept from the first time that it was computed until the chunk leaves: what is READY never changes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headwater.core.cache import Cache
from headwater.core.movement import OWNER
from headwater.errors import RefusedError, UnavailableError
from headwater.node.errands import Answer, Errands
from headwater.node.tiering import Tiering
from headwater.ports import Lent, Loan, Memory
from headwater.tiers.host import MappedMemory
from headwater.types import (
    ABSENT,
    NAME_BYTES,
    SEGMENT_SHIFT,
    Changed,
    ChunkKey,
    Extent,
    KVLayout,
    Outcome,
    Removed,
    Stored,
    TicketKind,
    Tier,
    chunk_name,
    split_name,
)

CHECKSUMS_MAX = 1 << 18
SPARE_S = 0.2
"""How long before a peer's deadline it is answered with what is here by then."""
LENT_SHARE = 0.5
"""Of HOST, what may be lent at a time: the rest is for this host's engines, whatever peers do."""
SETTLE_S = 0.01
"""How often those that wait for the disk are looked at."""
NAMES_MAX = 8192
"""In one request: the loop looks at each."""
WAITING_MAX = 256
"""Requests of peers that wait for the disk."""
Told = Callable[[str, bytes, float], bytes]


def realm_of(root: bytes, layout: KVLayout) -> bytes:
    """What peers must agree on before they exchange chunks: 32 bytes of the namespace's root, 16 of the layout."""
    return root + bytes.fromhex(layout.fingerprint())


@dataclass(slots=True)
class ChunkLoan:
    """Leased chunks; see `ports.Loan`."""

    parts: Sequence[Lent | Outcome]
    deadline_s: float
    returned: Callable[[Sequence[bool], Sequence[int | None]], None]

    def give_back(self, done: Sequence[bool], checksums: Sequence[int | None]) -> list[Outcome]:
        """See `ports.Loan`."""
        self.returned(done, checksums)
        return [Outcome.DONE if it else Outcome.FAILED for it in done]


@dataclass(slots=True, eq=False)
class Asked:
    """A peer's request that waits for the disk."""

    peer: str
    space: int
    names: Sequence[bytes]
    until_s: float
    loan: Answer[Loan]
    requests: tuple[str, ...] = ()
    """What brings it up."""


@dataclass(slots=True)
class Lending:
    """What a loan that is out holds, and where that is."""

    ticket: int
    space: int
    names: Sequence[bytes]
    places: Sequence[int]


@dataclass(slots=True)
class Sums:
    """What peers have had from here."""

    chunks: int = 0
    size_bytes: int = 0
    missing: int = 0
    from_disk: int = 0
    late: int = 0


@dataclass(slots=True)
class NodeExports:
    """See `ports.Exports`: `regions`, `lend`, `accept` and `told` are for the threads of connections."""

    cache: Cache
    tiering: Tiering
    memory: MappedMemory
    spaces: Mapping[bytes, int]
    errands: Errands
    lease_s: float
    topics: dict[str, Told] = field(default_factory=dict)
    """What peers may tell us, and who listens: called by the threads of connections."""
    served: Callable[[str, int, list[bytes], float], None] | None = None
    """Told, in the loop, who was lent what."""
    sums: Sums = field(default_factory=Sums)
    _waiting: list[Asked] = field(default_factory=list)
    _checksums: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    _next: int = 1
    _lent_bytes: int = 0
    _settled_s: float = 0.0

    @property
    def due_s(self) -> float:
        """When `settle` is to be called at the latest."""
        return min((it.until_s - SPARE_S for it in self._waiting), default=math.inf)

    def regions(self) -> Sequence[Memory]:
        """See `ports.Exports`."""
        # The first segment is the pool's; what else is mapped is for this host's clients.
        return [Memory(self.memory.descriptors[0], self.memory.array(0, self.memory.sizes[0]))]

    def lend(self, peer: str, realm: bytes, names: Sequence[bytes], until_s: float) -> Loan:
        """See `ports.Exports`."""

        def begin(now: float, loan: Answer[Loan]) -> None:
            self._begin(peer, realm, names, until_s, loan, now)

        return self.errands.ask(begin, until_s)

    def accept(self, peer: str, realm: bytes, names: Sequence[bytes], sizes: Sequence[int], until_s: float) -> Loan:
        """See `ports.Exports`; nodes pull, and let nobody push."""
        raise RefusedError("write", "a pull order", "chunks", "nodes read from each other and do not write")

    def told(self, peer: str, topic: str, body: bytes, until_s: float) -> bytes:
        """See `ports.Exports`."""
        listener = self.topics.get(topic)
        if listener is None:
            raise RefusedError("topic", " or ".join(sorted(self.topics)) or "none", topic[:40], "use equal versions")
        return listener(peer, body, until_s)

    # ---- in the loop ----------------------------------------------------------------------------------

    def heard(self, changes: Sequence[Changed]) -> None:
        """HOST has announced these changes: checksums of what left, or came anew, no longer hold."""
        for change in changes:
            if isinstance(change, Stored | Removed) and change.tier is Tier.HOST:
                for key in change.keys:
                    self._checksums.pop(chunk_name(change.group, key), None)

    def settle(self, now: float) -> None:
        """Answer those whose chunks have come up from the disk meanwhile, or whose time is over."""
        if not self._waiting or (now - self._settled_s < SETTLE_S and now < self.due_s):
            return
        self._settled_s = now
        for asked in list(self._waiting):
            over = all(self.tiering.fetches.is_over(OWNER, it) for it in asked.requests)
            if over or now >= asked.until_s - SPARE_S or not self._on_disk(asked.space, asked.names):
                self._waiting.remove(asked)
                self._lend(asked, now)

    def _begin(
        self, peer: str, realm: bytes, names: Sequence[bytes], until_s: float, loan: Answer[Loan], now: float
    ) -> None:
        number = self.spaces.get(realm[:32])
        if number is None:
            self.sums.missing += len(names)
            loan.give(ChunkLoan([Outcome.MISSING] * len(names), until_s, _nothing))
            return
        layout = self.cache.spaces[number].layout
        if realm[32:].hex() != layout.fingerprint():
            remedy = "chunks of one namespace must be laid out alike on all nodes"
            raise RefusedError("layout", layout.fingerprint(), realm[32:].hex()[:32], remedy)
        groups = len(layout.groups)
        if any(len(it) != NAME_BYTES for it in names):
            raise RefusedError("names", f"{NAME_BYTES} bytes", "another length", "use equal versions")
        if len(names) > NAMES_MAX:
            raise RefusedError("names", f"at most {NAMES_MAX}", f"{len(names)}", "ask for some at a time")
        asked_bytes = sum(self.cache.spaces[number].slot_bytes[min(it[-1], groups - 1)] for it in names)
        # One request may have more where nothing is lent: else a small node could never lend a long prompt.
        if self._lent_bytes and self._lent_bytes + asked_bytes > LENT_SHARE * self.cache.pool.capacity_bytes:
            raise UnavailableError("too much of this node's memory is lent")
        asked = Asked(peer, number, names, until_s, loan)
        below = self._on_disk(number, names)
        if below and len(self._waiting) < WAITING_MAX:
            chains = self._chains(number, names, below)
            asked.requests = tuple(f"lend-{self._next + at}" for at in range(len(chains)))
            self._next += len(chains)
            for request, chain in zip(asked.requests, chains, strict=True):
                self.tiering.fetches.prefetch(OWNER, request, number, chain, now)
            self.sums.from_disk += len(below)
            self._waiting.append(asked)
            return
        self._lend(asked, now)

    def _on_disk(self, space: int, names: Sequence[bytes]) -> list[ChunkKey]:
        """The chunks that DISK has and HOST has not, of those that were asked for."""
        disk = self.tiering.disk_level
        if disk is None or not disk.well:
            return []
        groups = len(self.cache.spaces[space].index)
        parts = [(group, key) for group, key in map(split_name, names) if group < groups]
        ready, serves = self.cache.is_ready, disk.serves
        return list(dict.fromkeys(k for g, k in parts if not ready(space, g, k) and serves(space, g, k)))

    def _chains(self, space: int, names: Sequence[bytes], keys: Sequence[ChunkKey]) -> list[list[ChunkKey]]:
        """The prompt that these chunks of a request are the end of, from its start on: what hangs on nothing cannot be
        brought up. A request is for one prompt, so the chain of its last chunk is all of it; but where keys hang on
        nothing, each is on its own."""
        if self.cache.spaces[space].main is None:
            return [[key] for key in keys]
        disk = self.tiering.disk_level
        assert disk is not None and disk.disk is not None
        # Names come group by group: the deepest chunk is the last of the main group.
        main = self.cache.spaces[space].main
        deepest = [split_name(it)[1] for it in names if split_name(it)[0] == main]
        chain = [next((it for it in reversed(deepest) if it in keys), keys[-1])]
        while (above := disk.disk.parent_of(disk.spaces[space], chain[-1])) is not None:
            chain.append(above)
        chain.reverse()
        return [chain]

    def _lend(self, asked: Asked, now: float) -> None:
        if not asked.loan.is_wanted:
            return
        space = self.cache.spaces[asked.space]
        groups = len(space.index)
        parts = [(group, key) for group, key in map(split_name, asked.names) if group < groups]
        deadline_s = min(now + self.lease_s, asked.until_s + self.lease_s)
        ticket, places = self.cache.hold(OWNER, TicketKind.LOAD, asked.space, parts, deadline_s)
        found = dict(zip(parts, places, strict=True))
        lent: list[Lent | Outcome] = []
        for name in asked.names:
            group, key = split_name(name)
            place = found.get((group, key), ABSENT)
            if place == ABSENT:
                lent.append(Outcome.MISSING)
                continue
            size = space.slot_bytes[group]
            extent = Extent(place >> SEGMENT_SHIFT, place & ((1 << SEGMENT_SHIFT) - 1), size)
            lent.append(Lent(self.memory.array(place, size), extent, self._checksums.get(name)))
            self.sums.size_bytes += size
        keys = list(dict.fromkeys(key for (_, key), place in found.items() if place != ABSENT))
        self.sums.chunks += len(keys)
        self.sums.missing += sum(it is Outcome.MISSING for it in lent)
        if keys:
            self.cache.touch(asked.space, keys)
            if self.served is not None:
                names = [name for name, it in zip(asked.names, lent, strict=True) if isinstance(it, Lent)]
                self.served(asked.peer, asked.space, names, now)
        lending = Lending(
            ticket, asked.space, list(asked.names), [found.get(split_name(it), ABSENT) for it in asked.names]
        )
        size_bytes = sum(len(it.memory) for it in lent if isinstance(it, Lent))
        self._lent_bytes += size_bytes

        def ended(done: Sequence[bool], checksums: Sequence[int | None]) -> None:
            self._lent_bytes -= size_bytes
            self._returned(lending, done, checksums)

        def returned(done: Sequence[bool], checksums: Sequence[int | None]) -> None:
            self.errands.tell(lambda now: ended(done, checksums))

        if not asked.loan.give(ChunkLoan(lent, deadline_s, returned if ticket else _nothing)) and ticket:
            ended((), ())

    def _returned(self, lending: Lending, done: Sequence[bool], checksums: Sequence[int | None]) -> None:
        if not self.cache.release(OWNER, lending.ticket):
            self.sums.late += 1  # it had ended: what the chunks are now is not what was summed
            return
        for name, place, good, checksum in zip(lending.names, lending.places, done, checksums, strict=False):
            # It may have been deleted meanwhile, and even stored anew: then that was not its sum.
            if good and checksum is not None and self.cache.place_of(lending.space, *split_name(name)) == place:
                self._checksums[name] = checksum
                if len(self._checksums) > CHECKSUMS_MAX:
                    self._checksums.popitem(last=False)


def _nothing(done: Sequence[bool], checksums: Sequence[int | None]) -> None:
    """Nothing was lent."""
