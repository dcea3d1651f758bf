"""The client side of a node: a link that calls, and memory that is mapped.

`Link` is one connection with deadlines: it never waits longer than it was told and never retries; after any
failure it is closed and useless. `Session` is a link with a registered namespace; `Supervisor` keeps one alive in the
background so that serving never waits for a dead node.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from headwater.errors import HeadwaterError, ProtocolError, RefusedError, ResourceError, UnavailableError
from headwater.node.address import peer_user, socket_path
from headwater.node.messages import (
    HEADER_BYTES,
    PROTOCOL,
    Clear,
    ClearReply,
    Contained,
    Contains,
    Done,
    Ended,
    Forget,
    Hello,
    Keep,
    Load,
    Loaded,
    Match,
    Matched,
    Refused,
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
    body_bytes,
    decode_reply,
    encode,
    unpack_addresses,
)
from headwater.tiers.host import MappedMemory
from headwater.types import ChunkKey, Cleared, KVLayout, Loadable, Namespace, Reservation, pack_keys
from headwater.version import VERSION

DESCRIPTORS_MAX = 64
READ_BYTES = 1 << 16
CLEAR_S = 10.0

R = TypeVar("R", bound=Reply)


class Link:
    """One connection to a node. Not thread-safe."""

    def __init__(self, address: str, instance: str, *, maps: bool, connect_s: float, call_s: float) -> None:
        """Connect and greet; raises UnavailableError, RefusedError, ProtocolError or ResourceError."""
        self._call_s = self._deadline_s = call_s
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.memory: MappedMemory | None = None
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # out of descriptors, say: that may pass
            raise UnavailableError(f"cannot open a socket: {error}") from error
        try:
            _set_deadline(self._socket, connect_s)
            self._socket.connect(str(socket_path(address)))
            self._check_owner()
            self._socket.sendall(encode(Hello(PROTOCOL, VERSION, instance, maps)))
            self.welcome, descriptors = self._receive_welcome(connect_s, maps)
            if maps:
                self._take(descriptors)
            _set_deadline(self._socket, call_s)
        except BlockingIOError as error:
            self.close()
            raise UnavailableError(f"the node at {address} does not answer within {connect_s:g} s") from error
        except OSError as error:
            self.close()
            raise UnavailableError(f"no node at {address}: {error}") from error
        except HeadwaterError:
            self.close()
            raise

    @property
    def node(self) -> tuple[str, int]:
        """The node's name and epoch: who it is, whatever its address."""
        return self.welcome.node, self.welcome.epoch

    @property
    def is_lost(self) -> bool:
        """Whether the node has closed the connection, or we have: for those who otherwise only look at its memory."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def call(self, request: Request, kind: type[R], call_s: float | None = None) -> R:
        """Send a request and return its reply of the expected kind, within `call_s` seconds.

        Raises RefusedError if the node says no (the link stays usable); UnavailableError or ProtocolError
        otherwise, after which it is disconnected: its memory stays mapped until `close`, since a copy may be
        under way there.
        """
        frame = encode(request)
        whole = False
        try:
            reply = self._exchange(frame, self._call_s if call_s is None else call_s)
            whole = True
        except BlockingIOError as error:
            raise UnavailableError(f"the node did not answer {type(request).__name__} in time") from error
        except OSError as error:
            raise UnavailableError(f"the node did not answer {type(request).__name__}: {error}") from error
        finally:
            # Also after an interrupt: a reply that nobody took would be taken for the next request's.
            if not whole:
                self._socket.close()
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, Refused):
            raise RefusedError(reply.field, reply.expected, reply.given, reply.remedy)
        self._socket.close()
        raise ProtocolError(f"{type(request).__name__} was answered by {type(reply).__name__}")

    def close(self) -> None:
        """Close the connection; mapped memory goes too, and with it (or its last view) the lifeline."""
        self._socket.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    # ---- inside ---------------------------------------------------------------------------------------

    def _exchange(self, frame: bytes, call_s: float) -> Reply:
        if call_s != self._deadline_s:
            _set_deadline(self._socket, call_s)
            self._deadline_s = call_s
        until_s = time.monotonic() + call_s
        sent = self._socket.send(frame)
        while sent < len(frame):
            self._wait_until(until_s)
            sent += self._socket.send(memoryview(frame)[sent:])
        if sent > READ_BYTES:
            self._wait_until(until_s)
        buffer = self._buffer
        count = self._socket.recv_into(buffer)
        if count >= HEADER_BYTES and count == HEADER_BYTES + body_bytes(buffer):
            return decode_reply(buffer[HEADER_BYTES:count])
        return self._receive_rest(count, until_s)

    def _receive_rest(self, count: int, until_s: float) -> Reply:
        """A reply of which `count` bytes have come so far, in the buffer."""
        received = bytearray()
        while True:
            if not count:
                raise ConnectionResetError("the node closed the connection")
            received += self._buffer[:count]
            if len(received) >= HEADER_BYTES:
                end = HEADER_BYTES + body_bytes(received)
                if len(received) > end:
                    raise ProtocolError(f"{len(received) - end} bytes came after the reply")
                if len(received) == end:
                    return decode_reply(bytes(received[HEADER_BYTES:]))
            self._wait_until(until_s)
            count = self._socket.recv_into(self._buffer)

    def _wait_until(self, until_s: float) -> None:
        """Let the next system call wait for what is left of the time; raises TimeoutError if nothing is."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole reply in time")
        _set_deadline(self._socket, left_s)
        self._deadline_s = left_s

    def _check_owner(self) -> None:
        """Only our own or root's node may see our KV, whoever put a socket where we look for one."""
        owner, own = peer_user(self._socket), os.geteuid()
        if own and owner not in (0, own):
            raise RefusedError("node's user", f"{own} or root", f"{owner}", "run the node as this user or as root")

    def _receive_welcome(self, connect_s: float, maps: bool) -> tuple[Welcome, list[int]]:
        # Not socket.recv_fds: it drops the flag that keeps the descriptors from programs that this process starts.
        space = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
        part, ancillary, _, _ = self._socket.recvmsg(READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        rights = [data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        descriptors = list(array("i", b"".join(rights)))
        try:
            if not part:
                raise ConnectionResetError("the node closed the connection during the handshake")
            if len(part) < HEADER_BYTES or len(part) != HEADER_BYTES + body_bytes(part):
                raise ProtocolError(f"{len(part)} bytes are not one whole Welcome")
            reply = decode_reply(part[HEADER_BYTES:])
            if isinstance(reply, Refused):
                raise RefusedError(reply.field, reply.expected, reply.given, reply.remedy)
            if not isinstance(reply, Welcome) or reply.protocol != PROTOCOL:
                raise ProtocolError("the node did not answer Hello with Welcome")
            if len(descriptors) != (len(reply.segments_bytes) + 1 if maps else 0):
                raise ProtocolError(f"{len(descriptors)} descriptors came for {len(reply.segments_bytes)} segments")
        except (OSError, HeadwaterError):
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return reply, descriptors

    def _take(self, descriptors: Sequence[int]) -> None:
        self.memory = MappedMemory(descriptors[:-1], self.welcome.segments_bytes, lifeline=descriptors[-1])


def _set_deadline(it: socket.socket, seconds: float) -> None:
    """Kernel time-outs: one system call a read, where Python's own time-outs poll before each."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or (0 if seconds >= 1 else 1))
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class Session:
    """A link whose instance has registered its namespace: the verbs of the cache. Not thread-safe."""

    def __init__(self, link: Link, namespace: Namespace, layout: KVLayout) -> None:
        """Register; raises RefusedError naming both values if the node has other ideas (the link stays usable)."""
        self.link, self.layout = link, layout
        self._space = link.call(Register(namespace, layout), Registered).space

    def match(
        self, keys: Sequence[ChunkKey], *, counts: bool = True, request: str = "", tokens_s: float = 0.0
    ) -> Matched:
        """Usable leading chunks. `counts` marks the first time that a request asks. With the name of a `request`, the
        node brings up more from lower tiers where that pays; then the answer says whether to ask again."""
        return self.link.call(Match(self._space, pack_keys(keys), counts, request, tokens_s), Matched)

    def forget(self, requests: Sequence[str]) -> int:
        """Requests are over: nothing more is brought up for them; how many were known."""
        return self.link.call(Forget(tuple(requests)), Ended).count

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which chunks are held."""
        return [bool(flag) for flag in self.contains_packed(pack_keys(keys))]

    def contains_packed(self, keys: bytes) -> bytes:
        """The same for packed keys: one byte a key."""
        return self.link.call(Contains(self._space, keys), Contained).flags

    def load(self, keys: Sequence[ChunkKey], first: int = 0, shards: Sequence[int] = (0,)) -> Loadable:
        """Lease the usable prefix from chunk `first` on."""
        it = self.link.call(Load(self._space, pack_keys(keys), first, tuple(shards)), Loaded)
        return Loadable(it.ticket, it.chunks, unpack_addresses(it.addresses), it.deadline_s)

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None = None,
        lacking: Sequence[tuple[int, int]] = (),
        shards: Sequence[int] = (0,),
    ) -> Reservation:
        """Slots for the keys that nobody holds yet."""
        request = Reserve(self._space, parent or b"", pack_keys(keys), tuple(lacking), tuple(shards))
        it = self.link.call(request, Reserved)
        return Reservation(it.ticket, it.covered, unpack_addresses(it.addresses), it.deadline_s)

    def done(self, ticket: int, shard: int = 0, failed: Sequence[int] = ()) -> bool:
        """A shard has finished its copy; False if the ticket had ended before."""
        return bool(self.link.call(Done(ticket, shard, tuple(failed)), Ended).count)

    def release(self, tickets: Sequence[int]) -> int:
        """Give tickets up; how many were open."""
        return self.link.call(Release(tuple(tickets)), Ended).count

    def keep(self, tickets: Sequence[int]) -> int:
        """Name all tickets that this instance knows of; what it holds besides is freed; how many those were."""
        return self.link.call(Keep(tuple(tickets)), Ended).count

    def clear(self) -> Cleared:
        """Delete every chunk of this namespace that nobody uses, in every tier. A million of them take seconds, so that
        this may take up to `CLEAR_S`."""
        it = self.link.call(Clear(self._space), ClearReply, CLEAR_S)
        return Cleared(it.deleted, it.kept, it.pins, it.pending)

    def still_clearing(self) -> tuple[str, ...]:
        """The REMOTE tiers that have yet to delete what `clear` told them to."""
        return self.link.call(Clear(self._space, begins=False), ClearReply).pending

    def close(self) -> None:
        """Close the link."""
        self.link.close()


def open_session(
    address: str, instance: str, namespace: Namespace, layout: KVLayout, *, maps: bool, connect_s: float, call_s: float
) -> Session:
    """Connect and register, all or nothing; raises what `Link` and `Session` raise."""
    link = Link(address, instance, maps=maps, connect_s=connect_s, call_s=call_s)
    try:
        return Session(link, namespace, layout)
    except HeadwaterError:
        link.close()
        raise


class Supervisor:
    """Keeps a session open in the background: callers either have one at once or go on without.

    Theory of operation. DOWN: a thread connects, with jittered back-off from 0.1 to 5 s. UP: `session` is
    there. A caller that meets an UnavailableError or ProtocolError reports it with `lost`, which makes it DOWN
    again. A RefusedError needs an operator: it is reported once, kept in `refusal`, and tried again at the slowest
    pace, so that the operator who mends the node need not restart the engines.
    """

    BACK_OFF_S = (0.1, 5.0)

    def __init__(self, connect: Callable[[], Session], on_refused: Callable[[HeadwaterError], None]) -> None:
        self._connect, self._on_refused = connect, on_refused
        self._session: Session | None = None
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.refusal: HeadwaterError | None = None
        self.connects = 0
        self._try_once()
        self._thread = threading.Thread(target=self._run, name="headwater-link", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The open session, or None while the node is away. Use it from one thread at a time."""
        return self._session

    def lost(self, session: Session) -> None:
        """A call on this session failed: forget it and reconnect in the background."""
        session.close()
        with self._lock:
            if self._session is session:
                self._session = None
                self._wanted.set()

    def close(self) -> None:
        """Stop reconnecting and close the session."""
        self._closed.set()
        self._wanted.set()
        self._thread.join()
        if self._session is not None:
            self._session.close()
            self._session = None

    def _run(self) -> None:
        first_s, longest_s = self.BACK_OFF_S
        while not self._closed.is_set():
            self._wanted.wait()
            # Before the attempt, not after: a session that is lost as soon as it is there must wake us again.
            self._wanted.clear()
            wait_s = first_s
            while not self._closed.is_set() and self._session is None:
                if self._try_once():
                    break
                wait_s = longest_s if self.refusal is not None else wait_s
                self._closed.wait(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(wait_s * 2, longest_s)

    def _try_once(self) -> bool:
        try:
            session = self._connect()
        except UnavailableError:
            self._wanted.set()
            return False
        except (RefusedError, ProtocolError, ResourceError) as error:
            known = self.refusal
            self.refusal = error
            self._wanted.set()
            if str(known) != str(error):
                self._on_refused(error)
            return False
        with self._lock:
            self.refusal = None
            self._session = session
            self.connects += 1
        return True


def ask_operator(address: str, wish: Wish, timeout_s: float = 5.0) -> object:
    """Have a node do something for its operator; its answer, from JSON. Raises UnavailableError or RefusedError."""
    link = Link(address, f"operator-{os.getpid()}", maps=False, connect_s=timeout_s, call_s=timeout_s)
    try:
        answer: object = msgspec.json.decode(link.call(wish, StatusReply).state)
    finally:
        link.close()
    return answer


def fetch_status(address: str, timeout_s: float = 1.0) -> dict[str, object]:
    """A node's state (see `Node.status`); raises UnavailableError."""
    link = Link(address, f"status-{os.getpid()}", maps=False, connect_s=timeout_s, call_s=timeout_s)
    try:
        state: dict[str, object] = msgspec.json.decode(link.call(Status(), StatusReply).state)
    finally:
        link.close()
    return state
