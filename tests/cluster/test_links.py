"""Links that lose, stall or creep, between hosts that are network namespaces of their own."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headwater.config import child_environment
from headwater.demo.namespaces import DEVICE, PEER_PORT
from headwater.demo.netlink import Netlink
from tests.cluster.cluster import TOKEN, Cluster, Got, Load, is_evicted, keys
from tests.cluster.payloads import layout_of
from tests.node.conftest import eventually

CHUNKS = 8
LONGEST_S = 1.5
HEAL_S = 10.0
HUGE_BYTES = 2 << 20
"""So much that it does not fit into the kernel's buffers."""
HUGE = layout_of(HUGE_BYTES)


def started(hosts: Cluster, name: str) -> list:
    """A, B and C, and a prompt on A that B has read."""
    for it in ("A", "B", "C"):
        hosts.start(it)
    wanted = keys(CHUNKS, name)
    hosts.put("A", wanted)
    hosts.know("B", "A")
    hosts.know("C", "A")
    with hosts.reader("B") as reader:
        assert reader.get(wanted).chunks == CHUNKS
    (link,) = [it for it in hosts.members["B"].status()["peers"] if it["read_bytes"]]
    assert link["transport"] == "tcp", "other hosts' memory cannot be mapped"
    return wanted


@pytest.mark.parametrize("lost", ["requests", "answers", "both"])
def test_two_hosts_lose_each_other_and_meet_again(hosts: Cluster, lost: str) -> None:
    wanted = started(hosts, f"cut-{lost}")
    ways = {"requests": [("B", "A")], "answers": [("A", "B")], "both": [("A", "B"), ("B", "A")]}[lost]
    assert hosts.lab is not None
    with hosts.reader("B") as reader, hosts.reader("C") as third, Load(reader, wanted, wait_s=5.0) as load:
        load.more(10)
        for way in ways:
            hosts.lab.cut(*way)
        cut_s = time.monotonic()
        load.run_for(1.5)
        assert third.get_again(wanted).chunks == CHUNKS, "others reach it as before"
        for way in ways:
            hosts.lab.mend(*way)
        mended_s = time.monotonic()
        eventually(lambda: any(load.whole(begun_after_s=mended_s)), HEAL_S)
        healed_s = time.monotonic() - mended_s
        load.more(5)
    print(f"{lost} lost for {mended_s - cut_s:.1f} s: longest get {load.longest_s:.3f} s; hit {healed_s:.2f} s after")
    assert load.longest_s <= LONGEST_S
    assert hosts.directory.listed(wanted) == CHUNKS


def test_a_host_is_unplugged_while_its_links_are_idle(hosts: Cluster) -> None:
    """Half-open connections: the next request finds out by itself, in a time that is known."""
    wanted = started(hosts, "idle")
    assert hosts.lab is not None
    hosts.lab.unplug("A")
    with hosts.reader("B") as reader:
        got = reader.get_again(wanted, wait_s=5.0)
        assert (got.chunks, got.seconds <= LONGEST_S) == (0, True), got
        hosts.lab.plug("A")
        eventually(lambda: reader.get_again(wanted).chunks == CHUNKS, HEAL_S)


def test_the_directory_is_out_of_a_hosts_reach(hosts: Cluster) -> None:
    wanted = started(hosts, "hub")
    assert hosts.lab is not None
    with hosts.reader("B") as reader, Load(reader, wanted) as load:
        load.more(5)
        with hosts.lab.at("B"):
            cut_off(hosts, on=True)
        load.run_for(2.0)
        with hosts.lab.at("B"):
            cut_off(hosts, on=False)
        load.more(5)
    print(f"{load.whole().count(False)} of {len(load.gets)} short, longest {load.longest_s:.3f} s")
    assert all(load.whole())
    assert load.longest_s <= LONGEST_S


def cut_off(hosts: Cluster, *, on: bool) -> None:
    """Lose what this host sends to the directory."""
    assert hosts.lab is not None
    with Netlink() as net:
        (net.misdirect if on else net.direct)(DEVICE, hosts.lab.hub_address)


