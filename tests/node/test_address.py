"""Where a node listens: one node a path, nobody else's path, and nobody else's access."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.errors import ConfigError
from headwater.node.address import PATH_BYTES_MAX, Listener, socket_path, sweep
from headwater.node.client import fetch_status
from headwater.node.driver import Node
from headwater.node.server import EmbeddedServer, Server
from tests.node.conftest import Rig, descriptors, needs_root
from tests.node.peers import ForkServer, as_user, rival, serve

NOBODY = 65534


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/n.sock"


def lock_of(address: str) -> Path:
    return Path(address.removeprefix("unix:") + ".lock")


def test_a_second_node_on_one_path_is_refused_with_the_pid_of_the_first(rig: Rig) -> None:
    with pytest.raises(ConfigError, match=rf"another node \(pid {os.getpid()}\) serves .*n\.sock; stop it"):
        Listener(rig.address)
    assert fetch_status(rig.address)["node"] == rig.node.name, "and the first goes on"


def test_a_node_in_another_process_is_named_too(peers: ForkServer, address: str) -> None:
    other = peers.start(serve, address=address)
    assert other.hear() == "up"
    with pytest.raises(ConfigError, match=rf"pid {other.pid}\)"):
        Listener(address)


def test_what_a_killed_node_left_is_taken_over(peers: ForkServer, address: str) -> None:
    other = peers.start(serve, address=address)
    assert other.hear() == "up"
    other.kill()
    left = {path.name for path in lock_of(address).parent.iterdir()}
    assert left == {"n.sock", "n.sock.lock"}
    listener = Listener(address)
    assert lock_of(address).read_text() == f"{os.getpid()}\n"
    listener.close()
    assert not list(lock_of(address).parent.iterdir())


def test_16_starts_at_once_have_one_winner(peers: ForkServer, address: str) -> None:
    for _ in range(20):
        rivals = [peers.start(rival, address=address) for _ in range(16)]
        assert {peer.hear() for peer in rivals} == {"ready"}
        for peer in rivals:
            peer.channel.tell("go")
        said = [peer.hear() for peer in rivals]
        assert said.count("won") == 1, said
        winner = rivals[said.index("won")]
        refusals = [it["refused"] for it in said if it != "won"]
        assert all("another node" in it for it in refusals)
        with socket.socket(socket.AF_UNIX) as it:
            it.connect(address.removeprefix("unix:"))
        winner.channel.tell("stop")
        assert [peer.ended() for peer in rivals] == [[]] * 16
        assert not list(lock_of(address).parent.iterdir())


def test_a_start_just_while_another_node_ends_gets_a_lock_of_its_own(address: str) -> None:
    """The old node removes the lock file between our open and our lock: what we locked has no name any more."""
    first = Listener(address)
    stale = os.open(lock_of(address), os.O_RDWR)
    first.close()
    second = Listener(address)
    assert not os.path.samestat(os.fstat(stale), lock_of(address).stat())
    with pytest.raises(ConfigError, match="another node"):
        Listener(address)
    second.close()
    os.close(stale)


def test_the_lock_that_counts_is_the_one_with_the_name(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same race, from the side of the one that starts."""
    lock_of(address).touch()
    real = os.open

    def open_and_lose(path: object, *rest: int) -> int:
        descriptor = real(path, *rest)
        monkeypatch.setattr(os, "open", real)
        lock_of(address).unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    listener = Listener(address)
    with pytest.raises(ConfigError, match="another node"):
        Listener(address)
    listener.close()


