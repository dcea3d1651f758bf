"""How an object of the Store lies in a node's memory: its key, the size of its slot, the header in front of it.

An object is a chunk like any other. Its namespace is one a tenant and slot size, with a single KV group of the rule
LAST, so that its key hangs on nothing. A slot begins with a header of 64 bytes, little-endian:

    0   magic "hwob" · version u8 · kind u8 · zero u16
    8   length u64 (bytes after the header) · expires u64 (Unix time in ns; 0: never)
    24  checksum, xxh3-128 of these bytes (16) · attempt u64 (of the put that wrote it) · key (16)

Slots are 1, 2 or 1 + 2^k * (4, 5, 6 or 7) / 4 pages: what people store is mostly a power of two, and 64 bytes more.
What is larger than a slab is SPLIT: its PARTs are objects of their own, and the object itself lists them.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from headwater.types import KEY_BYTES, PAGE_BYTES, ChunkKey, HitRule, KVGroup, KVLayout, Namespace, align

MODEL = "headwater.store"
KEY_BYTES_MAX = 4096
HEADER_BYTES = 64
MAGIC, VERSION = b"hwob", 1
STEPS_AN_OCTAVE = 4
PARTS_MAX = 65_536
"""What an object may consist of: as many keys as one call may name."""

_header = struct.Struct("<4sBBHQQ16sQ16s")
_split = struct.Struct("<QQQ")


class Kind(enum.IntEnum):
    """What the bytes after a header are."""

    WHOLE = 0
    SPLIT = 1
    PART = 2


@dataclass(frozen=True, slots=True)
class Header:
    """What the slot of an object says of it."""

    key: ChunkKey
    kind: Kind
    length_bytes: int
    checksum: bytes
    expires_ns: int
    attempt: int

    def encode(self) -> bytes:
        """As 64 bytes."""
        return _header.pack(
            MAGIC,
            VERSION,
            self.kind,
            0,
            self.length_bytes,
            self.expires_ns,
            self.checksum,
            self.attempt,
            self.key,
        )


def read_header(slot: memoryview, key: ChunkKey) -> Header | None:
    """The header of the object with this key; None if something else lies in this slot."""
    magic, version, kind, _, length, expires_ns, checksum, attempt, named = _header.unpack_from(slot)
    if magic != MAGIC or version != VERSION or kind > Kind.PART or named != key:
        return None
    if length > len(slot) - HEADER_BYTES:
        return None
    return Header(key, Kind(kind), length, checksum, expires_ns, attempt)


@dataclass(frozen=True, slots=True)
class Split:
    """What a SPLIT object consists of: `attempt` is in its parts' keys, so that two puts never share a part."""

    length_bytes: int
    part_bytes: int
    attempt: int

    def encode(self) -> bytes:
        """As what follows the header of a SPLIT object."""
        return _split.pack(self.length_bytes, self.part_bytes, self.attempt)

    @classmethod
    def decode(cls, data: bytes) -> Split | None:
        """The reverse; None for anything that cannot be."""
        if len(data) != _split.size:
            return None
        it = cls(*_split.unpack(data))
        return it if it.part_bytes and it.part_bytes < it.length_bytes <= PARTS_MAX * it.part_bytes else None

    @property
    def sizes(self) -> list[int]:
        """The parts' lengths, in order."""
        whole, rest = divmod(self.length_bytes, self.part_bytes)
        return [self.part_bytes] * whole + [rest] * bool(rest)


def tenant_root(tenant: str) -> bytes:
    """From what all keys of a tenant start."""
    return sha256(b"headwater.store.object.1\n" + tenant.encode("utf-8", "surrogatepass")).digest()


def object_key(root: bytes, name: bytes) -> ChunkKey:
    """The chunk key of the object that a tenant calls `name`."""
    return ChunkKey(sha256(root + name).digest()[:KEY_BYTES])


def part_keys(root: bytes, key: ChunkKey, split: Split) -> list[ChunkKey]:
    """The chunk keys of the parts; the root is followed by something that no name can be: it is longer than any."""
    begun = sha256(root + b"part".ljust(KEY_BYTES_MAX + 1, b"\0") + key)
    keys = []
    for number in range(len(split.sizes)):
        its = begun.copy()
        its.update(struct.pack("<QQ", split.attempt, number))
        keys.append(ChunkKey(its.digest()[:KEY_BYTES]))
    return keys


def slot_bytes(length_bytes: int, slab_bytes: int) -> int | None:
    """The slot for so many bytes; None if no slab is large enough."""
    pages = align(HEADER_BYTES + length_bytes) // PAGE_BYTES
    if pages > 1 + STEPS_AN_OCTAVE:
        step = 1 << (pages - 2).bit_length() - 3
        rounded = 1 + -(-(pages - 1) // step) * step
        # The slab itself is a slot too: the last step before it may be far.
        pages = min(rounded, slab_bytes // PAGE_BYTES) if pages * PAGE_BYTES <= slab_bytes else rounded
    return pages * PAGE_BYTES if pages * PAGE_BYTES <= slab_bytes else None


@lru_cache(maxsize=1024)
def object_layout(size_bytes: int) -> KVLayout:
    """The layout of objects in slots of this size."""
    return KVLayout(1, (KVGroup(1, size_bytes, (1,), HitRule.LAST),))


@lru_cache(maxsize=4096)
def object_namespace(tenant: str, size_bytes: int) -> Namespace:
    """The namespace of a tenant's objects in slots of this size."""
    groups = object_layout(size_bytes).fingerprint()
    return Namespace(MODEL, "bytes", f"object.{VERSION}/{size_bytes}", groups, tenant=tenant)
