"""Clients of a whole Conductor, many at once: each reads its answer strictly, or leaves in some way of its own.

told = gather(*(ask(fleet.port, "/v1/chat/completions", chat("hello", stream=True)) for _ in range(50)))
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.conductor.engine import Engine, Gate, events_of
from tests.conductor.running import Answer, Fleet, until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
DEADLINE_S = 60.0
_WORD = re.compile(rb'" w[0-9]+"')
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing is a reset."""


class TornAnswer(Exception):
    """The answer did not come to its end, or is no HTTP."""


@dataclass
class Stream:
    """One request on a connection of its own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def head(self) -> None:
        """Read status and headers."""
        try:
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise TornAnswer(f"the connection ended within the head, after {len(error.partial)} bytes") from error
        line, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        self.status = int(line.split(" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (it.partition(":") for it in lines)}

    async def piece(self) -> bytes:
        """The next chunk; b'' at the body's proper end."""
        try:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
        except asyncio.IncompleteReadError as error:
            raise TornAnswer(f"the connection ended within the body: {self.body[-200:]!r}") from error
        if data[size:] != b"\r\n":
            raise TornAnswer("a chunk is longer than it says")
        self.body += data[:size]
        return data[:size]

    async def told(self) -> None:
        """Read on, the head as well."""
        if not self.status:
            await self.head()
        assert await self.piece(), f"it ended: {self.body[-500:]!r}"

    @property
    def tokens(self) -> int:
        """How many tokens of the toy's were said."""
        return len(_WORD.findall(self.body))

    async def rest(self) -> Answer:
        """Read to the end; the connection stays open."""
        if not self.status:
            await self.head()
        if self.headers.get("transfer-encoding") == "chunked":
            while await self.piece():
                pass
        else:
            try:
                self.body = await self.reader.readexactly(int(self.headers["content-length"]))
            except asyncio.IncompleteReadError as error:
                raise TornAnswer("the body is shorter than it says") from error
        return Answer(self.status, self.headers, self.body)

    def close(self) -> None:
        """Leave in order: a FIN."""
        self.writer.close()

    def reset(self) -> None:
        """Leave in no order: a RST."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.writer.transport.abort()

    def half_close(self) -> None:
        """Shut our side, and keep the connection."""
        self.writer.write_eof()


def request(path: str, body: object, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def connected(port: int, *, window_bytes: int = 0) -> Stream:
    """A connection. `window_bytes`: how little the kernel takes for us before we read."""
    link = socket.socket()
    link.setblocking(False)
    if window_bytes:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
    await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", port))
    return Stream(*await asyncio.open_connection(sock=link, limit=window_bytes or 64 << 20))


async def begun(port: int, path: str, body: object) -> Stream:
    """A request that was sent."""
    stream = await connected(port)
    stream.writer.write(request(path, body))
    return stream


async def ask(port: int, path: str, body: object) -> Answer:
    """Ask on a connection of its own, and read to the end."""
    async with await begun(port, path, body) as stream:
        return await stream.rest()


def gather(*work: Coroutine[Any, Any, Any], within_s: float = DEADLINE_S) -> list[Any]:
    """Do all of it at once, within a deadline."""

    async def all_of_it() -> list[Any]:
        async with asyncio.timeout(within_s):
            return list(await asyncio.gather(*work))

    return asyncio.run(all_of_it())


async def reached(fact: Callable[[], object], within_s: float, what: str) -> float:
    """Poll within the loop; how long it took."""
    begun_s = time.monotonic()
    while not fact():
        assert time.monotonic() < begun_s + within_s, what
        await asyncio.sleep(0.002)
    return time.monotonic() - begun_s


async def go_on(gate: Gate, streams: int, tokens: int) -> None:
    """So many streams, which all wait at the gate, say so many tokens each."""
    for _ in range(tokens):
        await reached(lambda: len(gate._waiting) == streams, 20.0, "not all of them wait")
        gate.open(streams)
    await reached(lambda: len(gate._waiting) == streams, 20.0, "not all of them wait")


# ---- what an answer should be


def undisturbed(path: str, body: dict[str, Any]) -> Answer:
    """What an engine that nothing happens to answers."""
    sent = b"".join(events_of(Engine(), {**body, "stream_options": {"include_usage": True}}, chat=path == CHAT))
    return Answer(200, {"content-type": "text/event-stream"}, sent)


def check_whole(answer: Answer, path: str, body: dict[str, Any]) -> None:
    """The answer is what an undisturbed engine says: each token once, one [DONE], one finish, usage that fits."""
    assert answer.status == 200, answer.body[-500:]
    wanted = undisturbed(path, body)
    events = answer.events
    assert answer.body.count(b"[DONE]") == 1
    assert not [it for it in events if "error" in it], events
    assert answer.text == wanted.text
    choices = [it["choices"][0] for it in events if it["choices"]]
    assert [it["finish_reason"] for it in choices if it["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"
    assert len({it["id"] for it in events}) == len({it["object"] for it in events}) == 1
    if path == CHAT:
        assert [it["delta"].get("role") for it in choices if "role" in it["delta"]] == ["assistant"]
    usages = [it["usage"] for it in events if it.get("usage")]
    if (body.get("stream_options") or {}).get("include_usage"):
        (usage,) = usages
        right = wanted.events[-1]["usage"]
        assert {name: usage[name] for name in right if name.endswith("_tokens")} == {
            name: right[name] for name in right if name.endswith("_tokens")
        }
    else:
        assert not usages


def check_error(answer: Answer) -> dict[str, Any]:
    """The answer is OpenAI's error, as a body or as the last event of a stream; what it says."""
    if answer.status == 200:
        *before, last = answer.events
        assert not [it for it in before if "error" in it]
    else:
        assert answer.status >= 400
        last = answer.json
    error: dict[str, Any] = last["error"]
    assert set(error) >= {"message", "type", "param", "code"}, error
    assert error["message"] and error["type"]
    return error


# ---- what is left afterwards


def left_over(fleet: Fleet) -> dict[str, Any]:
    """Whatever still counts a request, anywhere; empty if nothing does."""
    state = fleet.state()
    counted: dict[str, Any] = {f"engine {at}": it.running for at, it in enumerate(fleet.engines)}
    counted["under way"] = state["brain"]["under_way"]
    counted["waiting"] = sum(map(bool, state["brain"]["waiting"].values()))
    for it in state["brain"]["instances"]:
        names = ("own_requests", "waiting_requests", "waiting_tokens", "running_requests", "running_tokens")
        counted |= {f"{it['name']} {name}": it[name] for name in names}
    counted |= {f"tenant {it['tenant']}": it["in_progress"] for it in state["tenants"]["rows"]}
    return {name: count for name, count in counted.items() if count}


def check_quiet(fleet: Fleet) -> None:
    """Soon nothing is counted any more."""
    until(lambda: not left_over(fleet), lambda: (left_over(fleet), fleet.logs()[-2000:]))


def all_alive(fleet: Fleet, within_s: float = 10.0) -> None:
    """Wait until every instance serves."""
    until(lambda: all(it["alive"] for it in fleet.state()["brain"]["instances"]), fleet.logs, within_s)
