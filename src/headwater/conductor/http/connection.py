"""One client's connection: requests are read one after the other, and each is answered before the next is looked at.

Theory of operation
-------------------
    HEAD ── head is whole ──► BODY ── body is whole ──► ANSWERING ── answer's end ──► HEAD, or CLOSING
    HEAD, BODY ── malformed, too large, too slow: the error is written ──► LINGERING
    any ── client gone, abort, stalled ──► CLOSED

- What comes while a request is answered (pipelining) is kept unread; above HELD_BYTES the connection is not read.
- LINGERING: our side is shut, what still comes is thrown away, so that the client is not cut off (reset) before it has
  read the error. CLOSING: nothing unread is there, what was written is still on its way.
- A body that is not here with its head is read only if the handler admits its request. Bodies above SMALL_BYTES are
  counted by the server from their head on until their answer has ended, as they are kept so long; beyond the limit of
  all together they are refused. So are chunked ones as they come.
- Deadlines are numbers; the server's sweep looks at them, about once a second. There is no timer per request.
- A client that shuts its side (half-close) while its answer is pending has left: a closed socket looks the same from
  here until something is sent, and an instance must not compute for up to minutes for nobody. Go's and nginx's servers
  do so too. If the answer was already written, it is delivered.
- Nobody is told of a hang-up on a connection that is not read. The sweep asks the kernel about those.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from enum import Enum, auto
from math import inf
from typing import Any, Protocol, cast

from headwater._kernels.events import Writer
from headwater.conductor.counts import Counts
from headwater.conductor.http.answering import Answer
from headwater.conductor.http.answers import CONTINUE, Heads, error_body
from headwater.conductor.http.chunks import Chunked
from headwater.conductor.http.exchange import Headers, Request
from headwater.conductor.http.heads import HeadReader, RequestHead, parse_request
from headwater.conductor.http.known import Known
from headwater.conductor.http.parsing import Malformed
from headwater.conductor.http.sockets import socket_of
from headwater.conductor.parts import Handler
from headwater.fleetfile.model import Limits, Times

HELD_BYTES = 64 << 10
"""Of pipelined requests, beyond which a connection is not read."""
TURN_REQUESTS = 16
"""Requests of one connection that may be answered in one turn of the loop."""
WRITE_HIGH_BYTES, WRITE_LOW_BYTES = 256 << 10, 64 << 10
LINGER_S = 2.0
FIRST_S = 1.0
"""Of a server that drains, until a new connection must have begun to bring its request."""
RETRY_AFTER = (b"retry-after", b"1")
SMALL_BYTES = 64 << 10
"""Bodies up to this are not counted: there are at most as many as connections, and floods of large ones do not keep
them out."""
FRAMING_BYTES = 64 << 10
"""What chunks' framing may take beyond as much as the body itself."""
_HUNG_UP = (7, 8)
"""TCP_CLOSE, TCP_CLOSE_WAIT."""

JSON = (b"content-type", b"application/json")
_INT = struct.Struct("i")
_known = Known(parse_request)
_whole = _known.whole


class Owner(Protocol):
    """The server, as its connections see it."""

    handler: Handler
    limits: Limits
    times: Times
    counts: Counts
    heads: Heads
    draining: bool
    buffered_bytes: int

    def time(self) -> float:
        """The loop's."""

    def later(self, call: Callable[[], None]) -> Any:
        """Call this in the loop's next turn."""

    def opened(self, connection: Connection) -> None:
        """A client has connected."""

    def closed(self, connection: Connection) -> None:
        """It has left."""


class Phase(Enum):
    """What a connection is at."""

    HEAD = auto()
    BODY = auto()
    ANSWERING = auto()
    LINGERING = auto()
    CLOSING = auto()
    CLOSED = auto()


# A member is looked up in four times the time that a name of the module takes, and there are dozens to a request.
_HEAD, _BODY, _ANSWERING = Phase.HEAD, Phase.BODY, Phase.ANSWERING
_LINGERING, _CLOSING, _CLOSED = Phase.LINGERING, Phase.CLOSING, Phase.CLOSED


