"""Objects that only a lower tier holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.errors import UnavailableError
from headwater.node import objects
from headwater.node.client import ask_operator
from headwater.node.messages import Evict, Find, Remove, encode
from headwater.node.object_format import object_key, object_namespace, slot_bytes, tenant_root
from headwater.store import Outcome, Store
from tests.node.conftest import Rig, eventually
from tests.store.conftest import SLAB_BYTES, value


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    """A node with a disk that takes everything."""
    return NodeConfig(
        socket=f"unix:{tmp_path}/n.sock",
        host_memory=8 << 20,
        slab=SLAB_BYTES,
        prefault=False,
        drain_s=2.0,
        disk=f"{tmp_path}/disk:64MiB?admission=all",
    )


@pytest.fixture
def lower(rig: Rig) -> Rig:
    """The node, once its disk works."""
    eventually(lambda: rig.node.tiering.levels[0].well)
    return rig


def leave_host(rig: Rig, name: str, length: int) -> None:
    """Have an object leave HOST once it is on the disk."""
    size = slot_bytes(length, SLAB_BYTES)
    key = object_key(tenant_root(""), name.encode())
    space = next(it for it, known in enumerate(rig.cache.spaces) if known.namespace == object_namespace("", size))
    eventually(lambda: rig.node.tiering.levels[0].serves(space, 0, key), seen=lambda: rig.node.tiering)
    ask_operator(rig.address, Evict(object_namespace("", size).root(), key, below=False))
    assert not rig.cache.is_ready(space, 0, key)


def test_an_object_on_the_disk_is_found_compared_and_brought_up(lower: Rig, store: Store) -> None:
    data = value("k", 1, 50_000)
    for again in ("get", "get_into", "size", "view", "put"):
        store.put({"k": data})
        leave_host(lower, "k", len(data))
        assert store.exists(["k", "no"]) == [True, False]
        if again == "get":
            assert store.get(["k", "no"]) == [data, None]
        elif again == "get_into":
            room = bytearray(len(data))
            assert store.get_into(["k"], [room])[0].outcome is Outcome.DONE
            assert room == data
        elif again == "size":
            assert store.size(["k"]) == [len(data)]
        elif again == "view":
            with store.view(["k"]) as (seen,):
                assert seen.data == data
        else:
            assert store.put({"k": value("k", 2, 50_000)})[0].outcome is Outcome.EXISTS
            assert store.put({"k": data})[0].outcome is Outcome.DONE
        assert store.get(["k"]) == [data]
    assert store.remove(["k"]) == [True]
    assert store.get(["k"]) == [None]


def test_what_is_removed_is_on_no_tier(lower: Rig, store: Store) -> None:
    data = value("k", 1, 5000)
    store.put({"k": data})
    leave_host(lower, "k", len(data))
    assert store.remove(["k"]) == [True]
    assert (store.exists(["k"]), store.get(["k"])) == ([False], [None])
    assert store.put({"k": value("k", 2, 5000)})[0].outcome is Outcome.DONE
    assert store.get(["k"]) == [value("k", 2, 5000)]


def test_what_is_removed_on_its_way_up_does_not_come_back(lower: Rig, store: Store) -> None:
    data = value("k", 1, 5000)
    connection = store._connected()
    for turn in range(5):
        name = f"k{turn}"
        store.put({name: data})
        leave_host(lower, name, len(data))
        key = object_key(tenant_root(""), name.encode())
        # Two requests of one connection that the loop handles in one turn: the read has begun, and cannot have ended.
        connection._link._socket.sendall(encode(Find(key, True)) + encode(Remove(key)))
        eventually(lambda turn=turn: lower.server.calls.get("Remove") == turn + 1)
        eventually(lambda: lower.node.tiering.is_quiet(lower.clock.now()))
        connection._link.close()
        connection = store._connected()
        assert store.exists([name]) == [False]
        assert store.get([name]) == [None]
        eventually(lambda: not lower.node.objects._leaving)
        assert lower.cache.pool.taken_bytes == 0


def test_objects_of_an_earlier_life_are_found_unless_their_time_is_over(config: NodeConfig) -> None:
    data, large = value("k", 1, 5000), value("l", 1, SLAB_BYTES * 2)
    first = Rig(config)
    with Store(config.socket) as store:
        store.put({"k": data, "large": large})
        store.put({"short": value("s", 1, 5000)}, ttl_s=0.2)
        until_s = time.monotonic() + 0.2
        level = first.node.tiering.levels[0]
        eventually(lambda: not level.queue and not level.writes and level.sums.written_chunks == 6)
    first.close()
    second = Rig(config)
    try:
        eventually(lambda: time.monotonic() > until_s)
        with Store(config.socket) as store:
            assert store.get(["k", "large"]) == [data, large]
            began_s = time.monotonic()
            assert store.get(["short"]) == [None]
            assert time.monotonic() - began_s < 2.0, "it is not brought up again and again"
            assert store.put({"k": b"other"})[0].outcome is Outcome.EXISTS
    finally:
        second.close()


def test_a_batch_larger_than_the_memory_is_read_whole(
    lower: Rig, store: Store, open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    length = SLAB_BYTES - 64
    values = {f"k{number}": value(f"k{number}", 1, length) for number in range(48)}
    names = list(values)
    level = lower.node.tiering.levels[0]
    its = lower.node.objects
    coming = []
    real = its._bring
    monkeypatch.setattr(its, "_bring", lambda *given: (real(*given), coming.append(its._coming_bytes))[0])
    for begin in range(0, 48, 16):
        assert {it.outcome for it in store.put({it: values[it] for it in names[begin : begin + 16]})} == {Outcome.DONE}
        eventually(lambda begin=begin: level.sums.written_chunks == begin + 16)
    assert store.exists(names) == [True] * 48
    assert store.get(names) == list(values.values())
    rooms = [bytearray(length) for _ in names]
    assert {it.outcome for it in store.get_into(names, rooms)} == {Outcome.DONE}
    assert rooms == list(values.values())
    assert store.size(names) == [length] * 48
    assert 0 < max(coming) <= objects.COMING_SHARE * lower.cache.pool.capacity_bytes
    eventually(lambda: its._coming_bytes == 0)
    hasty = open_store(call_s=0.2)
    with pytest.raises(UnavailableError, match="not brought up in time"), hasty.view(names):
        pass
    assert not any(it.owner.startswith("store-") for it in list(lower.cache.tickets.values())), "leases are left"


def test_a_large_object_with_a_part_below_is_there_and_is_pinned_once_it_is_whole(lower: Rig, store: Store) -> None:
    data = value("k", 1, 3 * SLAB_BYTES)
    store.put({"k": data})
    level = lower.node.tiering.levels[0]
    eventually(lambda: level.sums.written_chunks == 5)
    part = lower.node.objects._held[0, object_key(tenant_root(""), b"k")].parts[1]
    ask_operator(lower.address, Evict(object_namespace("", SLAB_BYTES).root(), part, below=False))
    assert store.exists(["k"]) == [True]
    assert store.pin(["k"]) == [False]
    assert store.get(["k"]) == [data]
    assert store.pin(["k"]) == [True]


def test_what_does_not_come_up_in_time_is_an_error_and_no_miss(
    lower: Rig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = value("k", 1, 50_000)
    store.put({"k": data})
    store.put({"here": b"1"})
    leave_host(lower, "k", len(data))
    monkeypatch.setattr(lower.node.objects, "_bring", lambda *_: True)
    with Store(lower.address, call_s=0.05) as hasty:
        for call in (hasty.get, hasty.size):
            with pytest.raises(UnavailableError, match=r"keys\[1\]: it was not brought up in time"):
                call(["here", "k"])
        results = hasty.get_into(["here", "k"], [bytearray(1), bytearray(len(data))])
        assert [it.outcome for it in results] == [Outcome.DONE, Outcome.ERROR]
        (result,) = hasty.put({"k": data})
        assert (result.outcome, result.reason) == (Outcome.ERROR, "it was not brought up in time")
    monkeypatch.undo()
    assert store.get(["k"]) == [data]


def test_a_node_that_leases_nothing_says_so(lower: Rig, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    data = value("k", 1, 50_000)
    store.put({"k": data})
    leave_host(lower, "k", len(data))
    room = bytearray(len(data))
    monkeypatch.setattr(lower.node.objects, "_is_draining", lambda: True)
    began_s = time.monotonic()
    (result,) = store.get_into(["k"], [room])
    assert (result.outcome, result.reason) == (Outcome.ERROR, "the node is being stopped")
    with pytest.raises(UnavailableError, match="being stopped"), store.view(["k"]):
        pass
    assert time.monotonic() - began_s < 2.0, "there is nothing to be waited for"
    assert store.exists(["k", "no"]) == [True, False]
    monkeypatch.undo()
    monkeypatch.setattr(objects, "TICKETS_MAX", 0)
    with Store(lower.address, call_s=0.05) as hasty:
        (result,) = hasty.get_into(["k"], [room])
        assert (result.outcome, result.reason[:14]) == (Outcome.ERROR, "the node has a")
    monkeypatch.undo()
    assert store.get(["k"]) == [data]
