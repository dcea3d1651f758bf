"""kill -9 of a client at any point of a save or load: what it held is free at once, nothing half-written shows."""

from __future__ import annotations

import random
import select
import time
from pathlib import Path

import pytest

from headwater.node.client import Session
from headwater.types import ABSENT
from tests.node.conftest import Rig, anonymous_bytes, descriptors, eventually
from tests.node.peers import (
    LOAD_POINTS,
    SAVE_POINTS,
    ForkServer,
    churner,
    is_whole,
    keys,
    loader,
    open_session,
    read,
    save,
    saver,
    serve,
)

CHUNKS = 4
FREE_S = 2.0
"""How long a busy machine may take for what is done at once."""


def held_wrong(session: Session, names: list[str], count: int) -> list[str]:
    """The names under which something can be loaded that is not whole."""
    wrong = []
    for name in names:
        wanted = keys(count, name)
        got = session.load(wanted)
        data = [read(session, place) for place in got.addresses[0]]
        if not all(is_whole(key, it) for key, it in zip(wanted, data, strict=False)):
            wrong.append(name)
        if got.ticket:
            session.done(got.ticket)
    return wrong


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_killed_while_saving(rig: Rig, peers: ForkServer, point: str) -> None:
    healthy = rig.session("healthy", maps=True)
    for turn in range(14):
        name = f"{point}-{turn}"
        victim = peers.start(saver, address=rig.address, instance="victim", name=name, count=CHUNKS, point=point)
        assert victim.hear() == point
        if point in ("reserved", "half written", "written"):
            assert healthy.reserve(keys(CHUNKS, name)).addresses[0] == (ABSENT,) * CHUNKS, "it is being written"
        victim.kill()
        rig.quiet(FREE_S)
        wanted = keys(CHUNKS, name)
        if point == "done":
            assert healthy.match(wanted).chunks == CHUNKS
            assert not held_wrong(healthy, [name], CHUNKS)
            continue
        assert healthy.match(wanted).chunks == 0, "nothing half-written is visible"
        assert healthy.contains(wanted) == [False] * CHUNKS
        again = healthy.reserve(wanted)
        assert ABSENT not in again.addresses[0], "another writer may have them at once"
        assert healthy.release([again.ticket]) == 1
        assert rig.cache.pool.taken_slots == 0
    assert not rig.cache.expired_saves, "freed by the death and not by the deadline"


@pytest.mark.parametrize("point", LOAD_POINTS)
def test_killed_while_loading(rig: Rig, peers: ForkServer, point: str) -> None:
    healthy = rig.session("healthy", maps=True)
    for turn in range(14):
        wanted = keys(CHUNKS, f"{turn}")
        save(healthy, wanted)
        victim = peers.start(loader, address=rig.address, instance="victim", name=f"{turn}", count=CHUNKS, point=point)
        assert victim.hear() == point
        if point != "done":
            assert healthy.clear().deleted == 0, "it is being read"
        victim.kill()
        rig.quiet(FREE_S)
        assert healthy.match(wanted).chunks == CHUNKS
        assert healthy.clear().deleted == CHUNKS, "nobody holds it any more"
    assert not rig.cache.expired_loads, "freed by the death and not by the deadline"


def test_killed_at_any_instant(rig: Rig, peers: ForkServer, seed: int) -> None:
    """Two clients save, load and clear the same chunks; every few milliseconds one of them dies."""
    draw = random.Random(seed)
    healthy = rig.session("healthy", maps=True)
    names = [f"churn-{index}" for index in range(4)]
    running = [peers.start(churner, address=rig.address, instance=f"churn{index}", seed=index) for index in (0, 1)]
    for peer in running:
        assert peer.hear() == "up"
    for turn in range(60):
        until_s = time.monotonic() + draw.random() * 0.01
        while time.monotonic() < until_s:
            save(healthy, keys(8, names[turn % 4]))
            assert not held_wrong(healthy, [names[turn % 4]], 8)
        place = draw.randrange(2)
        running[place].kill()
        running[place] = peers.start(churner, address=rig.address, instance=f"churn{turn + 2}", seed=turn)
        assert running[place].hear() == "up"
        told, _, _ = select.select([peer.channel.socket for peer in running], [], [], 0)
        assert not told, [peer.hear() for peer in running]
    for peer in running:
        peer.kill()
    rig.quiet(FREE_S)
    assert not held_wrong(healthy, names, 8)
    healthy.clear()
    assert rig.cache.pool.taken_slots == 0
    assert not rig.cache.expired_saves + rig.cache.expired_loads


def test_50_killed_engines_leave_the_node_as_it_was(peers: ForkServer, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/n.sock"
    node = peers.start(serve, address=address, checked=True, quiet=True, drain_s=0.1)
    assert node.hear() == "up"
    healthy = open_session(address, "healthy")

    def kill_some(count: int) -> None:
        for turn in range(count):
            point = SAVE_POINTS[turn % len(SAVE_POINTS)]
            victim = peers.start(saver, address=address, instance=f"v{turn}", name=f"{turn}", count=200, point=point)
            assert victim.hear() == point
            victim.kill()
        eventually(lambda: descriptors(node.pid) == open_before)
        healthy.clear()

    open_before = descriptors(node.pid)
    kill_some(14)
    before = anonymous_bytes(node.pid)
    kill_some(50)
    grown = anonymous_bytes(node.pid) - before
    assert grown < 1 << 20, f"{grown} bytes more"
    healthy.close()
