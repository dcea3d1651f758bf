"""A whole Conductor under streams while its processes are drained, rolled and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headwater.conductor.counts import Counts
from headwater.conductor.http.exchange import Exchange
from headwater.conductor.http.server import HttpServer
from headwater.conductor.listening import Listening, inherited
from headwater.fleetfile.model import Limits, Times
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
    go_on,
    reached,
)
from tests.conductor.running import Fleet, chat, running, until
from tests.servers import free_port

pytestmark = pytest.mark.alone

STREAMS, TOKENS = 50, 12
ABORTED_S = 5.0
"""So soon after its worker's death an engine is told to stop."""
DRAIN_S = 60.0


@contextmanager
def conductor(folder: Path, drain_s: float = DRAIN_S, workers: int = 2, **times: float) -> Iterator[Fleet]:
    """Two workers, two engines."""
    with running(folder, 2, workers=workers, times={"drain_s": drain_s, **times}) as it:
        yield it


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with TemporaryDirectory(prefix="hw") as folder, conductor(Path(folder)) as it:
        yield it


@pytest.fixture
def gate() -> Gate:
    """What all tokens of streams wait for."""
    return Gate()


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


async def under_way(fleet: Fleet, gate: Gate, stack: AsyncExitStack) -> list[Stream]:
    """Fifty streams that have said a part; later requests have no gate."""
    for engine in fleet.engines:
        engine.otherwise = Script(gate=gate)
    streams = [await stack.enter_async_context(await begun(fleet.port, *it)) for it in bodies()]
    await reached(lambda: total(fleet) == STREAMS, 20.0, f"only {total(fleet)} are under way")
    await go_on(gate, STREAMS, TOKENS // 2)
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
            served.append(answer.status)
            if answer.status != 200:
                failed.append(answer.body.decode())

    async def roll() -> None:
        async with AsyncExitStack() as stack:
            streams = await under_way(fleet, gate, stack)
            stop = asyncio.Event()
            hammers = [asyncio.create_task(hammer(stop, it)) for it in range(2)]
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


async def check_torn(stream: Stream) -> None:
    with pytest.raises((TornAnswer, OSError)):
        await stream.rest()


def test_rolls_cut_no_stream_until_too_many_drain_and_the_end_is_soon(tmp_path: Path) -> None:
    """One after the other, faster than streams end: each of five workers has one."""
    drain_s, body = 1.0, chat("one for each worker", stream=True, max_tokens=TOKENS)
    gates: list[Gate] = []
    workers: list[int] = []

    async def rolls(fleet: Fleet) -> None:
        async def begin() -> Stream:
            gates.append(Gate(2))
            for it in fleet.engines:
                it.otherwise = Script(gate=gates[-1])
            stream = await stack.enter_async_context(await begun(fleet.port, CHAT, body))
            await stream.head()
            workers.extend(set(fleet.workers()) - set(workers))
            return stream

        async def roll(times: int) -> None:
            fleet.process.send_signal(signal.SIGHUP)
            said = "the file was read again"
            await reached(lambda: fleet.logs().count(said) == times, 60.0, f"it was not rolled: {fleet.logs()}")

        async with AsyncExitStack() as stack:
            idle = await stack.enter_async_context(await begun(fleet.port, CHAT, body))
            assert (await idle.rest()).status == 200
            first = await begin()
            await roll(1)
            second = await begin()
            async with asyncio.timeout(1.0):  # and not when the others have ended
                assert await idle.reader.read() == b""
            await roll(2)
            third = await begin()
            await roll(3)
            fourth = await begin()
            assert total(fleet) == len(set(workers)) == 4
            assert set(workers) == set(fleet.workers())
            await asyncio.gather(roll(4), check_torn(first))
            assert total(fleet) == 3 and len(fleet.workers()) == 4
            gates[1].open()
            check_whole(await second.rest(), CHAT, body)
            os.kill(workers[2], signal.SIGKILL)
            await check_torn(third)
            assert total(fleet) <= 2 and not gates[3].tokens
            ends_s = asyncio.get_running_loop().time()
            fleet.process.send_signal(signal.SIGTERM)
            await check_torn(fourth)
            took_s = asyncio.get_running_loop().time() - ends_s
            print(f"after SIGTERM the last one had {took_s:.2f} s")
            assert took_s > 0.8 * drain_s

    with conductor(tmp_path, drain_s, workers=1) as fleet:
        gather(rolls(fleet), within_s=200)
        assert fleet.process.wait(10.0) == 0, fleet.logs()
        assert fleet.logs().count("another one starts") == 0, fleet.logs()
        check_nothing_is_left(fleet, workers)


def test_a_roll_cuts_streams_in_the_end(tmp_path: Path, gate: Gate) -> None:
    roll_s = 1.0

    async def ends(fleet: Fleet) -> None:
        for it in fleet.engines:
            it.otherwise = Script(gate=gate)
        async with await begun(fleet.port, CHAT, chat("too long", stream=True)) as stream:
            await reached(lambda: total(fleet) == 1, 20.0, "it was not sent")
            fleet.process.send_signal(signal.SIGHUP)
            await check_torn(stream)

    with conductor(tmp_path, workers=1, roll_s=roll_s) as fleet:
        workers = fleet.workers()
        gather(ends(fleet))
        until(lambda: not any(map(lives, workers)), fleet.logs)
        assert "killed" not in fleet.logs()
        until(lambda: not total(fleet), fleet.logs)


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 2.0).close()
    except ConnectionRefusedError:
        return True
    return False


