"""What peers say to each other, as bytes: frames, and what is in them. Pure: nothing here knows a socket.

A frame is a header of 24 bytes, a body, and zeros up to a multiple of 64 bytes: what comes behind it is copied nearly
twice as fast by kernels if it begins at such a place.

    "HW" | protocol u8 | kind u8 | serial u32 | body bytes u32 | checksum of body and zeros u64 | of all that u32

All numbers are little-endian, checksums are xxh3-64 (of the header its lower half), seeded by what both sides agreed
on in the handshake, so that a frame of another connection is none of this one. The serial counts the frames of one
direction: what is lost, doubled or in the wrong place is noticed before it is believed. The handshake is protocol 0,
which never changes; everything after it is the protocol that was chosen there.

    READ      a batch            -> STATUSES, the DONE items' bytes back to back, TRAILER
    WRITE     a batch, the bytes back to back, TRAILER          -> STATUSES
    LEND      a batch            -> LENT: a loan, and where the things lie; ended by GIVE_BACK, which has no answer
    ACCEPT    a batch            -> LENT: room to write into; ended by COMMIT -> STATUSES
    REGIONS   from which number  -> MAPPED, with the descriptors beside it (Unix sockets only)
    ASK       topic and body     -> ANSWER
    anything                     -> REFUSED (it is not served) or BUSY (not now); the connection stays good
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from headwater.errors import ProtocolError, RefusedError
from headwater.ports import Lent
from headwater.types import Extent, Outcome

MAGIC = b"HW"
OLDEST, NEWEST = 1, 1
"""The protocols that this version speaks."""
HANDSHAKE = 0
_header = struct.Struct("<2sBBIIQI")
_head = struct.Struct("<2sBBIIQ")
_check = struct.Struct("<I")
HEAD_BYTES = _head.size
HEADER_BYTES = _header.size
ALIGN_BYTES = 64
_padding = [bytes(it) for it in range(ALIGN_BYTES)]
MOST_MESSAGE = 4 << 20
MOST_BODY = MOST_MESSAGE + 4096
MOST_GREETING = 4 << 10
"""What may be said before the handshake is over."""
MOST_NAMES = 1 << 16
MOST_NAME = 64
MOST_REALM = 64
MOST_TOPIC = 64
MOST_REGIONS = 4096
"""As many of one exporter's have a number by which peers find them, at a time."""
LOCAL_TOPIC = "headwater.local."
"""What topics begin with that are answered over Unix sockets only."""
MOST_THING = 1 << 40
"""Bytes of one request's things, together."""
MOST_BUDGET_S = 60.0
MOST_TEXT = 500
SMALL_BYTES = 8 << 10


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    BUSY = 6
    READ = 16
    WRITE = 17
    STATUSES = 18
    TRAILER = 19
    LEND = 20
    ACCEPT = 21
    LENT = 22
    GIVE_BACK = 23
    COMMIT = 24
    REGIONS = 25
    MAPPED = 26
    ASK = 27
    ANSWER = 28


KINDS = {it.value: it for it in Kind}
CODES = tuple(Outcome)
_code = {it: number for number, it in enumerate(CODES)}
DONE = 0
assert CODES[:9] == (
    Outcome.DONE, Outcome.MISSING, Outcome.FOREIGN, Outcome.NEWER, Outcome.CORRUPT, Outcome.DAMAGED, Outcome.FULL,
    Outcome.REFUSED, Outcome.FAILED,
)  # fmt: skip


# ---- frames -------------------------------------------------------------------------------------------


def padding(length: int) -> int:
    """How many zeros follow a body of `length` bytes."""
    return -(HEADER_BYTES + length) % ALIGN_BYTES


def encode_frame(protocol: int, kind: Kind, serial: int, body: bytes, seed: int) -> tuple[bytes, bytes]:
    """A frame in two parts."""
    length = len(body)
    padded = body + _padding[-(HEADER_BYTES + length) % ALIGN_BYTES]
    header = encode_header(protocol, kind, serial, length, xxh3_64_intdigest(padded, seed), seed)
    return (header + padded, b"") if length < SMALL_BYTES else (header, padded)


def encode_header(protocol: int, kind: Kind, serial: int, length: int, content: int, seed: int) -> bytes:
    """The header of a frame with a body of this length and checksum."""
    head = _head.pack(MAGIC, protocol, kind, serial & 0xFFFFFFFF, length, content)
    return head + _check.pack(xxh3_64_intdigest(head, seed) & 0xFFFFFFFF)


