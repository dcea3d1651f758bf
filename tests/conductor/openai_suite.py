"""What the official `openai` client does with us, over any engines: each function is one fact, told by its name.

`test_openai` runs it over toy engines, `tests/e2e/test_up` over real ones. `rig.exact` tells that answers of equal
requests are equal (greedy), `rig.calls` that the engines call tools when they are given some.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import openai
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "gauge",
        "description": "The level of the river.",
        "parameters": {"type": "object", "properties": {"station": {"type": "string"}}},
    },
}


@dataclass
class Rig:
    """A client of a running Conductor."""

    client: openai.OpenAI
    model: str
    calls: bool
    running: Callable[[], int]
    """How many requests the engines have in progress."""
    until: Callable[[Callable[[], object]], None]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def models_are_listed(rig: Rig) -> None:
    assert [it.id for it in rig.client.models.list()] == [rig.model]
    assert rig.client.models.retrieve(rig.model).id == rig.model
    with pytest.raises(openai.NotFoundError):
        rig.client.models.retrieve("another")


def a_chat_is_answered_with_usage(rig: Rig) -> None:
    raw = rig.client.chat.completions.with_raw_response.create(
        model=rig.model, messages=ask("Where does the river rise?"), max_tokens=6, temperature=0
    )
    answer = raw.parse()
    assert raw.headers["x-headwater-instance"] and raw.headers["x-request-id"].startswith("hw-")
    assert raw.headers["x-headwater-reuse"].startswith("device=")
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens <= 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def a_streamed_chat_says_the_same(rig: Rig) -> None:
    question = {"model": rig.model, "messages": ask("Name one gauge of the river."), "max_tokens": 8, "temperature": 0}
    whole = rig.client.chat.completions.create(**question)
    stream = rig.client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert [it.choices[0].finish_reason for it in chunks if it.choices][-1] == whole.choices[0].finish_reason
    assert len({it.id for it in chunks}) == 1
    assert not any(getattr(it, "prompt_token_ids", None) for it in chunks), "nobody asked for ids"


def completions_take_text_and_ids(rig: Rig) -> None:
    question = {"model": rig.model, "max_tokens": 5, "temperature": 0}
    text = rig.client.completions.create(prompt="The river rises", **question)
    assert text.choices[0].text and text.usage.completion_tokens <= 5
    ids = rig.client.completions.create(prompt=[510, 1010, 2020, 3030], **question)
    assert ids.usage.prompt_tokens == 4
    streamed = rig.client.completions.create(prompt=[510, 1010, 2020, 3030], stream=True, **question)
    assert "".join(it.choices[0].text for it in streamed) == ids.choices[0].text


def several_prompts_are_one_request(rig: Rig) -> None:
    answer = rig.client.completions.create(model=rig.model, prompt=["One", "Two"], max_tokens=3, temperature=0)
    assert [it.index for it in answer.choices] == [0, 1]


def n_choices_come_back(rig: Rig) -> None:
    question = {
        "model": rig.model,
        "messages": ask("Say a word."),
        "max_tokens": 3,
        "n": 3,
        "temperature": 1.0,
        "seed": 5,
    }
    assert sorted(it.index for it in rig.client.chat.completions.create(**question).choices) == [0, 1, 2]
    chunks = rig.client.chat.completions.create(**question, stream=True)
    assert {choice.index for it in chunks for choice in it.choices} == {0, 1, 2}


def logprobs_come_back(rig: Rig) -> None:
    question = {"model": rig.model, "messages": ask("Count to three."), "max_tokens": 3, "temperature": 0}
    answer = rig.client.chat.completions.create(**question, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens and all(it.logprob <= 0 for it in content)
    streamed = rig.client.chat.completions.create(**question, logprobs=True, top_logprobs=2, stream=True)
    told = [it for chunk in streamed for it in chunk.choices if it.logprobs]
    assert sum(len(it.logprobs.content) for it in told) == len(content)


def stop_ends_an_answer(rig: Rig) -> None:
    question = {"model": rig.model, "prompt": "The river rises in the", "temperature": 0}
    whole = rig.client.completions.create(**question, max_tokens=8).choices[0].text
    mark = whole.split()[3]
    cut = rig.client.completions.create(**question, max_tokens=8, stop=[mark]).choices[0]
    assert cut.finish_reason == "stop" and mark not in cut.text and whole.startswith(cut.text)


def tools_are_passed_on(rig: Rig) -> None:
    question = {
        "model": rig.model,
        "messages": ask("What does gauge 5 read?"),
        "tools": [TOOL],
        "max_tokens": 4,
        "temperature": 0,
    }
    if rig.calls:
        answer = rig.client.chat.completions.create(**question)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "gauge"
        follow = [
            *question["messages"],
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "12 cm"},
        ]
        assert rig.client.chat.completions.create(**{**question, "messages": follow}).choices
    none = rig.client.chat.completions.create(**{**question, "tool_choice": "none"})
    assert none.choices[0].message.content


def salts_and_priorities_are_taken(rig: Rig) -> None:
    question = {"model": rig.model, "prompt": [7 + it % 90 for it in range(300)], "max_tokens": 2, "temperature": 0}
    plain = rig.client.completions.create(**question)
    salted = rig.client.completions.create(**question, extra_body={"cache_salt": "pepper"})
    again = rig.client.completions.create(**question, extra_body={"cache_salt": "pepper"})
    assert plain.choices[0].text == salted.choices[0].text == again.choices[0].text
    assert not _cached(salted), "another salt shares nothing"
    assert _cached(again) >= 128, "the same salt does"
    assert rig.client.completions.create(**question, extra_body={"priority": 3}).choices


def _cached(answer: object) -> int:
    details = getattr(getattr(answer, "usage", None), "prompt_tokens_details", None)
    return (details.cached_tokens or 0) if details else 0


def wrong_requests_are_refused(rig: Rig) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        rig.client.chat.completions.create(model="another", messages=ask("Hello"))
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    for wrong in (
        {"messages": []},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": ask("x"), "max_tokens": -1},
        {"messages": ask("x"), "n": 0},
        {"messages": ask("x"), "extra_body": {"stream": "yes"}},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            rig.client.chat.completions.create(model=rig.model, **wrong)
        assert isinstance(refused.value.body, dict) and refused.value.body["message"]
    assert rig.client.models.list().data, "the next request on the same connection works"


def leaving_aborts_the_request(rig: Rig) -> None:
    stream = rig.client.chat.completions.create(
        model=rig.model, messages=ask("Tell me all about it."), max_tokens=1000, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    rig.until(lambda: rig.running() == 0)


def many_at_once_are_all_answered(rig: Rig) -> None:
    texts: list[str] = []

    def one(number: int) -> None:
        answer = rig.client.chat.completions.create(
            model=rig.model, messages=ask(f"Question {number % 4}"), max_tokens=3, temperature=0
        )
        texts.append(answer.choices[0].message.content or "")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for it in threads:
        it.start()
    for it in threads:
        it.join(60)
    assert len(texts) == 8 and all(texts)


SUITE: dict[str, Callable[[Rig], None]] = {
    it.__name__: it
    for it in (
        models_are_listed,
        a_chat_is_answered_with_usage,
        a_streamed_chat_says_the_same,
        completions_take_text_and_ids,
        several_prompts_are_one_request,
        n_choices_come_back,
        logprobs_come_back,
        stop_ends_an_answer,
        tools_are_passed_on,
        salts_and_priorities_are_taken,
        wrong_requests_are_refused,
        leaving_aborts_the_request,
        many_at_once_are_all_answered,
    )
}
