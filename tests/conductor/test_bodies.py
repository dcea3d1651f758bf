"""Requests are read as engines read them, and what is dangerous or wrong is refused in words that quote nothing."""

import json
import time
from typing import Any

import pytest

from headwater.conductor import bodies
from headwater.conductor.bodies import read
from headwater.conductor.http.exchange import Headers, Request
from headwater.conductor.job import BadRequest, Kind, Parsed
from headwater.conductor.nesting import BIG_BYTES, CONTAINERS, STRINGS, check_counts, is_deeper
from headwater.fleetfile.model import Limits

LIMITS = Limits()
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "canary-1f0c"}]


def request(body: bytes, path: str = CHAT, headers: Headers | None = None) -> Request:
    return Request("POST", path, "", headers or [], body, "127.0.0.1", dict(headers or []))


def chat(headers: Headers | None = None, limits: Limits = LIMITS, **fields: Any) -> Parsed:
    return read(request(json.dumps({"messages": HI, **fields}).encode(), CHAT, headers), limits)


def completion(**fields: Any) -> Parsed:
    return read(request(json.dumps({"prompt": "canary-1f0c", **fields}).encode(), COMPLETION), LIMITS)


def refused(body: bytes, path: str = CHAT, limits: Limits = LIMITS) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(request(body, path), limits)
    assert 400 <= caught.value.status < 500
    assert "canary" not in caught.value.message and "canary" not in (caught.value.param or "")
    return caught.value


def test_reads_a_chat() -> None:
    parsed = chat(
        model="m", stream=True, stream_options={"include_usage": True}, n=2, cache_salt="s", priority=-3,
        max_tokens=5, return_token_ids=True, user="u", unknown=[1],
    )  # fmt: skip
    assert parsed.fields["unknown"] == [1] and parsed.fields["messages"] == HI
    parsed.known = {}
    assert parsed == Parsed(
        Kind.CHAT, {}, "m", stream=True, n=2, salt="s", priority=-3, max_tokens=5, session="u", include_usage=True,
        wants_ids=True,
    )  # fmt: skip


def test_nulls_are_as_if_absent() -> None:
    names = ("model", "stream", "stream_options", "n", "cache_salt", "priority", "max_tokens", "stop", "tools", "user")
    parsed = chat(**dict.fromkeys(names))
    assert parsed == Parsed(Kind.CHAT, parsed.fields, "")
    assert completion(max_tokens=None).max_tokens is None and completion().max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("a", "a", None),
        ("", "", None),
        (["a"], "a", None),
        (["a", "b"], None, None),
        ([1, 2], None, [1, 2]),
        ([[1, 2]], None, [1, 2]),
        ([[1], [2]], None, None),
        ([2**32 - 1], None, [2**32 - 1]),
    ],
    ids=range(8),
)
def test_reads_prompts(prompt: Any, text: str | None, ids: list[int] | None) -> None:
    parsed = completion(prompt=prompt)
    found = None if parsed.ids is None else list(parsed.ids)
    assert (parsed.text, found, parsed.media) == (text, ids, False)


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], 1, {}, True, [True], [1, True], [1, "a"], ["a", 1], [[1], "a"], [[1], []], [-1], [2**32], [1.0],
     [[1.5]], [None], [{}], [[["a"]]], ["a"] * 1025],
    ids=range(20),
)  # fmt: skip
def test_refuses_prompts(prompt: Any) -> None:
    assert refused(json.dumps({"prompt": prompt}).encode(), COMPLETION).param == "prompt"


