"""A burst of chats that share long prefixes: made, sent at its own pace, and put in a table.

    chats(Burst(...)) ──► requests ──► burst(requests, urls) ──► results ──► summary, table

Arrivals do not wait for answers. With one URL everything goes to it (a Conductor); with several, request i goes to the
(i mod n)-th of them, which is round robin. Times count from when a request was due.
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table

from headwater.errors import UnavailableError

PATIENCE_S = 300.0
PACE, SLO_COLD = 4.0, 2.0
"""Usual: arrivals are so many times what one instance could prefill, and the SLO is so many cold prefills."""
TIERS = ("device", "host", "disk", "remote", "peer")
_VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power"
)


@dataclass(frozen=True, slots=True)
class Burst:
    """`families` system prompts of about `prefix_tokens` each, `chats` chats with each of them in a random order,
    `rate` arrivals a second (a Poisson process)."""

    families: int = 16
    chats: int = 4
    prefix_tokens: int = 1100
    question_tokens: int = 24
    answer_tokens: int = 8
    rate: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One chat and when it is due, in seconds from the begin."""

    due_s: float
    family: int
    messages: tuple[dict[str, str], ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a request; `failure` says why nothing did."""

    due_s: float
    family: int
    ttft_s: float = math.inf
    total_s: float = math.inf
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    instance: str = ""
    reused: tuple[tuple[str, int], ...] = ()
    """(tier, tokens) as the Conductor's headers tell; empty without one."""
    failure: str = ""


def chats(burst: Burst) -> list[Request]:
    """The requests in order of arrival; the same burst makes the same ones."""
    draw = random.Random(f"burst {burst.seed}")
    prefixes = [_prose(draw, burst.prefix_tokens) for _ in range(burst.families)]
    order = [family for family in range(burst.families) for _ in range(burst.chats)]
    draw.shuffle(order)
    requests, due_s = [], 0.0
    for family in order:
        messages = (
            {"role": "system", "content": prefixes[family]},
            {"role": "user", "content": f"{_prose(draw, burst.question_tokens)}?"},
        )
        requests.append(Request(due_s, family, messages, burst.answer_tokens))
        due_s += draw.expovariate(burst.rate)
    return requests


def unseen(shape: Burst, name: str) -> Request:
    """One chat of a shape whose prefix is nobody else's, and the same in every run."""
    seed = int.from_bytes(name.encode(), "big") + (1 << 64)
    (request,) = chats(replace(shape, families=1, chats=1, seed=seed))
    return request


def _prose(draw: random.Random, words: int) -> str:
    """Words of one token each, for nearly any tokenizer."""
    return " ".join(draw.choices(_VOCABULARY.split(), k=words))


def burst(
    requests: Sequence[Request],
    urls: Sequence[str],
    *,
    model: str = "model",
    answered: Callable[[], object] = lambda: None,
    more: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Send all of them when they are due; results in the order of requests. `answered` is called after each. `more` is
    in every body."""
    targets = [urlsplit(it) for it in urls]
    said = threading.Lock()
    began_s = time.monotonic() + 0.2

    def send(index: int) -> Result:
        request = requests[index]
        target = targets[index % len(targets)]
        time.sleep(max(began_s + request.due_s - time.monotonic(), 0.0))
        try:
            return ask(str(target.hostname), target.port or 80, request, model, began_s + request.due_s, more)
        except UnavailableError as error:
            return Result(request.due_s, request.family, failure=str(error))
        finally:
            with said:
                answered()

    with ThreadPoolExecutor(len(requests), "burst") as pool:
        return list(pool.map(send, range(len(requests))))


def ask(
    host: str, port: int, request: Request, model: str, due_s: float, more: Mapping[str, Any] | None = None
) -> Result:
    """One streamed chat. Raises UnavailableError."""
    body = {
        "model": model,
        "messages": request.messages,
        "temperature": 0,
        "max_tokens": request.answer_tokens,
        "min_tokens": request.answer_tokens,  # a model that has nothing to say would end at once, without a token
        "stream": True,
        "stream_options": {"include_usage": True},
        **(more or {}),
    }
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise UnavailableError(f"answered {response.status}: {response.read(300)!r}")
        return _read(response, request, due_s)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"no answer: {type(error).__name__}") from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, request: Request, due_s: float) -> Result:
    headers = {name.lower(): value for name, value in response.getheaders()}
    texts: list[str] = []
    first_s, usage = math.inf, dict[str, Any]()
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise UnavailableError("an error within the stream")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                first_s = min(first_s, time.monotonic() - due_s)
                texts.append(text)
    if not texts:
        raise UnavailableError("the stream ended without a token")
    details = usage.get("prompt_tokens_details") or {}
    return Result(
        request.due_s,
        request.family,
        first_s,
        time.monotonic() - due_s,
        usage.get("prompt_tokens", 0),
        details.get("cached_tokens") or 0,
        "".join(texts),
        headers.get("x-headwater-instance", ""),
        reused(headers.get("x-headwater-reuse", "")),
    )


def reused(header: str) -> tuple[tuple[str, int], ...]:
    """`device=1024, host=256` as pairs; words that are no such pair are left out."""
    found = []
    for part in header.replace(";", ",").split(","):
        tier, _, tokens = part.strip().partition("=")
        if tier in TIERS and tokens.isdigit() and int(tokens):
            found.append((tier, int(tokens)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Summary:
    """A burst in figures. `goodput` is the requests whose first token came within the SLO, per second of arrivals; a
    request that failed counts as one that took PATIENCE_S."""

    requests: int
    failed: int
    within: int
    goodput: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    prompt_tokens: int
    cached_tokens: int
    reused: Mapping[str, int]

    @property
    def reuse(self) -> float:
        """Share of the prompts' tokens that nobody had to compute."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def summary(results: Sequence[Result], slo_s: float) -> Summary:
    """Of all results of one or of several bursts with the same arrivals."""
    times = sorted(min(it.ttft_s, PATIENCE_S) for it in results)
    spans = [list(it) for it in _bursts(results)]
    arrivals_s = sum(_span_s(it) for it in spans)
    within = sum(it.ttft_s <= slo_s for it in results)
    by_tier: dict[str, int] = {}
    for tier, tokens in itertools.chain.from_iterable(it.reused for it in results):
        by_tier[tier] = by_tier.get(tier, 0) + tokens
    return Summary(
        requests=len(results),
        failed=sum(bool(it.failure) for it in results),
        within=within,
        goodput=within / arrivals_s,
        ttft_mean_s=statistics.fmean(times),
        ttft_p50_s=statistics.median(times),
        ttft_p99_s=times[min(math.ceil(len(times) * 0.99), len(times)) - 1],
        prompt_tokens=sum(it.prompt_tokens for it in results),
        cached_tokens=sum(it.cached_tokens for it in results),
        reused=by_tier,
    )


def _bursts(results: Sequence[Result]) -> list[list[Result]]:
    """Where time goes back to 0, another burst begins."""
    found: list[list[Result]] = []
    for it in results:
        if not found or it.due_s < found[-1][-1].due_s:
            found.append([])
        found[-1].append(it)
    return found


def _span_s(results: Sequence[Result]) -> float:
    """From the first arrival to where the one after the last is expected."""
    last_s = results[-1].due_s
    return last_s * len(results) / (len(results) - 1) if len(results) > 1 and last_s else 1.0


def table(results: Mapping[str, Sequence[Result]], slo_s: float, title: str = "The same burst, two ways") -> Table:
    """One row for each way; the first is what the others are compared with."""
    made = Table(title=title)
    made.add_column("")
    figures = ("requests", "TTFT mean", "median", "p99", "reused", f"first token within {slo_s:.1f} s", "goodput")
    for name in figures:
        made.add_column(name, justify="right")
    made.add_column("from where")
    for name, it in results.items():
        found = summary(it, slo_s)
        made.add_row(
            name,
            f"{found.requests}" + (f" ({found.failed} failed)" if found.failed else ""),
            f"{found.ttft_mean_s:.2f} s",
            f"{found.ttft_p50_s:.2f} s",
            f"{found.ttft_p99_s:.2f} s",
            f"{found.reuse:.0%}",
            f"{found.within}",
            f"{found.goodput:.2f}/s",
            ", ".join(f"{tier} {tokens:,}" for tier, tokens in found.reused.items()) or "its own cache",
        )
    return made


def same_answers(one: Sequence[Result], other: Sequence[Result]) -> int:
    """How many requests were answered with the same text both ways, of those that were answered both ways."""
    return sum(a.text == b.text for a, b in zip(one, other, strict=True) if not a.failure and not b.failure)
