"""Events lost, doubled, late, engines begun anew: in the end the index has what the engine has, or less, never more."""

from __future__ import annotations

import random

import pytest

from headwater.conductor.events.device import Device
from headwater.conductor.events.ordering import OLD_RUN, REMEMBERED, WAITING_MAX, Ordering
from headwater.core.prefix import PrefixIndex
from headwater.fleet import Place
from headwater.types import Tier
from tests.conductor.events.engine import BLOCK, Line, ToyEngine, parse, salted

SEEDS = 300
STEPS = 60


class Rig:
    """An engine, a line with faults, and what an index makes of it."""

    def __init__(self, seed: int, buffer: int = 10_000, rate: float = 0.2, *, replays: bool = True) -> None:
        print(f"seed {seed}")
        self.draw = random.Random(seed)
        self.engine = ToyEngine(self.draw, buffer)
        self.index = PrefixIndex(1 << 12)
        self.device = Device(0, self.index, salted, block_tokens=BLOCK)
        self.ordering = Ordering(lambda it: self.device.apply(0, it), lambda: self.device.forget(0), replays=replays)
        self.line = Line(self.draw, self.engine, self.ordering, rate)

    @property
    def claimed(self) -> set[bytes]:
        """The keys that the index takes for held."""
        return {key for _, keys in self.index.dump() for key in keys}

    def run(self, steps: int = STEPS, *, restarts: bool = True) -> None:
        """Let the engine work; replays are answered now and then."""
        for _ in range(steps):
            if restarts and self.draw.random() < 0.03:
                self.engine.restart()
            self.line.carry(self.engine.step())
            if self.draw.random() < 0.5:
                self.line.serve(self.sometimes)

    def sometimes(self) -> None:
        """The engine works on while a replay is under way."""
        if self.draw.random() < 0.3:
            self.line.carry(self.engine.step())

    def settle(self) -> None:
        """Nothing is under way any more, and everybody has been asked."""
        for frame in self.line.late:
            self.line.deliver(frame)
        self.line.serve()
        self.ordering.check()
        self.line.serve()


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_the_index_has_what_the_engine_has(first: int) -> None:
    for seed in range(first, first + 50):
        rig = Rig(seed)
        rig.run()
        rig.settle()
        assert rig.claimed == rig.engine.keys, f"seed {seed}: {rig.ordering!r}"
        assert rig.ordering.is_settled


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_with_a_short_memory_it_has_no_more_than_the_engine(first: int) -> None:
    for seed in range(first, first + 50):
        rig = Rig(seed, buffer=3)
        rig.run()
        rig.settle()
        assert rig.claimed <= rig.engine.keys, f"seed {seed}: {rig.ordering!r}"
        # As it goes on, what was lost is stored anew and what is old is removed.
        rig.line.rate = 0.0
        rig.engine.cached.clear()
        rig.line.carry(rig.engine.publish([{"type": "AllBlocksCleared"}]))
        rig.run(20, restarts=False)
        rig.settle()
        assert rig.claimed == rig.engine.keys, f"seed {seed}: {rig.ordering!r}"


def test_without_replays_a_gap_costs_everything_and_nothing_false_is_left() -> None:
    for seed in range(100):
        rig = Rig(seed, replays=False, rate=0.1)
        rig.run(restarts=False)
        rig.line.rate = 0.0
        rig.line.carry(rig.engine.step())
        assert rig.claimed <= rig.engine.keys, f"seed {seed}"
        assert rig.ordering.sums.replays == 0


def test_recoveries_are_no_more_than_gaps() -> None:
    for seed in range(50):
        rig = Rig(seed, rate=0.1)
        rig.line.serve()
        before = rig.ordering.sums.replays
        rig.run(restarts=False)
        sums = rig.ordering.sums
        assert sums.gaps <= rig.line.faults
        assert sums.replays - before <= sums.gaps
        assert sums.resyncs == sums.restarts == 0


def test_whoever_comes_later_learns_the_same() -> None:
    rig = Rig(1, rate=0.0)
    rig.run(restarts=False)
    late = Rig(2, rate=0.0)
    late.engine = late.line.engine = rig.engine
    late.settle()
    assert late.claimed == rig.claimed == rig.engine.keys


