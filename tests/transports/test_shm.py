"""Peers of the same host: what is read, looked at and written in their memory, and what happens when they go."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.ports import Item
from headwater.transports import cma, peer_memory, wire
from headwater.transports import serving as server_side
from headwater.transports.memory_exports import RegionLoan
from headwater.transports.peer_memory import PeerMemory
from headwater.transports.shm import Shm, ShmLink
from headwater.transports.tcp import Tcp
from headwater.transports.wire import Kind
from headwater.types import Extent, Outcome
from tests.node.conftest import eventually
from tests.transports.exporters import (
    CLUSTER,
    CREDENTIALS,
    KIB,
    ME,
    MIB,
    REALM,
    Exporter,
    Exporting,
    Settings,
    exporting,
    items,
    pattern,
    segment,
    serving,
    soon,
    thing,
)

SIZE = 4 * MIB


@pytest.fixture
def exports() -> Exporter:
    exports = Exporter()
    memory, array = segment(SIZE)
    exports.add(array, memory.descriptors[0])
    return exports


@pytest.fixture
def shm() -> Iterator[Shm]:
    shm = Shm(ME, CLUSTER, CREDENTIALS)
    yield shm
    shm.close()


@pytest.fixture
def link(exports: Exporter, shm: Shm, tmp_path: Path) -> Iterator[ShmLink]:
    with serving(exports, tmp_path) as (_, member):
        link = shm.connect(member, soon())
        yield link
        link.close()


def test_what_is_read_is_verified_and_given_back(exports: Exporter, link: ShmLink) -> None:
    wanted = [*items((0, SIZE), (4096, 4096), (17, 1000), (5, 0)), Item(b"unknown", np.zeros(9, np.uint8))]
    outcomes = link.read(REALM, wanted, soon())
    assert outcomes == [Outcome.DONE] * 4 + [Outcome.MISSING]
    for item, (offset, length) in zip(wanted, [(0, SIZE), (4096, 4096), (17, 1000)], strict=False):
        assert np.array_equal(item.memory, pattern(SIZE)[offset : offset + length])
    eventually(lambda: len(exports.kept) == 1 and not exports.loans)
    assert exports.kept[0].done == [True] * 4 + [False]


def test_the_bytes_do_not_go_through_the_socket(link: ShmLink) -> None:
    link.read(REALM, items((0, SIZE)), soon())
    assert link.stream.bytes_in < 4 * KIB


def test_what_does_not_have_its_checksum_is_corrupt(exports: Exporter, link: ShmLink) -> None:
    exports.lie = lambda it: dataclasses.replace(it, checksum=(it.checksum or 0) ^ 1)
    assert link.read(REALM, items((0, SIZE), (0, 64)), soon()) == [Outcome.CORRUPT] * 2
    assert link.corrupt == 2
    eventually(lambda: [it.done for it in exports.kept] == [[False, False]])


def test_without_a_checksum_what_is_there_is_taken(exports: Exporter, link: ShmLink) -> None:
    exports.checked = False
    wanted = items((MIB, MIB))
    assert link.read(REALM, wanted, soon()) == [Outcome.DONE]
    assert np.array_equal(wanted[0].memory, pattern(SIZE)[MIB : 2 * MIB])


def test_a_loan_that_ended_during_the_copy_counts_for_nothing(exports: Exporter, link: ShmLink) -> None:
    exports.loan_s = 0.0
    assert link.read(REALM, items((0, 4096)), soon()) == [Outcome.FAILED]
    exports.loan_s = 30.0
    assert link.read(REALM, items((0, 4096)), soon()) == [Outcome.DONE]


def test_a_peer_that_took_everything_back_counts_for_nothing(
    exports: Exporter, link: ShmLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's end is closed while we copy; the mapping is still there, and what is in it is nobody's word."""
    exports.checked = False
    pull = PeerMemory.pull

    def late(self: PeerMemory, *arguments: object, checked: bool) -> int | None:
        answer = pull(self, *arguments, checked=checked)  # type: ignore[arg-type]
        link.stream.shut()
        return answer

    monkeypatch.setattr(PeerMemory, "pull", late)
    assert link.read(REALM, items((0, 4096)), soon()) == [Outcome.FAILED]


