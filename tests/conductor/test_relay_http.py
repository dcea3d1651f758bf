"""The relay between a real server and real connections: clients that leave or stall at the other end of a socket."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from headwater.conductor import bodies
from headwater.conductor.http.exchange import Exchange, Headers
from headwater.conductor.http.server import HttpServer
from headwater.conductor.job import Job, Phase
from headwater.fleetfile.model import Limits, TenantSpec
from tests.conductor.engine import Gate, Script
from tests.conductor.relays import DEADLINE_S, TIMES, House, house, run

ABORTED_S = 1.0
"""The promise: so soon after its client has left, an instance is told to stop."""


class Front:
    """A handler that relays everything."""

    def __init__(self, it: House) -> None:
        self._house, self._names = it, count()

    def admit(self, method: str, path: str, headers: Headers) -> None:
        """Everybody is let in."""

    def handle(self, exchange: Exchange) -> None:
        parsed = bodies.read(exchange.request, Limits())
        job = Job(f"h{next(self._names)}", exchange, TenantSpec("t"), parsed, 0.0)
        self._house.jobs.append(job)
        self._house.relay.start(job, self._house.brain.targets[0])


@asynccontextmanager
async def served(it: House) -> AsyncIterator[HttpServer]:
    server = HttpServer(Front(it), Limits(), TIMES, it.counts, None)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()


def request(**fields: object) -> bytes:
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def is_true(it: House, running: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while sum(engine.running for engine in it.engines) != running:
            await asyncio.sleep(0)


def test_a_client_that_leaves_at_a_random_byte() -> None:
    async def test() -> None:
        seed = 7
        draw = random.Random(seed)
        async with house(1) as it, served(it) as server:
            for _ in range(60):
                tokens = draw.randrange(30)
                it.engines[0].script(Script(gate=Gate(tokens)))
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                whole = request(stream=True, max_tokens=100)
                cut = draw.choice([draw.randrange(len(whole)), len(whole), len(whole), len(whole)])
                writer.write(whole[:cut])
                if cut == len(whole):
                    await is_true(it, 1)
                    if tokens and draw.random() < 0.5:
                        await reader.read(draw.randrange(1, 400))
                else:
                    it.engines[0].next_script()
                begun = time.monotonic()
                writer.close() if draw.random() < 0.5 else writer.transport.abort()
                await is_true(it, 0)
                assert time.monotonic() - begun < ABORTED_S, f"seed {seed}"
            await it.settled()
            assert it.engines[0].aborted == len(it.jobs)
            assert it.counted("ended") == {"left": len(it.jobs)}

    run(test())


def test_a_client_that_never_reads_holds_up_nobody() -> None:
    async def test() -> None:
        async with house(1) as it, served(it) as server:
            it.engines[0].script(Script(huge_bytes=12 << 20))
            stalled = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 10)
            stalled[1].write(request(stream=True, max_tokens=2000))
            async with asyncio.timeout(DEADLINE_S):
                while not it.jobs or it.jobs[0].phase is not Phase.ANSWERING:
                    await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(3):
                writer.write(request(max_tokens=5))
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
                assert len(await reader.readexactly(size)) == size
            assert it.jobs[0].phase is Phase.ANSWERING
            stalled[1].transport.abort()
            await is_true(it, 0)
            writer.close()
            await it.settled()

    run(test())


def test_one_connection_upstream_serves_many_streams() -> None:
    async def test() -> None:
        async with house(1) as it, served(it) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(5):
                writer.write(request(stream=True, max_tokens=5))
                assert (await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
            assert it.engines[0].connections == 1
            await it.settled()

    run(test())
