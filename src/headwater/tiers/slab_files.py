"""The segment files of the DISK tier: room that is ours before anything is written to it, and places in it.

A place is `segment << 40 | offset_bytes`, as in `core.pool`; the file `slabs-<format>-<slab bytes>-<segment>` has the
bytes. The sum of all is at most what was asked for, and leaves a reserve on the file system: what does not fit is
not used. Files of a newer format stay as they are and count as used; those of another slab size are removed, because
nothing in them is where it would be looked for.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Sequence

from headwater.errors import ResourceError
from headwater.ports import Bytes
from headwater.tiers import direct_io
from headwater.tiers.private_directory import PrivateDirectory
from headwater.types import SEGMENT_SHIFT

log = logging.getLogger(__name__)

FORMAT = 1
SEGMENT_BYTES = 8 << 30
RESERVE_BYTES, RESERVE_SHARE = 1 << 30, 0.01
TRIES = 4
OFFSET = (1 << SEGMENT_SHIFT) - 1
_NAME = re.compile(r"slabs-(\d{1,9})-(\d{1,15})-(\d{1,9})")
_OURS = re.compile(r"(?:slabs|journal)-(\d{1,9})[-.].*")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SlabFiles:
    """Open segment files. Reads and writes are thread-safe and raise OSError.

    `sizes` is the length of each, whole slabs; `kept` how much of each was there before, so that beyond it nothing
    was ever written. `direct` says whether they bypass the page cache.
    """

    def __init__(
        self,
        directory: PrivateDirectory,
        size_bytes: int,
        slab_bytes: int,
        reserve_bytes: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Open, create, grow or cut the files; raises ResourceError when not even one slab fits, and ConfigError."""
        self._directory, self.slab_bytes = directory, slab_bytes
        self._slabs_a_segment = max(segment_bytes // slab_bytes, 1)
        self._descriptors: list[int] = []
        self.sizes: tuple[int, ...] = ()
        self.kept: tuple[int, ...] = ()
        self.direct = True
        try:
            self._remove_other_slabs()
            slabs = self._affordable(size_bytes, reserve_bytes)
            self._remove_beyond(slabs)
            self._claim(slabs, size_bytes, reserve_bytes)
        except OSError as error:
            self.close()
            raise ResourceError(f"disk={directory.path}: cannot reserve {size_bytes} bytes: {error}") from error
        except BaseException:
            self.close()
            raise
        if not self.direct:
            log.warning("disk=%s: the file system has no O_DIRECT; chunks pass through the page cache", directory.path)

    @property
    def capacity_bytes(self) -> int:
        """The sum of all segments."""
        return sum(self.sizes)

    def read(self, place: int, views: Sequence[Bytes]) -> int:
        """Fill the views from a place on; the bytes read, fewer than asked for only where the file ends."""
        descriptor, offset = self._descriptors[place >> SEGMENT_SHIFT], place & OFFSET
        done = direct_io.read(descriptor, views, offset)
        if not self.direct:
            direct_io.forget_cached(descriptor, offset, done)
        return done

    def write(self, place: int, views: Sequence[Bytes]) -> None:
        """Write the views to a place."""
        segment, offset = place >> SEGMENT_SHIFT, place & OFFSET
        assert offset + sum(map(len, views)) <= self.sizes[segment], f"{place:#x} is outside of its segment"
        descriptor = self._descriptors[segment]
        direct_io.write(descriptor, views, offset)
        if not self.direct:
            direct_io.forget_cached(descriptor, offset, sum(map(len, views)))

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _name(self, segment: int) -> str:
        return f"slabs-{FORMAT}-{self.slab_bytes}-{segment:04d}"

    def _segments(self) -> dict[str, tuple[int, int, int]]:
        """Format, slab size and number by the name of every segment file there is."""
        found = {name: _NAME.fullmatch(name) for name in self._directory.names()}
        return {name: (int(it[1]), int(it[2]), int(it[3])) for name, it in found.items() if it}

    def _remove_other_slabs(self) -> None:
        """Files that were cut into slabs of another size: their room is what the new ones need."""
        others = [
            name for name, (number, slab_bytes, _) in self._segments().items()
            if number <= FORMAT and (number, slab_bytes) != (FORMAT, self.slab_bytes)
        ]  # fmt: skip
        for name in others:
            self._directory.regular(name)
            direct_io.unlink_at(self._directory.descriptor, name)
        if others:
            log.warning(
                "disk=%s: %d segment files had slabs of another size than %d bytes; what they held is gone",
                self._directory.path, len(others), self.slab_bytes,
            )  # fmt: skip

    def _affordable(self, size_bytes: int, reserve_bytes: int | None) -> int:
        """How many slabs may exist, counting what is ours already; raises ResourceError for none."""
        free, total = direct_io.free_bytes(self._directory.descriptor)
        reserve = max(RESERVE_BYTES, int(total * RESERVE_SHARE)) if reserve_bytes is None else reserve_bytes
        newer = held = 0
        for name in self._directory.names():
            if (ours := _OURS.fullmatch(name)) is None:
                continue
            allocated = direct_io.stat_at(self._directory.descriptor, name).st_blocks * 512
            if int(ours[1]) > FORMAT:
                newer += allocated
            elif name.startswith("slabs"):
                held += allocated
        room = free + held - reserve
        slabs = min(size_bytes - newer, room) // self.slab_bytes
        if slabs <= 0:
            raise ResourceError(
                f"disk={self._directory.path}: a slab of {self.slab_bytes} bytes does not fit: {size_bytes} bytes are "
                f"allowed, of which {newer} are held by a newer version, and the file system has {free} bytes free, "
                f"{held} of ours, {reserve} kept in reserve; free some, or lower the reserve or the size of a slab"
            )
        if size_bytes - newer > room:
            log.warning(
                "disk=%s: %d bytes are allowed, the file system has room for %d, with %d kept in reserve",
                self._directory.path, size_bytes, slabs * self.slab_bytes, reserve,
            )  # fmt: skip
        return slabs

    def _lengths(self, slabs: int) -> list[int]:
        """The sizes of the segments that hold so many slabs."""
        full, rest = divmod(slabs, self._slabs_a_segment)
        return [it * self.slab_bytes for it in [self._slabs_a_segment] * full + ([rest] if rest else [])]

    def _remove_beyond(self, slabs: int) -> None:
        """Give back what the new size does not cover, before anything else needs it."""
        count = len(self._lengths(slabs))
        for name, (number, _, segment) in self._segments().items():
            if number == FORMAT and (segment >= count or name != self._name(segment)):
                self._directory.regular(name)
                direct_io.unlink_at(self._directory.descriptor, name)

    def _claim(self, slabs: int, size_bytes: int, reserve_bytes: int | None) -> None:
        """Open the segments and give them their room; with less than counted on, count again."""
        kept: dict[int, int] = {}
        for attempt in range(TRIES):
            lengths = self._lengths(slabs)
            try:
                for segment, length in enumerate(lengths):
                    if segment == len(self._descriptors):
                        kept[segment] = self._open(segment)
                    kept[segment] = min(kept[segment], length)
                    self._resize(segment, length)
            except OSError as error:
                if error.errno not in _NO_ROOM or attempt == TRIES - 1:
                    raise
                self._give_back(kept)
                slabs = min(self._affordable(size_bytes, reserve_bytes), slabs - max(slabs // 8, 1))
                if slabs <= 0:
                    raise
            else:
                break
        for segment in range(len(self._descriptors) - 1, len(lengths) - 1, -1):
            os.close(self._descriptors.pop())
            direct_io.unlink_at(self._directory.descriptor, self._name(segment))
        self.sizes = tuple(lengths)
        self.kept = tuple(kept[segment] for segment in range(len(lengths)))

    def _open(self, segment: int) -> int:
        """Open a segment file; the bytes it had."""
        found = self._directory.regular(self._name(segment))
        descriptor, direct = direct_io.open_direct(self._directory.descriptor, self._name(segment))
        try:
            os.fchmod(descriptor, 0o600)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptors.append(descriptor)
        self.direct = self.direct and direct
        return found.st_size if found else 0

    def _resize(self, segment: int, length: int) -> None:
        descriptor = self._descriptors[segment]
        found = os.fstat(descriptor)
        if found.st_size > length:
            direct_io.truncate(descriptor, length)
        if (found.st_size < length or found.st_blocks * 512 < length) and not direct_io.allocate(descriptor, length):
            log.info("disk=%s: the file system cannot reserve room; it may fill up later", self._directory.path)

    def _give_back(self, kept: dict[int, int]) -> None:
        """Undo what was claimed in this call, but keep what was there before."""
        for segment, descriptor in enumerate(self._descriptors):
            if os.fstat(descriptor).st_size > kept[segment]:
                direct_io.truncate(descriptor, kept[segment])
