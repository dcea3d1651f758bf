"""The worker's Tokens: where ids come from, and what happens where there are none."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from headwater.conductor.bodies import read, read_any
from headwater.conductor.counts import Counts
from headwater.conductor.http.exchange import Request
from headwater.conductor.job import How, Kind, Parsed, Tokenised
from headwater.conductor.tokens import service as module
from headwater.conductor.tokens.local import Found
from headwater.conductor.tokens.samples import samples
from headwater.conductor.tokens.service import TokensService
from headwater.conductor.tokens.tokenizers import LocalTokenizer
from headwater.fleetfile.model import Limits
from tests.conductor.tokens.chats import QWEN, chat, folder, text, user

WAIT_S = 20.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs in a loop of its own."""

    @wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run


CANARY = "canary-8d1f"


@pytest.fixture(scope="module")
def own(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("service") / "model", model_dir, QWEN)


@asynccontextmanager
async def serving(
    own: Path, mode: str = "local", counts: Counts | None = None, **more: Any
) -> AsyncIterator[TokensService]:
    tokens = TokensService({"model": own}, mode, counts or Counts(), asyncio.get_running_loop(), **more)
    try:
        yield tokens
    finally:
        tokens.close()


def ask_for(tokens: TokensService, parsed: Parsed, done: Callable[[Tokenised], None], salt: str = "") -> None:
    """As whoever has a request does it."""
    known = tokens.known(parsed, salt)
    if known is None:
        tokens.find(parsed, done)
    else:
        done(known)


async def found(tokens: TokensService, parsed: Parsed, salt: str = "") -> Tokenised:
    """What it says, whenever it says it."""
    future: asyncio.Future[Tokenised] = asyncio.get_running_loop().create_future()
    ask_for(tokens, parsed, future.set_result, salt)
    return await asyncio.wait_for(future, WAIT_S)


