"""Heads of requests and answers: found, limited, parsed and checked.

A head is split at CRLF, and each line has to match a strict grammar (RFC 9112) as a whole: what is not in the grammar
(bare CR or LF, NUL, folded lines, blanks before the colon, other versions and forms of targets) is no line.

Lines are the same from message to message (Host, Authorization, ...), so what was read of one is remembered by its
bytes; `known.py` does so with whole heads. llhttp takes longer, and lets pass much that has to be refused afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from headwater.conductor.http.exchange import Headers
from headwater.conductor.http.parsing import (
    HOP_BY_HOP,
    Malformed,
    is_host,
    is_length,
    passed_lines,
    tokens,
    values,
    without_named,
)
from headwater.fleetfile.model import Limits

URL_BYTES = 8192
_START_BYTES = URL_BYTES + 64
_CACHED_LINES, _CACHED_BYTES = 4096, 512

_REQUEST = re.compile(rb"([A-Z]{1,20}) (/[\x21\x22\x24-\x7e]*) HTTP/1\.([01])")
_ANY_REQUEST = re.compile(rb"[A-Z]{1,20} [\x21-\x7e]+ HTTP/1\.[01]")
_ANSWER = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([\t\x20-\x7e\x80-\xff]*)")
"""No two neighbours match the same byte: each line is read in time that grows with its length only."""
_BROKEN = re.compile(rb"\0|\r[^\n]|(?<!\r)\n|\n[ \t]")
"""What no head can hold, wherever it is."""
_FRAMING = frozenset((b"content-length", b"expect"))
_ONCE = (b"content-length", b"transfer-encoding", b"host", b"content-encoding", b"expect")

RequestStart: TypeAlias = tuple[str, str, str, bool]
"""Method, path, query, and whether it is HTTP/1.1 rather than 1.0."""
AnswerStart: TypeAlias = tuple[int, bool]
"""Status, and whether it is HTTP/1.1."""


class _Fields(dict[bytes, tuple[bytes, bytes]]):
    """Header lines, parsed and checked as far as a line by itself can be."""

    def __missing__(self, line: bytes) -> tuple[bytes, bytes]:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise Malformed("a header cannot be read")
        name, value = found[1].lower(), found[2].strip(b" \t")
        if name == b"content-length" and not is_length(value):
            raise Malformed("Content-Length is not a number")
        if name == b"host" and not is_host(value):
            raise Malformed("Host cannot be read")
        if len(line) <= _CACHED_BYTES:
            if len(self) >= _CACHED_LINES:
                self.clear()
            self[line] = name, value
        return name, value


class _Requests(dict[bytes, RequestStart]):
    """First lines of requests."""

    def __missing__(self, line: bytes) -> RequestStart:
        found = _REQUEST.fullmatch(line)
        if found is None:
            if _ANY_REQUEST.fullmatch(line):
                raise Malformed("only paths of this server can be asked for")
            raise Malformed("the first line cannot be read")
        method, target, minor = found.groups()
        if len(target) > URL_BYTES:
            raise Malformed("the URL is too long", 414, "url_too_long")
        if method == b"CONNECT":
            raise Malformed("only paths of this server can be asked for")
        path, _, query = target.decode("ascii").partition("?")
        start = method.decode("ascii"), path, query, minor == b"1"
        if not query:
            if len(self) >= _CACHED_LINES:
                self.clear()
            self[line] = start
        return start


class _Answers(dict[bytes, AnswerStart]):
    """First lines of answers."""

    def __missing__(self, line: bytes) -> AnswerStart:
        found = _ANSWER.fullmatch(line)
        if found is None:
            raise Malformed("the first line cannot be read")
        start = int(found[2]), found[1] == b"1"
        if len(line) <= _CACHED_BYTES:
            if len(self) >= _CACHED_LINES:
                self.clear()
            self[line] = start
        return start


_field = _Fields().__getitem__
_request_start = _Requests().__getitem__
_answer_start = _Answers().__getitem__


class HeadReader:
    """Finds heads in what comes on one connection, within limits."""

    __slots__ = ("_head_bytes", "_lines", "partial")

    def __init__(self, limits: Limits) -> None:
        self._head_bytes, self._lines = limits.header_bytes, limits.headers
        self.partial = bytearray()
        """The part of a head that is here."""

    def read(self, data: bytes, pos: int) -> tuple[int, bytes] | None:
        """Where the head that begins at `pos` ends, and the head without its empty line; None if it goes on.

        Raises Malformed, as early as it can be known.
        """
        if self.partial:
            return self._read_on(data, pos)
        end = data.find(b"\r\n\r\n", pos)
        if end < 0:
            return self._read_on(data, pos)
        head = data[pos:end]
        self._check(head)
        return end + 4, head

    def _read_on(self, data: bytes, pos: int) -> tuple[int, bytes] | None:
        partial, before = self.partial, len(self.partial)
        partial += data[pos : pos + self._head_bytes + 1 - before]
        end = partial.find(b"\r\n\r\n", max(0, before - 3))
        if end >= 0:
            head = bytes(partial[:end])
            partial.clear()
            self._check(head)
            return pos + end + 4 - before, head
        if len(partial) >= self._head_bytes or len(partial) > _START_BYTES:
            self._check_size(partial, len(partial) + 1)
        if partial.count(b"\n") > self._lines + 1:
            raise Malformed("there are too many headers", 431, "headers_too_large")
        if _BROKEN.search(partial, max(0, before - 2)) or not 65 <= partial[0] <= 90:
            raise Malformed("the head cannot be read")
        return None

    def _check(self, head: bytes) -> None:
        if len(head) + 4 > self._head_bytes:
            self._check_size(head, len(head) + 4)
        if head.count(b"\n") > self._lines:
            raise Malformed("there are too many headers", 431, "headers_too_large")

    def _check_size(self, head: bytes | bytearray, least_bytes: int) -> None:
        """Say of what there is too much, if there is; the whole head has at least so many bytes."""
        if len(head) > _START_BYTES and head.find(b"\n", 0, _START_BYTES) < 0:
            raise Malformed("the URL is too long", 414, "url_too_long")
        if least_bytes > self._head_bytes:
            raise Malformed("the headers are too large", 431, "headers_too_large")


class RequestHead(NamedTuple):
    """A head that was read and checked, but for the length of the body."""

    method: str
    path: str
    query: str
    is_1_1: bool
    headers: Headers
    """Without hop-by-hop headers, and those of the body's framing."""
    length: int | None
    """Bytes of the body; None: chunked."""
    keep: bool
    """Whether the connection may be used again."""
    expects: bool
    """The client waits for 100 Continue."""
    named: Mapping[bytes, bytes]
    """The headers by name, the first of each."""


