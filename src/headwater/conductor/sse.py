"""Server-sent events as bytes: whole events out of pieces that are cut anywhere, and what is in them only when asked.

An event ends with an empty line: "\\n\\n" or "\\r\\n\\r\\n" (of the WHATWG's definition only lines that end with a lone
"\\r" are not known here; no engine sends them). JSON has no raw line breaks, so an end is never within a payload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_END = re.compile(rb"\n\r?\n")
_LINES = re.compile(rb"\r?\n")


class EventTooLong(Exception):
    """An event goes on beyond the limit: whoever sends it is not to be listened to any further."""


class Events:
    """Turns pieces of a stream into whole events. Holds at most `limit_bytes` of one that is not complete."""

    __slots__ = ("_edge", "_limit_bytes", "_size_bytes", "parts")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.parts: list[bytes] = []
        """What is held."""
        self._size_bytes = 0
        self._edge = b""
        """The last bytes of what is held: an end may lie across two pieces."""

    def feed(self, piece: bytes) -> bytes:
        """All events that are complete now, as they were sent, one after the other; b'' if none is.

        A piece that ends with an event's end, while nothing is held, is given back as it is. Raises EventTooLong.
        """
        if not self.parts and piece.endswith(b"\n\n"):
            return piece
        return self._joined(piece)

    def rest(self) -> bytes:
        """What is held of an event that is not complete."""
        return b"".join(self.parts)

    def _joined(self, piece: bytes) -> bytes:
        window = self._edge + piece
        # The end that comes last: whichever of its two forms.
        end = max(window.rfind(b"\n\n") + 2, window.rfind(b"\n\r\n") + 3)
        if end <= 2:
            self._hold(piece, window)
            return b""
        end -= len(self._edge)
        self.parts.append(piece[:end])
        whole = b"".join(self.parts)
        self.parts, self._size_bytes, self._edge = [], 0, b""
        if end < len(piece):
            self._hold(piece[end:], piece[end:])
        return whole

    def _hold(self, piece: bytes, window: bytes) -> None:
        self._size_bytes += len(piece)
        if self._size_bytes > self._limit_bytes:
            raise EventTooLong(f"an event of more than {self._limit_bytes} bytes")
        self.parts.append(piece)
        self._edge = window[-2:]


def each(events: bytes) -> Iterator[bytes]:
    """Single events of whole ones, each with its end."""
    if events.find(b"\n") == len(events) - 2:  # nearly always, and told in a twentieth of the time where it is long
        yield events
        return
    start = 0
    if b"\r" not in events:
        while (end := events.find(b"\n\n", start) + 2) > 1:
            yield events[start:end]
            start = end
        return
    for match in _END.finditer(events):
        yield events[start : match.end()]
        start = match.end()


def payload(event: bytes) -> bytes:
    """The `data` of one event, its lines joined; b'' for comments and for events without."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = [line[5:] for line in _LINES.split(event) if line.startswith(b"data:")]
    return b"\n".join([line[1:] if line.startswith(b" ") else line for line in lines])
