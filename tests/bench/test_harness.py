"""The harness alone: a fake clock, fake work."""

import gc
from collections.abc import Callable

import pytest

from headwater.bench.harness import (
    Clocks,
    Contender,
    Goal,
    Reading,
    Series,
    Spec,
    conclude,
    interleave,
    percentile,
    quartiles,
)


class FakeTime:
    """A wall clock and a CPU clock that move only when work moves them."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = self.elsewhere_s = 0.0

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall_s, lambda: self.cpu_s)

    def work(self, wall_s: float, cpu_s: float = 0.0, elsewhere_s: float = 0.0) -> Callable[[], None]:
        def spend() -> None:
            self.wall_s += wall_s
            self.cpu_s += cpu_s
            self.elsewhere_s += elsewhere_s

        return spend


def recorded(name: str, log: list[str]) -> Contender:
    return Contender(name, lambda: log.append(name))


def test_rounds_start_with_another_contender_each_time() -> None:
    log: list[str] = []
    interleave([recorded(name, log) for name in "abc"], 4, FakeTime().clocks, warm_ups=0)
    assert "".join(log) == "abcbcacababc"


def test_warm_ups_run_first_and_are_not_counted() -> None:
    log: list[str] = []
    series = interleave([recorded(name, log) for name in "ab"], 1, FakeTime().clocks, warm_ups=2)
    assert "".join(log) == "ababab"
    assert len(series["a"].seconds) == len(series["b"].seconds) == 1


def test_each_call_of_a_turn_is_timed_alone() -> None:
    time = FakeTime()
    durations = iter([9.0, 1.0, 2.0, 3.0, 9.0, 4.0, 5.0, 6.0])  # 9.0: what happens between turns

    def work() -> None:
        time.wall_s += next(durations)

    def between() -> None:
        time.wall_s += next(durations, 0.0)

    between()
    series = interleave([Contender("a", work, calls=3)], 2, time.clocks, warm_ups=0, after_turn=between)
    assert series["a"].seconds == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_cpu_time_counts_both_processes_and_only_inside_turns() -> None:
    time = FakeTime()
    work = time.work(1.0, cpu_s=0.5, elsewhere_s=0.25)
    contender = Contender("a", work, amount=2.0, calls=2, cpu_elsewhere=lambda: time.elsewhere_s)
    series = interleave([contender], 3, time.clocks, warm_ups=1, after_turn=time.work(0.0, cpu_s=100.0))
    assert series["a"].cpu_s == pytest.approx(3 * 2 * 0.75)
    assert series["a"].rate(in_gb=True).cpu_s_per_gb == pytest.approx(0.75 / 2.0)
    assert series["a"].cpu(1e3).value == pytest.approx(750.0)


def test_nothing_is_collected_inside_a_turn_and_collection_is_on_again_after_a_failure() -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave([Contender("a", work)], 1, FakeTime().clocks, warm_ups=0)
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([1.0], 99, 1.0),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 102)), 99, 100),
        ([5.0, 4.0], 0, 4.0),
        ([5.0, 4.0], 100, 5.0),
    ],
)
def test_percentiles(samples: list[float], percent: int, expected: float) -> None:
    assert percentile(samples, percent) == expected


def test_quartiles() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0]) == (1.0, 2.5, 3.0)


def test_a_rate_is_amount_over_median_time_with_the_quartiles_in_order() -> None:
    series = Series(amount=8.0, seconds=[1.0, 2.0, 4.0, 8.0])
    assert series.rate(Series(amount=6.0, seconds=[3.0])) == Reading(8 / 3, 2.0, 8.0, 4, 2.0, None)


def test_a_latency_is_scaled_with_its_yardstick() -> None:
    series, bare = Series(1.0, [0.002, 0.001, 0.003]), Series(1.0, [0.001, 0.0005, 0.004])
    assert series.latency(1e3, yardstick=bare) == Reading(2.0, 1.0, 3.0, 3, 1.0, None)
    assert series.latency(1e3, 99).value == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("goal", "unit", "text", "good", "bad"),
    [
        (Goal(at_least=True, factor=1.25), "GB/s", ">= 1.25 x yardstick", 12.5, 12.49),
        (Goal(at_least=False, plus=0.25), "ms", "<= 0.25 ms", 0.25, 0.251),
        (Goal(at_least=False, factor=1.3, plus=10), "us", "<= 1.3 x yardstick + 10 us", 23.0, 23.1),
        (Goal(at_least=True, plus=2e6), "keys/s", ">= 2e+06 keys/s", 2e6, 2e6 - 1),
    ],
)
def test_goals(goal: Goal, unit: str, text: str, good: float, bad: float) -> None:
    assert goal.text(unit) == text
    assert goal.met(good, 10.0)
    assert not goal.met(bad, 10.0)


def test_a_relative_goal_without_its_yardstick_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="yardstick"):
        Goal(at_least=True, factor=2).met(1.0, None)


def test_a_figure_is_a_reading_held_against_its_spec() -> None:
    spec = Spec("a", "GB/s", "", Goal(at_least=True, factor=2), "memcpy")
    figure = conclude(spec, Reading(5.0, 4.0, 6.0, 3, 2.0, 0.1)).figure
    assert (figure.name, figure.value, figure.unit, figure.yardstick) == ("a", 5.0, "GB/s", "memcpy")
    assert (figure.yardstick_value, figure.ratio, figure.target) == (2.0, 2.5, ">= 2 x yardstick")
    assert (figure.met, figure.cpu_s_per_gb) == (True, 0.1)


def test_a_figure_without_goal_and_yardstick_claims_nothing() -> None:
    figure = conclude(Spec("a", "s", ""), Reading(5.0, 4.0, 6.0, 3)).figure
    assert (figure.yardstick, figure.yardstick_value, figure.ratio, figure.target, figure.met) == (None,) * 5
