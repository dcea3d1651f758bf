"""LRU and S3-FIFO against models made of plain lists, and what S3-FIFO is for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.eviction import LRU, S3FIFO, Queues

Evictable = Callable[[int], bool]


class ListLRU:
    """Least recently used, as a list from old to young."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def insert(self, entry: int, key: bytes) -> None:
        self.order.append(entry)

    def access(self, entry: int) -> None:
        self.order.remove(entry)
        self.order.append(entry)

    def remove(self, entry: int) -> None:
        if entry in self.order:
            self.order.remove(entry)

    def victim(self, evictable: Evictable) -> int | None:
        for position, entry in enumerate(self.order):
            if evictable(entry):
                self.order = self.order[position + 1 :] + self.order[:position]
                return entry
        return None


class ListS3FIFO:
    """Algorithm 1 of the S3-FIFO paper with lists, and entries in use put to the young end of their queue."""

    def __init__(self, small_share: float) -> None:
        self.share = small_share
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[bytes] = []
        self.uses: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}

    def insert(self, entry: int, key: bytes) -> None:
        self.uses[entry], self.keys[entry] = 0, key
        (self.main if key in self.ghosts else self.small).append(entry)
        self.ghosts = [it for it in self.ghosts if it != key]

    def access(self, entry: int) -> None:
        self.uses[entry] = min(self.uses[entry] + 1, 3)

    def remove(self, entry: int) -> None:
        self.small = [it for it in self.small if it != entry]
        self.main = [it for it in self.main if it != entry]

    def victim(self, evictable: Evictable) -> int | None:
        if not any(map(evictable, self.small + self.main)):
            return None
        tried_small, tried_main = set[int](), set[int]()
        while True:
            wants_small = len(self.small) > self.share * (len(self.small) + len(self.main))
            small_left = any(it not in tried_small for it in self.small)
            main_left = any(it not in tried_main for it in self.main)
            if small_left and (wants_small or not main_left):
                entry = self.small.pop(0)
                if self.uses[entry]:
                    self.uses[entry] = 0
                    self.main.append(entry)
                elif evictable(entry):
                    self.ghosts = [it for it in self.ghosts if it != self.keys[entry]] + [self.keys[entry]]
                    self.ghosts = self.ghosts[-(len(self.small) + len(self.main)) :] if self.small + self.main else []
                    return entry
                else:
                    self.small.append(entry)
                    tried_small.add(entry)
            else:
                entry = self.main.pop(0)
                if self.uses[entry]:
                    self.uses[entry] -= 1
                    self.main.append(entry)
                elif evictable(entry):
                    return entry
                else:
                    self.main.append(entry)
                    tried_main.add(entry)


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
    assert repr(policy) == "S3FIFO(small=10, main=0, ghosts=9)"
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


def test_a_search_past_entries_in_use_is_short_on_average() -> None:
    """A chain comes leaf first: each victim is found at once, however long the chain."""
    for policy in (LRU(), S3FIFO()):
        asked = 0
        resident = set(range(1000))

        def is_leaf(entry: int, resident: set[int] = resident) -> bool:
            nonlocal asked
            asked += 1
            return entry + 1 not in resident

        for entry in range(999, -1, -1):
            policy.insert(entry, b"%d" % entry)
        for _ in range(1000):
            victim = policy.victim(is_leaf)
            assert victim is not None
            resident.remove(victim)
        assert asked == 1000


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
