"""What every PagedKV must do; subclass the suite with your own and let pytest collect the subclass.

    class TestMine(PagedKVSuite):
        def make(self, groups: Sequence[Tensors], blocks: int) -> PagedKV:
            return Mine(groups, blocks)

Each test fills pages and node memory with different random bytes, works out with plain loops over raw bytes what a job
must change, runs the job and compares *everything*: all of the pages' storage, padding and neighbours included, and
all of the node memory. So a byte that is wrong, left over, or changed elsewhere fails, on either side.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headwater.ports import Addresses, BlockIds, PagedKV
from headwater.types import PAGE_BYTES, KVGroup, KVLayout

Tensors = dict[str, torch.Tensor]
Bytes = np.ndarray
Spot = tuple[int, int, int]
"""Where the blocks of a layer really are: storage, first byte of block 0, bytes from block to block."""
Arranged = tuple[list[torch.Tensor], list[Spot]]
Job = tuple[str, int, BlockIds, Addresses, int]
"""Verb, group, blocks, places, layer stride."""

SEEDS = range(3)

BLOCKS = 40
CHUNK_BLOCKS = 4


@dataclass
class Group:
    """A KV group's tensors, and where each layer really is."""

    tensors: Tensors
    spots: list[Spot]
    block_bytes: int


class World:
    """Pages of some groups and node memory for some chunks of them, all filled from one seed."""

    def __init__(
        self,
        seed: int,
        shapes: Sequence[tuple[str, int, int]],
        *,
        device: torch.device,
        shards: int = 1,
        chunks: int = 6,
    ) -> None:
        """`shapes` lists (arrangement, layers, block bytes) of each group; see `ARRANGEMENTS`."""
        self.device = device
        self.random = np.random.default_rng(seed)
        self.storages: list[torch.Tensor] = []
        self.groups: list[Group] = []
        for shape in shapes:
            self.groups.append(self.group(*shape))
        declared = tuple(KVGroup(1, size, (max(layers, 1),) * shards) for _, layers, size in shapes)
        self.layout = KVLayout(CHUNK_BLOCKS, declared)
        self.chunks = chunks
        slots = sum(self.layout.slot_bytes(it) for it in range(len(shapes))) * chunks
        self.memory = mmap.mmap(-1, slots + PAGE_BYTES)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.bytes[:] = self.random.integers(0, 256, len(self.bytes), dtype=np.uint8)

    def storage(self, size_bytes: int) -> torch.Tensor:
        content = self.random.integers(0, 256, size_bytes, dtype=np.uint8)
        self.storages.append(torch.from_numpy(content).to(self.device))
        return self.storages[-1]

    @property
    def last(self) -> int:
        """The index of the newest storage."""
        return len(self.storages) - 1

    def group(self, arrangement: str, layers: int, block_bytes: int) -> Group:
        """A group of its own, or an `alias`: the same bytes as the group before, under other names."""
        prefix = f"group {len(self.groups)} layer"
        if arrangement == "alias":
            other = self.groups[-1]
            views, spots = list(other.tensors.values()), other.spots
        else:
            views, spots = ARRANGEMENTS[arrangement](self, layers, block_bytes)
        return Group({f"{prefix} {n}": it for n, it in enumerate(views)}, spots, block_bytes)

    def places(
        self, group: int, chunk: int, shard: int = 0, positions: Sequence[int] = range(CHUNK_BLOCKS)
    ) -> Addresses:
        """Addresses of the first layer's bytes of these blocks of a chunk."""
        before = sum(self.layout.slot_bytes(it) * self.chunks for it in range(group))
        slot = before + chunk * self.layout.slot_bytes(group)
        start = self.base + slot + self.layout.part_offset(group, shard)
        return np.array([start + it * self.groups[group].block_bytes for it in positions], dtype=np.uint64)

    def draw(self, count: int) -> BlockIds:
        """Different block ids in random order."""
        return self.random.permutation(BLOCKS)[:count].astype(np.int64)

    def snapshot(self) -> list[Bytes]:
        """All pages' storages, and the node memory last."""
        return [it.cpu().numpy().copy() for it in self.storages] + [self.bytes.copy()]

    def expect(self, state: list[Bytes], job: Job) -> None:
        """Do to a snapshot what the job must do."""
        verb, group, blocks, places, stride = job
        it = self.groups[group]
        for layer, (storage, start, apart) in enumerate(it.spots):
            for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
                paged = state[storage][start + block * apart :][: it.block_bytes]
                packed = state[-1][place - self.base + layer * stride :][: it.block_bytes]
                if verb == "gather":
                    packed[:] = paged
                else:
                    paged[:] = packed

    def run(self, kv: PagedKV, *jobs: Job) -> None:
        """Run jobs in order and compare everything after each."""
        kv.attach([self.base], [len(self.bytes)])
        for job in jobs:
            expected = self.snapshot()
            self.expect(expected, job)
            verb, group, blocks, places, stride = job
            given = blocks.copy(), places.copy()
            getattr(kv, verb)(group, blocks, places, stride)
            assert (blocks == given[0]).all() and (places == given[1]).all(), "the arguments changed"
            for index, (found, right) in enumerate(zip(self.snapshot(), expected, strict=True)):
                wrong = np.flatnonzero(found != right)
                side = "node memory" if index == len(expected) - 1 else f"pages, storage {index}"
                assert not len(wrong), f"{verb}: {len(wrong)} wrong bytes in {side}, the first at {wrong[0]}"
        kv.detach()
        kv.close()


