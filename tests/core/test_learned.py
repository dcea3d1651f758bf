"""What `Learned` learns, how fast it learns something else, and the arithmetic under it."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.eviction import LRU
from headwater.core.learned import (
    CLOCK_MASK,
    GHOSTS_LEAST,
    LEARN_LEAST,
    ROUND,
    STARTS,
    USE,
    Ghosts,
    Learned,
    band,
    best_rates,
)
from headwater.core.queues import NONE


def always(_: int) -> bool:
    return True


class Player:
    """A cache of single chunks: keys are numbers, entries are slots."""

    def __init__(self, policy: LRU | Learned, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.slot_of: dict[int, int] = {}
        self.key_in: dict[int, int] = {}

    def hits(self, keys: Iterable[int]) -> int:
        hits = 0
        for key in keys:
            if key in self.slot_of:
                hits += 1
                self.policy.access(self.slot_of[key])
                continue
            slot: int | None = len(self.key_in)
            if slot == self.capacity:
                slot = self.policy.victim(always)
                assert slot is not None
                del self.slot_of[self.key_in[slot]]
            assert slot is not None
            self.slot_of[key], self.key_in[slot] = slot, key
            self.policy.insert(slot, (key * 2654435761 % 2**32).to_bytes(4, "little"))
        return hits


def far_apart(rng: random.Random, rounds: int, first: int) -> list[int]:
    """What is used twice is used again and again, far apart; most is used once."""
    return [rng.randrange(300) if rng.random() < 0.3 else first + number for number in range(rounds)]


def twice_in_a_row(rounds: int, first: int, apart: int) -> list[int]:
    """Everything is used twice, `apart` uses after the first time, and never again."""
    keys: list[int] = []
    for number in range(rounds // 2):
        keys.append(first + number)
        if number >= apart:
            keys.append(first + number - apart)
    return keys


def test_what_is_used_once_does_not_push_out_what_is_used_often() -> None:
    keys = far_apart(random.Random(1), 30_000, 1000)
    recent, learned = Player(LRU(), 400), Player(Learned(), 400)
    recent.hits(keys[:10_000])
    learned.hits(keys[:10_000])
    most = sum(key < 1000 for key in keys[10_000:])
    assert recent.hits(keys[10_000:]) < 0.5 * most
    assert learned.hits(keys[10_000:]) > 0.9 * most


def test_what_it_learned_it_unlearns() -> None:
    """After the workload has changed to one that LRU serves best, the experience of the old one fades."""
    before, after = far_apart(random.Random(2), 20_000, 1000), twice_in_a_row(60_000, 10**6, 150)
    learned, recent = Player(Learned(), 400), Player(LRU(), 400)
    learned.hits(before)
    assert recent.hits(after[20_000:]) > 0.49 * 40_000
    learned.hits(after[:20_000])
    assert learned.hits(after[20_000:]) > 0.45 * 40_000


def test_without_experience_it_is_lru() -> None:
    rng = random.Random(3)
    keys = [rng.randrange(120) for _ in range(LEARN_LEAST - 1)]
    recent, learned = Player(LRU(), 40), Player(Learned(), 40)
    for key in keys:
        recent.hits([key])
        learned.hits([key])
        assert recent.slot_of == learned.slot_of


def test_an_entry_that_comes_back_has_its_uses_again() -> None:
    policy = Learned()
    for key in (b"aaaa", b"bbbb"):
        policy.insert(0, key)
        assert policy.victim(always) == 0
    policy.insert(5, b"aaaa")
    assert repr(policy).startswith("Learned([0, 0, 1, 0, 0, 0], parked=0")
    policy.insert(6, b"cccc", 5)  # its chain goes on behind it now
    assert repr(policy).startswith("Learned([1, 0, 0, 1, 0, 0], parked=0")


def test_an_entry_that_is_put_back_was_not_used() -> None:
    policy = Learned()
    for entry in range(3):
        policy.insert(entry, b"key%d" % entry)
    for turn in range(12):
        assert policy.victim(always) == turn % 3
        policy.insert(turn % 3, b"key%d" % (turn % 3))
        assert repr(policy).startswith("Learned([3, 0, 0, 0, 0, 0], parked=0")


def test_a_parent_is_free_as_soon_as_its_last_child_has_left() -> None:
    """Also when that child is deleted, and not asked for again and again before."""
    policy, resident, asked = Learned(), set(range(200)), list[int]()

    def is_leaf(entry: int) -> bool:
        asked.append(entry)
        return entry != 0 or resident == {0}

    policy.insert(0, b"root")
    for entry in range(1, 200):
        policy.insert(entry, b"%d" % entry, 0)
    for entry in range(1, 200):
        policy.remove(entry)
        resident.discard(entry)
    assert policy.victim(is_leaf) == 0
    assert len(asked) == 1


def test_uses_are_counted_by_kind_and_age_also_those_of_ghosts() -> None:
    policy = Learned()
    policy.insert(0, b"aaaa")
    for entry in range(1, 10):
        policy.insert(entry, b"key%d" % entry)
    policy.access(0)  # its first use again, 10 uses after it came
    assert (policy._uses[0][band(10)], sum(map(sum, policy._uses))) == (USE, USE)
    for _ in range(10):
        policy.victim(always)
    for entry in range(1, 5):
        policy.insert(entry, b"new%d" % entry)
    policy.insert(7, b"aaaa")  # used once, and now again after 5 uses
    assert (policy._uses[2][band(5)], sum(map(sum, policy._uses))) == (USE, 2 * USE)


def test_exposure_is_what_a_round_finds_in_proportion() -> None:
    """16 entries are found 4 times in a round of 64; of 8,192 places for ghosts it sees 64, where there may be one."""
    policy = Learned()
    for entry in range(16):
        policy.insert(entry, (entry + 1).to_bytes(4, "little"))
    for entry in range(4):
        assert policy.victim(always) == entry
    for entry in (4, 5) * ((ROUND - 16) // 2):
        policy.access(entry)
    entries, ghosts = 12 * 4 * 16, 4 * GHOSTS_LEAST
    assert sum(map(sum, policy._exposure)) == entries + ghosts
    assert sum(policy._exposure[0]) == 10 * 4 * 16 + ghosts


def test_old_experience_fades() -> None:
    policy = Learned()
    policy._uses[3][5] = policy._exposure[1][2] = 32 * USE
    policy._fade()
    assert policy._uses[3][5] == policy._exposure[1][2] == 31 * USE


def test_a_kind_without_experience_is_taken_for_what_was_used_once_less() -> None:
    policy, age = Learned(), band(100)
    policy._uses[0][age], policy._exposure[0][age] = 1000 * USE, 100_000
    policy._exposure[1][age] = 10_000_000
    policy._weigh()
    assert policy._worth[0][age] == pytest.approx(0.01, rel=0.1)
    assert policy._worth[2][age] == pytest.approx(0.01, rel=0.1)
    assert policy._worth[4][age] == pytest.approx(0.01, rel=0.1)
    assert policy._worth[1][age] < policy._worth[3][age] < 0.001


def test_an_entry_number_that_is_used_again_has_no_past() -> None:
    policy = Learned()
    policy.insert(0, b"aaaa")
    policy.insert(1, b"bbbb", 0)
    for entry in (0, 1):
        assert policy.victim(lambda it, entry=entry: it == entry) == entry  # type: ignore[misc]
        policy.insert(entry, b"new%d" % entry)
    assert repr(policy).startswith("Learned([2, 0, 0, 0, 0, 0], parked=0")


def test_the_clock_may_wrap() -> None:
    keys = far_apart(random.Random(4), 12_000, 1000)
    plain, wrapping = Learned(), Learned()
    wrapping._now += CLOCK_MASK - 6000
    wrapping._learn_at += wrapping._now
    shift = wrapping._now % LEARN_LEAST
    plain._now, plain._learn_at = shift, plain._learn_at + shift
    assert Player(wrapping, 400).hits(keys) == Player(plain, 400).hits(keys)


def test_ghosts_are_bounded_and_a_newcomer_takes_the_place() -> None:
    ghosts = Ghosts()
    assert ghosts.take(7) is None
    ghosts.fit(10)
    ghosts.add(3, 4, 100)
    ghosts.add(15, 1, 200)
    assert ghosts.take(5) is None
    assert ghosts.at(5) == (1, 200)
    ghosts.add(25, 2, 300)  # in the place of 15
    assert ghosts.take(15) is None
    assert ghosts.take(25) == (2, 300)
    assert ghosts.take(25) is None
    assert ghosts.at(5)[0] == NONE
    ghosts.fit(12)
    assert len(ghosts) == 10
    assert ghosts.take(3) == (4, 100)
    ghosts.fit(100)
    assert len(ghosts) == 100
    policy = Learned()
    Player(policy, 10).hits(range(100_000))
    assert repr(policy).endswith(f"ghosts<={GHOSTS_LEAST})")


@pytest.mark.parametrize("age", [*range(1, 70), *(2**power + step for power in range(8, 32) for step in (-1, 0, 1))])
def test_bands_cover_all_ages(age: int) -> None:
    assert STARTS[band(age)] <= age < STARTS[band(age) + 1]


def test_the_newest_is_in_the_first_band() -> None:
    assert band(0) == band(1) == 0


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=12))
def test_best_rates_is_the_best_of_all_ends(parts: list[tuple[int, int]]) -> None:
    gains, costs = [float(gain) for gain, _ in parts], [float(cost) for _, cost in parts]
    expected = [
        max(sum(gains[start:end]) / sum(costs[start:end]) for end in range(start + 1, len(parts) + 1))
        for start in range(len(parts))
    ]
    assert best_rates(gains, costs) == pytest.approx(expected)