def decode_header(
    header: bytes | memoryview, protocol: int, serial: int, most_bytes: int, seed: int
) -> tuple[Kind, int, int]:
    """Kind, body length and body checksum of the frame that must come next. Raises ProtocolError."""
    magic, version, code, count, length, content, check = _header.unpack(header)
    if magic != MAGIC:
        raise ProtocolError(f"a frame that starts with {bytes(header[:4])!r}")
    if check != xxh3_64_intdigest(header[:HEAD_BYTES], seed) & 0xFFFFFFFF:
        raise ProtocolError("a header with a wrong checksum")
    if version != protocol:
        raise ProtocolError(f"a frame of protocol {version}, {protocol} was agreed on")
    if count != serial & 0xFFFFFFFF:
        raise ProtocolError(f"frame {count} where {serial} was due")
    kind = KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"a frame of the unknown kind {code}")
    if length > most_bytes:
        raise ProtocolError(f"a body of {length} bytes, at most {most_bytes} were due")
    return kind, length, content


def check_body(padded: bytes | memoryview, content: int, seed: int) -> None:
    """Raises ProtocolError if this is not the body, with its padding, that the header announced."""
    if xxh3_64_intdigest(padded, seed) != content:
        raise ProtocolError("a body with a wrong checksum")


# ---- batches of named things --------------------------------------------------------------------------

CHECKED = 1
"""Payloads come with their checksums."""
_batch = struct.Struct("<BBHIQ")  # flags, bytes of a name (0: they differ), bytes of the realm, names, budget in us


@dataclass(slots=True)
class Batch:
    """A request that names things: what is wanted, how long each is, and how many seconds the asker has."""

    realm: bytes
    names: Sequence[bytes]
    sizes: Sequence[int]
    budget_s: float
    checked: bool = True


def encode_batch(it: Batch) -> bytes:
    """A batch as bytes; a few tenths of a microsecond a name. Raises RefusedError if it is more than peers take."""
    count = len(it.names)
    lengths = set(map(len, it.names))
    longest = max(lengths, default=0)
    if count > MOST_NAMES or longest > MOST_NAME or len(it.realm) > MOST_REALM:
        given = f"{count} names, the longest of {longest} bytes, in a realm of {len(it.realm)}"
        expected = f"at most {MOST_NAMES} names of {MOST_NAME} bytes in a realm of {MOST_REALM}"
        raise RefusedError("names", expected, given, "ask in smaller requests")
    if count * (longest + 8) + 1024 > MOST_BODY:
        raise RefusedError("names", f"at most {MOST_BODY} bytes", f"{count} of {longest}", "ask in smaller requests")
    uniform = longest if len(lengths) == 1 else 0
    head = _batch.pack(CHECKED if it.checked else 0, uniform, len(it.realm), count, _microseconds(it.budget_s))
    prefix = b"" if uniform else bytes(map(len, it.names))
    return b"".join((head, it.realm, struct.pack(f"<{count}Q", *it.sizes), prefix, *it.names))


def decode_batch(body: bytes | memoryview) -> Batch:
    """The reverse of `encode_batch`. Raises ProtocolError."""
    if len(body) < _batch.size:
        raise ProtocolError(f"a batch of {len(body)} bytes")
    flags, uniform, realm_bytes, count, budget = _batch.unpack_from(body)
    if count > MOST_NAMES or uniform > MOST_NAME or realm_bytes > MOST_REALM or flags & ~CHECKED:
        raise ProtocolError(f"a batch of {count} names of {uniform} bytes in a realm of {realm_bytes}, flags {flags}")
    sizes_at = _batch.size + realm_bytes
    names_at = sizes_at + 8 * count
    if len(body) < names_at + (uniform or 1) * count:
        raise ProtocolError(f"a batch of {count} names in {len(body)} bytes")
    realm = bytes(body[_batch.size : sizes_at])
    sizes = struct.unpack_from(f"<{count}Q", body, sizes_at)
    if sum(sizes) > MOST_THING:
        raise ProtocolError(f"a batch of {sum(sizes)} bytes")
    names = _uniform_names(body[names_at:], uniform) if uniform else _mixed_names(body[names_at:], count)
    if len(names) != count:
        raise ProtocolError(f"{len(names)} names in a batch of {count}")
    return Batch(realm, names, sizes, min(budget / 1e6, MOST_BUDGET_S), bool(flags & CHECKED))


def _uniform_names(packed: bytes | memoryview, size: int) -> list[bytes]:
    if len(packed) % size:
        raise ProtocolError(f"names of {size} bytes in {len(packed)} bytes")
    return list(chain.from_iterable(struct.iter_unpack(f"{size}s", packed)))


