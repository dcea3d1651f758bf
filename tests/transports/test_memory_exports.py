"""Regions are lent by name, inside their bounds, and leave when nobody has them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headwater.errors import UnavailableError
from headwater.ports import Exports, Lent
from headwater.transports import memory_exports
from headwater.transports.memory_exports import MemoryExports, region_name
from headwater.types import Extent, Outcome
from tests.conformance.transport import soon


def test_only_what_lies_inside_is_lent() -> None:
    exports = MemoryExports()
    memory = np.arange(100, dtype=np.uint8)
    segment = exports.add(memory, 5)
    inside = [(0, 100), (99, 1), (100, 0), (7, 3)]
    outside = [(0, 101), (99, 2), (101, 0), (1 << 63, 1 << 63)]
    loan = exports.lend("peer", b"", [region_name(segment, *it) for it in inside + outside], soon())
    for (offset, length), part in zip(inside, loan.parts, strict=False):
        assert isinstance(part, Lent)
        assert np.array_equal(part.memory, memory[offset : offset + length])
        assert part.extent == Extent(segment, offset, length)
    assert loan.parts[len(inside) :] == [Outcome.MISSING] * len(outside)
    assert loan.give_back([True] * 8, [None] * 8) == [Outcome.DONE] * 8
    assert exports.loans == 0


def test_a_region_leaves_when_nobody_has_it() -> None:
    exports = MemoryExports()
    segment = exports.add(np.zeros(100, np.uint8))
    name = region_name(segment, 0, 10)
    loan = exports.lend("peer", b"", [name], soon())
    with pytest.raises(UnavailableError, match="still lent"):
        exports.remove(segment, time.monotonic())
    late = exports.lend("peer", b"", [name], soon())
    assert late.parts == [Outcome.MISSING], "a region that is leaving was lent"
    late.give_back([False], [None])
    with ThreadPoolExecutor(1) as thread:
        leaving = thread.submit(exports.remove, segment, soon())
        loan.give_back([True], [None])
        leaving.result(10)
    assert not exports.regions()
    exports.remove(segment, time.monotonic())
    assert exports.add(np.zeros(1, np.uint8)) == segment + 1, "a number was used again"


def test_only_so_many_regions_have_a_place_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_exports, "MOST_REGIONS", 2)
    memory = MemoryExports()
    exports: Exports = memory
    numbers = [memory.add(np.full(8, it, np.uint8), 5, writable=it == 1) for it in range(3)]
    assert [(it.number, it.writable) for it in exports.regions()] == [(0, False), (1, True)]
    loan = exports.lend("peer", b"", [region_name(it, 0, 8) for it in numbers], soon())
    assert [isinstance(it, Lent) and it.extent is not None for it in loan.parts] == [True, True, False]
    assert isinstance(loan.parts[2], Lent) and (loan.parts[2].memory == 2).all(), "it goes over the connection"
    loan.give_back([True] * 3, [None] * 3)
    memory.remove(numbers[2], soon())
    memory.remove(numbers[2], soon())
    memory.add(np.zeros(8, np.uint8))
    assert [it.number for it in exports.regions()] == [0, 1], "that one had none"
    memory.remove(numbers[0], soon())
    memory.add(np.zeros(8, np.uint8))
    assert [it.number for it in exports.regions()] == [1, 4]
