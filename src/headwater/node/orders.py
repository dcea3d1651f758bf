"""Copies on other nodes: what is decided about them in the loop, and the thread that locates and sends the orders.

Theory of operation. Whoever wants a copy elsewhere asks that node to *pull*: the order names the namespace and the
keys of a prompt, from its start on; the node brings up what it lacks as it would for an operator's prefetch, in its own
time.

    thread, once a second    loop: what is hot, wished or to be drained ─► locate ─► loop: orders ─► tell their targets
    peer's connection        pull ─► loop: room for one more? namespace known, or fit to be ─► prefetch
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headwater.config import NodeConfig
from headwater.core.cache import Cache
from headwater.core.drain import Drain, Progress, Rebalance
from headwater.core.entries import State
from headwater.core.heat import Heat
from headwater.core.layout import needed_chunks
from headwater.core.movement import OWNER
from headwater.core.placement import Limits, Placement
from headwater.core.placing import Chain, Order, Reason, Room
from headwater.core.spread import Copies
from headwater.errors import HeadwaterError, RefusedError
from headwater.node.errands import Answer, Errands
from headwater.node.peers import PeersTier
from headwater.node.tiering import Tiering
from headwater.types import ChunkKey, KVLayout, Namespace, Standing, chunk_name, pack_keys, split_keys, split_name

log = logging.getLogger(__name__)

ROUND_S = 1.0
PULLS_MAX = 32
PULL_KEYS_MAX = 65_536
BYTES_S = 200e6
LOOK_CHAINS = 64
SPARE_ROWS, SPARE_CHAINS = 1024, 16
STEP_ROWS, STEP_LEAVES = 2048, 64
HOT_NAMES = 1024
"""Chunks whose reads are counted: more would cost the loop milliseconds to look through."""
TELL_S = 1.0


class PullOrder(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a node is asked to have a copy of: chunks of one prompt, from its start on."""

    namespace: Namespace
    layout: KVLayout
    root: bytes
    keys: bytes
    reason: str


Adopt = Callable[[Namespace, KVLayout, bytes], int | None]
"""The number of a namespace by its root, known or made known; None if there is no place for it."""


