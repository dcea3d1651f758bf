"""One bad client costs only itself: slow, silent, greedy and too many ones, while another is served as ever."""

from __future__ import annotations

import errno
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.node.client import Session, fetch_status
from headwater.node.messages import (
    FRAME_BYTES_MAX,
    Contains,
    Match,
    Message,
    Register,
    Reply,
    Request,
    Reserve,
    Reserved,
    Status,
    decode_reply,
    encode,
    unpack_addresses,
)
from headwater.node.server import FRAME_S, FRAMES_A_TURN, PENDING_BYTES_MAX, READ_BYTES
from headwater.node.server import Session as ServerSession
from headwater.types import ABSENT, pack_keys
from tests.node.conftest import Rig, descriptors, eventually
from tests.node.peers import LAYOUT, ForkServer, hello, keys, namespace, open_session, serve


class Crowd:
    """Bare connections, which end with the test."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sockets: list[socket.socket] = []

    def connected(self) -> socket.socket:
        """One that has said nothing."""
        it = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets.append(it)
        it.settimeout(5)
        it.connect(self.path)
        return it

    def greeted(self, instance: str = "bad") -> socket.socket:
        """One that has registered."""
        it = self.connected()
        it.sendall(hello(instance))
        assert it.recv(1 << 16)
        it.sendall(encode(Register(namespace(), LAYOUT)))
        assert it.recv(1 << 16)
        return it

    def close(self) -> None:
        for it in self.sockets:
            it.close()


@pytest.fixture
def crowd(rig: Rig) -> Iterator[Crowd]:
    crowd = Crowd(str(rig.server.listener.path))
    yield crowd
    crowd.close()


def is_closed(it: socket.socket) -> bool:
    it.setblocking(False)
    try:
        return it.recv(1 << 16) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def has_begun(session: ServerSession) -> bool:
    """Whether a part of a frame has come."""
    return bool(session.received)


@pytest.fixture
def healthy(rig: Rig) -> Session:
    session = rig.session("healthy")
    session.done(session.reserve(keys(4)).ticket)
    return session


PARTIAL = [
    b"",
    b"\x01",
    b"\x10\x00\x00",
    b"\x10\x00\x00\x00",
    bytes(encode(Status()))[:-1],
    FRAME_BYTES_MAX.to_bytes(4, "little") + b"x" * 1000,
]


@pytest.mark.parametrize("instance", ["", "known"])
def test_200_unfinished_frames_are_closed_in_time(
    rig: Rig, crowd: Crowd, healthy: Session, instance: str, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(index: int) -> socket.socket:
        it = crowd.greeted(f"{instance}{index}") if instance else crowd.connected()
        it.sendall(PARTIAL[index % len(PARTIAL)])
        return it

    bad = [slow(index) for index in range(200)]
    idle = [it for index, it in enumerate(bad) if instance and not PARTIAL[index % len(PARTIAL)]]
    late = [it for it in bad if it not in idle]
    begun = sum(bool(PARTIAL[index % len(PARTIAL)]) for index in range(200))
    eventually(lambda: rig.server.sessions == 201 and begun == sum(map(has_begun, rig.server._sessions.values())))
    rig.clock.moved_s += FRAME_S - 1
    for _ in range(5):
        assert healthy.match(keys(5), counts=False).chunks == 4
    assert not any(is_closed(it) for it in bad), "not before"
    for it in late[::2]:
        if not is_closed(it):
            it.sendall(b"\x00"[: 1 if it in late[::4] else 0])  # a byte more now and then buys no more time
    more = sum(not PARTIAL[index % len(PARTIAL)] for index in range(0, 200, 4)) if not instance else 0
    eventually(lambda: begun + more <= sum(map(has_begun, rig.server._sessions.values())) + rig.server.protocol_errors)
    rig.clock.moved_s += 2
    eventually(lambda: healthy.match(keys(5)).chunks == 4 and rig.server.sessions == 1 + len(idle))
    assert all(is_closed(it) for it in late)
    assert not any(is_closed(it) for it in idle), "a session with nothing to say may stay"
    assert rig.server.protocol_errors == len(late)
    assert sum("no whole frame" in it.message for it in caplog.records) < 5, "a crowd does not fill the log"


def test_a_frame_may_come_one_byte_at_a_time(rig: Rig, crowd: Crowd, healthy: Session) -> None:
    with crowd.connected() as it:
        for byte in hello() + encode(Register(namespace(), LAYOUT)) + encode(Match(0, pack_keys(keys(5)), False)):
            it.sendall(bytes([byte]))
        eventually(lambda: b"\x06\x04" in it.recv(1 << 16, socket.MSG_PEEK))
    assert healthy.match(keys(5)).chunks == 4


@pytest.mark.parametrize("excess", [0, 1, 2**32 - 1 - FRAME_BYTES_MAX])
def test_a_frame_that_is_announced_too_long_is_not_waited_for(
    rig: Rig, crowd: Crowd, healthy: Session, excess: int
) -> None:
    it = crowd.connected()
    it.sendall((FRAME_BYTES_MAX + excess).to_bytes(4, "little"))
    if excess:
        eventually(lambda: is_closed(it))
    else:
        eventually(lambda: any(map(has_begun, rig.server._sessions.values())))
    assert rig.server.protocol_errors == bool(excess)
    assert healthy.match(keys(5)).chunks == 4


def test_many_frames_may_come_at_once(rig: Rig, crowd: Crowd, healthy: Session) -> None:
    count = FRAMES_A_TURN * 5 + 3
    with crowd.greeted() as it:
        it.sendall(b"".join(encode(Match(0, pack_keys(keys(index % 5)), False)) for index in range(count)))
        assert [reply.chunks for reply in read_replies(it, count)] == [index % 5 for index in range(count)]
        it.sendall(encode(Match(0, pack_keys(keys(3)), False)))
        assert read_replies(it, 1)[0].chunks == 3
    assert not rig.server._backlog


def read_replies(it: socket.socket, count: int) -> list[Reply]:
    data, replies = bytearray(), []
    while len(replies) < count:
        part = it.recv(1 << 16)
        assert part, "closed"
        data += part
        while len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "little")):
            replies.append(decode_reply(bytes(data[4 : 4 + size])))
            del data[: 4 + size]
    return replies


def test_a_client_that_sends_much_at_once_does_not_keep_the_others_waiting(
    rig: Rig, crowd: Crowd, healthy: Session
) -> None:
    """All its frames are in the node's hands when the other's one request arrives."""
    order: list[str] = []
    at_work, go_on = threading.Event(), threading.Event()
    real = rig.node.handle

    def handle(instance: str, request: Request) -> Message:
        order.append(instance)
        if len(order) == 1:
            at_work.set()
            assert go_on.wait(5)
        return real(instance, request)

    frames = b"".join(encode(Match(0, b"", False)) for _ in range(2000))
    with crowd.greeted() as bad:
        rig.node.handle = handle  # type: ignore[method-assign,assignment]
        bad.sendall(frames)
        assert at_work.wait(5)
        healthy.link._socket.send(encode(Match(0, b"", False)))
        go_on.set()
        eventually(lambda: "healthy" in order)
        assert order.index("healthy") <= 2 * FRAMES_A_TURN
        assert len(read_replies(bad, 2000)) == 2000


def test_what_waits_for_its_turn_is_not_added_to(rig: Rig, crowd: Crowd, healthy: Session) -> None:
    """A client that sends faster than it is served: the rest waits in its own socket, not in the node."""
    frame, count = bytes(encode(Match(0, b"", False))), 60_000
    bad = crowd.greeted("bad")
    (session,) = (it for it in rig.server._sessions.values() if it.instance == "bad")
    most = 0
    real = rig.node.handle

    def handle(instance: str, request: Request) -> Message:
        nonlocal most
        most = max(most, len(session.received))
        return real(instance, request)

    rig.node.handle = handle  # type: ignore[method-assign,assignment]
    sender = threading.Thread(target=bad.sendall, args=(frame * count,))
    sender.start()
    assert len(read_replies(bad, count)) == count
    sender.join()
    assert len(frame) * count > 2 * READ_BYTES
    assert most < READ_BYTES + len(frame) * FRAMES_A_TURN


def test_a_client_gone_while_its_frames_wait_is_forgotten(rig: Rig, crowd: Crowd, healthy: Session) -> None:
    """It goes just after its first turn: its connection ends before its second."""
    waits, gone = threading.Event(), threading.Event()
    real = rig.server._watch

    def watch(session: ServerSession) -> None:
        real(session)
        if session in rig.server._backlog:
            waits.set()
            assert gone.wait(5)

    bad = crowd.greeted("bad")
    rig.server._watch = watch  # type: ignore[method-assign]
    bad.sendall(bytes(encode(Match(0, b"", False))) * 3000)
    assert waits.wait(5)
    bad.close()
    gone.set()
    eventually(lambda: rig.server.sessions == 1)
    assert healthy.match(keys(5)).chunks == 4
    assert not rig.server._backlog


def test_a_client_that_reads_nothing_is_not_answered_without_end(rig: Rig, crowd: Crowd, healthy: Session) -> None:
    frames = b"".join(encode(Status()) for _ in range(2000))
    most = 0
    with crowd.greeted("bad") as bad:
        bad.setblocking(False)
        (session,) = (it for it in rig.server._sessions.values() if it.instance == "bad")
        until_s = time.monotonic() + 1.0
        sent = 0
        while time.monotonic() < until_s:
            try:
                sent += bad.send(frames)
            except BlockingIOError:
                if most >= PENDING_BYTES_MAX and sent > 1 << 18:
                    break
            assert healthy.match(keys(5)).chunks == 4
            most = max(most, len(session.pending))
        for _ in range(50):
            assert healthy.match(keys(5)).chunks == 4
        assert PENDING_BYTES_MAX <= most < PENDING_BYTES_MAX + 65_536
        assert len(session.received) < 1 << 19
        handled = rig.server.calls["Status"]
        for _ in range(50):
            healthy.match(keys(5))
        assert rig.server.calls["Status"] == handled, "nothing more is done for it"
        rig.clock.moved_s += FRAME_S + 1
        eventually(lambda: healthy.match([]).chunks == 0 and rig.server.sessions == 1)


def test_a_client_that_reads_again_gets_all_its_answers(rig: Rig, crowd: Crowd, healthy: Session) -> None:
    count = 3000
    with crowd.greeted("bad") as bad:
        (session,) = (it for it in rig.server._sessions.values() if it.instance == "bad")
        sender = threading.Thread(target=bad.sendall, args=(b"".join(encode(Status()) for _ in range(count)),))
        sender.start()
        eventually(lambda: len(session.pending) >= PENDING_BYTES_MAX)
        assert healthy.match(keys(5)).chunks == 4
        assert len(read_replies(bad, count)) == count
        sender.join()
        eventually(lambda: not session.pending)
        bad.sendall(encode(Match(0, pack_keys(keys(5)), False)))
        assert read_replies(bad, 1)[0].chunks == 4


def test_a_client_gone_with_unread_answers_is_forgotten(rig: Rig, crowd: Crowd, healthy: Session) -> None:
    for _ in range(20):
        with crowd.greeted("bad") as bad:
            bad.sendall(b"".join(encode(Contains(0, bytes(16 * 4096))) for _ in range(3)))
            bad.setblocking(False)
    eventually(lambda: rig.server.sessions == 1)
    assert healthy.match(keys(5)).chunks == 4
    assert not rig.server._backlog


def test_out_of_descriptors_the_node_serves_whom_it_has_and_does_not_spin(
    rig: Rig, crowd: Crowd, healthy: Session, caplog: pytest.LogCaptureFixture
) -> None:
    real = rig.server.listener.socket
    tries = 0

    class NoRoom:
        """The listening socket of a process that has no descriptor left."""

        def accept(self) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            if full:
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        def fileno(self) -> int:
            return real.fileno()

        def close(self) -> None:
            real.close()

    full = True
    rig.server.listener.socket = NoRoom()  # type: ignore[assignment]
    with crowd.connected() as waiting:
        waiting.sendall(hello())
        eventually(lambda: tries == 1)
        for _ in range(200):
            assert healthy.match(keys(5)).chunks == 4
        assert tries <= 2, "each try is a line in the log and a turn of the loop"
        full = False
        rig.clock.moved_s += 1
        assert waiting.recv(1 << 16), "it waited in the queue and is served now"
    assert sum("cannot accept" in it.message for it in caplog.records) == 1


def test_a_node_without_descriptors_recovers_by_itself(peers: ForkServer, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/n.sock"
    node = peers.start(serve, address=address, prefault=False, quiet=True)
    assert node.hear() == "up"
    healthy = open_session(address, "healthy")
    room = descriptors(node.pid) + 10
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (room, room))
    crowd = Crowd(address.removeprefix("unix:"))
    for _ in range(20):
        crowd.connected().sendall(hello("crowd", maps=True))
    for _ in range(100):
        assert healthy.match(keys(1)).chunks == 0
    crowd.close()
    eventually(lambda: open_and_close(address))
    assert healthy.match(keys(1)).chunks == 0
    healthy.close()


def open_and_close(address: str) -> bool:
    open_session(address, "again").close()
    return True


@pytest.fixture
def big(config: NodeConfig, many_descriptors: None) -> Iterator[Rig]:
    rig = Rig(replace(config, max_sessions=2000))
    yield rig
    rig.close()


def test_512_engines_that_reserve_the_same_chunks_at_once(big: Rig) -> None:
    sessions = [big.session(f"i{index}") for index in range(512)]
    wanted = keys(8)
    frame = encode(Reserve(0, b"", pack_keys(wanted), (), (0,)))
    for it in sessions:
        it.link._socket.send(frame)
    writers = []
    for it in sessions:
        (reply,) = read_replies(it.link._socket, 1)
        assert isinstance(reply, Reserved)
        assert reply.covered == 8
        (places,) = unpack_addresses(reply.addresses)
        if reply.ticket:
            assert ABSENT not in places
            writers.append((it, reply.ticket))
        else:
            assert places == (ABSENT,) * 8
    assert len(writers) == 1, "exactly one writes"
    assert big.cache.pool.taken_slots == 8
    assert sessions[-1].match(wanted).chunks == 0
    writer, ticket = writers[0]
    writer.done(ticket)
    assert {it.match(wanted).chunks for it in sessions} == {8}


def test_512_engines_that_want_different_heads_of_one_prompt(big: Rig) -> None:
    """Whoever comes first writes what is missing; together they write each chunk once."""
    wanted = keys(64)
    sessions = [big.session(f"i{index}") for index in range(512)]
    for index, it in enumerate(sessions):
        count = 1 + (index * 7) % 64
        it.link._socket.send(encode(Reserve(0, b"", pack_keys(wanted[:count]), (), (0,))))
    written: list[int] = []
    for it in sessions:
        (reply,) = read_replies(it.link._socket, 1)
        assert isinstance(reply, Reserved)
        (places,) = unpack_addresses(reply.addresses)
        written += [place for place in places if place != ABSENT]
        if reply.ticket:
            it.done(reply.ticket)
    assert len(written) == len(set(written)) == 64
    assert sessions[0].match(wanted).chunks == 64


def test_a_full_node_saves_a_shorter_prefix(config: NodeConfig) -> None:
    rig = Rig(replace(config, host_memory=1 << 20))
    try:
        one, two = rig.session("a"), rig.session("b")
        got = one.reserve(keys(200))
        assert got.covered == 128, "as far as there is room"
        assert two.reserve(keys(3, "other")).covered == 0, "what is being written is not evicted"
        one.done(got.ticket)
        assert two.reserve(keys(3, "other")).covered == 3
        assert one.match(keys(200)).chunks == 125
        assert fetch_status(rig.address)["host"]["taken_bytes"] == 1 << 20
    finally:
        rig.close()
