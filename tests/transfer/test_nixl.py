"""Engines that read through NIXL; skipped only where its wheel cannot be had."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headwater.errors import ConfigError, RefusedError
from headwater.transfer import Engine, Outcome
from headwater.transports.nixl_agent import Agent
from tests.node.conftest import descriptors
from tests.transfer.peers import pattern

DONE = Outcome.DONE
SIZE = 1 << 20


def test_without_nixl_the_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl_cu12", None)
    before = descriptors()
    with pytest.raises(ConfigError, match="NIXL is not installed; pip install"):
        Engine("one", transports=("nixl", "tcp"))
    assert descriptors() == before


def test_what_cannot_change_is_read_by_nixl_and_the_rest_comes_over_the_connection(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl_cu12", reason="the wheel nixl-cu12 is not installed (there is none for this platform)")
    one, other = (make_engine(name, transports=("nixl",)) for name in ("one", "other"))
    fixed = one.register(pattern("fixed", SIZE), immutable=True)
    open_ = one.register(SIZE, writable=True)
    open_.memory[:] = pattern("open", SIZE)
    read: list[int] = []
    real = Agent.read

    def counted(agent, name, kind, targets, sources):
        read.append(sum(length for _, length, _ in sources))
        return real(agent, name, kind, targets, sources)

    monkeypatch.setattr(Agent, "read", counted)
    peer = other.connect(one.descriptor())
    rooms = [np.zeros(SIZE, np.uint8) for _ in range(2)]
    for _ in range(2):
        assert other.read(peer, [(fixed, 0, SIZE, rooms[0]), (open_, 0, SIZE, rooms[1])]) == [DONE, DONE]
    assert read == [SIZE, SIZE]
    assert np.array_equal(rooms[0], pattern("fixed", SIZE))
    assert np.array_equal(rooms[1], pattern("open", SIZE))
    assert other.write(peer, [(open_, 0, SIZE, rooms[0])]) == [DONE]
    assert np.array_equal(open_.memory, rooms[0])

    fixed.memory[5] ^= 1  # which was promised not to happen
    assert other.read(peer, [(fixed, 0, SIZE, rooms[1])], 1.0) == [Outcome.CORRUPT]
    agent = one._nixl.agent
    assert sorted(agent._exported) == [fixed.number, open_.number]
    one.unregister(fixed)
    assert sorted(agent._exported) == [open_.number]
    later = one.register(pattern("later", SIZE), immutable=True)
    other.refresh(peer)
    assert other.read(peer, [(later, 0, SIZE, rooms[0]), (fixed.number, 0, 1, bytearray(1))][:1]) == [DONE]
    assert np.array_equal(rooms[0], pattern("later", SIZE))


@pytest.mark.parametrize("transports", [("local",), ("shm",), ("tcp",)], ids="+".join)
def test_immutable_memory_is_verified_against_the_checksum_of_its_first_read(
    make_engine: Callable[..., Engine], transports: tuple[str, ...]
) -> None:
    one, other = (make_engine(name, transports=transports) for name in ("one", "other"))
    segment = one.register(SIZE, immutable=True)
    segment.memory[:] = pattern("one", SIZE)
    peer = other.connect(one.descriptor())
    room = bytearray(SIZE)
    assert other.read(peer, [(segment, 0, SIZE, room)]) == [DONE]
    assert room == pattern("one", SIZE).tobytes()
    if transports != ("local",):
        segment.memory[5] ^= 1
        assert other.read(peer, [(segment, 0, SIZE, room)], 1.0) == [Outcome.CORRUPT]
    with pytest.raises(RefusedError, match=r"^immutable"):
        one.register(5, immutable=True, writable=True)
