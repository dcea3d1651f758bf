"""The HOST tier's memory: segments that a node owns and every engine on the host maps.

A segment is a memfd (default) or an unlinked file in a directory on tmpfs or hugetlbfs. Its size is sealed or
reserved before anybody maps it, so that no reader can meet a SIGBUS later. Nothing has a name that could be
left behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import resource
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headwater import _kernels
from headwater.errors import ResourceError
from headwater.ports import Bytes
from headwater.types import PAGE_BYTES, SEGMENT_SHIFT

log = logging.getLogger(__name__)

PREFAULT_STEP_BYTES = 64 << 20
SPARE_BYTES = 256 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MappedMemory:
    """Segments mapped into this process; the mapping lasts until `close`."""

    def __init__(self, descriptors: Sequence[int], sizes: Sequence[int], lifeline: int | None = None) -> None:
        """Map the segments read-write; takes ownership of the descriptors. Raises ResourceError.

        `lifeline` is closed when nothing is mapped any more: after `close`, or with the last view.
        """
        self._descriptors = list(descriptors)
        self._lifeline = lifeline
        self._maps: list[mmap.mmap] = []
        self.bases: list[int] = []
        self.sizes = list(sizes)
        self._given = len(self.sizes)
        try:
            for descriptor, size in zip(descriptors, sizes, strict=True):
                actual = os.fstat(descriptor).st_size
                if actual < size:
                    raise ResourceError(f"segment has {actual} bytes, {size} announced; the node is not ours to use")
                self._maps.append(mmap.mmap(descriptor, size))
                self.bases.append(ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1])))
        except ResourceError:
            self.close()
            raise
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise ResourceError(f"cannot map {sum(sizes)} bytes of node memory: {error}") from error

    def add(self, descriptor: int, size_bytes: int) -> int:
        """Map one more segment, whose descriptor becomes this object's; its number. Raises ResourceError."""
        self._descriptors.append(descriptor)
        try:
            self._maps.append(mmap.mmap(descriptor, size_bytes))
        except (OSError, ValueError) as error:
            raise ResourceError(f"cannot map {size_bytes} bytes of node memory: {error}") from error
        self.bases.append(ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1])))
        self.sizes.append(size_bytes)
        return len(self.sizes) - 1

    def address(self, place: int) -> int:
        """The process-local address of a node address."""
        return self.bases[place >> SEGMENT_SHIFT] + (place & ((1 << SEGMENT_SHIFT) - 1))

    def view(self, place: int, size_bytes: int) -> memoryview:
        """The bytes at a node address; writes go to the shared memory."""
        start = place & ((1 << SEGMENT_SHIFT) - 1)
        return memoryview(self._maps[place >> SEGMENT_SHIFT])[start : start + size_bytes]

    def array(self, place: int, size_bytes: int) -> Bytes:
        """The same as uint8[size_bytes]."""
        return np.frombuffer(self.view(place, size_bytes), dtype=np.uint8)

    @property
    def descriptors(self) -> list[int]:
        """The segments' file descriptors, still owned by this object."""
        return self._descriptors

    def prefault(self, stop: threading.Event) -> int:
        """Fault all pages in, in steps, until done, stopped or refused by the host (which is logged); bytes done.
        Segments that were added take their pages when these are used.

        Meant for a thread of its own.
        """
        done = 0
        for base, size in zip(self.bases[: self._given], self.sizes, strict=False):
            for offset in range(0, size, PREFAULT_STEP_BYTES):
                if stop.is_set():
                    return done
                step = min(PREFAULT_STEP_BYTES, size - offset)
                try:
                    _kernels.touch(base + offset, step)
                except OSError as error:
                    log.error(
                        "the host gave %d of %d bytes of KV memory: %s; lower node.host_memory",
                        done,
                        sum(self.sizes),
                        error,
                    )
                    return done
                done += step
        return done

    def advise_huge(self) -> None:
        """Ask for huge pages; a host that does not allow them for shared memory gives small ones."""
        for it in self._maps:
            try:
                it.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without transparent huge pages
                return

    def lock(self) -> None:
        """Keep the pages in memory; raises ResourceError."""
        libc = ctypes.CDLL(None, use_errno=True)
        for base, size in zip(self.bases, self.sizes, strict=True):
            if libc.mlock(ctypes.c_void_p(base), ctypes.c_size_t(size)):
                limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                raise ResourceError(
                    f"node.lock_memory needs RLIMIT_MEMLOCK of {size} bytes, the limit is {limit} "
                    f"({os.strerror(ctypes.get_errno())}); raise it (ulimit -l {size // 1024}) "
                    "or set node.lock_memory=false"
                )

    def close(self) -> None:
        """Unmap and close; views that are still in use keep their mapping until they are dropped."""
        viewed = []
        for it in self._maps:
            try:
                it.close()
            except BufferError:  # an exported view is alive; its owner unmaps by dropping it
                viewed.append(it)
        self._maps.clear()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        if self._lifeline is not None:
            _close_after(viewed, self._lifeline)
            self._lifeline = None


