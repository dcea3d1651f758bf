"""A hundred thousand bad inputs over real sockets: the node serves its honest client all the while, keeps nothing."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from headwater.errors import ProtocolError
from headwater.node.client import Session, fetch_status
from headwater.node.messages import Loaded, Register, Request, Reserved, decode_reply, decode_request, encode
from tests.node.conftest import anonymous_bytes, descriptors, eventually
from tests.node.fuzz import BIG, Inputs
from tests.node.peers import LAYOUT, ForkServer, Peer, hello, keys, namespace, open_session, serve

GROWTH_BYTES = 16 << 20
ANSWER_S = 1.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"unix:{tmp_path_factory.mktemp('fuzz')}/n.sock"


@pytest.fixture(scope="module")
def node(fork_server: ForkServer, address: str) -> Iterator[Peer]:
    """One node for all of this file, whose invariants are asserted twice a second."""
    node = fork_server.start(serve, address=address, checked=True, quiet=True, prefault=False, drain_s=0.1)
    assert node.hear() == "up"
    yield node
    node.signal(15)
    (said,) = node.ended()
    assert said["ended"] == [15], said


@pytest.fixture(scope="module")
def healthy(node: Peer, address: str) -> Iterator[Session]:
    session = open_session(address, "healthy", call_s=ANSWER_S)
    path = address.removeprefix("unix:")
    for _ in range(2):  # what grows once, at the first use, has grown before it is measured
        shoot(path, [Inputs(0).garbage() for _ in range(200)])
        for it in BIG:
            shout(path, it)
    yield session
    session.close()


@pytest.fixture(autouse=True)
def unharmed(node: Peer, healthy: Session) -> Iterator[None]:
    """What must hold after each test: answers, memory, descriptors."""
    before = settled(node, healthy), anonymous_bytes(node.pid)
    yield
    after = settled(node, healthy), anonymous_bytes(node.pid)
    assert after[0] == before[0], "descriptors"
    print(f"memory: {(after[1] - before[1]) / 1e6:+.1f} MB")
    assert after[1] - before[1] <= GROWTH_BYTES


def settled(node: Peer, healthy: Session) -> int:
    """Wait until the node has only its honest client; its descriptors."""
    eventually(lambda: not any(fetch_status(path_of(healthy))["tickets"].values()))
    assert answers(healthy) < ANSWER_S
    counts: list[int] = []

    def steady() -> bool:
        healthy.match([])
        counts.append(descriptors(node.pid))
        return counts[-5:] == counts[-1:] * 5

    eventually(steady)
    return counts[-1]


def path_of(session: Session) -> str:
    return f"unix:{session.link._socket.getpeername()}"


def answers(healthy: Session) -> float:
    """How long an honest request takes, at worst of a few."""
    worst_s = 0.0
    for turn in range(3):
        begun_s = time.monotonic()
        got = healthy.reserve(keys(3, f"honest-{turn}"))
        assert healthy.release([got.ticket]) == (1 if got.ticket else 0)
        worst_s = max(worst_s, time.monotonic() - begun_s)
    return worst_s


def connect(path: str) -> socket.socket:
    it = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    it.connect(path)  # waits while the queue is full, as a socket with a time-out would not
    return it


def shoot(path: str, inputs: list[bytes], first: bytes = b"") -> None:
    """Each input on a connection of its own, many connections at a time."""
    for start in range(0, len(inputs), 100):
        opened = []
        for it in inputs[start : start + 100]:
            opened.append(connect(path))
            try:
                opened[-1].sendall(first + it)
            except (BrokenPipeError, ConnectionResetError):  # closed in the middle of it
                continue
        for connection in opened:
            connection.close()


def exchange(connection: socket.socket, frames: list[bytes]) -> tuple[list[bytes], bool]:
    """Send frames in one go; the replies, and whether the node closed before all were answered."""
    data, replies = bytearray(), []
    todo = memoryview(b"".join(frames))
    connection.setblocking(False)
    while len(replies) < len(frames):
        readable, writable, _ = select.select([connection], [connection] if todo else [], [], 20)
        assert readable or writable, "the node does not answer"
        try:
            if writable:
                todo = todo[connection.send(todo) :]
            part = connection.recv(1 << 18) if readable else None
        except (BrokenPipeError, ConnectionResetError):
            return replies, True
        if part == b"":
            return replies, True
        data += part or b""
        start = 0
        while len(data) - start >= 4:
            end = start + 4 + int.from_bytes(data[start : start + 4], "little")
            if len(data) < end:
                break
            replies.append(bytes(data[start + 4 : end]))
            start = end
        del data[:start]
    return replies, False


def shout(path: str, draw: Callable[[], Request]) -> None:
    """One message on a connection that is registered, and the node's answer to it."""
    with connect(path) as connection:
        exchange(connection, [bytes(hello("fuzz")), bytes(encode(Register(namespace(), LAYOUT)))])
        exchange(connection, [bytes(encode(draw()))])