def test_a_new_life_as_long_as_the_old_one_is_noticed() -> None:
    rig = Rig(3, rate=0.0)
    rig.run(10, restarts=False)
    rig.settle()
    rig.engine.restart()
    for _ in range(rig.ordering.next or 0):
        rig.engine.step()  # nobody is connected
    rig.ordering.check()
    rig.line.serve()
    assert rig.claimed == rig.engine.keys
    assert rig.ordering.sums.restarts == 1


def test_a_new_life_whose_clock_went_back_is_noticed() -> None:
    rig = Rig(4, rate=0.0, replays=False)
    rig.run(30, restarts=False)
    rig.engine.restart()
    rig.engine.time_s = 10.0
    for _ in range(8):
        rig.line.carry(rig.engine.step())
    assert (rig.ordering.sums.restarts, rig.ordering.sums.dropped) == (1, OLD_RUN - 1)
    assert rig.ordering.next == 8
    assert rig.claimed <= rig.engine.keys


def test_a_batch_that_cannot_be_read_leaves_nothing() -> None:
    rig = Rig(5, rate=0.0)
    rig.line.serve()
    rig.run(10, restarts=False)
    assert rig.claimed
    rig.ordering.came(rig.engine.number, None)
    rig.engine.number += 1
    assert not rig.claimed
    assert (rig.ordering.sums.malformed, rig.ordering.sums.resyncs) == (1, 1)
    rig.engine.cached.clear()
    rig.run(10, restarts=False)
    assert rig.claimed == rig.engine.keys
    assert rig.ordering.is_settled


def test_a_replay_that_never_ends_is_given_up() -> None:
    rig = Rig(6, rate=0.0)
    rig.run(5, restarts=False)
    rig.settle()
    rig.engine.step()
    rig.line.deliver(rig.engine.step())
    assert rig.ordering.wants == (rig.ordering.next or 0) - 1
    for _ in range(3):
        assert rig.ordering.wants is not None
        rig.ordering.replay_failed()
    assert rig.ordering.is_settled
    assert rig.ordering.sums.resyncs == 1
    assert rig.claimed <= rig.engine.keys


def test_holes_in_replays_are_asked_for_again_and_then_given_up() -> None:
    rig = Rig(7, rate=0.0)
    rig.run(5, restarts=False)
    rig.settle()
    for _ in range(4):
        rig.engine.step()
    last = rig.engine.step()
    rig.line.deliver(last)
    asked = 0
    while (first := rig.ordering.wants) is not None:
        asked += 1
        frames = rig.engine.replay(first)
        for number, payload in frames[:1]:  # nothing of it gets through
            rig.ordering.replayed(number, parse(payload))
        rig.ordering.replay_ended()
    assert asked == 3
    assert rig.ordering.is_settled
    assert rig.ordering.next == last[0] + 1


def test_what_waits_is_bounded() -> None:
    ordering = Ordering(lambda it: None, lambda: None, replays=True)
    rig = Rig(8, rate=0.0)
    batch = parse(rig.engine.step()[1])
    for number in range(WAITING_MAX + 5):
        ordering.came(number, batch)
    assert ordering.sums.overflows == 5
    ordering.replay_ended()
    assert ordering.next == WAITING_MAX


def test_what_is_remembered_of_the_past_is_bounded() -> None:
    rig = Rig(8, rate=0.0)
    rig.line.serve()
    for _ in range(REMEMBERED + 10):
        rig.line.carry(rig.engine.publish([]))
    assert len(rig.ordering._times) == REMEMBERED


def test_ranks_count_for_their_instance_and_are_forgotten_alone() -> None:
    index = PrefixIndex(1 << 12)
    device = Device(5, index, salted, block_tokens=BLOCK, ranks=2)
    draws = [random.Random(9), random.Random(10)]
    engines = [ToyEngine(draw, 100) for draw in draws]
    for rank, engine in enumerate(engines):
        for _ in range(10):
            device.apply(rank, parse(engine.step()[1]))
    both = {key for _, keys in index.dump() for key in keys}
    assert both == engines[0].keys | engines[1].keys
    device.forget(0)
    index.tidy()
    assert {key for places, keys in index.dump() for key in keys if places} == engines[1].keys
    assert Place(Tier.DEVICE, 5) not in index.counts()
