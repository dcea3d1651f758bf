"""The Transfer Engine: registered memory, and batches of reads and writes between engines.

    with Engine("a") as engine:
        segment = engine.register(1 << 30)              # memory of its own, or a buffer, array or CPU tensor of yours
        send_somehow(engine.descriptor())
        peer = engine.connect(receive_somehow())
        engine.read(peer, [(0, 4096, 65536, buffer)], deadline_s=2.0)     # -> [Outcome.DONE]
        transfer = engine.submit_write(peer, items)     # -> a future; `await engine.awrite(...)` in asyncio

An item is (segment of the peer, offset in bytes, length in bytes, local memory). A batch is one request: it goes over
the nearest transport that both have (the same process, the same host, then the network), and what fails there goes over
the next one, within the deadline. Each item has an outcome of its own: DONE is verified, exactly the peer's bytes;
MISSING is memory that is not, or not any more, registered there; REFUSED may not be read or written; FAILED was not
through in time, or no transport works. After anything but DONE the target's content is undefined.

A peer's segment is on loan for one request, at most `loan_s` seconds: what is through later is FAILED, and the exporter
does not take memory back before the loan's end. Calls return when nothing touches the caller's memory any more: by the
deadline, or, should a write into it be under way then, as soon as that has ended.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from ctypes import addressof, c_char
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from operator import add, gt, index
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from headwater.core.health import Breaker
from headwater.errors import RefusedError, UnavailableError
from headwater.node.links import LinkPool
from headwater.ports import Bytes, Item, Link, Transport
from headwater.tiers.host import MappedMemory, create_segment
from headwater.transfer.buffers import bytes_of
from headwater.transfer.claims import Mark
from headwater.transfer.descriptor import Descriptor, RemoteSegment, parse_descriptor
from headwater.transfer.exports import (
    BODY_BYTES_MAX,
    NOTE,
    REALM,
    SEGMENTS,
    TOPIC_CHARS_MAX,
    EngineExports,
    ExportedToNixl,
    encode_note,
)
from headwater.transfer.inbox import Inbox, Notification
from headwater.transfer.queue import TransferQueue
from headwater.transfer.transfer import Transfer
from headwater.transports.credentials import Credentials
from headwater.transports.host import host_id
from headwater.transports.local import LocalLink
from headwater.transports.memory_exports import region_name
from headwater.transports.nixl import Nixl
from headwater.transports.nixl_agent import Agent, agent_name
from headwater.transports.offers import Offers
from headwater.transports.server import PeerServer
from headwater.transports.shm import Shm
from headwater.transports.tcp import Tcp
from headwater.transports.wire import MOST_BUDGET_S
from headwater.types import Member, Outcome, align
from headwater.values import split_address
from headwater.version import VERSION

ITEMS_MAX = 65_536
NOTIFICATIONS_MAX = 1024
WAITING_MAX = 1024
NOTIFICATION_BYTES_MAX = 64 << 20
DEADLINE_S_MAX = MOST_BUDGET_S
"""Peers give no request more time than that."""
CLOSE_S = 10.0
AGAIN_S = 2.0
"""How long a write is tried again that the peer could not take, since another one there had not ended."""
FIRST_REST_S, LONGEST_REST_S = 0.005, 0.1
NEAREST = ("local", "shm", "nixl", "tcp")
"""Transports, the best one first."""
DEFAULT = ("local", "shm", "tcp")
FINAL = {Outcome.DONE, Outcome.MISSING, Outcome.REFUSED, Outcome.FOREIGN}
"""What another transport would not change."""
ANSWERS = {"notifications", "topic", "body"}
"""Fields of a refusal that is the peer's answer, whatever brings it."""
Request = tuple["int | Segment | RemoteSegment", int, int, object]
"""Segment of the peer, offset in bytes, length in bytes, local memory."""


@dataclass(eq=False, slots=True)
class Segment:
    """Registered memory: uint8[length_bytes]. What the engine has allocated itself can be mapped by peers on this host,
    what the caller brought is copied by the kernel."""

    number: int
    memory: Bytes
    readable: bool
    writable: bool
    _mapped: MappedMemory | None = None

    @property
    def length_bytes(self) -> int:
        """Its size."""
        return len(self.memory)

    @property
    def remote(self) -> RemoteSegment:
        """As peers know it."""
        return RemoteSegment(self.number, len(self.memory), self.readable, self.writable)

    def let_go(self) -> None:
        """Nobody touches it any more."""
        self.memory = np.empty(0, np.uint8)
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


