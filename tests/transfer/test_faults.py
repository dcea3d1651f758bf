"""Transfers from engines in other processes that die, stop, or are restarted."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from headwater.errors import RefusedError, UnavailableError
from headwater.ports import Lent
from headwater.transfer import Engine, Outcome
from headwater.transfer import Peer as Remote
from headwater.transfer.claims import Claim
from headwater.transfer.exports import EngineExports
from headwater.transports.memory_exports import region_name
from headwater.transports.serving import Serving
from headwater.transports.tcp import TcpLink
from headwater.transports.wire import Kind
from tests.node.conftest import eventually
from tests.node.peers import ForkServer, Peer
from tests.transfer.peers import SIZE, lender, pattern

DONE, FAILED = Outcome.DONE, Outcome.FAILED
ROOT = Path(__file__).resolve().parents[2]
OVER = [["shm"], ["tcp"]]
PIECE = 64 << 10
PIECES = SIZE // PIECE


def start(
    others: ForkServer, transports: list[str], name: str = "far", listen: str = "127.0.0.1:0"
) -> tuple[Peer, dict]:
    process = others.start(lender, name=name, transports=transports, listen=listen)
    return process, process.hear()


def link(engine: Engine, told: dict) -> Remote:
    return engine.connect(told["descriptor"].encode())


def stop(process: Peer) -> None:
    """Stop a process, all of its threads."""
    process.signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")

    def states() -> set[str]:
        return {(it / "stat").read_text().rpartition(")")[2].split()[0] for it in threads.iterdir()}

    eventually(lambda: states() == {"T"}, seen=states)


def batch(room: np.ndarray) -> list:
    return [(0, at * PIECE, PIECE, room[at * PIECE : (at + 1) * PIECE]) for at in range(PIECES)]


@pytest.mark.parametrize("transports", OVER, ids=str)
def test_bytes_cross_processes_both_ways(
    others: ForkServer, make_engine: Callable[..., Engine], transports: list[str]
) -> None:
    _, told = start(others, transports)
    engine = make_engine("near", transports=transports)
    peer = link(engine, told)
    room = np.zeros(SIZE, np.uint8)
    assert set(engine.read(peer, batch(room))) == {DONE}
    assert np.array_equal(room, pattern("far"))
    mine = engine.register(SIZE)
    mine.memory[:] = pattern("mine")
    assert engine.write(peer, [(1, 5, SIZE - 5, mine.memory[:-5])]) == [DONE]
    back = np.zeros(SIZE - 5, np.uint8)
    assert engine.read(peer, [(1, 5, SIZE - 5, back)]) == [DONE]
    assert np.array_equal(back, pattern("mine")[:-5])


@pytest.mark.parametrize("transports", OVER, ids=str)
def test_who_is_killed_while_it_is_read_costs_outcomes_and_no_wrong_byte(
    others: ForkServer, make_engine: Callable[..., Engine], transports: list[str]
) -> None:
    expected = pattern("far")
    engine = make_engine("near", transports=transports)
    process, told = start(others, transports)
    peer = link(engine, told)
    rooms = [np.zeros(SIZE, np.uint8) for _ in range(12)]
    transfers = [engine.submit_read(peer, batch(room), 5.0) for room in rooms]
    transfers[1].result(5)
    process.kill()
    killed_s = time.monotonic()
    outcomes = [it.result(5) for it in transfers]
    assert time.monotonic() - killed_s < 2.0
    for room, found in zip(rooms, outcomes, strict=True):
        assert set(found) <= {DONE, FAILED}
        for at, outcome in enumerate(found):
            if outcome is DONE:
                assert np.array_equal(room[at * PIECE :][:PIECE], expected[at * PIECE :][:PIECE])
    with pytest.raises(UnavailableError):
        engine.notify(peer, "are you there?", deadline_s=1.0)
    # Another engine at the same address is another peer.
    _, again = start(others, transports, listen=told["address"])
    if transports == ["tcp"]:
        with pytest.raises(RefusedError, match=r"^member"):
            eventually(lambda: engine.read(peer, [(0, 0, 4, bytearray(4))], 1.0) == [DONE])
    back = np.zeros(SIZE, np.uint8)
    assert set(engine.read(link(engine, again), batch(back))) == {DONE}
    assert np.array_equal(back, expected)


@pytest.mark.parametrize("transports", OVER, ids=str)
def test_who_is_stopped_costs_the_deadline_and_no_more(
    others: ForkServer, make_engine: Callable[..., Engine], transports: list[str]
) -> None:
    engine = make_engine("near", transports=transports)
    process, told = start(others, transports)
    peer = link(engine, told)
    stop(process)
    room = np.zeros(SIZE, np.uint8)
    began_s = time.monotonic()
    assert set(engine.read(peer, batch(room), 0.2)) == {FAILED}
    assert time.monotonic() - began_s < 1.0
    process.signal(signal.SIGCONT)
    room[:] = 7
    assert engine.read(peer, [(0, 0, 10, bytearray(10))], 5.0) == [DONE]
    assert (room == 7).all(), "what came late touched memory that was the caller's again"


@pytest.mark.parametrize("transports", OVER, ids=str)
def test_cancel_returns_soon_and_nothing_touches_the_memory_afterwards(
    others: ForkServer, make_engine: Callable[..., Engine], transports: list[str]
) -> None:
    engine = make_engine("near", transports=transports, workers=1)
    process, told = start(others, transports)
    peer = link(engine, told)
    stop(process)
    room = np.zeros(SIZE, np.uint8)
    transfer, waiting = (engine.submit_read(peer, batch(room), 30.0) for _ in range(2))
    with pytest.raises(TimeoutError):
        transfer.result(0.05)
    assert (waiting.cancel(), waiting.done()) == (True, True)
    began_s = time.monotonic()
    assert transfer.cancel()
    assert time.monotonic() - began_s < 0.8, "it does not connect again"
    assert transfer.cancelled()
    assert transfer.done()
    with pytest.raises(CancelledError):
        transfer.result()
    room[:] = 7
    process.signal(signal.SIGCONT)
    assert engine.read(peer, [(0, 0, 10, bytearray(10))], 5.0) == [DONE]
    assert (room == 7).all()


def test_a_coroutine_that_is_cancelled_ends_when_its_memory_is_free(
    others: ForkServer, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine("near", transports=["tcp"])
    process, told = start(others, ["tcp"])
    peer = link(engine, told)
    stop(process)
    room = np.zeros(SIZE, np.uint8)

    async def give_up() -> None:
        reading = asyncio.create_task(engine.aread(peer, batch(room), 30.0))
        done, _ = await asyncio.wait([reading], timeout=0.05)
        assert not done
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    began_s = time.monotonic()
    asyncio.run(give_up())
    assert time.monotonic() - began_s < 2.0
    assert not engine._under_way, "it was over before the coroutine was"
    process.signal(signal.SIGCONT)


class Held:
    """Holds up the first of a server's calls until it is let go."""

    def __init__(self, real: Callable[..., None]) -> None:
        self.real = real
        self.reached, self.go, self.over = (threading.Event() for _ in range(3))
        self._first = iter([True])

    def __call__(self, serving: Serving, *arguments: object) -> None:
        if not next(self._first, False):
            return self.real(serving, *arguments)
        self.reached.set()
        self.go.wait(10)
        try:
            return self.real(serving, *arguments)
        finally:
            self.over.set()


