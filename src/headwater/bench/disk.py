"""The DISK tier against fio: bytes really on the device, both ways, and what the checksums cost.

A *turn* moves all chunks once, several threads at a time, between node memory (a memfd, as in a node) and the slots,
past the page cache: header, checksum, verification and copy included. fio moves as many bytes in pieces of the same
size, with as many threads, past the page cache too, in a file of its own in the same directory, and reports its own
rate. All slots and the file were written once before anything is timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from headwater.bench import tools
from headwater.bench.harness import (
    GB,
    Contender,
    Effort,
    Experiment,
    Goal,
    Reading,
    Readings,
    Series,
    Spec,
    Unmeasured,
    quartiles,
)
from headwater.core.pool import Pool
from headwater.ports import Bytes, Piece
from headwater.tiers import disk
from headwater.tiers.checked_copy import copy_past_cache
from headwater.tiers.disk import DiskTier
from headwater.tiers.host import MappedMemory, create_memory
from headwater.types import KEY_BYTES, ChunkKey, Identity, KVGroup, KVLayout, Namespace, Origin, Outcome

MIB = 1 << 20
SIZES = {"2MiB": 2 * MIB, "32MiB": 32 * MIB}
TOTAL_BYTES, QUICK_BYTES = 512 * MIB, 128 * MIB
SLAB_BYTES = 256 * MIB
THREADS = 2
ROUNDS_MAX = 12
MOVE_S = 120.0
FIO = f"fio psync, O_DIRECT, same pieces, {THREADS} threads"


class Chunks:
    """So many chunks of one size in a DISK tier of their own, and the node memory that they are moved to and from."""

    def __init__(self, directory: Path, chunk_bytes: int, total_bytes: int) -> None:
        layout = KVLayout(256, (KVGroup(16, chunk_bytes // 16, (1,)),))
        origin = Origin.of(Namespace("bench", "raw", "disk", layout.fingerprint()), layout)
        self.count, self.chunk_bytes = total_bytes // chunk_bytes, chunk_bytes
        self.memory: MappedMemory = create_memory(total_bytes, "memfd", lock=False)
        words = np.frombuffer(self.memory.view(0, total_bytes), np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.tier = DiskTier(directory, 2 * total_bytes + 2 * SLAB_BYTES, SLAB_BYTES, reserve_bytes=0)
        pool = Pool(self.tier.segments_bytes, SLAB_BYTES)
        self.pieces: list[Piece] = []
        for number in range(self.count):
            identity = Identity(origin, 0, ChunkKey(number.to_bytes(KEY_BYTES, "big")))
            place = pool.allocate(self.tier.slot_bytes(identity), number)
            assert place is not None, "the disk is too small for the bench"
            self.pieces.append(Piece(identity, self.memory.array(number * chunk_bytes, chunk_bytes), place))
        self._pool = ThreadPoolExecutor(THREADS)

    def move(self, verb: Callable[[Sequence[Piece], float], list[Outcome]]) -> None:
        """Read or write every chunk; assertion error unless all went well."""
        until_s = time.monotonic() + MOVE_S
        parts = [self.pieces[start::THREADS] for start in range(THREADS)]
        for outcomes in self._pool.map(lambda part: verb(part, until_s), parts):
            assert all(it is Outcome.DONE for it in outcomes), f"the disk said {set(outcomes)}"

    def close(self) -> None:
        """Leave nothing behind."""
        self._pool.shutdown()
        self.pieces.clear()
        self.tier.close()
        self.memory.close()


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory below the working directory, which is on a disk where /tmp may be memory."""
    with tempfile.TemporaryDirectory(prefix=".headwater-bench-", dir=Path.cwd()) as directory:
        yield Path(directory)


def measure_transfer(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See TRANSFER."""
    total = QUICK_BYTES if effort.quick else TOTAL_BYTES
    rounds = min(effort.rounds, ROUNDS_MAX)
    readings: dict[str, Reading | Unmeasured] = {}
    for name, chunk_bytes in SIZES.items():
        if not any(spec.endswith(f"/{name}") for spec in wanted):
            continue
        with scratch() as directory:
            chunks = Chunks(directory / "tier", chunk_bytes, total)
            try:
                readings |= _transfer(effort, chunks, directory / "fio", name, total, rounds)
            finally:
                chunks.close()
    return readings


def _transfer(effort: Effort, chunks: Chunks, file: Path, name: str, total: int, rounds: int) -> Readings:
    if tools.program("fio") is None:
        return {f"disk/{verb}/{name}": Unmeasured(tools.missing("fio")) for verb in ("write", "read")}
    verbs = {"write": chunks.tier.write, "read": chunks.tier.read}
    ours = {verb: Series(total / GB) for verb in verbs}
    theirs = {verb: Series(total / GB) for verb in verbs}
    tools.fio(file, "write", chunks.chunk_bytes, total, THREADS)
    for move in verbs.values():
        chunks.move(move)
    for number in range(rounds):
        turns = [*verbs.items()]
        for verb, move in turns if number % 2 else reversed(turns):
            cpu, began_s = effort.clocks.cpu(), effort.clocks.wall()
            chunks.move(move)
            ours[verb].seconds.append(effort.clocks.wall() - began_s)
            ours[verb].cpu_s += effort.clocks.cpu() - cpu
            theirs[verb].seconds.append(total / tools.fio(file, verb, chunks.chunk_bytes, total, THREADS))
            effort.after_turn()
    return {f"disk/{verb}/{name}": ours[verb].rate(theirs[verb], in_gb=True) for verb in verbs}


TRANSFER = Experiment(
    "Chunks to and from the disk, past the page cache",
    tuple(
        Spec(f"disk/{verb}/{name}", "GB/s", about, Goal(at_least=True, factor=0.9), FIO)
        for name in SIZES
        for verb, about in (
            ("write", f"chunks of {name} from node memory to their slots"),
            ("read", f"chunks of {name} from their slots to node memory, verified"),
        )
    ),
    measure_transfer,
)


class Unchecked:
    """Equal to any checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def copy_unchecked(stored: Bytes, target: Bytes) -> Unchecked:
    """What `copy_from_buffer` does, without looking at the bytes."""
    copy_past_cache(stored, target)
    return Unchecked()


def measure_checksum(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See CHECKSUM. The same reads in turn, with and without computing the checksum of what is copied."""
    total = QUICK_BYTES if effort.quick else TOTAL_BYTES
    with scratch() as directory:
        chunks = Chunks(directory / "tier", 2 * MIB, total)

        def unchecked() -> None:
            with patch.object(disk, "copy_from_buffer", copy_unchecked):
                chunks.move(chunks.tier.read)

        try:
            chunks.move(chunks.tier.write)
            series = replace(effort, rounds=effort.rounds * (1 if effort.quick else 2)).interleave(
                [
                    Contender("checked", lambda: chunks.move(chunks.tier.read), total / GB),
                    Contender("unchecked", unchecked, total / GB),
                ]
            )
        finally:
            chunks.close()
    pairs = zip(series["checked"].seconds, series["unchecked"].seconds, strict=True)
    low, middle, high = quartiles([100 * (checked / plain - 1) for checked, plain in pairs])
    return {"disk/checksum": Reading(middle, low, high, len(series["checked"].seconds))}


CHECKSUM = Experiment(
    "What checksums cost",
    (
        Spec(
            "disk/checksum",
            "%",
            f"longer takes a read of 2 MiB chunks, {THREADS} threads, that is verified than one that is not",
            Goal(at_least=False, plus=3),
        ),
    ),
    measure_checksum,
)