@dataclass(eq=False, slots=True)
class Peer:
    """One life of another engine, to which this one is connected."""

    number: int
    member: Member
    segments: dict[int, RemoteSegment]
    transports: tuple[str, ...]
    connected: bool = True
    breakers: dict[str, Breaker] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it calls itself."""
        return self.member.name


class Engine:
    """One process's memory and its links to others'. Any thread may call anything."""

    def __init__(
        self,
        name: str,
        *,
        listen: str = "127.0.0.1:0",
        cluster: str = "default",
        credentials: Credentials | None = None,
        transports: Sequence[str] = DEFAULT,
        advertise: str = "",
        workers: int = 8,
        loan_s: float = 30.0,
    ) -> None:
        """Listen; raises ConfigError if that address cannot be had, or may not without credentials, or for the
        transport `nixl` where NIXL is not installed. `advertise` is
        where others reach it, if that is not where it listens. As many as `workers` transfers that were submitted are
        carried out at a time with one peer."""
        if not 0 < len(name) <= 128:
            raise RefusedError("name", "1 to 128 characters", f"{len(name)}", "choose another name")
        if workers < 1 or loan_s <= 0.0:
            expected, given = "at least 1 worker and a loan above 0 s", f"{workers} and {loan_s} s"
            raise RefusedError("workers, loan_s", expected, given, "leave them out")
        unknown = [it for it in transports if it not in NEAREST]
        if unknown or not transports:
            raise RefusedError("transports", ", ".join(NEAREST), f"{list(transports)}", "name some of these")
        self._cluster, self._credentials = cluster, credentials or Credentials()
        self._segments: dict[int, Segment] = {}
        self._process = os.getpid()
        self._inbox = Inbox(NOTIFICATIONS_MAX, NOTIFICATION_BYTES_MAX)
        here = weakref.ref(self)  # what serves peers does not keep an engine that was forgotten
        self._exports = EngineExports(self._inbox, lambda: _alive(here).descriptor(), loan_s)
        self._peers = count(1)
        self._notes = count(1)
        self._writes = count(1)
        self._floors: dict[tuple[str, int], int] = {}
        """For each life of a peer, the first write that still counts there."""
        self._lock = threading.Lock()
        self._closed = False
        self._order = tuple(it for it in NEAREST if it in transports)
        host, port = split_address(listen)
        member = Member(name, time.time_ns(), "", "", host_id(), {}, self._order, VERSION)
        agent = Agent(agent_name(member), member.host) if "nixl" in transports else None
        self._nixl = ExportedToNixl(agent, self._exports) if agent is not None else None
        self._directory = tempfile.mkdtemp(prefix="headwater-engine-")
        path = str(Path(self._directory) / "engine.sock") if "shm" in transports else None
        try:
            offers = Offers(self._exports, [self._nixl] if self._nixl else ())
            listener = host, int(port)
            self._server = PeerServer(lambda: _alive(here).member, cluster, offers, self._credentials, listener, path)
        except BaseException:
            if self._nixl is not None:
                self._nixl.agent.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self.member = replace(member, address=advertise or self._server.address, socket=path or "")
        self._links = LinkPool({it: self._transport(it) for it in self._order})
        self._queue = TransferQueue(f"headwater-{name[:16]}", workers)
        self._under_way: set[Future[list[Outcome]]] = set()
        parts = _Parts(self._links, self._queue, self._inbox, self._server, self._exports, self._segments, self._nixl)
        self._parts = weakref.finalize(self, _forget, name, self._process, parts, self._directory)
        _here[member.name, member.epoch] = self
        self._server.start()

    def __repr__(self) -> str:
        return f"Engine({self.member.name} at {self.member.address}, {len(self._segments)} segments)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is under way, end all connections, unregister everything. Returns when no thread of the engine
        touches memory any more."""
        if os.getpid() != self._process:
            return  # all of that belongs to the process that has opened it
        if self._queue.is_inside:
            raise RefusedError("thread", "one of the caller's", "one of the engine's", "close it from another thread")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            under_way = [it for it in self._under_way if isinstance(it, Transfer)]
        _here.pop((self.member.name, self.member.epoch), None)
        for it in under_way:
            it.abort()
        closing = self._parts.detach()
        assert closing is not None, "an engine is closed once"
        _, _, (_, _, parts, directory), _ = closing
        parts.close(directory)

    # ---- memory ---------------------------------------------------------------------------------------

    def register(
        self, memory: object, *, readable: bool = True, writable: bool = False, immutable: bool = False
    ) -> Segment:
        """Lend memory to peers: a buffer, array or tensor in this host's memory, or a size in bytes of memory to be
        allocated. The caller keeps what it brought alive, and does not move it, until `unregister`. Of `immutable`
        memory no byte changes after its first read: the checksum of what was read is kept, and verified by each reader
        that copies for itself.

        Raises RefusedError for what is no memory, is empty, or overlaps a segment; ResourceError if the host cannot
        give that much.
        """
        mapped = None
        descriptor = None
        self._check_open()
        if immutable and writable:
            raise RefusedError("immutable", "memory that no peer writes", "writable=True", "leave one of them out")
        if isinstance(memory, int | np.integer) and not isinstance(memory, bool):
            memory = index(memory)
            if memory <= 0:
                raise RefusedError("memory", "a size above 0 bytes", f"{memory}", "ask for at least one byte")
            descriptor = create_segment(align(memory))
            mapped = MappedMemory([descriptor], [align(memory)])
            given = mapped.array(0, memory)
        else:
            given = bytes_of(memory, "memory", writes=writable)
            if not len(given):
                raise RefusedError("memory", "at least one byte", "none", "register what has a length")
        with self._lock:
            self._check_open()
            overlapped = next((it for it in self._segments.values() if _overlap(it.memory, given)), None)
            if overlapped is not None:
                given_text = f"{len(given)} bytes that overlap segment {overlapped.number}"
                remedy = "use offsets in that segment, or unregister it first"
                raise RefusedError("memory", "memory that is not registered", given_text, remedy)
            number = self._exports.add(given, descriptor, readable=readable, writable=writable, immutable=immutable)
            it = self._segments[number] = Segment(number, given, readable, writable, mapped)
        return it

    def unregister(self, segment: Segment, timeout_s: float = 10.0) -> None:
        """Lend it no more; returns when nobody touches it. Raises UnavailableError if a peer still had it at the end of
        that time: then nobody new gets it, it is still in use, and this may be called again."""
        if self._segments.get(segment.number) is not segment:
            raise RefusedError("segment", "one of this engine", f"{segment.number}", "unregister what is registered")
        self._check_process()
        self._exports.remove(segment.number, time.monotonic() + timeout_s)
        if self._nixl is not None and not self._closed:
            self._nixl.update()
        with self._lock:
            self._segments.pop(segment.number, None)
        segment.let_go()

    # ---- peers ----------------------------------------------------------------------------------------

    def descriptor(self) -> bytes:
        """What another engine needs to connect to this one, with what is registered now."""
        segments = tuple(it.remote for it in list(self._segments.values()))
        return Descriptor(self._cluster, self.member, segments).encode()

    def connect(self, descriptor: bytes, deadline_s: float = 5.0) -> Peer:
        """A peer that can be reached, and takes us for one of its cluster. Raises RefusedError for a descriptor that is
        not whole, of another cluster, or of an earlier life of that engine; UnavailableError."""
        found = parse_descriptor(descriptor)
        if found.cluster != self._cluster:
            raise RefusedError("cluster", self._cluster, found.cluster, "give both engines the same cluster")
        with self._lock:
            self._check_open()
            number = next(self._peers)
        common = tuple(it for it in self._order if it in found.member.transports and self._may(it, found.member))
        if not common:
            given = ", ".join(found.member.transports)
            raise RefusedError("transports", ", ".join(self._order), given, "give both engines one in common")
        peer = Peer(number, found.member, {it.number: it for it in found.segments}, common)
        peer.breakers = {it: Breaker(failures=2) for it in common}
        self.refresh(peer, deadline_s)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Close all connections to a peer, which cannot be used any more; transfers that are under way end."""
        self._check_open()
        peer.connected = False
        self._links.forget({peer.number})

    def refresh(self, peer: Peer, deadline_s: float = 5.0) -> None:
        """Learn what the peer has registered by now. Raises UnavailableError, RefusedError."""
        found = parse_descriptor(self._ask(peer, SEGMENTS, b"", deadline_s))
        peer.segments = {it.number: it for it in found.segments}

    def notify(self, peer: Peer, topic: str, body: bytes = b"", deadline_s: float = 5.0) -> None:
        """Let a peer know something; when this returns, it is in the peer's queue. Raises RefusedError if that is full,
        UnavailableError if it is not known whether the peer has it."""
        if not 0 < len(topic) <= TOPIC_CHARS_MAX:
            raise RefusedError("topic", f"1 to {TOPIC_CHARS_MAX} characters", f"{len(topic)}", "use a shorter one")
        if len(body) > BODY_BYTES_MAX:
            raise RefusedError("body", f"at most {BODY_BYTES_MAX} bytes", f"{len(body)}", "write it to a segment")
        self._ask(peer, NOTE + topic, encode_note(self.member.epoch, next(self._notes), body), deadline_s)

    def notifications(self, wait_s: float | None = None) -> Iterator[Notification]:
        """What peers let us know, in the order in which it came, until none has come for `wait_s` seconds (None: for
        ever) or the engine is closed. At most 1024 are kept that nobody takes; then senders are refused."""
        return self._inbox.take(wait_s)

    def anotifications(self) -> AsyncIterator[Notification]:
        """The same for a coroutine."""
        return self._inbox.atake()

    # ---- transfers ------------------------------------------------------------------------------------

    def read(self, peer: Peer, items: Sequence[Request], deadline_s: float = 5.0) -> list[Outcome]:
        """Fill local memory from a peer's segments; an outcome for each item."""
        wanted = self._items(peer, items, writes=False)
        return self._move(peer, wanted, time.monotonic() + _seconds(deadline_s), None, writes=False)

    def write(self, peer: Peer, items: Sequence[Request], deadline_s: float = 5.0) -> list[Outcome]:
        """Copy local memory into a peer's segments; DONE is what the peer has verified. After anything else the
        target's content is undefined, and may change until the peer's loan is over, or until a later write there is
        DONE: writes to the same bytes come one after another."""
        wanted = self._items(peer, items, writes=True)
        return self._move(peer, wanted, time.monotonic() + _seconds(deadline_s), None, writes=True)

    def submit_read(self, peer: Peer, items: Sequence[Request], deadline_s: float = 5.0) -> Transfer:
        """The same in the background; the deadline runs from now on."""
        return self._submit(peer, items, deadline_s, writes=False)

    def submit_write(self, peer: Peer, items: Sequence[Request], deadline_s: float = 5.0) -> Transfer:
        """The same in the background."""
        return self._submit(peer, items, deadline_s, writes=True)

    async def aread(self, peer: Peer, items: Sequence[Request], deadline_s: float = 5.0) -> list[Outcome]:
        """The same for a coroutine; one that is cancelled is over when nothing touches the memory any more."""
        return await _wait(self.submit_read(peer, items, deadline_s))

    async def awrite(self, peer: Peer, items: Sequence[Request], deadline_s: float = 5.0) -> list[Outcome]:
        """The same for a coroutine."""
        return await _wait(self.submit_write(peer, items, deadline_s))

    # ---- inside ---------------------------------------------------------------------------------------

    def _submit(self, peer: Peer, items: Sequence[Request], deadline_s: float, *, writes: bool) -> Transfer:
        wanted = self._items(peer, items, writes=writes)
        until_s = time.monotonic() + _seconds(deadline_s)
        transfer = Transfer()
        transfer.add_done_callback(self._over)
        with self._lock:
            self._check_open()
            if len(self._under_way) >= WAITING_MAX:
                raise UnavailableError(f"{WAITING_MAX} transfers wait already; wait for some of them")
            self._under_way.add(transfer)
        work = partial(self._move, peer, wanted, until_s, transfer, writes=writes)
        self._queue.submit(peer.number, transfer, until_s, len(wanted), work)
        return transfer

    def _over(self, transfer: Future[list[Outcome]]) -> None:
        with self._lock:
            self._under_way.discard(transfer)

    def _move(
        self, peer: Peer, items: list[Item], until_s: float, transfer: Transfer | None, *, writes: bool
    ) -> list[Outcome]:
        """Over one transport after another, until each item has an outcome that no other would change. A peer cannot
        take a write as long as another one has not ended there, which is soon: then all that is tried again."""
        outcomes = [Outcome.FAILED] * len(items)
        left = list(range(len(items)))
        rest_s, again_s = FIRST_REST_S, min(until_s, time.monotonic() + AGAIN_S)
        while True:
            answered = self._move_once(peer, items, outcomes, left, until_s, transfer, writes=writes)
            left = [at for at in left if outcomes[at] not in FINAL]
            if not left or not writes or not answered or time.monotonic() + rest_s >= again_s or self._closed:
                return outcomes
            if transfer is None:
                time.sleep(rest_s)
            else:
                transfer.rest(rest_s)
                if transfer.ending:
                    return outcomes
            rest_s = min(2 * rest_s, LONGEST_REST_S)

    def _move_once(
        self,
        peer: Peer,
        items: list[Item],
        outcomes: list[Outcome],
        left: list[int],
        until_s: float,
        transfer: Transfer | None,
        *,
        writes: bool,
    ) -> bool:
        """What is left of the items over each transport once; whether the peer has answered over one of them."""
        answered = False
        refusal: RefusedError | None = None
        whole = len(left) == len(items)
        for name in self._choose(peer):
            if not left or time.monotonic() >= until_s or (transfer is not None and transfer.ending):
                break
            try:
                got = self._move_by(name, peer, [items[it] for it in left], until_s, transfer, writes=writes)
            except RefusedError as error:
                refusal = refusal or error
                self._judge(peer, name, well=False)
                continue
            # A peer that cannot lend something just now is there all the same.
            self._judge(peer, name, well=got is not None)
            if got is not None:
                answered = True
                for at, outcome in zip(left, got, strict=True):
                    outcomes[at] = outcome
                left = [at for at in left if outcomes[at] not in FINAL]
        if refusal is not None and whole and len(left) == len(items):
            raise refusal
        return answered

    def _move_by(
        self, name: str, peer: Peer, items: list[Item], until_s: float, transfer: Transfer | None, *, writes: bool
    ) -> list[Outcome] | None:
        """Over one transport; None if it does not work. An idle connection that the peer has closed meanwhile is no
        reason to give it up."""
        for fresh in (False, True):
            used_before = False
            try:
                with self._links.one(peer.number, peer.member, name, until_s, fresh=fresh) as taken:
                    used_before = taken.used_before
                    try:
                        if transfer is not None and not transfer.uses(taken.link):
                            raise UnavailableError("the transfer was cancelled")
                        if not writes:
                            return taken.link.read(REALM, items, until_s)
                        return self._write(peer, taken.link, items, until_s)
                    finally:
                        if transfer is not None:
                            transfer.uses(None)
            except UnavailableError:
                if not used_before or time.monotonic() >= until_s or (transfer is not None and transfer.ending):
                    break
        return None

    def _write(self, peer: Peer, link: Link, items: list[Item], until_s: float) -> list[Outcome]:
        """One write, with its number. If it is not known what becomes of it, it does not count any more, should it
        begin after the next one."""
        life = peer.member.name, peer.member.epoch
        with self._lock:
            serial = next(self._writes)
            mark = Mark(self.member.epoch, serial, self._floors.get(life, 0))
        answered = False
        try:
            outcomes = link.write(REALM + mark.encode(), items, until_s)
            answered = True
        except RefusedError:
            answered = True
            raise
        finally:
            if not answered:
                with self._lock:
                    self._floors[life] = max(self._floors.get(life, 0), serial + 1)
        return outcomes

    def _ask(self, peer: Peer, topic: str, body: bytes, deadline_s: float) -> bytes:
        """A message and its answer, over the first transport that brings one."""
        until_s = time.monotonic() + _seconds(deadline_s)
        trouble: UnavailableError | RefusedError = UnavailableError(f"{peer.name} cannot be reached in time")
        for name in self._choose(peer):
            for fresh in (False, True):
                used_before = False
                try:
                    with self._links.one(peer.number, peer.member, name, until_s, fresh=fresh) as taken:
                        used_before = taken.used_before
                        answer = taken.link.ask(topic, body, until_s)
                except UnavailableError as error:
                    trouble = error
                except RefusedError as error:
                    if error.field in ANSWERS:
                        raise
                    trouble = error
                else:
                    self._judge(peer, name, well=True)
                    return answer
                if not used_before:
                    break
            self._judge(peer, name, well=False)
        raise trouble

    def _choose(self, peer: Peer) -> list[str]:
        """The transports to try, in order: those that work, or all if none does."""
        if not peer.connected:
            raise RefusedError("peer", "one that is connected", f"{peer.name}, disconnected", "connect to it again")
        now = time.monotonic()
        with self._lock:
            self._check_open()
            well = [it for it in peer.transports if peer.breakers[it].allows(now)]
        return well or list(peer.transports)

    def _judge(self, peer: Peer, name: str, well: bool) -> None:
        with self._lock:
            if well:
                peer.breakers[name].succeeded(time.monotonic())
            else:
                peer.breakers[name].failed(time.monotonic(), random.random(), unavailable=True)

    def _items(self, peer: Peer, items: Sequence[Request], *, writes: bool) -> list[Item]:
        """What the transports move; raises RefusedError, naming the item, before anything is done."""
        self._check_open()
        if len(items) > ITEMS_MAX:
            raise RefusedError("items", f"at most {ITEMS_MAX} in a batch", f"{len(items)}", "split the batch")
        found = [_item(peer, at, it, writes=writes) for at, it in enumerate(items)]
        if not writes and len(found) > 1:
            _check_apart([it.memory for it in found])
        return found

    def _transport(self, name: str) -> Transport:
        here = weakref.ref(self)
        if name == "local":
            return _SameProcess(self)
        if name == "shm":
            return Shm(lambda: _alive(here).member, self._cluster, self._credentials)
        if self._nixl is not None and name == "nixl":
            return Nixl(lambda: _alive(here).member, self._cluster, self._credentials, self._nixl.agent)
        return Tcp(lambda: _alive(here).member, self._cluster, self._credentials)

    def _may(self, transport: str, member: Member) -> bool:
        """Whether a transport can reach a member at all."""
        if transport == "local":
            return (member.name, member.epoch) in _here
        return transport != "shm" or (bool(member.socket) and member.host == self.member.host)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            remedy = "open an engine of its own in each process, after the fork"
            raise RefusedError("process", f"{self._process}, which opened this engine", f"{os.getpid()}", remedy)

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise UnavailableError("this engine is closed")


