"""Requests that are wrong in every way, to a whole Conductor: each is answered with 2xx or 4xx, and soon; the next one
is served; and nothing goes on to an instance that it could not read as we did.

HEADWATER_TEST_MALFORMED says how many there are of each kind (1,000 by default).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec
import pydantic_core
import pytest

from tests.conductor.faults.hostile import (
    ANSWERED_S,
    WITHIN_S,
    all_told,
    check_forwarded,
    message,
    plain_reply,
    told,
)
from tests.conductor.http.rig import looped
from tests.conductor.http.test_fuzz import LINES, made
from tests.conductor.running import Fleet, chat, running
from tests.conductor.test_bodies_fuzz import Maker

COUNT = int(os.environ.get("HEADWATER_TEST_MALFORMED", "1000"))
CLIENTS = 32
LIMIT_S = 120 + COUNT // 10
GOOD = message(json.dumps(chat("is all well?")).encode())
LAST = message(json.dumps(chat("is all well?")).encode(), more="Connection: close\r\n")
REFUSED = frozenset({400, 401, 404, 405, 408, 413, 414, 415, 417, 422, 431})
UNDER_LIMITS = frozenset({429, 503})


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    times = {"header_s": 3.0, "body_s": 3.0}
    with TemporaryDirectory(prefix="hw") as folder, running(Path(folder), tokens="engine", times=times) as it:
        for engine in it.engines:
            engine.reply = plain_reply
        yield it


def forwarded(fleet: Fleet, note: str) -> int:
    """How many requests instances were sent since the last look, each of which is as we promise."""
    count = 0
    for engine in fleet.engines:
        seen, engine.requests = engine.requests, []
        for it in seen:
            try:
                check_forwarded(it)
            except (AssertionError, ValueError) as error:
                raise AssertionError(f"{note}: {it.path} {it.headers} {it.body[:2000]!r}") from error
            if it.method == "POST":
                assert msgspec.json.decode(it.body) == json.loads(it.body) == pydantic_core.from_json(it.body), note
                count += 1
    return count


def judged(it: int, headers: dict[str, str], note: str) -> None:
    assert it == 200 or it in REFUSED or (it in UNDER_LIMITS and "retry-after" in headers), note


def nearly_good(rng: Random) -> bytes:
    """A good request with up to two more lines in its head, and now and then a byte of it changed."""
    body = json.dumps(chat("a" * rng.randrange(99), stream=rng.random() < 0.3)).encode()
    lines = [b"Host: a", b"Content-Length: %d" % len(body), *rng.choices(LINES, k=rng.choice([0, 1, 1, 2]))]
    rng.shuffle(lines)
    data = bytearray(b"\r\n".join([b"POST /v1/chat/completions HTTP/1.1", *lines]) + b"\r\n\r\n" + body)
    if rng.random() < 0.3:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


async def raw_request(port: int, rng: Random, counted: Counter[int], note: str) -> None:
    """Bytes made by the grammar, in pieces; then, where the connection stays open, a good request on it."""
    data = nearly_good(rng) if rng.random() < 0.5 else made(rng)
    if not data.strip(b"\r\n"):
        return  # nothing was asked, and nothing is answered
    note = f"{note}: {data!r}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        at = 0
        while at < len(data):
            step = rng.choice([len(data), len(data), 7, 100])
            writer.write(data[at : at + step])
            await writer.drain()
            at += step
        try:
            within_s = WITHIN_S if rng.random() < 0.05 else ANSWERED_S
            first = await told(reader, within_s, to_head=data.lstrip(b"\r\n").startswith(b"HEAD "))
        except TimeoutError:
            # It waits for more of it. A few are waited for until their time is up, above.
            counted[0] += 1
            return
        counted[first.status] += 1
        judged(first.status, first.headers, note)
        if first.headers.get("connection") != "close":
            # More may have been in it than one request.
            writer.write(GOOD)
            await writer.drain()
            answers = [await told(reader)]
            while answers[-1].headers.get("connection") != "close" and answers[-1].status != 200:
                answers.append(await told(reader))
            for it in answers:
                judged(it.status, it.headers, note)
            counted[-1] += answers[-1].status == 200
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        raise AssertionError(f"{note}: the connection broke") from error
    finally:
        writer.close()


async def many(port: int, rng: Random, counted: Counter[int], note: str) -> None:
    """So many clients at a time; now and then somebody with a good request."""

    async def client(which: int) -> None:
        own = Random(rng.random())
        for number in range(-(-COUNT // CLIENTS)):
            await raw_request(port, own, counted, f"{note}, client {which}, request {number}")
            if number % 8 == 0:
                assert [
                    it.status for it in await all_told(port, GOOD.replace(b"Host", b"Connection: close\r\nHost"))
                ] == [200]

    async with asyncio.TaskGroup() as group:
        for which in range(CLIENTS):
            group.create_task(client(which))


@pytest.mark.alone
@pytest.mark.timeout(LIMIT_S)
def test_no_bytes_break_a_conductor(fleet: Fleet, seed: int) -> None:
    counted: Counter[int] = Counter()
    looped(many(fleet.port, Random(seed), counted, f"seed {seed}"), within_s=LIMIT_S)
    print(
        f"seed {seed}: {dict(sorted(counted.items()))} (0: more was waited for; -1: good ones on the same connection)"
    )
    assert counted[400] > COUNT / 5 and counted[408] and counted[-1] > COUNT / 50
    assert forwarded(fleet, f"seed {seed}") > 0
    assert fleet.process.poll() is None and len(fleet.workers()) == 1
    assert "Traceback" not in fleet.logs(), fleet.logs()[-5000:]


async def bodies(fleet: Fleet, rng: Random, counted: Counter[int], note: str) -> None:
    """Bodies in OpenAI's words, or nearly, one after the other on each of some connections, and good ones between."""
    maker, sent = Maker(rng), 0

    async def client() -> None:
        nonlocal sent
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
        try:
            while sent < COUNT:
                sent += 1
                request, mark = maker.request(), f"{note}, body {sent}"
                body = request.body.replace(b'"model": "m"', b'"model": "toy"')
                writer.write(message(body, request.path))
                it = await told(reader)
                counted[it.status] += 1
                judged(it.status, it.headers, f"{mark}: {it} to {body[:2000]!r}")
                assert it.headers["content-type"].startswith(("application/json", "text/event-stream"))
                if it.status != 200:
                    assert set(json.loads(it.body)["error"]) == {"message", "type", "param", "code"}, mark
                if sent % 16 == 0:
                    writer.write(GOOD)
                    assert (await told(reader)).status == 200, mark
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(client())


@pytest.mark.alone
@pytest.mark.timeout(LIMIT_S)
def test_no_body_breaks_a_conductor_or_an_instance(fleet: Fleet, seed: int) -> None:
    counted: Counter[int] = Counter()
    looped(bodies(fleet, Random(seed + 1), counted, f"seed {seed}"), within_s=LIMIT_S)
    print(f"seed {seed}: {dict(sorted(counted.items()))}")
    assert counted[200] > COUNT / 20 and counted[400] > COUNT / 5
    assert forwarded(fleet, f"seed {seed}") >= counted[200]
    assert "Traceback" not in fleet.logs(), fleet.logs()[-5000:]
