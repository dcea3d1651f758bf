"""Connections to instances, kept open between requests, and looked at about once a second."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Callable

from headwater.conductor.counts import Counts
from headwater.conductor.http.exchange import Headers, Origin, Sink
from headwater.conductor.http.link import Link, UpstreamCall, Why
from headwater.conductor.http.parsing import HOP_BY_HOP, Lines, UnsafeHeader, is_host
from headwater.fleetfile.model import Limits, Times

SWEEP_S = 1.0
IDLE_MAX = 256
"""Idle connections that are kept for each origin."""
LATE_S = 0.05
RESTED = 4
"""Links that have rested and go on in one turn of the loop."""
CONNECT_ROUNDS = 4

_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}
_METHOD = re.compile(r"[A-Z]{1,20}")
_PATH = re.compile(r"/[\x21-\x7e]*")


class UpstreamPool:
    """See `exchange.Upstreams`. Addresses come from Origins only; redirects are answers like any other."""

    def __init__(self, limits: Limits, times: Times, counts: Counts, ssl_context: ssl.SSLContext | None = None) -> None:
        self.limits, self.times, self.counts = limits, times, counts
        self._loop = asyncio.get_running_loop()
        self.time: Callable[[], float] = self._loop.time
        self._ssl = ssl_context
        self._idle: dict[Origin, list[Link]] = {}
        """The one that was used last is used next, so that the others grow old."""
        self._links: set[Link] = set()
        self._resting: deque[Link] = deque()
        self._opening: dict[asyncio.Task[None], UpstreamCall] = {}
        self._lines = Lines(_DROPPED)
        self._hosts: dict[Origin, bytes] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sweep_s = max(0.02, min(SWEEP_S, times.silent_s / 4))

    def call(
        self, origin: Origin, method: str, path: str, headers: Headers, body: bytes, sink: Sink, *, first_s: float,
        lines: bytes = b"",
    ) -> UpstreamCall:  # fmt: skip
        """See `Upstreams`. Nothing is told to `sink` before this returns. Raises UnsafeHeader."""
        start = _START.get((method, path)) or _start(method, path)
        if headers:
            lines += self._lines.join(headers)
        host = self._hosts.get(origin) or self._host(origin)
        head = b"%b%b%bcontent-length: %d\r\n\r\n" % (start, host, lines, len(body))
        call = UpstreamCall(origin, method, head, body, sink, first_s)
        idle = self._idle.get(origin)
        while idle:
            link = idle.pop()
            if link.begin(call, reused=True):
                return call
        self._open(call)
        return call

    def close(self, origin: Origin) -> None:
        """See `Upstreams`."""
        self._hosts.pop(origin, None)
        for link in self._idle.pop(origin, ()):
            link.cut()

    async def stop(self) -> None:
        """Cut everything; calls under way are lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = dict(self._opening)
        for task, call in tasks.items():
            task.cancel()
            self.lost(call, Why.CLOSED)
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links):
            link.lose(Why.CLOSED)
        self._idle.clear()
        while self._links:
            # Each of them is told by the loop that it is closed.
            await asyncio.sleep(0)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._links)

    # ------------------------------------------------------------ what links call

    def idle(self, link: Link) -> None:
        """A link may be used again."""
        links = self._idle.setdefault(link.origin, [])
        if len(links) >= IDLE_MAX:
            links.pop(0).cut()
        links.append(link)

    def rest(self, link: Link) -> None:
        """A link has read much: others first."""
        if not self._resting:
            self._loop.call_soon(self._go_on)
        self._resting.append(link)

    def _go_on(self) -> None:
        turn = [self._resting.popleft() for _ in range(min(RESTED, len(self._resting)))]
        if self._resting:
            self._loop.call_soon(self._go_on)
        for link in turn:
            link.go_on()

    def left(self, link: Link) -> None:
        """A connection has ended."""
        self._links.discard(link)
        links = self._idle.get(link.origin)
        if links is not None and link in links:
            links.remove(link)

    def again(self, call: UpstreamCall) -> None:
        """An idle connection turned out to be closed: send the request on a fresh one."""
        self.counts.add("upstream_stale")
        self._open(call)

    def lost(self, call: UpstreamCall, why: str) -> None:
        """A call ends without its answer's end."""
        if not call.closed:
            call.closed = True
            call.link = None
            self.counts.add("upstream_lost", why)
            call.sink.lost(why, sent=call.sent)

    # ------------------------------------------------------------ inside

    def _host(self, origin: Origin) -> bytes:
        host = self._hosts[origin] = _host(origin)
        return host

    def _open(self, call: UpstreamCall) -> None:
        task = self._loop.create_task(self._connect(call))
        self._opening[task] = call
        task.add_done_callback(self._opening.pop)

    async def _connect(self, call: UpstreamCall) -> None:
        try:
            link = await self._connected(call.origin)
        except ConnectionRefusedError:
            self.lost(call, Why.REFUSED)
        except (OSError, UnicodeError):
            self.lost(call, Why.CONNECT)
        else:
            # Not earlier: uvloop tells nobody of a connection whose making was given up.
            if not link.usable:
                self.lost(call, Why.CLOSED)
                return
            self._opened(link)
            if call.closed:
                link.cut()
            else:
                link.begin(call, reused=False)

    async def _connected(self, origin: Origin) -> Link:
        """A fresh connection, within `connect_s`. A deadline that is noticed late says that we were busy, and nothing
        of the instance, which may be connected since: it gets as long again."""
        making = self._loop.create_task(self._make(origin))
        try:
            for _ in range(CONNECT_ROUNDS):
                late_s = self.time() + self.times.connect_s + LATE_S
                await asyncio.wait({making}, timeout=self.times.connect_s)
                if making.done() or self.time() < late_s:
                    break
            if not making.done():
                raise TimeoutError
            return making.result()
        finally:
            if making.cancel():
                await asyncio.gather(making, return_exceptions=True)

    async def _make(self, origin: Origin) -> Link:
        tls = (self._ssl or ssl.create_default_context()) if origin.tls else None
        _, link = await self._loop.create_connection(
            lambda: Link(self, origin), origin.host, origin.port, ssl=tls,
            server_hostname=origin.host if tls else None,
        )  # fmt: skip
        return link

    def _opened(self, link: Link) -> None:
        self._links.add(link)
        self.counts.add("upstream_connections")
        if self._timer is None:
            self._timer = self._loop.call_later(self._sweep_s, self._sweep)

    def _sweep(self) -> None:
        self._timer = self._loop.call_later(self._sweep_s, self._sweep) if self._links else None
        now = self.time()
        for link in list(self._links):
            link.look(now)


_START: dict[tuple[str, str], bytes] = {}
_START_MAX = 256


def _start(method: str, path: str) -> bytes:
    """The first line of a request; the few that there are, are remembered."""
    if not _METHOD.fullmatch(method) or not _PATH.fullmatch(path):
        raise UnsafeHeader("a method or a path cannot be sent")
    line = f"{method} {path} HTTP/1.1\r\n".encode()
    if len(_START) < _START_MAX and len(path) < _START_MAX:
        _START[method, path] = line
    return line


def _host(origin: Origin) -> bytes:
    """The headers that every request to an origin has."""
    name = f"[{origin.host}]" if ":" in origin.host else origin.host
    shown = name if origin.port == (443 if origin.tls else 80) else f"{name}:{origin.port}"
    if not is_host(shown.encode()):
        raise UnsafeHeader("an instance's address cannot be sent")
    return f"host: {shown}\r\naccept-encoding: identity\r\n".encode()
