"""The node's memory in its clients' hands: who gets it, what they can do to it, and how long it counts as in use."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.errors import HeadwaterError, ProtocolError, RefusedError, ResourceError, UnavailableError
from headwater.node.client import Link, R, Session
from headwater.node.messages import (
    PROTOCOL,
    Message,
    Register,
    Registered,
    Reserve,
    Reserved,
    Welcome,
    decode_reply,
    encode,
    unpack_addresses,
)
from headwater.types import ABSENT, PAGE_BYTES, pack_keys
from tests.node.conftest import Rig, descriptors, eventually
from tests.node.peers import (
    LAYOUT,
    SLOT_BYTES,
    ForkServer,
    hello,
    holder,
    is_whole,
    keys,
    mapped,
    namespace,
    payload,
    read,
    save,
    write,
)


class Raw:
    """A client whose socket, segments and lifeline can be closed one by one."""

    def __init__(self, address: str, instance: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(5)
        self.socket.connect(address.removeprefix("unix:"))
        self.socket.sendall(hello(instance, maps=True))
        _, found, _, _ = socket.recv_fds(self.socket, 1 << 16, 8)
        self.segment, table, self.lifeline = found
        os.close(table)
        self.space = self.call(Register(namespace(), LAYOUT), Registered).space

    def call(self, message: Message, kind: type[R]) -> R:
        self.socket.sendall(encode(message))
        reply = decode_reply(self.socket.recv(1 << 16)[4:])
        assert isinstance(reply, kind), reply
        return reply

    def reserve(self, name: str, count: int) -> tuple[int, tuple[int, ...]]:
        it = self.call(Reserve(self.space, b"", pack_keys(keys(count, name)), (), (0,)), Reserved)
        return it.ticket, unpack_addresses(it.addresses)[0]


@pytest.fixture
def raw(rig: Rig) -> Iterator[Raw]:
    it = Raw(rig.address, "raw")
    yield it
    it.socket.close()
    os.close(it.segment)
    try:
        os.close(it.lifeline)
    except OSError:  # the test has
        return


def test_who_does_not_map_gets_no_descriptors(rig: Rig) -> None:
    before = descriptors()
    link = rig.link("a")
    assert link.memory is None
    assert link.welcome.segments_bytes == ()
    assert descriptors() == before + 2, "one socket at each end, and nothing else"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as it:
        it.connect(str(rig.server.listener.path))
        it.sendall(hello("b"))
        _, found, _, _ = socket.recv_fds(it, 1 << 16, 8)
        assert found == []


def test_no_client_can_change_the_size_of_the_memory(raw: Raw) -> None:
    size = os.fstat(raw.segment).st_size
    for other in (0, size - PAGE_BYTES, size + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(raw.segment, other)
    with pytest.raises(PermissionError):
        fcntl.fcntl(raw.segment, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.posix_fallocate(raw.segment, size, PAGE_BYTES)
    assert os.fstat(raw.segment).st_size == size


def test_clients_see_each_others_bytes(rig: Rig) -> None:
    one, two = rig.session("a", maps=True), rig.session("b", maps=True)
    wanted = keys(5)
    got = one.reserve(wanted)
    for key, place in zip(wanted, got.addresses[0], strict=True):
        write(one, place, payload(key, 7))
    one.done(got.ticket)
    found = two.load(wanted)
    assert found.chunks == 5
    assert found.addresses == got.addresses
    assert all(is_whole(key, read(two, place)) for key, place in zip(wanted, found.addresses[0], strict=True))
    place = found.addresses[0][0]
    assert bytes(rig.node.memory.view(place, SLOT_BYTES)) == payload(wanted[0], 7), "the node itself sees them too"
    assert mapped(two).address(place) != mapped(one).address(place)


def test_descriptors_do_not_reach_programs_that_the_client_starts(rig: Rig) -> None:
    rig.link("a", maps=True)
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the directory itself
            continue
        if "memfd:headwater" in target or target == f"unix:{rig.address}":
            assert not os.get_inheritable(int(name)), target


def test_200_connections_leave_nothing_behind(rig: Rig) -> None:
    def connect(maps: bool, end: str) -> None:
        link = Link(rig.address, f"i{end}", maps=maps, connect_s=5, call_s=5)
        if end != "greeted":
            session = Session(link, namespace(), LAYOUT)
            if end == "holding":
                session.reserve(keys(2, "held"))
        link.close()

    connect(True, "holding")
    rig.quiet()
    before, threads = descriptors(), len(os.listdir("/proc/self/task"))
    for index in range(200):
        connect(bool(index % 2), ("greeted", "registered", "holding")[index % 3])
    eventually(lambda: descriptors() == before and not rig.cache.tickets)
    assert len(os.listdir("/proc/self/task")) == threads
    assert rig.cache.pool.taken_slots == 0
    assert rig.server.sessions == 0
    assert not rig.node._instances
    assert not rig.server._alive


def test_a_failed_handshake_leaks_no_descriptor(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.session("warm", maps=True)
    before = descriptors()
    honest = rig.node.welcome
    lies = [
        (ProtocolError, lambda it: Welcome(PROTOCOL + 1, it.version, it.node, it.epoch, it.segments_bytes)),
        (ProtocolError, lambda it: Welcome(PROTOCOL, it.version, it.node, it.epoch, it.segments_bytes * 2)),
        (ResourceError, lambda it: Welcome(PROTOCOL, it.version, it.node, it.epoch, (1 << 40, it.segments_bytes[1]))),
        (ResourceError, lambda it: Welcome(PROTOCOL, it.version, it.node, it.epoch, (-1, it.segments_bytes[1]))),
    ]
    for kind, lie in lies:
        monkeypatch.setattr(rig.node, "welcome", lambda hello, lie=lie: lie(honest(hello)))
        with pytest.raises(kind):
            rig.link("a", maps=True)
    monkeypatch.setattr(rig.node, "welcome", lambda hello: lies[0][1](honest(hello)))
    with pytest.raises(HeadwaterError):
        rig.link("a")
    monkeypatch.undo()
    eventually(lambda: descriptors() == before)


# ---- the lifeline ----------------------------------------------------------------------------------------


def test_memory_counts_as_in_use_until_the_lifeline_ends(rig: Rig, raw: Raw) -> None:
    _, places = raw.reserve("x", 3)
    raw.socket.close()
    eventually(lambda: rig.server.sessions == 0)
    other = rig.session("other")
    assert len(rig.cache.tickets) == 1, "the process may still be writing"
    assert other.reserve(keys(3, "x")).addresses[0] == (ABSENT,) * 3, "and these keys are still its own to write"

    rig.clock.moved_s += rig.node.config.save_lease_s + 1
    eventually(lambda: other.match([]).chunks == 0 and rig.cache.expired_saves == 1)
    assert len(rig.cache.tickets) == 1, "a late writer may still write there"
    again = other.reserve(keys(3, "x"))
    assert again.covered == 3
    assert not set(again.addresses[0]) & set(places), "quarantined slots are given to nobody"

    os.close(raw.lifeline)
    eventually(lambda: len(rig.cache.tickets) == 1)
    assert list(rig.cache.tickets) == [again.ticket]
    assert rig.cache.pool.taken_slots == 3


def test_another_rank_of_the_instance_can_end_the_quarantine(rig: Rig, raw: Raw) -> None:
    ticket, _ = raw.reserve("x", 3)
    raw.socket.close()
    rig.clock.moved_s += rig.node.config.save_lease_s + 1
    rank = rig.session("raw")
    eventually(lambda: rank.match([]).chunks == 0 and rig.cache.expired_saves == 1)
    assert rank.done(ticket)
    assert rank.match(keys(3, "x")).chunks == 0, "too late to commit"
    assert rig.cache.pool.taken_slots == 0


def test_the_other_rank_may_not_be_another_instance(rig: Rig, raw: Raw) -> None:
    ticket, _ = raw.reserve("x", 3)
    thief = rig.session("thief")
    assert not thief.done(ticket)
    assert thief.release([ticket]) == 0
    assert thief.match(keys(3, "x")).chunks == 0
    assert rig.cache.unknown_tickets == 2
    assert len(rig.cache.tickets) == 1


def test_a_process_that_only_maps_keeps_its_instance(rig: Rig, raw: Raw, peers: ForkServer) -> None:
    """The scheduler dies; a worker of the same instance may still be writing."""
    worker = peers.start(holder, address=rig.address, instance="raw")
    assert worker.hear() == "up"
    raw.reserve("x", 3)
    raw.socket.close()
    os.close(raw.lifeline)
    eventually(lambda: rig.server.sessions == 1)
    rig.session("other").match([])
    assert len(rig.cache.tickets) == 1
    worker.kill()
    rig.quiet(1.0)
    assert rig.cache.pool.taken_slots == 0


def test_bytes_on_the_lifeline_do_not_end_it(rig: Rig, raw: Raw) -> None:
    raw.reserve("x", 1)
    raw.socket.close()
    os.write(raw.lifeline, b"x" * 60_000)
    other = rig.session("other")
    for _ in range(50):
        other.match([])
    assert len(rig.cache.tickets) == 1
    os.close(raw.lifeline)
    rig.quiet(1.0)


def test_a_view_in_use_keeps_the_lifeline_when_the_session_closes(rig: Rig) -> None:
    """Closed by one thread while another writes: what it writes to must stay its own until it lets go."""
    session = rig.session("a", maps=True)
    view = mapped(session).view(session.reserve(keys(1)).addresses[0][0], SLOT_BYTES)
    session.close()
    eventually(lambda: rig.server.sessions == 0)
    other = rig.session("b")
    assert len(rig.cache.tickets) == 1
    view[:] = b"\xff" * SLOT_BYTES
    del view
    rig.quiet(1.0)
    assert other.match(keys(1)).chunks == 0


def test_lifelines_are_bounded_like_sessions(config: NodeConfig) -> None:
    rig = Rig(dataclasses.replace(config, max_sessions=4))
    held = []
    try:
        for index in range(4):
            held.append(Raw(rig.address, f"r{index}"))
            held[-1].socket.close()
        eventually(lambda: rig.server.sessions == 0)
        with pytest.raises(RefusedError, match=r"node\.max_sessions=4"):
            rig.link("one-more", maps=True)
        assert rig.session("plain").match([]).chunks == 0
        os.close(held[0].lifeline)
        eventually(lambda: len(rig.server._lifelines) == 3)
        rig.link("now", maps=True)
    finally:
        for it in held:
            os.close(it.segment)
        for it in held[1:]:
            os.close(it.lifeline)
        rig.close()


def test_sessions_are_bounded(config: NodeConfig) -> None:
    rig = Rig(dataclasses.replace(config, max_sessions=3))
    try:
        links = [rig.link(f"i{index}") for index in range(3)]
        with pytest.raises(UnavailableError):
            rig.link("one-more")
        links[0].close()
        eventually(lambda: rig.server.sessions == 2)
        assert Session(rig.link("now"), namespace(), LAYOUT).match([]).chunks == 0
    finally:
        rig.close()


def test_the_memory_of_a_stopped_node_stays_readable_for_those_who_map_it(config: NodeConfig) -> None:
    rig = Rig(config)
    session = rig.session("a", maps=True)
    wanted = keys(1)
    save(session, wanted, 3)
    place = session.load(wanted).addresses[0][0]
    memory = mapped(session)
    rig.server.stop()
    with pytest.raises(HeadwaterError):
        eventually(lambda: session.match(wanted).chunks < 0)
    assert bytes(memory.view(place, SLOT_BYTES)) == payload(wanted[0], 3), "a copy may be under way"
    session.close()
    with pytest.raises(IndexError):
        memory.view(place, 1)
    rig.close()


def test_nothing_has_a_name(rig: Rig) -> None:
    rig.session("a", maps=True)
    assert not [name for name in os.listdir("/dev/shm") if "headwater" in name]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "headwater" in line]
    assert maps
    assert all("/memfd:headwater (deleted)" in line for line in maps if ".so" not in line)
