"""Peers on this host: control over a Unix socket, the bytes straight from or into the peer's memory.

    read     LEND -> copy out of the mapping -> is it still in time, is the peer still there -> GIVE_BACK (no answer)
    view     LEND -> look at the bytes where they lie -> GIVE_BACK
    write    ACCEPT -> copy into the mapping -> COMMIT, with checksums -> what the peer has kept

The peer's memory is mapped once for all links to one life of it (`peer_memory`), and copied by the kernel where it
cannot be mapped. What is in no region of the peer goes over the socket.

What is verified. A copy is checked while it is made: the checksum is that of the bytes written. Where the peer knows
the thing's checksum, DONE means that they are equal. Where it does not know it yet, there is nothing to compare with;
DONE then means that this process copied the peer's own memory within the loan, as an engine on this host does.

A loan counts only if, after the copy, its deadline is not over and the peer's end of the connection is open: a peer
that takes things back early closes that first.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.ports import Bytes, Item
from headwater.transports.credentials import Credentials
from headwater.transports.handshake import introduce
from headwater.transports.link import Busy
from headwater.transports.peer_memory import PeerMemory, Region
from headwater.transports.stream import Stream
from headwater.transports.tcp import TcpLink
from headwater.transports.wire import (
    Batch,
    Grant,
    Kind,
    Place,
    decode_grant,
    decode_statuses,
    encode_batch,
    encode_commit,
    encode_given,
)
from headwater.types import Extent, Member, Outcome

log = logging.getLogger(__name__)

CONNECT_S = 1.0
END_S = 0.2
"""How long the end of a loan may take to be said, also after the call's deadline."""
_credentials = struct.Struct("3i")  # pid, user, group


@dataclass(slots=True)
class _Shared:
    """A peer's memory and how many links use it."""

    memory: PeerMemory
    links: int = 0


class Shm:
    """Connects to other processes of this host."""

    name = "shm"

    def __init__(self, me: Callable[[], Member] | Member, cluster: str, credentials: Credentials) -> None:
        self._me, self._cluster, self._credentials = me, cluster, credentials
        self._shared: dict[tuple[str, int], _Shared] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Shm({len(self._shared)} peers)"

    def connect(self, peer: Member, until_s: float) -> ShmLink:
        """See `ports.Transport`. UnavailableError also where the peer's memory is out of reach."""
        until_s = min(until_s, time.monotonic() + CONNECT_S)
        me = self._me() if callable(self._me) else self._me
        if not peer.socket or peer.host != me.host:
            raise UnavailableError(f"{peer.name} is not on this host")
        connected, pid = _open_socket(peer, until_s)
        stream = Stream(connected, f"{peer.name} at {peer.socket}")
        memory = self._take(peer, pid)
        link = ShmLink(stream, peer, memory, lambda: self._let_go(peer, memory))
        try:
            introduce(stream, me, peer, self._cluster, self._credentials, until_s, self.name)
            memory.learn(link, until_s)
        except (RefusedError, UnavailableError):
            link.close()
            raise
        return link

    def close(self) -> None:
        """See `ports.Transport`."""
        with self._lock:
            left = list(self._shared.values())
        if left:
            log.error("shm: %d peers' memory is still in use, and stays mapped", len(left))

    def _take(self, peer: Member, pid: int) -> PeerMemory:
        with self._lock:
            shared = self._shared.setdefault((peer.name, peer.epoch), _Shared(PeerMemory(peer.name, pid)))
            shared.links += 1
            return shared.memory

    def _let_go(self, peer: Member, memory: PeerMemory) -> None:
        with self._lock:
            shared = self._shared[peer.name, peer.epoch]
            shared.links -= 1
            if not shared.links:
                del self._shared[peer.name, peer.epoch]
                memory.close()


