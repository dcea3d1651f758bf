"""Eviction measured on recorded workloads, against the hit rates of the same policies on single blocks.

The traces are not part of the repository: the tests that need them look for `shared/traces` beside it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from headwater.core.eviction import POLICIES
from headwater.sim import eviction_replay
from headwater.sim.eviction_replay import BLOCK_TOKENS, TraceRequest, read_trace, replay

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
TOLERANCE = 0.015
# Of the synthetic trace: prefix-hit tokens / input tokens, by blocks of 512 tokens.
REFERENCE = {
    (5_859, "lru"): 0.315,
    (5_859, "s3fifo"): 0.323,
    (20_000, "lru"): 0.582,
    (20_000, "s3fifo"): 0.605,
}
EVERYTHING = 0.6512


def as_line(tokens: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids})


def dialogues(seed: int, count: int) -> list[TraceRequest]:
    """Prompts that grow out of each other, with partial last blocks."""
    rng, known, fresh = random.Random(seed), list[list[int]](), 0
    lines = []
    for _ in range(count):
        stem = rng.choice(known)[: rng.randrange(1, 9)] if known and rng.random() < 0.7 else []
        new = rng.randrange(1, 6)
        ids = stem + list(range(fresh, fresh + new))
        fresh += new
        known.append(ids)
        lines.append(as_line(len(ids) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS), ids))
    return read_trace(lines)


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
    requests = dialogues(2, 1500)
    whole = replay(requests, policy, 400).hit_rate
    for piece in (1, 2):
        assert replay(requests, policy, 400, piece).hit_rate == pytest.approx(whole, abs=0.01)


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", '{"input_length": 3}', as_line(513, [1]), as_line(0, []), as_line(-5, [1]), as_line(5, [-1])],
)
def test_a_line_that_is_no_request_is_refused_by_number(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        read_trace([as_line(5, [1]), line])


def test_the_command_writes_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([as_line(1024, [1, 2]), as_line(1536, [1, 2, 3])]) + "\n")
    assert eviction_replay.main([str(trace), "--capacities", "1", "10"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| blocks | tokens | lru | s3fifo |"
    assert table[3] == "| 10 | 0.0 M | 0.4000 | 0.4000 |"
    assert eviction_replay.main([str(trace), "--capacities", "10", "--policies", "lru", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"policy": "lru", "capacity": 10, "requests": 2, "hit_rate": 0.4}]


@pytest.fixture(scope="module")
def recorded() -> list[TraceRequest]:
    path = TRACES / "synthetic_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded traces beside the repository ({'/'.join(path.parts[-3:])})")
    with path.open(encoding="utf-8") as lines:
        return read_trace(lines)


@pytest.mark.parametrize(("capacity", "policy"), REFERENCE)
def test_hit_rates_reach_the_reference(recorded: list[TraceRequest], capacity: int, policy: str) -> None:
    reference = REFERENCE[capacity, policy]
    rate = replay(recorded, policy, capacity).hit_rate
    print(f"{policy} at {capacity} blocks: {rate:.4f}, reference {reference}")
    assert reference - TOLERANCE <= rate <= EVERYTHING


def test_lru_keeps_its_hit_rate_when_prompts_are_saved_in_pieces(recorded: list[TraceRequest]) -> None:
    assert replay(recorded, "lru", 10_000, piece=4).hit_rate == pytest.approx(0.431, abs=TOLERANCE)
