"""The events of a stream that bring tokens, from an instance's connection to the client's: in C where that was built.

Writer(transport, fd).write(head, body=b"")
    Writes both, at once and to the socket `fd` as far as that takes it and nothing waits before it, else by the
    transport. The socket lives until the transport's protocol is told of its end, and nothing is written after that.
    -1: only by the transport.

TokenEvents(job, *, strips, keep_bytes)
    `job.answered_tokens` grows by the tokens that come. `strips`: token ids are taken out of what is sent.
    `keep_bytes`: so much of the events is kept at most, for whoever would have to go on with the stream; beyond it all
    that was kept is dropped, and `keeps` is false.
begin(writer)
    From now on, once, `feed` may write to the client by this Writer.
feed(raw) -> 0, 1 or 2; so does a call of it
    Takes what came from an instance if that is whole HTTP chunks (no extensions) of whole events (their lines end with
    LF) which all bring tokens: they are written on, as one chunk. 0: it is something else, and nothing was done.
    2: REPORTED tokens or more have come since the last `report`.
take(event) -> what is sent for one event; None if it brings no tokens, or has more than one list of ids. Nothing is
    written.
add(event, tokens)
    Counts and keeps one that was read otherwise.
report() -> whether REPORTED tokens came; they are then counted anew.
kept() -> what is kept; `ends`: whether the last event says why the answer ended.

Receiver
    A base of protocols. Its `data_received(data)` asks `quick(data)` first, if there is one and the data is shorter
    than RAW_MAX. 0: it took nothing, and `received(data)` is called. 1: it is done with, `heard` is set. 2: so it is,
    and `reported()` is called. Whoever inherits defines these two.

Why it is safe to look for bytes is said in headwater.conductor.tokenids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

__all__ = [
    "NATIVE", "RAW_MAX", "REPORTED", "Counted", "PlainReceiver", "PlainTokenEvents", "PlainWriter", "Receiver",
    "TokenEvents", "Transport", "Writer",
]  # fmt: skip

RAW_MAX = 64 << 10
REPORTED = 16

_TOKENS, _CHOICE, _FINISH, _END = b',"token_ids":[', b'"choices":[{', b'"finish_reason":"', b"\n\n"
_MEMBER, _NONE = b'token_ids"', b'token_ids":null'
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")


class Counted(Protocol):
    """Whose tokens are counted."""

    answered_tokens: int


class Transport(Protocol):
    """To a client."""

    def write(self, data: bytes) -> object:
        """See asyncio."""

    def is_closing(self) -> bool:
        """See asyncio."""

    def get_write_buffer_size(self) -> int:
        """See asyncio."""


class PlainWriter:
    """The same without C: all goes by the transport."""

    __slots__ = ("_transport",)

    def __init__(self, transport: Transport, fd: int) -> None:
        self._transport = transport

    def write(self, head: bytes, body: bytes = b"", /) -> None:
        """See above."""
        self._transport.write(head + body)


class PlainTokenEvents:
    """The same without C."""

    __slots__ = (
        "_job",
        "_kept",
        "_kept_bytes",
        "_limit_bytes",
        "_strips",
        "_unreported",
        "_writer",
        "ends",
        "keeps",
    )

    def __init__(self, job: Counted, *, strips: bool, keep_bytes: int) -> None:
        self._job, self._strips, self._limit_bytes = job, strips, keep_bytes
        self._writer: PlainWriter | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = self._unreported = 0
        self.keeps = keep_bytes > 0
        self.ends = False

    def begin(self, writer: PlainWriter) -> None:
        """See above."""
        if self._writer is not None:
            raise ValueError("it has begun")
        self._writer = writer

    def feed(self, raw: bytes) -> int:
        """See above."""
        if not raw or len(raw) > RAW_MAX or self._writer is None:
            return 0
        out: list[bytes] = []
        payloads: list[bytes] = []
        tokens, pos, ends = 0, 0, self.ends
        while pos < len(raw):
            size = _SIZE.match(raw, pos)
            length = int(size[1], 16) if size else 0
            if size is None or not length:
                return 0
            pos = size.end() + length + 2
            payload = raw[size.end() : pos - 2]
            if raw[pos - 2 : pos] != b"\r\n" or not payload.endswith(_END) or b"\r" in payload:
                return 0
            at = 0
            while at < length:
                end = payload.find(_END, at) + len(_END)
                said, count = self._one(payload[at:end])
                if said is None:
                    return 0
                out.append(said)
                tokens += count
                ends = _FINISH in payload[at:end]
                at = end
            payloads.append(payload)
        for payload in payloads:
            self._keep(payload)
        self.ends = ends
        self._count(tokens)
        body = b"".join(out)
        self._writer.write(b"%x\r\n%b\r\n" % (len(body), body))
        return 1 if self._unreported < REPORTED else 2

    __call__ = feed

    def take(self, event: bytes) -> bytes | None:
        """See above."""
        said, tokens = self._one(event)
        if said is not None:
            self.add(event, tokens)
        return said

    def add(self, event: bytes, tokens: int) -> None:
        """See above."""
        self._keep(event)
        self.ends = _FINISH in event
        self._count(tokens)

    def report(self) -> bool:
        """See above."""
        if self._unreported < REPORTED:
            return False
        self._unreported = 0
        return True

    def kept(self) -> bytes:
        """See above."""
        return b"".join(self._kept)

    def _one(self, event: bytes) -> tuple[bytes | None, int]:
        """What is sent for an event, and how many tokens it brings."""
        at = event.find(_TOKENS) + len(_TOKENS)
        if event.count(_MEMBER) != event.count(_NONE) + (at >= len(_TOKENS)):
            return None, 0
        end = event.find(b"]", at)
        if at >= len(_TOKENS) and end >= 0:
            count = event.count(b",", at, end) + (end > at)
            return (event[: at - 1] + b"null" + event[end + 1 :] if self._strips else event), count
        return (event, 1) if _CHOICE in event else (None, 0)

    def _keep(self, event: bytes) -> None:
        if not self.keeps:
            return
        self._kept_bytes += len(event)
        if self._kept_bytes > self._limit_bytes:
            self.keeps = False
            self._kept.clear()
        else:
            self._kept.append(event)

    def _count(self, tokens: int) -> None:
        self._unreported += tokens
        self._job.answered_tokens += tokens


class PlainReceiver:
    """The same without C."""

    __slots__ = ("heard", "quick")

    def __init__(self) -> None:
        self.quick: Callable[[bytes], int] | None = None
        self.heard = False

    def data_received(self, data: bytes) -> None:
        """See above."""
        if self.quick is not None and len(data) < RAW_MAX and (done := self.quick(data)):
            self.heard = True
            if done > 1:
                self.reported()
        else:
            self.received(data)

    def received(self, data: bytes) -> None:
        """What nobody took quickly."""
        raise NotImplementedError

    def reported(self) -> None:
        """Who took it wants to be asked."""
        raise NotImplementedError


try:
    from headwater._kernels._events import Receiver, TokenEvents, Writer
except ImportError:  # installed without a compiler
    NATIVE = False
    Receiver = PlainReceiver  # type: ignore[assignment, misc]
    TokenEvents = PlainTokenEvents  # type: ignore[assignment, misc]
    Writer = PlainWriter  # type: ignore[assignment, misc]
else:
    NATIVE = True
