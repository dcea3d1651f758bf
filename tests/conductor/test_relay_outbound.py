"""What instances are sent, and what clients are told when nothing can be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.conductor import bodies
from headwater.conductor.answers import error_event, refuse, refuse_bad
from headwater.conductor.http.answers import error_body
from headwater.conductor.http.exchange import Headers, Origin, Request
from headwater.conductor.job import BadRequest, Job, Kind, Refusal
from headwater.conductor.outbound import body_to, endpoint, lines_to, prefill_body, replay_body
from headwater.fleetfile.model import InstanceSpec, Limits, TenantSpec
from tests.conductor.relays import PATHS, Client, headers_in

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
AT = Origin("127.0.0.1", 1)
SPEC = InstanceSpec("i0", "toy", "toy")
PRIORITIES = InstanceSpec("i0", "toy", "toy", flags=("--scheduling-policy=priority",))


def job_of(
    fields: dict[str, Any], *, headers: Headers | None = None, salt: str = "", tenant: int = 0, raw: bytes = b""
) -> Job:
    kind = Kind.CHAT if "messages" in fields else Kind.COMPLETION
    body = raw or json.dumps(fields).encode()
    request = Request("POST", PATHS[kind], "", headers or [], body, "", dict(headers or []))
    parsed = bodies.read(request, Limits())
    return Job("r1", Client(request), TenantSpec("t", priority=tenant), parsed, 0.0, salt=salt)


def sent(
    fields: dict[str, Any], spec: InstanceSpec = SPEC, *, asks_ids: bool = False, **options: Any
) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(body_to(endpoint(spec, AT), job_of(fields, **options), asks_ids=asks_ids))
    return body


def test_a_body_in_which_nothing_changes_goes_as_it_came() -> None:
    raw = b' { "model" : "toy", "messages":[{"role":"user","content":"\\u00e9"}], "temperature": 1e0 } \n'
    assert body_to(endpoint(SPEC, AT), job_of(CHAT, raw=raw), asks_ids=False) == raw


def test_what_is_only_added_is_appended() -> None:
    raw = b'{"model":"toy","messages":[{"role":"user","content":"\\u00e9"}],"stream":true } \n'
    body = body_to(endpoint(SPEC, AT), job_of(CHAT, raw=raw, salt="s"), asks_ids=True)
    assert body.startswith(raw.rstrip()[:-1])
    added = {"cache_salt": "s", "return_token_ids": True, "stream_options": {"include_usage": True}}
    assert json.loads(body) == {**json.loads(raw), **added}


USUAL = [
    b'{"prompt":"a"}',
    b'{"prompt":[1,2],"max_tokens":3,"temperature":0}',
    b'{"prompt":"a","stream":true}',
    b'{"prompt":[1],"stream":true,"stream_options":{"include_usage":false}}',
    b'{"prompt": [1], "stream_options": {"include_usage": false}, "stream": true}',
    b'{"prompt":[1],"stream_options":{"include_usage": false },"stream":true}',
    b'{"prompt":"a","stream":true,"stream_options":{"include_usage":true}}',
    b'{"prompt":"a","stream":true,"stream_options":{}}',
    b'{"prompt":"a","stream":true,"stream_options":null}',
    b'{"prompt":"a","stream":true,"stream_options":{"include_usage":false},"stream_options":{}}',
    b'{"prompt":"a","stream":true,"stream_options":{"include_usage":false},"stream_options":null}',
    b'{"prompt":"a","stream":true,"stream_options":{"include_usage":true},"stream_options":{"include_usage":false}}',
    b'{"prompt":"a","stream":true,"stream_options":{"include_usage":false,"include_usage":false}}',
    b'{"prompt":"stream_options","stream":true}',
    b'{"prompt":"\\"stream_options\\":{\\"include_usage\\":false}","stream":true}',
]


@pytest.mark.parametrize("raw", USUAL)
@pytest.mark.parametrize("salt", ["", "s"])
@pytest.mark.parametrize("asks_ids", [False, True])
def test_usual_bodies_become_what_all_others_do(raw: bytes, salt: str, asks_ids: bool) -> None:
    for tenant, spec in ((0, SPEC), (2, PRIORITIES)):
        job = job_of({}, raw=raw, salt=salt, tenant=tenant)
        assert job.parsed.usual
        usual = body_to(endpoint(spec, AT), job, asks_ids=asks_ids)
        job.parsed = bodies.read_any(Kind.COMPLETION, job.exchange.request, Limits())
        with_care = body_to(endpoint(spec, AT), job, asks_ids=asks_ids)
        assert job.exchange.request.body == raw
        assert json.loads(usual) == json.loads(with_care)


@pytest.mark.parametrize(
    "forged",
    [
        {"kv_hints": {"actions": []}},
        {"request_id": "x"},
        {"cache_salt": "other"},
        {"priority": -5},
        {"kv_transfer_params": None},
        {"ec_transfer_params": None},
        {"vllm_xargs": {"kv_other": "x", "headwater.x": 1, "ec_x": 1, "mine": 2}},
    ],
    ids=lambda it: next(iter(it)),
)
def test_what_is_between_engines_is_taken_out(forged: dict[str, Any]) -> None:
    fields = {**CHAT, "temperature": 0.5, "future_field": {"a": [1]}, **forged}
    out = sent(fields)
    assert out.pop("vllm_xargs", {"mine": 2}) == {"mine": 2}
    assert out == {**CHAT, "temperature": 0.5, "future_field": {"a": [1]}}


def test_a_key_that_comes_twice_or_in_disguise_is_taken_out_too() -> None:
    raw = b'{"messages":[{"role":"user","content":"x"}],"kv\\u005fhints":{"a":1},"cache_salt":"a","cache_salt":"b"}'
    body = body_to(endpoint(SPEC, AT), job_of(CHAT, raw=raw, salt="ours"), asks_ids=False)
    assert b"hints" not in body
    assert body.count(b"cache_salt") == 1
    assert json.loads(body)["cache_salt"] == "ours"


def test_the_salt_is_ours() -> None:
    assert sent({**CHAT, "cache_salt": "theirs"}, salt="ours")["cache_salt"] == "ours"
    assert "cache_salt" not in sent({**CHAT, "cache_salt": "theirs"})


@pytest.mark.parametrize(
    ("own", "tenant", "there"),
    [(0, 0, None), (3, 0, 3), (0, 5, -5), (2, 5, -3), (5, 5, None), (-9, 0, None), (-9, 5, -5)],
)
def test_priorities_go_only_to_engines_that_have_any(own: int, tenant: int, there: int | None) -> None:
    assert sent({**CHAT, "priority": own}, PRIORITIES, tenant=tenant).get("priority") == there
    assert "priority" not in sent({**CHAT, "priority": own}, tenant=tenant)


def test_stream_options_are_kept() -> None:
    fields = {**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert sent(fields)["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    fields = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    assert sent(fields, asks_ids=True) == fields


def test_the_clients_headers_stay_here() -> None:
    theirs: Headers = [
        (b"authorization", b"Bearer canary"), (b"cookie", b"canary"), (b"x-headwater-tenant", b"canary"),
        (b"x-data-parallel-rank", b"1"), (b"forwarded", b"for=canary"), (b"x-forwarded-for", b"canary"),
        (b"x-request-id", b"canary"), (b"connection", b"canary"), (b"accept-encoding", b"br"), (b"host", b"canary"),
        (b"traceparent", b"00-1-2-3"), (b"x-session-id", b"s"),
    ]  # fmt: skip
    job = job_of(CHAT, headers=theirs)
    assert sorted(headers_in(lines_to(endpoint(SPEC, AT), job))) == [
        (b"content-type", b"application/json"),
        (b"traceparent", b"00-1-2-3"),
        (b"x-request-id", b"r1"),
        (b"x-session-id", b"s"),
    ]


@pytest.mark.parametrize(
    "spec",
    [
        InstanceSpec("i", "m", "m", environment={"VLLM_API_KEY": "own"}),
        InstanceSpec("i", "m", "m", flags=("--api-key", "own")),
        InstanceSpec("i", "m", "m", flags=("--x", "--api-key=own")),
        InstanceSpec("i", "m", "m", url="http://10.0.0.5:80", api_key="own"),
    ],
    ids=["environment", "flag", "flag-with-value", "file"],
)
def test_an_instance_gets_its_own_key(spec: InstanceSpec) -> None:
    assert (b"authorization", b"Bearer own") in headers_in(lines_to(endpoint(spec, AT), job_of(CHAT)))


def test_a_flag_without_a_value_is_none() -> None:
    assert endpoint(InstanceSpec("i", "m", "m", flags=("--api-key",)), AT).lines == endpoint(SPEC, AT).lines


def test_the_first_leg_of_a_completion() -> None:
    fields = {
        "model": "toy",
        "prompt": "x",
        "max_tokens": 9,
        "stream": True,
        "echo": True,
        "logprobs": 1,
        "kv_hints": {},
    }
    out = json.loads(prefill_body(endpoint(SPEC, AT), job_of(fields, salt="s")))
    assert out == {"model": "toy", "prompt": "x", "max_tokens": 1, "stream": False, "cache_salt": "s"}


def test_a_completion_that_goes_on_has_our_salt_and_no_forged_arguments() -> None:
    fields = {"prompt": [1], "vllm_xargs": {"kv_x": 1, "a": 2}}
    out = json.loads(replay_body(endpoint(PRIORITIES, AT), job_of(CHAT, salt="s", tenant=1), fields))
    assert out == {"prompt": [1], "vllm_xargs": {"a": 2}, "cache_salt": "s", "priority": -1}


# ---- answers of our own


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (502, "server_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_errors_have_openais_types(status: int, kind: str) -> None:
    error = {"message": "m", "type": kind, "param": "p", "code": "c"}
    assert json.loads(error_body(status, "m", "c", "p")) == {"error": error}


@pytest.mark.parametrize(("after_s", "header"), [(None, None), (0.0, b"1"), (0.2, b"1"), (1.2, b"2"), (7.0, b"7")])
def test_when_to_come_back(after_s: float | None, header: bytes | None) -> None:
    client = _client()
    refuse(client, Refusal(429, "c", "m", after_s), [(b"x-request-id", b"r")])
    assert client.status == 429
    assert dict(client.headers).get(b"retry-after") == header
    assert dict(client.headers)[b"x-request-id"] == b"r"
    assert client.closed


def test_what_cannot_be_used() -> None:
    client = _client()
    refuse_bad(client, BadRequest("expected a number", "n", 422, "code"))
    assert client.status == 422
    error = json.loads(client.body)["error"]
    assert error == {"message": "expected a number", "type": "invalid_request_error", "param": "n", "code": "code"}


def test_an_error_within_a_stream_is_an_event_and_the_end() -> None:
    event, done = error_event(502, "m", "c").split(b"\n\n")[:2]
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "c"
    assert done == b"data: [DONE]"


def _client() -> Client:
    return Client(Request("POST", "/", "", [], b"", "", {}))
