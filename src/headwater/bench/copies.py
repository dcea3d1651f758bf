"""Save and load: blocks of an engine's paged memory to a node's memory and back, against memcpy.

The bench is the engine: it has paged tensors of its own, maps a node that is another process, and goes through
the verbs that the plug-in's worker goes through. A *save* is reserve, gather, done; after it the chunks are
visible to lookups. A *load* is load, scatter into other blocks, done. Every operation takes the next blocks of
one random order over all paged memory and, in the node, the memory that was used longest ago, so nothing that
it touches is in a CPU cache. The yardstick copies as many bytes between memory of the same two kinds.

Layout of the paged memory, one run a layer as engines on CPUs have it: `[layer][block][block_bytes]`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from headwater import _kernels
from headwater.bench.harness import GB, Contender, Effort, Experiment, Goal, Reading, Readings, Spec, Unmeasured
from headwater.bench.peers import Peer, node_process
from headwater.engines.paged_kv import CpuPagedKV
from headwater.errors import ResourceError
from headwater.node.client import Link, Session
from headwater.ports import Addresses, BlockIds
from headwater.types import KEY_BYTES, ChunkKey, KVGroup, KVLayout, Namespace

COLD_BYTES = 1 << 30
QUICK_BYTES = 64 << 20
PIECE_BYTES = 2 << 20
YARDSTICK = "C memcpy, one thread, cold, 2 MiB pieces"
CALL_S = 5.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV as one rank sees it, and how many chunks a prompt of the measurement has."""

    name: str
    about: str
    layout: KVLayout
    prompt_chunks: int

    @property
    def layers(self) -> int:
        """Layers of the only group."""
        return self.layout.groups[0].shard_layers[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.layout.groups[0].block_bytes

    @property
    def prompt_blocks(self) -> int:
        """Blocks of a prompt."""
        return self.prompt_chunks * self.layout.blocks_per_chunk(0)

    @property
    def prompt_bytes(self) -> int:
        """KV bytes of a prompt."""
        return self.prompt_blocks * self.layers * self.block_bytes


def shape(name: str, about: str, layers: int, block_tokens: int, token_bytes: int, prompt_chunks: int) -> Shape:
    """A dense model with chunks of 256 tokens; `token_bytes` are K and V of one token in one layer."""
    group = KVGroup(block_tokens, block_tokens * token_bytes, (layers,))
    return Shape(name, about, KVLayout(256, (group,)), prompt_chunks)


SHAPES = (
    shape("llama-8b", "Llama-3.1-8B bf16: 32 layers, 16-token blocks of 64 KiB, chunks of 32 MiB", 32, 16, 4096, 8),
    shape("smollm2-bf16", "SmolLM2-135M bf16: 30 layers, 16-token blocks of 12 KiB", 30, 16, 768, 16),
    shape(
        "smollm2-fp32", "SmolLM2-135M fp32 (vLLM on CPUs): 30 layers, 128-token blocks of 192 KiB", 30, 128, 1536, 16
    ),
)


class PagedMemory:
    """An engine's KV pages in small pages, filled with bytes that differ from block to block."""

    def __init__(self, shape: Shape, at_least_bytes: int) -> None:
        per_block = shape.layers * shape.block_bytes
        self.blocks = max(-(-at_least_bytes // per_block), 2 * shape.prompt_blocks)
        self._map = mmap.mmap(-1, self.blocks * per_block)
        words = np.frombuffer(self._map, dtype=np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.pages = words.reshape(shape.layers, self.blocks, shape.block_bytes // 8)
        self._order = np.random.default_rng(2).permutation(self.blocks)
        self._next = 0

    @property
    def flat(self) -> npt.NDArray[np.uint64]:
        """All of it, in the order of addresses."""
        return self.pages.reshape(-1)

    def tensors(self) -> dict[str, SimpleNamespace]:
        """One tensor a layer, as far as `CpuPagedKV` looks at tensors: this suite needs no torch."""
        return {f"layer.{number}": _as_tensor(layer) for number, layer in enumerate(self.pages)}

    def take(self, count: int) -> BlockIds:
        """The next blocks in the random order."""
        taken = np.arange(self._next, self._next + count) % self.blocks
        self._next = (self._next + count) % self.blocks
        blocks: BlockIds = self._order[taken].astype(np.int64)
        return blocks


def _as_tensor(layer: npt.NDArray[np.uint64]) -> SimpleNamespace:
    strides = tuple(it // layer.itemsize for it in layer.strides)
    return SimpleNamespace(
        shape=layer.shape,
        device=SimpleNamespace(type="cpu"),
        element_size=lambda: layer.itemsize,
        stride=lambda dimension=None: strides if dimension is None else strides[dimension],
        data_ptr=lambda: layer.ctypes.data,
    )


class Engine:
    """The engine's side of a node: paged memory, mapped node memory, and the two operations to be timed."""

    def __init__(self, shape: Shape, node: Peer, paged: PagedMemory) -> None:
        self.shape, self.paged = shape, paged
        link = Link(node.address, f"bench-{os.getpid()}", maps=True, connect_s=CALL_S, call_s=CALL_S)
        if link.memory is None:
            raise ResourceError("the node gave no memory to map")
        self.memory = link.memory
        self.memory.prefault(threading.Event())
        namespace = Namespace("bench", "raw", shape.name, shape.layout.fingerprint())
        self.session = Session(link, namespace, shape.layout)
        slots = self.memory.sizes[0] // shape.layout.slot_bytes(0)  # the rest is for objects' readers
        self.room = slots // shape.prompt_chunks - 1
        self.held: deque[list[ChunkKey]] = deque()
        self._prompts = 0

    def save(self, paged_kv: CpuPagedKV) -> BlockIds:
        """Save the next prompt from the next blocks; which blocks."""
        keys = self._new_prompt()
        reservation = self.session.reserve(keys)
        assert reservation.covered == len(keys), f"room for {reservation.covered} of {len(keys)} chunks"
        blocks = self.paged.take(self.shape.prompt_blocks)
        places = self._places(reservation.addresses[0])
        paged_kv.gather(0, blocks, places, self.shape.layout.layer_stride_bytes(0))
        assert self.session.done(reservation.ticket), "the save came too late"
        self.held.append(keys)
        if len(self.held) > self.room:
            self.held.popleft()
        return blocks

    def load(self, paged_kv: CpuPagedKV) -> BlockIds:
        """Load the prompt that was used longest ago into the next blocks; which blocks."""
        keys = self.held.popleft()
        loadable = self.session.load(keys)
        assert loadable.chunks == len(keys), f"{loadable.chunks} of {len(keys)} chunks are still there"
        blocks = self.paged.take(self.shape.prompt_blocks)
        places = self._places(loadable.addresses[0])
        paged_kv.scatter(0, blocks, places, self.shape.layout.layer_stride_bytes(0))
        assert self.session.done(loadable.ticket), "the load came too late"
        self.held.append(keys)
        return blocks

    def fill(self, paged_kv: CpuPagedKV) -> None:
        """Save prompts until the node has given all of its memory, so that every later save must evict."""
        while len(self.held) < self.room:
            self.save(paged_kv)
        self.save(paged_kv)

    def verify(self, paged_kv: CpuPagedKV) -> None:
        """Save a prompt and load it into other blocks; ResourceError unless every byte is the same."""
        saved = self.save(paged_kv)
        self.held.rotate(1)  # the newest prompt becomes the next to be loaded
        loaded = self.load(paged_kv)
        for layer in self.paged.pages:
            if not np.array_equal(layer[saved], layer[loaded]):
                raise ResourceError("a loaded block differs from the saved one; this memory cannot be trusted")

    def close(self) -> None:
        """Let the node go."""
        self.session.close()

    def _new_prompt(self) -> list[ChunkKey]:
        self._prompts += 1
        name = f"prompt {self._prompts} chunk ".encode()
        return [ChunkKey(sha256(name + b"%d" % i).digest()[:KEY_BYTES]) for i in range(self.shape.prompt_chunks)]

    def _places(self, chunks: Sequence[int]) -> Addresses:
        """Where layer 0 of each block belongs."""
        bases = np.array([self.memory.address(it) for it in chunks], dtype=np.uint64)
        blocks = np.arange(self.shape.layout.blocks_per_chunk(0), dtype=np.uint64)
        places: Addresses = (bases[:, None] + blocks * np.uint64(self.shape.block_bytes)).reshape(-1)
        return places


class Plain:
    """Copies of contiguous pieces from the engine's memory to shared memory of the node's kind."""

    def __init__(self, source: npt.NDArray[np.uint64], turn_bytes: int) -> None:
        """`turn_bytes` are copied each time, further on each time; whole pieces."""
        self.turn_bytes = max(turn_bytes // PIECE_BYTES, 1) * PIECE_BYTES
        self._size = source.nbytes // PIECE_BYTES * PIECE_BYTES
        descriptor = os.memfd_create("headwater-bench", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, self._size)
        self._map = mmap.mmap(descriptor, self._size)
        os.close(descriptor)
        self.target = np.frombuffer(self._map, dtype=np.uint64)
        self._source, self._target = source.ctypes.data, self.target.ctypes.data
        _kernels.touch(self._target, self._size)
        self._offset = 0
        libc = ctypes.CDLL(None)
        self._memcpy = libc.memcpy
        self._memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def memcpy(self) -> None:
        """One turn with C memcpy."""
        for offset in self._take():
            self._memcpy(self._target + offset, self._source + offset, PIECE_BYTES)

    def copyv(self) -> None:
        """One turn with our copy kernel: what gather and scatter could reach if blocks were contiguous."""
        offsets = np.array(self._take(), dtype=np.uint64)
        lengths = np.full(len(offsets), PIECE_BYTES, dtype=np.uint64)
        _kernels.copyv(offsets + np.uint64(self._target), offsets + np.uint64(self._source), lengths)

    def _take(self) -> list[int]:
        start = self._offset
        self._offset = (start + self.turn_bytes) % self._size
        return [(start + it) % self._size for it in range(0, self.turn_bytes, PIECE_BYTES)]


THREADS = {1: "1-thread", 2: "2-threads"}


def _measure(shape: Shape, effort: Effort, wanted: frozenset[str]) -> Readings:
    pool_bytes = QUICK_BYTES if effort.quick else COLD_BYTES
    if effort.quick:
        shape = replace(shape, prompt_chunks=max(shape.prompt_chunks // 4, 1))
    node_bytes = max(2 * pool_bytes, 4 * shape.prompt_chunks * shape.layout.slot_bytes(0))
    with ExitStack() as stack:
        paged = PagedMemory(shape, pool_bytes)
        node = stack.enter_context(node_process(node_bytes))
        engine = Engine(shape, node, paged)
        stack.callback(engine.close)
        copiers = {}
        for threads in THREADS:
            copiers[threads] = CpuPagedKV([paged.tensors()], paged.blocks, threads=threads)
            stack.callback(copiers[threads].close)
        engine.fill(copiers[1])
        for copier in copiers.values():
            engine.verify(copier)
        plain = Plain(paged.flat, shape.prompt_bytes)

        def contender(name: str, work: Callable[[], object], amount_bytes: int) -> Contender:
            return Contender(name, work, amount_bytes / GB, cpu_elsewhere=node.cpu_s)

        def operation(verb: Callable[[CpuPagedKV], object], threads: int) -> Callable[[], object]:
            return lambda: verb(copiers[threads])

        memcpy = f"memcpy/{shape.name}/1-thread"
        contenders = [contender(memcpy, plain.memcpy, plain.turn_bytes)]
        for threads, suffix in THREADS.items():
            for verb in (engine.save, engine.load):
                name = f"{verb.__name__}/{shape.name}/{suffix}"
                contenders.append(contender(name, operation(verb, threads), shape.prompt_bytes))
        contenders.append(contender(f"plain/{shape.name}/1-thread", plain.copyv, plain.turn_bytes))
        series = effort.interleave([it for it in contenders if it.name in wanted or it.name == memcpy])
    readings: dict[str, Reading | Unmeasured] = {}
    for name, it in series.items():
        readings[name] = it.rate(None if name == memcpy else series[memcpy], in_gb=True)
    return readings


def experiment(shape: Shape, goals: dict[str, float]) -> Experiment:
    """The figures of a shape; `goals` says how many times the yardstick they have to reach."""
    prompt = f"{shape.prompt_bytes / 2**20:.0f} MiB a prompt"

    def spec(verb: str, threads: str, about: str) -> Spec:
        goal = goals.get(f"{verb}/{threads}")
        name = f"{verb}/{shape.name}/{threads}"
        return Spec(name, "GB/s", about, Goal(at_least=True, factor=goal) if goal else None, YARDSTICK)

    specs = []
    for threads in THREADS.values():
        specs.append(spec("save", threads, f"paged blocks to the node's memory, {prompt}"))
        specs.append(spec("load", threads, f"the node's memory to scattered blocks, {prompt}"))
    specs.append(spec("plain", "1-thread", "our copy kernel on contiguous 2 MiB pieces: the ceiling of a save"))
    specs.append(Spec(f"memcpy/{shape.name}/1-thread", "GB/s", "the yardstick itself"))
    return Experiment(shape.about, tuple(specs), lambda effort, wanted: _measure(shape, effort, wanted))


def experiments() -> list[Experiment]:
    """All shapes with their goals."""
    llama, bf16, fp32 = SHAPES
    small = {"save/1-thread": 1.1, "load/1-thread": 1.25}
    return [
        experiment(
            llama,
            {"save/1-thread": 1.25, "load/1-thread": 1.4, "save/2-threads": 2.2, "load/2-threads": 2.4},
        ),
        experiment(bf16, small),
        experiment(fp32, small),
    ]
