"""The index's figures: what is timed is what is meant, and the goals stand beside the peer."""

from __future__ import annotations

import pytest

from headwater.bench import holdings, index
from headwater.bench.harness import Effort, Series, Unmeasured
from headwater.bench.holdings import Holdings, Span
from headwater.bench.turns import Cell, Samples


@pytest.mark.parametrize("make", [index.Ours, index.OursInSteps])
def test_turns_check_what_the_index_says_and_change_it_back(make: type[index.Ours]) -> None:
    ours = make()
    fleet = Holdings(ours, 4, 80, 20)
    filled = fleet.fill()
    assert filled["held"] == 4 * 80 and filled["longest_s"] > 0
    before = ours._index.counts()
    assert sorted(before.values()) == [80] * 4
    for verb in (*holdings.QUESTIONS, *holdings.EVENTS):
        answer = fleet.turn(verb, 20, 8)
        assert len(answer["seconds"]) == 8 and answer["cpu_s"] >= 0
        assert ours._index.counts() == before, verb


def test_a_wrong_answer_ends_the_turn() -> None:
    class Wrong(index.Ours):
        def lengths(self, answer: object) -> dict[int, int]:
            return {0: 1}

    fleet = Holdings(Wrong(), 2, 40, 20)
    fleet.fill()
    with pytest.raises(SystemExit, match="the index says"):
        fleet.turn("everyone", 20, 2)


def test_numbers_are_each_blocks_own() -> None:
    whole = holdings.numbers_of(Span(3, 0, 10), 63)
    assert holdings.numbers_of(Span(3, 4, 3), 63) == whole[4:7] and len(set(whole)) == 10


def test_without_the_peer_there_are_figures_of_ours() -> None:
    cell = Cell(200, 1, 2, "stored", "all")
    samples = {("stored/idle", "ours"): Samples(Series(1.0, [1e-5, 1e-5]), [1e-5, 2e-5])}
    found = index._compared("stored/idle", cell, samples, {"dynamo": "not installed"})
    rate = found["index/stored/idle/rate"]
    assert not isinstance(rate, Unmeasured) and rate.value == pytest.approx(200 / 1e-5) and rate.yardstick_value is None
    assert isinstance(index._compared("stored/idle", cell, {}, {"ours": "gone"})["index/stored/idle/p50"], Unmeasured)


def test_every_figure_is_measured() -> None:
    names = [spec.name for it in index.EXPERIMENTS for spec in it.specs]
    assert len(names) == len(set(names))
    found = index.measure_scale(Effort(1, quick=True), frozenset(it for it in names if it.startswith("index/8/")))
    assert {it for it in names if it.startswith("index/8/")} <= set(found)
    memory = found["index/8/memory"]
    assert not isinstance(memory, Unmeasured) and memory.value < 200
