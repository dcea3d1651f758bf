"""The directory's state machine, told the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import directory
from headwater.core.directory import (
    FORGET_S,
    MOST_CHANGES,
    MOST_EPOCH,
    MOST_HOLDERS,
    MOST_REPORT_BYTES,
    SILENT_S,
    Records,
)
from headwater.errors import RefusedError
from headwater.types import Announced, Replica, Standing, Tier
from tests.core.directories import DISK, HOST, member, name, removed, stored


@pytest.fixture
def records() -> Records:
    return Records("g")


def holders(records: Records, number: int, now: float = 0.0) -> list[int]:
    [found] = records.locate([name(number)], now)
    return [it.number for it in found]


class TestMembers:
    def test_a_life_keeps_its_number_and_another_gets_a_higher_one(self, records: Records) -> None:
        first = records.join(member("a", 1), 0)
        assert records.join(member("a", 1), 1) == first
        other = records.join(member("b", 1), 1)
        later = records.join(member("a", 2), 2)
        assert first < other < later
        assert [it.number for it in records.members(2)] == [other, later]

    def test_an_older_life_is_refused_and_changes_nothing(self, records: Records) -> None:
        number = records.join(member("a", 5), 0)
        with pytest.raises(RefusedError, match="name of its own"):
            records.join(member("a", 4), 1)
        assert [(it.number, it.heard_s) for it in records.members(1)] == [(number, 1.0)]

    def test_a_new_life_ends_what_the_old_one_held(self, records: Records) -> None:
        old = records.join(member("a", 1), 0)
        records.announce(old, 1, stored(1), 0)
        records.join(member("a", 2), 0)
        assert holders(records, 1) == []
        with pytest.raises(RefusedError, match="join again"):
            records.announce(old, 2, stored(1), 0)
        assert records.beat(old, Standing.SERVING, b"", 0) is None

    def test_the_record_of_the_same_life_may_change(self, records: Records) -> None:
        number = records.join(member(address="a:1"), 0)
        records.join(member(address="b:2"), 0)
        [listed] = records.members(0)
        assert (listed.number, listed.member.address) == (number, "b:2")

    def test_numbers_are_new_even_after_a_directory_lost_everything(self) -> None:
        before = Records("1")
        numbers = {before.join(member(epoch=it), it / 100) for it in range(20)}
        assert Records("2").join(member(epoch=20), 0.3) not in numbers

    def test_silence(self, records: Records) -> None:
        number = records.join(member(), 0)
        records.announce(number, 1, stored(1), 0)
        before_s = SILENT_S - 0.01
        assert [it.standing for it in records.members(before_s)] == [Standing.SERVING]
        assert [it.standing for it in records.members(SILENT_S)] == [Standing.SILENT]
        assert holders(records, 1, SILENT_S) == [number]
        assert records.beat(number, Standing.SERVING, b"", SILENT_S) is not None
        assert [it.standing for it in records.members(SILENT_S)] == [Standing.SERVING]

    def test_the_forgotten_are_no_members(self, records: Records) -> None:
        number = records.join(member(), 0)
        records.announce(number, 1, stored(1), 0)
        assert holders(records, 1, FORGET_S - 0.01) == [number]
        assert holders(records, 1, FORGET_S) == []
        assert records.members(FORGET_S) == []
        assert records.beat(number, Standing.SERVING, b"", FORGET_S) is None
        assert records.join(member(), FORGET_S) != number

    def test_a_clock_that_went_back_keeps_nobody_alive(self, records: Records) -> None:
        silent = records.join(member("s"), 1000)
        dead, alive = records.join(member("d"), 1000 + SILENT_S), records.join(member("a"), 1000 + SILENT_S)

        def standings(now: float) -> dict[int, Standing]:
            records.beat(alive, Standing.SERVING, b"", now)
            return {it.number: it.standing for it in records.members(now)}

        before = {silent: Standing.SILENT, dead: Standing.SERVING, alive: Standing.SERVING}
        assert standings(1000 + SILENT_S) == before
        assert standings(10) == before
        assert [it.heard_s for it in records.members(10)] == [SILENT_S, 0, 0]
        assert standings(10 + SILENT_S) == {**before, dead: Standing.SILENT}
        assert standings(10 + FORGET_S - SILENT_S) == {dead: Standing.SILENT, alive: Standing.SERVING}
        assert standings(10 + FORGET_S) == {alive: Standing.SERVING}

    def test_announcing_is_no_sign_of_life(self, records: Records) -> None:
        number = records.join(member(), 0)
        records.announce(number, 1, stored(1), SILENT_S / 2)
        assert [it.standing for it in records.members(SILENT_S)] == [Standing.SILENT]

    def test_who_leaves_is_gone_with_what_it_held(self, records: Records) -> None:
        number, other = records.join(member("a"), 0), records.join(member("b"), 0)
        records.announce(number, 1, stored(1), 0)
        records.announce(other, 1, stored(1), 0)
        records.leave(number, 0)
        records.leave(number, 0)
        records.leave(12345678, 0)
        assert holders(records, 1) == [other]

    def test_what_a_beat_brings_is_listed(self, records: Records) -> None:
        number = records.join(member(), 0)
        records.beat(number, Standing.DRAINING, b"{}", 1)
        [listed] = records.members(1.5)
        assert (listed.standing, listed.report, listed.heard_s) == (Standing.DRAINING, b"{}", 0.5)

    def test_the_version_changes_with_the_members_and_only_then(self, records: Records) -> None:
        number = records.join(member("a"), 0)
        seen = []

        def version(now: float, standing: Standing = Standing.SERVING) -> int:
            beat = records.beat(number, standing, b"", now)
            assert beat is not None
            seen.append(beat.members)
            return beat.members

        assert version(0) == version(1)
        other = records.join(member("b"), 1)
        assert version(1) == version(2) != seen[0]
        records.announce(number, 1, stored(1), 2)
        assert version(2) == seen[-1]
        assert version(2, Standing.DRAINING) != seen[-2]
        assert version(SILENT_S + 1.1, Standing.DRAINING) != seen[-2]  # b is silent
        assert version(SILENT_S + 2, Standing.DRAINING) == seen[-2]
        records.beat(other, Standing.SERVING, b"", 6)
        assert version(6, Standing.DRAINING) != seen[-2]
        records.leave(other, 6)
        assert version(6, Standing.DRAINING) != seen[-2]

    def test_what_no_directory_takes(self, records: Records) -> None:
        number = records.join(member(epoch=MOST_EPOCH), 0)
        for call in (
            lambda: records.join(member(""), 0),
            lambda: records.join(member("x" * 256), 0),
            lambda: records.join(member(epoch=-1), 0),
            lambda: records.join(member(epoch=MOST_EPOCH + 1), 0),
            lambda: records.beat(number, Standing.SILENT, b"", 0),
            lambda: records.beat(number, Standing.SERVING, bytes(MOST_REPORT_BYTES + 1), 0),
            lambda: records.announce(number, 1, [Announced(b"short", HOST, True)], 0),
            lambda: records.announce(number, 1, [Announced(name(1), Tier.REMOTE, True)], 0),
            lambda: records.announce(number, 1, stored(1) * (MOST_CHANGES + 1), 0),
            lambda: records.locate([b""], 0),
        ):
            with pytest.raises(RefusedError):
                call()
        assert records.locate([name(1)], 0) == [()]


class TestEntries:
    def test_replicas_are_told_by_number_and_tier(self, records: Records) -> None:
        a, b = records.join(member("a"), 0), records.join(member("b"), 0)
        assert records.announce(a, 1, stored(1, 2) + stored(1, tier=DISK), 0) == bytes(3)
        assert records.announce(b, 1, stored(2, tier=DISK), 0) == b"\1"
        assert records.locate([name(1), name(2), name(3)], 0) == [
            (Replica(a, HOST), Replica(a, DISK)),
            (Replica(a, HOST), Replica(b, DISK)),
            (),
        ]
        assert records.announce(a, 2, removed(1), 0) == b"\0"
        assert records.announce(a, 3, removed(2), 0) == b"\1"
        assert records.locate([name(1), name(2)], 0) == [(Replica(a, DISK),), (Replica(b, DISK),)]
        assert records.announce(a, 4, removed(1, tier=DISK) + removed(9), 0) == bytes(2)
        assert len(records) == 1

    def test_a_batch_counts_once(self, records: Records) -> None:
        a, b = records.join(member("a"), 0), records.join(member("b"), 0)
        records.announce(b, 1, stored(1), 0)
        records.announce(a, 1, stored(1), 0)
        records.announce(a, 2, removed(1), 0)
        assert records.announce(a, 1, stored(1), 0) == b"\1"
        assert holders(records, 1) == [b]
        beat = records.beat(a, Standing.SERVING, b"", 0)
        assert beat is not None
        assert beat.serial == 2

    def test_a_gap_is_refused_whole(self, records: Records) -> None:
        a = records.join(member("a"), 0)
        with pytest.raises(RefusedError, match="at most 1, given 2"):
            records.announce(a, 2, stored(1), 0)
        assert holders(records, 1) == []
        assert records.announce(a, 1, [], 0) == b""

    def test_an_entry_is_bounded(self, records: Records) -> None:
        numbers = [records.join(member(f"n{it}"), 0) for it in range(MOST_HOLDERS + 3)]
        counts = [records.announce(it, 1, stored(1), 0)[0] for it in numbers]
        assert counts == [*range(MOST_HOLDERS), *[MOST_HOLDERS] * 3]
        assert holders(records, 1) == numbers[:MOST_HOLDERS]
        records.leave(numbers[0], 0)
        assert records.announce(numbers[-1], 2, stored(1), 0)[0] == MOST_HOLDERS - 1
        assert holders(records, 1) == [*numbers[1:MOST_HOLDERS], numbers[-1]]

    def test_the_memory_of_equal_entries_is_bounded(self, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(directory, "MOST_CHANGES", 8)
        for it in range(30):
            records.announce(records.join(member(f"n{it}"), 0), 1, stored(it % 8), 0)
        assert len(records._shared) <= 9
        assert len(records) == 8

    def test_what_ended_lives_left_is_swept_in_small_steps(self, records: Records) -> None:
        a, b = records.join(member("a"), 0), records.join(member("b"), 0)
        records.announce(a, 1, stored(*range(100)), 0)
        records.announce(b, 1, stored(*range(50, 60)), 0)
        assert not records.sweep(1000, 0)
        records.leave(a, 0)
        assert len(records) == 100
        assert records.sweep(30, 0)
        assert len(records) > 60
        steps = 1
        while records.sweep(30, 0):
            steps += 1
        assert steps == 3
        assert len(records) == 10
        assert [holders(records, it) for it in range(50, 60)] == [[b]] * 10

    def test_a_life_that_ends_during_a_sweep_gets_another(self, records: Records) -> None:
        a, b = records.join(member("a"), 0), records.join(member("b"), 0)
        records.announce(a, 1, stored(*range(10)), 0)
        records.announce(b, 1, stored(*range(10)), 0)
        records.leave(a, 0)
        assert records.sweep(5, 0)
        records.leave(b, 0)
        while records.sweep(5, 0):
            pass
        assert len(records) == 0

    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from((HOST, DISK)), st.booleans())))
    def test_entries_are_what_was_said_last(self, said: list[tuple[int, int, Tier, bool]]) -> None:
        records = Records("g")
        numbers = [records.join(member(f"n{it}"), 0) for it in range(3)]
        truth: dict[tuple[int, int, Tier], bool] = {}
        for serial, (who, what, tier, present) in enumerate(said, 1):
            if serial % 7 == 0:
                numbers[who] = records.join(member(f"n{who}", serial), 0)
                truth = {key: it and key[0] != who for key, it in truth.items()}
            number = numbers[who]
            beat = records.beat(number, Standing.SERVING, b"", 0)
            assert beat is not None
            [count] = records.announce(number, beat.serial + 1, [Announced(name(what), tier, present)], 0)
            truth[who, what, tier] = present
            assert count == len({w for (w, n, _), it in truth.items() if it and n == what and w != who})
        for what in range(4):
            [found] = records.locate([name(what)], 0)
            assert {(it.number, it.tier) for it in found} == {
                (numbers[who], tier) for (who, n, tier), it in truth.items() if it and n == what
            }


def test_it_explains_itself(records: Records) -> None:
    records.announce(records.join(member("a"), 0), 1, stored(1, 2), 0)
    records.join(member("b"), SILENT_S)
    assert repr(records) == "Records(g, 1 members and 1 silent ones, 2 chunks)"
