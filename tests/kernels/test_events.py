"""Streams' events in C and in Python: the same answers to whatever comes."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headwater._kernels import events
from headwater._kernels.events import (
    RAW_MAX,
    REPORTED,
    PlainReceiver,
    PlainTokenEvents,
    PlainWriter,
    Receiver,
    TokenEvents,
    Writer,
)

NATIVE = pytest.param(TokenEvents, id="c", marks=pytest.mark.skipif(not events.NATIVE, reason="built without C"))
BOTH = pytest.mark.parametrize("kind", [NATIVE, pytest.param(PlainTokenEvents, id="plain")])


class Job:
    """Counts tokens."""

    def __init__(self) -> None:
        self.answered_tokens = 0


class Wire:
    """A transport that takes whatever is written."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.write = write
        self.closing = False
        self.unsent = 0

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unsent


WRITERS: dict[type, type] = {TokenEvents: Writer, PlainTokenEvents: PlainWriter}


class Rig:
    """One stream: what is written, and what is counted."""

    def __init__(self, kind: type, *, strips: bool = True, keep_bytes: int = 1 << 20, begun: bool = True) -> None:
        self.job = Job()
        self.written: list[bytes] = []
        self.run = kind(self.job, strips=strips, keep_bytes=keep_bytes)
        if begun:
            self.run.begin(WRITERS[kind](Wire(self.written.append), -1))

    def state(self) -> tuple[object, ...]:
        run = self.run
        return self.job.answered_tokens, self.written, run.kept(), run.keeps, run.ends, run.report()


def event(ids: str | None = "5", more: str = "") -> bytes:
    member = "" if ids is None else f',"token_ids":[{ids}]'
    return f'data: {{"choices":[{{"index":0,"text":"a"{member}{more}}}]}}\n\n'.encode()


def chunk(*payload: bytes) -> bytes:
    body = b"".join(payload)
    return b"%x\r\n%b\r\n" % (len(body), body)


@BOTH
def test_a_token_is_passed_on_without_its_id_and_kept_with_it(kind: type) -> None:
    rig = Rig(kind)
    assert rig.run.feed(chunk(event())) == 1
    assert rig.written == [chunk(event().replace(b"[5]", b"null"))]
    assert rig.run.kept() == event()
    assert rig.job.answered_tokens == 1
    assert not rig.run.ends


@BOTH
@pytest.mark.parametrize(
    ("ids", "tokens", "said"), [("", 0, "null"), ("1,2,3", 3, "null"), (None, 1, None)], ids=["empty", "three", "none"]
)
def test_tokens_are_counted(kind: type, ids: str | None, tokens: int, said: str | None) -> None:
    rig = Rig(kind)
    assert rig.run.feed(chunk(event(ids))) == 1
    assert rig.job.answered_tokens == tokens
    wanted = event(ids) if said is None else event(ids).replace(f"[{ids}]".encode(), said.encode())
    assert rig.written == [chunk(wanted)]


@BOTH
def test_ids_that_are_null_are_none(kind: type) -> None:
    rig = Rig(kind)
    said = event(None, ',"token_ids":null,"prompt_token_ids":null')
    assert rig.run.feed(chunk(said)) == 1
    assert rig.written == [chunk(said)] and rig.job.answered_tokens == 1
    both = event("5", ',"prompt_token_ids":null')
    assert rig.run.feed(chunk(both)) == 1
    assert rig.written[1:] == [chunk(both.replace(b"[5]", b"null"))] and rig.job.answered_tokens == 2


@BOTH
def test_who_asked_for_ids_gets_them(kind: type) -> None:
    rig = Rig(kind, strips=False)
    rig.run.feed(chunk(event("1,2")))
    assert rig.written == [chunk(event("1,2"))]


@BOTH
def test_several_chunks_of_several_events_are_one_chunk(kind: type) -> None:
    rig = Rig(kind, strips=False)
    finish = event("7", ',"finish_reason":"stop"')
    assert rig.run.feed(chunk(event("1"), event("2")) + chunk(finish)) == 1
    assert rig.written == [chunk(event("1"), event("2"), finish)]
    assert rig.run.ends
    assert rig.run.feed(chunk(event("8"))) == 1
    assert not rig.run.ends, "of the last event"