def converse(path: str, inputs: Inputs, count: int, draw: Callable[[], bytes]) -> int:
    """Frames by the dozen on connections that are registered, and a new one whenever the node has had enough.

    A connection of the same instance stays open, so that its tickets live on. How many frames were judged.
    """
    opening = [bytes(hello("fuzz")), bytes(encode(Register(namespace(), LAYOUT)))]
    judged = 0
    with connect(path) as anchor:
        assert len(exchange(anchor, opening)[0]) == 2
        while judged < count:
            with connect(path) as connection:
                closed = len(exchange(connection, opening)[0]) != 2
                while not closed and judged < count:
                    replies, closed = exchange(connection, [draw() for _ in range(64)])
                    judged += len(replies) + closed
                    for it in map(decode_reply, replies):
                        if isinstance(it, Loaded | Reserved) and it.ticket:
                            inputs.tickets.append(it.ticket)
                    del inputs.tickets[:-100]
    return judged


def test_only_protocol_errors_come_out_of_decoding(seed: int) -> None:
    print(f"seed {seed}")
    inputs = Inputs(seed)
    good = 0
    for _ in range(30_000):
        body = inputs.garbage()[4:]
        for decode in (decode_request, decode_reply):
            try:
                decode(body)
                good += 1
            except ProtocolError:
                continue
    assert good > 100, "some mutations are harmless, or nothing was tried"


def test_garbage_as_first_words(address: str, healthy: Session, seed: int) -> None:
    print(f"seed {seed}")
    inputs = Inputs(seed + 1)
    for _ in range(10):
        shoot(address.removeprefix("unix:"), [inputs.garbage() for _ in range(1500)])
        assert answers(healthy) < ANSWER_S


def test_garbage_after_the_handshake(address: str, healthy: Session, seed: int) -> None:
    print(f"seed {seed}")
    inputs = Inputs(seed + 2)
    first = bytes(hello("fuzz")) + bytes(encode(Register(namespace(), LAYOUT)))
    for _ in range(10):
        shoot(address.removeprefix("unix:"), [inputs.garbage() for _ in range(1500)], first)
        assert answers(healthy) < ANSWER_S


def test_messages_with_absurd_values(address: str, healthy: Session, seed: int) -> None:
    print(f"seed {seed}")
    inputs = Inputs(seed + 3)
    judged = 0
    while judged < 35_000:
        judged += converse(address.removeprefix("unix:"), inputs, 7000, lambda: bytes(encode(inputs.hostile())))
        assert answers(healthy) < ANSWER_S
    state = fetch_status(address)
    space = state["namespaces"][0]
    assert space["stored_chunks"] > 500, "much of it was good enough to be served"
    assert space["evicted_bytes"] > 0
    assert space["failed_chunks"] > 50


def test_messages_as_large_as_can_be(address: str, healthy: Session, seed: int) -> None:
    print(f"seed {seed}")
    inputs = Inputs(seed + 4)
    for _ in range(3):
        for _ in range(15):
            shout(address.removeprefix("unix:"), inputs.big)
        assert answers(healthy) < ANSWER_S


def test_one_byte_at_a_time(address: str, healthy: Session, seed: int) -> None:
    print(f"seed {seed}")
    inputs = Inputs(seed + 5)
    for _ in range(100):
        with connect(address.removeprefix("unix:")) as connection:
            try:
                for byte in inputs.garbage()[:200]:
                    connection.send(bytes([byte]))
            except (BrokenPipeError, ConnectionResetError):
                continue
    assert answers(healthy) < ANSWER_S
