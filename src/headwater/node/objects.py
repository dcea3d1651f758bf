"""The node's side of the Store: objects, which are chunks that clients name, and verbs for batches of them.

Theory of operation. A client names objects by their keys. What it reads it finds in the table (`object_table`), and
copies without asking; it asks the node to write, to keep, to delete, and for what is not in the table.

    put      Place: slots for keys that nobody holds (a SAVE ticket a slot size) -> the client writes headers and bytes
             -> Publish: what is whole becomes READY and is listed. Whoever places a key meanwhile is told so, and asks
             again: the first to be published wins, and what is there never changes
    get      found in the table -> copied, looked at again. Else Find: what is below is brought up; what is here is
             leased if the client wants to look at it where it lies
    remove   found no more at once, in no tier; its slot is free when the last lease on it ends
    over     an object past its time is not found by readers, and removed within a tick; its time is told by the clock
             that nobody can set, from when it came here
    parts    what is done to an object of several parts is done to all; one that has lost a part is gone

The books here follow the cache and never lead it: whatever takes a slot from an object (eviction, an operator, a clear)
frees it in the pool, which tells us before anybody else can have it.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headwater.core.cache import Cache
from headwater.core.levels import Level
from headwater.core.movement import Move
from headwater.core.pool import Pool
from headwater.errors import ProtocolError, RefusedError
from headwater.node.errands import Errands
from headwater.node.messages import (
    KEYS_MAX,
    Contained,
    Ended,
    Enter,
    Entered,
    Find,
    Found,
    Hold,
    Kept,
    Leasing,
    Lower,
    Place,
    Placed,
    Publish,
    Published,
    Remove,
    Reply,
    Request,
    Used,
    Verdict,
    pack_words,
    unpack_words,
)
from headwater.node.object_format import (
    HEADER_BYTES,
    Kind,
    Split,
    object_layout,
    object_namespace,
    part_keys,
    read_header,
    slot_bytes,
    tenant_root,
)
from headwater.node.object_peers import ObjectPeers
from headwater.node.object_table import Listing, Table
from headwater.node.peers import PeersTier
from headwater.node.tiering import Tiering
from headwater.tiers.header import payload_checksum
from headwater.tiers.host import MappedMemory
from headwater.types import (
    ABSENT,
    KEY_BYTES,
    PAGE_BYTES,
    Changed,
    ChunkKey,
    KVLayout,
    Namespace,
    Outcome,
    Removed,
    TicketKind,
    Tier,
    split_keys,
)

TENANTS_MAX = 4096
TENANT_CHARS_MAX = 1024
TICKETS_MAX = 65_536
PINNED_SHARE = 0.5
HOLD_S_MAX = 7 * 86_400.0
PEERS = "peers"
"""The level that other nodes are."""
SOUGHT_S, SOUGHT_MAX = 1.0, 1 << 16
"""How long an answer about an object elsewhere is good for."""
COMING_MAX, COMING_SHARE = 256, 0.25
"""Objects that are brought up at a time, and what of the memory they may take: the rest wait for their turn, so that
what has come up is read before others take its place."""
SUSPECT_BYTES_MAX = 64 << 20
"""What is looked at again in one call."""
OVER_SPARE = 4096
"""How many objects that have left before their time was over may still be in the queue of those that end."""
SWEEP_MAX = 4096
"""Objects that one tick removes because their time is over; readers do not find the others either."""


class WatchedPool(Pool):
    """A pool that says which slots are given back, before anybody else can have them."""

    on_free: Callable[[int], None] | None = None

    def free(self, address: int) -> None:
        """See `Pool.free`."""
        if self.on_free is not None:
            self.on_free(address)
        super().free(address)

    def free_all(self, addresses: Iterable[int]) -> None:
        """See `Pool.free_all`."""
        if self.on_free is not None:
            addresses = list(addresses)
            for address in addresses:
                self.on_free(address)
        super().free_all(addresses)


@dataclass(slots=True, eq=False)
class Held:
    """An object that is READY in HOST."""

    tenant: int
    key: ChunkKey
    space: int
    address: int
    expires_s: float
    """On the monotonic clock; 0: never."""
    place: int | None
    parts: Sequence[ChunkKey] = ()


@dataclass(frozen=True, slots=True)
class Pinned:
    """A client's pin on an object, and on all its parts."""

    tickets: tuple[int, ...]
    size_bytes: int


