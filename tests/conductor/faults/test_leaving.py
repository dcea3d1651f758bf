"""Clients that leave a whole Conductor at any moment and in any way, or never read: engines stop, nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import pytest

from tests.conductor.engine import Gate, Script
from tests.conductor.faults.clients import (
    CHAT,
    COMPLETION,
    Stream,
    all_alive,
    ask,
    check_quiet,
    connected,
    gather,
    reached,
    request,
)
from tests.conductor.faults.loading import quantile, watched
from tests.conductor.running import Fleet, chat, running, until

ROUNDS = int(os.environ.get("HEADWATER_TEST_LEAVES", "200"))
ABORTED_S = 1.0
"""The promise: so soon after its client has left, an engine is told to stop."""
STALLED_S = 1.0
UNREAD = int(os.environ.get("HEADWATER_TEST_UNREAD", "100"))
"""Clients that never read."""
TOKENS, EVENT_BYTES = 400, 64 << 10
"""Of their answers, which are more than all kernel buffers on the way."""
UNREAD_BYTES = 3 << 19
"""So much a worker keeps of each: what it holds until the client's connection is full, and an event or two beyond."""
CUT_S = (0.9 * STALLED_S, 2 * STALLED_S + 1.0)
"""So long after the kernel took the last byte for it a client is cut. A connection that is full is looked at when
`stalled_s` are over, and if something was received meanwhile, when they are over again; and a machine may be busy."""
LOOK_S = 0.02
OTHERS_S = 5.0
GROWN_BYTES = 12 << 20
MOMENTS = ("within the request", "before the first token", "within the answer", "in silence", "in one piece")
WAYS: dict[str, Callable[[Stream], None]] = {
    "close": Stream.close,
    "reset": Stream.reset,
    "half-close": Stream.half_close,
}


SPARE = 6
"""Descriptors that come and go by themselves: questions to two instances about their health and their metrics, each on
a connection that is kept for a while. A leak would have one for each request."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    times = {"stalled_s": STALLED_S}
    with TemporaryDirectory(prefix="hw") as folder, running(Path(folder), 2, times=times) as it:
        yield it


def total(fleet: Fleet, name: str = "running") -> int:
    return sum(getattr(it, name) for it in fleet.engines)


async def left(fleet: Fleet, draw: random.Random, what: str) -> bool:
    """One client comes, and leaves; whether an engine had its request."""
    moment, way = draw.choice(MOMENTS), draw.choice(list(WAYS))
    what = f"{what}, {moment}, {way}"
    body = chat("somebody who leaves", stream=moment != "in one piece", max_tokens=100)
    path = CHAT
    if draw.random() < 0.5:
        path = COMPLETION
        body["prompt"] = body.pop("messages")[0]["content"]
    tokens = draw.randrange(1, 30) if moment == "within the answer" else 0
    scripts = {"in silence": Script(silent=True), "in one piece": Script(hang_at=draw.choice([0, 3]))}
    script = scripts.get(moment, Script(gate=Gate(tokens)))
    for it in fleet.engines:
        it.otherwise = script
    whole = request(path, body)
    asked = sum(len(it.asked) for it in fleet.engines)
    async with await connected(fleet.port) as stream:
        if moment == "within the request":
            stream.writer.write(whole[: draw.randrange(len(whole))])
        else:
            stream.writer.write(whole)
            await reached(lambda: total(fleet) == 1, 10.0, what)
        if tokens:
            size = draw.randrange(1, 200 * tokens)
            while len(stream.body) < size and stream.tokens < tokens:
                await stream.told()
        WAYS[way](stream)
        await reached(lambda: total(fleet) == 0, ABORTED_S, f"{what}: an engine goes on")
    return sum(len(it.asked) for it in fleet.engines) > asked


def size_of(pid: int) -> tuple[int, int]:
    """A process's descriptors and resident bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [it for it in status.splitlines() if it.startswith("VmRSS")]
    return len(os.listdir(f"/proc/{pid}/fd")), int(line.split()[1]) << 10


def test_clients_that_leave(fleet: Fleet) -> None:
    seed = 20240917
    draw = random.Random(seed)
    (worker,) = fleet.workers()

    async def rounds(count: int) -> int:
        return sum([await left(fleet, draw, f"seed {seed}, round {at}") for at in range(count)])

    gather(rounds(40))
    check_quiet(fleet)
    before, aborted = size_of(worker), total(fleet, "aborted")
    (asked,) = gather(rounds(ROUNDS), within_s=30.0 + ROUNDS / 5)
    assert total(fleet, "aborted") - aborted == asked
    check_quiet(fleet)
    until(lambda: size_of(worker)[0] <= before[0] + SPARE, lambda: (before, size_of(worker)))
    grown_bytes = size_of(worker)[1] - before[1]
    print(
        f"{ROUNDS} rounds, {asked} requests: {grown_bytes} bytes more, descriptors {before[0]} -> {size_of(worker)[0]}"
    )
    assert grown_bytes < GROWN_BYTES


def stalled(fleet: Fleet) -> float:
    """How many clients were cut as they do not read."""
    said = re.search(rb"http_clients_stalled_total ([0-9.]+)", fleet.control("GET", "/metrics").body)
    return float(said[1]) if said else 0.0


@dataclass
class Link:
    """What the kernel said of a client's connection; each time with the one before, when that was not so yet."""

    taken_bytes: int = 0
    """What is under way to it."""
    taken_s: tuple[float, float] = (0.0, 0.0)
    cut_s: tuple[float, float] | None = None


