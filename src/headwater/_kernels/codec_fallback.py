"""The codecs' kernels in numpy: the same results to the bit, slower, and mostly with the GIL."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.ports import Bytes

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.unsignedinteger[Any]]

_LEAST_SCALE, _MOST_SCALE = np.float32(2.0**-126), np.float32(float.fromhex("0x1.020406p121"))
_MOST = np.float32(127)
# For each element type: its bits as a number, the bits without sign, and the least of them that is not finite.
_ELEMENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
}


def shuffle(source: Bytes, target: Bytes, *, element_bytes: int) -> None:
    """See `headwater._kernels.codec`."""
    given, taken = _plane_arrays(source, target, element_bytes)
    taken.reshape(element_bytes, -1)[:] = given.reshape(-1, element_bytes).T


def unshuffle(source: Bytes, target: Bytes, *, element_bytes: int) -> None:
    """See `headwater._kernels.codec`."""
    given, taken = _plane_arrays(source, target, element_bytes)
    taken.reshape(-1, element_bytes)[:] = given.reshape(element_bytes, -1).T


def quantise(
    source: Bytes,
    scales: Floats,
    data: npt.NDArray[np.int8],
    *,
    element: str,
    layers: int,
    blocks: int,
    span_blocks: int,
    runs: int,
    rows: int,
    channels: int,
) -> bool:
    """See `headwater._kernels.codec`."""
    shape = (layers, blocks, span_blocks, runs, rows, channels)
    words, spans, steps = _quant_arrays(source, scales, data, element, shape, forth=True)
    _, size, infinity = _ELEMENTS[element]
    for layer in range(layers):
        most = (words[layer] & words.dtype.type(size)).max(axis=2)
        most = np.maximum.reduceat(most, range(0, blocks, span_blocks), axis=0)
        if most.max() >= infinity:
            return False
        spans[layer] = np.clip(_widen(most, element) / _MOST, _LEAST_SCALE, _MOST_SCALE)
        inverse = _by_block(np.float32(1) / spans[layer], blocks, span_blocks)
        steps[layer] = np.rint(_widen(words[layer], element) * inverse).astype(np.int8)
    return True


def dequantise(
    source: Bytes,
    scales: Floats,
    data: npt.NDArray[np.int8],
    *,
    element: str,
    layers: int,
    blocks: int,
    span_blocks: int,
    runs: int,
    rows: int,
    channels: int,
) -> bool:
    """See `headwater._kernels.codec`."""
    shape = (layers, blocks, span_blocks, runs, rows, channels)
    words, spans, steps = _quant_arrays(source, scales, data, element, shape, forth=False)
    word, _, infinity = _ELEMENTS[element]
    greatest = _widen(np.array([infinity - 1], word), element)[0] / _MOST
    if not ((spans >= _LEAST_SCALE) & (spans <= min(greatest, _MOST_SCALE))).all():
        return False
    for layer in range(layers):
        whole = np.maximum(steps[layer], np.int8(-127)).astype(np.float32)
        words[layer] = _narrow(whole * _by_block(spans[layer], blocks, span_blocks), element)
    return True


def _by_block(spans: Floats, blocks: int, span_blocks: int) -> Floats:
    """[span][run][channel] as [block][run][1][channel]."""
    return np.repeat(spans, min(span_blocks, blocks), axis=0)[:blocks, :, None]


def _widen(words: Words, element: str) -> Floats:
    if element == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(np.float16).astype(np.float32) if element == "float16" else words.view(np.float32)


def _narrow(values: Floats, element: str) -> Words:
    if element == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return values.astype(np.float16).view(np.uint16) if element == "float16" else values.view(np.uint32)


def _plane_arrays(source: Any, target: Any, element_bytes: Any) -> tuple[Bytes, Bytes]:
    if _count(element_bytes, "element_bytes") not in (2, 4):
        raise ValueError("element_bytes: want 2 or 4")
    given, taken = _array(source, "source", "B"), _array(target, "target", "B", written=True)
    if len(given) != len(taken) or len(given) % element_bytes:
        raise ValueError("source and target: not equally long, or not whole elements")
    return given, taken


def _quant_arrays(
    source: Any, scales: Any, data: Any, element: Any, shape: tuple[int, ...], *, forth: bool
) -> tuple[Words, Floats, npt.NDArray[np.int8]]:
    """The three arrays in the shapes that the contract says."""
    if not isinstance(element, str):
        raise TypeError(f"element: want str, got {type(element).__name__}")
    if element not in _ELEMENTS:
        raise ValueError(f"element: want bfloat16, float16 or float32, got {element}")
    names = ("layers", "blocks", "span_blocks", "runs", "rows", "channels")
    layers, blocks, span_blocks, runs, rows, channels = map(_count, shape, names)
    word = _ELEMENTS[element][0]
    given = _array(source, "source", "B", np.dtype(word).itemsize, written=not forth)
    spans = _array(scales, "scales", "f", 4, written=forth)
    steps = _array(data, "data", "b", written=forth)
    span_shape = (layers, -(-blocks // span_blocks), runs, channels)
    step_shape = (layers, blocks, runs, rows, channels)
    elements = math.prod(step_shape)
    sizes = (elements * np.dtype(word).itemsize, math.prod(span_shape), elements)
    if (len(given), len(spans), len(steps)) != sizes:
        raise ValueError("source, scales and data: not of the sizes that the shape says")
    return given.view(word).reshape(step_shape), spans.reshape(span_shape), steps.reshape(step_shape)


def _array(array: Any, name: str, form: str, alignment: int = 1, *, written: bool = False) -> npt.NDArray[Any]:
    view = memoryview(array)
    if view.format != form:
        raise TypeError(f"{name}: want format {form}, got {view.format}")
    if view.ndim != 1 or not view.c_contiguous:
        raise ValueError(f"{name}: want 1 dimension, contiguous")
    if written and view.readonly:
        raise ValueError(f"{name}: read-only")
    numbers = np.asarray(view)
    if len(numbers) and numbers.ctypes.data % alignment:
        raise ValueError(f"{name}: not aligned")
    return numbers


def _count(value: Any, name: str) -> int:
    number = operator.index(value)
    if not 1 <= number < 1 << 63:
        raise ValueError(f"{name}: want 1 to 2**63")
    return number
