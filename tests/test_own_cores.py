"""How those share the machine that run real engines side by side."""

from __future__ import annotations

import pytest

from tests.conftest import own_cores


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1], 1, [[0, 1]]),
        ([2, 3, 5, 7, 8], 2, [[2, 3], [5, 7, 8]]),
        ([4], 2, [[4], [4]]),
        ([0, 1], 3, [[0], [0], [1]]),
    ],
)
def test_each_gets_a_share_of_the_cores(cores: list[int], count: int, shares: list[list[int]]) -> None:
    assert [own_cores(cores, number, count) for number in range(count)] == shares
