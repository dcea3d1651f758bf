"""Observations to EngineTimes: least squares of relative errors, no term below zero, outliers with little weight.

The terms are those of `enginetimes`. None can be negative: a step that becomes quicker with more work would be noise,
and nonsense beyond what was measured. `decode_kv2_s` stays 0 for the same reason: over a bounded range it cannot be
told from noise. With at most four terms the best non-negative ones are found by trying every subset, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from headwater.calibrate.observations import Decode, Observations, Prefill
from headwater.enginetimes import EngineTimes
from headwater.errors import RefusedError

Floats = npt.NDArray[np.float64]

POINTS_MIN = 4
FIXED, TOKEN = 0, 1
"""Columns of the terms that no engine is without."""
OUTLIER = 4.685
"""From how many times the usual error on an observation has no weight (Beaton and Tukey 1974)."""
GROWTH_MIN, ERROR_MAX = 1.02, 0.5
"""Prefill times that grow less from the shortest prompt to the longest, or fit worse, are no engine's."""
EXACT = 0.005
"""Relative errors below this are as good as none: no clock of a server is better."""
TINY = 1e-6
ROUNDS = 20
DEFAULT_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors over the observations of one kind: of the fit itself, and of each when the rest predicts it."""

    points: int
    median: float
    p90: float
    left_out_median: float
    left_out_p90: float


@dataclass(frozen=True, slots=True)
class Range:
    """What was measured; beyond it the fit is a guess."""

    prefill_tokens: tuple[int, int]
    prefill_context: tuple[int, int]
    decode_requests: tuple[int, int]
    decode_kv_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Step times, how well they tell what they were fitted to, and where that was."""

    times: EngineTimes
    prefill: FitError
    decode: FitError
    measured: Range
    notes: tuple[str, ...] = ()

    def beyond(self, prompt_tokens: int, requests: int) -> tuple[str, ...]:
        """In what a workload goes beyond what was measured; nothing if it does not."""
        told = (
            ("prompts", "tokens", prompt_tokens, self.measured.prefill_tokens[1] + self.measured.prefill_context[1]),
            ("concurrency", "requests", requests, self.measured.decode_requests[1]),
        )
        return tuple(
            f"{what} of {asked} {unit}: measured up to {most}" for what, unit, asked, most in told if asked > most
        )


def fit(seen: Observations, *, requests_max: int = 256) -> Fitted:
    """Fit step times; raises RefusedError if the observations are too few, or say that length costs nothing."""
    _check(seen)
    step, notes = _step_tokens(seen)
    contexts = any(it.context for it in seen.prefills)
    prefill_rows = _prefill_rows(seen.prefills, step, contexts)
    prefill_s = np.array([it.seconds for it in seen.prefills])
    decode_rows = np.array([[1.0, it.requests, it.kv_tokens] for it in seen.decodes])
    decode_s = np.array([it.seconds for it in seen.decodes])
    fixed, token, token2, context = _with_context(_solve(prefill_rows, prefill_s, TOKEN), contexts)
    decode = _solve(decode_rows, decode_s, FIXED)
    times = EngineTimes(
        prefill_fixed_s=fixed,
        prefill_token_s=token,
        prefill_token2_s=token2,
        prefill_context_s=context,
        decode_fixed_s=float(decode[0]),
        decode_request_s=float(decode[1]),
        decode_kv_s=float(decode[2]),
        step_tokens=step,
        requests_max=min(requests_max, step - 1),
    )
    prefill_error, decode_error = _errors(prefill_rows, prefill_s, TOKEN), _errors(decode_rows, decode_s, FIXED)
    measured = _range(seen.prefills, seen.decodes)
    _check_sense(times, measured, {"prefill": prefill_error, "decode": decode_error})
    return Fitted(times, prefill_error, decode_error, measured, (*seen.notes, *notes))


def _check_sense(times: EngineTimes, measured: Range, errors: dict[str, FitError]) -> None:
    """Refuse what the terms can be bent to, but not by an engine."""
    remedy = "measure an idle server for longer (--seconds), with longer prompts"
    for kind, it in errors.items():
        if it.median > ERROR_MAX:
            raise RefusedError(
                f"{kind} times", "some that follow the load", f"a fit that errs by {it.median:.0%}", remedy
            )
    shortest, longest = (times.prefill_s(it) for it in measured.prefill_tokens)
    if longest < GROWTH_MIN * shortest:
        given = f"{shortest:.3g} to {longest:.3g} s"
        raise RefusedError("prefill times", "to grow with the prompt", given, remedy)


def _check(seen: Observations) -> None:
    """Refuse what no fit can be made of."""
    for kind, points in (("prefill", seen.prefills), ("decode", seen.decodes)):
        if len(points) < POINTS_MIN:
            raise RefusedError(
                f"{kind} observations", f"at least {POINTS_MIN}", f"{len(points)}", "give it more time (--seconds)"
            )
        worst = min(min(it.times) for it in points)
        if not all(np.isfinite(it.times).all() for it in points) or worst < 0 or min(it.seconds for it in points) <= 0:
            raise RefusedError(f"{kind} times", "positive seconds", f"{worst}", "measure again")
    if len({it.tokens for it in seen.prefills}) < POINTS_MIN - 1:
        raise RefusedError("prefill lengths", f"at least {POINTS_MIN - 1}", "fewer", "allow longer prompts")


