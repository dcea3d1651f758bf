"""What instances may do to us: every misbehaviour ends the call with one word, in time, and harms no other call."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace
from typing import Any

import pytest

from headwater.conductor.http.exchange import Origin
from headwater.conductor.http.link import IDLE_S
from headwater.conductor.http.parsing import UnsafeHeader
from headwater.conductor.http.upstream import UpstreamPool
from headwater.demo.processes import free_port
from tests.conductor.http.rig import LIMITS, Script, Sink, instance, looped, pooled, read_request, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
SSE = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1;x=y\r\n \r\n5\r\nworld\r\n0\r\nT: x\r\n\r\n"
)


def says(*answers: bytes, then: str = "wait") -> Script:
    """An instance that answers each request so, and then waits for the other side, or closes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for data in answers:
            await read_request(reader)
            writer.write(data)
        if then == "wait":
            await reader.read()
        elif then == "reset":
            await until(lambda: writer.transport.get_write_buffer_size() == 0)
            reset(writer)

    return script


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a process does that is killed with unread data."""
    link = writer.get_extra_info("socket")
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def called(pool: UpstreamPool, origin: Origin, method: str = "POST", first_s: float = 5.0, **more: Any) -> Sink:
    """One call, to its end."""
    sink = Sink()
    pool.call(origin, method, "/v1/x", more.get("headers", []), more.get("body", b"ask"), sink, first_s=first_s)
    await until(lambda: sink.outcome)
    return sink


GOOD: dict[str, tuple[bytes, bytes, bool]] = {
    "a length": (OK, b"hello", True),
    "chunks": (SSE, b"hello world", True),
    "no body": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", b"", True),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", True),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, b"hello", True),
    "elsewhere": (b"HTTP/1.1 302 Found\r\nLocation: http://other/\r\nContent-Length: 5\r\n\r\nhello", b"hello", True),
    "closing": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", False),
    "something after it": (OK + b"garbage", b"hello", False),
    "something after chunks": (SSE + b"x", b"hello world", False),
    "something after nothing": (b"HTTP/1.1 204 No Content\r\n\r\nx", b"", False),
}


class TakesWhole(Sink):
    """Takes what comes in one piece at once."""

    def whole(self, status: int, lines: bytes, body: bytes) -> None:  # type: ignore[override]
        self.calls.append("whole")
        self.status, self.body, self.outcome = status, body, "end"
        assert lines == b"content-type: text/plain\r\nretry-after: 3\r\n"


TOLD = b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Type: text/plain\r\nRetry-After: 3\r\nContent-Length: 5\r\n\r\nhello"
NO_PIECE = {
    "chunks": TOLD.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked")[:-5] + b"5\r\nhello\r\n0\r\n\r\n",
    "no content": TOLD.replace(b"200 OK", b"204 No").replace(b": 5", b": 0")[:-5],
    "something after it": TOLD + b"x",
}


async def told(pool: UpstreamPool, origin: Origin, method: str = "POST") -> TakesWhole:
    """The same by one who takes what comes in one piece."""
    sink = TakesWhole()
    pool.call(origin, method, "/v1/x", [], b"ask", sink, first_s=5)
    await until(lambda: sink.outcome)
    return sink


def test_an_answer_in_one_piece_is_told_at_once_where_its_head_is_known() -> None:
    async def run() -> None:
        own = TOLD.replace(b"Server: x", b"Server: whom no other test knows")
        world, head = own.replace(b"hello", b"world"), own.replace(b": 5", b": 0")[:-5]
        async with instance(says(own, own, world, head, own)) as (it, origin), pooled() as pool:
            first, second, third = [await told(pool, origin) for _ in range(3)]
            assert first.calls == ["head", "data"] and second.calls == third.calls == ["whole"]
            assert (first.body, second.body, third.body) == (b"hello", b"hello", b"world")
            assert (await told(pool, origin, "HEAD")).calls == ["head"]
            assert (await told(pool, origin)).calls == ["whole"] and it.connections == 1

    looped(run())


@pytest.mark.parametrize("name", NO_PIECE)
def test_what_is_no_answer_in_one_piece_is_not_taken_for_one(name: str) -> None:
    async def run() -> None:
        async with instance(says(NO_PIECE[name], NO_PIECE[name])) as (_, origin), pooled() as pool:
            for _ in range(2):
                sink = await told(pool, origin)
                assert sink.outcome == "end" and "whole" not in sink.calls

    looped(run())


@pytest.mark.parametrize("name", GOOD)
def test_an_answer_split_at_every_byte(name: str) -> None:
    data, body, _ = GOOD[name]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(data[: cuts[-1]])
        await until(lambda: any(link._touched for link in pools[0]._links))
        writer.write(data[cuts[-1] :])
        await reader.read()

    async def run() -> None:
        async with instance(script) as (it, origin), pooled() as pool:
            pools.append(pool)
            for cut in range(1, len(data) + 1):
                cuts.append(cut)
                sink = await called(pool, origin)
                assert (sink.outcome, sink.body) == ("end", body)
                assert sink.calls[0] == "head"
                pool.close(origin)
                await until(lambda: not pool.connections and it.closed == it.connections)

    cuts: list[int] = []
    pools: list[UpstreamPool] = []
    looped(run())


@pytest.mark.parametrize("name", GOOD)
def test_a_connection_is_used_again_only_where_that_is_safe(name: str) -> None:
    data, body, reused = GOOD[name]

    async def run() -> None:
        async with instance(says(data, OK)) as (it, origin), pooled() as pool:
            assert (await called(pool, origin)).body == body
            again = await called(pool, origin)
            assert again.outcome == "end"
            assert it.connections == (1 if reused else 2)

    looped(run())


BAD: dict[str, tuple[bytes, str, str]] = {
    "closes at once": (b"", "close", "closed"),
    "resets at once": (b"", "reset", "closed"),
    "closes within the head": (OK[:20], "close", "closed"),
    "closes within the body": (OK[:-1], "close", "closed"),
    "closes within chunks": (SSE[:70], "close", "closed"),
    "closes before the last chunk": (SSE[: SSE.index(b"0\r\nT")], "close", "closed"),
    "resets a body without a length": (b"HTTP/1.1 200 OK\r\n\r\nhello", "reset", "closed"),
    "says nothing": (b"", "wait", "late"),
    "stops within the head": (OK[:20], "wait", "late"),
    "stops after the head": (SSE[: SSE.index(b"5\r\n")], "wait", "silent"),
    "stops within the body": (OK[:-1], "wait", "silent"),
    "interim for ever": (b"HTTP/1.1 100 Continue\r\n\r\n" * 2, "wait", "late"),
    "many interims": (b"HTTP/1.1 100 Continue\r\n\r\n" * 100, "wait", "malformed"),
    "switches": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "wait", "malformed"),
    "garbage": (b"\x00\x01garbage\r\n\r\n", "wait", "malformed"),
    "garbage without an end": (b"garbage", "wait", "malformed"),
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n", "wait", "late"),
    "HTTP/2": (b"HTTP/2 200 OK\r\n\r\n", "wait", "malformed"),
    "bad status": (b"HTTP/1.1 2000 OK\r\n\r\n", "wait", "malformed"),
    "status 0": (b"HTTP/1.1 000 OK\r\n\r\n", "wait", "malformed"),
    "LF only": (b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", "wait", "malformed"),
    "10 MB of a header": (b"HTTP/1.1 200 OK\r\nX: " + b"a" * (10 << 20), "wait", "malformed"),
    "many headers": (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 2000 + b"\r\n", "wait", "malformed"),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "wait", "malformed"),
    "length and chunks": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello", "wait", "malformed"
    ),
    "length that is none": (b"HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\nhello", "wait", "malformed"),
    "gzip, chunked": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "wait", "malformed"),
    "gzip": (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", "wait", "malformed"),
    "bad chunk": (SSE.replace(b"1;x=y", b"xyz"), "wait", "malformed"),
    "bad end of a chunk": (SSE.replace(b"hello\r\n", b"hello!\n"), "wait", "malformed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_misbehaviour_ends_the_call(name: str) -> None:
    data, then, why = BAD[name]

    async def run() -> None:
        async with instance(says(data, then=then)) as (it, origin), pooled(silent_s=0.1) as pool:
            sink = await called(pool, origin, first_s=0.1)
            assert (sink.outcome, sink.sent) == (why, True)
            await until(lambda: pool.connections == 0)
            assert it.connections == 1
            assert pool.counts.numbers["upstream_lost", why] == 1

    looped(run())


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async def run() -> None:
        async with instance(says(b"HTTP/1.1 200 OK\r\n\r\nhello", then="close")) as (_, origin), pooled() as pool:
            sink = await called(pool, origin)
            assert (sink.outcome, sink.body) == ("end", b"hello")
            await until(lambda: pool.connections == 0)

    looped(run())


def test_an_answer_to_head_has_no_body() -> None:
    async def run() -> None:
        data = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
        async with instance(says(data, OK)) as (it, origin), pooled() as pool:
            sink = await called(pool, origin, method="HEAD")
            assert (sink.outcome, sink.body, sink.headers) == ("end", b"", [])
            assert (await called(pool, origin)).body == b"hello"
            assert it.connections == 1

    looped(run())


def test_nobody_is_there() -> None:
    async def run() -> None:
        async with pooled() as pool:
            sink = await called(pool, Origin("127.0.0.1", free_port()))
            assert (sink.outcome, sink.sent) == ("refused", False)
            assert pool.connections == 0

    looped(run())


def test_connecting_takes_too_long() -> None:
    async def run() -> None:
        # A listener whose queue is full does not answer.
        listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        async with pooled(connect_s=0.2) as pool:
            sink = await called(pool, Origin("127.0.0.1", port))
            assert (sink.outcome, sink.sent) == ("connect", False)
        for it in (listener, *fillers):
            it.close()

    looped(run())


def test_what_is_sent() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await read_request(reader))
        writer.write(OK)
        await reader.read()

    async def run() -> None:
        async with instance(script) as (_, origin), pooled() as pool:
            headers = [
                (b"host", b"evil"), (b"connection", b"keep-alive, x-secret"), (b"keep-alive", b"5"),
                (b"te", b"trailers"),
                (b"transfer-encoding", b"chunked"), (b"content-length", b"99"), (b"upgrade", b"h2c"),
                (b"expect", b"x"),
                (b"accept-encoding", b"gzip"), (b"x-secret", b"1"), (b"proxy-authorization", b"2"),
                (b"trailer", b"3"),
                (b"x-ours", b"yes"), (b"content-type", b"application/json"),
            ]  # fmt: skip
            await called(pool, origin, headers=headers)
            assert heads[0].decode() == (
                "POST /v1/x HTTP/1.1\r\n"
                f"host: 127.0.0.1:{origin.port}\r\naccept-encoding: identity\r\n"
                "x-ours: yes\r\ncontent-type: application/json\r\ncontent-length: 3\r\n\r\n"
            )

    heads: list[bytes] = []
    looped(run())


def test_what_is_handed_on() -> None:
    data = (
        b"HTTP/1.1 200 OK\r\nConnection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTrailer: a\r\nX-A:  b \r\n"
        b"Content-Length: 5\r\nProxy-Authenticate: x\r\n\r\nhello"
    )

    async def run() -> None:
        async with instance(says(data)) as (_, origin), pooled() as pool:
            sink = await called(pool, origin)
            assert sink.headers == [(b"x-a", b"b")]

    looped(run())


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/a", [(b"x", b"a\r\nb: c")]),
        ("POST", "/a", [(b"x", b"a\nb")]),
        ("POST", "/a", [(b"x", b"\0")]),
        ("POST", "/a", [(b"x y", b"a")]),
        ("POST", "/a b", []),
        ("POST", "/a\r\nx: y", []),
        ("POST", "http://other/", []),
        ("POST", "/\u00e9", []),
        ("POST /x", "/a", []),
    ],
    ids=["CRLF", "LF", "NUL", "name", "blank", "path", "absolute", "not ASCII", "method"],
)
def test_a_request_cannot_be_split(method: str, path: str, headers: Any) -> None:
    async def run() -> None:
        async with pooled() as pool:
            for _ in range(2):
                with pytest.raises(UnsafeHeader):
                    pool.call(Origin("127.0.0.1", 1), method, path, headers, b"", Sink(), first_s=1)
            with pytest.raises(UnsafeHeader):
                pool.call(Origin("a\r\nb", 1), "GET", "/", [], b"", Sink(), first_s=1)

    looped(run())


@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_connection_that_was_closed_in_the_meantime_is_replaced(then: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        if len(seen) == 0:
            # The second request on this connection finds it closing.
            seen.append(await read_request(reader))
            if then == "reset":
                reset(writer)
            return
        await reader.read()

    async def run() -> None:
        async with instance(script) as (it, origin), pooled() as pool:
            await called(pool, origin)
            sink = await called(pool, origin)
            assert (sink.outcome, sink.body, sink.calls) == ("end", b"hello", ["head", "data"])
            assert it.connections == 2
            assert pool.counts.numbers["upstream_stale", ""] == 1

    seen: list[bytes] = []
    looped(run())


def test_it_is_replaced_once_and_what_was_sent_is_told() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if not seen:
            seen.append(b"")
            writer.write(OK)
            await read_request(reader)

    async def run() -> None:
        async with instance(script) as (it, origin), pooled() as pool:
            await called(pool, origin)
            sink = await called(pool, origin)
            assert (sink.outcome, sink.sent) == ("closed", True)
            assert it.connections == 2
        # Where the fresh connection is refused, the first one may still have been read.
        async with instance(says(OK, b"")) as (it, origin), pooled() as pool:
            await called(pool, origin)
            it.server.close()
            sink = Sink()
            pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            it.writers[0].transport.abort()
            await until(lambda: sink.outcome)
            assert (sink.outcome, sink.sent) == ("refused", True)

    seen: list[bytes] = []
    looped(run())


def test_a_fresh_connection_that_closes_is_not_replaced_nor_one_that_said_a_byte() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        writer.write(b"H")

    async def run() -> None:
        async with instance(script) as (it, origin), pooled() as pool:
            await called(pool, origin)
            assert (await called(pool, origin)).outcome == "closed"
            assert it.connections == 1

    looped(run())


def test_idle_connections_end() -> None:
    async def run() -> None:
        async with instance(says(OK)) as (it, origin), pooled() as pool:
            await called(pool, origin)
            (link,) = pool._links
            now = pool.time()
            assert now + IDLE_S - 1 < link.deadline_s <= now + IDLE_S + 1
            link.deadline_s = now
            pool._sweep()
            await until(lambda: not pool.connections)
            assert not pool._idle[origin]
            # One that says something that nobody asked for, and one that closes.
            await called(pool, origin)
            it.writers[-1].write(b"x")
            await until(lambda: not pool.connections)
            await called(pool, origin)
            it.writers[-1].close()
            await until(lambda: not pool.connections)
            await called(pool, origin)
            pool.close(origin)
            await until(lambda: not pool.connections)
            assert it.connections == 4

    looped(run())


def test_the_one_used_last_is_used_next() -> None:
    async def run() -> None:
        async with instance(says(*[OK] * 9)) as (it, origin), pooled() as pool:
            sinks = [Sink() for _ in range(3)]
            for sink in sinks:
                pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            await until(lambda: all(sink.outcome for sink in sinks))
            last = pool._idle[origin][-1]
            for _ in range(3):
                await called(pool, origin)
                assert pool._idle[origin][-1] is last
            assert it.connections == 3

    looped(run())


@pytest.mark.parametrize("when", ["connecting", "waiting", "answering"])
def test_an_aborted_call_closes_its_connection_and_says_nothing(when: str) -> None:
    async def run() -> None:
        data = SSE[: SSE.index(b"1;")] if when == "answering" else b""
        async with instance(says(data)) as (it, origin), pooled() as pool:
            sink = Sink()
            call = pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            if when == "waiting":
                await until(lambda: pool.connections and call.sent)
            elif when == "answering":
                await until(lambda: sink.body)
            call.abort()
            call.abort()
            call.pause()
            call.resume()
            await until(lambda: it.connections == it.closed == 1 and not pool.connections)
            assert sink.outcome == ""

    looped(run())


class Aborting(Sink):
    """Wants no more as soon as something comes."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.call = at, None

    def head(self, status: int, headers: Any) -> None:
        super().head(status, headers)
        if self.at == "head":
            self.call.abort()

    def data(self, data: bytes) -> None:
        super().data(data)
        self.call.abort()


