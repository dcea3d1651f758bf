"""A node, clients of its Store, and values that name their source in each byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.store import Store
from tests.node.conftest import Rig, fork_server, peers

__all__ = ["fork_server", "peers"]

SLAB_BYTES = 256 << 10


def value(key: str, attempt: int, length: int) -> bytes:
    """Bytes that say which put wrote them, at every place."""
    return hashlib.shake_128(f"{key}/{attempt}".encode()).digest(length)


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    """A small node at a path of its own."""
    return NodeConfig(
        socket=f"unix:{tmp_path}/n.sock", host_memory=8 << 20, slab=SLAB_BYTES, prefault=False, drain_s=0.1
    )


@pytest.fixture
def rig(config: NodeConfig) -> Iterator[Rig]:
    """A node in this process; when the test is over, its table lists what it holds, and nothing else."""
    rig = Rig(config)
    yield rig
    rig.close()


@pytest.fixture
def open_store(rig: Rig) -> Iterator[Callable[..., Store]]:
    """Makes clients that end with the test."""
    opened: list[Store] = []

    def make(**settings: object) -> Store:
        opened.append(Store(rig.address, **settings))
        return opened[-1]

    yield make
    for it in opened:
        it.close()


@pytest.fixture
def store(open_store: Callable[..., Store]) -> Store:
    """One client."""
    return open_store()
