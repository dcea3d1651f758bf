"""Copies between HOST memory and an I/O buffer that compute the payload's checksum while the bytes are in the cache.

The checksum is that of `header.payload_checksum`. The GIL is released while bytes move.
"""

from __future__ import annotations

import numpy as np
import xxhash

from headwater import _kernels
from headwater.ports import Bytes

STEP_BYTES = 2 << 20
READ_STEP_BYTES = 512 << 10
"""Larger steps leave the cache before their second use, smaller ones cost calls. A read looks at bytes that it has just
copied past the cache: the source is still in the second level, of which cores have 512 KiB and more."""


def copy_to_buffer(payload: Bytes, target: Bytes) -> bytes:
    """Copy a payload to the start of `target`; the checksum of what lies there now."""
    checksum = xxhash.xxh3_128()
    for start in range(0, len(payload), STEP_BYTES):
        source = payload[start : start + STEP_BYTES]
        copied = target[start : start + len(source)]
        copied[:] = source  # by the ordinary way, through the cache, where the checksum finds it
        checksum.update(copied.data)
    return checksum.digest()


def copy_from_buffer(stored: Bytes, target: Bytes) -> bytes:
    """Copy stored bytes to `target`, of the same length; the checksum of what was copied."""
    checksum = xxhash.xxh3_128()
    for start in range(0, len(stored), READ_STEP_BYTES):
        source = stored[start : start + READ_STEP_BYTES]
        copy_past_cache(source, target[start : start + READ_STEP_BYTES])
        checksum.update(source.data)
    return checksum.digest()


def copy_past_cache(source: Bytes, target: Bytes) -> None:
    """What is not read again soon need not push other things out of the cache."""
    places = np.array([target.ctypes.data, source.ctypes.data, len(source)], np.uint64)
    _kernels.copyv(places[:1], places[1:2], places[2:])
