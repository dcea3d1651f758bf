"""What the answers put together: loads, batches, tiers and verdicts of one question."""

from dataclasses import replace

import pytest

from headwater.enginetimes import EngineTimes
from headwater.plan.gpus import GPUS
from headwater.plan.known import known_shape
from headwater.plan.links import WAYS
from headwater.plan.memory import device_tokens, tier_tokens
from headwater.plan.question import Question
from headwater.plan.work import both_ways, costs, fetch_answer, load, verdict

GIB = 1 << 30


def ask(**more: object) -> Question:
    """Llama-3.1-8B, 128 KiB a token, on one H100: 79.65 * 0.9 - 2 - 14.96 = 54.73 GiB for KV."""
    basis: dict[str, object] = {
        "shape": known_shape("llama-3.1-8b"), "gpu": GPUS["h100"], "tp": 1, "kv_width": 2.0,
        "ways": (WAYS["tcp-25g"],), "handoff": WAYS["roce-400g"],
    }  # fmt: skip
    return Question(**{**basis, **more})  # type: ignore[arg-type]


def test_a_cached_prefix_is_whole_chunks_and_takes_time_to_fetch() -> None:
    # 0.55 of 8,192 is 4,505: 17 chunks, 4,352 tokens, 544 MiB over PCIe 5: 570,425,344 / 50.4e9 + 20 us.
    it = load(ask(), 0.55)
    assert it.cached_tokens == 4352
    assert it.ttft_slo_s == pytest.approx(2.0 - 0.01131797 - 0.00002)
    assert load(ask(), 0.0).ttft_slo_s == 2.0


def test_the_last_token_is_always_computed() -> None:
    assert load(ask(), 1.0).cached_tokens == 8191
    assert both_ways(ask(), 1.0).prefill_s > 0


def test_memory_bounds_the_batch() -> None:
    # (8,192 + 512) * 128 KiB = 1.0625 GiB: 51 of them.
    assert both_ways(ask(tpot_slo_s=10.0), 0.5).decode_batch == 51
    assert both_ways(ask(tpot_slo_s=10.0, batch_max=40), 0.5).decode_batch == 40


def test_a_measured_engine_bounds_the_batch() -> None:
    times = EngineTimes(0.0, 1e-4, decode_fixed_s=0.01, requests_max=7)
    assert both_ways(ask(times=times), 0.5).decode_batch == 7


def test_the_hand_off_is_of_the_whole_prompt() -> None:
    assert both_ways(ask(), 0.5).handoff_s == pytest.approx(30e-6 + GIB / 43.5e9)


def test_tiers_of_the_fleet() -> None:
    # Of 8 instances each: 54.73 GiB / 128 KiB = 448,3xx tokens on DEVICE; HOST 1/8 of 1 TiB, DISK 1/8 of 8 TiB.
    device, host, disk = tier_tokens(ask())
    assert device == 8 * device_tokens(ask()) == 8 * (ask().room_bytes // 131_072)
    assert host - device == (1 << 40) // 131_072
    assert disk - host == (8 << 40) // 131_072


def test_costs_differ_by_the_prefill_that_is_saved() -> None:
    times = EngineTimes(0.0, 1e-4, decode_fixed_s=0.02)
    found = costs(ask(times=times, busy=1.0))
    assert found is not None
    # 2.5 / 3600 dollars a second * 0.8192 s / 8,192 tokens * 1e6, and half of it.
    assert found[0].input == pytest.approx(2.5 / 3600 * 100)
    assert found[1].input == pytest.approx(2.5 / 3600 * 50)
    assert found[0].cache == 0 and found[1].cache > 0
    assert costs(ask(times=times, ttft_slo_s=0.5)) is None


def test_where_fetching_stops_to_win_is_told() -> None:
    """Llama 4's chunked layers move whole up to 8,192 tokens and not beyond, and few tokens already read all experts:
    fetching wins for the shortest, then computing, then fetching again."""
    scout = ask(shape=known_shape("llama-4-scout"), tp=4, ways=(WAYS["roce-100g"],), length_tokens=131_072)
    figure = fetch_answer(scout).figures[0]
    assert (figure.value, figure.note) == (256, "not from 1,280, again from 9,216, another node or REMOTE")


def test_where_fetching_begins_to_win_is_told() -> None:
    # 0.1 + n * 131,072 / 2.8e9 < n * 1e-4 from n = 1,880 on: 8 chunks.
    slow = replace(WAYS["tcp-25g"], latency_s=0.1)
    figure = fetch_answer(ask(ways=(slow,), times=EngineTimes(0.0, 1e-4, step_tokens=1 << 20))).figures[0]
    assert (figure.value, figure.note) == (2048, "and longer, another node or REMOTE")


def test_fetching_may_never_win() -> None:
    figure = fetch_answer(ask(ways=(replace(WAYS["tcp-25g"], effective_bytes_s=1e6),), length_tokens=1024)).figures[0]
    assert (figure.value, figure.note) == (None, "never up to 1,024 tokens (another node or REMOTE)")


def test_verdicts() -> None:
    assert verdict(10.0, 12.0) == "yes: it serves 20 % more"
    assert verdict(10.0, 9.0) == "no: it serves 10 % less"
    assert verdict(10.0, 10.1) == "hardly: both serve about as much"
    assert verdict(None, 1.0) == "yes: together does not meet the SLOs"
    assert verdict(1.0, None) == "no: apart does not meet the SLOs"
    assert verdict(None, None) == "neither way meets the SLOs"