def at_once(tokens: TokensService, parsed: Parsed, salt: str = "") -> Tokenised | None:
    """What it says at once, in either way."""
    answers: list[Tokenised] = []
    ask_for(tokens, parsed, answers.append, salt)
    return answers[0] if answers else None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Threads wait at it."""
    opened = threading.Event()
    find = module.find_ids

    def waits(tokenizer: LocalTokenizer, parsed: Parsed, size: int) -> Found:
        assert opened.wait(WAIT_S)
        return find(tokenizer, parsed, size)

    monkeypatch.setattr(module, "find_ids", waits)
    yield opened
    opened.set()


@in_loop
async def test_ids_are_given_found_and_known(own: Path) -> None:
    async with serving(own) as tokens:
        given = Parsed(Kind.COMPLETION, {}, "model", ids=[1, 2, 3])
        assert at_once(tokens, given) == Tokenised([1, 2, 3], How.GIVEN)
        given.fields["truncate_prompt_tokens"] = 2
        assert at_once(tokens, given) == Tokenised([2, 3], How.GIVEN)
        given.fields["truncate_prompt_tokens"] = -1
        assert at_once(tokens, given) == Tokenised(None, How.NONE, "truncate")
        first = await found(tokens, text("Some rivers"))
        assert first.how is How.LOCAL and first.ids and first.seconds > 0
        known = at_once(tokens, text("Some rivers"))
        assert known == Tokenised(first.ids, How.KNOWN)
        assert at_once(tokens, text("Some rivers", add_special_tokens=False)) is None
        assert tokens.state()["remembered"] == 1


@in_loop
async def test_a_usual_prompt_is_not_taken_apart_to_be_looked_for(own: Path) -> None:
    body = b'{"model":"model","prompt":"Some rivers","max_tokens":3}'
    request = Request("POST", "/v1/completions", "", [], body, "", {})
    usual, with_care = read(request, Limits()), read_any(Kind.COMPLETION, request, Limits())
    async with serving(own) as tokens:
        assert tokens.known(usual) is None and usual.known is None
        first = await found(tokens, usual)
        assert first.ids and usual.usual
        assert at_once(tokens, with_care) == Tokenised(first.ids, How.KNOWN), "it is the same prompt"


@in_loop
async def test_nobody_knows_what_another_tenant_asked(own: Path) -> None:
    async with serving(own) as tokens:
        await found(tokens, text("secret"), "a")
        assert at_once(tokens, text("secret"), "a") is not None
        assert at_once(tokens, text("secret"), "b") is None
        salted = text("secret")
        salted.salt = "mine"
        assert at_once(tokens, salted, "a") is None


@in_loop
async def test_equal_prompts_are_tokenised_once(own: Path, gate: threading.Event) -> None:
    async with serving(own, searches=1) as tokens:
        answers: list[Tokenised] = []
        for _ in range(500):
            ask_for(tokens, chat({"messages": [user("Hi")]}), answers.append)
        assert at_once(tokens, text("another")) == Tokenised(None, How.NONE, "busy"), "the 500 take one place"
        assert not answers
        gate.set()
        last = await found(tokens, chat({"messages": [user("Hi")]}))
        assert len(answers) == 500 and {it.how for it in answers} == {How.LOCAL}
        assert all(it.ids is answers[0].ids for it in [*answers, last])


@pytest.mark.parametrize(
    ("parsed", "reason"),
    [
        (Parsed(Kind.CHAT, {"messages": []}, "other"), "no_tokenizer"),
        (Parsed(Kind.CHAT, {"messages": []}, "model", media=True), "media"),
        (chat({"messages": [user("a")], "chat_template": "x"}), "client_template"),
        (chat({"messages": [user("a")], "chat_template_kwargs": {"chat_template": "x"}}), "client_template"),
        (Parsed(Kind.COMPLETION, {"prompt": ["a", "b"]}, "model"), "prompts"),
    ],
    ids=range(5),
)
@in_loop
async def test_says_at_once_why_there_are_none(parsed: Parsed, reason: str, own: Path) -> None:
    async with serving(own) as tokens:
        assert at_once(tokens, parsed) == Tokenised(None, How.NONE, reason)


@in_loop
async def test_says_later_why_there_are_none(own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(own) as tokens:
        refused = await found(tokens, chat({"messages": [user([{"type": "file", "text": CANARY}])]}))
        assert (refused.ids, refused.how, refused.reason) == (None, How.NONE, "template")
        assert at_once(tokens, chat({"messages": [user([{"type": "file", "text": CANARY}])]})) is None, "not remembered"
    async with serving(tmp_path / "nowhere") as tokens:
        assert (await found(tokens, text(CANARY))).reason == "no_tokenizer"
        (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": 1}')
    async with serving(tmp_path / "broken") as tokens:
        assert (await found(tokens, text(CANARY))).reason == "no_tokenizer"
    assert caplog.text.count("no tokenizer for model model") == 2 and CANARY not in caplog.text


@in_loop
async def test_without_a_tokenizer_the_engines_are_asked(tmp_path: Path) -> None:
    def ask(parsed: Parsed, done: Callable[[array[int] | None], None]) -> None:
        done(array("I", [7, 8]))

    async with serving(tmp_path / "nowhere", ask=ask) as tokens:
        await found(tokens, text("a"))
        while tokens.state()["models"]["model"]["mode"] != "engine":
            await asyncio.sleep(0)
        later = await found(tokens, text("a"))
        assert (list(later.ids or ()), later.how) == ([7, 8], How.ENGINE)
        other = Parsed(Kind.COMPLETION, {"prompt": "a"}, "registered", text="a")
        assert (await found(tokens, other)).how is How.ENGINE, "a model that came while we ran"
    async with serving(tmp_path / "nowhere", mode="none", ask=ask) as tokens:
        assert at_once(tokens, other) == Tokenised(None, How.NONE, "no_tokenizer")


@in_loop
async def test_failures_are_said_without_the_prompt(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(tokenizer: LocalTokenizer, parsed: Parsed, size: int) -> Found:
        raise ZeroDivisionError(parsed.text)

    monkeypatch.setattr(module, "find_ids", fails)
    async with serving(own) as tokens:
        assert (await found(tokens, text(CANARY))).reason == "error"
    assert "ZeroDivisionError" in caplog.text and CANARY not in caplog.text


@in_loop
async def test_what_depends_on_the_time_is_not_remembered(own: Path, model_dir: Path, tmp_path: Path) -> None:
    timed = folder(tmp_path / "model", model_dir, "{{ strftime_now('%H:%M') }}")
    async with serving(timed) as tokens:
        assert (await found(tokens, chat({"messages": [user("a")]}))).ids
        assert at_once(tokens, chat({"messages": [user("a")]})) is None


@in_loop
async def test_yesterday_is_not_remembered(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(own) as tokens:
        await found(tokens, text("a"))
        monkeypatch.setattr(module, "today", lambda: "2031-01-01")
        assert at_once(tokens, text("a")) is None


@in_loop
async def test_closing_ends_what_is_under_way(own: Path, gate: threading.Event) -> None:
    answers: list[Tokenised] = []
    async with serving(own, threads=1) as tokens:
        for name in "abc":
            ask_for(tokens, text(name), answers.append)
        asyncio.get_running_loop().call_soon(gate.set)
        threading.Timer(0.05, gate.set).start()
    assert [it.reason for it in answers] == ["closed"] * 3
    await asyncio.sleep(0)
    assert at_once(tokens, text("d")) == Tokenised(None, How.NONE, "busy")
    assert not any(it.name.startswith("tokens") for it in threading.enumerate())


class Asked:
    """An engine that answers when the test says so."""

    def __init__(self) -> None:
        self.questions: list[tuple[Parsed, Callable[[array[int] | None], None]]] = []

    def __call__(self, parsed: Parsed, done: Callable[[array[int] | None], None]) -> None:
        self.questions.append((parsed, done))

    def answer(self, ids: list[int] | None) -> None:
        self.questions.pop(0)[1](None if ids is None else array("I", ids))


@in_loop
async def test_asks_an_engine(own: Path) -> None:
    ask, answers = Asked(), []
    async with serving(own, "engine", ask=ask) as tokens:
        for parsed in (text("a"), text("a"), text("b", truncate_prompt_tokens=1)):
            ask_for(tokens, parsed, answers.append)
        assert len(ask.questions) == 2 and not answers
        ask.answer([1, 2])
        await asyncio.sleep(0)
        ask.answer([1, 2])
        assert [(list(it.ids or ()), it.how) for it in answers] == [
            ([1, 2], How.ENGINE), ([1, 2], How.ENGINE), ([2], How.ENGINE),
        ]  # fmt: skip
        ask_for(tokens, text("c"), answers.append)
        ask.answer(None)
        assert answers[-1][:3] == (None, How.NONE, "engine")


@in_loop
async def test_waits_for_an_engine_only_so_long(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.01)
    ask = Asked()
    async with serving(own, "engine", ask=ask) as tokens:
        late = await found(tokens, text("a"))
        assert late[:3] == (None, How.NONE, "engine")
        ask.answer([1])
        assert at_once(tokens, text("a")) is None, "an answer that came too late counts for nothing"


@pytest.mark.parametrize(("mode", "ask"), [("none", Asked()), ("engine", None)], ids=["none", "nobody to ask"])
@in_loop
async def test_may_be_off(mode: str, ask: Asked | None, own: Path) -> None:
    async with serving(own, mode, ask=ask) as tokens:
        assert at_once(tokens, text("a")) == Tokenised(None, How.NONE, "off")


async def verified(tokens: TokensService) -> bool | None:
    future: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
    tokens.verify("model", future.set_result)
    return await asyncio.wait_for(future, WAIT_S)


@pytest.mark.parametrize("wrong", [None, 0, len(samples("model")) - 1])
@in_loop
async def test_a_model_that_counts_otherwise_is_asked(
    wrong: int | None, own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts, real, asked_for = Counts(), LocalTokenizer(own), []

    def ask(parsed: Parsed, done: Callable[[array[int] | None], None]) -> None:
        ids = module.find_ids(real, parsed, 1 << 16).ids
        if len(asked_for) == wrong:
            ids = array("I", [1, *(ids or ())])
        asked_for.append(parsed)
        done(ids)

    caplog.set_level(logging.WARNING)
    async with serving(own, counts=counts, ask=ask) as tokens:
        await found(tokens, text("a"))
        assert await verified(tokens) is (wrong is None)
        assert tokens.state()["models"]["model"] == {
            "mode": "local" if wrong is None else "engine", "verified": wrong is None,
        }  # fmt: skip
        assert at_once(tokens, text("a")) is not None, "remembered, or asked for at once"
        assert await verified(tokens) is (wrong is None)
    assert counts.numbers == ({} if wrong is None else {("tokens_mismatch", "model"): 1})
    assert caplog.text.count("tokenises otherwise") == (wrong is not None)
    assert wrong is not None or len(asked_for) == 2 * len(samples("model"))


@in_loop
async def test_an_engine_that_does_not_answer_proves_nothing(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.01)
    for ask in (Asked(), lambda parsed, done: done(None), None):
        async with serving(own, ask=ask) as tokens:
            assert await verified(tokens) is None
            assert tokens.state()["models"]["model"] == {"mode": "local", "verified": None}
