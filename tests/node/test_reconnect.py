"""A node that stands still, dies or comes back: nobody waits for it longer than told, and nobody need help it."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.errors import HeadwaterError, RefusedError, UnavailableError
from headwater.node.address import Listener
from headwater.node.client import Link, Session, Supervisor
from headwater.node.messages import (
    PROTOCOL,
    Match,
    Matched,
    Message,
    Register,
    Registered,
    Status,
    StatusReply,
    Welcome,
    encode,
)
from headwater.node.server import Session as ServerSession
from tests.node.conftest import Rig, descriptors, eventually
from tests.node.peers import LAYOUT, ForkServer, Peer, keys, namespace, save, serve

CALL_S = 0.3
LATE_S = 0.2
HEAL_S = 10.0


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/n.sock"


def start_node(peers: ForkServer, address: str) -> Peer:
    node = peers.start(serve, address=address, prefault=False, drain_s=0.1)
    assert node.hear() == "up"
    return node


def session_at(address: str, instance: str = "engine") -> Session:
    link = Link(address, instance, maps=True, connect_s=CALL_S, call_s=CALL_S)
    try:
        return Session(link, namespace(), LAYOUT)
    except HeadwaterError:
        link.close()
        raise


@pytest.fixture
def supervise() -> Iterator[Callable[[str], Supervisor]]:
    opened: list[Supervisor] = []

    def open_one(address: str, refusals: list[HeadwaterError] | None = None) -> Supervisor:
        noted = [] if refusals is None else refusals
        opened.append(Supervisor(lambda: session_at(address), noted.append))
        return opened[-1]

    yield open_one
    for it in opened:
        it.close()


def fails_in(act: Callable[[], object], kind: type[HeadwaterError] = UnavailableError) -> float:
    """How long it took to fail."""
    begun_s = time.monotonic()
    with pytest.raises(kind):
        act()
    return time.monotonic() - begun_s


def test_a_call_to_a_node_that_stands_still_ends_in_time(peers: ForkServer, address: str) -> None:
    node = start_node(peers, address)
    session = session_at(address)
    node.signal(signal.SIGSTOP)
    assert CALL_S <= fails_in(lambda: session.match(keys(1))) < CALL_S + LATE_S
    assert fails_in(lambda: session.match(keys(1))) < 0.01, "and is not tried again on this link"


def test_so_does_a_call_that_the_socket_cannot_take_whole(peers: ForkServer, address: str) -> None:
    """A megabyte of keys fills the socket's buffer: the time goes by while sending, not while receiving."""
    node = start_node(peers, address)
    session = session_at(address)
    packed = bytes(16 * 65_536)
    assert session.link.call(Match(session._space, packed, False), Matched).chunks == 0
    node.signal(signal.SIGSTOP)
    assert CALL_S <= fails_in(lambda: session.contains_packed(packed)) < CALL_S + LATE_S


def test_so_does_a_connection(peers: ForkServer, address: str) -> None:
    node = start_node(peers, address)
    node.signal(signal.SIGSTOP)
    assert CALL_S <= fails_in(lambda: session_at(address)) < CALL_S + LATE_S


