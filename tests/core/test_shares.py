"""Service is shared by deficits: each tenant gets its share whatever others push, and saves no credit."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.shares import OTHERS, Shares, work_tokens
from headwater.fleet import Ask

QUANTUM = 1000


def ask(name: str, tenant: str = "", priority: int = 0) -> Ask:
    return Ask(name, 100, (), 16, tenant=tenant, priority=priority)


def served(shares: Shares, count: int) -> list[Ask]:
    found = [shares.pop() for _ in range(count)]
    return [it for it in found if it is not None]


def test_one_tenant_is_served_in_order() -> None:
    shares = Shares()
    assert shares.pop() is None
    for at in range(5):
        shares.push(ask(str(at)), 10_000.0)
    assert len(shares) == 5
    assert [it.request for it in served(shares, 6)] == list("01234")
    assert len(shares) == 0


@given(
    st.floats(0.2, 5.0),
    st.lists(st.integers(1, 3 * QUANTUM), min_size=30, max_size=30),
    st.lists(st.integers(1, 3 * QUANTUM), min_size=30, max_size=30),
    st.integers(0, 20),
)
@settings(max_examples=30, deadline=None)
def test_a_flood_takes_no_more_than_its_share(weight: float, few: list[int], many: list[int], before: int) -> None:
    """At every time at which both wait, the steady tenant has had its share, within a quantum and a request of each."""
    shares = Shares({"steady": weight}, quantum=QUANTUM)
    work: dict[str, int] = {}
    for at in range(300):
        work[f"f{at}"] = many[at % 30]
        shares.push(ask(f"f{at}", "flood"), many[at % 30])
        if at == 0:
            served(shares, before)
    for at, tokens in enumerate(few):
        work[f"s{at}"] = tokens
        shares.push(ask(f"s{at}", "steady"), tokens)
    had = Counter[str]()
    share = weight / (1 + weight)
    while shares.waiting(0, "steady")[0] and shares.waiting(0, "flood")[0]:
        it = shares.pop()
        assert it is not None
        had[it.tenant] += work[it.request]
        slack = QUANTUM * max(weight, 1) + max(few) + max(many)
        assert had["steady"] >= share * had.total() - slack
        assert had["flood"] >= (1 - share) * had.total() - slack


def test_a_light_tenant_waits_no_longer_for_a_greater_flood() -> None:
    def position(flood: int) -> int:
        shares = Shares(quantum=QUANTUM)
        for at in range(flood):
            shares.push(ask(f"f{at}", "flood"), 500)
        served(shares, 3)
        shares.push(ask("light", "light"), 500)
        order = [it.request for it in served(shares, flood)]
        return order.index("light")

    assert position(20) == position(2000) <= 2


@pytest.mark.parametrize("seed", range(2))
def test_many_tenants_get_work_by_weight(seed: int) -> None:
    draw = random.Random(seed)
    weights = {f"t{at}": draw.choice([0.5, 1.0, 2.0, 4.0]) for at in range(8)}
    shares, work = Shares(weights, quantum=QUANTUM), dict[str, int]()
    for at in range(8000):
        tenant, tokens = f"t{draw.randrange(8)}", draw.randrange(1, 2000)
        work[str(at)] = tokens
        shares.push(ask(str(at), tenant), tokens)
    had = Counter[str]()
    for it in served(shares, 2000):
        had[it.tenant] += work[it.request]
    each = had.total() / sum(weights.values())
    assert max(abs(had[it] / weights[it] / each - 1) for it in weights) < 0.1, f"seed {seed}"


def test_a_debt_is_reckoned_and_not_walked_through() -> None:
    """A request of a million quanta costs its tenant as many rounds, at once."""
    shares = Shares(quantum=1)
    shares.push(ask("huge", "a"), 1_000_000)
    shares.push(ask("more", "a"), 1)
    for at in range(50):
        shares.push(ask(f"b{at}", "b"), 1)
    order = [it.request for it in served(shares, 52)]
    assert order[0] == "huge" and order[-1] == "more"


def test_an_idle_tenant_saves_no_credit() -> None:
    shares = Shares(quantum=QUANTUM)
    shares.push(ask("early", "idle"), 1)
    for at in range(200):
        shares.push(ask(f"b{at}", "busy"), QUANTUM)
    served(shares, 100)
    for at in range(50):
        shares.push(ask(f"i{at}", "idle"), QUANTUM)
    had = Counter(it.tenant for it in served(shares, 20))
    assert abs(had["idle"] - 10) <= 1


def test_what_is_left_of_a_turn_is_not_saved_for_the_next() -> None:
    shares = Shares(quantum=QUANTUM)
    shares.push(ask("early", "idle"), 1)
    for at in range(9):
        shares.push(ask(f"b{at}", "busy"), QUANTUM)
    assert [it.tenant for it in served(shares, 2)] == ["idle", "busy"]
    for at in range(9):  # while it has 999 of the last turn left, or would have
        shares.push(ask(f"i{at}", "idle"), QUANTUM)
    assert Counter(it.tenant for it in served(shares, 4)) == {"idle": 2, "busy": 2}


@pytest.mark.parametrize("away", [False, True])
def test_leaving_does_not_cancel_a_debt(away: bool) -> None:
    """Who comes with one large request at a time gets no more than who keeps them waiting, even if it only comes again
    after somebody else's turn."""
    shares, had, last = Shares(quantum=QUANTUM), Counter[str](), ""
    for at in range(400):
        shares.push(ask(f"b{at}", "busy"), QUANTUM)
    for at in range(200):
        if not shares.waiting(0, "sly")[0] and not (away and last == "sly"):
            shares.push(ask(f"s{at}", "sly"), 10 * QUANTUM)
        it = shares.pop()
        assert it is not None
        last = it.tenant
        had[last] += 10 if last == "sly" else 1
    assert had["sly"] <= had["busy"] + 20


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(1, 5000)), max_size=60), st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_of_calls(pushed: list[tuple[int, str, int]], data: st.DataObject) -> None:
    """Nothing is lost or served twice; never a lower priority while a higher waits; in a tenant's order; it ends."""
    shares, waiting = Shares(quantum=QUANTUM), dict[str, Ask]()
    for at, (priority, tenant, work) in enumerate(pushed):
        waiting[str(at)] = ask(str(at), tenant, priority)
        shares.push(waiting[str(at)], work)
        action = data.draw(st.sampled_from(["push", "pop", "back", "cancel"]))
        if action in ("pop", "back"):
            it = shares.pop()
            assert it is not None and it.priority == max(each.priority for each in waiting.values())
            same = [each for each in waiting.values() if (each.tenant, each.priority) == (it.tenant, it.priority)]
            assert it is same[0]
            if action == "back":
                shares.put_back(it)
            else:
                del waiting[it.request]
        elif action == "cancel" and waiting:
            name = data.draw(st.sampled_from(sorted(waiting)))
            assert shares.cancel(name) and not shares.cancel(name)
            del waiting[name]
        assert len(shares) == len(waiting)
    for _ in range(len(waiting)):
        it = shares.pop()
        assert it is not None
        del waiting[it.request]
    assert not waiting and shares.pop() is None
    assert shares.waiting(0, "a") == (0, 0.0)