def check_nothing_is_left(fleet: Fleet, workers: list[int]) -> None:
    """No process, no port, no socket."""
    until(lambda: not any(map(lives, workers)), lambda: (workers, fleet.logs()), DRAIN_S)
    assert is_refused(fleet.port) and is_refused(fleet.control_port)
    assert not list((fleet.log.parent / "run").rglob("*.sock"))
    until(lambda: not total(fleet), lambda: f"{total(fleet)} are at engines", ABORTED_S)


def test_a_killed_worker_takes_only_its_own_streams(fleet: Fleet, gate: Gate) -> None:
    workers = fleet.workers()

    async def rest(stream: Stream) -> Any:
        try:
            return await stream.rest()
        except (TornAnswer, OSError) as error:
            return error

    async def kills() -> None:
        async with AsyncExitStack() as stack:
            streams = await under_way(fleet, gate, stack)
            reading = [asyncio.create_task(rest(it)) for it in streams]
            os.kill(workers[0], signal.SIGKILL)
            took_s = await reached(
                lambda: 0 < sum(it.done() for it in reading) == STREAMS - total(fleet),
                ABORTED_S,
                f"{total(fleet)} go on at engines",
            )
            lost = [it.done() for it in reading]
            print(f"{sum(lost)} streams were lost; engines had stopped after {took_s:.3f} s")
            assert sum(lost) < STREAMS
            # Those that come to the dead one's place wait for the next.
            answers = await asyncio.gather(*(ask(fleet.port, CHAT, chat(f"meanwhile {it}")) for it in range(20)))
            assert {it.status for it in answers} == {200}
            gate.open()
            for is_lost, answer, (path, body) in zip(lost, await asyncio.gather(*reading), bodies(), strict=True):
                if is_lost:
                    assert isinstance(answer, TornAnswer | OSError)
                else:
                    check_whole(answer, path, body)

    gather(kills())
    until(lambda: len(fleet.workers()) == 2 and workers[0] not in fleet.workers(), fleet.logs, 20.0)
    until(lambda: sum(bool(it["ready"]) for it in fleet.state()["workers"]) == 2, fleet.logs, 40.0)
    check_quiet(fleet)


def test_a_conductor_that_is_told_to_end_ends_its_streams_first(tmp_path: Path, gate: Gate) -> None:
    async def ends(fleet: Fleet) -> None:
        async with AsyncExitStack() as stack:
            streams = await under_way(fleet, gate, stack)
            fleet.process.send_signal(signal.SIGTERM)
            await reached(lambda: is_refused(fleet.port), 20.0, "new connections are still taken")
            assert fleet.process.poll() is None and total(fleet) == STREAMS
            gate.open()
            await end(streams)

    with conductor(tmp_path) as fleet:
        workers = fleet.workers()
        gather(ends(fleet))
        assert fleet.process.wait(10.0) == 0, fleet.logs()
        assert "killed" not in fleet.logs()
        check_nothing_is_left(fleet, workers)


def test_a_killed_parent_leaves_nothing_and_cuts_nothing(tmp_path: Path, gate: Gate) -> None:
    async def ends(fleet: Fleet) -> None:
        async with AsyncExitStack() as stack:
            streams = await under_way(fleet, gate, stack)
            fleet.process.kill()
            await reached(lambda: is_refused(fleet.port), 20.0, "new connections are still taken")
            gate.open()
            await end(streams)

    with conductor(tmp_path) as fleet:
        workers = fleet.workers()
        gather(ends(fleet))
        fleet.process.wait()
        check_nothing_is_left(fleet, workers)


def test_streams_that_do_not_end_are_cut_once_draining_is_over(tmp_path: Path, gate: Gate) -> None:
    async def ends(fleet: Fleet) -> None:
        async with AsyncExitStack() as stack:
            streams = await under_way(fleet, gate, stack)
            fleet.process.kill()
            told = await asyncio.gather(*(it.rest() for it in streams), return_exceptions=True)
            assert all(isinstance(it, TornAnswer | OSError) for it in told), told

    with conductor(tmp_path, drain_s=1.0) as fleet:
        workers = fleet.workers()
        gather(ends(fleet))
        fleet.process.wait()
        check_nothing_is_left(fleet, workers)


def test_what_the_kernel_took_for_a_worker_that_ends_is_served_by_the_next() -> None:
    class Handler:
        def handle(self, exchange: Exchange) -> None:
            exchange.answer(200, [], b"")

    async def test() -> None:
        port = free_port()
        place = Listening(f"127.0.0.1:{port}")
        servers = [HttpServer(Handler(), Limits(), Times(), Counts()) for _ in range(2)]
        links = []
        try:
            for it in servers:
                listening = inherited([os.dup(it) for it in place.descriptors])
                await it.start("127.0.0.1", port, listening=listening)
            links = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]  # the loop has seen none
            drained = asyncio.create_task(servers[0].drain(5.0))
            await asyncio.sleep(0)
            for it in links:
                it.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            for it in links:
                assert (await asyncio.to_thread(it.recv, 100)).startswith(b"HTTP/1.1 200")
                it.close()
            assert await drained
        finally:
            place.close()
            for it in servers:
                await it.close()
            for it in links:
                it.close()
        assert is_refused(port)

    gather(test())