@pytest.mark.parametrize(
    "lie",
    [Extent(0, SIZE - 10, 64), Extent(0, 1 << 62, 64), Extent(5, 0, 64), Extent(0xFFFFFFF0, 0, 64)],
    ids=["over the end", "far away", "no such region", "no such region at all"],
)
def test_a_peer_that_lies_about_places_costs_the_link_and_no_more(
    exports: Exporter, link: ShmLink, lie: Extent
) -> None:
    exports.lie = lambda it: dataclasses.replace(it, extent=lie)
    with pytest.raises(UnavailableError, match="none of its regions"):
        link.read(REALM, items((0, 64)), soon())
    eventually(lambda: not exports.loans)


def test_memory_that_could_shrink_is_not_mapped(
    exports: Exporter, shm: Shm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a mapping beyond the end of its file ends the reader; sealed files cannot get there."""
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MIB)
    short = os.memfd_create("short", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(short, 4096)
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    for descriptor in (unsealed, short):
        exports.add(pattern(MIB, seed=9), descriptor)
    pipe, other = os.pipe()
    exports.add(pattern(MIB, seed=9), pipe)
    with serving(exports, tmp_path) as (_, member):
        link = shm.connect(member, soon())
        assert link._memory.mapped == 1
        for number in (1, 2, 3):
            target = np.zeros(MIB, np.uint8)
            assert link.read(REALM, [Item(thing(0, MIB, number), target)], soon()) == [Outcome.DONE]
            assert np.array_equal(target, pattern(MIB, seed=9)), "copied by the kernel instead"
        link.close()
        monkeypatch.setattr(peer_memory.cma.Process, "answers", lambda self, places: False)
        with pytest.raises(UnavailableError, match="neither be mapped nor"):
            shm.connect(member, soon())
    for descriptor in (unsealed, short, pipe, other):
        os.close(descriptor)


def test_regions_may_come_later(exports: Exporter, link: ShmLink) -> None:
    memory, array = segment(MIB, seed=2)
    exports.add(array, memory.descriptors[0])
    target = np.zeros(4096, np.uint8)
    assert link.read(REALM, [Item(thing(8192, 4096, 1), target)], soon()) == [Outcome.DONE]
    assert np.array_equal(target, pattern(MIB, seed=2)[8192:12288])


def test_regions_that_are_gone_are_let_go_of(exports: Exporter, link: ShmLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the peer has freed stays in memory for as long as somebody maps it."""
    target = np.zeros(64, np.uint8)
    monkeypatch.setattr(peer_memory, "REFRESH_S", 3600.0)
    start = len(os.listdir("/proc/self/fd"))
    for turn in range(4):
        memory, array = segment(MIB, seed=turn)
        number = exports.add(array, memory.descriptors[0])
        assert link.read(REALM, [Item(thing(0, 64, number), target)], soon()) == [Outcome.DONE]
        assert np.array_equal(target, pattern(MIB, seed=turn)[:64])
        exports.remove(number, soon())
        exports.kept.clear()
        del array
        memory.close()
        assert link._memory.mapped == 2, "those before the last are gone"
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= start + 2)
    monkeypatch.setattr(peer_memory, "REFRESH_S", 0.0)
    assert link.read(REALM, items((0, 64)), soon()) == [Outcome.DONE]
    assert link._memory.mapped == 1, "nothing new had to be asked for"
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= start)


def test_any_number_of_regions_may_come_and_go(exports: Exporter, shm: Shm, tmp_path: Path) -> None:
    with serving(exports, tmp_path) as (_, member):
        old = shm.connect(member, soon())
        for _ in range(wire.MOST_REGIONS + 1):
            exports.remove(exports.add(np.zeros(64, np.uint8)), soon())
        memory, array = segment(MIB, seed=2)
        number = exports.add(array, memory.descriptors[0])
        target = np.zeros(4096, np.uint8)
        new = shm.connect(member, soon())
        for link in (old, new):
            assert link.read(REALM, [Item(thing(0, 4096, number), target)], soon()) == [Outcome.DONE]
        assert np.array_equal(target, pattern(MIB, seed=2)[:4096]) and link._memory.mapped == 2
        old.close()
        new.close()


