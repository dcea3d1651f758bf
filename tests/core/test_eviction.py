"""LRU and S3-FIFO against models made of plain lists, what S3-FIFO is for, and what all policies do with chains."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.eviction import LRU, S3FIFO
from headwater.core.learned import Learned
from headwater.core.queues import Queues

Evictable = Callable[[int], bool]


def ask_parked(parked: list[int], evictable: Evictable) -> int | None:
    """The youngest parked entry that may leave (the model is for few entries, all of which are looked at)."""
    found = next(filter(evictable, reversed(parked)), None)
    if found is not None:
        parked.remove(found)
    return found


class ListLRU:
    """Least recently used, as a list from old to young, and those whose turn had come while they were in use."""

    def __init__(self) -> None:
        self.recent: list[int] = []
        self.parked: list[int] = []

    def insert(self, entry: int, key: bytes) -> None:
        self.recent.append(entry)

    def access(self, entry: int) -> None:
        self.remove(entry)
        self.recent.append(entry)

    def remove(self, entry: int) -> None:
        self.recent = [it for it in self.recent if it != entry]
        self.parked = [it for it in self.parked if it != entry]

    def victim(self, evictable: Evictable) -> int | None:
        found = ask_parked(self.parked, evictable)
        while found is None and self.recent:
            entry = self.recent.pop(0)
            if evictable(entry):
                return entry
            self.parked.append(entry)
        return found


class ListS3FIFO:
    """Algorithm 1 of the S3-FIFO paper with lists, each with its parked entries."""

    def __init__(self, small_share: float) -> None:
        self.share = small_share
        self.queues: dict[str, list[int]] = {"small": [], "main": []}
        self.parked: dict[str, list[int]] = {"small": [], "main": []}
        self.ghosts: list[bytes] = []
        self.uses: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}

    def insert(self, entry: int, key: bytes) -> None:
        self.uses[entry], self.keys[entry] = 0, key
        self.queues["main" if key in self.ghosts else "small"].append(entry)
        self.ghosts = [it for it in self.ghosts if it != key]

    def access(self, entry: int) -> None:
        if any(entry in parked for parked in self.parked.values()):
            self.remove(entry)
            self.queues["main"].append(entry)
        else:
            self.uses[entry] = min(self.uses[entry] + 1, 3)

    def remove(self, entry: int) -> None:
        for lists in (self.queues, self.parked):
            for name in lists:
                lists[name] = [it for it in lists[name] if it != entry]

    def count(self) -> int:
        return sum(map(len, [*self.queues.values(), *self.parked.values()]))

    def leave(self, entry: int, origin: str) -> int:
        if origin == "small":
            self.ghosts = [it for it in self.ghosts if it != self.keys[entry]] + [self.keys[entry]]
            self.ghosts = self.ghosts[-self.count() :] if self.count() else []
        return entry

    def victim(self, evictable: Evictable) -> int | None:
        small, main = self.queues["small"], self.queues["main"]
        for origin, parked in self.parked.items():
            found = ask_parked(parked, evictable)
            if found is not None:
                return self.leave(found, origin)
        while small or main:
            is_large = len(small) + len(self.parked["small"]) > self.share * self.count()
            origin = "small" if small and (is_large or not main) else "main"
            entry = self.queues[origin].pop(0)
            if self.uses[entry]:
                self.uses[entry] = 0 if origin == "small" else self.uses[entry] - 1
                main.append(entry)
            elif evictable(entry):
                return self.leave(entry, origin)
            else:
                self.parked[origin].append(entry)
        return None


steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 11), st.integers(0, 15)),
        st.tuples(st.just("access"), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("victim"), st.integers(0, 2**12 - 1), st.just(0)),
        st.tuples(st.just("victim"), st.just(2**12 - 1), st.just(0)),
    ),
    max_size=60,
)


def play(real: LRU | S3FIFO, model: ListLRU | ListS3FIFO, history: list[tuple[str, int, int]]) -> None:
    resident = set[int]()
    for verb, number, key in history:
        if verb == "insert" and number not in resident:
            resident.add(number)
            real.insert(number, b"%d" % key)
            model.insert(number, b"%d" % key)
        elif verb == "access" and number in resident:
            real.access(number)
            model.access(number)
        elif verb == "remove":
            resident.discard(number)
            real.remove(number)
            model.remove(number)
        elif verb == "victim":
            allowed = {entry for entry in resident if number >> entry & 1}
            expected = model.victim(allowed.__contains__)
            assert real.victim(allowed.__contains__) == expected
            resident.discard(-1 if expected is None else expected)
        assert len(real) == len(resident)


@settings(max_examples=300)
@given(steps)
def test_lru_is_least_recently_used(history: list[tuple[str, int, int]]) -> None:
    play(LRU(), ListLRU(), history)


@settings(max_examples=300)
@given(steps, st.sampled_from([0.1, 0.3, 0.9]))
def test_s3fifo_is_the_papers_algorithm(history: list[tuple[str, int, int]], share: float) -> None:
    play(S3FIFO(share), ListS3FIFO(share), history)


def run(policy: LRU | S3FIFO, capacity: int, requests: list[int]) -> int:
    """Hits of a cache of `capacity` entries; the entry's number is its key."""
    resident, hits = set[int](), 0
    for number in requests:
        if number in resident:
            hits += 1
            policy.access(number)
            continue
        if len(resident) == capacity:
            victim = policy.victim(lambda _: True)
            assert victim is not None
            resident.remove(victim)
        policy.insert(number, b"%d" % number)
        resident.add(number)
    return hits


