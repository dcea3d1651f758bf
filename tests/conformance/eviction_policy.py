"""What every EvictionPolicy must do; subclass it with your own and let pytest collect the subclass.

class TestMine(EvictionPolicySuite):
    def policy(self) -> EvictionPolicy:
        return Mine()
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from headwater.ports import EvictionPolicy


def always(_: int) -> bool:
    return True


def never(_: int) -> bool:
    return False


def only(*entries: int) -> Callable[[int], bool]:
    return lambda entry: entry in entries


def name(entry: int) -> bytes:
    return entry.to_bytes(16, "little")


class EvictionPolicySuite:
    """The contract of `headwater.ports.EvictionPolicy`."""

    def policy(self) -> EvictionPolicy:
        """A new, empty policy."""
        raise NotImplementedError

    def filled(self, count: int) -> EvictionPolicy:
        policy = self.policy()
        for entry in range(count):
            policy.insert(entry, name(entry))
        return policy

    def test_empty_has_no_victim(self) -> None:
        policy = self.policy()
        assert len(policy) == 0
        assert policy.victim(always) is None

    def test_each_entry_leaves_exactly_once(self) -> None:
        policy = self.filled(20)
        assert len(policy) == 20
        assert sorted(policy.victim(always) for _ in range(20)) == list(range(20))  # type: ignore[type-var]
        assert len(policy) == 0
        assert policy.victim(always) is None

    def test_entries_in_use_stay_and_are_not_forgotten(self) -> None:
        policy = self.filled(10)
        for entry in (0, 3, 3, 3, 3, 9):
            policy.access(entry)
        for _ in range(3):
            assert policy.victim(never) is None
            assert len(policy) == 10
        assert sorted(policy.victim(always) for _ in range(10)) == list(range(10))  # type: ignore[type-var]

    @pytest.mark.parametrize("accessed", ["none", "the free one", "the others", "all"])
    @pytest.mark.parametrize("settled", [0, 1, 6])
    def test_the_one_that_may_leave_is_found(self, accessed: str, settled: int) -> None:
        """Wherever it stands, and however often it or the others were used; `settled` entries left and came back."""
        count = 12 + settled
        for free in range(count):
            policy = self.filled(count)
            for entry in range(settled):
                assert policy.victim(only(entry)) == entry
                policy.insert(entry, name(entry))
            used = {"none": [], "the free one": [free], "all": range(count)}.get(accessed)
            for entry in (it for it in range(count) if it != free) if used is None else used:
                for _ in range(5):
                    policy.access(entry)
            assert policy.victim(only(free)) == free
            assert len(policy) == count - 1

    @pytest.mark.parametrize("count", [3, 70, 300])
    def test_the_one_that_may_leave_is_found_among_many_in_use(self, count: int) -> None:
        """After all have been found in use, once or again and again."""
        for free in range(0, count, 1 + count // 40):
            policy = self.filled(count)
            for _ in range(free % 3 + 1):
                assert policy.victim(never) is None
            assert policy.victim(only(free)) == free
            assert policy.victim(only(free)) is None
            assert {policy.victim(always) for _ in range(count - 1)} == set(range(count)) - {free}

    def test_a_removed_entry_is_no_victim(self) -> None:
        policy = self.filled(4)
        policy.remove(2)
        policy.remove(2)
        policy.remove(77)
        assert len(policy) == 3
        assert {policy.victim(always) for _ in range(4)} == {0, 1, 3, None}

    def test_numbers_are_used_again(self) -> None:
        policy = self.filled(3)
        for turn in range(50):
            entry = policy.victim(always)
            assert entry is not None
            policy.insert(entry, name(100 + turn))
            assert len(policy) == 3

    def test_access_keeps_an_entry_longer_than_its_equals(self) -> None:
        policy = self.filled(10)
        policy.access(0)
        left = [policy.victim(always) for _ in range(10)]
        assert left.index(0) > 0

    def test_a_parent_leaves_after_its_children(self) -> None:
        # A chain 0 <- 1 <- 2 ... and a bush 20 <- 21..29, inserted in either direction.
        children = {parent: {parent + 1} for parent in range(19)} | {20: set(range(21, 30))}
        parents = {child: parent for parent, its in children.items() for child in its}
        for order, is_told in itertools.product((range(30), range(29, -1, -1)), (True, False)):
            policy = self.policy()
            resident = set(order)
            for entry in order:
                policy.insert(entry, name(entry), parents.get(entry, -1) if is_told else -1)

            def is_leaf(entry: int, resident: set[int] = resident) -> bool:
                return not children.get(entry, set()) & resident

            for _ in range(30):
                victim = policy.victim(is_leaf)
                assert victim is not None
                assert is_leaf(victim)
                resident.discard(victim)
            assert not resident

    def test_equal_histories_give_equal_victims(self) -> None:
        assert self.story(7) == self.story(7)

    @pytest.mark.parametrize("seed", range(20))
    def test_any_history_agrees_with_a_set(self, seed: int) -> None:
        self.story(seed)

    def story(self, seed: int) -> list[int | None]:
        """A random history, checked against a plain set; the victims."""
        rng = random.Random(seed)
        policy, resident, victims = self.policy(), set[int](), list[int | None]()
        for step in range(400):
            choice = rng.random()
            if choice < 0.35:
                entry = rng.randrange(60)
                if entry not in resident:
                    # Whatever the parent is: resident, not yet, or no longer.
                    policy.insert(entry, name(rng.randrange(90)), rng.choice((-1, (entry + rng.randrange(1, 60)) % 60)))
                    resident.add(entry)
            elif choice < 0.6 and resident:
                policy.access(rng.choice(sorted(resident)))
            elif choice < 0.7:
                entry = rng.randrange(60)
                policy.remove(entry)
                resident.discard(entry)
            else:
                allowed = {entry for entry in sorted(resident) if rng.random() < rng.choice((0.05, 0.5, 1.0))}
                found = policy.victim(allowed.__contains__)
                assert (found in allowed) if allowed else found is None, f"seed {seed}, step {step}"
                resident.discard(-1 if found is None else found)
                victims.append(found)
            assert len(policy) == len(resident), f"seed {seed}, step {step}"
        return victims
