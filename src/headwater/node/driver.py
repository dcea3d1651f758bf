"""The node itself: drives the core with real memory and a real clock, one request at a time.

Not thread-safe on purpose: the server's one event-loop thread is the only caller of `handle`, `expire` and
`close_instance`; whoever else wants to know something asks the server (`Server.ask`).
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache

import msgspec

from headwater.config import NodeConfig
from headwater.core.cache import Cache, Space
from headwater.core.eviction import POLICIES
from headwater.core.fetch import Answer
from headwater.core.spread import SpreadEviction
from headwater.errors import ProtocolError, RefusedError
from headwater.node.cluster import Cluster, default_name
from headwater.node.conductors import TOPIC, Conductors
from headwater.node.errands import Errands
from headwater.node.messages import (
    ADDRESSES_MAX,
    KEYS_MAX,
    PROTOCOL,
    Clear,
    ClearReply,
    Contained,
    Contains,
    Done,
    Drain,
    Ended,
    Forget,
    Hello,
    Keep,
    Load,
    Loaded,
    Match,
    Matched,
    Register,
    Registered,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    Status,
    StatusReply,
    Welcome,
    Wish,
    pack_addresses,
)
from headwater.node.object_table import buckets_for, table_bytes
from headwater.node.objects import Objects, WatchedPool
from headwater.node.tiering import Tiering
from headwater.node.watching import Watching
from headwater.node.wishes import Wishes
from headwater.ports import Clock, EvictionPolicy
from headwater.tiers.host import MappedMemory, create_memory, create_segment
from headwater.types import (
    KEY_BYTES,
    SEGMENT_SHIFT,
    Changed,
    ChunkKey,
    KVLayout,
    Namespace,
    TicketKind,
    Tier,
    split_keys,
)
from headwater.version import VERSION

SPACES_MAX = 4096
REQUEST_CHARS_MAX = 1024
TOKENS_S_MAX = 1e9
TICKETS_MAX = 65_536
SHARDS_MAX = 4096
GROUPS_MAX = 64
NAME_CHARS_MAX = 1024
SPACES_SHOWN = 256
NAME_CHARS_SHOWN = 200


class MonotonicClock:
    """CLOCK_MONOTONIC: one time for all processes of a host."""

    def now(self) -> float:
        """See `ports.Clock`."""
        return time.monotonic()


class Node:
    """A host's KV cache: memory, the core that rules it, and who registered what."""

    def __init__(self, config: NodeConfig, clock: Clock | None = None) -> None:
        """Create the memory; raises ResourceError with the number needed if the host cannot give it."""
        self.config = config
        self.clock = clock or MonotonicClock()
        self.name = uuid.uuid4().hex
        self.epoch = time.time_ns()
        size = config.host_memory // 4096 * 4096
        self.memory: MappedMemory = create_memory(size, config.backing, lock=config.lock_memory)
        pool = WatchedPool(self.memory.sizes, config.slab_bytes)
        leases = config.load_lease_s, config.save_lease_s
        self.wake: Callable[[], None] = _nobody
        """Called by other threads when the loop should call `settle`; whoever runs the loop sets it."""
        self.errands = Errands(lambda: self.wake())
        self.cluster: Cluster | None = None
        try:
            if config.directory:
                self.cluster = Cluster(config, default_name(config.socket), self.epoch, self.errands)
            policy = self._policy(config, self.cluster)
            self.cache = Cache(pool, policy, *leases, self.epoch, Tier.HOST, config.quotas)
            table_size = table_bytes(buckets_for(size))
            table = self.memory.add(create_segment(table_size), table_size) << SEGMENT_SHIFT
            peers = None if self.cluster is None else self.cluster.tier
            self.tiering = Tiering(config, self.cache, self.memory, lambda: self.wake(), peers)
        except BaseException:
            if self.cluster is not None:
                self.cluster.close()
            self.memory.close()
            raise
        self.started_s = self.clock.now()
        self.draining = False
        self.prefaulted_bytes = 0
        self.refused = 0
        self._spaces: dict[bytes, int] = {}
        self._instances: dict[str, int] = {}
        self._stop = threading.Event()
        self._prefault = threading.Thread(target=self._fault_in, name="headwater-prefault", daemon=True)
        self._verbs: dict[type[Request], Callable[[str, Request, float], Reply]] = {
            Register: self._register,
            Match: self._match,
            Contains: self._contains,
            Load: self._load,
            Reserve: self._reserve,
            Done: self._done,
            Release: self._release,
            Keep: self._keep,
            Clear: self._clear,
            Forget: self._forget,
            Status: self._status,
        }
        for origin in self.tiering.recovered:
            if len(self.cache.spaces) < SPACES_MAX and self._layout_fits(origin.layout):
                self._add_space(origin.root, origin.namespace, origin.layout)
        self.objects = Objects(
            self.cache,
            pool,
            self.memory,
            self.tiering,
            (table, table_size),
            self._object_space,
            lambda: self.draining,
            config.load_lease_s,
        )
        self._verbs |= self.objects.verbs
        self.tiering.on_changes = self.objects.heard
        self.wishes = Wishes(self.cache, self.tiering, self._spaces)
        self.watching = Watching(self.cache, self.tiering, self._instances, self.cluster)
        self.conductors = Conductors(self.watching, self.errands, self.wish)
        if self.cluster is not None:
            try:
                self._join(self.cluster)
            except BaseException:
                self.close()
                raise
        self._watch()
        if config.prefault:
            self._prefault.start()

    def __repr__(self) -> str:
        return f"Node({self.name[:8]}, {self.cache!r})"

    def welcome(self, hello: Hello) -> Welcome:
        """The answer to a client's first frame; raises RefusedError if we cannot understand each other."""
        if hello.protocol != PROTOCOL:
            raise RefusedError(
                "protocol",
                f"{PROTOCOL} (headwater {VERSION})",
                f"{hello.protocol} (headwater {hello.version})",
                "install the same headwater version on both sides",
            )
        if not 0 < len(hello.instance) <= 200:
            raise RefusedError("instance", "1 to 200 characters", f"{len(hello.instance)}", "choose another name")
        sizes = tuple(self.memory.sizes) if hello.maps else ()
        return Welcome(PROTOCOL, VERSION, self.name, self.epoch, sizes)

    def handle(self, instance: str, request: Request) -> Reply:
        """Serve one request of an instance; raises RefusedError or ProtocolError."""
        verb = self._verbs.get(type(request))
        if verb is None:
            raise ProtocolError(f"{type(request).__name__} is not allowed after the handshake")
        return verb(instance, request, self.clock.now())

    def close_instance(self, instance: str) -> int:
        """Every process of an instance is gone: everything that it held is free; the number of tickets."""
        if self._instances.pop(instance, None) is not None:
            self.watching.instances_changed()
        self.objects.forget(instance)
        self.tiering.fetches.forget_owner(instance, self.clock.now())
        return self.cache.close(instance)

    def expire(self) -> int:
        """End what is past its deadline; to be called about once a second."""
        now = self.clock.now()
        late = self.cache.expire(now)
        self.objects.sweep(now)
        self.tiering.tick(now)
        self.conductors.tick(now)
        if self.cluster is not None:
            self.cluster.tick(now)
        return late

    def settle(self) -> None:
        """Let what has happened have its effects on the lower tiers; to be called after requests, and when woken."""
        now = self.clock.now()
        self.errands.run(now)
        self.tiering.settle(now)
        if self.cluster is not None:
            self.cluster.settle(now)

    @property
    def due_s(self) -> float:
        """When `settle` is to be called at the latest, although nothing has happened."""
        return math.inf if self.cluster is None else self.cluster.due_s

    @property
    def quiet(self) -> bool:
        """Whether no copy is under way, by engines or between tiers. Pins wait for nothing."""
        tickets = self.cache.tickets.values()
        return all(it.kind is TicketKind.PIN for it in tickets) and self.tiering.is_quiet(self.clock.now())

    def wish(self, request: Wish) -> Reply:
        """Serve an operator; the caller has checked that it is one. Raises RefusedError or ProtocolError."""
        if isinstance(request, Drain):
            if self.cluster is None:
                raise RefusedError("node", "a node of a cluster", "one that is alone", "start it with --directory")
            return StatusReply(msgspec.json.encode(self.cluster.drain(self.clock.now(), begins=request.begins)))
        return StatusReply(msgspec.json.encode(self.wishes.grant(request, self.clock.now())))

    def close(self) -> None:
        """Free the memory; nothing may be called afterwards."""
        self._stop.set()
        if self._prefault.is_alive():
            self._prefault.join()
        self.errands.end()
        self.objects.leave()
        if self.cluster is not None:
            self.cluster.close()
        self.tiering.close()
        if self.cluster is not None:
            self.cluster.let_go()
        self.objects.close()
        self.memory.close()

    # ---- verbs ----------------------------------------------------------------------------------------

    def _register(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Register)
        namespace, layout = request.namespace, request.layout
        self._check_layout(namespace, layout)
        for name, value in self.config.require.items():
            given = getattr(namespace, name)
            if given != value:
                raise RefusedError(f"namespace.{name}", value, given, "this node's node.require admits only the former")
        known = self._instances.get(instance)
        if known is not None:
            self._check_agrees(self.cache.spaces[known], namespace, layout)
            return Registered(known)
        root = namespace.root()
        space = self._spaces.get(root)
        if space is None:
            if len(self._spaces) >= SPACES_MAX:
                raise RefusedError("namespaces", f"at most {SPACES_MAX}", "one more", "start another node")
            space = self._add_space(root, namespace, layout)
        elif self.cache.spaces[space].namespace != namespace:
            # It was on the disk, where salts are left out.
            self.cache.spaces[space].namespace = namespace
        self._instances[instance] = space
        self.watching.instances_changed()
        return Registered(space)

    def _match(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Match)
        self._space(instance, request.space)
        keys = _keys(request.keys)
        if request.request and not self.draining:
            if len(request.request) > REQUEST_CHARS_MAX:
                raise ProtocolError(f"a request's name of {len(request.request)} characters")
            rate = request.tokens_s if 0.0 < request.tokens_s < TOKENS_S_MAX else 0.0
            it = self.tiering.ask(instance, request.request, request.space, keys, rate, now)
        else:
            it = Answer(self.cache.match(request.space, keys), waiting=False)
        if request.counts and not it.waiting:
            self.cache.count_lookup(request.space, len(keys), it.chunks)
        return Matched(it.chunks, it.waiting, it.disk, it.remote)

    def _contains(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Contains)
        self._space(instance, request.space)
        return Contained(self.cache.contains(request.space, _keys(request.keys)))

    def _load(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Load)
        space = self._space(instance, request.space)
        if self.draining or len(self.cache.tickets) >= TICKETS_MAX:
            return Loaded(0, 0, pack_addresses([()] * len(space.index)), now)
        keys = _keys(request.keys, len(space.index))
        shards = _shards(request.shards)
        it = self.cache.load(instance, request.space, keys, max(request.first, 0), shards, now)
        self.tiering.loaded(request.space, keys[: it.chunks])
        return Loaded(it.ticket, it.chunks, pack_addresses(it.addresses), it.deadline_s)

    def _reserve(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Reserve)
        space = self._space(instance, request.space)
        if self.draining or len(self.cache.tickets) >= TICKETS_MAX:
            return Reserved(0, 0, pack_addresses([()] * len(space.index)), now)
        parent = _keys(request.parent)[0] if request.parent else None
        keys = _keys(request.keys, len(space.index))
        _check_count("lacking", request.lacking)
        shards = _shards(request.shards)
        if any(shard >= space.layout.shards for shard in shards):
            raise ProtocolError(f"shards {shards} of a layout with {space.layout.shards}")
        lacking = frozenset(request.lacking)
        it = self.cache.reserve(instance, request.space, parent, keys, lacking, shards, now)
        return Reserved(it.ticket, it.covered, pack_addresses(it.addresses), it.deadline_s)

    def _done(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Done)
        _check_count("failed", request.failed)
        return Ended(int(self.cache.done(instance, request.ticket, request.shard, request.failed, now)))

    def _release(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Release)
        _check_count("tickets", request.tickets)
        return Ended(sum(self.cache.release(instance, ticket) for ticket in request.tickets))

    def _keep(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Keep)
        _check_count("tickets", request.tickets)
        return Ended(self.cache.keep(instance, frozenset(request.tickets)))

    def _clear(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Clear)
        self._space(instance, request.space)
        if not request.begins:
            return ClearReply(0, 0, 0, self.tiering.movement.pending(request.space))
        it = self.tiering.clear(request.space, now)
        return ClearReply(it.deleted, it.kept, it.pins, it.pending)

    def _forget(self, instance: str, request: Request, now: float) -> Reply:
        assert isinstance(request, Forget)
        _check_count("requests", request.requests)
        return Ended(self.tiering.fetches.forget(instance, request.requests, now))

    def _status(self, instance: str, request: Request, now: float) -> Reply:
        return StatusReply(msgspec.json.encode(self.status()))

    # ---- inside ---------------------------------------------------------------------------------------

    def _space(self, instance: str, space: int) -> Space:
        if self._instances.get(instance) != space:
            raise ProtocolError(f"namespace handle {space} is not this instance's")
        return self.cache.spaces[space]

    def _add_space(self, root: bytes, namespace: Namespace, layout: KVLayout) -> int:
        space = self._spaces[root] = self.cache.add_space(namespace, layout)
        self.tiering.add_space(space, namespace, layout, root)
        return space

    @staticmethod
    def _policy(config: NodeConfig, cluster: Cluster | None) -> Callable[[], EvictionPolicy]:
        """Who leaves HOST next; in a cluster, the last copy of a chunk for last."""
        make = POLICIES[config.eviction]
        if cluster is None:
            return make
        copies = cluster.copies
        return lambda: SpreadEviction(make(), copies)

    def _join(self, cluster: Cluster) -> None:
        exports = cluster.serve(self.cache, self.tiering, self.memory, self._spaces)
        exports.topics["pull"] = cluster.orders.told_pull
        exports.topics[TOPIC] = self.conductors.told
        cluster.orders.adopt = self._adopt
        cluster.orders.spaces = self._spaces
        exports.topics |= self.objects.join(cluster.tier, self.errands)
        self.objects.wish = cluster.orders.wish
        heard = self.tiering.on_changes

        def both(changes: Sequence[Changed]) -> None:
            heard(changes)
            self.objects.heard(changes)

        self.tiering.on_changes = both

    def _watch(self) -> None:
        """Have watchers told what HOST and DISK announce, after those who keep books of it."""
        heard = self.tiering.on_changes

        def all_of_us(changes: Sequence[Changed]) -> None:
            heard(changes)
            self.watching.heard(changes)

        self.tiering.on_changes = all_of_us

    def _adopt(self, namespace: Namespace, layout: KVLayout, root: bytes) -> int | None:
        """A peer's namespace, by its root, since its salt stays with the engines; None if it does not fit here."""
        known = self._spaces.get(root)
        if known is not None:
            return known if self.cache.spaces[known].layout == layout else None
        if len(self.cache.spaces) >= SPACES_MAX or not self._layout_fits(layout):
            return None
        return self._add_space(root, namespace, layout)

    def _object_space(self, namespace: Namespace, layout: KVLayout) -> int | None:
        """The handle of a namespace of objects, old or new; None if there are too many."""
        root = namespace.root()
        if root not in self._spaces and len(self._spaces) >= SPACES_MAX:
            return None
        return self._spaces[root] if root in self._spaces else self._add_space(root, namespace, layout)

    def _layout_fits(self, layout: KVLayout) -> bool:
        return all(layout.slot_bytes(it) <= self.cache.pool.slab_bytes for it in range(len(layout.groups)))

    def _check_layout(self, namespace: Namespace, layout: KVLayout) -> None:
        # First what bounds the work of all that follows, and what a namespace costs as long as the node lives.
        if len(layout.groups) > GROUPS_MAX:
            raise RefusedError("layout.groups", f"at most {GROUPS_MAX}", f"{len(layout.groups)}", "use fewer KV groups")
        if any(len(group.shard_layers) > SHARDS_MAX for group in layout.groups):
            raise RefusedError("layout.shards", f"at most {SHARDS_MAX}", "more", "use fewer ranks")
        for field in fields(Namespace):
            length = len(getattr(namespace, field.name))
            if length > NAME_CHARS_MAX:
                given = f"{length} characters"
                raise RefusedError(f"namespace.{field.name}", f"at most {NAME_CHARS_MAX}", given, "use a digest of it")
        problem = layout.problem()
        if problem is not None:
            raise RefusedError("layout", "a sound layout", problem, "this is a bug in the client")
        if namespace.groups != layout.fingerprint():
            raise RefusedError("namespace.groups", layout.fingerprint(), namespace.groups, "they must agree")
        for group in range(len(layout.groups)):
            if layout.slot_bytes(group) > self.cache.pool.slab_bytes:
                raise RefusedError(
                    "chunk size",
                    f"at most node.slab={self.cache.pool.slab_bytes} bytes",
                    f"{layout.slot_bytes(group)} bytes for a chunk of {layout.chunk_tokens} tokens",
                    "raise node.host_memory or node.slab, or lower engine.chunk_tokens",
                )

    def _check_agrees(self, space: Space, namespace: Namespace, layout: KVLayout) -> None:
        for field in fields(Namespace):
            expected, given = getattr(space.namespace, field.name), getattr(namespace, field.name)
            if expected != given and field.name != "groups":
                raise RefusedError(f"namespace.{field.name}", expected, given, "all ranks of an instance must agree")
        for field in fields(KVLayout):
            expected, given = getattr(space.layout, field.name), getattr(layout, field.name)
            if expected != given:
                raise RefusedError(f"layout.{field.name}", f"{expected}", f"{given}", "all ranks must agree")

    def _fault_in(self) -> None:
        self.prefaulted_bytes = self.memory.prefault(self._stop)

    def status(self, spaces: int = SPACES_SHOWN) -> dict[str, object]:
        """The state for people and programs, with at most so many namespaces: JSON-able, no keys, salts or tokens."""
        cache = self.cache
        pool = cache.pool
        tickets = list(cache.tickets.values())
        kinds = [ticket.kind for ticket in tickets]
        leased = [row for ticket in tickets if ticket.kind is TicketKind.LOAD for row in ticket.rows]
        leases = Counter(cache.entries.space[row] for row in leased)
        late = [row for ticket in tickets if ticket.quarantined for row in ticket.rows]
        return {
            "node": self.name,
            "version": VERSION,
            "protocol": PROTOCOL,
            "epoch": self.epoch,
            "uptime_s": round(self.clock.now() - self.started_s, 3),
            "draining": self.draining,
            "quiet": self.quiet,
            "eviction": self.config.eviction,
            "host": {
                "capacity_bytes": pool.capacity_bytes,
                "taken_bytes": pool.taken_bytes,
                "slab_bytes": pool.slab_bytes,
                "prefaulted_bytes": self.prefaulted_bytes,
                "quarantined_bytes": sum(pool.slot_bytes(cache.entries.address[row]) for row in late),
            },
            "instances": len(self._instances),
            "tickets": {kind.value: kinds.count(kind) for kind in TicketKind},
            "expired": {"load": cache.expired_loads, "save": cache.expired_saves},
            "unknown_tickets": cache.unknown_tickets,
            "refused": self.refused,
            "tiers": self.wishes.tiers(self.clock.now()),
            "fetches": self.wishes.fetches(),
            "cluster": None if self.cluster is None else self.cluster.status(self.clock.now()),
            "namespaces": [_space_status(cache.spaces[it], leases[it]) for it in _shown(cache.spaces, spaces)],
        }


