"""Answers of our own: refusals in OpenAI's form, when to come back, and errors within a stream."""

from __future__ import annotations

import math

from headwater.conductor.http.answers import error_body
from headwater.conductor.http.exchange import Exchange, Headers, Reply
from headwater.conductor.job import BadRequest, Refusal

JSON = (b"content-type", b"application/json")
LAST_EVENT = b"data: [DONE]\n\n"


def error_event(status: int, message: str, code: str | None = None) -> bytes:
    """The end of a stream that cannot go on: an event that clients raise as an error, then [DONE]."""
    return b"data: " + error_body(status, message, code) + b"\n\n" + LAST_EVENT


def refuse(exchange: Exchange, refusal: Refusal, headers: Headers | None = None, lines: bytes = b"") -> None:
    """Answer that a request is not served."""
    exchange.answer(*refused(refusal, headers), lines)


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
