"""Which objects lie where, in memory that a node writes and its clients read without asking.

Theory of operation. The table is a segment of its own, mapped by every client. An object is in one of two buckets of
eight places that its key names; a place is a *tag* (half of the key, 0 where it is free) and an *entry* of eight u64:

    key (2) · kind · address · length · expires (CLOCK_MONOTONIC ms, 0: never) · checksum's half · serial

    publish    entry written, its serial last                            -> tag written
    withdraw   tag = 0 -> entry = 0, key first                           -> only then may the slot have another owner
    read       tag -> entry, twice the same: it is one object's -> copy out of the slot -> the same entry again: no
               serial is used twice, so the bytes are those of that object; another entry: look again, the bytes are
               nobody's

All are aligned stores and loads of 8 bytes, whose order other cores see on x86-64 (`TRUSTED`); elsewhere clients ask
the node. Where no place is free an object is only in the node's books, and clients are told that they must ask.
"""

from __future__ import annotations

import platform
import struct
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headwater.ports import Bytes
from headwater.types import PAGE_BYTES, ChunkKey

MAGIC = int.from_bytes(b"hwtable1", "little")
PLACES = 8
TRUSTED = platform.machine() in ("x86_64", "AMD64")
BYTES_A_PLACE = 72
SLOT_BYTES_TYPICAL = 8192
"""Memory is divided by this to find how many objects the table is made for."""

_bucket = struct.Struct(f"{PLACES}Q")
_entry = struct.Struct("8Q")
_halves = struct.Struct("QQ")
_word = struct.Struct("Q")
_NOTHING = bytes(_entry.size)
_UNPUBLISHED_AT, _BELOW_AT = 16, 24
Entry = tuple[int, int, int, int, int, int, int, int]