def test_regions_are_told_of_a_few_at_a_time(
    exports: Exporter, shm: Shm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side, "MOST_DESCRIPTORS", 2)
    segments = [segment(4096, seed=it) for it in range(6)]
    numbers = [exports.add(array, memory.descriptors[0]) for memory, array in segments]
    for it in (0, 2, 3):
        exports.remove(numbers[it], soon())
    with serving(exports, tmp_path) as (_, member):
        link = shm.connect(member, soon())
        assert link._memory.mapped == 4
        for it in (1, 4, 5):
            target = np.zeros(4096, np.uint8)
            assert link.read(REALM, [Item(thing(0, 4096, numbers[it]), target)], soon()) == [Outcome.DONE]
            assert np.array_equal(target, pattern(4096, seed=it))
        link.close()


def test_what_was_lent_from_a_region_is_looked_for_in_no_other(exports: Exporter, link: ShmLink) -> None:
    memory, array = segment(MIB, seed=2)
    number = exports.add(array, memory.descriptors[0])
    target = np.zeros(64, np.uint8)
    assert link.read(REALM, [Item(thing(0, 64, number), target)], soon()) == [Outcome.DONE]
    exports.remove(number, soon())
    other, another = segment(MIB, seed=3)
    exports.add(another, other.descriptors[0])
    link._memory.learn(link, soon())
    target[:] = 0
    exports.lie = lambda it: dataclasses.replace(it, extent=Extent(number, 0, 64))
    with pytest.raises(UnavailableError, match="none of its regions"):
        link.read(REALM, [Item(thing(0, 64), target)], soon())
    assert not target.any()


def test_who_uses_a_region_keeps_its_mapping(link: ShmLink) -> None:
    """Another link to this peer may learn in the meantime that it is gone."""
    memory, extent = link._memory, Extent(0, 4096, 4096)
    region, view = memory.region(extent), memory.view(extent)
    assert region is not None and view is not None
    memory._forget([])
    assert memory.region(extent) is None and memory.mapped == 0
    target = np.zeros(4096, np.uint8)
    memory.pull(region, 4096, target, checked=True)
    assert np.array_equal(target, pattern(SIZE)[4096:8192]) and np.array_equal(view, target)
    with pytest.raises(OSError, match="gone"):
        memory.push(region, 0, target, lambda: True)


