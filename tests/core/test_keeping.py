"""What a tier behind DEVICEs keeps: which uses count, what is known of a chunk that comes late, what it is good for."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.eviction import LRU
from headwater.core.keeping import GHOSTS, Keeping
from headwater.core.learned import LEARN_LEAST, MOST_USES, ROUND, USE, Learned, band
from tests.conformance.eviction_policy import EvictionPolicySuite


def name(number: int) -> bytes:
    return number.to_bytes(4, "little")


def always(_: int) -> bool:
    return True


class TestKeepingLate(EvictionPolicySuite):
    def policy(self) -> Keeping:
        return Keeping()


class TestKeepingAtOnce(EvictionPolicySuite):
    def policy(self) -> Keeping:
        return Keeping(late=False)


# ---- which uses count --------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [True, False])
def test_only_what_no_device_served_is_a_demand(late: bool) -> None:
    policy = Keeping(late, ghosts=64)
    policy.absent(name(1), held=False)  # new: no demand for anything that was known
    policy.absent(name(1), held=True)
    policy.insert(0, name(1))
    policy.met(0)
    assert sum(map(sum, policy._uses)) == 0
    policy.access(0)
    assert sum(map(sum, policy._uses)) == USE
    assert policy.victim(always) == 0
    policy.absent(name(1), held=True)
    assert sum(map(sum, policy._uses)) == USE
    policy.absent(name(1), held=False)  # it would have been good to keep it
    assert sum(map(sum, policy._uses)) == 2 * USE


def test_a_use_on_a_device_makes_younger() -> None:
    policy = Keeping()
    for entry in range(3):
        policy.insert(entry, name(entry))
    policy.met(0)
    assert [policy.victim(always) for _ in range(3)] == [1, 2, 0]


def test_a_chunk_comes_with_its_past() -> None:
    """Its uses on DEVICEs are its uses, and it is as old as its last one; insert is none."""
    policy = Keeping()
    for _ in range(3):
        policy.absent(name(7), held=True)
    for number in range(100, 140):
        policy.absent(name(number), held=False)
    policy.insert(0, name(139))
    policy.insert(1, name(7))
    assert repr(policy).startswith("Keeping([0, 1, 0, 0, 0, 1], parked=0, late")
    assert policy._now == 43
    assert policy.victim(always) == 1


def test_saved_at_once_it_waits_with_the_others() -> None:
    policy = Keeping(late=False)
    policy.absent(name(7), held=False)
    policy.insert(0, name(7))
    policy.insert(1, name(8))
    assert repr(policy).startswith("Keeping([2, 0, 0, 0, 0, 0], parked=0, at once")
    assert policy._now == 2, "one of which nothing was known is used now"


def test_a_chunk_that_leaves_is_known_when_it_comes_back() -> None:
    policy = Keeping(late=False)
    policy.insert(0, name(7))
    policy.access(0)
    assert policy.victim(always) == 0
    policy.insert(5, name(7))
    assert repr(policy).startswith("Keeping([0, 0, 1, 0, 0, 0]")


def test_ghosts_have_their_places_and_no_more() -> None:
    policy = Keeping(ghosts=100)
    for number in range(1000):
        policy.absent(name(number), held=False)
        policy.insert(number, name(number + 5000))
    while policy.victim(always) is not None:
        pass
    assert len(policy._ghosts) == 100
    assert len(Keeping()._ghosts) == GHOSTS
    with pytest.raises(AssertionError, match="ghosts=0"):
        Keeping(ghosts=0)


@settings(max_examples=50, deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(("use", "save", "lose", "drop")), st.integers(0, 11), st.booleans()), max_size=100
    ),
)
def test_without_experience_it_is_the_model(late: bool, steps: list[tuple[str, int, bool]]) -> None:
    """Past, demands and victims against plain lists, as long as worth is the first guess: it falls with age only."""
    policy = Keeping(late, ghosts=64)
    past: dict[int, tuple[int, int]] = {}
    queues: list[list[int]] = [[] for _ in range(2 * MOST_USES + 2)]
    now, demands = 0, [0] * len(queues)
    resident: set[int] = set()
    assert len(steps) < LEARN_LEAST
    for what, it, flag in steps:
        if what == "use":
            now += 1
            if it in resident:
                (policy.met if flag else policy.access)(it)
                queues[past[it][0]].remove(it)
            else:
                policy.absent(name(it), flag)
            kind = 0
            if it in past:
                kind = past[it][0]
                demands[kind] += 0 if flag else USE
                kind = 2 * min(kind // 2 + 1, MOST_USES)
            past[it] = kind, now
            if it in resident:
                queues[kind].append(it)
        elif what == "save" and it not in resident:
            if it in past:
                past[it] = past[it][0] | late, past[it][1]
            else:
                now += 1
                past[it] = 0, now
            policy.insert(it, name(it))
            resident.add(it)
            queues[past[it][0]].append(it)
        elif what == "lose":
            heads = [(-band(now - past[q[0]][1]), past[q[0]][1], q[0]) for q in queues if q]
            expected = min(heads)[2] if heads else None
            assert policy.victim(always) == expected
            if expected is not None:
                resident.remove(expected)
                queues[past[expected][0]].remove(expected)
        elif what == "drop" and it in resident:
            policy.remove(it)
            resident.remove(it)
            queues[past.pop(it)[0]].remove(it)
        assert (len(policy), policy._now) == (len(resident), now)
        assert [sum(it) for it in policy._uses] == demands


# ---- behind DEVICEs ----------------------------------------------------------------------------------


class Behind:
    """A tier of `room` chunks behind `devices` that keep the `each` chunks that were used last; by turns, a session
    goes where it was before. Evicted chunks leave a DEVICE from the end of their prompt on."""

    def __init__(self, policy: LRU | Learned | Keeping, devices: int, each: int, room: int, late: bool) -> None:
        self.policy, self.room, self.late, self.each = policy, room, late, each
        self.devices: list[OrderedDict[int, tuple[int, ...]]] = [OrderedDict() for _ in range(devices)]
        self.parents: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.asked = self.by_device = self.by_tier = 0

    def serve(self, session: int, chunks: tuple[int, ...]) -> None:
        device = self.devices[session % len(self.devices)]
        held = next((at for at, it in enumerate(chunks) if it not in device), len(chunks))
        kept = next((at for at, it in enumerate(chunks) if it not in self.parents), len(chunks))
        self.asked += len(chunks)
        self.by_device += held
        self.by_tier += max(kept - held, 0)
        for at, it in enumerate(chunks):
            if not isinstance(self.policy, Keeping):
                if at < kept:
                    self.policy.access(it)
            elif at >= kept:
                self.policy.absent(name(it), at < held)
            elif at < held:
                self.policy.met(it)
            else:
                self.policy.access(it)
        if not self.late:
            self._save(chunks)
        for it in reversed(chunks):
            device[it] = chunks
            device.move_to_end(it)
        while len(device) > self.each:
            gone, prompt = device.popitem(last=False)
            if self.late:
                self._save(prompt[: prompt.index(gone) + 1])

    def _save(self, chunks: Sequence[int]) -> None:
        for before, it in zip((-1, *chunks), chunks, strict=False):
            if it in self.parents:
                continue
            if len(self.parents) == self.room:
                gone = self.policy.victim(lambda entry: not self.children.get(entry) and entry not in chunks)
                if gone is None:
                    return
                self.children[self.parents.pop(gone)] -= 1
            self.parents[it] = before
            self.children[before] = self.children.get(before, 0) + 1
            self.policy.insert(it, name(it), before)


def wheel(steps: int) -> list[tuple[int, ...]]:
    """Each step uses half of eight chunks that are always on the DEVICE, the next of eight that never are when they are
    used again, and four that nobody uses again."""
    fresh = itertools.count(100)
    found: list[tuple[int, ...]] = []
    for step in range(steps):
        found += [(4 * (step % 2) + it,) for it in range(4)]
        found += [(20 + step % 8,), *((next(fresh),) for _ in range(4))]
    return found


def test_the_tier_keeps_what_devices_cannot() -> None:
    """The right answer is known: a tier of ten serves all of the eight, once it has learned that they come back."""
    reached, learned = {}, 0
    for policy in (LRU(), Keeping(ghosts=1024)):
        fleet = Behind(policy, 1, 20, 10, late=True)
        for at, chunks in enumerate(wheel(500)):
            if at == 400 * 9:
                learned = fleet.by_tier
            fleet.serve(0, chunks)
        reached[type(policy)] = fleet.by_tier - learned
    assert reached[LRU] == 0
    assert reached[Keeping] >= 95


def chats(seed: int, count: int) -> list[tuple[int, tuple[int, ...]]]:
    """Sessions and prompts: a turn appends to the last one, most chats end after the first turn, and those that went on
    go on; between two turns comes what others ask."""
    rng, fresh, found = random.Random(seed), itertools.count(), list[tuple[int, tuple[int, ...]]]()
    stem = tuple(next(fresh) for _ in range(2))
    open_chats: list[tuple[int, int, int, tuple[int, ...]]] = []
    for now in range(count):
        if open_chats and open_chats[0][0] <= now:
            _, session, turn, chunks = heapq.heappop(open_chats)
        else:
            session, turn, chunks = now, 0, stem
        chunks += tuple(next(fresh) for _ in range(rng.randrange(1, 5 if turn else 16)))
        found.append((session, chunks))
        if rng.random() < min(0.25 + 0.2 * turn, 0.85):
            heapq.heappush(open_chats, (now + int(rng.lognormvariate(4.7, 1)), session, turn + 1, chunks))
    return found


def reuse(policy: LRU | Learned | Keeping, seed: int, late: bool) -> float:
    fleet = Behind(policy, 4, 250, 1000, late)
    for session, chunks in chats(seed, 1500):
        fleet.serve(session, chunks)
    assert fleet.by_device > 0 < fleet.by_tier
    return (fleet.by_device + fleet.by_tier) / fleet.asked


@pytest.mark.parametrize("late", [True, False])
def test_chats_are_served_better_than_by_recency(late: bool) -> None:
    seed = 5
    recent, keeping = reuse(LRU(), seed, late), reuse(Keeping(late, ghosts=8192), seed, late)
    print(f"{seed=}: {recent:.4f} {keeping:.4f}")
    assert keeping > recent * (1.02 if late else 1.1)


def test_work_is_bounded() -> None:
    """However many are in use, a victim costs a few looks."""
    policy, asked = Keeping(), 0
    for entry in range(2000):
        policy.insert(entry, name(entry))

    def evictable(entry: int) -> bool:
        nonlocal asked
        asked += 1
        return entry >= 1000

    for _ in range(1000):
        assert policy.victim(evictable) is not None
    assert asked <= 1000 + 5 * 1000 + ROUND
    assert len(policy) == 1000
