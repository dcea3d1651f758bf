"""What is refused before its body is read: by its head, and for the sum of all bodies."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from headwater.conductor.http.connection import SMALL_BYTES
from headwater.conductor.http.server import HttpServer
from tests.conductor.http.rig import LIMITS, answer, connected, looped, request, serving, until

BODY = b"x" * (100 << 10)
TWO = replace(LIMITS, buffered_bytes=2 * len(BODY))
"""Room for two of them."""


def test_who_is_refused_by_the_head_sends_no_body() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/refused", BODY)[: -len(BODY)])
            status, headers, body = await answer(reader)
            assert (status, headers[b"x-method"], body) == (401, b"POST", b"no")
            assert headers[b"connection"] == b"close"
            assert await reader.read() == b""
            assert not handler.requests
            writer.close()

    looped(run())


def test_who_is_refused_is_not_told_to_go_on() -> None:
    async def run() -> None:
        async with serving() as (server, _handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/refused", BODY, "Expect: 100-continue\r\n")[: -len(BODY)])
            assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
            writer.close()

    looped(run())


def test_chunked_bodies_are_refused_by_the_head_too() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST /refused HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello")
            assert (await answer(reader))[0] == 401
            assert not handler.requests
            writer.close()

    looped(run())


def test_a_body_that_comes_with_its_head_is_handled_at_once() -> None:
    async def run() -> None:
        async with serving() as (server, handler):
            connection, transport = connected(server)
            connection.data_received(request("/a", b"hello"))
            assert not handler.admitted
            connection.data_received(request("/b", b"hello")[:-1])
            assert handler.admitted == ["/b"]
            connection.data_received(b"o")
            assert [it.path for it in handler.requests] == ["/a", "/b"]
            transport.abort()

    looped(run())


async def held(server: HttpServer, body: bytes = BODY) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client whose body is taken, and whose answer is awaited."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("/hold", body))
    return reader, writer


def test_the_sum_of_bodies_is_limited_until_their_answers_end() -> None:
    async def run() -> None:
        async with serving(TWO) as (server, handler):
            clients = [await held(server) for _ in range(2)]
            await until(lambda: len(handler.held) == 2)
            assert server.buffered_bytes == 2 * len(BODY)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request("/hold", BODY)[: -len(BODY)])
            status, headers, body = await answer(reader)
            assert (status, headers[b"retry-after"]) == (503, b"1")
            assert json.loads(body)["error"]["type"] == "service_unavailable_error"
            writer.close()
            small, smalls = await held(server, b"x" * SMALL_BYTES)
            await until(lambda: len(handler.held) == 3)
            for exchange in handler.held:
                exchange.answer(200, [], b"")
            for reader, _ in [*clients, (small, smalls)]:
                assert (await answer(reader))[0] == 200
            assert server.buffered_bytes == 0
            # The same connection again: nothing is counted twice.
            clients[0][1].write(request("/a", BODY))
            assert (await answer(clients[0][0]))[2] == BODY
            assert server.buffered_bytes == 0
            for _, writer in [*clients, (small, smalls)]:
                writer.close()
            assert server.counts.numbers["http_bodies_refused", ""] == 1

    looped(run())


def test_who_leaves_gives_the_room_of_a_body_back() -> None:
    async def run() -> None:
        async with serving(TWO) as (server, handler):
            _, whole = await held(server)
            _, half = await asyncio.open_connection("127.0.0.1", server.port)
            half.write(request("/hold", BODY)[:-1])
            await until(lambda: server.buffered_bytes == 2 * len(BODY) and handler.held)
            whole.transport.abort()
            half.transport.abort()
            await until(lambda: not server.connections)
            assert server.buffered_bytes == 0

    looped(run())


def test_chunked_bodies_are_counted_as_they_come() -> None:
    async def run() -> None:
        async with serving(replace(LIMITS, buffered_bytes=len(BODY))) as (server, handler):
            connection, transport = connected(server)
            connection.data_received(b"POST /hold HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            chunk = b"%x\r\n%b\r\n" % (len(BODY) // 2, BODY[: len(BODY) // 2])
            connection.data_received(chunk)
            assert server.buffered_bytes == 0
            connection.data_received(chunk)
            assert server.buffered_bytes == len(BODY)
            connection.data_received(chunk)
            assert transport.written.startswith(b"HTTP/1.1 503 ")
            assert server.buffered_bytes == 0
            assert not handler.held
            transport.abort()

    looped(run())
