"""Bytes back to back on a connection, with a trailer behind them, and their checksums.

Hashing costs little while bytes are in the caches and the other side is at work meanwhile, so big payloads are moved
and hashed in pieces. Whether a loan had ended is looked at after its memory was sent; only what the kernel takes at
once, and a checksum pins, goes out together with the answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from headwater.ports import Bytes
from headwater.transports.stream import Buffer, Stream
from headwater.transports.wire import Kind, decode_trailer, encode_trailer, trailer_bytes

PIECE_BYTES = 4 << 20
AT_ONCE_BYTES = 64 << 10

Run: TypeAlias = "tuple[Sequence[Bytes], bool, bool]"
"""Windows that are moved by one call, whether they are whole payloads, and whether a payload ends here."""


def checksum(memory: Buffer) -> int:
    """The xxh3-64 of a payload."""
    return xxh3_64_intdigest(memory)


def send_payloads(
    stream: Stream,
    head: Sequence[Buffer],
    memories: Sequence[Bytes],
    known: Sequence[int | None],
    *,
    checked: bool,
    deadline_s: float,
    until_s: float,
) -> tuple[list[int], bool]:
    """Send `head`, the payloads and their trailer; the checksums, and whether it was too late. Raises UnavailableError.

    Payloads without a known checksum are hashed; a known one is taken at its word, and the receiver's business.
    """
    sums = Sums()
    if checked and None in known:
        held: list[Buffer] = list(head)
        for run in runs(memories):
            if len(held) > len(head) or not head:
                stream.send(held, until_s, more=True)
                held, head = [], ()
            sums.take(run)
            held += run[0]
        found = [mine if it is None else it for mine, it in zip(sums.found, known, strict=True)]
    else:
        held = [*head, *memories]
        found = [it for it in known if it is not None] if checked else []
    if not checked or sum(map(len, memories)) > AT_ONCE_BYTES:
        stream.send(held, until_s, more=True)
        held = []
    late = time.monotonic() > deadline_s
    stream.send([*held, *stream.frame(Kind.TRAILER, encode_trailer(late, found))], until_s)
    return found, late


def receive_payloads(
    stream: Stream, memories: Sequence[Bytes], *, checked: bool, until_s: float
) -> tuple[Sequence[bool], bool]:
    """Receive payloads and their trailer: which have the right checksum, and whether it was too late.

    Raises UnavailableError, ProtocolError.
    """
    count = len(memories)
    length = trailer_bytes(count, checked)
    sums = Sums()
    *first, last = runs(memories) if checked else [(memories, True, True)]
    for run in first:
        stream.fill(run[0], until_s)
        sums.take(run)
    if stream.buffered:  # a small answer, of which most is here already
        stream.fill(last[0], until_s)
        kind, body = stream.hear(until_s, length)
        if kind is not Kind.TRAILER:
            raise stream.nonsense(f"{kind.name} behind payloads")
    else:
        room = stream.room(length)
        stream.fill([*last[0], room], until_s)
        body = stream.accept(room, Kind.TRAILER)
    late, expected = decode_trailer(body, count, checked)
    if not checked:
        return [True] * count, late
    sums.take(last)
    if sums.found == list(expected):
        return [True] * count, late
    return [mine == theirs for mine, theirs in zip(sums.found, expected, strict=True)], late


class Sums:
    """Checksums of payloads that come in runs."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._open = xxh3_64()

    def take(self, run: Run) -> None:
        """Hash a run, the next in order."""
        windows, whole, ends = run
        if whole:
            self.found += map(checksum, windows)
            return
        window: Buffer = windows[0]
        self._open.update(window)
        if ends:
            self.found.append(self._open.intdigest())
            self._open.reset()


def runs(memories: Sequence[Bytes]) -> Iterator[Run]:
    """Payloads in order: small ones many at a time, big ones in pieces."""
    first = size = 0
    for index, it in enumerate(memories):
        length = len(it)
        if length > PIECE_BYTES:
            if first < index:
                yield memories[first:index], True, True
            for at in range(0, length, PIECE_BYTES):
                yield [it[at : at + PIECE_BYTES]], False, at + PIECE_BYTES >= length
            first, size = index + 1, 0
            continue
        size += length
        if size >= PIECE_BYTES:
            yield memories[first : index + 1], True, True
            first, size = index + 1, 0
    if first < len(memories):
        yield memories[first:], True, True
