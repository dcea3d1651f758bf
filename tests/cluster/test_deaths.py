"""Nodes that are killed at any instant and come back at the same place: misses, no wrong byte, no long wait."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import pytest

from headwater.demo.processes import free_port
from headwater.errors import HeadwaterError
from tests.cluster.cluster import SMALL, Cluster, Load, Reader, keys
from tests.cluster.payloads import layout_of
from tests.node.conftest import eventually

LARGE = layout_of(512 << 10)
CHUNKS = 8
HEAL_S = 10.0


def placed(cluster: Cluster, name: str) -> dict[str, str]:
    """A place that a member keeps over its lives."""
    return {"listen": f"127.0.0.1:{free_port()}"} if cluster.lab is None else {}


def test_killed_while_being_read_from(cluster: Cluster, seed: int) -> None:
    draw = random.Random(seed)
    place = placed(cluster, "A")
    cluster.start("B")
    wanted = keys(CHUNKS, "read")
    whole = 0
    with cluster.reader("B", LARGE) as reader:
        for attempt in range(1, 21):
            cluster.start("A", place)
            cluster.put("A", wanted, attempt, LARGE)
            eventually(lambda: reader.get_again(wanted[:1]).chunks, HEAL_S)
            # From before the first frame to after the last one, on slow machines and quick ones.
            killer = threading.Timer(draw.random() ** 2 * 0.1, cluster.members["A"].kill)
            killer.start()
            got = reader.get_again(wanted)
            killer.join()
            assert got.attempts <= {attempt}, "what an earlier life held is not mixed in"
            assert got.seconds < 2.0
            whole += got.chunks == CHUNKS
    print(f"seed {seed}: {whole} of 20 reads were whole")


def test_killed_while_being_written_to(cluster: Cluster, seed: int) -> None:
    draw = random.Random(seed)
    place = placed(cluster, "A")
    cluster.start("B")
    with cluster.reader("B", LARGE) as reader:
        for attempt in range(1, 21):
            cluster.start("A", place)
            wanted = keys(CHUNKS, f"write-{attempt % 3}")
            writer = Reader(cluster.members["A"].address, LARGE)

            def write(writer: Reader = writer, wanted: list = wanted, attempt: int = attempt) -> None:
                with suppress(HeadwaterError):
                    writer.put(wanted, attempt)

            thread = threading.Thread(target=write)
            thread.start()
            killer = threading.Timer(draw.random() ** 2 * 0.1, cluster.members["A"].kill)
            killer.start()
            got = reader.get_again(wanted, wait_s=0.3)
            assert got.attempts <= {attempt}
            killer.join()
            thread.join()
            writer.session.close()
    cluster.start("A", place)
    last = keys(CHUNKS, "write-0")
    cluster.put("A", last, 99, LARGE)  # another writer may have the keys at once
    cluster.know("B", "A")
    with cluster.reader("B", LARGE) as reader:
        eventually(lambda: reader.get_again(last).attempts == {99}, HEAL_S)
        assert reader.get_again(last).chunks == CHUNKS


def test_a_host_and_port_that_200_lives_use(cluster: Cluster) -> None:
    """Each life holds other bytes under the same keys: none of them may come under the name of another life."""
    place = placed(cluster, "A")
    cluster.start("B")
    wanted = keys(2, "same")
    with cluster.reader("B") as reader, Load(reader, wanted, wait_s=0.2) as load:
        lives = []
        for attempt in range(1, 201):
            member = cluster.start("A", place, joined=False)
            with Reader(member.address) as writer:
                writer.put(wanted, attempt)
            lives.append(time.monotonic())
            wait_for(load, attempt)
            member.kill()
        for it in load.gets:
            begun = sum(at_s < it.began_s for at_s in lives)  # lives that had stored their bytes by then
            assert len(it.attempts) <= 1, f"one get brought {set(it.attempts)}"
            assert all(attempt >= begun for attempt in it.attempts), "a life that was over cannot be read from"
    assert {attempt for it in load.gets for attempt in it.attempts} == set(range(1, 201))
    assert load.longest_s < 1.5
    print(f"{len(load.gets)} gets, {sum(load.whole())} whole, longest {load.longest_s:.3f} s")


def wait_for(load: Load, attempt: int) -> None:
    """Wait until a get has brought this attempt."""
    eventually(lambda: any(attempt in it.attempts for it in load.gets[-3:]) or load.failed, HEAL_S)


@pytest.mark.parametrize("by", ["tcp", "shm"])
def test_killed_under_load_with_another_replica(cluster: Cluster, by: str) -> None:
    changes = {"host_id": "one host"} if by == "shm" else {}
    for name in ("A", "B", "C"):
        cluster.start(name, changes)
    wanted = keys(CHUNKS, "two")
    cluster.put("A", wanted)
    cluster.know("C", "A")
    with cluster.reader("C") as other:
        assert other.get(wanted).chunks == CHUNKS
    cluster.know("B", "A")
    cluster.know("B", "C")
    with cluster.reader("B") as reader, Load(reader, wanted) as load:
        load.more(30)
        cluster.members["A"].kill()
        killed_s = time.monotonic()
        load.run_for(1.0)
        load.more(30)
    spread = sorted(it.seconds for it in load.gets)
    errors = sum(not it for it in load.whole())
    print(f"{by}: {len(load.gets)} gets, {errors} short; p99 {spread[len(spread) * 99 // 100] * 1e3:.1f} ms, ", end="")
    print(f"longest {load.longest_s * 1e3:.1f} ms; longest after the death ", end="")
    print(f"{max(it.seconds for it in load.gets if it.began_s > killed_s) * 1e3:.1f} ms")
    assert all(load.whole(begun_after_s=killed_s + 1.0)), "error rate 0 after 1 s"
    assert load.longest_s <= 1.5
    assert SMALL.slot_bytes(0) * CHUNKS == 512 << 10
