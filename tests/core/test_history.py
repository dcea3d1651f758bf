"""The last word about chunks that are gone."""

from __future__ import annotations

import pytest

from headwater.core import history as module
from headwater.core.history import Event, History
from headwater.types import Removed, Tier
from tests.core.examples import chain


def test_the_last_event_counts_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENTS_MAX", 3)
    history, keys = History(), chain(5)
    history.removed(Removed(0, 0, tuple(keys[:3]), Tier.HOST, 3 * 4096, "evicted", cause=4), 1.0)
    history.note(keys[0], "disk", "corrupt", 2.0)
    assert history.last(keys[0]) == Event("disk", "corrupt", 2.0)
    assert history.last(keys[1]) == Event("host", "evicted", 1.0, 4)
    history.note(keys[3], "disk", "missing", 3.0)
    assert history.last(keys[1]) is None
    assert [history.last(key) is not None for key in keys] == [True, False, True, True, False]
    assert repr(history) == "History(3 chunks)"
