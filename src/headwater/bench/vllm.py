"""`headwater bench vllm`: time to first token of real vLLM servers, with and without headwater.

Three `vllm serve` processes: P without the plug-in and A with it share one core, B with it has the other. Each
round draws a prompt that nobody has seen and asks A and P for it, in turns of who is first (both *cold*), waits
until the node holds what A has saved, and asks B (*warm*: the prompt is on the other instance). One server
computes at a time.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headwater.bench.harness import Effort, Experiment, Goal, Readings, Series, Spec, Suite
from headwater.demo.processes import Children, Served, kv_transfer_config, start_node, start_vllm
from headwater.errors import ResourceError, UnavailableError
from headwater.node.client import fetch_status

PROMPT_TOKENS = 2048
ANSWER_TOKENS = 4
ROUNDS_MIN, QUICK_ROUNDS = 10, 2
VOCABULARY = 40_000
"""Token ids are drawn below it; the demo's model has 49,152."""
NODE_MEMORY = "1GiB"
START_S = 600.0
ANSWER_S = 300.0
SETTLE_S = 10.0
POLL_S = 0.02
COLD = "the same prompt on a server without headwater"
FRESH = "a prompt that no server has seen, with headwater"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: time to the first token, all tokens, how many prompt tokens were reused."""

    ttft_s: float
    token_ids: tuple[int, ...]
    reused_tokens: int


@dataclass(slots=True)
class Times:
    """Times to first token by kind."""

    plain: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)


def ask(server: Served, prompt: list[int]) -> Answer:
    """A greedy streamed completion; raises UnavailableError."""
    body = {
        "model": "model",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    try:
        started_s = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise UnavailableError(f"vLLM {server.name} answered {response.status}: {response.read(500)!r}")
        return _read_stream(response, started_s)
    except OSError as error:
        raise UnavailableError(f"vLLM {server.name} does not answer: {error}") from error
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse, started_s: float) -> Answer:
    token_ids: list[int] = []
    ttft_s = 0.0
    reused = 0
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[len(b"data: ") :])
        if usage := event.get("usage"):
            reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event.get("choices", ()):
            new_ids = choice.get("token_ids") or ()
            if new_ids and not token_ids:
                ttft_s = time.monotonic() - started_s
            token_ids += new_ids
    if not token_ids:
        raise UnavailableError("the stream ended without a token")
    return Answer(ttft_s, tuple(token_ids), reused)


@contextmanager
def servers(model: Path) -> Iterator[tuple[dict[str, Served], str]]:
    """The three servers, ready, and the node's address; all are gone afterwards."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-")))
        children = stack.enter_context(Children())
        address = f"unix:{scratch}/node.sock"
        start_node(children, address, NODE_MEMORY, scratch / "node.log")
        cores = sorted(os.sched_getaffinity(0))
        transfer = kv_transfer_config(address)
        started = {}
        for name, core, plug_in in (("P", cores[0], None), ("A", cores[0], transfer), ("B", cores[-1], transfer)):
            it = started[name] = start_vllm(children, name, model, core, plug_in, scratch)
            it.child.wait_until(it.healthy, START_S, lambda: None)  # one after the other: they share cores
        yield started, address


def play(started: dict[str, Served], node: str, rounds: int, effort: Effort) -> Times:
    """All rounds; raises ResourceError if an answer with headwater differs from the one without, or if nothing was
    reused where all should have been."""
    times = Times()
    for number in range(-1, rounds):
        prompt = new_prompt(number)
        answers = {name: ask(started[name], prompt) for name in ("AP" if number % 2 else "PA")}
        _settle(node)
        answers["B"] = ask(started["B"], prompt)
        if len({it.token_ids for it in answers.values()}) > 1:
            raise ResourceError(f"answers differ: {answers}")
        if answers["B"].reused_tokens < PROMPT_TOKENS * 3 // 4:
            raise ResourceError(f"B reused {answers['B'].reused_tokens} of {PROMPT_TOKENS} tokens")
        if number >= 0:  # the first round warms the servers up
            times.plain.append(answers["P"].ttft_s)
            times.cold.append(answers["A"].ttft_s)
            times.warm.append(answers["B"].ttft_s)
        effort.after_turn()
    return times


def new_prompt(seed: int) -> list[int]:
    """A prompt that shares no chunk with that of any other seed."""
    draw = random.Random(f"prompt {seed}")
    return [draw.randrange(100, VOCABULARY) for _ in range(PROMPT_TOKENS)]


def _settle(node: str) -> None:
    """Wait until no copy is under way; what is saved then is what a later request finds."""
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        if fetch_status(node)["quiet"]:
            return


def measure(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See SUITE."""
    rounds = QUICK_ROUNDS if effort.quick else max(effort.rounds, ROUNDS_MIN)
    with servers(effort.model) as (started, node):
        times = play(started, node, rounds, effort)
    plain, cold, warm = (Series(1.0, it) for it in (times.plain, times.cold, times.warm))
    return {"vllm/cold/ttft": cold.latency(1.0, yardstick=plain), "vllm/warm/ttft": warm.latency(1.0, yardstick=cold)}


SUITE = Suite(
    "vllm",
    "real vLLM servers: what a cache hit saves, and what headwater costs where there is none",
    (
        Experiment(
            "Three vLLM servers (this takes minutes)",
            (
                Spec(
                    "vllm/warm/ttft",
                    "s",
                    f"{PROMPT_TOKENS:,}-token prompt that the other instance has computed",
                    Goal(at_least=False, factor=1 / 8),
                    FRESH,
                ),
                Spec(
                    "vllm/cold/ttft",
                    "s",
                    f"{PROMPT_TOKENS:,}-token prompt that nobody has computed",
                    Goal(at_least=False, factor=1.03),
                    COLD,
                ),
            ),
            measure,
        ),
    ),
)
