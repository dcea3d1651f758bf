"""The Transfer Engine between two engines of this process: every verb over every transport, and every refusal."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, as_completed
from hashlib import sha256

import numpy as np
import pytest

from headwater.errors import ConfigError, RefusedError, UnavailableError
from headwater.transfer import Credentials, Engine, Outcome, Peer, Segment, parse_descriptor
from headwater.transfer.buffers import bytes_of
from headwater.transfer.exports import REALM, EngineExports, encode_note
from headwater.transfer.inbox import Inbox, Notification
from headwater.transports.local import LocalLink
from headwater.transports.memory_exports import region_name
from headwater.transports.shm import ShmLink
from headwater.transports.tcp import TcpLink
from tests.node.conftest import descriptors, eventually
from tests.transfer.conftest import TRANSPORTS
from tests.transfer.peers import pattern

DONE, FAILED = Outcome.DONE, Outcome.FAILED
SIZE = 1 << 20
Pair = tuple[Engine, Engine, Peer, Segment]


@pytest.fixture(params=TRANSPORTS, ids="+".join)
def pair(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Pair:
    """An exporter with a readable and writable segment, and a reader that is connected to it."""
    one, other = (make_engine(name, transports=request.param) for name in ("one", "other"))
    segment = one.register(SIZE, writable=True)
    segment.memory[:] = pattern("one", SIZE)
    return one, other, other.connect(one.descriptor()), segment


def test_batches_of_any_shape_arrive_where_they_belong(pair: Pair) -> None:
    one, other, peer, segment = pair
    own = bytearray(pattern("own", 300_000).tobytes())
    brought = one.register(own)
    other.refresh(peer)
    draw = random.Random(1)
    for count in (1, 2, 33, 200):
        source = [(segment, segment.memory), (brought, np.frombuffer(own, np.uint8))]
        items, expected = [], []
        for _ in range(count):
            which, memory = draw.choice(source)
            length = draw.choice([1, 63, 4096, 10_000])
            offset = draw.randrange(len(memory) - length)
            items.append((which.number, offset, length, np.zeros(length + draw.choice([0, 5]), np.uint8)))
            expected.append(memory[offset : offset + length].tobytes())
        assert other.read(peer, items) == [DONE] * count
        for (_, _, length, memory), bytes_ in zip(items, expected, strict=True):
            assert memory[:length].tobytes() == bytes_
            assert not memory[length:].any()


def test_writes_are_there_when_they_are_done(pair: Pair) -> None:
    _, other, peer, segment = pair
    before = segment.memory.copy()
    items = [(segment.remote, at * 1000, 500, pattern(f"{at}", 500)) for at in range(100)]
    assert other.write(peer, items) == [DONE] * 100
    for at in range(100):
        assert np.array_equal(segment.memory[at * 1000 : at * 1000 + 500], pattern(f"{at}", 500))
        assert np.array_equal(
            segment.memory[at * 1000 + 500 : at * 1000 + 1000], before[at * 1000 + 500 : (at + 1) * 1000]
        )


def test_futures_and_coroutines_do_the_same(pair: Pair) -> None:
    _, other, peer, segment = pair
    rooms = [np.zeros(1000, np.uint8) for _ in range(20)]
    transfers = [other.submit_read(peer, [(0, at * 1000, 1000, room)]) for at, room in enumerate(rooms)]
    assert [it.result() for it in as_completed(transfers, 10)] == [[DONE]] * 20
    assert all(it.done() and not it.cancelled() and not it.cancel() for it in transfers)
    assert np.array_equal(np.concatenate(rooms), segment.memory[:20_000])
    assert other.submit_write(peer, [(0, 0, 5, b"hello")]).result(5) == [DONE]

    async def use() -> list[list[Outcome]]:
        room = bytearray(5)
        results = await asyncio.gather(*(other.aread(peer, [(0, 0, 5, room)]) for _ in range(3)))
        assert room == b"hello"
        return [*results, await other.awrite(peer, [(0, 0, 5, b"again")])]

    assert asyncio.run(use()) == [[DONE]] * 4
    assert segment.memory[:5].tobytes() == b"again"


def test_notifications_come_in_order_once_and_not_without_bound(pair: Pair) -> None:
    one, other, peer, _ = pair
    for number in range(5):
        other.notify(peer, "step", b"%d" % number)
    assert [(it.peer, it.topic, it.body) for it in one.notifications(0.0)] == [
        ("other", "step", b"%d" % number) for number in range(5)
    ]
    for _ in range(1024):
        other.notify(peer, "flood")
    with pytest.raises(RefusedError, match="notifications: expected at most 1024"):
        other.notify(peer, "flood")
    assert len(list(one.notifications(0.0))) == 1024

    async def first() -> bytes:
        other.notify(peer, "late", b"x")
        async for it in one.anotifications():
            return it.body
        raise AssertionError("the inbox has ended")

    assert asyncio.run(first()) == b"x"


def test_a_notification_that_was_sent_twice_comes_once(make_engine: Callable[..., Engine]) -> None:
    one = make_engine("one")
    for serial, body in ((1, b"a"), (1, b"a"), (2, b"b"), (1, b"a")):
        one._exports.told("other", "note/t", encode_note(7, serial, body), time.monotonic() + 1)
    one._exports.told("other", "note/t", encode_note(8, 1, b"another life"), time.monotonic() + 1)
    assert [it.body for it in one.notifications(0.0)] == [b"a", b"b", b"another life"]
    for topic, body in (("note/t", b"short"), ("x", b"")):
        with pytest.raises(RefusedError):
            one._exports.told("other", topic, body, time.monotonic() + 1)


def test_a_waiting_coroutine_is_woken_by_what_comes_and_by_the_end(make_engine: Callable[..., Engine]) -> None:
    one, other = make_engine("one"), make_engine("other")
    peer = other.connect(one.descriptor())

    async def listen() -> list[str]:
        seen = []
        async for it in one.anotifications():
            seen.append(it.topic)
            await asyncio.get_running_loop().run_in_executor(None, one.close)
        return seen

    async def both() -> list[str]:
        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, other.notify, peer, "t")
        return await asyncio.wait_for(listening, 10)

    assert asyncio.run(both()) == ["t"]
    assert list(one.notifications()) == []


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ((7, 0, 4, bytearray(4)), "segment"),
        ((-1, 0, 4, bytearray(4)), "segment"),
        ((0, -1, 4, bytearray(4)), "offset"),
        ((0, SIZE - 3, 4, bytearray(4)), "offset"),
        ((0, 1 << 70, 4, bytearray(4)), "offset"),
        ((0, 0, 0, bytearray(4)), "length"),
        ((0, 0, -4, bytearray(4)), "length"),
        ((0, 0, 4, bytearray(3)), "memory"),
        ((0, 0, 4, b"read"), "memory"),
        ((0, 0, 4, 5), "memory"),
        ((0, 0, 4, np.zeros((4, 4), np.uint8)[:, 1]), "memory"),
        ((0, 0, 4.0, bytearray(4)), ""),
        ((0, 0, 4), ""),
        (5, ""),
    ],
)
def test_items_that_cannot_be_are_refused_before_a_byte_moves(
    make_engine: Callable[..., Engine], item: object, field: str
) -> None:
    one, other = make_engine("one"), make_engine("other")
    one.register(SIZE)
    peer = other.connect(one.descriptor())
    first = bytearray(b"keep")
    with pytest.raises(RefusedError, match=rf"^items\[1\]{'.' + field if field else ''}: expected .*given .*; "):
        other.read(peer, [(0, 0, 4, first), item])
    assert first == b"keep"


def test_targets_that_overlap_are_refused(pair: Pair) -> None:
    _, other, peer, _ = pair
    room = bytearray(20)
    view = memoryview(room)
    assert other.read(peer, [(0, 0, 10, view[:10]), (0, 0, 10, view[10:])]) == [DONE, DONE]
    with pytest.raises(RefusedError, match="items 1 and 0 overlap"):
        other.read(peer, [(0, 0, 10, view[9:]), (0, 0, 10, view[:10])])


def test_only_what_may_be_read_is_read_and_what_may_be_written_written(pair: Pair) -> None:
    one, other, peer, _ = pair
    secret = one.register(bytearray(b"secret"), readable=False, writable=True)
    fixed = one.register(b"fixed!")
    other.refresh(peer)
    with pytest.raises(RefusedError, match="one that may be read"):
        other.read(peer, [(secret.number, 0, 6, bytearray(6))])
    with pytest.raises(RefusedError, match="one that may be written"):
        other.write(peer, [(fixed.number, 0, 6, b"broken")])
    # Whoever does not keep to that is stopped at the other end.
    for number in (secret.number, fixed.number):
        known = peer.segments[number]
        peer.segments[number] = type(known)(number, 6, readable=True, writable=True)
    room = bytearray(6)
    assert other.read(peer, [(secret.number, 0, 6, room), (fixed.number, 0, 6, bytearray(6))]) == [
        Outcome.REFUSED,
        DONE,
    ]
    assert room == bytes(6)
    assert other.write(peer, [(fixed.number, 0, 6, b"broken"), (secret.number, 0, 6, b"opened")]) == [
        Outcome.REFUSED,
        DONE,
    ]
    assert (fixed.memory.tobytes(), secret.memory.tobytes()) == (b"fixed!", b"opened")


@pytest.mark.parametrize(
    ("memory", "given"),
    [
        (0, "0"),
        (-1, "-1"),
        (b"", "none"),
        (None, "NoneType"),
        ("text", "str"),
        ([1, 2], "list"),
        (np.zeros((4, 4))[:, 1], "strides"),
        (np.array([object()]), "ndarray"),
    ],
)
def test_what_is_no_memory_is_not_registered(make_engine: Callable[..., Engine], memory: object, given: str) -> None:
    with pytest.raises(RefusedError, match=f"^memory: expected .*, given .*{given}"):
        make_engine("one").register(memory)


def test_memory_is_registered_once_and_let_go_of(make_engine: Callable[..., Engine]) -> None:
    one, other = make_engine("one"), make_engine("other")
    array = np.arange(10_000, dtype=np.int32)
    first = one.register(array[:5000])
    for overlapping in (array, array[4999:], array[100:200], array[:1]):
        with pytest.raises(RefusedError, match="overlap segment 0"):
            one.register(overlapping)
    second = one.register(array[5000:])
    assert (first.length_bytes, second.length_bytes) == (20_000, 20_000)
    peer = other.connect(one.descriptor())
    one.unregister(first)
    assert other.read(peer, [(0, 0, 4, bytearray(4)), (1, 0, 4, bytearray(4))]) == [Outcome.MISSING, DONE]
    with pytest.raises(RefusedError, match="segment: expected one of this engine"):
        one.unregister(first)
    third = one.register(array[:5000])
    assert third.number == 2, "numbers are not used again: a peer's old names are nobody's"


class Tensor:
    """What shows its memory to NumPy only, as tensors do."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self.array