class Connection(asyncio.Protocol):
    """See the theory of operation above. Made by the server, which sweeps it."""

    __slots__ = (
        "_answer",
        "_asked",
        "_blank",
        "_body",
        "_body_bytes",
        "_chunked",
        "_counted_bytes",
        "_head",
        "_head_bytes",
        "_head_lines",
        "_held",
        "_keep",
        "_peer",
        "_pending_bytes",
        "_phase",
        "_reader",
        "_server",
        "_small_bytes",
        "_taking",
        "_times",
        "_unread",
        "chunks",
        "deadline_s",
        "full",
        "refused",
        "transport",
        "writer",
    )  # fmt: skip

    transport: asyncio.Transport
    writer: Writer

    def __init__(self, server: Owner) -> None:
        self._server = server
        self._times = server.times
        self._phase = _HEAD
        self._reader = HeadReader(server.limits)
        self._head_bytes, self._head_lines = server.limits.header_bytes, server.limits.headers
        self._small_bytes = min(SMALL_BYTES, server.limits.body_bytes)
        self._head: RequestHead
        """Of the present request."""
        self._answer: Answer | None = None
        self._asked = False
        """It has brought a request."""
        self._blank = 0
        """Bytes of an empty line before the next request."""
        self._held = b""
        """Pipelined requests, unread."""
        self._unread = False
        """Reading is paused."""
        self._taking = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        """Bytes of the body that are to come; of a chunked one those that came, with framing."""
        self._chunked: Chunked | None = None
        self._counted_bytes = 0
        """Of the present body, in the server's sum."""
        self._keep = True
        self._peer = ""
        self._pending_bytes = 0
        self.chunks = True
        """The client understands chunks (HTTP/1.1)."""
        self.deadline_s = inf
        self.full = False
        self.refused = False
        """It is one too many."""

    # ------------------------------------------------------------ what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self.transport = cast(asyncio.Transport, transport)
        self.writer = Writer(self.transport, socket_of(transport))
        self.transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self.deadline_s = self._server.time() + self._times.header_s
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        phase = self._phase
        if phase is _HEAD and not (self._held or self._blank or self.full or self._reader.partial):
            whole = _whole(data, self._head_bytes, self._head_lines)
            if whole is not None and len(whole[1]) <= self._small_bytes:
                head, body = whole
                self._head, self.chunks, self._keep = head, head.is_1_1, head.keep
                self._handle(body)
                return
        if phase is _ANSWERING or self._held:
            self._hold(data)
        elif phase is _HEAD or phase is _BODY:
            if self.full:
                self._hold(data)
            else:
                self._take(data)

    def eof_received(self) -> None:
        """The client has shut its side, see above; the transport closes itself once what was written is sent."""
        if self._phase is _ANSWERING:
            self._gone()
            self.transport.abort()
        elif self._phase is not _CLOSED:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._gone()
        self._phase = _CLOSED
        self._held, self._body = b"", []
        self._discount()
        self._server.closed(self)

    def pause_writing(self) -> None:
        """See asyncio."""
        self.full = True
        self._pending_bytes = self._unsent_bytes()
        self.deadline_s = self._server.time() + self._times.stalled_s
        if self._answer is not None:
            self._answer.pressed(full=True)

    def resume_writing(self) -> None:
        """See asyncio."""
        self.full = False
        if self._phase is _ANSWERING:
            self.deadline_s = inf
            if self._answer is not None:
                self._answer.pressed(full=False)
        elif self._phase is _HEAD or self._phase is _BODY:
            allowed_s = self._times.keep_alive_s if self._phase is _HEAD else self._times.body_s
            self.deadline_s = self._server.time() + allowed_s
            self._go_on()

    # ------------------------------------------------------------ reading

    def _hold(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data
        if len(self._held) > HELD_BYTES and not self._unread:
            self._unread = True
            self.transport.pause_reading()

    def _go_on(self) -> None:
        """Read what was held, if it is its turn."""
        if self._held and self._phase in (_HEAD, _BODY) and not self.full and not self._taking:
            held, self._held = self._held, b""
            self._take(held)
        if self._unread and len(self._held) <= HELD_BYTES and self._phase in (_HEAD, _BODY, _ANSWERING):
            self._unread = False
            self.transport.resume_reading()

    def _take(self, data: bytes) -> None:
        """Read requests until one waits for its answer, or the data ends."""
        pos, end, turns = 0, len(data), 0
        self._taking = True
        try:
            while pos < end and not self.full and turns < TURN_REQUESTS:
                if self._phase is _HEAD:
                    turns += 1
                    pos = self._read_head(data, pos)
                elif self._phase is _BODY:
                    pos = self._read_body(data, pos)
                else:
                    break
        except Malformed as error:
            self._refuse(error)
            return
        finally:
            self._taking = False
        if pos < end and self._phase in (_HEAD, _BODY, _ANSWERING):
            self._hold(data[pos:])
            if self._phase is not _ANSWERING:
                self._server.later(self._go_on)

    def _read_head(self, data: bytes, pos: int) -> int:
        reader = self._reader
        fresh = not reader.partial
        if fresh and (data[pos] == 13 or self._blank):
            pos = self._skip_blank(data, pos)
            if pos == len(data):
                return pos
        found = reader.read(data, pos)
        if found is None:
            if fresh:
                self.deadline_s = self._server.time() + self._times.header_s
            return len(data)
        self._blank = 0
        after, raw = found
        head, length = _known.read(raw)
        self._head, self.chunks, self._keep = head, head.is_1_1, head.keep
        if length is None:
            length = head.length
        if length is not None:
            if length > self._server.limits.body_bytes:
                raise Malformed("the body is too large", 413, "body_too_large")
            if length > SMALL_BYTES and not self._count(length):
                return len(data)
            if len(data) - after >= length:
                self._handle(data[after : after + length])
                return after + length
        reply = self._server.handler.admit(head.method, head.path, head.headers)
        if reply is not None:
            self._turn_away(*reply)
            return len(data)
        self._phase = _BODY
        self.deadline_s = self._server.time() + self._times.body_s
        if head.expects and after == len(data):
            self.transport.write(CONTINUE)
        self._chunked = Chunked(self._server.limits.body_bytes) if length is None else None
        self._body_bytes = length or 0
        return after

    def _skip_blank(self, data: bytes, pos: int) -> int:
        """Pass over an empty line before a request, as old clients send after a body (RFC 9112, 2.2)."""
        while self._blank < 2 and pos < len(data):
            if data[pos] != b"\r\n"[self._blank]:
                raise Malformed("the head cannot be read")
            self._blank += 1
            pos += 1
        return pos

    def _read_body(self, data: bytes, pos: int) -> int:
        if self._chunked is not None:
            return self._read_chunks(self._chunked, data, pos)
        piece = data[pos : pos + self._body_bytes]
        self._body.append(piece)
        self._body_bytes -= len(piece)
        if not self._body_bytes:
            body, self._body = b"".join(self._body), []
            self._handle(body)
        return pos + len(piece)

    def _read_chunks(self, chunked: Chunked, data: bytes, pos: int) -> int:
        piece = chunked.feed(data, pos)
        if piece:
            self._body.append(piece)
        self._body_bytes += len(data) - pos
        if self._body_bytes - len(chunked.rest) > 2 * chunked.size_bytes + FRAMING_BYTES:
            raise Malformed("the body is nearly all framing")
        if chunked.size_bytes > SMALL_BYTES and not self._count(chunked.size_bytes):
            return len(data)
        if not chunked.done:
            return len(data)
        body, self._body = b"".join(self._body), []
        self._chunked = None
        self._handle(body)
        return len(data) - len(chunked.rest)

    def _count(self, size_bytes: int) -> bool:
        """The present body has so many bytes, as far as is known; False if they are too many, and the client was told
        so."""
        server = self._server
        more_bytes = size_bytes - self._counted_bytes
        if server.buffered_bytes + more_bytes > server.limits.buffered_bytes:
            server.counts.add("http_bodies_refused")
            self.refuse(503, "too many large bodies are in progress; try again", "overloaded", [RETRY_AFTER])
            return False
        server.buffered_bytes += more_bytes
        self._counted_bytes = size_bytes
        return True

    def _discount(self) -> None:
        self._server.buffered_bytes -= self._counted_bytes
        self._counted_bytes = 0

    def _handle(self, body: bytes) -> None:
        head = self._head
        request = Request(head.method, head.path, head.query, head.headers, body, self._peer, head.named)
        self._phase = _ANSWERING
        self._asked = True
        self.deadline_s = inf
        answer = self._answer = Answer(self, request)
        self._server.handler.handle(answer)

    # ------------------------------------------------------------ writing

    def head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        """The head of the present answer."""
        server = self._server
        if server.draining or not self.chunks:
            self._keep = False
        return server.heads.head(status, headers, framing, keep=self._keep)

    def answered(self) -> None:
        """The present answer has ended: on to the next request."""
        self._answer = None
        if self._counted_bytes:
            self._discount()
        if not self._keep or self._server.draining:
            self._close()
            return
        self._phase = _HEAD
        if not self.full:
            self.deadline_s = self._server.time() + self._times.keep_alive_s
        if self._held or self._unread:
            self._go_on()

    def cut(self) -> None:
        """The present answer cannot be ended: close the connection in the middle."""
        self._answer = None
        self._phase = _CLOSED
        self.transport.abort()

    def refuse(self, status: int, message: str, code: str, headers: Headers) -> None:
        """Write an error, and close once the client can have read it."""
        self._turn_away(status, [JSON, *headers], error_body(status, message, code))

    def _turn_away(self, status: int, headers: Headers, body: bytes) -> None:
        framing = b"content-length: %d\r\n" % len(body)
        self.transport.write(self._server.heads.head(status, headers, framing, keep=False) + body)
        self._held, self._body, self._chunked = b"", [], None
        self._discount()
        self._phase = _LINGERING
        self.deadline_s = self._server.time() + LINGER_S
        if self._unread:
            self._unread = False
            self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self._close()

    def _refuse(self, error: Malformed) -> None:
        self._server.counts.add("http_malformed", str(error.status))
        self.refuse(error.status, error.message, error.code, [])

    def _close(self) -> None:
        """Close once what was written is sent, or the client has stalled."""
        self._phase = _CLOSING
        self._pending_bytes = self._unsent_bytes()
        self.deadline_s = self._server.time() + self._times.stalled_s
        self.transport.close()

    def _gone(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self._server.counts.add("http_clients_gone")
            answer.left()

    # ------------------------------------------------------------ what the server calls

    @property
    def idle(self) -> bool:
        """Between two requests."""
        return self._phase is _HEAD and not self._reader.partial

    def leave(self) -> None:
        """The server drains: an idle connection is closed. On one that is new a request is on its way: it was made
        before anybody could know, and its request is still answered."""
        if self.idle and not self._held:
            if self._asked:
                self._close()
            else:
                self.deadline_s = min(self.deadline_s, self._server.time() + FIRST_S)

    def sweep(self, now: float) -> None:
        """Look at what nobody reports: deadlines, and hang-ups while the connection is not read."""
        if self.deadline_s <= now:
            self._expired(now)
        elif self._unread and self._hung_up():
            self._gone()
            self.transport.abort()

    def _hung_up(self) -> bool:
        link = self.transport.get_extra_info("socket")
        if link is None or link.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        state = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO)
        return bool(state in _HUNG_UP)

    def _unsent_bytes(self) -> int:
        """What the client has not received yet, by what it acknowledged: the kernel alone may hold megabytes of it, and
        a slow client's progress does not show in our own buffer for minutes."""
        pending, link = self.transport.get_write_buffer_size(), self.transport.get_extra_info("socket")
        if link is None or link.fileno() < 0:
            return pending
        (queued,) = _INT.unpack(fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(_INT.size)))
        return pending + int(queued)

    def _expired(self, now: float) -> None:
        pending = self._unsent_bytes()
        if self.full or self._phase is _CLOSING:
            if pending < self._pending_bytes:
                # It is slow, but it reads.
                self._pending_bytes = pending
                self.deadline_s = now + self._times.stalled_s
                return
            self._server.counts.add("http_clients_stalled")
            self._gone()
            self.transport.abort()
        elif self._phase is _LINGERING or pending:
            self.transport.abort()
        elif self.idle:
            self._close()
        else:
            self._refuse(Malformed("the request took too long to come", 408, "request_timeout"))
