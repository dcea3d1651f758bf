"""Quotas over the cluster: the lines of all nodes add up, what is held converges, and nobody is starved."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.quotas import SHIFT, Quotas, line_bytes

QUOTA = 1_000_000
HELD = st.lists(st.integers(0, 3 * QUOTA), min_size=1, max_size=20)


def lines(held: list[int], quota: int = QUOTA) -> list[int]:
    """Every node's line, all with the same reports."""
    return [line_bytes(quota, own, held[:at] + held[at + 1 :]) for at, own in enumerate(held)]


@given(HELD, st.integers(0, QUOTA))
@settings(max_examples=50, deadline=None)
def test_with_equal_reports_the_lines_add_up_to_the_quota(held: list[int], quota: int) -> None:
    found = lines(held, quota)
    assert quota - len(held) <= sum(found) <= quota
    assert min(found) >= int(SHIFT * quota / len(held))


@given(HELD)
@settings(max_examples=30, deadline=None)
def test_where_all_want_more_the_sum_is_the_quota_after_one_round(held: list[int]) -> None:
    assert sum(lines(held)) == pytest.approx(QUOTA, abs=len(held))


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_converges_whoever_wants_how_much(delay: int, seed: int) -> None:
    """Reports are up to so many rounds old, each by another node's own account."""
    draw = random.Random(seed)
    wants = [draw.choice((0, QUOTA // 20, QUOTA, QUOTA)) for _ in range(7)] + [QUOTA]
    held = [draw.randrange(2 * QUOTA) for _ in wants]
    past = [held]
    for _ in range(120):
        new = []
        for at, own in enumerate(held):
            seen = [past[-1 - min(draw.randrange(delay + 1), len(past) - 1)] for _ in held]
            others = [seen[it][it] for it in range(len(held)) if it != at]
            new.append(min(wants[at], line_bytes(QUOTA, own, others)))
        held = new
        past.append(held)
    assert 0.85 * QUOTA <= sum(held) <= 1.05 * QUOTA, f"seed {seed}"


def test_room_moves_to_where_it_is_asked_for() -> None:
    """One node holds all of it; another wants some as well."""
    held = [QUOTA, 0]
    for _ in range(60):
        held = lines(held)
    assert held[1] == pytest.approx(QUOTA / 2, rel=0.05)


def test_a_tenant_that_is_asked_for_on_one_node_only_has_nearly_all_of_it_there() -> None:
    held = [0] * 10
    for _ in range(60):
        held[0] = lines(held)[0]
    assert held[0] >= (1 - SHIFT) * QUOTA


def test_stale_or_lying_reports_starve_nobody() -> None:
    assert line_bytes(QUOTA, 0, [10**15, QUOTA]) >= SHIFT * QUOTA / 3 - 1
    assert line_bytes(QUOTA, QUOTA, []) == pytest.approx(QUOTA, abs=1)


def test_lines_follow_reports_and_members() -> None:
    quotas = Quotas({"a": QUOTA, "b": 10})
    assert quotas.lines({"a": 5}) == {"a": QUOTA, "b": pytest.approx(10, abs=1)}
    quotas.listed([1, 2])
    quotas.reported(1, {"a": QUOTA, "foreign": 7})
    quotas.reported(2, {"a": -QUOTA})
    quotas.reported(3, {"a": QUOTA})
    alone = line_bytes(QUOTA, 0, [QUOTA, 0])
    assert quotas.lines({})["a"] == alone
    quotas.listed([2])
    assert quotas.lines({})["a"] == line_bytes(QUOTA, 0, [0])
    assert "1 other" in repr(quotas)
