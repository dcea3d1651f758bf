"""Chunked bodies, decoded as they come.

Theory of operation
-------------------
    SIZE ── size line, not 0 ──► DATA ── that many bytes and CRLF ──► SIZE
    SIZE ── 0 ──► TRAILERS ── empty line ──► done

A piece of input is worked off in one turn, and the payloads in it are handed out as one. What is left of a line that
has not ended is kept (it is short) and put before the next piece, so each turn begins at the beginning of something.
"""

from __future__ import annotations

import re

from headwater.conductor.http.parsing import Malformed

LINE_BYTES = 256
"""Of a size line with its extensions, which are skipped."""
TRAILER_BYTES = 8192

_KNOWN_MAX = 4096
_KNOWN: dict[bytes, int] = {}
"""Size lines that were read before, without extensions and without their end; never that of the last chunk."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_SIZE_BEGUN = re.compile(rb"[0-9A-Fa-f]{1,8}(?:;[\t\x20-\x7e\x80-\xff]*)?\r?")
_FIELD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")
_FIELD_BEGUN = re.compile(rb"\r|[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?::[\t\x20-\x7e\x80-\xff]*\r?)?")


class Chunked:
    """One chunked body. `limit_bytes` is of its payload, and is looked at before the payload comes."""

    __slots__ = ("_held", "_left", "_limit_bytes", "_trailer_bytes", "_trailers", "done", "rest", "size_bytes")

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.done = False
        self.rest = b""
        """What came after the end."""
        self.size_bytes = 0
        """Of the payload, as far as it is announced."""
        self._left = 0
        """Bytes of the present chunk that are to come, with its CRLF."""
        self._held = b""
        self._trailers = False
        self._trailer_bytes = 0
        self._limit_bytes = limit_bytes

    @property
    def between(self) -> bool:
        """Whether what comes next begins a chunk."""
        return not self._left and not self._trailers and not self._held

    def feed(self, data: bytes, pos: int = 0) -> bytes:
        """The payload in what came, from `pos` on; b'' if there is none. Raises Malformed, with 413 above the limit."""
        if self.between:
            # Nearly always an event of a stream, which is one chunk, whole.
            line = data.find(b"\r\n", pos, pos + LINE_BYTES)
            size = _KNOWN.get(data[pos:line]) if line > 0 else None
            if size is not None and line + size + 4 == len(data) and data.endswith(b"\r\n"):
                self._announce(size)
                return data[line + 2 : -2]
        if self._held:
            data, pos, self._held = self._held + data[pos:], 0, b""
        parts: list[bytes] = []
        end = len(data)
        while pos < end and not self.done:
            if self._left:
                pos = self._data(data, pos, end, parts)
            elif self._trailers:
                pos = self._trailer(data, pos, end)
            else:
                pos = self._size(data, pos, end)
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)

    def _data(self, data: bytes, pos: int, end: int, parts: list[bytes]) -> int:
        left = self._left
        after = pos + left
        if after <= end:
            if data[after - 1] != 10 or (left > 1 and data[after - 2] != 13):
                raise Malformed("a chunk does not end where it should")
            if left > 2:
                parts.append(data[pos : after - 2])
            self._left = 0
            return after
        here = min(end - pos, left - 2)
        if here > 0:
            parts.append(data[pos : pos + here])
        if end - pos > here and data[end - 1] != 13:
            raise Malformed("a chunk does not end where it should")
        self._left = after - end
        return end

    def _size(self, data: bytes, pos: int, end: int) -> int:
        found = _SIZE.match(data, pos)
        if found is None:
            if end - pos > LINE_BYTES or not _SIZE_BEGUN.fullmatch(data, pos):
                raise Malformed("a chunk's size cannot be read")
            self._held = data[pos:]
            return end
        if found.end() - pos > LINE_BYTES:
            raise Malformed("a chunk's size cannot be read")
        size = int(found[1], 16)
        if size:
            self._announce(size)
            self._left = size + 2
            if found.end(1) + 2 == found.end():
                if len(_KNOWN) >= _KNOWN_MAX:
                    _KNOWN.clear()
                _KNOWN[found[1]] = size
        else:
            self._trailers = True
        return found.end()

    def _announce(self, size: int) -> None:
        """So much more payload is to come."""
        self.size_bytes += size
        if self._limit_bytes is not None and self.size_bytes > self._limit_bytes:
            raise Malformed("the body is too large", 413, "body_too_large")

    def _trailer(self, data: bytes, pos: int, end: int) -> int:
        if data.startswith(b"\r\n", pos):
            self.done, self.rest = True, data[pos + 2 :]
            return end
        found = _FIELD.match(data, pos)
        length = (found.end() if found else end) - pos
        if self._trailer_bytes + length > TRAILER_BYTES:
            raise Malformed("the trailers are too long", 431, "headers_too_large")
        if found:
            self._trailer_bytes += length
            return found.end()
        if not _FIELD_BEGUN.fullmatch(data, pos):
            raise Malformed("a trailer cannot be read")
        self._held = data[pos:]
        return end
