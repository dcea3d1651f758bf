"""A group's pages as few tensors of integer words: one kernel moves blocks of many layers, whatever they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.engines.paged_kv import GroupPages

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Stack:
    """Consecutive layers, from `first` on, equally far apart in one storage: `pages[l, b]` is a block in words."""

    first: int
    pages: torch.Tensor


def stacks(group: GroupPages, tensors: Sequence[torch.Tensor]) -> list[Stack]:
    """The layers of a group as few tensors, so that one kernel serves many layers: for each layer its stack."""
    found: list[Stack] = []
    while len(found) < len(tensors):
        start = len(found)
        end = _run_end(group, tensors, start)
        it = group.layers[start]
        gap = group.layers[start + 1].base - it.base if end - start > 1 else 0
        pages = _words(tensors[start], end - start, gap, group.blocks, it.stride_bytes, it.block_bytes)
        found += [Stack(start, pages)] * (end - start)
    return found


def _run_end(group: GroupPages, tensors: Sequence[torch.Tensor], start: int) -> int:
    """Where the longest run of layers ends that are equally far apart in one storage and have equal strides."""
    layers, end = group.layers, start + 1
    while (
        end < len(layers)
        and layers[end].stride_bytes == layers[start].stride_bytes
        and tensors[end].untyped_storage().data_ptr() == tensors[start].untyped_storage().data_ptr()
        and 0 < layers[end].base - layers[end - 1].base == layers[start + 1].base - layers[start].base
    ):
        end += 1
    return end


def _words(
    pages: torch.Tensor, layers: int, gap_bytes: int, blocks: int, stride_bytes: int, block_bytes: int
) -> torch.Tensor:
    """`layers` tensors from `pages` on as one `[layers, blocks, words]` view in the widest word that fits."""
    storage = pages.untyped_storage()
    offset_bytes = pages.data_ptr() - storage.data_ptr()
    numbers = (pages.data_ptr(), offset_bytes, gap_bytes, stride_bytes, block_bytes)
    for word in WORDS:
        if not any(number % word.itemsize for number in numbers):
            break
    view = torch.empty(0, dtype=word, device=pages.device)
    size = (layers, blocks, block_bytes // word.itemsize)
    strides = (gap_bytes // word.itemsize, stride_bytes // word.itemsize, 1)
    return view.set_(storage, offset_bytes // word.itemsize, size, strides)
