"""What the tests of the DISK tier share: small layouts, chunks whose bytes follow from their keys, slots on a disk."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headwater.core.pool import Pool
from headwater.ports import Bytes, Piece
from headwater.tiers.direct_io import aligned_buffer
from headwater.tiers.disk import DiskTier
from headwater.types import PAGE_BYTES, ChunkKey, HitRule, Identity, KVGroup, KVLayout, Namespace, Origin, Outcome
from tests.node.conftest import needs_root

KIB, MIB = 1 << 10, 1 << 20
SLAB_BYTES = 64 * KIB
SIZE_BYTES = 4 * MIB


def origin(layers: int = 2, tenant: str = "", rules: Sequence[HitRule] = (HitRule.ALL,)) -> Origin:
    """A namespace whose chunks have `layers` pages in each group."""
    groups = tuple(
        KVGroup(16, PAGE_BYTES, (layers,), rule, window_tokens=16 if rule is HitRule.WINDOW else 0) for rule in rules
    )
    layout = KVLayout(16, groups)
    return Origin.of(Namespace("m", "bf16", "cpu", layout.fingerprint(), tenant=tenant, salt="secret"), layout)


SMALL, LARGE = origin(2), origin(5, "other")
"""Slots of three pages and of six."""


def chunk(name: object, of: Origin = SMALL, parent: Identity | None = None, group: int = 0) -> Identity:
    """The chunk that has this name."""
    key = ChunkKey(hashlib.md5(f"{name}".encode()).digest())
    return Identity(of, group, key, parent.key if parent else b"")


def chain(count: int, of: Origin = SMALL, name: str = "") -> list[Identity]:
    """A prompt's chunks, each the parent of the next."""
    found: list[Identity] = []
    for index in range(count):
        found.append(chunk(f"{name}/{index}", of, found[-1] if found else None))
    return found


def content(identity: Identity) -> Bytes:
    """The bytes of a chunk: they follow from its identity, so that any foreign byte shows."""
    seed = identity.origin.root + identity.key + bytes([identity.group])
    return np.frombuffer(hashlib.shake_128(seed).digest(identity.length_bytes), np.uint8)


def soon() -> float:
    """A deadline that is not what a test is about."""
    return time.monotonic() + 60


class Slots:
    """A disk whose slots are given out and never taken back, and memory for its chunks."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.pool = Pool(tier.segments_bytes, tier.slab_bytes)

    def pieces(self, chunks: Sequence[Identity]) -> list[Piece]:
        """The chunks with their bytes, each with a slot of its own."""
        found = []
        for number, it in enumerate(chunks):
            place = self.pool.allocate(self.tier.slot_bytes(it), number)
            assert place is not None, f"no slot for {self.tier.slot_bytes(it)} bytes in {self.pool}"
            memory = aligned_buffer(it.length_bytes)
            memory[:] = content(it)
            found.append(Piece(it, memory, place))
        return found

    def store(self, chunks: Sequence[Identity]) -> list[Piece]:
        """Write chunks and journal them."""
        pieces = self.pieces(chunks)
        assert self.tier.write(pieces, soon()) == [Outcome.DONE] * len(pieces)
        self.tier.journal.stored([(it.place, self.tier.slot_bytes(it.identity), it.identity) for it in pieces])
        return pieces


def empty(piece: Piece) -> Piece:
    """The same piece with memory to read into."""
    memory = aligned_buffer(piece.identity.length_bytes)
    memory[:] = 0xEE
    return Piece(piece.identity, memory, piece.place)


def read_back(tier: DiskTier, pieces: Sequence[Piece]) -> list[Outcome]:
    """Read pieces; what is DONE must be right."""
    targets = [empty(it) for it in pieces]
    outcomes = tier.read(targets, soon())
    for it, outcome in zip(targets, outcomes, strict=True):
        right = bytes(it.memory) == bytes(content(it.identity))
        assert right or outcome is not Outcome.DONE, f"wrong bytes for {it.identity.key.hex()} at {it.place:#x}"
    return outcomes


@contextmanager
def opened(
    directory: Path, size_bytes: int = SIZE_BYTES, slab_bytes: int = SLAB_BYTES, reserve_bytes: int = 0
) -> Iterator[DiskTier]:
    """A disk tier that is closed at the end."""
    tier = DiskTier(directory, size_bytes, slab_bytes, reserve_bytes=reserve_bytes)
    try:
        yield tier
    finally:
        tier.close()


def segment_file(directory: Path, number: int = 0) -> Path:
    """The file of one segment."""
    return directory / f"slabs-1-{SLAB_BYTES}-{number:04d}"


@contextmanager
def tmpfs(size_mib: int) -> Iterator[Path]:
    """A small file system, outside of pytest's own folders: those could not be removed if it stayed mounted."""
    needs_root()
    place = Path(tempfile.mkdtemp(prefix="headwater-test-tmpfs-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0700", "tmpfs", str(place)]
    made = subprocess.run(command, check=False, capture_output=True)
    if made.returncode:
        place.rmdir()
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
        place.rmdir()


def descriptors() -> list[str]:
    """What this process has open of slab files, journals and directories."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(found)
