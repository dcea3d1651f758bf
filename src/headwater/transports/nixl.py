"""Peers over RDMA, NVLink or what else NIXL's UCX finds: control over TCP, bytes one-sided between registered memory.

    connect   the TCP handshake; ask for the peer's agent (metadata, where its regions are); add it to ours
    read      LEND -> one NIXL read of all that was lent -> poll until it has ended -> verify what has arrived -> is it
              still in time -> GIVE_BACK
    write     over the connection, as `tcp` does it: nobody ever writes into a peer's memory by itself here

Ours above it. A peer's agent is named after its life (name and epoch), so a restarted one is another. Agents are added
and removed one at a time, and one that has failed is not used again before all links to it are closed. Things whose
checksum the peer does not know yet come over the connection, which computes it: DONE always means verified.

What NIXL (1.5.1, UCX) guarantees about memory, and what was seen. A transfer that is DONE touches nothing any more. One
whose connection failed (the peer's process died: within milliseconds) does not either, as far as was seen; it is
waited a moment longer, as RDMA could not be tried. Nothing else ends it: releasing the handle of a transfer that is
under way, or removing the remote agent, returns at once, and the bytes arrive later all the same (a paused peer that
went on: 230 MB after the release). So a read returns only when its transfer has ended, be it long after its deadline:
that is the quarantine of its memory. The only other end is `Agent.close`, after which this process has no transfer.

UCX emulates RDMA where only TCP is there, and then a reader that dies at a bad moment makes the *exporter's* process
abort (seen: "unexpected error: Endpoint timeout"). So that is refused unless `emulated` allows it: both need an RDMA
device, or be on one host where the kernel copies between processes (CMA).

Whoever has an agent's metadata can read and write all memory that is registered with it, with any other program. It is
given to proven members of the cluster only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.ports import Bytes, Item
from headwater.transports import cma
from headwater.transports.credentials import Credentials
from headwater.transports.link import Busy
from headwater.transports.nixl_agent import (
    TOPIC,
    Agent,
    Description,
    Span,
    Tensor,
    Who,
    agent_name,
    decode_description,
    kind_of,
    size_of,
    span_of,
)
from headwater.transports.payloads import checksum
from headwater.transports.tcp import Tcp, TcpLink
from headwater.transports.wire import (
    Batch,
    Kind,
    Place,
    decode_grant,
    encode_batch,
    encode_given,
    encode_message,
)
from headwater.types import Member, Outcome

END_S = 0.2


class _Control(Tcp):
    """What a NIXL link is controlled over."""

    name = "nixl"


class Nixl:
    """Connects to peers that have a NIXL agent."""

    name = "nixl"

    def __init__(self, me: Callable[[], Member] | Member, cluster: str, credentials: Credentials, agent: Agent) -> None:
        """`agent` stays the caller's, and is closed after this."""
        self._me, self._agent = me, agent
        self._tcp = _Control(me, cluster, credentials)

    def connect(self, peer: Member, until_s: float) -> NixlLink:
        """See `ports.Transport`."""
        me = self._me() if callable(self._me) else self._me
        link = self._tcp.connect(peer, until_s)
        try:
            description = self._ask(link, peer, me, until_s)
            self._agent.join(description.agent, description.metadata)
        except (RefusedError, UnavailableError):
            link.close()
            raise
        return NixlLink(link, self._agent, description, lambda until_s: self._ask(link, peer, me, until_s))

    def close(self) -> None:
        """See `ports.Transport`."""
        self._tcp.close()

    def _ask(self, link: TcpLink, peer: Member, me: Member, until_s: float) -> Description:
        """The peer's agent, if it can be used without harm."""
        agent = self._agent
        try:
            body = link.ask(TOPIC, encode_message(Who(me.host, agent.has_rdma)), until_s)
            description = decode_description(body)
            if not agent.emulated and not (description.has_rdma and agent.has_rdma):
                places = cma.decode_places(link.ask(cma.PROBE_TOPIC, b"", until_s))
                if peer.host != me.host or not cma.Process(description.pid).answers(places):
                    raise UnavailableError(f"{peer.name}: no RDMA, and the kernel does not copy between us")
        except ProtocolError as error:
            raise UnavailableError(f"{peer.name}: {error}") from None
        except RefusedError as error:
            raise UnavailableError(f"{peer.name} has no NIXL agent for us: {error}") from None
        if description.agent != agent_name(peer):
            raise UnavailableError(f"{peer.name} calls its agent {description.agent}")
        return description