# ---- how engines arrange pages -----------------------------------------------------------------------------------


def apart(world: World, layers: int, size: int) -> Arranged:
    """A storage for each layer."""
    views = [world.storage(BLOCKS * size).view(BLOCKS, 1, 1, size) for _ in range(layers)]
    first = len(world.storages) - layers
    return views, [(first + n, 0, size) for n in range(layers)]


def layers_outside(world: World, layers: int, size: int) -> Arranged:
    """One storage, layer after layer (LBNHC)."""
    raw = world.storage(layers * BLOCKS * size).view(layers, BLOCKS, 1, 1, size)
    return list(raw), [(world.last, n * BLOCKS * size, size) for n in range(layers)]


def blocks_outside(world: World, layers: int, size: int) -> Arranged:
    """One storage, all layers of a block together (BLNHC)."""
    raw = world.storage(layers * BLOCKS * size).view(BLOCKS, layers, 1, 1, size)
    return list(raw.unbind(1)), [(world.last, n * size, layers * size) for n in range(layers)]


def padded(world: World, layers: int, size: int) -> Arranged:
    """Pages with unused bytes at their end, which are no multiple of a large word."""
    page = size + 20
    raw = world.storage(layers * BLOCKS * page).view(layers, BLOCKS, 1, 1, page)[..., :size]
    return list(raw), [(world.last, n * BLOCKS * page, page) for n in range(layers)]


