"""The verbs of the Store against a real node."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headwater.config import NodeConfig
from headwater.errors import RefusedError, UnavailableError
from headwater.node import object_table, objects
from headwater.node.client import ask_operator
from headwater.node.messages import Evict, Verdict
from headwater.node.object_format import Kind, object_key, object_namespace, slot_bytes, tenant_root
from headwater.store import GetResult, Outcome, Store, reading
from headwater.types import PAGE_BYTES
from tests.node.conftest import Rig, eventually
from tests.store.conftest import SLAB_BYTES, value

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [0, 1, 63, 64, 4031, 4032, 4033, 4096, 40_000, SLAB_BYTES - 65, SLAB_BYTES - 64]
BEYOND = [SLAB_BYTES - 63, SLAB_BYTES, 2 * (SLAB_BYTES - 64), 2 * (SLAB_BYTES - 64) + 1, 1 << 20]


def outcomes(results: list) -> list[Outcome]:
    return [it.outcome for it in results]


@pytest.mark.parametrize("length", LENGTHS + BEYOND)
def test_what_is_put_is_read_by_another_client_in_every_way(open_store: Callable[..., Store], length: int) -> None:
    one, other = open_store(), open_store()
    data = value("k", 1, length)
    assert outcomes(one.put({"k": data})) == [Outcome.DONE]
    assert other.get(["k"]) == [data]
    assert other.size(["k"]) == [length]
    assert other.exists(["k"]) == [True]
    room = np.zeros(length + 3, np.uint8)
    assert other.get_into(["k"], [room]) == [GetResult(Outcome.DONE, length)]
    assert room.tobytes() == data + bytes(3)
    with other.view(["k", "none"]) as (seen, missing):
        assert missing is None
        assert b"".join(seen.pieces) == data
        assert (len(seen.pieces) > 1) == (length in BEYOND)
        with pytest.raises(TypeError, match=r"read-only|cannot modify"):
            seen.pieces[0][:0] = b""
    assert one.remove(["k"]) == [True]
    assert other.get(["k"]) == [None]
    assert other.exists(["k"]) == [False]


def test_nothing_of_a_large_object_stays_when_it_is_removed(rig: Rig, store: Store) -> None:
    store.put({"k": value("k", 1, 1 << 20)})
    assert rig.cache.pool.taken_bytes > 1 << 20
    assert store.remove(["k", "k"]) == [True, False]
    assert (rig.cache.pool.taken_bytes, len(rig.node.objects)) == (0, 0)


def test_a_batch_has_results_in_its_order_and_misses_are_no_errors(store: Store) -> None:
    names = [f"k{index}" for index in range(300)]
    assert set(outcomes(store.put([(name, value(name, 1, 100)) for name in names[::2]]))) == {Outcome.DONE}
    expected = [value(name, 1, 100) if index % 2 == 0 else None for index, name in enumerate(names)]
    assert store.get(names) == expected
    assert store.exists(names) == [it is not None for it in expected]
    assert store.exists(names[:3]) == [True, False, True]
    assert store.size(names[:2]) == [100, None]
    room = [bytearray(100) for _ in names]
    found = store.get_into(names, room)
    assert [it.outcome is Outcome.DONE for it in found] == [it is not None for it in expected]
    assert {it.outcome for it in found[1::2]} == {Outcome.MISS}
    assert store.remove(names) == [it is not None for it in expected]
    assert not any(store.exists(names))


def test_objects_do_not_change(store: Store) -> None:
    first = value("k", 1, 5000)
    assert outcomes(store.put({"k": first})) == [Outcome.DONE]
    assert outcomes(store.put({"k": first})) == [Outcome.DONE]
    for other in (value("k", 2, 5000), first[:-1], first + b"\0", b"", value("k", 2, SLAB_BYTES * 2)):
        assert outcomes(store.put({"k": other})) == [Outcome.EXISTS]
    assert store.get(["k"]) == [first]
    large = value("large", 1, 3 * SLAB_BYTES)
    assert outcomes(store.put({"large": large})) == [Outcome.DONE]
    assert outcomes(store.put({"large": large})) == [Outcome.DONE]
    assert outcomes(store.put({"large": large[:-1] + b"\0"})) == [Outcome.EXISTS]
    assert outcomes(store.put({"large": b"small"})) == [Outcome.EXISTS]
    assert store.get(["large"]) == [large]


def test_a_key_twice_in_a_batch_is_two_puts_one_after_the_other(store: Store) -> None:
    assert outcomes(store.put([("k", b"1"), ("k", b"2"), ("k", b"1")])) == [Outcome.DONE, Outcome.EXISTS, Outcome.DONE]
    assert store.get(["k"]) == [b"1"]


def test_text_is_its_utf8_and_tenants_do_not_see_each_other(open_store: Callable[..., Store]) -> None:
    one, other = open_store(tenant="one"), open_store(tenant="other")
    one.put({"schlüssel\0\n": b"1", b"": b"2"})
    assert one.get(["schlüssel\0\n".encode(), ""]) == [b"1", b"2"]
    assert other.get(["schlüssel\0\n", ""]) == [None, None]
    assert other.exists(["schlüssel\0\n"] * 20) == [False] * 20
    other.put({"": b"3"})
    assert (one.get([""]), other.get([""])) == ([b"2"], [b"3"])
    assert other.remove(["schlüssel\0\n", ""]) == [False, True]
    assert one.get(["schlüssel\0\n", ""]) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda it: it.put({1: b""}), "key"),
        (lambda it: it.put([(bytearray(b"k"), b"")]), "key"),
        (lambda it: it.get("k"), "keys"),
        (lambda it: it.get([None]), "key"),
        (lambda it: it.exists([b"x" * 4097]), "key"),
        (lambda it: it.exists(["k"] * 70_000), "keys"),
        (lambda it: it.put({"k": 5}), r"items\[0\]"),
        (lambda it: it.put([("k", b""), ("l", np.zeros((4, 4))[:, 1])]), r"items\[1\]"),
        (lambda it: it.put({"k": b""}, ttl_s=0.0), "ttl_s"),
        (lambda it: it.put({"k": b""}, ttl_s=float("nan")), "ttl_s"),
        (lambda it: it.put({"k": b""}, replicas=0), "replicas"),
        (lambda it: it.get_into(["k"], []), "buffers"),
        (lambda it: it.get_into(["k"], [b"1"]), r"buffers\[0\]"),
        (lambda it: it.pin(["k"], -1.0), "pin"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_done(store: Store, call: Callable, field: str) -> None:
    with pytest.raises(RefusedError, match=f"^{field}: expected .*, given .*; "):
        call(store)
    assert store.get(["k", b"x" * 4096]) == [None, None]


def test_a_buffer_that_is_too_short_is_told_the_length(store: Store) -> None:
    for length in (100, 100_000, SLAB_BYTES * 2):
        store.put({f"{length}": bytes(length)})
        (found,) = store.get_into([f"{length}"], [bytearray(b"x" * 99)])
        assert (found.outcome, found.length_bytes) == (Outcome.REFUSED, length)
        assert "given 99" in found.reason


def test_the_queue_of_those_that_end_does_not_outgrow_them(
    rig: Rig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "OVER_SPARE", 10)
    store.put({"stays": b"1"}, ttl_s=60.0)
    for turn in range(40):
        store.put({f"{turn}": b"1"}, ttl_s=60.0)
        store.remove([f"{turn}"])
    assert len(rig.node.objects._over) <= 14
    assert any(it.key == object_key(tenant_root(""), b"stays") for _, _, it in rig.node.objects._over)


def test_several_threads_use_one_store(store: Store) -> None:
    def work(thread: int) -> None:
        for turn in range(40):
            name = f"{thread}/{turn}"
            data = value(name, 1, 700 * turn)
            assert outcomes(store.put({name: data})) == [Outcome.DONE]
            assert store.exists([name, f"{thread}/no"]) == [True, False]
            assert store.get([name]) == [data]
            with store.view([name]) as (seen,):
                assert seen.data == data
            assert store.remove([name]) == [True]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_an_object_is_gone_when_its_time_is_over(rig: Rig, store: Store) -> None:
    store.put({"short": b"1", "large": bytes(SLAB_BYTES * 2)}, ttl_s=0.5)
    store.put({"long": b"2"}, ttl_s=60.0)
    assert store.exists(["short", "large", "long"]) == [True, True, True]
    eventually(lambda: store.exists(["short", "large"]) == [False, False])
    assert store.exists(["short", *["long"] * 20]) == [False] + [True] * 20
    assert store.get(["short", "large", "long"]) == [None, None, b"2"]
    assert outcomes(store.put({"short": b"3"})) == [Outcome.DONE]
    assert store.get(["short"]) == [b"3"]
    eventually(lambda: len(rig.node.objects) == 2, seen=lambda: rig.node.objects)


def test_readers_do_not_find_what_is_over_and_not_yet_removed(
    rig: Rig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.node.objects, "sweep", lambda now: None)
    store.put({"k": b"1"}, ttl_s=0.3)
    store.put({"stays": b"2"})
    names = ["k"] * 20 + ["stays"]
    assert store.exists(names) == [True] * 21
    reader = store._connected().table
    eventually(lambda: reader.find(object_key(tenant_root(""), b"k")) is None)
    assert store.exists(names) == [False] * 20 + [True]
    assert store.get(["k"]) == [None]
    assert len(rig.node.objects) == 2
    assert outcomes(store.put({"k": b"3"})) == [Outcome.DONE]
    assert store.get(["k"]) == [b"3"]


def test_what_is_pinned_stays_and_the_rest_gives_way(rig: Rig, store: Store) -> None:
    size = SLAB_BYTES - 64
    assert store.put({"p": bytes(size)}, pin=True)[0].pinned
    assert store.put({"large": bytes(size * 2)}, pin=True)[0].pinned
    assert store.put({"q": bytes(size)})[0].pinned is False
    assert store.pin(["q", "none"]) == [True, False]
    for turn in range(80):
        assert outcomes(store.put({f"flood{turn}": bytes(size)})) == [Outcome.DONE]
    assert store.exists(["p", "large", "q", "flood0", "flood79"]) == [True, True, True, False, True]
    assert store.unpin(["p", "q", "none"]) == [True, True, False]
    for turn in range(80):
        store.put({f"more{turn}": bytes(size)})
    assert store.exists(["p", "q"]) == [False, False]
    assert store.get(["large"]) == [bytes(size * 2)]


def test_no_more_than_half_of_the_memory_is_pinned_and_pins_end_with_their_client(
    rig: Rig, open_store: Callable[..., Store]
) -> None:
    one, other = open_store(), open_store()
    slots = rig.cache.pool.capacity_bytes // SLAB_BYTES
    results = one.put([(f"{turn}", bytes(SLAB_BYTES - 64)) for turn in range(slots)], pin=True)
    assert sum(it.pinned for it in results) == slots // 2
    assert set(outcomes(results)) == {Outcome.DONE}
    one.close()
    rig.quiet()
    assert other.pin([f"{turn}" for turn in range(slots)]) == [True] * (slots // 2) + [False] * (slots - slots // 2)


def test_a_full_node_says_so(open_store: Callable[..., Store]) -> None:
    one, other = open_store(), open_store(call_s=1.0)
    size = SLAB_BYTES - 64
    names = [f"{turn}" for turn in range(32)]
    one.put([(name, bytes(size)) for name in names])
    with one.view(names) as views:
        assert None not in views
        assert outcomes(other.put({"k": bytes(size)})) == [Outcome.FULL]
        assert outcomes(other.put({"k": bytes(size * 2)})) == [Outcome.FULL]
    assert outcomes(other.put({"k": bytes(size * 2)})) == [Outcome.DONE]


def test_a_view_keeps_its_bytes_whatever_becomes_of_the_object(rig: Rig, open_store: Callable[..., Store]) -> None:
    one, other = open_store(), open_store()
    one.put({"k": value("k", 1, 100_000)})
    with other.view(["k"]) as (seen,):
        assert one.remove(["k"]) == [True]
        assert other.get(["k"]) == [None]
        assert outcomes(one.put({"k": value("k", 2, 100_000)})) == [Outcome.DONE]
        for turn in range(100):
            one.put({f"flood{turn}": value("flood", turn, 100_000)})
        assert seen.data == value("k", 1, 100_000)
    rig.quiet()


def test_a_view_that_outlives_its_lease_says_so(rig: Rig, store: Store) -> None:
    store.put({"k": b"1"})

    rig.clock.moved_s -= 1000.0  # a node whose leases are over before they have begun
    with pytest.raises(UnavailableError, match="discard"), store.view(["k"]) as (seen,):
        assert seen is not None
    rig.clock.moved_s = 0.0


def test_a_copy_that_was_overtaken_is_not_taken_for_the_object(
    rig: Rig, open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_store(), open_store()
    length = 100_000
    for turn, (again, expected) in enumerate([(True, Outcome.DONE), (False, Outcome.MISS)]):
        name = f"k{turn}"
        one.put({name: value(name, 1, length)})
        overtaken = []
        real = reading.copy

        def overtake(connection, copies, again=again, name=name, overtaken=overtaken, real=real):
            real(connection, copies)
            if not overtaken:
                overtaken.append(True)
                one.remove([name])
                if again:  # in the very same slot
                    one.put({name: value(name, 2, length)})

        monkeypatch.setattr("headwater.store.client.copy", overtake)
        room = bytearray(length)
        assert outcomes(other.get_into([name], [room])) == [expected]
        assert overtaken
        if again:
            assert room == value(name, 2, length)
        monkeypatch.undo()


@pytest.mark.parametrize("slabs", [2, 6])
def test_what_took_the_place_of_an_object_is_read_in_its_own_length(
    open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, slabs: int
) -> None:
    one, other = open_store(), open_store()
    one.put({"k": value("k", 1, 4 * SLAB_BYTES)})
    overtaken = []
    real = reading.copy

    def overtake(connection, copies):
        real(connection, copies)
        if not overtaken:
            overtaken.append(True)
            one.remove(["k"])
            one.put({"k": value("k", 2, slabs * SLAB_BYTES)})

    monkeypatch.setattr("headwater.store.client.copy", overtake)
    assert other.get(["k"]) == [value("k", 2, slabs * SLAB_BYTES)]
    assert overtaken


def test_small_objects_are_looked_at_again_as_well(
    open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_store(), open_store()
    one.put({"k": value("k", 1, 1000)})
    real = reading.listed
    overtaken = []

    def overtake(connection, root, key):
        plan = real(connection, root, key)
        if not overtaken:
            overtaken.append(True)
            one.remove(["k"])
            one.put({"other": value("other", 1, 1000)})
        return plan

    monkeypatch.setattr("headwater.store.client.listed", overtake)
    assert other.get(["k"]) == [None]
    overtaken.clear()
    one.put({"k": value("k", 2, 1000)})
    assert outcomes(other.get_into(["k"], [bytearray(1000)])) == [Outcome.MISS]


def test_bytes_that_are_not_what_was_put_are_not_handed_out(rig: Rig, store: Store) -> None:
    store.put({"k": value("k", 1, 1000)})
    (row,) = (row for index in (rig.cache.spaces[0].index[0],) for row in index.values())
    rig.node.memory.view(rig.cache.entries.address[row] + 64 + 500, 1)[0] ^= 1
    with pytest.raises(UnavailableError, match="not what was stored"):
        store.get(["k"])
    assert store.get(["k"]) == [None], "the node has looked at it, and dropped it"
    assert outcomes(store.put({"k": value("k", 1, 1000)})) == [Outcome.DONE]


def test_one_object_with_wrong_bytes_does_not_cost_the_others(rig: Rig, store: Store) -> None:
    values = {name: value(name, 1, 1000) for name in ("a", "b", "c")}
    for again in ("get", "get_into"):
        store.put(values, pin=True)
        held = rig.node.objects._held[0, object_key(tenant_root(""), b"b")]
        rig.node.memory.view(held.address + 64 + 500, 1)[0] ^= 1
        if again == "get":
            assert store.get(["a", "b", "c"]) == [values["a"], None, values["c"]]
        else:
            results = store.get_into(["a", "b", "c"], [bytearray(1000) for _ in range(3)])
            assert outcomes(results) == [Outcome.DONE, Outcome.ERROR, Outcome.DONE]
        assert store.exists(["a", "b", "c"]) == [True, False, True]
    store._suspect[object_key(tenant_root(""), b"a")] = None
    assert store.get(["a"]) == [values["a"]]
    assert store.exists(["a"]) == [True], "what is suspected and good stays"


def test_a_torn_entry_is_not_taken_for_one(rig: Rig, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put({"small": bytes(100), "big": bytes(200_000)})
    reader = store._connected().table
    small, big = (object_key(tenant_root(""), name) for name in (b"small", b"big"))
    (place, entry), (_, other) = reader.find(small), reader.find(big)
    real = object_table._entry
    seen = []

    class Overtaken:
        """Loads that get the first words of one object, and the rest of the next."""

        size = real.size

        def unpack_from(self, memory: memoryview, at: int) -> tuple[int, ...]:
            seen.append(at)
            words = real.unpack_from(memory, at)
            return words if len(seen) > 1 else (*words[:4], *other[4:])

    monkeypatch.setattr(object_table, "_entry", Overtaken())
    assert reader.find(small) == (place, entry)
    assert len(seen) > 1


def test_entries_that_point_outside_of_the_memory_are_not_followed(rig: Rig, store: Store) -> None:
    store.put({"k": value("k", 1, 100)})
    key = object_key(tenant_root(""), b"k")
    table = rig.node.objects._table
    place, entry = store._connected().table.find(key)
    at = table._entries + place * 64
    for address, length in ((entry[3], 1 << 40), (entry[3] + (8 << 20) - 4096, 8192), (entry[3] | 99 << 40, 100)):
        table._memory[at + 24 : at + 40] = address.to_bytes(8, "little") + length.to_bytes(8, "little")
        assert store.size(["k"]) == [100]
        (found,) = store.get_into(["k"], [bytearray(10)])
        assert (found.outcome, found.length_bytes) == (Outcome.REFUSED, 100)
        assert store.get(["k"]) == [value("k", 1, 100)]
    table._memory[at + 24 : at + 40] = entry[3].to_bytes(8, "little") + entry[4].to_bytes(8, "little")
    table._memory[at + 8] ^= 1
    assert store._connected().table.find(key) is None, "the tag is half of another key"
    assert store.exists(["k"] * 20) == [False] * 20


def test_lengths_that_are_told_are_looked_at_again(
    open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_store(), open_store()
    real = reading.listed
    overtaken = []

    def overtake(connection, root, key):
        plan = real(connection, root, key)
        if not overtaken:
            overtaken.append(True)
            one.remove(["k"])
            one.put({"k": bytes(700)})
        return plan

    for call, expected in (
        (lambda: other.size(["k"]), [700]),
        (lambda: [it.length_bytes for it in other.get_into(["k"], [bytearray(5)])], [700]),
    ):
        one.remove(["k"])
        one.put({"k": bytes(900)})
        overtaken.clear()
        with monkeypatch.context() as patch:
            patch.setattr("headwater.store.client.listed", overtake)
            assert call() == expected
        assert overtaken


def test_what_was_there_already_is_pinned_and_has_replicas_as_if_it_were_new(
    rig: Rig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = []
    monkeypatch.setattr(rig.node.objects, "wish", lambda space, keys, copies, now: wishes.append((keys, copies)))
    values = {"k": b"1", "large": value("l", 1, SLAB_BYTES * 2)}
    assert [it.pinned for it in store.put(values)] == [False, False]
    assert [it.pinned for it in store.put(values, replicas=3)] == [False, False]
    assert [it[1] for it in wishes] == [3, 3]
    assert [it.pinned for it in store.put(values, pin=True)] == [True, True]
    assert [it.pinned for it in store.put({"k": b"2"}, pin=True)] == [False]
    assert store.unpin(["k", "large"]) == [True, True]


def test_a_clock_that_is_set_back_does_not_make_objects_stay(
    rig: Rig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put({"k": b"1", "kept": b"2"}, ttl_s=0.3, pin=True)
    past = SimpleNamespace(time_ns=lambda: time.time_ns() - 3600 * 10**9, monotonic=time.monotonic)
    monkeypatch.setattr(objects, "time", past)
    eventually(lambda: len(rig.node.objects) == 0, seen=lambda: rig.node.objects)
    assert (len(rig.cache.tickets), rig.cache.pool.taken_bytes) == (0, 0), "nobody keeps what is over"


FORKS = """
import os, sys
from headwater.store import Store
store = Store(sys.argv[1])
store.put({"k": b"1"})
store.put({"pinned": b"2"}, pin=True)
with store.view(["k"]) as (seen,):
    child = os.fork()