class AnswerHead(NamedTuple):
    """An instance's head that was read and checked (RFC 9112, 6.3)."""

    status: int
    headers: Headers
    """Without hop-by-hop headers and Content-Length."""
    length: int | None
    """Bytes of the body, if the head tells."""
    chunked: bool
    """Neither this nor a length: the body ends with the connection."""
    keep: bool
    bodiless: bool
    """There is no body, whatever the head tells."""
    lines: bytes
    """The headers that are PASSED, as they are sent."""


def parse_request(head: bytes) -> RequestHead:
    """Read and check a request's head. Raises Malformed with 400, 414, 415 or 417."""
    lines = head.split(b"\r\n")
    method, path, query, is_1_1 = _request_start(lines[0])
    headers = list(map(_field, lines[1:]))
    found = dict(headers)
    if len(found) != len(headers):
        _check_once(headers)
    if is_1_1 and b"host" not in found:
        raise Malformed("there is no Host")
    stated = found.get(b"content-length")
    length: int | None = 0 if stated is None else int(stated)
    encoding = found.get(b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise Malformed("bodies are taken without Content-Encoding only", 415, "unsupported_encoding")
    if _is_chunked(found, is_1_1):
        length = None
    expect = found.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise Malformed("nothing but 100-continue can be expected", 417, "expectation_failed")
    kept = [it for it in _end_to_end(headers) if it[0] not in _FRAMING]
    keep = _keeps(headers, found, is_1_1)
    named = dict(reversed(kept))
    return RequestHead(method, path, query, is_1_1, kept, length, keep, expect is not None and is_1_1, named)


def parse_answer(head: bytes) -> AnswerHead:
    """Read and check an instance's head; what its request's method means for it is left to the caller. Raises
    Malformed."""
    lines = head.split(b"\r\n")
    status, is_1_1 = _answer_start(lines[0])
    headers = list(map(_field, lines[1:]))
    found = dict(headers)
    if len(found) != len(headers):
        _check_once(headers)
    encoding = found.get(b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise Malformed("the answer is encoded")
    chunked = _is_chunked(found, is_1_1)
    keep = _keeps(headers, found, is_1_1)
    kept = [it for it in _end_to_end(headers) if it[0] != b"content-length"]
    stated = found.get(b"content-length")
    length = None if stated is None else int(stated)
    bodiless = status < 200 or status in (204, 304)
    keep = keep and (chunked or bodiless or stated is not None)
    return AnswerHead(status, kept, length, chunked, keep, bodiless, passed_lines(kept))


def _is_chunked(found: dict[bytes, bytes], is_1_1: bool) -> bool:
    transfer = found.get(b"transfer-encoding")
    if transfer is None:
        return False
    if b"content-length" in found or not is_1_1 or transfer.lower() != b"chunked":
        raise Malformed("Transfer-Encoding can only be chunked, without Content-Length")
    return True


def _check_once(headers: Headers) -> None:
    for name in _ONCE:
        if len(values(headers, name)) > 1:
            raise Malformed("a header is there twice")


def _keeps(headers: Headers, found: dict[bytes, bytes], is_1_1: bool) -> bool:
    """HTTP/1.0 connections are used once."""
    value = found.get(b"connection")
    if value is None or (value == b"keep-alive" and len(found) == len(headers)):
        return is_1_1
    return is_1_1 and b"close" not in tokens(values(headers, b"connection"))


def _end_to_end(headers: Headers) -> Headers:
    """Headers without those of one connection."""
    if HOP_BY_HOP.isdisjoint(dict(headers)):
        return headers
    return [it for it in without_named(headers) if it[0] not in HOP_BY_HOP]
