"""Copies between an engine's KV pages on a CUDA device and node memory, off the engine's stream.

Theory of operation. Scattered pages meet contiguous host memory in a bounded staging buffer on the device:

    save   pages --take--> staging --one copy a piece--> node memory
    load   node memory --one copy a piece--> staging --put--> pages         (a few layers at a time, in their order)

Each direction is a *lane*: a stream of kernels (which alone touches pages), a stream of copies (which alone touches
node memory) and a ring of staging slots. Nothing here waits on the host but `Copy.wait`; five waits between streams
order what must be ordered, and each has its name in the code:

    mark      the lane's kernels wait for the engine's work that the caller marked: it wrote, or zeroed, the blocks
    hazard    ... and for the other lane's kernels that are under way on some of the same blocks
    filled    a slot's second half (copy of a save, put of a load) waits for its first half
    free      a slot's next user waits for its last
    fence     the engine's stream waits: for one layer of a load, or for all kernels of both lanes

A copy is over when its last slot is free: only then may a save be committed, a load's lease be released, and blocks
be used by whoever does not wait on the device. See docs/decisions/0003-cuda-copies.md.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from headwater.engines.cuda_device import Device, Event, Stream, TorchDevice
from headwater.engines.cuda_pages import stacks
from headwater.engines.cuda_plan import Piece, split
from headwater.engines.paged_kv import CpuPagedKV, GroupPages
from headwater.errors import RefusedError
from headwater.ports import Addresses, BlockIds, PagedKV

SLOT_BYTES = 4 << 20
"""A compromise: 160 us on a link of 25 GB/s, so launching is not the limit, and still few layers a piece."""
SLOTS = 3
POLL_S = 0.0002


class Slot:
    """A staging buffer and the event after which it may be filled again."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.free: Event | None = None


class Lane:
    """The streams and slots of one direction."""

    def __init__(self, device: Device, slots: int, slot_bytes: int) -> None:
        self.kernels: Stream = device.stream()
        self.copies: Stream = device.stream()
        self.slots = cycle([Slot(device.empty(slot_bytes)) for _ in range(slots)])


@dataclass(frozen=True, slots=True)
class Underway:
    """Blocks that a lane's kernels read or write until `settled` is over."""

    lane: Lane
    blocks: BlockIds
    settled: Event


@dataclass(frozen=True, slots=True)
class Region:
    """One segment of node memory in this process."""

    address: int
    size_bytes: int
    view: torch.Tensor
    pinned: bool


class Copy:
    """A copy that was started. Until it is done, the blocks and the node memory stay leased."""

    def __init__(self, device: Device, last: Event | None, ready: Sequence[tuple[int, Event]]) -> None:
        self._device, self._last, self._ready = device, last, ready

    def done(self) -> bool:
        """Whether all bytes are where they belong."""
        return self._last is None or self._device.finished(self._last)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for that; False when time is up, and then nothing has been given up."""
        if timeout_s is None:
            if self._last is not None:
                self._device.synchronize(self._last)
            return True
        until_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= until_s:
                return False
            time.sleep(POLL_S)
        return True

    def wait_layer(self, layer: int) -> None:
        """Of a load: what the calling thread gives to its stream from now on sees this layer's bytes."""
        for end, event in self._ready:
            if layer < end:
                self._device.wait(self._device.current_stream(), event)  # fence
                return


