"""CPU pages: the contract with both copy kernels and thread counts, what is refused, and that the suite can fail."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from headwater import _kernels
from headwater.engines import paged_kv
from headwater.engines.paged_kv import CpuPagedKV, resolve_layer
from headwater.errors import RefusedError
from headwater.ports import Addresses, BlockIds
from tests.conformance.paged_kv import PagedKVSuite, Tensors


class TestCpu(PagedKVSuite):
    def make(self, groups: Sequence[Tensors], blocks: int) -> CpuPagedKV:
        return CpuPagedKV(groups, blocks)


class TestWithoutC(PagedKVSuite):
    def make(self, groups: Sequence[Tensors], blocks: int) -> CpuPagedKV:
        return CpuPagedKV(groups, blocks, kernels=_kernels.load(native=False))


class TestTwoThreads(PagedKVSuite):
    @pytest.fixture(autouse=True)
    def split_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paged_kv, "SPLIT_MIN_BYTES", 1)
        monkeypatch.setattr(paged_kv, "PIECE_BYTES", 500)

    def make(self, groups: Sequence[Tensors], blocks: int) -> CpuPagedKV:
        return CpuPagedKV(groups, blocks, threads=2)


# ---- the suite catches what it is for ----------------------------------------------------------------------------


class Sabotaged(CpuPagedKV):
    """Breaks the contract in the way that `fault` names."""

    fault = ""

    def attach(self, bases: Sequence[int], sizes: Sequence[int]) -> None:
        self.base = bases[0]

    def gather(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: object = None
    ) -> None:
        if self.fault == "the last block is not saved":
            blocks, places = blocks[:-1], places[:-1]
        elif self.fault == "saves read the neighbour":
            blocks = np.minimum(blocks + 1, self.groups[group].blocks - 1)
        elif self.fault == "saves go through a set":
            blocks, at = np.unique(blocks, return_index=True)
            places = places[at]
        elif self.fault == "saves put layers too close":
            size = self.groups[group].block_bytes
            layer_stride_bytes = max(size, layer_stride_bytes - size)
        elif self.fault == "saves clear what they have read":
            super().gather(group, blocks, places, layer_stride_bytes, after)
            zeros = np.zeros(self.groups[group].block_bytes, dtype=np.uint8)
            for block in blocks[:1].tolist() if self.groups[group].layers else []:
                it = self.groups[group].layers[0]
                ctypes.memmove(it.base + block * it.stride_bytes, zeros.ctypes.data, len(zeros))
            return
        super().gather(group, blocks, places, layer_stride_bytes, after)

    def scatter(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: object = None
    ) -> None:
        if self.fault == "the last block is not loaded":
            blocks, places = blocks[:-1], places[:-1]
        elif self.fault == "loads sort their blocks":
            blocks = np.sort(blocks)
        elif self.fault == "loads fill whole pages":
            for it, band in zip(self.groups[group].layers, range(len(self.groups[group].layers)), strict=True):
                for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
                    room = min(it.stride_bytes, it.block_bytes + 8)
                    ctypes.memmove(it.base + block * it.stride_bytes, place + band * layer_stride_bytes, room)
            return
        elif self.fault == "loads move what they have read":
            super().scatter(group, blocks, places, layer_stride_bytes, after)
            ctypes.memset(self.base, 0, 1)
            return
        super().scatter(group, blocks, places, layer_stride_bytes, after)


FAULTS = [
    "the last block is not saved",
    "saves read the neighbour",
    "saves go through a set",
    "saves put layers too close",
    "saves clear what they have read",
    "the last block is not loaded",
    "loads sort their blocks",
    "loads fill whole pages",
    "loads move what they have read",
]


def failures(fault: str) -> list[str]:
    """The suite's tests that fail."""

    class Broken(Sabotaged):
        pass

    Broken.fault = fault

    class Suite(PagedKVSuite):
        def make(self, groups: Sequence[Tensors], blocks: int) -> CpuPagedKV:
            return Broken(groups, blocks)

    suite, found = Suite(), []
    for name in (it for it in dir(suite) if it.startswith("test_")):
        test: Callable[..., None] = getattr(suite, name)
        needs = {mark.args[0]: mark.args[1] for mark in getattr(test, "pytestmark", [])}
        for arrangement in needs.get("arrangement", [None]):
            try:
                test(0, arrangement) if arrangement else test(0)
            except AssertionError:
                found.append(name)
    return found


def test_a_sound_copy_passes_the_suite() -> None:
    assert failures("") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches(fault: str) -> None:
    assert failures(fault)


# ---- what is refused ---------------------------------------------------------------------------------------------


