"""Other processes for the tests: a small server that forks them, so that one starts in milliseconds.

A `Peer` is a forked process that plays a role (a function of this file) and talks over its own channel, one JSON
value a packet. The fork server has one thread and has loaded headwater already, which a test process with its
own threads must not fork for itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import headwater
from headwater.config import NodeConfig
from headwater.errors import ConfigError, HeadwaterError
from headwater.node.address import Listener
from headwater.node.client import Link, Session
from headwater.node.driver import Node
from headwater.node.messages import PROTOCOL, Hello, Reserve, encode
from headwater.node.server import Server
from headwater.tiers.host import MappedMemory, available_bytes, create_memory
from headwater.types import ChunkKey, KVGroup, KVLayout, Namespace, pack_keys

PACKET_BYTES = 1 << 16
REPORT_S = 20.0

LAYOUT = KVLayout(16, (KVGroup(16, 4096, (2,)),))
SLOT_BYTES = LAYOUT.slot_bytes(0)


def namespace(layout: KVLayout = LAYOUT, /, **changes: str) -> Namespace:
    """A namespace that fits the layout, with some fields changed."""
    return Namespace(**{"model": "m", "kv_dtype": "bf16", "layout": "cpu", "groups": layout.fingerprint(), **changes})


def keys(count: int, name: str = "") -> list[ChunkKey]:
    """Keys that belong to a name."""
    return [ChunkKey(hashlib.md5(f"{name}/{index}".encode()).digest()) for index in range(count)]


def payload(key: bytes, writer: int, size: int = SLOT_BYTES) -> bytes:
    """Bytes that tell who wrote them and for which key: a foreign, stale or missing byte shows."""
    return struct.pack("<Q", writer) + hashlib.shake_128(key + struct.pack("<Q", writer)).digest(size - 8)


def is_whole(key: bytes, data: bytes) -> bool:
    """Whether these are the bytes of one writer of this key, all of them."""
    return data == payload(key, struct.unpack("<Q", data[:8])[0], len(data))


def open_session(address: str, instance: str, *, maps: bool = True, call_s: float = 5.0) -> Session:
    """A registered session of the tests' namespace."""
    link = Link(address, instance, maps=maps, connect_s=5.0, call_s=call_s)
    return Session(link, namespace(), LAYOUT)


def mapped(session: Session) -> MappedMemory:
    """The memory that a session maps."""
    assert session.link.memory is not None
    return session.link.memory


def write(session: Session, place: int, data: bytes) -> None:
    """Put bytes at a node address."""
    mapped(session).view(place, len(data))[:] = data


def read(session: Session, place: int, size: int = SLOT_BYTES) -> bytes:
    """The bytes at a node address."""
    return bytes(mapped(session).view(place, size))


def save(session: Session, wanted: Sequence[ChunkKey], writer: int = 1) -> int:
    """Save what is not held yet; how many chunks were written."""
    got = session.reserve(wanted)
    places = [(key, place) for key, place in zip(wanted, got.addresses[0], strict=False) if place != (1 << 64) - 1]
    for key, place in places:
        write(session, place, payload(key, writer))
    if got.ticket:
        session.done(got.ticket)
    return len(places)


# ---- the other side of the tests -----------------------------------------------------------------------


class Channel:
    """JSON values between a peer and its test, one a packet."""

    def __init__(self, it: socket.socket) -> None:
        self.socket = it

    def tell(self, value: Any) -> None:
        """Send one value."""
        self.socket.send(json.dumps(value).encode())

    def hear(self, within_s: float = REPORT_S) -> Any:
        """The next value; EOFError when the other side is gone."""
        self.socket.settimeout(within_s)
        packet = self.socket.recv(PACKET_BYTES)
        if not packet:
            raise EOFError("the other side is gone")
        return json.loads(packet)

    def stay(self) -> None:
        """Wait until the test closes its side or kills us."""
        self.socket.settimeout(None)
        while self.socket.recv(PACKET_BYTES):
            pass