def test_only_the_owner_may_come_in(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        listener = Listener(f"unix:{tmp_path}/own/n.sock")
        assert os.umask(0) == 0, "the umask is the process's, not ours to change"
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "own/n.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "own/n.sock.lock").stat().st_mode) == 0o600
    listener.close()


@pytest.mark.parametrize("name", ["n.sock", "n.sock.lock"])
@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_links_are_not_followed(address: str, name: str, exists: bool) -> None:
    target = lock_of(address).parent / "target"
    if exists:
        target.write_text("precious")
    (lock_of(address).parent / name).symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"):
        Listener(address)
    assert (target.read_text() == "precious") if exists else not target.exists()


def test_a_link_that_appears_after_the_look_is_not_followed_either(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = lock_of(address).parent / "target"
    target.write_text("precious")
    monkeypatch.setattr(Listener, "_check_directory", lambda self: lock_of(address).symlink_to(target))
    with pytest.raises(ConfigError, match=r"node\.socket"):
        Listener(address)
    assert target.read_text() == "precious"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_directory_that_others_can_write_to_is_refused(address: str, mode: int) -> None:
    directory = lock_of(address).parent
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=r"writable by others; use a directory of mode 0700"):
        Listener(address)
    directory.chmod(0o1777)
    Listener(address).close()


def test_a_directory_of_another_user_is_refused(address: str) -> None:
    needs_root()
    directory = lock_of(address).parent
    os.chown(directory, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345"):
        Listener(address)
    assert not list(directory.iterdir())


def test_a_file_that_is_no_socket_is_left_alone(address: str) -> None:
    path = lock_of(address).with_name("n.sock")
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        Listener(address)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "path", ["/proc/1/nowhere/n.sock", "/dev/null/n.sock", "/proc/n.sock"], ids=["missing", "no directory", "proc"]
)
def test_an_unusable_path_is_the_operators_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.socket"):
        Listener(f"unix:{path}")


def test_a_failed_start_holds_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()

    def bind(self: socket.socket, path: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("socket.socket.bind", bind)
        with pytest.raises(ConfigError, match=r"cannot bind: .*No space left"):
            Listener(address)
    assert descriptors() == before
    assert not list(lock_of(address).parent.iterdir())
    Listener(address).close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcp:127.0.0.1:1", "expected unix:/path"),
        ("/run/n.sock", "expected unix:/path"),
        ("unix:n.sock", "must be absolute"),
        ("unix:/" + "x" * PATH_BYTES_MAX, f"at most {PATH_BYTES_MAX} bytes"),
        ("unix:/" + "é" * 60, f"at most {PATH_BYTES_MAX} bytes"),
    ],
)
def test_addresses_that_cannot_be(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        socket_path(text)
    assert socket_path("unix:/" + "x" * (PATH_BYTES_MAX - 1)).name == "x" * (PATH_BYTES_MAX - 1)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can pass through, so that only the socket's own mode keeps them out."""
    needs_root()
    path = Path(tempfile.mkdtemp(prefix="headwater-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def test_another_user_cannot_connect(config: NodeConfig, open_directory: Path, peers: ForkServer) -> None:
    rig = Rig(replace(config, socket=f"unix:{open_directory}/n.sock"))
    try:
        kind, text = peers.start(as_user, user=NOBODY, action="connect", address=rig.address).hear()
        assert kind == "UnavailableError"
        assert "Permission denied" in text
        assert rig.server.sessions == 0
        rig.server.listener.path.chmod(0o666)
        assert peers.start(as_user, user=NOBODY, action="connect", address=rig.address).hear()[0] == "none"
    finally:
        rig.close()


def test_a_client_does_not_give_its_kv_to_another_users_node(open_directory: Path, peers: ForkServer) -> None:
    """Somebody else was first at the path where we look for our node."""
    address = f"unix:{open_directory}/n.sock"
    os.chown(open_directory, 54321, -1)
    assert peers.start(as_user, user=54321, action="listen", address=address).hear()[0] == "none"
    (open_directory / "n.sock").chmod(0o666)
    kind, text = peers.start(as_user, user=NOBODY, action="connect", address=address).hear()
    assert kind == "RefusedError"
    assert f"expected {NOBODY} or root, given 54321" in text


def test_sweep_removes_what_the_dead_left_and_nothing_else(peers: ForkServer, tmp_path: Path) -> None:
    for name in ("e-dead.sock", "e-alive.sock", "other.sock"):
        peer = peers.start(serve, address=f"unix:{tmp_path}/{name}")
        assert peer.hear() == "up"
        if name != "e-alive.sock":
            peer.kill()
    (tmp_path / "e-link.sock.lock").symlink_to(tmp_path / "target")
    sweep(tmp_path, "e-")
    assert {path.name for path in tmp_path.iterdir()} == {
        "e-alive.sock",
        "e-alive.sock.lock",
        "e-link.sock.lock",
        "other.sock",
        "other.sock.lock",
    }
    assert fetch_status(f"unix:{tmp_path}/e-alive.sock")["node"]


def test_an_embedded_node_that_cannot_start_holds_nothing(rig: Rig, config: NodeConfig) -> None:
    before = descriptors()
    node = Node(replace(config, prefault=True))
    with pytest.raises(ConfigError, match="another node"):
        EmbeddedServer(node, rig.address)
    node.close()
    assert descriptors() == before


def test_signals_do_not_matter_to_a_server_that_has_ended(config: NodeConfig) -> None:
    server = Server(Node(config))
    server.stop()
    server.serve_forever()
    before = descriptors()
    reader, writer = os.pipe()
    server.stop()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    assert descriptors() == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a library installs no handlers"