def pages(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def test_a_block_is_resolved_to_its_first_byte_stride_and_size() -> None:
    whole = pages(3, 8, 2, 4, 16)
    it = resolve_layer("x", whole[1].transpose(1, 2), blocks=4)
    assert (it.base, it.stride_bytes, it.block_bytes) == (whole.data_ptr() + 8 * 256, 512, 512)


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (pages(9, 2, 2, 8), "layer x: expected a multiple of 4 rows, given 9"),
        (pages(0, 2, 2, 8), "layer x: expected a multiple of 4 rows, given 0"),
        (
            pages(4, 2, 2, 8)[..., :6],
            r"each one dense run of bytes, given shape (4, 2, 2, 6) with strides (32, 16, 8, 1)",
        ),
        (pages(4, 3, 5, 2, 8)[:, :, 1], "each one dense run of bytes"),
        (pages(4, 1, 1, 8).expand(4, 2, 2, 8), "each one dense run of bytes"),
        (
            pages(1, 2, 2, 8).expand(4, 2, 2, 8),
            "layer x: expected 64 bytes from row to row, 1 of which are one block, given 0",
        ),
        (pages(8, 3, 2, 8)[:, 0], "layer x: expected 32 bytes from row to row, 2 of which are one block, given 96"),
    ],
    ids=["rows", "no rows", "padding inside", "other layers inside", "broadcast", "same row", "layers between rows"],
)
def test_refuses_what_is_not_one_run_of_bytes(tensor: torch.Tensor, complaint: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(complaint)):
        CpuPagedKV([{"x": tensor}], 4)


def test_refuses_layers_of_one_group_with_unequal_blocks() -> None:
    expected = "layer b: expected blocks of 64 bytes, as in layer a of the same group, given 32;"
    with pytest.raises(RefusedError, match=re.escape(expected)):
        CpuPagedKV([{"a": pages(4, 2, 2, 8)}, {"a": pages(4, 2, 2, 8), "b": pages(4, 1, 2, 8)}], 4)


def test_refuses_tensors_that_are_elsewhere() -> None:
    with pytest.raises(RefusedError, match="layer x: expected cpu, given meta"):
        CpuPagedKV([{"x": torch.empty(4, 1, 1, 8, device="meta")}], 4)


@pytest.mark.parametrize(("block", "count", "stride"), [(4, 1, 64), (-1, 1, 64), (0, 2, 64), (0, 1, 63)])
def test_asserts_that_jobs_are_possible(block: int, count: int, stride: int) -> None:
    kv = CpuPagedKV([{"x": pages(4, 2, 2, 8)}], 4)
    target = np.zeros(256, dtype=np.uint8)
    places = np.full(count, target.ctypes.data, dtype=np.uint64)
    with pytest.raises(AssertionError):
        kv.gather(0, np.array([block]), places, stride)
    assert not target.any()


# ---- large jobs --------------------------------------------------------------------------------------------------


def test_two_threads_share_a_large_job_and_leave_a_small_one_to_the_caller() -> None:
    layers, blocks, size = 8, 24, 65536
    raw = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (layers, blocks, 1, 1, size), dtype=np.uint8))
    kv = CpuPagedKV([{str(n): raw[n] for n in range(layers)}], blocks, threads=2)
    memory = mmap.mmap(-1, layers * blocks * size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for count in (blocks, 2):
        ids = np.random.default_rng(count).permutation(blocks)[:count]
        kv.gather(0, ids, np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(size), count * size)
        found = np.frombuffer(memory, dtype=np.uint8, count=layers * count * size).reshape(layers, count, size)
        assert (found == raw[:, ids, 0, 0].numpy()).all()
    assert layers * 2 * size < paged_kv.SPLIT_MIN_BYTES <= layers * blocks * size
    kv.close()


def test_a_failing_piece_is_reported_after_all_threads_are_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_kv, "SPLIT_MIN_BYTES", 1)
    monkeypatch.setattr(paged_kv, "PIECE_BYTES", 1)
    begun: list[int] = []

    def fail(bases: Addresses, *rest: object, **named: object) -> None:
        begun.append(int(bases[0]))
        raise ValueError("injected")

    sound = _kernels.load(native=False)
    kernels = _kernels.Kernels(False, "failing", sound.copyv, fail, fail, sound.touch)
    kv = CpuPagedKV([{str(n): pages(4, 2, 2, 8) for n in range(6)}], 4, threads=2, kernels=kernels)
    target = np.zeros(6 * 64, dtype=np.uint8)
    with pytest.raises(ValueError, match="injected"):
        kv.scatter(0, np.array([0]), np.array([target.ctypes.data], dtype=np.uint64), 64)
    count = len(begun)
    kv.close()
    assert len(begun) == count
