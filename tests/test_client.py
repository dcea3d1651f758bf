"""The public client against a real node: what is saved is found, by everybody and only by those who should."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import headwater
from headwater import Client, HitRule, KVGroup, KVLayout, Namespace, RefusedError, UnavailableError
from headwater.config import NodeConfig
from headwater.node.client import ask_operator, fetch_status
from headwater.node.driver import Node
from headwater.node.messages import Evict
from headwater.node.server import EmbeddedServer
from headwater.tiers.memory import MemoryTier
from headwater.types import Cleared, pack_keys
from tests.node.conftest import eventually
from tests.node.tiered import SlowTier, plug

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = KVLayout(32, (KVGroup(16, 1024, (3, 2)), KVGroup(16, 512, (1, 1), HitRule.WINDOW, 40)))
NAMESPACE = Namespace("model", "float32", "test", LAYOUT.fingerprint())
PROMPT = list(range(500, 665))  # five whole chunks and a tail


@pytest.fixture
def node(tmp_path: Path) -> Iterator[str]:
    address = f"unix:{tmp_path}/node.sock"
    config = NodeConfig(socket=address, host_memory=1 << 20, slab=1 << 17, metrics="off", load_lease_s=0.2)
    server = EmbeddedServer(Node(config), address)
    yield address
    cache = server.server.node.cache
    cache.check()
    assert not cache.tickets
    server.close()


def content(position: int, group: int, shard: int) -> np.ndarray:
    """What these tests keep in a part."""
    seed = [position, group, shard]
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.part_bytes(group, shard), dtype=np.uint8)


def fill(saving: headwater.client.Saving, first: int = 0) -> None:
    for position in saving.positions:
        for group in range(2):
            for shard in range(2):
                saving.part(position, group, shard)[:] = content(first + position, group, shard)


def test_another_client_reads_what_one_saved(node: str) -> None:
    with Client(node, NAMESPACE, LAYOUT) as one, Client(node, NAMESPACE, LAYOUT) as other:
        keys = one.keys(PROMPT)
        assert len(keys) == 5
        assert one.match(keys) == 0
        with one.save(keys[:3]) as saving:
            assert (saving.covered, saving.positions) == (3, [0, 1, 2])
            fill(saving)
            assert other.match(keys) == 0, "nothing is found before it is committed"
        with one.save(keys[3:], parent=keys[2]) as saving:
            fill(saving, 3)
        assert other.match(keys) == 5
        assert other.contains([*keys, b"x" * 16]) == [True] * 5 + [False]
        with other.load(keys, first=1) as held:
            assert held.chunks == 5
            for position in range(1, 5):
                for shard in range(2):
                    assert np.array_equal(held.part(position, 0, shard), content(position, 0, shard))
            for position in (3, 4):
                assert np.array_equal(held.part(position, 1, 1), content(position, 1, 1))
            with pytest.raises(IndexError, match="chunk 1 of group 1"):
                held.part(1, 1)
            with pytest.raises(IndexError, match="chunk 0"):
                held.part(0)
            with pytest.raises(ValueError, match="read-only"):
                held.part(1)[0] = 1


def test_a_block_that_raises_commits_nothing_and_frees_its_slots(node: str) -> None:
    with Client(node, NAMESPACE, LAYOUT) as client:
        keys = client.keys(PROMPT)
        with pytest.raises(ZeroDivisionError), client.save(keys):
            raise ZeroDivisionError
        assert client.match(keys) == 0
        with client.save(keys) as saving:
            assert saving.positions == [0, 1, 2, 3, 4]
            fill(saving)
            saving.failed.add(3)
        assert client.match(keys) == 3, "what failed cuts the prefix there"


def test_a_lease_that_ended_too_early_is_an_error(node: str) -> None:
    with Client(node, NAMESPACE, LAYOUT) as client:
        keys = client.keys(PROMPT)
        with client.save(keys) as saving:
            fill(saving)
        with pytest.raises(UnavailableError, match="discard"), client.load(keys) as held:
            while headwater.client.time.monotonic() <= held.deadline_s:
                pass
        assert client.clear() == Cleared(10, 0)


def test_who_must_not_share_does_not(node: str) -> None:
    other = Namespace("model", "float32", "test", LAYOUT.fingerprint(), tenant="other")
    with Client(node, NAMESPACE, LAYOUT) as one, Client(node, other, LAYOUT) as two:
        with one.save(one.keys(PROMPT)) as saving:
            fill(saving)
        assert two.match(two.keys(PROMPT)) == 0
        assert two.match(one.keys(PROMPT)) == 0, "not even with the other's keys"


def test_refusals_name_both_values(node: str) -> None:
    with pytest.raises(RefusedError, match=r"namespace\.groups"):
        Client(node, Namespace("model", "float32", "test", "wrong"), LAYOUT)
    huge = KVLayout(32, (KVGroup(16, 1 << 20, (3,)),))
    with pytest.raises(RefusedError, match=r"node\.slab=131072") as refused:
        Client(node, Namespace("model", "float32", "test", huge.fingerprint()), huge)
    assert "6291456" in refused.value.given
    with pytest.raises(UnavailableError, match="no node at"):
        Client("unix:/nowhere/node.sock", NAMESPACE, LAYOUT)


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[str]:
    """A node with a disk."""
    address = f"unix:{tmp_path}/tiered.sock"
    disk = f"{tmp_path}/disk:16MiB"
    config = NodeConfig(
        socket=address, host_memory=1 << 20, slab=1 << 17, metrics="off", disk=disk, disk_reserve=0, drain_s=2.0
    )
    server = EmbeddedServer(Node(config), address)
    yield address
    server.close()


def sink(node: str, client: Client, keys: list[headwater.types.ChunkKey]) -> None:
    """Fill what is missing, let it go down to the disk, and take it out of memory."""
    with client.save(keys) as saving:
        fill(saving)
    eventually(lambda: fetch_status(node)["quiet"])

    def is_out() -> bool:
        ask_operator(node, Evict(NAMESPACE.root(), pack_keys(keys), below=False))
        return client.match(keys) == 0

    eventually(is_out)


def test_a_load_waits_for_lower_tiers_if_it_is_told_to(tiered: str) -> None:
    with Client(tiered, NAMESPACE, LAYOUT) as client:
        keys = client.keys(PROMPT)
        sink(tiered, client, keys)
        with client.load(keys) as held:
            assert held.chunks == 0, "by default what is not in memory is a miss"
        with client.load(keys, wait_s=5.0) as held:
            assert held.chunks == 5
            for shard in range(2):
                assert np.array_equal(held.part(4, 1, shard), content(4, 1, shard))
                assert np.array_equal(held.part(0, 0, shard), content(0, 0, shard))
        with client.load(keys, first=2, wait_s=5.0) as held:
            assert held.chunks == 5, "what is in memory needs no waiting"


def test_a_load_does_not_wait_for_what_nobody_has(tiered: str) -> None:
    with Client(tiered, NAMESPACE, LAYOUT) as client:
        began_s = time.monotonic()
        with client.load(client.keys(PROMPT), wait_s=5.0) as held:
            assert held.chunks == 0
        assert time.monotonic() - began_s < 1.0


def test_a_load_waits_no_longer_than_it_was_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = SlowTier(MemoryTier(), 1e12)
    address = f"unix:{tmp_path}/slow.sock"
    remotes = plug(monkeypatch, {"line": line})
    config = NodeConfig(socket=address, host_memory=1 << 20, slab=1 << 17, metrics="off", remotes=remotes, drain_s=0.1)
    server = EmbeddedServer(Node(config), address)
    with Client(address, NAMESPACE, LAYOUT) as client:
        keys = client.keys(PROMPT)
        sink(address, client, keys)
        line.latency_s = 0.4
        began_s = time.monotonic()
        with client.load(keys, wait_s=0.1) as held:
            waited_s = time.monotonic() - began_s
            assert held.chunks == 0
        assert 0.1 <= waited_s < 0.35
        line.latency_s = 0.15
        with client.load(keys, wait_s=4.0) as held:
            assert held.chunks == 5, "a tier may take as long as its client has time"
    server.close()


def test_what_was_prefetched_is_there(tiered: str) -> None:
    with Client(tiered, NAMESPACE, LAYOUT) as client:
        keys = client.keys(PROMPT)
        sink(tiered, client, keys)
        assert client.prefetch(keys) == 0
        eventually(lambda: client.match(keys) == 5)
        assert client.prefetch(keys) == 5
        assert client.prefetch(client.keys(range(9000, 9400))) == 0


def test_the_example_runs() -> None:
    told = subprocess.run([sys.executable, ROOT / "examples" / "client.py"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "found 3 of its 10 chunks, with equal bytes" in told.stdout
