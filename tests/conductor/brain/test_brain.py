"""Requests through the brain: sent, waiting, refused, lost, finished; and that nothing is left of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.conductor.asking import TPOT_SLO, TTFT_SLO
from headwater.conductor.job import How, Lens, Phase, Tokenised
from headwater.conductor.polling import SLOW_S, SLOW_SHARE
from headwater.conductor.signals import Signals
from headwater.enginetimes import EngineTimes
from headwater.fleet import Link, Place
from headwater.fleetfile.model import Limits, Slo, TenantSpec
from headwater.types import Tier
from tests.conductor.brain.rig import TIMES, BrainRig, Client, headers_of, prompt, spec

SEED = 20240905


def test_a_request_from_beginning_to_end() -> None:
    rig = BrainRig(2, quiet=True)
    client = rig.take(prompt(1))
    job, target = client.job, client.targets[0]
    assert (job.phase, job.tries, job.routed_s) == (Phase.SENT, 1, rig.timers.now)
    assert headers_of(target)[b"x-headwater-instance"] == f"i{client.at}".encode()
    assert headers_of(target)[b"x-headwater-reuse"] == b"device=0" and b"x-headwater-node" not in headers_of(target)
    it = rig.brain.fleet.instances[client.at]
    assert (it.waiting_requests, it.waiting_tokens) == (1, 900)
    rig.timers.run(0.2)
    rig.start(client)
    job.answered_tokens = 200
    rig.brain.progressed(job)
    rig.brain.loads.refresh(rig.timers.now)
    assert (it.waiting_requests, it.running_requests, it.running_tokens) == (0, 1, 1100)
    rig.finish(client, 200)
    rig.finish(client, 200)
    assert rig.is_still() and job.phase is Phase.DONE
    assert rig.counts.numbers["outcomes", "whole"] == 1
    again = rig.take(prompt(1))
    assert again.at == client.at and headers_of(again.targets[0])[b"x-headwater-reuse"] == b"device=896"


def test_a_few_tokens_more_are_not_counted() -> None:
    rig = BrainRig(1, quiet=True)
    client = rig.take(prompt(1))
    rig.start(client)
    client.job.answered_tokens = 5
    rig.brain.progressed(client.job)
    rig.brain.loads.refresh(rig.timers.now)
    assert rig.brain.fleet.instances[0].running_tokens == 900


def test_ids_that_are_not_known_are_guessed_from_the_body() -> None:
    rig = BrainRig(2, quiet=True)
    client = rig.take(None, body=b"x" * 4000)
    assert client.job.ask is not None and client.job.ask.tokens == 1000 and not client.job.ask.keys
    assert client.targets and not rig.sight.places


def test_of_several_lenses_the_finest_gives_the_keys() -> None:
    rig = BrainRig(1, quiet=True)
    one = rig.sight.lenses("m", "", prompt(1))[0]
    coarse = one._replace(keys=one.keys[::2], tokens=32)
    rig.sight.lenses = lambda *_, again: [coarse, one]  # type: ignore[method-assign]
    client = rig.take(prompt(1))
    assert client.job.ask is not None and client.job.ask.block_tokens == 16 and client.job.ask.keys == one.keys


def test_only_of_texts_that_come_again_keys_are_kept() -> None:
    rig = BrainRig(1, quiet=True)
    made, said = rig.sight.lenses, []

    def lenses(model: str, salt: str, ids: Sequence[int], *, again: bool = False) -> Sequence[Lens]:
        said.append(again)
        return made(model, salt, ids)

    rig.sight.lenses = lenses  # type: ignore[method-assign]
    for how in (How.GIVEN, How.LOCAL, How.KNOWN):
        job = rig.job(prompt(1))
        job.tokenised = Tokenised(prompt(1), how)
        client = Client(job)
        rig.brain.take(job, client.sent, client.refused)
    assert said == [False, False, True]


def test_whose_slo_and_priority() -> None:
    gold = TenantSpec("gold", priority=3, slo=Slo(ttft_s=0.5))
    rig = BrainRig(1, quiet=True, tenants=(gold,), slo=Slo(2.0, 0.1))
    asked = [(TTFT_SLO, b"0.1"), (TPOT_SLO, b"0.4")]
    for headers, priority, expected in (
        ([], 0, (0.5, 0.1, 3)),
        (asked, -5, (0.5, 0.4, 3)),  # nothing tighter than its tenant's, nor before it
        ([(TTFT_SLO, b"nan"), (TPOT_SLO, b"x")], 5, (0.5, 0.1, -2)),
        ([(TTFT_SLO, b"-1"), (TPOT_SLO, b"1e9")], 99, (0.5, 0.1, -4)),
    ):
        ask = rig.take(prompt(1), tenant=gold, headers=headers, priority=priority).job.ask
        assert ask is not None and (ask.ttft_slo_s, ask.tpot_slo_s, ask.priority) == expected
    alone = BrainRig(1, quiet=True)
    ask = alone.take(prompt(1), headers=asked, priority=-5).job.ask
    assert ask is not None and (ask.ttft_slo_s, ask.tpot_slo_s, ask.priority) == (0.1, 0.4, 5)


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    rig = BrainRig(1, quiet=True, admission=False)
    for number in range(200):
        client = rig.take(prompt(number), output=1000)
        rig.start(client)
        rig.finish(client, 40)
    ask = rig.take(prompt(1), output=1000).job.ask
    assert ask is not None and 35 <= ask.output_tokens <= 60
    ask = rig.take(prompt(1), output=7, n=3).job.ask
    assert ask is not None and ask.output_tokens == 21


# ---- refused


def refused(client: Client) -> tuple[int, str]:
    assert client.refusal is not None and not client.targets
    return client.refusal.status, client.refusal.code


def test_too_many_are_refused_at_once() -> None:
    rig = BrainRig(2, quiet=True, admission=False, limits=Limits(requests=3))
    clients = [rig.take(prompt(it)) for it in range(5)]
    assert [bool(it.targets) for it in clients] == [True] * 3 + [False] * 2
    assert refused(clients[3]) == (503, "overloaded") and clients[3].refusal is not None
    assert clients[3].refusal.retry_after_s is not None
    rig.finish(clients[0])
    assert rig.take(prompt(9)).targets


def test_nobody_alive_no_such_model_and_too_long() -> None:
    rig = BrainRig(2, quiet=True, capacity_tokens=1000)
    assert refused(rig.take(prompt(1, 1001))) == (400, "context_length_exceeded")
    assert refused(rig.take(prompt(1), model="other")) == (404, "model_not_found")
    for it in rig.roster.instances().values():
        it.alive = False
    assert refused(rig.take(prompt(1))) == (503, "no_instance")
    assert rig.is_still()


def test_an_slo_that_not_even_an_idle_instance_meets() -> None:
    rig = BrainRig(2, quiet=True, slo=Slo(ttft_s=0.05))
    client = rig.take(prompt(1, 4000))
    assert refused(client) == (429, "slo_unreachable") and client.refusal is not None
    assert client.refusal.retry_after_s is None


def test_overload_waits_then_sheds_with_the_time_to_come_back() -> None:
    rig = BrainRig(2, slo=Slo(ttft_s=1.0), wait_s=5.0)
    draw = random.Random(SEED)
    clients = []
    for number in range(400):  # 20 a second can be served
        clients.append(rig.take(prompt(number), output=20))
        rig.timers.run(draw.expovariate(100))
    rig.timers.run(30.0)
    assert rig.is_still() and rig.timers.pending() == 0
    shed = [it.refusal for it in clients if it.refusal is not None]
    served = [it for it in clients if it.targets]
    assert len(shed) + len(served) == 400 and len(served) > 60 and len(shed) > 200
    assert all(it.status == 429 and it.retry_after_s is not None and it.retry_after_s > 0 for it in shed)
    late = [it for it in served if it.job.first_s - it.job.arrived_s > 1.1]
    assert len(late) <= 0.1 * len(served), f"{len(late)} of {len(served)}"


def test_the_line_is_bounded_and_has_a_deadline() -> None:
    times = EngineTimes(0.01, 1e-4, decode_fixed_s=1.0)
    rig = BrainRig(1, times=times, quiet=True, capacity_tokens=2000, limits=Limits(waiting=3), wait_s=2.0)
    clients = [rig.take(prompt(it), output=500) for it in range(8)]
    waiting = [it for it in clients if it.waits]
    assert len(waiting) == 3 and waiting[0].job.phase is Phase.WAITING
    assert all(refused(it) == (429, "overloaded") for it in clients if it.refusal is not None)
    rig.timers.run(1.9)
    assert all(it.waits for it in waiting)
    rig.timers.run(0.2)
    assert all(refused(it) == (429, "overloaded") for it in waiting)
    for client in clients:
        if client.targets:
            rig.finish(client)
    assert rig.is_still() and rig.timers.pending() == 0


def test_a_flood_of_one_tenant_leaves_room_for_another() -> None:
    mass, few = TenantSpec("mass"), TenantSpec("few")
    limits = Limits(waiting=20)
    rig = BrainRig(1, capacity_tokens=4000, limits=limits, tenants=(mass, few), wait_s=1000.0, quiet=True)
    flood = [rig.take(prompt(it), tenant=mass) for it in range(60)]
    mine = [rig.take(prompt(100 + it), tenant=few) for it in range(8)]
    assert all(it.waits for it in mine), "mass gave up places for them"
    assert rig.brain.turns.tenants() == {"mass": 12, "few": 8}
    order, under_way = [], [it for it in flood if it.targets]
    while under_way or len(rig.brain.turns):
        client = under_way.pop(0)
        order.append(client)
        rig.start(client)
        rig.finish(client)
        known = {id(it) for it in (*order, *under_way)}
        rig.timers.run(1.0)
        under_way += [it for it in flood + mine if it.targets and id(it) not in known]
    served = ["few" if it in mine else "mass" for it in order if it in mine or it not in flood[:4]]
    first = served[:16]
    assert abs(first.count("few") - 8) <= 3, f"both in turn: {served}"
    assert rig.is_still()


def test_a_dropped_request_waits_no_more() -> None:
    rig = BrainRig(1, capacity_tokens=2000, quiet=True)
    clients = [rig.take(prompt(it)) for it in range(6)]
    waiting = [it for it in clients if it.waits]
    assert waiting
    for client in waiting:
        rig.brain.drop(client.job)
        rig.brain.drop(client.job)
    for client in clients:
        if client.targets:
            rig.finish(client)
    rig.timers.run(60.0)
    assert rig.is_still() and all(it.waits for it in waiting)


def test_those_who_wait_keep_to_the_limit_too() -> None:
    rig = BrainRig(1, capacity_tokens=2000, quiet=True, limits=Limits(requests=3))
    clients = [rig.take(prompt(it)) for it in range(9)]
    assert sum(it.waits for it in clients) >= 6
    rig.roster.instances()[0].capacity_tokens = 1 << 20
    rig.timers.run(1.0)
    assert rig.brain.under_way == 3
    rig.finish(next(it for it in clients if it.targets))
    rig.timers.run(0.1)
    assert rig.brain.under_way == 3


def test_models_do_not_wait_for_each_other() -> None:
    rig = BrainRig(1, capacity_tokens=2000, quiet=True)
    rig.roster.register(spec("other", served_name="other", capacity_tokens=2000), 1)
    clients = [rig.take(prompt(it)) for it in range(6)]
    assert any(it.waits for it in clients)
    assert rig.take(prompt(9), model="other").targets


# ---- lost


def test_lost_goes_elsewhere_and_never_back() -> None:
    rig = BrainRig(3, quiet=True, retries=2)
    client = rig.take(prompt(1))
    seen = [client.at]
    held = set(rig.sight.places.values().__iter__().__next__())
    assert held == {client.at}
    rig.lose(client)
    assert not any(seen[0] in it for it in rig.sight.places.values()), "what was not confirmed is not held"
    seen.append(client.at)
    rig.lose(client)
    seen.append(client.at)
    assert len(set(seen)) == 3 and client.job.tries == 3
    rig.lose(client)
    assert client.refusal is not None and client.refusal.status == 502 and rig.is_still()
    rig.brain.finished(client.job, whole=False)  # said after all
    assert rig.is_still()


def test_who_was_admitted_once_is_not_turned_away_when_it_is_lost() -> None:
    rig = BrainRig(2, quiet=True, slo=Slo(ttft_s=0.5))
    client = rig.take(prompt(1))
    other = [rig.take(prompt(2 + it)) for it in range(6)]
    rig.timers.run(2.0)
    rig.lose(client)
    assert len(client.targets) == 2 and len(other) == 6


def test_lost_with_the_only_one() -> None:
    rig = BrainRig(1, quiet=True)
    client = rig.take(prompt(1))
    rig.lose(client)
    assert client.refusal is not None and client.refusal.status == 503 and rig.is_still()


def test_a_stream_that_moves_takes_what_was_answered_along() -> None:
    rig = BrainRig(3, quiet=True)
    client = rig.take(prompt(1), output=500)
    rig.start(client)
    before = client.job.ask
    assert before is not None
    for answered in (100, 150):
        client.job.answered_tokens = answered
        rig.lose(client, "closed")
        ask = client.job.ask
        assert ask is not None and ask.tokens == 900 + answered
        assert ask.output_tokens == max(before.output_tokens - answered, 1)
        rig.start(client)
    rig.finish(client, 400)
    assert rig.is_still() and len(client.targets) == 3


# ---- health


class MadeHealth:
    """As tests say."""

    def __init__(self) -> None:
        self.shares: dict[int, float] = {}
        self.out: dict[int, float] = {}
        self.troubles: list[tuple[int, str]] = []

    def trouble(self, number: int, why: str) -> None:
        """See `Health`."""
        self.troubles.append((number, why))

    def share(self, number: int, now: float) -> float:
        """See `Health`."""
        return self.shares.get(number, 1.0)

    def out_s(self, number: int, now: float) -> float | None:
        """See `Health`."""
        return now - self.out[number] if number in self.out else None

    def state(self, number: int) -> dict[str, object]:
        """See `Health`."""
        return {}


def test_slow_start_gives_a_part_of_the_share() -> None:
    rig = BrainRig(4, quiet=True, policy="round_robin", admission=False)
    health = rig.brain.choosing.health = MadeHealth()
    health.shares[0] = 0.25
    rig.brain.changed(0, True)

    def count(requests: int) -> int:
        clients = [rig.take(prompt(it)) for it in range(requests)]
        for client in clients:
            rig.finish(client)
        return sum(it.at == 0 for it in clients)

    assert 18 <= count(400) <= 32, "a quarter of a quarter"
    health.shares.clear()
    assert 95 <= count(400) <= 105
    assert SLOW_SHARE < 1 and SLOW_S > 0


def test_rather_one_that_comes_back_slowly_than_nobody() -> None:
    rig = BrainRig(1, quiet=True)
    health = rig.brain.choosing.health = MadeHealth()
    health.shares[0] = 0.1
    rig.brain.changed(0, True)
    assert all(rig.take(prompt(it)).targets for it in range(5))


def test_who_is_gone_for_a_moment_is_waited_for() -> None:
    rig = BrainRig(1, quiet=True)
    health = rig.brain.choosing.health = MadeHealth()
    it = rig.roster.instances()[0]
    it.alive, health.out[0] = False, rig.timers.now
    client, other = rig.take(prompt(1)), rig.take(prompt(2))
    assert client.waits and other.waits
    rig.timers.run(0.5)
    it.alive = True
    del health.out[0]
    rig.brain.changed(0, True)
    rig.timers.run(0.01)
    assert client.targets and other.targets
    it.alive, health.out[0] = False, rig.timers.now
    late = rig.take(prompt(3))
    rig.timers.run(1.5)
    assert refused(late) == (503, "no_instance")
    assert refused(rig.take(prompt(4))) == (503, "no_instance")


def test_losses_are_told_to_health() -> None:
    rig = BrainRig(2, quiet=True)
    health = rig.brain.choosing.health = MadeHealth()
    client = rig.take(prompt(1))
    number = client.at
    rig.lose(client, "closed")
    assert health.troubles == [(number, "closed")]


# ---- one prefix, many at once


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("tokens", [900, 4000])
def test_500_equal_cold_prompts_are_computed_twice_at_most(count: int, tokens: int) -> None:
    rig = BrainRig(count)
    ids = prompt(1, tokens)
    clients = [rig.take(ids) for _ in range(500)]
    rig.timers.run(0.05)
    clients += [rig.take(ids) for _ in range(20)]
    rig.timers.run(60.0)
    assert all(it.targets for it in clients) and rig.is_still()
    whole = [it for each in rig.computed.values() for it in each if it > tokens / 2]
    assert len(whole) <= 2, f"{len(whole)} computed it: { {n: len(it) for n, it in rig.computed.items()} }"
    alike = rig.brain.choosing.alike
    assert alike.places((), 1, 1, rig.timers.now) is None and not len(alike)


def test_a_shared_beginning_is_computed_twice_at_most() -> None:
    rig = BrainRig(8)
    common = prompt(1, 4000)
    clients = [rig.take(common + prompt(100 + it, 64)) for it in range(100)]
    rig.timers.run(60.0)
    assert all(it.targets for it in clients)
    assert sum(it > 2000 for each in rig.computed.values() for it in each) <= 2


def test_unlike_prompts_use_the_whole_fleet() -> None:
    rig = BrainRig(8)
    for number in range(400):
        rig.take(prompt(number))
    rig.timers.run(60.0)
    counts = [len(rig.computed.get(it, ())) for it in range(8)]
    assert min(counts) >= 40, counts


def test_a_leader_that_is_lost_leads_nobody() -> None:
    rig = BrainRig(3, quiet=True)
    clients = [rig.take(prompt(1)) for _ in range(40)]
    assert {it.at for it in clients} == {0, 1}
    for client in clients:
        rig.lose(client)
    assert all(it.targets or it.refusal for it in clients)
    for client in clients:
        rig.finish(client, whole=False)
    assert rig.is_still() and not len(rig.brain.choosing.alike)


# ---- nodes


def test_what_another_tier_has_is_ordered_at_once() -> None:
    orders: list[tuple[int, int]] = []
    rig = BrainRig(1, quiet=True, prefetch=lambda node, model, salt, keys: orders.append((node, len(keys))))
    rig.roster.instances()[0].node = 5
    fleet = rig.brain.fleet
    fleet.kv_bytes_per_token = 1000
    fleet.links = {(Place(tier, 0), 5): Link(1e-3, 1e9) for tier in (Tier.REMOTE,)}
    fleet.links |= {(Place(Tier.HOST, 5), 5): Link(1e-4, 1e10)}
    rig.sight.extra = {Place(Tier.REMOTE, 0): 800}
    client = rig.take(prompt(1))
    assert orders == [(5, 50)] and headers_of(client.targets[0])[b"x-headwater-reuse"] == b"device=0, remote=800"
    rig.sight.extra = {Place(Tier.HOST, 5): 800}
    rig.take(prompt(2))
    assert len(orders) == 1, "its own HOST needs no order"
    rig.sight.extra = {Place(Tier.REMOTE, 0): 800}
    for number in range(500):
        rig.take(prompt(10 + number))
    assert len(orders) <= 201 and rig.counts.numbers["prefetches", "dropped"] > 200


# ---- what is learned and said


def test_rates_are_learned_from_requests() -> None:
    slow = EngineTimes(0.03, 1e-3, decode_fixed_s=0.02, decode_request_s=1e-3)
    rig = BrainRig(2, admission=False)
    rig.times = slow
    draw = random.Random(SEED)
    for number in range(24):
        rig.take(prompt(number, draw.choice([200, 800, 2000])), output=10)
        rig.timers.run(5.0)
    for it in rig.brain.fleet.instances.values():
        assert it.times.prefill_s(1000) == pytest.approx(slow.prefill_s(1000), rel=0.1)
        assert it.times.decode_s(1, 1000) == pytest.approx(slow.decode_s(1, 1000), rel=0.1)
    number = rig.roster.register(spec("new"), 1)
    assert rig.brain.fleet.instances[number].times.prefill_s(1000) == pytest.approx(slow.prefill_s(1000), rel=0.1)


def test_answers_in_one_piece_teach_no_times_and_wait_for_nobody() -> None:
    rig = BrainRig(1, quiet=True)
    before = rig.brain.fleet.instances[0].times
    for number in range(20):
        client = rig.take(prompt(number), stream=False)
        rig.timers.run(1.0)
        it = rig.brain.fleet.instances[0]
        rig.brain.loads.refresh(rig.timers.now)
        assert (it.waiting_requests, it.running_requests) == (0, 1), "taken to decode by now"
        rig.start(client)
        rig.finish(client, 100)
    assert rig.brain.fleet.instances[0].times is before and rig.is_still() and rig.timers.pending() == 0


def test_what_engines_say() -> None:
    rig = BrainRig(2, quiet=True, capacity_tokens=None)
    rig.brain.told(0, Signals(running=3, waiting=2, capacity_tokens=5000, block_tokens=16), rig.timers.now)
    rig.brain.told(7, Signals(running=3, waiting=2), rig.timers.now)
    rig.brain.loads.refresh(rig.timers.now)
    it = rig.brain.fleet.instances[0]
    assert (it.capacity_tokens, it.waiting_requests, it.running_requests) == (5000, 2, 3)
    assert rig.take(prompt(1)).at == 1


def test_a_request_in_prefill_is_not_taken_for_one_that_decodes() -> None:
    rig = BrainRig(1, quiet=True)
    rig.take(prompt(1))
    rig.timers.run(0.5)
    rig.brain.told(0, Signals(running=1, waiting=0), rig.timers.now)
    rig.brain.loads.refresh(rig.timers.now)
    it = rig.brain.fleet.instances[0]
    assert (it.waiting_requests, it.waiting_tokens, it.running_requests) == (1, 900, 0)


def test_an_engine_in_a_long_step_does_not_say_what_we_sent_it_meanwhile() -> None:
    rig = BrainRig(1, quiet=True)
    for number in (1, 2):
        rig.take(prompt(number))
    rig.timers.run(0.5)
    rig.brain.told(0, Signals(running=0, waiting=0), rig.timers.now)
    rig.brain.loads.refresh(rig.timers.now)
    it = rig.brain.fleet.instances[0]
    assert (it.waiting_requests, it.waiting_tokens, it.running_requests) == (2, 1800, 0)


def test_an_answer_in_one_piece_that_comes_early_leads_nobody_for_ever() -> None:
    rig = BrainRig(2, quiet=True)
    for number in range(5):
        rig.finish(rig.take(prompt(number), stream=False))
        rig.timers.run(10.0)
    rig.take(prompt(9))
    assert len(rig.brain.choosing.alike) == 1


def test_each_model_has_its_own_bytes_a_token() -> None:
    rig = BrainRig(1, quiet=True)
    rig.roster.register(spec("other", served_name="n"), 1)
    rig.brain.choosing.kv_bytes_per_token = {"m": 1000, "n": 7}.__getitem__
    for model, size in (("m", 1000), ("n", 7), ("m", 1000)):
        rig.take(prompt(1), model=model)
        assert rig.brain.fleet.kv_bytes_per_token == size


def test_an_instance_that_leaves_is_forgotten_by_all() -> None:
    rig = BrainRig(2, quiet=True)
    clients = [rig.take(prompt(it)) for it in range(4)]
    rig.roster.unregister("i0", 1)
    rig.timers.run(0.1)
    assert rig.roster.by_name("i0") == 0, "its requests are served to their end"
    assert {rig.take(prompt(10 + it)).at for it in range(4)} == {1}
    for client in clients:
        rig.start(client)
        rig.finish(client)
    assert rig.roster.by_name("i0") is None and rig.sight.forgotten == [0]
    assert rig.roster.register(spec("new"), 2) == 0
    assert not any(rig.brain.loads.book.own(0))
    rig.roster.unregister("new", 3)
    rig.timers.run(0.1)
    assert rig.roster.by_name("new") is None, "nothing was under way there"


def test_state_is_plain() -> None:
    rig = BrainRig(2)
    rig.take(prompt(1))
    rig.timers.run(1.0)
    rig.take(prompt(1))
    rig.timers.run(1.0)
    state = rig.brain.state()
    row = max(state["instances"], key=lambda it: it["ended_requests"])
    assert row["ended_requests"] == 2 and row["prompt_tokens"] == 1800 and row["device_tokens"] == 896
    assert state["policy"] == "headwater" and state["waiting"] == {}


# ---- conservation


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from("tttsplfddugkb"), st.integers(0, 10_000)), max_size=90),
    st.sampled_from([(1 << 20, 4, 30), (3000, 60, 5), (6000, 8, 8)]),
)
def test_routed_is_finished_plus_lost_and_nothing_is_left(
    steps: list[tuple[str, int]], sizes: tuple[int, int, int]
) -> None:
    capacity, requests, waiting = sizes
    limits = Limits(requests=requests, waiting=waiting)
    rig = BrainRig(3, quiet=True, capacity_tokens=capacity, limits=limits, wait_s=3.0, slo=Slo(2.0, 0.5))
    clients: list[Client] = []
    for what, number in steps:
        live = [it for it in clients if it.targets and it.refusal is None and it.job.phase is not Phase.DONE]
        if what == "t":
            ids = prompt(number % 7, 100 + number % 900) if number % 5 else None
            clients.append(rig.take(ids, stream=bool(number % 3), output=1 + number % 300))
        elif what == "u":
            name = f"n{number % 3}"
            if rig.roster.by_name(name) is None:
                rig.roster.register(spec(name, capacity_tokens=capacity), len(clients) + 1)
            else:
                rig.roster.unregister(name, len(clients) + 1)
        elif what == "g":
            rig.timers.run(number / 5000)
        elif what == "k" or what == "b":
            it = rig.roster.instances()[number % 3]
            it.alive = what == "b"
            rig.brain.changed(number % 3, it.alive)
        elif what == "d":
            for client in clients[-3:]:
                rig.brain.drop(client.job)
        elif live:
            client = live[number % len(live)]
            if what == "s":
                rig.start(client)
            elif what == "p":
                client.job.answered_tokens += number % 50
                rig.brain.progressed(client.job)
            elif what == "l":
                rig.lose(client, ("refused", "closed", "late")[number % 3])
            elif what == "f":
                rig.finish(client, number % 400, whole=bool(number % 4))
        assert rig.brain.under_way <= requests + 1 and len(rig.brain.turns) <= waiting
    for it in rig.roster.instances().values():
        it.alive = True
    for client in clients:
        if client.targets:
            rig.finish(client, whole=False)
    rig.timers.run(0.5)
    for client in clients:
        if client.targets:
            rig.finish(client, whole=False)
        rig.brain.drop(client.job)
    rig.timers.run(10.0)
    assert rig.is_still() and rig.timers.pending() == 0
    assert not any(rig.brain.loads.book.own(number) != (0, 0, 0, 0) for number in rig.roster.instances())
    outcomes = {label: n for (name, label), n in rig.counts.numbers.items() if name == "outcomes"}
    assert sum(outcomes.values()) + rig.counts.numbers.get(("limited", "requests"), 0) == len(clients), outcomes


def test_the_policy_is_called_as_the_simulator_calls_it() -> None:
    rig = BrainRig(2, quiet=True)
    calls: list[str] = []

    def noting(owner: object, method: str) -> None:
        call = getattr(owner, method)
        label = f"{type(owner).__name__}.{method}"
        setattr(owner, method, lambda *a, **k: (calls.append(label), call(*a, **k))[1])

    for owner, methods in (
        (rig.brain.policy, ("choose", "routed", "finished", "left")),
        (rig.brain.admission, ("decide", "admitted", "started", "finished", "left")),
        (rig.brain.loads.book, ("routed", "prefilled", "finished", "left")),
    ):
        for method in methods:
            noting(owner, method)
    client = rig.take(prompt(1))
    rig.start(client)
    rig.finish(client)
    rig.roster.unregister("i0", 1)
    rig.timers.run(0.1)
    assert calls == [
        "Headwater.choose", "Admission.decide", "LoadBook.routed", "LoadBook.finished", "Headwater.routed",
        "Admission.admitted",
        "LoadBook.prefilled", "Admission.started",
        "Headwater.finished", "LoadBook.finished", "Admission.finished",
        "Headwater.left", "LoadBook.left", "Admission.left",
    ]  # fmt: skip


def test_times_of_the_rig_are_what_the_brain_begins_with() -> None:
    assert BrainRig(1).brain.fleet.instances[0].times is TIMES