def buckets_for(memory_bytes: int) -> int:
    """How many buckets a node of this size has: a power of two."""
    return 1 << max((memory_bytes // SLOT_BYTES_TYPICAL // PLACES).bit_length() - 1, 3)


def table_bytes(buckets: int) -> int:
    """The size of a table, whole pages."""
    return PAGE_BYTES + -(-buckets * PLACES * BYTES_A_PLACE // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Listing:
    """What is said of an object."""

    key: ChunkKey
    kind: int
    address: int
    length_bytes: int
    expires_ms: int
    checksum: bytes


class Table:
    """The node's side: the only writer."""

    def __init__(self, memory: memoryview, *, below: bool) -> None:
        """`below` says that what is not here may be in a lower tier. The memory is zero."""
        self._memory = memory
        self._buckets = buckets_of(len(memory))
        self._tags, self._entries = PAGE_BYTES, PAGE_BYTES + self._buckets * _bucket.size
        self._serial = 0
        self._unpublished = 0
        _word.pack_into(memory, _BELOW_AT, below)
        _word.pack_into(memory, 0, MAGIC)

    def publish(self, it: Listing) -> int | None:
        """Have clients find an object; its place, or None where there is none for it."""
        first, tag = _halves.unpack(it.key)
        mask = self._buckets - 1
        for bucket in (first & mask, first >> 32 & mask) if first and tag else ():
            at = self._tags + bucket * _bucket.size
            tags = _bucket.unpack_from(self._memory, at)
            if 0 in tags:
                place: int = bucket * PLACES + tags.index(0)
                self._serial += 1
                half = int.from_bytes(it.checksum[:8], "little")
                where = (first, tag, it.kind, it.address, it.length_bytes, it.expires_ms, half, self._serial)
                _entry.pack_into(self._memory, self._entries + place * _entry.size, *where)
                _word.pack_into(self._memory, self._tags + place * _word.size, tag)
                return place
        self._unpublished += 1
        _word.pack_into(self._memory, _UNPUBLISHED_AT, self._unpublished)
        return None

    def withdraw(self, place: int | None) -> None:
        """Have nobody find what is there."""
        if place is None:
            self._unpublished -= 1
            _word.pack_into(self._memory, _UNPUBLISHED_AT, self._unpublished)
            return
        _word.pack_into(self._memory, self._tags + place * _word.size, 0)
        _entry.pack_into(self._memory, self._entries + place * _entry.size, 0, 0, 0, 0, 0, 0, 0, 0)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.release()


def buckets_of(size_bytes: int) -> int:
    """How many buckets a table of this size has."""
    return 1 << ((size_bytes - PAGE_BYTES) // BYTES_A_PLACE // PLACES).bit_length() - 1


class TableReader:
    """A client's side. Safe from several threads: nothing is ever written. Keys are the tenants' own: each begins with
    the tenant's root, so that one table serves all."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory.data
        self._buckets = buckets = buckets_of(len(memory))
        self._entries = PAGE_BYTES + buckets * _bucket.size
        words: npt.NDArray[np.uint64] = memory.view(np.uint64)
        first = PAGE_BYTES // 8
        self._tag_rows = words[first : first + buckets * PLACES].reshape(buckets, PLACES)
        last = first + buckets * PLACES * 9
        self._entry_rows = words[first + buckets * PLACES : last].reshape(buckets * PLACES, 8)

    @property
    def is_table(self) -> bool:
        """Whether this memory is a table that we can read."""
        return bool(_word.unpack_from(self._memory)[0] == MAGIC)

    @property
    def is_complete(self) -> bool:
        """Whether what is not here is nowhere."""
        return not any(struct.unpack_from("QQ", self._memory, _UNPUBLISHED_AT))

    def find(self, key: ChunkKey) -> tuple[int, Entry] | None:
        """Where an object's entry is, and what it says; None if it is not here, or over."""
        first, tag = _halves.unpack(key)
        mask = self._buckets - 1
        for bucket in (first & mask, first >> 32 & mask):
            tags = _bucket.unpack_from(self._memory, PAGE_BYTES + bucket * _bucket.size)
            if tag in tags:
                for place, it in enumerate(tags, bucket * PLACES):
                    if it == tag and (entry := self._entry(place, first, tag)) is not None:
                        return place, entry
        return None

    def _entry(self, place: int, first: int, tag: int) -> Entry | None:
        at = self._entries + place * _entry.size
        entry: Entry = _entry.unpack_from(self._memory, at)
        # A reader that was overtaken between two words has some of one object, and some of the next.
        while entry != (again := _entry.unpack_from(self._memory, at)):
            entry = again
        if entry[0] != first or entry[1] != tag or not entry[7]:
            return None
        return None if entry[5] and entry[5] <= time.monotonic() * 1000 else entry

    def still(self, place: int, entry: Entry) -> bool:
        """Whether an entry is as it was: what was copied from its slot in between are that object's bytes."""
        now: Entry = _entry.unpack_from(self._memory, self._entries + place * _entry.size)
        return now == entry

    def kinds(self, packed: bytes) -> npt.NDArray[np.int8]:
        """The kind of each of many packed keys; -1 where it is not here."""
        keys = np.frombuffer(packed, np.uint64).reshape(-1, 2)
        mask = np.uint64(self._buckets - 1)
        kinds = np.full(len(keys), -1, np.int8)
        tags = keys[:, 1:]
        for buckets in (keys[:, 0] & mask, keys[:, 0] >> np.uint64(32) & mask):
            rows, columns = np.nonzero(self._tag_rows[buckets] == tags)
            if len(rows):
                entries = self._entry_rows[buckets[rows] * np.uint64(PLACES) + columns.astype(np.uint64)]
                over = (entries[:, 5] != 0) & (entries[:, 5] <= np.uint64(int(time.monotonic() * 1000)))
                here = (entries[:, :2] == keys[rows]).all(axis=1) & (entries[:, 7] != 0) & ~over
                kinds[rows[here]] = entries[here, 2]
        return kinds

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.release()
        del self._tag_rows, self._entry_rows
