"""Requests made by a grammar and broken by chance: each is answered with 2xx or 4xx and leaves the server well.

What the server executes is read by llhttp too: a second reader must see the same request in the same bytes.
HEADWATER_TEST_HTTP_FUZZ says how many (10,000 by default).
"""

from __future__ import annotations

import asyncio
import os
import random
import re

import httptools

from tests.conductor.http.rig import answer, ask, connected, looped, request, serving
from tests.conductor.http.test_requests import SMUGGLED

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Z]")
COUNT = int(os.environ.get("HEADWATER_TEST_HTTP_FUZZ", "10000"))

METHODS = [b"POST"] * 60 + [b"GET", b"HEAD", b"OPTIONS", b"CONNECT", b"TRACE", b"get", b"", b"P\0ST", b"DELETE"]
KNOWN = {"POST", "GET", "HEAD", "OPTIONS", "TRACE", "DELETE"}
"""llhttp takes no others; whoever handles requests may."""
TARGETS = [b"/v1/chat/completions"] * 60 + [b"/", b"/a?b=c", b"*", b"http://x/", b"//x", b"/\xff", b"/a b", b"", b"/#x"]
VERSIONS = [b"HTTP/1.1"] * 60 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.11", b"", b"ICE/1.0"]
ENDS = [b"\r\n"] * 250 + [b"\n", b"\r", b"\r\r\n", b"\n\r\n", b"", b"\r\n "]
LINES = [
    b"Content-Length: 0", b"Content-Length: 5", b"content-length: 5", b"Content-Length: 99", b"Content-Length : 5",
    b"Content-Length: 5,5", b"Content-Length:", b"Content-Length: -1", b"Content-Length: 18446744073709551621",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding:chunked ",
    b"Transfer-Encoding: identity", b"transfer-encoding: CHUNKED", b"Transfer-Encoding : chunked", b"Host: b", b"Host:",
    b"Connection: close",
    b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: websocket", b"Expect: 100-continue",
    b"Expect: x",
    b"Content-Encoding: gzip", b"X: y", b"X", b": y", b" X: y", b"\tX: y", b"X: \x00", b"X: \x7f", b"X\xff: y",
    b"Trailer: X", b"TE: trailers", b"X: " + b"y" * 5000, b"Authorization: Bearer x", b"GET /smuggled HTTP/1.1",
]  # fmt: skip
BODIES = [b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"5;x=y\r\nhello\r\n0\r\nT: x\r\n\r\n", b"5\r\nhell\r\n0\r\n\r\n"]
BODIES += [b"fffffffff\r\n", b"0\r\n\r\n", b"0\n\n", b"-1\r\n", b"5\nhello\n0\n\n", b"hello" * 20, b'{"model": "m"}']


def made(rng: random.Random) -> bytes:
    """A request: well-formed lines nearly everywhere, some others, then a few bytes changed in some."""
    parts = [rng.choice(METHODS), b" ", rng.choice(TARGETS), b" ", rng.choice(VERSIONS), rng.choice(ENDS)]
    lines = [b"Host: a"] if rng.random() < 0.9 else []
    lines += rng.choices(LINES, k=rng.choice([0, 1, 1, 1, 2, 3, 40] if rng.random() < 0.1 else [0, 1, 1, 2]))
    rng.shuffle(lines)
    for line in lines:
        parts += [line, rng.choice(ENDS)]
    data = bytearray(b"".join(parts) + rng.choice(ENDS) + rng.choice(BODIES))
    while data and rng.random() < 0.3:
        place = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                data[place:place] = rng.choice([b"\r\n", b"\n", b"\0", b" ", b":", rng.randbytes(3)])
            case 2:
                del data[place : place + rng.choice([1, 1, 5, 50])]
            case _:
                del data[place:]
    return bytes(data)


class Second:
    """What llhttp sees in the same bytes, up to the end of the first request."""

    def __init__(self, data: bytes) -> None:
        self.url, self.body, self.headers, self.whole = b"", b"", 0, False
        parser = httptools.HttpRequestParser(self)
        try:
            for i in range(len(data)):
                parser.feed_data(data[i : i + 1])
                if self.whole:
                    break
        except httptools.HttpParserUpgrade:
            self.whole = True
        self.method = parser.get_method()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers += 1

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True


def test_no_request_breaks_the_server(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        async with serving() as (server, handler):
            for number in range(COUNT):
                data = made(rng)
                note = f"seed {seed}, request {number}: {data!r}"
                connection, transport = connected(server)
                handler.requests.clear()
                pos = 0
                while pos < len(data) and not transport.over:
                    step = rng.choice([len(data), 1, 7, 100])
                    connection.data_received(data[pos : pos + step])
                    pos += step
                statuses = [int(it) for it in STATUS.findall(transport.written)]
                counted.update({status: counted.get(status, 0) + 1 for status in statuses})
                assert set(statuses) <= {100, 200, 400, 413, 414, 415, 417, 431}, note
                assert len([it for it in statuses if it == 200]) == len(handler.requests), note
                assert all(it.path != "/smuggled" for it in handler.requests) or b"hello" in data, note
                if handler.requests and handler.requests[0].method in KNOWN:
                    first, second = handler.requests[0], Second(data)
                    target = f"{first.path}?{first.query}" if first.query else first.path
                    assert second.method.decode() == first.method, note
                    assert second.url.decode() in (target, target + "?"), note
                    if b"pgrade" not in data:
                        assert second.whole and second.body == first.body, note
                if not transport.over and connection.idle:
                    handler.requests.clear()
                    connection.data_received(SMUGGLED)
                    assert [it.path for it in handler.requests] == ["/smuggled"], note
                elif not transport.over:
                    # It waits for more, and not for ever.
                    connection.sweep(server.time() + 1000)
                    assert transport.over, note
                    assert bytes(transport.written).rfind(b"HTTP/1.1 408 ") >= 0, note
                connection.connection_lost(None)
            assert server.connections == 0

    counted: dict[int, int] = {}
    looped(run(), within_s=600)
    # The grammar makes enough of each kind.
    assert counted[200] > COUNT / 20 and counted[400] > COUNT / 5, counted


def test_no_request_over_a_socket_breaks_the_server(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed + 1)
        async with serving(header_s=0.2, body_s=0.2, keep_alive_s=0.2) as (server, _):
            good = await asyncio.open_connection("127.0.0.1", server.port)
            for number in range(COUNT // 50):
                data = made(rng)
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(data)
                if rng.random() < 0.5:
                    # The client leaves at any byte.
                    writer.transport.abort()
                else:
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(), 5)
                    writer.close()
                if number % 10 == 0:
                    more = request("/well", b"hello", more="Connection: close\r\n")
                    assert (await ask(server.port, more)).endswith(b"hello")
                good[1].write(request("/good", b"good"))
                assert (await answer(good[0]))[2] == b"good"
            good[1].close()

    looped(run(), within_s=600)
