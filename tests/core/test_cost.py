"""Fetch or recompute: estimates follow what was measured, the plan is the best one, and patience bounds the loss."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwater.core.cost import (
    Calibration,
    Patience,
    Plan,
    PrefillSpeed,
    Source,
    Step,
    TierSpeed,
    best_prefix,
    prefill_s,
)

MB = 1_000_000
SLOW = (0.050, 1 * MB)
DISK = (0.001, 1500 * MB)
REDIS = (0.002, 600 * MB)


def took(tier: tuple[float, float], size_bytes: int) -> float:
    latency_s, bytes_s = tier
    return latency_s + size_bytes / bytes_s


def measured(tier: tuple[float, float], sizes: list[int], noise: float = 0.0, seed: int = 1) -> TierSpeed:
    draw, speed = random.Random(seed), TierSpeed()
    for size in sizes:
        speed.observe(size, took(tier, size) * draw.uniform(1 - noise, 1 + noise))
    return speed


# ---- a tier's speed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [SLOW, DISK, REDIS])
@pytest.mark.parametrize("seed", range(5))
def test_latency_and_bandwidth_are_told_apart_in_noise(tier: tuple[float, float], seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([1, 2, 4, 8, 16]) * 2 * MB // 2 for _ in range(60)]
    speed = measured(tier, sizes, noise=0.1, seed=seed)
    for size in (1 * MB, 8 * MB, 32 * MB):
        assert speed.seconds(size) == pytest.approx(took(tier, size), rel=0.25)
    assert speed.bytes_s == pytest.approx(tier[1], rel=0.3)


def test_a_latency_bound_tier_is_seen_as_one() -> None:
    speed = measured((0.080, 1000 * MB), [MB, 8 * MB, 2 * MB, 32 * MB] * 10)
    assert speed.latency_s == pytest.approx(0.080, rel=0.1)
    assert speed.bytes_s == pytest.approx(1000 * MB, rel=0.1)


def test_batches_of_one_size_scale_with_the_bytes() -> None:
    speed = measured(DISK, [2 * MB] * 20)
    one = took(DISK, 2 * MB)
    assert speed.seconds(2 * MB) == pytest.approx(one)
    assert speed.seconds(20 * MB) == pytest.approx(10 * one)
    assert speed.latency_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_sizes_that_hardly_differ_say_nothing_of_latency(seed: int) -> None:
    draw = random.Random(seed)
    speed = measured(DISK, [2 * MB + draw.randrange(-MB // 50, MB // 50) for _ in range(40)], noise=0.1, seed=seed)
    assert speed.seconds(8 * MB) == pytest.approx(4 * took(DISK, 2 * MB), rel=0.3)


def test_a_first_batch_in_no_time_is_soon_forgotten() -> None:
    speed = TierSpeed()
    speed.observe(4 * MB, 0.0)
    assert batches_until(speed, DISK, within=1.5) <= 12


def test_bytes_before_ours_are_waited_for_and_shared_among_the_lanes() -> None:
    sizes = [MB, 8 * MB] * 20
    alone = measured(REDIS, sizes)
    assert alone.seconds(2 * MB, queued_bytes=6 * MB) == pytest.approx(took(REDIS, 8 * MB), rel=0.05)
    four = TierSpeed(lanes=4)
    for size in sizes:
        four.observe(size, took(REDIS, size))
    assert four.seconds(2 * MB, queued_bytes=24 * MB) == pytest.approx(took(REDIS, 8 * MB), rel=0.05)


def test_nothing_is_said_of_what_was_never_measured() -> None:
    speed = TierSpeed()
    assert speed.seconds(MB) is None
    assert speed.latency_s is None
    assert speed.bytes_s is None
    assert repr(speed) == "TierSpeed(never measured)"
    speed.observe(0, 0.003)
    assert speed.latency_s == pytest.approx(0.003)
    assert speed.bytes_s is None
    assert repr(speed) == "TierSpeed(3 ms + rate unknown, 1 batches)"
    assert repr(measured((0.0, 500 * MB), [MB, 2 * MB])) == "TierSpeed(0 ms + 500 MB/s, 2 batches)"


def batches_until(speed: TierSpeed, tier: tuple[float, float], within: float) -> int:
    for count in itertools.count():
        estimate = speed.seconds(4 * MB)
        assert estimate is not None
        if took(tier, 4 * MB) / within <= estimate <= took(tier, 4 * MB) * within:
            return count
        assert count < 500
        speed.observe(4 * MB, took(tier, 4 * MB))
    raise AssertionError


@pytest.mark.parametrize("factor", [3, 30, 1000])
def test_a_collapse_is_believed_at_once_and_an_improvement_slowly(factor: int) -> None:
    collapsed = (DISK[0], DISK[1] / factor)
    speed = measured(DISK, [2 * MB, 4 * MB, 8 * MB] * 10)
    worse = batches_until(speed, collapsed, within=1.5)
    assert worse <= 3 + math.log(factor) / math.log(2.5)
    for _ in range(10):
        speed.observe(4 * MB, took(collapsed, 4 * MB))
    better = batches_until(speed, DISK, within=1.5)
    assert better > 1.5 * worse


def test_one_hiccup_does_not_condemn_a_tier() -> None:
    speed = measured(DISK, [2 * MB, 8 * MB] * 20)
    before = speed.seconds(4 * MB)
    assert before is not None
    speed.observe(4 * MB, 30.0)
    after = speed.seconds(4 * MB)
    assert after is not None
    assert before < after < 3 * before
    for _ in range(12):
        speed.observe(4 * MB, took(DISK, 4 * MB))
    assert speed.seconds(4 * MB) == pytest.approx(before, rel=0.35)


def test_a_tier_that_is_not_asked_is_believed_less_until_it_is() -> None:
    speed = measured(SLOW, [MB, 2 * MB] * 10)
    honest = speed.seconds(MB)
    assert honest is not None
    for _ in range(10):
        speed.declined()
    assert speed.seconds(MB) == pytest.approx(honest / 2, rel=0.05)
    speed.observe(MB, took(SLOW, MB))
    assert speed.seconds(MB) == pytest.approx(honest, rel=0.05)


BATCH = st.tuples(st.one_of(st.just(0), st.integers(0, 1 << 20), st.integers(0, 1 << 50)), st.floats(0, 1e300))


@settings(max_examples=300)
@given(st.lists(BATCH, min_size=1, max_size=40), st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_estimates_are_sane_whatever_was_measured(batches: list[tuple[int, float]], one: int, more: int) -> None:
    speed = TierSpeed()
    for size, seconds in batches:
        speed.observe(size, seconds)
        speed.declined()
    small, large, behind = speed.seconds(one), speed.seconds(one + more), speed.seconds(one, more)
    assert small is not None
    assert large is not None
    assert behind == large
    assert 0 <= small <= large < math.inf
    assert speed.latency_s is not None
    assert 0 <= speed.latency_s < math.inf
    assert (speed.bytes_s is None) == (not any(size for size, _ in batches))
    if speed.bytes_s is not None:
        assert 0 < speed.bytes_s < math.inf
    assert repr(speed)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-3, 1e3)), min_size=1, max_size=30))
def test_an_estimate_for_the_usual_size_lies_among_what_was_measured(batches: list[tuple[int, float]]) -> None:
    same = [seconds for _, seconds in batches]
    speed = TierSpeed()
    for seconds in same:
        speed.observe(MB, seconds)
    estimate = speed.seconds(MB)
    assert estimate is not None
    assert min(same) * 0.999 <= estimate <= max(same) * 1.001


# ---- an engine's speed --------------------------------------------------------------------------------


def engine_step(tokens: int) -> float:
    return 0.020 + tokens / 4000


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_takes_as_long_as_its_steps(seed: int) -> None:
    draw, speed = random.Random(seed), PrefillSpeed(512)
    assert speed.seconds(100) is None
    for _ in range(60):
        tokens = draw.choice([16, 100, 300, 512])
        speed.observe(tokens, engine_step(tokens) * draw.uniform(0.9, 1.1))
    for tokens in (16, 512, 4096):
        whole, rest = divmod(tokens, 512)
        truth = whole * engine_step(512) + (engine_step(rest) if rest else 0)
        assert speed.seconds(tokens) == pytest.approx(truth, rel=0.2)
    assert speed.seconds(0) == 0.0


def test_short_steps_do_not_make_an_engine_slow() -> None:
    """Most requests compute little more than what the cache did not have."""
    speed = PrefillSpeed(512)
    for round_ in range(40):
        tokens = 512 if round_ % 8 == 0 else 8 + round_ % 5
        speed.observe(tokens, engine_step(tokens))
    assert speed.seconds(4096) == pytest.approx(8 * engine_step(512), rel=0.1)


def test_an_engine_is_believed_to_be_faster_sooner_than_slower() -> None:
    def steps_until(speed: PrefillSpeed, seconds: float) -> int:
        for count in itertools.count():
            estimate = speed.seconds(512)
            assert estimate is not None
            if seconds / 1.5 <= estimate <= seconds * 1.5:
                return count
            assert count < 200
            speed.observe(512, seconds)
        raise AssertionError

    speed = PrefillSpeed(512)
    for _ in range(20):
        speed.observe(512, 0.1)
    slower = steps_until(speed, 1.0)
    for _ in range(40):
        speed.observe(512, 1.0)
    faster = steps_until(speed, 0.1)
    assert faster <= 5
    assert slower >= 2 * faster


def test_one_stall_of_an_engine_says_little() -> None:
    speed = PrefillSpeed(512)
    for tokens in [64, 512] * 20:
        speed.observe(tokens, engine_step(tokens))
    speed.observe(512, 30.0)
    assert speed.seconds(512) == pytest.approx(engine_step(512), rel=0.3)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1e300)), min_size=1, max_size=30), st.integers(0, 1 << 24)
)
def test_an_engines_speed_is_sane_whatever_was_measured(steps: list[tuple[int, float]], tokens: int) -> None:
    speed = PrefillSpeed(2048)
    for size, seconds in steps:
        speed.observe(size, seconds)
    one, more = speed.seconds(tokens), speed.seconds(tokens + 2048)
    assert one is not None
    assert more is not None
    assert 0 <= one < more < math.inf
    assert repr(speed)


# ---- how much to fetch --------------------------------------------------------------------------------

CHUNK = 256
CHUNK_BYTES = 2 * MB


def cost_of(count: int, steps: list[Step], rest: int, tokens_s: float, sources: list[Source]) -> float:
    """The definition, term by term."""
    fetch = 0.0
    for index, source in enumerate(sources):
        mine = [step.size_bytes for step in steps[:count] if step.source == index]
        if mine:
            fetch = max(fetch, source.speed.seconds(sum(mine), source.queued_bytes) or 0.0)
    left = sum(step.tokens for step in steps[count:]) + rest
    return fetch + left / tokens_s


SPEEDS = [measured(tier, [MB, 2 * MB, 8 * MB] * 5) for tier in (SLOW, DISK, REDIS)] + [TierSpeed()]
SOURCES = st.lists(
    st.builds(Source, st.sampled_from(SPEEDS), st.integers(0, 50 * MB)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=300)
@given(SOURCES, st.data())
def test_no_other_length_is_better_than_the_plan(sources: list[Source], data: st.DataObject) -> None:
    where = st.one_of(st.none(), st.integers(0, len(sources) - 1))
    step = st.builds(Step, st.integers(1, 512), st.integers(1, 8 * MB), where)
    steps = data.draw(st.lists(step, max_size=12))
    rest, tokens_s = data.draw(st.integers(0, 1000)), data.draw(st.floats(10, 1e6))
    plan = best_prefix(steps, rest, tokens_s, sources)
    costs = [cost_of(count, steps, rest, tokens_s, sources) for count in range(len(steps) + 1)]
    assert plan.ttft_s == pytest.approx(costs[plan.steps])
    assert plan.ttft_s <= min(costs) * (1 + 1e-9)
    assert all(costs[count] >= plan.ttft_s * (1 - 1e-9) for count in range(plan.steps))
    unknown = any(it.source is not None and not sources[it.source].speed.batches for it in steps[: plan.steps])
    assert plan.guessed == unknown


DISK_SPEED, SLOW_SPEED = measured(DISK, [MB, 8 * MB] * 20), measured(SLOW, [MB, 8 * MB] * 20)


@pytest.mark.parametrize(
    ("places", "tokens_s", "fetched"),
    [
        ("dddddddd", 2_000, 8),  # disk beats a slow engine
        ("ssssssss", 2_000, 0),  # 2 s for what takes 0.13 s to compute
        ("ssssssss", 50, 8),  # but 5 s of computing
        ("ddddssss", 2_000, 4),  # as far as it goes
        ("hhhhssss", 2_000, 4),  # what HOST has costs nothing
        ("hhhhhhhh", 2_000, 8),
        ("sddddddd", 2_000, 0),  # 2 s before anything that is fast
        ("shhhhhhh", 100, 8),  # 2 s before what would take 20 s
        ("dddddddd", 1e7, 0),  # an engine that computes faster than a disk reads
        ("uuuuuuuu", 2_000, 8),  # nobody knows yet
        ("dddduuuu", 2_000, 8),
        ("ssssuuuu", 2_000, 0),
        ("ssssssss", None, 8),
        ("", 2_000, 0),
    ],
)
def test_how_much_is_fetched(places: str, tokens_s: float | None, fetched: int) -> None:
    sources = [Source(DISK_SPEED), Source(SLOW_SPEED), Source(TierSpeed())]
    steps = [Step(CHUNK, CHUNK_BYTES, {"d": 0, "s": 1, "u": 2, "h": None}[it]) for it in places]
    plan = best_prefix(steps, 100, tokens_s, sources)
    assert plan.steps == fetched
    assert plan.guessed == (tokens_s is None or "u" in places[:fetched])


def test_of_equal_plans_the_shorter_fetch_is_taken() -> None:
    speed = TierSpeed()
    speed.observe(MB, 0.5)
    speed.observe(MB, 0.5)
    # 256 tokens of prefill take as long as 1 MB: 0.5 s.
    steps = [Step(256, MB, 0)] * 4
    assert best_prefix(steps, 0, 512, [Source(speed)]).steps == 0
    assert best_prefix(steps, 0, 511, [Source(speed)]).steps == 4


def test_tiers_deliver_at_the_same_time() -> None:
    one, two = measured((0.0, 100 * MB), [MB, 2 * MB] * 9), measured((0.0, 100 * MB), [MB, 2 * MB] * 9)
    steps = [Step(100, 10 * MB, position % 2) for position in range(8)]
    plan = best_prefix(steps, 0, 900, [Source(one), Source(two)])
    assert plan.steps == 8
    assert plan.fetch_s == pytest.approx(0.4, rel=0.01)
    # Together they are worth it, one after the other they would not be.
    assert best_prefix([Step(100, 10 * MB, 0)] * 8, 0, 1100, [Source(one)]).steps == 0


def test_a_long_queue_makes_a_fast_tier_not_worth_it() -> None:
    steps = [Step(CHUNK, CHUNK_BYTES, 0)] * 8
    assert best_prefix(steps, 0, 10_000, [Source(DISK_SPEED)]).steps == 8
    assert best_prefix(steps, 0, 10_000, [Source(DISK_SPEED, queued_bytes=1000 * MB)]) == Plan(0, 0.0, 0.2048, False)


def test_a_declined_tier_is_tried_again_some_time() -> None:
    speed = measured(SLOW, [MB, 2 * MB] * 10)
    steps = [Step(CHUNK, CHUNK_BYTES, 0)] * 8
    for asked in itertools.count():
        if best_prefix(steps, 0, 2_000, [Source(speed)]).steps:
            break
        speed.declined()
        assert asked < 100
    assert asked > 10


def test_the_time_of_prefill() -> None:
    assert prefill_s(1000, 500.0) == 2.0
    assert prefill_s(-5, 500.0) == 0.0
    assert prefill_s(1000, None) is None
    assert prefill_s(1000, 0.0) is None


# ---- how long to wait ---------------------------------------------------------------------------------


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(0, 5000)), max_size=30),
    st.integers(1, 20_000),
    st.floats(50, 1e5),
    st.floats(0.0005, 0.05),
)
def test_a_tier_costs_a_request_at_most_a_tenth(
    arrivals: list[tuple[float, int]], total: int, tokens_s: float, poll_s: float
) -> None:
    """Whatever arrives whenever: waiting, then computing the rest, is at most 1.1 times computing all of it."""
    patience = Patience(total, tokens_s)
    arrivals = sorted(arrivals)
    alone_s = total / tokens_s
    assume(1.2 * alone_s / poll_s < 20_000)
    for poll in itertools.count():
        waited = poll * poll_s
        arrived = min(sum(tokens for at, tokens in arrivals if at <= waited), total)
        if arrived == total or patience.expired(waited, arrived):
            break
        assert patience.remaining_s(waited, arrived) >= 0
    assert waited + (total - arrived) / tokens_s <= 1.1 * alone_s + poll_s + 1e-6


@settings(max_examples=200)
@given(st.integers(1, 10_000), st.floats(10, 1e5), st.integers(0, 10_000), st.floats(0, 100))
def test_what_remains_is_when_patience_ends(total: int, tokens_s: float, arrived: int, waited: float) -> None:
    patience = Patience(total, tokens_s)
    left = patience.remaining_s(waited, arrived)
    assert patience.expired(waited, arrived) == (left == 0 and waited > 0.1 * total / tokens_s + arrived / tokens_s)
    assert patience.expired(waited + left + 1e-6, arrived)
    if left > 1e-6:
        assert not patience.expired(waited + left - 1e-6, arrived)


def test_an_unmeasured_engine_waits_a_moment_after_each_arrival() -> None:
    for rate in (None, 0.0):
        patience = Patience(10_000, rate, floor_s=0.1)
        assert patience.remaining_s(0.0, 0) == pytest.approx(0.1)
        assert not patience.expired(0.09, 0)
        assert patience.expired(0.11, 0)
        assert not patience.expired(0.11, 256)
        assert patience.remaining_s(0.15, 256) == pytest.approx(0.06)
        assert not patience.expired(0.20, 256)
        assert patience.expired(0.22, 256)


@pytest.mark.parametrize("rate", [None, 10.0])
def test_nobody_waits_beyond_the_limit(rate: float | None) -> None:
    patience = Patience(10_000, rate, limit_s=5.0)
    assert not any(patience.expired(at / 100, at) for at in range(500))
    assert patience.remaining_s(4.99, 499) <= 0.011
    assert patience.expired(5.001, 501)


# ---- how good the estimates were ----------------------------------------------------------------------


def test_estimates_are_held_against_outcomes() -> None:
    sums = Calibration()
    assert (sums.count, sums.error, sums.worst) == (0, 0.0, 0.0)
    sums.add(1.2, 1.0)
    assert sums.error == pytest.approx(0.2)
    assert sums.bias == pytest.approx(0.2)
    sums.add(0.8, 1.0)
    assert sums.error == pytest.approx(0.2)
    assert sums.bias == pytest.approx(0.0)
    sums.add(100.0, 0.0)
    assert sums.worst == pytest.approx(100_000)
    assert sums.error < 4
    for _ in range(50):
        sums.add(1.0, 1.0)
    assert sums.error < 0.05
    assert repr(sums).endswith("worst 10000000%, 53 outcomes)")
