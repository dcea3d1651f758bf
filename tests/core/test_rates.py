"""Step times learned from requests: how soon, how well, and that nothing makes them absurd."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.rates import K_MOST, QUIET_S, TOKEN_MOST_S, Rates
from headwater.enginetimes import EngineTimes

PRIOR = EngineTimes(0.005, 1e-4, decode_fixed_s=0.02, decode_request_s=5e-4, decode_kv_s=1e-7)
SLOW = EngineTimes(0.040, 1.3e-3, decode_fixed_s=0.08, decode_request_s=4e-3, decode_kv_s=8e-7)
SEED = 20240811


def serve(
    rates: Rates, times: EngineTimes, count: int, seed: int = SEED, at_s: float = 0.0, noise: float = 0.1
) -> None:
    """So many requests of an idle instance 1, of all lengths, one in ten of which took thrice as long."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(count):
        tokens, requests = draw.choice([60, 300, 900, 2500]), draw.randint(1, 12)
        slow = 3.0 if draw.random() < 0.1 else 1.0
        off = slow * (1 + noise * (draw.random() - 0.5))
        rates.prefilled(1, "m", tokens, 0, times.prefill_s(tokens) * off, at_s + number)
        rates.decoded(1, "m", requests, requests * 1000, times.decode_s(requests, requests * 1000) * off)
        rates.times(1, "m")


def close(found: EngineTimes, real: EngineTimes, within: float = 0.2) -> bool:
    """Whether both say about the same of usual requests."""
    prefills = all(abs(found.prefill_s(it) / real.prefill_s(it) - 1) < within for it in (100, 900, 4000))
    decodes = all(abs(found.decode_s(it, it * 1000) / real.decode_s(it, it * 1000) - 1) < within for it in (1, 6, 16))
    return prefills and decodes


def test_what_is_not_known_is_the_prior() -> None:
    rates = Rates(PRIOR)
    assert rates.times(1, "m") is PRIOR
    rates.prefilled(1, "m", 900, 0, 9.0, 0.0)
    assert rates.times(1, "m") is PRIOR


@pytest.mark.parametrize("seed", range(8))
def test_ten_requests_are_enough(seed: int) -> None:
    rates = Rates(PRIOR)
    serve(rates, SLOW, 10, SEED + seed)
    assert close(rates.times(1, "m"), SLOW, 0.25), rates.times(1, "m")


@pytest.mark.parametrize("seed", range(8))
def test_a_change_is_followed(seed: int) -> None:
    rates = Rates(PRIOR)
    serve(rates, SLOW, 100, SEED + seed)
    serve(rates, PRIOR, 12, SEED + 100 + seed, at_s=100.0)
    assert close(rates.times(1, "m"), PRIOR, 0.3), rates.times(1, "m")


def test_prompts_of_one_length_scale_the_prior() -> None:
    rates = Rates(PRIOR)
    for number in range(10):
        rates.prefilled(1, "m", 900, 0, 2 * PRIOR.prefill_s(900), float(number))
    assert rates.times(1, "m").prefill_s(4000) == pytest.approx(2 * PRIOR.prefill_s(4000))


def test_attention_keeps_the_shape_of_the_prior() -> None:
    prior = EngineTimes(0.005, 1e-4, 1e-8, 2e-8)
    rates, real = Rates(prior), EngineTimes(0.015, 3e-4, 3e-8, 6e-8)
    for number, (tokens, context) in enumerate([(100, 0), (4000, 0), (900, 3000), (8000, 100), (50, 8000)] * 2):
        rates.prefilled(1, "m", tokens, context, real.prefill_s(tokens, context), float(number))
    assert rates.times(1, "m").prefill_s(6000, 6000) == pytest.approx(real.prefill_s(6000, 6000), rel=0.02)


def test_a_busy_instance_is_judged_only_if_it_is_never_idle() -> None:
    rates = Rates(PRIOR)
    for number in range(5):
        rates.prefilled(1, "m", 900, 0, PRIOR.prefill_s(900), float(number))
    for _ in range(30):
        rates.prefilled(1, "m", 900, 0, 50.0, 5.0, queued_tokens=900, queued_requests=1)
    assert rates.times(1, "m").prefill_s(900) == pytest.approx(PRIOR.prefill_s(900), rel=0.01)
    for number in range(30):
        seconds = 2 * PRIOR.prefill_fixed_s + 5 * 1800 * PRIOR.prefill_token_s
        rates.prefilled(1, "m", 900, 0, seconds, 5 + QUIET_S + number, queued_tokens=900, queued_requests=1)
    assert rates.times(1, "m").prefill_s(900) > 3 * PRIOR.prefill_s(900)


def test_who_is_not_known_is_like_its_kind() -> None:
    rates = Rates(PRIOR)
    serve(rates, SLOW, 20)
    assert close(rates.times(2, "m"), SLOW, 0.3)
    assert rates.times(2, "other") is PRIOR
    rates.left(1)
    assert close(rates.times(1, "m"), SLOW, 0.3), "the kind is still known"


def test_the_same_times_are_the_same_object() -> None:
    rates = Rates(PRIOR)
    serve(rates, SLOW, 30, noise=0.0)
    before = rates.times(1, "m")
    serve(rates, SLOW, 30, noise=0.0)
    assert rates.times(1, "m") is before


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-5, 200_000),
            st.integers(0, 100_000),
            st.floats(allow_nan=True, allow_infinity=True),
            st.integers(0, 50_000),
        ),
        max_size=40,
    )
)
def test_nothing_makes_them_absurd(outcomes: list[tuple[int, int, float, int]]) -> None:
    rates = Rates(PRIOR)
    for number, (tokens, context, seconds, queued) in enumerate(outcomes):
        rates.prefilled(1, "m", tokens, context, seconds, 20.0 * number, queued, queued // 1000)
        rates.decoded(1, "m", tokens % 300, float(context), seconds)
        for it in (rates.times(1, "m"), rates.times(2, "m")):
            terms = (it.prefill_fixed_s, it.prefill_token2_s, it.prefill_context_s, it.decode_fixed_s)
            assert all(0 <= term <= 1e4 for term in (*terms, it.decode_request_s, it.decode_kv_s)), it
            assert 0 < it.prefill_token_s <= min(TOKEN_MOST_S, K_MOST * PRIOR.prefill_token_s)
