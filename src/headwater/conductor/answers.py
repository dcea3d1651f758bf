"""Answers of our own: OpenAI's error bodies, when to come back, and errors within a stream."""

from __future__ import annotations

import math

import msgspec

from headwater.conductor.http.exchange import Exchange, Headers, Reply
from headwater.conductor.job import BadRequest, Refusal

JSON = (b"content-type", b"application/json")
DONE = b"data: [DONE]\n\n"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""OpenAI's `type` by status; the other 4xx are invalid_request_error, the other 5xx server_error."""


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    """OpenAI's error body. `message` has to be of ours: nothing of a prompt, no address, no key."""
    return msgspec.json.encode({"error": _error(status, message, code, param)})


def error_event(status: int, message: str, code: str | None = None) -> bytes:
    """The end of a stream that cannot go on: an event that clients raise as an error, then [DONE]."""
    return b"data: " + error_body(status, message, code) + b"\n\n" + DONE


def refuse(exchange: Exchange, refusal: Refusal, headers: Headers | None = None) -> None:
    """Answer that a request is not served."""
    exchange.answer(*refused(refusal, headers))


def refused(refusal: Refusal, headers: Headers | None = None) -> Reply:
    """That answer."""
    body = error_body(refusal.status, refusal.message, refusal.code)
    return Reply(refusal.status, [JSON, *retry_after(refusal.retry_after_s), *(headers or ())], body)


def refuse_bad(exchange: Exchange, error: BadRequest, headers: Headers | None = None) -> None:
    """Answer that a request cannot be used."""
    body = error_body(error.status, error.message, error.code, error.param)
    exchange.answer(error.status, [JSON, *(headers or ())], body)


def retry_after(seconds: float | None) -> Headers:
    """The header, in whole seconds and at least one; none where nobody knows."""
    return [] if seconds is None else [(b"retry-after", b"%d" % max(1, math.ceil(seconds)))]


def _error(status: int, message: str, code: str | None, param: str | None) -> dict[str, str | None]:
    kind = KINDS.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": code}
