"""An engine's KV pages as addresses of opaque bytes, and the copies between CPU pages and node memory.

An engine hands over one tensor a layer, `[blocks * ratio, ...]`: `ratio` rows are one block, and the bytes of a block
must be one dense run. What is inside them (order of dimensions, dtype, padding between blocks, other layers between
two blocks) does not matter, and tensors may share storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from headwater import _kernels
from headwater.errors import RefusedError
from headwater.ports import Addresses, BlockIds

if TYPE_CHECKING:
    import torch

SPLIT_MIN_BYTES = 8 << 20
"""Jobs below this stay on one thread: waking a second one costs more than it brings."""
PIECE_BYTES = 2 << 20
LAYOUT_REMEDY = "choose a KV cache layout that keeps each layer's block in one run of bytes (such as LBNHC)"


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Block b of a layer is the `block_bytes` bytes at `base + b * stride_bytes`."""

    name: str
    base: int
    stride_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive layers of a group, from `first` on, whose blocks are equally far apart."""

    first: int
    bases: Addresses
    stride_bytes: int


def resolve_layer(name: str, pages: torch.Tensor, blocks: int) -> LayerPages:
    """The addresses of a layer's pages; raises RefusedError when a block is not one dense run of bytes."""
    rows, item = int(pages.shape[0]), pages.element_size()
    where = f"KV cache of layer {name}"
    if rows == 0 or rows % blocks:
        raise RefusedError(where, f"a multiple of {blocks} rows", str(rows), LAYOUT_REMEDY)
    ratio, row_bytes = rows // blocks, item
    inner = ((stride, size) for size, stride in zip(pages.shape[1:], pages.stride()[1:], strict=True) if size != 1)
    for stride, size in sorted(inner):
        if stride * item != row_bytes:
            given = f"shape {tuple(pages.shape)} with strides {tuple(pages.stride())}"
            raise RefusedError(where, "rows that are each one dense run of bytes", given, LAYOUT_REMEDY)
        row_bytes *= size
    row_stride = pages.stride(0) * item
    if row_stride < row_bytes or (ratio > 1 and row_stride != row_bytes):
        expected = f"{row_bytes} bytes from row to row, {ratio} of which are one block"
        raise RefusedError(where, expected, str(row_stride), LAYOUT_REMEDY)
    return LayerPages(name, pages.data_ptr(), row_stride * ratio, row_bytes * ratio)


class GroupPages:
    """The pages of one KV group, whose layers share block ids and all have blocks of `block_bytes` bytes."""

    def __init__(self, layers: Mapping[str, torch.Tensor], blocks: int) -> None:
        """Resolve the tensors, in this order of layers; raises RefusedError."""
        self.blocks = blocks
        self.layers = [resolve_layer(name, pages, blocks) for name, pages in layers.items()]
        self.block_bytes = self.layers[0].block_bytes if self.layers else 0
        for it in self.layers:
            if it.block_bytes != self.block_bytes:
                raise RefusedError(
                    f"KV cache of layer {it.name}",
                    f"blocks of {self.block_bytes} bytes, as in layer {self.layers[0].name} of the same group",
                    str(it.block_bytes),
                    "headwater needs equal blocks in a group; report this model",
                )
        self.bands = _bands(self.layers)

    def check(self, blocks: BlockIds, places: Addresses, layer_stride_bytes: int) -> None:
        """Assert that a job names pages that are there, and places whose layers do not overlap."""
        assert len(blocks) == len(places), f"{len(blocks)} blocks, {len(places)} places"
        assert layer_stride_bytes >= self.block_bytes, f"{layer_stride_bytes=} below block_bytes={self.block_bytes}"
        if len(blocks):
            low, high = int(blocks.min()), int(blocks.max())
            assert low >= 0 and high < self.blocks, f"blocks {low} to {high} of {self.blocks}"


class Finished:
    """A copy that was over before its caller could ask."""

    def done(self) -> bool:
        """Always true."""
        return True


