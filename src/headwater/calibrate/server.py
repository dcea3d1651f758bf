"""An OpenAI-compatible server, asked as its clients do: what it serves, and streamed completions with their times.

What servers have beyond the common part is learned by trying: prompts as token ids, and an answer that does not end
before its length.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from headwater.calibrate.exchange import Exchanges, Lines
from headwater.errors import ProtocolError, RefusedError, UnavailableError

ASK_S = 30.0
"""For what costs the server nothing."""
VOCABULARY = range(1000, 30_000)
"""Token ids that every common vocabulary has, and that are no special ones."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself; None where it says nothing."""

    model: str
    length_max: int | None = None
    """How long a prompt and its answer may be."""
    block_tokens: int | None = None
    capacity_tokens: int | None = None
    """How many tokens of KV it has room for."""
    busy: int = 0
    """Requests of others, running or waiting."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion. Times are on the clock of time.monotonic; `token_s` has an element a token."""

    sent_s: float
    token_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompt; None if the server does not say."""

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.token_s[0] - self.sent_s


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the server takes beyond the common part. Where it takes text only, a prompt's numbers become words."""

    token_ids: bool = True
    extensions: bool = True
    """`ignore_eos` and `return_token_ids`, as vLLM and SGLang have."""


class EngineServer:
    """One server by its URL. Threads may share it; `key` is sent and never shown."""

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = 300.0, model: str | None = None) -> None:
        self._http = Exchanges(url, key)
        self.url, self.timeout_s, self.dialect = self._http.url, timeout_s, Dialect()
        self._model = model

    def describe(self) -> Served:
        """What it serves, from /v1/models and /metrics; raises RefusedError or UnavailableError."""
        models = self._models()
        names = [str(it["id"]) for it in models]
        name = self._model or names[0]
        if name not in names:
            raise RefusedError("model", " or ".join(names[:5]), name, "name one that the server has")
        self._model = name
        length = models[names.index(name)].get("max_model_len")
        return replace(self._told_by_metrics(name), length_max=length if isinstance(length, int) else None)

    def hit_tokens(self) -> int | None:
        """The prompt tokens that it has found in its prefix cache so far, of all requests; None if it does not say."""
        found = [value for name, _, value in self._metrics() if name.startswith("vllm:prefix_cache_hits")]
        return round(sum(found)) if found else None

    def learn(self, prompt: Sequence[int]) -> Answer:
        """The first completion, in the richest dialect that the server takes; raises what the plainest raises."""
        for token_ids, extensions in ((True, True), (True, False), (False, True), (False, False)):
            self.dialect = Dialect(token_ids, extensions)
            try:
                return self.complete(prompt, 2)
            except RefusedError as error:
                if error.field != "request" or not (token_ids or extensions):
                    raise
        raise AssertionError("the loop ends by itself")

    def complete(self, prompt: Sequence[int], answer_tokens: int) -> Answer:
        """A greedy streamed completion.

        Raises RefusedError if the server takes no such request, UnavailableError if it fails or is late, ProtocolError
        if what it sends is no completion.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt) if self.dialect.token_ids else words(prompt),
            "temperature": 0,
            "max_tokens": answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.dialect.extensions:
            body |= {"ignore_eos": True, "return_token_ids": True}
        with self._http.exchange("/v1/completions", self.timeout_s, body) as lines:
            token_s, usage = self._read_stream(lines)
        if not token_s:
            raise UnavailableError(f"{self.url}: the stream ended without a token")
        told = usage.get("prompt_tokens")
        if not isinstance(told, int):
            if not self.dialect.token_ids:
                raise RefusedError(
                    "usage", "the number of prompt tokens in the stream", "none",
                    "use a server with stream_options.include_usage, or one that takes prompts as token ids",
                )  # fmt: skip
            told = len(prompt)
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Answer(lines.sent_s, tuple(token_s), told, cached if isinstance(cached, int) else None)

    def together(
        self,
        prompts: Sequence[Sequence[int]],
        answer_tokens: Sequence[int],
        at_s: Sequence[float] | None = None,
        done: Callable[[int], None] = lambda count: None,
    ) -> list[Answer]:
        """Completions at the same time, or each so many seconds from now; `done` is told how many have ended.

        The first failure ends all, and is raised.
        """
        began_s = time.monotonic()

        def ask(number: int) -> Answer:
            if at_s is not None:
                self._http.ended.wait(max(began_s + at_s[number] - time.monotonic(), 0.0))
            return self.complete(prompts[number], answer_tokens[number])

        with ThreadPoolExecutor(len(prompts)) as pool:
            try:
                asked = [pool.submit(ask, number) for number in range(len(prompts))]
                left = set(asked)
                while left:
                    ended, left = wait(left, return_when=FIRST_COMPLETED)
                    for it in ended:
                        it.result()
                    done(len(asked) - len(left))
                return [it.result() for it in asked]
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End all calls under way, which raise UnavailableError; no further ones begin."""
        self._http.close()

    def _read_stream(self, lines: Lines) -> tuple[list[float], dict[str, Any]]:
        """When each token came, and the last usage that was told."""
        token_s: list[float] = []
        usage: dict[str, Any] = {}
        for line, now_s in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[len(b"data:") :].strip()
            if payload == b"[DONE]":
                break
            count, told = self._read_event(payload)
            token_s += [now_s] * count
            usage = told or usage
        return token_s, usage

    def _read_event(self, payload: bytes) -> tuple[int, dict[str, Any]]:
        """How many tokens an event has, and its usage."""
        try:
            event = json.loads(payload)
            if "error" in event:
                raise self._failure(event["error"])
            count = 0
            for choice in event.get("choices") or ():
                ids = choice.get("token_ids")
                # Without ids an event is a token; the last one may only say why the answer ended.
                count += len(ids) if ids is not None else int(bool(choice.get("text")))
            usage = event.get("usage")
            return count, usage if isinstance(usage, dict) else {}
        except (ValueError, TypeError, AttributeError) as error:
            said = self._http.said(payload.decode(errors="replace"))
            raise ProtocolError(f"{self.url}: an event is not a completion: {said}") from error

    def _failure(self, told: object) -> RefusedError | UnavailableError:
        """What became of a stream that had begun well: vLLM reports there even what it should have refused."""
        said = self._http.said(json.dumps(told))
        if isinstance(told, dict) and told.get("code") in (400, 422):
            return RefusedError("request", "one that the server takes", said, "see what it says")
        return UnavailableError(f"{self.url}: {said}")

    def _models(self) -> list[dict[str, Any]]:
        text = self._http.get("/v1/models", ASK_S)
        try:
            told = json.loads(text)["data"]
            if told and all("id" in it and hasattr(it, "get") for it in told):
                return list(told)
        except (ValueError, TypeError, KeyError):
            pass
        given = f"/v1/models answers {self._http.said(text)!r}"
        raise RefusedError("URL", "an OpenAI-compatible server with a model", given, "check the URL")

    def _metrics(self) -> list[tuple[str, dict[str, str], float]]:
        """What vLLM exports of itself, as name, labels, value; nothing where it is not vLLM."""
        try:
            text = self._http.get("/metrics", ASK_S)
        except RefusedError:
            return []
        samples = []
        for line in text.splitlines():
            if line.startswith("vllm:") and "_created" not in line:
                name = re.split(r"[{ ]", line, maxsplit=1)[0]
                samples.append((name, dict(_LABEL.findall(line)), _number(line.rsplit(" ", 1)[-1])))
        return samples

    def _told_by_metrics(self, name: str) -> Served:
        samples = self._metrics()
        waits = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        busy = round(sum(value for it, _, value in samples if it in waits))
        for metric, labels, _ in samples:
            if metric == "vllm:cache_config_info":
                block, blocks = _whole(labels.get("block_size")), _whole(labels.get("num_gpu_blocks"))
                capacity = _whole(labels.get("kv_cache_size_tokens"))
                if capacity is None and block is not None and blocks is not None:
                    capacity = block * blocks
                return Served(name, None, block, capacity, busy)
        return Served(name, busy=busy)


def words(prompt: Sequence[int]) -> str:
    """Token ids as text for a server that takes no ids: equal numbers are equal words, in the same order."""
    syllables = ("ka", "to", "mi", "re", "su", "no", "la", "vi", "pe", "du")
    return " ".join("".join(syllables[int(digit)] for digit in str(it)) for it in prompt)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
