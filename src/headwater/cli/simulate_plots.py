"""Simulated runs as plots: PNG files, or SVG inside a page."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.simulate_rows import labels, tiers_found
from headwater.errors import ConfigError
from headwater.sim.fleet.summary import CURVE
from headwater.sim.fleet.sweep import Swept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES_MAX = 12
"""More lines cannot be told apart: the first ones are drawn, and the title says so."""
PANELS_MAX = 4
"""A panel for each load, of plots over time."""
SIZE_INCHES = (9.0, 4.2)
PANEL_INCHES = 2.2
LINE_STYLES = ("-", "--", ":", "-.")
TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
DPI = 120
STYLE = {
    "svg.hashsalt": "headwater",  # else the same run gives another file each time
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn plot and the name of its file."""

    name: str
    title: str
    figure: Any

    def png(self) -> bytes:
        """As PNG."""
        return self._saved("png", {"Software": None})

    def svg(self) -> bytes:
        """As SVG."""
        return self._saved("svg", {"Date": None})

    def _saved(self, form: str, metadata: dict[str, None]) -> bytes:
        _, context = _matplotlib()
        file = io.BytesIO()
        with context(STYLE):
            self.figure.savefig(file, format=form, metadata=metadata)
        return file.getvalue()


def check() -> None:
    """Raise ConfigError if there is nothing to draw with."""
    _matplotlib()


def plots(runs: Sequence[Swept]) -> list[Plot]:
    """Reuse by tier, both latencies, goodput against load, and balance over time, as far as the runs have them."""
    draw: list[tuple[str, str, Callable[[Figure, Sequence[Swept]], bool]]] = [
        ("reuse", "Prompt tokens found, by tier", _reuse),
        ("ttft", "Time to first token", lambda figure, them: _curves(figure, them, "ttft")),
        ("tpot", "Time per output token", lambda figure, them: _curves(figure, them, "tpot")),
        ("goodput", "Requests that met the SLO, by load", _goodput),
        ("balance", "Prompt tokens computed: busiest instance / mean instance, over time", _balance),
        ("queue", "Longest queue of uncached prompt tokens, over time", _queue),
    ]
    make, context = _matplotlib()
    found = []
    with context(STYLE):
        for name, title, fill in draw:
            figure: Figure = make(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
            if fill(figure, runs):
                left_out = name != "goodput" and len(runs) > LINES_MAX
                figure.suptitle(title + (f" (first {LINES_MAX} of {len(runs)} runs)" if left_out else ""))
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # the layout is found once, not for each format
                found.append(Plot(name, title, figure))
    return found


def write_png(found: Sequence[Plot], directory: Path) -> list[Path]:
    """A file a plot, in a folder that exists; raises OSError."""
    paths = [directory / f"{it.name}.png" for it in found]
    for path, it in zip(paths, found, strict=True):
        path.write_bytes(it.png())
    return paths


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'headwater[plots]', or use --json or tables") from error
    return Figure, rc_context


def _reuse(figure: Figure, runs: Sequence[Swept]) -> bool:
    axes = figure.subplots()
    shown, names = runs[:LINES_MAX], labels(runs)[:LINES_MAX]
    left = [0.0] * len(shown)
    for tier in tiers_found(runs):
        widths = [100 * _finite(getattr(it.summary.reuse, tier)) for it in shown]
        axes.barh(range(len(shown)), widths, left=left, label=tier)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shown)), [_escape(it) for it in names])
    axes.invert_yaxis()
    axes.set_xlabel("% of the prompt tokens")
    axes.set_xlim(0, max([*left, 1.0]) * 1.05)
    if tiers_found(runs):
        _legend(figure, axes)
    return True


def _curves(figure: Figure, runs: Sequence[Swept], which: str) -> bool:
    """A colour for each policy, a style of line for each load."""
    axes = figure.subplots()
    colours, styles = _numbered(labels(_without_load(runs))), _numbered([_load(it) for it in runs])
    least: list[float] = []
    for run, name, colour, style in zip(runs[:LINES_MAX], labels(runs), colours, styles, strict=False):
        curve = getattr(run.summary, which).curve_s
        if curve:
            line = LINE_STYLES[style % len(LINE_STYLES)]
            axes.plot(CURVE, curve, label=_escape(name), color=f"C{colour % 10}", linestyle=line)
            least.append(min(curve))
    if least:
        limits = {getattr(it.summary.slo, f"{which}_s") for it in runs}
        if len(limits) == 1 and 0 < (limit := limits.pop()) < math.inf:
            axes.axhline(limit, color="0.6", linewidth=1, label=f" SLO: {_time(limit)}")
        if min(least) > 0:
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_time)
        axes.set_xlim(0, 100)
        axes.set_xlabel("percentile of the served requests")
        axes.set_ylabel("time")
        _legend(figure, axes)
    return bool(least)


