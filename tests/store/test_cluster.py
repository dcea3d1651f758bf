"""Objects of one cluster: what was put on one node is read on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headwater.node import objects
from headwater.node.object_format import object_key, tenant_root
from headwater.store import Outcome, Store
from tests.clustered import raising, together, valkey
from tests.node.conftest import Rig, eventually
from tests.servers import RedisServer
from tests.store.conftest import SLAB_BYTES, value

__all__ = ["valkey"]
Raise = Callable[..., tuple[Rig, Store]]


@pytest.fixture
def raised(valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Raise]:
    """Starts nodes of this test's cluster, each with a client."""
    monkeypatch.setattr(objects, "SOUGHT_S", 0.1)
    with ExitStack() as stack, raising(valkey, tmp_path, monkeypatch, host_memory=8 << 20, slab=SLAB_BYTES) as start:

        def start_both(place: str, **changes: object) -> tuple[Rig, Store]:
            rig = start(place, **changes)
            # Its client ends before it, whichever was asked to end first.
            return rig, clients.enter_context(Store(rig.address))

        clients = stack.enter_context(ExitStack())
        yield start_both
        clients.close()


def test_what_is_put_on_one_node_is_read_on_another_in_every_way(raised: Raise) -> None:
    (a, near), (b, far) = raised("a"), raised("b")
    values = {f"k{length}": value("k", length, length) for length in (0, 100, 5000, 90_000, SLAB_BYTES * 2)}
    assert {it.outcome for it in near.put(values)} == {Outcome.DONE}
    together(a, b)
    names = list(values)
    assert far.exists([*names, "no"]) == [True] * len(names) + [False]
    assert len(b.node.objects) == 0, "asking brings nothing up"
    assert far.size(["k100", "no"]) == [100, None]
    assert far.get([*names, "no"]) == [*values.values(), None]
    assert len(b.node.objects) >= len(names)
    room = bytearray(SLAB_BYTES * 2)
    assert far.get_into(names[-1:], [room])[0].outcome is Outcome.DONE
    assert room == values[names[-1]]
    with far.view(["k5000"]) as (seen,):
        assert seen.data == values["k5000"]
    assert far.put({"k100": b"other"})[0].outcome is Outcome.EXISTS
    with Store(b.address, tenant="other") as other:
        assert other.get(names) == [None] * len(names)
    a.quiet()


def test_what_is_removed_on_one_node_is_gone_on_the_others(raised: Raise) -> None:
    (a, near), (b, far) = raised("a"), raised("b")
    near.put({"k": value("k", 1, 5000), "stays": b"1"})
    together(a, b)
    assert far.get(["k", "stays"]) == [value("k", 1, 5000), b"1"]
    far.remove(["k"])
    eventually(lambda: near.exists(["k"]) == [False])
    eventually(lambda: far.get(["k"]) == [None])
    assert near.get(["k", "stays"]) == [None, b"1"]
    assert near.put({"k": b"2"})[0].outcome is Outcome.DONE
    together(a, b)
    eventually(lambda: far.get(["k"]) == [b"2"])


def test_replicas_are_made_on_other_nodes(raised: Raise) -> None:
    (a, near), (b, _) = raised("a"), raised("b")
    together(a, b)
    data = value("k", 1, 5000)
    near.put({"k": data}, replicas=2)
    key = object_key(tenant_root(""), b"k")

    def has_copy() -> bool:
        return any(b.cache.is_ready(space, 0, key) for space in range(len(b.cache.spaces)))

    eventually(has_copy, 10.0)
    with Store(b.address) as store:
        assert store.get(["k"]) == [data]


def test_what_only_a_remote_tier_holds_is_found(raised: Raise, valkey: RedisServer) -> None:
    settings = {"directory": "", "remotes": (f"{valkey.url()}?admission=all",)}
    data = value("k", 1, 5000)
    rig, store = raised("alone", **settings)
    store.put({"k": data, "gone": value("gone", 1, 5000)})
    level = rig.node.tiering.levels[0]
    eventually(lambda: level.sums.written_chunks == 2)
    rig.node.errands.tell(lambda now: rig.node.tiering.evict_here(0, [object_key(tenant_root(""), b"k")]))
    eventually(lambda: len(rig.node.objects) == 1)
    assert store.exists(["k", "no"]) == [True, False]
    assert store.get(["k", "no"]) == [data, None]
    assert store.remove(["gone"]) == [True]
    eventually(lambda: level.usage is not None and store.get(["gone"]) == [None])


def test_a_holder_that_is_gone_costs_a_miss(raised: Raise) -> None:
    (a, near), (b, far) = raised("a"), raised("b")
    near.put({"k": value("k", 1, 5000)})
    together(a, b)
    assert far.exists(["k"]) == [True]
    near.close()
    a.server.stop()
    a._thread.join(10)
    eventually(lambda: far.get(["k"]) == [None])
    assert far.put({"k": b"1"})[0].outcome is Outcome.DONE
    assert far.get(["k"]) == [b"1"]