class Peer:
    """A forked process, seen from the test."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid = int(channel.hear())

    def hear(self, within_s: float = REPORT_S) -> Any:
        """Its next report."""
        return self.channel.hear(within_s)

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, unless it is gone already; returns when it is."""
        self.signal(signal.SIGKILL)
        self.ended()

    def ended(self, within_s: float = REPORT_S) -> list[Any]:
        """Wait for its end; what it said until then."""
        said = []
        with suppress(EOFError, ConnectionResetError):
            while True:
                said.append(self.hear(within_s))
        self.channel.socket.close()
        return said


class ForkServer:
    """Starts peers; its own end is the end of all of them."""

    def __init__(self, module: str = "tests.node.peers") -> None:
        """`module` has the roles, and calls `serve_orders` when it is run."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            root = Path(__file__).parents[2]
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(Path(headwater.__file__).parents[1])])}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=root, env=env)
        self._socket = ours
        self._peers: list[Peer] = []

    def start(self, role: Callable[..., None], **arguments: Any) -> Peer:
        """Fork a peer that plays `role(channel, **arguments)`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            order = json.dumps({"role": role.__name__, "arguments": arguments}).encode()
            socket.send_fds(self._socket, [order], [theirs.fileno()])
        peer = Peer(Channel(ours))
        self._peers.append(peer)
        return peer

    def forget(self) -> None:
        """End all peers that are still there."""
        for peer in self._peers:
            if peer.channel.socket.fileno() >= 0:
                peer.signal(signal.SIGCONT)
                peer.kill()
        self._peers.clear()

    def close(self) -> None:
        """End the fork server."""
        self.forget()
        self._socket.close()
        self._process.wait()


def serve_orders(descriptor: int, roles: Mapping[str, Any]) -> None:
    """A fork server's life: fork a peer for each order, which names one of the roles."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = socket.socket(fileno=descriptor)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, PACKET_BYTES, 1)
        if not order:
            return
        if os.fork() == 0:
            orders.close()
            _play(roles, json.loads(order), Channel(socket.socket(fileno=descriptors[0])))
        os.close(descriptors[0])


def _play(roles: Mapping[str, Any], order: dict[str, Any], channel: Channel) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    whole = False
    try:
        channel.tell(os.getpid())
        roles[order["role"]](channel, **order["arguments"])
        whole = True
    except BrokenPipeError:  # the test has seen enough
        whole = True
    finally:
        if not whole:
            channel.tell({"crash": traceback.format_exc()[-4000:]})
        os._exit(not whole)


# ---- roles ---------------------------------------------------------------------------------------------

SAVE_POINTS = ("connected", "half a frame", "unread reply", "reserved", "half written", "written", "done")
LOAD_POINTS = ("leased", "half read", "read", "done")


def saver(channel: Channel, address: str, instance: str, name: str, count: int, point: str) -> None:
    """Save `count` chunks and stop at a point, to be killed there."""
    session = open_session(address, instance)
    wanted = keys(count, name)

    def at(here: str) -> None:
        if here == point:
            channel.tell(here)
            channel.stay()

    at("connected")
    frame = encode(Reserve(0, b"", pack_keys(wanted), (), (0,)))
    if point in ("half a frame", "unread reply"):
        session.link._socket.send(frame[: len(frame) // 2] if point == "half a frame" else frame)
        at(point)
    got = session.reserve(wanted)
    at("reserved")
    for index, (key, place) in enumerate(zip(wanted, got.addresses[0], strict=True)):
        write(session, place, payload(key, os.getpid())[: SLOT_BYTES // 2])
        if index == count // 2:
            at("half written")
        write(session, place, payload(key, os.getpid()))
    at("written")
    session.done(got.ticket)
    at("done")


def loader(channel: Channel, address: str, instance: str, name: str, count: int, point: str) -> None:
    """Load `count` chunks and stop at a point, to be killed there."""
    session = open_session(address, instance)
    wanted = keys(count, name)

    def at(here: str) -> None:
        if here == point:
            channel.tell(here)
            channel.stay()

    got = session.load(wanted)
    at("leased")
    for index, place in enumerate(got.addresses[0]):
        assert is_whole(wanted[index], read(session, place))
        if index == count // 2:
            at("half read")
    at("read")
    session.done(got.ticket)
    at("done")


def churner(channel: Channel, address: str, instance: str, seed: int) -> None:
    """Save, verify and clear without end, to be killed at any instant; tells of every byte that is not right."""
    session = open_session(address, instance)
    draw = random.Random(seed)
    channel.tell("up")
    while True:
        wanted = keys(draw.randint(1, 8), f"churn-{draw.randint(0, 3)}")
        save(session, wanted, os.getpid())
        got = session.load(wanted)
        data = [read(session, place) for place in got.addresses[0]]
        if time.monotonic() < got.deadline_s:
            wrong = [index for index, it in enumerate(data) if not is_whole(wanted[index], it)]
            if wrong:
                channel.tell({"wrong": wrong})
        if got.ticket:
            session.done(got.ticket)
        if not draw.randint(0, 3):
            session.clear()


def holder(channel: Channel, address: str, instance: str) -> None:
    """Map the node's memory and stay: a process of an instance that keeps its lifeline."""
    link = Link(address, instance, maps=True, connect_s=5.0, call_s=5.0)
    channel.tell("up")
    channel.stay()
    link.close()


