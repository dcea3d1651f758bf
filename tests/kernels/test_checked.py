"""The copy that checks itself: every byte, its checksum as xxhash has it, and nothing beyond the target."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from headwater._kernels import checked
from headwater._kernels.checked import CopyChecked

LENGTHS = [0, 1, 240, 241, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 4096, 262143, 262144, 262145, (1 << 20) + 77]


def _plain(target: int, source: int, length: int) -> int:
    """In C, without vector instructions."""
    if length < checked.LEAST_NATIVE_BYTES:
        return checked.copy_then_check(target, source, length)
    return checked._checked.copy_checked(target, source, length, plain=True)


WAYS = [checked.copy_then_check, *([checked.copy_checked, _plain] if checked.NATIVE else [])]


@pytest.mark.parametrize("copy", WAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_and_checksum(copy: CopyChecked, length: int) -> None:
    rng = np.random.default_rng(length)
    source = rng.integers(0, 256, length + 3, np.uint8)
    for before in (0, 1, 32, 40):  # whole vectors or not
        room = np.full(length + 256, 0xA5, np.uint8)
        start = -room.ctypes.data % 64 + before
        found = copy(room.ctypes.data + start, source.ctypes.data + 3, length)
        assert found == xxh3_64_intdigest(source[3:])
        assert np.array_equal(room[start : start + length], source[3:])
        assert (room[:start] == 0xA5).all() and (room[start + length :] == 0xA5).all()


@pytest.mark.parametrize("copy", WAYS)
def test_the_checksum_is_that_of_the_target_whatever_becomes_of_the_source(copy: CopyChecked) -> None:
    size = 4 << 20
    source, target = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    words = source.view(np.uint64)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            words[:] += np.uint64(0x0101010101010101)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        sums = set()
        for _ in range(20):
            found = copy(target.ctypes.data, source.ctypes.data, size)
            sums.add(found)
            assert found == xxh3_64_intdigest(target)
    finally:
        stop.set()
        thread.join()
    assert len(sums) > 1, "it did change"


@pytest.mark.parametrize("copy", WAYS)
@pytest.mark.parametrize("place", [(0, 8), (8, 0), (1 << 63, 8), (8, (1 << 63) - 100), ((1 << 64) - 2000, 8)])
def test_places_that_nobody_has_are_refused(copy: CopyChecked, place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="address space"):
        copy(*place, 4096)


@pytest.mark.skipif(not checked.NATIVE, reason="the C extension was not built")
@pytest.mark.parametrize("length", [0, 240])
def test_what_c_has_no_formula_for_is_refused(length: int) -> None:
    memory = np.zeros(512, np.uint8)
    with pytest.raises(ValueError, match="at least 241"):
        checked._checked.copy_checked(memory.ctypes.data, memory.ctypes.data + 256, length)
