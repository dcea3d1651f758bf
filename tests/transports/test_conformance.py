"""The transports that go to a peer's memory by themselves keep the contract, whichever way they get there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.ports import Bytes
from headwater.tiers.host import MappedMemory, create_memory
from headwater.transports.nixl import Nixl
from headwater.transports.nixl_agent import Agent
from headwater.transports.offers import Offers
from headwater.transports.server import PeerServer
from headwater.transports.shm import Shm
from headwater.types import Member, align
from tests.conformance import transport
from tests.conformance.transport import Pair, TransportSuite
from tests.transports.exporters import CREDENTIALS, HOST, Exporter

ME = Member("asker", 3, "", host=HOST)
MEMBER = replace(transport.MEMBER, host=HOST)


@contextlib.contextmanager
def served(path: Path, agent: Agent | None = None) -> Iterator[tuple[Exporter, Member]]:
    exports = Exporter(transport.REALM)
    offers = Offers(exports, [agent] if agent else [])
    server = PeerServer(MEMBER, "test", offers, CREDENTIALS, ("127.0.0.1", 0), str(path / "s"))
    server.start()
    yield exports, replace(MEMBER, address=server.address, socket=server.socket_path)
    server.close(time.monotonic() + 5)
    assert exports.loans == 0


class TestShm(TransportSuite):
    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Pair]:
        self.segments: list[MappedMemory] = []
        with served(tmp_path) as (exports, member):
            shm = Shm(ME, "test", CREDENTIALS)
            yield Pair(shm, member, exports)
            shm.close()

    def add(self, pair: Pair, memory: Bytes, *, writable: bool = True) -> int:
        mapped = create_memory(align(len(memory)), "memfd", lock=False)
        self.segments.append(mapped)
        array = mapped.array(0, len(memory))
        array[:] = memory
        return pair.exports.add(array, mapped.descriptors[0], writable=writable)


class TestShmByTheKernel(TransportSuite):
    """Memory without a descriptor."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Pair]:
        with served(tmp_path) as (exports, member):
            shm = Shm(ME, "test", CREDENTIALS)
            yield Pair(shm, member, exports)
            shm.close()


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Agent, Agent]]:
    pytest.importorskip("nixl_cu12", reason="the wheel nixl-cu12 is not installed (none for this platform)")
    ours, theirs = Agent("asker.3", HOST), Agent("holder.7", HOST)
    yield ours, theirs
    ours.close()
    theirs.close()


class TestNixl(TransportSuite):
    @pytest.fixture
    def pair(self, tmp_path: Path, agents: tuple[Agent, Agent]) -> Iterator[Pair]:
        ours, theirs = agents
        with served(tmp_path, theirs) as (exports, member):
            nixl = Nixl(ME, "test", CREDENTIALS, ours)
            yield Pair(nixl, member, exports)
            nixl.close()
        theirs.export([])
