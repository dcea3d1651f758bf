"""Who watches the node: Conductors, which are told what its tiers hold, which engines are registered, how fast it is.

Theory of operation. A watcher asks, and is answered when there is something to tell, or after `HOLD_S`. What it asked
with acknowledges the answer before. So nothing is under way but one answer, and a watcher that is slow to ask slows
nobody down: changes queue up for it, each chunk and tier once, and when they are too many it is told everything again.

    asks with the number and serial of the last answer    -> the batch is acknowledged, it waits for the next one
    asks with others, or its queue was full               -> another number: what it knew is void, a walk over the
                                                             inventory feeds the queue, changes go in as they come
    leaves                                                -> forgotten

The queue and the walk are those that announce to a directory (`core.announcing`). Of a chunk with several KV groups the
one counts that needs every chunk; objects of the Store are nobody's prefix and are left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headwater.core.announcing import QUEUE_LIMIT, Announcing, Batch, Standpoint
from headwater.core.cache import Cache, Space
from headwater.core.entries import State
from headwater.core.levels import Level
from headwater.errors import ProtocolError, RefusedError
from headwater.node.cluster import Cluster
from headwater.node.messages import FRAME_BYTES_MAX, Figure, Moves, Registration, Watch, Watched
from headwater.node.object_format import MODEL
from headwater.node.tiering import Tiering
from headwater.types import Announced, Changed, ChunkKey, Removed, Stored, Tier, chunk_name, split_name

WATCHERS_MAX = 128
"""A Conductor has one for each of its workers, also old ones that drain; those of other hosts linger for seconds."""
HOLD_S, FIGURES_S = 1.0, 3.0
NUMBER_MASK = 0xFFFFFFFF
STEP_ROWS = 2048
STEPS_A_TURN = 8
INSTANCES_BYTES_MAX = FRAME_BYTES_MAX // 2
FIGURES_MAX = 1024
PEERS = "peers"
"""The level that is other nodes' memory, of which these tell themselves."""
TIERS = (Tier.HOST, Tier.DISK, Tier.REMOTE)


@dataclass(slots=True)
class Watcher:
    """One connection that watches."""

    announcing: Announcing
    number: int = 0
    serial: int = 0
    sent: Batch | None = None
    waits: bool = False
    until_s: float = 0.0
    instances: int = -1
    """The version of the list that it knows."""
    figures_s: float = field(default=float("-inf"))


