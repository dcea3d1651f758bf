"""What is a request, and what is refused: tables, cut at any place. Nothing behind a bad request is ever executed."""

from __future__ import annotations

import json
import random
import time

import pytest

from tests.conductor.http.rig import LIMITS, Memory, ask, connected, looped, request, serving

START = b"POST /a HTTP/1.1\r\n"
HOST = b"Host: a\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"


def said(data: bytes, cut: int = 0) -> tuple[list[int], list[str], Memory]:
    """Statuses answered and paths executed, for bytes that come in pieces of `cut`."""

    async def run() -> None:
        async with serving() as (server, handler):
            connection, transport = connected(server)
            pieces = [data[i : i + cut] for i in range(0, len(data), cut)] if cut else [data]
            for piece in pieces:
                connection.data_received(piece)
            statuses.extend(statuses_of(bytes(transport.written)))
            paths.extend(it.path for it in handler.requests)
            transports.append(transport)
            connection.connection_lost(None)

    statuses: list[int] = []
    paths: list[str] = []
    transports: list[Memory] = []
    looped(run())
    return statuses, paths, transports[0]


def statuses_of(written: bytes) -> list[int]:
    """Statuses of whole answers with lengths."""
    found, pos = [], 0
    while pos < len(written):
        end = written.index(b"\r\n\r\n", pos) + 4
        head = written[pos:end].lower()
        found.append(int(head[9:12]))
        at = head.find(b"content-length: ")
        pos = end + (int(head[at + 16 : head.index(b"\r\n", at)]) if at >= 0 else 0)
    return found


