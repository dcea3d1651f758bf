"""Traces made faster, cut, merged and made up, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.traces.facts import Spread, facts
from headwater.traces.generate import Chats, chats, with_sessions
from headwater.traces.model import Trace, TraceRequest
from headwater.traces.read import read
from headwater.traces.shape import between, faster, first, merge

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "traces"
TRACE = Trace(
    "small",
    16,
    (
        TraceRequest(0.0, 32, 1, (0, 1), "a"),
        TraceRequest(2.0, 40, 3, (0, 1, 2), "a", tenant="x"),
        TraceRequest(6.0, 20, 5, (0, 3), "b"),
    ),
)


def test_faster_is_more_load() -> None:
    assert [it.arrival_s for it in faster(TRACE, 4).requests] == [0.0, 0.5, 1.5]
    assert faster(TRACE, 1) is TRACE
    for load in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="write a number above 0"):
            faster(TRACE, load)


def test_parts_begin_at_zero() -> None:
    part = between(TRACE, 2.0, 6.0)
    assert [(it.arrival_s, it.input_tokens) for it in part.requests] == [(0.0, 40)]
    assert [it.arrival_s for it in between(TRACE, 2.0, 6.5).requests] == [0.0, 4.0]
    assert between(TRACE, 7.0, 8.0).requests == ()
    assert first(TRACE, 2).requests == TRACE.requests[:2]
    for bad in ((-1.0, 2.0), (2.0, 2.0), (0.0, float("nan"))):
        with pytest.raises(ConfigError, match="write a span of time"):
            between(TRACE, *bad)
    with pytest.raises(ConfigError, match="the first 0 requests"):
        first(TRACE, 0)


def test_merged_traces_share_nothing() -> None:
    merged = merge([TRACE, TRACE])
    assert [it.arrival_s for it in merged.requests] == [0.0, 0.0, 2.0, 2.0, 6.0, 6.0]
    assert merged.block_tokens == 16 and merged.name == "small+small"
    ours = {it for one in merged.requests if one.session.startswith("0:") for it in one.blocks}
    theirs = {it for one in merged.requests if one.session.startswith("1:") for it in one.blocks}
    assert len(ours) == len(theirs) == 4 and not ours & theirs
    assert facts(merged).reuse_max == facts(TRACE).reuse_max
    with pytest.raises(ConfigError, match=r"blocks of \[16, 32\] tokens"):
        merge([TRACE, Trace("other", 32, TRACE.requests)])


def test_facts_against_a_hand_count() -> None:
    found = facts(TRACE)
    assert (found.requests, found.span_s, found.blocks, found.blocks_unique) == (3, 6.0, 7, 4)
    # Found: nothing, then 32 of 40, then 16 of 20.
    assert found.reuse_max == pytest.approx(48 / 92)
    assert (found.gap_s.mean, found.gap_s.most) == (pytest.approx(8 / 3), 4.0)  # block 0: 2 and 4, block 1: 2
    assert found.input_tokens == Spread(pytest.approx(92 / 3), 32.0, pytest.approx(38.4), pytest.approx(39.84), 40.0)
    assert (found.sessions, found.tenants) == (2, 1)


def test_a_prompt_that_is_held_whole_counts_no_more_than_its_tokens() -> None:
    requests = (TraceRequest(0.0, 20, 1, (0, 1)), TraceRequest(1.0, 20, 1, (0, 1)))
    assert facts(Trace("twice", 16, requests)).reuse_max == 0.5


def test_facts_of_nothing_are_zero() -> None:
    found = facts(Trace("none", 0, ()))
    assert (found.requests, found.span_s, found.reuse_max, found.gap_s) == (0, 0.0, 0.0, Spread(0, 0, 0, 0, 0))


@pytest.mark.parametrize(("name", "reuse"), [("conversation", 0.3736), ("synthetic", 0.6512)])
def test_recorded_traces_are_as_published(name: str, reuse: float) -> None:
    path = RECORDED / f"{name}_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded traces beside the repository ({'/'.join(path.parts[-3:])})")
    opened = read(path)
    assert opened.trace.block_tokens == 512 and not opened.notes
    assert facts(opened.trace).reuse_max == pytest.approx(reuse, abs=5e-5)


@pytest.mark.parametrize("block_tokens", [16, 512])
def test_made_up_chats_grow_out_of_their_last_turn(block_tokens: int, seed: int) -> None:
    print(f"seed {seed}")
    how = Chats(chats=40, input_tokens_max=4000, prompt_tokens=520)
    trace = chats(seed, block_tokens, how)
    assert trace == chats(seed, block_tokens, how) != chats(seed + 1, block_tokens, how)
    arrivals = [it.arrival_s for it in trace.requests]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0.0
    last: dict[str, TraceRequest] = {}
    grown = 0
    for it in trace.requests:
        assert len(it.blocks) == -(-it.input_tokens // block_tokens) and 0 < it.input_tokens <= 4000
        before = last.get(it.session)
        if before is not None:
            whole = before.input_tokens // block_tokens
            assert it.turn == before.turn + 1 and it.input_tokens > before.input_tokens + before.output_tokens
            assert it.blocks[:whole] == before.blocks[:whole]
            assert not set(it.blocks[whole:]) & set(before.blocks)
            grown += 1
        last[it.session] = it
    assert len(last) == 40 and grown > 40
    assert facts(trace).reuse_max > 0.2


def test_sessions_are_made_up_for_a_trace_without_blocks(seed: int) -> None:
    print(f"seed {seed}")
    requests = tuple(TraceRequest(2.0 * n, 50 + 37 * (n % 40), 20) for n in range(400))
    bare = Trace("bare", 0, requests)
    made = with_sessions(bare, seed, 16, again=0.7, shared_tokens=100)
    assert made == with_sessions(bare, seed, 16, again=0.7, shared_tokens=100)
    assert [(it.arrival_s, it.input_tokens, it.output_tokens) for it in made.requests] == [
        (it.arrival_s, it.input_tokens, it.output_tokens) for it in requests
    ]
    last: dict[str, TraceRequest] = {}
    for it in made.requests:
        assert len(it.blocks) == -(-it.input_tokens // 16)
        before = last.get(it.session)
        if before is not None:
            assert before.arrival_s + 5 <= it.arrival_s
            assert before.input_tokens + before.output_tokens < it.input_tokens
            assert it.blocks[: before.input_tokens // 16] == before.blocks[: before.input_tokens // 16]
        last[it.session] = it
    assert len(made.requests) - len(last) > 100
    alone = with_sessions(bare, seed, 16, again=0.0)
    assert facts(alone).reuse_max == 0.0 < facts(made).reuse_max
    shared = with_sessions(bare, seed, 16, again=0.0, shared_tokens=100)
    hit = stem = 0
    for it in requests:  # of the 6 blocks that all begin with, those that somebody had before
        mine = min(6, it.input_tokens // 16)
        hit, stem = hit + 16 * min(mine, stem), max(mine, stem)
    assert facts(shared).reuse_max == pytest.approx(hit / sum(it.input_tokens for it in requests))


def test_what_cannot_be_made_up_is_refused() -> None:
    bare = Trace("bare", 0, (TraceRequest(0.0, 5, 1),))
    with pytest.raises(ConfigError, match="has blocks of its own"):
        with_sessions(TRACE, 0, 16)
    with pytest.raises(ConfigError, match="again 2: write a probability"):
        with_sessions(bare, 0, 16, again=2)
    with pytest.raises(ConfigError, match="block size 0"):
        with_sessions(bare, 0, 0)
