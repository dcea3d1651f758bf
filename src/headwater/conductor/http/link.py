"""One connection to an instance, and the request that is on it.

Theory of operation
-------------------
    link:  CONNECTING ──► IDLE ◄──► HEAD ──► BODY ──► IDLE, or closed
    call:  connecting ──► written ──► head ──► data ... ──► end
           any ──► lost | aborted | begun again on a fresh connection, once

- A call is begun again only if it was written to a connection that had served another one before, and that connection
  closed before a single byte of the answer came: the instance closed it while the request was on its way (RFC 9112,
  9.3).
- A link goes back to the pool only if the answer's end was known from its framing, nothing followed it, and the request
  had left our buffers. Whatever else happens closes it.
- `deadline_s` is looked at by the pool's sweep: the first byte's deadline until the head is whole, then silence, then
  idleness. A paused link has none: it is us who do not read.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from math import inf
from typing import Protocol, cast

from headwater.conductor.http.chunks import Chunked
from headwater.conductor.http.exchange import Origin, Sink
from headwater.conductor.http.heads import HeadReader, parse_answer
from headwater.conductor.http.known import Known
from headwater.conductor.http.parsing import Malformed
from headwater.fleetfile.model import Limits, Times

INTERIM_MAX = 16
"""Answers of status 1xx before the real one."""
JOIN_BYTES = 64 << 10
IDLE_S = 4.0
"""Less than the 5 s after which engines' servers (uvicorn) close idle connections."""

_known = Known(parse_answer)


class Why:
    """Reasons of `Sink.lost`."""

    REFUSED, CONNECT, CLOSED = "refused", "connect", "closed"
    SILENT, LATE, MALFORMED = "silent", "late", "malformed"


class UpstreamCall:
    """See `exchange.Call`. The pool and the link that it is on move it."""

    __slots__ = (
        "body", "closed", "first_s", "head", "link", "method", "origin", "paused", "retried", "sent", "sink",
    )  # fmt: skip

    def __init__(self, origin: Origin, method: str, head: bytes, body: bytes, sink: Sink, first_s: float) -> None:
        self.origin, self.method, self.head, self.body = origin, method, head, body
        self.sink, self.first_s = sink, first_s
        self.link: Link | None = None
        self.sent = False
        """Whether any of it was written to any connection."""
        self.retried = False
        self.paused = False
        self.closed = False

    def pause(self) -> None:
        """See `Call`. What was already read is still handed on."""
        if not self.closed and not self.paused:
            self.paused = True
            if self.link is not None:
                self.link.hold()

    def resume(self) -> None:
        """See `Call`."""
        if not self.closed and self.paused:
            self.paused = False
            if self.link is not None:
                self.link.release()

    def abort(self) -> None:
        """See `Call`."""
        if not self.closed:
            self.closed = True
            link, self.link = self.link, None
            if link is not None:
                link.cut()


class Owner(Protocol):
    """The pool, as its links see it."""

    limits: Limits
    times: Times

    def time(self) -> float:
        """The loop's."""

    def idle(self, link: Link) -> None:
        """A link may be used again."""

    def left(self, link: Link) -> None:
        """A link's connection has ended."""

    def again(self, call: UpstreamCall) -> None:
        """Send a request on a fresh connection."""

    def lost(self, call: UpstreamCall, why: str) -> None:
        """A call ends without its answer's end."""


