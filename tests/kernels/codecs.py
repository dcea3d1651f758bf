"""What the tests of the codecs' kernels share: implementations, shapes, and floats as bits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from headwater._kernels import codec as kernels
from headwater._kernels.codec import CodecKernels
from tests.kernels.arena import POISON

IMPLEMENTATIONS = [kernels.load(False), *(kernels.load(True, isa) for isa in kernels.ISAS)]
WORDS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
SIGN = {"bfloat16": 0x8000, "float16": 0x8000, "float32": 0x80000000}
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
LEAST_EXPONENT = {"bfloat16": -126, "float16": -14, "float32": -126}


def name(implementation: CodecKernels) -> str:
    return implementation.isa


@dataclass(frozen=True)
class Shape:
    """See `headwater._kernels.codec`."""

    layers: int = 1
    blocks: int = 1
    span_blocks: int = 1
    runs: int = 1
    rows: int = 1
    channels: int = 1

    @property
    def elements(self) -> int:
        return self.layers * self.blocks * self.runs * self.rows * self.channels

    @property
    def scales(self) -> int:
        return self.layers * math.ceil(self.blocks / self.span_blocks) * self.runs * self.channels

    def arguments(self, element: str) -> dict[str, object]:
        return {"element": element, **asdict(self)}


def as_bytes(words: npt.NDArray[np.unsignedinteger], shift: int = 0) -> npt.NDArray[np.uint8]:
    """A copy as bytes that starts `shift` elements after an aligned address."""
    room = np.empty(len(words) + shift, words.dtype)
    room[shift:] = words
    return room[shift:].view(np.uint8)


def poisoned(count: int, dtype: type, shift: int = 0) -> npt.NDArray:
    """`count` elements of 0xa5, with as many more around them as `guards` looks at."""
    room = np.full((count + shift + 64) * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype)
    return room[shift : shift + count]


def guards_hold(array: npt.NDArray, shift: int = 0) -> bool:
    """Whether nothing around a `poisoned` array changed."""
    around = array.base.view(np.uint8)
    item = array.itemsize
    return bool((around[: shift * item] == POISON).all() and (around[(shift + len(array)) * item :] == POISON).all())


def floats(words: npt.NDArray, element: str) -> npt.NDArray[np.float64]:
    """The numbers that bits stand for, from the definition of the format."""
    bits = words.astype(np.int64)
    mantissa_bits, bias_exponent = MANTISSA_BITS[element], LEAST_EXPONENT[element]
    sign = np.where(bits & SIGN[element], -1.0, 1.0)
    size = bits & (SIGN[element] - 1)
    exponent, mantissa = size >> mantissa_bits, size & ((1 << mantissa_bits) - 1)
    whole = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa).astype(np.float64)
    return sign * np.ldexp(whole, (np.maximum(exponent, 1) - 1 + bias_exponent - mantissa_bits).astype(np.int32))


def half_step(values: npt.NDArray[np.float64], element: str) -> npt.NDArray[np.float64]:
    """Half the distance between neighbours of an element type at each value."""
    exponent = np.maximum(np.frexp(values)[1] - 1, LEAST_EXPONENT[element])
    return np.ldexp(0.5, exponent - MANTISSA_BITS[element])
