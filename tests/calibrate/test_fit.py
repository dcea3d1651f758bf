"""The fit: known step times come back from noisy observations, and what cannot be fitted is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headwater.calibrate.fit import DEFAULT_STEP_TOKENS, Fitted, fit
from headwater.calibrate.observations import Decode, Observations, Prefill, StepTokens, step_limit
from headwater.enginetimes import EngineTimes
from headwater.errors import RefusedError

TRUTHS = [
    EngineTimes(0.0165, 1.52e-5, 4.2e-10, 8.4e-10, 5.7e-3, 2e-5, 5e-8, step_tokens=8192),
    EngineTimes(0.08, 3.1e-3, 1.3e-6, 3.6e-6, 0.063, 8.8e-3, 1.3e-5, step_tokens=2048),
    EngineTimes(0.02, 2e-4, 0.0, 0.0, 0.02, 0.0, 4e-7, step_tokens=512),
]
LENGTHS = (16, 33, 64, 130, 260, 512, 1024, 2048, 4096)


def observed(truth: EngineTimes, seed: int, noise: float, repeats: int = 3) -> Observations:
    """What a probe would bring of an engine with these times."""
    drawn = random.Random(seed)

    def times(seconds: float) -> tuple[float, ...]:
        return tuple(seconds * (1 + drawn.gauss(0, noise)) for _ in range(repeats))

    cached = [(new, context) for new in (32, 256) for context in (256, 1024, 3072)]
    prefills = [Prefill(n, c, times(truth.prefill_s(n, c))) for n, c in [*((n, 0) for n in LENGTHS), *cached]]
    decodes = [
        Decode(r, float(r * kv), times(truth.decode_s(r, r * kv))) for r in (1, 2, 4, 8, 16) for kv in (32, 512, 4096)
    ]
    return Observations(tuple(prefills), tuple(decodes), StepTokens(truth.step_tokens, True))


def worst(fitted: Fitted, truth: EngineTimes) -> float:
    """The largest relative error at points that were not observed, within what was."""
    points = [(n, c) for n in (24, 90, 400, 1500, 3000) for c in (0, 128, 700, 2500)]
    loads = [(r, r * kv) for r in (1, 3, 7, 12) for kv in (100, 900, 3000)]
    prefill = [fitted.times.prefill_s(n, c) / truth.prefill_s(n, c) - 1 for n, c in points]
    decode = [fitted.times.decode_s(r, kv) / truth.decode_s(r, kv) - 1 for r, kv in loads]
    return max(map(abs, [*prefill, *decode]))


@pytest.mark.parametrize("truth", TRUTHS)
def test_without_noise_every_term_comes_back(truth: EngineTimes, seed: int) -> None:
    fitted = fit(observed(truth, seed, noise=0.0))
    for name in ("prefill_fixed_s", "prefill_token_s", "decode_fixed_s", "decode_kv_s", "prefill_context_s"):
        assert getattr(fitted.times, name) == pytest.approx(getattr(truth, name), rel=1e-6, abs=1e-15), name
    assert fitted.times.step_tokens == truth.step_tokens
    assert fitted.prefill.p90 < 1e-6
    assert fitted.decode.left_out_p90 < 1e-6


@pytest.mark.parametrize("truth", TRUTHS)
def test_noise_of_5_percent_leaves_less_than_10(truth: EngineTimes, seed: int) -> None:
    for at in range(2):
        fitted = fit(observed(truth, seed + at, noise=0.05))
        assert worst(fitted, truth) < 0.10, f"seed {seed + at}"
        assert 0.005 < fitted.prefill.left_out_median < 0.15, f"seed {seed + at}: the error is told as it is"


@pytest.mark.parametrize("bad", [0, 4, 7, 8, 12])
def test_a_disturbed_point_weighs_nothing(seed: int, bad: int) -> None:
    """One length and one load that took four times as long every time, the longest prompt among them."""
    seen = observed(TRUTHS[1], seed, noise=0.02)
    prefills, decodes = list(seen.prefills), list(seen.decodes)
    prefills[bad] = replace(prefills[bad], times=tuple(4 * it for it in prefills[bad].times))
    decodes[bad] = replace(decodes[bad], times=tuple(4 * it for it in decodes[bad].times))
    fitted = fit(replace(seen, prefills=tuple(prefills), decodes=tuple(decodes)))
    assert worst(fitted, TRUTHS[1]) < 0.1


def test_no_term_is_negative(seed: int) -> None:
    """Times that grow ever slower would make the quadratic term negative, and long prompts free."""
    prefills = tuple(Prefill(n, 0, (0.01 + 1e-3 * n**0.8,)) for n in LENGTHS)
    seen = replace(observed(TRUTHS[0], seed, noise=0.0), prefills=prefills)
    times = fit(seen).times
    assert times.prefill_token2_s == 0.0
    assert times.prefill_s(100_000) > times.prefill_s(50_000)


def test_without_contexts_their_cost_follows_from_the_length(seed: int) -> None:
    truth = EngineTimes(0.08, 3e-3, 1.5e-6, 3e-6, 0.06, 8e-3, 1e-5)
    seen = observed(truth, seed, noise=0.0)
    fitted = fit(replace(seen, prefills=tuple(it for it in seen.prefills if not it.context)))
    assert fitted.times.prefill_context_s == pytest.approx(3e-6, rel=1e-6)
    assert fitted.measured.prefill_context == (0, 0)


def test_what_is_beyond_the_measurements_is_told(seed: int) -> None:
    fitted = fit(observed(TRUTHS[0], seed, noise=0.0))
    assert fitted.measured.prefill_tokens == (16, 4096)
    assert fitted.measured.decode_requests == (1, 16)
    assert fitted.beyond(7000, 16) == ()
    assert fitted.beyond(7169, 17) == (
        "prompts of 7169 tokens: measured up to 7168",
        "concurrency of 17 requests: measured up to 16",
    )


@pytest.mark.parametrize("limit", [None, StepTokens(1024, False), StepTokens(16_384, False)])
def test_an_unknown_step_is_assumed_and_told(seed: int, limit: StepTokens | None) -> None:
    fitted = fit(replace(observed(TRUTHS[0], seed, noise=0.0), step_tokens=limit))
    assert fitted.times.step_tokens == max(DEFAULT_STEP_TOKENS, limit.tokens if limit else 0)
    assert any("assumed" in it for it in fitted.notes)


def test_more_requests_than_a_step_has_tokens_cannot_decode(seed: int) -> None:
    fitted = fit(replace(observed(TRUTHS[2], seed, noise=0.0), step_tokens=StepTokens(128, True)), requests_max=256)
    assert fitted.times.requests_max == 127


def test_garbage_is_refused(seed: int) -> None:
    good = observed(TRUTHS[0], seed, noise=0.0)
    few = replace(good, decodes=good.decodes[:3])
    one_length = replace(good, prefills=tuple(Prefill(64, c, (0.1,)) for c in (0, 128, 256, 512)))
    flat = replace(good, prefills=tuple(Prefill(n, 0, (0.1 + 1e-7 * n,)) for n in LENGTHS))
    shrinking = replace(good, prefills=tuple(Prefill(n, 0, (10.0 / n,)) for n in LENGTHS))
    nan = replace(good, decodes=(*good.decodes, Decode(1, 5.0, (float("nan"), 1.0))))
    erratic = replace(
        good, decodes=tuple(replace(it, times=(1e-5 if at % 2 else 0.1,)) for at, it in enumerate(good.decodes))
    )
    zero = replace(good, prefills=(*good.prefills, Prefill(99, 0, (0.0,))))
    for seen, field in (
        (few, "decode observations"),
        (one_length, "prefill lengths"),
        (flat, "prefill times"),
        (shrinking, "prefill times"),
        (nan, "decode times"),
        (erratic, "decode times"),
        (zero, "prefill times"),
    ):
        with pytest.raises(RefusedError) as refused:
            fit(seen)
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([1, 8, 8, 3], StepTokens(2048, True)),
        ([8, 4], StepTokens(2048, True)),
        ([1, 5, 5, 1], StepTokens(1280, True)),
        ([6, 5], StepTokens(1536, False)),  # late arrivals, perhaps
        ([1, 11], StepTokens(2816, False)),
        ([12], StepTokens(3072, False)),
        ([1, 7, 8, 7], StepTokens(2048, True)),
        ([1, 1, 1, 1], None),
        ([], None),
    ],
)
def test_the_step_is_read_from_who_answers_together(steps: list[int], expected: StepTokens | None) -> None:
    arrived = [at + 0.001 * number for at, count in enumerate(steps) for number in range(count)]
    random.Random(1).shuffle(arrived)
    assert step_limit(arrived, 256, 0.1) == expected
