"""The clients of every proxy that is measured: a process that takes turns, one line of JSON each (see `turns`).

    {"do": "unary", "port": 8000, "connections": 32, "requests": 25600, "prompts": {...}}
    {"do": "streams", "port": 8000, "connections": 96, "chunks": 400, "prompts": {...}}
    {"do": "open", "port": 8000, "rate": 500, "requests": 3000, "prompts": {...}}

`unary` and `streams` are closed loops: each connection asks again as soon as it has its answer. `open` asks at the
times of a Poisson process, whether or not it has been answered. Every answer is checked: all of it came, once, in
order. Answers are read by hand, and taken apart when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import uvloop

from headwater.bench.harness import percentile
from headwater.bench.proxy_prompts import Prompts

HEAD_END, LAST_CHUNK = b"\r\n\r\n", b"0\r\n\r\n"
TURN_S = 280.0
WHOLE_ANSWER = b'"finish_reason":"length"'
WHOLE_ANSWER_SPACED = b'"finish_reason": "length"'
NS = 1e9


class WrongAnswer(Exception):
    """What came is not what the engine sent."""


class Connection(asyncio.Protocol):
    """One connection: a request at a time, and its answer when all of it is there."""

    def __init__(self, answered: Callable[[Connection], None], broke: Callable[[Exception], None]) -> None:
        self._answered, self._broke = answered, broke
        self.pieces: list[tuple[int, bytes]] = []
        """The answer, with when each piece came (monotonic, ns)."""
        self.asked_ns = 0
        self._head: bytes | None = None
        self._missing = 0
        self._chunked = False
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> None:
        """Send one."""
        self.pieces, self._head, self._busy = [], None, True
        self.asked_ns = time.monotonic_ns()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """A piece of the answer."""
        self.pieces.append((time.monotonic_ns(), data))
        if self._head is None:
            if not self._read_head():
                return
        elif not self._chunked:
            self._missing -= len(data)
        # No event of the engine ends like the last chunk, so that pieces need not be taken apart here.
        if self._missing <= 0 and (not self._chunked or self._ends()):
            self._busy = False
            self._answered(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Closed by the other side: an error while an answer is due."""
        if self._busy:
            self._broke(error or WrongAnswer(f"the connection was closed after {len(self.pieces)} pieces"))

    def _read_head(self) -> bool:
        data = self.pieces[0][1] if len(self.pieces) == 1 else b"".join(it for _, it in self.pieces)
        end = data.find(HEAD_END)
        if end < 0:
            return False
        self._head = head = data[: end + 4].lower()
        at = head.find(b"\r\ncontent-length:")
        self._chunked = at < 0
        self._missing = 0
        if at >= 0:
            self._missing = int(head[at + 17 :].split(b"\r\n", 1)[0]) - (len(data) - end - 4)
        return True

    def _ends(self) -> bool:
        last = self.pieces[-1][1]
        if len(last) >= 5 or len(self.pieces) == 1:
            return last.endswith(LAST_CHUNK)
        return b"".join(it for _, it in self.pieces[-5:]).endswith(LAST_CHUNK)


def status_of(answer: bytes) -> int:
    """Of an answer's first line."""
    return int(answer[9:12])


