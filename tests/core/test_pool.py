"""The pool against a model of bytes: no two entries ever share one, none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.pool import Pool
from headwater.types import PAGE_BYTES, SEGMENT_SHIFT

SLAB = 6 * PAGE_BYTES
SIZES = [PAGE_BYTES, 2 * PAGE_BYTES, 4 * PAGE_BYTES, 6 * PAGE_BYTES]


def pages(address: int, size: int) -> range:
    return range(address // PAGE_BYTES, (address + size) // PAGE_BYTES)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=3), st.data())
def test_entries_never_overlap_and_a_full_pool_is_really_full(segment_pages: list[int], data: st.DataObject) -> None:
    pool = Pool([count * PAGE_BYTES for count in segment_pages], SLAB)
    slabs = sum(count // 6 for count in segment_pages)
    assert pool.capacity_bytes == slabs * SLAB
    held: dict[int, tuple[int, int]] = {}  # address -> size, entry
    for entry in range(data.draw(st.integers(0, 40))):
        if held and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(held)))
            del held[address]
            pool.free(address)
        else:
            size = data.draw(st.sampled_from(SIZES))
            address = pool.allocate(size, entry)
            used = {pool.slab(it) for it in held}
            room = any(
                pool.slot_bytes(it) == size and sum(pool.slab(other) == pool.slab(it) for other in held) < SLAB // size
                for it in held
            )
            assert (address is not None) == (room or len(used) < slabs)
            if address is not None:
                segment, offset = address >> SEGMENT_SHIFT, address & ((1 << SEGMENT_SHIFT) - 1)
                assert offset % PAGE_BYTES == 0
                assert offset + size <= segment_pages[segment] * PAGE_BYTES
                taken = {page for at, (length, _) in held.items() for page in pages(at, length)}
                assert not taken.intersection(pages(address, size))
                held[address] = size, entry
        pool.check()
        assert pool.taken_bytes == sum(size for size, _ in held.values())
        assert pool.taken_slots == len(held)
        for address, (size, owner) in held.items():
            assert pool.entry(address) == owner
            assert pool.slot_bytes(address) == size
            assert owner in pool.residents(pool.slab(address))
        assert sum(len(pool.residents(slab)) for slab in range(slabs)) == len(held)


def test_an_emptied_slab_serves_another_size() -> None:
    pool = Pool([SLAB], SLAB)
    small = [pool.allocate(PAGE_BYTES, entry) for entry in range(6)]
    assert None not in small
    assert pool.allocate(PAGE_BYTES, 6) is None
    for address in small[:5]:
        assert address is not None
        pool.free(address)
    # One small slot keeps the whole slab.
    assert pool.allocate(SLAB, 7) is None
    assert small[5] is not None
    pool.free(small[5])
    assert pool.allocate(SLAB, 7) is not None
    assert pool.allocate(PAGE_BYTES, 8) is None
    pool.check()


def test_the_rest_of_a_slab_or_segment_is_never_used() -> None:
    pool = Pool([SLAB + 5 * PAGE_BYTES], SLAB)
    assert pool.capacity_bytes == SLAB
    assert pool.allocate(4 * PAGE_BYTES, 0) is not None
    assert pool.allocate(4 * PAGE_BYTES, 1) is None


def test_free_of_a_free_slot_is_a_programmers_error() -> None:
    pool = Pool([SLAB], SLAB)
    address = pool.allocate(PAGE_BYTES, 0)
    pool.allocate(PAGE_BYTES, 1)
    assert address is not None
    pool.free(address)
    with pytest.raises(AssertionError):
        pool.free(address)
    with pytest.raises(AssertionError):
        Pool([SLAB], SLAB).allocate(SLAB + PAGE_BYTES, 0)


def test_a_pool_explains_itself() -> None:
    pool = Pool([3 * SLAB], SLAB)
    pool.allocate(PAGE_BYTES, 0)
    pool.allocate(2 * PAGE_BYTES, 1)
    assert repr(pool) == "Pool(2 slots of [4096, 8192] bytes taken, 12288/73728 bytes, 1/3 slabs unassigned)"
