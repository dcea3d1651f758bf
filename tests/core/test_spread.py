"""Eviction that spares last copies: what it prefers, what it costs, and that it is its inner policy otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headwater.core.eviction import POLICIES
from headwater.core.spread import LOOKS_MAX, SPARED_LEAST, Copies, SpreadEviction

ALL = pytest.mark.parametrize("inner", sorted(POLICIES))


def name(entry: int) -> bytes:
    return entry.to_bytes(16, "little")


def always(_: int) -> bool:
    return True


def filled(inner: str, count: int, held: range | set[int] = range(0)) -> SpreadEviction:
    copies = Copies()
    copies.told({name(it): 1 for it in held})
    policy = SpreadEviction(POLICIES[inner](), copies)
    for entry in range(count):
        policy.insert(entry, name(entry))
    return policy


@ALL
def test_what_others_hold_leaves_first(inner: str) -> None:
    policy = filled(inner, 400, held=range(0, 400, 2))
    left = [policy.victim(always) for _ in range(400)]
    assert sorted(it for it in left if it is not None) == list(range(400))
    # Until as many are spared as may be, only such leave.
    assert all(it is not None and it % 2 == 0 for it in left[:SPARED_LEAST])
    assert policy.preferred >= SPARED_LEAST - 1


@ALL
def test_a_last_copy_stays_for_a_while_and_not_for_ever(inner: str) -> None:
    """Most victims are held elsewhere, and yet the others leave some time after their turn."""
    policy = filled(inner, 1000, held={it for it in range(1000) if it % 10})
    left = [policy.victim(always) for _ in range(1000)]
    order = {entry: at for at, entry in enumerate(left)}
    late = [order[it] - it for it in range(0, 800, 10)]
    assert min(late[:40]) > 50
    assert max(late) <= 2 * 1000 // 8 + SPARED_LEAST


def test_it_looks_no_further_than_a_few_candidates() -> None:
    """One replicated chunk among the youngest: it does not leave long before its turn."""
    policy = filled("lru", 400, held={300})
    left = [policy.victim(always) for _ in range(400)]
    assert 300 - SPARED_LEAST - LOOKS_MAX <= left.index(300) <= 300
    assert max(at - it for at, it in enumerate(left) if it is not None) <= 2 * SPARED_LEAST + LOOKS_MAX


@ALL
def test_work_is_bounded(inner: str) -> None:
    for held in ({1999}, set(range(0, 2000, 3)), set(range(1000, 2000))):
        policy, total = filled(inner, 2000, held), 0
        for _ in range(1000):
            asked: list[int] = []

            def evictable(entry: int, asked: list[int] = asked) -> bool:
                asked.append(entry)
                return True

            spared = set(policy._spared)
            assert policy.victim(evictable) is not None
            # The inner policy itself looks at up to 68 of each queue that wait.
            assert len(asked) <= 2 * 68 + LOOKS_MAX + 1
            assert len(set(policy._spared) - spared) <= LOOKS_MAX
            assert len(policy._spared) <= 250
            total += len(asked)
        assert total <= 1000 * 80


def story(policy: object, seed: int, told: Callable[[int], None]) -> list[int | None]:
    """A random history with leases and re-used numbers; its victims."""
    draw, resident, victims = random.Random(seed), set[int](), list[int | None]()
    call: Callable[[str], Callable[..., int | None]] = lambda it: getattr(policy, it)  # noqa: E731
    for step in range(600):
        kind = draw.random()
        if kind < 0.45:
            entry = draw.randrange(80)
            if entry not in resident:
                call("insert")(entry, name(draw.randrange(120)), draw.choice((-1, entry - 1)))
                resident.add(entry)
        elif kind < 0.6 and resident:
            call("access")(draw.choice(sorted(resident)))
        elif kind < 0.65:
            entry = draw.randrange(80)
            call("remove")(entry)
            resident.discard(entry)
        elif kind < 0.7:
            told(draw.randrange(120))
        else:
            free = {it for it in sorted(resident) if draw.random() < 0.7}
            found = call("victim")(free.__contains__)
            assert (found in free) if free else found is None, f"seed {seed}, step {step}"
            victims.append(found)
            resident.discard(-1 if found is None else found)
        assert len(policy) == len(resident), f"seed {seed}, step {step}"  # type: ignore[arg-type]
    return victims


@ALL
@pytest.mark.parametrize("seed", range(5))
def test_without_copies_elsewhere_it_is_the_inner_policy(inner: str, seed: int) -> None:
    copies = Copies()
    alone = story(POLICIES[inner](), seed, lambda _: None)
    assert story(SpreadEviction(POLICIES[inner](), copies), seed, lambda it: copies.told({name(it): 0})) == alone


@ALL
@pytest.mark.parametrize("seed", range(10))
def test_any_history_with_copies_agrees_with_a_set(inner: str, seed: int) -> None:
    copies, draw = Copies(), random.Random(seed)
    story(SpreadEviction(POLICIES[inner](), copies), seed, lambda it: copies.told({name(it): draw.randrange(3)}))


def test_who_was_spared_and_is_used_or_gone_is_spared_no_more() -> None:
    policy = filled("lru", 40, held={39})
    assert policy.victim(always) == LOOKS_MAX
    assert policy._spared.keys() == set(range(LOOKS_MAX))
    policy.access(3)
    policy.remove(4)
    assert not policy._spared.keys() & {3, 4}
    # The number is another chunk's now.
    policy.insert(4, name(1000))
    while (found := policy.victim(always)) is not None:
        assert found not in policy._spared
    assert not policy._spared


def test_the_policy_keeps_its_order_where_hardly_anything_is_held_twice() -> None:
    policy = filled("lru", 2000, held={1999})
    for _ in range(300):
        policy.victim(always)
    assert policy._looks == 1
    policy._copies.told({name(it): 1 for it in range(600, 1000)})
    for _ in range(400):
        policy.victim(always)
    assert policy._looks == LOOKS_MAX


def test_copies_are_bounded_and_forgotten() -> None:
    copies = Copies(keys_max=3)
    copies.told({name(it): it for it in range(6)})
    assert len(copies) == 3
    assert [copies.others(name(it)) for it in range(6)] == [0, 0, 0, 3, 4, 5]
    copies.told({name(4): 0, name(9): -1})
    assert copies.others(name(4)) == 0
    assert len(copies) == 2
