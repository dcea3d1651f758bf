"""A whole Conductor under streams while its processes are drained, rolled and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conductor.engine import Gate, Script
from tests.conductor.faults.clients import (
    CHAT,
    COMPLETION,
    Stream,
    TornAnswer,
    ask,
    begun,
    check_quiet,
    check_whole,
    gather,
)
from tests.conductor.running import Fleet, chat, running, until

pytestmark = pytest.mark.alone

STREAMS, TOKENS = 50, 12
ABORTED_S = 5.0
"""So soon after its worker's death an engine is told to stop."""
DRAIN_S = 60.0


@pytest.fixture
def gate() -> Gate:
    """What all tokens of streams wait for."""
    return Gate()


@pytest.fixture
def fleet(tmp_path: Path, gate: Gate) -> Iterator[Fleet]:
    """Two workers, two engines."""
    with running(tmp_path, 2, workers=2, times={"drain_s": DRAIN_S}) as it:
        for engine in it.engines:
            engine.otherwise = Script(gate=gate)
        yield it


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Of fifty streams."""
    asks = []
    for at in range(STREAMS):
        body = chat(f"one of fifty {at}", stream=True, max_tokens=TOKENS, stream_options={"include_usage": True})
        path = COMPLETION if at % 2 else CHAT
        if path == COMPLETION:
            body["prompt"] = body.pop("messages")[0]["content"]
        asks.append((path, body))
    return asks


def total(fleet: Fleet) -> int:
    return sum(it.running for it in fleet.engines)


async def reached(fact: Any, within_s: float, what: str) -> float:
    """Poll within the loop; how long it took."""
    begun_s = time.monotonic()
    while not fact():
        assert time.monotonic() < begun_s + within_s, what
        await asyncio.sleep(0.002)
    return time.monotonic() - begun_s


async def under_way(fleet: Fleet, gate: Gate, stack: AsyncExitStack) -> list[Stream]:
    """Fifty streams that have said a part."""
    streams = [await stack.enter_async_context(await begun(fleet.port, *it)) for it in bodies()]
    await reached(lambda: total(fleet) == STREAMS, 20.0, f"only {total(fleet)} are under way")
    gate.open(STREAMS * TOKENS // 2)
    await reached(lambda: not gate.tokens, 10.0, "they do not go on")
    for engine in fleet.engines:
        engine.otherwise = Script()
    for it in streams:
        await it.head()
    return streams


async def end(streams: list[Stream]) -> None:
    """All go on to their ends, and are whole."""
    answers = await asyncio.gather(*(it.rest() for it in streams))
    for answer, (path, body) in zip(answers, bodies(), strict=True):
        check_whole(answer, path, body)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_roll_cuts_no_stream_and_refuses_nobody(fleet: Fleet, gate: Gate) -> None:
    old = set(fleet.workers())
    served: list[int] = []
    failed: list[str] = []

    async def hammer(stop: asyncio.Event, number: int) -> None:
        """New connections, one after the other, each with a request."""
        while not stop.is_set():
            try:
                answer = await ask(fleet.port, CHAT, chat(f"new {number}", max_tokens=2))
            except (OSError, TornAnswer) as error:
                failed.append(repr(error))
                continue
            await asyncio.sleep(0.003)  # as fast as clients come
            served.append(answer.status)
            if answer.status != 200:
                failed.append(answer.body.decode())

    async def roll() -> None:
        async with AsyncExitStack() as stack:
            streams = await under_way(fleet, gate, stack)
            stop = asyncio.Event()
            hammers = [asyncio.create_task(hammer(stop, it)) for it in range(2)]
            for _ in range(1):
                fleet.process.send_signal(signal.SIGHUP)
                await reached(lambda: "the file was read again" in fleet.logs(), 90.0, "it was not rolled")
            before = len(served)
            await reached(lambda: len(served) > before + 100, 10.0, "nobody is served")
            assert old <= set(fleet.workers()), "the old ones drain"
            gate.open()
            await end(streams)
            stop.set()
            await asyncio.gather(*hammers)
            await reached(lambda: not old & set(fleet.workers()), DRAIN_S, "the old ones stay")

    gather(roll(), within_s=150)
    print(f"{len(served)} were served meanwhile")
    assert not failed, f"{len(failed)} of {len(served)}: {failed[:5]}"
    assert len(fleet.workers()) == 2
    check_quiet(fleet)
