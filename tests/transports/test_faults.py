"""What networks do to a connection is noticed: nothing wrong is ever called right, and the damage stays where it is."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from headwater.errors import RefusedError, UnavailableError
from headwater.ports import Item, Lent
from headwater.transports.credentials import Credentials
from headwater.transports.memory_exports import RegionLoan, region_name
from headwater.transports.payloads import checksum
from headwater.transports.server import PeerServer
from headwater.transports.tcp import Tcp, TcpLink
from headwater.types import Outcome
from tests.conformance.transport import MEMBER, REALM, KeptExports, content, soon
from tests.node.conftest import eventually
from tests.transports.proxy import Fault, FaultProxy, Kind, Way

SIZE, COUNT = 3000, 5
TOKEN = Credentials((b"a token of this test",))


class Rig:
    """A holder behind a proxy."""

    def __init__(self, seed: int) -> None:
        self.exports = KeptExports()
        self.source = content(1, SIZE * COUNT)
        self.exports.add(self.source)
        self.server = PeerServer(MEMBER, "test", self.exports, TOKEN, ("127.0.0.1", 0))
        self.server.start()
        self.proxy = FaultProxy("127.0.0.1", int(self.server.address.rpartition(":")[2]), seed)
        self.transport = Tcp(replace(MEMBER, name="asker"), "test", TOKEN)
        self.target = np.zeros(SIZE * COUNT, np.uint8)
        self.items = [
            Item(region_name(0, at * SIZE, SIZE), self.target[at * SIZE : (at + 1) * SIZE]) for at in range(COUNT)
        ]

    def connect(self) -> TcpLink:
        return self.transport.connect(replace(MEMBER, address=self.proxy.address), soon())

    def right(self) -> list[bool]:
        """Which items have the holder's bytes."""
        rows = zip(self.target.reshape(COUNT, SIZE), self.source.reshape(COUNT, SIZE), strict=True)
        return [bool(np.array_equal(mine, theirs)) for mine, theirs in rows]

    def close(self) -> None:
        self.proxy.close()
        self.server.close(soon())
        assert self.exports.loans == 0


@pytest.fixture
def rig(seed: int) -> Iterator[Rig]:
    rig = Rig(seed)
    yield rig
    rig.close()


BREAKS = [Kind.CORRUPT, Kind.TRUNCATE, Kind.DUPLICATE, Kind.DROP, Kind.REORDER]


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("kind", BREAKS)
def test_no_fault_makes_wrong_bytes_right(rig: Rig, kind: Kind, verb: str, way: Way, seed: int) -> None:
    rng = random.Random(f"{seed} {kind} {verb} {way}")
    payload_way = Way.BACK if verb == "read" else Way.OUT
    for _ in range(5):
        link = rig.connect()
        (rig.target if verb == "read" else rig.source)[:] = 0
        fresh = content(rng.randrange(1 << 30), SIZE * COUNT)
        (rig.source if verb == "read" else rig.target)[:] = fresh
        most = SIZE * COUNT if way is payload_way else 64
        rig.proxy.arm(Fault(kind, way, rng.randrange(most), rng.choice((1, 64, 700))))
        try:
            outcomes = getattr(link, verb)(REALM, rig.items, soon(0.2))
        except UnavailableError:
            outcomes = None
        rig.proxy.arm(None)
        if outcomes is not None:
            right = rig.right()
            assert all(it or outcome is not Outcome.DONE for it, outcome in zip(right, outcomes, strict=True))
        link.close()
        eventually(lambda: rig.exports.loans == 0)


