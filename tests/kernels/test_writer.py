"""Messages are written to a socket, in C, or by a transport: all of each, in order, whatever the socket takes."""

from __future__ import annotations

import gc
import random
import socket
import weakref
from collections.abc import Iterator

import pytest

from headwater._kernels import events
from headwater._kernels.events import PlainWriter, Writer

Pair = tuple[socket.socket, socket.socket]
native = pytest.mark.skipif(not events.NATIVE, reason="built without C")
BOTH = pytest.mark.parametrize(
    "kind", [pytest.param(Writer, id="c", marks=native), pytest.param(PlainWriter, id="plain")]
)


class Wire:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closing = False
        self.unsent = 0

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unsent


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@BOTH
def test_without_a_socket_all_goes_by_the_transport(kind: type[Writer]) -> None:
    wire = Wire()
    writer = kind(wire, -1)
    writer.write(b"head", b"body")
    writer.write(b"alone")
    assert b"".join(wire.written) == b"headbodyalone"


@native
def test_it_is_written_at_once(pair: Pair) -> None:
    wire = Wire()
    writer = Writer(wire, pair[0].fileno())
    writer.write(b"head", b"body")
    writer.write(b"alone")
    writer.write(b"", b"")
    assert pair[1].recv(100) == b"headbodyalone" and not wire.written


@native
@pytest.mark.parametrize("why", ["closing", "unsent"])
def test_nothing_passes_what_waits(pair: Pair, why: str) -> None:
    wire = Wire()
    setattr(wire, why, 1)
    Writer(wire, pair[0].fileno()).write(b"head", b"body")
    assert wire.written == [b"headbody"]
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)


@native
def test_what_a_socket_does_not_take_goes_by_the_transport(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    for size in (1 << 10, 1 << 16, 3 << 20):
        head, body = rng.randbytes(size), rng.randbytes(2 * size)
        wire, came = Wire(), b""
        Writer(wire, pair[0].fileno()).write(head, body)
        left = b"".join(wire.written)
        while len(came) + len(left) < 3 * size:
            came += pair[1].recv(1 << 20)
        assert came + left == head + body
    assert left, "a socket that takes megabytes at once"
    wire = Wire()
    Writer(wire, pair[0].fileno()).write(b"a", b"b" * (8 << 20))
    before = b"".join(wire.written)
    assert before and set(before) == {ord("b")}


@native
def test_a_closed_socket_is_the_transports_business(pair: Pair) -> None:
    wire = Wire()
    pair[1].close()
    Writer(wire, pair[0].fileno()).write(b"head", b"body")
    assert b"".join(wire.written) == b"headbody"


@native
def test_a_transport_that_fails_is_heard(pair: Pair) -> None:
    class Failing(Wire):
        def is_closing(self) -> bool:
            raise RuntimeError("broken")

        def write(self, data: bytes) -> None:
            raise RuntimeError("broken")

    for fd in (-1, pair[0].fileno()):
        with pytest.raises(RuntimeError, match="broken"):
            Writer(Failing(), fd).write(b"head")
    with pytest.raises(TypeError):
        Writer(Wire(), -1).write("head")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        Writer(object(), -1)  # type: ignore[arg-type]


@native
def test_it_is_let_go_with_its_transport() -> None:
    class Cyclic(Wire):
        writer: Writer

    wire = Cyclic()
    wire.writer = Writer(wire, -1)
    gone = weakref.ref(wire)
    del wire
    gc.collect()
    assert gone() is None
