"""The listeners, what ends with a connection, and loans that peers use by themselves."""

from __future__ import annotations

import mmap
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater.errors import ConfigError, RefusedError, UnavailableError
from headwater.ports import Item
from headwater.transports import serving, wire
from headwater.transports.credentials import Credentials
from headwater.transports.handshake import introduce
from headwater.transports.link import Asker, Busy
from headwater.transports.memory_exports import region_name
from headwater.transports.payloads import checksum
from headwater.transports.server import PeerServer
from headwater.transports.stream import Stream
from headwater.transports.tcp import Tcp
from headwater.transports.wire import Batch, Kind, Place
from headwater.types import Member, Outcome
from tests.conformance.transport import MEMBER, REALM, KeptExports, content, soon
from tests.node.conftest import eventually

ASKER = Member("asker", 3, "")
TOKEN = Credentials((b"a token of this test",))


@pytest.fixture
def exports() -> KeptExports:
    exports = KeptExports()
    exports.add(content(1, 1 << 16))
    return exports


@pytest.fixture
def server(exports: KeptExports, tmp_path: Path) -> Iterator[PeerServer]:
    server = PeerServer(MEMBER, "test", exports, TOKEN, ("127.0.0.1", 0), str(tmp_path / "peers" / "sock"))
    server.start()
    yield server
    server.close(soon())
    assert exports.loans == 0


def by_socket(server: PeerServer) -> Asker:
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(server.socket_path)
    stream = Stream(connected, "by socket")
    introduce(stream, ASKER, MEMBER, "test", TOKEN, soon())
    return Asker(stream, MEMBER)


def by_tcp(server: PeerServer) -> Asker:
    return Tcp(ASKER, "test", TOKEN).connect(replace(MEMBER, address=server.address), soon())


def lend(link: Asker, names: list[bytes], sizes: list[int], kind: Kind = Kind.LEND) -> wire.Grant:
    request = wire.encode_batch(Batch(REALM, names, sizes, 5.0))
    return wire.decode_grant(link.call(kind, request, Kind.LENT, soon()), sizes)


# ---- listening ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_nobody_listens_to_the_world_without_credentials(host: str, exports: KeptExports) -> None:
    with pytest.raises(ConfigError, match=r"listen=.*token_file"):
        PeerServer(MEMBER, "test", exports, Credentials(), (host, 0))
    server = PeerServer(MEMBER, "test", exports, TOKEN, (host, 0))
    assert not server.address.endswith(":0")
    server.close(soon())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_of_every_kind(host: str, exports: KeptExports) -> None:
    server = PeerServer(MEMBER, "test", exports, Credentials(), (host, 0))
    server.start()
    link = Tcp(ASKER, "test", Credentials()).connect(replace(MEMBER, address=server.address), soon())
    item = Item(region_name(0, 0, 9), np.zeros(9, np.uint8))
    assert link.read(REALM, [item], soon()) == [Outcome.DONE]
    link.close()
    server.close(soon())


def test_an_address_that_cannot_be_had(server: PeerServer, exports: KeptExports, tmp_path: Path) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"listen=127.0.0.1:{port}"):
        PeerServer(MEMBER, "test", exports, TOKEN, ("127.0.0.1", port))
    with pytest.raises(ConfigError, match="another process serves it"):
        PeerServer(MEMBER, "test", exports, TOKEN, ("127.0.0.1", 0), server.socket_path)
    with pytest.raises(ConfigError, match="listen=no such host"):
        PeerServer(MEMBER, "test", exports, TOKEN, ("no such host", 0))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no socket"):
        PeerServer(MEMBER, "test", exports, TOKEN, None, str(tmp_path / "file"))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        PeerServer(MEMBER, "test", exports, TOKEN, None, str(tmp_path / "link"))
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by others"):
        PeerServer(MEMBER, "test", exports, TOKEN, None, str(open_to_all / "sock"))