def test_a_creeping_link_gives_right_bytes_or_none(hosts: Cluster) -> None:
    """A read takes ten times as long as its lease, and the holder fills the memory with other bytes meanwhile. Nobody
    has read the chunks before, so that no checksum is known that could tell."""
    room = {"host_memory": CHUNKS * HUGE_BYTES, "slab": HUGE_BYTES}
    hosts.start("A", {**room, "load_lease_s": 0.05})
    hosts.start("B", room)
    hosts.know("B", "A")
    assert hosts.lab is not None
    holder = hosts.members["A"]
    gets: list[Got] = []
    with hosts.reader("B", HUGE) as reader, hosts.reader("A", HUGE) as writer:
        for attempt in range(1, 4):
            wanted, others = keys(CHUNKS, f"creep-{attempt}"), keys(CHUNKS, f"other-{attempt}")
            assert writer.put(wanted, attempt) == CHUNKS
            hosts.listed(wanted)
            lent = holder.status()["served"]["chunks"]
            hosts.lab.throttle("A", 2 * CHUNKS * HUGE_BYTES)
            try:
                getting = threading.Thread(target=lambda it=wanted: gets.append(reader.get(it, wait_s=1.0)))
                getting.start()
                eventually(lambda lent=lent: holder.status()["served"]["chunks"] > lent)
                eventually(lambda it=wanted: is_evicted(writer, it))
                assert writer.put(others, attempt) == CHUNKS
                getting.join()
            finally:
                hosts.lab.throttle("A", None)
            assert len(gets) == attempt, "a wrong byte has ended the thread"
            assert is_evicted(writer, others)
        print([(it.chunks, round(it.seconds, 2)) for it in gets], holder.status()["served"])
        assert max(it.seconds for it in gets) <= LONGEST_S
        assert any(it.chunks < CHUNKS for it in gets), "no lease has ended before its read"
        assert writer.put(wanted, 9) == CHUNKS
        hosts.listed(wanted)
        reader.evict(wanted)
        eventually(lambda: reader.get_again(wanted).attempts == {9}, HEAL_S)


def test_what_listens(hosts: Cluster, tmp_path: Path) -> None:
    """A real `headwater node`: its peer port, metrics on loopback, nothing else; and nothing is said to strangers."""
    assert hosts.lab is not None
    command = [sys.executable, "-m", "headwater", "node", "--socket", f"unix:{tmp_path}/n.sock"]
    settings = {**hosts.settings("C"), "host_memory": "16MiB", "slab": "1MiB", "drain_s": "0.1s", "prefault": None}
    for name, value in settings.items():
        command += [f"--{name.replace('_', '-')}", str(value)] if value is not None else [f"--no-{name}"]
    command += ["--metrics", "127.0.0.1:7480"]
    with hosts.lab.at("C"), subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment({})) as node:
        try:
            assert node.stdout is not None
            assert b"serving" in node.stdout.readline()
            assert listening() == {("0.0.0.0", PEER_PORT), ("127.0.0.1", 7480)}
            for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 64, b"\x16\x03\x01" + b"\xff" * 200, TOKEN.encode(), b""):
                with socket.create_connection(("127.0.0.1", PEER_PORT), 2.0) as stranger:
                    stranger.sendall(said)
                    if not said:
                        stranger.shutdown(socket.SHUT_WR)
                    stranger.settimeout(5.0)
                    heard = stranger.recv(1 << 16)
                    assert len(heard) <= 600, "at most a refusal"
                    assert TOKEN.encode() not in heard
        finally:
            node.send_signal(signal.SIGTERM)
    assert node.returncode == 0


def listening() -> set[tuple[str, int]]:
    """What accepts connections or packets in this thread's namespace."""
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if name.startswith("tcp") and fields[3] != "0A":
                continue
            assert re.fullmatch(r"[0-9A-F]{8}", address), f"{name} listens at {address}"
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found
