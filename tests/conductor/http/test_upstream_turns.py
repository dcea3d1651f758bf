"""Instances that send faster than anything is passed on: each turn of the loop reads a little of a few of them."""

from __future__ import annotations

import asyncio

from tests.conductor.http.rig import Sink, instance, looped, passing, pooled, read_request, until

STREAMS = 16
READ_BYTES = 256 << 10
"""What uvloop reads at once."""
FULL = 50
"""Turns without progress."""


class Counter(Sink):
    """What came, of all of them."""

    size_bytes = 0

    def data(self, data: bytes) -> None:
        Counter.size_bytes += len(data)


def test_streams_that_flood_leave_others_their_turn() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"10000\r\n%b\r\n" % (b"x" * 65536)
        while not writer.is_closing():
            writer.write(piece)
            sent.append(1)
            await writer.drain()

    async def run() -> None:
        async with instance(script) as (_, origin), pooled() as pool:
            Counter.size_bytes = 0
            calls = []
            for _ in range(STREAMS):
                sink = Counter()
                calls.append(pool.call(origin, "POST", "/v1/x", [], b"ask", sink, first_s=5.0))
                calls[-1].pause()
            still, known = 0, -1
            while still < FULL:  # until all buffers of the kernel's are full
                await passing(0.001)
                still, known = (still + 1 if known == len(sent) else 0), len(sent)
            for call in calls:
                call.resume()
            turns, before = [], Counter.size_bytes
            while Counter.size_bytes < 2 * STREAMS * READ_BYTES or len(turns) < FULL:
                await asyncio.sleep(0)
                turns.append(Counter.size_bytes - before)
                before = Counter.size_bytes
            print(f"bytes in a turn: at first {turns[:5]}, later at most {max(turns[10:])}")
            assert max(turns) <= 1.5 * STREAMS * READ_BYTES
            assert max(turns[10:]) <= STREAMS // 2 * READ_BYTES
            for call in calls:
                call.abort()
            await until(lambda: not pool.connections)

    sent: list[int] = []
    looped(run())
