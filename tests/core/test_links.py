"""Peers: whom to read from and how many reads at once, who is sick, and when a read goes on elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.health import LONGEST_S, Health
from headwater.core.links import HEDGE_BURST, HEDGE_SHARE, Begun, Peers, Wanted
from headwater.core.paths import LAST_STALL_S, LEAST_STALL_S, MOST_STALL_S, STALE_S, Distance, Path
from headwater.types import Listed, Member, Replica, Standing, Tier

MIB = 1 << 20
OWN = Member("own", 1, "own:1", "/own", "h0", {"zone": "z", "switch": "s", "process": "1"}, ("local", "shm", "tcp"))


def listed(
    number: int,
    host: str = "",
    standing: Standing = Standing.SERVING,
    transports: tuple[str, ...] = ("local", "shm", "tcp"),
    **labels: str,
) -> Listed:
    host = host or f"h{number}"
    member = Member(f"node{number}", 1, f"{host}:1", f"/{number}", host, labels, transports)
    return Listed(number, member, standing, 0.0)


def peers(*members: Listed, reads: int = 64) -> Peers:
    """Peers that may have many reads under way, as if they had proved themselves."""
    found = Peers(OWN, 0)
    found.listed(members, 0.0)
    for it in members:
        warm(found, it.number, reads)
    return found


def warm(found: Peers, number: int, reads: int) -> None:
    for _ in range(reads - 1):
        read(found, number, seconds=None)


def read(
    found: Peers, number: int, now: float = 0.0, seconds: float | None = 0.001, size: int = MIB, transport: str = ""
) -> None:
    """One read that succeeds; without seconds, as fast as it is taken to be."""
    transport = transport or found.transports(number, Tier.HOST, now)[0]
    begun = begin(found, number, now, size, transport)
    if seconds is None:
        latency_s, byte_s = begun.path.line(now)
        seconds = latency_s + size * byte_s
    found.succeeded(begun, now + seconds)


def begin(found: Peers, number: int, now: float = 0.0, size: int = MIB, transport: str = "tcp") -> Begun:
    begun = found.began(number, transport, Tier.HOST, size, now)
    assert begun is not None
    return begun


def wanted(count: int, *numbers: int, tier: Tier = Tier.HOST, size: int = MIB) -> list[Wanted]:
    return [Wanted([Replica(it, tier) for it in numbers], size) for _ in range(count)]


def chosen(found: Peers, chunks: Sequence[Wanted], now: float = 0.0, without: Sequence[int] = ()) -> dict[int, int]:
    """How many chunks each holder gets."""
    counts = Counter[int]()
    for it in found.choose(chunks, now, without).reads:
        counts[it.number] += len(it.chunks)
    return dict(counts)


def break_down(found: Peers, number: int, now: float = 0.0) -> None:
    """A peer none of whose transports works."""
    for transport in found.transports(number, Tier.HOST, now):
        begun = found.began(number, transport, Tier.HOST, MIB, now)
        assert begun is not None
        found.failed(begun, now, 0.0, unavailable=True)


# ---- distance and guesses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("near", "far"),
    [
        (listed(1, "h0", process="1"), listed(2, "h0", process="2")),
        (listed(1, "h0"), listed(2, switch="s")),
        (listed(1, switch="s"), listed(2, zone="z")),
        (listed(1, zone="z"), listed(2, zone="other")),
        (listed(1, zone="z"), listed(2)),
    ],
)
def test_who_was_never_measured_is_chosen_by_distance(near: Listed, far: Listed) -> None:
    for first, second in ((near, far), (far, near)):
        found = Peers(OWN, 0)
        found.listed([first, second], 0.0)
        assert chosen(found, wanted(1, 1, 2)) == {near.number: 1}


def test_only_transports_that_reach_the_peer_are_tried() -> None:
    found = peers(listed(1, "h0", process="1"), listed(2, "h0"), listed(3), listed(4, transports=("nixl", "tcp")))
    assert found.transports(1, Tier.HOST, 0.0) == ["local", "shm", "tcp"]
    assert found.transports(2, Tier.HOST, 0.0) == ["shm", "tcp"]
    assert found.transports(3, Tier.HOST, 0.0) == ["tcp"]
    assert found.transports(4, Tier.HOST, 0.0) == ["tcp"]
    assert found.transports(99, Tier.HOST, 0.0) == []


def test_the_transport_that_was_measured_to_be_faster_comes_first() -> None:
    found = peers(listed(1, "h0"))
    for _ in range(10):
        read(found, 1, seconds=0.1, transport="shm")
        read(found, 1, seconds=0.01, transport="tcp")
    assert found.transports(1, Tier.HOST, 1.0) == ["tcp", "shm"]
    # What was slow long ago is tried again, by one read.
    begin(found, 1, STALE_S - 0.1, transport="tcp")
    assert found.transports(1, Tier.HOST, STALE_S) == ["shm", "tcp"]
    begin(found, 1, STALE_S, transport="shm")
    assert found.transports(1, Tier.HOST, STALE_S) == ["tcp", "shm"]


# ---- choosing -------------------------------------------------------------------------------------------


def test_a_small_request_goes_to_one_holder_and_a_large_one_to_all() -> None:
    found = peers(*(listed(it, zone="z") for it in (1, 2, 3, 4)))
    assert len(chosen(found, wanted(2, 1, 2, 3, 4, size=4096))) == 1
    shares = chosen(found, wanted(256, 1, 2, 3, 4))
    assert len(shares) == 4
    assert max(shares.values()) - min(shares.values()) <= 4


def test_shares_follow_speed() -> None:
    found = peers(listed(1), listed(2))
    for _ in range(20):
        read(found, 1, seconds=0.001)
        read(found, 2, seconds=0.004)
    shares = chosen(found, wanted(200, 1, 2))
    assert 3 <= shares[1] / shares[2] <= 5


def test_bytes_under_way_count() -> None:
    for loaded in (1, 2):
        found = peers(listed(1), listed(2))
        begin(found, loaded, size=64 * MIB)
        assert chosen(found, wanted(1, 1, 2)) == {3 - loaded: 1}


def test_who_has_no_choice_comes_first() -> None:
    found = peers(listed(1), listed(2))
    chunks = wanted(50, 1, 2) + wanted(50, 1)
    assert chosen(found, chunks)[2] >= 49


def test_disk_costs_more_than_memory() -> None:
    found = peers(listed(1), listed(2))
    assert chosen(found, [Wanted([Replica(1, Tier.DISK), Replica(2, Tier.HOST)], MIB)]) == {2: 1}
    assert chosen(found, wanted(1, 1, tier=Tier.DISK)) == {1: 1}
    # Even if disk reads happened to be fast.
    for _ in range(5):
        begun = found.began(1, "tcp", Tier.DISK, MIB, 0.0)
        assert begun is not None
        found.succeeded(begun, 1e-6)
    assert chosen(found, [Wanted([Replica(1, Tier.DISK), Replica(1, Tier.HOST)], MIB)]) == {1: 1}
    assert found.choose([Wanted([Replica(1, Tier.DISK), Replica(1, Tier.HOST)], MIB)], 0.0).reads[0].tier is Tier.HOST


def test_equal_holders_are_not_all_asked_by_everybody() -> None:
    first = set[int]()
    for own in range(100, 140):
        found = Peers(OWN, own)
        found.listed([listed(1), listed(2), listed(3)], 0.0)
        first |= chosen(found, wanted(1, 1, 2, 3)).keys()
    assert first == {1, 2, 3}


def test_silent_ones_are_not_chosen_draining_ones_last() -> None:
    found = peers(listed(1, zone="z"), listed(2))
    found.listed([listed(1, zone="z", standing=Standing.DRAINING), listed(2)], 0.0)
    assert chosen(found, wanted(4, 1, 2)) == {2: 4}
    assert chosen(found, wanted(4, 1)) == {1: 4}
    found.listed([listed(1, standing=Standing.SILENT), listed(2)], 0.0)
    assert found.choose(wanted(1, 1), 0.0).nowhere == (0,)


def test_a_number_that_is_no_member_is_told() -> None:
    found = peers(listed(1))
    choice = found.choose([*wanted(1, 1, 77), *wanted(1, 78), *wanted(1, 0)], 0.0)
    assert choice.unknown == {77, 78}
    assert choice.nowhere == (1, 2)


def test_who_failed_this_request_is_left_out() -> None:
    found = peers(listed(1, zone="z"), listed(2))
    assert chosen(found, wanted(1, 1, 2), without=[1]) == {2: 1}
    assert found.choose(wanted(1, 1), 0.0, without={1}).nowhere == (0,)


def test_who_has_stalled_once_is_second_choice_until_it_has_succeeded() -> None:
    found = peers(listed(1), listed(2))
    for _ in range(20):
        read(found, 1, seconds=0.004)
        read(found, 2, seconds=0.006)
    assert chosen(found, wanted(1, 1, 2)) == {1: 1}
    found.stalled(begin(found, 1, size=0), 0.0, 0.0)
    assert chosen(found, wanted(1, 1, 2)) == {2: 1}
    read(found, 1, seconds=0.004)
    assert chosen(found, wanted(1, 1, 2)) == {1: 1}


TIERS = st.sampled_from([Tier.HOST, Tier.DISK])
REPLICAS = st.lists(st.builds(Replica, st.integers(1, 8), TIERS), max_size=4)


@given(st.lists(st.tuples(REPLICAS, st.integers(1, 8 * MIB)), max_size=40), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_each_chunk_has_one_fate_and_a_reader_that_holds_it(
    chunks: list[tuple[list[Replica], int]], trouble: int
) -> None:
    found = Peers(OWN, 0)
    found.listed([listed(it) for it in range(1, 7)], 0.0)
    if trouble:
        break_down(found, trouble)
    request = [Wanted(replicas, size) for replicas, size in chunks]
    choice = found.choose(request, 0.0)
    fates = [*choice.busy, *choice.nowhere, *(index for it in choice.reads for index in it.chunks)]
    assert sorted(fates) == list(range(len(chunks)))
    for it in choice.reads:
        assert all(Replica(it.number, it.tier) in chunks[index][0] for index in it.chunks)
        assert it.size_bytes == sum(chunks[index][1] for index in it.chunks)
        assert list(it.chunks) == sorted(it.chunks)
        assert it.number != trouble
    usable = set(range(1, 7)) - {trouble}
    for index in choice.nowhere:
        assert not usable & {it.number for it in chunks[index][0]}


# ---- slow start -------------------------------------------------------------------------------------------


def reads_at_once(found: Peers, number: int, now: float = 0.0) -> list[Begun]:
    begun: list[Begun] = []
    while (it := found.began(number, "tcp", Tier.HOST, MIB, now)) is not None:
        begun.append(it)
    return begun


def test_a_new_peer_starts_slowly() -> None:
    found = Peers(OWN, 0)
    found.listed([listed(1)], 0.0)
    counts = []
    for _ in range(9):
        begun = reads_at_once(found, 1)
        assert found.choose(wanted(2, 1), 0.0).busy == (0, 1)
        counts.append(len(begun))
        for it in begun:
            found.succeeded(it, 0.001)
    assert counts == [1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_a_healed_peer_and_one_that_is_heard_of_again_start_slowly() -> None:
    found = peers(listed(1))
    break_down(found, 1)
    read(found, 1, now=0.2)
    assert len(reads_at_once(found, 1, 0.2)) == 1
    found = peers(listed(1))
    found.listed([listed(1, standing=Standing.SILENT)], 0.0)
    found.listed([listed(1)], 0.0)
    assert len(reads_at_once(found, 1)) == 1
    found.listed([listed(1, standing=Standing.DRAINING)], 0.0)
    found.listed([listed(1)], 0.0)
    assert not reads_at_once(found, 1)


# ---- health --------------------------------------------------------------------------------------------------


def test_a_transport_that_does_not_work_makes_way_for_the_next() -> None:
    found = peers(listed(1, "h0"))
    found.failed(begin(found, 1, transport="shm"), 0.0, 0.0, unavailable=True)
    assert found.transports(1, Tier.HOST, 0.0) == ["tcp"]
    assert chosen(found, wanted(1, 1)) == {1: 1}
    # It is probed; until that has succeeded it comes last.
    assert found.probes(0.0) == []
    assert found.probes(0.2) == [(1, "shm")]
    assert found.transports(1, Tier.HOST, 0.2) == ["tcp", "shm"]
    probe = begin(found, 1, 0.2, transport="shm")
    assert found.began(1, "shm", Tier.HOST, MIB, 0.2) is None
    found.succeeded(probe, 0.2)
    assert found.transports(1, Tier.HOST, 0.2) == ["shm", "tcp"]
    assert found.probes(0.2) == []


def test_a_peer_is_sick_when_nothing_reaches_it() -> None:
    found = peers(listed(1, "h0"), listed(2))
    break_down(found, 1)
    assert found.report(0.0)[0].health is Health.SICK
    assert found.choose(wanted(1, 1), 0.0).nowhere == (0,)
    assert found.began(1, "tcp", Tier.HOST, MIB, 0.0) is None
    # When it is due to be asked again: only for what nobody else has.
    assert chosen(found, wanted(3, 1, 2), now=0.2) == {2: 3}
    assert chosen(found, wanted(1, 1), now=0.2) == {1: 1}
    assert len(found.probes(0.2)) == 1
    begin(found, 1, 0.2, transport="shm")
    assert found.probes(0.2) == []
    assert chosen(found, wanted(1, 1), now=0.3) == {}


def test_a_sick_peer_is_the_last_resort_though_one_of_its_transports_is_well() -> None:
    found = peers(listed(1, "h0"), listed(2))
    begun = [begin(found, 1, transport="tcp") for _ in range(3)]
    for it in begun:
        found.stalled(it, 0.05, 0.0)
        found.abandoned(it, 0.05)
    assert chosen(found, wanted(1, 1, 2)) == {2: 1}
    assert chosen(found, wanted(1, 1, 2), now=0.2) == {2: 1}
    assert chosen(found, wanted(1, 1), now=0.2) == {1: 1}
    # Healed over the other transport, it is the nearest again; the one that stalled is sick for itself.
    read(found, 1, 0.2, transport="shm")
    assert chosen(found, wanted(1, 1, 2), now=0.2) == {1: 1}
    assert found.probes(0.2) == [(1, "tcp")]
    assert found.transports(1, Tier.HOST, 0.2) == ["shm", "tcp"]


def test_a_peer_none_of_whose_transports_is_well_is_the_last_resort_though_it_is_not_sick() -> None:
    found = peers(listed(1, "h0"), listed(2))
    found.failed(begin(found, 1, transport="shm"), 0.0, 0.0, unavailable=True)
    begin(found, 1, 0.2, transport="shm")
    # One is being probed: whether the peer is gone is not known yet.
    found.failed(begin(found, 1, 0.2, transport="tcp"), 0.2, 0.0, unavailable=True)
    assert found.report(0.2)[0].health is Health.WELL
    assert chosen(found, wanted(1, 1, 2), now=0.4) == {2: 1}
    assert chosen(found, wanted(1, 1), now=0.4) == {1: 1}


def test_planning_makes_nobody_the_probe() -> None:
    found = peers(listed(1))
    break_down(found, 1)
    for _ in range(3):
        assert chosen(found, wanted(1, 1), now=0.2) == {1: 1}
        assert found.probes(0.2) == [(1, "tcp")]
    assert found.began(1, "tcp", Tier.HOST, 0, 0.2) is not None


def test_three_stalls_make_a_peer_sick_and_a_success_heals_it() -> None:
    found = peers(listed(1))
    begun = [begin(found, 1) for _ in range(3)]
    for it in begun:
        assert found.report(0.0)[0].health is Health.WELL
        found.stalled(it, 0.5, 0.0)
    assert found.report(0.0)[0].health is Health.SICK
    for it in begun[:2]:
        found.abandoned(it, 0.6)
    found.succeeded(begun[2], 0.6)
    assert found.report(0.0)[0].health is Health.WELL


def test_it_heals_within_the_longest_pause_whatever_happened() -> None:
    found, now = peers(listed(1)), 0.0
    for _ in range(20):
        break_down(found, 1, now)
        while not found.probes(now):
            now += 0.1
    for _ in range(int(2 * LONGEST_S / 0.1)):
        now += 0.1
        if found.probes(now):
            read(found, 1, now)
            break
    assert found.report(now)[0].health is Health.WELL


def test_nothing_is_learned_from_bytes_that_did_not_come() -> None:
    """A peer that says at once that it has nothing, or refuses, is no fast one; one that was given up is a slow one."""
    found = peers(listed(1))
    for _ in range(20):
        read(found, 1, seconds=0.01)
    for _ in range(20):
        found.abandoned(begin(found, 1, size=64 * MIB), 0.001)
        found.succeeded(begin(found, 1, size=64 * MIB), 0.001, came_bytes=0)
        found.succeeded(begin(found, 1, size=64 * MIB), 0.02, came_bytes=2 * MIB)
    assert found.rates()[1] == pytest.approx(100 * MIB, rel=0.2)
    for _ in range(5):
        found.abandoned(begin(found, 1), 1.0)
    assert found.rates()[1] < 40 * MIB


# ---- stalls and hedges ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 64 * MIB), st.floats(0, 20)), max_size=30), st.integers(0, 64 * MIB))
@settings(max_examples=40, deadline=None)
def test_a_read_is_waited_for_within_bounds(past: list[tuple[int, float]], size: int) -> None:
    path = Path("tcp", Distance.FAR, 0.0)
    for size_bytes, seconds in past:
        path.observe(size_bytes, seconds)
    assert LEAST_STALL_S <= path.stall_s(size) <= LAST_STALL_S


def test_the_wait_follows_what_is_usual() -> None:
    path = Path("tcp", Distance.ZONE, 0.0)
    assert path.stall_s(MIB) == MOST_STALL_S
    for _ in range(30):
        path.observe(MIB, 0.001)
    assert path.stall_s(MIB) == LEAST_STALL_S
    # A peer that is always between 60 and 140 ms has not stalled at 140, nor at twice the mean.
    for turn in range(60):
        path.observe(MIB, 0.06 if turn % 2 else 0.14)
    assert 0.2 < path.stall_s(MIB) <= MOST_STALL_S
    # One that is always slow is not given up before it can have answered.
    for _ in range(60):
        path.observe(MIB, 0.6)
    assert 0.6 < path.stall_s(MIB) <= LAST_STALL_S


def test_a_stopped_holder_costs_a_get_less_than_a_second_and_a_half() -> None:
    """Whatever the credit for hedges is: without any, it is found sick."""
    for credit in (True, False):
        found = peers(listed(1), listed(2))
        while not credit and found.may_go_on(begin(found, 2)):
            pass
        begun, now = begin(found, 1), 0.0
        while True:
            now += begun.stall_s
            found.stalled(begun, now, 0.0)
            if found.may_go_on(begun):
                break
        assert now <= 1.5 - 0.01
        if not credit:
            assert found.report(now)[0].health is Health.SICK
        assert chosen(found, wanted(4, 1, 2), now, without=[1]) == {2: 4}


@given(st.lists(st.booleans(), max_size=300))
@settings(max_examples=40, deadline=None)
def test_hedges_are_a_share_of_all_reads(story: list[bool]) -> None:
    found = peers(listed(1), reads=2)
    before = found.begun
    for hedges in story:
        begun = begin(found, 1)
        if hedges:
            found.may_go_on(begun)
        found.succeeded(begun, 0.001)
    assert found.hedges <= HEDGE_BURST + HEDGE_SHARE * (found.begun - before)


def test_hedges_come_back_with_reads() -> None:
    found = peers(listed(1), reads=2)
    held = begin(found, 1)
    while found.may_go_on(held):
        pass
    for _ in range(int(1 / HEDGE_SHARE) + 1):
        read(found, 1)
    assert found.may_go_on(held)
    assert not found.may_go_on(held)
    for _ in range(500):
        read(found, 1)
    assert [found.may_go_on(held) for _ in range(6)] == [True] * int(HEDGE_BURST) + [False] * 2
    assert found.report(0.0)[0].hedges == found.hedges


# ---- membership ------------------------------------------------------------------------------------------------


def test_who_is_listed_no_more_is_forgotten_whatever_is_under_way() -> None:
    found = peers(listed(1), listed(2))
    begun, other = begin(found, 1), begin(found, 1)
    found.listed([listed(2)], 1.0)
    assert (1 in found, len(found)) == (False, 1)
    assert found.may_go_on(begun)
    assert found.hedges == 0
    found.listed([listed(1), listed(2)], 2.0)
    found.succeeded(begun, 2.0)
    found.failed(other, 2.0, 0.0)
    report = found.report(3.0)[0]
    assert (report.reads, report.reading_bytes, report.reads_max, report.seen_s) == (0, 0, 1, 1.0)
    with pytest.raises(AssertionError, match="ended twice"):
        found.abandoned(begun, 2.0)


def test_another_life_at_its_address_ends_it_though_it_is_listed_yet() -> None:
    found = peers(listed(1))
    found.left(1)
    found.listed([listed(1)], 1.0)
    assert 1 not in found
    assert found.member(1) is None
    found.listed([], 2.0)
    found.listed([listed(1)], 3.0)
    assert found.member(1) is not None


def test_we_are_no_peer_of_ours() -> None:
    found = Peers(OWN)
    found.listed([listed(1), listed(5)], 0.0)
    found.renumber(5)
    assert len(found) == 1
    found.listed([listed(1), listed(5)], 0.0)
    assert len(found) == 1


def test_state_is_bounded_by_who_is_listed() -> None:
    found = Peers(OWN, 0)
    for number in range(1, 500):
        found.listed([listed(number)], 0.0)
        found.left(number - 1)
        found.left(number)
    assert len(found) == 0
    assert len(found._gone) <= 1


def test_people_see_rates_and_health() -> None:
    found = peers(listed(1, "h0"))
    for _ in range(5):
        read(found, 1, seconds=0.001, transport="tcp")
    report = found.report(1.0)[0]
    assert (report.name, report.health, report.reads, report.distance) == ("node1", Health.WELL, 0, Distance.HOST)
    by_name = {it.transport: it for it in report.paths}
    assert by_name["tcp"].bytes_s == pytest.approx(MIB / 0.001, rel=0.1)
    assert by_name["tcp"].reads == 5
    assert 1 in found.rates()
    assert found.batch_bytes(1, "tcp", Tier.HOST, 1.0) == pytest.approx(0.1 * MIB / 0.001, rel=0.3)
    assert "1, 0 of them sick" in repr(found)
