"""A read from peers in a simulated cluster: whom to ask, what comes of it, and whom to ask then.

The guards are those of `node.peers`: bytes count only if their checksum is right and the loan lasted until they were
there; what is wrong or does not come is read from the next holder; and a command ends only when nothing touches its
slots any more, be that later than its deadline. A stream that is abandoned touches nothing from then on; what a
one-sided read has begun, it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.core.levels import Command, Part
from headwater.core.links import Begun, Read, Wanted
from headwater.sim.cluster_exports import Granted, Refused, Sent, Streamed
from headwater.sim.cluster_life import Asked, Life
from headwater.sim.cluster_oracle import ROTTEN, Checksum
from headwater.sim.network import Answered
from headwater.types import ABSENT, PAGE_BYTES, Member, Outcome, chunk_name

AGAIN_S = 0.03
ONE_SIDED = "nixl"
MARGIN = 0.03
"""The share of a loan that is not used, for clocks that do not go alike."""
HEADER_BYTES, NAME_BYTES = 64, 24


class PeerRead:
    """One READ command."""

    def __init__(self, node: Life, command: Command, transfer: type[Transfer]) -> None:
        self.node, self.command, self._transfer = node, command, transfer
        self.writer = f"{node.process.name} read {command.number}"
        self._left = {chunk_name(part.group, part.key): part for part in command.parts}
        self._busy: dict[bytes, Transfer] = {}
        self._outcomes: dict[bytes, Outcome] = {}
        self._without: set[int] = set()
        self._transfers: list[Transfer] = []
        self._waits = self._is_told = self.over = False

    def start(self) -> None:
        """From now on the slots are the transfers'."""
        self.node.memory.claim(self.writer, [part.address for part in self.command.parts])
        self.node.after(self.command.until_s - self.node.now, self._time_is_over)
        self.go_on()

    def go_on(self) -> None:
        """Ask for what is neither here nor under way."""
        if self.over:
            self._end_if_idle()
            return
        names = [it for it in self._left if it not in self._busy]
        if names:
            self._ask(names)
        self._end_if_idle()

    def ended(self, transfer: Transfer, outcomes: dict[bytes, Outcome]) -> None:
        """A transfer touches nothing any more."""
        self._transfers.remove(transfer)
        for name, outcome in outcomes.items():
            if self._busy.get(name) is transfer:
                del self._busy[name]
            if outcome is Outcome.DONE:
                self._outcomes[name] = outcome
                self._left.pop(name, None)
            elif outcome in (Outcome.MISSING, Outcome.CORRUPT):
                self.node.locations.missed(name, transfer.number, self.node.now)
                self.node.cluster.sums.stale += outcome is Outcome.MISSING
                self.node.cluster.sums.corrupt += outcome is Outcome.CORRUPT
            else:
                self._without.add(transfer.number)
        self.go_on()

    def _ask(self, names: Sequence[bytes]) -> None:
        node, now = self.node, self.node.now
        found, _ = node.locations.find(names, now)
        wanted = [Wanted(replicas or (), PAGE_BYTES) for replicas in found]
        choice = node.peers.choose(wanted, now, self._without)
        for at in choice.nowhere:
            self._outcomes[names[at]] = Outcome.FAILED if found[at] else Outcome.MISSING
            del self._left[names[at]]
        started = False
        for it in choice.reads:
            started |= self._begin(it, [names[at] for at in it.chunks])
        if (choice.busy or (choice.reads and not started)) and not self._waits:
            self._waits = True
            node.after(AGAIN_S, self._again)

    def _again(self) -> None:
        self._waits = False
        self.go_on()
        self.node.settle()

    def _begin(self, read: Read, names: Sequence[bytes]) -> bool:
        node, now = self.node, self.node.now
        peer = node.peers.member(read.number)
        transport = next(iter(node.peers.transports(read.number, read.tier, now, read.size_bytes)), None)
        if peer is None or transport is None:
            return False
        most = max(node.peers.batch_bytes(read.number, transport, read.tier, now) // PAGE_BYTES, 1)
        parts = [self._left[name] for name in names[:most]]
        begun = node.peers.began(read.number, transport, read.tier, len(parts) * PAGE_BYTES, now)
        if begun is None:
            return False
        transfer = self._transfer(self, peer, begun, parts)
        self._transfers.append(transfer)
        self._busy.update(dict.fromkeys(names[:most], transfer))
        node.cluster.sums.transfers += 1
        transfer.start()
        return True

    def _time_is_over(self) -> None:
        if self._left or self._transfers:
            self.over = True
            for it in list(self._transfers):
                it.abandon()
            self._end_if_idle()
            self.node.settle()

    def _end_if_idle(self) -> None:
        if self._transfers or (self._left and not self.over) or self._is_told:
            return
        self._is_told = True
        self.node.memory.stopped(self.writer)
        named = [chunk_name(it.group, it.key) for it in self.command.parts]
        self.node.end(self.command, [self._outcomes.get(name, Outcome.FAILED) for name in named])


class Transfer:
    """One request to one holder."""

    def __init__(self, read: PeerRead, peer: Member, begun: Begun, parts: Sequence[Part]) -> None:
        self.read, self.node, self.number = read, read.node, begun.number
        self._peer, self._begun, self._parts = peer, begun, list(parts)
        self._began_s = self.node.now
        self._abandoned = self._copying = self._over = False

    def start(self) -> None:
        """Ask the holder for a stream, or for leave to take the bytes from its memory."""
        node = self.node
        one_sided = self._begun.transport == ONE_SIDED
        within_s = max(self.read.command.until_s - node.now, 0.0)
        keys = tuple(part.key for part in self._parts)
        asked = Asked(node.announcing.number, self._peer, keys)

        def serve(server: Life, reply: Answered) -> None:
            if one_sided:
                server.lender.grant(asked, reply)
            else:
                server.lender.stream(asked, reply)

        def answered(answer: Any) -> None:
            self._answered(answer)
            node.settle()

        size = HEADER_BYTES + NAME_BYTES * len(keys)
        wait_s = node.site.host.clock.true_s(within_s)
        network, host = node.cluster.network, node.site.host
        network.call(host, node.process, self._peer.address, size, serve, lambda _: size, answered, wait_s)
        node.after(self._begun.stall_s, self._look)

    def abandon(self) -> None:
        """Nobody waits for it any more; it ends as soon as nothing touches the slots."""
        self._abandoned = True
        if not self._copying:
            self._end({}, Outcome.FAILED)

    def is_right(self, content: Checksum, checksum: Checksum | None) -> bool:
        """Whether bytes are what was lent, as far as that can be told."""
        return checksum is None or content == checksum

    def is_in_time(self, deadline_s: float) -> bool:
        """Whether what was taken from another's memory counts, now that it is here."""
        return self.node.now < deadline_s

    def _look(self) -> None:
        """Has it stalled?"""
        if self._over or self._abandoned:
            return
        peers, now = self.node.peers, self.node.now
        peers.stalled(self._begun, now, self.node.cluster.rng.random())
        if peers.may_go_on(self._begun):
            self.node.cluster.sums.hedges += 1
            self.abandon()
            self.node.settle()
        else:
            self.node.after(self._begun.stall_s, self._look)

    def _answered(self, answer: Any) -> None:
        if isinstance(answer, Granted) and (self._over or self._abandoned):
            self._give_back(answer)
        if self._over:
            return
        if isinstance(answer, Streamed):
            self._take(answer)
        elif isinstance(answer, Granted):
            self._copy(answer)
        else:
            self._end({}, Outcome.FAILED, refused=isinstance(answer, Refused))

    def _take(self, answer: Streamed) -> None:
        """A stream has come through."""
        node, outcomes = self.node, dict[Part, Outcome]()
        for part, sent in zip(self._parts, answer.chunks, strict=True):
            if not isinstance(sent, Sent):
                outcomes[part] = sent
                continue
            content = sent.content
            if node.cluster.rots():
                content = (part.key, ROTTEN), content[1]
            for half in (0, 1):
                node.memory.write(self.read.writer, part.address, half, content[half])
            right = self.is_right(content, sent.checksum)
            outcomes[part] = (
                Outcome.DONE if right and not answer.late else Outcome.CORRUPT if not right else Outcome.FAILED
            )
        node.cluster.sums.late += answer.late
        self._end(outcomes, Outcome.FAILED)

    def _copy(self, granted: Granted) -> None:
        """The bytes go from memory to memory, whatever the two processes do meanwhile."""
        node, holder = self.node, granted.holder
        # The loan began after it was asked for.
        deadline_s = self._began_s + granted.lease_s * (1 - MARGIN)
        pairs = list(zip(self._parts, granted.places, granted.checksums, strict=True))
        self._copying = True

        def move(half: int) -> None:
            for part, place, _ in pairs:
                if place != ABSENT:
                    node.memory.write(self.read.writer, part.address, half, holder.memory.read(place, half))

        def landed() -> None:
            broken = not holder.process.alive or node.cluster.network.is_cut(holder.site.host, node.site.host)
            if node.process.alive and not broken:
                move(1)
            node.after(0.0, lambda: copied(broken))

        def copied(broken: bool) -> None:
            self._copying = False
            self._give_back(granted)
            outcomes = {}
            in_time = self.is_in_time(deadline_s)
            node.cluster.sums.late += not in_time
            for part, place, checksum in pairs:
                content = node.memory.read(part.address, 0), node.memory.read(part.address, 1)
                if checksum is not None and node.cluster.rots():
                    content = (part.key, ROTTEN), content[1]
                    node.memory.write(self.read.writer, part.address, 0, content[0])
                if place == ABSENT:
                    outcomes[part] = Outcome.MISSING
                elif broken or not in_time or self._abandoned:
                    outcomes[part] = Outcome.FAILED
                else:
                    outcomes[part] = Outcome.DONE if self.is_right(content, checksum) else Outcome.CORRUPT
            self._end(outcomes, Outcome.FAILED)
            node.settle()

        move(0)
        took_s = node.cluster.copy_s(holder.site.host, len(pairs))
        node.cluster.schedule.after(took_s, "", landed)

    def _give_back(self, granted: Granted) -> None:
        """Say that the loan is over; if that is lost, its deadline ends it."""
        node, holder = self.node, granted.holder

        def serve(server: Life, reply: Answered) -> None:
            if server is holder:
                server.lender.give_back(granted.ticket)
                server.settle()

        node.cluster.network.call(
            node.site.host, node.process, self._peer.address, HEADER_BYTES, serve, lambda _: 0, _ignore, 1.0
        )

    def _end(self, outcomes: dict[Part, Outcome], otherwise: Outcome, *, refused: bool = False) -> None:
        """It is over, and touches nothing any more."""
        if self._over:
            return
        self._over = True
        node, now = self.node, self.node.now
        if self._abandoned:
            node.peers.abandoned(self._begun, now)
        elif any(it is not Outcome.FAILED for it in outcomes.values()):
            node.peers.succeeded(self._begun, now)
        else:
            node.peers.failed(self._begun, now, node.cluster.rng.random(), unavailable=not outcomes)
        if refused:
            node.cluster.sums.refused += 1
            node.peers.left(self.number)
        names = {chunk_name(it.group, it.key): outcomes.get(it, otherwise) for it in self._parts}
        self.read.ended(self, names)


def _ignore(answer: object) -> None:
    """Nobody waits for it."""
