"""The tiers against LMCache's adapters for the same places: files on this disk, and one Valkey server.

A *turn* stores or loads all chunks once, ours and then theirs or the other way round, in the same rounds. Theirs are
moved by `benchmarks/lmcache_tiers.py` in a process of its own, from and to its own memory, and it says what a turn
took. Durable is compared with durable: a store is over when the files are synced, and a load finds nothing in the page
cache. What is different stays different: ours writes a header, verifies each chunk that it reads, overwrites its slots
and takes two threads; LMCache checks nothing, makes a new file a chunk and takes as many threads as it likes.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headwater.bench import disk, remote, tools
from headwater.bench.harness import GB, Effort, Experiment, Goal, Reading, Readings, Series, Spec, Unmeasured
from headwater.config import child_environment
from headwater.demo.processes import uninterrupted
from headwater.errors import UnavailableError

PYTHON = Path(".cache/peers/lmcache/bin/python")
DRIVER = Path("benchmarks/lmcache_tiers.py")
MISSING = "run benchmarks/install_peers.py"
SIZES = disk.SIZES
CPU_SIZE = "2MiB"
TOTALS = {True: (remote.QUICK_BYTES, remote.TOTAL_BYTES), False: (disk.QUICK_BYTES, disk.TOTAL_BYTES)}
"""Quick and thorough, for servers and for files."""
ROUNDS_MAX = 12
READY_S, TURN_S, STOP_S = 120.0, 120.0, 20.0
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING", "PYTHONPATH": None, "PYTHONHOME": None}

Turn = Callable[[str], tuple[float, float]]
"""Does one `store` or `load`, and says how many seconds and CPU seconds it took."""


@dataclass(frozen=True, slots=True)
class Rival:
    """One way in which LMCache keeps chunks; `name` is that of its figures, `options` are for the driver."""

    name: str
    adapter: str
    about: str
    sizes: tuple[str, ...] = tuple(SIZES)
    serves: bool = False
    """Whether it needs a server; it writes files otherwise."""
    options: tuple[str, ...] = ()

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its figures."""
        ahead = Goal(at_least=True, factor=1.0)
        found = [
            Spec(f"lmcache/{self.name}/{verb}/{size}", "GB/s", f"ours: {words} {size}", ahead, self.about)
            for size in self.sizes
            for verb, words in (("store", "chunks of"), ("load", "verified chunks of"))
        ]
        about = f"CPU time of this process a GB moved, both ways, {CPU_SIZE} chunks"
        return (*found, Spec(f"lmcache/{self.name}/cpu", "s/GB", about, None, self.about))


RIVALS = (
    Rival("fs", "fs", "LMCache 0.5.6 fs, synced"),
    Rival("fs_native", "fs_native", "LMCache 0.5.6 fs_native, 4 workers, synced"),
    Rival(
        "fs_native_direct",
        "fs_native",
        "LMCache 0.5.6 fs_native, use_odirect (not its default), synced",
        options=("--direct",),
    ),
    Rival("resp", "resp", "LMCache 0.5.6 resp, 8 workers", serves=True),
    Rival("redis", "redis", "LMCache 0.5.6 redis://", ("2MiB",), serves=True),
)


def measure(rival: Rival, effort: Effort, wanted: frozenset[str]) -> Readings:
    """All figures of one rival that are wanted, and why if they cannot be had."""
    names = [it.name for it in rival.specs if it.name in wanted]
    if not PYTHON.exists() or not DRIVER.exists():
        return dict.fromkeys(names, Unmeasured(MISSING))
    readings: dict[str, Reading | Unmeasured] = {}
    try:
        for size in rival.sizes:
            if any(it.endswith(f"/{size}") or (it.endswith("/cpu") and size == CPU_SIZE) for it in names):
                readings |= _measure(rival, size, effort)
    except UnavailableError as error:
        return {**dict.fromkeys(names, Unmeasured(str(error))), **readings}
    return readings


def _measure(rival: Rival, size: str, effort: Effort) -> Readings:
    quick, thorough = TOTALS[rival.serves]
    total = quick if effort.quick else thorough
    with ExitStack() as stack:
        directory = stack.enter_context(disk.scratch())
        if rival.serves:
            port = stack.enter_context(tools.valkey(directory))
            target = f"redis://127.0.0.1:{port}"
            moves = _moves(stack.enter_context(closing(remote.Chunks(port, SIZES[size], total))), lambda: None)
        else:
            target, tier = str(directory / "lmcache"), directory / "tier"
            moves = _moves(stack.enter_context(closing(disk.Chunks(tier, SIZES[size], total))), partial(_sync, tier))
        theirs = stack.enter_context(_process(rival, target, SIZES[size], total, directory / "log"))
        return _compare(rival, size, effort, {"ours": _timed(moves, effort), "theirs": theirs}, total)