@pytest.mark.parametrize("way", ["cancelled", "late"])
def test_a_write_that_was_given_up_while_it_is_received_does_not_undo_a_later_one(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    one, other = (make_engine(name, transports=["tcp"]) for name in ("one", "other"))
    segment = one.register(PIECE, writable=True)
    peer = other.connect(one.descriptor())
    held = Held(Serving._fill)
    monkeypatch.setattr(Serving, "_fill", lambda *arguments: held(*arguments))
    old, new = np.full(PIECE, 1, np.uint8), np.full(PIECE, 2, np.uint8)
    first = other.submit_write(peer, [(0, 0, PIECE, old)], 30.0 if way == "cancelled" else 0.3)
    assert held.reached.wait(5)
    if way == "cancelled":
        assert first.cancel()
    else:
        assert first.result(5) == [FAILED]
    elsewhere = other.write(peer, [(0, PIECE - 10, 10, new)], 0.1)
    second = other.submit_write(peer, [(0, 10, PIECE - 10, new)], 10.0)
    with pytest.raises(TimeoutError):
        second.result(0.4)
    held.go.set()
    assert second.result(10) == [DONE]
    assert held.over.wait(5)
    assert elsewhere == [FAILED]
    assert np.array_equal(segment.memory[10:], new[10:])


def test_a_write_that_was_given_up_before_it_began_does_not_count_any_more(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (make_engine(name, transports=["tcp"]) for name in ("one", "other"))
    segment = one.register(PIECE, writable=True)
    peer = other.connect(one.descriptor())
    held = Held(Serving._verbs[Kind.WRITE])
    monkeypatch.setitem(Serving._verbs, Kind.WRITE, held)
    old, new = np.full(PIECE, 1, np.uint8), np.full(PIECE, 2, np.uint8)
    first = other.submit_write(peer, [(0, 0, PIECE, old)], 30.0)
    assert held.reached.wait(5)
    assert first.cancel()
    assert other.write(other.connect(one.descriptor()), [(0, 0, PIECE, new)], 5.0) == [DONE]
    held.go.set()
    assert held.over.wait(5)
    assert np.array_equal(segment.memory, new), "the older bytes came last"
    assert other.write(peer, [(0, 0, PIECE, old)], 5.0) == [DONE]
    assert np.array_equal(segment.memory, old)


def test_writes_of_many_at_once_leave_each_range_as_one_of_them_has_written_it(
    make_engine: Callable[..., Engine],
) -> None:
    one = make_engine("one", transports=["shm", "tcp"])
    segment = one.register(SIZE // 8, writable=True)
    writers = [make_engine(f"writer{at}", transports=[via]) for at, via in enumerate(["shm", "tcp"])]
    peers = [it.connect(one.descriptor()) for it in writers]
    transfers = [
        it.submit_write(peer, [(0, 0, SIZE // 8, np.full(SIZE // 8, 4 * number + at, np.uint8))], 20.0)
        for number in range(4)
        for at, (it, peer) in enumerate(zip(writers, peers, strict=True))
    ]
    assert [it.result(20) for it in transfers] == [[DONE]] * 8
    assert len(np.unique(segment.memory)) == 1
    assert not one._exports._claims._claims


@pytest.mark.parametrize("transports", [["shm"], ["shm", "tcp"]], ids=str)
def test_memory_that_the_user_has_brought_is_written_over_shm(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, transports: list[str]
) -> None:
    one, other = (make_engine(name, transports=transports) for name in ("one", "other"))
    brought = np.zeros(PIECE, np.uint8)
    monkeypatch.setattr(TcpLink, "write", lambda *_: [FAILED])
    one.register(brought, writable=True)
    peer = other.connect(one.descriptor())
    for _ in range(3):
        assert other.write(peer, [(0, 0, PIECE, pattern("x", PIECE))]) == [DONE]
    assert np.array_equal(brought, pattern("x", PIECE))
    assert not peer.breakers["shm"].failed_operations


def test_what_a_peer_cannot_lend_to_be_written_goes_over_the_socket(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (make_engine(name, transports=["shm"]) for name in ("one", "other"))
    segments = [one.register(PIECE, writable=True) for _ in range(2)]
    peer = other.connect(one.descriptor())
    accept = EngineExports.accept

    def in_no_region(*arguments):
        loan = accept(*arguments)
        loan.parts = [Lent(loan.parts[0].memory), *loan.parts[1:]]
        return loan

    monkeypatch.setattr(EngineExports, "accept", in_no_region)
    items = [(at, 0, PIECE, pattern(f"{at}", PIECE)) for at in range(2)]
    assert other.write(peer, items) == [DONE, DONE]
    for at, it in enumerate(segments):
        assert np.array_equal(it.memory, pattern(f"{at}", PIECE))


def test_a_peer_that_answers_that_it_cannot_lend_is_not_sick(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (make_engine(name, transports=["shm"]) for name in ("one", "other"))
    one.register(PIECE, writable=True)
    peer = other.connect(one.descriptor())
    one._exports._memory.available = False
    assert other.write(peer, [(0, 0, 4, b"four")], 0.05) == [FAILED]
    assert other.read(peer, [(0, 0, 4, bytearray(4))], 0.5) == [FAILED]
    assert not peer.breakers["shm"].failed_operations


def test_claims_meet_where_a_byte_belongs_to_both() -> None:
    draw = random.Random(3)
    for _ in range(300):
        both = [
            [(draw.randrange(2), draw.randrange(30), draw.randrange(1, 4)) for _ in range(draw.randrange(5))]
            for _ in range(2)
        ]
        one, other = (Claim([region_name(*it) for it in spans]) for spans in both)
        bytes_ = [{(segment, at + step) for segment, at, size in it for step in range(size)} for it in both]
        assert one.meets(other) == other.meets(one) == bool(bytes_[0] & bytes_[1]), both


def test_the_example_runs() -> None:
    script = ROOT / "examples" / "transfer_engine.py"
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stderr) == (0, "")
    assert "16 of 16 blocks" in told.stdout
    assert "has written b'hello'" in told.stdout
