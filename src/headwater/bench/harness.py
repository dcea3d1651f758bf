"""How a figure is measured: warm-up, then rounds in which every contender has its turn, then medians.

Theory of operation. A *contender* is a piece of work that is done again and again: the subject of a figure, or
its *yardstick*, the known thing that it is compared with. One *round* gives each contender one turn of `calls`
timed calls; the rounds start with another contender each time, so that whatever else happens on the machine
meets all of them alike. Nothing is drawn, logged or collected inside a turn. What is compared in the end are
medians over all rounds.

    Spec ──► Experiment.measure ──► interleave(contenders) ──► Series ──► Reading ──► Result
    what      sets up, checks        warm-up, rounds            seconds     numbers     with target
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GB = 1e9
MODEL = Path(".cache/models/SmolLM2-135M-Instruct")
"""Where `make setup` puts the model of the demo and of the suites that run engines."""
TRACES = Path("traces")
"""Where recorded workloads are looked for."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure has to reach: a limit of `factor` x yardstick + `plus`, in the figure's unit."""

    at_least: bool
    factor: float = 0.0
    plus: float = 0.0

    def limit(self, yardstick: float | None) -> float:
        """The limit in this run; assertion error for a goal relative to a yardstick that was not measured."""
        assert yardstick is not None or not self.factor, "a relative goal needs its yardstick"
        return self.factor * (yardstick or 0.0) + self.plus

    def met(self, value: float, yardstick: float | None) -> bool:
        """Whether a value reaches it."""
        limit = self.limit(yardstick)
        return value >= limit if self.at_least else value <= limit

    def text(self, unit: str) -> str:
        """The goal in words: `>= 1.25 x yardstick`, `<= 0.25 ms`."""
        parts = [f"{self.factor:.4g} x yardstick"] if self.factor else []
        if self.plus or not parts:
            parts.append(f"{self.plus:g} {unit}".strip())
        return f"{'>=' if self.at_least else '<='} {' + '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Spec:
    """One figure before it is measured; `name` is stable and what `--only` selects by."""

    name: str
    unit: str
    about: str
    goal: Goal | None = None
    yardstick: str | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: the machine-readable contract of `--json`, so fields are never renamed or dropped.

    `ratio` is value / yardstick_value; `target` is the goal in words; null stands for "there is none".
    """

    name: str
    value: float
    unit: str
    yardstick: str | None
    yardstick_value: float | None
    ratio: float | None
    target: str | None
    met: bool | None
    cpu_s_per_gb: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of a figure: median, quartiles, how many samples; the yardstick's median from the same rounds."""

    value: float
    low: float
    high: float
    samples: int
    yardstick_value: float | None = None
    cpu_s_per_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Why a figure cannot be had on this machine."""

    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """A figure and how far its samples spread."""

    spec: Spec
    figure: Figure
    reading: Reading


def conclude(spec: Spec, reading: Reading) -> Result:
    """Hold a reading against its yardstick and its goal."""
    yardstick = reading.yardstick_value
    figure = Figure(
        spec.name,
        reading.value,
        spec.unit,
        spec.yardstick,
        yardstick,
        reading.value / yardstick if yardstick else None,
        spec.goal.text(spec.unit) if spec.goal else None,
        spec.goal.met(reading.value, yardstick) if spec.goal else None,
        reading.cpu_s_per_gb,
    )
    return Result(spec, figure, reading)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where seconds come from: the wall, and the CPU time of all threads of this process."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


@dataclass(frozen=True, slots=True)
class Contender:
    """Work that takes turns: `amount` is what one call does (GB, keys, 1), `calls` how many a turn are timed.

    `cpu_elsewhere` reads the CPU seconds that other processes have spent on our behalf so far.
    """

    name: str
    work: Callable[[], object]
    amount: float = 1.0
    calls: int = 1
    cpu_elsewhere: Callable[[], float] | None = None


@dataclass(slots=True)
class Series:
    """All timed calls of one contender."""

    amount: float
    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def rate(self, yardstick: Series | None = None, *, in_gb: bool = False) -> Reading:
        """Amount a second; `in_gb` says that amounts are GB, so that CPU time a GB means something."""
        low, middle, high = (self.amount / it for it in reversed(quartiles(self.seconds)))
        cpu = self.cpu_s / (self.amount * len(self.seconds)) if in_gb else None
        beside = yardstick.rate().value if yardstick else None
        return Reading(middle, low, high, len(self.seconds), beside, cpu)

    def latency(self, scale: float, percent: int = 50, yardstick: Series | None = None) -> Reading:
        """Time a call in units of 1/`scale` seconds: a percentile of all calls, with the quartiles around it."""
        low, middle, high = (it * scale for it in quartiles(self.seconds))
        value = middle if percent == 50 else percentile(self.seconds, percent) * scale
        beside = yardstick.latency(scale, percent).value if yardstick else None
        return Reading(value, low, high, len(self.seconds), beside)

    def cpu(self, scale: float) -> Reading:
        """Mean CPU time a call, of this process and those that it works with."""
        value = self.cpu_s / len(self.seconds) * scale
        return Reading(value, value, value, len(self.seconds))


def percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that at least `percent` % of them do not exceed."""
    ordered = sorted(samples)
    return ordered[min(max(-(-percent * len(ordered) // 100) - 1, 0), len(ordered) - 1)]


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    return percentile(samples, 25), statistics.median(samples), percentile(samples, 75)


def interleave(
    contenders: Sequence[Contender],
    rounds: int,
    clocks: Clocks,
    *,
    warm_ups: int = 1,
    after_turn: Callable[[], object] = lambda: None,
) -> dict[str, Series]:
    """Give every contender `rounds` turns after `warm_ups` untimed ones; `after_turn` is called outside of them."""
    series = {it.name: Series(it.amount) for it in contenders}
    for _ in range(warm_ups):
        for it in contenders:
            _take_turn(it, Series(it.amount), clocks)
    for number in range(rounds):
        shift = number % len(contenders)
        for it in (*contenders[shift:], *contenders[:shift]):
            _take_turn(it, series[it.name], clocks)
            after_turn()
    return series


def _take_turn(contender: Contender, series: Series, clocks: Clocks) -> None:
    work, wall = contender.work, clocks.wall
    elsewhere = contender.cpu_elsewhere or (lambda: 0.0)
    seconds = [0.0] * contender.calls
    gc.collect()
    gc.disable()
    try:
        cpu_before = elsewhere() + clocks.cpu()  # in this order: what it costs to look elsewhere is not the work's
        for index in range(contender.calls):
            before = wall()
            work()
            seconds[index] = wall() - before
        series.cpu_s += clocks.cpu() + elsewhere() - cpu_before
    finally:
        gc.enable()
    series.seconds += seconds


@dataclass(frozen=True, slots=True)
class Effort:
    """How thorough to be: rounds, whether to use small amounts (`quick`), and whom to tell after each turn.

    `model` is the directory of the model that engines serve, `traces` that of recorded workloads; `prompts` is how many
    a measurement of memory sends, 0 for none.
    """

    rounds: int
    quick: bool = False
    clocks: Clocks = field(default_factory=Clocks)
    after_turn: Callable[[], object] = lambda: None
    model: Path = MODEL
    traces: Path = TRACES
    prompts: int = 0

    def interleave(self, contenders: Sequence[Contender], *, warm_ups: int = 1) -> dict[str, Series]:
        """`interleave` with this effort."""
        return interleave(contenders, self.rounds, self.clocks, warm_ups=warm_ups, after_turn=self.after_turn)


Readings = Mapping[str, Reading | Unmeasured]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Figures that share a set-up. `measure` is told which of them are wanted and returns at least those."""

    title: str
    specs: tuple[Spec, ...]
    measure: Callable[[Effort, frozenset[str]], Readings]


@dataclass(frozen=True, slots=True)
class Suite:
    """What `headwater bench NAME` measures."""

    name: str
    about: str
    experiments: tuple[Experiment, ...]

    @property
    def specs(self) -> list[Spec]:
        """All figures, in order."""
        return [spec for it in self.experiments for spec in it.specs]
