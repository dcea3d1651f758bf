"""Requests whose prompt is computed at one instance and answered at another."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headwater.conductor.brain import HANDOFF_S
from headwater.enginetimes import EngineTimes
from headwater.fleet import Role
from tests.conductor.brain.rig import BLOCK, TIMES, BrainRig, Client, prompt

SEED = 20261130


def pair(**more: Any) -> BrainRig:
    """Number 0 computes prompts, 1 answers them; both are on one node."""
    rig = BrainRig(2, quiet=True, **more)
    for number, role in enumerate((Role.PREFILL, Role.DECODE)):
        it = rig.roster.instances()[number]
        it.role, it.node = role, 0
    return rig


class Told:
    """Counts how often it was told to go on."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def hand_over(rig: BrainRig, client: Client, why: str = "") -> Told:
    told = Told()
    rig.brain.prefilled(client.job, why, told)
    return told


def loads(rig: BrainRig) -> list[tuple[int, int]]:
    rig.brain.loads.refresh(rig.timers.now)
    return [(it.waiting_requests, it.running_requests) for it in rig.brain.fleet.instances.values()]


def test_headers_name_both() -> None:
    target = pair().take(prompt(1)).targets[0]
    assert (target.prefill, target.decode) == (0, 1)
    assert target.headers[b"x-headwater-instance"] == b"i1" and target.headers[b"x-headwater-prefill"] == b"i0"


def test_the_first_leg_is_over_when_it_says_so() -> None:
    rig = pair()
    client = rig.take(prompt(1))
    assert loads(rig) == [(1, 0), (0, 0)]
    rig.timers.run(0.1)
    assert hand_over(rig, client).count == 1, "nobody would tell whether it is stored"
    assert loads(rig) == [(0, 0), (0, 1)]
    rig.timers.run(0.2)
    rig.start(client)
    assert loads(rig) == [(0, 0), (0, 1)]
    (flight,) = rig.brain._flights.values()
    assert flight.decoders == (1, 900), "it is not counted twice"
    rig.finish(client, 30)
    assert rig.is_still() and rig.timers.pending() == 0
    told = rig.brain.explained(client.job.id)
    assert told is not None
    assert (told["took"]["prefilled_s"], told["took"]["first_token_s"]) == pytest.approx((0.1, 0.3))
    rows = {it["name"]: it for it in rig.brain.state()["instances"]}
    assert [rows[name]["ended_requests"] for name in ("i0", "i1")] == [1, 1]
    assert [rows[name]["prompt_tokens"] for name in ("i0", "i1")] == [900, 0]


def test_the_second_leg_waits_until_the_first_ones_kv_is_stored() -> None:
    rig = pair()
    rig.sight.in_store = False
    client = rig.take(prompt(1))
    told = hand_over(rig, client)
    rig.timers.run(0.02)
    assert told.count == 0
    rig.sight.in_store = True
    rig.timers.run(0.04)
    assert told.count == 1 and rig.counts.numbers["handoffs", "stored"] == 1
    rig.finish(client)
    assert rig.timers.pending() == 0


@pytest.mark.parametrize("tokens", [200, 50_000])
def test_but_not_longer_than_computing_it_takes_nor_for_ever(tokens: int) -> None:
    rig = pair()
    rig.sight.in_store = False
    client = rig.take(prompt(1, tokens))
    told, began_s = hand_over(rig, client), rig.timers.now
    while not told.count:
        assert rig.timers.step()
    assert rig.timers.now - began_s == pytest.approx(min(TIMES.prefill_s(tokens), HANDOFF_S), rel=0.01)
    assert rig.counts.numbers["handoffs", "late"] == 1
    rig.finish(client)


def test_who_leaves_meanwhile_is_not_handed_over() -> None:
    rig = pair()
    rig.sight.in_store = False
    client = rig.take(prompt(1))
    told = hand_over(rig, client)
    rig.finish(client, 0, whole=False)
    rig.timers.run(2.0)
    assert told.count == 0 and rig.is_still() and rig.timers.pending() == 0


def test_a_first_leg_that_is_lost_is_told_and_nothing_is_held_there() -> None:
    rig = pair()
    troubles: list[tuple[int, str]] = []

    class Health:
        def trouble(self, number: int, why: str) -> None:
            troubles.append((number, why))

        def share(self, number: int, now: float) -> float:
            return 1.0

        def out_s(self, number: int, now: float) -> float | None:
            return None

        def state(self, number: int) -> dict[str, Any]:
            return {}

    rig.brain.choosing.health = Health()
    rig.sight.in_store = False
    client = rig.take(prompt(1))
    assert hand_over(rig, client, "refused").count == 1, "there is nothing to wait for"
    assert troubles == [(0, "refused")]
    assert {number for places in rig.sight.places.values() for number in places} == {1}
    rig.start(client)
    rig.finish(client)
    assert rig.is_still()


def test_a_second_leg_that_is_lost_takes_nothing_from_the_first() -> None:
    rig = pair(retries=0)
    client = rig.take(prompt(1))
    hand_over(rig, client)
    rig.brain.lost(client.job, 1, "closed", client.sent, client.refused)
    assert client.refusal is not None, "it may not be tried again"
    assert {number for places in rig.sight.places.values() for number in places} == {0}


def test_rates_are_learned_from_first_legs() -> None:
    slow = EngineTimes(0.03, 1e-3)
    rig = pair(admission=False)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    for number in range(24):
        tokens = draw.choice([200, 800, 2000])
        client = rig.take(prompt(number, tokens))
        rig.timers.run(slow.prefill_s(tokens))
        hand_over(rig, client)
        rig.timers.run(5.0)  # whatever the second leg does, it is not the first one's time
        rig.start(client)
        rig.timers.run(1.0)
        rig.finish(client, 10)
    assert rig.brain.fleet.instances[0].times.prefill_s(1000) == pytest.approx(slow.prefill_s(1000), rel=0.1)


def test_prompts_shorter_than_a_block_are_handed_over_too() -> None:
    rig = pair()
    client = rig.take(prompt(1, BLOCK - 1))
    assert hand_over(rig, client).count == 1
    rig.finish(client)


@pytest.mark.parametrize("gone", [0, 1])
def test_one_instance_does_both_where_nobody_is_left_for_the_other_part(gone: int) -> None:
    rig = pair()
    rig.roster.instances()[gone].alive = False
    target = rig.take(prompt(1)).targets[0]
    assert (target.prefill, target.decode) == (1 - gone, 1 - gone)
    assert [it.role for it in rig.roster.instances().values()] == [Role.PREFILL, Role.DECODE]
    assert rig.counts.numbers["unpaired", ""] == 1
    rig.roster.instances()[gone].alive = True
    target = rig.take(prompt(2)).targets[0]
    assert (target.prefill, target.decode) == (0, 1) and rig.counts.numbers["unpaired", ""] == 1


def test_or_where_nothing_leads_from_one_to_the_other() -> None:
    rig = pair()
    rig.roster.instances()[1].node = 7
    target = rig.take(prompt(1)).targets[0]
    assert target.prefill == target.decode


def test_a_pair_whose_second_part_was_lost_everywhere_is_done_by_the_first() -> None:
    rig = pair()
    client = rig.take(prompt(1))
    hand_over(rig, client)
    rig.brain.lost(client.job, 1, "closed", client.sent, client.refused)
    assert (client.targets[-1].prefill, client.targets[-1].decode) == (0, 0)
    rig.start(client)
    rig.finish(client)
    assert rig.is_still()
