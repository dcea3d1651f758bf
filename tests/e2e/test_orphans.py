"""What counts as left behind in shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from tests.e2e.orphans import FOLDER, orphans


def test_only_what_nobody_holds_is_left_behind() -> None:
    libc = ctypes.CDLL(None)  # Python's own mappings keep the file open
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    path = Path(FOLDER) / f"headwater-test-{os.getpid()}"
    try:
        with path.open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            assert path.name not in orphans(), "it is open"
            place = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert path.name not in orphans(), "it is mapped"
        libc.munmap(place, mmap.PAGESIZE)
        assert path.name in orphans()
    finally:
        path.unlink(missing_ok=True)
