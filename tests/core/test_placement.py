"""Placement: what is hot is found in bounded memory, and copies are made within budgets, once, where there is room."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.heat import Heat
from headwater.core.placement import LONGEST_COOL, Limits, Placement
from headwater.core.placing import SETTLE_S, Chain, Grants, Order, Purse, Reason, Room, pick

MIB = 1 << 20
GIB = 1 << 30


def names(count: int, start: int = 0) -> tuple[bytes, ...]:
    return tuple(it.to_bytes(17, "big") for it in range(start, start + count))


def chain(count: int = 4, start: int = 0, size: int = MIB, worth: float = 1.0) -> Chain:
    return Chain(names(count, start), (size,) * count, worth)


def rooms(count: int, fill: float = 0.95, zones: int = 1) -> list[Room]:
    return [Room(it, 100 * GIB, int(fill * 100 * GIB), str(it % zones)) for it in range(count)]


# ---- heat ------------------------------------------------------------------------------------------------


def test_a_rate_is_what_it_is_and_fades() -> None:
    heat = Heat(half_s=1.0)
    for turn in range(1000):
        heat.served(1, names(1), (MIB,), turn / 50)
    assert heat.rate(names(1)[0], 20.0) == pytest.approx(50, rel=0.05)
    assert heat.rate(names(1)[0], 23.0) == pytest.approx(50 / 8, rel=0.05)
    assert heat.rate(b"never", 20.0) == 0


def test_rates_survive_any_time() -> None:
    heat = Heat(half_s=1.0)
    heat.served(1, names(1), (MIB,), 0.0)
    assert heat.rate(names(1)[0], 70.0) < 1e-9
    for now in (100.0, 1e6):
        for turn in range(100):
            heat.served(1, names(1), (MIB,), now + turn / 10)
        assert heat.rate(names(1)[0], now + 10) == pytest.approx(10, rel=0.1)


def test_what_fades_away_fades_whole() -> None:
    """Counts, errors and what newcomers start from, over a time in which all are scaled down."""
    heat = Heat(8, half_s=1.0)
    cold = iter(range(1000, 10**9))
    for _ in range(100):
        for it in (1, 1, 1, 1, 1, *(next(cold) for _ in range(7))):
            heat.served(1, names(1, it), (MIB,), 0.0)
    held = [it for it in (1, *range(1000, 2000)) if heat.rate(names(1, it)[0], 0.0)]
    assert len(held) >= 4
    for _ in range(20):
        heat.served(1, names(1, 1), (MIB,), 100.0)
    assert all(heat.rate(names(1, it)[0], 100.0) >= 0 for it in held)
    for _ in range(30):
        heat.served(1, names(1, next(cold)), (MIB,), 100.0)
    assert heat.rate(names(1, 1)[0], 100.0) == pytest.approx(20 * math.log(2))


def test_readers_are_counted_once_and_forgotten() -> None:
    heat = Heat(half_s=10.0)
    for _ in range(5):
        for reader in (3, 4, 9):
            heat.served(reader, names(2), (MIB, MIB), 1.0)
    assert heat.readers(names(2)[1], 1.0) == 3
    assert heat.readers(names(2)[1], 11.0) == 3
    assert heat.readers(names(2)[1], 21.0) == 0
    heat.served(3, names(1), (MIB,), 21.0)
    assert heat.readers(names(1)[0], 41.0) == 0
    assert heat.readers(b"never", 1.0) == 0


@given(st.lists(st.integers(0, 40), max_size=300), st.integers(2, 16))
@settings(max_examples=30, deadline=None)
def test_memory_is_bounded_and_no_rate_is_overstated(story: list[int], names_max: int) -> None:
    heat, true = Heat(names_max, half_s=1e9), Counter[int]()
    for it in story:
        heat.served(0, names(1, it), (MIB,), 0.0)
        true[it] += 1
        assert len(heat) <= names_max
    one = Heat(half_s=1e9)
    one.served(0, names(1), (MIB,), 0.0)
    unit = one.rate(names(1)[0], 0.0)
    for it, count in true.items():
        assert heat.rate(names(1, it)[0], 0.0) <= count * unit * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_hot_is_found_in_a_flood(seed: int) -> None:
    """A hundred times as many cold names as there is room, and a hot one in fifty reads."""
    draw, heat = random.Random(seed), Heat(64, half_s=100.0)
    for turn in range(6400):
        now = turn / 100
        at = 0 if draw.random() < 0.05 else draw.randrange(1, 1 << 30)
        heat.served(draw.randrange(10), names(1, at), (MIB,), now)
    (found,) = heat.chains(1.0, 2, 64.0)
    assert found.names == names(1), f"seed {seed}"
    # 5 reads a second, of which 36 % are in the sum by then.
    assert found.worth == pytest.approx(5 * 0.36, rel=0.5)


def test_what_was_hot_long_ago_does_not_keep_out_what_is_read_again_and_again() -> None:
    """It is thrown out each time before it has as many reads as those; what left counts when it comes back."""
    heat = Heat(8, half_s=1e9)
    for it in range(4):
        for _ in range(10):
            heat.served(1, names(1, it), (MIB,), 0.0)
    for turn in range(60):
        for it in (100, *range(1000 + 4 * turn, 1004 + 4 * turn)):
            heat.served(1, names(1, it), (MIB,), 0.0)
    rates = {it: heat.rate(names(1, it)[0], 0.0) for it in (0, 100)}
    assert rates[100] > 3 * rates[0]
    assert len(heat) <= 8


def test_hot_runs_come_in_the_order_of_their_prompt() -> None:
    heat = Heat()
    for turn in range(100):
        heat.served(turn % 5, names(6), (MIB,) * 6, 1.0)
        heat.served(turn % 5, (*names(3), *names(2, 100)), (MIB,) * 5, 1.0)
        # A tail alone, and once a name of which nobody reads what is before.
        heat.served(turn % 5, names(2, 4), (MIB,) * 2, 1.0)
    heat.served(1, names(20, 200), (MIB,) * 20, 1.0)
    found = {it.names for it in heat.chains(1.0, 2, 1.0)}
    assert found == {names(6), (*names(3), *names(2, 100))}
    heat.forget(names(6))
    assert {it.names for it in heat.chains(1.0, 2, 1.0)} == {names(2, 100)}


def test_a_peer_that_asks_in_a_circle_does_no_harm() -> None:
    heat = Heat()
    for run in ((0, 1), (1, 0), (1, 2)):
        for reader in range(20):
            heat.served(reader, [names(1, it)[0] for it in run], (MIB, MIB), 1.0)
    assert [it.names for it in heat.chains(0.5, 2, 1.0)] == [names(3)]


# ---- who takes it ---------------------------------------------------------------------------------------


def picked(it: Chain, places: list[Room], held: dict[bytes, set[int]] | None = None, **more: object) -> int | None:
    zones = more.get("zones", ())
    assert isinstance(zones, tuple | set)
    found = pick(it, places, held or {}, Grants(0.1), {0}, zones)
    return found[0].number if found is not None else None


def test_another_zone_is_preferred_then_who_has_most_then_who_is_idle_then_who_is_empty() -> None:
    it = chain()
    assert picked(it, rooms(6, zones=2), zones={"0"}) in {1, 3, 5}
    assert picked(it, rooms(3, zones=1), zones={"0"}) in {1, 2}
    assert picked(it, rooms(6), {name: {4} for name in it.names[:3]}) == 4
    busy = [Room(1, 100 * GIB, 0, load=0.9), Room(2, 100 * GIB, 0, load=0.1)]
    assert picked(it, busy) == 2
    assert picked(it, [*rooms(3), Room(7, 100 * GIB, 0)]) == 7


def test_nobody_is_picked_who_takes_nothing_has_no_room_or_has_it_all() -> None:
    it = chain()
    assert picked(it, [Room(1, 100 * GIB, 0, takes=False)]) is None
    assert picked(it, [Room(0, 100 * GIB, 0)]) is None
    assert picked(it, [Room(1, 30 * MIB, 30 * MIB)]) is None
    assert picked(it, [Room(1, 100 * GIB, 0)], {name: {1} for name in it.names}) is None
    assert picked(it, [Room(1, 0, 0)]) is None


def test_who_asks_does_not_matter_and_chains_are_spread() -> None:
    found = [picked(chain(start=10 * it), rooms(9)) for it in range(60)]
    assert found == [picked(chain(start=10 * it), rooms(9)[::-1]) for it in range(60)]
    assert len(set(found)) == 8


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 200)), max_size=60))
@settings(max_examples=30, deadline=None)
def test_a_purse_spends_no_more_than_its_rate(story: list[tuple[float, int]]) -> None:
    purse, now, spent = Purse(100.0), 0.0, 0
    for wait, size in story:
        now += wait
        purse.fill(now)
        if purse.spend(size):
            spent += size
    assert spent <= 100 * (now + 1) + 200


# ---- hot prefixes ------------------------------------------------------------------------------------------


def warmed(limits: Limits | None = None, readers: int = 5, rate: float = 2.0, seconds: float = 60.0) -> Placement:
    """A node that has served one chain for a while."""
    found = Placement(0, limits)
    serve(found, 0.0, seconds, rate, readers)
    return found


def serve(found: Placement, start: float, end: float, rate: float, readers: int = 5) -> None:
    for turn in range(int((end - start) * rate)):
        found.served(1 + turn % readers, chain().names, chain().sizes, start + turn / rate)


def hot(found: Placement, now: float, held: set[int], places: list[Room] | None = None) -> list[Order]:
    chains = found.hot_chains(now)
    return found.hot(chains, dict.fromkeys(chain().names, held), places or rooms(6), now)


def test_what_many_read_often_is_offered() -> None:
    (order, *more) = hot(warmed(rate=0.6), 60.0, {0})
    assert not more
    assert (order.names, order.size_bytes, order.reason) == (chain().names, 4 * MIB, Reason.HOT)
    assert order.target in range(1, 6)


def test_what_few_read_or_seldom_is_not() -> None:
    assert hot(warmed(readers=1), 60.0, {0}) == []
    assert hot(warmed(rate=0.3), 60.0, {0}) == []
    assert hot(warmed(), 120.0, {0}) == []


def test_what_is_much_hotter_is_offered_to_several_but_not_to_more_than_the_most() -> None:
    orders = hot(warmed(rate=5.0), 60.0, {0})
    assert len({it.target for it in orders}) == len(orders) == 2
    assert len(hot(warmed(rate=5.0), 60.0, {0, 1})) == 1
    assert hot(warmed(rate=5.0), 60.0, {0, 1, 2}) == []
    # We hold it, whatever the directory says.
    assert len(hot(warmed(rate=5.0), 60.0, {1})) == 1


def test_offers_do_not_flap() -> None:
    """A target that evicts at once what it has pulled: it is asked ever more seldom, until the prefix was cold."""
    found = warmed()
    asked: list[int] = []
    for second in range(60, 1400):
        serve(found, second, second + 1, 2.0)
        if hot(found, second + 1, {0}):
            asked.append(second)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= 10
    assert len(asked) <= 9
    assert gaps[-2:] == [10 * LONGEST_COOL] * 2
    # Cold, and hot again: it is new.
    found.hot_chains(3000.0)
    serve(found, 3000.0, 3060.0, 2.0)
    assert hot(found, 3060.0, {0})
    assert not hot(found, 3061.0, {0})
    serve(found, 3061.0, 3071.0, 2.0)
    assert hot(found, 3071.0, {0})


def test_nothing_is_offered_for_which_there_is_no_money() -> None:
    found = warmed(Limits(bytes_s=MIB / 10, replicas_max=9), rate=8.0)
    assert len(hot(found, 60.0, {0})) == 1
    # 4 MiB at 0.1 MiB a second.
    serve(found, 60.0, 95.0, 8.0)
    assert hot(found, 95.0, {0}) == []
    serve(found, 95.0, 102.0, 8.0)
    assert len(hot(found, 102.0, {0})) == 1


def test_a_full_member_is_given_a_share_of_its_capacity_only() -> None:
    full = [Room(1, 100 * MIB, 100 * MIB)]
    found = Placement(0, Limits(replicas_max=2, bytes_s=GIB))
    chains = [chain(start=10 * it) for it in range(5)]
    assert len(found.hot(chains, {}, full, 0.0)) == 2
    assert len(found.hot(chains, {}, full, SETTLE_S - 1)) == 0
    assert len(found.hot(chains, {}, full, SETTLE_S)) == 2


# ---- copies that somebody has asked for -------------------------------------------------------------------


def test_a_wish_is_kept_until_it_is_fulfilled() -> None:
    found = Placement(0)
    assert found.wish(chain(), 3, 0.0)
    assert found.wished_chains(0.0) == [chain()]
    orders = found.wished([chain()], {}, rooms(6, zones=3), 0.0)
    assert len({it.target for it in orders}) == 2
    assert {it.target % 3 for it in orders} == {1, 2}
    assert all(it.reason is Reason.REPLICAS for it in orders)
    assert found.wished_chains(9.0) == []
    # One of them has it by now; the other has forgotten.
    held = {name: {0, orders[0].target} for name in chain().names}
    assert len(found.wished(found.wished_chains(10.0), held, rooms(6), 10.0)) == 1
    held = {name: {0, 1, 2} for name in chain().names}
    assert found.wished(found.wished_chains(20.0), held, rooms(6), 20.0) == []
    assert found.wished_chains(1000.0) == []
    assert found.failed_wishes == 0


def test_a_chunk_that_is_held_in_parts_is_not_held() -> None:
    found = Placement(0)
    found.wish(chain(), 2, 0.0)
    held = {name: {0, 1} for name in chain().names[:-1]}
    (order,) = found.wished([chain()], held, rooms(2), 0.0)
    assert (order.target, order.size_bytes, order.names) == (1, MIB, chain().names)


def test_a_wish_that_nobody_fulfils_is_given_up() -> None:
    found, now = Placement(0), 0.0
    found.wish(chain(), 2, now)
    while found.wished_chains(now):
        found.wished(found.wished_chains(now), {}, rooms(3), now)
        now += 10.0
    assert now == 60.0
    assert found.failed_wishes == 1


def test_wishes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.core.placement.REMEMBERED_MAX", 3)
    found = Placement(0)
    assert [found.wish(chain(start=10 * it), 2, 0.0) for it in range(5)] == [True, True, True, False, False]
    assert found.wish(chain(start=0), 3, 0.0)