_here: weakref.WeakValueDictionary[tuple[str, int], Engine] = weakref.WeakValueDictionary()
"""The engines of this process, by name and epoch."""


class _SameProcess:
    """See `ports.Transport`: to the other engines of this process."""

    name = "local"

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def connect(self, peer: Member, until_s: float) -> Link:
        """See `ports.Transport`."""
        there, here = _here.get((peer.name, peer.epoch)), self._engine()
        if there is None or here is None:
            raise UnavailableError(f"{peer.name} is not in this process any more")
        if there._credentials.tokens[:1] != here._credentials.tokens[:1]:
            raise RefusedError("token", "that of the other engine", "another", "give both the same credentials")
        return LocalLink(peer, there._exports, here.member.name)

    def close(self) -> None:
        """See `ports.Transport`."""


@dataclass(slots=True, eq=False)
class _Parts:
    """What an engine consists of, and what ends it, also if it was forgotten."""

    links: LinkPool
    queue: TransferQueue
    inbox: Inbox
    server: PeerServer
    exports: EngineExports
    segments: dict[int, Segment]
    nixl: ExportedToNixl | None

    def close(self, directory: str) -> None:
        """End everything, also after something that has failed; that is raised at the end."""
        until_s = time.monotonic() + CLOSE_S
        with ExitStack() as ending:  # the last one first
            ending.callback(shutil.rmtree, directory, ignore_errors=True)
            for it in list(self.segments.values()):
                ending.callback(self._unregister, it, until_s)
            if self.nixl is not None:
                ending.callback(self.nixl.agent.close)
            ending.callback(self.server.close, until_s)
            ending.callback(self.inbox.close)
            ending.callback(self.links.close_transports)
            ending.callback(self.queue.close)
            ending.callback(self.links.close, until_s)

    def _unregister(self, segment: Segment, until_s: float) -> None:
        self.exports.remove(segment.number, until_s)
        self.segments.pop(segment.number, None)
        segment.let_go()


