"""A copy and the xxh3-64 of what it has written: in C where that was built, in one pass, else by libc and xxhash.

copy_checked(target, source, length) -> int
    Copies `length` bytes from address `source` to address `target` and returns their xxh3-64: of what is in the target,
    whatever becomes of the source meanwhile. The GIL is released while bytes move. Addresses that no process can have
    raise ValueError before a byte is copied; whether they are mapped is not checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

try:
    from headwater._kernels import _checked
except ImportError:  # installed without a compiler
    NATIVE = False
else:
    NATIVE = True

CopyChecked: TypeAlias = Callable[[int, int, int], int]

LEAST_NATIVE_BYTES = 1024
"""Less is copied and hashed faster than C is called for it; and C's formula is for more than 240 bytes."""
_ADDRESS_END = 1 << 63


def copy_then_check(target: int, source: int, length: int) -> int:
    """The same without C: the target is read again."""
    if not (0 < target <= _ADDRESS_END - length and 0 < source <= _ADDRESS_END - length and length >= 0):
        raise ValueError(f"{length} bytes from {source:#x} to {target:#x}: outside of the address space")
    ctypes.memmove(target, source, length)
    return xxh3_64_intdigest(memoryview((ctypes.c_uint8 * length).from_address(target)))


def _copy_checked(target: int, source: int, length: int) -> int:
    if length < LEAST_NATIVE_BYTES:
        return copy_then_check(target, source, length)
    return _checked.copy_checked(target, source, length)


copy_checked: CopyChecked = _copy_checked if NATIVE else copy_then_check