BAD: dict[str, tuple[int, bytes]] = {
    "absolute form": (400, b"GET http://other/ HTTP/1.1\r\n" + HOST + b"\r\n"),
    "authority form": (400, b"CONNECT other:80 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "CONNECT of a path": (400, b"CONNECT /a HTTP/1.1\r\n" + HOST + b"\r\n"),
    "asterisk form": (400, b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n"),
    "fragment": (400, b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n"),
    "blank in the path": (400, b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n"),
    "two blanks": (400, b"GET  /a HTTP/1.1\r\n" + HOST + b"\r\n"),
    "tab": (400, b"GET\t/a HTTP/1.1\r\n" + HOST + b"\r\n"),
    "blank at the end": (400, b"GET /a HTTP/1.1 \r\n" + HOST + b"\r\n"),
    "high byte in the path": (400, b"GET /\xe9 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "HTTP/0.9": (400, b"GET /a\r\n\r\n"),
    "HTTP/1.2": (400, b"GET /a HTTP/1.2\r\n" + HOST + b"\r\n"),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "ICE": (400, b"SOURCE /a ICE/1.0\r\n" + HOST + b"\r\n"),
    "method in lower case": (400, b"get /a HTTP/1.1\r\n" + HOST + b"\r\n"),
    "TLS on a plain port": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "two empty lines first": (400, b"\r\n\r\n" + START + HOST + b"\r\n"),
    "no Host": (400, START + b"\r\n"),
    "empty Host": (400, START + b"Host:\r\n\r\n"),
    "two Hosts": (400, START + HOST + HOST + b"\r\n"),
    "Host with a path": (400, START + b"Host: a/b\r\n\r\n"),
    "Host with a user": (400, START + b"Host: u@b\r\n\r\n"),
    "two Hosts in one": (400, START + b"Host: a, b\r\n\r\n"),
    "two lengths": (400, START + HOST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello"),
    "two other lengths": (400, START + HOST + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\nhello"),
    "two lengths, in two cases": (400, START + HOST + b"content-length: 0\r\nContent-Length: 5\r\n\r\nhello"),
    "list of lengths": (400, START + HOST + b"Content-Length: 5, 5\r\n\r\nhello"),
    "signed length": (400, START + HOST + b"Content-Length: +5\r\n\r\nhello"),
    "negative length": (400, START + HOST + b"Content-Length: -5\r\n\r\nhello"),
    "hexadecimal length": (400, START + HOST + b"Content-Length: 0x5\r\n\r\nhello"),
    "underscore in the length": (400, START + HOST + b"Content-Length: 1_0\r\n\r\nhello"),
    "other digits in the length": (400, START + HOST + b"Content-Length: \xb2\r\n\r\nhello"),
    "empty length": (400, START + HOST + b"Content-Length: \r\n\r\nhello"),
    "endless length": (400, START + HOST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n"),
    "large length": (413, START + HOST + b"Content-Length: 99999999999\r\n\r\n"),
    "both": (400, START + HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "both, the other way round": (
        400,
        START + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    ),
    "two encodings": (400, START + HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "gzip, chunked": (400, START + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "chunked, identity": (400, START + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
    "identity": (400, START + HOST + b"Transfer-Encoding: identity\r\n\r\n"),
    "xchunked": (400, START + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    "quoted chunked": (400, START + HOST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n'),
    "chunked with VT": (400, START + HOST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
    "chunked in HTTP/1.0": (400, b"POST /a HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "blank before the colon": (400, START + HOST + b"Content-Length : 5\r\n\r\nhello"),
    "tab before the colon": (400, START + HOST + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n"),
    "no colon": (400, START + HOST + b"abc\r\n\r\n"),
    "no name": (400, START + HOST + b": abc\r\n\r\n"),
    "blank before a header": (400, START + b" " + HOST + b"\r\n"),
    "folded": (400, START + HOST + b"X: a\r\n b\r\n\r\n"),
    "folded length": (400, START + HOST + b"Content-Length:\r\n 5\r\n\r\nhello"),
    "LF only": (400, b"POST /a HTTP/1.1\nHost: a\n\n"),
    "LF in a header": (400, START + HOST + b"X: a\nContent-Length: 5\r\n\r\nhello"),
    "CR in a header": (400, START + HOST + b"X: a\rContent-Length: 5\r\n\r\nhello"),
    "CR CR LF": (400, START + HOST + b"X: a\r\r\nContent-Length: 5\r\n\r\nhello"),
    "NUL in a value": (400, START + HOST + b"X: a\0b\r\n\r\n"),
    "NUL in a name": (400, START + HOST + b"X\0: a\r\n\r\n"),
    "control in a value": (400, START + HOST + b"X: a\x01b\r\n\r\n"),
    "DEL in a value": (400, START + HOST + b"X: a\x7fb\r\n\r\n"),
    "NEL in a name": (400, START + HOST + b"X\x85: a\r\n\r\n"),
    "gzip body": (415, START + HOST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"),
    "two body encodings": (400, START + HOST + b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n\r\n"),
    "expects something else": (417, START + HOST + b"Expect: 200-ok\r\n\r\n"),
    "long URL": (414, b"GET /" + b"a" * 8300 + b" HTTP/1.1\r\n"),
    "many bytes of headers": (431, START + HOST + (b"X: " + b"a" * 1000 + b"\r\n") * 17 + b"\r\n"),
    "many headers": (431, START + HOST + b"X: a\r\n" * 32 + b"\r\n"),
    "chunk too large": (413, START + HOST + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n"),
    "bad chunk": (400, START + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n"),
    "nearly all framing": (400, START + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20_000),
}


@pytest.mark.parametrize("cut", [0, 1, 7], ids=["whole", "bytes", "sevens"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_ends_the_connection(name: str, cut: int) -> None:
    status, data = BAD[name]
    if cut == 1 and len(data) > 20_000:
        cut = 1000
    statuses, paths, transport = said(request("/before") + data + SMUGGLED, cut)
    assert statuses == [200, status]
    assert paths == ["/before"]
    assert transport.shut
    body = json.loads(transport.written[transport.written.rindex(b"\r\n\r\n") :])
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}


GOOD: dict[str, tuple[bytes, bytes]] = {
    "no body": (b"", START + HOST + b"\r\n"),
    "a length": (b"hello", START + HOST + b"Content-Length: 5\r\n\r\nhello"),
    "blanks around a length": (b"hello", START + HOST + b"Content-Length: \t 5 \t\r\n\r\nhello"),
    "chunks": (
        b"hello", START + HOST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nT: a\r\n\r\n"
    ),
    "Chunked": (b"hello", START + HOST + b"transfer-encoding:Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
    "no address but a port": (b"", START + b"HOST: [::1]:8000\r\n\r\n"),
    "an empty line first": (b"", b"\r\n" + START + HOST + b"\r\n"),
    "an upgrade that is not wanted": (
        b"hello", START + HOST + b"Connection: upgrade, x-a\r\nUpgrade: h2c\r\nX-A: 1\r\nContent-Length: 5\r\n\r\nhello"
    ),
    "identity": (b"hello", START + HOST + b"Content-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello"),
    "as many headers as there may be": (b"", START + HOST + b"X: a\r\n" * 31 + b"\r\n"),
    "an empty header": (b"", START + HOST + b"X:\r\nY: \r\n\r\n"),
    "high bytes in a value": (b"", START + HOST + b"X: \xc3\xa9\xff\r\n\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("cut", [0, 1, 7], ids=["whole", "bytes", "sevens"])
@pytest.mark.parametrize("name", GOOD)
def test_what_is_taken_keeps_the_connection(name: str, cut: int) -> None:
    _, data = GOOD[name]
    statuses, paths, transport = said(data + data + SMUGGLED, cut)
    assert statuses == [200, 200, 200]
    assert paths == ["/a", "/a", "/smuggled"]
    assert not transport.over


@pytest.mark.parametrize("name", GOOD)
def test_the_request_is_what_was_sent(name: str) -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            connection, _ = connected(server)
            connection.data_received(data)
            (it,) = handler.requests
            assert (it.method, it.path, it.query, it.body, it.peer) == ("POST", "/a", "", body, "127.0.0.1")
            names = {name for name, _ in it.headers}
            assert b"host" in names
            assert not names & {b"connection", b"upgrade", b"transfer-encoding", b"content-length", b"x-a"}
            connection.connection_lost(None)

    body, data = GOOD[name]
    looped(run())


def test_heads_that_differ_in_their_length_only_are_not_mixed_up() -> None:
    """Such heads are read once. With and without a length they must never be taken for each other."""
    order = random.Random(7)
    shapes = [
        (b"%b%bContent-Length: %d\r\nX: y\r\n\r\n", True),
        (b"%b%bX: y\r\nContent-Length: %d\r\n\r\n", True),
        (b"%b%bX: y\r\ncontent-length: %d\r\n\r\n", True),
        (b"%b%bX: y\r\n\r\n", False),
    ]

    async def run() -> None:
        async with serving() as (server, handler):
            connection, _ = connected(server)
            for _ in range(400):
                shape, has_body = order.choice(shapes)
                body = order.randbytes(order.choice([0, 1, 5, 300])) if has_body else b""
                head = shape % (START, HOST, len(body)) if has_body else shape % (START, HOST)
                connection.data_received(head + body)
                assert handler.requests[-1].body == body
            assert len(handler.requests) == 400
            connection.connection_lost(None)

    looped(run())


def test_a_remembered_head_does_not_lend_itself_to_a_bad_one() -> None:
    good = START + HOST + b"X: y\r\nContent-Length: 0\r\n\r\n"
    for bad in (
        START + HOST + b"X: y\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n",
        START + HOST + b"X: y\r\nContent-Length: 0x\r\n\r\n",
        START + HOST + b"X: y\nContent-Length: 0\r\n\r\n",
        START + HOST + b"X: y\r\nContent-Length: \r\n\r\n",
        START + HOST + b"X: y\r\nContent-Length: 999999999999\r\n\r\n",
    ):
        statuses, paths, _ = said(good + good + bad + SMUGGLED)
        assert statuses[:2] == [200, 200]
        assert statuses[2] in (400, 413)
        assert len(paths) == 2


def test_the_target_is_handed_on_as_it_came() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            connection, _ = connected(server)
            connection.data_received(b"GET /a%2F..//b?x=%00&y=/?z HTTP/1.1\r\nHost: a\r\n\r\n")
            (it,) = handler.requests
            assert (it.path, it.query) == ("/a%2F..//b", "x=%00&y=/?z")
            connection.connection_lost(None)

    looped(run())


def test_more_than_the_limit_is_refused_before_it_comes() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            data = request("/a", b"x" * (LIMITS.body_bytes + 1))
            answer = await ask(server.port, data[: data.index(b"\r\n\r\n") + 4])
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"connection: close" in answer
            # A client that sends all of it nevertheless reads the answer too.
            assert (await ask(server.port, data)).startswith(b"HTTP/1.1 413 ")
            assert not handler.requests

    looped(run())


@pytest.mark.parametrize(
    "filling", [b"a", b" ", b"a ", b"\t", b"a: "], ids=["words", "blanks", "both", "tabs", "colons"]
)
@pytest.mark.parametrize("start", [b"X: ", b"X", b"Host: ", b"Content-Length: ", b"Connection: "], ids=range(5))
def test_no_line_takes_long_to_refuse(start: bytes, filling: bytes) -> None:
    """A grammar that can match a line in many ways tries all of them before it gives up."""
    line = start + filling * (15_000 // len(filling)) + b"\x01"
    begun_s = time.process_time()
    statuses, _, _ = said(START + HOST + line + b"\r\n\r\n")
    assert statuses == [400]
    assert time.process_time() - begun_s < 0.5