def _close_after(maps: list[mmap.mmap], descriptor: int) -> None:
    """Close a descriptor once nobody maps any of these."""
    if not maps:
        os.close(descriptor)
        return
    last = maps.pop()
    weakref.finalize(last, _close_after, maps, descriptor).atexit = False


def create_memory(size_bytes: int, backing: str, *, lock: bool) -> MappedMemory:
    """A node's own memory: one segment of `size_bytes` (whole pages), zero-filled, size fixed.

    Raises ResourceError, with the number needed, when the host cannot give that much.
    """
    assert size_bytes % PAGE_BYTES == 0, f"size_bytes={size_bytes}"
    if size_bytes >> SEGMENT_SHIFT:
        raise ResourceError(f"host_memory={size_bytes} is above the {1 << SEGMENT_SHIFT} bytes of one segment")
    descriptor = _memfd(size_bytes) if backing == "memfd" else _file_in(Path(backing), size_bytes)
    memory = MappedMemory([descriptor], [size_bytes])
    memory.advise_huge()
    if lock:
        try:
            memory.lock()
        except ResourceError:
            memory.close()
            raise
    return memory


def create_segment(size_bytes: int) -> int:
    """A descriptor of zero-filled memory of a fixed size, for `MappedMemory.add`. Raises ResourceError."""
    return _memfd(size_bytes)


def available_bytes() -> int:
    """How much memory this process may still take: the host's estimate and every cgroup limit above us."""
    limits = [_meminfo_available(), *_cgroup_available()]
    return min(limits)


def _check_available(size_bytes: int) -> None:
    free = available_bytes()
    if size_bytes + SPARE_BYTES > free:
        raise ResourceError(
            f"host_memory needs {size_bytes} bytes and {SPARE_BYTES} to spare, {free} are available; "
            "lower node.host_memory or raise the memory limit"
        )


def _memfd(size_bytes: int) -> int:
    _check_available(size_bytes)
    descriptor = os.memfd_create("headwater", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(descriptor)
        raise ResourceError(f"cannot create a memfd of {size_bytes} bytes: {error}") from error
    return descriptor


def _file_in(directory: Path, size_bytes: int) -> int:
    descriptor = None
    try:
        free = os.statvfs(directory)
        if free.f_bavail * free.f_frsize < size_bytes:
            raise ResourceError(
                f"node.backing={directory} has {free.f_bavail * free.f_frsize} bytes free, {size_bytes} are needed; "
                "enlarge that file system or lower node.host_memory"
            )
        if free.f_frsize == PAGE_BYTES:  # tmpfs: its pages are ordinary memory, unlike those of hugetlbfs
            _check_available(size_bytes)
        descriptor, name = tempfile.mkstemp(prefix="headwater-", dir=directory)
        os.unlink(name)
        # Reserving the pages now turns a full file system into an error here instead of a SIGBUS later.
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        raise ResourceError(f"node.backing={directory}: cannot reserve {size_bytes} bytes: {error}") from error
    return descriptor


def _meminfo_available(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ResourceError(f"{meminfo} has no MemAvailable; headwater needs Linux 3.14 or newer")


def _cgroup_available(memberships: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the memory cgroups of this process leave (v2 and v1); empty where there are none."""
    found: list[int] = []
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:  # a kernel without cgroups
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_file, usage_file = mount, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = mount / "memory"
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = root / path.lstrip("/")
        for directory in (inside, *inside.parents):
            limit, usage = _number(directory / limit_file), _number(directory / usage_file)
            if limit is not None and usage is not None:
                found.append(max(limit - usage + _reclaimable(directory / "memory.stat"), 0))
            if directory == root:
                break
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or the word "max": no limit here
        return None


def _reclaimable(stat: Path) -> int:
    """Page cache that a cgroup counts as used although it gives way to us."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    sums = dict(line.split() for line in lines)
    return int(sums.get("total_inactive_file", sums.get("inactive_file", 0)))
