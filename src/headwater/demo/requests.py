"""Ask a vLLM server as its clients do: streamed chat completions, and its own metrics about them."""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.demo.processes import Served
from headwater.errors import UnavailableError

ANSWER_TOKENS = 16
TIMEOUT_S = 300.0

Chat = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """One answer: its text and tokens, how long the first token took, and what the prompt cost."""

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def ask(server: Served, chat: Chat, *, without_cache: bool = False) -> Answer:
    """A greedy streamed answer; `without_cache` keeps both headwater's and the engine's own cache out of it."""
    body: dict[str, Any] = {
        "model": "model",
        "messages": list(chat),
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if without_cache:
        body["kv_transfer_params"] = {"headwater.skip": True}
        body["cache_salt"] = uuid.uuid4().hex
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    try:
        started_s = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise UnavailableError(f"vLLM {server.name} answered {response.status}: {response.read(500)!r}")
        return _read_stream(response, started_s)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"vLLM {server.name} does not answer: {error}\n{server.child.tail()}") from error
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse, started_s: float) -> Answer:
    texts: list[str] = []
    token_ids: list[int] = []
    ttft_s = 0.0
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[len(b"data: ") :])
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            new_ids = choice.get("token_ids") or ()
            if new_ids and not token_ids:
                ttft_s = time.monotonic() - started_s
            token_ids.extend(new_ids)
            texts.append(choice.get("delta", {}).get("content") or "")
    if not token_ids:
        raise UnavailableError("the stream ended without a token")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        "".join(texts), tuple(token_ids), ttft_s, usage.get("prompt_tokens", 0), details.get("cached_tokens") or 0
    )


def read_metrics(server: Served) -> dict[str, float]:
    """The sums of a server's metrics that tell where prompt tokens came from and how many bytes moved."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10.0)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"vLLM {server.name} does not answer: {error}\n{server.child.tail()}") from error
    finally:
        connection.close()
    wanted = ("vllm:headwater_", "vllm:external_prefix_cache_", "vllm:prefix_cache_")
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(wanted):
            name = line.split("{", 1)[0].split(" ", 1)[0]
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return sums