def _mixed_names(packed: bytes | memoryview, count: int) -> list[bytes]:
    lengths, at = bytes(packed[:count]), count
    if max(lengths, default=0) > MOST_NAME or count + sum(lengths) != len(packed):
        raise ProtocolError(f"{count} names of {sum(lengths)} bytes in {len(packed)} bytes")
    names: list[bytes] = []
    for length in lengths:
        names.append(bytes(packed[at : at + length]))
        at += length
    return names


def _microseconds(budget_s: float) -> int:
    return int(min(max(budget_s, 0.0), MOST_BUDGET_S) * 1e6)


# ---- outcomes and checksums ---------------------------------------------------------------------------


def encode_statuses(outcomes: Sequence[Outcome]) -> bytes:
    """One byte for each item."""
    if outcomes.count(Outcome.DONE) == len(outcomes):
        return bytes(len(outcomes))
    return bytes([_code[it] for it in outcomes])


def decode_statuses(body: bytes | memoryview, count: int) -> list[Outcome]:
    """The reverse, for `count` items. Raises ProtocolError."""
    if len(body) != count:
        raise ProtocolError(f"{len(body)} outcomes of {count} items")
    if bytes(body).count(DONE) == count:
        return [Outcome.DONE] * count
    try:
        return [CODES[it] for it in body]
    except IndexError:
        raise ProtocolError(f"the unknown outcome {max(body)}") from None


def trailer_bytes(count: int, checked: bool) -> int:
    """The length of a trailer behind `count` payloads."""
    return 1 + 8 * count * checked


def encode_trailer(late: bool, checksums: Sequence[int]) -> bytes:
    """What is said behind payloads: whether the loan had ended meanwhile, and the payloads' checksums."""
    return struct.pack(f"<B{len(checksums)}Q", late, *checksums)


def decode_trailer(body: bytes | memoryview, count: int, checked: bool) -> tuple[bool, Sequence[int]]:
    """The reverse, behind `count` payloads. Raises ProtocolError."""
    if len(body) != trailer_bytes(count, checked) or body[0] > 1:
        raise ProtocolError(f"a trailer of {len(body)} bytes behind {count} payloads")
    return bool(body[0]), struct.unpack_from(f"<{count}Q", body, 1) if checked else ()


# ---- loans --------------------------------------------------------------------------------------------

_loan = struct.Struct("<QQI")  # number, microseconds left, parts
_part = struct.Struct("<BBIQQ")  # outcome, whether the checksum is known, segment, offset, checksum
NOWHERE = 0xFFFFFFFF
"""The segment of memory that is in none: it can be read only over the connection."""


@dataclass(slots=True)
class Place:
    """One lent thing: where it lies in the exporter's segments, and its checksum where it is known."""

    extent: Extent
    checksum: int | None


@dataclass(slots=True)
class Grant:
    """A loan that the asker uses by itself: `left_s` counts from when the request was sent, at the earliest."""

    number: int
    left_s: float
    parts: Sequence[Place | Outcome]


def encode_grant(number: int, left_s: float, parts: Sequence[Lent | Outcome]) -> bytes:
    """A loan as bytes; memory without an extent is FAILED."""
    rows = [_loan.pack(number, _microseconds(left_s), len(parts))]
    for it in parts:
        if isinstance(it, Outcome):
            rows.append(_part.pack(_code[it], 0, 0, 0, 0))
        elif it.extent is None:
            rows.append(_part.pack(_code[Outcome.FAILED], 0, 0, 0, 0))
        else:
            known = it.checksum is not None
            rows.append(_part.pack(DONE, known, it.extent.segment, it.extent.offset_bytes, it.checksum or 0))
    return b"".join(rows)


def decode_grant(body: bytes | memoryview, sizes: Sequence[int]) -> Grant:
    """The reverse, for things of these sizes. Raises ProtocolError."""
    if len(body) < _loan.size:
        raise ProtocolError(f"a loan of {len(body)} bytes")
    number, left, count = _loan.unpack_from(body)
    if count != len(sizes) or len(body) != _loan.size + count * _part.size:
        raise ProtocolError(f"a loan of {count} parts in {len(body)} bytes, {len(sizes)} were asked for")
    parts: list[Place | Outcome] = []
    rows = _part.iter_unpack(body[_loan.size :])
    for size, (code, known, segment, offset, checksum) in zip(sizes, rows, strict=True):
        if code == DONE:
            parts.append(Place(Extent(segment, offset, size), checksum if known else None))
        elif code < len(CODES):
            parts.append(CODES[code])
        else:
            raise ProtocolError(f"the unknown outcome {code}")
    return Grant(number, left / 1e6, parts)


_given = struct.Struct("<QI")  # number, parts