def test_so_does_a_call_whose_reply_comes_drop_by_drop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drop comes in time for its own wait; together they do not."""
    link = rig.link("a", call_s=CALL_S)
    enough = threading.Event()

    def drip(session: ServerSession, message: Message) -> None:
        def run() -> None:
            for byte in (1000).to_bytes(4, "little") + bytes(1000):
                if enough.wait(CALL_S / 3):
                    return
                with suppress(BrokenPipeError):  # it has had enough
                    session.socket.send(bytes([byte]))

        monkeypatch.undo()
        drips.append(threading.Thread(target=run))
        drips[-1].start()

    drips: list[threading.Thread] = []
    monkeypatch.setattr(rig.server, "_send", drip)
    spent_s = fails_in(lambda: link.call(Status(), StatusReply), HeadwaterError)
    enough.set()
    drips[0].join()
    assert spent_s < CALL_S + LATE_S


def test_time_spent_on_sending_is_not_there_for_receiving(address: str) -> None:
    """A node that takes a large request late, and then says nothing."""
    listener = Listener(address)
    listener.socket.setblocking(True)
    late, over = threading.Event(), threading.Event()

    def run() -> None:
        accepted, _ = listener.socket.accept()
        with accepted:
            accepted.recv(1 << 16)
            accepted.sendall(encode(Welcome(PROTOCOL, "x", "fake", 1, ())))
            late.wait(CALL_S * 0.8)
            accepted.recv(1 << 21, socket.MSG_WAITALL)
            over.wait(5)

    node = threading.Thread(target=run)
    node.start()
    link = Link(address, "a", maps=False, connect_s=5, call_s=CALL_S)
    spent_s = fails_in(lambda: link.call(Match(0, bytes(16 * 65_536), False), Matched))
    over.set()
    link.close()
    node.join()
    listener.close()
    assert spent_s < CALL_S + LATE_S


def test_one_call_may_have_a_time_of_its_own(peers: ForkServer, address: str) -> None:
    node = start_node(peers, address)
    link = Link(address, "a", maps=False, connect_s=CALL_S, call_s=30.0)
    assert link.call(Status(), StatusReply, call_s=0.05)
    assert link.call(Status(), StatusReply)
    node.signal(signal.SIGSTOP)
    assert fails_in(lambda: link.call(Status(), StatusReply, call_s=0.05)) < 0.05 + LATE_S


def test_no_node_is_known_at_once(address: str) -> None:
    assert fails_in(lambda: session_at(address)) < 0.1


def test_an_interrupted_call_is_not_answered_by_the_next_ones_reply(rig: Rig) -> None:
    link = rig.link("a")
    real = link._exchange

    def interrupted(frame: bytearray, call_s: float) -> object:
        link._socket.send(frame)
        raise KeyboardInterrupt

    link._exchange = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        link.call(Register(namespace(), LAYOUT), Registered)
    link._exchange = real  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        link.call(Register(namespace(), LAYOUT), Registered)


# ---- the supervisor --------------------------------------------------------------------------------------


def test_a_node_that_stands_still_costs_one_call_and_heals(peers: ForkServer, address: str, supervise) -> None:
    node = start_node(peers, address)
    supervisor = supervise(address)
    session = supervisor.session
    node.signal(signal.SIGSTOP)
    assert fails_in(lambda: session.match(keys(1))) < CALL_S + LATE_S
    begun_s = time.monotonic()
    supervisor.lost(session)
    for _ in range(100):
        assert supervisor.session is None, "the next callers go on without"
    assert time.monotonic() - begun_s < 0.1
    eventually(lambda: len(peers_waiting(address)) > 1, HEAL_S)
    node.signal(signal.SIGCONT)
    waited_s = eventually(lambda: supervisor.session is not None, HEAL_S)
    print(f"healed after {waited_s:.3f} s")
    assert supervisor.session.match(keys(1)).chunks == 0
    assert supervisor.connects == 2


def peers_waiting(address: str) -> list[str]:
    """Connections to a socket, accepted or not."""
    path = address.removeprefix("unix:")
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(f" {path}")]


def test_a_killed_node_is_found_again_at_its_path(peers: ForkServer, address: str, supervise) -> None:
    node = start_node(peers, address)
    supervisor = supervise(address)
    session = supervisor.session
    save(session, keys(3))
    ticket = session.load(keys(3)).ticket
    before = session.link.node
    node.kill()
    assert fails_in(lambda: session.match(keys(1))) < 0.1
    supervisor.lost(session)
    start_node(peers, address)
    waited_s = eventually(lambda: supervisor.session is not None, HEAL_S)
    print(f"healed after {waited_s:.3f} s")
    session = supervisor.session
    name, epoch = session.link.node
    assert name != before[0]
    assert epoch > before[1]
    assert session.match(keys(3)).chunks == 0, "it is empty"
    assert not session.done(ticket), "and knows nothing of tickets of its earlier life"
    assert session.release([ticket]) == 0
    new = session.reserve(keys(3)).ticket
    assert new > ticket, "nor gives their numbers out again"


def test_20_restarts_leak_neither_threads_nor_descriptors(peers: ForkServer, address: str, supervise) -> None:
    node = start_node(peers, address)
    supervisor = supervise(address)
    before: tuple[int, int] | None = None
    longest_s = 0.0
    for turn in range(20):
        session = supervisor.session
        save(session, keys(2, f"{turn}"))
        node.kill()
        with pytest.raises(HeadwaterError):
            session.match([])
        supervisor.lost(session)
        node = start_node(peers, address)
        longest_s = max(longest_s, eventually(lambda: supervisor.session is not None, HEAL_S))
        now = (descriptors(), threading.active_count())
        before = before or now
        assert now == before, turn
    print(f"longest: {longest_s:.3f} s")
    assert supervisor.connects == 21


def test_a_session_lost_as_soon_as_it_is_there_is_replaced(rig: Rig, supervise) -> None:
    """A caller may report the loss before the thread that connected has gone back to waiting."""
    supervisor = supervise(rig.address)
    for turn in range(2, 30):
        session = supervisor.session
        supervisor.lost(session)
        eventually(lambda: supervisor.session is not None, HEAL_S)
        assert supervisor.connects == turn


def test_the_loss_reported_inside_the_connection_is_not_missed(rig: Rig) -> None:
    """The same race, made certain: the loss comes right after the session is put in place."""
    lost_once = threading.Event()

    class Racing(Supervisor):
        def _try_once(self) -> bool:
            done = super()._try_once()
            if done and self.connects == 2 and not lost_once.is_set():
                lost_once.set()
                self.lost(self.session)
            return done

    supervisor = Racing(lambda: session_at(rig.address), lambda error: None)
    try:
        supervisor.lost(supervisor.session)
        eventually(lambda: supervisor.connects == 3, HEAL_S)
        assert supervisor.session.match([]).chunks == 0
    finally:
        supervisor.close()


def test_a_loss_reported_twice_or_late_ends_no_new_session(rig: Rig, supervise) -> None:
    supervisor = supervise(rig.address)
    old = supervisor.session
    supervisor.lost(old)
    eventually(lambda: supervisor.session is not None)
    new = supervisor.session
    supervisor.lost(old)
    assert supervisor.session is new
    assert new.match([]).chunks == 0


def test_engines_may_start_before_the_node(peers: ForkServer, address: str, supervise) -> None:
    supervisor = supervise(address)
    assert supervisor.session is None
    start_node(peers, address)
    eventually(lambda: supervisor.session is not None, HEAL_S)


def test_a_refusal_is_told_once_and_heals_when_the_node_is_mended(config: NodeConfig, monkeypatch) -> None:
    monkeypatch.setattr(Supervisor, "BACK_OFF_S", (0.01, 0.02))
    refusals: list[HeadwaterError] = []
    rig = Rig(replace(config, require={"tenant": "blue"}))
    supervisor = Supervisor(lambda: session_at(config.socket), refusals.append)
    try:
        assert isinstance(supervisor.refusal, RefusedError)
        eventually(lambda: rig.node.refused >= 4)
        assert supervisor.session is None
        assert len(refusals) == 1
        rig.close()
        rig = Rig(config)
        eventually(lambda: supervisor.session is not None, HEAL_S)
        assert supervisor.refusal is None
    finally:
        supervisor.close()
        rig.close()


def counted(connect: Callable[[], Session], many: int, wait_s: float) -> list[float]:
    """How long a supervisor wanted to wait before so many connections and more; it waits for `wait_s` instead."""
    waits: list[float] = []

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return super().wait(wait_s)

    closed = Closed()

    class Counted(Supervisor):
        """Has this event from the beginning on."""

        _closed = property(lambda self: closed, lambda self, event: None)

    supervisor = Counted(connect, lambda error: None)
    try:
        eventually(lambda: len(waits) > many)
    finally:
        supervisor.close()
    return waits


def test_refused_clients_are_in_no_hurry(rig: Rig, supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.node.client.random.uniform", lambda low, high: high)
    waits = counted(lambda: Session(rig.link("x"), namespace(groups="bad"), LAYOUT), 3, 0.001)
    assert set(waits) == {5.0}


def test_back_off_grows_is_jittered_and_bounded(address: str) -> None:
    waits = counted(lambda: session_at(address), 12, 0.0)
    grown = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert len({round(wait / most, 3) for wait, most in zip(waits, grown, strict=False)}) > 3, "jitter"
    tail = waits[-4:]
    assert all(2.5 <= wait <= 5.0 for wait in tail)


def test_closing_a_supervisor_ends_its_thread_and_its_session(rig: Rig) -> None:
    before, threads = descriptors(), threading.active_count()
    supervisor = Supervisor(lambda: session_at(rig.address), lambda error: None)
    assert threading.active_count() == threads + 1
    supervisor.close()
    assert threading.active_count() == threads
    eventually(lambda: descriptors() == before)
    assert supervisor.session is None


def test_a_connection_under_way_when_it_closes_is_closed_too(rig: Rig) -> None:
    connecting, closing, never = threading.Event(), threading.Event(), threading.Event()

    def connect() -> Session:
        if threading.current_thread() is threading.main_thread():
            raise UnavailableError("not yet")
        connecting.set()
        closing.wait(5)
        never.wait(0.05)  # it takes a little longer than the call of close
        return session_at(rig.address)

    supervisor = Supervisor(connect, lambda error: None)
    assert connecting.wait(5)
    closing.set()
    supervisor.close()
    assert not supervisor._thread.is_alive()
    assert supervisor.session is None
    eventually(lambda: rig.server.sessions == 0)
