"""What the terminal and the page both show of simulated runs: a row a run, as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from headwater.sim.fleet.config import SloConfig
from headwater.sim.fleet.sweep import Swept

DASH = "-"
Figure = tuple[str, str, Callable[[float], str]]
"""A column's name, where a Summary has its value, and how it is written."""
TIERS = ("device", "host", "disk", "peer", "remote")


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: a title, the names of columns, and text for each cell. The first `left` columns are names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int


def share(value: float) -> str:
    """`37.4 %`."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else DASH


def seconds(value: float) -> str:
    """`263 ms`, `1.24 s`: three figures."""
    if not math.isfinite(value):
        return DASH
    return (
        f"{1000 * value:.3g} ms" if abs(value) < 0.9995 else f"{value:,.3g} s" if value < 999.5 else f"{value:,.0f} s"
    )


def count(value: float) -> str:
    """`12,031`."""
    return f"{value:,.0f}"


def plain_number(value: float) -> str:
    """Three figures."""
    return f"{value:.3g}" if math.isfinite(value) else DASH


def labels(runs: Sequence[Swept]) -> list[str]:
    """A name for each run: the settings in which they differ."""
    varied = _varied(runs)
    return [" ".join(_setting(name, it.settings[name]) for name in varied) for it in runs]


def _setting(name: str, value: object) -> str:
    if name in ("policy", "load"):
        return f"×{_value(value)}" if name == "load" else str(value)
    return f"{name}={_value(value)}"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _varied(runs: Sequence[Swept]) -> list[str]:
    """The settings with more than one value, and the policy always."""
    names = list(dict.fromkeys(name for it in runs for name in it.settings))
    return [name for name in names if name == "policy" or len({repr(it.settings.get(name)) for it in runs}) > 1]


def tiers_found(runs: Sequence[Swept]) -> list[str]:
    """The tiers where any run found anything."""
    return [it for it in TIERS if any(getattr(run.summary.reuse, it) > 0 for run in runs)]


def tables(runs: Sequence[Swept]) -> list[Rows]:
    """All that is said of the runs."""
    found: list[Figure] = [("reuse", "reuse.overall", share)]
    found += [(tier, f"reuse.{tier}", share) for tier in tiers_found(runs)]
    found += [(name, name, count) for name in ("served", "rejected", "failed")]
    points = ("mean", "p50", "p90", "p99")
    late: list[Figure] = [(f"TTFT {at}", f"ttft.{at}_s", seconds) for at in points]
    late += [(f"per token {at}", f"tpot.{at}_s", seconds) for at in points]
    good: list[Figure] = [
        ("goodput a second", "goodput_rps", plain_number),
        ("of all requests", "goodput_share", share),
        ("busiest / mean instance", "balance.imbalance", plain_number),
        ("over time", "balance.imbalance_windows", plain_number),
        ("TTFT predicted within", "prediction.error_share", share),
    ]
    slo = runs[0].summary.slo if runs else SloConfig()
    met = f"TTFT ≤ {seconds(slo.ttft_s)}, per token ≤ {seconds(slo.tpot_s)}"
    parts = (
        ("Reuse: prompt tokens found, by tier", found),
        ("Latency", late),
        (f"Goodput ({met}), load balance, prediction", good),
    )
    return [_table(title, runs, figures) for title, figures in parts]


def _table(title: str, runs: Sequence[Swept], figures: Sequence[Figure]) -> Rows:
    names = _varied(runs)
    rows = [
        (
            *(_value(run.settings.get(name, "")) for name in names),
            *(show(attrgetter(path)(run.summary)) for _, path, show in figures),
        )
        for run in runs
    ]
    return Rows(title, (*names, *(name for name, _, _ in figures)), tuple(rows), len(names))
