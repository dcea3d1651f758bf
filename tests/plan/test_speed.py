"""Step times of the roofline, and from which length on fetching wins, worked out by hand."""

from dataclasses import replace

import pytest

from headwater.enginetimes import EngineTimes
from headwater.plan.fetch import Change, changes, least_fetch_bytes_s, saved_s
from headwater.plan.gpus import Gpu
from headwater.plan.links import WayIn
from headwater.plan.shapes import Weights
from headwater.plan.speed import Roofline
from tests.plan.shapes import SMALL

# 1e6 operations and 1e6 bytes a second for two GPUs at the shares that are reached.
GPU = Gpu("g", 1 << 30, flops_s=1e6, memory_bytes_s=1e6)
LINE = Roofline(SMALL, GPU, tp=2, kv_width=2.0, mfu=0.5, mbu=0.5)


def test_prefill_is_bound_by_operations() -> None:
    # 10 tokens after 5: weights 2 * (1000 * 10 + 100) = 20,200; pairs 10 * 5 + 10 * 11 / 2 = 105 in each of 2 layers,
    # 64 operations each = 13,440.
    assert LINE.prefill_flops(10, 5) == 33_640
    assert LINE.prefill_s(10, 5) == pytest.approx(0.033640)
    assert LINE.prefill_s(0, 5) == 0


def test_a_short_prefill_is_bound_by_reading_the_weights() -> None:
    # (1000 + 100) * 2 bytes = 2,200: more than the 2 * 1100 + 128 = 2,328 operations only if memory is slower.
    slow = replace(LINE, gpu=replace(GPU, memory_bytes_s=1e5))
    assert slow.prefill_s(1) == pytest.approx(0.022)
    assert LINE.prefill_s(1) == pytest.approx(0.002328)


def test_decode_is_bound_by_bytes() -> None:
    # 4 requests of 100 tokens: weights 2,200 and 4 * 2 layers * 100 * 16 * 2 bytes * 2 copies of the one head = 51,200.
    assert LINE.decode_bytes(4, 400) == 53_400
    # At half the bandwidth.
    assert replace(LINE, mbu=0.25).decode_s(4, 400) == pytest.approx(0.1068)
    assert LINE.decode_s(0, 0) == 0


def test_decode_of_many_is_bound_by_operations() -> None:
    # 4 * (2 * 1100 + 2 * 64 * 101) = 60,512 operations, more than the 53,400 bytes.
    assert LINE.decode_s(4, 400) == pytest.approx(0.060512)


def test_few_requests_read_few_experts() -> None:
    shape = replace(SMALL, weights=Weights(100, 100, False, 1000, routed=8000, experts=8, chosen=2), routed_width=0.5)
    # 1 token: (1000 + 100) * 2 + 8000 * 0.5 * 0.25 = 3,200; 2 tokens: 2200 + 4000 * 0.4375 = 3,950.
    assert shape.step_weight_bytes(1) == 3200
    assert shape.step_weight_bytes(2) == 3950
    # A token meets 1000 + 8000 * 2 / 8 = 3,000 weights.
    assert replace(LINE, shape=shape).prefill_flops(1) == 2 * (3000 + 100) + 2 * 64


def test_what_a_prefix_saves() -> None:
    # Fixed parts are paid either way: 201 tokens take 0.01 + 0.201, the last one alone 0.01 + 0.001.
    assert saved_s(EngineTimes(0.01, 0.001), 200) == pytest.approx(0.2)
    # The last token reads the weights either way, and attends to the prefix either way.
    assert saved_s(LINE, 10) == pytest.approx((2 * 1000 * 10 + 2 * 64 * 55) / 1e6)


def test_where_fetching_begins_to_win() -> None:
    # 0.1 + 0.0005 n < 0.001 n from n = 200 on; of multiples of 60 the first is 240.
    way, times = WayIn("w", "", 1e6, 1e6, 0.1), EngineTimes(0.01, 0.001, step_tokens=1 << 20)

    def found(bytes_of_token: int, latency_s: float = 0.1) -> tuple[Change, ...]:
        link = replace(way, latency_s=latency_s)
        return changes(range(60, 601, 60), lambda n: link.seconds(bytes_of_token * n), lambda n: saved_s(times, n))

    assert found(500) == (Change(60, False), Change(240, True))
    assert found(2000) == (Change(60, False),)
    assert found(500, latency_s=0.0) == (Change(60, True),)


def test_the_winner_may_change_more_than_once() -> None:
    compute = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    fetch = {1: 0.5, 2: 2.5, 3: 3.0, 4: 3.5}
    found = changes(range(1, 5), fetch.__getitem__, compute.__getitem__)
    assert found == (Change(1, True), Change(2, False), Change(4, True))


def test_mooncakes_condition_gives_mooncakes_figures() -> None:
    # LLaMA3-70B, a prefix of 8,192: 2 * 8192 * 2 / (8 * (4 * 8192 * 8192 + 22 * 8192^2)) = 2.3475e-6 bytes an
    # operation; on 8 A800 (2.496e15) 5.86 GB/s, on 8 H800 (7.912e15) 18.6. The paper says 6 and 19.
    assert least_fetch_bytes_s(8192, 8192, 8, 2.0, 8 * 312e12) == pytest.approx(5.859e9, rel=1e-3)
    assert least_fetch_bytes_s(8192, 8192, 8, 2.0, 8 * 989e12) == pytest.approx(18.57e9, rel=1e-3)
