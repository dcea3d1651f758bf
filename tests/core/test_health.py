"""The breaker: when it opens, how seldom it lets a try through, and how it heals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.health import FIRST_S, LONGEST_S, Breaker, Health


def sick(now: float = 0.0, jitter: float = 0.0) -> Breaker:
    breaker = Breaker()
    breaker.failed(now, jitter, unavailable=True)
    assert breaker.state is Health.SICK
    return breaker


@pytest.mark.parametrize("kind", ["failed", "slow", "mixed"])
def test_three_in_a_row_open_it(kind: str) -> None:
    breaker = Breaker()
    for now in range(3):
        assert breaker.state is Health.WELL
        assert breaker.allows(now)
        if kind == "slow" or (kind == "mixed" and now == 1):
            breaker.slow(now, 0.5)
        else:
            breaker.failed(now, 0.5)
    assert breaker.state is Health.SICK
    assert breaker.opened == 1
    assert breaker.failed_operations + breaker.slow_operations == 3


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker()
    for now in range(20):
        breaker.failed(now, 0.0)
        breaker.slow(now, 0.0)
        breaker.succeeded(now)
    assert breaker.state is Health.WELL
    assert breaker.opened == 0


def test_one_word_that_nothing_works_is_enough() -> None:
    breaker = sick(now=10.0)
    assert not breaker.allows(10.05)
    assert breaker.next_probe_s == pytest.approx(10.1)


def test_one_probe_at_a_time() -> None:
    breaker = sick()
    assert breaker.allows(0.1)
    assert breaker.state is Health.PROBING
    assert not any(breaker.allows(0.1 + step / 10) for step in range(49))
    assert breaker.probes == 1
    breaker.succeeded(0.3)
    assert breaker.state is Health.WELL
    assert breaker.next_probe_s is None
    assert breaker.allows(0.3)


def test_a_probe_that_nobody_reports_is_followed_by_another() -> None:
    breaker = sick()
    assert breaker.allows(1.0)
    assert not breaker.allows(1.0 + LONGEST_S - 0.01)
    assert breaker.allows(1.0 + LONGEST_S)
    assert breaker.probes == 2


def pauses(breaker: Breaker, count: int, jitter: float) -> list[float]:
    """The times from a failed probe to the next."""
    found, now = [], 0.0
    for _ in range(count):
        due = breaker.next_probe_s
        assert due is not None
        found.append(due - now)
        now = due
        assert breaker.allows(now)
        breaker.failed(now, jitter)
    return found


def test_pauses_double_up_to_five_seconds() -> None:
    assert pauses(sick(), 8, 0.0) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5, 2.5])
    late = pauses(sick(jitter=0.999), 8, 0.999)
    assert late == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], rel=0.001)


def test_a_tier_that_only_answers_probes_is_asked_less_and_less() -> None:
    breaker, now = sick(), 0.0
    lengths = []
    for _ in range(6):
        due = breaker.next_probe_s
        assert due is not None
        lengths.append(due - now)
        assert breaker.allows(due)
        breaker.succeeded(due)
        now = due + 0.5
        breaker.failed(now, 0.0, unavailable=True)
    assert lengths == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.5])
    # Having been well for a while, it starts anew.
    breaker.succeeded(now)
    breaker.failed(now + LONGEST_S + 0.1, 0.0, unavailable=True)
    assert breaker.next_probe_s == pytest.approx(now + LONGEST_S + 0.1 + FIRST_S / 2)


def test_operations_begun_before_do_not_lengthen_the_pause() -> None:
    breaker = sick()
    for _ in range(50):
        breaker.failed(0.01, 0.9)
    assert breaker.next_probe_s == pytest.approx(0.1)
    breaker.succeeded(0.02)
    assert breaker.state is Health.WELL


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 0.3),
        st.sampled_from(["ask", "ask", "failed", "slow", "gone", "succeeded"]),
        st.floats(0, 1, exclude_max=True),
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(EVENTS)
def test_few_tries_get_through_and_it_always_heals(events: list[tuple[float, str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    last_probe_s = None
    for later, event, jitter in events:
        now += later
        before = breaker.state
        if event == "ask":
            allowed = breaker.allows(now)
            if before is Health.WELL:
                assert allowed
            elif allowed:
                assert breaker.state is Health.PROBING
                assert last_probe_s is None or now - last_probe_s >= 0.1
                last_probe_s = now
        elif event == "succeeded":
            breaker.succeeded(now)
            last_probe_s = None
            assert breaker.state is Health.WELL
        elif event == "slow":
            breaker.slow(now, jitter)
        else:
            breaker.failed(now, jitter, unavailable=event == "gone")
            assert event == "failed" or breaker.state is not Health.WELL
        assert (breaker.next_probe_s is None) == (breaker.state is Health.WELL)
        if breaker.next_probe_s is not None:
            # Whatever happened, the next probe is at most the longest pause away.
            assert breaker.next_probe_s <= now + LONGEST_S
    healthy_s = now + LONGEST_S
    assert breaker.allows(healthy_s)
    breaker.succeeded(healthy_s)
    assert breaker.state is Health.WELL


@settings(max_examples=100)
@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=200))
def test_a_dead_tier_sees_at_most_ten_tries_a_second(jitters: list[float]) -> None:
    """Asked every 5 ms by everybody, failing at once each time."""
    breaker, tries, now = sick(), 0, 0.0
    for tick in range(2000):
        now = tick * 0.005
        if breaker.allows(now):
            tries += 1
            breaker.failed(now, jitters[tries % len(jitters)], unavailable=True)
    assert 2 <= tries <= 10


def test_a_breaker_explains_itself() -> None:
    breaker = sick()
    breaker.allows(0.1)
    assert repr(breaker) == "Breaker(probing, 1 failures in a row, opened 1 times, 1 probes)"
