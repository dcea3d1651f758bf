"""A log becomes a trace: equal prefixes have equal numbers, and nothing of what was said is in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headwater.errors import ConfigError
from headwater.traces.export import Exporter, Messages, Tokenizer, read_paths
from headwater.traces.fields import BadRecord
from headwater.traces.model import TraceRequest

NOW = 1_763_317_023.25
SECRET = "Geheimnis"


def letters(text: str) -> Sequence[int]:
    return [ord(it) for it in text]


def template(messages: Messages, tools: Messages | None) -> Sequence[int]:
    if messages[0]["role"] == "ghost":
        raise BadRecord("messages", "...", "the model's chat template does not take them")
    said = "".join(f"<{it['role']}>{it.get('content') or ''}" for it in messages)
    return letters(f"{tools or ''}{said}<assistant>")


WORDS = Tokenizer(letters, template)


def line(**fields: Any) -> str:
    return msgspec.json.encode({"timestamp": NOW, "output_length": 3} | fields).decode()


def ids(*numbers: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(numbers)}


def test_equal_prefixes_have_equal_numbers() -> None:
    exporter = Exporter(4)
    rows = [
        ids(1, 2, 3, 4, 5, 6),
        ids(1, 2, 3, 4, 5, 6),
        ids(1, 2, 3, 4, 5),  # the partial block is another
        ids(1, 2, 3, 4, 5, 6, 7, 8),
        ids(9, 2, 3, 4, 5, 6),  # the second block is the same, but not what is before it
        ids(1, 2, 3, 4),
    ]
    taken = [exporter.take(line(**it)) for it in rows]
    assert [it.blocks for it in taken] == [(0, 1), (0, 1), (0, 2), (0, 3), (4, 5), (0,)]
    assert [it.input_tokens for it in taken] == [6, 6, 5, 8, 6, 4]
    assert taken[0] == TraceRequest(NOW, 6, 3, (0, 1))


def test_two_exports_cannot_be_put_side_by_side() -> None:
    record = line(**ids(1, 2, 3), session="s", tenant="t")
    one, two = Exporter(16), Exporter(16)
    assert one.take(record) == one.take(record)
    assert {one.take(record).session, one.take(record).tenant}.isdisjoint(
        {two.take(record).session, two.take(record).tenant}
    )
    assert one._numbers.keys().isdisjoint(two._numbers.keys() | set())  # digests of the same block
    two.take(record)
    assert len(one._numbers) == len(two._numbers) == 1 and one._numbers.keys() != two._numbers.keys()
    assert "_secret" not in repr(one) and "_numbers" not in repr(one)


def test_text_chats_and_token_ids_of_the_same_prompt_are_the_same() -> None:
    exporter = Exporter(4, WORDS)
    chat = [{"role": "user", "content": "hello"}]
    rendered = "<user>hello<assistant>"
    taken = [
        exporter.take(line(messages=chat)),
        exporter.take(line(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])),
        exporter.take(line(prompt=rendered)),
        exporter.take(line(prompt=letters(rendered))),
        exporter.take(line(prompt_token_ids=letters(rendered), messages=[])),
    ]
    assert {it.blocks for it in taken} == {tuple(range(6))} and taken[0].input_tokens == 22
    tools = exporter.take(line(messages=chat, tools=[{"type": "function"}]))
    assert not set(tools.blocks) & set(taken[0].blocks)
    assert Exporter(4).take(line(prompt=[1, 2])).input_tokens == 2


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"usage": {"completion_tokens": 7}, "output_length": 9}, 7),
        ({"output_length": 0}, 0),
        ({"output_length": None, "completion": "abc"}, 3),
        ({"output_length": None, "completion": [5, 6]}, 2),
        ({"output_length": None, "completion": []}, 0),
    ],
)
def test_the_length_of_the_answer(fields: dict[str, Any], tokens: int) -> None:
    assert Exporter(4, WORDS).take(line(**ids(1), **fields)).output_tokens == tokens


@pytest.mark.parametrize(
    ("unit", "said", "moment"),
    [
        (None, 1_763_317_023, 1_763_317_023.0),
        (None, 1_763_317_023_250, NOW),
        (None, "2025-11-16T18:17:03.250Z", NOW),
        (None, "2025-11-16 19:17:03.25+01:00", NOW),
        ("s", 12.5, 12.5),
        ("ms", 12.5, 0.0125),
        ("s", "2025-11-16T18:17:03.250", NOW),
    ],
)
def test_times_of_every_kind(unit: str | None, said: object, moment: float) -> None:
    taken = Exporter(4, time_unit=unit).take(line(**ids(1)).replace(f"{NOW}", msgspec.json.encode(said).decode()))
    assert taken.arrival_s == pytest.approx(moment, abs=1e-6)


def test_hashes_stay_as_they_are_shared() -> None:
    exporter = Exporter(16)
    started = exporter.take(line(input_length=40, hash_ids=[7, 8, 9]))
    full = [exporter.take(line(input_length=40, hash_ids=[7, 8])) for _ in range(2)]
    assert started.blocks == (0, 1, 2) and [it.blocks for it in full] == [(0, 1, 3), (0, 1, 4)]
    # A number and a text are not the same hash.
    assert exporter.take(line(input_length=16, hash_ids=["7"])).blocks == (5,)


def test_fields_elsewhere() -> None:
    paths = read_paths(["messages=request.messages", "completion_tokens=answers.0.tokens", "timestamp=at"])
    record = {"at": NOW, "request": {"messages": [{"role": "user", "content": "a"}]}, "answers": [{"tokens": 4}]}
    taken = Exporter(4, WORDS, paths=paths).take(msgspec.json.encode(record).decode())
    assert (taken.input_tokens, taken.output_tokens) == (18, 4)
    for bad in ("x=y", "prompt", "prompt="):
        with pytest.raises(ConfigError, match=re.escape(f"--field '{bad}': write NAME=PATH")):
            read_paths([bad])


def test_who_asks_is_hidden() -> None:
    exporter = Exporter(4)
    taken = exporter.take(line(**ids(1), session="chat 7", user="ann", priority=2))
    assert re.fullmatch("[0-9a-f]{12}", taken.session) and re.fullmatch("[0-9a-f]{12}", taken.tenant)
    assert taken.priority == 2
    # The same name as a session and as a tenant are two things; `tenant` goes before `user`.
    other = exporter.take(line(**ids(1), session="ann", tenant="acme", user="ann"))
    assert len({taken.session, taken.tenant, other.session, other.tenant}) == 4
    assert exporter.take(line(**ids(1))).session == ""


BAD: list[tuple[dict[str, Any], str]] = [
    ({"timestamp": -1, **ids(1)}, "timestamp = -1: write seconds, milliseconds or an ISO"),
    ({"timestamp": True, **ids(1)}, "timestamp = True"),
    ({"timestamp": 12, **ids(1)}, "timestamp = 12: no time since 1970; say what the numbers are with --time-unit"),
    ({"timestamp": SECRET, **ids(1)}, "timestamp = '...': write an ISO 8601 time"),
    ({"prompt_token_ids": []}, "prompt_token_ids = '...': write a list of at least one token id"),
    ({"prompt_token_ids": [1, -1]}, "prompt_token_ids = '...'"),
    ({"prompt_token_ids": [1, 1 << 32]}, "prompt_token_ids = '...'"),
    ({"prompt_token_ids": [1, True]}, "prompt_token_ids = '...'"),
    ({"prompt_token_ids": [1, SECRET]}, "prompt_token_ids = '...'"),
    ({"prompt_token_ids": SECRET}, "prompt_token_ids = '...'"),
    ({}, "prompt = None: none of prompt_token_ids, hash_ids, messages, prompt is there"),
    ({"prompt": ""}, "prompt = '...': write text"),
    ({"prompt": {"text": SECRET}}, "prompt = '...': write text"),
    ({"messages": SECRET}, "messages = '...': write a list of objects with role and content"),
    ({"messages": []}, "messages = '...'"),
    ({"messages": [{"content": SECRET}]}, "messages = '...'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]},
        "text parts; skip others",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages = '...': a content is text"),
    ({"messages": [{"role": "ghost", "content": SECRET}]}, "the model's chat template does not take them"),
    ({"messages": [{"role": "user", "content": SECRET}], "tools": SECRET}, "tools = '...': write a list"),
    ({"hash_ids": [1]}, "input_length = None: is missing"),
    ({"hash_ids": [1], "input_length": 100}, "1 for 100 tokens, which are 25 blocks of 4; say their size"),
    ({"hash_ids": [1.5], "input_length": 4}, "hash_ids = '...'"),
    ({**ids(1), "output_length": None}, "output = None: the answer's length is missing"),
    ({**ids(1), "output_length": -1}, "output_length = -1"),
    ({**ids(1), "output_length": SECRET}, "output_length = '...'"),
    ({**ids(1), "output_length": None, "completion": [SECRET]}, "completion = '...'"),
    ({**ids(1), "session": [SECRET]}, "session = '...': write text"),
    ({**ids(1), "priority": SECRET}, "priority = '...'"),
]


@pytest.mark.parametrize(("fields", "said"), BAD)
def test_a_bad_record_is_refused_without_its_contents(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRecord, match=re.escape(said)) as refused:
        Exporter(4, WORDS).take(line(**fields))
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__


@pytest.mark.parametrize("text", [f'"{SECRET}"', f'{{"prompt": "{SECRET}', "[1]", "5"])
def test_what_is_no_object_is_refused_without_its_contents(text: str) -> None:
    with pytest.raises(BadRecord) as refused:
        Exporter(4).take(text)
    assert SECRET not in str(refused.value)


def test_text_needs_a_tokenizer() -> None:
    for fields in ({"prompt": SECRET}, {"messages": [{"role": "user", "content": SECRET}]}):
        with pytest.raises(BadRecord, match="name the model's tokenizer with --tokenizer"):
            Exporter(4).take(line(**fields))
    with pytest.raises(ConfigError, match="--block-tokens 0"):
        Exporter(0)
