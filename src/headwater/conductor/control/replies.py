"""JSON answers of the control API, errors among them, in the parent and in the workers alike.

{"error": {"code": "unknown_field", "message": "...", "field": "modelnam"}}
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from headwater.errors import HeadwaterError, RefusedError, UnavailableError

READ_S = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Rejected(Exception):
    """A request that is not served: status, a code for programs, words for people, the field that is to blame."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.field = status, code, message, field


def reply(body: Any, status: int = 200) -> web.Response:
    """An answer that nobody stores."""
    return web.Response(
        text=json.dumps(body) + "\n",
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )


def reject(error: Rejected) -> web.Response:
    """The answer that an error is."""
    said = {"code": error.code, "message": error.message}
    if error.field is not None:
        said["field"] = error.field
    return reply({"error": said}, error.status)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error that we know as JSON; others are bugs, which aiohttp logs and answers with 500."""
    try:
        return await handler(request)
    except Rejected as error:
        return reject(error)
    except RefusedError as error:
        return reject(Rejected(422, "refused", str(error), error.field))
    except UnavailableError as error:
        return reject(Rejected(503, "unavailable", str(error)))
    except HeadwaterError as error:
        return reject(Rejected(422, "refused", str(error)))
    except web.HTTPException as error:
        answer = reject(Rejected(error.status, _CODES.get(error.status, "http_error"), error.reason))
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer


async def read_body(request: web.Request, most: int) -> bytes:
    """A body within a limit, which is checked before anything is read, and within READ_S."""
    if (request.content_length or 0) > most:
        raise Rejected(413, "too_large", f"the body may have {most} bytes at most")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_S):
            async for part in request.content.iter_any():
                size += len(part)
                if size > most:
                    raise Rejected(413, "too_large", f"the body may have {most} bytes at most")
                parts.append(part)
    except TimeoutError:
        raise Rejected(408, "too_slow", f"the body did not come within {READ_S:.0f} s") from None
    return b"".join(parts)


def quiet_log() -> logging.Logger:
    """The log of aiohttp's server. What is no HTTP is answered with 400 and not logged: it would be quoted, and there
    may be a key in it."""
    log = logging.getLogger("headwater.conductor.control.http")
    log.addFilter(_is_ours)
    return log


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_CODES = {404: "no_such_path", 405: "method_not_allowed", 413: "too_large"}
