"""Every policy in the registry: whom it may choose, that it is deterministic; the rivals against numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.policies import POLICIES
from headwater.core.rivals import (
    CacheAware,
    Dynamo,
    LeastLoad,
    Mooncake,
    PrefixOnly,
    RoundRobin,
    Session,
    StickyUntilSaturated,
)
from headwater.core.routing import Headwater, can_decode, can_prefill, choice_of, handoff_s
from headwater.fleet import Ask, Fleet, Held, Link, Place, Role
from headwater.ports import RoutingPolicy
from headwater.types import Tier
from tests.core.fleets import ask_of, asks, fleet_of, fleets, helds, meshed, on_device, on_host, prefer, route

ALL = pytest.mark.parametrize("name", sorted(POLICIES))


def servers(ask: Ask, fleet: Fleet) -> set[tuple[int, int]]:
    """Every pair that can serve a request, by the words of `fleet` alone."""
    found = set()
    for first in fleet.instances.values():
        for last in fleet.instances.values():
            fit = all(
                it.alive and not it.draining and it.model == ask.model and it.capacity_tokens >= ask.tokens
                for it in (first, last)
            )
            able = first.role is not Role.DECODE and last.role is not Role.PREFILL
            if fit and able and handoff_s(ask, fleet, first, last) is not None:
                found.add((first.number, last.number))
    return found


REQUESTS = st.lists(st.tuples(asks(), helds()), min_size=1, max_size=3)


@settings(max_examples=40)
@given(fleet=fleets(), requests=REQUESTS)
def test_serves_what_can_be_served_by_those_that_can(fleet: Fleet, requests: list[tuple[Ask, Held]]) -> None:
    policies = [factory() for factory in POLICIES.values()]
    for ask, held in requests:
        able = servers(ask, fleet)
        for policy in policies:
            choice = route(policy, ask, held, fleet)
            if choice is None:
                assert not able, policy.name
                continue
            assert (choice.prefill, choice.decode) in able, policy.name
            assert can_prefill(ask, fleet.instances[choice.prefill])
            assert can_decode(ask, fleet.instances[choice.decode])
            assert 0 <= choice.cached_tokens < ask.tokens, policy.name
            assert 0 <= choice.fetched_tokens < ask.tokens - choice.cached_tokens, policy.name
            assert (choice.source is None) == (choice.fetched_tokens == 0), policy.name
            assert all(part >= 0 for part in choice.parts), policy.name
            assert choice.parts.prefill_s > 0, policy.name
            policy.finished(ask, choice)
            policy.left(choice.prefill)


@ALL
@pytest.mark.parametrize(
    ("field", "value"),
    [("alive", False), ("draining", True), ("model", "other"), ("capacity_tokens", 999), ("role", Role.DECODE)],
)
def test_who_cannot_serve_is_not_asked(name: str, field: str, value: object) -> None:
    policy, fleet = POLICIES[name](), fleet_of(3)
    held = on_device({0: 900, 1: 900})
    last = fleet.instances[2]
    last.waiting_tokens, last.waiting_requests = 50_000, 20
    for number in (0, 1):
        setattr(fleet.instances[number], field, value)
    for number in range(4):
        choice = route(policy, ask_of(1000, f"r{number}"), held, fleet)
        assert choice is not None
        assert (choice.prefill, choice.decode) == (2, 2)
    setattr(last, field, value)
    assert policy.choose(ask_of(1000), held, fleet) is None


@settings(max_examples=15)
@given(fleet=fleets(), requests=REQUESTS)
def test_the_same_calls_give_the_same_choices(fleet: Fleet, requests: list[tuple[Ask, Held]]) -> None:
    for factory in POLICIES.values():
        mine, again = factory(), factory()
        for ask, held in requests:
            # Choosing alone changes nothing, however often, and in what order things come does not matter.
            for _ in range(2):
                again.choose(ask_of(50, "another"), {}, fleet)
            other = replace(fleet, instances=dict(reversed(fleet.instances.items())))
            same = again.choose(ask, dict(reversed(held.items())), other)
            assert route(mine, ask, held, fleet) == same, mine.name
            if same is not None:
                again.routed(ask, same, other)


@ALL
def test_everybody_gets_work_under_uniform_load(name: str) -> None:
    policy, fleet = POLICIES[name](), fleet_of(5)
    counts = dict.fromkeys(fleet.instances, 0)
    for number in range(500):
        ask = ask_of(1000, f"r{number}")
        choice = route(policy, ask, {}, fleet)
        assert choice is not None
        counts[choice.prefill] += 1
        if number >= 10:  # ten are always under way
            first = fleet.instances[number % 5]
            first.waiting_requests, first.waiting_tokens = 0, 0
            policy.finished(ask, choice)
    assert min(counts.values()) >= 50, counts


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"prefix", "round_robin", "session"}))
def test_what_is_not_known_to_be_held_leaves_least_load(name: str) -> None:
    policy, fleet = POLICIES[name](), fleet_of(4)
    for number, waiting in enumerate((90_000, 30_000, 70_000, 50_000)):
        fleet.instances[number].waiting_tokens, fleet.instances[number].waiting_requests = waiting, waiting // 1000
    order = []
    for number in range(4):
        choice = policy.choose(ask_of(5000, f"r{number}"), {}, fleet)
        assert choice is not None
        order.append(choice.prefill)
        fleet.instances[choice.prefill].alive = False
    # The fewest requests, where more than 64 lie between most and fewest, would be the same order.
    assert order == [1, 3, 2, 0] or name == "cache_aware"


def chosen(policy: RoutingPolicy, ask: Ask, held: Held, fleet: Fleet) -> int:
    choice = route(policy, ask, held, fleet)
    assert choice is not None
    return choice.prefill


def test_round_robin_goes_on_after_the_last() -> None:
    policy, fleet = RoundRobin(), fleet_of(3)
    assert [chosen(policy, ask_of(10), {}, fleet) for _ in range(4)] == [0, 1, 2, 0]
    fleet.instances[1].draining = True
    assert [chosen(policy, ask_of(10), {}, fleet) for _ in range(3)] == [2, 0, 2]


def test_least_load_counts_tokens_then_requests() -> None:
    policy, fleet = LeastLoad(), fleet_of(3)
    for number, (tokens, waiting, running) in enumerate([(100, 1, 0), (50, 3, 4), (50, 1, 5)]):
        it = fleet.instances[number]
        it.waiting_tokens, it.waiting_requests, it.running_requests = tokens, waiting, running
    assert chosen(policy, ask_of(10), {}, fleet) == 2


def test_a_session_stays_when_others_leave() -> None:
    policy, fleet = Session(), fleet_of(10)
    sessions = [f"s{number}" for number in range(200)]
    before = {it: chosen(policy, ask_of(10, session=it), {}, fleet) for it in sessions}
    assert len(set(before.values())) == 10
    fleet.instances[3].alive = False
    policy.left(3)
    after = {it: chosen(policy, ask_of(10, session=it), {}, fleet) for it in sessions}
    assert {it for it in sessions if before[it] != after[it]} == {it for it in sessions if before[it] == 3}


def test_prefix_only_takes_the_longest_then_who_waited_longest() -> None:
    policy, fleet = PrefixOnly(), fleet_of(3)
    held = on_device({0: 64, 1: 96, 2: 96})
    assert [chosen(policy, ask_of(200), held, fleet) for _ in range(3)] == [1, 2, 1]


def test_dynamo_by_hand() -> None:
    fleet = fleet_of(2)
    ask = ask_of(1600)  # 100 blocks of 16
    first, second = fleet.instances.values()
    first.waiting_tokens, first.running_tokens = 800, 3200
    held: Held = {
        Place(Tier.DEVICE, 0): 640,  # 40 blocks
        Place(Tier.HOST, 0): 960,  # 20 more
        Place(Tier.DISK, 0): 1120,  # 10 more
    }
    # prefill (1600 + 800) / 16 = 150, credit 40 + 0.75 x 20 + 0.25 x 10 = 57.5; decode (3200 + 800 + 1600) / 16 = 350
    assert Dynamo().cost(ask, held, first) == 92.5 + 350
    assert Dynamo(2).cost(ask, held, first) == 2 * 92.5 + 350
    assert Dynamo().cost(ask, held, second) == 100 + 100
    # Without the decoding, what is held weighs more than what waits.
    first.running_tokens = 0
    assert chosen(Dynamo(), ask, held, fleet) == 1  # 92.5 + 150 against 100 + 100
    first.waiting_tokens = 0
    assert chosen(Dynamo(), ask, held, fleet) == 0  # 42.5 + 100


def test_sticky_until_saturated_by_hand() -> None:
    fleet = fleet_of(3)
    ask, held = ask_of(1000), on_device({0: 850, 1: 799})
    first, second, third = fleet.instances.values()
    # 0.1 ms a token: 170,000 tokens are 17 s, and 18 s are waited for the one that holds 80 %.
    first.waiting_tokens, second.waiting_tokens, third.waiting_tokens = 170_000, 500, 400
    assert chosen(StickyUntilSaturated(), ask, held, fleet) == 0
    first.waiting_tokens = 181_000
    assert chosen(StickyUntilSaturated(), ask, held, fleet) == 2
    # One in a hundred passes it over.
    first.waiting_tokens = 100_000
    policy = StickyUntilSaturated(seed=7)
    passed = 0
    for _ in range(3000):
        choice = policy.choose(ask, held, fleet)
        assert choice is not None
        policy.routed(ask, choice, fleet)
        passed += choice.prefill != 0
    assert 10 <= passed <= 60


def test_mooncake_by_hand() -> None:
    fleet = fleet_of(2, kv_bytes=1000)
    ask = ask_of(4000)
    held = {**on_device({0: 1000, 1: 2000}), **on_host({1: 3000})}
    fleet.links = {(Place(Tier.HOST, 1), 0): Link(0.01, 1e8), (Place(Tier.HOST, 1), 1): Link(0.0, 1e9)}
    first, second = fleet.instances.values()
    second.waiting_requests, second.waiting_tokens = 2, 4000  # each 10 ms + 0.2 s
    # 3000 / 1000 > 1.5: 2,000 tokens of 1 kB come in 10 ms + 20 ms; then 10 ms + 1,000 tokens.
    assert Mooncake().plan(ask, held, fleet, first) == (
        pytest.approx(0.03 + 0.11), pytest.approx(0.03), 3000, Place(Tier.HOST, 1),
    )  # fmt: skip
    # Its node's own HOST is what it holds; it waits 0.42 s for the others.
    assert Mooncake().plan(ask, held, fleet, second)[0] == pytest.approx(0.42 + 0.11)
    # With a threshold of 4, the first computes 3,000 tokens itself.
    assert Mooncake(4).plan(ask, held, fleet, first)[0] == pytest.approx(0.31)
    choice = Mooncake().choose(ask, held, fleet)
    assert choice is not None
    assert (choice.prefill, choice.cached_tokens, choice.fetched_tokens) == (0, 1000, 2000)
    assert choice.parts[:3] == (0.0, pytest.approx(0.03), pytest.approx(0.11))
    assert chosen(Mooncake(4), ask, held, fleet) == 0


def test_cache_aware_by_hand() -> None:
    policy, fleet = CacheAware(), fleet_of(3)
    first, second, third = fleet.instances.values()
    held = on_device({0: 301, 1: 299})
    assert chosen(policy, ask_of(1000), held, fleet) == 0
    # 0.3 of the prompt matches nowhere: the smallest tree. The first has 699 tokens, then the second 701, the last 1000
    assert chosen(policy, ask_of(1000), on_device({1: 299}), fleet) == 1
    assert chosen(policy, ask_of(1000), {}, fleet) == 2
    assert chosen(policy, ask_of(1000), {}, fleet) == 0
    # 66 - 1 is more than 64, and 66 more than 1.5 x 1: the fewest, whatever is held.
    first.running_requests, first.waiting_requests = 66, 0
    second.waiting_requests, third.waiting_requests = 1, 2
    assert chosen(policy, ask_of(1000), held, fleet) == 1
    # 200 - 136 is not.
    first.running_requests, second.waiting_requests, third.waiting_requests = 200, 136, 136
    assert chosen(policy, ask_of(1000), held, fleet) == 0
    policy.routed(ask_of(10), prefer(2), fleet)
    policy.left(2)
    assert chosen(policy, ask_of(1000), {}, fleet) == 2


def test_a_rival_prefills_only_where_somebody_can_decode() -> None:
    fleet = fleet_of(4)
    for number, role in enumerate((Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)):
        fleet.instances[number].role = role
    fleet.links = {(Place(Tier.HOST, 1), number): Link(0.5, 1e6) for number in (2, 3)}
    fleet.instances[2].running_tokens = 10
    choice = LeastLoad().choose(ask_of(1000), {}, fleet)
    assert choice is not None
    assert (choice.prefill, choice.decode) == (1, 3)
    assert choice.parts.handoff_s == pytest.approx(1.5)  # 1 MB at 1 MB/s, and the latency


@ALL
@pytest.mark.parametrize(
    ("field", "value"),
    [("alive", False), ("draining", True), ("model", "other"), ("capacity_tokens", 999), ("role", Role.PREFILL)],
)
def test_who_cannot_decode_is_not_handed_to(name: str, field: str, value: object) -> None:
    fleet = meshed(fleet_of(3))
    fleet.instances[0].role = Role.PREFILL
    for number in (1, 2):
        fleet.instances[number].role = Role.DECODE
    fleet.instances[2].running_requests, fleet.instances[2].running_tokens = 9, 9000
    setattr(fleet.instances[1], field, value)
    choice = POLICIES[name]().choose(ask_of(1000), {}, fleet)
    assert choice is not None
    assert choice.decode == 2
    setattr(fleet.instances[2], field, value)
    assert POLICIES[name]().choose(ask_of(1000), {}, fleet) is None


def test_what_does_both_hands_nothing_off() -> None:
    fleet = meshed(fleet_of(3))
    alone, both, decode = fleet.instances.values()
    alone.role, alone.node, decode.role = Role.PREFILL, None, Role.DECODE  # nothing leads from the first
    both.running_tokens, both.waiting_tokens = 5000, 100
    choice = LeastLoad().choose(ask_of(1000), {}, fleet)
    assert choice is not None
    assert (choice.prefill, choice.decode) == (1, 1)


@settings(max_examples=25)
@given(fleet=fleets(), ask=asks(), held=helds())
def test_a_choice_has_the_seconds_that_ours_has_for_the_same(fleet: Fleet, ask: Ask, held: Held) -> None:
    for it in Headwater().explain(ask, held, fleet):
        instance = fleet.instances[it.instance]
        made = choice_of(ask, held, fleet, instance, instance)
        assert made.parts[:3] == (it.queue_s, it.fetch_s, it.prefill_s)
        assert (made.cached_tokens, made.fetched_tokens, made.source) == (
            it.cached_tokens,
            it.fetched_tokens,
            it.source,
        )
        assert made.parts.handoff_s == 0.0
        if instance.role is Role.BOTH:
            assert made.parts.decode_s == it.decode_s
