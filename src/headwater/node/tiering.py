"""All that a node has below HOST: its tiers, their threads, and the core that rules both.

Theory of operation. The node's loop is the only caller. After each turn it calls `settle`: what ended in the threads is
told to the core, what HOST announced is offered to the levels, what the DISK tier announced is journalled, and what
the core orders is handed to the threads. So a request is answered first and moved for afterwards.

What a namespace is called below: on REMOTE tiers by its root, on DISK by the root that `tiers.retired` has for it,
which is another after each clear. `_disk_spaces` has the first, `_disk_origins` the second; nobody else decides.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from headwater.config import NodeConfig
from headwater.core.cache import Cache
from headwater.core.eviction import POLICIES
from headwater.core.fetch import Answer, Fetches
from headwater.core.history import History
from headwater.core.levels import Admission, Level
from headwater.core.movement import Movement
from headwater.core.pool import Pool
from headwater.errors import ConfigError, RefusedError
from headwater.node.carrier import Carrier, Ends, lanes
from headwater.places import DiskSpec, RemoteSpec, parse_disk, parse_remote
from headwater.ports import LowerTier
from headwater.tiers.codecs import make_codec
from headwater.tiers.disk import DiskTier
from headwater.tiers.host import MappedMemory
from headwater.tiers.journal import Journal
from headwater.tiers.remote import open_remote
from headwater.types import Changed, ChunkKey, Cleared, Identity, KVLayout, Namespace, Origin, Removed, Stored, Tier

log = logging.getLogger(__name__)

CLOSE_S = 5.0
PEER_READERS = 4
PEER_BATCH_BYTES = 32 << 20
"""Peers are read from in larger batches than slower tiers: each costs a round trip."""


class Tiering:
    """A node's lower tiers; without any it does nothing, and the node is its HOST tier alone."""

    def __init__(
        self,
        config: NodeConfig,
        host: Cache,
        memory: MappedMemory,
        wake: Callable[[], None],
        peers: LowerTier | None = None,
    ) -> None:
        """Open all tiers; raises ConfigError or ResourceError for a disk that cannot be used. A remote that is away is
        only sick. `peers` is what other nodes hold: it is read from, and closed with the others."""
        self._host, self._memory = host, memory
        self._origins: list[Origin] = []
        self._ends = Ends(wake)
        self._disk: DiskTier | None = None
        self._disk_spaces: dict[bytes, int] = {}
        self._disk_origins: list[Origin] = []
        self.recovered_chunks = 0
        self.history = History()
        self.levels: list[Level] = []
        """The tiers below HOST, nearest first."""
        self._carriers: list[Carrier] = []
        self._used: list[tuple[int, Sequence[ChunkKey]]] = []
        self.on_changes: Callable[[Sequence[Changed]], None] = _nobody
        """Told what HOST and DISK have announced."""
        try:
            if config.disk:
                self.levels.append(self._open_disk(config, parse_disk(config.disk)))
            if peers is not None:
                self.levels.append(self._open_peers(config, peers))
            for url in config.remotes:
                self.levels.append(self._open_remote(config, parse_remote(url)))
        except BaseException:
            self.close()
            raise
        self.movement = Movement(host, self.levels, self.history)
        self.fetches = Fetches(self.movement)

    def __repr__(self) -> str:
        return f"Tiering({self.movement!r}, {self.fetches!r})"

    @property
    def recovered(self) -> list[Origin]:
        """The namespaces that an earlier life left on the disk."""
        return [self._base(it) for it in self._disk_origins]

    @property
    def journal(self) -> Journal | None:
        """The DISK tier's, if there is one."""
        return None if self._disk is None else self._disk.journal

    @property
    def disk_level(self) -> Level | None:
        """The DISK tier's, if there is one."""
        return self.levels[0] if self._disk is not None and self.levels else None

    def last_error(self, level: int) -> tuple[float, str] | None:
        """When and why a level as a whole last failed."""
        return self._carriers[level].last_error if level < len(self._carriers) else None

    # ---- what the node's verbs need -------------------------------------------------------------------

    def add_space(self, space: int, namespace: Namespace, layout: KVLayout, root: bytes) -> None:
        """A namespace with this root was registered as number `space` of HOST."""
        assert space == len(self._origins), f"space {space} of {len(self._origins)}"
        origin = Origin(replace(namespace, salt=""), layout, root)
        self._origins.append(origin)
        for level in self.levels:
            if level.disk is not None:
                number = self._disk_space(level.disk, origin)
                if number is not None:
                    level.spaces[space] = number

    def origin(self, space: int) -> Origin:
        """What REMOTE tiers know of a namespace."""
        return self._origins[space]

    def clear(self, space: int, now: float, *, here_only: bool = False) -> Cleared:
        """See `Movement.clear`; what the disk has of it is not found by any later life of the node either. `here_only`
        leaves REMOTE tiers and peers to whoever says so to all nodes.

        Raises RefusedError if the disk cannot take that down: then it is gone from this life alone.
        """
        trouble = None
        if self._disk is not None:
            self._hand_over(now)  # what was ordered so far goes by the old name
            trouble = self._retire(self._disk, space)
        cleared = self.fetches.clear(space, now, here_only=here_only)
        if trouble is not None:
            lasting = "a disk that takes down what is cleared"
            raise RefusedError("disk", lasting, trouble, "it is gone until a restart; mend the disk and clear again")
        return cleared

    def evict_here(self, space: int, keys: Sequence[ChunkKey]) -> None:
        """Delete chunks, and what hangs on them, from HOST and DISK."""
        self._host.evict(space, keys)
        level = self.disk_level
        if level is not None and level.disk is not None and space in level.spaces:
            level.disk.evict(level.spaces[space], keys)

    def ask(
        self, owner: str, request: str, space: int, keys: Sequence[ChunkKey], tokens_s: float, now: float
    ) -> Answer:
        """See `Fetches.ask`."""
        return self.fetches.ask(owner, request, space, keys, tokens_s or None, now)

    def loaded(self, space: int, keys: Sequence[ChunkKey]) -> None:
        """These chunks were leased to be read: they were used again."""
        if self.levels:
            self._used.append((space, keys))

    # ---- the loop's turns -----------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Let everything that has happened have its effects; starts the moves that follow from it."""
        for number, result in self._ends.take():
            self.movement.ended(number, result, now, random.random())
        for space, keys in self._used:
            self.movement.used(space, keys, now)
        self._used.clear()
        changes = self._host.take_changes()
        if changes:
            self.movement.heard(changes, now)
            self.on_changes(changes)
        self.fetches.go_on(now)  # not before the request that asked has its answer
        self._hand_over(now)

    def _hand_over(self, now: float) -> None:
        for command in self.movement.take_commands():
            self._carriers[command.level].order(command)
        self._journal(now)

    def tick(self, now: float) -> None:
        """About twice a second."""
        self.movement.tick(now, random.random())
        self.fetches.tick(now)
        self.settle(now)

    def is_quiet(self, now: float) -> bool:
        """Whether nothing moves and nothing that could is waiting to."""
        waiting = (level.queue and level.well and now >= level.full_until_s for level in self.levels)
        return self.movement.idle and not any(waiting)

    def close(self) -> None:
        """End the threads and close the tiers; what was written is journalled."""
        for level in self.levels:
            if level.clearing:
                say = "%s has yet to delete %d namespaces that were cleared; clear them again after the restart"
                log.warning(say, level.name, len(level.clearing))
        self._journal(time.monotonic())
        for carrier in self._carriers:
            carrier.end()
        until_s = time.monotonic() + CLOSE_S
        for carrier in self._carriers:
            carrier.close(until_s)
        self._carriers.clear()

    # ---- tiers ----------------------------------------------------------------------------------------

    def _open_disk(self, config: NodeConfig, spec: DiskSpec) -> Level:
        began_s = time.monotonic()
        codec = make_codec(spec.codec, Path(config.keys) if config.keys else None)
        disk = self._disk = DiskTier(
            Path(spec.path), spec.size_bytes, config.disk_slab_bytes, codec, config.disk_reserve
        )
        threads = config.disk_threads
        self._carriers.append(
            Carrier("disk", disk, lanes(threads, threads), self._memory, self._disk_origin, self._ends.add)
        )
        pool = Pool(disk.segments_bytes, disk.slab_bytes)
        cache = Cache(
            pool, POLICIES[config.eviction], 60.0, 60.0, 0, Tier.DISK, disk_quotas(config, pool.capacity_bytes)
        )
        self._restore(disk, cache)
        log.info(
            "disk=%s: %d chunks of an earlier life, %d of %d bytes taken, read in %.2f s",
            spec.path,
            self.recovered_chunks,
            pool.taken_bytes,
            pool.capacity_bytes,
            time.monotonic() - began_s,
        )
        admission = Admission(spec.admission)
        return Level("disk", Tier.DISK, admission, cache, threads, threads, config.transfer_bytes)

    def _open_peers(self, config: NodeConfig, peers: LowerTier) -> Level:
        self._carriers.append(
            Carrier("peers", peers, lanes(PEER_READERS, 1), self._memory, self.origin, self._ends.add)
        )
        return Level(
            "peers", Tier.REMOTE, Admission.NONE, None, PEER_READERS, 1, config.transfer_bytes, PEER_BATCH_BYTES
        )

    def _open_remote(self, config: NodeConfig, spec: RemoteSpec) -> Level:
        codec = make_codec(spec.codec, Path(config.keys) if config.keys else None)
        tier = open_remote(spec, codec)
        readers, writers = spec.connections, max(spec.connections // 2, 1)
        self._carriers.append(
            Carrier(spec.name, tier, lanes(readers, writers), self._memory, self.origin, self._ends.add)
        )
        admission = Admission(spec.admission)
        return Level(spec.name, Tier.REMOTE, admission, None, readers, writers, config.transfer_bytes)

    def _restore(self, disk: DiskTier, cache: Cache) -> None:
        """Take in what an earlier life left on the disk; what does not fit is forgotten."""
        parts: dict[int, list[tuple[int, ChunkKey, bytes, int]]] = {}
        origin: Origin | None = None
        number: int | None = None
        for it in disk.recover():
            if it.identity.origin is not origin:
                origin = it.identity.origin
                number = self._disk_space(cache, self._base(origin))
            if number is None:
                disk.journal.removed([it.place])
                continue
            parts.setdefault(number, []).append((it.identity.group, it.identity.key, it.identity.parent, it.place))
        for number, found in parts.items():
            took = cache.restore(number, found)
            self.recovered_chunks += sum(took)
            disk.journal.removed([part[3] for part, there in zip(found, took, strict=True) if not there])

    def _disk_space(self, cache: Cache, origin: Origin) -> int | None:
        """The DISK tier's number of a namespace, new or known, by its base root; None if its chunks do not fit into a
        slab."""
        assert self._disk is not None
        number = self._disk_spaces.get(origin.root)
        if number is not None:
            return number if self._disk_origins[number].layout == origin.layout else None
        groups = range(len(origin.layout.groups))
        sizes = [self._disk.slot_bytes(Identity(origin, group, ChunkKey(b""))) for group in groups]
        if max(sizes) > cache.pool.slab_bytes:
            say = "chunks of %d bytes do not fit the disk's slabs of %d bytes and stay out of it; set node.slab to more"
            log.warning(say, max(sizes), cache.pool.slab_bytes)
            return None
        number = cache.add_space(origin.namespace, origin.layout, sizes)
        self._disk_spaces[origin.root] = number
        self._disk_origins.append(replace(origin, root=self._disk.retired.current(origin.root)))
        return number

    def _base(self, named: Origin) -> Origin:
        """A namespace of the disk by its base root."""
        assert self._disk is not None
        return replace(named, root=self._disk.retired.base(named.root))

    def _disk_origin(self, space: int) -> Origin:
        """What the disk knows of a namespace."""
        return self._disk_origins[self.levels[0].spaces[space]]

    def _retire(self, disk: DiskTier, space: int) -> str | None:
        """Give a namespace another name on disk; why that cannot be done, if so."""
        if not self.levels[0].well:  # it might never return
            return "one that does not work now"
        root = self._origins[space].root
        try:
            disk.retired.add(disk.retired.current(root))
        except (OSError, ConfigError) as error:
            return str(error)
        number = self._disk_spaces.get(root)
        if number is not None:
            self._disk_origins[number] = replace(self._disk_origins[number], root=disk.retired.current(root))
        return None

    def _journal(self, now: float) -> None:
        for level in self.levels:
            if level.disk is None or self._disk is None:
                continue
            changes = level.disk.take_changes()
            for change in changes:
                self._journal_change(level.disk, self._disk, change, now)
            if changes:
                self.on_changes(changes)

    def _journal_change(self, cache: Cache, disk: DiskTier, change: Changed, now: float) -> None:
        if isinstance(change, Removed):
            self.history.removed(change, now)
            disk.journal.removed(change.places)
            return
        assert isinstance(change, Stored)
        origin, size = self._disk_origins[change.namespace], cache.spaces[change.namespace].slot_bytes[change.group]
        rows = []
        for key, place in zip(change.keys, change.places, strict=True):
            parent = cache.parent_of(change.namespace, key) or b""
            rows.append((place, size, Identity(origin, change.group, key, parent)))
        disk.journal.stored(rows)


def _nobody(changes: Sequence[Changed]) -> None:
    """Nobody listens."""


def disk_quotas(config: NodeConfig, capacity_bytes: int) -> dict[str, int]:
    """What tenants with a quota are entitled to on DISK: the share of it that they have of HOST memory."""
    return {tenant: capacity_bytes * quota // config.host_memory for tenant, quota in config.quotas.items()}
