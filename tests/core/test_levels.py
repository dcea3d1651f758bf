"""What a level knows, wants and lets wait."""

from __future__ import annotations

import pytest

from headwater.core import levels as module
from headwater.core.cache import Cache
from headwater.core.eviction import LRU
from headwater.core.levels import Admission, Level
from headwater.core.pool import Pool
from headwater.types import PAGE_BYTES, Tier, Usage
from tests.core.examples import chain, dense, namespace, reserve


def remote(admission: Admission = Admission.AUTO) -> Level:
    return Level("remote", Tier.REMOTE, admission)


def disk(slots: int = 4) -> Level:
    cache = Cache(Pool([slots * PAGE_BYTES], PAGE_BYTES), LRU, 60.0, 60.0, 0, Tier.DISK)
    cache.add_space(namespace(dense()), dense())
    level = Level("disk", Tier.DISK, Admission.AUTO, cache)
    level.spaces[7] = 0
    return level


@pytest.mark.parametrize(
    ("admission", "used_bytes", "used", "wanted"),
    [
        (Admission.ALL, 100, False, True),
        (Admission.REUSED, 0, False, False),
        (Admission.REUSED, 0, True, True),
        (Admission.AUTO, 89, False, True),
        (Admission.AUTO, 90, False, False),
        (Admission.AUTO, 100, True, True),
        (Admission.AUTO, None, False, True),
    ],
)
def test_admission(admission: Admission, used_bytes: int | None, used: bool, wanted: bool) -> None:
    level = remote(admission)
    level.usage = Usage(100, used_bytes)
    (key,) = chain(1)
    assert level.wants(0, 0, key, used=used) == wanted
    level.know(0, 0, key)
    assert not level.wants(0, 0, key, used=used)
    level.unknow(0, 0, key)
    assert level.wants(0, 0, key, used=used) == wanted


def test_disk_says_what_it_has_and_what_can_be_read() -> None:
    level, keys = disk(), chain(2)
    assert level.disk is not None
    granted = reserve(level.disk, 0, keys[:1])
    assert (level.has(7, 0, keys[0]), level.serves(7, 0, keys[0])) == (True, False)
    assert level.fill == 0.25
    level.disk.done("a", granted.ticket, 0, (), 0.0)
    assert level.serves(7, 0, keys[0])
    assert level.serves_which(7, 0, keys) == [True, False]
    # Of another namespace it knows nothing, and wants nothing.
    assert not level.has(8, 0, keys[0])
    assert not level.serves(8, 0, keys[0])
    assert level.serves_which(8, 0, keys) is None
    assert not level.wants(8, 0, keys[0], used=True)
    assert remote().serves_which(7, 0, keys) is None


def test_the_queue_and_what_is_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_KEYS_MAX", 3)
    monkeypatch.setattr(module, "KNOWN_KEYS_MAX", 3)
    level, keys = remote(), chain(5)
    for key in [*keys, keys[2]]:
        level.enqueue(0, key)
        level.know(0, 0, key)
    assert list(level.queue) == [(0, key) for key in keys[2:]]
    assert level.sums.dropped_chunks == 2
    assert [level.has(0, 0, key) for key in keys] == [False, False, True, True, True]
    level.put_first(0, keys[4], again=True)
    assert next(iter(level.queue.items())) == ((0, keys[4]), True)
    level.forget_all()
    assert not level.has(0, 0, keys[4])


def test_a_level_explains_itself() -> None:
    level = remote()
    level.enqueue(0, chain(1)[0])
    assert repr(level) == "Level(remote, well, 1 chunks queued, 0 reads and 0 writes under way)"
    with pytest.raises(AssertionError):
        Level("disk", Tier.DISK)
