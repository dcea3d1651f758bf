"""A node's start and what it needs for its bookkeeping."""

from __future__ import annotations

from dataclasses import replace

from headwater.bench.calls import connect, hold, random_keys
from headwater.bench.harness import Contender, Effort, Experiment, Goal, Reading, Readings, Spec, quartiles
from headwater.bench.peers import node_process
from headwater.types import PAGE_BYTES

GIB = 1 << 30
CHUNKS, QUICK_CHUNKS = 200_000, 20_000
CHAIN_CHUNKS = 4000


def measure_start(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See START. From starting the process until its first Status answer; prefault may go on behind."""
    starts: list[float] = []

    def start() -> None:
        with node_process((256 << 20) if effort.quick else 4 * GIB) as node:
            starts.append(node.start_s)

    rounds = max(min(effort.rounds // 4, 5), 1)
    replace(effort, rounds=rounds).interleave([Contender("start", start)])
    low, middle, high = quartiles(starts[1:])  # the first was the warm-up
    return {"node/start": Reading(middle, low, high, rounds)}


START = Experiment(
    "Start of a node",
    (Spec("node/start", "s", "from starting a process with 4 GiB to its answer", Goal(at_least=False, plus=2)),),
    measure_start,
)


def measure_bookkeeping(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See BOOKKEEPING. Prefault is off and nobody writes to a slot, so what grows is bookkeeping alone."""
    chunks = QUICK_CHUNKS if effort.quick else CHUNKS
    with node_process(chunks * PAGE_BYTES + GIB // 2, prefault=False) as node:
        session = connect(node)
        hold(session, random_keys(100, 5))
        before = node.memory_bytes()
        for first in range(0, chunks, CHAIN_CHUNKS):
            hold(session, random_keys(CHAIN_CHUNKS, 6 + first))
            effort.after_turn()
        per_chunk = (node.memory_bytes() - before) / chunks
        session.close()
    return {"node/bookkeeping": Reading(per_chunk, per_chunk, per_chunk, 1)}


BOOKKEEPING = Experiment(
    "Bookkeeping of a node",
    (Spec("node/bookkeeping", "B/chunk", "the node's own memory, 200,000 chunks", Goal(at_least=False, plus=120)),),
    measure_bookkeeping,
)