@dataclass
class Links:
    """Connections by the client's port."""

    port: int
    ports: list[int] = field(default_factory=list)
    seen: dict[int, Link] = field(default_factory=dict)
    looked_s: float = 0.0

    def look(self) -> None:
        """Once more (proc(5): net/tcp): the server's side is not established any more when it has cut a client."""
        before_s, ports = self.looked_s, list(self.ports)
        taken = {}
        asked_s = time.monotonic()
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        now_s = time.monotonic()
        for _, local, remote, state, queues, *_ in map(str.split, lines):
            here, there = (int(it.rpartition(":")[2], 16) for it in (local, remote))
            if here == self.port and state == "01":
                taken[there] = int(queues.partition(":")[0], 16)
        for port in ports:
            link = self.seen.setdefault(port, Link())
            if port not in taken:
                link.cut_s = link.cut_s or (before_s, now_s)
                continue
            link.cut_s = None  # a row may be left out while others come and go
            if taken[port] != link.taken_bytes:
                link.taken_bytes, link.taken_s = taken[port], (before_s, now_s)
        self.looked_s = asked_s

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look all the time, from a thread, until the block ends."""
        over = Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                self.look()

        thread = Thread(target=look, name="looking")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_clients_that_never_read(fleet: Fleet) -> None:
    """Each is sent more than the kernel holds for it: it is cut `stalled_s` later, and its engine stops. Meanwhile
    others are served, probes are answered, and what is kept for it is bounded."""
    for it in fleet.engines:
        it.otherwise = Script(large_bytes=EVENT_BYTES)
    body = chat("somebody who never reads", stream=True, max_tokens=TOKENS)
    (worker,) = fleet.workers()
    before, aborted, cut = size_of(worker)[1], total(fleet, "aborted"), stalled(fleet)
    served_s: list[float] = []
    links = Links(fleet.port)

    async def never(stack: AsyncExitStack) -> None:
        stream = await stack.enter_async_context(await connected(fleet.port, window_bytes=4096))
        stream.writer.transport.pause_reading()  # type: ignore[attr-defined]
        links.ports.append(stream.writer.get_extra_info("sockname")[1])
        stream.writer.write(request(CHAT, body))

    async def all_of_them() -> float:
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(never(stack) for _ in range(UNREAD)))
            await reached(lambda: total(fleet) + total(fleet, "aborted") - aborted == UNREAD, 20.0, "not all were sent")
            begun_s = time.monotonic()
            for it in fleet.engines:
                it.otherwise = Script()
            while total(fleet):
                asked_s = time.monotonic()
                assert (await ask(fleet.port, CHAT, chat("somebody else", stream=True))).status == 200
                served_s.append(time.monotonic() - asked_s)
                assert time.monotonic() < begun_s + 30.0, f"{total(fleet)} are still at engines"
            took_s = time.monotonic() - begun_s
            await reached(lambda: all(it.cut_s for it in links.seen.values()), 5.0, "not all were cut")
            return took_s

    with watched(fleet) as seen, links.looking():
        (took_s,) = gather(all_of_them())
    assert total(fleet, "aborted") - aborted == UNREAD  # none came to its end
    check_quiet(fleet)
    probed_s = quantile(seen.probes_s["/health"], 0.99)
    more_bytes = seen.most_bytes - before
    # How long at most, and at least: what happened was between two looks.
    after_s = [(it.cut_s[1] - it.taken_s[0], it.cut_s[0] - it.taken_s[1]) for it in links.seen.values() if it.cut_s]
    soonest_s, latest_s = min(most for most, _ in after_s), max(least for _, least in after_s)
    print(f"each was cut {soonest_s:.2f} s to {latest_s:.2f} s after the last byte that was taken for it")
    print(
        f"{UNREAD} clients: all cut after {took_s:.2f} s, {more_bytes >> 20} MiB more in between;"
        f" /health within {probed_s:.3f} s, {len(served_s)} others within {quantile(served_s, 0.99):.3f} s"
    )
    assert seen.statuses["/health", 200] == len(seen.probes_s["/health"]) and probed_s < 1.0
    assert len(served_s) >= 3 and quantile(served_s, 0.99) < OTHERS_S
    assert more_bytes < UNREAD * UNREAD_BYTES + GROWN_BYTES
    assert stalled(fleet) - cut == UNREAD
    assert len(after_s) == UNREAD
    assert CUT_S[0] < soonest_s and latest_s < CUT_S[1], (soonest_s, latest_s)


def test_clients_that_leave_while_they_wait(fleet: Fleet) -> None:
    """Nobody is alive for a moment: requests wait, and whoever leaves is forgotten."""

    async def waits() -> None:
        async with await connected(fleet.port) as stream:
            stream.writer.write(request(CHAT, chat("somebody who waits", stream=True)))
            await stream.writer.drain()
            stream.close()

    for it in fleet.engines:
        it.call(it.stop())  # type: ignore[attr-defined]
    try:
        (answer,) = gather(ask(fleet.port, CHAT, chat("who finds out", stream=True)))
        assert answer.status == 503
        gather(*(waits() for _ in range(10)))
        until(lambda: b'how="left"' in fleet.control("GET", "/metrics").body, fleet.state)
        check_quiet(fleet)
    finally:
        for it in fleet.engines:
            it.call(it.start())  # type: ignore[attr-defined]
    all_alive(fleet)