def serve(
    channel: Channel,
    address: str,
    *,
    checked: bool = False,
    quiet: bool = False,
    late: bool = False,
    **settings: Any,
) -> None:
    """A node process with the signal handling of `headwater node`: SIGTERM drains.

    `checked` asserts the cache's invariants at every tick; `late` has the start wait for a signal between the
    handlers and the socket.
    """
    if quiet:
        logging.disable(logging.WARNING)
    server: Server | None = None
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        if server is not None:
            server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    config = NodeConfig(**{"socket": address, "host_memory": 8 << 20, "slab": 64 << 10, **settings})
    node = Node(config)
    if late:
        channel.tell("starting")
        while not stopped:
            signal.sigtimedwait([], 0.01)
    try:
        server = Server(node)
    except ConfigError as error:
        node.close()
        channel.tell({"refused": str(error)})
        return
    if checked:
        plain = node.expire

        def expire() -> int:
            node.cache.check()
            return plain()

        node.expire = expire  # type: ignore[method-assign]
    if stopped:
        server.stop()
    channel.tell("up")
    server.serve_forever()
    node.cache.check()
    channel.tell({"ended": stopped, "own": own_things()})


def rival(channel: Channel, address: str) -> None:
    """One of many that start a node on one path at the same instant: it tells how that went and stays."""
    channel.tell("ready")
    channel.hear()
    try:
        listener = Listener(address)
    except ConfigError as error:
        channel.tell({"refused": str(error)})
        return
    channel.tell("won")
    channel.hear()
    listener.close()


def as_user(channel: Channel, user: int, action: str, **arguments: Any) -> None:
    """Try something as another, powerless user; tells the error's type and text."""
    available_bytes()  # loads what that user may not be able to read
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    try:
        {"connect": _connect, "lock": _lock, "listen": _listen}[action](**arguments)
    except (HeadwaterError, OSError) as error:
        channel.tell([type(error).__name__, str(error)])
        return
    channel.tell(["none", ""])
    channel.stay()


_kept: list[object] = []


def _connect(address: str) -> None:
    _kept.append(Link(address, "other", maps=True, connect_s=1.0, call_s=1.0))


def _listen(address: str) -> None:
    _kept.append(Listener(address))


def _lock(size_bytes: int, limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))
    create_memory(size_bytes, "memfd", lock=True)


def in_cgroup(channel: Channel, cgroup: str, size_bytes: int) -> None:
    """Create memory inside a memory cgroup; tells the error."""
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    try:
        create_memory(size_bytes, "memfd", lock=False).close()
    except HeadwaterError as error:
        channel.tell([type(error).__name__, str(error)])
        return
    channel.tell(["none", ""])


def own_things() -> dict[str, int]:
    """What this process has open: to be the same before and after."""
    threads = len(os.listdir("/proc/self/task"))
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threads}


def hello(instance: str = "raw", *, maps: bool = False) -> bytearray:
    """A good first frame."""
    return encode(Hello(PROTOCOL, headwater.__version__, instance, maps))


if __name__ == "__main__":
    serve_orders(int(sys.argv[1]), globals())
