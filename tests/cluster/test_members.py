"""Who is in a cluster and who is not: hits across nodes, credentials, protocols, draining, leaving."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.config import child_environment
from headwater.node.client import ask_operator
from headwater.node.messages import Drain
from tests.cluster.cluster import Cluster, keys, numbers
from tests.node.conftest import eventually

CHUNKS = 8
SAID_S = 5.0


@pytest.mark.parametrize("by", ["tcp", "shm"])
def test_a_prefix_saved_on_one_node_is_a_hit_on_another(cluster: Cluster, by: str) -> None:
    for name in ("A", "B"):
        cluster.start(name, {"host_id": "one host"} if by == "shm" else {})
    wanted = keys(CHUNKS, "hit")
    cluster.put("A", wanted, 7)
    cluster.know("B", "A")
    with cluster.reader("B") as reader:
        got = reader.get(wanted)
        assert (got.chunks, got.attempts) == (CHUNKS, {7})
        assert reader.get(wanted[:2]).chunks == 2, "it is here now"
    (link,) = [it for it in cluster.members["B"].status()["peers"] if it["read_bytes"]]
    assert (link["transport"], link["read_bytes"], link["health"]) == (by, CHUNKS * (64 << 10), "well")


def test_a_node_that_leaves_and_one_that_is_killed(cluster: Cluster) -> None:
    for name in ("A", "B", "C"):
        cluster.start(name)
    lives = {name: cluster.members[name].status()["number"] for name in ("A", "B", "C")}
    for name in ("A", "C"):
        cluster.know("B", name)
    cluster.members["A"].signal(15)
    eventually(lambda: lives["A"] not in numbers(cluster.members["B"].status()), SAID_S)
    cluster.members["C"].kill()
    cluster.start("C")
    cluster.know("B", "C")
    eventually(lambda: lives["C"] not in numbers(cluster.members["B"].status()), SAID_S)
    assert cluster.members["C"].status()["number"] not in lives.values(), "numbers are never used again"


@pytest.mark.parametrize(
    "stranger",
    [{"token": "another token of at least thirty-two characters"}, {"token": ""}, {"cluster": "other"}],
    ids=["wrong token", "no token", "another cluster"],
)
def test_strangers_get_nothing(cluster: Cluster, stranger: dict[str, str], tmp_path: Path) -> None:
    cluster.start("A")
    wanted = keys(CHUNKS, "secret")
    cluster.put("A", wanted)
    changes = dict(stranger)
    if "token" in changes:
        token = tmp_path / "other"
        token.touch(mode=0o600)
        token.write_text(changes.pop("token"))
        changes["token_file"] = str(token) if token.read_text() else ""
    cluster.start("B", changes)
    with cluster.reader("B") as reader:
        got = reader.get(wanted, wait_s=1.0)
    assert (got.chunks, got.seconds < 1.5) == (0, True)
    assert not any(it["read_bytes"] for it in cluster.members["B"].status()["peers"])


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_beyond_loopback_only_with_credentials(cluster: Cluster, tmp_path: Path, listen: str) -> None:
    command = [sys.executable, "-m", "headwater", "node", "--socket", f"unix:{tmp_path}/n.sock", "--metrics", "off"]
    command += ["--host-memory", "16MiB", "--cluster", "test", "--directory", cluster.directory.url, "--listen", listen]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment({}), timeout=30, check=False)
    assert done.returncode == 2, done.stderr
    assert "token" in done.stderr
    assert "Traceback" not in done.stderr


def test_neighbouring_protocols_work_together_and_others_say_why_not(cluster: Cluster) -> None:
    cluster.start("A", protocols=(1, 2))
    cluster.start("B", protocols=(1, 1))
    cluster.start("C", protocols=(2, 2))
    wanted = keys(CHUNKS, "protocol")
    cluster.put("A", wanted)
    for name in ("B", "C"):
        cluster.know(name, "A")
        with cluster.reader(name) as reader:
            assert reader.get(wanted).chunks == CHUNKS
    cluster.members["A"].kill()
    with cluster.reader("B") as reader:
        got = reader.get_again(wanted, wait_s=1.0)
        assert (got.chunks, got.seconds < 1.5) == (0, True), "B and C have no protocol in common"


def test_a_drained_node_leaves_nothing_behind(cluster: Cluster) -> None:
    for name in ("A", "B", "C"):
        cluster.start(name)
    wanted = keys(CHUNKS, "drain")
    cluster.put("A", wanted, 3)
    for name in ("B", "C"):
        cluster.know(name, "A")
    address = cluster.members["A"].address
    ask_operator(address, Drain())

    def drained() -> dict[str, Any]:
        told: Any = ask_operator(address, Drain(begins=False))
        return told

    eventually(lambda: drained()["done"], 10.0, seen=drained)
    cluster.members["A"].signal(15)
    cluster.members["A"].peer.ended()
    with cluster.reader("B") as reader:
        eventually(lambda: reader.get(wanted).attempts == {3}, SAID_S)
        assert reader.get(wanted).chunks == CHUNKS


def test_two_nodes_hold_one_key_with_other_bytes(cluster: Cluster) -> None:
    for name in ("A", "B", "C"):
        cluster.start(name)
    wanted = keys(CHUNKS, "twice")
    with cluster.reader("A") as first, cluster.reader("C") as second:
        ways = [threading.Thread(target=it.put, args=(wanted, at)) for at, it in ((1, first), (2, second))]
        for it in ways:
            it.start()
        for it in ways:
            it.join()
    cluster.listed(wanted)
    cluster.know("B", "A")
    cluster.know("B", "C")
    with cluster.reader("B") as reader:
        for _ in range(20):
            got = reader.get_again(wanted)  # every chunk is all of one attempt
            assert (got.chunks, got.attempts <= {1, 2}) == (CHUNKS, True)


def test_nothing_is_left_in_shared_memory(cluster: Cluster) -> None:
    before = set(os.listdir("/dev/shm"))
    cluster.start("A").kill()
    assert set(os.listdir("/dev/shm")) <= before
