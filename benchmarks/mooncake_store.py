"""Objects in Mooncake's Store: its master, nodes and a client, one turn at a time; run by Mooncake's Python.

    PYTHONPATH=src .cache/peers/mooncake/bin/python benchmarks/mooncake_store.py OBJECT_BYTES_IN_ALL|faults

See `headwater.bench.objects` for what it is asked and answers. With `faults` it is asked
for `kill SECONDS`, `pause SECONDS` and `restart SECONDS` instead: see `Faults`. Everything is at Mooncake's defaults.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mooncake
from mooncake.store import MooncakeDistributedStore

from headwater.bench import objects

HOST = "127.0.0.1"
MASTER = Path(mooncake.__file__).parent / "mooncake_master"
LOCAL_BYTES = 64 << 20
MIB = 1 << 20
FAULT_OBJECTS = 32
SLOW_S = 0.1


def free_port() -> int:
    """A port that nobody has right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def connect(port: int, node_bytes: int) -> MooncakeDistributedStore:
    """A client of a master, or a node with so many bytes to lend."""
    store = MooncakeDistributedStore()
    if code := store.setup(HOST, "P2PHANDSHAKE", node_bytes, LOCAL_BYTES, "tcp", "", f"{HOST}:{port}"):
        raise SystemExit(f"Mooncake's store does not start: code {code}")
    return store


def serve_node(port: int, node_bytes: int) -> None:
    """Be a node until stdin ends."""
    answers = objects.answer_file()
    store = connect(port, node_bytes)
    answers.write("ready\n")
    answers.flush()
    sys.stdin.read()
    del store
    os.kill(os.getpid(), signal.SIGKILL)


class Cluster:
    """A master and nodes, each a process; a client is whoever asks for one."""

    def __init__(self, nodes: int, node_bytes: int) -> None:
        self.port = free_port()
        self.master = self.start_master()
        self.nodes = [self._start_node(node_bytes) for _ in range(nodes)]

    def start_master(self) -> subprocess.Popen[bytes]:
        """A master that answers, on the cluster's port."""
        command = [str(MASTER), f"-rpc_port={self.port}", f"-metrics_port={free_port()}", "-minloglevel=2"]
        master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until_s = time.monotonic() + 20.0
        while time.monotonic() < until_s:
            try:
                socket.create_connection((HOST, self.port)).close()
                return master
            except OSError:
                time.sleep(0.02)
        raise SystemExit("mooncake_master does not answer")

    def _start_node(self, node_bytes: int) -> subprocess.Popen[bytes]:
        """A node in a process of its own, which ends with ours."""
        command = [sys.executable, __file__, "node", str(self.port), str(node_bytes)]
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert node.stdout is not None
        if node.stdout.readline() != b"ready\n":
            raise SystemExit("a Mooncake node does not start")
        return node

    def connect(self) -> MooncakeDistributedStore:
        """A client."""
        return connect(self.port, 0)

    def end(self) -> None:
        """Nothing of it is left."""
        self.master.kill()
        self.master.wait()
        for node in self.nodes:
            node.kill()
            node.wait()


class Shelf:
    """See `objects.Shelf`."""

    def __init__(self, total_bytes: int) -> None:
        self._cluster = Cluster(1, 4 * total_bytes)
        self._store = self._cluster.connect()

    def put(self, items: Mapping[str, Any]) -> None:
        """See `objects.Shelf`."""
        for key, data in items.items():
            if code := self._store.put(key, data.tobytes()):
                raise SystemExit(f"Mooncake's put: code {code}")

    def get(self, key: str) -> bytes:
        """See `objects.Shelf`."""
        found: bytes = self._store.get(key)
        return found

    def into(self, keys: Sequence[str], places: Sequence[Any]) -> None:
        """See `objects.Shelf`."""
        sizes = [len(it) for it in places]
        addresses = [it.ctypes.data for it in places]
        if len(keys) == 1:
            got = [self._store.get_into(keys[0], addresses[0], sizes[0])]
        else:
            got = self._store.batch_get_into(list(keys), addresses, sizes)
        if got != sizes:
            raise SystemExit(f"Mooncake's get_into: {got}")

    def exists(self, keys: Sequence[str]) -> int:
        """See `objects.Shelf`."""
        if len(keys) == 1:
            return int(self._store.is_exist(keys[0]) == 1)
        return sum(it == 1 for it in self._store.batch_is_exist(list(keys)))

    def register(self, memory: Any) -> None:
        """See `objects.Shelf`."""
        if code := self._store.register_buffer(memory.ctypes.data, len(memory)):
            raise SystemExit(f"Mooncake's register_buffer: code {code}")

    def processes(self) -> Sequence[int]:
        """See `objects.Shelf`."""
        return [self._cluster.master.pid, *(it.pid for it in self._cluster.nodes)]

    def control(self, words: Sequence[str]) -> dict[str, Any]:
        """See `objects.Shelf`."""
        raise SystemExit(f"cannot {words[0]}")

    def end(self) -> None:
        """Nothing of it is left."""
        self._cluster.end()


