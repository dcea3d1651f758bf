"""NIXL between processes of this host: by CMA, and by the RDMA that UCX emulates over TCP, where a peer can stop in the
middle. Skipped only where NIXL's wheel cannot be had."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.errors import ConfigError, RefusedError, UnavailableError
from headwater.ports import Item
from headwater.transports import nixl, nixl_agent
from headwater.transports.nixl import Nixl, NixlLink
from headwater.transports.nixl_agent import Agent, Description, Span, Transfer, Who, span_of
from headwater.transports.wire import encode_message
from headwater.types import Extent, Member, Outcome
from tests.node.conftest import eventually
from tests.transports.exporters import (
    CLUSTER,
    CREDENTIALS,
    HOST,
    KIB,
    ME,
    MIB,
    REALM,
    Exporter,
    Settings,
    exporting,
    items,
    pattern,
    segment,
    serving,
    soon,
    thing,
)

pytest.importorskip("nixl_cu12", reason="the wheel nixl-cu12 is not installed (there is none for this platform)")

SIZE = 4 * MIB
SMALL = 256 * KIB


@pytest.fixture(scope="module")
def reading() -> Iterator[Agent]:
    agent = Agent("reader.1", HOST)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def exported() -> Iterator[Agent]:
    agent = Agent("exporter.7", HOST)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def exports(exported: Agent) -> Exporter:
    exports = Exporter()
    memory, array = segment(SIZE)
    exports.add(array, memory.descriptors[0])
    return exports


@pytest.fixture
def member(exports: Exporter, exported: Agent, tmp_path: Path) -> Iterator[Member]:
    exports.kept.clear()
    exports.loan_s, exports.checked, exports.lie = 30.0, True, lambda it: it
    with serving(exports, tmp_path, exported) as (_, member):
        yield member


@pytest.fixture
def transport(reading: Agent) -> Iterator[Nixl]:
    transport = Nixl(ME, CLUSTER, CREDENTIALS, reading)
    yield transport
    transport.close()
    assert "0 peers, 0 transfers" in repr(reading)


@pytest.fixture
def link(transport: Nixl, member: Member) -> Iterator[NixlLink]:
    link = transport.connect(member, soon())
    yield link
    link.close()


def test_what_is_read_is_verified_and_given_back(exports: Exporter, link: NixlLink) -> None:
    wanted = [*items((0, SIZE), (4096, 4096), (17, 1000), (5, 0)), Item(b"unknown", np.zeros(9, np.uint8))]
    assert link.read(REALM, wanted, soon()) == [Outcome.DONE] * 4 + [Outcome.MISSING]
    for item, (offset, length) in zip(wanted, [(0, SIZE), (4096, 4096), (17, 1000)], strict=False):
        assert np.array_equal(item.memory, pattern(SIZE)[offset : offset + length])
    eventually(lambda: not exports.loans)
    assert [it.done for it in exports.kept] == [[True] * 4 + [False]]
    assert link.stream.bytes_in < 4 * KIB, "the bytes do not go through the connection"


def test_memory_is_registered_once_if_it_can_be(
    link: NixlLink, reading: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = np.zeros(SIZE, np.uint8)
    reading.register(pool)
    assert not reading.lacking([pool[4096:8192], pool])
    made: list[object] = []
    register, deregister = nixl_agent._register, reading._nixl.deregister_memory
    monkeypatch.setattr(nixl_agent, "_register", lambda *arguments: made.append(1) or register(*arguments))
    undone: list[object] = []
    monkeypatch.setattr(reading._nixl, "deregister_memory", lambda it: undone.append(1) or deregister(it))
    assert link.read(REALM, [Item(thing(0, 4096), pool[4096:8192])], soon()) == [Outcome.DONE]
    assert np.array_equal(pool[4096:8192], pattern(SIZE)[:4096]) and not made
    assert link.read(REALM, items((0, 4096)), soon()) == [Outcome.DONE]
    assert made == undone == [1]


def test_what_has_no_checksum_comes_over_the_connection(exports: Exporter, link: NixlLink) -> None:
    exports.checked = False
    wanted = items((MIB, MIB))
    assert link.read(REALM, wanted, soon()) == [Outcome.DONE]
    assert np.array_equal(wanted[0].memory, pattern(SIZE)[MIB : 2 * MIB])
    assert link.stream.bytes_in > MIB
    eventually(lambda: len(exports.kept) == 2)
    assert exports.kept[1].checksums[0] is not None, "from now on the peer may know it"


def test_what_does_not_have_its_checksum_is_corrupt(exports: Exporter, link: NixlLink) -> None:
    exports.lie = lambda it: dataclasses.replace(it, checksum=(it.checksum or 0) ^ 1)
    assert link.read(REALM, items((0, MIB)), soon()) == [Outcome.CORRUPT]
    assert link.corrupt == 1


def test_a_loan_that_ended_meanwhile_counts_for_nothing(exports: Exporter, link: NixlLink) -> None:
    exports.loan_s = 0.0
    assert link.read(REALM, items((0, 4096)), soon()) == [Outcome.FAILED]


@pytest.mark.parametrize("lie", [Extent(0, SIZE - 10, 64), Extent(3, 0, 64)], ids=["over the end", "no such region"])
def test_a_peer_that_lies_about_places_costs_the_link_and_no_more(
    exports: Exporter, link: NixlLink, lie: Extent
) -> None:
    exports.lie = lambda it: dataclasses.replace(it, extent=lie)
    with pytest.raises(UnavailableError, match="none of its regions"):
        link.read(REALM, items((0, 64)), soon())
    eventually(lambda: not exports.loans)


def test_regions_may_come_and_go(exports: Exporter, link: NixlLink, exported: Agent) -> None:
    memory, array = segment(MIB, seed=2)
    number = exports.add(array, memory.descriptors[0])
    target = np.zeros(4096, np.uint8)
    assert link.read(REALM, [Item(thing(8192, 4096, number), target)], soon()) == [Outcome.DONE]
    assert np.array_equal(target, pattern(MIB, seed=2)[8192:12288])
    assert link.stream.bytes_in < 8 * KIB
    eventually(lambda: not exports.loans)
    exports.remove(number, soon())
    exported.export(exports.regions())
    assert list(exported._exported) == [0]


def test_what_is_written_goes_over_the_connection(exports: Exporter, link: NixlLink) -> None:
    mine = exports.regions()[0].memory[:4096].copy()
    assert link.write(REALM, [Item(thing(0, 4096), mine)], soon()) == [Outcome.DONE]
    assert link.stream.bytes_out > 4096


def test_an_agent_is_that_of_the_life_that_was_asked_for(
    transport: Nixl, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RefusedError, match="member"):
        transport.connect(dataclasses.replace(member, epoch=8), soon())
    monkeypatch.setattr(nixl, "agent_name", lambda member: "exporter.8")
    with pytest.raises(UnavailableError, match=r"calls its agent exporter\.7"):
        transport.connect(member, soon())


def test_an_agent_whose_name_only_begins_alike_is_another(
    transport: Nixl, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Life 1 is not life 12."""
    monkeypatch.setattr(nixl, "agent_name", lambda member: "exporter.")
    with pytest.raises(UnavailableError, match=r"calls its agent exporter\.7"):
        transport.connect(member, soon())


