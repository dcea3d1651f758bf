"""Many clients at once, each on a connection of its own, with what each of them saw and when.

told = at_once(fleet.port, [completion(ids) for _ in range(500)])
told = open_loop(fleet.port, bodies, 300)      # so many a second, whatever becomes of those before
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import uvloop

from tests.conductor.engine import _later
from tests.conductor.running import Fleet

WITHIN_S = 60.0
LOOK_S = 0.05
SHED = (429, 503)
T = TypeVar("T")


@dataclass(slots=True)
class Told:
    """What one client saw; times are since it began."""

    status: int = 0
    """0: the connection was refused or cut before any answer."""
    retry_after: str = ""
    head_s: float = 0.0
    """Of a stream: its first token."""
    end_s: float = 0.0
    whole: bool = False
    error: str = ""

    @property
    def shed(self) -> bool:
        """Refused, with when to come back."""
        return self.status in SHED and self.retry_after.isdigit() and int(self.retry_after) >= 1


def completion(prompt: Sequence[int] | str, tokens: int = 4, **more: Any) -> bytes:
    """A whole request."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": tokens, "stream": True, **more}
    return post("/v1/completions", json.dumps(body).encode())


def post(path: str, body: bytes, more: str = "", size: int | None = None) -> bytes:
    """The bytes of a request."""
    length = len(body) if size is None else size
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}Content-Length: {length}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, request: bytes) -> Told:
    """One client."""
    told, begun_s = Told(), time.perf_counter()
    writer = None
    try:
        async with asyncio.timeout(WITHIN_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            told.head_s = time.perf_counter() - begun_s
            told.status = int(head[9:12])
            fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
            told.retry_after = fields.get("retry-after", "")
            if "content-length" in fields:
                await reader.readexactly(int(fields["content-length"]))
                told.whole = True
            else:
                tail = b""
                while not tail.endswith(b"0\r\n\r\n"):
                    data = await reader.read(65536)
                    if not data:
                        break
                    tail = (tail + data)[-64:]
                told.whole = b"data: [DONE]" in tail
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        told.error = type(error).__name__
    finally:
        if writer is not None:
            writer.transport.abort()
    told.end_s = time.perf_counter() - begun_s
    return told


def looped(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a fast loop."""

    async def ended() -> T:
        try:
            return await work
        finally:
            for _ in range(10):
                await asyncio.sleep(0)  # connections that were cut are closed in the loop's next turns

    return uvloop.run(ended())


def at_once(port: int, requests: Sequence[bytes]) -> list[Told]:
    """All of them at the same time."""

    async def all_of_them() -> list[Told]:
        return list(await asyncio.gather(*(ask(port, it) for it in requests)))

    return looped(all_of_them())


def open_loop(port: int, requests: Sequence[bytes], a_second: float) -> list[Told]:
    """One after the other at an even pace, without waiting for any."""

    async def paced() -> list[Told]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        tasks = []
        for number, it in enumerate(requests):
            await _later(max(begun_s + number / a_second - loop.time(), 0.0))
            tasks.append(asyncio.ensure_future(ask(port, it)))
        return list(await asyncio.gather(*tasks))

    return looped(paced())


async def reached(fact: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until it is so."""
    deadline_s = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline_s, f"not so within {within_s} s"
        await _later(LOOK_S)


def statuses(told: Sequence[Told]) -> Counter[Any]:
    """How many of which, for messages."""
    return Counter((it.status, it.error, it.whole) for it in told)


def answered_or_shed(told: Sequence[Told]) -> int:
    """Everybody was; how many were answered."""
    odd = [it for it in told if not (it.shed or (it.status == 200 and it.whole))]
    assert not odd, (statuses(told), odd[:3])
    return sum(it.status == 200 for it in told)


def quantile(values: Sequence[float], part: float) -> float:
    """Of these, which must not be none."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def rss_bytes(pid: int) -> int:
    """A process's memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


MUCH = 0.2
"""Whoever has more of the machine's CPU time may be why a fleet is late."""


def _machine_ticks() -> tuple[int, int]:
    """What all CPUs were busy with and what they have had of time, in clock ticks (proc(5): stat). What the kernel did
    for packets counts for nobody: nearly all of them are ours."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields)
    return user + nice + system + steal, user + nice + system + idle + iowait + irq + softirq + steal


def _own_ticks(fleet: Fleet) -> int:
    """What this process, with its clients and engines, and all those of the Conductor have used, and their children
    that have ended."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended, and whoever waited for it has its time
        if int(path.parent.name) == os.getpid() or int(fields[3]) == fleet.process.pid:
            total += sum(map(int, fields[11:15]))
    return total


@dataclass
class Others:
    """What others had of the machine's CPU time."""

    share: float = 0.0


@contextmanager
def others(fleet: Fleet) -> Iterator[Others]:
    """Measure it until the block ends. What the fleet and this test use is none of it: if they use too much, that is
    their own fault."""
    found = Others()
    (busy, had), own = _machine_ticks(), _own_ticks(fleet)
    yield found
    (busy_now, had_now), own_now = _machine_ticks(), _own_ticks(fleet)
    found.share = max(busy_now - busy - (own_now - own), 0) / max(had_now - had, 1)


@dataclass
class Watched:
    """What was seen of a fleet meanwhile."""

    probes_s: dict[str, list[float]]
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    most_bytes: int = 0


@contextmanager
def watched(fleet: Fleet, every_s: float = 0.05) -> Iterator[Watched]:
    """Ask its probes and look at its workers' memory, from a thread, until the block ends."""
    seen, over = Watched({"/health": [], "/ready": []}), Event()

    def look() -> None:
        while not over.wait(every_s):
            for path, taken in seen.probes_s.items():
                begun_s = time.perf_counter()
                seen.statuses[path, fleet.control("GET", path).status] += 1
                taken.append(time.perf_counter() - begun_s)
            seen.most_bytes = max(seen.most_bytes, *map(rss_bytes, fleet.workers()))

    thread = Thread(target=look, name="watching")
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
