"""A loop that was busy takes no instance for late that has answered meanwhile."""

from __future__ import annotations

import asyncio
import time

from headwater.conductor.http.exchange import Origin
from headwater.conductor.http.link import Link
from headwater.conductor.http.upstream import CONNECT_ROUNDS
from tests.conductor.http.rig import Sink, instance, looped, pooled, read_request, until

CONNECT_S = 0.05
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def test_a_connection_that_was_made_while_the_loop_was_busy() -> None:
    async def run() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(OK)
            await reader.read()

        async with instance(script) as (_, origin), pooled(connect_s=CONNECT_S) as pool:
            sink = Sink()
            pool.call(origin, "POST", "/v1/x", [], b"ask", sink, first_s=5.0)
            await until(lambda: pool._opening)
            pool._loop.call_soon(time.sleep, 4 * CONNECT_S)
            await until(lambda: sink.outcome)
            assert (sink.outcome, sink.body) == ("end", b"hello")

    looped(run())


async def _never(_: Origin) -> Link:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("it ends never")


def test_an_instance_that_does_not_answer_is_given_up_in_time() -> None:
    async def run() -> None:
        async with pooled(connect_s=CONNECT_S) as pool:
            pool._make = _never  # type: ignore[method-assign]
            sink, begun_s = Sink(), time.monotonic()
            pool.call(Origin("127.0.0.1", 1), "POST", "/v1/x", [], b"", sink, first_s=5.0)
            await until(lambda: sink.outcome)
            assert sink.outcome == "connect"
            assert time.monotonic() - begun_s < 2 * CONNECT_S * CONNECT_ROUNDS + 1.0

    looped(run())