def kernel_blocks(world: World, layers: int, size: int) -> Arranged:
    """Two rows of the tensor are one block."""
    raw = world.storage(layers * BLOCKS * size).view(layers, BLOCKS * 2, 1, 1, size // 2)
    return list(raw), [(world.last, n * BLOCKS * size, size) for n in range(layers)]


def permuted(world: World, layers: int, size: int) -> Arranged:
    """bfloat16 `[blocks, heads, tokens, channels]`, with the tokens outside of the heads in memory."""
    raw = world.storage(layers * BLOCKS * size).view(torch.bfloat16).view(layers, BLOCKS, 4, 2, size // 16)
    return list(raw.transpose(2, 3)), [(world.last, n * BLOCKS * size, size) for n in range(layers)]


def states(world: World, layers: int, size: int) -> Arranged:
    """int8 states that start at an odd byte, last layer first."""
    raw = world.storage(layers * BLOCKS * size + 5)[5:].view(torch.int8).view(layers, BLOCKS, 1, 1, size)
    spots = [(world.last, 5 + n * BLOCKS * size, size) for n in range(layers)]
    return list(raw)[::-1], spots[::-1]


def unequal_strides(world: World, layers: int, size: int) -> Arranged:
    """One storage and equal room for each layer, but only every other layer spreads its blocks over that room."""
    room = 2 * BLOCKS * size
    raw = world.storage(layers * room).view(layers, 2 * BLOCKS, 1, 1, size)
    views = [it[::2] if n % 3 else it[:BLOCKS] for n, it in enumerate(raw)]
    return views, [(world.last, n * room, 2 * size if n % 3 else size) for n in range(layers)]


ARRANGEMENTS: dict[str, Callable[[World, int, int], Arranged]] = {
    it.__name__: it
    for it in (apart, layers_outside, blocks_outside, padded, kernel_blocks, permuted, states, unequal_strides)
}


# ---- the suite -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
class PagedKVSuite:
    """The contract of `headwater.ports.PagedKV`."""

    device = torch.device("cpu")
    """Where `make` wants its tensors."""

    def make(self, groups: Sequence[Tensors], blocks: int) -> PagedKV:
        """The PagedKV under test."""
        raise NotImplementedError

    def world(
        self, seed: int, *shapes: tuple[str, int, int], shards: int = 1, chunks: int = 6
    ) -> tuple[World, PagedKV]:
        world = World(seed, shapes, device=self.device, shards=shards, chunks=chunks)
        return world, self.make([it.tensors for it in world.groups], BLOCKS)

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_whole_chunks_are_saved_and_loaded_into_other_blocks(self, seed: int, arrangement: str) -> None:
        world, kv = self.world(seed, (arrangement, 5, 96))
        stride = world.layout.layer_stride_bytes(0)
        places = np.concatenate([world.places(0, chunk) for chunk in (4, 0, 2)])
        world.run(
            kv,
            ("gather", 0, world.draw(len(places)), places, stride),
            ("scatter", 0, world.draw(len(places)), places, stride),
        )

    def test_some_blocks_of_some_chunks_in_any_order(self, seed: int) -> None:
        world, kv = self.world(seed, ("layers_outside", 7, 32))
        stride = world.layout.layer_stride_bytes(0)
        every = np.concatenate([world.places(0, chunk) for chunk in range(6)])
        places, tail = world.random.permutation(every)[:13], world.places(0, 1, positions=[2, 3])
        world.run(
            kv,
            ("gather", 0, world.draw(13), places, stride),
            ("scatter", 0, world.draw(13), places, stride),
            ("scatter", 0, world.draw(2), tail, stride),
            ("gather", 0, world.draw(1), tail[:1], stride),
        )

    def test_groups_differ_share_bytes_or_have_no_layers_here(self, seed: int) -> None:
        shapes = [("padded", 3, 48), ("alias", 3, 48), ("blocks_outside", 2, 160), ("apart", 0, 16), ("states", 1, 33)]
        world, kv = self.world(seed, *shapes)
        jobs: list[Job] = []
        for group in world.random.permutation(len(shapes)).tolist():
            stride, places = world.layout.layer_stride_bytes(group), world.places(group, 3)
            jobs += [(verb, group, world.draw(len(places)), places, stride) for verb in ("gather", "scatter")]
        world.run(kv, *jobs)

    def test_each_shard_copies_its_own_part_of_the_same_slots(self, seed: int) -> None:
        world, kv = self.world(seed, ("layers_outside", 3, 80), ("apart", 2, 112), shards=3)
        jobs: list[Job] = []
        for shard in (2, 0, 1):
            for group in (0, 1):
                stride = world.layout.layer_stride_bytes(group)
                places = np.concatenate([world.places(group, chunk, shard) for chunk in (5, 1)])
                jobs += [(verb, group, world.draw(len(places)), places, stride) for verb in ("gather", "scatter")]
        world.run(kv, *jobs)

    def test_places_sizes_and_strides_that_are_aligned_to_nothing(self, seed: int) -> None:
        world, kv = self.world(seed, ("states", 4, 37), ("padded", 4, 50))
        jobs: list[Job] = []
        for group, size in enumerate((37, 50)):
            odd = world.base + 1 + 2 * int(world.random.integers(0, 50))
            places = np.array([odd + n * size for n in range(6)], dtype=np.uint64)
            jobs += [(verb, group, world.draw(6), places, 6 * size + 13) for verb in ("gather", "scatter")]
        world.run(kv, *jobs)

    def test_no_blocks_no_change(self, seed: int) -> None:
        world, kv = self.world(seed, ("apart", 2, 64))
        blocks, places = np.array([], dtype=np.int64), np.array([], dtype=np.uint64)
        world.run(kv, ("gather", 0, blocks, places, 64), ("scatter", 0, blocks, places, 64))

    @pytest.mark.parametrize("arrangement", ["layers_outside", "apart"])
    def test_hundreds_of_layers(self, seed: int, arrangement: str) -> None:
        world, kv = self.world(seed, (arrangement, 300, 16), chunks=2)
        stride = world.layout.layer_stride_bytes(0)
        places = np.concatenate([world.places(0, chunk) for chunk in (1, 0)])
        world.run(kv, *((verb, 0, world.draw(len(places)), places, stride) for verb in ("gather", "scatter")))

    def test_a_save_may_read_a_block_for_several_places(self, seed: int) -> None:
        world, kv = self.world(seed, ("blocks_outside", 3, 72))
        places = np.concatenate([world.places(0, chunk) for chunk in (2, 5)])
        blocks = world.random.choice(world.draw(3), len(places))
        world.run(kv, ("gather", 0, blocks, places, world.layout.layer_stride_bytes(0)))

    def test_the_outermost_blocks_and_bytes(self, seed: int) -> None:
        world, kv = self.world(seed, ("layers_outside", 2, 96))
        end = world.base + len(world.bytes)
        places = np.array([world.base, end - 96 - 200], dtype=np.uint64)
        edges = np.array([BLOCKS - 1, 0], dtype=np.int64)
        world.run(kv, ("gather", 0, edges, places, 200), ("scatter", 0, edges[::-1].copy(), places, 200))