class NixlLink(TcpLink):
    """A connection beside which NIXL reads; see `ports.Link`."""

    def __init__(
        self, link: TcpLink, agent: Agent, description: Description, ask: Callable[[float], Description]
    ) -> None:
        super().__init__(link.stream, link.peer)
        self._agent, self._description, self._describe = agent, description, ask
        self._places = description.places()
        self._aborted = False

    def read(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`. May end late: not before nothing can come into the items' memory any more."""
        begun_s = time.monotonic()
        sizes = [size_of(it.memory) for it in items]
        request = encode_batch(Batch(realm, [it.name for it in items], sizes, until_s - begun_s))
        try:
            grant = decode_grant(self.call(Kind.LEND, request, Kind.LENT, until_s), sizes)
        except Busy:
            return [Outcome.FAILED] * len(items)
        except ProtocolError as error:
            self.stream.shut()
            raise UnavailableError(str(error)) from None
        places = [(index, it) for index, it in enumerate(grant.parts) if isinstance(it, Place)]
        known = [(index, it) for index, it in places if it.checksum is not None]
        outcomes = [Outcome.FAILED if isinstance(it, Place) else it for it in grant.parts]
        try:
            if not all(self._is_known(it) for _, it in known):
                self._learn(until_s)
            if self._move([(items[index].memory, it) for index, it in known], until_s):
                for index, it in known:
                    outcomes[index] = self._verify(items[index].memory, it)
            if time.monotonic() > begun_s + grant.left_s:
                outcomes = [Outcome.FAILED if it is Outcome.DONE else it for it in outcomes]
        finally:
            done = [it is Outcome.DONE for it in outcomes]
            with contextlib.suppress(UnavailableError):  # with its connection, the loan ends by itself
                self.stream.say(
                    Kind.GIVE_BACK, encode_given(grant.number, done), max(until_s, time.monotonic() + END_S)
                )
        rest = [index for index, it in places if it.checksum is None]
        rest += [index for index, it in enumerate(grant.parts) if it is Outcome.FAILED]
        rest = [it for it in rest if isinstance(items[it].memory, np.ndarray)]  # a socket fills no device's memory
        if rest and not self._aborted and time.monotonic() < until_s:
            answers = super().read(realm, [items[it] for it in rest], until_s)
            for index, answer in zip(rest, answers, strict=True):
                outcomes[index] = answer
        return outcomes

    def abort(self) -> None:
        """See `ports.Link`."""
        self._aborted = True
        super().abort()

    def close(self) -> None:
        """See `ports.Link`."""
        super().close()
        self._agent.leave(self._description.agent)

    def _move(self, moves: Sequence[tuple[Bytes | Tensor, Place]], until_s: float) -> bool:
        """Have NIXL fill the memories; whether it has, in time."""
        whole = True
        with self._agent.registered([memory for memory, _ in moves]):
            for kind in ("DRAM", "VRAM"):
                chosen = [(memory, it) for memory, it in moves if kind_of(memory) == kind and it.extent.length_bytes]
                if chosen:
                    targets, sources = [span_of(it) for it, _ in chosen], [self._source(it) for _, it in chosen]
                    whole &= self._transfer(kind, targets, sources, until_s)
        return whole

    def _transfer(self, kind: str, targets: Sequence[Span], sources: Sequence[Span], until_s: float) -> bool:
        name = self._description.agent
        try:
            transfer = self._agent.read(name, kind, targets, sources)
        except UnavailableError:
            self._broken()
            raise
        in_time = transfer.wait(until_s, lambda: self._aborted)
        if transfer.state != "DONE":
            self._broken()
            raise UnavailableError(f"{self.stream.name}: NIXL's connection broke")
        if self._aborted:
            raise UnavailableError(f"{self.stream.name}: ended here")
        return in_time

    def _broken(self) -> None:
        self._agent.failed(self._description.agent)
        self.stream.shut()

    def _is_known(self, part: Place) -> bool:
        _, size = self._places.get(part.extent.segment, (0, -1))
        return part.extent.offset_bytes + part.extent.length_bytes <= size

    def _learn(self, until_s: float) -> None:
        """The peer has got new regions."""
        description = self._describe(until_s)
        self._agent.join(description.agent, description.metadata)
        self._agent.leave(self._description.agent)
        self._description, self._places = description, description.places()

    def _source(self, part: Place) -> Span:
        """Where a part is in the peer's address space, if it is in one of its regions."""
        if not self._is_known(part):
            self.stream.shut()
            raise UnavailableError(f"{self.stream.name}: {part.extent} is in none of its regions")
        base, _ = self._places[part.extent.segment]
        return base + part.extent.offset_bytes, part.extent.length_bytes, 0

    def _verify(self, memory: Bytes | Tensor, part: Place) -> Outcome:
        here = memory if isinstance(memory, np.ndarray) else memory.cpu().numpy()
        if checksum(here) == part.checksum:
            return Outcome.DONE
        self.corrupt += 1
        return Outcome.CORRUPT
