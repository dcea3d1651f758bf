"""What the cluster's demo and tests stand on: hosts in namespaces, loopback relays, and a guard for child processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.config import child_environment
from headwater.demo import namespaces
from headwater.demo.cluster_stage import open_network
from headwater.demo.guard import GuardedChildren
from headwater.demo.loopback import Loopback
from headwater.demo.namespaces import PEER_PORT, Lab
from headwater.errors import ResourceError
from tests.node.conftest import eventually

PATH = {"PATH": "/usr/bin:/bin"}
SILENCE_S = 0.2
PARENT = """
import sys, time
from pathlib import Path
from headwater.demo.guard import GuardedChildren
from headwater.demo.namespaces import Lab
from contextlib import nullcontext
with GuardedChildren() as children:
    lab = Lab(["A"]) if sys.argv[2] == "lab" else None
    with lab.at("A") if lab else nullcontext():
        first, second = (children.start(name, ["sleep", "60"], {"PATH": "/usr/bin:/bin"}, Path(sys.argv[1])) for name in "ab")
    children.end(first)
    print(first.group, second.group, flush=True)
    time.sleep(60)
"""  # noqa: E501


def connected(server: socket.socket, connect: Callable[[], socket.socket]) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    near = connect()
    far, _ = server.accept()
    far.settimeout(10.0)
    return near, far


def is_silent(it: socket.socket) -> bool:
    """Whether nothing comes for a while."""
    it.settimeout(SILENCE_S)
    try:
        return it.recv(1, socket.MSG_PEEK) == b"impossible"
    except TimeoutError:
        return True
    finally:
        it.settimeout(10.0)


def test_hosts_reach_each_other_until_a_link_is_cut(lab: Lab) -> None:
    with lab.at("A"):
        server = socket.create_server(("0.0.0.0", PEER_PORT))

    def connect() -> socket.socket:
        with lab.at("B"):
            return socket.create_connection((lab.hosts["A"].address, PEER_PORT), 2.0)

    near, far = connected(server, connect)
    with server, near, far:
        assert near.getsockname()[0] == lab.hosts["B"].address
        near.send(b"1")
        assert far.recv(1) == b"1"
        lab.cut("B", "A")
        near.send(b"2")
        assert is_silent(far), "what is sent to A is lost"
        far.send(b"back")
        assert near.recv(4) == b"back", "and the other way is as it was"
        lab.mend("B", "A")
        assert far.recv(1) == b"2", "TCP has sent it again"
        lab.unplug("A")
        near.send(b"3")
        assert is_silent(far)
        lab.plug("A")
        assert far.recv(1) == b"3"


def test_a_slow_host(lab: Lab) -> None:
    with lab.at("A"):
        server = socket.create_server(("0.0.0.0", PEER_PORT + 1))

    def connect() -> socket.socket:
        with lab.at("C"):
            return socket.create_connection((lab.hosts["A"].address, PEER_PORT + 1), 2.0)

    def seconds(size: int) -> float:
        took: list[float] = []

        def read() -> None:
            began_s, left = time.monotonic(), size
            while left:
                left -= len(far.recv(min(left, 1 << 16)))
            took.append(time.monotonic() - began_s)

        thread = threading.Thread(target=read)
        thread.start()
        near.sendall(bytes(size))
        thread.join()
        return took[0]

    near, far = connected(server, connect)
    with server, near, far:
        lab.throttle("C", 1_000_000)
        slow_s = seconds(400_000)
        lab.throttle("C", None)
        assert slow_s > 0.2
        assert seconds(400_000) < slow_s / 2


def test_a_thread_comes_back_from_a_namespace(lab: Lab) -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with pytest.raises(ZeroDivisionError), lab.at("A"):
        assert os.readlink("/proc/thread-self/ns/net") != home
        print(1 / 0)
    assert os.readlink("/proc/thread-self/ns/net") == home


def test_a_lab_leaves_no_descriptor(lab: Lab) -> None:
    before = os.listdir("/proc/self/fd")
    with Lab(("A",)) as other:
        assert other.hosts["A"].address == lab.hosts["A"].address, "labs do not see each other"
    assert os.listdir("/proc/self/fd") == before


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(flags: int) -> int:
        namespaces.ctypes.set_errno(1)
        return -1

    class Refusing:
        unshare = staticmethod(refuse)

    monkeypatch.setattr(namespaces, "_libc", Refusing)
    with pytest.raises(ResourceError, match="no network namespaces here"):
        Lab(("A",))
    with open_network(loopback=False) as network:
        assert isinstance(network, Loopback)
        assert "need root" in network.words


def test_relays_stall_and_go_on() -> None:
    def reach(address: str) -> tuple[str, int]:
        host, _, port = address.rpartition(":")
        return host, int(port)

    with Loopback(("A", "B")) as network:
        place = network.settings("A")
        assert (place["host_id"], place["listen"].split(":")[0]) == ("A", "127.0.0.2")
        server = socket.create_server(reach(place["listen"]))
        near, far = connected(server, lambda: socket.create_connection(reach(place["advertise"]), 2.0))
        with server, near, far:
            near.send(b"1")
            assert far.recv(1) == b"1"
            network.cut("B", "A")
            near.send(b"2")
            assert is_silent(far)
            network.mend("B", "A")
            assert far.recv(1) == b"2"
            near.close()
            assert far.recv(1) == b""


@pytest.mark.parametrize("where", ["plain", "lab"])
def test_a_killed_parent_leaves_nothing(tmp_path: Path, where: str, request: pytest.FixtureRequest) -> None:
    if where == "lab":
        request.getfixturevalue("lab")
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log"), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment({})) as parent:
        assert parent.stdout is not None
        ended, running = (int(it) for it in parent.stdout.readline().split())
        assert not is_running(ended)
        assert is_running(running)
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: not is_running(running))


def is_running(process: int) -> bool:
    """Whether a process is there and not only waits to be buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_guarded_children_end_as_others_do(tmp_path: Path) -> None:
    with GuardedChildren() as children:
        first, second = (children.start(name, ["sleep", "60"], PATH, tmp_path / name) for name in "ab")
        children.end(first)
        assert (is_running(first.group), is_running(second.group)) == (False, True)
    assert not is_running(second.group)
