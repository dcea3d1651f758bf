"""One request's answer, as it is written to the connection that the request came on."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from headwater._kernels.events import Writer
from headwater.conductor.http.answers import bodiless
from headwater.conductor.http.exchange import Headers, Listener, Request


class Wire(Protocol):
    """The connection, as its answer sees it."""

    transport: asyncio.Transport
    writer: Writer
    chunks: bool
    """The client understands chunks (HTTP/1.1)."""
    full: bool
    """It reads more slowly than we write."""

    def head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        """The head of the present answer; raises UnsafeHeader."""

    def answered(self) -> None:
        """The present answer has ended."""

    def cut(self) -> None:
        """The present answer cannot be ended."""


class Answer(msgspec.Struct, eq=False):
    """See `exchange.Exchange`."""

    _connection: Wire
    request: Request
    started: bool = False
    closed: bool = False
    _listener: Listener | None = None
    _gone: bool = False
    _chunked: bool = False
    _bodiless: bool = False
    _head: bytes = b""
    """Of an answer that was begun: it is sent with the first of its body."""

    def watch(self, listener: Listener | None) -> None:
        """See `Exchange`. A listener that comes while the client reads slowly is told so at once."""
        if listener is not None and self._gone:
            listener.gone()
        elif not self.closed:
            self._listener = listener
            if listener is not None and self._connection.full:
                listener.full()

    def answer(self, status: int, headers: Headers, body: bytes, lines: bytes = b"") -> None:
        """See `Exchange`. Raises UnsafeHeader."""
        if self.closed or self.started:
            return
        connection, method = self._connection, self.request.method
        if not bodiless(method, status):
            lines = b"%bcontent-length: %d\r\n" % (lines, len(body))
        else:
            if method == "HEAD":
                lines += b"content-length: %d\r\n" % len(body)
            body = b""
        head = connection.head(status, headers, lines)
        self.started = self.closed = True
        self._listener = None
        connection.writer.write(head, body)
        connection.answered()

    def start(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        """See `Exchange`. Raises UnsafeHeader."""
        if self.closed or self.started:
            return
        self._bodiless = bodiless(self.request.method, status)
        self._chunked = not self._bodiless and self._connection.chunks
        if self._chunked:
            lines += b"transfer-encoding: chunked\r\n"
        self._head = self._connection.head(status, headers, lines)
        self.started = True

    def send(self, data: bytes) -> None:
        """See `Exchange`."""
        if self.closed or not self.started or self._bodiless or not data:
            return
        head, self._head = self._head, b""
        if self._chunked:
            head, data = b"%b%x\r\n" % (head, len(data)), data + b"\r\n"
        self._connection.writer.write(head, data)

    def channel(self) -> Writer | None:
        """See `Exchange`."""
        return self._connection.writer if self._chunked and not (self.closed or self._head) else None

    def end(self) -> None:
        """See `Exchange`."""
        if self.closed or not self.started:
            return
        self.closed = True
        self._listener = None
        head, self._head = self._head, b""
        if head or self._chunked:
            self._connection.writer.write(head, b"0\r\n\r\n" if self._chunked else b"")
        self._connection.answered()

    def abort(self) -> None:
        """See `Exchange`."""
        if not self.closed:
            self.closed = True
            self._listener = None
            self._connection.cut()

    def left(self) -> None:
        """The client is gone."""
        if not self.closed:
            self.closed = self._gone = True
            listener, self._listener = self._listener, None
            if listener is not None:
                listener.gone()

    def pressed(self, *, full: bool) -> None:
        """The client reads more slowly than we write, or has caught up."""
        if self._listener is not None:
            if full:
                self._listener.full()
            else:
                self._listener.drained()
