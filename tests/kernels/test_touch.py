"""Touched pages are there, and hold what they held."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from headwater import _kernels as kernels
from headwater._kernels import fallback

PAGE = mmap.PAGESIZE
PAGES = 64
Touch = Callable[[int, int], None]

TOUCHES: dict[str, Touch] = {"libc": fallback.touch, "libc-old": partial(fallback.touch, populate=False)}
if kernels.NATIVE:
    from headwater._kernels import _copy

    TOUCHES |= {"c": _copy.touch, "c-old": partial(_copy.touch, populate=False)}

each = pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
each_that_populates = pytest.mark.parametrize("touch", [TOUCHES[way] for way in ("libc", "c") if way in TOUCHES])


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("touch")
    os.ftruncate(fd, PAGES * PAGE)
    yield fd
    os.close(fd)


def held_pages(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512 // PAGE


def address_of(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


@each
def test_pages_are_allocated(memfd: int, touch: Touch) -> None:
    mapped = mmap.mmap(memfd, 0)
    address = address_of(mapped)
    assert held_pages(memfd) == 0
    touch(address, 0)
    assert held_pages(memfd) == 0
    touch(address + PAGE - 1, 2)  # the last byte of one page and the first of the next
    assert held_pages(memfd) >= 2
    touch(address + 5, PAGES * PAGE - 5)
    assert held_pages(memfd) == PAGES
    os.preadv(memfd, [content := bytearray(PAGES * PAGE)], 0)
    assert not any(content)


@each
def test_content_stays(memfd: int, touch: Touch, seed: int) -> None:
    mapped = mmap.mmap(memfd, 0)
    array = np.frombuffer(mapped, np.uint8)
    array[:] = np.random.default_rng(seed).integers(0, 256, array.size, np.uint8)
    before = array.copy()
    touch(address_of(mapped), array.size)
    np.testing.assert_array_equal(array, before)


@each_that_populates
def test_memory_that_cannot_be_had_is_an_error_and_not_a_signal(memfd: int, touch: Touch) -> None:
    beyond_the_file = mmap.mmap(memfd, 0)
    os.ftruncate(memfd, PAGE)
    read_only = mmap.mmap(memfd, 0, prot=mmap.PROT_READ)
    for address in (address_of(beyond_the_file) + PAGE, address_of(read_only), PAGE):
        with pytest.raises(OSError, match=r"\[Errno"):
            touch(address, PAGE)


@each
@pytest.mark.parametrize(
    ("error", "address", "length"),
    [
        (TypeError, 1.0, 1),
        (TypeError, 1, "1"),
        (ValueError, 0, 1),
        (ValueError, -1, 1),
        (ValueError, 1, -1),
        (ValueError, 1 << 63, 1),
        (ValueError, 1, 1 << 63),
        (ValueError, 1 << 64, 1),
    ],
)
def test_refusals(touch: Touch, error: type[Exception], address: int, length: int) -> None:
    with pytest.raises(error):
        touch(address, length)
