"""Objects of several parts: what is done to one is done to all of it, and one that has lost a part is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from headwater.config import NodeConfig
from headwater.node.client import ask_operator
from headwater.node.messages import Evict
from headwater.node.object_format import object_key, object_namespace, tenant_root
from headwater.store import Outcome, Store, writing
from headwater.types import ChunkKey, TicketKind
from tests.node.conftest import Rig
from tests.store.conftest import SLAB_BYTES, value

LARGE = SLAB_BYTES * 4


def parts_of(rig: Rig, name: str) -> list[ChunkKey]:
    return list(rig.node.objects._held[0, object_key(tenant_root(""), name.encode())].parts)


def pins(rig: Rig) -> int:
    return sum(it.kind is TicketKind.PIN for it in rig.cache.tickets.values())


def lose(rig: Rig, part: ChunkKey) -> None:
    """Have a part leave HOST."""
    ask_operator(rig.address, Evict(object_namespace("", SLAB_BYTES).root(), part, below=False))
    assert (0, part) not in rig.node.objects._held


def test_a_large_object_is_pinned_whole_or_not_at_all(rig: Rig, open_store: Callable[..., Store]) -> None:
    one, other = open_store(), open_store()
    beyond = SLAB_BYTES * 20  # more than half of the memory
    (result,) = one.put({"beyond": bytes(beyond)}, pin=True)
    assert (result.outcome, result.pinned) == (Outcome.DONE, False)
    assert one.pin(["beyond"]) == [False]
    assert (pins(rig), rig.node.objects._pinned_bytes) == (0, 0)
    one.remove(["beyond"])
    data = value("k", 1, LARGE)
    assert one.put({"k": data}, pin=True)[0].pinned
    parts = parts_of(rig, "k")
    assert pins(rig) == len(parts) + 1
    assert other.pin(["k"]) == [True]
    assert pins(rig) == 2 * (len(parts) + 1)
    for turn in range(80):
        one.put({f"flood{turn}": bytes(SLAB_BYTES - 64)})
    assert one.get(["k"]) == [data]
    assert one.unpin(["k"]) == [True]
    assert one.unpin(["k"]) == [False]
    assert pins(rig) == len(parts) + 1
    assert other.unpin(["k"]) == [True]
    lose(rig, parts[1])
    assert one.pin(["k"]) == [False]
    assert (pins(rig), rig.node.objects._pinned_bytes) == (0, 0)


def test_a_large_object_that_is_read_stays_whole(config: NodeConfig) -> None:
    rig = Rig(replace(config, eviction="lru"))
    data = value("k", 1, LARGE)
    try:
        with Store(rig.address) as store:
            store.put({"k": data})
            for turn in range(60):
                store._tell_at_s = 0.0
                assert store.get(["k"]) == [data]
                store.put({f"flood{turn}": bytes(SLAB_BYTES - 64)})
    finally:
        rig.close()


def test_a_large_object_that_has_lost_a_part_is_gone_and_can_be_put_again(rig: Rig, store: Store) -> None:
    for turn, data in enumerate(value("k", it, LARGE) for it in range(4)):
        assert [it.outcome for it in store.put({"k": data})] == [Outcome.DONE]
        assert (store.exists(["k"]), store.size(["k"]), store.get(["k"])) == ([True], [LARGE], [data])
        lose(rig, parts_of(rig, "k")[turn])
        if turn == 1:
            assert store.get(["k"]) == [None]
        elif turn == 2:
            assert store.size(["k"]) == [None]
        elif turn == 3:
            assert store.remove(["k"]) == [True]
            assert rig.cache.pool.taken_bytes == 0
        assert store.exists(["k"]) == [False]
        assert store.exists(["k"] * 20) == [False] * 20


@pytest.mark.parametrize(("round_bytes", "outcome"), [(1 << 30, Outcome.FULL), (4 * SLAB_BYTES, Outcome.ERROR)])
def test_a_large_object_without_room_for_all_its_parts_is_not_there(
    rig: Rig, store: Store, monkeypatch: pytest.MonkeyPatch, round_bytes: int, outcome: Outcome
) -> None:
    monkeypatch.setattr(
        writing, "ROUND_BYTES", round_bytes
    )  # with many rounds, the last parts take the first ones' room
    (result,) = store.put({"k": bytes(rig.cache.pool.capacity_bytes + SLAB_BYTES)})
    assert result.outcome is outcome
    assert (store.exists(["k"]), store.get(["k"])) == ([False], [None])
    assert rig.cache.pool.taken_bytes == 0


@pytest.mark.parametrize("names", [["k"], ["k", "large"]])
def test_what_is_removed_or_over_is_pinned_for_nobody(
    rig: Rig, open_store: Callable[..., Store], names: list[str]
) -> None:
    one, other, third = open_store(), open_store(), open_store()
    values = {name: value(name, 1, LARGE if name == "large" else 5000) for name in names}
    assert all(it.pinned for it in one.put(values, pin=True))
    assert all(other.pin(names))
    assert third.remove(names) == [True] * len(names)
    assert (pins(rig), rig.node.objects._pinned_bytes, rig.cache.pool.taken_bytes) == (0, 0, 0)
    assert one.unpin(names) == [False] * len(names)