def _nobody() -> None:
    """No loop runs yet."""


def _shown(spaces: Sequence[Space], most: int) -> list[int]:
    """At most so many namespaces: those that hold most."""
    if len(spaces) <= most:
        return list(range(len(spaces)))
    return sorted(range(len(spaces)), key=lambda number: spaces[number].held_bytes, reverse=True)[:most]


@lru_cache(maxsize=SPACES_MAX)
def _public_name(namespace: Namespace) -> str:
    """A short name that namespaces share which differ only in who asks."""
    return replace(namespace, adapter="", tenant="", salt="").root().hex()[:12]


def _space_status(space: Space, leases: int) -> dict[str, object]:
    namespace = space.namespace
    return {
        "namespace": _public_name(namespace),
        "model": namespace.model[:NAME_CHARS_SHOWN],
        "kv_dtype": namespace.kv_dtype[:NAME_CHARS_SHOWN],
        "layout": namespace.layout[:NAME_CHARS_SHOWN],
        "parallel": namespace.parallel[:NAME_CHARS_SHOWN],
        "tenant": namespace.tenant[:NAME_CHARS_SHOWN],
        "tier": "host",
        "chunk_tokens": space.layout.chunk_tokens,
        "chunk_bytes": sum(space.layout.slot_bytes(group) for group in range(len(space.index))),
        "replicas": sum(map(len, space.index)),
        "held_bytes": space.held_bytes,
        "stored_bytes": space.stored_bytes,
        "evicted_bytes": space.evicted_bytes,
        "deleted_bytes": space.deleted_bytes,
        "held_chunks": space.stored_chunks - space.evicted_chunks - space.deleted_chunks,
        "stored_chunks": space.stored_chunks,
        "evicted_chunks": space.evicted_chunks,
        "deleted_chunks": space.deleted_chunks,
        "leases": leases,
        "failed_chunks": space.failed_chunks,
        "lookup_tokens": space.lookup_tokens,
        "hit_tokens": space.hit_tokens,
        "miss_tokens": space.lookup_tokens - space.hit_tokens,
    }


def _keys(packed: bytes, addresses: int = 0) -> list[ChunkKey]:
    """The keys of a call, whose reply has so many addresses a key."""
    if len(packed) > KEYS_MAX * KEY_BYTES:
        raise ProtocolError(f"{len(packed) // KEY_BYTES} keys in one call, at most {KEYS_MAX} are allowed")
    if len(packed) // KEY_BYTES * addresses > ADDRESSES_MAX:
        raise ProtocolError(f"{len(packed) // KEY_BYTES} keys with {addresses} groups are too many for one reply")
    try:
        return split_keys(packed)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def _check_count(name: str, items: Sequence[object]) -> None:
    if len(items) > KEYS_MAX:
        raise ProtocolError(f"{len(items)} {name} in one call, at most {KEYS_MAX} are allowed")


def _shards(shards: tuple[int, ...]) -> tuple[int, ...]:
    if not shards or len(shards) > SHARDS_MAX or len(set(shards)) != len(shards) or min(shards) < 0:
        raise ProtocolError(f"shards={shards[:8]} must be distinct, not negative, and at least one")
    return shards
