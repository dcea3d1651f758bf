"""One life of a node in a simulated cluster: the real core, and drivers of virtual time around it.

`settle` has the order of `node.tiering`: ends, what HOST announced, reads, orders, batches for the directory. The beat
is that of `node.membership`: join if need be, beat, list the members when they have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwater.core.announcing import BATCH_CHANGES, QUEUE_LIMIT, Announcing, Batch, Stamp, Standpoint
from headwater.core.cache import Cache
from headwater.core.directory import Records
from headwater.core.eviction import LRU
from headwater.core.fetch import Answer, Fetches
from headwater.core.history import History
from headwater.core.levels import ASKING_MAX, Admission, Command, Level, Verb
from headwater.core.links import Peers
from headwater.core.locations import Locations, Replicas
from headwater.core.movement import Movement
from headwater.core.placement import Limits, Placement
from headwater.core.placing import Chain, Order, Room
from headwater.core.pool import Pool
from headwater.core.spread import Copies, SpreadEviction
from headwater.errors import RefusedError
from headwater.sim.cluster_directory import ADDRESS, DirectoryServer, Roll
from headwater.sim.cluster_exports import SimulatedExports
from headwater.sim.cluster_life import Around, Result, Site
from headwater.sim.cluster_oracle import NodeOracle, SlotMemory, must
from headwater.sim.cluster_reads import PeerRead, Transfer
from headwater.sim.network import Answered
from headwater.sim.schedule import Process
from headwater.types import (
    ABSENT,
    PAGE_BYTES,
    Announced,
    ChunkKey,
    Listed,
    Loadable,
    Member,
    Outcome,
    Reservation,
    Standing,
    Tier,
    Usage,
    chunk_name,
    split_name,
)

OWNER = "engine"
LOAD_S, SAVE_S, WAIT_S = 1.5, 3.0, 4.0
BEAT_S, CALL_S, AGAIN_S = 1.0, 1.0, 0.2
LIST_S = 0.008
"""How long a list of members is kept at least, for each of them."""
SLAB_PAGES = 2
CALL_BYTES, ENTRY_BYTES = 64, 24
Said = tuple[Any] | None
"""What the directory says, or that it does not answer."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a life is made of; tests replace a part by one that is broken on purpose."""

    cache: type[Cache] = Cache
    movement: type[Movement] = Movement
    fetches: type[Fetches] = Fetches
    announcing: type[Announcing] = Announcing
    exports: type[SimulatedExports] = SimulatedExports
    reader: type[PeerRead] = PeerRead
    transfer: type[Transfer] = Transfer


