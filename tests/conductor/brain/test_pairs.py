"""Requests whose prompt is computed at one instance and answered at another."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headwater.conductor.handoff import HANDOFF_S
from headwater.conductor.patience import FACTOR, SPARE_S, TOKEN_S
from headwater.enginetimes import EngineTimes
from headwater.fleet import Place, Role
from headwater.types import Tier
from tests.conductor.brain.rig import BLOCK, TIMES, BrainRig, Client, headers_of, prompt

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


def sent_to(rig: BrainRig, number: int, tokens: int = 900) -> tuple[Client, tuple[int, int]]:
    client = rig.take(prompt(number, tokens))
    return client, (client.targets[0].prefill, client.targets[0].decode)


def loads(rig: BrainRig) -> list[tuple[int, int]]:
    rig.brain.loads.refresh(rig.timers.now)
    return [(it.waiting_requests, it.running_requests) for it in rig.brain.fleet.instances.values()]


def test_headers_name_both() -> None:
    target = pair().take(prompt(1)).targets[0]
    assert (target.prefill, target.decode) == (0, 1)
    assert headers_of(target)[b"x-headwater-instance"] == b"i1" and headers_of(target)[b"x-headwater-prefill"] == b"i0"


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
    (flight,) = rig.brain._under_way.flights.values()
    assert flight.decoders == (1, 900), "it is not counted twice"
    client.job.found_tokens = 800
    rig.finish(client, 30)
    assert rig.is_still() and rig.timers.pending() == 0
    told = rig.brain.explained(client.job.id)
    assert told is not None and told["took"]["found_tokens"] == 800
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


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_rates_are_learned_from_first_legs(stream: bool) -> None:
    slow = EngineTimes(0.03, 1e-3)
    rig = pair(admission=False)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    for number in range(24):
        tokens = draw.choice([200, 800, 2000])
        client = rig.take(prompt(number, tokens), stream=stream)
        rig.timers.run(slow.prefill_s(tokens))
        hand_over(rig, client)
        rig.timers.run(5.0)  # whatever the second leg does, it is not the first one's time
        rig.start(client)
        rig.timers.run(1.0)
        rig.finish(client, 10)
    assert rig.brain.fleet.instances[0].times.prefill_s(1000) == pytest.approx(slow.prefill_s(1000), rel=0.1)


def test_prompts_of_which_nothing_can_be_handed_over_are_computed_where_they_are_answered() -> None:
    rig = pair()
    client, at = sent_to(rig, 1, BLOCK - 1)
    assert at == (1, 1) and rig.counts.numbers["unpaired", "needless"] == 1
    rig.start(client)
    rig.finish(client)
    told = rig.brain.explained(client.job.id)
    assert told is not None and told["tries"][0]["needless"]
    assert sent_to(rig, 2, BLOCK)[1] == (0, 1)
    target = rig.take(None).targets[0]
    assert (target.prefill, target.decode) == (0, 1), "nobody knows how long it is"


def test_what_the_decode_instance_holds_is_not_computed_elsewhere() -> None:
    rig = pair()
    first, at = sent_to(rig, 1, 900)
    assert at == (0, 1)
    _, at = sent_to(rig, 1, 900)
    assert at == (0, 1), "it is not there yet: who asks the same meets the first one"
    hand_over(rig, first)
    follow_up, at = sent_to(rig, 1, 900 + BLOCK - 5)
    assert at == (1, 1)
    assert headers_of(follow_up.targets[0])[b"x-headwater-reuse"] == b"device=896"
    assert sent_to(rig, 1, 900 + BLOCK)[1] == (0, 1), "a chunk more is handed over"


@pytest.mark.parametrize(
    "place", [Place(Tier.HOST, 0), Place(Tier.DISK, 0), Place(Tier.REMOTE, 0), Place(Tier.HOST, 7)]
)
def test_nor_what_its_node_has(place: Place) -> None:
    rig = pair()
    for held in (896, 890):
        rig.sight.extra = {place: held}
        assert sent_to(rig, held, 900)[1] == ((0, 1) if place.number else (1, 1))
    rig.sight.extra = {place: 880}
    assert sent_to(rig, 3, 900)[1] == (0, 1), "a chunk"


@pytest.mark.parametrize("gone", [0, 1])
def test_one_instance_does_both_where_nobody_is_left_for_the_other_part(gone: int) -> None:
    rig = pair()
    rig.roster.instances()[gone].alive = False
    target = rig.take(prompt(1)).targets[0]
    assert (target.prefill, target.decode) == (1 - gone, 1 - gone)
    assert [it.role for it in rig.roster.instances().values()] == [Role.PREFILL, Role.DECODE]
    assert rig.counts.numbers["unpaired", "alone"] == 1
    rig.roster.instances()[gone].alive = True
    target = rig.take(prompt(2)).targets[0]
    assert (target.prefill, target.decode) == (0, 1) and rig.counts.numbers["unpaired", "alone"] == 1


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


# ---- prefill instances that take prompts and do not answer


def learned(slow: EngineTimes, **more: Any) -> BrainRig:
    """A pair whose first computes prompts as slowly as this, which is known."""
    rig = pair(admission=False, **more)
    for number in range(8):
        client = rig.take(prompt(number, 400 + 200 * number))
        rig.timers.run(slow.prefill_s(400 + 200 * number))
        hand_over(rig, client)
        rig.start(client)
        rig.timers.run(0.1)
        rig.finish(client, 10)
    rig.timers.run(20.0)
    return rig


def test_patience_is_as_long_as_load_and_speed_ask_for() -> None:
    slow = EngineTimes(0.05, 1e-3)
    rig = learned(slow)
    brain = rig.brain
    short, long = rig.take(prompt(101, 100)), rig.take(prompt(102, 9000))
    behind = rig.take(prompt(103, 100))
    assert brain.patience_s(short.job) == pytest.approx(SPARE_S + FACTOR * slow.prefill_s(100), rel=0.05)
    assert brain.patience_s(long.job) == pytest.approx(SPARE_S + FACTOR * slow.prefill_s(9100), rel=0.05)
    assert brain.patience_s(behind.job) > brain.patience_s(long.job)

    rig = pair()
    client = rig.take(prompt(1, 1000))
    assert rig.brain.patience_s(client.job) == pytest.approx(SPARE_S + FACTOR * 1000 * TOKEN_S)


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
def test_who_is_merely_slow_is_waited_for_under_load(known: bool) -> None:
    """60 prompts at once, computed one after the other: 100 times as slowly as is taken for usual, or 3 times as slowly
    as was learned."""
    token_s = 3e-3 if known else 100 * TIMES.prefill_token_s
    rig = learned(EngineTimes(0.01, 1e-3)) if known else pair(admission=False)
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    free_s, lost, longest_s = rig.timers.now, 0, 0.0
    told = []
    for number in range(60):
        tokens = draw.choice([20, 300, 1500, 6000])
        client = rig.take(prompt(1000 + number, tokens))
        free_s += tokens * token_s
        longest_s = free_s - rig.timers.now
        lost += longest_s > rig.brain.patience_s(client.job)
        told.append(client)
        rig.timers.call_later(longest_s, lambda client=client: hand_over(rig, client))
    assert not lost and longest_s > 20 * SPARE_S
    while rig.timers.step():
        pass
    for client in told:
        rig.finish(client)
    assert rig.is_still() and not rig.brain.choosing.tardy.left_out


def test_who_did_not_answer_in_time_is_tried_by_one_request_now_and_then() -> None:
    rig = pair(admission=False)
    clients = [sent_to(rig, number)[0] for number in range(4)]
    rig.timers.run(30.0)
    for client in clients:
        assert hand_over(rig, client, "late").count == 1
    told = rig.brain.explained(clients[0].job.id)
    assert told is not None and told["tries"][0]["prefill_lost"] == "late"
    pauses = []
    for _ in range(6):
        since_s = rig.timers.now
        while (found := sent_to(rig, 100 + len(clients)))[1] == (1, 1):
            rig.timers.run(1.0)
            clients.append(found[0])
        pauses.append(rig.timers.now - since_s)
        clients.append(found[0])
        assert sent_to(rig, 5000 + len(clients))[1] == (1, 1), "one is enough"
        if len(pauses) < 6:
            hand_over(rig, found[0], "late")
    assert pauses == pytest.approx([5, 10, 20, 40, 60, 60], abs=1.1)
    hand_over(rig, found[0])
    assert [sent_to(rig, number)[1] for number in (9001, 9002)] == [(0, 1), (0, 1)], "it has answered"


def test_rather_one_that_did_not_answer_in_time_than_nobody() -> None:
    rig = pair(admission=False)
    hand_over(rig, sent_to(rig, 1)[0], "late")
    assert sent_to(rig, 2)[1] == (1, 1)
    rig.roster.instances()[1].alive = False
    assert sent_to(rig, 3)[1] == (0, 0)


@pytest.mark.parametrize("why", ["closed", "status", "error", "refused"])
def test_other_losses_are_not_taken_for_silence(why: str) -> None:
    rig = pair(admission=False)
    hand_over(rig, sent_to(rig, 1)[0], why)
    assert sent_to(rig, 2)[1] == (0, 1)


def test_who_came_back_has_a_clean_slate() -> None:
    rig = pair(admission=False)
    hand_over(rig, sent_to(rig, 1)[0], "silent")
    rig.brain.changed(0, True)
    assert sent_to(rig, 2)[1] == (0, 1)
    hand_over(rig, sent_to(rig, 3)[0], "silent")
    rig.brain._left(0)
    assert not rig.brain.choosing.tardy.left_out
