"""CUDA pages on a fake device: the contract, every ordering that the code asks for is needed, and failures settle."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.engines import cuda_device
from headwater.engines.cuda_device import TorchDevice
from headwater.engines.cuda_kv import Copy, CudaPagedKV, open_paged_kv
from headwater.engines.cuda_plan import split
from headwater.engines.paged_kv import CpuPagedKV
from headwater.errors import RefusedError
from tests.conformance.paged_kv import PagedKVSuite, Tensors
from tests.engines.fake_device import FakeDevice

LAYERS, BLOCKS, BLOCK_BYTES, CHUNK = 6, 12, 16, 4
STRIDE = CHUNK * BLOCK_BYTES
SLOT_BYTES = 2 * STRIDE
"""Two layers of a chunk: a job of two chunks needs six pieces, and there are two slots."""
SEEDS = range(20)


class TestContract(PagedKVSuite):
    def make(self, groups: Sequence[Tensors], blocks: int) -> CudaPagedKV:
        return CudaPagedKV(groups, blocks, FakeDevice(len(groups)), slots=2, slot_bytes=500)


class TestContractWithTinySlots(PagedKVSuite):
    def make(self, groups: Sequence[Tensors], blocks: int) -> CudaPagedKV:
        return CudaPagedKV(groups, blocks, FakeDevice(len(groups)), slots=3, slot_bytes=70)


class TestContractWithoutPinning(PagedKVSuite):
    def make(self, groups: Sequence[Tensors], blocks: int) -> CudaPagedKV:
        return CudaPagedKV(groups, blocks, FakeDevice(len(groups), pins=False))


# ---- scenes: an engine that goes on working while copies are under way ---------------------------------------------


class Scene:
    """Pages whose layers lie partly in one storage, partly apart; node memory for four chunks; an engine's stream."""

    def __init__(self, seed: int, cut: tuple[str, int] | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.device = FakeDevice(seed, cut)
        together = torch.from_numpy(self.noise(LAYERS - 1, BLOCKS, BLOCK_BYTES))
        self.layers = [*together.unbind(0), torch.from_numpy(self.noise(BLOCKS, BLOCK_BYTES))]
        tensors = {str(n): it.view(BLOCKS, 1, 1, BLOCK_BYTES) for n, it in enumerate(self.layers)}
        self.kv = CudaPagedKV([tensors], BLOCKS, self.device, slots=2, slot_bytes=SLOT_BYTES)
        self.memory = self.noise(4, LAYERS, CHUNK, BLOCK_BYTES)
        self.kv.attach([self.memory.ctypes.data], [self.memory.nbytes])
        self.blocks = self.random.permutation(BLOCKS)[: 2 * CHUNK]

    def noise(self, *shape: int) -> np.ndarray:
        return self.random.integers(0, 256, shape, dtype=np.uint8)

    def places(self, *chunks: int) -> np.ndarray:
        base = self.memory.ctypes.data
        starts = [base + it * LAYERS * STRIDE + n * BLOCK_BYTES for it in chunks for n in range(CHUNK)]
        return np.array(starts, dtype=np.uint64)

    def packed(self, *chunks: int) -> np.ndarray:
        """Node memory as `[layer, block, byte]`."""
        return np.concatenate([self.memory[it] for it in chunks], axis=1)

    def paged(self) -> np.ndarray:
        """The blocks as `[layer, block, byte]`."""
        return np.stack([it[self.blocks].numpy() for it in self.layers])

    def compute(self, content: np.ndarray) -> None:
        """The engine writes the blocks, layer by layer, some time."""
        for pages, rows in zip(self.layers, content, strict=True):
            self.device.give(self.device.compute, lambda pages=pages, rows=rows: self.write(pages, rows))

    def write(self, pages: torch.Tensor, rows: np.ndarray) -> None:
        pages[self.blocks] = torch.from_numpy(rows)

    def attend(self, layer: int, seen: list[np.ndarray]) -> None:
        """The engine reads one layer, some time."""
        self.device.give(self.device.compute, lambda: seen.append(self.layers[layer][self.blocks].numpy().copy()))

    def save(self, *chunks: int, after: object = None) -> Copy:
        return self.kv.start_gather(0, self.blocks, self.places(*chunks), STRIDE, after)

    def load(self, *chunks: int, after: object = None) -> Copy:
        return self.kv.start_scatter(0, self.blocks, self.places(*chunks), STRIDE, after)

    def end(self) -> None:
        """Let everything run that has not yet, and give all back."""
        self.device.drain()
        self.kv.close()
        assert not self.device.pinned


def same(found: np.ndarray, right: np.ndarray) -> None:
    assert np.array_equal(found, right), f"{int((found != right).sum())} of {right.size} bytes are wrong"


def save_what_the_engine_has_launched(scene: Scene) -> None:
    content = scene.noise(LAYERS, 2 * CHUNK, BLOCK_BYTES)
    scene.compute(content)
    scene.save(3, 1, after=scene.kv.mark()).wait()
    same(scene.packed(3, 1), content)


def save_and_ask_whether_it_is_done(scene: Scene) -> None:
    copy, content = scene.save(0, 2), scene.paged()
    while not copy.done():
        pass
    same(scene.packed(0, 2), content)


def save_twice_and_wait_for_the_second(scene: Scene) -> None:
    content = scene.paged()
    scene.save(0, 1)
    assert scene.save(2, 3).wait(timeout_s=60)
    same(scene.packed(0, 1), content)
    same(scene.packed(2, 3), content)


def save_and_let_the_engine_write_behind_a_fence(scene: Scene) -> None:
    content = scene.paged()
    copy = scene.save(1, 2)
    scene.kv.fence()
    scene.compute(scene.noise(*content.shape))
    copy.wait()
    same(scene.packed(1, 2), content)


def load_after_the_engine_has_zeroed(scene: Scene) -> None:
    scene.compute(np.zeros((LAYERS, 2 * CHUNK, BLOCK_BYTES), dtype=np.uint8))
    copy = scene.load(3, 0, after=scene.kv.mark())
    copy.wait()
    same(scene.paged(), scene.packed(3, 0))
    scene.device.drain()
    same(scene.paged(), scene.packed(3, 0))


def load_and_attend_layer_by_layer(scene: Scene) -> None:
    seen: list[np.ndarray] = []
    copy = scene.load(2, 1)
    for layer in range(LAYERS):
        copy.wait_layer(layer)
        scene.attend(layer, seen)
    scene.device.drain()
    same(np.stack(seen), scene.packed(2, 1))


def load_and_attend_behind_a_fence(scene: Scene) -> None:
    seen: list[np.ndarray] = []
    scene.load(2, 1)
    scene.kv.fence()
    for layer in reversed(range(LAYERS)):
        scene.attend(layer, seen)
    scene.device.drain()
    same(np.stack(seen[::-1]), scene.packed(2, 1))


def load_twice_and_give_the_node_its_memory_back(scene: Scene) -> None:
    content = scene.packed(2, 3).copy()
    scene.load(0, 1)
    scene.load(2, 3).wait()
    scene.memory[:] = 0
    scene.device.drain()
    same(scene.paged(), content)


def save_then_load_into_the_same_blocks(scene: Scene) -> None:
    before, after = scene.paged(), scene.packed(2, 3).copy()
    ids = scene.blocks.copy()
    save = scene.kv.start_gather(0, ids, scene.places(0, 1), STRIDE)
    ids[:] = 0  # a caller may use its arrays again at once
    load = scene.load(2, 3)
    save.wait()
    load.wait()
    same(scene.packed(0, 1), before)
    same(scene.paged(), after)


def load_then_save_from_the_same_blocks(scene: Scene) -> None:
    content = scene.packed(2, 3).copy()
    scene.load(2, 3)
    scene.save(0, 1).wait()
    same(scene.packed(0, 1), content)


def save_and_detach(scene: Scene) -> None:
    content = scene.paged()
    scene.save(0, 1)
    scene.kv.detach()
    same(scene.packed(0, 1), content)
    scene.memory[:] = 0
    scene.device.drain()
    assert not scene.memory.any(), "node memory was written after it was detached"


def load_and_detach(scene: Scene) -> None:
    content = scene.packed(0, 1).copy()
    scene.load(0, 1)
    scene.kv.detach()
    scene.memory[:] = 0
    same(scene.paged(), content)


def fail_half_way(scene: Scene) -> None:
    for verb in (scene.save, scene.load):
        scene.device.fail_after = int(scene.random.integers(1, 24))
        with pytest.raises(RuntimeError, match="injected"):
            verb(0, 1)
        content, packed = scene.paged(), scene.packed(0, 1).copy()
        scene.device.drain()
        same(scene.paged(), content)
        same(scene.packed(0, 1), packed)
    load_twice_and_give_the_node_its_memory_back(scene)


SCENES: list[Callable[[Scene], None]] = [
    save_what_the_engine_has_launched,
    save_and_ask_whether_it_is_done,
    save_twice_and_wait_for_the_second,
    save_and_let_the_engine_write_behind_a_fence,
    load_after_the_engine_has_zeroed,
    load_and_attend_layer_by_layer,
    load_and_attend_behind_a_fence,
    load_twice_and_give_the_node_its_memory_back,
    save_then_load_into_the_same_blocks,
    load_then_save_from_the_same_blocks,
    save_and_detach,
    load_and_detach,
    fail_half_way,
]


@pytest.mark.parametrize("play", SCENES, ids=lambda it: it.__name__)
def test_scene(play: Callable[[Scene], None]) -> None:
    for seed in SEEDS:
        print(f"seed {seed}")
        scene = Scene(seed)
        play(scene)
        scene.end()


# ---- every ordering is needed ------------------------------------------------------------------------------------


def ordering_lines() -> list[tuple[str, int]]:
    """The lines of the code that record events or wait for them, as the scenes meet them."""
    found: set[tuple[str, int]] = set()
    for play in SCENES:
        scene = Scene(0)
        play(scene)
        scene.end()
        found |= scene.device.lines
    return sorted(found)


ORDERINGS = ordering_lines()


def test_all_kinds_of_ordering_are_met() -> None:
    kinds = [kind for kind, _ in ORDERINGS]
    assert {it: kinds.count(it) for it in kinds} == {"record": 8, "wait": 8, "synchronize": 3}


@pytest.mark.parametrize("cut", ORDERINGS, ids=lambda it: f"{it[0]} in line {it[1]}")
def test_leaving_out_an_ordering_is_caught(cut: tuple[str, int]) -> None:
    assert any(goes_wrong(play, seed, cut) for seed in SEEDS for play in SCENES)


def goes_wrong(play: Callable[[Scene], None], seed: int, cut: tuple[str, int]) -> bool:
    try:
        play(Scene(seed, cut))
    except AssertionError as error:
        print(f"without the {cut[0]} in line {cut[1]}: {play.__name__}, seed {seed}: {error}".splitlines()[0])
        return True
    return False


# ---- pinning and accounting --------------------------------------------------------------------------------------


def test_memory_is_pinned_while_it_is_attached() -> None:
    scene = Scene(1)
    assert scene.device.pinned == {scene.memory.ctypes.data: scene.memory.nbytes}
    other = scene.noise(2, LAYERS, CHUNK, BLOCK_BYTES)
    scene.kv.attach([other.ctypes.data], [other.nbytes])
    assert scene.device.pinned == {other.ctypes.data: other.nbytes}
    with pytest.raises(AssertionError, match="in no attached region"):
        scene.save(0, 1)
    scene.end()


def test_bytes_that_go_through_pageable_memory_are_counted() -> None:
    scene = Scene(2)
    scene.save(0, 1).wait()
    assert scene.kv.pageable_bytes == 0
    scene.device.pins = False
    scene.kv.attach([scene.memory.ctypes.data], [scene.memory.nbytes])
    scene.load(0, 1).wait()
    assert scene.kv.pageable_bytes == LAYERS * 2 * STRIDE
    scene.device.pins = True
    scene.kv.attach([scene.memory.ctypes.data], [scene.memory.nbytes])
    scene.save(0, 1).wait()
    assert scene.kv.pageable_bytes == LAYERS * 2 * STRIDE
    scene.end()


def test_waiting_ends_in_time_and_loses_nothing() -> None:
    scene = Scene(3)
    content = scene.paged()
    hold = scene.device.stream("held")
    never = scene.device.record(hold)
    hold.queue.clear()
    copy = scene.save(0, 1, after=never)
    assert not copy.wait(timeout_s=0.002)
    assert not copy.done()
    never.over = True
    assert copy.wait(timeout_s=60)
    same(scene.packed(0, 1), content)
    scene.end()


def test_a_copy_of_nothing_is_done() -> None:
    scene = Scene(4)
    copy = scene.kv.start_scatter(0, np.array([], dtype=np.int64), np.array([], dtype=np.uint64), STRIDE)
    copy.wait_layer(0)
    assert copy.done() and copy.wait() and copy.wait(timeout_s=0)
    scene.end()


def test_the_host_copies_once_a_piece_when_chunks_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(5)
    sizes: list[int] = []
    copy = scene.device.copy
    monkeypatch.setattr(
        scene.device, "copy", lambda s, target, source: (sizes.append(len(source)), copy(s, target, source))
    )
    scene.save(0, 1).wait()
    assert sizes == [SLOT_BYTES] * (LAYERS // 2 * 2)
    sizes.clear()
    scene.kv.gather(0, scene.blocks[:3], scene.places(0)[:3], STRIDE)
    assert sizes == [3 * BLOCK_BYTES] * LAYERS
    scene.end()


# ---- the plan ------------------------------------------------------------------------------------------------------


@given(st.data())
def test_pieces_cover_every_block_of_every_layer_once_and_in_place(data: st.DataObject) -> None:
    chunk, layers, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    stride = chunk * size + data.draw(st.sampled_from([0, 0, 3]))
    cells = [(slot, block) for slot in range(4) for block in range(chunk)]
    chosen = data.draw(st.one_of(st.just(cells), st.lists(st.sampled_from(cells), unique=True)))
    slot_bytes = layers * stride + 5
    places = np.array([1000 + slot * slot_bytes + block * size for slot, block in chosen], dtype=np.uint64)
    limit = data.draw(st.integers(size, 3 * slot_bytes))
    seen = set()
    reached = 0
    for group in split(places, size, layers, stride, limit):
        assert {(it.first, it.layers) for it in group} == {(reached, group[0].layers)}
        reached += group[0].layers
        for it in group:
            assert it.layers * it.blocks * size <= limit
            for layer in range(it.layers):
                for n in range(it.blocks):
                    cell = it.first + layer, it.start + n
                    assert cell not in seen
                    seen.add(cell)
                    right = int(places[cell[1]]) + cell[0] * stride
                    assert right == it.address + layer * stride + n * size
                    if it.whole:
                        assert right == it.address + (layer * it.blocks + n) * size
    assert len(seen) == layers * len(places)
    assert reached == (layers if len(places) else 0)


@pytest.mark.parametrize("shift", range(8))
def test_words_are_as_wide_as_the_addresses_allow(shift: int) -> None:
    raw = torch.from_numpy(np.zeros(2048, dtype=np.uint8)[shift:])  # a storage that starts anywhere
    layers = {str(n): raw[n * 960 :][:960].view(20, 1, 1, 48) for n in range(2)}
    (stack, same) = CudaPagedKV([layers], 20, FakeDevice(0))._stacks[0]
    word = stack.pages.dtype.itemsize
    assert stack is same and stack.pages.shape == (2, 20, 48 // word)
    assert word == min(8, raw.data_ptr() & -raw.data_ptr())


# ---- what stands between the code and torch ------------------------------------------------------------------------


def test_torch_takes_and_puts_as_the_fake_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    real, fake = TorchDevice(torch.device("cpu")), FakeDevice(0)
    pages = torch.arange(3 * 5 * 4).view(5, 3, 4).transpose(0, 1)
    ids = torch.tensor([4, 0, 3])
    taken = [torch.zeros(3, 3, 4, dtype=torch.int64) for _ in range(2)]
    put = [pages.clone(), pages.clone()]
    for device, target, other in zip((real, fake), taken, put, strict=True):
        stream = fake.compute
        device.take(stream, pages, ids, target)
        device.put(stream, other, ids[:2], -torch.ones(3, 2, 4, dtype=torch.int64))
        fake.drain()
    assert torch.equal(taken[0], pages[:, [4, 0, 3]]) and torch.equal(taken[1], taken[0])
    assert (put[0][:, [4, 0]] == -1).all() and torch.equal(put[0], put[1]) and torch.equal(put[0][:, 3], pages[:, 3])
    copied = torch.zeros(7, dtype=torch.uint8)
    real.copy(None, copied, torch.arange(7, dtype=torch.uint8))
    assert copied.tolist() == list(range(7))


def test_torch_has_the_streams_and_events_that_are_used() -> None:
    assert callable(torch.cuda.Stream.wait_event)
    assert all(callable(getattr(torch.cuda.Event, name)) for name in ("record", "query", "synchronize"))
    assert all(callable(getattr(torch.cuda, name)) for name in ("current_stream", "stream", "device", "cudart"))


class FakeCudart:
    """Registers as CUDA does: with a result, and in the calling thread."""

    def __init__(self, result: int) -> None:
        self.result = result
        self.calls: list[tuple[int, ...]] = []
        self.threads: set[threading.Thread] = set()

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        self.threads.add(threading.current_thread())
        return self.result


@pytest.mark.parametrize("result", [0, 2])
def test_pinning_that_is_refused_is_a_warning_and_stays_in_its_thread(
    result: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = FakeCudart(result)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    with caplog.at_level(logging.WARNING, cuda_device.__name__):
        assert TorchDevice(torch.device("cpu")).pin(4096, 8192) == (result == 0)
    assert cudart.calls == [(4096, 8192, 0)]
    assert threading.current_thread() not in cudart.threads
    assert ("cannot pin 8192 bytes of node memory (CUDA error 2)" in caplog.text) == (result != 0)


def test_the_device_decides_which_copies_are_used() -> None:
    pages = torch.zeros(4, 1, 1, 8)
    assert isinstance(open_paged_kv([{"x": pages}], 4), CpuPagedKV)
    with pytest.raises(RefusedError, match="KV cache device: expected cpu or one cuda device, given cpu, meta"):
        open_paged_kv([{"x": pages, "y": pages.to("meta")}], 4)
