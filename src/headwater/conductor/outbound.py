"""What an instance is sent for a client's request: a path, headers and a body of ours.

Headers are those of a short list, so that no client can forge one that means something between us and the engines
(x-headwater-*, x-data-parallel-rank, forwarded, cookies, its own key). A body goes as it came where nothing changes,
and with members added at its end where they are only added; a member that comes twice counts as its last, in engines
as here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headwater.conductor.http.exchange import Headers, Origin
from headwater.conductor.http.parsing import lines_of
from headwater.conductor.job import Job, Kind, Parsed
from headwater.fleetfile.model import InstanceSpec

PATHS = {Kind.CHAT: "/v1/chat/completions", Kind.COMPLETION: "/v1/completions"}
PASSED = frozenset({b"traceparent", b"tracestate", b"baggage", b"x-session-id"})
INTERNAL = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_hints", "request_id"})
"""Between engines, and between engines and us; never a client's."""
_JUDGED = INTERNAL | {"vllm_xargs", "chat_template", "chat_template_kwargs"}
"""Where any of these is, the body is written anew: it may be there twice, and the engine is to read what we read."""
FORGED = ("kv_", "ec_", "headwater")
"""How keys of `vllm_xargs` begin that engines would take for their own."""

_encode = msgspec.json.Encoder().encode
_SPACE = b" \t\r\n"


class Endpoint(NamedTuple):
    """What every request to one instance has in common."""

    spec: InstanceSpec
    origin: Origin
    lines: bytes
    """Header lines, as they are sent."""
    prioritises: bool
    """Whether it knows priorities; vLLM refuses them otherwise."""


def credentials(spec: InstanceSpec) -> Headers:
    """What all that an instance is asked carries: its key, if it has any, by the file or as it is started with."""
    key = spec.api_key or spec.environment.get("VLLM_API_KEY") or _flag(spec, "--api-key")
    return [(b"authorization", b"Bearer " + key.encode())] if key else []


def endpoint(spec: InstanceSpec, origin: Origin) -> Endpoint:
    """Of an instance."""
    lines = lines_of([(b"content-type", b"application/json"), *credentials(spec)])
    return Endpoint(spec, origin, lines, _flag(spec, "--scheduling-policy") == "priority")


def named(lines: bytes, job: Job) -> bytes:
    """Header lines with the request's name, by which engines, clients and `explain` know it."""
    return b"%bx-request-id: %b\r\n" % (lines, job.id.encode())


def lines_to(to: Endpoint, job: Job) -> bytes:
    """The header lines of a request to this instance, as they are sent."""
    lines = named(to.lines, job)
    request = job.exchange.request
    if not PASSED.isdisjoint(request.named):
        lines += lines_of([it for it in request.headers if it[0] in PASSED])
    return lines


def body_to(to: Endpoint, job: Job, *, asks_ids: bool) -> bytes:
    """The request's body for this instance. `asks_ids`: the stream may have to move, so its ids are asked for."""
    parsed, tenant = job.parsed, job.tenant
    if parsed.usual and not (parsed.stream or job.salt or tenant.priority):
        return parsed.body
    added = additions(to, job)
    if parsed.stream and asks_ids:
        added["return_token_ids"] = True
    if parsed.usual:
        body = parsed.body
        if parsed.stream and not parsed.include_usage:
            if _OPTIONS in body:
                body = _asking_for_usage(body)
            else:
                added["stream_options"] = _USAGE
        if body:
            return _appended(body, added)
    fields = parsed.fields
    if parsed.stream and not parsed.include_usage:
        added["stream_options"] = {**(fields.get("stream_options") or {}), "include_usage": True}
    if not dropped(parsed, added) and added.keys().isdisjoint(fields):
        return _appended(job.exchange.request.body, added) if fields else _encode(added)
    return _encode({**kept(parsed), **added})


def prefill_body(to: Endpoint, job: Job) -> bytes:
    """The same request for an instance that only computes its prompt: one token, in one piece."""
    fields = {name: value for name, value in kept(job.parsed).items() if name not in _OF_ANSWERS}
    fields |= additions(to, job)
    fields |= {"stream": False, "max_tokens": 1}
    if job.parsed.kind is Kind.CHAT:
        fields["max_completion_tokens"] = 1
    return _encode(fields)


def replay_body(to: Endpoint, job: Job, fields: Mapping[str, Any]) -> bytes:
    """A completion that goes on with a stream of another instance; see `replay`."""
    return _encode({**_unforged(fields), **additions(to, job)})


def kept(parsed: Parsed) -> dict[str, Any]:
    """What of a request's fields is the client's to say."""
    return _unforged({name: value for name, value in parsed.fields.items() if name not in _OURS})


def additions(to: Endpoint, job: Job) -> dict[str, Any]:
    """What we say: the salt, and the priority. In vLLM the least comes first; a tenant's is the other way round, and
    its requests can only go after what it has, not before."""
    added: dict[str, Any] = {"cache_salt": job.salt} if job.salt else {}
    asked = job.parsed.priority if not job.tenant.name else max(job.parsed.priority, 0)
    priority = asked - job.tenant.priority
    if priority and to.prioritises:
        added["priority"] = priority
    return added


def dropped(parsed: Parsed, added: Mapping[str, Any]) -> bool:
    """Whether anything that the client said must not be passed on."""
    fields = parsed.fields
    if not _JUDGED.isdisjoint(fields):
        return True
    return ("cache_salt" in fields and "cache_salt" not in added) or ("priority" in fields and "priority" not in added)


def _asking_for_usage(body: bytes) -> bytes:
    """A usual body that has stream options, with the usage asked for; b'' if it has to be written anew for that.

    In a text the names would have a backslash before their last quotes; where one is there twice, the last one counts.
    """
    if body.find(_OPTIONS) != body.rfind(_OPTIONS) or body.find(_ASKS) != body.rfind(_ASKS):
        return b""
    for told, asked in _TOLD:
        at = body.find(told)
        if at >= 0:
            return b"%b%b%b" % (body[:at], asked, body[at + len(told) :])
    return b""


_USAGE = {"include_usage": True}
_OPTIONS, _ASKS = b'"stream_options"', b'"include_usage"'
_TOLD = [(b'"include_usage":%bfalse' % it, b'"include_usage":%btrue' % it) for it in (b"", b" ")]
_OURS = INTERNAL | {"cache_salt", "priority"}
_OF_ANSWERS = frozenset({
    "stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids",
    "echo", "stop", "stream_interval", "return_token_ids",
})  # fmt: skip


def _unforged(fields: Mapping[str, Any]) -> dict[str, Any]:
    extra = fields.get("vllm_xargs")
    if not isinstance(extra, dict):
        return dict(fields)
    return {**fields, "vllm_xargs": {name: value for name, value in extra.items() if not name.startswith(FORGED)}}


def _appended(body: bytes, added: Mapping[str, Any]) -> bytes:
    if not added:
        return body
    return body.rstrip(_SPACE)[:-1] + b"," + _encode(added)[1:]


def _flag(spec: InstanceSpec, name: str) -> str:
    """The value of a flag that an instance is started with, in either form; '' if it has none."""
    flags = spec.flags
    for at, flag in enumerate(flags):
        if flag == name and at + 1 < len(flags):
            return flags[at + 1]
        if flag.startswith(name + "="):
            return flag[len(name) + 1 :]
    return ""