if not child:
    good = store.get(["k"]) == [b"1"] and seen.data == b"1"
for turn in range(300):
    name = f"{child > 0}{turn}"
    good = store.put({name: name.encode()})[0].outcome.value == "done" and (child > 0 or good)
    good = store.get([name]) == [name.encode()] and good
if not child:
    good = store.unpin(["pinned"]) == [False] and good
    store.close()
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0, "the child"
assert good and store.unpin(["pinned"]) == [True], "the parent's pins are its own"
store.close()
"""


def test_a_forked_child_has_a_connection_of_its_own(rig: Rig) -> None:
    told = subprocess.run([sys.executable, "-c", FORKS, rig.address], capture_output=True, text=True, timeout=30)
    assert (told.returncode, told.stderr) == (0, "")


def test_evicted_and_cleared_objects_are_not_listed(rig: Rig, store: Store) -> None:
    size = slot_bytes(1000, SLAB_BYTES)
    assert size == PAGE_BYTES
    namespace = object_namespace("", size)
    store.put({"a": bytes(1000), "b": bytes(1000)})
    key = object_key(tenant_root(""), b"a")
    ask_operator(rig.address, Evict(namespace.root(), key, below=False))
    assert store.exists(["a", "b"]) == [False, True]
    ask_operator(rig.address, Evict(namespace.root(), b"", below=True))
    assert store.exists(["a", "b"]) == [False, False]
    assert len(rig.node.objects) == 0


def test_objects_that_are_read_leave_later_than_those_that_are_not(config: NodeConfig) -> None:
    size = SLAB_BYTES - 64
    rig = Rig(replace(config, eviction="lru"))
    try:
        with Store(rig.address) as store:
            for turn in range(32):
                store.put({f"{turn}": bytes(size)})
            store._tell_at_s = 0.0
            assert store.get(["0", "1"]) == [bytes(size)] * 2
            store.put([(f"new{turn}", bytes(size)) for turn in range(16)])
            left = [turn for turn in range(32) if store.exists([f"{turn}"])[0]]
            assert left == [0, 1, *range(18, 32)]
    finally:
        rig.close()


def test_a_table_without_room_has_clients_ask(rig: Rig, open_store: Callable[..., Store]) -> None:
    table = rig.node.objects._table
    full = [(1 << 64) - 1] * 8
    with open_store() as one:
        assert one._connection.lists_all
        for bucket in range(table._buckets):  # as if strangers had taken every place
            for place, tag in enumerate(full):
                at = table._tags + (bucket * 8 + place) * 8
                table._memory[at : at + 8] = tag.to_bytes(8, "little")
        assert outcomes(one.put({"k": b"1", "large": value("l", 1, SLAB_BYTES * 2)})) == [Outcome.DONE] * 2
        assert not one._connection.lists_all
        assert one.exists(["k", "no"]) == [True, False]
        assert one.exists(["k", "no"] * 20) == [True, False] * 20
        assert one.get(["k", "no"]) == [b"1", None]
        assert one.size(["k", "large", "no"]) == [1, SLAB_BYTES * 2, None]
        assert one.get(["large"]) == [value("l", 1, SLAB_BYTES * 2)]
        assert outcomes(one.put({"k": b"2"})) == [Outcome.EXISTS]
        assert outcomes(one.put({"k": b"1"})) == [Outcome.DONE]
        assert one.remove(["k", "large"]) == [True, True]
        assert rig.cache.pool.taken_bytes == 0
        eventually(lambda: one._connection.lists_all)


def test_slots_waste_little() -> None:
    slab = 16 << 20
    for length in (0, 1, 4032, 4096, 65_536, 100_000, 1 << 20, 3 << 20, 5_000_000):
        size = slot_bytes(length, slab)
        assert size % PAGE_BYTES == 0
        assert 64 + length <= size <= max(2 * PAGE_BYTES, 1.25 * (length + 64) + 2 * PAGE_BYTES)
    assert slot_bytes(slab - 64, slab) == slab
    assert slot_bytes(slab - 63, slab) is None
    assert slot_bytes(1 << 20, slab) == (1 << 20) + PAGE_BYTES, "a power of two and its header"
    assert len({slot_bytes(length, slab) for length in range(0, slab - 64, 4096)}) < 50
    assert Kind.WHOLE == 0
    assert Verdict.YOURS == 1


def test_a_store_that_is_closed_says_so(rig: Rig) -> None:
    with Store.connect(rig.address) as it:
        it.put({"k": b"1"})
    with pytest.raises(UnavailableError, match="closed"):
        it.get(["k"])
    began_s = time.monotonic()
    with pytest.raises(UnavailableError):
        Store(rig.address + "x")
    assert time.monotonic() - began_s < 1.0


def test_the_example_runs() -> None:
    told = subprocess.run([sys.executable, ROOT / "examples" / "store.py"], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stderr) == (0, "")
    assert "put of other bytes: exists" in told.stdout
    assert "equal: True" in told.stdout
