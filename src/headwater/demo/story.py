"""What the demo asks, and what it makes of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from headwater.demo.front import Bursts
from headwater.demo.processes import Served
from headwater.demo.requests import Answer, Chat, ask, read_metrics
from headwater.errors import UnavailableError
from headwater.node.client import fetch_status
from headwater.types import Tier

FACTS, QUICK_FACTS = 92, 24
"""What the document has, at about 22 tokens each."""
WARM_UP_CHARS = 1500
SETTLE_S = 10.0
REST_S = 60.0
POLL_S = 0.02

SHARED, RESTARTED, WIPED = "shared", "restarted", "wiped"
"""The acts: all is running; engines and node were restarted; and the node has lost its memory and its disk, too."""


@dataclass(frozen=True)
class Line:
    """One request of the demo: the machine-readable contract of `headwater demo --json`.

    `tiers` has the reused tokens by the tier that they came from, `tier` the same as text.
    """

    act: str
    instance: str
    prompt_tokens: int
    reused_tokens: int
    tier: str
    tiers: dict[str, int]
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


def document(facts: int) -> str:
    """Tokens that nobody has seen before, so that no answer comes from the model's memory."""
    told = (
        f"Gauge {number} stands at kilometre {number * 7 % 193} of the river and reads {number * number % 89} cm."
        for number in range(1, facts + 1)
    )
    return "Survey of the river and its gauges, to be used as the only source. " + " ".join(told)


def steps(facts: int) -> Iterator[Step]:
    """The document on A, the same on B, another question, and a chat that alternates between them."""
    about = [{"role": "system", "content": document(facts)}]

    def question(text: str) -> list[dict[str, str]]:
        return [*about, {"role": "user", "content": text}]

    yield Step("document, first seen by A", "A", question("At which kilometre does gauge 12 stand?"))
    yield Step("same question on B", "B", question("At which kilometre does gauge 12 stand?"))
    yield Step("another question on B", "B", question(f"How many centimetres does gauge {facts // 3} read?"))
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


def tell(
    servers: dict[str, Served], node: str, facts: int, begin: Callable[[str], None]
) -> tuple[list[Line], dict[str, Answer]]:
    """Make all requests, each first without any cache and then with; `begin` is told what comes next.

    Also returns what each instance answered to the first question without any cache.
    """
    lines: list[Line] = []
    plain: dict[str, Answer] = {}
    for step in steps(facts):
        begin(step.title)
        server = servers[step.instance]
        uncached = ask(server, step.chat, without_cache=True)
        plain.setdefault(step.instance, uncached)
        lines.append(ask_with_cache(SHARED, server, node, step.chat, uncached)[0])
    # The chat starts with the document, too, so that its prefix is already shared.
    chat: list[dict[str, str]] = [{"role": "system", "content": document(facts)}]
    for turn, text in enumerate(CHAT_TURNS):
        server = servers["AB"[turn % 2]]
        begin(f"chat, turn {turn + 1} on {server.name}")
        chat.append({"role": "user", "content": text})
        uncached = ask(server, chat, without_cache=True)
        line, answer = ask_with_cache(SHARED, server, node, chat, uncached)
        lines.append(line)
        chat.append({"role": "assistant", "content": answer.text})
    return lines, plain


def tell_again(act: str, server: Served, node: str, facts: int, plain: Answer) -> Line:
    """Ask the first question again, of an engine that has just been started; `plain` is its uncached answer."""
    # An engine that has computed nothing yet is slow at first, and cannot say what fetching would have to beat.
    ask(server, [{"role": "user", "content": document(facts)[:WARM_UP_CHARS]}], without_cache=True)
    return ask_with_cache(act, server, node, next(steps(facts)).chat, plain)[0]


def wait_for_rest(node: str) -> None:
    """Return when everything that should be in the node's lower tiers is there; raises UnavailableError."""
    _wait(lambda: fetch_status(node)["quiet"] is True, "the node still moves KV to its tiers")


def wait_for_engine(node: str) -> None:
    """Return when an engine has connected to a node; raises UnavailableError."""
    _wait(lambda: fetch_status(node)["instances"] != 0, "no engine has found the node")


def _wait(fact: Callable[[], bool], else_say: str) -> None:
    deadline_s = time.monotonic() + REST_S
    while not fact():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{else_say} after {REST_S:.0f} s")
        time.sleep(POLL_S)


def ask_with_cache(act: str, server: Served, node: str, chat: Chat, uncached: Answer) -> tuple[Line, Answer]:
    """Ask with the cache and see where the prompt came from; `uncached` is the same instance's answer without it."""
    before = read_metrics(server)
    cached = ask(server, chat)
    after = _settled_metrics(server, node)

    def grown(name: str) -> int:
        return int(after.get(name, 0.0) - before.get(name, 0.0))

    from_node = grown("vllm:external_prefix_cache_hits_total")
    below = {it: grown(f"vllm:headwater_{it.value}_tokens_total") for it in (Tier.DISK, Tier.REMOTE)}
    tiers = _by_tier(cached.cached_tokens, from_node, below)
    line = Line(
        act=act,
        instance=server.name,
        prompt_tokens=cached.prompt_tokens,
        reused_tokens=cached.cached_tokens,
        tier=" + ".join(f"{name} {tokens}" for name, tokens in tiers.items()) or "none",
        tiers=tiers,
        ttft_s=round(cached.ttft_s, 4),
        ttft_uncached_s=round(uncached.ttft_s, 4),
        bytes_moved=grown("vllm:headwater_loaded_bytes_total") + grown("vllm:headwater_saved_bytes_total"),
        identical=cached.token_ids == uncached.token_ids and cached.text == uncached.text,
    )
    return line, cached


def _by_tier(cached_tokens: int, from_node: int, below: dict[Tier, int]) -> dict[str, int]:
    """Where the reused tokens of one request came from: the engine's own cache, or a tier of the node."""
    tiers = {Tier.DEVICE: cached_tokens - from_node, Tier.HOST: from_node - sum(below.values())} | below
    return {tier.value: tokens for tier, tokens in tiers.items() if tokens > 0}


def _settled_metrics(server: Served, node: str) -> dict[str, float]:
    """A server's metrics once the node has no copy of it under way any more."""
    deadline_s = time.monotonic() + SETTLE_S
    last = read_metrics(server)
    while time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        quiet = fetch_status(node)["quiet"]
        now = read_metrics(server)
        if quiet and now == last:
            return now
        last = now
    return last


def reused_on_other(lines: Sequence[Line]) -> bool:
    """Whether B's first request took most of its prompt from what A had saved."""
    first = next(line for line in lines if line.instance == "B")
    return _mostly(first, Tier.HOST)


def came_from(lines: Sequence[Line], act: str, tier: Tier) -> bool:
    """Whether the requests of an act took most of their prompts from this tier."""
    asked = [line for line in lines if line.act == act]
    return bool(asked) and all(_mostly(line, tier) for line in asked)


def _mostly(line: Line, tier: Tier) -> bool:
    return line.tiers.get(tier.value, 0) > line.prompt_tokens // 2


def as_json(lines: Sequence[Line], bursts: Bursts) -> dict[str, object]:
    """The contract: whether all is well, each request, and the burst both ways."""
    ok = all(line.identical for line in lines) and reused_on_other(lines)
    ok = ok and came_from(lines, RESTARTED, Tier.DISK) and came_from(lines, WIPED, Tier.REMOTE)
    ok = ok and bursts.identical and bursts.reused_more
    return {"ok": ok, "requests": [asdict(line) for line in lines], "burst": bursts.as_json()}
