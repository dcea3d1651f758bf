"""What tests of nodes in a cluster share: a directory, nodes of one cluster in this process, and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.core import drain
from headwater.node import membership, orders, server
from headwater.node.client import fetch_status
from tests.node.conftest import Rig, eventually
from tests.servers import RedisServer, redis_server, valkey_program

Raise = Callable[..., Rig]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests of a module; each has a cluster of its own."""
    with redis_server(valkey_program(), tmp_path_factory.mktemp("valkey")) as it:
        yield it


@contextmanager
def raising(directory: RedisServer, folder: Path, monkeypatch: pytest.MonkeyPatch, **common: object) -> Iterator[Raise]:
    """Starts nodes of one cluster by name, all with these settings, and ends them. They are in a hurry."""
    monkeypatch.setattr(membership, "BEAT_S", 0.05)
    monkeypatch.setattr(orders, "ROUND_S", 0.05)
    monkeypatch.setattr(server, "TICK_S", 0.05)
    monkeypatch.setattr(drain, "AGAIN_S", 0.3)
    usual = {"host_memory": 4 << 20, "slab": 64 << 10, "prefault": False, "drain_s": 0.1}
    where = {"directory": directory.url(), "cluster": folder.name[:60]}
    with ExitStack() as stack:

        def start(place: str, **changes: object) -> Rig:
            own = {"socket": f"unix:{folder}/{place}", "name": place, "host_id": place}
            rig = Rig(NodeConfig(**{**usual, **where, **common, **own, **changes}))
            stack.callback(rig.close)
            if rig.node.cluster is not None:
                eventually(lambda: cluster_of(rig)["directory"]["standpoint"] == "member")
            return rig

        yield start


def cluster_of(rig: Rig) -> dict:
    """What a node says of its cluster."""
    state = fetch_status(rig.address)["cluster"]
    assert isinstance(state, dict)
    return state


def together(*rigs: Rig) -> None:
    """Wait until all know each other, by the numbers that they have now, and have told the directory everything."""

    def known(rig: Rig) -> bool:
        numbers = {it.node.cluster.announcing.number for it in rigs if it is not rig}
        return {it.number for it in rig.node.cluster.tier.members()} == numbers

    eventually(lambda: all(cluster_of(it)["directory"]["settled"] for it in rigs))
    eventually(lambda: all(known(it) for it in rigs))
