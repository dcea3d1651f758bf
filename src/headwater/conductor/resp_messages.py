"""Replies and messages of Redis as they come in, in pieces of any size: RESP2, and of it what pub/sub needs.

Lengths are compared with what is allowed before anything is kept, and nothing nests deeper than a list of values.
"""

from __future__ import annotations

from typing import TypeAlias

from headwater.conductor.sharing import MESSAGE_BYTES
from headwater.errors import ProtocolError
from headwater.tiers.resp import ServerError

LINE_BYTES = 1024
ITEMS = 8
BUFFER_BYTES = MESSAGE_BYTES + 8 * LINE_BYTES
Value: TypeAlias = "int | bytes | ServerError | None"
Reply: TypeAlias = "Value | list[Value]"


class Replies:
    """What has come and is not whole yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0

    def take(self, data: bytes) -> list[Reply]:
        """The replies that are whole now. Raises ProtocolError; then nothing that follows can be read either."""
        self._buffer += data
        if len(self._buffer) > BUFFER_BYTES + len(data):
            raise ProtocolError("a reply is longer than any message")
        found: list[Reply] = []
        self._at = 0
        while True:
            start = self._at
            try:
                found.append(self._reply())
            except _Incomplete:
                del self._buffer[:start]
                return found

    def _reply(self) -> Reply:
        if self._buffer[self._at : self._at + 1] != b"*":
            return self._value()
        count = self._number(self._line())
        if not 0 <= count <= ITEMS:
            raise ProtocolError(f"a list of {count}")
        return [self._value() for _ in range(count)]

    def _value(self) -> Value:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return self._number(line)
        if kind == b"-":
            code, _, text = rest.decode("utf-8", "replace").partition(" ")
            return ServerError(code[:32], text[:200])
        if kind != b"$":
            raise ProtocolError("something that is no reply")
        length = self._number(line)
        if length == -1:
            return None
        if not 0 <= length <= MESSAGE_BYTES:
            raise ProtocolError(f"a string of {length} bytes")
        end = self._at + length
        if len(self._buffer) < end + 2:
            raise _Incomplete
        value = bytes(self._buffer[self._at : end])
        if self._buffer[end : end + 2] != b"\r\n":
            raise ProtocolError("a string without an end")
        self._at = end + 2
        return value

    def _line(self) -> bytes:
        found = self._buffer.find(b"\r\n", self._at, self._at + LINE_BYTES)
        if found < 0:
            if len(self._buffer) - self._at >= LINE_BYTES:
                raise ProtocolError("a line without an end")
            raise _Incomplete
        line = bytes(self._buffer[self._at : found])
        self._at = found + 2
        return line

    def _number(self, line: bytes) -> int:
        digits = line[1:]
        if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
            raise ProtocolError("something else for a number")
        return int(digits)


class _Incomplete(Exception):
    """More has to come."""
