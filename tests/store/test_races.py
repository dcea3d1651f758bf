"""The Store while others write the same keys, die, or are away."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headwater.errors import ProtocolError, UnavailableError
from headwater.node.messages import (
    Find,
    Found,
    Hold,
    Kept,
    Place,
    Placed,
    Publish,
    Published,
    Remove,
    Used,
    Verdict,
    pack_words,
    unpack_words,
)
from headwater.node.object_format import object_key, tenant_root
from headwater.store import Outcome, Store
from headwater.store.connection import Connection
from tests.node.conftest import Rig, eventually
from tests.node.peers import ForkServer, serve
from tests.store.conftest import SLAB_BYTES, value

WRITERS, KEYS = 4, 12
SEED = 20261129


def length_of(name: str, attempt: int) -> int:
    """Attempts of one key differ in their slots, and some in the number of their parts."""
    return random.Random(f"{SEED}/{name}/{attempt}").choice([0, 10, 5000, 5001, 90_000, SLAB_BYTES * 2 + 7])


def whole(name: str, data: bytes) -> int | None:
    """Which attempt these bytes are, all of them."""
    return next((it for it in range(WRITERS) if data == value(name, it, length_of(name, it))), None)


def test_of_concurrent_puts_one_wins_and_the_others_are_told(open_store: Callable[..., Store], rig: Rig) -> None:
    names = [f"k{number}" for number in range(KEYS)]
    stores = [open_store() for _ in range(WRITERS)]
    reader = open_store()
    over = threading.Event()
    start = threading.Barrier(WRITERS)

    def write(attempt: int) -> list[Outcome]:
        mine = names.copy()
        random.Random(attempt).shuffle(mine)
        start.wait()
        found: dict[str, Outcome] = {}
        for begin in range(0, KEYS, 3):
            batch = mine[begin : begin + 3]
            pairs = [(it, value(it, attempt, length_of(it, attempt))) for it in batch]
            found |= dict(zip(batch, (it.outcome for it in stores[attempt].put(pairs)), strict=True))
        return [found[it] for it in names]

    def read() -> None:
        seen: dict[str, bytes] = {}
        while not over.is_set():
            for name, data in zip(names, reader.get(names), strict=True):
                if data is not None:
                    assert whole(name, data) is not None, f"{name}: bytes of nobody"
                    assert seen.setdefault(name, data) == data, f"{name} has changed"

    with ThreadPoolExecutor(WRITERS + 1) as pool:
        reading = pool.submit(read)
        results = list(pool.map(write, range(WRITERS)))
        over.set()
        reading.result()
    for at, (name, data) in enumerate(zip(names, reader.get(names), strict=True)):
        assert data is not None
        for attempt in range(WRITERS):
            same = data == value(name, attempt, length_of(name, attempt))
            assert results[attempt][at] is (Outcome.DONE if same else Outcome.EXISTS), (name, attempt)
    assert reader.remove(names) == [True] * KEYS
    assert rig.cache.pool.taken_bytes == 0, "parts of those who lost are left"


def placed(one: Connection, name: str, length: int = 100) -> Placed:
    return one.call(Place(object_key(tenant_root(""), name.encode()), pack_words([length])), Placed)


@pytest.fixture
def one(rig: Rig):
    connection = Connection(rig.address, "", 5.0, 5.0)
    yield connection
    connection.close()


def test_who_dies_while_writing_leaves_the_key_to_others(rig: Rig, store: Store) -> None:
    one = Connection(rig.address, "", 5.0, 5.0)
    assert list(placed(one, "k").verdicts) == [Verdict.YOURS]
    assert list(placed(one, "k").verdicts) == [Verdict.BUSY]
    impatient = Store(rig.address, call_s=0.05)
    (busy,) = impatient.put({"k": b"1"})
    assert (busy.outcome, impatient.get(["k"])) == (Outcome.ERROR, [None])
    impatient.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.put, {"k": b"2"})
        one.close()
        assert not waiting.done(), "it may still write, as long as it maps the memory"
        del one
        assert [it.outcome for it in waiting.result(5)] == [Outcome.DONE]
    assert store.get(["k"]) == [b"2"]


def test_a_slot_that_was_not_written_in_time_is_not_published(rig: Rig, store: Store, one: Connection) -> None:
    got = placed(one, "k")
    rig.clock.moved_s += rig.node.config.save_lease_s + 1.0
    eventually(lambda: [it.quarantined for it in rig.cache.tickets.values()] == [True])
    assert [it.outcome for it in store.put({"k": value("k", 2, 100)})] == [Outcome.DONE]
    assert one.call(Publish(got.placing), Published) == Published(b"\0", b"\0")
    assert store.get(["k"]) == [value("k", 2, 100)]
    late = placed(one, "late", 100_000)
    rig.clock.moved_s += rig.node.config.save_lease_s + 1.0
    eventually(lambda: [it.quarantined for it in list(rig.cache.tickets.values())] == [True])
    swept = threading.Event()
    rig.node.errands.tell(lambda now: (rig.node.objects.sweep(now), swept.set()))
    assert swept.wait(5)
    assert one.call(Publish(late.placing), Published) == Published(b"\0", b"\0")
    assert not rig.cache.tickets, "its writer has said that nobody writes there any more"
    assert not rig.node.objects._placings
    assert store.remove(["k"]) == [True]
    assert rig.cache.pool.taken_bytes == 0


def test_what_is_published_without_a_header_is_found_by_nobody(rig: Rig, store: Store, one: Connection) -> None:
    got = placed(one, "k")
    assert one.call(Publish(got.placing), Published).done == b"\0"
    assert store.get(["k"]) == [None]
    assert rig.cache.pool.taken_bytes == 0
    other = placed(one, "k")
    assert one.call(Publish(other.placing, (0,)), Published).done == b"\0"
    assert one.call(Publish(other.placing), Published).done == b"", "a placing is published once"


@pytest.mark.parametrize(
    "request_",
    [
        Place(b"x" * 15, pack_words([1])),
        Place(b"x" * 16, pack_words([1, 2])),
        Place(b"x" * 16, b"x"),
        Find(b"x" * 17),
        Remove(b"x"),
        Hold(b"x", 1.0),
        Used(b"x" * 16 * 70_000),
    ],
)
def test_a_client_that_talks_nonsense_loses_its_connection(rig: Rig, one: Connection, request_: object) -> None:
    with pytest.raises((UnavailableError, ProtocolError)):
        one.call(request_, Found)
    eventually(lambda: rig.server.sessions == 0)


def test_lengths_beyond_all_slots_and_unknown_placings_are_harmless(rig: Rig, one: Connection) -> None:
    huge = one.call(Place(b"x" * 16, pack_words([(1 << 64) - 1])), Placed)
    assert (list(huge.verdicts), huge.placing) == ([Verdict.FULL], 0)
    assert one.call(Publish(77), Published) == Published(b"", b"")
    assert one.call(Hold(b"x" * 16, 5.0), Kept).flags == b"\0"
    found = one.call(Find(b"x" * 16, True), Found)
    assert (found.tickets, unpack_words(found.addresses)) == ((), [(1 << 64) - 1])


def test_objects_before_enter_and_a_second_tenant_are_refused(rig: Rig) -> None:
    link = rig.link("engine")
    with pytest.raises(UnavailableError):
        link.call(Find(b"x" * 16), Found)


def test_a_node_that_is_killed_costs_an_error_and_no_wrong_byte(peers: ForkServer, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/n.sock"
    settings = {"prefault": False, "drain_s": 0.1, "slab": SLAB_BYTES}
    node = peers.start(serve, address=address, **settings)
    assert node.hear() == "up"
    with Store(address) as store:
        for turn in range(3):
            names = [f"{turn}/{number}" for number in range(40)]
            room = np.zeros(60_000, np.uint8)
            began = threading.Event()

            def work(names: list[str] = names, room: np.ndarray = room, began: threading.Event = began) -> None:
                with pytest.raises(UnavailableError):
                    while True:
                        store.put([(name, value(name, 1, 60_000)) for name in names[:5]])
                        for name, data in zip(names[:5], store.get(names[:5]), strict=True):
                            assert data == value(name, 1, 60_000)
                        (got,) = store.get_into(names[:1], [room])
                        assert got.outcome is Outcome.DONE
                        store.remove(names[:5])
                        began.set()

            with ThreadPoolExecutor(1) as pool:
                working = pool.submit(work)
                assert began.wait(10)
                node.kill()
                killed_s = time.monotonic()
                working.result(10)
            assert time.monotonic() - killed_s < 2.0
            with pytest.raises(UnavailableError):
                store.get(names)
            node = peers.start(serve, address=address, **settings)
            assert node.hear() == "up"
            eventually(lambda names=names: is_back(store, names), 5.0)
            assert store.get(names) == [None] * len(names), "the dead node's memory is not read any more"


def is_back(store: Store, names: list[str]) -> bool:
    try:
        return store.exists(names) == [False] * len(names)
    except UnavailableError:
        return False
