"""A stream that goes on at other instances says what it would have said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.conductor import bodies
from headwater.conductor.http.exchange import Request
from headwater.conductor.job import Parsed
from headwater.conductor.replay import EngineError, Plan, Story, Translator, Unmovable, body_of, obstacle
from headwater.conductor.sse import payload
from headwater.fleetfile.model import Limits
from tests.conductor.engine import Engine, events_of
from tests.conductor.toy import ALPHABET, Bytes, Words

MESSAGES = [{"role": "user", "content": "hi"}]
DONE = b"data: [DONE]\n\n"


def parsed_of(fields: dict[str, Any], *, chat: bool) -> Parsed:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return bodies.read(Request("POST", path, "", [], json.dumps({"model": "toy", **fields}).encode(), "", {}), Limits())


def said(events: list[bytes]) -> tuple[str, list[int], str | None, Any, list[Any]]:
    """Text, ids, finish reason, usage, and logprobs of a stream; it is well formed."""
    assert events[-1] == DONE
    assert events.count(DONE) == 1
    text, ids, finish, usage, marks = "", [], None, None, []
    heads = set()
    for event in events[:-1]:
        body = json.loads(payload(event))
        heads.add((body["id"], body["object"], body["created"], body["model"]))
        for choice in body["choices"]:
            assert finish is None, "something came after the end"
            text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            ids += choice.get("token_ids") or []
            finish = choice["finish_reason"]
            marks.append(choice["logprobs"])
        usage = body.get("usage") or usage
    assert len(heads) == 1
    return text, ids, finish, usage, marks


def move(fields: dict[str, Any], *, chat: bool, deaths: list[int], engine: Engine) -> list[bytes]:
    """The events that a client gets whose instances die after so many events of theirs."""
    parsed = parsed_of(fields, chat=chat)
    assert obstacle(parsed) == ""
    story = Story(parsed)
    raw = events_of(engine, {**fields, "return_token_ids": True}, chat=chat)
    until = 1 + chat + deaths[0] % (len(raw) - 1 - chat)
    sent = raw[:until]
    for event in sent:
        story.read(event)
    for death in [*deaths[1:], 1 << 30]:
        if story.finish:
            return [*sent, story.closing()] if story.counted or not parsed.include_usage else _split(sent, story)
        plan = story.plan(None)
        translator = Translator(story, plan)
        raw = events_of(engine, json.loads(json.dumps(body_of(plan, parsed, engine.length))), chat=False)
        for event in raw[:death]:
            out = translator.said(event)
            if translator.done:
                out = out.removesuffix(DONE)
                return [*sent, *([out] if out else []), DONE]
            if out:
                sent.append(out)
    raise AssertionError("it never ended")


def _split(sent: list[bytes], story: Story) -> list[bytes]:
    return [*sent, story.closing().removesuffix(DONE), DONE]


STOPS = st.lists(
    st.lists(st.sampled_from([it.decode() for it in ALPHABET]), min_size=1, max_size=3).map("".join), max_size=2
)


@settings(max_examples=150, deadline=None)
@given(
    chat=st.booleans(),
    toy=st.sampled_from([Bytes(), Words()]),
    prompt=st.text("abc é", min_size=1, max_size=6).filter(str.strip),
    limit=st.integers(1, 40) | st.none(),
    stop=STOPS,
    include=st.booleans(),
    interval=st.integers(1, 3),
    ids=st.booleans(),
    usage=st.sampled_from([None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]),
    least=st.integers(0, 12),
    eos_in=st.sampled_from([0, 9]),
    deaths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    temperature=st.sampled_from([None, 0]),
)
def test_nothing_is_missing_and_nothing_comes_twice(
    chat: bool,
    toy: Any,
    prompt: str,
    limit: int | None,
    stop: list[str],
    include: bool,
    interval: int,
    ids: bool,
    usage: Any,
    least: int,
    eos_in: int,
    deaths: list[int],
    temperature: int | None,
) -> None:
    engine = Engine(toy=toy, interval=interval, eos_in=eos_in, length=150)
    fields: dict[str, Any] = {"prompt": prompt, "messages": [{"role": "user", "content": prompt}], "max_tokens": limit}
    fields |= {"stop": stop, "include_stop_str_in_output": include, "stream": True, "return_token_ids": ids or None}
    fields |= {"stream_options": usage, "min_tokens": min(least, limit or least), "temperature": temperature}
    fields = {name: it for name, it in fields.items() if it is not None and name != ("prompt" if chat else "messages")}
    expected = said(events_of(engine, {**fields, "return_token_ids": True}, chat=chat))
    text, seen, finish, counted, _ = said(move(fields, chat=chat, deaths=deaths, engine=engine))
    assert (text, finish) == (expected[0], expected[2])
    if ids:
        assert seen == expected[1]
    if usage:
        assert counted["completion_tokens"] == expected[3]["completion_tokens"]
        assert counted["prompt_tokens"] == expected[3]["prompt_tokens"]


def test_logprobs_of_completions_go_on() -> None:
    engine = Engine(toy=Words())
    fields = {"prompt": "hi", "max_tokens": 12, "logprobs": 1, "stream": True}
    expected = said(events_of(engine, fields, chat=False))
    for death in range(12):
        assert said(move(fields, chat=False, deaths=[death], engine=engine))[4][: death + 1] == expected[4][: death + 1]
        moved = said(move(fields, chat=False, deaths=[death], engine=engine))[4]
        assert [it["tokens"] for it in moved] == [it["tokens"] for it in expected[4]]
        offsets = [it["text_offset"][0] for it in moved]
        assert offsets == sorted(set(offsets))


def test_a_prompt_that_would_end_within_a_character_is_cut_back() -> None:
    """To go on from all ids that were sent would bring the whole prompt as text: the reason for all the care."""
    engine = Engine(toy=Bytes())
    fields = {"prompt": "hi", "max_tokens": 30, "stream": True, "return_token_ids": True}
    raw = events_of(engine, fields, chat=False)
    cuts = [n for n, it in enumerate(raw[:-1]) if not json.loads(payload(it))["choices"][0]["text"]]
    assert cuts, "the toy says no character of several bytes"
    story = Story(parsed_of(fields, chat=False))
    story.read(b"".join(raw[: cuts[0] + 1]))
    plan = story.plan(None)
    assert plan.place.ids < len(story.ids)
    assert bytes(plan.prompt).decode() == "hi" + story.text
    naive = events_of(engine, {"prompt": [*b"hi", *story.ids], "max_tokens": 4, "stream": True}, chat=False)
    assert "hi" in said(naive)[0], "the toy lacks the trap"


def test_with_sampling_an_event_of_several_ids_is_gone_on_from() -> None:
    """What was drawn is kept, though its last character may not be complete: the prompt that comes is cut off."""
    fields = {"prompt": "hi", "max_tokens": 60, "stream": True, "temperature": 0.7}
    engine = Engine(toy=Bytes(), interval=3)
    raw = events_of(engine, {**fields, "return_token_ids": True}, chat=False)
    parsed = parsed_of(fields, chat=False)
    uncertain = 0
    for until in range(6, 18):
        story = Story(parsed)
        story.read(b"".join(raw[:until]))
        plan = story.plan(None)
        uncertain += not plan.certain
        before = story.text
        translator = Translator(story, plan)
        for event in events_of(engine, body_of(plan, parsed, None), chat=False):
            translator.said(event)
        assert story.text == said(raw)[0], (until, before)
    assert uncertain


def test_another_opinion_about_what_was_sent_ends_it() -> None:
    fields = {"prompt": "hi", "max_tokens": 30, "stream": True, "stop": ["zzz"], "temperature": 0.9}
    engine = Engine(toy=Words(), noise=0xFFFF)
    parsed = parsed_of(fields, chat=False)
    story = Story(parsed)
    story.read(b"".join(events_of(engine, {**fields, "return_token_ids": True}, chat=False)[:5]))
    plan = story.plan(None)
    assert plan.skip
    translator = Translator(story, plan)
    other = events_of(Engine(toy=Words(), noise=2), body_of(plan, parsed, None), chat=False)
    with pytest.raises(Unmovable, match="differs"):
        for event in other:
            translator.said(event)


TEXT = {"messages": MESSAGES, "stream": True}
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("reason", "chat", "fields"),
    [
        ("choices", True, {"n": 2}),
        ("tools", True, {"tools": [TOOL]}),
        ("", True, {"tools": [TOOL], "tool_choice": "none"}),
        ("structured", True, {"response_format": {"type": "json_object"}}),
        ("", True, {"response_format": {"type": "text"}}),
        ("structured", False, {"structured_outputs": {"regex": "a"}}),
        ("logprobs", True, {"logprobs": True}),
        ("", False, {"logprobs": 0}),
        ("reasoning", True, {"thinking_token_budget": 5}),
        ("prompts", False, {"prompt": ["a", "b"]}),
        ("engine", False, {"suffix": "x"}),
        ("echo", False, {"echo": True, "stop": ["x"]}),
        ("", False, {"echo": True}),
        ("media", True, {"messages": [{"role": "user", "content": [PICTURE]}]}),
        ("", True, {"temperature": 1, "seed": 3, "vllm_xargs": {"a": 1}, "presence_penalty": 1}),
    ],
)  # fmt: skip
def test_what_cannot_be_moved(reason: str, chat: bool, fields: dict[str, Any]) -> None:
    base = TEXT if chat else {"prompt": "hi", "stream": True}
    assert obstacle(parsed_of({**base, **fields}, chat=chat)) == reason


@pytest.mark.parametrize(
    ("reason", "delta", "ids"),
    [
        ("reasoning", {"reasoning": "hm"}, [1]),
        ("reasoning", {}, [1]),
        ("reasoning", {"tool_calls": [{"index": 0}]}, [1]),
        ("ids", {"content": "a"}, None),
    ],
    ids=["thinks", "swallowed", "calls", "no-ids"],
)
def test_what_is_seen_only_when_it_comes(reason: str, delta: dict[str, Any], ids: list[int] | None) -> None:
    story = Story(parsed_of(TEXT, chat=True))
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": ids}
    with pytest.raises(Unmovable, match=reason):
        story.read(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


def test_without_the_prompts_ids_it_cannot_go_on_and_the_conductors_own_will_do() -> None:
    story = Story(parsed_of(TEXT, chat=True))
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None, "token_ids": [7]}
    story.read(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    with pytest.raises(Unmovable, match="ids"):
        story.plan(None)
    assert story.plan([1, 2]).prompt == [1, 2, 7]


def test_a_chat_without_a_limit_needs_the_models_length() -> None:
    story = Story(parsed_of(TEXT, chat=True))
    story.read(b"".join(events_of(Engine(toy=Words()), {**TEXT, "return_token_ids": True}, chat=True)[:4]))
    plan = story.plan(None)
    with pytest.raises(Unmovable, match="length"):
        body_of(plan, story.parsed, None)
    assert body_of(plan, story.parsed, 100)["max_tokens"] == 100 - len(plan.prompt)


@pytest.mark.parametrize(
    "event", [b"data: nonsense\n\n", b"data: []\n\n", b'data: {"error":{"message":"x"}}\n\n', DONE]
)
def test_an_instance_that_goes_on_with_nonsense(event: bytes) -> None:
    story = Story(parsed_of(TEXT, chat=True))
    story.read(b"".join(events_of(Engine(toy=Words()), {**TEXT, "return_token_ids": True}, chat=True)[:4]))
    translator = Translator(story, story.plan(None))
    with pytest.raises(EngineError):
        translator.said(event)


def test_a_plan_shows_no_prompt_in_errors() -> None:
    assert "hi" not in repr(Story(parsed_of(TEXT, chat=True)))
    assert str(Unmovable("ids")) == "the stream cannot be moved: ids"
    assert isinstance(Plan._fields, tuple)


def test_the_longest_begun_stop_string_is_seen() -> None:
    fields = {"prompt": "hi", "stream": True, "stop": ["abab", "ba"], "include_stop_str_in_output": True}
    story = Story(parsed_of(fields, chat=False))
    for text, begun in (("", 0), ("x", 0), ("xa", 1), ("xaba", 3), ("xb", 1), ("xabab", 2), ("abax", 0)):
        story.text = text
        assert story._begun_stop() == begun, text
