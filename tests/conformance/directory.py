"""What every Directory must do; subclass it with your own and let pytest collect the subclass.

class TestMine(DirectorySuite):
    @pytest.fixture
    def directory(self) -> Iterator[Directory]:
        directory = Mine()
        yield directory
        directory.close()

    @pytest.fixture
    def elapse(self, directory: Mine) -> Callable[[float], None]:
        return directory.clock.advance  # seconds, by which silence is measured
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from headwater.core.directory import FORGET_S, MOST_CHANGES, MOST_HOLDERS, MOST_REPORT_BYTES, SILENT_S
from headwater.errors import RefusedError, UnavailableError
from headwater.ports import Directory
from headwater.types import Announced, Beat, Member, Replica, Standing, Tier
from tests.core.directories import DISK, HOST, member, name, removed, stored

WITHIN_S = 20.0
UNKNOWN = 12_345
Elapse = Callable[[float], None]


def soon(seconds: float = WITHIN_S) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def locate(directory: Directory, *numbers: int) -> list[tuple[Replica, ...]]:
    """Who holds these chunks."""
    return directory.locate([name(it) for it in numbers], soon())


def holders(directory: Directory, number: int) -> list[int]:
    """The numbers of those who hold one chunk."""
    return [it.number for it in locate(directory, number)[0]]


def beat(directory: Directory, number: int, standing: Standing = Standing.SERVING, report: bytes = b"{}") -> Beat:
    """A beat of one who is known."""
    answer = directory.beat(number, standing, report, soon())
    assert answer is not None
    return answer


def joined(directory: Directory, *nodes: str) -> list[int]:
    """The numbers of new members."""
    return [directory.join(member(it), soon()) for it in nodes]


class DirectorySuite:
    """Collected through subclasses only."""

    # ---- members ----------------------------------------------------------------------------------------

    def test_an_empty_one_knows_nobody(self, directory: Directory) -> None:
        assert directory.members(soon()) == []
        assert locate(directory, 1, 2) == [(), ()]
        assert directory.beat(UNKNOWN, Standing.SERVING, b"", soon()) is None

    def test_a_member_is_listed_as_it_described_itself(self, directory: Directory) -> None:
        it = Member(
            "näme", (1 << 63) - 1, "[fd00::1]:7420", "/run/a.sock", "host", {"zone": "ü", "nic": ""},
            ("shm", "tcp"), "1.2.3", 2, 5, 1 << 50,
        )  # fmt: skip
        number = directory.join(it, soon())
        [listed] = directory.members(soon())
        assert (listed.number, listed.member, listed.standing, listed.report) == (number, it, Standing.SERVING, b"")
        assert 0 <= listed.heard_s < WITHIN_S

    def test_a_life_keeps_its_number(self, directory: Directory) -> None:
        [number] = joined(directory, "a")
        directory.announce(number, 1, stored(1), soon())
        assert directory.join(member("a", address="b:2"), soon()) == number
        [listed] = directory.members(soon())
        assert listed.member.address == "b:2"
        assert holders(directory, 1) == [number]
        assert beat(directory, number).serial == 1

    def test_a_newer_life_ends_the_older(self, directory: Directory) -> None:
        old = directory.join(member("a", 1), soon())
        directory.announce(old, 1, stored(1), soon())
        new = directory.join(member("a", 1 << 62), soon())
        assert new != old
        assert [it.number for it in directory.members(soon())] == [new]
        assert holders(directory, 1) == []
        assert directory.beat(old, Standing.SERVING, b"", soon()) is None
        assert beat(directory, new).serial == 0

    def test_an_older_life_is_refused(self, directory: Directory) -> None:
        # Two that a float cannot tell apart.
        number = directory.join(member("a", (1 << 62) + 1), soon())
        with pytest.raises(RefusedError, match="name of its own"):
            directory.join(member("a", 1 << 62), soon())
        assert [it.number for it in directory.members(soon())] == [number]

    def test_a_clock_that_goes_back_keeps_nobody_alive(self, directory: Directory, elapse: Elapse) -> None:
        """As where another server takes over."""
        silent, dead, alive = joined(directory, "silent", "dead", "alive")
        elapse(SILENT_S + 1)
        directory.announce(dead, 1, stored(1), soon())
        beat(directory, dead)
        elapse(-3600)

        def standings() -> dict[int, Standing]:
            return {it.number: it.standing for it in directory.members(soon())}

        before = {silent: Standing.SILENT, dead: Standing.SERVING, alive: Standing.SILENT}
        assert standings() == before
        assert all(it.heard_s >= 0 for it in directory.members(soon()))
        beat(directory, alive)
        assert standings() == {**before, alive: Standing.SERVING}
        elapse(SILENT_S)
        beat(directory, alive)
        assert standings() == {**before, dead: Standing.SILENT, alive: Standing.SERVING}
        for _ in range(2):
            elapse(FORGET_S / 2)
            beat(directory, alive)
        assert standings() == {alive: Standing.SERVING}
        assert holders(directory, 1) == []

    def test_numbers_are_never_used_again(self, directory: Directory) -> None:
        numbers = []
        for epoch in range(5):
            numbers.append(directory.join(member("a", epoch), soon()))
            numbers += joined(directory, f"b{epoch}")
            directory.leave(numbers[-1], soon())
        numbers += joined(directory, "b1")
        assert sorted(set(numbers)) == numbers

    def test_who_leaves_is_gone_with_what_it_held(self, directory: Directory) -> None:
        a, b = joined(directory, "a", "b")
        directory.announce(a, 1, stored(1), soon())
        directory.announce(b, 1, stored(1), soon())
        for number in (a, a, UNKNOWN, 0):
            directory.leave(number, soon())
        assert holders(directory, 1) == [b]
        assert [it.number for it in directory.members(soon())] == [b]

    def test_silence_and_after(self, directory: Directory, elapse: Elapse) -> None:
        a, b = joined(directory, "a", "b")
        directory.announce(a, 1, stored(1), soon())
        elapse(SILENT_S + 0.5)
        beat(directory, b, Standing.DRAINING)
        assert {it.number: it.standing for it in directory.members(soon())} == {
            a: Standing.SILENT,
            b: Standing.DRAINING,
        }
        assert holders(directory, 1) == [a]
        beat(directory, a)
        assert {it.standing for it in directory.members(soon())} == {Standing.SERVING, Standing.DRAINING}
        elapse(FORGET_S - 10)
        beat(directory, b)
        elapse(10.5)
        assert holders(directory, 1) == []
        assert [it.number for it in directory.members(soon())] == [b]
        assert directory.beat(a, Standing.SERVING, b"", soon()) is None
        with pytest.raises(RefusedError):
            directory.announce(a, 2, stored(2), soon())
        assert directory.join(member("a"), soon()) not in (a, b)

    def test_announcing_is_no_sign_of_life(self, directory: Directory, elapse: Elapse) -> None:
        [a] = joined(directory, "a")
        elapse(SILENT_S - 1)
        directory.announce(a, 1, stored(1), soon())
        elapse(1.5)
        [listed] = directory.members(soon())
        assert listed.standing is Standing.SILENT

    def test_what_a_beat_brings_is_listed(self, directory: Directory, elapse: Elapse) -> None:
        a, b = joined(directory, "a", "b")
        report = bytes(range(256)) * (MOST_REPORT_BYTES // 256)
        beat(directory, a, Standing.DRAINING, report)
        elapse(2)
        beat(directory, b, report=b"")
        listed = {it.number: it for it in directory.members(soon())}
        assert (listed[a].standing, listed[a].report) == (Standing.DRAINING, report)
        assert 2 <= listed[a].heard_s < 3
        assert listed[b].heard_s < 1

    def test_the_version_changes_with_the_members_and_only_then(self, directory: Directory, elapse: Elapse) -> None:
        [a] = joined(directory, "a")
        versions = [beat(directory, a).members]

        def changes(standing: Standing = Standing.SERVING) -> bool:
            versions.append(beat(directory, a, standing).members)
            return versions[-1] not in versions[:-1]

        assert not changes()
        [b] = joined(directory, "b")
        assert changes()
        directory.announce(a, 1, stored(1), soon())
        joined(directory, "b")
        assert not changes()
        assert changes(Standing.DRAINING)
        assert changes()
        elapse(2)
        beat(directory, a)
        elapse(2)
        assert changes()  # b is silent
        assert not changes()
        beat(directory, b)
        assert changes()
        directory.leave(b, soon())
        assert changes()

    def test_one_generation_for_all(self, directory: Directory) -> None:
        a, b = joined(directory, "a", "b")
        assert beat(directory, a).generation == beat(directory, b).generation != ""

    # ---- chunks -----------------------------------------------------------------------------------------

    def test_replicas_are_told_by_number_and_tier(self, directory: Directory) -> None:
        a, b = joined(directory, "a", "b")
        assert directory.announce(a, 1, stored(1, 2) + stored(1, tier=DISK), soon()) == bytes(3)
        assert directory.announce(b, 1, stored(2, tier=DISK) + stored(3), soon()) == b"\1\0"
        assert locate(directory, 3, 1, 2, 4, 1) == [
            (Replica(b, HOST),),
            (Replica(a, HOST), Replica(a, DISK)),
            (Replica(a, HOST), Replica(b, DISK)),
            (),
            (Replica(a, HOST), Replica(a, DISK)),
        ]
        assert directory.announce(a, 2, removed(1, 2), soon()) == b"\0\1"
        assert locate(directory, 1, 2) == [(Replica(a, DISK),), (Replica(b, DISK),)]

    def test_groups_of_a_chunk_are_apart(self, directory: Directory) -> None:
        [a] = joined(directory, "a")
        directory.announce(a, 1, [Announced(name(1, 255), HOST, True)], soon())
        assert directory.locate([name(1, 254), name(1, 255)], soon()) == [(), (Replica(a, HOST),)]

    def test_names_are_any_bytes(self, directory: Directory) -> None:
        [a] = joined(directory, "a")
        names = [bytes(17), b"\xff" * 17, b"\r\n$17\r\n" + bytes(10), b"*" * 17]
        directory.announce(a, 1, [Announced(it, HOST, True) for it in names], soon())
        assert directory.locate(names, soon()) == [(Replica(a, HOST),)] * 4

    def test_changes_of_one_batch_are_applied_in_order(self, directory: Directory) -> None:
        [a] = joined(directory, "a")
        directory.announce(a, 1, stored(1) + removed(1) + removed(2) + stored(2) + stored(2, tier=DISK), soon())
        assert locate(directory, 1, 2) == [(), (Replica(a, HOST), Replica(a, DISK))]

    def test_a_batch_counts_once(self, directory: Directory) -> None:
        a, b = joined(directory, "a", "b")
        directory.announce(b, 1, stored(1), soon())
        directory.announce(a, 1, stored(1), soon())
        directory.announce(a, 2, removed(1), soon())
        assert directory.announce(a, 1, stored(1), soon()) == b"\1"
        assert holders(directory, 1) == [b]
        assert beat(directory, a).serial == 2

    def test_a_gap_is_refused_whole(self, directory: Directory) -> None:
        [a] = joined(directory, "a")
        with pytest.raises(RefusedError, match="join again"):
            directory.announce(a, 2, stored(1), soon())
        assert holders(directory, 1) == []
        assert beat(directory, a).serial == 0

    def test_an_unknown_number_is_refused(self, directory: Directory) -> None:
        joined(directory, "a")
        for number in (UNKNOWN, 0, -1, 1 << 60):
            with pytest.raises(RefusedError, match="join again"):
                directory.announce(number, 1, stored(1), soon())
            assert directory.beat(number, Standing.SERVING, b"", soon()) is None
        assert holders(directory, 1) == []

    def test_empty_batches(self, directory: Directory) -> None:
        [a] = joined(directory, "a")
        assert directory.announce(a, 1, [], soon()) == b""
        assert beat(directory, a).serial == 1
        assert directory.locate([], soon()) == []

    def test_big_batches(self, directory: Directory) -> None:
        a, b = joined(directory, "a", "b")
        everything = range(2 * MOST_CHANGES)
        for serial, start in enumerate((0, MOST_CHANGES), 1):
            changes = stored(*everything[start : start + MOST_CHANGES])
            assert directory.announce(a, serial, changes, soon()) == bytes(MOST_CHANGES)
        assert directory.announce(b, 1, stored(*everything[::2]), soon()) == b"\1" * MOST_CHANGES
        found = locate(directory, *everything, -1)
        both = (Replica(a, HOST), Replica(b, HOST))
        assert found == [both if it % 2 == 0 else both[:1] for it in everything] + [()]
        assert directory.announce(a, 3, removed(*everything[:MOST_CHANGES]), soon()) == b"\1\0" * (MOST_CHANGES // 2)
        assert locate(directory, 0, 1) == [(Replica(b, HOST),), ()]

    def test_an_entry_is_bounded(self, directory: Directory) -> None:
        numbers = joined(directory, *(f"n{it}" for it in range(MOST_HOLDERS + 2)))
        counts = [directory.announce(it, 1, stored(1), soon())[0] for it in numbers]
        assert counts == [*range(MOST_HOLDERS), MOST_HOLDERS, MOST_HOLDERS]
        assert holders(directory, 1) == numbers[:MOST_HOLDERS]
        directory.leave(numbers[3], soon())
        assert directory.announce(numbers[-1], 2, stored(1), soon())[0] == MOST_HOLDERS - 1
        assert holders(directory, 1) == [it for it in numbers[:MOST_HOLDERS] if it != numbers[3]] + [numbers[-1]]

    # ---- all --------------------------------------------------------------------------------------------

    def test_what_no_directory_takes(self, directory: Directory) -> None:
        [a] = joined(directory, "a")
        refused: Sequence[Callable[[], object]] = (
            lambda: directory.join(member(""), soon()),
            lambda: directory.join(member("x" * 256), soon()),
            lambda: directory.join(member("b", -1), soon()),
            lambda: directory.join(member("b", 1 << 63), soon()),
            lambda: directory.beat(a, Standing.SILENT, b"", soon()),
            lambda: directory.beat(a, Standing.SERVING, bytes(MOST_REPORT_BYTES + 1), soon()),
            lambda: directory.announce(a, 0, stored(1), soon()),
            lambda: directory.announce(a, 1 << 53, stored(1), soon()),
            lambda: directory.announce(a, 1, stored(1) * (MOST_CHANGES + 1), soon()),
            lambda: directory.announce(a, 1, [*stored(1), Announced(b"x" * 16, HOST, True)], soon()),
            lambda: directory.announce(a, 1, [Announced(name(1), Tier.REMOTE, True)], soon()),
            lambda: directory.locate([name(1), b""], soon()),
            lambda: directory.locate([name(1) + b"x"], soon()),
        )
        for call in refused:
            with pytest.raises(RefusedError):
                call()
        assert holders(directory, 1) == []
        assert [it.number for it in directory.members(soon())] == [a]

    def test_calls_that_come_too_late_do_nothing(self, directory: Directory) -> None:
        [a] = joined(directory, "a")
        late = time.monotonic() - 0.001
        for call in (
            lambda: directory.join(member("b"), late),
            lambda: directory.beat(a, Standing.SERVING, b"", late),
            lambda: directory.announce(a, 1, stored(1), late),
            lambda: directory.locate([name(1)], late),
            lambda: directory.members(late),
            lambda: directory.leave(a, late),
        ):
            with pytest.raises(UnavailableError):
                call()
        assert [it.number for it in directory.members(soon())] == [a]
        assert holders(directory, 1) == []

    def test_many_threads_at_once(self, directory: Directory) -> None:
        def live(it: int) -> tuple[int, list[int]]:
            number = directory.join(member(f"n{it}"), soon())
            for serial in range(1, 11):
                mine = range(100 * it + 100, 100 * it + 100 + serial)
                directory.announce(number, serial, stored(1, *mine) if serial % 2 else removed(1, *mine), soon())
                found = directory.locate([name(1)] * 50, soon())
                assert len(set(found)) == 1, "one call sees one state"
                beat(directory, number)
            directory.announce(number, 11, stored(1), soon())
            return number, [
                r.number for found in locate(directory, *range(100 * it + 100, 100 * it + 110)) for r in found
            ]

        with ThreadPoolExecutor(8) as threads:
            lives = list(threads.map(live, range(8)))
        assert len({number for number, _ in lives}) == 8
        assert [left for _, left in lives] == [[]] * 8
        assert sorted(holders(directory, 1)) == sorted(number for number, _ in lives)

    def test_it_explains_itself(self, directory: Directory) -> None:
        assert "Directory(" in repr(directory)