@dataclass(slots=True)
class Sought:
    """An object that was looked for on other nodes and REMOTE tiers: how many have yet to answer, and the level and
    namespace where it was found, until `over_s`."""

    waiting: int
    over_s: float
    where: tuple[int, int] | None = None


@dataclass(slots=True)
class Tenant:
    """Whose objects, and in which namespaces: one a slot size."""

    name: str
    root: bytes
    spaces: dict[int, int] = field(default_factory=dict)
    scanned: int = 0
    """How many namespaces of the node were looked at: they also come from the disk, and from peers."""


@dataclass(slots=True, eq=False)
class Placing:
    """A put under way: for each key its space and the ticket that holds its slot; None where it has none."""

    owner: str
    tenant: int
    keys: list[ChunkKey]
    slots: list[tuple[int, int, int] | None]
    """Space, ticket and position in the call that reserved it."""


class Objects:
    """All objects of a node. For the node's loop."""

    def __init__(
        self,
        host: Cache,
        pool: WatchedPool,
        memory: MappedMemory,
        tiering: Tiering,
        table: tuple[int, int],
        add_space: Callable[[Namespace, KVLayout], int | None],
        is_draining: Callable[[], bool],
        lease_s: float,
    ) -> None:
        """`table` is the address and size of memory for the table, zero-filled. `add_space` finds or adds a namespace;
        None if the node has too many."""
        self._host, self._memory, self._tiering, self._pool = host, memory, tiering, pool
        self._add_space, self._is_draining, self._lease_s = add_space, is_draining, lease_s
        self._table_at = table
        self._table = Table(memory.view(*table), below=bool(tiering.levels))
        self._tenants: list[Tenant] = []
        self._tenant_numbers: dict[str, int] = {}
        self._clients: dict[str, int] = {}
        self._held: dict[tuple[int, ChunkKey], Held] = {}
        self._at: dict[int, Held] = {}
        self._over: list[tuple[float, int, Held]] = []
        self._overs = 0
        self._placings: dict[int, Placing] = {}
        self._placed: dict[tuple[int, ChunkKey], tuple[int, int]] = {}
        """Who writes a key now: the placing's number and the ticket."""
        self._next_placing = 1
        self._pins: dict[tuple[int, ChunkKey], dict[str, Pinned]] = {}
        """By object, then by client."""
        self._pinned_bytes = 0
        self._coming_bytes = 0
        self._coming: dict[tuple[int, ChunkKey], bool] = {}
        """What is being brought up, and whether it is still wanted."""
        self._leaving: dict[tuple[int, ChunkKey], None] = {}
        """What was removed while it was on its way to or from the disk: it is there for nobody."""
        self.wish: Callable[[int, Sequence[ChunkKey], int, float], object] = _nobody
        """Told of the namespace and key of what was put to have so many replicas."""
        self._peers: ObjectPeers | None = None
        self._sought: OrderedDict[tuple[int, ChunkKey], Sought] = OrderedDict()
        pool.on_free = self._freed
        self.verbs: dict[type[Request], Callable[[str, Request, float], Reply]] = {
            Enter: self._enter,
            Place: self._place,
            Publish: self._publish,
            Find: self._find,
            Remove: self._remove,
            Hold: self._hold,
            Used: self._used,
        }

    def __repr__(self) -> str:
        return f"Objects({len(self._held)} held, {len(self._placings)} puts under way, {len(self._tenants)} tenants)"

    def __len__(self) -> int:
        return len(self._held)

    def join(self, tier: PeersTier, errands: Errands) -> dict[str, Callable[[str, bytes, float], bytes]]:
        """This node is one of a cluster; what its peers may tell it about objects."""
        self._peers = ObjectPeers(tier, errands, self._sizes_of, self._remove_told, self._located)
        return self._peers.topics()

    def leave(self) -> None:
        """This node leaves its cluster: nobody is asked any more."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _sizes_of(self, name: str, keys: Sequence[ChunkKey], now: float) -> list[int]:
        """The sizes of the slots of objects that are here, for a peer; 0 where there is none."""
        tenant = self._known_tenant(name)
        if tenant is None:
            return [0] * len(keys)
        sizes = []
        for key in keys:
            it = self._look(tenant, key, now)
            below = self._below(tenant, key) if it is None else None
            space = it.space if it is not None else None if below is None else below[1]
            sizes.append(0 if space is None else self._host.spaces[space].slot_bytes[0])
        return sizes

    def _remove_told(self, name: str, keys: Sequence[ChunkKey], now: float) -> None:
        tenant = self._known_tenant(name)
        if tenant is not None:
            self._delete(tenant, keys, now)

    def forget(self, instance: str) -> None:
        """A client is gone; its tickets end with it."""
        self._clients.pop(instance, None)
        for number in [number for number, it in self._placings.items() if it.owner == instance]:
            self._end_placing(number)
        for name in [name for name, pins in self._pins.items() if instance in pins]:
            self._take_pin(instance, *name)

    def sweep(self, now: float) -> None:
        """Remove what is over; to be called about twice a second."""
        clock_s = time.monotonic()
        for _ in range(SWEEP_MAX):
            if not self._over or self._over[0][0] > clock_s:
                break
            it = heapq.heappop(self._over)[2]
            if self._held.get((it.tenant, it.key)) is it:
                self._delete(it.tenant, [it.key], now)
        if self._leaving:
            self._let_go()
        # One whose time is over stays while its slots do: only a late Publish says that nobody writes to them.
        for number in [number for number, it in self._placings.items() if not self._has_tickets(it)]:
            self._end_placing(number)

    def heard(self, changes: Sequence[Changed]) -> None:
        """What left HOST although its slot is still being read is not listed any more either."""
        for change in changes:
            for address in change.places if isinstance(change, Removed) and change.tier is Tier.HOST else ():
                it = self._at.get(address)
                if it is not None and not self._host.is_ready(it.space, 0, it.key):
                    self._freed(address)

    def close(self) -> None:
        """Let go of the memory."""
        self._pool.on_free = None
        self._table.close()

    # ---- verbs ----------------------------------------------------------------------------------------

    def _enter(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Enter)
        number = self._tenant_number(request.tenant)
        if self._clients.setdefault(instance, number) != number:
            other = self._tenants[self._clients[instance]].name
            raise RefusedError("tenant", f"{other!r}", f"{request.tenant!r}", "use one client a tenant")
        return Entered(*self._table_at, self._pool.slab_bytes)

    def _place(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Place)
        tenant, keys = self._tenant(instance), _keys(request.keys)
        try:
            lengths = unpack_words(request.lengths)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if len(lengths) != len(keys):
            raise ProtocolError(f"{len(lengths)} lengths for {len(keys)} keys")
        verdicts, wanted = self._judge(tenant, keys, lengths, now)
        placing = Placing(instance, tenant, keys, [None] * len(keys))
        addresses = [ABSENT] * len(keys)
        deadline_s = now
        for size, positions in wanted.items():
            space = self._space(tenant, size)
            if space is None or self._is_draining() or len(self._host.tickets) >= TICKETS_MAX:
                continue
            got = self._host.reserve(instance, space, None, [keys[at] for at in positions], (), (0,), now)
            deadline_s = max(deadline_s, got.deadline_s)
            for turn, address in enumerate(got.addresses[0]):
                at = positions[turn]
                if address == ABSENT:
                    verdicts[at] = Verdict.BUSY
                    continue
                verdicts[at], addresses[at] = Verdict.YOURS, address
                placing.slots[at] = (space, got.ticket, turn)
        number = self._begin_placing(placing) if deadline_s > now else 0
        return Placed(number, bytes(verdicts), pack_words(addresses), deadline_s)

    def _judge(
        self, tenant: int, keys: Sequence[ChunkKey], lengths: Sequence[int], now: float
    ) -> tuple[list[int], dict[int, list[int]]]:
        """What to tell of each key; and by slot size those that may have a slot, which are FULL until they have."""
        verdicts: list[int] = []
        wanted: dict[int, list[int]] = {}
        seen: set[ChunkKey] = set()
        for position, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            size = slot_bytes(length, self._pool.slab_bytes)
            if key in seen or self._is_placed(tenant, key):
                verdicts.append(Verdict.BUSY)
            elif self._look(tenant, key, now) is not None:
                verdicts.append(Verdict.HELD)
            elif self._below(tenant, key) is not None:
                verdicts.append(Verdict.BELOW)
            else:
                verdicts.append(Verdict.FULL)
                if size is not None:
                    wanted.setdefault(size, []).append(position)
            seen.add(key)
        return verdicts, wanted

    def _publish(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Publish)
        placing = self._placings.get(request.placing)
        if placing is None or placing.owner != instance:
            return Published(b"", b"")
        failed = set(request.failed)
        tickets = {it[1] for it in placing.slots if it is not None}
        in_time = {it for it in tickets if self._is_writable(it)}
        for ticket in tickets & self._host.tickets.keys():
            bad = {it[2] for at, it in enumerate(placing.slots) if it and it[1] == ticket and at in failed}
            self._host.done(instance, ticket, 0, bad, now)
        self._end_placing(request.placing)
        done, pinned = bytearray(len(placing.keys)), bytearray(len(placing.keys))
        for at, (key, slot) in enumerate(zip(placing.keys, placing.slots, strict=True)):
            if slot is None or at in failed or slot[1] not in in_time or not self._host.is_ready(slot[0], 0, key):
                continue
            it = self._adopt(placing.tenant, slot[0], key, now)
            done[at] = it is not None and self._is_complete(it, now)
            if it is not None and not done[at]:
                self._delete(placing.tenant, [key], now)
            if done[at] and request.replicas > 1:
                self.wish(slot[0], [key], request.replicas, now)
            if done[at] and request.pin_s > 0.0:
                pinned[at] = self._pin(instance, placing.tenant, key, min(request.pin_s, HOLD_S_MAX), now)
        return Published(bytes(done), bytes(pinned))

    def _find(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Find)
        tenant, keys = self._tenant(instance), _keys(request.keys)
        leasing = Leasing.OPEN
        if request.leases or request.brings:
            full = len(self._host.tickets) >= TICKETS_MAX
            leasing = Leasing.DRAINING if self._is_draining() else Leasing.EXHAUSTED if full else Leasing.OPEN
        if leasing is not Leasing.OPEN:
            nowhere = pack_words([ABSENT] * len(keys))
            return Found((), nowhere, bytes(8 * len(keys)), bytes(len(keys)), now, leasing)
        deadline_s = now + self._lease_s
        sizes, waits = [0] * len(keys), bytearray(len(keys))
        addresses = [ABSENT] * len(keys)
        by_space: dict[int, list[int]] = {}
        absent = []
        for at, key in enumerate(keys):
            it = self._look(tenant, key, now)
            if it is None:
                absent.append(at)
                continue
            by_space.setdefault(it.space, []).append(at)
            sizes[at] = self._host.spaces[it.space].slot_bytes[0]
            addresses[at] = it.address
        tickets = []
        for space, positions in by_space.items() if request.leases else ():
            here = [keys[at] for at in positions]
            parts = [(0, key) for key in here]
            ticket, places = self._host.hold(instance, TicketKind.LOAD, space, parts, deadline_s)
            tickets.append(ticket)
            self._host.touch(space, here)
            self._tiering.loaded(space, here)
            for at, place in zip(positions, places, strict=True):
                addresses[at] = place
        for at in absent:  # what is here is leased by now, so that what comes up cannot take its place
            if request.brings:
                waits[at] = self._bring(tenant, keys[at], now)
            elif self._below(tenant, keys[at]) is not None or self._seek(tenant, keys[at], now):
                sought = self._sought.get((tenant, keys[at]))
                waits[at] = Lower.SOUGHT if sought is not None and sought.where is None else Lower.THERE
        return Found(tuple(tickets), pack_words(addresses), pack_words(sizes), bytes(waits), deadline_s)

    def _remove(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Remove)
        tenant, keys = self._tenant(instance), _keys(request.keys)
        flags = self._delete(tenant, keys, now)
        if any(level.disk is None for level in self._tiering.levels):
            self._delete_elsewhere(tenant, keys, now)
        return Contained(flags)

    def _hold(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Hold)
        tenant, keys = self._tenant(instance), _keys(request.keys)
        if request.replicas > 1:
            for it in filter(None, [self._look(tenant, key, now) for key in keys]):
                self.wish(it.space, [it.key], request.replicas, now)
        if request.hold_s < 0.0 and request.replicas > 1:
            return Kept(bytes(len(keys)))
        if not 0.0 <= request.hold_s <= HOLD_S_MAX:
            given = f"{request.hold_s}"
            raise RefusedError("pin", f"0 to {HOLD_S_MAX:.0f} s", given, "choose a time within that")
        if request.hold_s:
            return Kept(bytes(self._pin(instance, tenant, key, request.hold_s, now) for key in keys))
        return Kept(bytes(self._unpin(instance, tenant, key) for key in keys))

    def _used(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Used)
        tenant = self._tenant(instance)
        by_space: dict[int, list[ChunkKey]] = {}
        for key in _keys(request.keys):
            it = self._held.get((tenant, key))
            for one in () if it is None else (it, *self._parts_here(it)):
                by_space.setdefault(one.space, []).append(one.key)
        if request.suspect:
            self._verify(tenant, _keys(request.suspect))
        for space, keys in by_space.items():
            self._host.touch(space, keys)
            self._tiering.loaded(space, keys)
        return Ended(sum(map(len, by_space.values())))

    # ---- what is here ---------------------------------------------------------------------------------

    def _look(self, tenant: int, key: ChunkKey, now: float) -> Held | None:
        """An object that is READY in HOST, and whose parts are here or elsewhere; one that has lost a part is gone."""
        it = self._here(tenant, key, now)
        if it is not None and it.parts and not self._is_complete(it, now):
            self._delete(tenant, [key], now)
            return None
        return it

    def _is_complete(self, it: Held, now: float) -> bool:
        """Whether all parts of an object are here, or may be had from a lower tier or another node."""
        return all(
            self._here(it.tenant, part, now) is not None
            or self._below(it.tenant, part) is not None
            or self._seek(it.tenant, part, now)
            for part in it.parts
        )

    def _parts_here(self, it: Held) -> list[Held]:
        return [part for key in it.parts if (part := self._held.get((it.tenant, key))) is not None]

    def _here(self, tenant: int, key: ChunkKey, now: float) -> Held | None:
        """What is READY in HOST; it becomes known if it came there by another way than a put."""
        it = self._held.get((tenant, key))
        if it is not None and it.expires_s and it.expires_s <= time.monotonic():
            self._delete(tenant, [key], now)
            return None
        if it is not None:
            return it
        if self._tiering.levels:
            for space in self._spaces_of(tenant):
                if self._host.is_ready(space, 0, key):
                    return self._adopt(tenant, space, key, now)
        return None

    def _adopt(self, tenant: int, space: int, key: ChunkKey, now: float) -> Held | None:
        """List what became READY; None, and it is gone from all tiers, if its slot does not say that it is that object,
        if it is over, or if there is another of this key already."""
        row = self._host.spaces[space].index[0][key]
        address = self._host.entries.address[row]
        slot = self._memory.view(address, self._host.spaces[space].slot_bytes[0])
        header = read_header(slot, key)
        parts: Sequence[ChunkKey] = ()
        if header is not None and header.kind is Kind.SPLIT:
            split = Split.decode(bytes(slot[HEADER_BYTES : HEADER_BYTES + header.length_bytes]))
            if split is None:
                header = None
            else:
                parts = part_keys(self._tenants[tenant].root, key, split)
        left_ns = 0 if header is None or not header.expires_ns else header.expires_ns - time.time_ns()
        if header is None or left_ns < 0 or (tenant, key) in self._held:
            self._host.drop(space, 0, key, address, "corrupt" if header is None else "deleted")
            if self._tiering.levels and (tenant, key) not in self._held:
                self._delete(tenant, [key], now)
            return None
        expires_s = time.monotonic() + left_ns / 1e9 if header.expires_ns else 0.0
        listing = Listing(key, header.kind, address, header.length_bytes, int(expires_s * 1000), header.checksum)
        it = Held(tenant, key, space, address, expires_s, self._table.publish(listing), parts)
        self._held[tenant, key] = self._at[address] = it
        if expires_s:
            self._overs += 1
            heapq.heappush(self._over, (expires_s, self._overs, it))
            if len(self._over) > 2 * len(self._held) + OVER_SPARE:
                self._over = [it for it in self._over if self._held.get((it[2].tenant, it[2].key)) is it[2]]
                heapq.heapify(self._over)
        return it

    def _freed(self, address: int) -> None:
        """A slot is given back: whatever object was there is not there any more."""
        it = self._at.pop(address, None)
        if it is not None:
            self._table.withdraw(it.place)
            del self._held[it.tenant, it.key]

    def _delete(self, tenant: int, keys: Sequence[ChunkKey], now: float) -> bytes:
        """Remove objects, their parts and all pins on them from this node's HOST and DISK; one byte a key: 1 where it
        was known to be in one."""
        found = bytearray(len(keys))
        for at, key in enumerate(keys):
            it = self._held.get((tenant, key))
            found[at] = self._delete_one(tenant, key)
            for part in () if it is None else it.parts:
                self._delete_one(tenant, part)
        return bytes(found)

    def _delete_one(self, tenant: int, key: ChunkKey) -> bool:
        it = self._held.get((tenant, key))
        found = it is not None and (not it.expires_s or it.expires_s > time.monotonic())
        for instance in list(self._pins.get((tenant, key), ())):
            self._unpin(instance, tenant, key)
        if it is not None:
            self._freed(it.address)
            self._host.drop(it.space, 0, key, it.address, "deleted")
        if (tenant, key) in self._coming:
            self._coming[tenant, key] = False
        self._sought.pop((tenant, key), None)
        if not self._tiering.levels:
            return found
        for space in self._spaces_of(tenant):
            self._host.evict(space, [key])
            for level in self._tiering.levels:
                level.queue.pop((space, key), None)
                if level.disk is not None and space in level.spaces:
                    found |= bool(level.disk.evict(level.spaces[space], [key]))
        if any(level.disk is not None and self._is_on(level, tenant, key) for level in self._tiering.levels):
            found |= (tenant, key) not in self._leaving
            self._leaving[tenant, key] = None
        return found

    def _verify(self, tenant: int, keys: Sequence[ChunkKey]) -> None:
        """Drop from HOST those of these objects, and of their parts, whose bytes are not what their checksums say; a
        lower tier's copy is another."""
        left = SUSPECT_BYTES_MAX
        for it in filter(None, [self._held.get((tenant, key)) for key in keys]):
            for one in (it, *self._parts_here(it)):
                size = self._host.spaces[one.space].slot_bytes[0]
                left -= size
                if left < 0:
                    return
                slot = self._memory.view(one.address, size)
                header = read_header(slot, one.key)
                if header is not None:
                    data = slot[HEADER_BYTES : HEADER_BYTES + header.length_bytes]
                    if payload_checksum(data) == header.checksum:
                        continue
                for instance in list(self._pins.get((tenant, it.key), ())):
                    self._unpin(instance, tenant, it.key)
                self._freed(one.address)
                self._host.drop(one.space, 0, one.key, one.address, "corrupt")

    def _delete_elsewhere(self, tenant: int, keys: Sequence[ChunkKey], now: float) -> None:
        """Remove objects from REMOTE tiers, and have the other nodes remove them."""
        for level in self._tiering.levels:
            if level.disk is None and level.name != PEERS:
                for space in self._spaces_of(tenant):
                    self._tiering.movement.evict(space, keys, now, below=True)
        if self._peers is not None:
            self._peers.removed(self._tenants[tenant].name, keys)

    def _is_on(self, level: Level, tenant: int, key: ChunkKey) -> bool:
        return any(level.has(space, 0, key) for space in self._spaces_of(tenant))

    def _let_go(self) -> None:
        """Delete from the disk what could not be deleted before, because it was being moved."""
        for tenant, key in list(self._leaving):
            for level in self._tiering.levels:
                for space in self._spaces_of(tenant) if level.disk is not None else ():
                    if level.disk is not None and space in level.spaces:
                        level.disk.evict(level.spaces[space], [key])
            if not any(level.disk is not None and self._is_on(level, tenant, key) for level in self._tiering.levels):
                del self._leaving[tenant, key]

    # ---- what is below --------------------------------------------------------------------------------

    def _below(self, tenant: int, key: ChunkKey) -> tuple[int, int] | None:
        """The level and the namespace in which an object is known to be, with nobody being asked."""
        if (tenant, key) in self._leaving:
            return None
        for number, level in enumerate(self._tiering.levels):
            for space in self._spaces_of(tenant) if level.well else ():
                if level.serves(space, 0, key):
                    return number, space
        return None

    def _bring(self, tenant: int, key: ChunkKey, now: float) -> bool:
        """Begin to bring an object up; whether it is worth asking again."""
        if (tenant, key) in self._coming:
            return self._coming[tenant, key]
        where = self._below(tenant, key)
        if where is None and self._seek(tenant, key, now):
            where = self._sought[tenant, key].where
            if where is None:
                return True
        if where is None:
            return False
        number, space = where
        if space in self._tiering.levels[number].clearing or not self._tiering.levels[number].well:
            return False
        size = self._host.spaces[space].slot_bytes[0]
        room = COMING_SHARE * self._pool.capacity_bytes
        if self._coming and (len(self._coming) >= COMING_MAX or self._coming_bytes + size > room):
            return True
        ended = partial(self._came, tenant, key, size)
        if self._tiering.movement.read(number, space, [key], [(0, key)], None, now, ended) is not None:
            self._coming[tenant, key] = True
            self._coming_bytes += size
        return True  # also if there is no room for it now: it is no miss

    def _seek(self, tenant: int, key: ChunkKey, now: float) -> bool:
        """Look for an object on other nodes and REMOTE tiers; whether it is there or may be."""
        known = self._sought.get((tenant, key))
        if known is not None and now < known.over_s and (tenant, key) not in self._leaving:
            return known.waiting > 0 or known.where is not None
        sought = self._sought[tenant, key] = Sought(0, now + SOUGHT_S)
        while len(self._sought) > SOUGHT_MAX:
            self._sought.popitem(last=False)
        for number, level in enumerate(self._tiering.levels):
            if level.disk is not None or not level.well:
                continue
            if level.name == PEERS:
                if self._peers is not None:
                    sought.waiting += 1
                    self._peers.seek(self._tenants[tenant].name, key)
                continue
            for space in self._spaces_of(tenant):
                if space not in level.clearing:
                    sought.waiting += 1
                    ended = partial(self._answered, sought, number, space)
                    self._tiering.movement.ask(number, space, [(0, key)], now, ended)
        return sought.waiting > 0

    @staticmethod
    def _answered(sought: Sought, number: int, space: int, move: Move, outcomes: list[Outcome], now: float) -> None:
        sought.waiting -= 1
        if outcomes == [Outcome.DONE]:
            sought.where = sought.where or (number, space)

    def _located(self, name: str, key: ChunkKey, size: int, now: float) -> None:
        """The peers have been asked about an object."""
        tenant = self._tenant_numbers[name]
        sought = self._sought.get((tenant, key))
        if sought is None:
            return
        sought.waiting -= 1
        fits = 0 < size <= self._pool.slab_bytes and size % PAGE_BYTES == 0
        space = self._space(tenant, size) if fits else None
        level = next((at for at, it in enumerate(self._tiering.levels) if it.name == PEERS), None)
        if space is not None and level is not None:
            sought.where = level, space

    def _came(self, tenant: int, key: ChunkKey, size: int, move: Move, outcomes: list[Outcome], now: float) -> None:
        self._coming_bytes -= size
        if self._tiering.movement.arrived(move, outcomes, now):
            self._sought[tenant, key] = Sought(0, now + SOUGHT_S)  # it is not there after all
        if not self._coming.pop((tenant, key)):
            self._delete(tenant, [key], now)

    # ---- puts under way, and pins ---------------------------------------------------------------------

    def _begin_placing(self, placing: Placing) -> int:
        number = self._next_placing
        self._next_placing += 1
        self._placings[number] = placing
        for key, slot in zip(placing.keys, placing.slots, strict=True):
            if slot is not None:
                self._placed[placing.tenant, key] = number, slot[1]
        return number

    def _end_placing(self, number: int) -> None:
        placing = self._placings.pop(number)
        for key in placing.keys:
            if self._placed.get((placing.tenant, key), (0, 0))[0] == number:
                del self._placed[placing.tenant, key]

    def _has_tickets(self, placing: Placing) -> bool:
        return any(it[1] in self._host.tickets for it in placing.slots if it is not None)

    def _is_placed(self, tenant: int, key: ChunkKey) -> bool:
        """Whether somebody is writing this object and may still publish it."""
        it = self._placed.get((tenant, key))
        return it is not None and self._is_writable(it[1])

    def _is_writable(self, number: int) -> bool:
        ticket = self._host.tickets.get(number)
        return ticket is not None and not ticket.quarantined

    def _pin(self, instance: str, tenant: int, key: ChunkKey, hold_s: float, now: float) -> bool:
        """Keep an object in HOST with all its parts; False, and none of it is kept, if not all of it is there, or if
        half of the memory is pinned already."""
        it = self._look(tenant, key, now)
        if it is None:
            return False
        for name in (key, *it.parts):
            self._unpin(instance, tenant, name)
        here = [it, *self._parts_here(it)]
        if len(here) <= len(it.parts) or len(self._host.tickets) + len(here) > TICKETS_MAX:
            return False
        size = sum(self._host.spaces[one.space].slot_bytes[0] for one in here)
        most = PINNED_SHARE * self._pool.capacity_bytes
        if self._pinned_bytes + size > most:
            self._forget_ended_pins()
        if self._pinned_bytes + size > most:
            return False
        tickets = [
            self._host.hold(instance, TicketKind.PIN, one.space, [(0, one.key)], now + hold_s)[0] for one in here
        ]
        self._pins.setdefault((tenant, key), {})[instance] = Pinned(tuple(tickets), size)
        self._pinned_bytes += size
        return True

    def _unpin(self, instance: str, tenant: int, key: ChunkKey) -> bool:
        """End a client's pin on an object; whether there was one."""
        pin = self._take_pin(instance, tenant, key)
        held = () if pin is None else [it for it in pin.tickets if it in self._host.tickets]
        for ticket in held:
            self._host.release(instance, ticket)
        return pin is not None and len(held) == len(pin.tickets)

    def _take_pin(self, instance: str, tenant: int, key: ChunkKey) -> Pinned | None:
        pins = self._pins.get((tenant, key), {})
        pin = pins.pop(instance, None)
        if pin is not None:
            self._pinned_bytes -= pin.size_bytes
            if not pins:
                del self._pins[tenant, key]
        return pin

    def _forget_ended_pins(self) -> None:
        for (tenant, key), pins in list(self._pins.items()):
            for instance, pin in list(pins.items()):
                if not any(it in self._host.tickets for it in pin.tickets):
                    self._take_pin(instance, tenant, key)

    # ---- names ----------------------------------------------------------------------------------------

    def _tenant(self, instance: str) -> int:
        tenant = self._clients.get(instance)
        if tenant is None:
            raise ProtocolError("Enter comes before all that is about objects")
        return tenant

    def _known_tenant(self, name: str) -> int | None:
        """The number of a tenant that has something here; peers ask about others, too, which must cost nothing."""
        if name in self._tenant_numbers:
            return self._tenant_numbers[name]
        is_here = any(it.namespace == object_namespace(name, it.slot_bytes[0]) for it in self._host.spaces)
        return self._tenant_number(name) if is_here else None

    def _tenant_number(self, name: str) -> int:
        """The number of a tenant, old or new; raises RefusedError."""
        number = self._tenant_numbers.get(name)
        if number is None:
            if len(name) > TENANT_CHARS_MAX:
                most = f"at most {TENANT_CHARS_MAX} characters"
                raise RefusedError("tenant", most, f"{len(name)}", "use a digest of it")
            if len(self._tenants) >= TENANTS_MAX:
                raise RefusedError("tenants", f"at most {TENANTS_MAX}", "one more", "start another node")
            number = self._tenant_numbers[name] = len(self._tenants)
            self._tenants.append(Tenant(name, tenant_root(name)))
        return number

    def _spaces_of(self, tenant: int) -> Collection[int]:
        """The namespaces of a tenant's objects."""
        it = self._tenants[tenant]
        while it.scanned < len(self._host.spaces):
            space = self._host.spaces[it.scanned]
            size = space.slot_bytes[0]
            if space.namespace == object_namespace(it.name, size):
                it.spaces[size] = it.scanned
            it.scanned += 1
        return it.spaces.values()

    def _space(self, tenant: int, size: int) -> int | None:
        self._spaces_of(tenant)
        it = self._tenants[tenant]
        if size not in it.spaces:
            space = self._add_space(object_namespace(it.name, size), object_layout(size))
            if space is None:
                return None
            it.spaces[size] = space
        return it.spaces[size]


def _nobody(space: int, keys: Sequence[ChunkKey], copies: int, now: float) -> None:
    """A node that is alone has no replicas."""


def _keys(packed: bytes) -> list[ChunkKey]:
    if len(packed) > KEYS_MAX * KEY_BYTES:
        raise ProtocolError(f"{len(packed) // KEY_BYTES} keys in one call, at most {KEYS_MAX} are allowed")
    try:
        return split_keys(packed)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
