"""Memory with known addresses: source bytes that differ everywhere, and a target full of poison."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headwater import _kernels as kernels
from headwater._kernels import Kernels

POISON = 0xA5
IMPLEMENTATIONS = [kernels.load(False), *(kernels.load(True, isa) for isa in kernels.ISAS)]


def name(implementation: Kernels) -> str:
    return implementation.isa


def u64(*numbers: int) -> npt.NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


def i64(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, np.int64)


@dataclass(frozen=True)
class Memory:
    """Page-aligned bytes; `at` gives addresses in it."""

    array: npt.NDArray[np.uint8]

    def at(self, offset_bytes: int = 0) -> int:
        return int(self.array.ctypes.data) + offset_bytes

    def poison(self) -> None:
        self.array.fill(POISON)


def memory(size_bytes: int) -> Memory:
    array = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    array.fill(POISON)
    return Memory(array)


def noise(size_bytes: int, seed: int = 20) -> Memory:
    filled = memory(size_bytes)
    filled.array[:] = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
    return filled
