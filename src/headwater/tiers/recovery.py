"""What a disk still holds after a restart: from the journal, or from the headers of all slots where that is lost.

Nothing here is proof that a chunk is there: its header and checksum are, when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.layout import main_group
from headwater.tiers.direct_io import Buffers
from headwater.tiers.header import Header, check_payload, read_header
from headwater.tiers.slab_files import OFFSET, SlabFiles
from headwater.types import KEY_BYTES, PAGE_BYTES, SEGMENT_SHIFT, ChunkKey, Identity, Origin, Outcome

SCAN_THREADS = 8
SIZES_TRIED = 8
SMALL_BYTES, WINDOW_BYTES = 128 << 10, 2 << 20
_NO_PARENT = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A chunk that should still be in its slot."""

    identity: Identity
    place: int
    slot_bytes: int


def consistent(
    rows: npt.NDArray[np.void], origins: Mapping[int, Origin], files: SlabFiles, slot_bytes: Callable[[Identity], int]
) -> tuple[list[Recovered], list[int]]:
    """Those of the journal's rows that can all be true at once, oldest first, and the places of the others.

    Of rows that contradict each other the youngest counts: slots of one slab have one size, a chunk is in one slot.
    Rows are wrong where the journal missed something: a removal, a file that is gone or was cut.
    """
    place, size = rows["place"].astype(np.int64), rows["slot_bytes"].astype(np.int64)
    segment, offset = place >> SEGMENT_SHIFT, place & OFFSET
    slab, inside = offset // files.slab_bytes, offset % files.slab_bytes
    kept = np.array([*files.kept, 0], np.int64)
    within = offset + size <= kept[np.clip(segment, 0, len(files.kept))]
    good = (size > 0) & (size == _sizes_today(rows, origins, slot_bytes)) & within
    good &= (inside % np.maximum(size, 1) == 0) & (inside + size <= files.slab_bytes)
    good &= size == size[_youngest(segment << 20 | slab)]
    roots = {origin.root: number for number, origin in origins.items()}
    alias = {number: roots[origin.root] for number, origin in origins.items()}
    names = np.empty(len(rows), [("origin", "<u4"), ("group", "<u4"), ("key", "V16")])
    names["origin"] = [alias.get(number, 0) for number in rows["origin"].tolist()]
    names["group"], names["key"] = rows["group"], rows["key"]
    position = np.arange(len(rows))
    good &= (_youngest(names.view("V24")) == position) & (_youngest(place) == position)
    return recovered(rows[good], origins), place[~good].tolist()


def recovered(rows: npt.NDArray[np.void], origins: Mapping[int, Origin]) -> list[Recovered]:
    """Rows of the journal, whose origins are known, as chunks."""
    keys, parents = rows["key"].tobytes(), rows["parent"].tobytes()
    columns = (rows["origin"].tolist(), rows["group"].tolist(), rows["place"].tolist(), rows["slot_bytes"].tolist())
    ends = range(KEY_BYTES, len(keys) + 1, KEY_BYTES)
    return [
        Recovered(
            Identity(
                origins[number],
                group,
                ChunkKey(keys[end - KEY_BYTES : end]),
                b"" if (parent := parents[end - KEY_BYTES : end]) == _NO_PARENT else parent,
            ),
            place,
            size,
        )
        for number, group, place, size, end in zip(*columns, ends, strict=True)
    ]