def _forget(name: str, process: int, parts: _Parts, directory: str) -> None:
    """An engine was dropped that nobody had closed, or the process ends."""
    if os.getpid() != process:
        return
    if threading.current_thread().name.startswith("headwater-"):  # one of those that would be waited for
        threading.Thread(target=_forget, args=(name, process, parts, directory), name="ending").start()
    else:
        with ExitStack() as ending:
            ending.callback(warnings.warn, f"the engine {name} was not closed", ResourceWarning, stacklevel=2)
            ending.callback(parts.close, directory)


def _alive(engine: weakref.ref[Engine]) -> Engine:
    found = engine()
    if found is None:
        raise UnavailableError("this engine is gone")
    return found


async def _wait(transfer: Transfer) -> list[Outcome]:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    transfer.add_done_callback(lambda _: loop.call_soon_threadsafe(over.set))
    try:
        await over.wait()
    except asyncio.CancelledError:
        transfer.abort()
        while not transfer.done():
            try:
                await over.wait()
            except asyncio.CancelledError:  # once more: the memory is not the caller's yet
                continue
        raise
    return transfer.result()


def _item(peer: Peer, at: int, request: Request, *, writes: bool) -> Item:
    """What a transport moves. Raises RefusedError, which names the item."""
    try:
        return _checked(peer, request, writes=writes)
    except RefusedError as error:
        name = f"items[{at}].{error.field}".removesuffix(".")
        raise RefusedError(name, error.expected, error.given, error.remedy) from error.__cause__


