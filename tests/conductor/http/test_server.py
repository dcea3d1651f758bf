"""The server over real sockets: order, pressure, time, limits, departures and endings."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from dataclasses import replace

import pytest

from headwater._kernels.events import TokenEvents
from headwater.conductor.http.connection import HELD_BYTES, WRITE_HIGH_BYTES
from headwater.conductor.http.parsing import UnsafeHeader
from tests.conductor.http.rig import LIMITS, Watcher, answer, ask, looped, passing, request, serving, until


def test_answers_come_in_the_order_of_the_requests() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/hold", b"1") + request("/second", b"2") + request("/third", b"3"))
            await until(lambda: handler.held)
            assert [it.path for it in handler.requests] == ["/hold"]
            handler.held[0].answer(200, [], b"first")
            assert [(await answer(reader))[2] for _ in range(3)] == [b"first", b"2", b"3"]
            writer.close()

    looped(run())


def test_many_requests_at_once_are_all_answered() -> None:
    async def run() -> None:
        async with serving() as (server, _handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"".join(request(f"/{i}", b"%d" % i) for i in range(500)))
            assert [(await answer(reader))[2] for _ in range(500)] == [b"%d" % i for i in range(500)]
            writer.close()

    looped(run())


def test_pipelined_requests_are_bounded() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = b"x" * (200 << 10)
            writer.write(request("/hold"))
            await until(lambda: handler.held)
            for _ in range(40):
                writer.write(request("/more", body))
            (connection,) = server._connections
            await until(lambda: connection._unread)
            assert len(connection._held) <= HELD_BYTES + (256 << 10)
            handler.held[0].answer(200, [], b"")
            for _ in range(41):
                assert (await answer(reader))[0] == 200
            writer.close()

    looped(run())


def test_a_stream_is_chunked_and_the_connection_lives_on() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(2):
                writer.write(request("/hold"))
                await until(lambda: handler.held)
                exchange = handler.held.pop()
                exchange.start(200, [(b"content-type", b"text/event-stream"), (b"content-length", b"3")])
                exchange.send(b"one")
                exchange.send(b"")
                exchange.send(b"2" * 100_000)
                exchange.end()
                status, headers, body = await answer(reader)
                assert (status, body) == (200, b"one" + b"2" * 100_000)
                assert b"content-length" not in headers
                assert b"date" in headers
                # Whatever comes later does nothing.
                exchange.send(b"late")
                exchange.end()
                exchange.answer(500, [], b"")
                exchange.abort()
            writer.close()

    looped(run())


def test_answers_to_http_1_0_end_with_the_connection() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            said = asyncio.create_task(ask(server.port, b"GET /hold HTTP/1.0\r\n\r\n"))
            await until(lambda: handler.held)
            handler.held[0].start(200, [])
            handler.held[0].send(b"one")
            handler.held[0].end()
            head, _, body = (await said).partition(b"\r\n\r\n")
            assert body == b"one"
            assert b"chunked" not in head
            assert b"connection: close" in head
            whole = await ask(server.port, b"GET /a HTTP/1.0\r\n\r\n")
            assert b"content-length: 7\r\n" in whole
            assert whole.endswith(b"nothing")

    looped(run())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_head_has_no_body(streamed: bool) -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/hold", method="HEAD") + request("/next", b"next"))
            await until(lambda: handler.held)
            exchange = handler.held[0]
            if streamed:
                exchange.start(200, [])
                exchange.send(b"body")
                exchange.end()
            else:
                exchange.answer(200, [], b"body")
            head = await reader.readuntil(b"\r\n\r\n")
            assert (b"content-length: 4" in head) is not streamed
            assert (await answer(reader))[2] == b"next"
            writer.close()

    looped(run())


def test_no_content_has_no_body() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/hold") + request("/next", b"next"))
            await until(lambda: handler.held)
            handler.held[0].answer(204, [], b"body")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length" not in head
            assert (await answer(reader))[2] == b"next"
            writer.close()

    looped(run())


def test_the_client_may_close() -> None:
    async def run() -> None:
        async with serving() as (server, _):
            said = await ask(server.port, request("/a", more="Connection: Foo, Close\r\n"))
            assert b"connection: close\r\n" in said

    looped(run())


def test_continue_is_said_before_the_body_comes() -> None:
    async def run() -> None:
        async with serving() as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            data = request("/a", b"hello", "Expect: 100-continue\r\n")
            writer.write(data[:-5])
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(data[-5:])
            assert (await answer(reader))[2] == b"hello"
            # A client that does not wait is not told.
            writer.write(data)
            assert (await answer(reader))[0] == 200
            writer.close()

    looped(run())


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", b""),
        (b"GET / HT", b"HTTP/1.1 408 "),
        (request("/a", b"hello")[:-1], b"HTTP/1.1 408 "),
        (request("/a") + b"G", b"HTTP/1.1 200 "),
    ],
    ids=["nothing", "half a head", "half a body", "after a good one"],
)
def test_who_is_too_slow_is_told_so(sent: bytes, said: bytes) -> None:
    async def run() -> None:
        async with serving(header_s=0.1, body_s=0.1, keep_alive_s=0.1) as (server, _):
            begun_s = time.monotonic()
            assert (await ask(server.port, sent)).startswith(said)
            assert 0.09 <= time.monotonic() - begun_s < 5

    looped(run())


def test_dripping_does_not_gain_time() -> None:
    async def run() -> None:
        async with serving(header_s=0.2) as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            said = asyncio.create_task(reader.read())
            begun_s = time.monotonic()
            while not said.done() and time.monotonic() - begun_s < 5:
                writer.write(b"A")
                await passing(0.01)
            assert said.done()
            assert (await said).startswith(b"HTTP/1.1 408 ")
            writer.close()

    looped(run())


def test_an_idle_connection_is_closed() -> None:
    async def run() -> None:
        async with serving(keep_alive_s=0.1) as (server, _):
            said = await ask(server.port, request("/a", b"hello"))
            assert said.endswith(b"hello")

    looped(run())


def test_one_too_many_is_told_to_come_back() -> None:
    async def run() -> None:
        async with serving(replace(LIMITS, connections=2)) as (server, _handler):
            links = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
            for reader, writer in links:
                writer.write(request("/a"))
                assert (await answer(reader))[0] == 200
            said = await ask(server.port, request("/a"))
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in said
            links[0][1].close()
            await until(lambda: server.connections == 1)
            assert (await ask(server.port, request("/b", more="Connection: close\r\n"))).startswith(b"HTTP/1.1 200 ")
            links[1][1].close()

    looped(run())


async def holding(port: int, small: bool = False) -> socket.socket:
    """A client with a request that is held, as a bare socket."""
    link = socket.socket()
    if small:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(link, request("/hold"))
    return link


def reset(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


WAYS = {"close": socket.socket.close, "reset": reset, "half": lambda link: link.shutdown(socket.SHUT_WR)}


@pytest.mark.parametrize("state", ["pending", "streaming", "pipelined", "unread"])
@pytest.mark.parametrize("way", WAYS)
def test_who_leaves_is_noticed(way: str, state: str) -> None:
    async def run() -> None:
        async with serving(keep_alive_s=1.0) as (server, handler):
            link = await holding(server.port)
            await until(lambda: handler.held)
            exchange, (watcher,) = handler.held[0], handler.watchers
            loop = asyncio.get_running_loop()
            if state == "streaming":
                exchange.start(200, [])
                exchange.send(b"data")
            elif state == "pipelined":
                await loop.sock_sendall(link, request("/next"))
            elif state == "unread":
                # So much that it is not read any more: only the sweep can see that the client has left.
                await loop.sock_sendall(link, request("/next", b"x" * (200 << 10)))
                (connection,) = server._connections
                await until(lambda: connection._unread)
            WAYS[way](link)
            assert await until(lambda: watcher.told == ["gone"]) < 1.5
            assert exchange.closed
            late = Watcher()
            exchange.watch(late)
            assert late.told == ["gone"]
            exchange.send(b"more")
            exchange.end()
            await until(lambda: server.connections == 0)
            assert [it.path for it in handler.requests] == ["/hold"]
            assert watcher.told == ["gone"]
            link.close()

    looped(run())


def test_what_was_answered_is_delivered_to_who_shut_its_side() -> None:
    async def run() -> None:
        async with serving() as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/a", b"hello"))
            writer.write_eof()
            assert (await reader.read()).endswith(b"hello")
            writer.close()

    looped(run())


def test_who_aborts_is_not_told() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/hold"))
            await until(lambda: handler.held)
            exchange = handler.held[0]
            exchange.start(200, [])
            exchange.send(b"half")
            exchange.abort()
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
            await until(lambda: server.connections == 0)
            assert handler.watchers[0].told == []
            writer.close()

    looped(run())


def test_pressure_is_told_and_relieved() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            link = await holding(server.port, small=True)
            await until(lambda: handler.held)
            exchange, (watcher,) = handler.held[0], handler.watchers
            exchange.start(200, [])
            sent = 0
            while "full" not in watcher.told:
                exchange.send(b"x" * 10_000)
                sent += 10_000
                await asyncio.sleep(0)
            assert sent < 64 << 20
            late = Watcher()
            exchange.watch(late)
            assert late.told == ["full"]
            exchange.watch(watcher)
            loop = asyncio.get_running_loop()
            while "drained" not in watcher.told:
                await loop.sock_recv(link, 1 << 20)
            link.close()
            await until(lambda: watcher.told[-1] == "gone")

    looped(run())


@pytest.mark.parametrize("ended", [False, True], ids=["streaming", "ended"])
def test_who_never_reads_is_cut_off(ended: bool) -> None:
    async def run() -> None:
        async with serving(stalled_s=0.2) as (server, handler):
            link = await holding(server.port, small=True)
            await until(lambda: handler.held)
            exchange, (watcher,) = handler.held[0], handler.watchers
            exchange.start(200, [])
            while "full" not in watcher.told:
                exchange.send(b"x" * WRITE_HIGH_BYTES)
                await asyncio.sleep(0)
            if ended:
                exchange.end()
            assert await until(lambda: server.connections == 0) < 5
            assert watcher.told.count("gone") == (0 if ended else 1)
            assert server.counts.numbers["http_clients_stalled", ""] == 1
            link.close()

    looped(run())


def test_who_never_reads_does_not_pile_up_answers() -> None:
    async def run() -> None:
        async with serving(stalled_s=0.3) as (server, handler):
            link = socket.socket()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(link, ("127.0.0.1", server.port))
            data = request("/a", b"x" * (200 << 10))
            with pytest.raises((ConnectionError, TimeoutError)):
                async with asyncio.timeout(10):
                    for _ in range(1000):
                        await loop.sock_sendall(link, data)
            # The kernel's buffers hold a few megabytes; more than that was never answered.
            assert len(handler.requests) < 100
            await until(lambda: server.connections == 0)
            link.close()

    looped(run())


def test_who_reads_slowly_is_not_cut_off() -> None:
    async def run() -> None:
        async with serving(stalled_s=0.2) as (server, handler):
            link = await holding(server.port, small=True)
            await until(lambda: handler.held)
            exchange, (watcher,) = handler.held[0], handler.watchers
            exchange.start(200, [])
            while "full" not in watcher.told:
                exchange.send(b"x" * WRITE_HIGH_BYTES)
                await asyncio.sleep(0)
            (connection,) = server._connections
            loop = asyncio.get_running_loop()
            begun_s = time.monotonic()
            while time.monotonic() - begun_s < 0.8:
                await loop.sock_recv(link, 20_000)
                await passing(0.02)
            assert connection.full
            assert "gone" not in watcher.told
            link.close()
            await until(lambda: watcher.told[-1] == "gone")

    looped(run())


def test_draining_ends_what_is_in_progress_and_takes_nothing_new() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            idle = await asyncio.open_connection("127.0.0.1", server.port)
            busy = await asyncio.open_connection("127.0.0.1", server.port)
            half = await asyncio.open_connection("127.0.0.1", server.port)
            idle[1].write(request("/a"))
            assert (await answer(idle[0]))[0] == 200
            busy[1].write(request("/hold") + request("/pipelined"))
            half[1].write(request("/half", b"hello")[:-5])
            await until(lambda: handler.held and server.connections == 3)
            drained = asyncio.create_task(server.drain(5.0))
            assert await idle[0].read() == b""
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", server.port)
            half[1].write(b"hello")
            for reader in (half[0], busy[0]):
                if reader is busy[0]:
                    handler.held[0].answer(200, [], b"done")
                status, headers, _ = await answer(reader)
                assert (status, headers[b"connection"]) == (200, b"close")
                assert await reader.read() == b""
            assert await drained
            assert "/pipelined" not in [it.path for it in handler.requests]
            for _, writer in (idle, busy, half):
                writer.close()

    looped(run())


def test_draining_has_an_end() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/hold"))
            await until(lambda: handler.held)
            assert not await server.drain(0.1)
            await server.close()
            assert handler.watchers[0].told == ["gone"]
            writer.close()

    looped(run())


@pytest.mark.parametrize(
    "header",
    [
        (b"x", b"a\r\nb: c"),
        (b"x", b"a\nb"),
        (b"x", b"a\rb"),
        (b"x", b"\0"),
        (b"x: y\r\nz", b"a"),
        (b"X", b"a"),
        (b"", b""),
    ],
    ids=["CRLF", "LF", "CR", "NUL", "name", "upper case", "empty"],
)  # fmt: skip
def test_an_answer_cannot_be_split(header: tuple[bytes, bytes]) -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/hold"))
            await until(lambda: handler.held)
            for _ in range(2):
                with pytest.raises(UnsafeHeader):
                    handler.held[0].answer(200, [header], b"")
                with pytest.raises(UnsafeHeader):
                    handler.held[0].start(200, [header])
            handler.held[0].answer(200, [(b"x", b"ok"), (b"connection", b"x"), (b"date", b"1")], b"")
            _, headers, _ = await answer(reader)
            assert b"connection" not in headers
            assert headers[b"date"] != b"1"
            writer.close()

    looped(run())


def test_five_hundred_slow_clients_do_not_slow_a_healthy_one(many_descriptors: None) -> None:
    async def run() -> None:
        async with serving(header_s=1.0) as (server, _):
            slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(500)]
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            times_s = []
            for i in range(300):
                slow[i][1].write(b"G" if i % 2 else b"P")
                begun_s = time.perf_counter()
                writer.write(request("/a", b"hello"))
                assert (await answer(reader))[2] == b"hello"
                times_s.append(time.perf_counter() - begun_s)
            assert sorted(times_s)[int(len(times_s) * 0.99)] < 0.1
            assert await until(lambda: server.connections <= 1) < 8
            writer.close()
            for _, other in slow:
                other.close()

    looped(run())


def test_of_headers_that_are_there_twice_the_first_counts() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            head = b"GET /a HTTP/1.1\r\nHost: h\r\nAuthorization: one\r\nX-A: 1\r\nAuthorization: two\r\n"
            head += b"Connection: close\r\n\r\n"
            assert (await ask(server.port, head)).startswith(b"HTTP/1.1 200 ")
            (request,) = handler.requests
            assert request.named == {b"host": b"h", b"authorization": b"one", b"x-a": b"1"}
            assert [it for it in request.headers if it[0] == b"authorization"] == [
                (b"authorization", b"one"), (b"authorization", b"two"),
            ]  # fmt: skip

    looped(run())


def test_chunks_can_be_written_by_others_only_while_the_body_is_under_way() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            asked = asyncio.create_task(ask(server.port, request("/hold")[:-2] + b"Connection: close\r\n\r\n"))
            await until(lambda: handler.held)
            (exchange,) = handler.held
            exchange.start(200, [])
            assert exchange.channel() is None, "the head has not been sent yet"
            exchange.send(b"first")
            assert exchange.channel() is not None
            exchange.end()
            assert exchange.channel() is None
            assert (await asked).endswith(b"\r\n\r\n5\r\nfirst\r\n0\r\n\r\n")

    looped(run())


def test_nothing_overtakes_what_a_client_has_not_read_yet(seed: int) -> None:
    """A slow client, and an answer that is written in all the ways that there are, in a random order."""
    rng = random.Random(seed)

    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 14)
            writer.write(request("/hold"))
            await until(lambda: handler.held)
            (exchange,) = handler.held
            exchange.start(200, [])
            exchange.send(b"first")
            said = [b"first"]
            channel = exchange.channel()
            assert channel is not None
            events = TokenEvents(Counter(), strips=False, keep_bytes=0)
            events.begin(channel)
            for number in range(1000):
                text = b"%d %b" % (number, b"x" * rng.choice((1, 100, 40_000)))
                if rng.random() < 0.5:
                    exchange.send(text)
                else:
                    text = b'data: {"choices":[{"text":"%b"}]}\n\n' % text
                    assert events(b"%x\r\n%b\r\n" % (len(text), text)) > 0
                said.append(text)
                if rng.random() < 0.02:
                    await passing(0.001)
            exchange.end()
            assert handler.watchers[0].told[:1] == ["full"], "it was never slow"
            body, head = b"".join(said), await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            came = b""
            while size := int(await reader.readline(), 16):
                came += (await reader.readexactly(size + 2))[:-2]
            assert came == body
            writer.close()

    looped(run())


class Counter:
    """Counts tokens."""

    answered_tokens = 0
