"""Chunks whose every page tells which key it belongs to and which attempt to store it wrote it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headwater.node.client import Session
from headwater.types import ABSENT, PAGE_BYTES, ChunkKey, KVGroup, KVLayout, Namespace

Bytes = npt.NDArray[np.uint8]
HEAD = struct.Struct("<QQ")


def layout_of(chunk_bytes: int) -> KVLayout:
    """One group, one shard, chunks of so many bytes."""
    return KVLayout(16, (KVGroup(16, chunk_bytes, (1,)),))


def namespace_of(layout: KVLayout) -> Namespace:
    """The tests' namespace for a layout."""
    return Namespace(model="m", kv_dtype="bf16", layout="cpu", groups=layout.fingerprint())


def payload(key: bytes, attempt: int, size_bytes: int) -> Bytes:
    """The bytes of one chunk: each page has the attempt, its own number, and a digest of both and the key."""
    pages = np.empty((size_bytes // PAGE_BYTES, PAGE_BYTES), np.uint8)
    pages[:] = np.frombuffer(hashlib.shake_128(key + attempt.to_bytes(8, "little")).digest(PAGE_BYTES), np.uint8)
    for number, page in enumerate(pages):
        page[: HEAD.size] = np.frombuffer(HEAD.pack(attempt, number), np.uint8)
    return pages.reshape(-1)


def attempt_of(key: bytes, data: Bytes) -> int:
    """Which attempt wrote these bytes; fails if they are not all of one attempt at this key."""
    attempt, _ = HEAD.unpack_from(data[: HEAD.size].tobytes())
    expected = payload(key, attempt, len(data))
    if not np.array_equal(data, expected):
        pages = [
            HEAD.unpack_from(data[at : at + HEAD.size].tobytes())
            for at in range(0, len(data), PAGE_BYTES)
            if not np.array_equal(data[at : at + PAGE_BYTES], expected[at : at + PAGE_BYTES])
        ]
        raise AssertionError(f"wrong bytes: not those of attempt {attempt}, but (attempt, page) {pages[:8]}")
    return int(attempt)


def part(session: Session, place: int, size_bytes: int) -> Bytes:
    """The bytes at a node address, where they lie."""
    assert session.link.memory is not None
    return np.frombuffer(session.link.memory.view(place, size_bytes), np.uint8)


def put(session: Session, wanted: Sequence[ChunkKey], attempt: int) -> int:
    """Save what is not held yet; how many chunks were written."""
    size = session.layout.slot_bytes(0)
    got = session.reserve(wanted)
    places = [(key, place) for key, place in zip(wanted, got.addresses[0], strict=False) if place != ABSENT]
    for key, place in places:
        part(session, place, size)[:] = payload(key, attempt, size)
    if got.ticket:
        session.done(got.ticket)
    return len(places)