class CpuPagedKV:
    """PagedKV over CPU tensors: one pass of the copy kernel, without the GIL, by up to `threads` threads."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, torch.Tensor]],
        blocks: int,
        *,
        threads: int = 1,
        kernels: _kernels.Kernels | None = None,
    ) -> None:
        """`groups[g]` maps the layers of KV group g, in order, to tensors of `blocks` blocks each.

        The tensors must stay alive and in place. Raises RefusedError when they cannot be used as opaque bytes.
        """
        for layers in groups:
            for name, pages in layers.items():
                if pages.device.type != "cpu":
                    raise RefusedError(f"KV cache of layer {name}", "cpu", str(pages.device), "use CudaPagedKV")
        self.groups = [GroupPages(layers, blocks) for layers in groups]
        self._kernels = kernels or _kernels.load(_kernels.NATIVE)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "headwater-copy") if threads > 1 else None

    def attach(self, bases: Sequence[int], sizes: Sequence[int]) -> None:
        """Node memory was mapped; nothing to prepare here, since addresses are used as they are."""

    def detach(self) -> None:
        """Node memory is about to be unmapped; nothing is under way outside of `gather` and `scatter`."""

    def mark(self) -> None:
        """The engine's work is over when its call returns, so there is nothing to wait for."""

    def gather(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: object = None
    ) -> None:
        """Copy blocks into node memory; when it returns, the bytes are there."""
        self._copy(self._kernels.gather, self.groups[group], blocks, places, layer_stride_bytes)

    def scatter(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: object = None
    ) -> None:
        """Copy node memory into blocks, none of them twice; when it returns, the bytes are there."""
        self._copy(self._kernels.scatter, self.groups[group], blocks, places, layer_stride_bytes)

    def start_gather(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: object = None
    ) -> Finished:
        """The same, behind the interface for devices that copy by themselves."""
        self.gather(group, blocks, places, layer_stride_bytes, after)
        return Finished()

    def start_scatter(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: object = None
    ) -> Finished:
        """The same, behind the interface for devices that copy by themselves."""
        self.scatter(group, blocks, places, layer_stride_bytes, after)
        return Finished()

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """See `ports.PagedKV`."""
        return tuple((len(it.layers), it.block_bytes) for it in self.groups)

    def close(self) -> None:
        """Stop the threads; no copy may be under way."""
        if self._pool is not None:
            self._pool.shutdown()

    # ---- inside ---------------------------------------------------------------------------------------

    def _copy(
        self, kernel: _kernels.PagedCopy, pages: GroupPages, blocks: BlockIds, places: Addresses, stride: int
    ) -> None:
        pages.check(blocks, places, stride)
        job_bytes = len(pages.layers) * len(blocks) * pages.block_bytes
        if not job_bytes:
            return
        step = len(pages.layers)
        if self._pool is not None and job_bytes >= SPLIT_MIN_BYTES:
            step = max(1, min(PIECE_BYTES * len(pages.layers) // job_bytes, -(-len(pages.layers) // self._threads)))
        pieces = _split(kernel, pages, blocks, places, stride, step)
        if self._pool is None or len(pieces) == 1:
            _drain(pieces)
            return
        others = [self._pool.submit(_drain, pieces) for _ in range(self._threads - 1)]
        try:
            _drain(pieces)
        finally:
            for it in others:
                if not it.cancel():  # on a busy machine it may not even have begun, and there is nothing left for it
                    it.result()


def _split(
    kernel: _kernels.PagedCopy, pages: GroupPages, blocks: BlockIds, places: Addresses, stride: int, step: int
) -> list[Callable[[], None]]:
    """The job as kernel calls of at most `step` layers each."""
    pieces: list[Callable[[], None]] = []
    for band in pages.bands:
        for start in range(0, len(band.bases), step):
            shifted = places + np.uint64((band.first + start) * stride) if band.first + start else places
            piece = partial(
                kernel,
                band.bases[start : start + step],
                blocks,
                shifted,
                block_bytes=pages.block_bytes,
                stride_bytes=band.stride_bytes,
                layer_stride_bytes=stride,
            )
            pieces.append(piece)
    return pieces


def _drain(pieces: list[Callable[[], None]]) -> None:
    """Run pieces until none is left; several threads may share the list, whose `pop` is atomic."""
    while pieces:
        try:
            piece = pieces.pop()
        except IndexError:  # another thread took the last one
            return
        piece()


def _bands(layers: Sequence[LayerPages]) -> list[Band]:
    changes = [n for n, (one, two) in enumerate(pairwise(layers), 1) if one.stride_bytes != two.stride_bytes]
    bands = []
    for start, end in pairwise([0, *changes, len(layers)] if layers else []):
        bases = np.array([it.base for it in layers[start:end]], dtype=np.uint64)
        bands.append(Band(start, bases, layers[start].stride_bytes))
    return bands
