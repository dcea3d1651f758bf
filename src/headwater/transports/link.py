"""The asker's end of a connection: a request and its answer, the same way for every transport that has a connection."""

from __future__ import annotations

import time

from headwater.errors import ProtocolError, RefusedError, UnavailableError
from headwater.transports.stream import Stream
from headwater.transports.wire import MOST_MESSAGE, Ask, Kind, decode_refused, encode_message
from headwater.types import Member


class Asker:
    """A connection to one peer, introduced; for one thread at a time. Base of the links."""

    def __init__(self, stream: Stream, peer: Member) -> None:
        self.peer = peer
        self.stream = stream

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.peer.name}, {self.stream})"

    def ask(self, topic: str, body: bytes, until_s: float) -> bytes:
        """See `ports.Link`."""
        if len(body) > MOST_MESSAGE:
            raise RefusedError("message", f"at most {MOST_MESSAGE} bytes", f"{len(body)}", "say it in pieces")
        request = encode_message(Ask(topic, until_s - time.monotonic(), body))
        return bytes(self.call(Kind.ASK, request, Kind.ANSWER, until_s))

    def moved_bytes(self) -> int:
        """See `ports.Link`."""
        return self.stream.bytes_in

    def abort(self) -> None:
        """See `ports.Link`."""
        self.stream.shut()

    def close(self) -> None:
        """See `ports.Link`."""
        self.stream.close()

    def call(self, kind: Kind, body: bytes, due: Kind, until_s: float) -> memoryview:
        """A request and the body of its answer, valid until the next call. Raises as `ports.Link` says."""
        self.stream.say(kind, body, until_s)
        return self.answer(due, until_s)

    def answer(self, due: Kind, until_s: float, ahead_bytes: int = 1 << 16) -> memoryview:
        """The body of the frame that is due, valid until the next call; BUSY is an UnavailableError here, too."""
        try:
            kind, body = self.stream.hear(until_s, ahead_bytes=ahead_bytes)
            if kind is Kind.REFUSED:
                raise decode_refused(body)
            if kind is Kind.BUSY:
                raise Busy(f"{self.stream.name}: {bytes(body).decode('utf-8', 'replace')}")
            if kind is not due:
                raise self.stream.nonsense(f"{kind.name} where {due.name} was due")
        except ProtocolError as error:
            self.stream.shut()
            raise UnavailableError(str(error)) from None
        return body


class Busy(UnavailableError):
    """The peer does not serve this now; the connection stays good."""