@pytest.mark.parametrize("data", [OK, SSE], ids=["length", "chunks"])
@pytest.mark.parametrize("at", ["head", "data"])
def test_a_call_may_be_aborted_while_it_hands_on(at: str, data: bytes) -> None:
    async def run() -> None:
        async with instance(says(data)) as (it, origin), pooled() as pool:
            sink = Aborting(at)
            sink.call = pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            await until(lambda: it.closed)
            assert sink.calls == (["head"] if at == "head" else ["head", "data"])
            assert sink.outcome == ""

    looped(run())


def test_a_paused_call_is_not_read_and_not_silent() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        for _ in range(total // 100_000):
            writer.write(b"x" * 100_000)
            await writer.drain()
        await reader.read()

    async def run() -> None:
        async with instance(script) as (_, origin), pooled(silent_s=0.2) as pool:
            sink = Sink()
            call = pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            await until(lambda: sink.body)
            call.pause()
            await asyncio.sleep(0)
            got = len(sink.body)
            due_s = pool.time() + 0.6
            await until(lambda: pool.time() > due_s)
            assert len(sink.body) == got < total
            assert sink.outcome == ""
            call.resume()
            await until(lambda: sink.outcome == "end")
            assert len(sink.body) == total

    total = 20_000_000
    looped(run())


def test_a_link_whose_call_ended_paused_is_read_again() -> None:
    async def run() -> None:
        async with instance(says(OK, OK)) as (it, origin), pooled() as pool:
            sink = Aborting("")
            sink.data = lambda data: sink.call.pause()  # type: ignore[method-assign]
            sink.call = pool.call(origin, "POST", "/", [], b"", sink, first_s=5)
            await until(lambda: sink.outcome == "end")
            assert (await called(pool, origin)).body == b"hello"
            assert it.connections == 1

    looped(run())


def test_stopping_loses_what_is_under_way() -> None:
    async def run() -> None:
        async with instance(says(b"")) as (_, origin), pooled(replace(LIMITS)) as pool:
            sinks = [Sink(), Sink()]
            pool.call(origin, "POST", "/", [], b"", sinks[0], first_s=5)
            await until(lambda: pool.connections)
            pool.call(origin, "POST", "/", [], b"", sinks[1], first_s=5)
            await pool.stop()
            assert [sink.outcome for sink in sinks] == ["closed", "closed"]

    looped(run())


def test_a_large_body_arrives() -> None:
    async def run() -> None:
        async with instance(says(OK)) as (_, origin), pooled() as pool:
            assert (await called(pool, origin, body=b"x" * (5 << 20))).outcome == "end"

    looped(run())