def test_s3fifo_keeps_what_is_used_again_through_a_scan() -> None:
    hot = list(range(20)) * 2
    scan = list(range(100, 400))
    requests = (hot + scan) * 3
    assert run(LRU(), 50, requests) == 3 * 20
    # All but the first round of the hot entries hit: the scan passes through the small queue.
    assert run(S3FIFO(), 50, requests) == 20 + 2 * 40


def test_s3fifo_remembers_what_left_too_early() -> None:
    policy = S3FIFO()
    assert run(policy, 10, list(range(10))) == 0
    for newcomer in range(100, 110):  # each pushes one of 0..9 out, unused, and leaves a ghost
        assert policy.victim(lambda _: True) == newcomer - 100
        policy.insert(newcomer, b"%d" % newcomer)
    assert repr(policy) == "S3FIFO(small=10, main=0, parked=[0, 0], ghosts=9)"
    victim = policy.victim(lambda _: True)
    policy.insert(5, b"5")
    assert victim == 100
    assert "main=1" in repr(policy)


def test_ghosts_are_no_more_than_residents() -> None:
    policy = S3FIFO()
    for number in range(1000):
        policy.insert(number % 10, b"%d" % number)
        if number >= 9:
            policy.victim(lambda _: True)
            policy.remove((number + 1) % 10)
        assert int(repr(policy).split("ghosts=")[1].rstrip(")")) <= 10


POLICY_TYPES = [LRU, S3FIFO, Learned]


class Forest:
    """Chains of entries in one policy: an entry may leave when its child has left."""

    def __init__(self, policy: LRU | S3FIFO | Learned) -> None:
        self.policy = policy
        self.child: dict[int, int] = {}
        self.parent: dict[int, int] = {}
        self.resident = set[int]()
        self.asked = 0

    def add(self, chain: list[int], *, leaf_first: bool) -> None:
        self.child.update(itertools.pairwise(chain))
        self.parent.update(itertools.pairwise(reversed(chain)))
        for entry in chain[::-1] if leaf_first else chain:
            self.policy.insert(entry, b"%d" % entry, self.parent.get(entry, -1))
            self.resident.add(entry)

    def is_leaf(self, entry: int) -> bool:
        self.asked += 1
        return self.child.get(entry) not in self.resident

    def leave(self, count: int) -> list[int]:
        left = []
        for _ in range(count):
            entry = self.policy.victim(self.is_leaf)
            assert entry is not None
            self.resident.remove(entry)
            left.append(entry)
        return left


@pytest.mark.parametrize("policy", POLICY_TYPES)
def test_a_search_past_entries_in_use_is_short_on_average(policy: type[LRU | S3FIFO | Learned]) -> None:
    """However long the chain, and whichever end of it came first."""
    for leaf_first, looks in ((True, 1), (False, 2)):
        forest = Forest(policy())
        forest.add(list(range(1000)), leaf_first=leaf_first)
        assert forest.leave(1000) == list(range(999, -1, -1))
        assert forest.asked <= looks * 1010


@pytest.mark.parametrize("policy", POLICY_TYPES)
def test_an_old_chain_leaves_whole_before_a_young_one_however_it_was_saved(
    policy: type[LRU | S3FIFO | Learned],
) -> None:
    for leaf_first in (True, False):
        forest = Forest(policy())
        for start in range(0, 500, 50):
            forest.add(list(range(start, start + 50)), leaf_first=leaf_first)
        assert [entry // 50 for entry in forest.leave(500)] == [chain for chain in range(10) for _ in range(50)]


@pytest.mark.parametrize("policy", POLICY_TYPES)
def test_what_is_used_while_it_is_parked_stays(policy: type[LRU | S3FIFO | Learned]) -> None:
    """An entry whose turn came while it was leased is first in line afterwards, unless it is used again."""
    for is_used in (False, True):
        forest = Forest(policy())
        forest.add([0], leaf_first=True)
        forest.add([1], leaf_first=True)
        forest.add([2], leaf_first=True)
        assert forest.policy.victim(lambda entry: entry != 0) == 1
        forest.resident.remove(1)
        if is_used:
            forest.policy.access(0)
        assert forest.leave(2) == ([2, 0] if is_used else [0, 2])


def test_queues_refuse_what_would_corrupt_them() -> None:
    queues = Queues(2)
    queues.push(0, 3)
    with pytest.raises(AssertionError):
        queues.push(1, 3)
    queues.take(3)
    with pytest.raises(AssertionError):
        queues.take(3)
    assert queues.sizes == [0, 0]
    assert queues.oldest(0) == -1
