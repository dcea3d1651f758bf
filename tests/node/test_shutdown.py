"""SIGTERM, at any time and twice: a node ends soon, lets running copies finish, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headwater.config import NodeConfig
from headwater.errors import HeadwaterError, UnavailableError
from headwater.node.client import Session, fetch_status
from headwater.node.driver import Node
from headwater.node.server import Server
from tests.node.conftest import Rig, anonymous_bytes, descriptors, eventually
from tests.node.peers import ForkServer, Peer, keys, open_session, save, serve

SOON_S = 1.0


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/n.sock"


def started(peers: ForkServer, address: str, **settings: Any) -> Peer:
    node = peers.start(serve, address=address, prefault=False, **settings)
    assert node.hear() == "up"
    return node


def left_behind(address: str) -> list[str]:
    return sorted(os.listdir(Path(address.removeprefix("unix:")).parent))


def test_an_idle_node_ends_at_once(peers: ForkServer, address: str) -> None:
    node = started(peers, address)
    session = open_session(address, "a")
    session.done(session.reserve(keys(3)).ticket)
    begun_s = time.monotonic()
    node.signal(signal.SIGTERM)
    (said,) = node.ended()
    assert time.monotonic() - begun_s < SOON_S
    assert said["ended"] == [signal.SIGTERM]
    assert left_behind(address) == []
    with pytest.raises(UnavailableError):
        session.match(keys(1))


def test_a_running_save_may_finish(peers: ForkServer, address: str) -> None:
    node = started(peers, address, drain_s=30.0)
    session, other = open_session(address, "a"), open_session(address, "b", maps=False)
    got = session.reserve(keys(3))
    node.signal(signal.SIGTERM)
    eventually(lambda: fetch_status(address)["draining"], SOON_S)
    assert other.reserve(keys(1, "late")).covered == 0
    assert session.load(keys(3)).ticket == 0, "nothing new begins"
    assert other.match(keys(3)).chunks == 0, "and questions are still answered"
    assert session.done(got.ticket), "what runs may end, and is told so"
    begun_s = time.monotonic()
    node.ended()
    assert time.monotonic() - begun_s < SOON_S
    assert left_behind(address) == []
    other.close()
    session.close()


def test_a_save_that_never_ends_delays_the_node_by_drain_s_and_no_more(peers: ForkServer, address: str) -> None:
    node = started(peers, address, drain_s=0.5)
    session = open_session(address, "a")
    session.reserve(keys(3))
    begun_s = time.monotonic()
    node.signal(signal.SIGTERM)
    node.ended()
    assert 0.5 <= time.monotonic() - begun_s < 0.5 + SOON_S
    assert left_behind(address) == []
    session.close()


def test_the_death_of_the_last_client_ends_the_drain(peers: ForkServer, address: str) -> None:
    node = started(peers, address, drain_s=30.0)
    session, other = open_session(address, "a"), open_session(address, "b")
    session.reserve(keys(3))
    node.signal(signal.SIGTERM)
    eventually(lambda: fetch_status(address)["draining"], SOON_S)
    session.close()
    begun_s = time.monotonic()
    node.ended()
    assert time.monotonic() - begun_s < SOON_S
    other.close()


def test_many_signals_are_one(peers: ForkServer, address: str) -> None:
    node = started(peers, address, drain_s=0.3)
    session = open_session(address, "a")
    session.reserve(keys(3))
    for _ in range(200):
        node.signal(signal.SIGTERM)
        node.signal(signal.SIGINT)
    (said,) = node.ended()
    assert {*said["ended"]} == {signal.SIGTERM, signal.SIGINT}
    assert left_behind(address) == []
    session.close()


def test_a_signal_inside_the_handler_of_another_does_no_harm(rig: Rig) -> None:
    """The second SIGTERM may come at any line of `stop`; here it comes at each."""
    server = rig.server
    real = server._wake_write

    class Reentrant:
        """A wake-up during which the next signal comes."""

        depth = 0

        def send(self, data: bytes) -> int:
            self.depth += 1
            if self.depth < 5:
                server.stop()
            return real.send(data)

        def close(self) -> None:
            real.close()

    server._wake_write = Reentrant()  # type: ignore[assignment]
    server.stop()
    rig._thread.join(5)
    assert not rig._thread.is_alive()


def test_a_signal_during_the_start_ends_it(peers: ForkServer, address: str) -> None:
    node = peers.start(serve, address=address, late=True)
    assert node.hear() == "starting"
    begun_s = time.monotonic()
    node.signal(signal.SIGTERM)
    assert node.ended()[0] == "up"
    assert time.monotonic() - begun_s < SOON_S
    assert left_behind(address) == []


def test_a_node_ends_while_it_is_still_touching_its_memory(peers: ForkServer, address: str) -> None:
    node = peers.start(serve, address=address, prefault=True, host_memory=512 << 20, slab=1 << 20)
    assert node.hear() == "up"
    begun_s = time.monotonic()
    node.signal(signal.SIGTERM)
    node.ended()
    assert time.monotonic() - begun_s < SOON_S


def test_an_uncaught_failure_leaves_nothing_either(config: NodeConfig) -> None:
    before = descriptors()
    server = Server(Node(config))

    def fail() -> int:
        raise KeyboardInterrupt

    server.node.expire = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        server.serve_forever()
    assert left_behind(config.socket) == []
    assert descriptors() == before


def test_30_cycles_leave_nothing(config: NodeConfig, tmp_path: Path) -> None:
    """Socket, lock, descriptors, threads, shared memory and memory are what they were."""

    def cycle() -> None:
        rig = Rig(config)
        session = rig.session("a", maps=True)
        save(session, keys(100))
        session.load(keys(100))
        rig.close()

    def own() -> tuple[int, int, int]:
        shared = [name for name in os.listdir("/dev/shm") if "headwater" in name]
        return descriptors(), len(os.listdir("/proc/self/task")), len(shared)

    gc.collect()
    for _ in range(3):
        cycle()
    before, memory = own(), anonymous_bytes(os.getpid())
    shared = mapped_bytes()
    for _ in range(30):
        cycle()
    # No more than before: what an earlier test let go of may only now be gone.
    eventually(lambda: all(now <= then for now, then in zip(own(), before, strict=True)), seen=own)
    assert mapped_bytes() == shared
    assert list(tmp_path.iterdir()) == []
    grown = anonymous_bytes(os.getpid()) - memory
    assert grown < 8 << 20, f"{grown} bytes more"


def mapped_bytes() -> int:
    """Bytes of node memory that this process maps."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:headwater" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


def test_30_processes_leave_nothing(peers: ForkServer, address: str) -> None:
    for turn in range(30):
        node = started(peers, address)
        session: Session | None = open_session(address, "a") if turn % 3 else None
        if session is not None:
            save(session, keys(10))
        node.signal((signal.SIGTERM, signal.SIGINT)[turn % 2])
        node.ended()
        assert left_behind(address) == []
        if session is not None:
            session.close()
    assert not [name for name in os.listdir("/dev/shm") if "headwater" in name]


def test_a_node_that_is_draining_keeps_its_path(peers: ForkServer, address: str) -> None:
    node = started(peers, address, drain_s=30.0)
    session = open_session(address, "a")
    got = session.reserve(keys(1))
    node.signal(signal.SIGTERM)
    eventually(lambda: fetch_status(address)["draining"], SOON_S)
    second = peers.start(serve, address=address)
    assert "another node" in second.hear()["refused"]
    session.done(got.ticket)
    node.ended()
    third = started(peers, address)
    with pytest.raises(HeadwaterError):
        session.match([])
    third.signal(signal.SIGTERM)
    third.ended()
