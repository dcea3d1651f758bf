"""What the server writes: heads of answers, and OpenAI's form of an error."""

from __future__ import annotations

from email.utils import formatdate
from http import HTTPStatus

import msgspec

from headwater.conductor.http.exchange import Headers
from headwater.conductor.http.parsing import HOP_BY_HOP, Lines

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""OpenAI's `type` by status; the other 4xx are invalid_request_error, the other 5xx server_error."""
_OURS = HOP_BY_HOP | {b"content-length", b"date"}
"""Headers that the server writes itself; what callers say there is left out."""
_REASONS = {it.value: it.phrase for it in HTTPStatus}
_LINES: dict[int, bytes] = {}


def bodiless(method: str, status: int) -> bool:
    """Whether an answer has no body whatever its headers say (RFC 9112, 6.3)."""
    return method == "HEAD" or status < 200 or status == 204 or status == 304


class Heads:
    """Writes heads; `tick` at least once a second keeps their Date true."""

    def __init__(self) -> None:
        self._end = b""
        self._lines = Lines(_OURS)
        self.tick()

    def tick(self) -> None:
        """Look at the clock."""
        self._end = b"date: %b\r\n\r\n" % formatdate(usegmt=True).encode()

    def head(self, status: int, headers: Headers, framing: bytes, *, keep: bool) -> bytes:
        """A whole head. `framing` are lines of ours, or b''. Raises UnsafeHeader."""
        line = _LINES.get(status) or _status_line(status)
        if headers:
            line += self._lines.join(headers)
        if not keep:
            framing += b"connection: close\r\n"
        return line + framing + self._end


def _status_line(status: int) -> bytes:
    assert 100 <= status <= 999, "a status has three digits"
    line = _LINES[status] = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n".encode()
    return line


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    """OpenAI's error body. `message` has to be of ours: nothing of a prompt, no address, no key."""
    kind = KINDS.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
