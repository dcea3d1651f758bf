"""What the node's tests share: a node in this process, others in their own, and a way to wait for a fact."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.node.client import Link, Session
from headwater.node.driver import Node
from headwater.node.server import Server
from headwater.types import KVLayout, Namespace
from tests.node.peers import LAYOUT, ForkServer, namespace

STEP_S = 0.002


def eventually(fact: Callable[[], object], within_s: float = 5.0, seen: Callable[[], object] = str) -> float:
    """Wait until the fact holds and return how long that took; fails after `within_s` with what is `seen`."""
    begun_s = time.monotonic()
    while not fact():
        waited_s = time.monotonic() - begun_s
        assert waited_s < within_s, f"not so within {within_s} s: {seen()}"
        time.sleep(STEP_S)
    return time.monotonic() - begun_s


class MovedClock:
    """The real monotonic clock, moved forward as tests like."""

    def __init__(self) -> None:
        self.moved_s = 0.0

    def now(self) -> float:
        """See `ports.Clock`."""
        return time.monotonic() + self.moved_s


class Rig:
    """A node served by a thread of the test; look at its insides only while it has nothing to do."""

    def __init__(self, config: NodeConfig) -> None:
        self.clock = MovedClock()
        self.node = Node(config, self.clock)
        self.server = Server(self.node)
        self.address = config.socket
        self._opened: list[Link] = []
        # What escapes from its loop fails the test: pytest reports it.
        self._thread = threading.Thread(target=self.server.serve_forever, name="rig")
        self._thread.start()

    @property
    def cache(self):
        """The core."""
        return self.node.cache

    def link(self, instance: str, *, maps: bool = False, call_s: float = 5.0) -> Link:
        """A connection that ends with the test."""
        link = Link(self.address, instance, maps=maps, connect_s=5.0, call_s=call_s)
        self._opened.append(link)
        return link

    def session(
        self,
        instance: str,
        space: Namespace | None = None,
        layout: KVLayout = LAYOUT,
        *,
        maps: bool = False,
        call_s: float = 5.0,
    ) -> Session:
        """A registered session that ends with the test."""
        return Session(self.link(instance, maps=maps, call_s=call_s), space or namespace(layout), layout)

    def quiet(self, within_s: float = 5.0) -> float:
        """Wait until nobody holds anything; how long that took."""
        return eventually(lambda: not self.cache.tickets, within_s)

    def close(self) -> None:
        """Stop; the invariants must hold."""
        for link in self._opened:
            link.close()
        self.server.stop()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server does not end"
        self.cache.check()


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    """A small node at a path of its own."""
    path = tmp_path / "n.sock"
    return NodeConfig(socket=f"unix:{path}", host_memory=8 << 20, slab=64 << 10, prefault=False, drain_s=0.1)


@pytest.fixture
def rig(config: NodeConfig) -> Iterator[Rig]:
    """A node in this process."""
    rig = Rig(config)
    yield rig
    rig.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """What starts other processes."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def peers(fork_server: ForkServer) -> Iterator[ForkServer]:
    """Other processes, which end with the test."""
    yield fork_server
    fork_server.forget()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Room for a thousand connections, where the host allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptors(pid: int | str = "self") -> int:
    """How many file descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def anonymous_bytes(pid: int) -> int:
    """A process's own memory, without what it shares."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def needs_root() -> None:
    """Skip where the test cannot do what only root can."""
    if os.getuid() != 0:
        pytest.skip("needs root")


def closed(link: Link) -> bool:
    """Whether the node has closed this connection."""
    with suppress(BlockingIOError):
        link._socket.setblocking(False)
        return link._socket.recv(1) == b""
    return False
