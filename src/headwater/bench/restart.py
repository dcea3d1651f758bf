"""A node that starts again over a full disk, and lookups of what only the disk has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from headwater.bench.calls import (
    CHUNK_TOKENS,
    LAYOUT,
    MS,
    NAMESPACE,
    connect,
    cores,
    hold,
    random_keys,
    random_tokens,
)
from headwater.bench.disk import scratch
from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Series, Spec
from headwater.bench.peers import Peer, node_process, pinned
from headwater.core.hashing import chunk_keys
from headwater.errors import UnavailableError
from headwater.node.client import Session, fetch_status

MIB = 1 << 20
CHUNKS, QUICK_CHUNKS = 100_000, 6_000
CHAIN_CHUNKS = 2_000
HOST_BYTES = 64 * MIB
PROMPTS, QUICK_PROMPTS = 400, 50
PROMPT_TOKENS = 4096
SINK_S = 120.0
RATE = 1e9
"""A prefill rate so high that nothing is worth fetching: what is measured is the lookup."""


@contextmanager
def _node(directory: Path, chunks: int) -> Iterator[Peer]:
    # A slot has a header page and a page of payload.
    size = 2 * 4096 * chunks * 5 // 4 + 256 * MIB
    disk = {"HEADWATER_NODE_DISK": f"{directory}/disk:{size}?admission=all"}
    with node_process(HOST_BYTES, prefault=False, settings=disk) as node:
        yield node


def _sunk(node: Peer, chunks: int) -> bool:
    state = fetch_status(node.address)
    tiers = state["tiers"]
    assert isinstance(tiers, list)
    return bool(state["quiet"]) and tiers[1]["used_bytes"] >= 2 * 4096 * chunks


def _sink(node: Peer, session: Session, chains: list[int], effort: Effort) -> None:
    """Save chains of random chunks (seed by seed), waiting for each to be on the disk."""
    written = 0
    for seed, count in enumerate(chains):
        hold(session, random_keys(count, 1000 + seed))
        written += count
        until_s = time.monotonic() + SINK_S
        while not _sunk(node, written):
            if time.monotonic() > until_s:
                raise UnavailableError(f"the disk did not take {written} chunks within {SINK_S:.0f} s")
            time.sleep(0.01)
        effort.after_turn()


def measure_restart(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See RESTART. From starting the process until its first answer, with all chunks known again."""
    chunks = QUICK_CHUNKS if effort.quick else CHUNKS
    chain = min(CHAIN_CHUNKS, chunks)
    with scratch() as directory:
        with _node(directory, chunks) as node:
            session = connect(node)
            _sink(node, session, [chain] * (chunks // chain), effort)
            session.close()
        starts = []
        for _ in range(max(min(effort.rounds // 4, 5), 2)):
            with _node(directory, chunks) as node:
                assert _sunk(node, chunks), "chunks were lost by a clean restart"
                starts.append(node.start_s)
            effort.after_turn()
    starts.sort()
    return {"tiers/restart": Reading(starts[len(starts) // 2], starts[0], starts[-1], len(starts))}


RESTART = Experiment(
    "Restart over a full disk",
    (Spec("tiers/restart", "s", "to the first answer, 100,000 chunks on disk", Goal(at_least=False, plus=2)),),
    measure_restart,
)


def measure_lookup(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See LOOKUP. Each prompt is asked for once: what is asked for comes up."""
    count = QUICK_PROMPTS if effort.quick else PROMPTS
    root = NAMESPACE.root()
    prompts = [random_tokens(PROMPT_TOKENS, seed) for seed in range(count)]
    per_prompt = PROMPT_TOKENS // CHUNK_TOKENS
    series = Series(1.0)
    with scratch() as directory:
        with _node(directory, count * per_prompt) as node:
            session = connect(node)
            for number, tokens in enumerate(prompts, 1):
                hold(session, chunk_keys(root, tokens, CHUNK_TOKENS))
                until_s = time.monotonic() + SINK_S
                while not _sunk(node, number * per_prompt) and time.monotonic() < until_s:
                    time.sleep(0.002)
            session.close()
        with _node(directory, count * per_prompt) as node:
            session = connect(node)
            session.match([])
            two = cores()
            with pinned([node], *two) if two else nullcontext():
                for number, tokens in enumerate(prompts):
                    began_s = effort.clocks.wall()
                    keys = chunk_keys(root, tokens, CHUNK_TOKENS)
                    session.match(keys, request=f"{number}", tokens_s=RATE)
                    series.seconds.append(effort.clocks.wall() - began_s)
                    session.forget([f"{number}"])
            session.close()
    assert LAYOUT.chunk_tokens == CHUNK_TOKENS
    return {"disk/lookup/4k/p50": series.latency(MS), "disk/lookup/4k/p99": series.latency(MS, 99)}


LOOKUP = Experiment(
    "Lookup of a prompt that only the disk has: tokens to keys, one call to the node, and its plan",
    (
        Spec("disk/lookup/4k/p50", "ms", "4,096 tokens, all on disk", Goal(at_least=False, plus=0.3)),
        Spec("disk/lookup/4k/p99", "ms", "4,096 tokens, all on disk, 99th percentile"),
    ),
    measure_lookup,
)
