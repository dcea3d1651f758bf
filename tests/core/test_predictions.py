"""The margin follows the error of predictions, heals, and goes back to 1 in silence; lengths are learned by name."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.predictions import (
    HALF_S,
    LEAST_COUNT,
    MARGIN_LEAST,
    MARGIN_MOST,
    QUIET_S,
    WINDOW,
    Outputs,
    Predictions,
    Quantity,
    Window,
)

TTFT, TPOT = Quantity.TTFT, Quantity.TPOT


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 12), st.sampled_from([0.1, 0.5, 0.9, 1.0])
)
@settings(max_examples=80, deadline=None)
def test_a_window_is_the_sorted_last_numbers(values: list[float], size: int, share: float) -> None:
    window = Window(size)
    for value in values:
        window.add(value)
    last = sorted(values[-size:])
    assert len(window) == len(last)
    found = window.quantile(share)
    assert sum(it <= found for it in last) >= share * len(last)
    assert sum(it < found for it in last) < share * len(last) or found == last[0]


def told(factor: float, spread: float = 0.2, count: int = 300, seed: int = 1, instance: int = 0) -> Predictions:
    """Outcomes that are `factor` times what was predicted, more or less, ten a second."""
    draw, predictions = random.Random(seed), Predictions()
    for at in range(count):
        predicted = draw.uniform(0.5, 2.0)
        predictions.observe(
            TTFT, instance, predicted, predicted * factor * draw.uniform(1 - spread, 1 + spread), at / 10
        )
    return predictions


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 4.0])
def test_the_margin_covers_bias_and_spread(factor: float) -> None:
    margin = told(factor).margin(TTFT, 0, 30.0)
    # The 0.9 quantile of uniform(0.8, 1.2) is 1.16.
    assert margin == pytest.approx(1.16 * factor, rel=0.06)


def test_nothing_is_known_at_first_and_then_the_fleet_speaks_for_an_instance() -> None:
    assert Predictions().margin(TTFT, 0, 0.0) == 1.0
    predictions = told(2.0, spread=0.0)
    assert predictions.margin(TTFT, 7, 30.0) == pytest.approx(2.0, rel=0.05)
    assert predictions.margin(TPOT, 0, 30.0) == 1.0
    for at in range(LEAST_COUNT // 2):
        predictions.observe(TTFT, 7, 1.0, 1.0, 30.0 + at)
    assert predictions.margin(TTFT, 7, 40.0) == pytest.approx(1.5, rel=0.05)
    for at in range(LEAST_COUNT // 2):
        predictions.observe(TTFT, 7, 1.0, 1.0, 40.0 + at)
    assert predictions.margin(TTFT, 7, 48.0) == pytest.approx(1.0, abs=0.01)


def test_one_outcome_moves_a_margin_little() -> None:
    predictions = Predictions()
    predictions.observe(TTFT, 0, 0.1, 60.0, 0.0)
    assert predictions.margin(TTFT, 0, 0.0) < 1.0 + (MARGIN_MOST - 1) * 2 / LEAST_COUNT


def test_what_was_is_forgotten() -> None:
    predictions = told(4.0)
    for at in range(WINDOW):
        predictions.observe(TTFT, 0, 1.0, 1.0, 30.0 + at)
    assert predictions.margin(TTFT, 0, 30.0 + WINDOW) == pytest.approx(1.0, abs=0.01)


def test_what_is_old_is_forgotten_however_few_came_after_it() -> None:
    predictions = told(4.0)
    for at in range(6):
        predictions.observe(TTFT, 0, 1.0, 1.0, 30.0 + 5 * at)
    assert predictions.margin(TTFT, 0, 55.0) == pytest.approx(1.0, abs=0.01)


def test_in_silence_it_goes_back_to_one() -> None:
    predictions = told(3.0, spread=0.0)
    heard = 29.9
    before = predictions.margin(TTFT, 0, heard)
    assert predictions.margin(TTFT, 0, heard + QUIET_S) == before
    assert predictions.margin(TTFT, 0, heard + QUIET_S + HALF_S) == pytest.approx(1 + (before - 1) / 2)
    assert predictions.margin(TTFT, 0, heard + 1e4) == pytest.approx(1.0)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
@settings(max_examples=50, deadline=None)
def test_no_margin_is_wild(predicted: float, actual: float) -> None:
    predictions = Predictions()
    for _ in range(20):
        predictions.observe(TTFT, 0, predicted, actual, 0.0)
    assert MARGIN_LEAST <= predictions.margin(TTFT, 0, 0.0) <= MARGIN_MOST


def test_small_differences_do_not_count() -> None:
    predictions = Predictions()
    for _ in range(50):
        predictions.observe(TTFT, 0, 0.001, 0.03, 0.0, floor_s=0.25)
    assert predictions.margin(TTFT, 0, 0.0) < 1.15


def test_error_and_bias_by_instance_and_in_all() -> None:
    predictions = told(2.0, spread=0.0, instance=3)
    assert predictions.calibration(TTFT, 3).bias == pytest.approx(-0.5)
    assert predictions.calibration(TTFT).error == pytest.approx(0.5)
    assert predictions.calibration(TPOT, 3).count == predictions.calibration(TTFT, 4).count == 0
    predictions.left(3)
    assert predictions.calibration(TTFT, 3).count == 0
    assert predictions.calibration(TTFT).count == 300
    assert "ttft" in repr(predictions)


def test_lengths_are_learned_by_name_and_drawn_towards_all() -> None:
    draw, outputs = random.Random(2), Outputs()
    assert outputs.expected("a", "chat", 256) == 256
    assert outputs.longest("a", "chat", 256) == 256
    for _ in range(400):
        outputs.observe("a", "chat", draw.randrange(80, 121))
        outputs.observe("b", "code", 1000)
    assert outputs.expected("a", "chat", 256) == pytest.approx(100, rel=0.1)
    assert outputs.longest("a", "chat", 256) == pytest.approx(117, abs=5)
    assert outputs.expected("b", "code", 256) == pytest.approx(1000, rel=0.02)
    assert 300 < outputs.expected("new", "chat", 256) < 800
    outputs.observe("new", "chat", 10)
    assert outputs.expected("new", "chat", 256) < 650


def test_lengths_follow_a_change() -> None:
    outputs = Outputs()
    for tokens in [100] * 200 + [400] * 60:
        outputs.observe("a", "", tokens)
    assert outputs.expected("a", "", 0) == pytest.approx(386, abs=12)


def test_names_are_bounded_and_the_longest_unheard_of_leaves() -> None:
    outputs = Outputs(names_max=3)
    for name in "abc":
        outputs.observe(name, "", 10)
    outputs.observe("a", "", 10)
    outputs.observe("d", "", 1000)
    assert len(outputs) == 3
    # b is not known any more; a, heard of again, and c still are.
    assert outputs.expected("a", "", 10) < outputs.expected("c", "", 10)
    assert outputs.expected("b", "", 10) > outputs.expected("c", "", 10)
    assert "3 names" in repr(outputs)