def _checked(peer: Peer, request: Request, *, writes: bool) -> Item:
    """The same; an error's field is a part of the request, or empty."""
    try:
        segment, offset, length, memory = request
    except (TypeError, ValueError) as error:
        expected = "(segment, offset, length, memory)"
        raise RefusedError("", expected, f"{type(request).__name__}", "pass four values") from error
    try:
        number = segment.number if isinstance(segment, Segment | RemoteSegment) else index(segment)
        offset, length = index(offset), index(length)
    except TypeError as error:
        raise RefusedError("", "whole numbers", f"{error}", "pass bytes as int") from error
    known = peer.segments.get(number)
    if known is None:
        have = f"one of the {len(peer.segments)} segments of {peer.name}"
        raise RefusedError("segment", have, f"{number}", "register it there, and refresh(peer) here")
    if not (known.writable if writes else known.readable):
        verb = "written" if writes else "read"
        remedy = f"register it with {'writable' if writes else 'readable'}=True"
        raise RefusedError("segment", f"one that may be {verb}", f"segment {number}", remedy)
    if length <= 0:
        raise RefusedError("length", "at least 1 byte", f"{length}", "leave empty items out")
    if offset < 0 or offset + length > known.length_bytes:
        expected = f"within the {known.length_bytes} bytes of segment {number}"
        raise RefusedError("offset", expected, f"{offset} to {offset + length}", "stay inside of it")
    local = bytes_of(memory, "memory", writes=not writes)
    have_bytes = len(local)
    if have_bytes < length:
        raise RefusedError("memory", f"{length} bytes", f"{have_bytes}", "pass as much as is moved")
    return Item(region_name(number, offset, length), local if have_bytes == length else local[:length])


def _check_apart(targets: Sequence[Bytes]) -> None:
    """Raises RefusedError if some of them, none of which is empty or read-only, overlap."""
    starts = [addressof(c_char.from_buffer(it.data)) for it in targets]
    ends = sorted(map(add, starts, map(len, targets)))
    if not any(map(gt, ends, sorted(starts)[1:])):  # so each ends before the next one begins
        return
    spans = sorted((start, len(it), at) for at, (start, it) in enumerate(zip(starts, targets, strict=True)))
    for (start, length, at), (following, _, other) in pairwise(spans):
        if start + length > following:
            given = f"items {at} and {other} overlap"
            raise RefusedError("items", "targets apart from each other", given, "read them to other places")


def _overlap(one: Bytes, other: Bytes) -> bool:
    first, second = one.ctypes.data, other.ctypes.data
    return first < second + len(other) and second < first + len(one)


def _seconds(deadline_s: float) -> float:
    if not 0.0 < deadline_s <= DEADLINE_S_MAX:
        raise RefusedError("deadline_s", f"above 0, at most {DEADLINE_S_MAX:.0f}", f"{deadline_s}", "choose a time")
    return deadline_s
