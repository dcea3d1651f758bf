"""Deadlines: what a ticket is worth after its time, and that late and unknown messages do no harm."""

from __future__ import annotations

import os

import pytest

from headwater.errors import UnavailableError
from headwater.node.messages import Done, Ended, Release
from headwater.types import ABSENT, Cleared
from tests.node.conftest import Rig, eventually
from tests.node.peers import LAYOUT, keys, mapped, namespace, payload, save, write

LATER_S = 1.0


@pytest.fixture
def load_lease_s(rig: Rig) -> float:
    return rig.node.config.load_lease_s


@pytest.fixture
def save_lease_s(rig: Rig) -> float:
    return rig.node.config.save_lease_s


def test_deadlines_are_the_configured_time_from_now(rig: Rig, load_lease_s: float, save_lease_s: float) -> None:
    session = rig.session("a", maps=True)
    before_s = rig.clock.now()
    got = session.reserve(keys(1))
    assert before_s + save_lease_s <= got.deadline_s <= rig.clock.now() + save_lease_s
    session.done(got.ticket)
    before_s = rig.clock.now()
    got = session.load(keys(1))
    assert before_s + load_lease_s <= got.deadline_s <= rig.clock.now() + load_lease_s


def test_a_load_ends_at_its_deadline_and_its_reader_can_know(rig: Rig, load_lease_s: float) -> None:
    session = rig.session("a", maps=True)
    save(session, keys(2))
    got = session.load(keys(2))
    assert session.clear() == Cleared(0, 2)
    rig.clock.moved_s += load_lease_s - LATER_S
    session.match([])
    session.match([])
    assert session.clear().deleted == 0, "not before"
    rig.clock.moved_s += 2 * LATER_S
    eventually(lambda: session.clear().deleted == 2)
    assert rig.cache.expired_loads == 1
    assert rig.clock.now() > got.deadline_s, "so the check that readers make after their copy fails"
    taken = session.reserve(keys(2, "new")).addresses[0]
    assert set(taken) & set(got.addresses[0]), "which matters: the place is another's by now"
    assert not session.done(got.ticket)
    assert session.release([got.ticket]) == 0
    assert rig.cache.unknown_tickets == 2


def test_a_late_save_commits_nothing(rig: Rig, save_lease_s: float) -> None:
    session = rig.session("a", maps=True)
    got = session.reserve(keys(2))
    rig.clock.moved_s += save_lease_s + LATER_S
    eventually(lambda: session.match([]).chunks == 0 and rig.cache.expired_saves == 1)
    for key, place in zip(keys(2), got.addresses[0], strict=True):
        write(session, place, payload(key, 1))
    assert rig.cache.pool.taken_slots == 2, "kept from re-use while it may still be written to"
    assert session.done(got.ticket)
    assert session.match(keys(2)).chunks == 0
    assert rig.cache.pool.taken_slots == 0
    assert not session.done(got.ticket)


def test_a_save_that_is_late_but_not_yet_expired_commits_nothing_either(rig: Rig, save_lease_s: float) -> None:
    """`done` arrives after the deadline and before the tick that would have noticed."""
    session = rig.session("a")
    got = session.reserve(keys(2))
    expire, rig.node.expire = rig.node.expire, lambda: 0  # type: ignore[method-assign]
    rig.clock.moved_s += save_lease_s + LATER_S
    assert session.done(got.ticket)
    assert session.match(keys(2)).chunks == 0
    assert rig.cache.pool.taken_slots == 0
    rig.node.expire = expire  # type: ignore[method-assign]


def test_a_new_writer_need_not_wait_for_a_late_one(rig: Rig, save_lease_s: float) -> None:
    slow, quick = rig.session("slow", maps=True), rig.session("quick", maps=True)
    old = slow.reserve(keys(2))
    assert quick.reserve(keys(2)).addresses[0] == (ABSENT, ABSENT)
    rig.clock.moved_s += save_lease_s + LATER_S
    eventually(lambda: quick.match([]).chunks == 0 and rig.cache.expired_saves == 1)
    assert save(quick, keys(2), 2) == 2
    for key, place in zip(keys(2), old.addresses[0], strict=True):
        write(slow, place, payload(key, 1))
    slow.done(old.ticket)
    found = quick.load(keys(2))
    for key, place in zip(keys(2), found.addresses[0], strict=True):
        assert bytes(mapped(quick).view(place, 64)) == payload(key, 2)[:64], "the late bytes went elsewhere"


