"""Eviction measured on recorded workloads, against the hit rates of the same policies on single blocks; on generated
ones; and the most that any policy could reach.

The traces are not part of the repository: the tests that need them look for `shared/traces` beside it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.core.eviction import POLICIES
from headwater.errors import ConfigError
from headwater.sim import eviction_replay
from headwater.sim.eviction_replay import BLOCK_TOKENS, Prompt, clairvoyant, prompts, replay
from headwater.traces.model import Trace, TraceRequest
from headwater.traces.read import read

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
TOLERANCE = 0.015
WHOLE = 1 << 30
# Of the synthetic trace: prefix-hit tokens / input tokens, by blocks of 512 tokens, and how many of them are saved at a
# time. The core takes about 20 us a block, a replay seconds: S3-FIFO is replayed where it is not what LRU is.
REFERENCE = {
    (5_859, "lru", 4): 0.315,
    (20_000, "lru", WHOLE): 0.582,
    (20_000, "s3fifo", WHOLE): 0.605,
}
EVERYTHING = 0.6512
# What `learned` reached on the first so many requests, and how far from that it may end when something that should not
# matter is changed.
LEARNED = {
    ("synthetic", 3_000, 1_500): 0.0498,
    ("synthetic", 20_000, 4_000): 0.5993,
    ("conversation", 2_000, 1_000): 0.0491,
}
LEARNED_TOLERANCE = 0.02


def as_prompts(requests: list[tuple[int, Sequence[int]]]) -> list[Prompt]:
    """Prompts with these lengths and numbers of blocks."""
    return prompts(Trace("test", BLOCK_TOKENS, tuple(TraceRequest(0.0, n, 1, tuple(ids)) for n, ids in requests)))


def sessions(seed: int, count: int) -> list[Prompt]:
    """Chats behind a few shared prompts: each turn appends to the last one, many chats end after the first, and most of
    those that went on go on; between the turns comes what others ask."""
    rng, fresh, asked = random.Random(seed), itertools.count(), list[tuple[int, Sequence[int]]]()
    stems = [[next(fresh) for _ in range(rng.randrange(1, 6))] for _ in range(5)]
    open_chats: list[tuple[int, int, list[int]]] = []
    for now in range(count):
        if open_chats and open_chats[0][0] <= now:
            _, turn, ids = heapq.heappop(open_chats)
        else:
            turn, ids = 0, rng.choice(stems)
        ids = ids + [next(fresh) for _ in range(rng.randrange(1, 8 if turn else 20))]
        asked.append((len(ids) * BLOCK_TOKENS, ids))
        if rng.random() < min(0.3 + 0.15 * turn, 0.8):
            heapq.heappush(open_chats, (now + int(rng.lognormvariate(4, 1)), turn + 1, ids))
    return as_prompts(asked)


def dialogues(seed: int, count: int) -> list[Prompt]:
    """Prompts that grow out of each other, with partial last blocks."""
    rng, known, fresh = random.Random(seed), list[list[int]](), 0
    asked: list[tuple[int, Sequence[int]]] = []
    for _ in range(count):
        stem = rng.choice(known)[: rng.randrange(1, 9)] if known and rng.random() < 0.7 else []
        new = rng.randrange(1, 6)
        ids = stem + list(range(fresh, fresh + new))
        fresh += new
        known.append(ids)
        asked.append((len(ids) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS), ids))
    return as_prompts(asked)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_with_room_for_everything_every_repeated_prefix_is_a_hit(policy: str, piece: int) -> None:
    requests = dialogues(1, 200)
    seen, asked, hit = set[bytes](), 0, 0
    for request in requests:
        run = next((at for at, key in enumerate(request.keys) if key not in seen), len(request.keys))
        asked, hit = asked + request.tokens, hit + min(run * BLOCK_TOKENS, request.tokens)
        seen.update(request.keys)
    result = replay(requests, policy, len(seen), piece)
    assert result.hit_rate == pytest.approx(hit / asked)
    assert result.hit_rate > 0.3
    assert replay(requests, policy, len(seen) // 8, piece).hit_rate < result.hit_rate


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_saving_piece_by_piece_costs_no_hits(policy: str) -> None:
    requests = dialogues(2, 800)
    whole = replay(requests, policy, 400).hit_rate
    for piece in (1, 2):
        assert replay(requests, policy, 400, piece).hit_rate == pytest.approx(whole, abs=0.01)


def test_a_trace_without_blocks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="not every request has blocks of 512 tokens"):
        as_prompts([(5, [1]), (5, [])])
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}')
    with pytest.raises(SystemExit):
        eviction_replay.main([str(trace)])
    assert "line 1: hash_ids = '3 for 40 tokens'" in capsys.readouterr().err


def test_the_command_writes_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": %s}\n'
    trace.write_text(line % (1024, [1, 2]) + line % (1536, [1, 2, 3]))
    assert eviction_replay.main([str(trace), "--capacities", "1", "10"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| blocks | tokens | learned | lru | s3fifo | opt |"
    assert table[3] == "| 10 | 0.0 M | 0.4000 (100%) | 0.4000 (100%) | 0.4000 (100%) | 0.4000 |"
    assert eviction_replay.main([str(trace), "--capacities", "10", "--policies", "lru", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"policy": "lru", "capacity": 10, "requests": 2, "hit_rate": 0.4}]


@functools.cache
def best_by_trial(ids: tuple[tuple[int, ...], ...], capacity: int, held: frozenset[int] = frozenset()) -> int:
    """Blocks hit at most, by trying every set of blocks that may be held after each request."""
    if not ids:
        return 0
    first, rest = ids[0], ids[1:]
    hit = next((at for at, it in enumerate(first) if it not in held), len(first))
    may_stay = held | set(first)
    choices = itertools.combinations(sorted(may_stay), min(capacity, len(may_stay)))
    return hit + max(best_by_trial(rest, capacity, frozenset(it)) for it in choices)


@pytest.mark.parametrize("seed", range(40))
def test_opt_is_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    # Blocks of a small tree: a block's number says all that is before it.
    paths = [(1,), (1, 2), (1, 2, 3), (1, 4), (5,), (5, 6), (5, 6, 7)]
    ids = tuple(rng.choice(paths) for _ in range(7))
    capacity = rng.randrange(1, 5)
    requests = as_prompts([(len(it) * BLOCK_TOKENS, it) for it in ids])
    expected = best_by_trial(ids, capacity) / sum(map(len, ids))
    assert clairvoyant(requests, capacity).hit_rate == pytest.approx(expected), f"seed {seed}"


@pytest.mark.parametrize("capacity", [60, 250, 1000])
def test_on_generated_chats_learned_is_no_worse_than_lru_and_opt_is_above_both(capacity: int) -> None:
    requests = sessions(5, 1200)
    rates = {policy: replay(requests, policy, capacity).hit_rate for policy in ("lru", "learned")}
    most = clairvoyant(requests, capacity).hit_rate
    print(f"{capacity} blocks: {rates}, opt {most:.4f}")
    assert 0.99 * rates["lru"] <= rates["learned"] <= most
    assert rates["lru"] < most


@functools.cache
def trace(name: str) -> list[Prompt]:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded traces beside the repository ({'/'.join(path.parts[-3:])})")
    return prompts(read(path).trace)


@pytest.fixture
def recorded() -> list[Prompt]:
    return trace("synthetic")


@pytest.mark.parametrize(("name", "capacity", "count"), LEARNED)
def test_learned_keeps_its_hit_rates(name: str, capacity: int, count: int) -> None:
    expected = LEARNED[name, capacity, count]
    rate = replay(trace(name)[:count], "learned", capacity).hit_rate
    print(f"learned on {name} at {capacity} blocks: {rate:.4f}, was {expected}")
    assert rate == pytest.approx(expected, rel=LEARNED_TOLERANCE)


@pytest.mark.parametrize(("capacity", "reference"), [(1_000, 0.282), (5_859, 0.560), (39_062, EVERYTHING)])
def test_opt_is_the_reference(recorded: list[Prompt], capacity: int, reference: float) -> None:
    assert clairvoyant(recorded, capacity).hit_rate == pytest.approx(reference, abs=0.0005)


@pytest.mark.parametrize(("capacity", "policy", "piece"), REFERENCE)
def test_hit_rates_reach_the_reference_in_one_go_and_in_pieces(
    recorded: list[Prompt], capacity: int, policy: str, piece: int
) -> None:
    reference = REFERENCE[capacity, policy, piece]
    rate = replay(recorded, policy, capacity, piece).hit_rate
    print(f"{policy} at {capacity} blocks: {rate:.4f}, reference {reference}")
    assert rate == pytest.approx(reference, abs=TOLERANCE) and rate <= EVERYTHING
