"""`headwater bench store`: objects and prompts in nodes, against C memcpy, bare C over TCP and Mooncake's Store.

Small calls are timed under two conditions, with all cores for everybody and with everybody on one core, because waking
another core costs several times what such a call does. What is moved is cold: random objects into random places.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from headwater.bench import faults, objects, tools
from headwater.bench.harness import (
    Contender,
    Effort,
    Experiment,
    Goal,
    Reading,
    Readings,
    Series,
    Spec,
    Suite,
    Unmeasured,
)
from headwater.bench.turns import MIB, Cell, Contest, Samples, compile_bare, peer_command
from headwater.directory.open import open_directory
from headwater.types import KEY_BYTES, Announced, ChunkKey, Member, Tier, chunk_name

US, MS = 1e6, 1e3
KIB = 1024
QUICK_AMOUNT_BYTES, POOL_BYTES = 32 * MIB, 512 * MIB
TURN_BYTES, QUICK_TURN_BYTES = 128 * MIB, 16 * MIB
TURN_CALLS, QUICK_TURN_CALLS = 1000, 50
ROUNDS_MAX = 12
MANY_KEYS = 1000
LOCATED, HOLDERS = 512, 3
OTHERS, BATCH = 20_000, 1000
"""Chunks that the directory knows besides: a server keeps few of them in another way, and that is slower."""
CALL_S = 10.0
MEMCPY = "C memcpy, one thread, cold, same sizes"
BARE = "bare C: one recvmsg into the same scattered blocks"
MOONCAKE = "Mooncake Store 0.3.13, node in another process"
IDLE, ONE_CORE = "idle", "one-core"
WHERE = {IDLE: "all", ONE_CORE: "one"}


def _amount(effort: Effort) -> int:
    return QUICK_AMOUNT_BYTES if effort.quick else objects.AMOUNT_BYTES


def _ours(effort: Effort) -> list[str]:
    return [sys.executable, "-m", "headwater.bench.storer", str(_amount(effort))]


def _prompts(effort: Effort) -> list[str]:
    return [sys.executable, "-m", "headwater.bench.prompts", str(2 * _amount(effort))]


def _mooncake(effort: Effort) -> list[str]:
    return [*peer_command("mooncake", "mooncake_store.py"), str(_amount(effort))]


def _bare(directory: Path) -> list[str]:
    return [str(compile_bare(directory)), str(POOL_BYTES // MIB)]


@contextmanager
def contest(effort: Effort, whos: Sequence[str]) -> Iterator[Contest]:
    """Those that take part, as far as they can."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name, Contest() as found:
        directory = Path(name)
        entrants: dict[str, tuple[str, Callable[[], Sequence[str]]]] = {
            "ours": ("our Store", partial(_ours, effort)),
            "prompts": ("our cluster", partial(_prompts, effort)),
            "mooncake": ("Mooncake", partial(_mooncake, effort)),
            "bare": ("the yardstick in C", partial(_bare, directory)),
        }
        for who in whos:
            found.add(who, *entrants[who], directory / f"{who}.log")
        yield found


def _rounds(effort: Effort) -> int:
    return min(effort.rounds, ROUNDS_MAX)


# ---- small calls --------------------------------------------------------------------------------------------

SMALL = {
    "get/4KiB": ("get", 4 * KIB, 1),
    "exists/one-key": ("exists", 4 * KIB, 1),
    "exists/batch": ("exists", 4 * KIB, MANY_KEYS),
}