def body_of(pieces: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """An answer's body, without its framing, as (when it came, piece)."""
    data = b"".join(it for _, it in pieces)
    end = data.index(HEAD_END) + 4
    times: list[tuple[int, int]] = []
    length = 0
    for at_ns, it in pieces:
        length += len(it)
        times.append((length, at_ns))
    if b"\r\ntransfer-encoding:" not in data[:end].lower():
        return [(times[-1][1], data[end:])]
    found: list[tuple[int, bytes]] = []
    piece = 0
    while True:
        line = data.index(b"\r\n", end)
        size = int(data[end:line].split(b";")[0], 16)
        if not size:
            return found
        end = line + 2 + size
        while times[piece][0] < end:
            piece += 1
        found.append((times[piece][1], data[line + 2 : end]))
        end += 2


def events_of(pieces: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The events of a streamed answer, as (when its last byte came, what its `data:` says)."""
    found, rest = [], b""
    for at_ns, it in body_of(pieces):
        *events, rest = (rest + it).split(b"\n\n")
        found += [(at_ns, event.removeprefix(b"data: ")) for event in events]
    if rest:
        raise WrongAnswer("the stream ends within an event")
    return found


def check_stream(pieces: Sequence[tuple[int, bytes]], chunks: int) -> list[float]:
    """How long after the engine wrote it each event came, in seconds. Raises WrongAnswer unless all came in order."""
    if (status := status_of(b"".join(it for _, it in pieces[:16]))) != 200:
        raise WrongAnswer(f"status {status}: {pieces[-1][1][-300:]!r}")
    events = events_of(pieces)
    last = events.pop()[1] if events else b""
    if last != b"[DONE]" or len(events) != chunks:
        raise WrongAnswer(f"{len(events)} of {chunks} events, the last one {last[:80]!r}")
    lags = []
    for index, (at_ns, text) in enumerate(events):
        event = json.loads(text)
        choice = event["choices"][0]
        said = choice["text"] if "text" in choice else choice["delta"].get("content")
        if said != f" t{index}":
            raise WrongAnswer(f"event {index} says {said!r}")
        lags.append((at_ns - int(event["system_fingerprint"])) / NS)
    return lags


class Crowd:
    """Connections that ask all requests of a turn; `samples` are what is kept of each answer."""

    def __init__(self, requests: Sequence[bytes], keep: Callable[[Connection], None]) -> None:
        self._requests, self._keep = requests, keep
        self._next = 0
        self._left = len(requests)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle: deque[Connection] = deque()
        self.connections: list[Connection] = []

    async def connect(self, port: int, count: int) -> None:
        """Open so many connections."""
        loop = asyncio.get_running_loop()
        for _ in range(count):
            _, connection = await loop.create_connection(
                lambda: Connection(self._answered, self.broke), "127.0.0.1", port
            )
            self.connections.append(connection)
            self._idle.append(connection)

    def go(self) -> None:
        """Every idle connection asks."""
        while self._idle and self._next < len(self._requests):
            self._ask(self._idle.popleft())

    def one(self) -> bool:
        """One idle connection asks; whether there was one."""
        if not self._idle:
            return False
        self._ask(self._idle.popleft())
        return True

    def _ask(self, connection: Connection) -> None:
        request = self._requests[self._next]
        self._next += 1
        connection.ask(request)

    def _answered(self, connection: Connection) -> None:
        self._keep(connection)
        self._left -= 1
        self.free(connection)
        if not self._left and not self.done.done():
            self.done.set_result(None)

    def free(self, connection: Connection) -> None:
        """A connection that has its answer: it asks again."""
        if self._next < len(self._requests):
            self._ask(connection)

    def broke(self, error: Exception) -> None:
        """The turn fails."""
        if not self.done.done():
            self.done.set_exception(error)

    def close(self) -> None:
        """Close all connections."""
        for it in self.connections:
            it.transport.abort()


class OpenCrowd(Crowd):
    """Asks at given times; a request that finds no idle connection waits for one, and that counts as its own delay."""

    def __init__(self, requests: Sequence[bytes], keep: Callable[[Connection], None], due_s: Sequence[float]) -> None:
        super().__init__(requests, keep)
        self._due_s = due_s
        self._loop = asyncio.get_running_loop()
        self._planned: deque[int] = deque()
        self._owed = 0

    def start(self, began_s: float) -> None:
        """Plan the first one."""
        self._began_s = began_s
        self._index = 0
        self._plan()

    def _plan(self) -> None:
        now_s = time.monotonic()
        while self._index < len(self._due_s):
            due_s = self._began_s + self._due_s[self._index]
            if due_s > now_s + 0.0005:  # the loop's timers are no finer
                self._loop.call_later(due_s - now_s, self._plan)
                return
            self._index += 1
            self._planned.append(round(due_s * NS))
            self._serve()

    def _serve(self) -> None:
        while self._planned and self._idle:
            due_ns = self._planned.popleft()
            connection = self._idle.popleft()
            self._ask(connection)
            connection.asked_ns = due_ns

    def free(self, connection: Connection) -> None:
        """The next one that waits takes it."""
        self._idle.append(connection)
        self._serve()


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Seconds."""
    return {"p50": percentile(samples, 50), "p99": percentile(samples, 99), "max": max(samples)}


def check_unary(connection: Connection, kept: list[float]) -> None:
    """Keep how long an answer took. Raises WrongAnswer unless it is the engine's."""
    at_ns, last = connection.pieces[-1]
    answer = last if len(connection.pieces) == 1 else b"".join(it for _, it in connection.pieces)
    if answer[9:12] != b"200" or (WHOLE_ANSWER not in answer and WHOLE_ANSWER_SPACED not in answer):
        raise WrongAnswer(f"status {status_of(answer)}: {answer[-300:]!r}")
    kept.append((at_ns - connection.asked_ns) / NS)


async def play_unary(turn: dict[str, Any], requests: Sequence[bytes]) -> dict[str, Any]:
    """A closed loop of whole answers."""
    seconds: list[float] = []
    crowd: Crowd

    def keep(connection: Connection) -> None:
        try:
            check_unary(connection, seconds)
        except WrongAnswer as error:
            crowd.broke(error)

    crowd = Crowd(requests, keep)
    ran = await _run(crowd, turn, crowd.go)
    return {**ran, "requests": len(seconds), "latency": summary(seconds)}


async def play_streams(turn: dict[str, Any], requests: Sequence[bytes]) -> dict[str, Any]:
    """A closed loop of streams."""
    answers: list[tuple[int, list[tuple[int, bytes]]]] = []
    crowd = Crowd(requests, lambda it: answers.append((it.asked_ns, it.pieces)))
    ran = await _run(crowd, turn, crowd.go)
    return {**ran, **_streams(answers, turn["prompts"]["max_tokens"])}


async def play_open(turn: dict[str, Any], requests: Sequence[bytes]) -> dict[str, Any]:
    """Streams that begin when they are due."""
    draw = random.Random(f"arrivals {turn['prompts'].get('seed', 0)}")
    due_s, at_s = [], 0.0
    for _ in requests:
        at_s += draw.expovariate(turn["rate"])
        due_s.append(at_s)
    answers: list[tuple[int, list[tuple[int, bytes]]]] = []
    crowd = OpenCrowd(requests, lambda it: answers.append((it.asked_ns, it.pieces)), due_s)
    ran = await _run(crowd, turn, lambda: crowd.start(time.monotonic()))
    return {**ran, **_streams(answers, turn["prompts"]["max_tokens"])}


def _streams(answers: Sequence[tuple[int, list[tuple[int, bytes]]]], chunks: int) -> dict[str, Any]:
    lags, firsts = [], []
    for asked_ns, pieces in answers:
        lags += check_stream(pieces, chunks)
        firsts.append((events_of(pieces)[0][0] - asked_ns) / NS)
    return {"requests": len(answers), "chunks": len(lags), "lag": summary(lags), "ttft": summary(firsts)}


async def _run(crowd: Crowd, turn: dict[str, Any], go: Callable[[], None]) -> dict[str, float]:
    """From the first request to the last answer: seconds, and this process's CPU time."""
    try:
        await crowd.connect(turn["port"], turn["connections"])
        if "settle" in turn:
            await asyncio.sleep(turn["settle"])
        gc.collect()
        gc.disable()
        began_s = time.monotonic()
        before_s = cpu_s()
        go()
        await asyncio.wait_for(crowd.done, TURN_S)
        return {"wall_s": time.monotonic() - began_s, "client_cpu_s": cpu_s() - before_s}
    finally:
        gc.enable()
        crowd.close()


PLAYS = {"unary": play_unary, "streams": play_streams, "open": play_open}


def cpu_s() -> float:
    """Of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def take(line: str) -> dict[str, Any]:
    """One turn; a failure is an answer too, with `failed` for why."""
    turn = json.loads(line)
    prompts = Prompts(**turn["prompts"])
    requests = prompts.requests(turn["requests"])
    try:
        return uvloop.run(PLAYS[turn["do"]](turn, requests))
    except (WrongAnswer, OSError, TimeoutError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Until stdin is closed."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(take(line)), flush=True)


if __name__ == "__main__":
    main()
