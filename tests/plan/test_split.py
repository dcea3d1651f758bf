"""Prefill and decode together and apart, and what tokens cost, worked out by hand."""

from dataclasses import replace

import pytest

from headwater.enginetimes import EngineTimes
from headwater.plan.cost import Prices, instance_dollars_s, tiers_dollars_s, token_cost
from headwater.plan.split import Load, Split, busy_share, split

# P = 1000 * 0.1 ms = 0.1 s; step(b) = 10 ms + 1 ms * b
TIMES = EngineTimes(0.0, 1e-4, decode_fixed_s=0.01, decode_request_s=0.001)
LOAD = Load(input_tokens=1000, cached_tokens=0, output_tokens=100, ttft_slo_s=0.6, tpot_slo_s=0.0305)


def found(load: Load = LOAD, batch_max: int = 256, handoff_s: float = 0.1, handoff_rate: float = 1e9) -> Split:
    return split(TIMES, load, batch_max, handoff_s, handoff_rate)


def test_together() -> None:
    # tpot(b) = 0.01 + 0.001 b + b * 0.1 / 100 = 0.01 + 0.002 b <= 0.0305: b = 10.
    # rate = 1 / (0.1 + 100 * 0.02 / 10) = 1 / 0.3
    assert found().together_batch == 10
    assert found().together == pytest.approx(1 / 0.3)


def test_apart() -> None:
    # step(b) <= 0.0305: b = 20, rate 20 / (100 * 0.03) = 6.667.
    # Prefill waits 0.6 - 0.1 - 0.1 = 0.4: busy 0.8 / 0.9, rate 8.889. Ratio 0.75, share 1 / (0.1125 + 0.15).
    it = found()
    assert (it.decode_batch, it.decode) == (20, pytest.approx(20 / 3))
    assert it.prefill == pytest.approx(0.8 / 0.9 / 0.1)
    assert it.ratio == pytest.approx(0.75)
    assert it.apart == pytest.approx(1 / 0.2625)


def test_whole_instances() -> None:
    # Of 7, three prefill 26.67 a second and four decode 26.67; of 2 one each, and decode is the slower.
    it = found()
    assert it.best_prefills(7) == 3
    assert it.fleet_apart(7) == pytest.approx(80 / 3)
    assert it.fleet_apart(2) == pytest.approx(20 / 3)
    assert it.best_prefills(1) is None


def test_waiting() -> None:
    # M/D/1: at busy 0.8 a prefill of 0.1 waits 0.8 * 0.1 / (2 * 0.2) = 0.2.
    assert busy_share(0.1, 0.2) == pytest.approx(0.8)
    assert busy_share(0.1, 0.0) == busy_share(0.1, -1.0) == 0.0


def test_what_is_cached_is_not_computed() -> None:
    assert found(replace(LOAD, cached_tokens=600)).prefill_s == pytest.approx(0.04)


def test_memory_bounds_the_batch() -> None:
    it = found(batch_max=5)
    assert (it.together_batch, it.decode_batch) == (5, 5)
    assert it.together == pytest.approx(1 / (0.1 + 100 * 0.015 / 5))
    assert found(batch_max=0).together is None


def test_the_link_bounds_the_prefill_instance() -> None:
    assert found(handoff_rate=2.0).prefill == 2.0


def test_ttft_bounds_together_too() -> None:
    # 0.11 - 0.1 to wait: busy 0.02 / 0.12, rate 1.667, less than the 3.33 of the steps.
    assert found(replace(LOAD, ttft_slo_s=0.11)).together == pytest.approx(1 / 0.6)


def test_slos_that_cannot_be_met() -> None:
    it = found(replace(LOAD, ttft_slo_s=0.15))  # the hand-off alone is too late
    assert it.prefill is None and it.apart is None and it.ratio is None and it.fleet_apart(8) is None
    assert it.together
    it = found(replace(LOAD, tpot_slo_s=0.0115))  # one request's step has 0.011, with its share of prefill 0.012
    assert it.together is None and it.together_batch == 0 and it.apart
    assert found(replace(LOAD, tpot_slo_s=0.001)).decode is None


def test_dollars_a_second() -> None:
    prices = Prices(gpu_hour=3.6, dram_gb_month=0.73, ssd_gb_month=0.1)
    assert instance_dollars_s(prices, 2) == pytest.approx(0.002)
    # 1,000 GB * 0.73 + 2,000 GB * 0.1 = 930 dollars in 730 hours.
    assert tiers_dollars_s(prices, 1e12, 2e12) == pytest.approx(930 / 730 / 3600)


def test_dollars_a_million_tokens() -> None:
    # Input 0.002 * 0.1 / 1000 * 1e6 = 0.2, output 0.002 * 0.02 / 10 * 1e6 = 4, tiers 0.0001 / (2 * 1000) * 1e6 = 0.05;
    # all double when the GPUs work half of the time.
    it = token_cost(0.002, 0.0001, 1000, prefill_s=0.1, step_s=0.02, batch=10, rate=2.0, busy=0.5)
    assert (it.input, it.output, it.cache) == (pytest.approx(0.4), pytest.approx(8.0), pytest.approx(0.1))
    # 1,000 of one kind at 0.5 and 100 of the other at 8.
    assert it.mixed(1000, 100) == pytest.approx((500 + 800) / 1100)