def measure_small(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See SMALL_CALLS."""
    calls = QUICK_TURN_CALLS if effort.quick else TURN_CALLS
    plan: dict[str, dict[str, Cell]] = {}
    for name, (verb, size, batch) in SMALL.items():
        for condition, where in WHERE.items():
            if any(it.startswith(f"store/{name}/{condition}") for it in wanted):
                cell = Cell(size, batch, max(calls // batch, 20), verb, where)
                plan[f"{name}/{condition}"] = dict.fromkeys(("ours", "mooncake"), cell)
    readings: dict[str, Reading | Unmeasured] = {}
    with contest(effort, ("ours", "mooncake")) as it:
        samples = it.run(plan, _rounds(effort), effort.after_turn)
        for name in plan:
            if reason := it.reasons.get("ours"):
                readings |= {spec.name: Unmeasured(reason) for spec in SMALL_CALLS.specs}
                break
            has_theirs = "mooncake" not in it.reasons
            readings |= _small_readings(name, samples, has_theirs)
    return readings


def _small_readings(name: str, samples: Mapping[tuple[str, str], Samples], has_theirs: bool) -> Readings:
    ours, theirs = (Series(1.0, samples[name, who].calls) for who in ("ours", "mooncake"))
    beside = theirs if has_theirs else None
    if name.startswith("exists/batch"):
        rates = [Series(float(MANY_KEYS), it.seconds) for it in (ours, theirs)]
        return {f"store/{name}/rate": rates[0].rate(rates[1] if has_theirs else None)}
    return {
        f"store/{name}/p50": ours.latency(US, yardstick=beside),
        f"store/{name}/p99": ours.latency(US, 99, yardstick=beside),
    }


def _small_specs() -> tuple[Spec, ...]:
    limits = {"get/4KiB": (75, 25), "exists/one-key": (60, 20)}
    words = {IDLE: "all cores for everybody", ONE_CORE: "everybody on one core"}
    specs = []
    for name, (idle, one) in limits.items():
        about = "an object of 4 KiB as bytes" if name.startswith("get") else "whether an object is there"
        for condition, limit in ((IDLE, idle), (ONE_CORE, one)):
            goal = Goal(at_least=False, plus=limit)
            specs.append(Spec(f"store/{name}/{condition}/p50", "us", f"{about}, {words[condition]}", goal, MOONCAKE))
            specs.append(Spec(f"store/{name}/{condition}/p99", "us", "99th percentile", None, MOONCAKE))
    for condition in WHERE:
        about = f"{MANY_KEYS:,} keys a call, all there, {words[condition]}"
        goal = Goal(at_least=True, plus=2e6)
        specs.append(Spec(f"store/exists/batch/{condition}/rate", "keys/s", about, goal, MOONCAKE))
    return tuple(specs)


SMALL_CALLS = Experiment("Small calls to the Store", _small_specs(), measure_small)

# ---- objects of megabytes -----------------------------------------------------------------------------------

LARGE = ((MIB, 1), (4 * MIB, 1), (MIB, 32))


def _cells(effort: Effort, shapes: Sequence[tuple[int, int]], verb: str, how: str = "all") -> dict[str, Cell]:
    turn = QUICK_TURN_BYTES if effort.quick else TURN_BYTES
    amount = _amount(effort)
    cells = {}
    for size, batch in shapes:
        fits = max(min(batch, amount // (4 * size)), 1)
        cells[Cell(size, batch, 1).name] = Cell(size, fits, max(turn // (size * fits), 2), verb, how)
    return cells


def _beside(
    effort: Effort, wanted: frozenset[str], figure: str, ours: str, cells: Mapping[str, Cell], bare_verb: str
) -> Readings:
    """For each wanted cell, `figure/NAME` of ours beside the bare yardstick, and the same beside Mooncake's `into`."""
    beside_mooncake = f"mooncake/{figure.partition('/')[2]}"
    plan = {}
    for name, cell in cells.items():
        if wanted & {f"{figure}/{name}", f"{beside_mooncake}/{name}"}:
            bare = replace(cell, verb=bare_verb, how="cold")
            plan[name] = {ours: cell, "bare": bare, "mooncake": replace(cell, verb="into", how="all")}
    with contest(effort, (ours, "bare", "mooncake")) as it:
        samples = it.run(plan, _rounds(effort), effort.after_turn)
        readings: dict[str, Reading | Unmeasured] = {}
        for name in plan:
            readings[f"{figure}/{name}"] = it.compare(ours, "bare", samples, name)
            readings[f"{beside_mooncake}/{name}"] = it.compare(ours, "mooncake", samples, name)
        return readings


def measure_large(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See LARGE_GETS."""
    return _beside(effort, wanted, "store/into", "ours", _cells(effort, LARGE, "into"), "memcpy")


def _large_specs() -> tuple[Spec, ...]:
    about = "a node's objects into the caller's memory, verified"
    names = [Cell(size, batch, 1).name for size, batch in LARGE]
    ours = [Spec(f"store/into/{it}", "GB/s", about, Goal(at_least=True, factor=1.25), MEMCPY) for it in names]
    ahead = Goal(at_least=True, factor=1.0)
    return (*ours, *(Spec(f"mooncake/into/{it}", "GB/s", f"ours: {about}", ahead, MOONCAKE) for it in names))


LARGE_GETS = Experiment("Objects of megabytes from a node of this host", _large_specs(), measure_large)

# ---- prompts from another node ------------------------------------------------------------------------------

FETCHES = ((MIB, 1), (MIB, 32), (4 * MIB, 8))


def measure_fetch(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See FETCHING."""
    return _beside(effort, wanted, "cluster/fetch", "prompts", _cells(effort, FETCHES, "fetch"), "read")


def _fetch_specs() -> tuple[Spec, ...]:
    about = "chunks of a prompt from another node over TCP, from the question to the lease, verified"
    names = [Cell(size, batch, 1).name for size, batch in FETCHES]
    ours = [Spec(f"cluster/fetch/{it}", "GB/s", about, None, BARE) for it in names]
    ahead = Goal(at_least=True, factor=1.0)
    return (*ours, *(Spec(f"mooncake/fetch/{it}", "GB/s", f"ours: {about}", ahead, MOONCAKE) for it in names))


FETCHING = Experiment("Prompts that another node has", _fetch_specs(), measure_fetch)

# ---- the directory ------------------------------------------------------------------------------------------


def measure_locate(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See LOCATING."""
    known = [chunk_name(0, ChunkKey(sha256(b"%d" % it).digest()[:KEY_BYTES])) for it in range(LOCATED + OTHERS)]
    names = known[:LOCATED]
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder, tools.valkey(Path(folder)) as port:
        directory = open_directory(f"valkey://127.0.0.1:{port}", "bench")
        try:
            for number in range(HOLDERS):
                mine = directory.join(Member(f"holder-{number}", 1, f"127.0.0.1:{number + 1}"), _soon())
                told = names if number else known
                for serial, first in enumerate(range(0, len(told), BATCH), 1):
                    batch = [Announced(it, Tier.HOST, True) for it in told[first : first + BATCH]]
                    directory.announce(mine, serial, batch, _soon())

            def locate() -> None:
                found = directory.locate(names, _soon())
                assert all(len(it) == HOLDERS for it in found), "the directory knows every holder of every chunk"

            calls = 10 if effort.quick else 100
            series = effort.interleave([Contender("locate", locate, 1.0, calls)])["locate"]
        finally:
            directory.close()
    return {"directory/locate/p50": series.latency(MS), "directory/locate/p99": series.latency(MS, 99)}


def _soon() -> float:
    return time.monotonic() + CALL_S


LOCATING = Experiment(
    "Where the chunks of a prompt are, in one round trip to Valkey",
    (
        Spec(
            "directory/locate/p50",
            "ms",
            f"{LOCATED} chunks with {HOLDERS} holders each, of {OTHERS:,}",
            Goal(at_least=False, plus=1.5),
        ),
        Spec("directory/locate/p99", "ms", "99th percentile"),
    ),
    measure_locate,
)

SUITE = Suite(
    "store",
    "the Store, prompts of other nodes, the directory and faults, against memcpy and Mooncake",
    (SMALL_CALLS, LARGE_GETS, FETCHING, LOCATING, *faults.EXPERIMENTS),
)
