"""The rounds of `headwater bench vllm` against small HTTP servers that answer as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headwater.bench import vllm
from headwater.bench.harness import Effort
from headwater.demo.processes import Served
from headwater.errors import ResourceError, UnavailableError


class FakeVLLM(ThreadingHTTPServer):
    """Answers completions; what it says is a function of the prompt alone, unless it is told to be wrong."""

    def __init__(self, name: str, asked: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.asked = name, asked
        self.reused, self.wrong, self.status = 0, False, 200
        self.bodies: list[dict[str, Any]] = []

    @property
    def served(self) -> Served:
        return Served(self.name, self.server_address[1], None)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    """One completion, streamed as vLLM streams it."""

    server: FakeVLLM

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.asked.append(self.server.name)
        self.send_response(self.server.status)
        self.end_headers()
        first = sum(body["prompt"]) % 1000 + self.server.wrong
        events: list[Any] = [
            {"choices": [{"token_ids": None}]},
            {"choices": [{"token_ids": [first, 2]}]},
            {"choices": [{"token_ids": [3]}]},
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": self.server.reused}}},
        ]
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeVLLM]]:
    monkeypatch.setattr(vllm, "_settle", lambda node: None)
    asked: list[str] = []
    fakes = {name: FakeVLLM(name, asked) for name in "PAB"}
    fakes["B"].reused = vllm.PROMPT_TOKENS - 128
    threads = [threading.Thread(target=it.serve_forever, args=(0.01,)) for it in fakes.values()]
    for it in threads:
        it.start()
    yield fakes
    for fake, thread in zip(fakes.values(), threads, strict=True):
        fake.shutdown()
        thread.join()
        fake.server_close()


def play(fakes: dict[str, FakeVLLM], rounds: int) -> vllm.Times:
    return vllm.play({name: it.served for name, it in fakes.items()}, "unix:/none", rounds, Effort(rounds))


def test_cold_servers_take_turns_and_the_first_round_is_a_warm_up(fakes: dict[str, FakeVLLM]) -> None:
    times = play(fakes, 3)
    assert [len(it) for it in (times.plain, times.cold, times.warm)] == [3, 3, 3]
    assert min(times.plain + times.cold + times.warm) > 0
    assert "".join(fakes["P"].asked) == "APBPABAPBPAB"


def test_every_server_gets_the_same_new_prompt_each_round(fakes: dict[str, FakeVLLM]) -> None:
    play(fakes, 2)
    prompts = [[tuple(body["prompt"]) for body in fakes[name].bodies] for name in "PAB"]
    assert prompts[0] == prompts[1] == prompts[2]
    assert {len(it) for it in prompts[0]} == {vllm.PROMPT_TOKENS}
    assert len({it[:16] for it in prompts[0]}) == 3
    assert {body["temperature"] for body in fakes["A"].bodies} == {0}


def test_another_answer_with_the_cache_is_no_figure_but_an_error(fakes: dict[str, FakeVLLM]) -> None:
    fakes["B"].wrong = True
    with pytest.raises(ResourceError, match="differ"):
        play(fakes, 1)


def test_a_prompt_that_was_not_reused_is_not_called_warm(fakes: dict[str, FakeVLLM]) -> None:
    fakes["B"].reused = 0
    with pytest.raises(ResourceError, match="B reused 0 of 2048"):
        play(fakes, 1)


def test_a_server_that_fails_is_named(fakes: dict[str, FakeVLLM]) -> None:
    fakes["A"].status = 500
    with pytest.raises(UnavailableError, match="vLLM A answered 500"):
        play(fakes, 1)
