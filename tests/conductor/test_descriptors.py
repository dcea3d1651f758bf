"""How a worker's limits fit into its file descriptors."""

from __future__ import annotations

import pytest

from headwater.conductor.descriptors import SPARE, fitting
from headwater.errors import ResourceError
from headwater.fleetfile.model import Limits


def test_enough_of_them_change_nothing() -> None:
    limits = Limits(connections=800, requests=100)
    assert fitting(limits, 900 + 100 + SPARE) is limits


def test_too_few_of_them_make_room_for_refusals_and_for_instances(caplog: pytest.LogCaptureFixture) -> None:
    limits = fitting(Limits(), 1024)
    assert limits.connections == limits.requests == 451
    assert limits.connections * 9 // 8 + limits.requests + SPARE <= 1024
    assert "ulimit -n" in caplog.text
    assert fitting(Limits(connections=10_000, requests=5), 1024).requests == 5


def test_next_to_none_are_an_error() -> None:
    with pytest.raises(ResourceError, match="ulimit"):
        fitting(Limits(), SPARE + 10)
