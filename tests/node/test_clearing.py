"""Clearing a namespace: nothing that was stored before comes back, from whatever tier, whatever happens meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.config import NodeConfig
from headwater.errors import RefusedError
from headwater.node.client import Session, ask_operator, fetch_status
from headwater.node.messages import Evict, Pin, Tiers
from headwater.tiers import direct_io
from headwater.tiers.memory import MemoryTier
from headwater.types import Cleared, Origin, pack_keys
from tests.node.conftest import eventually
from tests.node.peers import LAYOUT, ForkServer, keys, namespace, open_session, save, serve
from tests.node.tiered import (
    CHUNKS,
    SlowTier,
    Still,
    bring,
    disk_of,
    load,
    plug,
    rigged,
    save_all,
    settle,
    tier,
    with_tiers,
)
from tests.servers import RedisServer, redis_server, valkey_program

NAMES = [f"prompt {number}" for number in range(4)]
ROOT = namespace().root()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisServer]:
    """One whose data outlives its end."""
    with redis_server(valkey_program(), tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def served(session: Session, tag: str = "") -> list[int]:
    """How many chunks of each prompt an engine gets."""
    return [bring(session, keys(CHUNKS, name), f"{tag}/{name}").chunks for name in NAMES]


def below(session: Session, address: str) -> None:
    """The prompts are saved, and only lower tiers have them."""
    save_all(session, NAMES, address)
    for name in NAMES:
        ask_operator(address, Evict(ROOT, pack_keys(keys(CHUNKS, name)), False))
    assert session.match(keys(1, NAMES[0])).chunks == 0


@pytest.mark.parametrize("journal", ["journal is there", "journal is lost"])
def test_a_disk_forgets_for_good(config: NodeConfig, tmp_path: Path, journal: str) -> None:
    config = with_tiers(config, disk=disk_of(tmp_path))
    for life in range(3):
        with rigged(config) as rig:
            session = rig.session("engine", maps=True)
            assert served(session) == ([0] * 4 if not life else [0, 0, CHUNKS, 0]), f"life {life}"
            below(session, rig.address)
            assert session.clear() == Cleared(4 * CHUNKS, 0)
            assert served(session, "at once") == [0] * 4
            save_all(session, NAMES[2:3], rig.address)
            assert len(rig.cache.spaces) == 1
        if journal == "journal is lost":
            for path in (tmp_path / "disk").glob("journal-*"):
                path.unlink()


def test_a_kill_right_after_the_answer_changes_nothing(peers: ForkServer, tmp_path: Path) -> None:
    """The journal has not yet been told what left."""
    address, settings = f"unix:{tmp_path}/n.sock", {"drain_s": 5.0, "disk_reserve": 0, "host_memory": 1 << 20}
    for life in range(3):
        node = peers.start(serve, address=address, quiet=True, disk=disk_of(tmp_path), **settings)
        assert node.hear() == "up"
        session = open_session(address, f"engine {life}")
        assert served(session) == [0] * 4, f"life {life}"
        assert fetch_status(address)["tiers"][1]["used_bytes"] == 0  # type: ignore[index]
        below(session, address)
        eventually(Still(tmp_path / "disk"))
        assert session.clear().deleted == 4 * CHUNKS
        node.kill()
        session.close()


def test_a_disk_that_cannot_take_it_down_is_said(
    config: NodeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, os.strerror(5))

    with rigged(with_tiers(config, disk=disk_of(tmp_path))) as rig:
        session = rig.session("engine", maps=True)
        below(session, rig.address)
        with monkeypatch.context() as patch:
            patch.setattr(direct_io, "sync", broken)
            with pytest.raises(RefusedError, match="Input/output error; it is gone until a restart; mend the disk"):
                session.clear()
            assert served(session) == [0] * 4
        assert session.clear() == Cleared(0, 0)


def test_a_remote_that_is_down_is_pending_until_it_has_deleted(
    config: NodeConfig, tmp_path: Path, valkey: RedisServer
) -> None:
    with rigged(with_tiers(config, remotes=(valkey.url(),))) as rig:
        session = rig.session("engine", maps=True)
        below(session, rig.address)
        there = len(valkey.names())
        assert there >= 4 * CHUNKS
        valkey.kill()
        name = fetch_status(rig.address)["tiers"][1]["name"]  # type: ignore[index]
        assert session.clear() == Cleared(0, 0, 0, (name,))
        assert session.clear().pending == (name,), "to say it again changes nothing"
        assert served(session) == [0] * 4
        save_all(session, NAMES[:1])
        valkey.start()
        began_s = time.monotonic()
        while session.still_clearing():
            assert served(session, f"{time.monotonic()}")[1:] == [0] * 3
            assert time.monotonic() - began_s < 20.0
        settle(rig.address)
        assert served(session, "after")[1:] == [0] * 3
        eventually(lambda: tier(rig.address)["written_chunks"] == 5 * CHUNKS, 10.0)
        mine = Origin.of(namespace(), LAYOUT)
        assert mine.root == ROOT
        ask_operator(rig.address, Evict(ROOT, pack_keys(keys(CHUNKS, NAMES[0])), False))
        assert served(session, "what was saved since") == [CHUNKS, 0, 0, 0]


class Gated(SlowTier):
    """A tier whose clear waits for a signal."""

    def __init__(self) -> None:
        super().__init__(MemoryTier(1 << 24), 1e9)
        self.gate, self.clears, self.calls = threading.Event(), 0, list[str]()

    def clear(self, origin: Origin, until_s: float) -> int:
        """See `LowerTier`."""
        self.clears += 1
        self.gate.wait(20.0)
        return super().clear(origin, until_s)

    def holds(self, *arguments: Any) -> list[bool]:
        """See `LowerTier`."""
        self.calls.append("holds")
        return super().holds(*arguments)

    def read(self, *arguments: Any) -> Any:
        """See `LowerTier`."""
        self.calls.append("read")
        return super().read(*arguments)

    def write(self, *arguments: Any) -> Any:
        """See `LowerTier`."""
        self.calls.append("write")
        return super().write(*arguments)


def test_a_namespace_is_left_alone_while_it_is_deleted(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated()
    with rigged(with_tiers(config, remotes=plug(monkeypatch, {"gated": gated}))) as rig:
        session = rig.session("engine", maps=True)
        other = rig.session("other", replace(namespace(), tenant="blue"))
        below(session, rig.address)
        gated.calls.clear()
        for _ in range(3):
            assert len(session.clear().pending) == 1
        assert other.clear().pending
        assert served(session) == [0] * 4
        save_all(session, NAMES[:1])
        session.match(keys(CHUNKS, NAMES[0]))
        eventually(lambda: tier(rig.address)["clearing"] == 2)
        assert (gated.clears, gated.calls) == (1, []), "one at a time, and nothing else meanwhile"
        gated.gate.set()
        eventually(lambda: not session.still_clearing() and not other.still_clearing())
        settle(rig.address)
        assert tier(rig.address)["written_chunks"] == 5 * CHUNKS, "what was saved meanwhile"
        assert served(session, "after") == [CHUNKS, 0, 0, 0]
        assert load(session, keys(CHUNKS, NAMES[0])) == CHUNKS


def test_pins_end_and_what_is_kept_is_counted(config: NodeConfig) -> None:
    with rigged(with_tiers(config)) as rig:
        session = rig.session("engine", maps=True)
        save_all(session, NAMES)
        packed = pack_keys(keys(CHUNKS, NAMES[0]))
        ask_operator(rig.address, Pin(ROOT, packed, "me", 60.0))
        assert ask_operator(rig.address, Evict(ROOT, packed, True)) == {"deleted": 0, "kept": CHUNKS}
        got = session.load(keys(3, NAMES[1]))
        assert session.clear() == Cleared(4 * CHUNKS - 3, 3, 1)
        session.done(got.ticket)
        assert session.clear() == Cleared(3, 0)
        tiers: Any = ask_operator(rig.address, Tiers())
        assert tiers["tiers"][0]["used_bytes"] == 0


def test_deletions_of_many_keys_have_the_time_they_need(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch after batch, each with a time of its own."""
    batches: list[tuple[int, float]] = []

    class Slow(SlowTier):
        def delete(self, identities: Any, until_s: float) -> None:
            batches.append((len(identities), until_s))
            super().delete(identities, until_s)

    plugged = plug(monkeypatch, {"slow": Slow(MemoryTier(1 << 24), 1e9)})
    with rigged(with_tiers(config, remotes=plugged)) as rig:
        session = rig.session("engine", maps=True)
        save(session, keys(1, "x"))
        until_s = time.monotonic()
        ask_operator(rig.address, Evict(ROOT, pack_keys(keys(10_000, "many")), True))
        eventually(lambda: len(batches) == 3, 10.0)
        assert [count for count, _ in batches] == [4096, 4096, 10_000 - 2 * 4096]
        for count, batch_until_s in batches:
            assert batch_until_s >= until_s + 1.0 + 0.002 * count - 1e-6
            until_s = batch_until_s
        assert tier(rig.address)["health"] == "well"
