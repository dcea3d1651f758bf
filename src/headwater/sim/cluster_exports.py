"""What a simulated node lends to its peers: the guards of `node.exports`, in virtual time.

Whoever asks says whom it takes us for; another life refuses. What is lent is leased for a while, and a stream that was
not through by then says so. A reader that takes the bytes itself is told how long it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.movement import OWNER
from headwater.sim.cluster_life import Asked, Life
from headwater.sim.cluster_oracle import Checksum, must
from headwater.sim.network import Answered
from headwater.types import ABSENT, PAGE_BYTES, Changed, ChunkKey, Outcome, TicketKind


@dataclass(frozen=True, slots=True)
class Refused:
    """Another life listens here than was expected."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent for a chunk, and its checksum."""

    content: Checksum
    checksum: Checksum


@dataclass(frozen=True, slots=True)
class Streamed:
    """All that was asked for; `late` says that the lease had ended before it was through."""

    chunks: tuple[Sent | Outcome, ...]
    late: bool


@dataclass(frozen=True, slots=True)
class Granted:
    """Slots of this life's memory that the reader may read for `lease_s`; a checksum where it is known."""

    holder: Life
    ticket: int
    places: tuple[int, ...]
    checksums: tuple[Checksum | None, ...]
    lease_s: float


class SimulatedExports:
    """One life's side of what its peers read."""

    def __init__(self, node: Life) -> None:
        self._node = node
        self._checksums: dict[ChunkKey, Checksum] = {}

    def heard(self, changes: Sequence[Changed]) -> None:
        """Checksums of what left, or came anew, no longer hold."""
        for change in changes:
            for key in change.keys:
                self._checksums.pop(key, None)

    def expects(self, asked: Asked) -> bool:
        """Whether it is us that the peer takes us for."""
        own = self._node.member
        return (own.name, own.epoch) == (asked.expected.name, asked.expected.epoch)

    def stream(self, asked: Asked, reply: Answered) -> None:
        """Lend chunks, send them while they are leased, and say in the end whether they still were."""
        if not self._may_serve(asked):
            reply(Refused())
            return
        node = self._node
        ticket, places, deadline_s = self._lend(asked)
        known = [self._checksums.get(key) for key in asked.keys]
        first = [None if place == ABSENT else node.memory.read(place, 0) for place in places]

        def sent() -> None:
            chunks: list[Sent | Outcome] = []
            late = self.is_late(deadline_s)
            for key, place, half, checksum in zip(asked.keys, places, first, known, strict=True):
                if place == ABSENT:
                    chunks.append(Outcome.MISSING)
                    continue
                content = half, node.memory.read(place, 1)
                chunks.append(Sent(content, checksum or content))
                if not late:
                    self._checksums.setdefault(key, content)
            reply(Streamed(tuple(chunks), late))
            self.give_back(ticket)
            node.settle()

        node.settle()
        node.after(node.cluster.copy_s(node.site.host, len(places)), sent)

    def grant(self, asked: Asked, reply: Answered) -> None:
        """Lend chunks to a reader that takes them from this node's memory itself."""
        if not self._may_serve(asked):
            reply(Refused())
            return
        ticket, places, deadline_s = self._lend(asked)
        checksums = tuple(self._checksums.get(key) for key in asked.keys)
        reply(Granted(self._node, ticket, tuple(places), checksums, deadline_s - self._node.now))
        self._node.settle()

    def give_back(self, ticket: int) -> None:
        """A loan is over; its deadline may have ended it before."""
        if ticket:
            self._node.touched = True
            self._node.cache.release(OWNER, ticket)

    def is_late(self, deadline_s: float) -> bool:
        """Whether a loan has ended by itself."""
        return self._node.now >= deadline_s

    def _may_serve(self, asked: Asked) -> bool:
        if not self.expects(asked):
            return False
        # The oracle's own view, whatever `expects` says.
        must(asked.expected == self._node.member, f"{self._node.process.name} serves who asked {asked.expected}")
        return True

    def _lend(self, asked: Asked) -> tuple[int, list[int], float]:
        node = self._node
        node.touched = True
        deadline_s = node.now + node.cluster.plan.lease_s
        parts = [(0, key) for key in asked.keys]
        ticket, places = node.cache.hold(OWNER, TicketKind.LOAD, 0, parts, deadline_s)
        if ticket:
            node.cluster.sums.loans += 1
            node.cluster.was_lent(node.site)
            here = [key for key, place in zip(asked.keys, places, strict=True) if place != ABSENT]
            node.cache.touch(0, here)
            node.served(asked.peer, here, PAGE_BYTES)
        return ticket, places, deadline_s
