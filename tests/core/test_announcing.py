"""What a node tells the directory, and that the directory comes to know the truth whatever happens on the way."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence

import pytest

from headwater.core.announcing import BATCH_CHANGES, Announcing, Batch, Inventory, Standpoint
from headwater.core.directory import Records
from headwater.errors import RefusedError
from headwater.types import Announced, Beat, Removed, Standing, Stored, Tier, split_name
from tests.core.directories import DISK, HOST, member, name, removed, stored


def nothing() -> Inventory:
    return iter(())


def event(present: bool, numbers: Sequence[int], tier: Tier = HOST) -> Stored | Removed:
    keys = tuple(split_name(name(it))[1] for it in numbers)
    return Stored(0, 0, keys, tier, 1) if present else Removed(0, 0, keys, tier, 1, "evicted")


def settled(announcing: Announcing, number: int = 7) -> Announcing:
    """A member whose walk is over."""
    announcing.joined(number)
    while (batch := announcing.batch()) or not announcing.is_settled:
        if batch:
            announcing.acknowledged(batch)
    return announcing


def send(announcing: Announcing) -> list[Announced]:
    batch = announcing.batch()
    assert batch is not None
    announcing.acknowledged(batch)
    return list(batch.changes)


class TestBatches:
    def test_changes_go_out_in_order_with_serials_from_1(self) -> None:
        it = settled(Announcing(nothing))
        it.changed(event(True, [1, 2]))
        it.changed(event(True, [1], DISK))
        assert it.batch() == Batch(7, 1, tuple(stored(1, 2) + stored(1, tier=DISK)))
        it.changed(event(False, [1]))
        batch = it.batch()
        assert batch is not None
        assert batch.serial == 1
        it.acknowledged(batch)
        assert it.batch() == Batch(7, 2, tuple(removed(1)))

    def test_other_tiers_are_not_announced(self) -> None:
        it = settled(Announcing(nothing))
        it.changed(event(True, [1], Tier.REMOTE))
        it.changed(event(True, [1], Tier.DEVICE))
        assert it.batch() is None

    def test_a_failed_batch_is_the_next_again(self) -> None:
        it = settled(Announcing(nothing))
        it.changed(event(True, [1]))
        first = it.batch()
        it.changed(event(False, [1]))
        assert it.batch() is first
        assert len(it) == 2

    def test_what_came_and_went_is_not_told(self) -> None:
        it = settled(Announcing(nothing))
        it.changed(event(True, [1, 2]))
        it.changed(event(False, [1]))
        it.changed(event(True, [3]))
        assert send(it) == stored(2, 3)
        it.changed(event(False, [2]))
        it.changed(event(True, [2]))
        it.changed(event(False, [2]))
        assert send(it) == removed(2)
        assert it.is_settled

    def test_of_disks_there_may_be_several(self) -> None:
        it = settled(Announcing(nothing))
        it.changed(event(True, [1], DISK))
        assert send(it) == stored(1, tier=DISK)
        it.changed(event(True, [1], DISK))
        it.changed(event(False, [1], DISK))
        assert send(it) == removed(1, tier=DISK)

    def test_batches_are_bounded(self) -> None:
        it = settled(Announcing(nothing))
        it.changed(event(True, range(BATCH_CHANGES + 1)))
        assert [len(send(it)), len(send(it))] == [BATCH_CHANGES, 1]

    def test_nothing_is_queued_before_the_directory_knows_us(self) -> None:
        it = Announcing(lambda: iter([stored(1)]))
        it.changed(event(True, [1]))
        assert (it.standpoint, len(it), it.batch()) == (Standpoint.OUTSIDE, 0, None)
        it.joined(7)
        assert send(it) == stored(1)

    def test_a_full_queue_is_given_up(self) -> None:
        it = settled(Announcing(lambda: iter([stored(5)]), limit=10))
        it.changed(event(True, range(10)))
        assert it.standpoint is Standpoint.MEMBER
        it.changed(event(True, [10]))
        assert (it.standpoint, len(it), it.overflows) == (Standpoint.BEHIND, 0, 1)
        it.joined(8)
        assert it.batch() == Batch(8, 1, tuple(stored(5)))


class TestWalk:
    def test_a_step_of_the_inventory_a_call(self) -> None:
        drawn = []

        def inventory() -> Iterator[list[Announced]]:
            for at in range(3):
                drawn.append(at)
                yield [] if at == 1 else stored(at)

        it = Announcing(inventory)
        it.joined(7)
        assert drawn == []
        assert send(it) == stored(0)
        assert drawn == [0]
        assert it.batch() is None
        assert not it.is_settled
        assert send(it) == stored(2)
        assert it.batch() is None
        assert it.is_settled
        assert it.walks == 1

    def test_changes_fill_a_batch_before_the_inventory_does(self) -> None:
        it = Announcing(lambda: iter([stored(1), stored(2)]))
        it.joined(7)
        it.changed(event(True, range(100, 100 + BATCH_CHANGES)))
        assert send(it) == stored(*range(100, 100 + BATCH_CHANGES))
        it.changed(event(False, [100]))
        assert send(it) == removed(100) + stored(1)

    def test_what_the_walk_meets_gives_way_to_what_is_queued(self) -> None:
        it = Announcing(lambda: iter([stored(1, 2)]))
        it.joined(7)
        it.changed(event(False, [1]))
        assert send(it) == removed(1) + stored(2)

    def test_nothing_is_cancelled_while_the_walk_may_have_told_it(self) -> None:
        it = Announcing(lambda: iter([stored(1), stored(2)]))
        it.joined(7)
        assert send(it) == stored(1)
        it.changed(event(True, [1]))
        it.changed(event(False, [1]))
        assert send(it) == removed(1) + stored(2)

    def test_what_the_walk_has_queued_is_not_cancelled_either(self) -> None:
        it = Announcing(lambda: iter([[], stored(2, 1)]))
        it.joined(7)
        it.changed(event(True, [1]))
        assert send(it) == stored(1)
        it.changed(event(True, range(100, 99 + BATCH_CHANGES)))
        assert send(it)[-1:] == stored(2)
        it.changed(event(False, [1]))
        assert send(it) == removed(1)


class TestBeats:
    def test_a_beat_that_fits_changes_nothing(self) -> None:
        it = settled(Announcing(nothing))
        it.beaten(Beat("g", 0, 1), it.stamp())
        it.changed(event(True, [1]))
        stamp, batch = it.stamp(), it.batch()
        it.beaten(Beat("g", 1, 2), stamp)  # applied, and not yet acknowledged
        assert batch is not None
        it.acknowledged(batch)
        it.beaten(Beat("g", 0, 2), stamp)  # from before it was applied
        assert it.standpoint is Standpoint.MEMBER

    @pytest.mark.parametrize("beat", [None, Beat("g", 0, 1), Beat("h", 1, 1), Beat("g", 2, 1)])
    def test_a_beat_that_does_not_fit_means_to_join_anew(self, beat: Beat | None) -> None:
        it = settled(Announcing(nothing))
        it.changed(event(True, [1]))
        send(it)
        it.beaten(Beat("g", 1, 1), it.stamp())
        it.changed(event(True, [2]))
        it.beaten(beat, it.stamp())
        assert (it.standpoint, len(it), it.batch()) == (Standpoint.BEHIND, 0, None)
        it.joined(8)
        assert (it.standpoint, it.walks) == (Standpoint.MEMBER, 2)

    def test_an_answer_to_an_earlier_number_is_of_no_interest(self) -> None:
        it = settled(Announcing(nothing))
        stamp = it.stamp()
        settled(it, 8)
        it.beaten(None, stamp)
        assert it.standpoint is Standpoint.MEMBER

    def test_a_refused_batch_means_to_join_anew(self) -> None:
        it = settled(Announcing(nothing))
        it.changed(event(True, [1]))
        batch = it.batch()
        assert batch is not None
        it.refused(batch)
        assert it.standpoint is Standpoint.BEHIND
        settled(it, 8)
        it.refused(batch)  # late
        it.acknowledged(batch)
        assert it.standpoint is Standpoint.MEMBER
        assert it.stamp().serial == 0

    def test_the_same_number_again_is_no_new_beginning(self) -> None:
        it = settled(Announcing(nothing))
        it.beaten(None, it.stamp())
        it.joined(7)
        assert it.standpoint is Standpoint.BEHIND
        it.joined(8)
        it.beaten(None, it.stamp())
        it.joined(7)  # an old copy of the directory, from before we left
        assert (it.standpoint, it.number) == (Standpoint.BEHIND, 7)


class Rig:
    """Two nodes, their truth, and a directory that loses calls, answers and itself."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.records = Records("g0")
        self.saved = copy.deepcopy(self.records)
        self.generations = 0
        self.truth: list[set[tuple[bytes, Tier]]] = [set(), set()]
        self.nodes = [Announcing(lambda at=at: self.inventory(at), limit=40) for at in (0, 1)]  # type: ignore[misc]
        self.faulty = True

    def inventory(self, at: int) -> Inventory:
        """A live walk: keys in order, each step as it is when it is drawn."""
        done = b""
        while rest := sorted({it for it, _ in self.truth[at] if it > done})[:3]:
            done = rest[-1]
            yield [Announced(it, tier, True) for it in rest for tier in (HOST, DISK) if (it, tier) in self.truth[at]]

    def is_lost(self) -> bool:
        return self.faulty and self.rng.random() < 0.2

    def change(self, at: int) -> None:
        numbers = self.rng.sample(range(30), self.rng.choice((1, 1, 1, 2, 5, 25)))
        tier = self.rng.choice((HOST, DISK))
        present = self.rng.random() < 0.5
        known = [it for it in numbers if ((name(it), tier) in self.truth[at]) is not present]
        for it in known:
            (self.truth[at].add if present else self.truth[at].discard)((name(it), tier))
        self.nodes[at].changed(event(present, known, tier))

    def announce(self, at: int) -> None:
        node = self.nodes[at]
        if node.standpoint is not Standpoint.MEMBER:
            if self.is_lost():
                return
            if node.number:
                self.records.leave(node.number, self.now)
            if self.is_lost():
                return
            number = self.records.join(member("ab"[at]), self.now)
            if not self.is_lost():
                node.joined(number)
            return
        batch = node.batch()
        if batch is None or self.is_lost():
            return
        try:
            self.records.announce(batch.number, batch.serial, batch.changes, self.now)
        except RefusedError:
            node.refused(batch)
            return
        if not self.is_lost():
            node.acknowledged(batch)

    def beat(self, at: int) -> None:
        stamp = self.nodes[at].stamp()
        if self.is_lost() or not stamp.number:
            return
        beat = self.records.beat(stamp.number, Standing.SERVING, b"", self.now)
        if self.faulty and self.rng.random() < 0.3:
            self.announce(at)  # overtakes the answer
        if not self.is_lost():
            self.nodes[at].beaten(beat, stamp)

    def fail(self) -> None:
        kind = self.rng.random()
        if kind < 0.4:
            self.saved = copy.deepcopy(self.records)
        elif kind < 0.7:
            self.records = copy.deepcopy(self.saved)
        elif kind < 0.85:
            self.generations += 1
            self.records = Records(f"g{self.generations}")
        else:
            self.now += self.rng.choice((4.0, 61.0))

    def told(self, at: int) -> set[tuple[bytes, Tier]]:
        names = [name(it) for it in range(30)]
        found = zip(names, self.records.locate(names, self.now), strict=True)
        return {(it, r.tier) for it, replicas in found for r in replicas if r.number == self.nodes[at].number}