def _moves(chunks: disk.Chunks | remote.Chunks, sync: Callable[[], None]) -> dict[str, Callable[[], None]]:
    def store() -> None:
        chunks.move(chunks.tier.write)
        sync()

    return {"store": store, "load": lambda: chunks.move(chunks.tier.read)}


def _sync(directory: Path) -> None:
    """Wait until the device has what was written past the page cache too: a power cut must not take it away."""
    for path in sorted(it for it in directory.iterdir() if it.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.close(descriptor)


def _timed(moves: Mapping[str, Callable[[], None]], effort: Effort) -> Turn:
    def turn(verb: str) -> tuple[float, float]:
        cpu, began_s = effort.clocks.cpu(), effort.clocks.wall()
        moves[verb]()
        return effort.clocks.wall() - began_s, effort.clocks.cpu() - cpu

    return turn


def _compare(rival: Rival, size: str, effort: Effort, sides: Mapping[str, Turn], total: int) -> Readings:
    """Rounds of stores and loads by both sides; the first store of each is not counted."""
    verbs = ("store", "load")
    series = {side: {verb: Series(total / GB) for verb in verbs} for side in sides}
    for turn in sides.values():
        for verb in verbs:
            turn(verb)
    for number in range(min(effort.rounds, ROUNDS_MAX)):
        for verb in verbs:
            order = [*sides.items()]
            for side, turn in order if number % 2 else reversed(order):
                seconds, cpu_s = turn(verb)
                series[side][verb].seconds.append(seconds)
                series[side][verb].cpu_s += cpu_s
            effort.after_turn()
    ours, theirs = series["ours"], series["theirs"]
    readings = {f"lmcache/{rival.name}/{it}/{size}": ours[it].rate(theirs[it], in_gb=True) for it in verbs}
    if size == CPU_SIZE:
        value, beside = _cpu(ours), _cpu(theirs)
        samples = sum(len(it.seconds) for it in ours.values())
        readings[f"lmcache/{rival.name}/cpu"] = Reading(value, value, value, samples, beside)
    return readings


def _cpu(series: Mapping[str, Series]) -> float:
    moved = sum(it.amount * len(it.seconds) for it in series.values())
    return sum(it.cpu_s for it in series.values()) / moved


@contextmanager
def _process(rival: Rival, target: str, chunk_bytes: int, total: int, log: Path) -> Iterator[Turn]:
    """LMCache in its own Python, ready; gone when the context ends. Raises UnavailableError with its last words."""
    command = [str(PYTHON), str(DRIVER), rival.adapter, target, f"{chunk_bytes}", f"{total}", *rival.options]
    process = None
    try:
        with open(log, "wb") as words, uninterrupted():
            process = subprocess.Popen(
                command,
                env=child_environment(QUIET),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                bufsize=0,
            )
        _answer(process, READY_S, log)
        yield partial(_ask, process, log)
    finally:
        if process is not None:
            _stop(process)


def _ask(process: subprocess.Popen[bytes], log: Path, verb: str) -> tuple[float, float]:
    assert process.stdin is not None
    try:
        process.stdin.write(f"{verb}\n".encode())
    except BrokenPipeError:
        raise _failure(process, log) from None
    answer = _answer(process, TURN_S, log)
    return float(answer["seconds"]), float(answer["cpu_s"])


def _answer(process: subprocess.Popen[bytes], patience_s: float, log: Path) -> dict[str, float]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], patience_s)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise _failure(process, log)
    answer: dict[str, float] = json.loads(line)
    return answer


def _failure(process: subprocess.Popen[bytes], log: Path) -> UnavailableError:
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return UnavailableError(f"LMCache does not go on: {last[0][-300:] if last else 'it says nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let it end by itself, or end it; its descriptors are closed."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


EXPERIMENTS = tuple(
    Experiment(f"Ours and LMCache's {it.name}, in the same rounds", it.specs, partial(measure, it)) for it in RIVALS
)
