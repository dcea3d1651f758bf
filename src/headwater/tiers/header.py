"""The page in front of every stored chunk, the same in all lower tiers: what it is, and a checksum that proves it.

    0     magic "headwatr" · version u16 · flags u16 · group u32 · slot_bytes u64 (of its place; 0 where it has none)
    24    length u64 (payload as it was) · stored u64 (payload as it lies after this page)
    40    payload checksum, xxh3-128 of the stored bytes (16)
    56    namespace root (32) · layout fingerprint (16) · key (16) · parent (16, zero at the start of a prompt)
    136   codec (16, ASCII) · key id (16, ASCII) · extra (64, the codec's own)
    232   origin length u16 · origin, msgpack of (namespace, layout); left out when it does not fit
    4088  header checksum, xxh3-64 of all before

Little-endian. A bit that flips anywhere is found: in the page by its own checksum, in the payload by the other.
Version 1 reads version 1; what is newer is a miss and is left alone.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import msgspec
import xxhash

from headwater.ports import Bytes
from headwater.types import KEY_BYTES, PAGE_BYTES, ChunkKey, Identity, KVLayout, Namespace, Origin, Outcome

MAGIC = b"headwatr"
VERSION = 1
HAS_PARENT = 1
EXTRA_BYTES = 64

_fixed = struct.Struct("<8sHHIQQQ16s32s16s16s16s16s16s64sH")
_checksum = struct.Struct("<Q")
_CHECKSUM_AT = PAGE_BYTES - _checksum.size
_origins: msgspec.msgpack.Decoder[tuple[Namespace, KVLayout]] = msgspec.msgpack.Decoder(tuple[Namespace, KVLayout])


@dataclass(frozen=True, slots=True)
class Encoded:
    """How a payload lies in a tier: its length there, and what its codec needs to bring it back."""

    stored_bytes: int
    codec: str = "none"
    key_id: str = ""
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class Header:
    """A header page that is whole and of our version; what it says of the payload is not yet proved."""

    slot_bytes: int
    length_bytes: int
    encoded: Encoded
    checksum: bytes
    root: bytes
    layout: bytes
    group: int
    key: ChunkKey
    parent: bytes
    origin: Origin | None

    def names(self, identity: Identity) -> bool:
        """Whether this is the header of that very chunk."""
        return (
            self.key == identity.key
            and self.root == identity.origin.root
            and self.layout == _fingerprint(identity.origin.layout)
            and self.group == identity.group
            and self.length_bytes == identity.length_bytes
        )


class Unreadable(enum.Enum):
    """Why a page is no header of ours."""

    CORRUPT = Outcome.CORRUPT
    NEWER = Outcome.NEWER


def payload_checksum(payload: Bytes | memoryview) -> bytes:
    """xxh3-128 of stored bytes."""
    return xxhash.xxh3_128_digest(payload if isinstance(payload, memoryview) else payload.data)


def write_header(page: memoryview, identity: Identity, encoded: Encoded, checksum: bytes, slot_bytes: int = 0) -> None:
    """Fill a page of PAGE_BYTES; `checksum` is `payload_checksum` of the stored bytes."""
    origin = identity.origin
    about = msgspec.msgpack.encode((origin.namespace, origin.layout))
    if _fixed.size + len(about) > _CHECKSUM_AT:
        about = b""
    page[:] = bytes(PAGE_BYTES)
    _fixed.pack_into(
        page,
        0,
        MAGIC,
        VERSION,
        HAS_PARENT if identity.parent else 0,
        identity.group,
        slot_bytes,
        identity.length_bytes,
        encoded.stored_bytes,
        checksum,
        origin.root,
        _fingerprint(origin.layout),
        identity.key,
        identity.parent,
        encoded.codec.encode("ascii"),
        encoded.key_id.encode("ascii"),
        encoded.extra,
        len(about),
    )
    page[_fixed.size : _fixed.size + len(about)] = about
    _checksum.pack_into(page, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(page[:_CHECKSUM_AT]))


def read_header(page: memoryview | bytes) -> Header | Unreadable:
    """What a page says, or why it says nothing."""
    page = memoryview(page)
    if len(page) != PAGE_BYTES or bytes(page[: len(MAGIC)]) != MAGIC:
        return Unreadable.CORRUPT
    if _checksum.unpack_from(page, _CHECKSUM_AT)[0] != xxhash.xxh3_64_intdigest(page[:_CHECKSUM_AT]):
        # A newer version may keep its checksum elsewhere; a flipped version bit must not pass for one.
        return Unreadable.CORRUPT
    _, version, flags, group, slot, length, stored, checksum, root, layout, key, parent, codec, key_id, extra, size = (
        _fixed.unpack_from(page)
    )
    if version > VERSION:
        return Unreadable.NEWER
    if version != VERSION or _fixed.size + size > _CHECKSUM_AT:
        return Unreadable.CORRUPT
    return Header(
        slot,
        length,
        Encoded(stored, _text(codec), _text(key_id), extra),
        checksum,
        root,
        layout,
        group,
        ChunkKey(key),
        parent if flags & HAS_PARENT else b"",
        _origin(bytes(page[_fixed.size : _fixed.size + size]), root),
    )


def check_payload(header: Header, payload: Bytes | memoryview) -> Outcome:
    """Whether stored bytes are what was written: DONE or CORRUPT."""
    whole = len(payload) == header.encoded.stored_bytes and payload_checksum(payload) == header.checksum
    return Outcome.DONE if whole else Outcome.CORRUPT


def _fingerprint(layout: KVLayout) -> bytes:
    return bytes.fromhex(layout.fingerprint())


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")


def _origin(about: bytes, root: bytes) -> Origin | None:
    if not about:
        return None
    try:
        namespace, layout = _origins.decode(about)
    except (msgspec.DecodeError, msgspec.ValidationError):  # whole by its checksum, so written by something else
        return None
    return None if layout.problem() else Origin(namespace, layout, root)


assert KEY_BYTES == 16 and _fixed.size == 234, f"header of {_fixed.size} bytes"