def test_tensors_are_registered_and_filled_where_they_are(pair: Pair) -> None:
    one, other, peer, _ = pair
    segment = one.register(Tensor(np.arange(100, dtype=np.float32)))
    other.refresh(peer)
    target = Tensor(np.zeros(100, np.float32))
    assert other.read(peer, [(segment, 0, 400, target)]) == [DONE]
    assert np.array_equal(target.array, np.arange(100, dtype=np.float32))


def test_unregister_waits_for_who_is_reading(make_engine: Callable[..., Engine]) -> None:
    one = make_engine("one")
    segment = one.register(SIZE)
    loan = one._exports.lend("peer", REALM, [region_name(0, 0, 10)], time.monotonic() + 5)
    with pytest.raises(UnavailableError, match="still lent"):
        one.unregister(segment, timeout_s=0.01)
    assert one._exports.lend("peer", REALM, [region_name(0, 0, 10)], time.monotonic() + 5).parts == [Outcome.MISSING]
    unregistering = threading.Thread(target=one.unregister, args=(segment, 5.0))
    unregistering.start()
    assert len(loan.parts[0].memory) == 10
    loan.give_back([True], [None])
    unregistering.join(5)
    assert not unregistering.is_alive()
    assert len(segment.memory) == 0


def test_a_loan_that_ends_too_soon_makes_nothing_done(make_engine: Callable[..., Engine]) -> None:
    one, other = make_engine("one", loan_s=1e-9), make_engine("other")
    one.register(SIZE, writable=True)
    peer = other.connect(one.descriptor())
    assert other.read(peer, [(0, 0, 10, bytearray(10))], 1.0) == [FAILED]


