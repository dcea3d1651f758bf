"""Events out of pieces that are cut anywhere, and token ids out of events."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.conductor import tokenids
from headwater.conductor.sse import Events, EventTooLong, each, payload
from tests.conductor.engine import Engine, events_of
from tests.conductor.toy import Bytes

STREAM = b'data: {"a":1}\n\n: still here\n\ndata: one\r\ndata:  two\r\n\r\nevent: x\ndata: y\n\ndata: [DONE]\n\n'
WHOLE = [
    b'data: {"a":1}\n\n',
    b": still here\n\n",
    b"data: one\r\ndata:  two\r\n\r\n",
    b"event: x\ndata: y\n\n",
    b"data: [DONE]\n\n",
]


def fed(pieces: list[bytes], limit_bytes: int = 1 << 20) -> tuple[list[bytes], bytes]:
    events = Events(limit_bytes)
    out = [events.feed(it) for it in pieces]
    return out, events.rest()


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_events_are_whole_however_they_are_cut(size: int) -> None:
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    out, rest = fed(pieces)
    assert b"".join(out) == STREAM
    assert rest == b""
    for whole in out:
        assert whole == b"" or all(it in WHOLE for it in each(whole))


@given(st.lists(st.integers(0, len(STREAM)), max_size=6), st.integers(0, len(STREAM)))
def test_what_is_held_is_the_event_that_is_not_complete(cuts: list[int], until: int) -> None:
    marks = sorted({0, until, *[it for it in cuts if it < until]})
    out, rest = fed([STREAM[a:b] for a, b in pairwise(marks)])
    assert b"".join(out) + rest == STREAM[:until]
    ends = [len(b"".join(WHOLE[: n + 1])) for n in range(len(WHOLE))]
    assert len(b"".join(out)) == max([it for it in ends if it <= until], default=0)


def test_a_piece_that_ends_an_event_is_given_back_as_it_is() -> None:
    piece = bytes(STREAM)
    assert Events(10).feed(piece) is piece


def test_an_event_beyond_the_limit_is_an_error() -> None:
    events = Events(100)
    assert events.feed(b"x" * 100) == b""
    with pytest.raises(EventTooLong):
        events.feed(b"x")
    assert Events(100).feed(b"y" * 99 + b"\n\n") == b"y" * 99 + b"\n\n"
    with pytest.raises(EventTooLong):
        Events(100).feed(b"\n\n" + b"y" * 101)


def test_a_huge_event_takes_no_more_time_a_byte_than_a_small_one() -> None:
    """Of 8 MB in pieces of 1 kB: looked at once and joined once, which takes 10 ms; squared it would be minutes."""
    events, piece = Events(1 << 24), b"x" * 1024
    begun = time.process_time()
    for _ in range(8 << 10):
        events.feed(piece)
    assert len(events.feed(b"\n\n")) == (8 << 20) + 2
    assert time.process_time() - begun < 2.0


def test_payloads() -> None:
    assert [payload(it) for it in WHOLE] == [b'{"a":1}', b"", b"one\n two", b"y", b"[DONE]"]
    assert payload(b"data:x\n\n") == b"x"


# ---- token ids

ALIKE = [',"token_ids":[1,2]', '"prompt_token_ids":[', "token_ids", '{"token_ids":[3]}']
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(ALIKE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
KEYS = st.sampled_from(["token_ids", "prompt_token_ids", "text", 'a"token_ids', "x,", "delta"])
IDS = st.lists(st.integers(0, 200_000), max_size=4)


@st.composite
def chunks(draw: st.DrawFn) -> dict[str, Any]:
    """Objects with ids at some depth, and with words that look like them everywhere."""
    choice: dict[str, Any] = {"index": 0, "delta": draw(JSON), draw(KEYS): draw(st.text())}
    if draw(st.booleans()):
        choice["token_ids"] = draw(IDS)
    event = {"id": draw(st.text()), "choices": [choice], "about": draw(JSON)}
    if draw(st.booleans()):
        event["prompt_token_ids"] = draw(IDS)
    return event


def nulled(value: Any) -> Any:
    if isinstance(value, list):
        return [nulled(it) for it in value]
    if not isinstance(value, dict):
        return value
    ours = ("token_ids", "prompt_token_ids")
    return {k: None if k in ours and isinstance(v, list) else nulled(v) for k, v in value.items()}


@settings(max_examples=150, deadline=None)
@given(chunks(), st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans())
def test_ids_are_taken_out_and_nothing_else(
    chunk: dict[str, Any], separators: tuple[str, str], ascii_only: bool
) -> None:
    def event(body: Any) -> bytes:
        return (
            b"data: "
            + json.dumps(body, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "replace")
            + b"\n\n"
        )

    raw = event(chunk)
    assert tokenids.without(raw) == event(nulled(json.loads(payload(raw))))
    assert tokenids.without(raw * 2) == tokenids.without(raw) * 2
    ids = chunk["choices"][0].get("token_ids") or []
    if isinstance(ids, list):
        assert tokenids.count(raw * 3) == 3 * len(ids)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_what_is_left_is_what_the_engine_says_to_those_who_do_not_ask(chat: bool) -> None:
    fields = {"prompt": 'a"b', "messages": [{"role": "user", "content": 'a"b'}], "max_tokens": 9, "stream": True}
    asked = events_of(Engine(toy=Bytes()), {**fields, "return_token_ids": True}, chat=chat)
    assert tokenids.count(b"".join(asked)) == 9
    assert [tokenids.without(it) for it in asked] == events_of(Engine(toy=Bytes()), fields, chat=chat)