@BOTH
def test_it_says_when_the_brain_should_hear_of_it(kind: type) -> None:
    rig = Rig(kind)
    assert [rig.run.feed(chunk(event())) for _ in range(REPORTED + 1)] == [1] * (REPORTED - 1) + [2, 2]
    assert rig.run.report()
    assert not rig.run.report()
    assert rig.run.feed(chunk(event())) == 1


@BOTH
def test_more_than_may_be_kept_is_not_kept_at_all(kind: type) -> None:
    size = len(event())
    rig = Rig(kind, keep_bytes=2 * size)
    rig.run.feed(chunk(event()))
    rig.run.feed(chunk(event()))
    assert rig.run.keeps and rig.run.kept() == 2 * event()
    assert rig.run.feed(chunk(event())) == 1
    assert not rig.run.keeps and rig.run.kept() == b""
    rig.run.add(event(), 1)
    assert rig.run.kept() == b"" and len(rig.written) == 3 and rig.job.answered_tokens == 4


@BOTH
def test_nothing_is_kept_where_nothing_may_be(kind: type) -> None:
    rig = Rig(kind, keep_bytes=0)
    assert not rig.run.keeps
    rig.run.feed(chunk(event()))
    assert rig.run.kept() == b"" and len(rig.written) == 1


REFUSED = {
    "nothing": b"",
    "no chunk": event(),
    "the last chunk": b"0\r\n\r\n",
    "an extension": chunk(event()).replace(b"\r\n", b";a=b\r\n", 1),
    "half a chunk": chunk(event())[:-5],
    "a chunk and the size of the next": chunk(event()) + b"10",
    "a wrong end": chunk(event())[:-2] + b"xx",
    "half an event": chunk(event()[:-1]),
    "an event and a half": chunk(event(), event()[:9]),
    "CRLF": chunk(event().replace(b"\n", b"\r\n")),
    "a comment": chunk(b": alive\n\n"),
    "the usage": chunk(b'data: {"choices":[],"usage":{}}\n\n'),
    "the end": chunk(b"data: [DONE]\n\n"),
    "an error": chunk(b'data: {"error":{"message":"no"}}\n\n'),
    "a token and an error": chunk(event(), b'data: {"error":1}\n\n'),
    "nine digits": b"0" * 9 + chunk(event()),
    "too much": chunk(*[event()] * (RAW_MAX // len(event()) + 1)),
    "a size beyond memory": b"ffffffff\r\n" + event(),
    "ids of the prompt": chunk(event().replace(b',"token_ids"', b',"prompt_token_ids":[1,2],"token_ids"')),
    "ids in front": chunk(b'data: {"choices":[{"token_ids":[3,4],"index":0,"text":"a"}]}\n\n'),
    "ids after a blank": chunk(event().replace(b"[5]", b" [5]")),
    "two answers": chunk(event().replace(b"}]", b'},{"index":1,"text":"b","token_ids":[6]}]')),
    "ids without an end": chunk(b'data: {"a":1,"token_ids":[1,2\n\n'),
}


@BOTH
@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_anything_else_changes_nothing(kind: type, raw: bytes) -> None:
    rig = Rig(kind)
    before = rig.state()
    assert rig.run.feed(raw) == 0
    assert rig.run.feed(chunk(event()) + raw) == (0 if raw else 1)
    if raw:
        assert rig.state() == before


@BOTH
def test_before_it_begins_nothing_is_written(kind: type) -> None:
    rig = Rig(kind, begun=False)
    assert rig.run.feed(chunk(event())) == 0
    assert rig.run.take(event("3")) == event("3").replace(b"[3]", b"null")
    assert rig.run.take(b"data: [DONE]\n\n") is None
    assert (rig.job.answered_tokens, rig.run.kept()) == (1, event("3"))


@BOTH
def test_an_error_of_the_writer_is_its_callers(kind: type) -> None:
    def broken(data: bytes) -> None:
        raise OSError("no such socket")

    rig = Rig(kind, begun=False)
    rig.run.begin(WRITERS[kind](Wire(broken), -1))
    with pytest.raises(OSError, match="no such socket"):
        rig.run.feed(chunk(event()))


@pytest.mark.skipif(not events.NATIVE, reason="built without C")
@pytest.mark.parametrize(
    "wrong", [None, "text", 3, bytearray(b"1\r\n1\r\n")], ids=["none", "text", "number", "bytearray"]
)
def test_only_bytes_are_taken(wrong: object) -> None:
    rig = Rig(TokenEvents)
    for call in (rig.run.feed, rig.run.take, lambda it: rig.run.add(it, 1)):
        with pytest.raises(TypeError):
            call(wrong)


@BOTH
def test_it_is_gone_when_nobody_has_it(kind: type) -> None:
    class Held:
        def __init__(self) -> None:
            self.answered_tokens = 0
            self.run: object = None

        def write(self, data: bytes) -> None:
            """Nothing is done with it."""

    def circle() -> Callable[[], object]:
        held = Held()
        held.run = kind(held, strips=True, keep_bytes=100)
        held.run.begin(WRITERS[kind](Wire(held.write), -1))
        return weakref.ref(held)

    seen = circle()
    gc.collect()
    assert seen() is None


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, clients = socket.socketpair()
    with ours, clients:
        ours.setblocking(False)
        clients.settimeout(5.0)
        yield ours, clients


@pytest.mark.skipif(not events.NATIVE, reason="built without C")
def test_a_socket_that_has_room_is_written_to(pair: tuple[socket.socket, socket.socket]) -> None:
    rig, (ours, clients) = Rig(TokenEvents, begun=False, strips=False), pair
    rig.run.begin(Writer(Wire(rig.written.append), ours.fileno()))
    assert rig.run.feed(chunk(event())) == 1
    assert clients.recv(1000) == chunk(event())
    assert rig.written == []


@pytest.mark.skipif(not events.NATIVE, reason="built without C")
def test_what_a_socket_does_not_take_goes_by_the_transport(pair: tuple[socket.socket, socket.socket]) -> None:
    rig, (ours, clients) = Rig(TokenEvents, begun=False, strips=False), pair
    rig.run.begin(Writer(Wire(rig.written.append), ours.fileno()))
    count = 0
    while not rig.written:
        rig.run.feed(chunk(event(more="x" * 9000)))
        count += 1
    got = b""
    while len(got) < count * len(chunk(event(more="x" * 9000))) - len(rig.written[0]):
        got += clients.recv(1 << 20)
    assert got + rig.written[0] == count * chunk(event(more="x" * 9000))


@pytest.mark.skipif(not events.NATIVE, reason="built without C")
@pytest.mark.parametrize("what", ["closing", "unsent"])
def test_nothing_overtakes_what_waits(pair: tuple[socket.socket, socket.socket], what: str) -> None:
    rig, (ours, _) = Rig(TokenEvents, begun=False, strips=False), pair
    wire = Wire(rig.written.append)
    rig.run.begin(Writer(wire, ours.fileno()))
    setattr(wire, what, 1)
    rig.run.feed(chunk(event()))
    assert rig.written == [chunk(event())]


@BOTH
def test_it_begins_once(kind: type) -> None:
    rig = Rig(kind)
    with pytest.raises(ValueError, match="begun"):
        rig.run.begin(WRITERS[kind](Wire(rig.written.append), -1))


@pytest.mark.skipif(not events.NATIVE, reason="built without C")
def test_both_do_the_same(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [
        b"data: ", b'{"choices":[{', b'"choices":[{', b',"token_ids":[', b"]", b"1,2", b",", b'"finish_reason":"',
        b'"token_ids":null', b'"prompt_token_ids":[',
        b"\n\n", b"\n", b"\r\n", b"5", b"}]}", b"null", b"\r", b"a" * 40,
    ]  # fmt: skip

    def some_event() -> bytes:
        return rng.choice([event(), event("1,2"), event(None), event("", ',"finish_reason":"length"')])

    def raw() -> bytes:
        found = b""
        for _ in range(rng.randrange(1, 4)):
            body = [some_event() if rng.random() < 0.8 else rng.choice(pieces) for _ in range(rng.randrange(1, 5))]
            found += chunk(*body) if rng.random() < 0.95 else b"".join(body)
        if rng.random() < 0.2:
            at = rng.randrange(len(found))
            found = found[:at] + rng.choice(pieces) + found[at + rng.randrange(3) :]
        return found

    for _ in range(300):
        options = {"strips": rng.random() < 0.5, "keep_bytes": rng.choice([0, 300, 5000])}
        one, other = Rig(TokenEvents, **options), Rig(PlainTokenEvents, **options)
        for _ in range(20):
            given = raw()
            if rng.random() < 0.2:
                assert one.run.take(given) == other.run.take(given), given
            elif rng.random() < 0.1:
                one.run.add(given, 2)
                other.run.add(given, 2)
            else:
                assert one.run.feed(given) == other.run.feed(given), given
            assert one.state() == other.state(), given


def receiving(base: type) -> Any:
    """A protocol that notes what it is told."""

    class Protocol(base, asyncio.Protocol):  # type: ignore[misc, valid-type]
        __slots__ = ("__weakref__", "seen")

        def __init__(self) -> None:
            self.seen: list[object] = []
            self.quick = None
            self.heard = False

        def received(self, data: bytes) -> None:
            self.seen.append(data)

        def reported(self) -> None:
            self.seen.append("reported")

    return Protocol()


RECEIVERS = pytest.mark.parametrize(
    "base",
    [
        pytest.param(Receiver, id="c", marks=pytest.mark.skipif(not events.NATIVE, reason="built without C")),
        pytest.param(PlainReceiver, id="plain"),
    ],
)


@RECEIVERS
def test_who_takes_quickly_is_asked_first(base: type) -> None:
    it = receiving(base)
    it.data_received(b"a")
    assert it.seen == [b"a"] and not it.heard
    answers = {b"no": 0, b"yes": 1, b"ask": 2}
    it.quick = answers.__getitem__
    it.data_received(b"no")
    assert it.seen == [b"a", b"no"] and not it.heard
    it.data_received(b"yes")
    assert it.seen == [b"a", b"no"] and it.heard is True
    it.heard = False
    it.data_received(b"ask")
    assert it.seen == [b"a", b"no", "reported"] and it.heard
    it.quick = None
    it.data_received(b"yes")
    assert it.seen[-1] == b"yes"


@RECEIVERS
def test_long_pieces_are_not_taken_quickly(base: type) -> None:
    it, asked = receiving(base), []
    it.quick = lambda data: asked.append(len(data)) or 1
    for size in (0, RAW_MAX - 1, RAW_MAX, RAW_MAX + 1):
        it.data_received(bytes(size))
    assert asked == [0, RAW_MAX - 1] and list(map(len, it.seen)) == [RAW_MAX, RAW_MAX + 1]


@RECEIVERS
def test_errors_of_whoever_is_called_are_heard(base: type) -> None:
    it = receiving(base)
    it.quick = {}.__getitem__
    with pytest.raises(KeyError):
        it.data_received(b"a")
    assert not it.heard

    def replaces(data: bytes) -> int:
        it.quick = None  # the last that holds this function
        gc.collect()
        return 2

    it.quick = replaces
    del replaces
    it.data_received(b"a")
    assert it.seen == ["reported"] and it.quick is None


@RECEIVERS
def test_a_receiver_that_quick_holds_is_let_go(base: type) -> None:
    it = receiving(base)
    it.quick = lambda data, it=it: 1
    gone = weakref.ref(it)
    del it
    gc.collect()
    assert gone() is None


@RECEIVERS
def test_events_are_taken_without_a_line_of_python(base: type) -> None:
    it, rig = receiving(base), Rig(TokenEvents)
    it.quick = rig.run
    for number in range(REPORTED):
        it.data_received(chunk(event(f"{number}")))
    assert rig.job.answered_tokens == REPORTED and it.seen == ["reported"] and it.heard
    it.data_received(b"no chunk")
    assert it.seen == ["reported", b"no chunk"]
    with pytest.raises(TypeError):
        rig.run()
    with pytest.raises(TypeError):
        rig.run("no bytes")