def _goodput(figure: Figure, runs: Sequence[Swept]) -> bool:
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for run, name in zip(runs, labels(_without_load(runs)), strict=True):
        it = run.summary
        offered = it.requests / it.span_s if it.span_s > 0 else math.nan
        lines.setdefault(name, []).append((offered, it.goodput_rps, _load(run)))
    for name, points in list(lines.items())[:LINES_MAX]:
        ordered = sorted(points)
        axes.plot([it[0] for it in ordered], [it[1] for it in ordered], marker="o", label=_escape(name))
    axes.axline((0, 0), slope=1, color="0.7", linestyle=":", label=" all that arrive")
    most = max((_finite(it[0]) for points in lines.values() for it in points), default=0.0)
    axes.set_xlim(0, most * 1.1 or 1)
    axes.set_ylim(0, most * 1.1 or 1)
    axes.set_xlabel("requests that arrive, a second")
    axes.set_ylabel("requests within the SLO, a second")
    _legend(figure, axes)
    return True


def _without_load(runs: Sequence[Swept]) -> list[Swept]:
    return [Swept({name: value for name, value in it.settings.items() if name != "load"}, it.summary) for it in runs]


def _load(run: Swept) -> float:
    return float(run.settings.get("load", 1.0))


def _numbered(values: Sequence[object]) -> list[int]:
    """Equal values have equal numbers, from 0 in order of appearance."""
    numbers = {it: number for number, it in enumerate(dict.fromkeys(values))}
    return [numbers[it] for it in values]


def _balance(figure: Figure, runs: Sequence[Swept]) -> bool:
    return _over_time(figure, runs, "by_window", "busiest / mean (1 is even)")


def _queue(figure: Figure, runs: Sequence[Swept]) -> bool:
    return _over_time(figure, runs, "busiest_tokens", "tokens")


def _over_time(figure: Figure, runs: Sequence[Swept], which: str, unit: str) -> bool:
    """A panel for each load, for their time is not the same; a colour for each policy in all of them."""
    colours, names = _numbered(labels(_without_load(runs))), labels(_without_load(runs))
    known = [
        (run, name, colour)
        for run, name, colour in zip(runs[:LINES_MAX], names, colours, strict=False)
        if getattr(run.summary.balance, which)
    ]
    loads = sorted({_load(run) for run, _, _ in known})[-PANELS_MAX:]
    if not loads:
        return False
    figure.set_size_inches(SIZE_INCHES[0], max(SIZE_INCHES[1], PANEL_INCHES * len(loads)))
    panels = figure.subplots(len(loads), 1, sharey=True, squeeze=False)[:, 0]
    for axes, load in zip(panels, loads, strict=True):
        for run, name, colour in known:
            if _load(run) == load:
                balance = run.summary.balance
                shown = f"C{colour % 10}"
                axes.plot(balance.at_s, getattr(balance, which), label=_escape(name), color=shown, linewidth=1.2)
        axes.set_ylabel(unit)
        axes.yaxis.set_major_formatter("{x:,.4g}" if which == "by_window" else "{x:,.0f}")
        axes.set_title(f"load ×{load:g}" if len(loads) > 1 else "", loc="left", fontsize="medium")
    panels[-1].set_xlabel("seconds since the first arrival")
    _legend(figure, *panels)
    return True


def _legend(figure: Figure, *panels: Axes) -> None:
    """Beside what is drawn, not on it."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside right upper")


def _time(seconds: float, _: object = None) -> str:
    """`200 ms`, as the ticks of an axis are written."""
    size, unit = next((it for it in TIMES if seconds >= it[0]), TIMES[-1])
    return f"{seconds / size:.3g} {unit}"


def _escape(text: str) -> str:
    """Text that is drawn as it is: no formula, and not left out of the legend."""
    return " " + text.replace("$", r"\$")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