class Phase(Enum):
    """What a link is at."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    CLOSED = auto()


_IDLE, _HEAD, _BODY, _CLOSED = Phase.IDLE, Phase.HEAD, Phase.BODY, Phase.CLOSED
"""By a name of the module they are found faster."""


class Link(asyncio.Protocol):
    """See the theory of operation above. Made by the pool, which sweeps it."""

    __slots__ = (
        "_call", "_chunked", "_interim", "_keep", "_left", "_phase", "_pool", "_reader", "_reused", "_silent_s",
        "_time", "_touched", "_transport", "deadline_s", "origin",
    )  # fmt: skip

    _transport: asyncio.Transport

    def __init__(self, pool: Owner, origin: Origin) -> None:
        self.origin = origin
        self.deadline_s = inf
        self._pool = pool
        self._time = pool.time
        self._silent_s = pool.times.silent_s
        self._reader = HeadReader(pool.limits)
        self._phase = _IDLE
        self._call: UpstreamCall | None = None
        self._chunked: Chunked | None = None
        self._left: int | None = None
        """Bytes of the body that are to come; None: it ends with the connection, unless it is chunked."""
        self._keep = False
        self._reused = False
        self._touched = False
        """A byte of the answer has come."""
        self._interim = 0

    # ------------------------------------------------------------ what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._phase is _BODY:
            self.deadline_s = self._time() + self._silent_s
            self._read_body(data)
        elif self._phase is _HEAD:
            self._touched = True
            try:
                self._read_head(data)
            except Malformed:
                self.lose(Why.MALFORMED)
        else:
            # Nothing was asked.
            self._drop()

    def eof_received(self) -> None:
        """See asyncio. An answer that has no other end ends here."""
        call = self._call
        if call is not None and self._phase is _BODY and self._left is None and self._chunked is None:
            self._keep = False
            self._finish(call)
        elif self._phase is _IDLE:
            self._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._pool.left(self)
        call = self._call
        if call is not None and self._reused and not self._touched and not call.retried:
            self._call = call.link = None
            self._phase = _CLOSED
            call.retried = True
            self._pool.again(call)
        else:
            self.lose(Why.CLOSED)
        self._phase = _CLOSED

    # ------------------------------------------------------------ requests

    def begin(self, call: UpstreamCall, *, reused: bool) -> None:
        """Write a request; the link is its alone until it ends."""
        self._call, call.link = call, self
        self._phase = _HEAD
        self._reused, self._touched, self._interim = reused, False, 0
        self.deadline_s = self._time() + call.first_s
        call.sent = True
        if len(call.body) <= JOIN_BYTES:
            self._transport.write(call.head + call.body)
        else:
            self._transport.writelines((call.head, call.body))
        if call.paused:
            self.hold()

    def hold(self) -> None:
        """Read no more for now."""
        self._transport.pause_reading()
        self.deadline_s = inf

    def release(self) -> None:
        """Read on."""
        call = self._call
        if call is not None:
            self.deadline_s = self._time() + (call.first_s if self._phase is _HEAD else self._silent_s)
        self._transport.resume_reading()

    def cut(self) -> None:
        """Nobody wants the rest."""
        self._call = None
        self._drop()

    def lose(self, why: str) -> None:
        """The request on this link, if there is one, does not come to its end."""
        call, self._call = self._call, None
        self._drop()
        if call is not None:
            self._pool.lost(call, why)

    def expired(self) -> None:
        """The deadline has passed."""
        self.lose(Why.LATE if self._phase is _HEAD else Why.SILENT)

    @property
    def usable(self) -> bool:
        """Whether a request may be written to it."""
        return self._phase is _IDLE and not self._transport.is_closing()

    # ------------------------------------------------------------ answers

    def _read_head(self, data: bytes) -> None:
        call, reader, pos = self._call, self._reader, 0
        assert call is not None, "a link that waits for a head has a call"
        while True:
            found = reader.read(data, pos) if pos < len(data) else None
            if found is None:
                return
            pos, raw = found
            head, length = _known.read(raw)
            if head.status >= 200:
                break
            self._interim += 1
            if head.status == 101 or self._interim > INTERIM_MAX:
                raise Malformed("the instance does not come to its answer")
        headers = head.headers.copy()
        if length is None:
            length = head.length
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        self._phase = _BODY
        self._keep = head.keep
        if head.bodiless or call.method == "HEAD":
            length, self._chunked = 0, None
        else:
            self._chunked = Chunked() if head.chunked else None
        self._left = length
        call.head = call.body = b""
        if not call.paused:
            self.deadline_s = self._time() + self._silent_s
        call.sink.head(head.status, headers)
        if not call.closed and (pos < len(data) or length == 0):
            self._read_body(data[pos:])

    def _read_body(self, data: bytes) -> None:
        call = self._call
        assert call is not None, "a link within a body has a call"
        chunked, left = self._chunked, self._left
        if chunked is not None:
            try:
                piece = chunked.feed(data)
            except Malformed:
                self.lose(Why.MALFORMED)
                return
            done, extra = chunked.done, chunked.rest != b""
        elif left is not None:
            piece, extra = (data, False) if len(data) <= left else (data[:left], True)
            self._left = left - len(piece)
            done = not self._left
        else:
            piece, done, extra = data, False, False
        if piece:
            call.sink.data(piece)
            if call.closed:
                return
        if call.paused:
            self.deadline_s = inf
        if done:
            self._keep = self._keep and not extra
            self._finish(call)

    def _finish(self, call: UpstreamCall) -> None:
        self._call = call.link = None
        call.closed = True
        transport = self._transport
        if not self._keep or transport.get_write_buffer_size() or transport.is_closing():
            self._drop()
        else:
            if call.paused:
                transport.resume_reading()
            self._phase = _IDLE
            self._chunked = None
            self.deadline_s = self._time() + IDLE_S
            self._pool.idle(self)
        call.sink.end()

    def _drop(self) -> None:
        if self._phase is not _CLOSED:
            self._phase = _CLOSED
            self.deadline_s = inf
            self._transport.abort()
