"""A node's start and what it needs for its bookkeeping."""

from __future__ import annotations

from headwater.bench.calls import connect, hold, random_keys
from headwater.bench.harness import Clocks, Contender, Effort, Experiment, Goal, Reading, Readings, Spec
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
    Effort(rounds, effort.quick, Clocks(), effort.after_turn).interleave([Contender("start", start)])
    series = starts[1:]  # the first was the warm-up
    ordered = sorted(series)
    middle = ordered[len(ordered) // 2]
    return {"node/start": Reading(middle, ordered[0], ordered[-1], len(ordered))}


START = Experiment(
    "Start of a node",
    (Spec("node/start", "s", "from starting the process with 4 GiB to its first answer", Goal(at_least=False, plus=2)),),
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
    (Spec("node/bookkeeping", "B/chunk", "growth of the node's own memory by 200,000 chunks", Goal(at_least=False, plus=120)),),
    measure_bookkeeping,
)