def test_what_does_not_fit_is_put_back_uncharged() -> None:
    def order(back: int) -> list[str]:
        shares = Shares(quantum=QUANTUM)
        for at in range(20):
            shares.push(ask(f"a{at}", "a"), 700)
            shares.push(ask(f"b{at}", "b"), 300)
        found = []
        while (it := shares.pop()) is not None:
            for _ in range(back):
                shares.put_back(it)
                assert shares.pop() is it
            found.append(it.request)
        return found

    assert order(0) == order(3)
    shares = Shares()
    shares.push(ask("only"), 5)
    it = shares.pop()
    assert it is not None
    shares.put_back(it)
    assert len(shares) == 1 and shares.waiting(0, "") == (1, 5)
    with pytest.raises(AssertionError):
        shares.put_back(it)


def test_the_longest_prefix_goes_first_until_the_oldest_has_waited() -> None:
    prefixes = {"old": 0, "short": 10, "long": 90, "beyond": 100}

    def new() -> Shares:
        shares = Shares(prefix=lambda it: prefixes[it.request], window=3, patience_s=1.0)
        for name in prefixes:
            shares.push(ask(name), 1, now=0.0)
        return shares

    assert [it.request for it in served(new(), 4)] == ["long", "beyond", "short", "old"]
    late = new()
    assert [late.pop(1.5).request for _ in range(4)] == list(prefixes)  # type: ignore[union-attr]


def test_locality_ends_with_the_deficit() -> None:
    """A tenant whose prompts are all cached still gets its share and no more."""
    shares = Shares(quantum=QUANTUM, prefix=lambda it: 1000 if it.tenant == "warm" else 0)
    for at in range(100):
        shares.push(ask(f"w{at}", "warm"), 400)
        shares.push(ask(f"c{at}", "cold"), 400)
    had = Counter(it.tenant for it in served(shares, 60))
    assert abs(had["warm"] - had["cold"]) <= 3


def test_tenants_are_bounded() -> None:
    """Those beyond share one line, and get one share."""
    shares = Shares(tenants_max=4, quantum=1)
    for at in range(40):
        for tenant in range(4):
            shares.push(ask(f"{tenant}-{at}", f"t{tenant}"), 1)
        shares.push(ask(f"x{at}", f"x{at}"), 1)
    assert shares.waiting(0, OTHERS) == (40, 40)
    had = Counter(it.tenant[0] for it in served(shares, 50))
    assert had["x"] == 10


def test_work_counts_answers_more_than_prompts() -> None:
    assert work_tokens(1000, 100) == 1200
    with pytest.raises(AssertionError):
        Shares().push(ask("free"), 0)
    with pytest.raises(AssertionError):
        Shares({"a": 0.0})
