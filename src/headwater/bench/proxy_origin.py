"""The engine behind every proxy that is measured: answers completions as vLLM does, for next to no CPU time.

    python -m headwater.bench.proxy_origin PORT [PORT ...]

One process, one loop, as many ports as there are instances. It computes nothing: a completion has `max_tokens` events
GAP_S apart, or is one JSON. Requests are read by hand and not by a parser, because whatever the engine costs is taken
from the two cores that proxy and client need as well. An event tells in `system_fingerprint` when it was written.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import cast

import uvloop

GAP_S = 0.01
MODEL = "model"
UNARY_TEXT = " word" * 40
HEAD_END = b"\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
USAGE = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1796000000,'
    b'"model":"model","choices":[],"usage":{"prompt_tokens":800,"total_tokens":840,"completion_tokens":40,'
    b'"prompt_tokens_details":{"cached_tokens":640}}}\n\n'
)
COMPLETION = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1796000000,'
    b'"model":"model","choices":[{"index":0,"text":" t%d","logprobs":null,"finish_reason":%b,"stop_reason":null%b}],'
    b'"usage":null,"system_fingerprint":"%d"}\n\n'
)
CHAT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1796000000,'
    b'"model":"model","choices":[{"index":0,"delta":{"content":" t%d"},"logprobs":null,"finish_reason":%b%b}],'
    b'"system_fingerprint":"%d"}\n\n'
)
METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="model"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="model"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="model"} 0.0
"""


def whole(status: str, body: bytes, kind: str = "application/json") -> bytes:
    """An answer with a length."""
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _unary(chat: bool, ids: bool) -> bytes:
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    choice |= {"message": {"role": "assistant", "content": UNARY_TEXT}} if chat else {"text": UNARY_TEXT}
    if ids:
        choice["token_ids"] = list(range(300, 340))
    answer = {
        "id": "chatcmpl-0123456789abcdef" if chat else "cmpl-0123456789abcdef",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1796000000,
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": 800, "completion_tokens": 40, "total_tokens": 840, "prompt_tokens_details": None},
    }
    return whole("200 OK", json.dumps(answer).encode())


UNARY = {(chat, ids): _unary(chat, ids) for chat in (False, True) for ids in (False, True)}
NOT_FOUND = whole("404 Not Found", b'{"detail":"Not Found"}')
FIXED = {
    b"/health": whole("200 OK", b""),
    b"/v1/models": whole(
        "200 OK",
        json.dumps(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 131072}]}
        ).encode(),
    ),
    b"/metrics": whole("200 OK", METRICS, "text/plain; version=0.0.4"),
    b"/version": whole("200 OK", b'{"version":"0.32.0"}'),
}
COMPLETIONS = {b"/v1/completions": False, b"/v1/chat/completions": True}


def split(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Path, body and what follows of the first request in `data`; None if it is not all there."""
    end = data.find(HEAD_END)
    if end < 0:
        return None
    path = data[data.index(b" ") + 1 : end].split(b" ", 1)[0]
    head = data[:end].lower()
    body = end + 4
    at = head.find(b"\r\ncontent-length:")
    if at >= 0:
        after = body + int(head[at + 17 :].split(b"\r\n", 1)[0])
    elif b"\r\ntransfer-encoding:" in head:
        last = data.find(b"0\r\n\r\n", body)  # what is sent here is JSON, in which there is no line end
        if last < 0:
            return None
        after = last + 5
    else:
        after = body
    return (path, data[body:after], data[after:]) if len(data) >= after else None


def flag(body: bytes, name: bytes) -> bool:
    """Whether a JSON body says `true` for this field, at whatever depth."""
    return b'"%b":true' % name in body or b'"%b": true' % name in body


def number(body: bytes, name: bytes, default: int) -> int:
    """A whole number in a JSON body."""
    at = body.find(b'"%b":' % name)
    if at < 0:
        return default
    digits = body[at + len(name) + 3 : at + len(name) + 16].lstrip()
    length = next((i for i, it in enumerate(digits) if not 48 <= it <= 57), len(digits))
    return int(digits[:length] or default)


def prompt_ids(body: bytes) -> bytes:
    """The prompt's ids as JSON: those that were sent, or as many as a text of this length may have."""
    start = body.find(b'"prompt":[')
    if start >= 0:
        return body[start + 9 : body.index(b"]", start) + 1]
    return b"[%b]" % b",".join([b"12345"] * (len(body) // 5))


def framed(event: bytes) -> bytes:
    """A chunk of its own, as uvicorn sends events."""
    return b"%x\r\n%b\r\n" % (len(event), event)


class Stream:
    """One streamed answer: the first event at once, the next ones in equal steps."""

    def __init__(self, transport: asyncio.Transport, body: bytes, *, chat: bool, done: Callable[[], None]) -> None:
        self._transport, self._done = transport, done
        self._form = CHAT if chat else COMPLETION
        self._ids = flag(body, b"return_token_ids")
        self._prompt = b',"prompt_token_ids":%b' % prompt_ids(body) if self._ids else b""
        self._end = framed(USAGE) + DONE if flag(body, b"include_usage") else DONE
        self._count = number(body, b"max_tokens", 16)
        self._sent = 0
        self._loop = asyncio.get_running_loop()
        self._next_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        first = self._event()
        self._transport.write(STREAM_HEAD + first)
        self._plan()

    def _event(self) -> bytes:
        index = self._sent
        self._sent += 1
        reason = b'"length"' if self._sent == self._count else b"null"
        ids = b',"token_ids":[%d]' % (300 + index % 40_000) if self._ids else b""
        if not index:
            ids += self._prompt
        event = framed(self._form % (index, reason, ids, time.monotonic_ns()))
        return event + self._end if self._sent == self._count else event

    def _plan(self) -> None:
        if self._sent == self._count:
            self._done()
            return
        self._next_s += GAP_S
        self._timer = self._loop.call_at(self._next_s, self._step)

    def _step(self) -> None:
        self._transport.write(self._event())
        self._plan()

    def stop(self) -> None:
        """The other side is gone."""
        if self._timer is not None:
            self._timer.cancel()


class Connection(asyncio.Protocol):
    """Requests of one connection, one after the other."""

    def __init__(self) -> None:
        self._rest = b""
        self._stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer what is complete."""
        self._rest = self._rest + data if self._rest else data
        self._go_on()

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody reads any more."""
        if self._stream is not None:
            self._stream.stop()

    def _go_on(self) -> None:
        while self._stream is None and self._rest and (request := split(self._rest)) is not None:
            path, body, self._rest = request
            chat = COMPLETIONS.get(path)
            if chat is None:
                self._transport.write(FIXED.get(path, NOT_FOUND))
            elif flag(body, b"stream"):
                self._begin(body, chat)
            else:
                self._transport.write(UNARY[chat, flag(body, b"return_token_ids")])

    def _begin(self, body: bytes, chat: bool) -> None:
        ended = False

        def done() -> None:
            nonlocal ended
            ended, self._stream = True, None
            self._go_on()

        stream = Stream(self._transport, body, chat=chat, done=done)
        if not ended:
            self._stream = stream


async def serve(ports: list[int]) -> None:
    """Until SIGTERM."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Connection, "127.0.0.1", port, backlog=4096) for port in ports]
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    for server in servers:
        server.close()


if __name__ == "__main__":
    uvloop.run(serve([int(it) for it in sys.argv[1:]]))
