"""Admission: goodput at overload, what it promises to whom, no starvation, no waves, wrong predictions healed."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.admission import AFTER_MOST_S, CLASS_FORGOTTEN_S, Admission, Outcome, Reason, Verdict
from headwater.core.owed import ROOM_MOST_S, Owed
from headwater.core.predictions import Predictions, Quantity
from headwater.fleet import Ask, Choice, Fleet, Instance, Parts
from tests.core.serving import TIMES, Served, World, arrivals, goodput

SEED = 1
SECONDS = 40.0
TTFT_S, TPOT_S = 2.0, 0.15
CAPACITY = 4.0
"""Mixed requests a second that one engine serves without a queue that grows."""


def mixed(draw: random.Random) -> tuple[int, int]:
    """Mostly short prompts, and a few that are eight times as long: six tenths of the work."""
    tokens = draw.randrange(6000, 12_000) if draw.random() < 0.15 else draw.randrange(200, 2000)
    return tokens, 1 + int(draw.expovariate(1 / 63))


def same(draw: random.Random) -> tuple[int, int]:
    return 2000, 1 + int(draw.expovariate(1 / 63))


def new(**asked: float) -> Admission:
    return Admission(Predictions(), **asked)


def load_of(rate: float, lengths=mixed, seconds: float = SECONDS, **asked: float | None) -> list[Served]:  # type: ignore[no-untyped-def]
    return arrivals(SEED, rate, seconds, lengths, **{"ttft_slo_s": TTFT_S, "tpot_slo_s": TPOT_S} | asked)


@cache
def ran(load: float, lengths, admits: bool = True) -> list[Served]:  # type: ignore[no-untyped-def]
    """What became of all at so many times the load that fits."""
    served = load_of(load * 2 * CAPACITY, lengths)
    admission = new() if admits else None
    World().run(served, admission)
    assert admission is None or admission.serving == 0
    return served


@pytest.mark.parametrize("load", [2, 4])
@pytest.mark.parametrize("lengths", [mixed, same])
def test_goodput_at_overload_is_far_above_none(load: int, lengths) -> None:  # type: ignore[no-untyped-def]
    """And near that at the load that the fleet just bears; without admission, hardly anybody is served in time."""
    without, served, fits = ran(load, lengths, False), ran(load, lengths), ran(1, lengths)
    sent = [it for it in served if it.sent_s is not None]
    assert goodput(served, SECONDS) >= 1.3 * goodput(without, SECONDS), f"seed {SEED}"
    assert goodput(served, SECONDS) >= 0.8 * goodput(fits, SECONDS)
    assert sum(it.good for it in sent) >= 0.8 * len(sent)


def test_those_who_cost_most_are_turned_away_first() -> None:
    served = ran(4, mixed)
    sent = Counter(it.ask.tokens >= 6000 for it in served if it.sent_s is not None)
    asked = Counter(it.ask.tokens >= 6000 for it in served)
    assert sent[True] / asked[True] < 0.3 * sent[False] / asked[False]


@pytest.mark.parametrize("tpot_s", [TPOT_S, None])
def test_long_prompts_are_not_starved(tpot_s: float | None) -> None:
    """With a share they get in all the time, and it costs little; without one, once it is crowded, hardly ever."""

    def run(share: float) -> tuple[list[float], float]:
        served = load_of(4 * 2 * CAPACITY, seconds=60.0, tpot_slo_s=tpot_s)
        World().run(served, new(long_share=share))
        longs = [it.sent_s for it in served if it.sent_s is not None and it.ask.tokens >= 6000]
        return [it for it in longs if it > 5], goodput(served, 60.0)

    (shared, good), (starved, best) = run(0.1), run(0.0)
    gaps = [later - before for before, later in zip([5.0, *shared], [*shared, 60.0], strict=True)]
    assert max(gaps) < 20, f"{shared}"
    assert len(shared) >= 1.5 * len(starved), f"{shared}, {starved}"
    assert good > 0.8 * best


def test_underload_rejects_nothing() -> None:
    served = load_of(0.4 * 2 * CAPACITY, ttft_slo_s=5.0, tpot_slo_s=0.3)
    World().run(served, new())
    assert all(it.verdicts[0].outcome is Outcome.ADMIT for it in served), f"seed {SEED}"


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_wrong_predictions_heal(factor: float) -> None:
    """Engines take `factor` times what is predicted: goodput is near what a fleet of such engines has when known."""
    rate = 2 * 2 * CAPACITY / factor
    served = load_of(rate, same, tpot_slo_s=0.3)
    admission = new()
    World(factor=factor).run(served, admission)
    late = [it for it in served if it.sent_s is not None and it.arrived_s > 15]
    assert sum(it.good for it in late) >= 0.85 * len(late)
    # A fleet whose engines are known, with its clock and its SLOs scaled, is the same fleet.
    known = load_of(2 * 2 * CAPACITY, same, SECONDS / factor, ttft_slo_s=TTFT_S / factor, tpot_slo_s=0.3 / factor)
    World().run(known, new())
    assert goodput(served, SECONDS) >= 0.65 * goodput(known, SECONDS / factor) / factor
    margin = admission.predictions.margin(Quantity.TTFT, 0, SECONDS)
    assert margin > 1.7 if factor > 1 else margin < 1.2


def reacts(ask: Ask, choice: Choice, fleet: Fleet, _: float) -> Verdict:
    """Early rejection by the decode load of now."""
    it = fleet.instances[choice.decode]
    tpot_s = TIMES.decode_s(it.running_requests + 1, it.running_tokens + ask.tokens)
    fits = tpot_s <= (ask.tpot_slo_s or math.inf)
    return Verdict(Outcome.ADMIT if fits else Outcome.REJECT, Reason.FITS if fits else Reason.TPOT, None)


def test_no_waves_where_reacting_makes_them() -> None:
    """Requests decode three seconds after they were admitted; whoever looks at decoding alone goes up and down."""

    def run(predicts: bool) -> tuple[float, float]:
        asked = {"output_tokens": 200, "ttft_slo_s": 4.0, "tpot_slo_s": 0.02}
        served = load_of(20.0, lambda draw: (100, 1 + int(draw.expovariate(1 / 199))), 80.0, **asked)
        world = World(engines=1, delay_s=3.0)
        if predicts:
            world.run(served, new())
        else:
            world.run(served, decide=reacts)
        counts = Counter(int(it.sent_s) for it in served if it.sent_s is not None)
        each = [counts[at] for at in range(30, 75)]
        return statistics.pstdev(each) / max(statistics.mean(each), 1e-9), goodput(served, 80.0)

    (waves, good), (naive_waves, naive_good) = run(True), run(False)
    assert waves < 0.6 * naive_waves, f"{waves}, {naive_waves}"
    assert good > 1.3 * naive_good, f"{good}, {naive_good}"


def test_who_is_told_to_come_back_fits_then() -> None:
    """Nobody else comes: at the time that the verdict names, it is admitted and served in time."""
    served = load_of(40.0, same, 10.0, tpot_slo_s=None)
    last = Served(replace(served[-1].ask, request="last"), 10.0, 10)
    World().run([*served, last], new(), retries=1)
    assert [it.outcome for it in last.verdicts] == [Outcome.REJECT, Outcome.ADMIT]
    assert 0 < (last.verdicts[0].after_s or 0) < AFTER_MOST_S
    assert last.good


# --- single decisions


def fleet_of(**it: Any) -> Fleet:
    return Fleet({0: replace(Instance(0, TIMES, 100_000), **it)}, now=1.0)


def to(queue_s: float = 0.0, prefill_s: float = 0.1, tpot_s: float = 0.02) -> Choice:
    return Choice(0, 0, Parts(queue_s=queue_s, prefill_s=prefill_s), tpot_s=tpot_s)


def ask(name: str = "a", **asked: float) -> Ask:
    return Ask(name, 1000, (), 64, **{"output_tokens": 100} | asked)  # type: ignore[arg-type]


def decided(one: Ask, choice: Choice | None, fleet: Fleet, admission: Admission | None = None) -> Verdict:
    return (admission if admission is not None else new()).decide(one, choice, fleet)


def test_nobody_and_never() -> None:
    assert decided(ask(), None, fleet_of())[:3] == (Outcome.REJECT, Reason.NOBODY, None)
    assert decided(ask(ttft_slo_s=0.05), to(), fleet_of())[:3] == (Outcome.REJECT, Reason.NEVER, None)
    slow = ask(ttft_slo_s=0.5, tpot_slo_s=0.005)
    assert decided(slow, to(queue_s=0.2), fleet_of())[:3] == (Outcome.REJECT, Reason.NEVER, None)
    assert decided(replace(ask(), tokens=200_000), to(), fleet_of())[:3] == (Outcome.REJECT, Reason.NEVER, None)


def test_an_idle_instance_takes_what_would_fit_whatever_the_margin() -> None:
    predictions = Predictions()
    for _ in range(100):
        predictions.observe(Quantity.TTFT, 0, 0.1, 10.0, 1.0)
    one, admission = ask(ttft_slo_s=0.5), Admission(predictions)
    assert decided(one, to(), fleet_of(), admission)[:2] == (Outcome.ADMIT, Reason.IDLE)
    assert decided(one, to(), fleet_of(running_requests=1, running_tokens=10), admission).outcome is Outcome.REJECT


def test_without_slos_everybody_is_taken_that_has_room() -> None:
    one = ask()
    assert (
        decided(one, to(queue_s=100.0), fleet_of(running_requests=50, running_tokens=50_000)).outcome is Outcome.ADMIT
    )
    full = decided(replace(one, tokens=5000), to(), fleet_of(running_requests=50, running_tokens=99_900))
    assert full[:2] == (Outcome.WAIT, Reason.FULL)


def test_the_queue_counts_with_what_was_waited() -> None:
    fleet, one = fleet_of(running_requests=1, running_tokens=1000), ask(ttft_slo_s=1.0)
    assert decided(one, to(queue_s=0.5), fleet).outcome is Outcome.ADMIT
    late = new().decide(one, to(queue_s=0.5), fleet, waited_s=0.6)
    assert late[:2] == (Outcome.REJECT, Reason.TTFT)
    assert late.after_s == pytest.approx(0.2)


def test_decoders_that_will_be_gone_do_not_count_and_those_that_will_come_do() -> None:
    one = ask(ttft_slo_s=10.0, tpot_slo_s=0.03, output_tokens=50)
    crowd = fleet_of(running_requests=60, running_tokens=60_000)
    now = decided(one, Choice(0, 0, Parts(prefill_s=0.1), tpot_s=0.045), crowd)
    assert now[:2] == (Outcome.WAIT, Reason.TPOT)
    assert decided(one, Choice(0, 0, Parts(prefill_s=0.1, fetch_s=5.0), tpot_s=0.045), crowd).outcome is Outcome.ADMIT
    coming = fleet_of(waiting_requests=60)
    assert decided(one, Choice(0, 0, Parts(prefill_s=0.1, queue_s=0.1), tpot_s=0.01), coming).reason is Reason.TPOT


@pytest.mark.parametrize(("priority", "outcome"), [(0, Outcome.WAIT), (1, Outcome.ADMIT)])
def test_nobody_of_its_priority_or_above_is_pushed_over(priority: int, outcome: Outcome) -> None:
    """A long prefill would take 15 ms a token from answers that have 30 ms; lower priorities are no reason."""
    admission, fleet = new(), fleet_of()
    admission.admitted(ask("old", tpot_slo_s=0.03), to(), Verdict(Outcome.ADMIT, Reason.FITS), fleet)
    fleet.instances[0].running_requests, fleet.instances[0].running_tokens = 10, 10_000
    fleet.now += 1.0
    admission.started("old", fleet.now)
    one = ask("new", priority=priority)
    assert admission.decide(one, to(prefill_s=0.01), fleet).outcome is Outcome.ADMIT
    verdict = admission.decide(one, to(prefill_s=1.5), fleet)
    assert verdict.outcome is outcome
    if outcome is Outcome.WAIT:
        assert verdict.reason is Reason.OTHERS
        admission.finished("old", 100, fleet.now + 1)
        assert admission.decide(one, to(prefill_s=1.5), fleet).outcome is Outcome.ADMIT


def test_lower_classes_leave_room_for_higher_ones() -> None:
    admission, fleet = new(), fleet_of(running_requests=1, running_tokens=1000)
    low, high = ask("low", priority=0), ask("high", priority=1, ttft_slo_s=1.0)
    assert admission.decide(low, to(queue_s=0.9), fleet).outcome is Outcome.ADMIT
    assert admission.decide(high, to(queue_s=0.2), fleet).outcome is Outcome.ADMIT
    verdict = admission.decide(low, to(queue_s=0.9), fleet)
    assert verdict[:2] == (Outcome.WAIT, Reason.CLASSES)
    # 1.0 with itself, and two of 0.1 after it.
    assert verdict.after_s == pytest.approx(0.2)
    assert admission.decide(low, to(queue_s=0.7), fleet).outcome is Outcome.ADMIT
    # The higher class has no need of it any more; nor did it ever wait for the lower one's.
    assert admission.decide(high, to(queue_s=0.89), fleet).outcome is Outcome.ADMIT
    fleet.now += CLASS_FORGOTTEN_S + 1
    assert admission.decide(low, to(queue_s=0.9), fleet).outcome is Outcome.ADMIT


def test_classes_are_strict_under_overload() -> None:
    """Twice what fits of a low class, half of what fits of a high one: the high one hardly notices."""
    low = load_of(2 * 2 * CAPACITY, same, priority=0, ttft_slo_s=8.0)
    high = [replace(it, ask=replace(it.ask, request=f"h{it.ask.request}", priority=1, ttft_slo_s=1.0)) for it in
            arrivals(SEED + 1, CAPACITY / 2, SECONDS, same, ttft_slo_s=1.0, tpot_slo_s=TPOT_S)]  # fmt: skip
    both = sorted([*low, *high], key=lambda it: it.arrived_s)
    World().run(both, new())
    assert sum(it.good for it in high) >= 0.8 * len(high), f"seed {SEED}"
    assert sum(it.good for it in low) >= 0.2 * len(low)
    mixed_up = [replace(it, ask=replace(it.ask, priority=0), sent_s=None, first_s=None, last_s=None) for it in both]
    World().run(mixed_up, new())
    assert sum(it.good for it in mixed_up if it.ask.request[0] == "h") <= 0.6 * len(high)


def test_those_turned_away_are_not_told_to_come_back_all_at_once() -> None:
    admission, fleet = new(), fleet_of(running_requests=1, running_tokens=1000)
    told = [admission.decide(ask(f"{at}", ttft_slo_s=1.0), to(queue_s=1.0), fleet).after_s for at in range(1000)]
    assert told == sorted(told)  # type: ignore[type-var]
    assert told[20] == pytest.approx(21 * 0.1)
    assert told[-1] == AFTER_MOST_S


def test_what_left_is_forgotten() -> None:
    admission, fleet = new(), fleet_of()
    for at in range(3):
        admission.admitted(ask(f"{at}", tpot_slo_s=0.1), to(), Verdict(Outcome.ADMIT, Reason.FITS), fleet)
    admission.started("0", 2.0)
    admission.finished("1", None, 3.0)
    assert admission.serving == 2
    admission.left(0)
    assert admission.serving == 0
    admission.started("2", 4.0)
    admission.finished("2", 100, 4.0)
    assert admission.predictions.calibration(Quantity.TPOT).count == 0
    assert decided(ask(), to(), fleet, admission).reason is Reason.IDLE
    assert "0 in service" in repr(admission)


def usual(owed: Owed, own_s: float) -> None:
    for _ in range(500):
        owed.admitted(0, own_s, pays=False)


def test_only_long_prompts_are_owed() -> None:
    owed = Owed(0.1)
    usual(owed, 0.1)
    owed.refused(0, 1.0, 1.0, 8, queued=False)
    assert owed.credit_s == pytest.approx(0.1)
    # Neither what is short of the longest by more than half, nor what is hardly longer than those who get in.
    owed.refused(0, 0.4, 2.0, 8, queued=False)
    usual(owed, 0.3)
    owed.refused(0, 0.8, 3.0, 8, queued=False)
    assert owed.credit_s == pytest.approx(0.1)
    owed.credit_s = 5.0
    assert owed.pays(1.0) and not owed.pays(0.4) and not owed.pays(0.8)


def test_room_is_paid_for_once() -> None:
    owed = Owed(0.1)
    owed.credit_s = 5.0
    for at in range(3):
        owed.refused(0, 1.0, 1.0 + at / 10, 80, queued=True)
        assert owed.rooms == {0: (1.0, pytest.approx(1.0 + ROOM_MOST_S))}
    assert owed.credit_s == pytest.approx(5.0 + 0.3 - 1.0)
    owed.admitted(0, 0.1, pays=False)
    assert owed.rooms
    owed.admitted(0, 1.0, pays=False)
    assert not owed.rooms


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["decide", "started", "finished", "cancelled", "left"]),
        st.integers(0, 8),
        st.floats(0, 5),
        st.floats(0, 5),
        st.sampled_from([None, 0.01, 0.1, 1.0]),
        st.integers(0, 2),
    ),
    max_size=50,
)


@given(CALLS)
@settings(max_examples=60, deadline=None)
def test_any_calls_leave_nothing_behind(calls: list[tuple[str, int, float, float, float | None, int]]) -> None:
    """Verdicts are sane whatever happened; when all have ended, the books are empty."""
    admission, fleet, serving = new(), fleet_of(), set[str]()
    for what, number, queue_s, prefill_s, slo_s, priority in calls:
        fleet.now += 0.1
        name = str(number)
        if what == "decide" and name not in serving:
            one = Ask(name, 1000, (), 64, ttft_slo_s=slo_s, tpot_slo_s=slo_s, priority=priority)
            verdict = admission.decide(one, to(queue_s, prefill_s), fleet, waited_s=queue_s / 10)
            assert verdict.after_s is None or 0 <= verdict.after_s < math.inf
            assert (verdict.outcome is Outcome.ADMIT) == (verdict.reason in (Reason.FITS, Reason.IDLE, Reason.OWED))
            assert verdict.after_s is not None or verdict.reason is Reason.NEVER
            if verdict.outcome is Outcome.WAIT:
                assert verdict.after_s
            if verdict.outcome is Outcome.ADMIT:
                admission.admitted(one, to(queue_s, prefill_s), verdict, fleet)
                serving.add(name)
        elif what == "started":
            admission.started(name, fleet.now)
        elif what in ("finished", "cancelled"):
            admission.finished(name, 10 if what == "finished" else None, fleet.now)
            serving.discard(name)
        elif what == "left" and number == 0:
            admission.left(0)
            serving.clear()
        assert admission.serving == len(serving)
    for name in serving:
        admission.finished(name, 5, fleet.now)
    assert decided(ask(), to(), fleet, admission).reason is Reason.IDLE
