"""The Redis tier against redis-benchmark, on a real Valkey server on this machine.

A *turn* sets or gets all chunks once over two connections, each with a thread of its own, from and to node memory (a
memfd): header, checksum and verification included. redis-benchmark moves values of the tier's own size over as many
connections, from and to one buffer, and reports its own rate.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from headwater.bench import tools
from headwater.bench.calls import MS
from headwater.bench.harness import GB, Contender, Effort, Experiment, Goal, Reading, Readings, Series, Spec, Unmeasured
from headwater.places import parse_remote
from headwater.ports import LowerTier, Piece
from headwater.tiers.host import MappedMemory, create_memory
from headwater.tiers.redis_chunks import PIECE_BYTES
from headwater.tiers.remote import open_remote
from headwater.types import KEY_BYTES, ChunkKey, Identity, KVGroup, KVLayout, Namespace, Origin, Outcome

MIB = 1 << 20
CHUNK_BYTES = 2 * MIB
TOTAL_BYTES, QUICK_BYTES = 256 * MIB, 64 * MIB
CONNECTIONS = 2
ROUNDS_MAX = 15
MOVE_S = 60.0
PROMPT_CHUNKS = {"4k": 16, "128k": 512}
YARDSTICK = f"redis-benchmark, {PIECE_BYTES >> 10} KiB values, {CONNECTIONS} connections"


def identities(count: int, chunk_bytes: int = CHUNK_BYTES) -> list[Identity]:
    """So many chunks of one size."""
    layout = KVLayout(256, (KVGroup(16, chunk_bytes // 16, (1,)),))
    origin = Origin.of(Namespace("bench", "raw", "remote", layout.fingerprint()), layout)
    return [Identity(origin, 0, ChunkKey(number.to_bytes(KEY_BYTES, "big"))) for number in range(count)]


class Chunks:
    """So many chunks of one size, the node memory that they are moved to and from, and a tier on a server here."""

    def __init__(self, port: int, chunk_bytes: int, total_bytes: int) -> None:
        self.tier: LowerTier = open_remote(parse_remote(f"valkey://127.0.0.1:{port}?connections={CONNECTIONS}"))
        self.memory: MappedMemory = create_memory(total_bytes, "memfd", lock=False)
        words = np.frombuffer(self.memory.view(0, total_bytes), np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.pieces = [
            Piece(it, self.memory.array(number * chunk_bytes, chunk_bytes))
            for number, it in enumerate(identities(total_bytes // chunk_bytes, chunk_bytes))
        ]
        self._pool = ThreadPoolExecutor(CONNECTIONS)

    def move(self, verb: Callable[[Sequence[Piece], float], list[Outcome]]) -> None:
        """Put or get every chunk; assertion error unless all went well."""
        until_s = time.monotonic() + MOVE_S
        parts = [self.pieces[start::CONNECTIONS] for start in range(CONNECTIONS)]
        for outcomes in self._pool.map(lambda part: verb(part, until_s), parts):
            assert all(it is Outcome.DONE for it in outcomes), f"the server said {set(outcomes)}"

    def close(self) -> None:
        """Leave nothing behind but what the server holds."""
        self._pool.shutdown()
        self.pieces.clear()
        self.tier.close()
        self.memory.close()


def measure_transfer(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See TRANSFER."""
    total = QUICK_BYTES if effort.quick else TOTAL_BYTES
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory, tools.valkey(Path(directory)) as port:
        chunks = Chunks(port, CHUNK_BYTES, total)
        try:
            return _transfer(effort, chunks, port, total)
        finally:
            chunks.close()


def _transfer(effort: Effort, chunks: Chunks, port: int, total: int) -> Readings:
    if tools.program("redis-benchmark") is None:
        reason = Unmeasured(tools.missing("redis-benchmark"))
        return {"redis/put": reason, "redis/get": reason}
    verbs = {"put": (chunks.tier.write, "set"), "get": (chunks.tier.read, "get")}
    ours = {name: Series(total / GB) for name in verbs}
    theirs = {name: Series(total / GB) for name in verbs}
    count = total // PIECE_BYTES
    for move, _ in verbs.values():
        chunks.move(move)
    for number in range(min(effort.rounds, ROUNDS_MAX)):
        turns = [*verbs.items()]
        for name, (move, verb) in turns if number % 2 else reversed(turns):
            cpu, began_s = effort.clocks.cpu(), effort.clocks.wall()
            chunks.move(move)
            ours[name].seconds.append(effort.clocks.wall() - began_s)
            ours[name].cpu_s += effort.clocks.cpu() - cpu
            rate = tools.redis_benchmark(port, verb, PIECE_BYTES, count, CONNECTIONS)
            theirs[name].seconds.append(total / rate)
            effort.after_turn()
    return {f"redis/{name}": ours[name].rate(theirs[name], in_gb=True) for name in verbs}


TRANSFER = Experiment(
    "Chunks to and from Valkey",
    (
        Spec("redis/put", "GB/s", "2 MiB chunks from node memory", Goal(at_least=True, factor=0.8), YARDSTICK),
        Spec("redis/get", "GB/s", "2 MiB chunks to node memory, verified", Goal(at_least=True, factor=0.8), YARDSTICK),
    ),
    measure_transfer,
)


def measure_lookup(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See LOOKUP."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory, tools.valkey(Path(directory)) as port:
        tier = open_remote(parse_remote(f"valkey://127.0.0.1:{port}"))
        memory = create_memory(MIB, "memfd", lock=False)
        known = identities(max(PROMPT_CHUNKS.values()), 4096)
        try:
            pieces = [Piece(it, memory.array(0, 4096)) for it in known]
            assert set(tier.write(pieces, time.monotonic() + MOVE_S)) == {Outcome.DONE}
            del pieces
            contenders = []
            for name, count in PROMPT_CHUNKS.items():
                asked = known[:count]

                def ask(asked: Sequence[Identity] = asked) -> None:
                    assert all(tier.holds(asked, time.monotonic() + 1.0))

                contenders.append(Contender(name, ask, 1.0, 20 if effort.quick else 200))
            series = effort.interleave(contenders)
        finally:
            tier.close()
            memory.close()
    readings: dict[str, Reading | Unmeasured] = {}
    for name, it in series.items():
        readings |= {f"redis/lookup/{name}/p50": it.latency(MS), f"redis/lookup/{name}/p99": it.latency(MS, 99)}
    return readings


LOOKUP = Experiment(
    "Which chunks of a prompt Valkey has, in one round trip",
    (
        Spec("redis/lookup/4k/p50", "ms", "4,096 tokens, all held", Goal(at_least=False, plus=1)),
        Spec("redis/lookup/4k/p99", "ms", "4,096 tokens, all held, 99th percentile"),
        Spec("redis/lookup/128k/p50", "ms", "131,072 tokens, all held"),
        Spec("redis/lookup/128k/p99", "ms", "131,072 tokens, all held, 99th percentile"),
    ),
    measure_lookup,
)
