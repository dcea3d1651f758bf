"""CUDA pages on a real device: the contract, an engine that is still at work, and what the link gives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from headwater.engines.cuda_device import TorchDevice
from headwater.engines.cuda_kv import CudaPagedKV
from headwater.tiers.host import MappedMemory, create_memory
from tests.conformance.paged_kv import PagedKVSuite, Tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

# Llama-3.1-8B: 32 layers, blocks of 16 tokens, 4 KiB a token and layer; chunks of 256 tokens.
LAYERS, BLOCK_BYTES, CHUNK_BLOCKS, CHUNKS = 32, 16 * 4096, 16, 16
BLOCKS = 2 * CHUNKS * CHUNK_BLOCKS
STRIDE = CHUNK_BLOCKS * BLOCK_BYTES
SLOT_BYTES = LAYERS * STRIDE


class TestContract(PagedKVSuite):
    device = torch.device("cuda")

    def make(self, groups: Sequence[Tensors], blocks: int) -> CudaPagedKV:
        return CudaPagedKV(groups, blocks, TorchDevice(torch.device("cuda", 0)))


@pytest.fixture
def memory() -> Iterator[MappedMemory]:
    it = create_memory(CHUNKS * SLOT_BYTES, "memfd", lock=False)
    yield it
    it.close()


@pytest.fixture
def pages() -> torch.Tensor:
    """`[layer, block, byte]` of random bytes, about 2 GiB."""
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randint(0, 256, (LAYERS, BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda", generator=generator)


def opened(pages: torch.Tensor, memory: MappedMemory) -> CudaPagedKV:
    tensors = {str(n): pages[n].view(BLOCKS, 1, 1, BLOCK_BYTES) for n in range(LAYERS)}
    kv = CudaPagedKV([tensors], BLOCKS, TorchDevice(pages.device))
    kv.attach(memory.bases, memory.sizes)
    return kv


def places(memory: MappedMemory, chunks: int) -> np.ndarray:
    starts = [memory.address(c * SLOT_BYTES) + b * BLOCK_BYTES for c in range(chunks) for b in range(CHUNK_BLOCKS)]
    return np.array(starts, dtype=np.uint64)


def test_node_memory_is_pinned(pages: torch.Tensor, memory: MappedMemory) -> None:
    kv = opened(pages, memory)
    assert all(it.pinned and it.view.is_pinned() for it in kv._regions)
    kv.close()


def test_a_save_waits_for_an_engine_that_is_still_at_work_and_a_load_does_not(
    pages: torch.Tensor, memory: MappedMemory
) -> None:
    kv = opened(pages, memory)
    blocks = np.random.default_rng(1).permutation(BLOCKS)
    mine, others = blocks[:CHUNK_BLOCKS], blocks[CHUNK_BLOCKS : 2 * CHUNK_BLOCKS]
    my_ids, other_ids = torch.from_numpy(mine).cuda(), torch.from_numpy(others).cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second of work
    pages.index_fill_(1, my_ids, 7)  # launches without waiting
    save = kv.start_gather(0, mine, places(memory, 1), STRIDE, after=kv.mark())
    kv.scatter(0, others, places(memory, 2)[CHUNK_BLOCKS:], STRIDE)
    assert not save.done(), "the load waited for the engine, or the engine was too quick to tell"
    save.wait()
    assert (np.frombuffer(memory.view(0, SLOT_BYTES), dtype=np.uint8) == 7).all()
    assert not pages[:, other_ids].any()
    kv.close()


def test_round_trip_and_bandwidth(pages: torch.Tensor, memory: MappedMemory) -> None:
    kv = opened(pages, memory)
    blocks = np.random.default_rng(2).permutation(BLOCKS)[: CHUNKS * CHUNK_BLOCKS]
    ids = torch.from_numpy(blocks).cuda()
    content = pages[:, ids].clone()
    size = CHUNKS * SLOT_BYTES
    for verb in (kv.gather, kv.scatter):
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            verb(0, blocks, places(memory, CHUNKS), STRIDE)
            seconds.append(time.perf_counter() - begun)
        print(f"{verb.__name__}: {size / sorted(seconds)[2] / 1e9:.1f} GB/s, {torch.cuda.get_device_name()}")
        if verb == kv.gather:
            pages.zero_()
            torch.cuda.synchronize()
    assert torch.equal(pages[:, ids], content)
    assert kv.pageable_bytes == 0
    kv.close()
