"""A Conductor that knows nothing yet: what it guesses refuses nobody, and what it learns is believed. What many have in
common is counted once, and of a prompt that nobody has counted only the load is judged."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headwater.conductor.job import Parsed
from headwater.core.loads import Published, Totals
from headwater.core.predictions import Quantity
from headwater.core.rates import USUAL, Rates
from headwater.core.trials import TRIALS
from headwater.enginetimes import EngineTimes
from headwater.fleetfile.model import Slo
from tests.conductor.brain.rig import BrainRig, Client, prompt
from tests.conductor.brain.rig import spec as made

SEED = 20261130
FAST = EngineTimes(0.002, 1e-5, decode_fixed_s=0.004, decode_request_s=2e-5, decode_kv_s=1e-9, step_tokens=4096)
"""Ten times as fast as is usual."""
SLOW = EngineTimes(0.2, 2e-3, decode_fixed_s=0.2, decode_request_s=1e-3, step_tokens=4096)
GUESS = {"prior": Rates(USUAL)}


def beginning(count: int = 2, **more: Any) -> BrainRig:
    """A Conductor that was just started."""
    return BrainRig(count, **({"prior": Rates(USUAL)} | more))


def codes(clients: list[Client]) -> list[str]:
    return [it.refusal.code for it in clients if it.refusal is not None]


def in_time(client: Client, slo_s: float) -> bool:
    return bool(client.targets) and client.job.first_s - client.job.arrived_s <= slo_s


def test_a_goal_that_only_a_guess_cannot_meet_is_tried_and_then_kept() -> None:
    goal_s = 0.1  # 4000 tokens take 0.42 s at the usual speed, and 0.042 at this one
    rig = beginning(times=FAST, slo=Slo(ttft_s=goal_s))
    clients = []
    for number in range(200):
        clients.append(rig.take(prompt(number, 4000)))
        rig.timers.run(0.03)
    rig.timers.run(10.0)
    assert rig.is_still() and codes(clients) == [] and all(in_time(it, goal_s) for it in clients)
    assert all(it.prefill_learned_s > 0 and it.decode_learned_s > 0 for it in rig.brain.fleet.instances.values())


def test_a_goal_on_decoding_is_tried_too_and_learned_before_answers_end() -> None:
    rig = beginning(1, times=FAST, slo=Slo(tpot_s=0.01), quiet=True)
    clients = [rig.take(prompt(number), output=2000) for number in range(TRIALS + 4)]
    assert sum(bool(it.targets) for it in clients) == TRIALS and codes(clients) == []
    first = clients[0]
    rig.start(first)
    for tokens in (33, 66, 99):
        rig.timers.run(33 * 0.004)
        first.job.answered_tokens = tokens
        rig.brain.progressed(first.job)
    rig.timers.run(1.0)
    assert all(it.targets for it in clients), "4 ms a token were learned from a part of one answer"
    for it in clients:
        rig.finish(it, 2000)
    assert rig.is_still()


@pytest.mark.parametrize("how", ["one piece", "two answers"])
@pytest.mark.parametrize("slo", [Slo(ttft_s=0.1), Slo(ttft_s=10.0, tpot_s=0.005)], ids=["prefill", "decode"])
def test_answers_that_teach_nothing_end_what_a_guess_keeps_out(slo: Slo, how: str) -> None:
    rig = beginning(times=FAST, slo=slo, quiet=True)
    clients, free_s = [], {0: 0.0, 1: 0.0}

    def serve(client: Client) -> None:
        number, now = client.at, rig.timers.now
        begun_s = free_s[number] = max(free_s[number], now) + FAST.prefill_s(4000)
        rig.timers.call_later(begun_s - now + 200 * 0.0045, lambda: rig.finish(client, 200))

    for number in range(200):
        job: dict[str, Any] = {"stream": False} if how == "one piece" else {"n": 2}
        client = Client(rig.job(prompt(number, 4000), output=200, **job))
        client.on_sent = serve
        rig.brain.take(client.job, client.sent, client.refused)
        clients.append(client)
        rig.timers.run(0.03)
    rig.timers.run(60.0)
    assert rig.is_still() and codes(clients[60:]) == [], "an answer takes a second, and three are enough"
    assert all(it.prefill_learned_s == float("-inf") for it in rig.brain.fleet.instances.values())
    seen = []
    for number in range(200, 212):
        rig.quiet = False
        seen.append(rig.take(prompt(number, 4000), output=20))
        rig.timers.run(1.0)
    assert codes(seen) == [] and all(it.prefill_learned_s > 0 for it in rig.brain.fleet.instances.values())


def test_what_was_learned_is_believed_and_doubted_later() -> None:
    rig = beginning(1, times=SLOW, slo=Slo(ttft_s=1.0))
    clients = []
    for number in range(8):
        clients.append(rig.take(prompt(number)))  # 2 s each
        rig.timers.run(4.0)
    assert codes(clients) == ["slo_unreachable"] * 5, "three are enough to know"
    rig.timers.run(60.0)
    assert rig.take(prompt(50)).targets, "it may be faster by now"


def test_a_crowd_at_the_beginning_is_let_in_a_few_at_a_time() -> None:
    rig = beginning(2, times=SLOW, slo=Slo(ttft_s=1.0), quiet=True)
    clients = [rig.take(prompt(number, 4000)) for number in range(100)]
    assert sum(bool(it.targets) for it in clients) == 2 * TRIALS and codes(clients) == []
    rig.timers.run(1.5)
    assert codes(clients) == ["overloaded"] * (100 - 2 * TRIALS), "their goal is missed, and nobody knows the speed"
    for it in clients:
        if it.targets:
            rig.finish(it, whole=False)
    assert rig.is_still()


def test_others_loads_bound_what_is_tried() -> None:
    rig = beginning(1, slo=Slo(ttft_s=0.1), quiet=True)
    rig.brain.heard(Published("b", 1, {0: Totals(TRIALS, 100, 0, 0)}))
    client = rig.take(prompt(1, 4000))
    assert client.waits
    rig.brain.heard(Published("b", 2, {}))
    rig.timers.run(0.09)
    assert client.targets


def test_a_replaced_instance_is_a_guess_again() -> None:
    rig = beginning(1, times=FAST, slo=Slo(ttft_s=0.5))
    clients = [rig.take(prompt(number)) for number in range(10)]
    rig.timers.run(5.0)
    assert codes(clients) == [] and rig.brain.fleet.instances[0].prefill_learned_s > 0
    rig.roster.unregister("i0", 1)
    rig.timers.run(1.0)
    number = rig.roster.register(made("j0", capacity_tokens=1 << 20), 2)
    it = rig.brain.fleet.instances[number]
    assert it.prefill_learned_s == it.decode_learned_s == float("-inf")
    assert it.times.prefill_token_s < USUAL.prefill_token_s / 3, "its kind's is the better guess"


def test_true_overload_is_shed_from_the_first_second() -> None:
    print(f"seed {SEED}")
    times, draw, goal_s = EngineTimes(0.002, 1e-4, decode_fixed_s=0.004), random.Random(SEED), 0.5
    rig = beginning(times=times, slo=Slo(ttft_s=goal_s))
    clients = []
    for number in range(800):  # 400 tokens take 42 ms: 50 a second can be served
        clients.append(rig.take(prompt(number, 400), output=4))
        rig.timers.run(draw.expovariate(200))
    rig.timers.run(30.0)
    served = [it for it in clients if it.targets]
    good = sum(in_time(it, goal_s) for it in served)
    assert rig.is_still() and set(codes(clients)) == {"overloaded"}
    assert len(served) > 150 and good >= 0.9 * len(served), f"{good} of {len(served)} in time"


# ---- what many have in common


@pytest.mark.parametrize("tail", [0, 16], ids=["equal", "shared"])
@pytest.mark.parametrize("count", [1, 8])
def test_a_herd_with_a_goal_is_one_prompts_work(count: int, tail: int) -> None:
    rig = BrainRig(count, times=USUAL, slo=Slo(ttft_s=2.0))
    common = prompt(1, 1000)
    clients = []
    for number in range(300):
        clients.append(rig.take(common + prompt(100 + number, tail), output=5))
        rig.timers.run(0.0005)
    rig.timers.run(60.0)
    assert codes(clients) == [] and rig.is_still()
    whole = sum(it > 500 for each in rig.computed.values() for it in each)
    assert whole <= max(2, min(count, 4)) and all(in_time(it, 2.0) for it in clients)
    assert not any(it.light_requests for it in rig.brain.fleet.instances.values())


def test_kv_that_many_share_is_counted_once_and_given_back() -> None:
    rig = BrainRig(1, slo=Slo(ttft_s=2.0), capacity_tokens=40_000)
    common = prompt(1, 4000)
    clients = [rig.take(common + prompt(100 + number, 32), output=200) for number in range(150)]
    rig.timers.run(1.2)
    rig.brain.loads.refresh(rig.timers.now)
    it = rig.brain.fleet.instances[0]
    assert codes(clients) == [] and it.running_tokens > 10 * it.capacity_tokens
    assert it.running_tokens - it.shared_tokens < it.capacity_tokens
    rig.timers.run(60.0)
    assert rig.is_still() and it.shared_tokens == 0 and not len(rig.brain.loads._common)


# ---- prompts that nobody has counted


def media(rig: BrainRig, size: int, **job: Any) -> Client:
    client = Client(rig.job(None, body=b"x" * size, **job))
    assert isinstance(client.job.parsed, Parsed)
    client.job.parsed.media = True
    rig.brain.take(client.job, client.sent, client.refused)
    return client


@pytest.mark.parametrize("size", [10_000, 1_000_000, 15_000_000])
def test_a_guess_at_a_prompts_length_refuses_nobody(size: int) -> None:
    rig = BrainRig(2, quiet=True, capacity_tokens=1000, slo=Slo(ttft_s=0.05))
    clients = [rig.take(None, body=b"x" * size), media(rig, size), rig.take(None, body=b"x" * size)]
    assert [bool(it.targets) for it in clients] == [True] * 3
    assert {it.at for it in clients} == {0, 1}, "they go by load"
    for it in clients:
        rig.start(it)
        rig.finish(it)
    assert rig.is_still() and rig.brain.admission is not None
    assert rig.brain.admission.predictions.calibration(Quantity.TTFT).count == 0, "no guess of theirs was wrong"


def test_images_teach_nothing_about_speed() -> None:
    rig = beginning(1, quiet=True)
    for _ in range(5):
        client = media(rig, 1_000_000)
        rig.timers.run(0.1)
        rig.start(client)
        rig.finish(client)
    assert not rig.brain.learning.rates.known(0)[0]


def test_one_of_unknown_length_that_waits_goes_on_when_instances_change() -> None:
    rig = BrainRig(1, quiet=True, capacity_tokens=100_000)
    first = [rig.take(prompt(number, 4000)) for number in range(30)]
    waits = rig.take(None, body=b"x" * 1_000_000)
    assert waits.waits
    rig.brain.fleet.instances[0].capacity_tokens = 1000
    rig.timers.run(5.0)
    assert waits.waits, "it is full still"
    for it in first:
        if it.targets:
            rig.finish(it)
        else:
            rig.brain.drop(it.job)
    rig.timers.run(0.2)
    assert waits.targets and rig.brain.fleet.instances[0].waiting_tokens < 1000
    rig.finish(waits, whole=False)
    assert rig.is_still()