@pytest.mark.parametrize("seed", range(100))
def test_the_directory_comes_to_know_the_truth(seed: int) -> None:
    rig = Rig(seed)
    for _ in range(rig.rng.choice((30, 100, 300))):
        rig.now += 0.05
        at = rig.rng.randrange(2)
        rig.rng.choices((rig.change, rig.announce, rig.beat), (3, 4, 1))[0](at)
        if rig.rng.random() < 0.03:
            rig.fail()
        assert all(len(it) <= 40 + BATCH_CHANGES for it in rig.nodes)
    rig.faulty = False
    for _ in range(60):
        rig.now += 0.05
        for at in (0, 1):
            rig.beat(at)
            rig.announce(at)
    for at in (0, 1):
        assert rig.nodes[at].is_settled, f"{seed=} {rig.nodes[at]}"
        assert rig.told(at) == rig.truth[at], f"{seed=}"
    assert {it.number for it in rig.records.members(rig.now)} == {it.number for it in rig.nodes}


def test_it_explains_itself() -> None:
    it = Announcing(lambda: iter([stored(1)]))
    assert repr(it) == "Announcing(outside, number 0, 0 queued)"
    it.joined(3)
    it.changed(event(True, [4]))
    assert repr(it) == "Announcing(member, number 3, 1 queued, walking)"
