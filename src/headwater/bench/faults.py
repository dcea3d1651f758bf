"""What a fault costs those who go on reading: a node killed, a node stopped, a directory that comes back empty.

Two nodes hold the prompts, each its own; a third is asked for them, one after another, and forgets each, so that every
read goes to a holder. A read has *failed* if it was promised (the node said that more will come) and did not come; one
that is over within 100 ms costs no more than a miss does. What is gone with a node is a miss. Mooncake's master, nodes
and client go through the same, where a read has failed if it brings nothing of an object that the master says exists;
see `benchmarks/mooncake_store.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Unmeasured
from headwater.bench.peers import Peer, node_process
from headwater.bench.prompts import Asker, cluster_settings, prompt, wait_known
from headwater.bench.turns import MIB, peer_command, turner
from headwater.config import child_environment
from headwater.demo.processes import free_port, uninterrupted
from headwater.demo.valkey import answers, valkey_command
from headwater.errors import UnavailableError
from headwater.types import ChunkKey

CHUNK_BYTES, PROMPTS = MIB, 16
NODE_BYTES = 128 * MIB
READ_S = 10.0
"""How long a read may take: far more than any figure, so that none is cut short."""
BEFORE_S, AFTER_S, QUICK_AFTER_S = 0.5, 8.0, 1.5
RIVAL_KILL_S, RIVAL_PAUSE_S, RIVAL_RESTART_S = 13.0, 32.0, 10.0
RIVAL_WAIT_S = 120.0
BACK_S = 30.0
SLOW_S = 0.1
MOONCAKE = "Mooncake Store 0.3.13 with its master"


class Directory:
    """A Valkey server that can be replaced by an empty one at the same address."""

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """An empty server. Raises UnavailableError."""
        command = valkey_command(self.port, self._folder)
        with uninterrupted():
            self._server = subprocess.Popen(
                command, env=child_environment({}), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        until_s = time.monotonic() + 20.0
        while not answers(self.port):
            if time.monotonic() > until_s:
                raise UnavailableError("Valkey does not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it, and all that it knew."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


@dataclass(slots=True)
class Reads:
    """What the reads after a fault were like."""

    seconds: list[float] = field(default_factory=list)
    failed: list[tuple[float, float]] = field(default_factory=list)
    """When, after the fault, and how long it had taken."""
    wrong: int = 0

    def last_failure_s(self, slower_than_s: float) -> float:
        """When the last failed read that took so long was over; 0 if none failed."""
        return max((at for at, took_s in self.failed if took_s > slower_than_s), default=0.0)

    @property
    def p99_s(self) -> float:
        """So long or less for 99 of 100."""
        return sorted(self.seconds)[len(self.seconds) * 99 // 100]


class Cluster:
    """Two holders, one that is asked, and their directory."""

    def __init__(self, directory: Directory, holders: tuple[Peer, Peer], asked: Peer) -> None:
        self.directory, self.holders = directory, holders
        self.askers = [Asker(it, CHUNK_BYTES) for it in (*holders, asked)]
        self.prompts: list[list[ChunkKey]] = [prompt(it, 1, "fault") for it in range(PROMPTS)]
        for number, keys in enumerate(self.prompts):
            self.askers[number % 2].save(keys, number)
        for number, keys in enumerate(self.prompts):
            wait_known(self.askers[2], keys, number)

    def read(self, fault: Callable[[], object], for_s: float) -> Reads:
        """Read for so long after the fault."""
        found, asker, number = Reads(), self.askers[2], 0
        began_s, fault_s = time.monotonic(), 0.0
        while not fault_s or time.monotonic() < fault_s + for_s:
            if not fault_s and time.monotonic() > began_s + BEFORE_S:
                fault()
                fault_s = time.monotonic()
            keys = self.prompts[number % PROMPTS]
            got = asker.fetch(keys, number % PROMPTS, READ_S)
            if fault_s:
                found.seconds.append(got.seconds)
                if got.expected and not got.chunks:
                    found.failed.append((time.monotonic() - fault_s, got.seconds))
            found.wrong += not got.is_right
            asker.evict(keys)
            number += 1
        return found

    def known(self) -> int:
        """How many prompts the asked node finds somewhere else."""
        asker, there = self.askers[2], 0
        for number, keys in enumerate(self.prompts):
            there += asker.fetch(keys, number, READ_S).chunks == 1
            asker.evict(keys)
        return there

    def close(self) -> None:
        """Disconnect."""
        for it in self.askers:
            it.close()


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster that reads; gone when the context ends, whatever has been done to it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-")))
        directory = Directory(folder)
        stack.callback(directory.stop)
        directory.start()
        nodes = [
            stack.enter_context(node_process(NODE_BYTES, settings=cluster_settings(directory.port, folder, name)))
            for name in ("one", "two", "asked")
        ]
        for it in nodes:
            stack.callback(partial(os.kill, it.pid, signal.SIGCONT))
        found = Cluster(directory, (nodes[0], nodes[1]), nodes[2])
        stack.callback(found.close)
        yield found


def _signal(number: int) -> Callable[[Effort], Reads]:
    def measured(effort: Effort) -> Reads:
        with cluster() as it:
            return it.read(lambda: os.kill(it.holders[0].pid, number), QUICK_AFTER_S if effort.quick else AFTER_S)

    return measured


def _rival(request: str) -> dict[str, Any] | None:
    """Mooncake through the same; None where it is not installed or does not go on."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        try:
            command = [*peer_command("mooncake", "mooncake_store.py"), "faults"]
            with turner("Mooncake", command, Path(folder) / "log") as process:
                return process.ask(request, RIVAL_WAIT_S)
        except UnavailableError:
            return None