class ShmLink(TcpLink):
    """A connection beside which the peer's memory is touched; see `ports.Link`."""

    def __init__(self, stream: Stream, peer: Member, memory: PeerMemory, let_go: Callable[[], None]) -> None:
        super().__init__(stream, peer)
        self._memory, self._let_go = memory, let_go
        self._guard = threading.Lock()
        self._aborted = threading.Event()
        self._pushing = False
        self._ends = select.poll()
        self._ends.register(stream.socket, select.POLLRDHUP)

    def read(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`."""
        try:
            grant, deadline_s = self._borrow(Kind.LEND, realm, items, until_s)
        except Busy:
            return [Outcome.FAILED] * len(items)
        outcomes = [Outcome.FAILED] * len(items)
        try:
            for index, (part, item) in enumerate(zip(grant.parts, items, strict=True)):
                if self._aborted.is_set() or time.monotonic() >= until_s:
                    break
                outcomes[index] = self._pull(part, item.memory, until_s) if isinstance(part, Place) else part
            if time.monotonic() > deadline_s or not self._is_open():
                outcomes = [Outcome.FAILED if it is Outcome.DONE else it for it in outcomes]
        finally:
            self._give_back(grant.number, [it is Outcome.DONE for it in outcomes], until_s)
        return self._read_rest(realm, items, grant, outcomes, until_s)

    def view(self, realm: bytes, names: Sequence[bytes], sizes: Sequence[int], until_s: float) -> Views:
        """Look at things of these sizes where they lie. Raises as `read` does; a context that gives them back."""
        grant, deadline_s = self._lend(Kind.LEND, realm, names, sizes, until_s)
        views = [self._look(it, until_s) if isinstance(it, Place) else it for it in grant.parts]
        return Views(views, deadline_s, self._is_open, lambda done: self._give_back(grant.number, done, until_s))

    def write(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """See `ports.Link`."""
        try:
            grant, _ = self._borrow(Kind.ACCEPT, realm, items, until_s)
        except Busy:
            return [Outcome.FAILED] * len(items)
        checksums: list[int] = []
        done = [False] * len(items)
        with self._guard:
            if self._aborted.is_set():
                raise UnavailableError(f"{self.stream.name}: ended here")
            self._pushing = True
        try:
            for index, (part, item) in enumerate(zip(grant.parts, items, strict=True)):
                if self._aborted.is_set() or time.monotonic() >= until_s or not self._is_open():
                    break
                if isinstance(part, Place):
                    checksums.append(self._push(part, item.memory, until_s))
                    done[index] = True
        finally:
            with self._guard:
                self._pushing = False
                if self._aborted.is_set():
                    self.stream.shut()
        try:
            # Said also where nothing was moved: as long as it is not, the peer keeps that memory for us.
            ends_s = max(until_s, time.monotonic() + END_S)
            answer = self.call(Kind.COMMIT, encode_commit(grant.number, done, checksums), Kind.STATUSES, ends_s)
            answers = decode_statuses(answer, len(items))
        except ProtocolError as error:
            self.stream.shut()
            raise UnavailableError(str(error)) from None
        outcomes = [it if isinstance(part, Place) else part for it, part in zip(answers, grant.parts, strict=True)]
        rest = self._rest(grant, until_s)
        if rest:
            sent = super().write(realm, [items[it] for it in rest], until_s)
            for index, outcome in zip(rest, sent, strict=True):
                outcomes[index] = outcome
        return outcomes

    def abort(self) -> None:
        """See `ports.Link`. As long as we write into the peer's memory, the connection, and so the loan, stays."""
        with self._guard:
            self._aborted.set()
            if not self._pushing:
                self.stream.shut()

    def close(self) -> None:
        """See `ports.Link`."""
        super().close()
        self._let_go()

    # ---- loans --------------------------------------------------------------------------------------------

    def _borrow(self, kind: Kind, realm: bytes, items: Sequence[Item], until_s: float) -> tuple[Grant, float]:
        return self._lend(kind, realm, [it.name for it in items], [len(it.memory) for it in items], until_s)

    def _lend(
        self, kind: Kind, realm: bytes, names: Sequence[bytes], sizes: Sequence[int], until_s: float
    ) -> tuple[Grant, float]:
        """A loan and when it ends, on our clock and not later than on the peer's."""
        self._memory.refresh(self, until_s)
        begun_s = time.monotonic()
        request = encode_batch(Batch(realm, names, sizes, until_s - begun_s))
        body = self.call(kind, request, Kind.LENT, until_s)
        try:
            grant = decode_grant(body, sizes)
        except ProtocolError as error:
            self.stream.shut()
            raise UnavailableError(str(error)) from None
        return grant, begun_s + grant.left_s

    def _give_back(self, number: int, done: Sequence[bool], until_s: float) -> None:
        with suppress(UnavailableError):  # with its connection, the loan ends by itself
            self.stream.say(Kind.GIVE_BACK, encode_given(number, done), max(until_s, time.monotonic() + END_S))

    def _is_open(self) -> bool:
        """Whether the peer has not closed its end."""
        return not self._ends.poll(0)

    # ---- memory -------------------------------------------------------------------------------------------

    def _region(self, extent: Extent, until_s: float) -> Region:
        if not self._memory.knows(extent.segment):
            self._memory.learn(self, until_s)
        region = self._memory.region(extent)
        if region is None:
            error = self.stream.nonsense(f"{extent} is in none of its regions")
            raise UnavailableError(str(error)) from None
        return region

    def _pull(self, part: Place, target: Bytes, until_s: float) -> Outcome:
        region = self._region(part.extent, until_s)
        try:
            found = self._memory.pull(region, part.extent.offset_bytes, target, checked=part.checksum is not None)
        except OSError as error:
            raise self._out_of_reach(error) from None
        if part.checksum is None or found == part.checksum:
            return Outcome.DONE
        self.corrupt += 1
        return Outcome.CORRUPT

    def _push(self, part: Place, source: Bytes, until_s: float) -> int:
        region = self._region(part.extent, until_s)
        try:
            return self._memory.push(region, part.extent.offset_bytes, source, self._is_open)
        except OSError as error:
            raise self._out_of_reach(error) from None

    def _look(self, part: Place, until_s: float) -> Bytes | Outcome:
        self._region(part.extent, until_s)
        view = self._memory.view(part.extent)
        return Outcome.FAILED if view is None else view

    def _out_of_reach(self, error: OSError) -> UnavailableError:
        self.stream.shut()
        return UnavailableError(f"the memory of {self.stream.name} cannot be reached any more: {error}")

    def _read_rest(
        self, realm: bytes, items: Sequence[Item], grant: Grant, outcomes: list[Outcome], until_s: float
    ) -> list[Outcome]:
        """What the peer could not lend, for instance because it lies in no region, may still come over the socket."""
        rest = self._rest(grant, until_s)
        if rest:
            answers = super().read(realm, [items[it] for it in rest], until_s)
            for index, answer in zip(rest, answers, strict=True):
                outcomes[index] = answer
        return outcomes

    def _rest(self, grant: Grant, until_s: float) -> list[int]:
        """Which parts the peer could not lend, if there is time left to move them over the socket."""
        if self._aborted.is_set() or time.monotonic() >= until_s:
            return []
        return [index for index, part in enumerate(grant.parts) if part is Outcome.FAILED]


@dataclass(slots=True)
class Views:
    """A peer's things where they lie, read-only; an Outcome where there is nothing to look at.

    What was seen counts only if `lasts` still says so afterwards. Nothing may be looked at after the context's end.
    """

    views: Sequence[Bytes | Outcome]
    deadline_s: float
    _is_open: Callable[[], bool] = field(repr=False)
    _give_back: Callable[[Sequence[bool]], None] = field(repr=False)

    def lasts(self) -> bool:
        """Whether the loan has not ended until now."""
        return time.monotonic() <= self.deadline_s and self._is_open()

    def __enter__(self) -> Views:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seen = kind is None and self.lasts()
        done = [seen and not isinstance(it, Outcome) for it in self.views]
        self.views = ()
        self._give_back(done)


def _open_socket(peer: Member, until_s: float) -> tuple[socket.socket, int]:
    """A connected socket and the id of the process that listens there. Raises UnavailableError, RefusedError."""
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # out of descriptors
        raise UnavailableError(f"cannot open a socket: {error}") from None
    try:
        made.settimeout(max(until_s - time.monotonic(), 0.001))
        made.connect(peer.socket)
        pid, user, _ = _credentials.unpack(made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size))
    except OSError as error:
        made.close()
        raise UnavailableError(f"cannot connect to {peer.name} at {peer.socket}: {error}") from None
    if user not in (0, os.geteuid()):
        made.close()
        raise RefusedError("user", f"{os.geteuid()} or root", f"{user}", "run both nodes as one user")
    return made, pid
