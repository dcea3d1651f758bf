"""Processes that stop in the middle of things and go on later: nobody waits long for them, and they do no harm."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests.cluster.cluster import Cluster, Got, Load, is_evicted, keys
from tests.cluster.payloads import layout_of
from tests.node.conftest import eventually

CHUNKS = 8
LONGEST_S = 1.5
HEAL_S = 10.0
MANY, LARGE_BYTES = 16, 2 << 20
LARGE = layout_of(LARGE_BYTES)


@pytest.mark.parametrize("by", ["tcp", "shm"])
def test_a_paused_holder(cluster: Cluster, by: str) -> None:
    changes = {"host_id": "one host"} if by == "shm" else {}
    for name in ("A", "B"):
        cluster.start(name, changes)
    wanted = keys(CHUNKS, "pause")
    cluster.put("A", wanted)
    cluster.know("B", "A")
    holder = cluster.members["A"]
    with cluster.reader("B") as reader, Load(reader, wanted, wait_s=5.0) as load:
        load.more(20)
        holder.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        load.run_for(2.0)
        holder.signal(signal.SIGCONT)
        went_on_s = time.monotonic()
        healed_s = eventually(lambda: any(load.whole(begun_after_s=went_on_s)), HEAL_S)
        load.more(20)
    print(f"{by}: longest get {load.longest_s:.3f} s while the holder was paused for {went_on_s - stopped_s:.1f} s; ")
    print(f"first hit {healed_s:.3f} s after it went on")
    assert load.longest_s <= LONGEST_S
    assert all(load.whole()[-5:])


def test_a_paused_holder_with_another_replica(cluster: Cluster) -> None:
    for name in ("A", "B", "C"):
        cluster.start(name)
    wanted = keys(CHUNKS, "pause-two")
    cluster.put("A", wanted)
    cluster.know("C", "A")
    with cluster.reader("C") as other:
        assert other.get(wanted).chunks == CHUNKS
    cluster.know("B", "A")
    cluster.know("B", "C")
    with cluster.reader("B") as reader, Load(reader, wanted, wait_s=5.0) as load:
        load.more(20)
        cluster.members["A"].signal(signal.SIGSTOP)
        load.run_for(1.5)
        cluster.members["A"].signal(signal.SIGCONT)
        cluster.members["C"].signal(signal.SIGSTOP)
        load.run_for(1.5)
        cluster.members["C"].signal(signal.SIGCONT)
        load.more(20)
    print(f"{len(load.gets)} gets, {load.whole().count(False)} short, longest {load.longest_s:.3f} s")
    assert load.longest_s <= LONGEST_S
    assert load.whole().count(False) <= 2, "the other one has it"


def test_a_paused_reader_wakes_up_to_other_bytes(cluster: Cluster) -> None:
    """It is stopped in the middle of a copy from the holder's memory, for longer than its lease lasts; meanwhile the
    holder uses that memory for something else. No checksum is known that could tell."""
    room = {"host_memory": MANY * LARGE_BYTES, "slab": LARGE_BYTES, "host_id": "one host"}
    holder = cluster.start("A", {**room, "load_lease_s": 0.05})
    paused = cluster.start("B", room)
    cluster.know("B", "A")
    gets: list[Got] = []
    with cluster.reader("B", LARGE) as reader, cluster.reader("A", LARGE) as writer:
        for attempt in range(1, 7):
            wanted, others = keys(MANY, f"mine-{attempt}"), keys(MANY, f"other-{attempt}")
            assert writer.put(wanted, attempt) == MANY
            cluster.listed(wanted)
            lent = holder.status()["served"]["chunks"]
            getting = threading.Thread(target=lambda it=wanted: gets.append(reader.get(it)))
            getting.start()
            try:
                eventually(lambda lent=lent: holder.status()["served"]["chunks"] > lent)
                paused.signal(signal.SIGSTOP)
                eventually(lambda it=wanted: is_evicted(writer, it))
                assert writer.put(others, attempt) == MANY
            finally:
                paused.signal(signal.SIGCONT)
            getting.join()
            assert len(gets) == attempt, "a wrong byte has ended the thread"
            assert is_evicted(writer, others)
    print([(it.chunks, round(it.seconds, 2)) for it in gets])
    assert any(it.chunks < MANY for it in gets), "none was stopped in the middle"


def test_the_beat_of_a_paused_node_is_late_and_nothing_of_it_is_lost(cluster: Cluster) -> None:
    for name in ("A", "B"):
        cluster.start(name)
    wanted = keys(CHUNKS, "beat")
    cluster.put("A", wanted)
    cluster.know("B", "A")
    number = cluster.members["A"].status()["number"]
    cluster.members["A"].signal(signal.SIGSTOP)
    threading.Event().wait(1.0)
    cluster.members["A"].signal(signal.SIGCONT)
    assert cluster.members["A"].status()["number"] == number, "it is the same life"
    assert cluster.directory.listed(wanted) == CHUNKS
    with cluster.reader("B") as reader:
        eventually(lambda: reader.get_again(wanted).chunks == CHUNKS, HEAL_S)
