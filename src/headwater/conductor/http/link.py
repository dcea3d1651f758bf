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
- Of a stream's body nearly all goes by `quick` of its sink, which passes it on as it came from the socket: see there.
- After a piece of REST_BYTES a link rests until the pool says `go_on`, to a few of them in each turn of the loop. Else
  what comes faster than it is passed on is read on and on (uvloop: 32 times 256 KB) before anybody else has a turn, and
  a hundred such keep all others waiting for seconds.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from math import inf
from typing import Protocol, cast

import msgspec

from headwater._kernels.events import RAW_MAX, Receiver, Writer
from headwater.conductor.http.chunks import Chunked
from headwater.conductor.http.exchange import Origin, Quick, Sink
from headwater.conductor.http.heads import AnswerHead, HeadReader, parse_answer
from headwater.conductor.http.known import Known
from headwater.conductor.http.parsing import Malformed
from headwater.conductor.http.sockets import socket_of
from headwater.fleetfile.model import Limits, Times

INTERIM_MAX = 16
"""Answers of status 1xx before the real one."""
REST_BYTES = RAW_MAX
"""What is shorter may be taken quickly."""
IDLE_S = 4.0
"""Less than the 5 s after which engines' servers (uvicorn) close idle connections."""

_known = Known(parse_answer)
_whole = _known.whole


class Why:
    """Reasons of `Sink.lost`."""

    REFUSED, CONNECT, CLOSED = "refused", "connect", "closed"
    SILENT, LATE, MALFORMED = "silent", "late", "malformed"


class UpstreamCall(msgspec.Struct, eq=False):
    """See `exchange.Call`. The pool and the link that it is on move it."""

    origin: Origin
    method: str
    head: bytes
    body: bytes
    sink: Sink
    first_s: float
    link: Link | None = None
    sent: bool = False
    """Whether any of it was written to any connection."""
    retried: bool = False
    paused: bool = False
    closed: bool = False

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

    def rest(self, link: Link) -> None:
        """Tell it to go on when it is its turn."""

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


class Link(Receiver, asyncio.Protocol):
    """See the theory of operation above. Made by the pool, which sweeps it."""

    __slots__ = (
        "_call", "_chunked", "_head_bytes", "_head_lines", "_interim", "_keep", "_left", "_phase", "_pool",
        "_reader", "_reused", "_silent_s", "_time", "_touched", "_transport", "_writer", "deadline_s",
        "origin",
    )  # fmt: skip

    _transport: asyncio.Transport
    _writer: Writer

    def __init__(self, pool: Owner, origin: Origin) -> None:
        self.origin = origin
        self.deadline_s = inf
        self._pool = pool
        self._time = pool.time
        self._silent_s = pool.times.silent_s
        self._reader = HeadReader(pool.limits)
        self._head_bytes, self._head_lines = pool.limits.header_bytes, pool.limits.headers
        self._phase = _IDLE
        self._call: UpstreamCall | None = None
        self._chunked: Chunked | None = None
        self._left: int | None = None
        """Bytes of the body that are to come; None: it ends with the connection, unless it is chunked."""
        self.quick: Quick | None = None
        """Who takes the body from here on, as far as it is as expected."""
        self.heard = False
        """More of a body came since it was last looked at; `deadline_s` does not know yet."""
        self._keep = False
        self._reused = False
        self._touched = False
        """A byte of the answer has come."""
        self._interim = 0

    # ------------------------------------------------------------ what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        self._writer = Writer(self._transport, socket_of(transport))

    def reported(self) -> None:
        """Who takes a stream quickly wants a word."""
        if self._call is not None:
            self._call.sink.data(b"")

    def received(self, data: bytes) -> None:
        """See `data_received` of asyncio: what was not taken quickly."""
        if self._phase is _BODY:
            self.deadline_s = self._time() + self._silent_s
            self._read_body(data)
            if len(data) >= REST_BYTES and self._phase is _BODY:
                self._transport.pause_reading()
                self._pool.rest(self)
        elif self._phase is _HEAD:
            self._touched = True
            call = self._call
            if not self._reader.partial and call is not None and call.method != "HEAD":
                whole = _whole(data, self._head_bytes, self._head_lines)
                if whole is not None and not whole[0].bodiless:
                    self._take(call, *whole)
                    return
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

    def begin(self, call: UpstreamCall, *, reused: bool) -> bool:
        """Write a request; the link is its alone until it ends. False: nothing was done, as it is closed."""
        if not self.usable:
            return False
        self._call, call.link = call, self
        self._phase = _HEAD
        self._reused, self._touched, self._interim = reused, False, 0
        self.deadline_s = self._time() + call.first_s
        call.sent = True
        self._writer.write(call.head, call.body)
        if call.paused:
            self.hold()
        return True

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

    def go_on(self) -> None:
        """It has rested."""
        if (self._call is None or not self._call.paused) and not self._transport.is_closing():
            self._transport.resume_reading()

    def cut(self) -> None:
        """Nobody wants the rest."""
        self._call = self.quick = None
        self._drop()

    def lose(self, why: str) -> None:
        """The request on this link, if there is one, does not come to its end."""
        call, self._call, self.quick = self._call, None, None
        self._drop()
        if call is not None:
            self._pool.lost(call, why)

    def look(self, now: float) -> None:
        """Is the deadline over?"""
        if self.heard:
            self.heard = False
            if self._call is not None and not self._call.paused:
                self.deadline_s = now + self._silent_s
        elif self.deadline_s <= now:
            self.lose(Why.LATE if self._phase is _HEAD else Why.SILENT)

    @property
    def usable(self) -> bool:
        """Whether a request may be written to it."""
        return self._phase is _IDLE and not self._transport.is_closing()

    # ------------------------------------------------------------ answers

    def _take(self, call: UpstreamCall, head: AnswerHead, body: bytes) -> None:
        """An answer in one piece, with a head that was read before: nearly all that are not streamed."""
        self._keep = head.keep
        self._chunked, self._left = None, 0
        self._phase = _BODY
        call.head = call.body = b""
        sink = call.sink
        if sink.whole is not None:
            self._release(call)
            sink.whole(head.status, head.lines, body)
            return
        sink.head(head.status, head.headers)
        if body and not call.closed:
            sink.data(body)
        if not call.closed:
            self._finish(call)

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
        if length is None:
            length = head.length
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
        call.sink.head(head.status, head.headers)
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
        elif chunked is not None:
            self.quick = call.sink.quick if chunked.between else None

    def _finish(self, call: UpstreamCall) -> None:
        self._release(call)
        call.sink.end()

    def _release(self, call: UpstreamCall) -> None:
        """All of its answer is here: the connection may serve another one."""
        self._call = self.quick = call.link = None
        self.heard = False
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

    def _drop(self) -> None:
        if self._phase is not _CLOSED:
            self._phase = _CLOSED
            self.deadline_s = inf
            self._transport.abort()
