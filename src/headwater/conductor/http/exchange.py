"""What the two sides of HTTP look like to those between them. All calls are made in the worker's loop, none waits.

    server ── Request ──► app ── Exchange.answer / start, send, end
    app ── Upstreams.call ──► instance ──► Sink.head, data ..., end | lost

Nothing is called after `end`, `lost`, `abort` or `Listener.gone`; calls that come too late do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from headwater._kernels.events import Writer

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case."""
Quick: TypeAlias = Callable[[bytes], int]
"""0: nothing was done, read it with care. 1: it is done with. 2: so it is, and `Sink.data` is called with nothing."""

WholeAnswer: TypeAlias = Callable[[int, bytes, bytes], None]
PASSED = frozenset({b"content-type", b"retry-after"})
"""The headers of instances that mean something to a client."""


class Request(msgspec.Struct, frozen=True, eq=False):
    """A whole request, within the limits. `path` and `query` are as they were sent, not decoded. `headers` are not to
    be changed: others see the same list."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes
    peer: str
    """The client's address, as text."""
    named: Mapping[bytes, bytes]
    """The headers by name, the first of each; not to be changed either."""


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


class Listener(Protocol):
    """Who wants to know what becomes of the client."""

    def gone(self) -> None:
        """The client has left; nothing can be sent any more."""

    def full(self) -> None:
        """The client reads more slowly than we send: send no more until `drained`."""

    def drained(self) -> None:
        """It has read what there was."""


class Exchange(Protocol):
    """One request and its answer."""

    request: Request
    started: bool
    """Whether the answer was begun."""
    closed: bool
    """The answer has ended, or the client has left."""

    def watch(self, listener: Listener | None) -> None:
        """Tell this one from now on; at once if the client is gone already."""

    def answer(self, status: int, headers: Headers, body: bytes, lines: bytes = b"") -> None:
        """The whole answer. `lines` are more headers, as they are sent and known to be good. Content-Length, Date and
        Connection are the server's business."""

    def start(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        """Begin an answer whose length is not known: its head is sent with the first of its body."""

    def send(self, data: bytes) -> None:
        """More of its body."""

    def channel(self) -> Writer | None:
        """Where chunks are written that the caller has framed (RFC 9112, 7.1), once some of the body was sent; None if
        there are no chunks in this answer."""

    def end(self) -> None:
        """The end of its body."""

    def abort(self) -> None:
        """Cut the connection, so that nobody takes what was sent for a whole answer."""


class Origin(NamedTuple):
    """Where an instance listens."""

    host: str
    port: int
    tls: bool = False


class Sink(Protocol):
    """Who takes an instance's answer."""

    def head(self, status: int, headers: Headers) -> None:
        """Status and headers, without hop-by-hop headers and Content-Length. They are not to be changed: others see the
        same list."""

    def data(self, data: bytes) -> None:
        """A piece of the body, without its framing; none, when `quick` says so."""

    @property
    def quick(self) -> Quick | None:
        """Who takes what comes next in a chunked body, framing and all; looked at between chunks, after `data`."""

    @property
    def whole(self) -> WholeAnswer | None:
        """Who takes an answer that came in one piece, status, lines of headers and body at once, instead of `head`,
        `data` and `end`. The lines are those of the headers that are PASSED, as they are sent."""

    def end(self) -> None:
        """The body is complete."""

    def lost(self, why: str, *, sent: bool) -> None:
        """It did not come to an end: `why` in a word or two (refused, connect, closed, silent, late, malformed).
        `sent` tells whether the instance may have seen the request."""


class Call(Protocol):
    """A request that is under way at an instance."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self) -> None:
        """Read on."""

    def abort(self) -> None:
        """We want no more of it: the connection is closed, so that the instance stops. `Sink` is not called again."""


class Upstreams(Protocol):
    """Connections to instances, kept open between requests."""

    def call(
        self, origin: Origin, method: str, path: str, headers: Headers, body: bytes, sink: Sink, *, first_s: float,
        lines: bytes = b"",
    ) -> Call:  # fmt: skip
        """Send a request. `first_s` is how long the instance may take until it begins to answer. `lines` are more
        headers, as they are sent and known to be good."""

    def close(self, origin: Origin) -> None:
        """An instance is gone: close its idle connections."""