def test_a_region_that_goes_while_it_is_asked_for_costs_nothing(
    exports: Exporter, link: ShmLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = exports.add(pattern(4096))
    places = cma.Probe.places
    monkeypatch.setattr(
        cma.Probe, "places", lambda self, regions: places(self, [it for it in regions if it.number != going])
    )
    link._memory.learn(link, soon())
    assert "1 regions" in repr(link._memory)
    assert link.read(REALM, items((0, 64)), soon()) == [Outcome.DONE]


def test_descriptors_are_for_what_may_be_done_with_them(exports: Exporter, shm: Shm, tmp_path: Path) -> None:
    memory, array = segment(MIB, seed=2)
    number = exports.add(array, memory.descriptors[0], writable=False)
    with serving(exports, tmp_path) as (_, member):
        link = shm.connect(member, soon())
        link.stream.say(Kind.REGIONS, wire.encode_message(wire.Regions(0)), soon())
        _, _, received = link.stream.hear_with(soon(), 8)
        assert [fcntl.fcntl(it, fcntl.F_GETFL) & os.O_ACCMODE for it in received] == [os.O_RDWR, os.O_RDONLY]
        assert not any(os.get_inheritable(it) for it in received), "programs that are started would have them"
        with pytest.raises(PermissionError):
            mmap.mmap(received[1], MIB)
        for it in received:
            os.close(it)
        region = link._memory.region(Extent(number, 0, 64))
        assert region is not None and region.descriptor is None
        with pytest.raises(PermissionError):
            link._memory.push(region, 0, pattern(64), lambda: True)
        target = np.zeros(64, np.uint8)
        assert link.read(REALM, [Item(thing(0, 64, number), target)], soon()) == [Outcome.DONE]
        link.close()
    assert np.array_equal(array, pattern(MIB, seed=2))


@pytest.mark.parametrize("sizes", [[], [1, 1, 1]], ids=["none of those that there are", "more than there are"])
def test_a_peer_that_lies_about_regions_costs_the_link_and_no_more(
    link: ShmLink, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = [False] * len(sizes)
    lie = wire.Mapped([0, 1, 2], sizes, marks, marks)
    monkeypatch.setattr(peer_memory, "decode_mapped", lambda body: lie)
    with pytest.raises(UnavailableError, match="regions and 0 descriptors"):
        link._memory.learn(link, soon(0.5))
    with pytest.raises(UnavailableError):
        link.read(REALM, items((0, 64)), soon())


def test_addresses_are_told_to_this_host_only(exports: Exporter, link: ShmLink, tmp_path: Path) -> None:
    assert cma.decode_places(link.ask(cma.TOPIC, b"", soon())).numbers == [0]
    assert cma.decode_places(link.ask(cma.PROBE_TOPIC, b"", soon())).numbers == []
    other = tmp_path / "other"
    other.mkdir()
    with serving(exports, other) as (_, member):
        far = Tcp(ME, CLUSTER, CREDENTIALS).connect(member, soon())
        with pytest.raises(RefusedError, match="Unix socket"):
            far.ask(cma.TOPIC, b"", soon())
        assert cma.decode_places(far.ask(cma.PROBE_TOPIC, b"", soon())).numbers == []
        far.close()


@pytest.mark.parametrize("body", [cma.Places([1], [], 1, b""), cma.Places([], [1], 1, b"")])
def test_places_that_do_not_fit_are_none(body: cma.Places) -> None:
    with pytest.raises(ProtocolError):
        cma.decode_places(wire.encode_message(body))


def test_what_is_in_no_region_comes_over_the_socket(exports: Exporter, link: ShmLink) -> None:
    exports.lie = lambda it: dataclasses.replace(it, extent=None)
    wanted = items((0, MIB))
    assert link.read(REALM, wanted, soon()) == [Outcome.DONE]
    assert np.array_equal(wanted[0].memory, pattern(SIZE)[:MIB])
    assert link.stream.bytes_in > MIB


def test_views_lie_where_the_peer_has_them_and_are_given_back(exports: Exporter, link: ShmLink) -> None:
    with link.view(REALM, [thing(4096, 8192), b"unknown"], [8192, 1], soon()) as views:
        seen, missing = views.views
        assert missing is Outcome.MISSING and isinstance(seen, np.ndarray)
        assert np.array_equal(seen, pattern(SIZE)[4096:12288])
        exports.regions()[0].memory[4096] ^= 0xFF
        assert seen[0] == exports.regions()[0].memory[4096], "no copy"
        assert not seen.flags.writeable and views.lasts() and exports.loans == 1
        with pytest.raises(ValueError, match="read-only"):
            seen[0] = 1
    eventually(lambda: not exports.loans)
    assert exports.kept[0].done == [True, False]


def test_a_view_says_when_it_is_over(exports: Exporter, link: ShmLink) -> None:
    exports.loan_s = 0.05
    with link.view(REALM, [thing(0, 64)], [64], soon()) as views:
        eventually(lambda: not views.lasts())
    exports.loan_s = 30.0
    eventually(lambda: not exports.loans)
    assert exports.kept[0].done == [False]


def test_what_is_written_is_verified_by_the_peer(exports: Exporter, link: ShmLink) -> None:
    mine = pattern(MIB, seed=3)
    answers = link.write(REALM, [Item(thing(0, MIB), mine), Item(b"unknown", mine[:5])], soon())
    assert answers == [Outcome.DONE, Outcome.MISSING]
    assert np.array_equal(exports.regions()[0].memory[:MIB], mine)
    assert exports.kept[0].done == [True, False] and exports.kept[0].checksums[0] is not None
    assert link.stream.bytes_out < 4 * KIB


def test_a_write_that_went_wrong_is_not_kept(exports: Exporter, link: ShmLink, monkeypatch: pytest.MonkeyPatch) -> None:
    push = PeerMemory.push
    monkeypatch.setattr(PeerMemory, "push", lambda self, *arguments: push(self, *arguments) ^ 1)
    assert link.write(REALM, [Item(thing(0, 4096), pattern(4096))], soon()) == [Outcome.CORRUPT]


def test_a_write_that_is_ended_keeps_its_loan_until_nothing_is_written_any_more(
    exports: Exporter, link: ShmLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    loans: list[int] = []
    push = PeerMemory.push

    def slow(self: PeerMemory, *arguments: object) -> int:
        link.abort()
        threading.Event().wait(0.05)  # for a peer that takes its memory back as soon as it can
        loans.append(exports.loans)
        return push(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PeerMemory, "push", slow)
    with pytest.raises(UnavailableError):
        link.write(REALM, [Item(thing(0, 4096), pattern(4096)), Item(thing(4096, 4096), pattern(4096))], soon())
    assert loans == [1], "and the second was not begun"
    eventually(lambda: not exports.loans)
    assert exports.kept[0].done == [False, False]


def test_nothing_is_written_to_who_is_gone(
    exports: Exporter, shm: Shm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have its id by then."""
    with serving(exports, tmp_path) as (server, member):
        link = shm.connect(member, soon())
        written: list[int] = []
        push = PeerMemory.push

        def last(self: PeerMemory, *arguments: object) -> int:
            answer = push(self, *arguments)  # type: ignore[arg-type]
            written.append(answer)
            server.close(soon())
            eventually(lambda: not link._is_open())
            return answer

        monkeypatch.setattr(PeerMemory, "push", last)
        with pytest.raises(UnavailableError):
            link.write(REALM, [Item(thing(0, 64), pattern(64)), Item(thing(64, 64), pattern(64))], soon())
        assert len(written) == 1
        link.close()


def test_a_copy_by_the_kernel_ends_with_its_connection() -> None:
    target, source = np.zeros(3 * cma.STEP_BYTES, np.uint8), pattern(3 * cma.STEP_BYTES)
    open_for = iter([True, False])
    with pytest.raises(ConnectionResetError):
        cma.Process(os.getpid()).write(target.ctypes.data, source, lambda: next(open_for))
    assert np.array_equal(target[: cma.STEP_BYTES], source[: cma.STEP_BYTES])
    assert not target[cma.STEP_BYTES :].any()


def test_a_read_that_waits_can_be_ended(exports: Exporter, link: ShmLink, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()
    lend = exports.lend

    def slow(*arguments: object) -> RegionLoan:
        asked.set()
        go_on.wait(5)
        return lend(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exports, "lend", slow)
    ended: list[Exception] = []

    def read() -> None:
        try:
            link.read(REALM, items((0, 64)), soon(30))
        except UnavailableError as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    asked.wait(5)
    link.abort()
    thread.join(2)
    assert ended
    go_on.set()


def test_links_to_one_life_share_a_mapping_and_the_last_unmaps(exports: Exporter, shm: Shm, tmp_path: Path) -> None:
    with serving(exports, tmp_path) as (_, member):
        before = len(os.listdir("/proc/self/fd"))
        first, second = shm.connect(member, soon()), shm.connect(member, soon())
        assert first._memory is second._memory and "1 peers" in repr(shm)
        first.close()
        assert second.read(REALM, items((0, 64)), soon()) == [Outcome.DONE]
        second.close()
        assert "0 peers" in repr(shm)
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_who_is_elsewhere_or_nobody_is_not_connected_to(exports: Exporter, shm: Shm, tmp_path: Path) -> None:
    with serving(exports, tmp_path) as (_, member):
        for other in (dataclasses.replace(member, host="another"), dataclasses.replace(member, socket="")):
            with pytest.raises(UnavailableError, match="not on this host"):
                shm.connect(other, soon())
        with pytest.raises(RefusedError, match="member"):
            shm.connect(dataclasses.replace(member, epoch=8), soon())
        with pytest.raises(UnavailableError):
            shm.connect(dataclasses.replace(member, socket=member.socket + "x"), soon())
    assert "0 peers" in repr(shm)


# ---- a process of its own -----------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["mapped", "copied by the kernel"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Exporting]:
    with exporting(Settings(str(tmp_path), SIZE, descriptor=request.param)) as process:
        yield process


def test_another_process_is_read_and_written(other: Exporting, shm: Shm) -> None:
    link = shm.connect(other.member, soon())
    wanted = items((0, SIZE), (MIB, 4096), (3, 100))
    assert link.read(REALM, wanted, soon()) == [Outcome.DONE] * 3
    assert np.array_equal(wanted[0].memory, pattern(SIZE))
    mine = pattern(MIB, seed=4)
    assert link.write(REALM, [Item(thing(0, MIB), mine)], soon()) == [Outcome.DONE]
    again = items((0, MIB))
    assert link.read(REALM, again, soon()) == [Outcome.DONE]
    assert np.array_equal(again[0].memory, mine)
    eventually(lambda: other.loans() == (0, 3))
    assert link.stream.bytes_in < 8 * KIB
    link.close()


def test_a_peer_that_is_killed_costs_its_reads_at_once(other: Exporting, shm: Shm) -> None:
    link = shm.connect(other.member, soon())
    target = np.zeros(SIZE, np.uint8)
    ended: list[float] = []

    def read_on() -> None:
        while not ended:
            target[:] = 0
            try:
                outcomes = link.read(REALM, [Item(thing(0, SIZE), target)], soon(60))
            except UnavailableError:
                ended.append(time.monotonic())
                return
            assert outcomes != [Outcome.DONE] or np.array_equal(target, pattern(SIZE))

    thread = threading.Thread(target=read_on)
    thread.start()
    eventually(lambda: link.stream.bytes_in > 2000)
    killed_s = time.monotonic()
    other.signal(signal.SIGKILL)
    thread.join(20)
    assert ended and ended[0] - killed_s < 20
    link.close()
    with pytest.raises(UnavailableError):
        shm.connect(other.member, soon())


def test_a_peer_that_is_paused_costs_no_more_than_the_deadline(other: Exporting, shm: Shm) -> None:
    link = shm.connect(other.member, soon())
    other.pause()
    begun_s = time.monotonic()
    with pytest.raises(UnavailableError):
        link.read(REALM, items((0, 4096)), soon(0.1))
    with pytest.raises(UnavailableError):
        shm.connect(other.member, soon(0.1))
    assert time.monotonic() - begun_s < 4
    other.signal(signal.SIGCONT)
    link.close()
    again = shm.connect(other.member, soon())
    assert again.read(REALM, items((0, 4096)), soon()) == [Outcome.DONE]
    eventually(lambda: other.loans()[0] == 0)
    again.close()


def test_what_a_killed_reader_had_borrowed_comes_back(exports: Exporter, tmp_path: Path) -> None:
    with serving(exports, tmp_path) as (_, member):
        child = os.fork()
        if not child:  # pragma: no cover - the other process
            link = Shm(ME, CLUSTER, CREDENTIALS).connect(member, soon())
            link.view(REALM, [thing(0, 64)], [64], soon())
            signal.pause()
        eventually(lambda: exports.loans == 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        eventually(lambda: not exports.loans)
        assert exports.kept[0].done == [False]


def test_a_new_life_at_the_same_path_is_another(shm: Shm, tmp_path: Path) -> None:
    with exporting(Settings(str(tmp_path), MIB, seed=1, epoch=7)) as first:
        old = shm.connect(first.member, soon())
        first.signal(signal.SIGKILL)
        first.end()
        with exporting(Settings(str(tmp_path), MIB, seed=2, epoch=8)) as second:
            with pytest.raises(RefusedError, match="member"):
                shm.connect(first.member, soon())
            new = shm.connect(second.member, soon())
            assert new._memory is not old._memory
            target = np.zeros(MIB, np.uint8)
            assert new.read(REALM, [Item(thing(0, MIB), target)], soon()) == [Outcome.DONE]
            assert np.array_equal(target, pattern(MIB, seed=2))
            new.close()
        old.close()