def _one(value: float, samples: int, rival: float | None = None) -> Reading:
    return Reading(value, value, value, samples, rival)


def measure_kill(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See KILL."""
    ours = _signal(signal.SIGKILL)(effort)
    theirs = None if effort.quick else _rival(f"kill {RIVAL_KILL_S}")
    count = len(ours.seconds)
    return {
        "fault/kill/errors-end": _one(ours.last_failure_s(SLOW_S), count, _of(theirs, "last_slow_failure_s")),
        "fault/kill/promises-end": _one(ours.last_failure_s(0.0), count, _of(theirs, "last_failure_s")),
        "fault/kill/p99": _one(ours.p99_s * 1e3, count, _of(theirs, "p99_s", 1e3)),
        "fault/kill/longest": _one(max(ours.seconds), count, _of(theirs, "longest_s")),
        "fault/kill/wrong": _one(ours.wrong, count, _of(theirs, "wrong")),
    }


def _of(answer: dict[str, Any] | None, name: str, scale: float = 1.0) -> float | None:
    return None if answer is None else answer[name] * scale


def measure_pause(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See PAUSE."""
    ours = _signal(signal.SIGSTOP)(effort)
    theirs = None if effort.quick else _rival(f"pause {RIVAL_PAUSE_S}")
    return {"fault/pause/longest": _one(max(ours.seconds), len(ours.seconds), _of(theirs, "longest_s"))}


def measure_restart(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See RESTART. While the directory is away and afterwards everything is read on; then the asked node is replaced by
    one that knows nothing, and what that finds counts."""
    with cluster() as it:
        away = it.read(it.directory.stop, QUICK_AFTER_S)
        began_s = time.monotonic()
        it.directory.start()
        missing = _until_known(it, began_s)
        if missing is not None:
            return dict.fromkeys((spec.name for spec in RESTART.specs), Unmeasured(missing))
        back_s = time.monotonic() - began_s
    theirs = None if effort.quick else _rival(f"restart {RIVAL_RESTART_S}")
    there = None if theirs is None else 100.0 * theirs["there"] / theirs["of"]
    return {
        "fault/directory/back": _one(back_s, PROMPTS),
        "fault/directory/keys": _one(100.0, PROMPTS, there),
        "fault/directory/failed": _one(len(away.failed), len(away.seconds)),
    }


def _until_known(it: Cluster, began_s: float) -> str | None:
    """Until a node that has only just come finds every prompt; None, or why that never was."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        settings = cluster_settings(it.directory.port, Path(folder), "fresh")
        with node_process(NODE_BYTES, settings=settings) as fresh:
            asker = Asker(fresh, CHUNK_BYTES)
            try:
                for number, keys in enumerate(it.prompts):
                    while asker.fetch(keys, number, READ_S).chunks != 1:
                        if time.monotonic() > began_s + BACK_S:
                            return f"{number} of {PROMPTS} prompts are found {BACK_S:.0f} s after the restart"
                        time.sleep(0.01)
            finally:
                asker.close()
    return None


def _experiment(title: str, measure: Callable[[Effort, frozenset[str]], Readings], *specs: Spec) -> Experiment:
    """One whose cluster may break down, which is a reason to have no figures and not to end the run."""

    def measured(effort: Effort, wanted: frozenset[str]) -> Readings:
        try:
            return measure(effort, wanted)
        except UnavailableError as error:
            return dict.fromkeys((it.name for it in specs), Unmeasured(str(error)))

    return Experiment(title, specs, measured)


KILL = _experiment(
    "A node is killed under read load",
    measure_kill,
    Spec(
        "fault/kill/errors-end",
        "s",
        f"until the last failed read that took more than {SLOW_S * 1e3:.0f} ms",
        Goal(at_least=False, plus=1.0),
        MOONCAKE,
    ),
    Spec("fault/kill/promises-end", "s", "until the last failed read", None, MOONCAKE),
    Spec("fault/kill/p99", "ms", "99th percentile of reads from the kill on", None, MOONCAKE),
    Spec("fault/kill/longest", "s", "the longest read from the kill on", None, MOONCAKE),
    Spec("fault/kill/wrong", "reads", "with other bytes than were saved", Goal(at_least=False, plus=0.0), MOONCAKE),
)
PAUSE = _experiment(
    "A node is stopped (SIGSTOP) under read load",
    measure_pause,
    Spec("fault/pause/longest", "s", "the longest read", Goal(at_least=False, plus=1.5), MOONCAKE),
)
RESTART = _experiment(
    "The directory is killed and comes back empty",
    measure_restart,
    Spec("fault/directory/back", "s", "until a new node finds every key", Goal(at_least=False, plus=10.0)),
    Spec("fault/directory/keys", "%", "of the keys are found again", Goal(at_least=True, plus=100.0), MOONCAKE),
    Spec("fault/directory/failed", "reads", "that failed meanwhile", Goal(at_least=False, plus=0.0)),
)
EXPERIMENTS = (KILL, PAUSE, RESTART)