def test_a_flipped_bit_costs_one_payload(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    link = rig.connect()
    for round_ in range(1, 20):
        at = rng.randrange(COUNT * SIZE)
        expected = [Outcome.DONE] * COUNT
        expected[at // SIZE] = Outcome.CORRUPT
        rig.proxy.arm(Fault(Kind.CORRUPT, Way.BACK, 64 + at))
        assert link.read(REALM, rig.items, soon()) == expected, f"{at=}"
        assert link.corrupt == round_
        request_bytes = -(-(24 + 20 + len(REALM) + COUNT * 28) // 64) * 64
        rig.proxy.arm(Fault(Kind.CORRUPT, Way.OUT, request_bytes + at))
        assert link.write(REALM, rig.items, soon()) == expected, f"{at=}"
        assert rig.server.stats()["corrupt"] == round_
        assert rig.exports.kept[-1].done == [it is Outcome.DONE for it in expected]
        rig.source[:] = rig.target[:] = content(round_, SIZE * COUNT)
    assert link.read(REALM, rig.items, soon()) == [Outcome.DONE] * COUNT
    link.close()


@pytest.mark.parametrize("at", [0, 5, 10, 20, 30])
@pytest.mark.parametrize("way", Way)
def test_a_flipped_bit_in_a_frame_ends_the_connection(rig: Rig, way: Way, at: int) -> None:
    link = rig.connect()
    rig.proxy.arm(Fault(Kind.CORRUPT, way, at))
    with pytest.raises(UnavailableError):
        link.read(REALM, rig.items, soon())
    with pytest.raises(UnavailableError):
        link.ask("anything", b"", soon())
    link.close()
    if way is Way.OUT:
        eventually(lambda: rig.server.stats()["protocol_errors"] == 1)


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("way", Way)
def test_a_stalled_direction_ends_in_time(rig: Rig, way: Way, verb: str) -> None:
    link = rig.connect()
    rig.proxy.arm(Fault(Kind.STALL, way, 40))
    before_s = time.monotonic()
    with pytest.raises(UnavailableError, match="in time"):
        getattr(link, verb)(REALM, rig.items, before_s + 0.15)
    assert 0.14 < time.monotonic() - before_s < 1.5
    link.close()


def test_a_delay_is_no_fault(rig: Rig) -> None:
    link = rig.connect()
    rig.proxy.arm(Fault(Kind.DELAY, Way.BACK, 1000, delay_s=0.05))
    before_s = time.monotonic()
    assert link.read(REALM, rig.items, soon()) == [Outcome.DONE] * COUNT
    assert time.monotonic() - before_s >= 0.05
    link.close()


@pytest.mark.parametrize("way", Way)
def test_a_handshake_on_a_bad_line_ends_in_time(rig: Rig, way: Way, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        rig.proxy.arm(Fault(rng.choice(BREAKS), way, rng.randrange(128), 1))
        try:
            link = rig.transport.connect(replace(MEMBER, address=rig.proxy.address), soon(0.3))
        except (UnavailableError, RefusedError):
            continue
        assert not rig.proxy.hit.is_set() or link.read(REALM, rig.items, soon(0.3))
        link.close()


@pytest.mark.parametrize("known", [False, True])
def test_a_reader_that_is_slower_than_its_loan_gets_nothing(rig: Rig, known: bool) -> None:
    """The holder's memory is another's by the time that its last bytes go out."""
    big = np.zeros(32 << 20, np.uint8)
    lend, sum_ = rig.exports.lend, checksum(big)

    def lend_known(peer: str, realm: bytes, names: Sequence[bytes], until_s: float) -> RegionLoan:
        loan = lend(peer, realm, names, until_s)
        loan.parts[:] = [Lent(it.memory, None, sum_) for it in loan.parts if isinstance(it, Lent)]
        return loan

    if known:
        rig.exports.lend = lend_known  # type: ignore[method-assign]
    segment = rig.exports.add(big)
    rig.exports.loan_s = 0.2
    link = rig.connect()
    target = np.ones(32 << 20, np.uint8)
    rig.proxy.arm(Fault(Kind.DELAY, Way.BACK, 1 << 20, delay_s=0.5))
    assert link.read(REALM, [Item(region_name(segment, 0, 32 << 20), target)], soon()) == [Outcome.FAILED]
    eventually(lambda: rig.exports.loans == 0)
    assert rig.exports.kept[-1].done == [False]
    assert rig.server.stats()["late"] == 1
    link.close()


def test_memory_that_changes_while_it_is_sent_is_not_taken(rig: Rig) -> None:
    """The holder has said a checksum; what it sends is something else by now."""

    def stale(loan: RegionLoan) -> RegionLoan:
        loan.parts[:] = [Lent(it.memory, None, 12345) if isinstance(it, Lent) else it for it in loan.parts]
        return loan

    lend = rig.exports.lend
    rig.exports.lend = lambda *words: stale(lend(*words))  # type: ignore[method-assign]
    link = rig.connect()
    assert link.read(REALM, rig.items, soon()) == [Outcome.CORRUPT] * COUNT
    link.close()


def test_a_connection_that_is_cut_gives_everything_back(rig: Rig) -> None:
    link = rig.connect()
    rig.proxy.arm(Fault(Kind.STALL, Way.OUT, 9000))
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(link.write, REALM, rig.items, soon())
        assert rig.proxy.hit.wait(5)
        eventually(lambda: rig.exports.loans == 1)
        rig.proxy.cut()
        with pytest.raises(UnavailableError):
            call.result(10)
    eventually(lambda: rig.exports.loans == 0)
    assert rig.exports.kept[-1].done == [False] * COUNT
    link.close()
