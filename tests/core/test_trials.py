"""Guesses at an instance's speed refuse nobody: a few try it, the others wait; what was learned is believed."""

from __future__ import annotations

from math import inf

import pytest

from headwater.core.admission import Admission, Outcome, Reason, Verdict
from headwater.core.predictions import Predictions
from headwater.core.rates import LEAST, Rates
from headwater.core.routing import queue_s
from headwater.core.trials import DOUBT_S, TRIALS, count_ended
from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Choice, Fleet, Instance, Parts

TIMES = EngineTimes(0.01, 1e-3, decode_fixed_s=0.05)
NEVER = -inf


def instance(prefill_s: float = NEVER, decode_s: float = NEVER, number: int = 0) -> Instance:
    it = Instance(number, TIMES, 100_000)
    it.prefill_learned_s, it.decode_learned_s = prefill_s, decode_s
    return it


def decided(
    it: Instance,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    tokens: int = 1000,
    waited_s: float = 0.0,
    now: float = 100.0,
    queue_s: float = 0.0,
    counted: bool = True,
) -> Verdict:
    ask = Ask("a", tokens, (), 16, 100, ttft_slo_s=ttft_s, tpot_slo_s=tpot_s, counted=counted)
    choice = Choice(0, 0, Parts(queue_s, prefill_s=TIMES.prefill_s(tokens)), tpot_s=0.05)
    return Admission(Predictions()).decide(ask, choice, Fleet({0: it}, now=now), waited_s)


@pytest.mark.parametrize(("goals"), [{"ttft_s": 0.5}, {"ttft_s": 10.0, "tpot_s": 0.01}], ids=["prefill", "decode"])
def test_a_few_go_where_only_a_guess_says_no_and_the_others_wait(goals: dict[str, float]) -> None:
    for waiting in range(TRIALS):
        it = instance()
        it.waiting_requests = waiting
        verdict = decided(it, queue_s=0.01 * waiting, **goals)
        assert verdict.outcome is Outcome.ADMIT, waiting
    it = instance()
    it.waiting_requests = TRIALS
    waits = decided(it, queue_s=0.04, **goals)
    assert (waits.outcome, waits.reason) == (Outcome.WAIT, Reason.TRIAL) and waits.after_s
    late = decided(it, queue_s=0.04, waited_s=10.0, **goals)
    assert late.outcome is Outcome.REJECT and late.after_s is not None, "it may come back: nobody knows"


@pytest.mark.parametrize(("goals"), [{"ttft_s": 0.5}, {"ttft_s": 10.0, "tpot_s": 0.01}], ids=["prefill", "decode"])
def test_a_guess_that_answers_do_not_change_keeps_nobody_out(goals: dict[str, float]) -> None:
    it = instance()
    it.waiting_requests = 100
    for _ in range(LEAST):
        assert decided(it, queue_s=10.0, **goals).outcome is Outcome.WAIT
        count_ended(it)
    assert decided(it, queue_s=10.0, **goals).outcome is Outcome.ADMIT
    it.running_requests, it.running_tokens = 2, 200_000
    assert decided(it, queue_s=10.0, **goals).outcome is not Outcome.ADMIT, "there is no room"
    it.running_requests = it.running_tokens = 0
    it.prefill_learned_s = it.decode_learned_s = 99.0
    assert decided(it, queue_s=10.0, **goals).outcome is not Outcome.ADMIT, "it is known now"


def test_what_requests_have_taught_is_believed() -> None:
    assert decided(instance(99.0), ttft_s=0.5) == (Outcome.REJECT, Reason.NEVER, None, *decided(instance())[3:])
    assert decided(instance(inf, inf), ttft_s=0.5).reason is Reason.NEVER
    slow = instance(99.0, 99.0)
    slow.running_requests = 1
    assert decided(slow, ttft_s=5.0, tpot_s=0.01).reason is Reason.NEVER
    slow.decode_learned_s = NEVER
    assert decided(slow, ttft_s=5.0, tpot_s=0.01).reason is Reason.TRIAL
    slow.running_requests = TRIALS
    assert decided(slow, ttft_s=5.0, tpot_s=0.01).outcome is Outcome.WAIT


def test_a_guess_at_decoding_is_none_at_prefill() -> None:
    it = instance(99.0, NEVER)
    assert decided(it, ttft_s=0.5).reason is Reason.NEVER


def test_what_was_learned_long_ago_is_doubted_if_nothing_is_there() -> None:
    assert decided(instance(99.0, 99.0), ttft_s=0.5, now=99.0 + DOUBT_S).reason is Reason.NEVER
    it = instance(99.0, 99.0)
    assert decided(it, ttft_s=0.5, now=100.0 + DOUBT_S).outcome is Outcome.ADMIT
    it.running_requests = 1
    assert decided(it, ttft_s=0.5, now=100.0 + DOUBT_S).reason is Reason.NEVER


def test_no_guess_makes_room() -> None:
    it = instance()
    it.running_requests, it.running_tokens = 2, 200_000
    assert decided(it, ttft_s=0.5).outcome is Outcome.WAIT
    assert decided(it, ttft_s=5.0).reason is Reason.FULL
    assert decided(it, ttft_s=5000.0, tokens=100_001).reason is Reason.NEVER


def test_a_guess_at_a_prompts_length_keeps_nobody_out() -> None:
    assert decided(instance(99.0, 99.0), ttft_s=0.5, counted=False).outcome is Outcome.ADMIT
    assert decided(instance(99.0, 99.0), ttft_s=0.5, queue_s=1.0, counted=False).outcome is Outcome.REJECT


def test_those_who_wait_in_one_step_are_waited_for_once() -> None:
    it = instance(99.0, 99.0)
    it.waiting_requests, it.waiting_tokens, it.shared_tokens = 400, 1000, 399 * 1000
    it.light_requests = 399
    verdict = decided(it, ttft_s=3.0, queue_s=400 * TIMES.prefill_fixed_s + 1000 * TIMES.prefill_token_s)
    assert verdict.outcome is Outcome.ADMIT and verdict.ttft_s == pytest.approx(0.01 + 1.0 + 1.01)


def test_kv_in_common_is_there_once() -> None:
    it = instance(99.0, 99.0)
    it.running_requests, it.running_tokens = 90, 90 * 4000
    assert decided(it, ttft_s=5.0).reason is Reason.FULL
    it.shared_tokens = 89 * 4000
    assert decided(it, ttft_s=5.0).outcome is Outcome.ADMIT


def test_kv_in_common_makes_nobody_wait() -> None:
    it = instance()
    it.running_requests, it.running_tokens = 50, 50 * 4000
    assert queue_s(it, 1000, 100) > 0
    it.shared_tokens = 49 * 4000
    assert queue_s(it, 1000, 100) == 0


def test_the_first_in_a_queue_is_half_done() -> None:
    rates = Rates(TIMES)
    for at in range(3):
        rates.prefilled(0, "m", 1000, 0, 1.01 * 1.5, 10.0 + at, queued_tokens=1000, queued_requests=1)
    assert rates.times(0, "m").prefill_token_s == pytest.approx(TIMES.prefill_token_s, rel=0.02)
