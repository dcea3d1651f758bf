"""A node with a real disk and a real Valkey: what sinks comes back, byte for byte, after whatever ended the node."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.config import NodeConfig
from headwater.errors import ConfigError
from headwater.node.client import fetch_status
from headwater.node.driver import Node
from headwater.tiers.memory import MemoryTier
from tests.node.conftest import eventually
from tests.node.peers import SLOT_BYTES, ForkServer, keys, namespace, open_session, save, serve
from tests.node.tiered import CHUNKS, Still, bring, disk_of, load, plug, rigged, save_all, settle, tier, with_tiers
from tests.servers import RedisServer, redis_server, valkey_program

PROMPTS = [f"prompt {number}" for number in range(32)]
TOKENS = CHUNKS * 16
LIVES = 5


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(valkey_program(), tmp_path_factory.mktemp("valkey"), "--maxmemory", "64mb") as server:
        yield server


@pytest.mark.parametrize("kind", ["disk", "remote"])
def test_what_sinks_comes_back(config: NodeConfig, tmp_path: Path, valkey: RedisServer, kind: str) -> None:
    """Twice as much as HOST holds; every prompt is there, and the older ones come from below."""
    valkey.say("FLUSHALL")
    below = {"disk": disk_of(tmp_path)} if kind == "disk" else {"remotes": (valkey.url(),)}
    with rigged(with_tiers(config, **below)) as rig:
        session = rig.session("engine", maps=True)
        save_all(session, PROMPTS, rig.address)
        assert tier(rig.address)["written_chunks"] == len(PROMPTS) * CHUNKS
        assert tier(rig.address)["dropped_chunks"] == 0
        assert session.match(keys(CHUNKS, PROMPTS[0])).chunks == 0, "the oldest has left HOST"
        from_below = 0
        for name in PROMPTS:
            wanted = keys(CHUNKS, name)
            it = bring(session, wanted, name)
            assert (it.chunks, it.waiting) == (CHUNKS, False)
            assert load(session, wanted) == CHUNKS
            assert (it.remote if kind == "disk" else it.disk) == 0
            from_below += it.disk + it.remote
        assert from_below >= (len(PROMPTS) - 16) * CHUNKS, "HOST holds 16 prompts"
        assert tier(rig.address)["hit_tokens"] == from_below * 16
        assert not any(tier(rig.address)["errors"].values())


def test_a_restarted_node_is_warm(config: NodeConfig, tmp_path: Path) -> None:
    config = with_tiers(config, disk=disk_of(tmp_path))
    with rigged(config) as rig:
        save_all(rig.session("engine", maps=True), PROMPTS, rig.address)
    with rigged(config) as rig:
        assert rig.node.tiering.recovered_chunks == len(PROMPTS) * CHUNKS
        assert len(rig.cache.spaces) == 1, "the namespace is known before anybody registers"
        session = rig.session("engine", maps=True)
        for name in PROMPTS:
            assert bring(session, keys(CHUNKS, name), name).disk == CHUNKS
            assert load(session, keys(CHUNKS, name)) == CHUNKS
        longer = keys(CHUNKS + 4, PROMPTS[3])
        assert save(session, longer) == 4, "a prompt goes on where its prefix is"


def test_kill_9_leaves_what_was_written(peers: ForkServer, tmp_path: Path, seed: int) -> None:
    """Killed while it writes: only right chunks come back, and all that had time to be journalled."""
    draw = random.Random(seed)
    address, settings = f"unix:{tmp_path}/n.sock", {"drain_s": 5.0, "disk_reserve": 0, "host_memory": 2 << 20}
    saved: list[str] = []
    for life in range(LIVES):
        node = peers.start(serve, address=address, quiet=True, disk=disk_of(tmp_path), **settings)
        assert node.hear() == "up"
        session = open_session(address, f"engine {life}")
        for name in saved:
            assert bring(session, keys(CHUNKS, name), name).chunks == CHUNKS, f"life {life} (seed {seed})"
            assert load(session, keys(CHUNKS, name)) == CHUNKS
        fresh = [f"{life}/{number}" for number in range(8)]
        save_all(session, fresh, address)
        saved += fresh
        eventually(Still(tmp_path / "disk"))
        until_s = time.monotonic() + draw.random() * 0.05
        number = 0
        while time.monotonic() < until_s:
            save(session, keys(CHUNKS, f"{life}/unsettled {number}"))
            number += 1
        node.kill()
        session.close()
    node = peers.start(serve, address=address, quiet=True, disk=disk_of(tmp_path), **settings)
    assert node.hear() == "up"
    session = open_session(address, "last")
    for life in range(LIVES):
        for number in range(50):
            wanted = keys(CHUNKS, f"{life}/unsettled {number}")
            bring(session, wanted, f"{life}/{number}")
            load(session, wanted)
    session.close()


def test_a_tenants_quota_is_a_share_of_the_disk_too(config: NodeConfig, tmp_path: Path) -> None:
    settings = with_tiers(config, disk=disk_of(tmp_path), host_memory=4 << 20, quotas={"blue": 1 << 20})
    with rigged(settings) as rig:
        session = rig.session("engine", replace(namespace(), tenant="blue"), maps=True)
        save_all(session, PROMPTS[:1], rig.address)
        disk = rig.node.tiering.levels[0].disk
        assert disk is not None
        assert disk.shares["blue"].quota_bytes == disk.pool.capacity_bytes // 4
        assert disk.shares["blue"].held_bytes > 0


def test_a_directory_has_one_owner(config: NodeConfig, tmp_path: Path) -> None:
    config = with_tiers(config, disk=disk_of(tmp_path))
    with rigged(config) as rig:
        with pytest.raises(ConfigError, match=r"another node \(pid \d+, epoch 1\) owns it; stop that one or choose"):
            Node(config)
        save_all(rig.session("engine", maps=True), PROMPTS[:2], rig.address)
        assert tier(rig.address)["written_chunks"] == 2 * CHUNKS, "the owner goes on"


def test_a_full_tier_does_not_hold_up_the_end(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    remotes = plug(monkeypatch, {"small": MemoryTier(4 * SLOT_BYTES)})
    with rigged(with_tiers(config, remotes=remotes, drain_s=30.0)) as rig:
        save_all(rig.session("engine", maps=True), PROMPTS[:4])
        eventually(lambda: tier(rig.address)["full"] and tier(rig.address)["queued_chunks"])
        settle(rig.address)
        assert tier(rig.address)["written_chunks"] == 4
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5.0


def test_two_nodes_share_one_valkey(config: NodeConfig, tmp_path: Path, valkey: RedisServer) -> None:
    valkey.say("FLUSHALL")
    here = with_tiers(config, remotes=(valkey.url(),))
    there = with_tiers(config, remotes=(valkey.url(),), socket=f"unix:{tmp_path}/other.sock")
    with rigged(here) as one, rigged(there) as other:
        save_all(one.session("engine", maps=True), PROMPTS[:4], one.address)
        session = other.session("engine", maps=True)
        for name in PROMPTS[:4]:
            it = bring(session, keys(CHUNKS, name), name)
            assert (it.chunks, it.remote) == (CHUNKS, CHUNKS)
            assert load(session, keys(CHUNKS, name)) == CHUNKS
        settle(other.address)
        assert tier(other.address)["written_chunks"] == 0, "what came from there need not go there"
        status = fetch_status(other.address)
        assert status["tiers"][1]["hit_tokens"] == 4 * TOKENS  # type: ignore[index]
        assert status["tiers"][1]["read_bytes"] == 4 * CHUNKS * SLOT_BYTES  # type: ignore[index]
