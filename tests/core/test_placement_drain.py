"""Drain and rebalance: what only we hold goes to others, most valuable first, within a bandwidth, and it ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.drain import AGAIN_S, BEGIN, END, TRIES, Drain, Rebalance
from headwater.core.placing import Chain, Order, Room

MIB = 1 << 20
GIB = 1 << 30


def names(count: int, start: int = 0) -> tuple[bytes, ...]:
    return tuple(it.to_bytes(17, "big") for it in range(start, start + count))


def chain(count: int = 4, start: int = 0, worth: float = 1.0) -> Chain:
    return Chain(names(count, start), (MIB,) * count, worth)


def places(count: int, used_bytes: int = 0, capacity_bytes: int = GIB) -> list[Room]:
    return [Room(it, capacity_bytes, used_bytes) for it in range(count)]


def carry_out(held: dict[bytes, set[int]], orders: list[Order]) -> None:
    for order in orders:
        for name in order.names:
            held.setdefault(name, set()).add(order.target)


def run(drain: Drain, held: dict[bytes, set[int]], members: list[Room], rounds: int = 200) -> list[Order]:
    """Carry out every order at once, a round every half second."""
    all_orders: list[Order] = []
    for turn in range(rounds):
        orders = drain.step(drain.chains(turn / 2), held, members, turn / 2)
        carry_out(held, orders)
        all_orders += orders
    return all_orders


def test_everything_is_brought_to_safety_and_it_ends() -> None:
    drain = Drain(0, [chain(start=10 * it) for it in range(30)], 1e9, 0.0)
    assert drain.progress.open_bytes == 120 * MIB
    orders = run(drain, held := {}, places(5))
    assert drain.progress.over
    assert drain.progress.safe_bytes == 120 * MIB
    assert sum(it.size_bytes for it in orders) == 120 * MIB
    assert {it.target for it in orders} == {1, 2, 3, 4}
    assert 0 not in set().union(*held.values())


def test_what_others_hold_is_left_alone() -> None:
    held = {name: {0, 3} for name in names(4)}
    drain = Drain(0, [chain(), chain(start=10)], 1e9, 0.0)
    (order,) = run(drain, held, places(5))
    assert order.names == names(4, 10)
    assert drain.progress.safe_bytes == 8 * MIB


def test_a_copy_with_one_who_leaves_too_or_is_no_member_is_none() -> None:
    members = [*places(2), Room(7, GIB, 0, takes=False)]
    for holder in (7, 8):
        held = {name: {0, holder} for name in names(4)}
        (order,) = run(Drain(0, [chain()], 1e9, 0.0), held, members)
        assert order.target == 1


def test_the_most_valuable_goes_first_within_the_bandwidth() -> None:
    chains = [chain(start=10 * it, worth=it % 7) for it in range(21)]
    drain, held, now, worths = Drain(0, chains, 4 * MIB, 0.0), dict[bytes, set[int]](), 0.0, list[float]()
    value = {it.names: it.worth for it in chains}
    sent = 0
    while not drain.progress.over:
        orders = drain.step(drain.chains(now), held, places(3), now)
        carry_out(held, orders)
        worths += [value[it.names] for it in orders]
        sent += sum(it.size_bytes for it in orders)
        assert sent <= 4 * MIB * (now + 2)
        now += 0.5
    assert worths == sorted(worths, reverse=True)
    assert now >= 18


def test_beginnings_that_are_shared_go_once_and_stay_together() -> None:
    """Ten ends on one beginning: one order after the other to the member that has the beginning by then."""
    chains = [Chain((*names(20), *names(2, 100 + 10 * it)), (MIB,) * 22, 1.0) for it in range(10)]
    drain = Drain(0, chains, 1e9, 0.0)
    orders = run(drain, {}, places(4))
    assert drain.progress.over
    assert len({it.target for it in orders}) == 1
    assert sum(it.size_bytes for it in orders) == 40 * MIB


def test_a_chain_that_is_part_of_another_goes_along_with_it() -> None:
    drain = Drain(0, [chain(6, worth=2.0), chain(4), chain(5)], 1e9, 0.0)
    (order,) = drain.step(drain.chains(0.0), {}, places(4), 0.0)
    assert order.names == names(6)


def test_what_nobody_takes_is_given_up_and_it_ends() -> None:
    shared = Chain((*names(4), *names(2, 50)), (MIB,) * 6, 0.5)
    drain = Drain(0, [chain(), shared, chain(start=10)], 1e9, 0.0)
    orders: list[Order] = []
    now = 0.0
    while not drain.progress.over:
        orders += drain.step(drain.chains(now), {}, places(3), now)
        now += 1.0
    assert now <= (TRIES + 1) * AGAIN_S
    assert drain.progress.lost_bytes == 10 * MIB
    assert max(orders.count(it) for it in orders) <= TRIES


def test_no_room_anywhere_ends_it_too() -> None:
    drain = Drain(0, [chain()], 1e9, 0.0)
    assert run(drain, {}, places(1)) == []
    assert drain.progress.over
    assert drain.progress.lost_bytes == 4 * MIB


def test_a_full_member_is_not_flooded() -> None:
    members = [Room(0, GIB, GIB), Room(1, GIB, GIB)]
    drain = Drain(0, [chain(64, 100 * it) for it in range(16)], 1e12, 0.0)
    orders = drain.step(drain.chains(0.0), {}, members, 0.0)
    assert 0 < sum(it.size_bytes for it in orders) <= GIB // 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=8), st.integers(1, 3), st.randoms())
@settings(max_examples=30, deadline=None)
def test_bytes_are_conserved_and_it_always_ends(
    shapes: list[tuple[int, int]], members: int, draw: random.Random
) -> None:
    """Trees of any shape, targets that carry out only some of what they are told."""
    choose = draw.random
    chains = [
        Chain((*names(trunk), *names(length, 100 + 10 * at)), (MIB,) * (trunk + length), float(at))
        for at, (trunk, length) in enumerate(shapes)
    ]
    total = len({name for it in chains for name in it.names}) * MIB
    drain, held, now = Drain(0, chains, 1e9, 0.0), dict[bytes, set[int]](), 0.0
    while not drain.progress.over:
        orders = drain.step(drain.chains(now), held, places(members), now)
        carry_out(held, [it for it in orders if choose() < 0.5])
        progress = drain.progress
        assert progress.open_bytes + progress.safe_bytes + progress.lost_bytes == total
        now += 1.0
        assert now < 200
    safe = sum(bool(it) for it in held.values()) * MIB
    assert drain.progress.safe_bytes <= safe


# ---- rebalance -------------------------------------------------------------------------------------------


def filled(own: float, others: float, count: int = 4) -> list[Room]:
    return [Room(it, GIB, int((own if it == 0 else others) * GIB)) for it in range(count)]


def test_it_begins_late_and_ends_early() -> None:
    rebalance = Rebalance(0, 1e9)
    mean = 0.5
    for above, active in ((END, False), (BEGIN - 0.01, False), (BEGIN + 0.01, True), (END + 0.01, True), (0.0, False)):
        own = mean + above
        others = (4 * mean - own) / 3
        surplus = rebalance.surplus_bytes(filled(own, others))
        assert rebalance.active is active
        assert surplus == (pytest.approx(above * GIB, rel=0.01) if active else 0)
    assert not Rebalance(0, 1e9).surplus_bytes([Room(0, GIB, GIB)])
    assert not Rebalance(9, 1e9).surplus_bytes(filled(0.9, 0.1))


def test_unique_chains_go_to_emptier_members_until_the_surplus_is_given() -> None:
    rebalance = Rebalance(0, 1e9)
    chains = [chain(16, 100 * it) for it in range(64)]
    held = {name: {0} for it in chains for name in it.names} | {name: {0, 2} for name in chains[0].names}
    orders = rebalance.step(chains, held, filled(0.9, 0.1), 0.0)
    given = sum(it.size_bytes for it in orders)
    assert 0.6 * GIB <= given <= 0.6 * GIB + 16 * MIB
    assert {it.target for it in orders} == {1, 2, 3}
    assert chains[0].names not in {it.names for it in orders}
    assert len(rebalance.sent) == len(orders)
    # What has arrived may be evicted here, and is not sent again.
    carry_out(held, orders[:5])
    assert [it.names for it in rebalance.arrived(held)] == [it.names for it in orders[:5]]
    assert rebalance.arrived(held) == []
    assert rebalance.step(chains, held, filled(0.9, 0.1), 0.0) == []


def test_an_order_that_is_not_carried_out_is_given_again_after_a_while() -> None:
    rebalance = Rebalance(0, 1e9)
    given = [now for now in range(0, 130, 5) if rebalance.step([chain()], {}, filled(0.9, 0.1), float(now))]
    assert given == [0, 60, 120]


def test_what_was_ordered_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.core.drain.SENT_MAX", 3)
    rebalance = Rebalance(0, 1e9)
    assert len(rebalance.step([chain(1, 10 * it) for it in range(8)], {}, filled(0.9, 0.1), 0.0)) == 8
    assert len(rebalance.sent) == 3


def test_who_has_no_free_room_or_is_above_the_mean_is_given_nothing() -> None:
    members = [Room(0, GIB, GIB), Room(1, GIB, int(0.95 * GIB)), Room(2, GIB, int(0.75 * GIB)), Room(3, GIB, 0)]
    orders = Rebalance(0, 1e9).step([chain(4, 10 * it) for it in range(20)], {}, members, 0.0)
    assert {it.target for it in orders} == {3}
    members[3] = Room(3, GIB, 0, takes=False)
    assert Rebalance(0, 1e9).step([chain()], {}, members, 0.0) == []


def test_many_givers_share_what_one_newcomer_can_take() -> None:
    """In ten seconds, each at its own word: a hundred nodes give a new one no more than one node's bandwidth."""
    members = [Room(it, GIB, int(0.85 * GIB)) for it in range(100)] + [Room(100, 64 * GIB, 0)]
    sent = 0
    for own in range(100):
        rebalance = Rebalance(own, 8 * MIB)
        rebalance.step([chain(1, 1000 * own)], {}, members, 0.0)
        for second in range(1, 11):
            chains = [chain(1, 1000 * own + 10 * second + it) for it in range(10)]
            sent += sum(it.size_bytes for it in rebalance.step(chains, {}, members, float(second)))
    # What each may have saved up for its first second comes on top.
    assert sent <= 100 * 8 * MIB + 10 * 8 * MIB + 100 * MIB