class Orders:
    """One node's orders to others, and theirs to it."""

    def __init__(
        self,
        config: NodeConfig,
        errands: Errands,
        cache: Cache,
        tiering: Tiering,
        tier: PeersTier,
        rooms: Callable[[], list[Room]],
        copies: Copies,
    ) -> None:
        self._copies, self._cursor = copies, 0
        self._errands, self._cache, self._tiering, self._tier, self._rooms = errands, cache, tiering, tier, rooms
        self._placement = Placement(-1, Limits(bytes_s=BYTES_S, replicas_max=config.replicas))
        self._rebalance = Rebalance(-1, BYTES_S)
        self._placement.heat = Heat(HOT_NAMES)
        self._drain: Drain | None = None
        self._drain_number: int | None = None
        self._gathered: list[Chain] = []
        self._gathering: Iterator[list[Chain]] = iter(())
        self._pulls: dict[str, None] = {}
        self._next = 0
        self._tick_s = 0.0
        self.pulled = self.refused = 0
        self.sent = dict.fromkeys(Reason, 0)
        self.adopt: Adopt = _nobody
        self.spaces: Mapping[bytes, int] = {}
        """The namespaces of this node, by root."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-orders", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, until_s: float) -> None:
        """End the thread."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(max(until_s - time.monotonic(), 0.0))

    # ---- in the loop ----------------------------------------------------------------------------------

    def served(self, peer: str, space: int, names: list[bytes], now: float) -> None:
        """A peer has been lent these parts of chunks."""
        number = self._tier.number_of(peer)
        if number is not None:
            slots = self._cache.spaces[space].slot_bytes
            self._placement.served(number, names, [slots[split_name(it)[0]] for it in names], now)

    def wish(self, space: int, keys: Sequence[ChunkKey], copies: int, now: float) -> bool:
        """So many nodes shall hold these chunks, which we hold."""
        names, sizes = self._named(space, keys)
        return self._placement.wish(Chain(tuple(names), tuple(sizes)), copies, now)

    def begin_drain(self, number: int, now: float) -> None:
        """Have the others pull all that only we hold; again, if it is under way or over: from the beginning."""
        self._drain_number, self._drain = number, None
        self._gathered = []
        self._gathering = self._all_chains()

    def drained(self) -> Progress | None:
        """How far the drain is; None if there is none, or it is not known yet what has to leave."""
        return None if self._drain is None else self._drain.progress

    def _gather(self, now: float, answer: Answer[bool]) -> None:
        """One step towards a drain: find out what is here; whether there is more to find."""
        assert self._drain_number is not None
        more = next(self._gathering, None)
        if more is None:
            self._drain = Drain(self._drain_number, self._gathered, BYTES_S, now)
        else:
            self._gathered += more
        answer.give(more is not None)

    def tick(self, now: float) -> None:
        """Now and then: forget the pulls that are over."""
        self._tick_s = now
        for it in [it for it in self._pulls if self._tiering.fetches.is_over(OWNER, it)]:
            del self._pulls[it]

    def hottest(self, now: float, most: int) -> list[dict[str, Any]]:
        """What others read most from here, for people."""
        found = []
        for chain in self._placement.heat.chains(0.01, 1, now, most):
            last = chain.names[-1]
            found.append(
                {
                    "prefix": last[:8].hex(),
                    "chunks": len(chain.names),
                    "rate": round(chain.worth, 3),
                    "readers": self._placement.heat.readers(last, now),
                    "replicas": 1 + self._copies.others(split_name(last)[1]),
                }
            )
        return found

    def status(self) -> dict[str, Any]:
        """For people."""
        sent = {reason.value: count for reason, count in self.sent.items()}
        return {"sent": sent, "pulling": len(self._pulls), "pulled": self.pulled, "refused": self.refused}

    def told_pull(self, peer: str, body: bytes, until_s: float) -> bytes:
        """A peer wants us to have a copy; for the threads of connections. Raises RefusedError."""
        try:
            order = msgspec.msgpack.decode(body, type=PullOrder)
            keys = split_keys(order.keys)
        except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError) as error:
            raise RefusedError("pull", "an order", str(error)[:100], "use equal versions") from None
        if not 0 < len(keys) <= PULL_KEYS_MAX or order.layout.problem() is not None or len(order.root) != 32:
            raise RefusedError("pull", "a sound order", f"{len(keys)} keys", "use equal versions")

        def known(now: float, answer: Answer[bool]) -> None:
            answer.give(self._drain_number is not None or order.root in self.spaces)

        def begin(now: float, answer: Answer[bytes]) -> None:
            self._pull(order, keys, now)
            answer.give(b"")

        try:
            if not self._errands.ask(known, until_s):
                self._check_held(order, keys, until_s)
            return self._errands.ask(begin, until_s)
        except RefusedError:
            self.refused += 1
            raise

    def _check_held(self, order: PullOrder, keys: Sequence[ChunkKey], until_s: float) -> None:
        """A namespace that nobody here has spoken of: it is taken in for chunks that some member holds, no others."""
        names = [chunk_name(group, keys[-1]) for group in range(len(order.layout.groups))]
        if not any(self._tier.locate(names, until_s)):
            raise RefusedError("pull", "chunks that somebody holds", "others", "look up in the directory who has them")

    def _pull(self, order: PullOrder, keys: Sequence[ChunkKey], now: float) -> None:
        if self._drain_number is not None:
            raise RefusedError("pull", "a node that stays", "one that drains", "choose another node")
        space = self.adopt(order.namespace, order.layout, order.root)
        if space is None:
            raise RefusedError("pull", "a namespace that fits here", "one that does not", "choose another node")
        main = self._cache.spaces[space].main
        for run in [keys] if main is not None else [[key] for key in keys]:
            if len(self._pulls) >= PULLS_MAX:
                raise RefusedError("pull", f"at most {PULLS_MAX} at a time", "one more", "try again later")
            self._next += 1
            request = f"pull-{self._next}"
            if self._tiering.fetches.prefetch(OWNER, request, space, run, now):
                self._pulls[request] = None
                self.pulled += 1

    # ---- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        whole = False
        try:
            while not self._ending.wait(ROUND_S):
                try:
                    self._round()
                except HeadwaterError as error:  # the loop is busy, or ends
                    log.debug("orders: %s", error)
            whole = True
        finally:
            if not whole:
                # A bug, which Python tells of as it ends this thread; the node must not be without it for that.
                threading.Thread(target=self._run, name="headwater-orders", daemon=True).start()

    def _round(self) -> None:
        until_s = time.monotonic() + TELL_S
        self._tier.probe(until_s)
        while self._drain_number is not None and self._drain is None and not self._ending.is_set():
            self._errands.ask(self._gather, time.monotonic() + TELL_S)
        wanted = self._errands.ask(self._collect, until_s)
        chains = [chain for some in wanted.values() for chain in some]
        if not chains or not self._tier.members():
            return
        names = list(dict.fromkeys(name for chain in chains for name in chain.names))
        located = self._tier.locate_now(names, until_s)
        # A copy on a member that is silent may be none.
        there = {it.number for it in self._tier.members() if it.standing is not Standing.SILENT}
        there.add(self._placement.own)
        holders = {
            name: [it.number for it in found if it.number in there] for name, found in zip(names, located, strict=True)
        }

        def decide(now: float, answer: Answer[list[tuple[Order, bytes]]]) -> None:
            answer.give(self._decide(wanted, holders, now))

        for order, body in self._errands.ask(decide, time.monotonic() + TELL_S):
            if self._ending.is_set():
                return
            try:
                self._tier.tell(order.target, "pull", body, time.monotonic() + TELL_S)
                self.sent[order.reason] += 1
            except HeadwaterError as error:
                log.debug("member %d does not pull: %s", order.target, error)

    def _collect(self, now: float, answer: Answer[dict[Reason, list[Chain]]]) -> None:
        rooms = self._rooms()
        self._placement.own = self._rebalance.own = rooms[-1].number
        spare = self._spare_chains(now) if self._drain_number is None and self._rebalance.surplus_bytes(rooms) else []
        wanted = {
            Reason.REBALANCE: [*self._rebalance.sent[:LOOK_CHAINS], *spare],
            Reason.HOT: self._placement.hot_chains(now, LOOK_CHAINS),
            Reason.REPLICAS: self._placement.wished_chains(now, LOOK_CHAINS),
            Reason.DRAIN: self._drain.chains(now, LOOK_CHAINS) if self._drain is not None else [],
        }
        answer.give(wanted)

    def _decide(
        self, wanted: dict[Reason, list[Chain]], holders: dict[bytes, list[int]], now: float
    ) -> list[tuple[Order, bytes]]:
        rooms = self._rooms()
        orders = self._placement.wished(wanted[Reason.REPLICAS], holders, rooms, now)
        if self._drain_number is not None and self._drain is not None:
            orders += self._drain.step(wanted[Reason.DRAIN], holders, rooms, now)
        else:
            orders += self._placement.hot(wanted[Reason.HOT], holders, rooms, now)
            for chain in self._rebalance.arrived(holders):
                self._give_up(chain)
            orders += self._rebalance.step(wanted[Reason.REBALANCE], holders, rooms, now)
        return [(it, body) for it in orders if (body := self._body(it)) is not None]

    def _spare_chains(self, now: float) -> list[Chain]:
        """Ends of prompts that nobody else is known to hold and nobody reads from here, a few further on each time."""
        entries, found = self._cache.entries, []
        rows = len(entries.keys)
        for _ in range(min(SPARE_ROWS, rows)):
            self._cursor = (self._cursor + 1) % rows
            row = self._cursor
            if entries.state[row] != State.READY or not entries.is_leaf(row) or entries.leases[row]:
                continue
            key = entries.keys[row]
            if self._copies.others(key) or self._placement.heat.rate(chunk_name(entries.group[row], key), now):
                continue
            chain = self._chain_to(entries.space[row], key, now)
            if chain.names:
                found.append(chain)
                if len(found) == SPARE_CHAINS:
                    break
        return found

    def _give_up(self, chain: Chain) -> None:
        """Others hold this by now: its last chunk may leave here."""
        group, last = split_name(chain.names[-1])
        for number, space in enumerate(self._cache.spaces):
            if last in space.index[group]:
                self._cache.evict(number, [last])

    # ---- chains ---------------------------------------------------------------------------------------

    def _body(self, order: Order) -> bytes | None:
        """An order as it is sent; None if what it names has left meanwhile."""
        last = split_name(order.names[-1])[1]
        for number, space in enumerate(self._cache.spaces):
            if any(self._is_here(number, group, last) for group in range(len(space.index))):
                keys = self._chain(number, last) if space.main is not None else _keys(order.names)
                origin = self._tiering.origin(number)
                body = PullOrder(origin.namespace, origin.layout, origin.root, pack_keys(keys), order.reason.value)
                return msgspec.msgpack.encode(body)
        return None

    def _chain(self, space: int, last: ChunkKey) -> list[ChunkKey]:
        """A chunk and all before it, the first first."""
        chain = [last]
        while (above := self._above(space, chain[-1])) is not None:
            chain.append(above)
        chain.reverse()
        return chain

    def _above(self, space: int, key: ChunkKey) -> ChunkKey | None:
        above = self._cache.parent_of(space, key)
        if above is not None:
            return above
        level = self._tiering.disk_level
        if level is None or level.disk is None or space not in level.spaces:
            return None
        return level.disk.parent_of(level.spaces[space], key)

    def _named(self, space: int, keys: Iterable[ChunkKey]) -> tuple[list[bytes], list[int]]:
        sizes = self._cache.spaces[space].slot_bytes
        names = [(chunk_name(group, key), size) for key in keys for group, size in enumerate(sizes)]
        return [name for name, _ in names], [size for _, size in names]

    def _all_chains(self) -> Iterator[list[Chain]]:
        """Every prompt that HOST or DISK hold to its last chunk, some at a time."""
        caches: list[tuple[Cache, dict[int, int] | None]] = [(self._cache, None)]
        level = self._tiering.disk_level
        if level is not None and level.disk is not None:
            caches.append((level.disk, {disk: host for host, disk in level.spaces.items()}))
        for cache, spaces in caches:
            entries, row = cache.entries, 0
            while row < len(entries.keys):
                found: list[Chain] = []
                rows, row = range(row, min(row + STEP_ROWS, len(entries.keys))), row + STEP_ROWS
                for it in rows:
                    if entries.state[it] != State.READY or not entries.is_leaf(it):
                        continue
                    space = entries.space[it] if spaces is None else spaces.get(entries.space[it])
                    if space is not None:
                        found.append(self._chain_to(space, entries.keys[it], self._tick_s))
                    if len(found) == STEP_LEAVES:
                        yield [chain for chain in found if chain.names]
                        found = []
                yield [chain for chain in found if chain.names]

    def _chain_to(self, space: int, last: ChunkKey, now: float) -> Chain:
        """A prompt to its last chunk: the parts of it that are there, and are needed to use all of it. It is worth what
        others read of it."""
        it = self._cache.spaces[space]
        keys = self._chain(space, last) if it.main is not None else [last]
        needed = [set(needed_chunks(it.layout, group, len(keys))) for group in range(len(it.index))]
        parts = [
            (chunk_name(group, key), it.slot_bytes[group])
            for at, key in enumerate(keys)
            for group in range(len(it.index))
            if at in needed[group] and self._is_here(space, group, key)
        ]
        worth = self._placement.heat.rate(parts[-1][0], now) if parts else 0.0
        return Chain(tuple(name for name, _ in parts), tuple(size for _, size in parts), worth)

    def _is_here(self, space: int, group: int, key: ChunkKey) -> bool:
        if self._cache.is_ready(space, group, key):
            return True
        level = self._tiering.disk_level
        return level is not None and level.serves(space, group, key)


def _keys(names: Sequence[bytes]) -> list[ChunkKey]:
    return list(dict.fromkeys(split_name(it)[1] for it in names))


def _nobody(namespace: Namespace, layout: KVLayout, root: bytes) -> int | None:
    """No namespace is taken in yet."""
    return None
