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
    go_on,
    reached,
    undisturbed,
)
from tests.conductor.running import Answer, Fleet, chat, running
from tests.conftest import MODEL

TOKENS = 12
ASKED_MOST = 40
TIMES = {"first_s": 1.0, "silent_s": 1.0}
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three engines; streams that are silent for a while are lost."""
    with TemporaryDirectory(prefix="hw") as folder, running(Path(folder), 3, times=TIMES) as it:
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
    await reached(lambda: any(it.running for it in fleet.engines), 10, "no engine has a request")
    (engine,) = [it for it in fleet.engines if it.running]
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


def test_a_prompt_of_ids(fleet: Fleet) -> None:
    for at in (0, 1, 6, TOKENS):
        scripted(fleet, Script(close_at=at))
        body = {**asked(COMPLETION, ""), "prompt": [2000 + at, 2001, 2002, 2003, 2004]}
        (answer,) = gather(ask(fleet.port, COMPLETION, body))
        check_whole(answer, COMPLETION, body)


def test_what_cannot_move_ends_with_an_error_and_before_the_first_token_goes_elsewhere(fleet: Fleet) -> None:
    body = asked(CHAT, "two of them", n=2)
    scripted(fleet, Script(close_at=3))
    (answer,) = gather(ask(fleet.port, CHAT, body))
    assert check_error(answer)["code"] == "stream_lost"
    scripted(fleet, Script(close_at=0))
    (answer,) = gather(ask(fleet.port, CHAT, body))
    assert len([it for it in answer.events if it["choices"] and it["choices"][0]["finish_reason"]]) == 2


@pytest.mark.parametrize(("path", "stream"), [(CHAT, True), (COMPLETION, False)], ids=["stream", "whole"])
def test_all_die_and_the_client_is_told_soon(fleet: Fleet, path: str, stream: bool) -> None:
    body = {**asked(path, "all die"), "stream": stream}
    if not stream:
        del body["stream_options"]
    assert 3 * len(fleet.engines) < TOKENS, "all of them together do not come to the end"
    for it in fleet.engines:
        it.otherwise = Script(hang_at=3)

    async def told() -> Answer:
        async with await begun(fleet.port, path, body) as asking:
            await running_at(fleet)
            while stream and asking.tokens < 3:
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


def test_fifty_streams_while_one_of_three_dies(fleet: Fleet) -> None:
    gate = Gate()
    for it in fleet.engines:
        it.otherwise = Script(gate=gate)
    asks = [(path, asked(path, f"one of fifty {at}")) for at in range(25) for path in (CHAT, COMPLETION)]
    lost = 0

    async def dies() -> None:
        nonlocal lost
        await reached(lambda: sum(it.running for it in fleet.engines) >= len(asks), 30, "not all are under way")
        await go_on(gate, len(asks), TOKENS // 3)
        dying = max(fleet.engines, key=lambda it: it.running)
        lost = dying.running
        await in_thread(kill, dying)
        gate.open()

    _, *answers = gather(dies(), *(ask(fleet.port, path, body) for path, body in asks))
    assert lost >= 10
    for (path, body), answer in zip(asks, answers, strict=True):
        check_whole(answer, path, body)


@pytest.mark.alone
@pytest.mark.skipif(not MODEL.exists(), reason="the model is not here; scripts/setup_env.py fetches it")
def test_streams_move_where_tokens_are_counted_here_as_well(tmp_path: Path) -> None:
    named = {"model": str(MODEL), "served_name": "toy"}
    with running(tmp_path, 2, instance=named, tokens="local") as fleet:
        for path in (CHAT, COMPLETION):
            for at in (0, 1, 5, TOKENS):
                scripted(fleet, Script(close_at=at))
                body = asked(path, f"counted here {at}")
                (answer,) = gather(ask(fleet.port, path, body))
                check_whole(answer, path, body)
        assert b'headwater_conductor_prompts_total{how="local"} 8' in fleet.control("GET", "/metrics").body
        check_quiet(fleet)


# ---- an instance misbehaves


BROKEN = {
    "500": Script(status=500),
    "503": Script(status=503),
    "401": Script(status=401),
    "error-body": Script(error_body=True),
    "error-first": Script(error_at=0),
    "error-later": Script(error_at=4),
    "closes-first": Script(close_at=0),
    "closes-later": Script(close_at=4),
    "torn-first": Script(close_at=0, torn=True),
    "torn-later": Script(close_at=4, torn=True),
    "ends-first": Script(end_at=0),
    "ends-later": Script(end_at=4),
    "no-done": Script(no_done=True),
    "no-end": Script(no_end=True),
    "silent": Script(silent=True),
    "hangs-first": Script(hang_at=0),
    "hangs-later": Script(hang_at=4),
    "short": Script(short=True),
    "byte-by-byte": Script(split=1),
    "torn-bytes": Script(split=3, close_at=5, torn=True),
}


def check_one(answer: Answer, path: str, body: dict[str, Any]) -> None:
    """A whole answer, streamed or not."""
    if body["stream"]:
        check_whole(answer, path, body)
        return
    assert answer.status == 200, answer.body[-500:]
    assert answer.text == undisturbed(path, body).text
    assert answer.json["usage"]["completion_tokens"] == TOKENS


def batch(text: str, count: int = 3) -> list[tuple[str, dict[str, Any]]]:
    """So many requests of each kind, streamed and not."""
    asks = []
    for at in range(count):
        for path in (CHAT, COMPLETION):
            asks.append((path, asked(path, f"{text} {at} streamed")))
            whole = {**asked(path, f"{text} {at} whole"), "stream": False}
            del whole["stream_options"]
            asks.append((path, whole))
    return asks


@pytest.mark.parametrize("name", list(BROKEN))
def test_one_of_three_misbehaves_and_nobody_notices(fleet: Fleet, name: str) -> None:
    all_alive(fleet)
    bad = fleet.engines[0]
    bad.otherwise = BROKEN[name]
    before = len(bad.asked)
    for number in range(ASKED_MOST):  # who has just come back gets its share little by little
        asks = batch(f"{name} {number}")
        answers = gather(*(ask(fleet.port, path, body) for path, body in asks))
        for (path, body), answer in zip(asks, answers, strict=True):
            check_one(answer, path, body)
        if len(bad.asked) > before:
            return
    pytest.fail("the one that misbehaves was not asked")


HOPELESS = {
    "500": Script(status=500),
    "error-body": Script(error_body=True),
    "error": Script(error_at=2),
    "closes": Script(close_at=2),
    "torn-bytes": Script(close_at=2, torn=True, split=3),
    "ends": Script(end_at=2),
}


@pytest.mark.parametrize("name", list(HOPELESS))
def test_all_misbehave_and_clients_get_errors(fleet: Fleet, name: str) -> None:
    for it in fleet.engines:
        it.otherwise = HOPELESS[name]
    asks = [(path, body) for path, body in batch(name, 2) if body["stream"] or name in ("500", "error-body", "closes")]
    for answer in gather(*(ask(fleet.port, path, body) for path, body in asks)):
        error = check_error(answer)
        assert error["code"] in ("stream_lost", "instance_lost", "no_instance"), error
        assert "scripted" not in error["message"]
    for it in fleet.engines:
        it.otherwise = Script()
    path, body = CHAT, asked(CHAT, "afterwards")
    (answer,) = gather(ask(fleet.port, path, body))
    check_whole(answer, path, body)


def test_the_clients_own_error_is_passed_on(fleet: Fleet) -> None:
    for it in fleet.engines:
        it.otherwise = Script(status=400)
    for answer in gather(*(ask(fleet.port, path, body) for path, body in batch("wrong", 1))):
        assert answer.status == 400 and check_error(answer)["message"] == "scripted"
    assert sum(len(it.asked) for it in fleet.engines) >= 4


async def once_taken(fleet: Fleet, path: str, body: dict[str, Any]) -> Answer:
    """Ask when an engine has the request that its script is for: only a stream has events."""
    while fleet.engines[0]._scripts:
        await asyncio.sleep(0)
    return await ask(fleet.port, path, body)


def test_an_event_of_ten_megabytes(fleet: Fleet) -> None:
    huge_bytes = 10 << 20
    for path in (CHAT, COMPLETION):
        scripted(fleet, Script(huge_bytes=huge_bytes))
        body = asked(path, f"huge {path}")
        besides = batch(f"beside the huge {path}", 1)
        answers = gather(ask(fleet.port, path, body), *(once_taken(fleet, p, it) for p, it in besides))
        sizes = sorted(len(it.text) for it in answers)
        assert sizes[-1] > huge_bytes and sizes[-2] < 1000
        for (where, it), answer in zip([(path, body), *besides], answers, strict=True):
            if len(answer.text) < huge_bytes:
                check_one(answer, where, it)
            else:
                assert answer.text.replace("x" * huge_bytes, "") == undisturbed(where, it).text