def encode_given(number: int, done: Sequence[bool]) -> bytes:
    """The end of a loan: which of its parts were moved whole and in time."""
    return _given.pack(number, len(done)) + bytes(done)


def decode_given(body: bytes | memoryview) -> tuple[int, list[bool]]:
    """The reverse. Raises ProtocolError."""
    if len(body) < _given.size:
        raise ProtocolError(f"the end of a loan in {len(body)} bytes")
    number, count = _given.unpack_from(body)
    flags = bytes(body[_given.size :])
    if len(flags) != count or not set(flags) <= {0, 1}:
        raise ProtocolError(f"the end of a loan of {count} parts in {len(body)} bytes")
    return number, [it == 1 for it in flags]


def encode_commit(number: int, done: Sequence[bool], checksums: Sequence[int]) -> bytes:
    """The end of a loan that was written to, with the checksums of the parts that are done, or none at all."""
    return encode_given(number, done) + struct.pack(f"<{len(checksums)}Q", *checksums)


def decode_commit(body: bytes | memoryview) -> tuple[int, list[bool], Sequence[int]]:
    """The reverse. Raises ProtocolError."""
    count = _given.unpack_from(body)[1] if len(body) >= _given.size else 0
    number, done = decode_given(body[: _given.size + count])
    rest = body[_given.size + count :]
    if len(rest) not in (0, 8 * sum(done)):
        raise ProtocolError(f"{len(rest)} bytes of checksums for {sum(done)} parts")
    return number, done, struct.unpack(f"<{len(rest) // 8}Q", rest)


# ---- messages -----------------------------------------------------------------------------------------


class Ask(msgspec.Struct, array_like=True):
    """A message and how long its sender waits."""

    topic: str
    budget_s: float
    body: bytes


class Regions(msgspec.Struct, array_like=True):
    """Wants the exporter's regions from this number on."""

    first: int


class Mapped(msgspec.Struct, array_like=True):
    """The numbers of all regions that are there, rising. Of the first of those asked for, as many as are told of at
    once: the sizes, whether the descriptor came along (in order), whether the asker may write."""

    numbers: list[int]
    sizes: list[int]
    passed: list[bool]
    writable: list[bool]


class Refused(msgspec.Struct, array_like=True):
    """Why something is not served: the fields of a RefusedError."""

    field: str
    expected: str
    given: str
    remedy: str

    @classmethod
    def of(cls, error: RefusedError) -> Refused:
        """An error as it is sent."""
        texts = (error.field, error.expected, error.given, error.remedy)
        return cls(*(it[:MOST_TEXT] for it in texts))

    def error(self) -> RefusedError:
        """What was sent, as the error that it was."""
        return RefusedError(*(it[:MOST_TEXT] for it in (self.field, self.expected, self.given, self.remedy)))


T = TypeVar("T")
_ask = msgspec.msgpack.Decoder(Ask)
_regions = msgspec.msgpack.Decoder(Regions)
_mapped = msgspec.msgpack.Decoder(Mapped)
_refused = msgspec.msgpack.Decoder(Refused)
_encoder = msgspec.msgpack.Encoder()


def encode_message(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_ask(body: bytes | memoryview) -> Ask:
    """Raises ProtocolError."""
    it: Ask = decode_with(_ask, body)
    if len(it.topic) > MOST_TOPIC or not it.budget_s >= 0:
        raise ProtocolError(f"a topic of {len(it.topic)} letters with {it.budget_s} s")
    return it


def decode_regions(body: bytes | memoryview) -> Regions:
    """Raises ProtocolError."""
    it: Regions = decode_with(_regions, body)
    if it.first < 0:
        raise ProtocolError(f"regions from {it.first} on")
    return it


def decode_mapped(body: bytes | memoryview) -> Mapped:
    """Raises ProtocolError."""
    it: Mapped = decode_with(_mapped, body)
    if not len(it.sizes) == len(it.passed) == len(it.writable) <= len(it.numbers) or min(it.sizes, default=0) < 0:
        raise ProtocolError(f"{len(it.sizes)} regions, {len(it.passed)} and {len(it.writable)} marks")
    if len(it.numbers) > MOST_REGIONS or any(after <= before for before, after in pairwise((-1, *it.numbers, NOWHERE))):
        raise ProtocolError(f"{len(it.numbers)} numbers of regions that do not rise, or too many")
    return it


def decode_refused(body: bytes | memoryview) -> RefusedError:
    """Raises ProtocolError."""
    it: Refused = decode_with(_refused, body)
    return it.error()


def decode_with(decoder: msgspec.msgpack.Decoder[T], body: bytes | memoryview) -> T:
    """One message. Raises ProtocolError."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from None
