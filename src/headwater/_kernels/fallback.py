"""The copies without the C extension: checked here, moved piece by piece by libc, without the GIL."""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.ports import Addresses, BlockIds

_ADDRESS_END = 1 << 63
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def copyv(targets: Addresses, sources: Addresses, lengths: Addresses) -> None:
    """See `headwater._kernels`."""
    target_list = _array(targets, "targets", "QL").tolist()
    source_list = _array(sources, "sources", "QL").tolist()
    length_list = _array(lengths, "lengths", "QL").tolist()
    if not len(target_list) == len(source_list) == len(length_list):
        raise ValueError("targets, sources and lengths: not equally long")
    pieces = [piece for piece in zip(target_list, source_list, length_list, strict=True) if piece[2]]
    for target, source, length in pieces:
        if not (_fits(target, length) and _fits(source, length)):
            raise ValueError(f"piece {target:#x} from {source:#x}: outside of the address space")
    if sum(length_list) > _ADDRESS_END:
        raise ValueError("lengths: more than 2**63 bytes in all")
    for target, source, length in pieces:
        ctypes.memmove(target, source, length)


def gather(
    bases: Addresses,
    blocks: BlockIds,
    places: Addresses,
    *,
    block_bytes: int,
    stride_bytes: int,
    layer_stride_bytes: int,
) -> None:
    """See `headwater._kernels`."""
    paged, packed = _pieces(bases, blocks, places, block_bytes, stride_bytes, layer_stride_bytes)
    for source, target in zip(paged, packed, strict=True):
        ctypes.memmove(target, source, block_bytes)


def scatter(
    bases: Addresses,
    blocks: BlockIds,
    places: Addresses,
    *,
    block_bytes: int,
    stride_bytes: int,
    layer_stride_bytes: int,
) -> None:
    """See `headwater._kernels`."""
    paged, packed = _pieces(bases, blocks, places, block_bytes, stride_bytes, layer_stride_bytes)
    for target, source in zip(paged, packed, strict=True):
        ctypes.memmove(target, source, block_bytes)


def touch(address: int, length: int, *, populate: bool = True) -> None:
    """See `headwater._kernels`.

    Kernels before 5.14 cannot populate. There (and with `populate=False`, for tests) a page is read, not
    written: nothing in Python can write a byte back without a race, and a shared mapping has its memory then.
    """
    address, length = _number(address, "address", 0), _number(length, "length", 0)
    if not length:
        return
    if not _fits(address, length):
        raise ValueError("touch: outside of the address space")
    start = address - address % mmap.PAGESIZE
    end = address + length + -(address + length) % mmap.PAGESIZE
    if populate and _libc.madvise(None, 0, _MADV_POPULATE_WRITE) == 0:
        if _libc.madvise(start, end - start, _MADV_POPULATE_WRITE) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
    pages[:: mmap.PAGESIZE].max()


def _pieces(
    bases: Addresses, blocks: BlockIds, places: Addresses, block: int, stride: int, layer_stride: int
) -> tuple[list[int], list[int]]:
    """The addresses of every piece on the paged and on the packed side, layer by layer."""
    block = _number(block, "block_bytes", 1)
    stride = _number(stride, "stride_bytes", 1)
    layer_stride = _number(layer_stride, "layer_stride_bytes", 1)
    base, page = _array(bases, "bases", "QL"), _array(blocks, "blocks", "ql")
    place = _array(places, "places", "QL")
    if len(page) != len(place):
        raise ValueError("blocks and places: not equally long")
    if min(stride, layer_stride) < block:
        raise ValueError("stride_bytes and layer_stride_bytes: less than block_bytes")
    if len(base) * len(page) * block > _ADDRESS_END:
        raise ValueError("bases and blocks: more than 2**63 bytes in all")
    if not len(base) or not len(page):
        return [], []
    if page.min() < 0:
        raise ValueError("blocks: negative")
    paged_bytes = int(page.max()) * stride + block
    packed_bytes = (len(base) - 1) * layer_stride + block
    if not (_fits(int(base.min()), 0) and _fits(int(base.max()), paged_bytes)):
        raise ValueError("bases: blocks outside of the address space")
    if not (_fits(int(place.min()), 0) and _fits(int(place.max()), packed_bytes)):
        raise ValueError("places: layers outside of the address space")
    offsets = page.astype(np.uint64) * np.uint64(stride)
    layers = np.arange(len(base), dtype=np.uint64) * np.uint64(layer_stride)
    return (base[:, None] + offsets).ravel().tolist(), (layers[:, None] + place).ravel().tolist()


def _array(array: Any, name: str, formats: str) -> npt.NDArray[np.uint64]:
    view = memoryview(array)
    if view.format not in tuple(formats):
        raise TypeError(f"{name}: want format {formats[0]}, got {view.format}")
    if view.ndim != 1 or not view.c_contiguous:
        raise ValueError(f"{name}: want 1 dimension, contiguous")
    numbers = np.asarray(view)
    if not numbers.flags.aligned:
        raise ValueError(f"{name}: not aligned")
    return numbers


def _number(value: int, name: str, least: int) -> int:
    number = operator.index(value)
    if not least <= number <= _ADDRESS_END:
        raise ValueError(f"{name}: want {least} to 2**63")
    return number


def _fits(address: int, length: int) -> bool:
    return 0 < address <= _ADDRESS_END - length