def test_a_ticket_is_done_when_each_shard_has_said_so_once(rig: Rig) -> None:
    layout = type(LAYOUT)(16, (type(LAYOUT.groups[0])(16, 4096, (1, 1)),))
    session = rig.session("a", namespace(layout), layout)
    got = session.reserve(keys(1), shards=(0, 1))
    assert session.done(got.ticket, shard=0)
    assert session.match(keys(1)).chunks == 0
    assert not session.done(got.ticket, shard=0), "twice is once"
    assert not session.done(got.ticket, shard=7)
    assert session.match(keys(1)).chunks == 0
    assert session.done(got.ticket, shard=1)
    assert session.match(keys(1)).chunks == 1


def test_a_failed_position_publishes_neither_itself_nor_what_follows(rig: Rig) -> None:
    session = rig.session("a")
    got = session.reserve(keys(5))
    session.done(got.ticket, failed=(2, 99))
    assert session.match(keys(5)).chunks == 2
    assert session.contains(keys(5)) == [True, True, False, False, False]
    assert rig.cache.pool.taken_slots == 2


def test_a_hundred_thousand_unknown_ids_create_no_state(rig: Rig) -> None:
    session = rig.session("a")
    kept = session.reserve(keys(1)).ticket
    for start in range(0, 100_000, 10_000):
        assert session.release(range(start, start + 10_000)) == 0
    assert rig.cache.unknown_tickets == 100_000
    assert list(rig.cache.tickets) == [kept]
    for ticket in (0, -1, 1 << 63, -(1 << 63), (1 << 64) - 1):
        assert session.link.call(Done(ticket, 0, ()), Ended).count == 0
        assert session.link.call(Release((ticket,)), Ended).count == 0
    assert session.match([os.urandom(16) for _ in range(10_000)]).chunks == 0
    assert list(rig.cache.tickets) == [kept]
    assert len(rig.cache.entries) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.release(range(65_537)),
        lambda session: session.done(0, failed=range(65_537)),
        lambda session: session.reserve(keys(1), lacking=[(0, index) for index in range(65_537)]),
        lambda session: session.match([b"k" * 16] * 65_537),
        lambda session: session.contains([b"k" * 16] * 65_537),
        lambda session: session.load([b"k" * 16] * 65_537),
        lambda session: session.reserve([b"k" * 16] * 65_537),
        lambda session: session.match([b"short"]),
        lambda session: session.reserve(keys(1), parent=b"x"),
        lambda session: session.reserve(keys(1), shards=()),
        lambda session: session.reserve(keys(1), shards=(0, 0)),
        lambda session: session.reserve(keys(1), shards=(-1,)),
        lambda session: session.reserve(keys(1), shards=(1,)),
        lambda session: session.load(keys(1), shards=range(4097)),
    ],
)
def test_calls_that_cannot_be_meant_end_the_session_and_nothing_else(rig: Rig, call) -> None:
    healthy, bad = rig.session("healthy"), rig.session("bad")
    bad.reserve(keys(1))
    with pytest.raises(UnavailableError):
        call(bad)
    eventually(lambda: not rig.cache.tickets)
    assert healthy.match(keys(1)).chunks == 0
    assert rig.server.protocol_errors == 1


def test_a_reply_that_would_not_fit_a_frame_is_not_begun(rig: Rig) -> None:
    groups = tuple(type(LAYOUT.groups[0])(16, 4096, (1,)) for _ in range(9))
    layout = type(LAYOUT)(16, groups)
    session = rig.session("a", namespace(layout), layout)
    assert session.match(keys(1) * 65_536).chunks == 0, "one byte says it"
    with pytest.raises(UnavailableError):
        session.reserve(keys(1) * 65_536)


def test_announcements_do_not_pile_up(rig: Rig) -> None:
    """Nobody takes them on this host; a node that runs for months must not keep them."""
    session = rig.session("a")
    for turn in range(20):
        session.done(session.reserve(keys(50, f"{turn}")).ticket)
    rig.clock.moved_s += 1
    eventually(lambda: session.match([]).chunks == 0 and not rig.cache._changes)