def _youngest(names: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """For each position, the last one that has the same name."""
    _, number = np.unique(names, return_inverse=True)
    last = np.empty(len(names), np.int64)
    last[number] = np.arange(len(names))  # of several for one place the last one stays
    return last[number]


def _sizes_today(
    rows: npt.NDArray[np.void], origins: Mapping[int, Origin], slot_bytes: Callable[[Identity], int]
) -> npt.NDArray[np.int64]:
    """The size that each row's slot would have if it were stored today; 0 if nothing can be stored under its name."""
    sizes = np.zeros(len(rows), np.int64)
    for number, origin in origins.items():
        for group in range(0 if origin.layout.problem() else len(origin.layout.groups)):
            those = (rows["origin"] == number) & (rows["group"] == group)
            sizes[those] = slot_bytes(Identity(origin, group, ChunkKey(b"")))
    return sizes


def parents_first(found: Iterable[Recovered]) -> Iterator[Recovered]:
    """The same chunks, each after the one it hangs on, else in their order; those whose parent is lost come last.

    A chunk of the main group hangs on its parent's, one of another group on the main group's part of itself.
    """
    origin: Origin | None = None
    main: int | None = None
    there: set[bytes] = set()
    of_root: dict[bytes, set[bytes]] = {}
    waiting: dict[tuple[bytes, bytes], list[Recovered]] = {}
    for it in found:
        identity = it.identity
        if identity.origin is not origin:
            origin = identity.origin
            main, there = main_group(origin.layout), of_root.setdefault(origin.root, set())
        above = identity.parent if identity.group == main else b"" if main is None else identity.key
        if above and above not in there:
            waiting.setdefault((origin.root, above), []).append(it)
            continue
        yield it
        if identity.group == main:
            there.add(identity.key)
            if waiting:
                for child in _released(waiting, origin.root, identity.key):
                    there.add(child.identity.key)
                    yield child
    identities = [it.identity for those in waiting.values() for it in those]
    themselves_waiting = {(it.origin.root, it.key) for it in identities if it.group == main_group(it.origin.layout)}
    lost = [name for name in waiting if name not in themselves_waiting]
    for root, key in [*lost, *waiting]:  # the rest, if any, wait for each other: no journal of ours says so
        yield from _released(waiting, root, key)


def _released(waiting: dict[tuple[bytes, bytes], list[Recovered]], root: bytes, key: bytes) -> Iterator[Recovered]:
    """Take out what waits for a chunk, with all that waits for that."""
    ready = [key]
    while ready:
        for child in waiting.pop((root, ready.pop()), ()):
            yield child
            ready.append(child.identity.key)


def scan(files: SlabFiles, codec: str, slot_bytes: Callable[[Identity], int]) -> list[Recovered]:
    """What the headers of all slots say, in the order of places; what cannot be read is left out.

    Slabs are filled from their start, so the header at a slab's start tells the size of its slots. Where that one is
    damaged, the sizes that other slabs have are tried.
    """
    slabs = [
        segment << SEGMENT_SHIFT | offset
        for segment, kept in enumerate(files.kept)
        for offset in range(0, kept - PAGE_BYTES + 1, files.slab_bytes)
    ]
    headers = _Headers(files, codec)
    with ThreadPoolExecutor(SCAN_THREADS, "headwater-scan") as pool:
        sizes = dict(zip(slabs, pool.map(headers.first_size, slabs), strict=True))
        known = sorted(set(sizes.values()) - {0})[:SIZES_TRIED]
        for slab in [slab for slab, size in sizes.items() if not size]:
            sizes[slab] = next((size for size in known if headers.has_second(slab, size)), 0)
        tasks = [pool.submit(headers.slots, slab, size) for slab, size in sizes.items() if size]
        chunks = [it for task in tasks for it in task.result()]
    found: dict[tuple[bytes, int, bytes], Recovered] = {}
    for it in chunks:
        name = it.identity.origin.root, it.identity.group, it.identity.key
        # A chunk that moved left its header behind, and one that was torn has only that: the first whole one will do.
        if name not in found or not headers.is_whole(found[name]):
            found[name] = it
    sizes_today = {(it.identity.origin.root, it.identity.group): slot_bytes(it.identity) for it in found.values()}
    return [it for name, it in found.items() if it.slot_bytes == sizes_today[name[:2]]]


class _Headers:
    """Finds the headers in slabs; thread-safe."""

    def __init__(self, files: SlabFiles, codec: str) -> None:
        self._files, self._codec = files, codec
        self._buffers = Buffers(WINDOW_BYTES)
        self._origins: dict[tuple[bytes, bytes], Origin] = {}
        self._sound: dict[tuple[bytes, bytes, int, int], bool] = {}

    def first_size(self, slab: int) -> int:
        """The size of the slots of a slab, by its first header; 0 if there is none."""
        it = next(self._read(slab, PAGE_BYTES, PAGE_BYTES), None)
        return it[1].slot_bytes if it is not None and PAGE_BYTES < it[1].slot_bytes <= self._files.slab_bytes else 0

    def has_second(self, slab: int, size: int) -> bool:
        """Whether the second slot of a slab is one of this size."""
        it = next(self._read(slab + size, PAGE_BYTES, PAGE_BYTES), None) if 2 * size <= self._files.slab_bytes else None
        return it is not None and it[1].slot_bytes == size

    def slots(self, slab: int, size: int) -> list[Recovered]:
        """What is in the slots of a slab. Small ones are read whole, which costs less than a call for each."""
        count = self._files.slab_bytes // size
        at_once = max(WINDOW_BYTES // size, 1) if size <= SMALL_BYTES else 1
        found = []
        for first in range(0, count, at_once):
            length = min(at_once, count - first) * size if at_once > 1 else PAGE_BYTES
            for place, it in self._read(slab + first * size, length, size):
                if it.slot_bytes == size and it.origin is not None and self._is_sound(it, it.origin):
                    origin = self._origins.setdefault((it.root, it.layout), it.origin)
                    found.append(Recovered(Identity(origin, it.group, it.key, it.parent), place, size))
        return found

    def is_whole(self, it: Recovered) -> bool:
        """Whether a chunk's payload is what its header says."""
        with self._buffers.borrow(it.slot_bytes) as buffer:
            try:
                got = self._files.read(it.place, [buffer[: it.slot_bytes]])
            except OSError:
                return False
            header = read_header(buffer[:PAGE_BYTES].data) if got >= PAGE_BYTES else None
            if not isinstance(header, Header):
                return False
            stored = buffer[PAGE_BYTES : min(PAGE_BYTES + header.encoded.stored_bytes, got)]
            return check_payload(header, stored) is Outcome.DONE

    def _is_sound(self, it: Header, origin: Origin) -> bool:
        """Whether what the header says of itself fits together."""
        name = it.root, it.layout, it.group, it.length_bytes
        if name not in self._sound:
            inside = it.group < len(origin.layout.groups)
            self._sound[name] = inside and it.names(Identity(origin, it.group, it.key))
        return self._sound[name]

    def _read(self, place: int, length: int, step: int) -> Iterator[tuple[int, Header]]:
        """The good headers at every `step` bytes of a range, and their places."""
        with self._buffers.borrow(length) as buffer:
            try:
                got = self._files.read(place, [buffer[:length]])
            except OSError:
                return
            for start in range(0, got - PAGE_BYTES + 1, step):
                it = read_header(buffer[start : start + PAGE_BYTES].data)
                if isinstance(it, Header) and it.encoded.codec == self._codec:
                    yield place + start, it
