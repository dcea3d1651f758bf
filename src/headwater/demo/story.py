"""What the demo asks, and what it makes of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from headwater.demo.processes import Served
from headwater.demo.requests import Answer, Chat, ask, read_metrics
from headwater.node.client import fetch_status
from headwater.types import Tier

DOCUMENT_FACTS = 92
SETTLE_S = 10.0
POLL_S = 0.02


@dataclass(frozen=True)
class Line:
    """One request of the demo: the machine-readable contract of `headwater demo --json`."""

    instance: str
    prompt_tokens: int
    reused_tokens: int
    tier: str
    ttft_s: float
    ttft_uncached_s: float
    bytes_moved: int
    identical: bool


@dataclass(frozen=True)
class Step:
    """A request to make: what it shows, on which instance, with which chat."""

    title: str
    instance: str
    chat: Chat


def document() -> str:
    """About 2,000 tokens that nobody has seen before, so that no answer comes from the model's memory."""
    facts = (
        f"Gauge {number} stands at kilometre {number * 7 % 193} of the river and reads {number * number % 89} cm."
        for number in range(1, DOCUMENT_FACTS + 1)
    )
    return "Survey of the river and its gauges, to be used as the only source. " + " ".join(facts)


def steps() -> Iterator[Step]:
    """The document on A, the same on B, another question, and a chat that alternates between them."""
    about = [{"role": "system", "content": document()}]

    def question(text: str) -> list[dict[str, str]]:
        return [*about, {"role": "user", "content": text}]

    yield Step("document, first seen by A", "A", question("At which kilometre does gauge 12 stand?"))
    yield Step("same question on B", "B", question("At which kilometre does gauge 12 stand?"))
    yield Step("another question on B", "B", question("How many centimetres does gauge 30 read?"))
    yield Step("another question on A", "A", question("Which gauge stands at the spring?"))


CHAT_TURNS = tuple(
    f"{question} Keep these notes of station {station} in mind: "
    + " ".join(
        f"On day {day} it read {day * station % 97} cm, the wind was {day + station} knots." for day in range(1, 8)
    )
    for station, question in enumerate(
        ("Sum up the survey.", "Name two of its gauges.", "Which of them reads more?", "Is there anything else?"), 5
    )
)
"""Each turn adds more than a chunk, so that the next instance finds the turn before in the node."""


def tell(servers: dict[str, Served], node: str, begin: Callable[[str], None]) -> list[Line]:
    """Make all requests, each first without any cache and then with; `begin` is told what comes next."""
    lines = []
    for step in steps():
        begin(f"{step.title}")
        lines.append(_ask_both_ways(servers[step.instance], node, step.chat)[0])
    # The chat starts with the document, too, so that its prefix is already shared.
    chat: list[dict[str, str]] = [{"role": "system", "content": document()}]
    for turn, text in enumerate(CHAT_TURNS):
        instance = "AB"[turn % 2]
        begin(f"chat, turn {turn + 1} on {instance}")
        chat.append({"role": "user", "content": text})
        line, answer = _ask_both_ways(servers[instance], node, chat)
        lines.append(line)
        chat.append({"role": "assistant", "content": answer.text})
    return lines


def _ask_both_ways(server: Served, node: str, chat: Chat) -> tuple[Line, Answer]:
    uncached = ask(server, chat, without_cache=True)
    before = read_metrics(server)
    cached = ask(server, chat)
    after = _settled_metrics(server, node)

    def grown(name: str) -> int:
        return int(after.get(name, 0.0) - before.get(name, 0.0))

    from_node = grown("vllm:external_prefix_cache_hits_total")
    tiers = []
    if cached.cached_tokens > from_node:
        tiers.append(f"{Tier.DEVICE.value} {cached.cached_tokens - from_node}")
    if from_node:
        tiers.append(f"{Tier.HOST.value} {from_node}")
    line = Line(
        instance=server.name,
        prompt_tokens=cached.prompt_tokens,
        reused_tokens=cached.cached_tokens,
        tier=" + ".join(tiers) or "none",
        ttft_s=round(cached.ttft_s, 4),
        ttft_uncached_s=round(uncached.ttft_s, 4),
        bytes_moved=grown("vllm:headwater_loaded_bytes_total") + grown("vllm:headwater_saved_bytes_total"),
        identical=cached.token_ids == uncached.token_ids and cached.text == uncached.text,
    )
    return line, cached


def _settled_metrics(server: Served, node: str) -> dict[str, float]:
    """A server's metrics once the node has no copy of it under way any more."""
    deadline_s = time.monotonic() + SETTLE_S
    last = read_metrics(server)
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        tickets = fetch_status(node)["tickets"]
        now = read_metrics(server)
        if tickets == {"load": 0, "save": 0} and now == last:
            return now
        last = now
    return last


def reused_on_other(lines: Sequence[Line]) -> bool:
    """Whether B's first request took most of its prompt from what A had saved."""
    first = next(line for line in lines if line.instance == "B")
    return Tier.HOST.value in first.tier and first.reused_tokens > first.prompt_tokens // 2


def as_json(lines: Sequence[Line]) -> dict[str, object]:
    """The contract: whether all is well, and each request."""
    ok = all(line.identical for line in lines) and reused_on_other(lines)
    return {"ok": ok, "requests": [asdict(line) for line in lines]}