class Faults:
    """Two nodes, objects on both, and a client that reads one after another."""

    def __init__(self) -> None:
        self.cluster = Cluster(2, 256 * MIB)
        self.store = self.cluster.connect()
        self.keys = [f"fault/{it}" for it in range(FAULT_OBJECTS)]
        self.data = {key: objects.pattern(number, MIB).tobytes() for number, key in enumerate(self.keys)}
        for key, data in self.data.items():
            if code := self.store.put(key, data):
                raise SystemExit(f"Mooncake's put: code {code}")

    def read(self, for_s: float, fault: Any, fault_after_s: float = 0.5) -> dict[str, Any]:
        """Read on for so long after the fault. A read has failed if it brings nothing of an object that exists."""
        began_s = time.monotonic()
        failed: list[tuple[float, float]] = []
        taken: list[float] = []
        wrong, fault_s, number = 0, 0.0, 0
        while not fault_s or time.monotonic() < fault_s + for_s:
            if not fault_s and time.monotonic() > began_s + fault_after_s:
                fault()
                fault_s = time.monotonic()
            key = self.keys[number % len(self.keys)]
            number += 1
            before_s = time.monotonic()
            exists = self.store.is_exist(key) == 1
            got = self.store.get(key) if exists else b""
            after_s = time.monotonic()
            if fault_s:
                taken.append(after_s - before_s)
                if exists and not got:
                    failed.append((after_s - fault_s, after_s - before_s))
            wrong += bool(got) and got != self.data[key]
            if not exists:
                time.sleep(0.001)
        return {
            "last_slow_failure_s": max((at for at, took_s in failed if took_s > SLOW_S), default=0.0),
            "last_failure_s": max((at for at, _ in failed), default=0.0),
            "reads": len(taken),
            "longest_s": max(taken),
            "p99_s": sorted(taken)[len(taken) * 99 // 100],
            "wrong": wrong,
        }


def kill(for_s: float) -> dict[str, Any]:
    """One of two nodes is killed."""
    faults = Faults()
    try:
        return faults.read(for_s, lambda: faults.cluster.nodes[0].send_signal(signal.SIGKILL))
    finally:
        faults.cluster.end()


def pause(for_s: float) -> dict[str, Any]:
    """One of two nodes is stopped, and goes on at the end."""
    faults = Faults()
    try:
        return faults.read(for_s, lambda: faults.cluster.nodes[0].send_signal(signal.SIGSTOP))
    finally:
        faults.cluster.end()


def restart(for_s: float) -> dict[str, Any]:
    """The master is killed and started anew: how many of the keys are there after so long, and when all were."""
    faults = Faults()
    cluster = faults.cluster
    try:
        cluster.master.kill()
        cluster.master.wait()
        fault_s = time.monotonic()
        cluster.master = cluster.start_master()
        store = cluster.connect()
        there, back_s = 0, -1.0
        while time.monotonic() < fault_s + for_s and back_s < 0:
            there = sum(it == 1 for it in store.batch_is_exist(faults.keys))
            if there == len(faults.keys):
                back_s = time.monotonic() - fault_s
            time.sleep(0.05)
        return {"back_s": back_s, "there": there, "of": len(faults.keys)}
    finally:
        cluster.end()


class OnlyFaults:
    """No objects: each fault has a cluster of its own."""

    def processes(self) -> Sequence[int]:
        """See `objects.Shelf`."""
        return []

    def register(self, memory: Any) -> None:
        """See `objects.Shelf`."""

    def control(self, words: Sequence[str]) -> dict[str, Any]:
        """See `objects.Shelf`."""
        return {"kill": kill, "pause": pause, "restart": restart}[words[0]](float(words[1]))


def main() -> None:
    """The command line."""
    if sys.argv[1] == "node":
        serve_node(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "faults":
        objects.main(OnlyFaults(), 0)  # type: ignore[arg-type]
    else:
        shelf = Shelf(int(sys.argv[1]))
        try:
            objects.main(shelf, int(sys.argv[1]))
        finally:
            shelf.end()
    os.kill(os.getpid(), signal.SIGKILL)  # its threads may hang at the end


if __name__ == "__main__":
    main()