class Watching:
    """All watchers of a node; for the node's loop."""

    def __init__(self, cache: Cache, tiering: Tiering, instances: Mapping[str, int], cluster: Cluster | None) -> None:
        """`instances` are the namespaces of those that are registered, by name."""
        self._cache, self._tiering, self._instances, self._cluster = cache, tiering, instances, cluster
        self._watchers: dict[Hashable, Watcher] = {}
        self._version = 0
        for level in self._stores():
            level.on_known = self._heard_store

    def __len__(self) -> int:
        return len(self._watchers)

    def instances_changed(self) -> None:
        """Somebody registered, or is gone."""
        self._version += 1

    def heard(self, changes: Sequence[Changed]) -> None:
        """Tiers have stored or removed chunks."""
        if not self._watchers:
            return
        disk = self._tiering.disk_level
        for change in changes:
            cache = self._cache if change.tier is Tier.HOST or disk is None or disk.disk is None else disk.disk
            if _counts(cache.spaces[change.namespace], change.group):
                for it in self._watchers.values():
                    it.announcing.changed(change)

    def ask(self, session: Hashable, request: Watch, now: float) -> None:
        """A session wants to be told; raises RefusedError if there are too many, ProtocolError if it waits already."""
        it = self._watchers.get(session)
        is_new = it is None
        if it is None:
            if len(self._watchers) >= WATCHERS_MAX:
                raise RefusedError("watchers", f"at most {WATCHERS_MAX}", "one more", "let fewer Conductors watch")
            it = self._watchers[session] = Watcher(Announcing(self._inventory, QUEUE_LIMIT, TIERS))
            # Whoever was forgotten meanwhile, and goes on asking, is to see another number.
            it.number = request.number & NUMBER_MASK
        if it.waits:
            raise ProtocolError("a Watch while one waits to be answered")
        it.waits, it.until_s = True, now + HOLD_S
        if is_new or (request.number, request.serial) != (it.number, it.serial):
            self._begin(it)
        elif it.sent is not None:
            it.announcing.acknowledged(it.sent)
            it.sent = None

    def waits(self, session: Hashable) -> bool:
        """Whether a session waits to be told something."""
        it = self._watchers.get(session)
        return it is not None and it.waits

    def left(self, session: Hashable) -> None:
        """A session is over."""
        self._watchers.pop(session, None)

    def answers(self, now: float) -> Iterator[tuple[Hashable, Watched]]:
        """Whom to tell what now; to be called after each turn."""
        for session, it in self._watchers.items():
            if it.waits and (answer := self._answer(it, now)) is not None:
                it.waits = False
                yield session, answer

    # ---- inside -----------------------------------------------------------------------------------------

    def _begin(self, it: Watcher) -> None:
        """Tell everything anew."""
        it.number += 1
        it.serial, it.sent = 0, None
        it.instances, it.figures_s = -1, float("-inf")
        it.announcing.joined(it.number)

    def _answer(self, it: Watcher, now: float) -> Watched | None:
        begins = it.announcing.standpoint is Standpoint.BEHIND
        if begins:
            self._begin(it)
        batch = self._next(it)
        has_instances, has_figures = it.instances != self._version, now >= it.figures_s
        # While the walk goes on it is to ask again at once, whatever this step has found.
        if batch is None and it.announcing.is_settled and not has_instances and not has_figures and now < it.until_s:
            return None
        instances = figures = None
        if has_instances:
            it.instances, instances = self._version, self._list()
        if has_figures:
            it.figures_s, figures = now + FIGURES_S, self._figures(now)
        if batch is not None:
            it.sent, it.serial = batch, batch.serial
        name = "" if self._cluster is None else self._cluster.member.name
        return Watched(it.number, it.serial, name, _moves(batch), instances, figures)

    @staticmethod
    def _next(it: Watcher) -> Batch | None:
        for _ in range(STEPS_A_TURN):
            batch = it.announcing.batch()
            if batch is not None or it.announcing.is_settled:
                return batch
        return None

    def _stores(self) -> list[Level]:
        return [it for it in self._tiering.levels if it.tier is Tier.REMOTE and it.name != PEERS]

    def _heard_store(self, space: int, group: int, key: ChunkKey, there: bool) -> None:
        if self._watchers:
            change: Changed
            if there:
                change = Stored(space, group, (key,), Tier.REMOTE, 0)
            else:
                change = Removed(space, group, (key,), Tier.REMOTE, 0, "deleted")
            self.heard((change,))

    def _inventory(self) -> Iterator[list[Announced]]:
        """What HOST, DISK and REMOTE tiers hold, some rows a step."""
        disk = self._tiering.disk_level
        for cache in (self._cache, None if disk is None else disk.disk):
            first = 0
            while cache is not None and first < len(cache.entries.keys):
                yield list(_rows(cache, first))
                first += STEP_ROWS
        known = [part for level in self._stores() for part in level.known()]
        for first in range(0, len(known), STEP_ROWS):
            found = (it for it in known[first : first + STEP_ROWS] if _counts(self._cache.spaces[it[0]], it[1]))
            yield [Announced(chunk_name(group, key), Tier.REMOTE, present=True) for _, group, key in found]

    def _list(self) -> tuple[Registration, ...]:
        """Who is registered, as many as fit into an answer."""
        room_bytes, told = INSTANCES_BYTES_MAX, []
        for instance, space in self._instances.items():
            origin = self._tiering.origin(space)
            layout = origin.layout
            chunk_bytes = sum(map(layout.slot_bytes, range(len(layout.groups))))
            size = chunk_bytes // layout.chunk_tokens
            it = Registration(instance, origin.root, origin.namespace, layout.chunk_tokens, size)
            room_bytes -= len(msgspec.msgpack.encode(it))
            if room_bytes < 0:
                break
            told.append(it)
        return tuple(told)

    def _figures(self, now: float) -> tuple[Figure, ...]:
        """Of the tiers that were measured, and of peers."""
        levels = [it for it in self._tiering.levels if it.name != PEERS and it.well]
        told = [Figure(it.tier.value, "", it.reading.latency_s, it.reading.bytes_s) for it in levels]
        if self._cluster is not None:
            links = [it for it in self._cluster.links(now) if it["transport"] != "-"]
            told += [Figure(Tier.HOST.value, it["name"], it["latency_s"], it["bytes_s"]) for it in links]
        return tuple(told[:FIGURES_MAX])


def _counts(space: Space, group: int) -> bool:
    """Whether a part says that its chunk is there."""
    return group == (space.main or 0) and space.namespace.model != MODEL


def _rows(cache: Cache, first: int) -> Iterator[Announced]:
    entries = cache.entries
    for row in range(first, min(first + STEP_ROWS, len(entries.keys))):
        if entries.state[row] == State.READY and _counts(cache.spaces[entries.space[row]], entries.group[row]):
            yield Announced(chunk_name(entries.group[row], entries.keys[row]), cache.tier, present=True)


def _moves(batch: Batch | None) -> tuple[Moves, ...]:
    found: dict[Tier, tuple[list[bytes], list[bytes]]] = {}
    for it in () if batch is None else batch.changes:
        stored, removed = found.setdefault(it.tier, ([], []))
        (stored if it.present else removed).append(split_name(it.name)[1])
    return tuple(Moves(tier.value, b"".join(stored), b"".join(gone)) for tier, (stored, gone) in found.items())