def test_what_fails_on_one_transport_goes_over_the_next(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (make_engine(name, transports=("shm", "tcp")) for name in ("one", "other"))
    segment = one.register(SIZE)
    segment.memory[:] = pattern("one", SIZE)
    peer = other.connect(one.descriptor())
    used: list[str] = []
    real = {ShmLink: ShmLink.read, TcpLink: TcpLink.read}

    def half(link, realm, items, until_s):
        """The first half arrives, then the connection is gone."""
        used.append(f"shm {len(items)}")
        real[ShmLink](link, realm, items[: len(items) // 2], until_s)
        return [DONE] * (len(items) // 2) + [FAILED] * (len(items) - len(items) // 2)

    def broken(link, realm, items, until_s):
        used.append("broken")
        raise UnavailableError("the connection is gone")

    def over_tcp(link, realm, items, until_s):
        used.append(f"tcp {len(items)}")
        return real[TcpLink](link, realm, items, until_s)

    monkeypatch.setattr(TcpLink, "read", over_tcp)
    for failing, expected in (
        (half, ["shm 10", "tcp 5"]),
        (broken, ["broken", "broken", "tcp 10"]),
        (broken, ["tcp 10"]),
    ):
        used.clear()
        monkeypatch.setattr(ShmLink, "read", failing)
        rooms = [np.zeros(100, np.uint8) for _ in range(10)]
        assert other.read(peer, [(0, at * 100, 100, room) for at, room in enumerate(rooms)]) == [DONE] * 10
        assert np.array_equal(np.concatenate(rooms), segment.memory[:1000])
        assert used == expected, "a transport that has just failed is not tried again at once"


def test_names_and_lives_are_checked_and_not_addresses(make_engine: Callable[..., Engine]) -> None:
    other = make_engine("other", transports=("tcp",))
    one = Engine("one", transports=("tcp",))
    descriptor, address = one.descriptor(), one.member.address
    peer = other.connect(descriptor)
    one.close()
    again = make_engine("one", transports=("tcp",), listen=address)
    again.register(SIZE)
    with pytest.raises(RefusedError, match=r"^member"):
        other.connect(descriptor)
    peer.segments[0] = again._segments[0].remote
    with pytest.raises(RefusedError, match=r"^member"):
        other.read(peer, [(0, 0, 4, bytearray(4))])
    assert other.connect(again.descriptor()).member.epoch > peer.member.epoch


def test_descriptors_that_are_not_whole_are_refused(make_engine: Callable[..., Engine]) -> None:
    one = make_engine("one")
    one.register(SIZE)
    good = one.descriptor()
    assert parse_descriptor(good).member == one.member
    draw = random.Random(2)
    bad = [b"", b"\n", good[:-1], good + b" ", good.replace(b"-1 ", b"-2 "), b"x" * (5 << 20)]
    for _ in range(100):
        at = draw.randrange(len(good))
        bad.append(good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :])
    for it in bad:
        with pytest.raises(RefusedError, match=r"^descriptor"):
            parse_descriptor(it)
    for made in ({"segments": ((0, 0, True, True),)}, {"member": 5}, {}):
        body = json.dumps(made).encode()
        digest = sha256(body).hexdigest().encode()
        with pytest.raises(RefusedError, match=r"^descriptor"):
            parse_descriptor(b"headwater-engine-1 " + digest + b"\n" + body)
    with pytest.raises(RefusedError, match=r"^descriptor: expected bytes"):
        parse_descriptor(good.decode())  # type: ignore[arg-type]


def test_only_members_of_the_cluster_connect(make_engine: Callable[..., Engine]) -> None:
    secret = Credentials((b"0123456789abcdef",))
    for transports in (("local",), ("shm",), ("tcp",)):
        one = make_engine("one", credentials=secret, transports=transports)
        one.register(SIZE)
        for settings in ({}, {"credentials": Credentials((b"fedcba9876543210",))}):
            with pytest.raises(RefusedError, match="token"):
                make_engine("other", transports=transports, **settings).connect(one.descriptor())
        with pytest.raises(RefusedError, match=r"^cluster"):
            make_engine("third", cluster="x", credentials=secret, transports=transports).connect(one.descriptor())
        friend = make_engine("friend", credentials=secret, transports=transports)
        assert friend.read(friend.connect(one.descriptor()), [(0, 0, 4, bytearray(4))]) == [DONE]


def test_engines_that_cannot_be_are_refused(make_engine: Callable[..., Engine]) -> None:
    before = descriptors()
    with pytest.raises(ConfigError, match="no credentials"):
        Engine("one", listen="0.0.0.0:0")
    for settings in ({"transports": ()}, {"transports": ("smoke",)}, {"workers": 0}, {"loan_s": 0.0}):
        with pytest.raises(RefusedError):
            Engine("one", **settings)
    with pytest.raises(RefusedError, match=r"^name"):
        Engine("")
    assert descriptors() == before
    one = make_engine("one", transports=("local",))
    other = make_engine("other", transports=("tcp",))
    with pytest.raises(RefusedError, match=r"^transports"):
        other.connect(one.descriptor())
    for deadline_s in (0.0, -1.0, float("nan"), 60.1, 1e9):
        with pytest.raises(RefusedError, match=r"^deadline_s"):
            one.connect(one.descriptor(), deadline_s)


def test_an_engine_that_is_closed_leaves_nothing(tmp_path: object) -> None:
    before, threads = descriptors(), set(threading.enumerate())
    with Engine("one") as one, Engine("other", transports=("shm", "tcp")) as other:
        one.register(SIZE)
        peer = other.connect(one.descriptor())
        transfers = [other.submit_read(peer, [(0, 0, SIZE, np.empty(SIZE, np.uint8))]) for _ in range(50)]
        folder = one._directory
        assert os.path.isdir(folder)
        one.close()
    for it in transfers:
        assert it.done(), "closing has waited for what was under way"
        if not it.cancelled():
            assert it.result() in ([DONE], [FAILED])
    assert not os.path.exists(folder)
    with pytest.raises(UnavailableError, match="closed"):
        other.read(peer, [(0, 0, 4, bytearray(4))])
    eventually(lambda: descriptors() == before and set(threading.enumerate()) <= threads)


def test_no_more_transfers_wait_than_can_be_kept(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_engine("one"), make_engine("other", workers=1)
    one.register(SIZE)
    peer = other.connect(one.descriptor())
    stuck, read = threading.Event(), LocalLink.read

    def late(*arguments):
        stuck.wait(10)
        return read(*arguments)

    monkeypatch.setattr(LocalLink, "read", late)
    waiting = [other.submit_read(peer, [(0, 0, 4, bytearray(4))], 30.0) for _ in range(1024)]
    with pytest.raises(UnavailableError, match="1024 transfers wait"):
        other.submit_read(peer, [(0, 0, 4, bytearray(4))])
    assert waiting[1].cancel()
    assert waiting[1].cancelled()
    with pytest.raises(CancelledError):
        waiting[1].result()
    stuck.set()
    assert {tuple(it.result(10)) for it in waiting if it is not waiting[1]} == {(DONE,)}


def test_a_slow_peer_keeps_nobody_else_waiting_and_nobody_longer_than_the_deadline(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, well = make_engine("slow"), make_engine("well")
    other = make_engine("other", workers=2)
    stuck, read = threading.Event(), LocalLink.read

    def late(link, *arguments):
        if link.peer.name == "slow":
            stuck.wait(10)
        return read(link, *arguments)

    for it in (slow, well):
        it.register(SIZE)
    far, near = (other.connect(it.descriptor()) for it in (slow, well))
    monkeypatch.setattr(LocalLink, "read", late)
    under_way = [other.submit_read(far, [(0, 0, 4, bytearray(4))], 30.0) for _ in range(2)]
    waiting = [other.submit_read(far, [(0, 0, 4, bytearray(4))], seconds) for seconds in (30.0, 0.02, 30.0, 0.01)]
    assert other.submit_read(near, [(0, 0, 4, bytearray(4))], 5.0).result(5) == [DONE]
    assert [waiting[at].result(5) for at in (1, 3)] == [[FAILED], [FAILED]]
    assert not any(it.done() for it in (waiting[0], waiting[2], *under_way))
    waiting[2].abort()
    assert waiting[2].cancelled(), "what has not begun is over at once"
    stuck.set()
    assert [it.result(5) for it in (waiting[0], *under_way)] == [[DONE]] * 3


def test_a_peer_that_was_disconnected_is_gone(pair: Pair) -> None:
    one, other, peer, _ = pair
    assert other.read(peer, [(0, 0, 4, bytearray(4))]) == [DONE]
    assert other._links._idle
    other.disconnect(peer)
    other.disconnect(peer)
    assert not other._links._idle
    for use in (lambda: other.read(peer, [(0, 0, 4, bytearray(4))]), lambda: other.refresh(peer)):
        with pytest.raises(RefusedError, match=r"^peer: .*connect to it again"):
            use()
    assert other.read(other.connect(one.descriptor()), [(0, 0, 4, bytearray(4))]) == [DONE]


def test_an_engine_is_closed_by_none_of_its_own_threads(make_engine: Callable[..., Engine]) -> None:
    one, other = make_engine("one"), make_engine("other")
    one.register(SIZE)
    peer = other.connect(one.descriptor())
    seen: list[Exception] = []
    over = threading.Event()

    def close(_: object) -> None:
        try:
            other.close()
        except RefusedError as error:
            seen.append(error)
        over.set()

    held = threading.Event()
    other._queue._pool.submit(held.wait, 10)
    transfer = other.submit_read(peer, [(0, 0, 4, bytearray(4))])
    other._queue._pool.submit(close, None)
    assert over.wait(5)
    held.set()
    assert [it.field for it in seen] == ["thread"]
    assert transfer.result(5) == [DONE], "nothing was closed"


def test_closing_goes_on_after_what_fails(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what tests before this one have left
    before, threads = descriptors(), set(threading.enumerate())
    one = Engine("one")
    segments = [one.register(SIZE), one.register(SIZE)]
    monkeypatch.setattr("headwater.transfer.engine.CLOSE_S", 0.05)
    loan = one._exports.lend("peer", REALM, [region_name(0, 0, 10)], time.monotonic() + 5)
    with pytest.raises(UnavailableError, match="segment 0 is still lent"):
        one.close()
    assert (len(segments[0].memory), len(segments[1].memory)) == (SIZE, 0)
    assert not os.path.exists(one._directory)
    eventually(lambda: set(threading.enumerate()) <= threads)
    loan.give_back([True], [None])
    one.unregister(segments[0])
    one.close()
    del loan
    gc.collect()  # what was raised still knows the memory
    eventually(lambda: descriptors() <= before, seen=lambda: (descriptors(), before))


def _let_go(engines: list[Engine]) -> None:
    engines.clear()
    gc.collect()


def test_an_engine_that_was_forgotten_ends_and_says_so() -> None:
    before, threads = descriptors(), set(threading.enumerate())
    engine = Engine("forgotten")
    engine.register(SIZE)
    with Engine("other") as other:
        assert other.read(other.connect(engine.descriptor()), [(0, 0, 4, bytearray(4))]) == [DONE]
    folder = engine._directory
    forgotten = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="the engine forgotten was not closed"):
        _let_go(forgotten)
    assert not os.path.exists(folder)
    eventually(lambda: descriptors() == before and set(threading.enumerate()) <= threads)


def test_a_child_process_is_told_that_the_engine_is_not_its_own(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_engine("one"), make_engine("other")
    segment = one.register(SIZE)
    peer = other.connect(one.descriptor())
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        for use in (
            lambda: other.read(peer, [(0, 0, 4, bytearray(4))]),
            lambda: other.submit_write(peer, [(0, 0, 4, b"four")]),
            lambda: other.connect(one.descriptor()),
            lambda: other.notify(peer, "t"),
            lambda: other.disconnect(peer),
            lambda: one.register(SIZE),
            lambda: one.unregister(segment),
        ):
            with pytest.raises(RefusedError, match=r"^process: .*after the fork"):
                use()
        other.close()
    assert other.read(peer, [(0, 0, 4, bytearray(4))]) == [DONE], "the parent's went on"


@pytest.mark.parametrize("number", [np.int64(4096), np.uint16(4096)])
def test_numbers_of_numpy_are_sizes_and_no_memory(make_engine: Callable[..., Engine], number: np.generic) -> None:
    one = make_engine("one")
    assert one.register(number).length_bytes == 4096
    peer = make_engine("other").connect(one.descriptor())
    for memory in (number, np.float32(1), np.datetime64(5, "s")):
        with pytest.raises(RefusedError, match=r"memory: expected a buffer, an array or a tensor"):
            bytes_of(memory, "memory", writes=False)
    assert peer.segments[0].length_bytes == 4096


def test_arrays_of_any_type_are_memory() -> None:
    for kind in ("M8[s]", "m8[ns]", ">f4", "c8", "U3", "?", [("a", "i4"), ("b", "M8[s]")]):
        array = np.zeros((2, 3), kind)
        view = bytes_of(array, "memory", writes=True)
        view[:] = 1
        assert len(view) == array.nbytes
        assert array.view(np.uint8).all() if kind != "?" else array.all()
    with pytest.raises(RefusedError, match="contiguous"):
        bytes_of(np.zeros((4, 4), "M8[s]")[:, 1], "memory", writes=False)
    frozen = np.zeros(4, "M8[s]")
    frozen.flags.writeable = False
    with pytest.raises(RefusedError, match="read-only"):
        bytes_of(frozen, "memory", writes=True)


def test_tensors_of_any_type_are_memory() -> None:
    torch = pytest.importorskip("torch")
    for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bool, torch.complex64):
        tensor = torch.zeros(3, 4, dtype=kind)
        view = bytes_of(tensor, "memory", writes=True)
        view[:] = 1
        assert len(view) == tensor.numel() * tensor.element_size()
        assert bool((tensor.view(torch.uint8) == 1).all())
    weights = torch.zeros(4, requires_grad=True)
    bytes_of(weights, "memory", writes=True)[:4] = 255
    assert torch.isnan(weights[0])
    with pytest.raises(RefusedError, match="contiguous"):
        bytes_of(torch.zeros(3, 4, dtype=torch.bfloat16).T, "memory", writes=False)
    with pytest.raises(RefusedError, match="a tensor on meta"):
        bytes_of(torch.zeros(4, device="meta"), "memory", writes=False)


def test_notifications_are_bounded_in_bytes_and_checked_where_they_come_in() -> None:
    inbox = Inbox(100, 1000)
    for _ in range(2):
        inbox.put(Notification("peer", "t", bytes(400)))
    with pytest.raises(RefusedError, match=r"^notifications: .*1000 bytes"):
        inbox.put(Notification("peer", "t", bytes(201)))
    inbox.put(Notification("peer", "t", bytes(200)))
    assert len(next(inbox.take(0.0)).body) == 400
    inbox.put(Notification("peer", "t", bytes(400)))
    exports = EngineExports(inbox, bytes, 1.0)
    for topic, size in (("note/t", (1 << 20) + 1), ("note/" + 49 * "t", 0)):
        with pytest.raises(RefusedError, match=r"^body"):
            exports.told("peer", topic, encode_note(7, 1, bytes(size)), time.monotonic() + 1)
