"""The public client against a real node: what is saved is found, by everybody and only by those who should."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import headwater
from headwater import Client, HitRule, KVGroup, KVLayout, Namespace, RefusedError, UnavailableError
from headwater.config import NodeConfig
from headwater.node.driver import Node
from headwater.node.server import EmbeddedServer

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
        assert client.clear() == 10


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


def test_the_example_runs() -> None:
    told = subprocess.run([sys.executable, ROOT / "examples" / "client.py"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "found 3 of its 10 chunks, with equal bytes" in told.stdout