def _step_tokens(seen: Observations) -> tuple[int, tuple[str, ...]]:
    found = seen.step_tokens
    if found is None:
        return DEFAULT_STEP_TOKENS, (f"step_tokens was not measured: {DEFAULT_STEP_TOKENS} is assumed",)
    if found.is_limit:
        return found.tokens, ()
    taken = max(found.tokens, DEFAULT_STEP_TOKENS)
    return taken, (f"a step takes at least {found.tokens} tokens: {taken} is assumed (--step-tokens)",)


def _prefill_rows(points: Sequence[Prefill], step: int, contexts: bool) -> Floats:
    """What each term of EngineTimes.prefill_s is multiplied with. Without contexts, the third column has both terms:
    attention goes over n^2 / 2 pairs of new tokens and over n * c pairs with cached ones, so `context` is 2 * `token2`.
    """
    rows = []
    for it in points:
        sizes = [step] * (it.tokens // step) + [it.tokens % step] * bool(it.tokens % step)
        befores = [it.context + step * number for number in range(len(sizes))]
        square = float(sum(size * size for size in sizes))
        across = float(sum(size * before for size, before in zip(sizes, befores, strict=True)))
        start = [float(len(sizes)), float(it.tokens)]
        rows.append([*start, square, across] if contexts else [*start, square + 2 * across])
    return np.array(rows)


def _with_context(found: Floats, contexts: bool) -> tuple[float, float, float, float]:
    fixed, token, token2 = (float(it) for it in found[:3])
    return fixed, token, token2, float(found[3]) if contexts else 2 * token2


def _solve(rows: Floats, seconds: Floats, needed: int) -> Floats:
    """Non-negative terms with small relative errors, of which `needed` is not 0.

    First the least sum of errors, which few bad points do not bend, however bad; then from there the least squares of
    those that err no more than is usual, the others with less weight, the worst with none (Tukey's biweight).
    """
    scaled, ones = rows / seconds[:, None], np.ones(len(seconds))
    # As many observations as there are terms can be met exactly, which says nothing of what is usual.
    middle = 50 * (1 + rows.shape[1] / len(seconds))
    found = _non_negative(scaled, ones, needed)
    for number in range(ROUNDS):
        share = np.maximum(scaled @ found, TINY)
        error = np.maximum(share, 1 / share) - 1
        usual = max(1.4826 * float(np.percentile(error, min(middle, 100))), EXACT)
        if number < ROUNDS // 2:
            weights = 1 / np.sqrt(np.maximum(error, EXACT))
        else:
            weights = np.maximum(1 - (error / (OUTLIER * usual)) ** 2, 0.0)
        again = _non_negative(scaled * weights[:, None], weights, needed)
        if number > ROUNDS // 2 and np.allclose(again, found, rtol=1e-4, atol=0):
            break
        found = again
    return found


def _non_negative(rows: Floats, target: Floats, needed: int) -> Floats:
    """The least squares with no negative term: the best of all subsets of terms whose own solution has none."""
    width = rows.shape[1]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    unit = rows / scale
    products, aims = unit.T @ unit, unit.T @ target
    best, least = np.zeros(width), np.inf
    for chosen in _subsets(width, needed):
        part = np.linalg.lstsq(products[np.ix_(chosen, chosen)], aims[chosen], rcond=None)[0]
        if (part < 0).any() or part[chosen.index(needed)] <= 0:
            continue
        left = float(part @ products[np.ix_(chosen, chosen)] @ part - 2 * part @ aims[chosen])
        if left < least:
            least, best = left, np.zeros(width)
            best[chosen] = part
        if len(chosen) == width:
            break  # no subset of it can be better
    found: Floats = best / scale
    return found


def _subsets(width: int, needed: int) -> list[list[int]]:
    """All choices of columns that have one of them, the largest first."""
    sizes = range(width, 0, -1)
    return [list(it) for count in sizes for it in combinations(range(width), count) if needed in it]


def _errors(rows: Floats, seconds: Floats, needed: int) -> FitError:
    def error(found: Floats, which: slice | int) -> Floats:
        off: Floats = np.atleast_1d(np.abs(rows[which] @ found / seconds[which] - 1))
        return off

    own = error(_solve(rows, seconds, needed), slice(None))
    others = [np.arange(len(seconds)) != number for number in range(len(seconds))]
    left_out = np.concatenate(
        [error(_solve(rows[rest], seconds[rest], needed), number) for number, rest in enumerate(others)]
    )
    return FitError(
        len(seconds),
        float(np.median(own)),
        float(np.percentile(own, 90)),
        float(np.median(left_out)),
        float(np.percentile(left_out, 90)),
    )


def _range(prefills: Sequence[Prefill], decodes: Sequence[Decode]) -> Range:
    def span(numbers: Sequence[float]) -> tuple[int, int]:
        return round(min(numbers)), round(max(numbers))

    return Range(
        span([it.tokens for it in prefills]),
        span([it.context for it in prefills]),
        span([it.requests for it in decodes]),
        span([it.kv_tokens for it in decodes]),
    )