class CudaPagedKV:
    """PagedKV over tensors of one CUDA device. Any thread may call it; jobs of a direction run in their order."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, torch.Tensor]],
        blocks: int,
        device: Device,
        *,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`groups[g]` maps the layers of KV group g, in order, to tensors of `blocks` blocks each.

        Takes `2 * slots * slot_bytes` of device memory (more only where one block does not fit a slot). The
        tensors must stay alive and in place. Raises RefusedError when they cannot be used as opaque bytes.
        """
        assert slots >= 2, f"{slots=}: one slot would be filled and emptied in turn"
        self.groups = [GroupPages(layers, blocks) for layers in groups]
        self._stacks = [stacks(it, list(layers.values())) for it, layers in zip(self.groups, groups, strict=True)]
        self._device = device
        self._slot_bytes = max([slot_bytes, *(it.block_bytes for it in self.groups)])
        self._saving = Lane(device, slots, self._slot_bytes)
        self._loading = Lane(device, slots, self._slot_bytes)
        self._regions: list[Region] = []
        self._underway: list[Underway] = []
        self._lock = threading.Lock()
        self.pageable_bytes = 0
        """Bytes copied from or to node memory that could not be pinned."""

    def attach(self, bases: Sequence[int], sizes: Sequence[int]) -> None:
        """Node memory was mapped at `bases`: pin it. It stays mapped until `detach` returns.

        Pinning takes about a second for a few GiB and must not happen while the engine captures CUDA graphs.
        """
        self.detach()
        regions = []
        for base, size in zip(bases, sizes, strict=True):
            view = torch.frombuffer((ctypes.c_uint8 * size).from_address(base), dtype=torch.uint8)
            regions.append(Region(base, size, view, self._device.pin(base, size)))
        with self._lock:
            self._regions = regions

    def detach(self) -> None:
        """Wait for all copies and forget the node memory; it may be unmapped then."""
        with self._lock:
            self._settle()
            regions, self._regions = self._regions, []
        for it in regions:
            if it.pinned:
                self._device.unpin(it.address)

    def mark(self) -> Event:
        """Called by the engine's thread: a point in its stream after all work that it has launched."""
        return self._device.record(self._device.current_stream())

    def fence(self) -> None:
        """Called by the engine's thread: what it launches from now on may use any block of any copy started so far."""
        stream = self._device.current_stream()
        with self._lock:
            for it in self._underway:
                self._device.wait(stream, it.settled)  # fence

    def gather(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: Event | None = None
    ) -> None:
        """Copy blocks into node memory; when it returns, the bytes are there."""
        self.start_gather(group, blocks, places, layer_stride_bytes, after).wait()

    def scatter(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: Event | None = None
    ) -> None:
        """Copy node memory into blocks, none of them twice; when it returns, the bytes are there."""
        self.start_scatter(group, blocks, places, layer_stride_bytes, after).wait()

    def start_gather(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: Event | None = None
    ) -> Copy:
        """Begin a save once `after` (see `mark`) is over. When this raises, nothing is under way."""
        return self._start(self._saving, group, blocks, places, layer_stride_bytes, after)

    def start_scatter(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: Event | None = None
    ) -> Copy:
        """Begin a load; blocks change only once `after` is over. When this raises, nothing is under way."""
        return self._start(self._loading, group, blocks, places, layer_stride_bytes, after)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """See `ports.PagedKV`."""
        return tuple((len(it.layers), it.block_bytes) for it in self.groups)

    def close(self) -> None:
        """The same, at the end."""
        self.detach()

    # ---- inside ---------------------------------------------------------------------------------------

    def _start(
        self, lane: Lane, group: int, blocks: BlockIds, places: Addresses, stride_bytes: int, after: Event | None
    ) -> Copy:
        pages = self.groups[group]
        pages.check(blocks, places, stride_bytes)
        layers = len(pages.layers)
        if not len(blocks) or not layers:
            return Copy(self._device, None, ())
        plan = split(places, pages.block_bytes, layers, stride_bytes, self._slot_bytes)
        with self._lock:
            try:
                return self._issue(lane, group, blocks, plan, stride_bytes, after)
            except BaseException:
                self._settle()
                raise

    def _issue(
        self,
        lane: Lane,
        group: int,
        blocks: BlockIds,
        plan: list[list[Piece]],
        stride_bytes: int,
        after: Event | None,
    ) -> Copy:
        device = self._device
        if after is not None:
            device.wait(lane.kernels, after)  # mark
        self._underway = [it for it in self._underway if not device.finished(it.settled)]
        for it in self._underway:
            if it.lane is not lane and np.isin(blocks, it.blocks).any():
                device.wait(lane.kernels, it.settled)  # hazard
        ids = device.upload(lane.kernels, blocks)
        move = self._save if lane is self._saving else self._load
        ready = []
        for pieces in plan:
            for piece in pieces:
                over = move(lane, group, piece, ids[piece.start : piece.end], stride_bytes)
            ready.append((pieces[0].first + pieces[0].layers, device.record(lane.kernels)))
        self._underway.append(Underway(lane, blocks.copy(), ready[-1][1]))
        return Copy(device, over, ready if lane is self._loading else ())

    def _save(self, lane: Lane, group: int, piece: Piece, ids: torch.Tensor, stride_bytes: int) -> Event:
        device, slot = self._device, next(lane.slots)
        if slot.free is not None:
            device.wait(lane.kernels, slot.free)  # free
        for pages, words in self._parts(group, piece, slot):
            device.take(lane.kernels, pages, ids, words)
        filled = device.record(lane.kernels)
        device.wait(lane.copies, filled)  # filled
        for staged, host in self._moves(group, piece, slot, stride_bytes):
            device.copy(lane.copies, host, staged)
        slot.free = device.record(lane.copies)
        return slot.free

    def _load(self, lane: Lane, group: int, piece: Piece, ids: torch.Tensor, stride_bytes: int) -> Event:
        device, slot = self._device, next(lane.slots)
        if slot.free is not None:
            device.wait(lane.copies, slot.free)  # free
        for staged, host in self._moves(group, piece, slot, stride_bytes):
            device.copy(lane.copies, staged, host)
        filled = device.record(lane.copies)
        device.wait(lane.kernels, filled)  # filled
        for pages, words in self._parts(group, piece, slot):
            device.put(lane.kernels, pages, ids, words)
        slot.free = device.record(lane.kernels)
        return slot.free

    def _parts(self, group: int, piece: Piece, slot: Slot) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A piece as (pages, staging) pairs in words: one for each stack that it touches."""
        layer_bytes = piece.blocks * self.groups[group].block_bytes
        first, last = piece.first, piece.first + piece.layers
        found = []
        while first < last:
            stack = self._stacks[group][first]
            end = min(last, stack.first + stack.pages.shape[0])
            staged = slot.buffer[(first - piece.first) * layer_bytes : (end - piece.first) * layer_bytes]
            words = staged.view(stack.pages.dtype).view(end - first, piece.blocks, -1)
            found.append((stack.pages[first - stack.first : end - stack.first], words))
            first = end
        return found

    def _moves(
        self, group: int, piece: Piece, slot: Slot, stride_bytes: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A piece as (staging, node memory) pairs of bytes: one where it is whole, else one a layer."""
        layer_bytes = piece.blocks * self.groups[group].block_bytes
        count, size = (1, piece.layers * layer_bytes) if piece.whole else (piece.layers, layer_bytes)
        return [
            (slot.buffer[it * size : (it + 1) * size], self._host(piece.address + it * stride_bytes, size))
            for it in range(count)
        ]

    def _host(self, address: int, size_bytes: int) -> torch.Tensor:
        for it in self._regions:
            offset = address - it.address
            if offset >= 0 and offset + size_bytes <= it.size_bytes:
                if not it.pinned:
                    self.pageable_bytes += size_bytes
                return it.view[offset : offset + size_bytes]
        raise AssertionError(f"{size_bytes} bytes at {address:#x} are in no attached region")

    def _settle(self) -> None:
        """Wait for everything that was given to the lanes."""
        for lane in (self._saving, self._loading):
            self._device.synchronize(self._device.record(lane.copies))
            self._device.synchronize(self._device.record(lane.kernels))
        self._underway.clear()


def open_paged_kv(
    groups: Sequence[Mapping[str, torch.Tensor]], blocks: int, *, threads: int = 1, slot_bytes: int = SLOT_BYTES
) -> PagedKV:
    """The PagedKV for the device that the tensors are on; raises RefusedError."""
    devices = {pages.device for layers in groups for pages in layers.values()}
    kinds = {it.type for it in devices}
    if kinds <= {"cpu"}:
        return CpuPagedKV(groups, blocks, threads=threads)
    if len(devices) == 1 and kinds == {"cuda"}:
        return CudaPagedKV(groups, blocks, TorchDevice(devices.pop()), slot_bytes=slot_bytes)
    given = ", ".join(sorted(map(str, devices)))
    raise RefusedError("KV cache device", "cpu or one cuda device", given, "this device is not supported")
