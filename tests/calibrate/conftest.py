"""Stand-ins for an engine: one with step times that are known and a clock of its own, and a real HTTP server."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headwater.calibrate.server import Answer, Dialect, Served
from headwater.enginetimes import EngineTimes

BLOCK = 16


@dataclass
class VirtualEngine:
    """Asked like a server, and its seconds pass at once: prefills step by step, then all decode together."""

    times: EngineTimes
    noise: float = 0.0
    seed: int = 0
    caches: bool = True
    tells: bool = True
    """Whether it says how much of a prompt was cached."""
    outliers: float = 0.0
    """The share of requests that take five times as long."""
    now_s: float = 0.0
    dialect: Dialect = field(default_factory=Dialect)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    hits: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def clock(self) -> float:
        return self.now_s

    def served(self, length_max: int = 4096) -> Served:
        return Served("model", length_max, BLOCK, 1 << 20)

    def learn(self, prompt: Sequence[int]) -> Answer:
        return self.complete(prompt, 2)

    def complete(self, prompt: Sequence[int], answer_tokens: int) -> Answer:
        return self.together([prompt], [answer_tokens])[0]

    def hit_tokens(self) -> int | None:
        return self.hits if self.tells else None

    def together(self, prompts: Sequence[Sequence[int]], answer_tokens: Sequence[int]) -> list[Answer]:
        sent_s = self.now_s
        cached = [self._find(it) for it in prompts]
        first_s = self._prefill([(len(it) - have, have) for it, have in zip(prompts, cached, strict=True)])
        token_s = [[at_s] for at_s in first_s]
        for step in range(1, max(answer_tokens)):
            kv = sum(len(it) + step for it in prompts)
            self._pass(self.times.decode_s(len(prompts), kv))
            for times in token_s:
                times.append(self.now_s)
        self.hits += sum(cached)
        self.asked += [tuple(it) for it in prompts]
        told = [have if self.tells else None for have in cached]
        return [
            Answer(sent_s, tuple(times), len(it), have) for it, have, times in zip(prompts, told, token_s, strict=True)
        ]

    def _prefill(self, work: list[tuple[int, int]]) -> list[float]:
        """When each first token comes. The first prompt comes a moment before the others, as in life."""
        first_s = [0.0] * len(work)
        waiting = list(range(len(work)))
        left = [new for new, _ in work]
        room = left[0]
        while waiting:
            room = min(room, self.times.step_tokens)
            took_s, ended = self.times.prefill_fixed_s, []
            for number in waiting:
                tokens = min(left[number], room)
                if tokens:
                    context = work[number][1] + work[number][0] - left[number]
                    took_s += self.times.step_s(tokens, context) - self.times.prefill_fixed_s
                    left[number] -= tokens
                    room -= tokens
                    ended += [number] if not left[number] else []
            self._pass(took_s)
            for number in ended:
                first_s[number] = self.now_s
                waiting.remove(number)
            room = self.times.step_tokens
        return first_s

    def _pass(self, seconds: float) -> None:
        factor = 5.0 if self._random.random() < self.outliers else 1.0
        self.now_s += seconds * factor * max(1 + self._random.gauss(0, self.noise), 0.1)

    def _find(self, prompt: Sequence[int]) -> int:
        """The cached tokens of a prompt, of which the last is always computed; then it is cached as well."""
        if not self.caches:
            return 0
        parent, found, is_known = 0, 0, True
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            block = (parent, tuple(prompt[end - BLOCK : end]))
            is_known = is_known and block in self._known
            found += is_known
            parent = self._known.setdefault(block, len(self._known) + 1)
        return min(found, (len(prompt) - 1) // BLOCK) * BLOCK


Reply = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Answers as the test's server says, and remembers what it was asked."""

    protocol_version = "HTTP/1.1"
    server: HttpServer

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers), {}))
        text = self.server.pages.get(self.path)
        self.say(200 if text is not None else 404, text or "no such page")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        self.server.reply(self, body)

    def say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, *events: object, done: bool = True) -> None:
        """Events as they are sent, each in a chunk of its own."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        texts = [it if isinstance(it, str) else json.dumps(it) for it in events] + ["[DONE]"] * done
        for text in texts:
            data = f"data: {text}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class HttpServer(ThreadingHTTPServer):
    """A server on a free port of the loopback."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages = {"/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 4096}]})}
        self.reply: Reply = tokens
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.released = threading.Event()
        """Handlers that keep a client waiting wait for it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has gone away, as tests want it to."""


def tokens(handler: Handler, body: dict[str, Any]) -> None:
    """As many tokens as were asked for, and what they cost."""
    events: list[object] = [{"choices": [{"text": "a", "token_ids": [7]}]} for _ in range(body["max_tokens"])]
    usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 3}}
    handler.stream(*events, {"choices": [], "usage": usage})


@pytest.fixture
def http() -> Iterator[HttpServer]:
    server = HttpServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()