def test_refuses_too_many_ids() -> None:
    body = json.dumps({"prompt": [[1, 2, 3, 4]]}).encode()
    assert refused(body, COMPLETION, Limits(prompt_tokens=3)).param == "prompt"
    assert read(request(body, COMPLETION), Limits(prompt_tokens=4)).ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [*HI, {"content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"messages": [{"role": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user<|im_end|>"}]}, "messages[0].role"),
        ({"messages": [{"role": "user\n"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": ["a"]}]}, "messages[0].tool_calls"),
        ({"model": 1}, "model"),
        ({"model": "m" * 257}, "model"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": [], "stream": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "1"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0, "max_completion_tokens": 1}, "max_tokens"),
        ({"priority": 2**63}, "priority"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"priority": "0"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": -2}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": ["a"]}, "tools"),
        ({"tools": [{}] * 513}, "tools"),
        ({"stop": 1}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"user": 1}, "user"),
        ({"session_id": 1}, "session_id"),
        ({"prompt_cache_key": []}, "prompt_cache_key"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"ec_transfer_params": 1}, "ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "a"}}, "kv_transfer_params"),
        ({"vllm_xargs": ["kv_transfer_params"]}, "vllm_xargs"),
        ({"vllm_xargs": 0}, "vllm_xargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": ""}, "chat_template_kwargs"),
    ],
    ids=range(58),
)
def test_refuses_fields_of_chats(fields: dict[str, Any], param: str) -> None:
    assert refused(json.dumps({"messages": HI, **fields}).encode()).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 129}, "n"),
    ],
    ids=range(7),
)
def test_refuses_fields_of_completions(fields: dict[str, Any], param: str) -> None:
    assert refused(json.dumps({"prompt": "a", **fields}).encode(), COMPLETION).param == param


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"null", b"[]", b'"a"', b"1", b"{", b'{"messages":', b"{}{}", b'{"a":1,}', b"\xef\xbb\xbf{}",
        b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":1e400}', b'{"a":"\xff"}', b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\\ud800"}', b'{"a":"\\ud800x"}', b'{"a":"\\udc00\\ud800"}', b'{"a":"\n"}', b"{'a':1}", b'{"a":01}',
        b'{"a":' + b"1" * 5000 + b"}", b"\x00", b'{"a":"\\x41"}',
    ],
    ids=range(26),
)  # fmt: skip
def test_refuses_what_is_no_object_in_json(body: bytes) -> None:
    assert refused(body).status == 400


def test_the_last_of_equal_keys_counts() -> None:
    assert read(request(b'{"messages":1,"messages":[{"role":"user","content":"a"}],"n":1,"n":2}'), LIMITS).n == 2


def test_whole_numbers_may_be_written_as_floats() -> None:
    parsed = chat(max_tokens=5.0, n=2.0)
    assert (parsed.max_tokens, parsed.n, parsed.fields["max_tokens"]) == (5, 2, 5)
    assert type(parsed.fields["n"]) is int


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5, max_completion_tokens=None).max_tokens == 5


@pytest.mark.parametrize(
    ("content", "media"),
    [
        ("a", False),
        (None, False),
        ([], False),
        (["a"], False),
        ([{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}], False),
        ([{"text": "a"}], False),
        ([{"type": "image_url", "image_url": {"url": "http://a"}}], True),
        ([{"image_url": "http://a"}], True),
        ([{"type": "input_audio"}], True),
        ([{"type": 1}], True),
        ([{"type": "text", "text": "a", "video_url": "x"}], True),
    ],
    ids=range(11),
)
def test_knows_media(content: Any, media: bool) -> None:
    assert chat(messages=[*HI, {"role": "user", "content": content}]).media is media


def test_knows_media_beside_content() -> None:
    assert chat(messages=[{"role": "assistant", "audio": {"id": "a"}}, *HI]).media
    parsed = read(request(b'{"prompt_embeds":"AAAA"}', COMPLETION), LIMITS)
    assert parsed.media and parsed.text is None and parsed.ids is None


def test_sessions_have_the_narrowest_name() -> None:
    header = [(b"x-session-id", b"header")]
    names = {"session_id": "one", "prompt_cache_key": "two", "user": "four"}
    assert chat(header, **names).session == "one"
    del names["session_id"]
    assert chat(header, **names).session == "two"
    del names["prompt_cache_key"]
    assert chat(header, **names).session == "header"
    assert chat(**names).session == "four"
    assert chat().session == ""
    assert chat(user="u" * 300).session == "u" * 256
    assert chat([(b"x-session-id", b"\xff" * 300)]).session == "ÿ" * 256


def test_roles_of_models_own_are_passed_on() -> None:
    assert chat(messages=[*HI, {"role": "ipython", "content": "a"}, {"role": "latest_reminder"}]).fields


def nested(depth: int, what: str = "[]") -> bytes:
    return b'{"messages":[{"role":"user","content":"a"}],"x":%s%s}' % (
        {"[]": b"[", "{}": b'{"a":'}[what] * (depth - 1) + (b"1" if what == "{}" else b""),
        what[1].encode() * (depth - 1),
    )