def test_the_unix_socket_is_private_and_goes(exports: KeptExports, tmp_path: Path) -> None:
    path = tmp_path / "private" / "sock"
    server = PeerServer(MEMBER, "test", exports, TOKEN, None, str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.start()
    link = by_socket(server)
    link.close()
    server.close(soon())
    assert list(path.parent.iterdir()) == []


def test_one_connection_too_many(exports: KeptExports) -> None:
    server = PeerServer(MEMBER, "test", exports, TOKEN, ("127.0.0.1", 0), max_connections=2)
    server.start()
    first, second = by_tcp(server), by_tcp(server)
    with pytest.raises(UnavailableError):
        by_tcp(server)
    eventually(lambda: server.stats()["connections"] == 2)
    first.close()
    eventually(lambda: server.stats()["connections"] == 1)
    by_tcp(server).close()
    second.close()
    server.close(soon())
    assert server.stats()["turned_away"] == 1


def test_the_end_does_not_wait_for_peers(exports: KeptExports) -> None:
    server = PeerServer(MEMBER, "test", exports, TOKEN, ("127.0.0.1", 0))
    server.start()
    link = by_tcp(server)
    stranger = socket.create_connection(link.stream.socket.getpeername())
    begun_s = time.monotonic()
    server.close(soon())
    assert time.monotonic() - begun_s < 1
    with pytest.raises(UnavailableError):
        link.ask("x", b"", soon())
    stranger.close()
    link.close()
    names = [it.name for it in threading.enumerate()]
    assert not any(it.startswith("headwater-peer") for it in names)


def test_connections_find_out_that_the_other_end_is_gone(server: PeerServer) -> None:
    link = by_tcp(server)
    (thread_stream,) = [it for it in server._threads.values() if it is not None]
    for end in (link.stream.socket, thread_stream.socket):
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            assert end.getsockopt(socket.IPPROTO_TCP, option) == value
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    link.close()


# ---- loans ----------------------------------------------------------------------------------------------


def mapped(exports: KeptExports, size: int = 4096) -> tuple[int, int, mmap.mmap]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    array = np.frombuffer(memory, np.uint8)
    array[:] = content(2, size)
    return exports.add(array, descriptor), descriptor, memory


def test_a_loan_lasts_until_it_is_given_back(server: PeerServer, exports: KeptExports) -> None:
    segment, descriptor, _ = mapped(exports)
    link = by_socket(server)
    grant = lend(link, [region_name(segment, 64, 100), b"none", region_name(segment, 0, 5)], [100, 1, 6])
    place, *rest = grant.parts
    assert isinstance(place, Place) and (place.extent.segment, place.extent.offset_bytes) == (segment, 64)
    assert rest == [Outcome.MISSING, Outcome.FOREIGN]
    assert 20 < grant.left_s <= 30
    assert (exports.loans, server.stats()["loans"]) == (1, 1)
    link.stream.say(Kind.GIVE_BACK, wire.encode_given(grant.number, [True, False, False]), soon())
    eventually(lambda: exports.loans == 0)
    assert exports.kept[-1].done == [True, False, False]
    link.close()
    os.close(descriptor)


def test_a_dead_connection_gives_its_loans_back_and_not_before(server: PeerServer, exports: KeptExports) -> None:
    segment, descriptor, _ = mapped(exports)
    link = by_socket(server)
    for kind in (Kind.LEND, Kind.ACCEPT):
        lend(link, [region_name(segment, 0, 100)], [100], kind)
    exports.on("say", lambda peer, body, until_s: body)
    link.ask("say", b"", soon())
    assert exports.loans == 2
    link.close()
    eventually(lambda: exports.loans == 0)
    assert [it.done for it in exports.kept] == [[False], [False]]
    assert server.stats()["abandoned"] == 2
    os.close(descriptor)


def test_a_loan_to_be_read_ends_with_its_deadline(
    server: PeerServer, exports: KeptExports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to be written does not: a peer that is late may still write."""
    monkeypatch.setattr(serving, "TICK_S", 0.02)
    segment, descriptor, _ = mapped(exports)
    exports.loan_s = 0.05
    link = by_socket(server)
    read = lend(link, [region_name(segment, 0, 100)], [100])
    write = lend(link, [region_name(segment, 0, 100)], [100], Kind.ACCEPT)
    eventually(lambda: exports.loans == 1)
    link.stream.say(Kind.GIVE_BACK, wire.encode_given(read.number, [True]), soon())
    body = wire.encode_commit(write.number, [True], [])
    eventually(lambda: time.monotonic() > exports.kept[0].deadline_s + 0.05)
    assert exports.loans == 1
    answer = link.call(Kind.COMMIT, body, Kind.STATUSES, soon())
    assert wire.decode_statuses(answer, 1) == [Outcome.FAILED], "it was committed after its end"
    assert [it.done for it in exports.kept] == [[False], [False]]
    link.close()
    os.close(descriptor)


def test_what_is_committed_is_verified(server: PeerServer, exports: KeptExports) -> None:
    segment, descriptor, memory = mapped(exports)
    link = by_socket(server)
    grant = lend(link, [region_name(segment, at * 100, 100) for at in range(4)], [100, 100, 100, 99], Kind.ACCEPT)
    memory[0:300] = b"a" * 300
    right = checksum(b"a" * 100)
    body = wire.encode_commit(grant.number, [True, True, False, False], [right, right + 1])
    outcomes = wire.decode_statuses(link.call(Kind.COMMIT, body, Kind.STATUSES, soon()), 4)
    assert outcomes == [Outcome.DONE, Outcome.CORRUPT, Outcome.FAILED, Outcome.FOREIGN]
    assert exports.kept[-1].done == [True, False, False, False]
    assert exports.kept[-1].checksums[0] == right
    link.close()
    os.close(descriptor)


@pytest.mark.parametrize("wrong", ["twice", "parts", "kind"])
def test_a_loan_that_is_ended_wrongly_ends_the_connection(server: PeerServer, exports: KeptExports, wrong: str) -> None:
    segment, descriptor, _ = mapped(exports)
    link = by_socket(server)
    grant = lend(link, [region_name(segment, 0, 100)], [100], Kind.LEND if wrong == "kind" else Kind.ACCEPT)
    done = [True, True] if wrong == "parts" else [True]
    if wrong == "twice":
        link.call(Kind.COMMIT, wire.encode_commit(grant.number, done, []), Kind.STATUSES, soon())
    with pytest.raises(UnavailableError):
        link.call(Kind.COMMIT, wire.encode_commit(grant.number, done, []), Kind.STATUSES, soon())
    eventually(lambda: exports.loans == 0)
    eventually(lambda: server.stats()["protocol_errors"] == 1)
    link.close()
    os.close(descriptor)


def test_loans_are_not_without_end(server: PeerServer, exports: KeptExports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_LOANS", 2)
    link = by_socket(server)
    for _ in range(2):
        lend(link, [region_name(0, 0, 1)], [1])
    with pytest.raises(Busy):
        lend(link, [region_name(0, 0, 1)], [1])
    assert exports.loans == 2
    link.close()


def test_regions_come_with_their_descriptors(server: PeerServer, exports: KeptExports) -> None:
    _, descriptor, memory = mapped(exports)
    link = by_socket(server)
    link.stream.say(Kind.REGIONS, wire.encode_message(wire.Regions(0)), soon())
    kind, body, received = link.stream.hear_with(soon(), 8)
    assert kind is Kind.MAPPED
    assert wire.decode_mapped(body) == wire.Mapped([0, 1], [1 << 16, 4096], [False, True], [True, True])
    (other,) = received
    with mmap.mmap(other, 4096) as view:
        memory[7] = 123
        assert view[7] == 123
    os.close(other)
    link.close()
    far = by_tcp(server)
    with pytest.raises(RefusedError, match="regions"):
        far.call(Kind.REGIONS, wire.encode_message(wire.Regions(0)), Kind.MAPPED, soon())
    far.close()
    os.close(descriptor)


def test_messages_have_a_size(server: PeerServer, exports: KeptExports) -> None:
    exports.on("long", lambda peer, body, until_s: bytes(wire.MOST_MESSAGE + 1))
    link = by_tcp(server)
    with pytest.raises(RefusedError, match="answer"):
        link.ask("long", b"", soon())
    with pytest.raises(RefusedError, match="message"):
        link.ask("long", bytes(wire.MOST_MESSAGE + 1), soon())
    with pytest.raises(RefusedError, match="answer"):
        link.ask("long", b"", soon())
    link.close()


# ---- writes ---------------------------------------------------------------------------------------------


def test_what_nobody_wants_is_not_received_without_end(
    server: PeerServer, exports: KeptExports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_DRAINED", 1000)
    link = Tcp(ASKER, "test", TOKEN).connect(replace(MEMBER, address=server.address), soon())
    small, big = Item(b"none", np.zeros(1000, np.uint8)), Item(b"none", np.zeros(1001, np.uint8))
    assert link.write(REALM, [small], soon()) == [Outcome.MISSING]
    with pytest.raises(UnavailableError):
        link.write(REALM, [big], soon())
    link.close()


def test_memory_that_cannot_be_received_into_costs_the_link(server: PeerServer) -> None:
    link = Tcp(ASKER, "test", TOKEN).connect(replace(MEMBER, address=server.address), soon())
    frozen = np.zeros(100, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises((BufferError, TypeError, ValueError)):
        link.read(REALM, [Item(region_name(0, 0, 100), frozen)], soon())
    with pytest.raises(UnavailableError):
        link.ask("x", b"", soon())
    link.close()
