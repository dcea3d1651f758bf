"""Words of HTTP/1.1 that both sides use: what is malformed, what belongs to one connection only, what may be sent."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headwater.conductor.http.exchange import PASSED, Headers

HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
    )
)  # fmt: skip
"""RFC 9110, 7.6.1."""
PLAIN_CONNECTION = (b"keep-alive", b"close")
"""Values of Connection that name no further header."""

_LENGTH = re.compile(rb"[0-9]{1,18}")
_HOST = re.compile(rb"[A-Za-z0-9._~\-]+(?::[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{0,5})?")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_UNSAFE = re.compile(rb"[\r\n\0]")
_CACHED_LINES, _CACHED_BYTES = 4096, 512


class Malformed(Exception):
    """What came is not HTTP as we take it. `status` is what a client is told; `message` quotes nothing of it."""

    def __init__(self, message: str, status: int = 400, code: str = "malformed_request") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


class UnsafeHeader(ValueError):
    """A caller's header, method or path would break the framing of a message: a mistake of ours."""


def values(headers: Headers, name: bytes) -> list[bytes]:
    """All values of a header."""
    return [value for known, value in headers if known == name]


def tokens(lines: Iterable[bytes]) -> set[bytes]:
    """The words of a header whose value is a list, in lower case."""
    return {word.strip(b" \t").lower() for line in lines for word in line.split(b",")}


def is_length(value: bytes) -> bool:
    """Whether this may be a Content-Length: digits and nothing else."""
    return _LENGTH.fullmatch(value) is not None


def is_host(value: bytes) -> bool:
    """Whether this may be the value of Host: a name or an address, and a port."""
    return _HOST.fullmatch(value) is not None


def without_named(headers: Headers) -> Headers:
    """Headers without those that Connection names; what is always hop-by-hop stays, and is left to the caller."""
    named = tokens(values(headers, b"connection"))
    return [it for it in headers if it[0] not in named]


class Lines(dict[tuple[bytes, bytes], bytes]):
    """Header lines as they are sent, by name and value; b'' for those that are left out.

    The same ones are sent again and again, so each is checked and put together once. Lengths and dates differ, so it
    is emptied when it is full.
    """

    def __init__(self, dropped: frozenset[bytes]) -> None:
        super().__init__()
        self._dropped = dropped

    def join(self, headers: Headers) -> bytes:
        """All of them; raises UnsafeHeader for names and values that would end their line or the head."""
        try:
            return b"".join(map(self.__getitem__, headers))
        except _NamesHeaders:
            kept = [it for it in without_named(headers) if it[0] != b"connection"]
            return b"".join(map(self.__getitem__, kept))

    def __missing__(self, header: tuple[bytes, bytes]) -> bytes:
        name, value = header
        if name == b"connection" and value.lower() not in PLAIN_CONNECTION:
            raise _NamesHeaders
        line = lines_of([header])
        if name in self._dropped:
            line = b""
        if len(value) <= _CACHED_BYTES:
            if len(self) >= _CACHED_LINES:
                self.clear()
            self[header] = line
        return line


def lines_of(headers: Headers) -> bytes:
    """Header lines as they are sent, of headers that neither server nor pool write themselves. Raises UnsafeHeader."""
    for name, value in headers:
        if not _NAME.fullmatch(name) or _UNSAFE.search(value):
            raise UnsafeHeader("a header's name is not a token in lower case, or its value holds CR, LF or NUL")
    return b"".join([b"%b: %b\r\n" % it for it in headers])


def passed_lines(headers: Headers) -> bytes:
    """Those of an instance's headers that are PASSED on to a client, as they are sent."""
    return lines_of([it for it in headers if it[0] in PASSED])


class _NamesHeaders(Exception):
    """A Connection header names others, which have to be left out."""