class ClusterNode:
    """One life."""

    def __init__(self, cluster: Around, site: Site, epoch: int, parts: NodeParts) -> None:
        self.cluster, self.site, self._parts, plan = cluster, site, parts, cluster.plan
        self.process = Process(f"{site.name}.{epoch}")
        capacity = plan.slots * PAGE_BYTES
        self.member = Member(
            site.name, epoch, site.address, host=site.name, transports=site.transports, capacity_bytes=capacity
        )
        pool, self.copies = Pool([plan.slots * PAGE_BYTES], SLAB_PAGES * PAGE_BYTES), Copies()
        self.cache = parts.cache(pool, lambda: SpreadEviction(LRU(), self.copies), LOAD_S, SAVE_S, epoch << 20)
        self.cache.add_space(cluster.namespace, cluster.layout)
        self.memory = SlotMemory()
        self.oracle = NodeOracle(self.process.name, self.cache, self.memory)
        batch_bytes = plan.batch_chunks * PAGE_BYTES
        self.level = Level("peers", Tier.REMOTE, Admission.NONE, None, 4, 1, plan.slots * PAGE_BYTES // 2, batch_bytes)
        self.movement = parts.movement(self.cache, [self.level], History())
        self.fetches = parts.fetches(self.movement, wait_s=WAIT_S)
        self.announcing = parts.announcing(self._inventory)
        self.locations, self.peers, self.placement = Locations(), Peers(self.member), Placement(0)
        self.lender = parts.exports(self)
        self.standing = Standing.SERVING
        self._ends: list[tuple[Command, Result]] = []
        self._roll, self._met = Roll({}, {}), set[int]()
        self._seen: int | None = None
        self._list_from_s = 0.0
        self._sending = False
        self._batch: Batch | None = None
        self.touched = True
        """Something about its chunks can have changed since it was judged."""
        self._every(plan.tick_s, self._tick)
        self.cluster.schedule.after(self.cluster.rng.uniform(0.0, 0.1), "", self._beat, self.process)

    def __repr__(self) -> str:
        return f"ClusterNode({self.process.name}, {self.cache!r}, {self.announcing!r}, {self.peers!r})"

    @property
    def now(self) -> float:
        """This host's time."""
        return self.site.host.clock.now()

    def after(self, local_s: float, act: Callable[[], None]) -> None:
        """Plan something by this host's clock; it does not happen if the node is dead by then."""
        self.cluster.schedule.after(self.site.host.clock.true_s(local_s), "", act, self.process)

    def writer_of(self, ticket: int) -> str:
        """Who writes for a ticket."""
        return f"{self.process.name} #{ticket}"

    def note(self, what: str) -> None:
        """A line for the log."""
        self.cluster.schedule.note(f"{self.process.name} {what}")

    # ---- what instances ask ---------------------------------------------------------------------------

    def ask(self, request: str, keys: Sequence[ChunkKey]) -> Answer:
        """See `Fetches.ask`."""
        answer = self.fetches.ask(OWNER, request, 0, keys, self.cluster.plan.tokens_s, self.now)
        if not answer.waiting:
            self.cluster.sums.pulled += answer.remote
            self.note(f"ask {request} of {len(keys)} -> {answer.chunks}, {answer.remote} of them from peers")
        return answer

    def prefetch(self, name: str, keys: Sequence[ChunkKey]) -> None:
        """Pull chunks, as another node has ordered."""
        self.fetches.prefetch("", name, 0, keys, self.now)

    def forget(self, request: str) -> None:
        """See `Fetches.forget`."""
        self.fetches.forget(OWNER, [request], self.now)

    def load(self, request: str, keys: Sequence[ChunkKey]) -> Loadable:
        """See `Cache.load`."""
        self.touched = True
        return self.cache.load(request, 0, keys, 0, (0,), self.now)

    def reserve(self, request: str, parent: ChunkKey | None, keys: Sequence[ChunkKey]) -> Reservation:
        """See `Cache.reserve`."""
        self.touched = True
        got = self.cache.reserve(request, 0, parent, keys, frozenset(), (0,), self.now)
        self.memory.claim(self.writer_of(got.ticket), [it for it in got.addresses[0] if it != ABSENT])
        return got

    def done(self, request: str, ticket: int) -> bool:
        """See `Cache.done`."""
        self.touched = True
        self.memory.stopped(self.writer_of(ticket))
        return self.cache.done(request, ticket, 0, (), self.now)

    def release(self, request: str, ticket: int) -> None:
        """See `Cache.release`."""
        self.touched = True
        self.memory.stopped(self.writer_of(ticket))
        self.cache.release(request, ticket)

    def clear(self) -> None:
        """Lose what nobody uses."""
        self.touched = True
        self.note(f"is cleared of {self.cache.clear(0, '')} chunks")

    # ---- turns ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything that has happened have its effects."""
        now = self.now
        while self._ends:
            ends, self._ends = self._ends, []
            for command, result in ends:
                self.movement.ended(command.number, result, now, self.cluster.rng.random())
        changes = self.cache.take_changes()
        if changes:
            self.touched = True
            self.oracle.heard(changes)
            self.lender.heard(changes)
            self.movement.heard(changes, now)
            for change in changes:
                self.announcing.changed(change)
        self.fetches.go_on(now)
        for command in self.movement.take_commands():
            self._order(command)
        self._announce()
        self.check()

    def check(self) -> None:
        """Judge the node if anything about its chunks can have changed."""
        if self.touched:
            self.touched = False
            self.oracle.check()
            level = self.level
            must(level.reads <= 2 * level.readers and level.asking <= ASKING_MAX, f"too much is under way: {level!r}")
            must(not level.queue and not level.writes, f"something goes down to the peers: {level!r}")
            must(len(self.announcing) <= QUEUE_LIMIT, f"too much waits to be announced: {self.announcing!r}")

    def end(self, command: Command, result: Result) -> None:
        """A command has come to its end."""
        self._ends.append((command, result))
        self.touched = True

    def die(self) -> None:
        """kill -9."""
        self.process.alive = False

    def _order(self, command: Command) -> None:
        if command.verb is Verb.READ:
            self._parts.reader(self, command, self._parts.transfer).start()
        elif command.verb is Verb.HOLDS:
            self._locate(command)
        elif command.verb is Verb.USAGE:
            self.after(0.001, lambda: self._ended(command, Usage(None, None) if self.announcing.number else None))
        else:
            self.after(0.001, lambda: self._ended(command, [Outcome.DONE] * len(command.parts)))

    def _ended(self, command: Command, result: Result) -> None:
        self.end(command, result)
        self.settle()

    def _every(self, local_s: float, act: Callable[[], None]) -> None:
        def turn() -> None:
            act()
            self.after(local_s, turn)

        self.after(local_s * self.cluster.rng.random(), turn)

    def _tick(self) -> None:
        now = self.now
        self.touched |= self.cache.expire(now) > 0
        self.movement.tick(now, self.cluster.rng.random())
        self.fetches.tick(now)
        self.settle()

    # ---- the directory --------------------------------------------------------------------------------

    def directory(self, act: Callable[[Records, float], Any], entries: int, then: Callable[[Said], None]) -> None:
        """A call to the directory; `then` is told what it says, in a tuple, or None if it does not answer."""
        size = CALL_BYTES + ENTRY_BYTES * entries

        def serve(server: DirectoryServer, reply: Answered) -> None:
            server.call(act, reply)

        host = self.site.host
        wait_s = host.clock.true_s(CALL_S)
        self.cluster.network.call(host, self.process, ADDRESS, size, serve, lambda _: size, then, wait_s)

    def find(self, names: Sequence[bytes], then: Callable[[list[Replicas | None], bool], None]) -> None:
        """Who holds these chunks, as far as is known; and whether the directory answered, if it had to be asked."""
        found, ask = self.locations.find(names, self.now)

        def told(answer: Said) -> None:
            is_answer = answer is not None and isinstance(answer[0], list)
            if answer is not None and is_answer:
                self.locations.merge(ask, answer[0], self.now)
            known, _ = self.locations.find(names, self.now)
            self._meet(known)
            then(known, is_answer)

        if ask:
            self.directory(lambda records, now: records.locate(ask, now), len(ask), told)
        else:
            self.after(0.0, lambda: then(found, True))

    def _locate(self, command: Command) -> None:
        def told(found: list[Replicas | None], answered: bool) -> None:
            if answered or any(found):
                there = [any(it.number in self.peers for it in replicas or ()) for replicas in found]
                self._ended(command, [Outcome.DONE if it else Outcome.MISSING for it in there])
            else:
                self._ended(command, None)

        self.find([chunk_name(part.group, part.key) for part in command.parts], told)

    def _inventory(self) -> Iterator[Sequence[Announced]]:
        keys = list(self.cache.spaces[0].index[0])
        for start in range(0, len(keys), BATCH_CHANGES):
            step = [it for it in keys[start : start + BATCH_CHANGES] if self.cache.is_ready(0, 0, it)]
            yield [Announced(chunk_name(0, it), Tier.HOST, present=True) for it in step]

    def _announce(self) -> None:
        """Send the next batch, if none is under way."""
        batch = None if self._sending else self.announcing.batch()
        if batch is None:
            return
        self._sending = True
        if batch is not self._batch:
            self._batch = batch
            present = {split_name(it.name)[1] for it in batch.changes if it.present}
            must(present <= self.oracle.held, f"{self.process.name} announces what is not readable")

        def told(answer: Said) -> None:
            self._sending = answer is None  # and then for a moment longer
            if answer is None:
                self.after(AGAIN_S, announce_again)
            elif isinstance(answer[0], RefusedError):
                self.announcing.refused(batch)
            else:
                self.announcing.acknowledged(batch)
                names = zip(batch.changes, answer[0], strict=True)
                self.copies.told({split_name(it.name)[1]: others for it, others in names})
                self._announce()

        def announce_again() -> None:
            self._sending = False
            self._announce()

        number, serial, changes = batch.number, batch.serial, batch.changes
        self.directory(lambda records, now: records.announce(number, serial, changes, now), len(changes), told)

    def _beat(self) -> None:
        """What the directory is to be told next, for as long as this life lasts."""
        number, standing, server = self.announcing.number, self.standing, self.cluster.directory
        if self.announcing.standpoint is Standpoint.OUTSIDE:
            self.directory(partial(server.join, self.member), 1, self._joined)
        elif self.announcing.standpoint is Standpoint.BEHIND:
            self.directory(partial(server.leave, number), 1, self._left)
        else:
            stamp = self.announcing.stamp()
            told = partial(self._beaten, stamp)
            self.directory(partial(server.beat, number, standing, self._report()), 1, told)

    def _beat_again(self, *, soon: bool) -> None:
        self.after(AGAIN_S * self.cluster.rng.uniform(0.5, 1.0) if soon else BEAT_S, self._beat)

    def _joined(self, answer: Said) -> None:
        if answer is None or isinstance(answer[0], RefusedError):
            self._beat_again(soon=True)
            return
        self.note(f"joins as {answer[0]}")
        self.cluster.sums.joins += 1
        self.announcing.joined(answer[0])
        self.peers.renumber(answer[0])
        self.placement = Placement(answer[0], Limits(hot_rate=0.05, replicas_max=self.cluster.plan.replicas), self.now)
        self._seen, self._list_from_s = None, 0.0
        self.settle()
        self._beat()

    def _left(self, answer: Said) -> None:
        if answer is None:
            self._beat_again(soon=True)
        else:
            self.directory(partial(self.cluster.directory.join, self.member), 1, self._joined)

    def _beaten(self, stamp: Stamp, answer: Said) -> None:
        if answer is None:
            self._beat_again(soon=False)
            return
        beat = answer[0]
        self.announcing.beaten(beat, stamp)
        if self.announcing.standpoint is not Standpoint.MEMBER:
            self._beat_again(soon=True)
        elif beat.members == self._seen or self.now < self._list_from_s:
            self._place()
            self._beat_again(soon=False)
        else:
            roll, told_all = self.cluster.directory.roll, partial(self._listed, beat.members)
            self.directory(roll, 8, told_all)
        self.settle()

    def _listed(self, version: int, answer: Said) -> None:
        self._beat_again(soon=answer is None)
        if answer is None:
            return
        roll: Roll = answer[0]
        # Listing all takes time that grows with their number, and all do it when one comes or goes.
        self._list_from_s = self.now + LIST_S * len(roll.members) * self.cluster.rng.uniform(0.5, 1.0)
        self._seen, before, self._roll = version, self._roll, roll
        for number in self._met & (before.members.keys() - roll.members.keys()):
            self._met.discard(number)
            member = before.members[number].member
            anew = roll.numbers.get((member.name, member.epoch))
            if anew is None:
                self.locations.ended([number])
            else:
                self.locations.renumbered(number, anew)
        self._meet(())
        self.settle()

    def _meet(self, found: Iterable[Replicas | None]) -> None:
        """Only those are peers that hold something of interest, so that a thousand nodes need not know each other."""
        number = self.announcing.number
        self._met.update(it.number for replicas in found for it in replicas or () if it.number != number)
        known = self._roll.members
        self.peers.listed([known[it] for it in self._met if it in known], self.now)

    # ---- copies on other nodes ------------------------------------------------------------------------

    def served(self, reader: int, keys: Sequence[ChunkKey], size_bytes: int) -> None:
        """A peer reads chunks from here."""
        names = [chunk_name(0, key) for key in keys]
        self.placement.served(reader, names, [size_bytes] * len(names), self.now)

    def _report(self) -> bytes:
        return self.cache.pool.taken_bytes.to_bytes(8, "little")

    def _place(self) -> None:
        """Have hot prefixes pulled by others."""
        if self.cluster.at_rest:
            return
        chains = [it for it in map(self._whole, self.placement.hot_chains(self.now)) if it is not None]
        if not chains:
            return
        rooms = [_room(it) for it in self._roll.members.values()]
        names = list(dict.fromkeys(name for chain in chains for name in chain.names))

        def told(found: list[Replicas | None], answered: bool) -> None:
            holders = {name: {it.number for it in replicas or ()} for name, replicas in zip(names, found, strict=True)}
            for order in self.placement.hot(chains, holders, rooms, self.now):
                self._order_pull(order)

        self.find(names, told)

    def _whole(self, chain: Chain) -> Chain | None:
        """A chain with what comes before it; None if that is not here any more."""
        names = list(chain.names)
        while (above := self.cache.parent_of(0, split_name(names[0])[1])) is not None:
            names.insert(0, chunk_name(0, above))
        if not all(self.cache.is_ready(0, *split_name(it)) for it in names):
            return None
        return Chain(tuple(names), (PAGE_BYTES,) * len(names), chain.worth)

    def _order_pull(self, order: Order) -> None:
        listed = self._roll.members.get(order.target)
        if listed is None:
            return
        peer = listed.member
        keys = [split_name(it)[1] for it in order.names]

        def serve(server: ClusterNode, reply: Answered) -> None:
            if server.member.epoch == peer.epoch:
                server.prefetch(f"pull {keys[-1].hex()[:6]}", keys)
                server.settle()
            reply(True)

        host, size = self.site.host, CALL_BYTES + ENTRY_BYTES * len(keys)
        self.cluster.sums.orders += 1
        self.cluster.network.call(
            host, self.process, peer.address, size, serve, lambda _: CALL_BYTES, _ignore, host.clock.true_s(CALL_S)
        )


def _room(listed: Listed) -> Room:
    used = int.from_bytes(listed.report, "little")
    return Room(listed.number, listed.member.capacity_bytes, used, takes=listed.standing is Standing.SERVING)


def _ignore(answer: object) -> None:
    """Nobody waits for it."""
