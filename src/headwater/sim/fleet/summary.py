"""What is said of a run: reuse by tier, latencies, goodput, balance, and how good the predictions were.

    reuse       prompt tokens found / prompt tokens, of served requests
    goodput     served requests that met both SLOs, per second of arrivals and as a share of all that arrived
    imbalance   computed prompt tokens of the busiest instance / those of the mean one; 1 is even

What nothing can be said of is NaN: no request served, no prediction made, nothing computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from headwater.sim.fleet.config import SloConfig
from headwater.sim.fleet.results import Ending, Floats, Ints, Run

NAN = math.nan
CURVE = tuple(range(0, 101, 2))
"""The percentiles of curves."""
WINDOWS = 60
"""So many windows of time at most, each of a second at least."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: the mean, percentiles, and the whole curve at the percentiles of CURVE."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    curve_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Floats) -> Times:
        """Of those that are numbers."""
        known = values[np.isfinite(values)]
        if not known.size:
            return cls(NAN, NAN, NAN, NAN)
        p50, p90, p99 = (float(it) for it in np.percentile(known, (50, 90, 99)))
        return cls(float(known.mean()), p50, p90, p99, tuple(float(it) for it in np.percentile(known, CURVE)))


@dataclass(frozen=True, slots=True)
class Reuse:
    """Shares of the prompt tokens of served requests, by where they were found; `overall` is their sum."""

    overall: float
    device: float
    host: float
    disk: float
    peer: float
    remote: float


@dataclass(frozen=True, slots=True)
class Balance:
    """How even the work is: over the whole run, and by windows of time (mean of all, and each with its middle)."""

    imbalance: float
    imbalance_windows: float
    at_s: tuple[float, ...] = ()
    by_window: tuple[float, ...] = ()
    busiest_tokens: tuple[float, ...] = ()
    """The longest queue of uncached prompt tokens in each window; empty if the run has no samples."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted against simulated TTFT of served requests: mean |error|, its median share of the time, mean error."""

    error_s: float
    error_share: float
    bias_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures."""

    requests: int
    served: int
    rejected: int
    failed: int
    span_s: float
    """From the first arrival to the last; to the last token if all arrive at once."""
    reuse: Reuse
    ttft: Times
    tpot: Times
    slo: SloConfig
    goodput_rps: float
    goodput_share: float
    balance: Balance
    prediction: Prediction
    wall_s: float
    simulated_rps: float
    """Simulated requests per second of real time."""
    log_hash: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with null for what nothing can be said of."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return plain


def summarise(run: Run, slo: SloConfig | None = None, instances: int | None = None) -> Summary:
    """The figures of a run. `instances` is how many the fleet has, where its samples do not tell."""
    slo = slo or SloConfig()
    served = run.ending == Ending.SERVED
    good = served & (run.ttft_s <= slo.ttft_s) & ~(run.tpot_s > slo.tpot_s)  # one token has no time per token
    requests, span_s = int(run.arrival_s.size), _span(run)
    return Summary(
        requests=requests,
        served=int(served.sum()),
        rejected=int((run.ending == Ending.REJECTED).sum()),
        failed=int((run.ending == Ending.FAILED).sum()),
        span_s=span_s,
        reuse=_reuse(run, served),
        ttft=Times.of(run.ttft_s[served]),
        tpot=Times.of(run.tpot_s[served]),
        slo=slo,
        goodput_rps=_share(float(good.sum()), span_s),
        goodput_share=_share(float(good.sum()), requests),
        balance=_balance(run, served, span_s, instances),
        prediction=_prediction(run, served),
        wall_s=run.wall_s,
        simulated_rps=_share(requests, run.wall_s),
        log_hash=run.log_hash,
    )


def _span(run: Run) -> float:
    """The same for all policies on a trace: how late the last token comes does not make its goodput smaller."""
    if not run.arrival_s.size:
        return 0.0
    first, last = float(run.arrival_s.min()), float(run.arrival_s.max())
    if last > first:
        return last - first
    done = run.done_s[np.isfinite(run.done_s)]
    return float(done.max()) - first if done.size else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else NAN


def _reuse(run: Run, served: np.ndarray[Any, np.dtype[np.bool_]]) -> Reuse:
    asked = int(run.input_tokens[served].sum())
    tiers = (run.device_tokens, run.host_tokens, run.disk_tokens, run.peer_tokens, run.remote_tokens)
    found = [int(it[served].sum()) for it in tiers]
    return Reuse(_share(sum(found), asked), *(_share(it, asked) for it in found))


def _computed(run: Run) -> Ints:
    found = run.device_tokens + run.host_tokens + run.disk_tokens + run.peer_tokens + run.remote_tokens
    return run.input_tokens - found


def _balance(run: Run, served: np.ndarray[Any, np.dtype[np.bool_]], span_s: float, instances: int | None) -> Balance:
    placed = served & (run.instance >= 0)
    if not placed.any():
        return Balance(NAN, NAN)
    count = max(instances or run.waiting_tokens.shape[1], int(run.instance.max()) + 1)
    work = _computed(run)
    windows = max(1, min(WINDOWS, int(span_s)))
    width_s = span_s / windows
    begin_s = float(run.arrival_s.min())
    at = _window(run.arrival_s, begin_s, width_s, windows)
    table = np.zeros((windows, count))
    np.add.at(table, (at[placed], run.instance[placed]), work[placed])
    each = [_uneven(it) for it in table]
    known = [it for it in each if math.isfinite(it)]
    middles = tuple(begin_s + (it + 0.5) * width_s for it in range(windows))
    whole = _uneven(table.sum(axis=0))
    mean = sum(known) / len(known) if known else NAN
    return Balance(whole, mean, middles, tuple(each), _busiest(run, begin_s, width_s, windows))


def _window(at_s: Floats, begin_s: float, width_s: float, windows: int) -> Ints:
    if width_s <= 0:
        return np.zeros(at_s.size, np.int64)
    return np.clip(((at_s - begin_s) / width_s).astype(np.int64), 0, windows - 1)


def _uneven(work: Floats) -> float:
    return _share(float(work.max()), float(work.mean()))


def _busiest(run: Run, begin_s: float, width_s: float, windows: int) -> tuple[float, ...]:
    if not run.sample_s.size or not run.waiting_tokens.size:
        return ()
    inside = (run.sample_s >= begin_s) & (run.sample_s <= begin_s + width_s * windows)
    longest = np.zeros(windows)
    at = _window(run.sample_s[inside], begin_s, width_s, windows)
    np.maximum.at(longest, at, run.waiting_tokens[inside].max(axis=1))
    return tuple(float(it) for it in longest)


def _prediction(run: Run, served: np.ndarray[Any, np.dtype[np.bool_]]) -> Prediction:
    known = served & np.isfinite(run.predicted_ttft_s) & np.isfinite(run.ttft_s)
    if not known.any():
        return Prediction(NAN, NAN, NAN)
    actual = run.ttft_s[known]
    error = run.predicted_ttft_s[known] - actual
    some = actual > 0
    share = float(np.median(np.abs(error[some]) / actual[some])) if some.any() else NAN
    return Prediction(float(np.abs(error).mean()), share, float(error.mean()))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {it.name: _plain(getattr(value, it.name)) for it in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(it) for it in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