@pytest.mark.parametrize(
    "wrong",
    [
        {"bases": []},
        {"sizes": [1, 2]},
        {"numbers": [0, 0], "bases": [1, 1], "sizes": [1, 1]},
        {"numbers": [-1]},
        {"bases": [-1]},
        {"sizes": [-1]},
        {"bases": [(1 << 64) - 1], "sizes": [2]},
        {"pid": 0},
        {"pid": 1 << 31},
    ],
    ids=str,
)
def test_a_description_that_makes_no_sense_costs_the_link_and_no_more(
    transport: Nixl, member: Member, exported: Agent, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    good = Description("exporter.7", b"", [0], [4096], [1], False, os.getpid())
    bad = encode_message(msgspec.structs.replace(good, **wrong))
    monkeypatch.setattr(exported, "describe", lambda *_: bad)
    with pytest.raises(UnavailableError, match=r"exporter: .*region"):
        transport.connect(member, soon())


def test_regions_that_came_and_went_leave_nothing_behind(exports: Exporter, link: NixlLink, exported: Agent) -> None:
    for _ in range(3):
        exports.remove(exports.add(np.zeros(4096, np.uint8)), soon())
    number = exports.add(np.ones(4096, np.uint8))
    target = np.zeros(4096, np.uint8)
    assert link.read(REALM, [Item(thing(0, 4096, number), target)], soon()) == [Outcome.DONE]
    assert target.all() and sorted(link._description.numbers) == [0, number] == sorted(exported._exported)
    eventually(lambda: not exports.loans)
    exports.remove(number, soon())


def test_metadata_of_another_agent_is_not_taken(exported: Agent, reading: Agent) -> None:
    about = nixl_agent.decode_description(exported.describe("", encode_message(Who(HOST, False)), [], soon()))
    with pytest.raises(UnavailableError, match=r"that of exporter\.7"):
        reading.join("exporter.8", about.metadata)
    with pytest.raises(UnavailableError, match="NIXL"):
        reading.join("exporter.9", b"no metadata")


def test_an_agent_that_failed_is_not_used_before_all_links_to_it_are_closed(
    transport: Nixl, member: Member, reading: Agent
) -> None:
    first = transport.connect(member, soon())
    second = transport.connect(member, soon())
    reading.failed("exporter.7")
    first.close()
    with pytest.raises(UnavailableError, match="has failed"):
        transport.connect(member, soon())
    second.close()
    third = transport.connect(member, soon())
    assert third.read(REALM, items((0, 4096)), soon()) == [Outcome.DONE]
    third.close()


def test_emulated_rdma_is_refused_by_both_sides(
    transport: Nixl, member: Member, exported: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that dies would end the exporter's process."""
    with pytest.raises(RefusedError, match="RDMA"):
        exported.describe("", encode_message(Who("another host", has_rdma=True)), [], soon())
    with pytest.raises(RefusedError, match="who asks"):
        exported.describe("", b"nonsense", [], soon())
    with pytest.raises(UnavailableError, match="no RDMA"):
        transport.connect(dataclasses.replace(member, host="another host"), soon())
    monkeypatch.setattr(nixl.cma.Process, "answers", lambda self, places: False)
    with pytest.raises(UnavailableError, match="no RDMA"):
        transport.connect(member, soon())


def test_without_the_wheel_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(ConfigError, match="headwater\\[nixl\\]"):
        Agent("nobody")


# ---- processes of their own ---------------------------------------------------------------------------------


def test_another_process_is_read_and_may_be_killed(transport: Nixl, tmp_path: Path) -> None:
    with exporting(Settings(str(tmp_path), SIZE, nixl=True, epoch=9)) as other:
        link = transport.connect(other.member, soon())
        wanted = items((0, SIZE), (3, 100))
        assert link.read(REALM, wanted, soon()) == [Outcome.DONE] * 2
        assert np.array_equal(wanted[0].memory, pattern(SIZE))
        eventually(lambda: other.loans() == (0, 1))
        begun_s = time.monotonic()
        with pytest.raises(UnavailableError):
            killed_before(link._agent, other.pid, link, items((0, SIZE)))
        assert time.monotonic() - begun_s < 20
        link.close()
        with pytest.raises(UnavailableError):
            transport.connect(other.member, soon())


def killed_before(agent: Agent, pid: int, link: NixlLink, wanted: Sequence[Item]) -> None:
    """Read, and kill the peer between its answer and the transfer."""
    read = agent.read

    def late(name: str, kind: str, targets: Sequence[Span], sources: Sequence[Span]) -> Transfer:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return read(name, kind, targets, sources)

    agent.read = late  # type: ignore[method-assign]
    try:
        link.read(REALM, wanted, soon(60))
    finally:
        del agent.read  # type: ignore[method-assign]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent that has nothing but TCP, where a peer can stop in the middle."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    agent = Agent("reader.2", HOST, emulated=True)
    yield agent
    agent.close()


def test_a_paused_peer(emulated: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releasing a transfer's handle would return at once, and its bytes would come when the peer goes on."""
    settings = Settings(str(tmp_path), SMALL, nixl=True, emulated=True)
    with exporting(settings, {"UCX_TLS": "tcp", "UCX_HANDLE_ERRORS": "none"}) as other:
        transport = Nixl(ME, CLUSTER, CREDENTIALS, emulated)
        link = transport.connect(other.member, soon())
        assert link.read(REALM, items((0, SMALL)), soon(10)) == [Outcome.DONE]
        eventually(lambda: other.loans() == (0, 1))

        read = Agent.read

        def paused(self: Agent, name: str, kind: str, targets: Sequence[Span], sources: Sequence[Span]) -> Transfer:
            other.pause()
            return read(self, name, kind, targets, sources)

        with monkeypatch.context() as patch:
            patch.setattr(Agent, "read", paused)
            wanted, outcomes = items((0, SMALL)), []
            thread = threading.Thread(target=lambda: outcomes.extend(link.read(REALM, wanted, soon(0.5))))
            thread.start()
            eventually(lambda: bool(emulated._busy))
            thread.join(0.8)
            assert thread.is_alive() and not wanted[0].memory.any(), "late, but its memory is not free yet"
            other.signal(signal.SIGCONT)
            thread.join(10)
        assert outcomes == [Outcome.FAILED], "too late"
        assert np.array_equal(wanted[0].memory, pattern(SMALL)), "all of it had arrived before the call was over"
        eventually(lambda: other.loans() == (0, 2))

        other.pause()
        about = link._description
        late = np.zeros(SMALL, np.uint8)
        monkeypatch.setattr(nixl_agent, "CLOSE_S", 0.1)
        with emulated.registered([late]):
            transfer = emulated.read("exporter.7", "DRAM", [span_of(late)], [(about.bases[0], len(late), 0)])
            emulated.close()
        assert not transfer.wait(soon(), lambda: False) and transfer.state == "ERR"
        other.signal(signal.SIGCONT)
        link.close()
        transport.close()
        other.ends_within(0.5)  # as it may, when it sends to nobody
        assert not late.any(), "nothing comes any more"


ENDS = """
import atexit, sys
import numpy
from headwater.transports import nixl_agent
from headwater.transports.nixl_agent import Agent
nixl_agent.CLOSE_S = 0.1
atexit.register(lambda: print("closed", agent._ended.is_set()))
metadata, base, size = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
agent = Agent("reader.3", emulated=True)
target = numpy.zeros(size, numpy.uint8)
agent.register(target)
agent.join("exporter.7", metadata)
places = [(target.ctypes.data, size, 0)] * 30, [(base, size, 0)] * 30
assert agent.read("exporter.7", "DRAM", *places).state == "PROC"
"""


def test_a_process_may_end_in_the_middle(emulated: Agent, tmp_path: Path) -> None:
    """UCX crashes if its parts go while something is under way."""
    settings = Settings(str(tmp_path), SMALL, nixl=True, emulated=True)
    with exporting(settings, {"UCX_TLS": "tcp", "UCX_HANDLE_ERRORS": "none"}) as other:
        transport = Nixl(ME, CLUSTER, CREDENTIALS, emulated)
        link = transport.connect(other.member, soon())
        about = link._description
        link.close()
        command = [sys.executable, "-c", ENDS, about.metadata.hex(), str(about.bases[0]), str(SMALL)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, text=True)
        assert ended.returncode == 0 and "closed True" in ended.stdout, ended.stdout


@pytest.mark.gpu
def test_device_memory_is_read_into(transport: Nixl, member: Member) -> None:
    torch = pytest.importorskip("torch")
    link = transport.connect(member, soon())
    target = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    assert link.read(REALM, [Item(thing(0, MIB), target)], soon()) == [Outcome.DONE]
    assert np.array_equal(target.cpu().numpy(), pattern(SIZE)[:MIB])
    link.close()
