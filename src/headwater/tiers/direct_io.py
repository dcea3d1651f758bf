"""The system calls of the DISK tier, all in one place, and memory that suits them.

Files are opened past the page cache (O_DIRECT) where the file system can; buffers, offsets and lengths are whole pages.
Every function raises OSError as the kernel gives it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from headwater.ports import Bytes
from headwater.types import PAGE_BYTES

HUGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def open_at(directory: int, name: str, flags: int) -> int:
    """Open a file of a directory, never through a symbolic link; created with mode 0600."""
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)


def open_direct(directory: int, name: str) -> tuple[int, bool]:
    """Open or create a file for reading and writing; whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return open_at(directory, name, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return open_at(directory, name, flags), False


def stat_at(directory: int, name: str) -> os.stat_result:
    """What a name of a directory is, itself and not what it may point to."""
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def unlink_at(directory: int, name: str) -> None:
    """Remove a file of a directory."""
    os.unlink(name, dir_fd=directory)


def read(descriptor: int, views: Sequence[Bytes], offset_bytes: int) -> int:
    """Fill the views one after another; the bytes read, fewer than they hold only where the file ends."""
    left, done = [view.data for view in views], 0
    while left:
        step = os.preadv(descriptor, left, offset_bytes + done)
        done += step
        left = _after(left, step)
        if not step or done % PAGE_BYTES:
            break
    return done


def write(descriptor: int, views: Sequence[Bytes], offset_bytes: int) -> None:
    """Write the views one after another, all of them: a file that takes no more is an ENOSPC."""
    left, done = [view.data for view in views], 0
    while left:
        step = os.pwritev(descriptor, left, offset_bytes + done)
        done += step
        left = _after(left, step)
        if not step or (left and done % PAGE_BYTES):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def forget_cached(descriptor: int, offset_bytes: int, length_bytes: int) -> None:
    """Tell the page cache that a range read or written through it is not needed any more."""
    os.posix_fadvise(descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)


def allocate(descriptor: int, size_bytes: int) -> bool:
    """Give a file its room up to `size_bytes` without writing; False, with a sparse file, where that is unknown."""
    # Not posix_fallocate: where the kernel cannot, glibc would write to every block instead.
    if _libc.fallocate(descriptor, 0, 0, size_bytes) == 0:
        return True
    number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(number, os.strerror(number))
    os.ftruncate(descriptor, size_bytes)
    return False


def truncate(descriptor: int, size_bytes: int) -> None:
    """Cut a file off."""
    os.ftruncate(descriptor, size_bytes)


def sync(descriptor: int) -> None:
    """Have what was written to a file, or the names in a directory, outlive a loss of power."""
    os.fsync(descriptor)


def free_bytes(descriptor: int) -> tuple[int, int]:
    """What a file system has left for us, and what it has in all."""
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after their first `done` bytes."""
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(done - len(view), 0)
    return left


def aligned_buffer(size_bytes: int) -> Bytes:
    """Anonymous memory of whole pages, on huge pages where the host has them; unmapped with its last view."""
    memory = mmap.mmap(-1, size_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_BYTES
    return whole[start : start + size_bytes]


class Buffers:
    """Buffers that calls borrow, as many as there are calls at a time, each as big as the biggest loan so far."""

    def __init__(self, size_bytes: int = 0) -> None:
        """`size_bytes` is what is expected."""
        self._idle: list[Bytes] = []
        self._lock = threading.Lock()
        self._size_bytes = size_bytes

    @contextmanager
    def borrow(self, size_bytes: int) -> Iterator[Bytes]:
        """A buffer of at least `size_bytes`, page-aligned, with undefined content."""
        with self._lock:
            fitting = self._size_bytes = max(self._size_bytes, size_bytes)
            buffer = self._idle.pop() if self._idle else None
        if buffer is None or len(buffer) < size_bytes:
            buffer = aligned_buffer(fitting)
        try:
            yield buffer
        finally:
            with self._lock:
                self._idle.append(buffer)

    def close(self) -> None:
        """Drop the idle buffers."""
        with self._lock:
            self._idle.clear()