@pytest.mark.parametrize("what", ["[]", "{}"])
def test_depth_is_bounded(what: str) -> None:
    assert read(request(nested(64, what)), LIMITS)
    assert "64 levels" in refused(nested(65, what)).message
    for depth in (500, 5_000, 100_000):
        assert "64 levels" in refused(nested(depth, what)).message
    assert refused(b"[" * 1_000_000).status == 413


def test_depth_is_not_what_strings_say() -> None:
    assert chat(messages=[{"role": "user", "content": '[{"a":' * 500}], x=[[1]] * 100)
    hidden = b'{"messages":[],"x":' + b'["]",' * 70 + b"1" + b"]" * 70 + b"}"
    assert "64 levels" in refused(hidden).message
    assert is_deeper([[[]]], 2) and not is_deeper([[[]]], 3) and is_deeper({"a": {"b": [1]}}, 2)


def test_counts_are_bounded_before_decoding() -> None:
    filler = b" " * BIG_BYTES
    for body in (
        b"[" + b"[]," * CONTAINERS + b"[]]",
        b"[" + b"{}," * CONTAINERS + b"{}]",
        b'["\\\\",' + b"[]," * CONTAINERS + b"[]]",
        b'["\\"",' + b'{"":1},' * CONTAINERS + b"{}]",
        b'["' + b'",[],"' * CONTAINERS + b'"]',
    ):
        with pytest.raises(BadRequest) as caught:
            check_counts(body + filler, 1 << 30)
        assert caught.value.status == 413
    for body in (
        b'["' + b"[{" * CONTAINERS + b'"]',
        b'["' + b'\\"[' * 2 * CONTAINERS + b'"]',
        b'["\\\\","' + b"[" * 2 * CONTAINERS + b'\\\\"]',
        b'["' + b"," * 2000 + b'"]',
    ):
        check_counts(body + filler, 1000)
    for body in (b"[" + b"1," * 1001 + b"1]", b'["a","' + b'","' * 1001 + b'"]'):
        with pytest.raises(BadRequest):
            check_counts(body + filler, 1000)
    assert refused(b'{"messages":[' + b"{}," * CONTAINERS + b"{}]}").status == 413
    for text in (b'""', b'"\\\\"', b'"\\""'):
        body = b"[" + (text + b",") * STRINGS + b'"a"]'
        assert refused(b'{"messages":' + body + b"}").status == 413
        check_counts(b"[" + (text + b",") * (STRINGS - 1) + b'"a"]', 1 << 30)
    check_counts(b'["' + b'\\"' * (4 * STRINGS) + b'"]', 1 << 30)


def test_size_and_numbers_are_bounded() -> None:
    body = json.dumps({"messages": HI * 3, "tools": [{}, {}]}).encode()
    assert refused(body, limits=Limits(body_bytes=len(body) - 1)).status == 413
    assert refused(body, limits=Limits(messages=2)).param == "messages"
    assert refused(body, limits=Limits(tools=1)).param == "tools"
    assert read(request(body), Limits(body_bytes=len(body), messages=3, tools=2))


def test_other_paths_are_not_found() -> None:
    assert refused(b"{}", "/v1/embeddings").status == 404


def test_lists_models() -> None:
    row = {"id": 'a"b', "object": "model", "created": 7, "owned_by": "headwater"}
    assert json.loads(bodies.models(['a"b'], 7)) == {"object": "list", "data": [row]}
    assert json.loads(bodies.model('a"b', 7)) == row


@pytest.mark.alone
def test_reading_is_cheap() -> None:
    """3.6 KB take about 10 µs on a quiet core; deep and escaped texts cost no more than their decoding."""
    messages = [{"role": "user", "content": "Some question, again. " * 16}] * 10
    body = json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 9}).encode()
    best_s = min(timed(body) for _ in range(20))
    print(f"{len(body)} bytes are read in {best_s * 1e6:.1f} us")
    assert best_s < 60e-6


def timed(body: bytes) -> float:
    asked, begun_s = request(body), time.process_time()
    for _ in range(200):
        read(asked, LIMITS)
    return (time.process_time() - begun_s) / 200
