"""Streams through a whole Conductor while its instances die, misbehave, or are left by their clients."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.conductor.engine import Engine, Gate, Script
from tests.conductor.faults.clients import (
    CHAT,
    COMPLETION,
    all_alive,
    ask,
    begun,
    check_error,
    check_quiet,
    check_whole,
    gather,
)
from tests.conductor.running import Answer, Fleet, chat, running

TOKENS = 12
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three engines; streams that are silent for a while are lost."""
    with TemporaryDirectory(prefix="hw") as folder, running(Path(folder), 3, times={"silent_s": 1.0}) as it:
        yield it


@pytest.fixture(autouse=True)
def as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test leaves nothing behind, and all instances alive."""
    yield
    if "fleet" in request.fixturenames:
        fleet: Fleet = request.getfixturevalue("fleet")
        for it in fleet.engines:
            it.otherwise = Script()
            it._scripts = deque()
            restart(it)
        check_quiet(fleet)
        all_alive(fleet)


def asked(path: str, text: str, **more: Any) -> dict[str, Any]:
    """A stream's body."""
    body = chat(text, stream=True, max_tokens=TOKENS, stream_options=USAGE, **more)
    if path == COMPLETION:
        del body["messages"]
        body["prompt"] = text
    return body


async def running_at(fleet: Fleet) -> Engine:
    """The only engine that has a request, once there is one."""
    while not (busy := [it for it in fleet.engines if it.running]):
        await asyncio.sleep(0.001)
    (engine,) = busy
    return engine


def kill(engine: Engine) -> None:
    engine.call(engine.stop())  # type: ignore[attr-defined]


def restart(engine: Engine) -> None:
    if engine._server is None:
        engine.call(engine.start())  # type: ignore[attr-defined]


async def in_thread(work: Any, *args: Any) -> Any:
    return await asyncio.to_thread(work, *args)


# ---- an instance dies


def scripted(fleet: Fleet, *scripts: Script) -> None:
    """The next requests get these, whichever engine they come to."""
    shared = deque(scripts)
    for it in fleet.engines:
        it._scripts = shared


PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETION], ids=["chat", "completion"])


@PATHS
def test_an_engine_closes_one_connection_after_each_number_of_tokens(fleet: Fleet, path: str) -> None:
    for at in range(TOKENS + 1):
        scripted(fleet, Script(close_at=at, torn=at % 2 == 1))
        body = asked(path, f"close {at}")
        (answer,) = gather(ask(fleet.port, path, body))
        check_whole(answer, path, body)


@PATHS
@pytest.mark.parametrize("at", [0, 1, 5, TOKENS])
def test_an_engine_dies_after_some_tokens(fleet: Fleet, path: str, at: int) -> None:
    scripted(fleet, Script(hang_at=at))
    body = asked(path, f"die {at}")

    async def told() -> Answer:
        async with await begun(fleet.port, path, body) as stream:
            dying = await running_at(fleet)
            while stream.tokens < at:
                await stream.told()
            await in_thread(kill, dying)
            return await stream.rest()

    (answer,) = gather(told())
    check_whole(answer, path, body)


@PATHS
def test_two_die_in_a_row(fleet: Fleet, path: str) -> None:
    scripted(fleet, Script(hang_at=4), Script(hang_at=3))
    body = asked(path, "two die")

    async def told() -> Answer:
        async with await begun(fleet.port, path, body) as stream:
            for tokens in (4, 7):
                dying = await running_at(fleet)
                while stream.tokens < tokens:
                    await stream.told()
                await in_thread(kill, dying)
            return await stream.rest()

    (answer,) = gather(told())
    check_whole(answer, path, body)


@PATHS
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_all_die_and_the_client_is_told_soon(fleet: Fleet, path: str, stream: bool) -> None:
    body = {**asked(path, "all die"), "stream": stream}
    if not stream:
        del body["stream_options"]
    for it in fleet.engines:
        it.otherwise = Script(hang_at=4)

    async def told() -> Answer:
        async with await begun(fleet.port, path, body) as asking:
            await running_at(fleet)
            while stream and asking.tokens < 4:
                await asking.told()
            for it in fleet.engines:
                await in_thread(kill, it)
            return await asking.rest()

    begun_s = time.monotonic()
    (answer,) = gather(told())
    assert time.monotonic() - begun_s < 3.0
    error = check_error(answer)
    assert error["code"] in ("stream_lost", "no_instance", "instance_lost"), error
    assert (answer.status == 200) == stream
    begun_s = time.monotonic()
    (later,) = gather(ask(fleet.port, path, body))
    assert later.status == 503 and time.monotonic() - begun_s < 3.0
    assert int(later.headers["retry-after"]) >= 1
