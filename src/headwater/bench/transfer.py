"""`headwater bench transfer`: blocks between two processes, against bare C, Mooncake's Transfer Engine and NIXL.

Each contender is two processes with pools larger than the caches; offsets walk through both in random orders. Ours are
the public `headwater.transfer.Engine`: named, leased, with a deadline, authenticated, and verified by checksums, which
nobody else here does. A *turn* is the same number of bytes for all, and all take turns in the same rounds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Suite, Unmeasured
from headwater.bench.turns import MIB, Cell, Contest, Samples, compile_bare, peer_command

POOL_BYTES, QUICK_POOL_BYTES = 512 * MIB, 64 * MIB
TURN_BYTES, QUICK_TURN_BYTES = 256 * MIB, 32 * MIB
ROUNDS_MAX = 12
KIB = 1024
SHAPES = ((MIB, 1), (MIB, 32), (4 * MIB, 1), (4 * MIB, 32), (64 * KIB, 128))
CPU_CELL = "1MiB/x32"
STALL_S = 0.1
STALL_TRANSFERS, QUICK_STALL_TRANSFERS, STALL_TURN = 10_000, 200, 500
BARE = "bare C: one recvmsg into the same scattered blocks"
MEMCPY = "C memcpy, one thread, cold, same blocks"
MOONCAKE = "Mooncake Transfer Engine 0.3.13, TCP"
CMA, NIXL_TCP = "NIXL 1.5.1, UCX cma", "NIXL 1.5.1, UCX tcp"


def _ours(kind: str, pool_bytes: int, _: Path) -> list[str]:
    return [sys.executable, "-m", "headwater.bench.mover", kind, str(pool_bytes)]


def _bare(pool_bytes: int, directory: Path) -> list[str]:
    return [str(compile_bare(directory)), str(pool_bytes // MIB)]


def _mooncake(pool_bytes: int, _: Path) -> list[str]:
    return [*peer_command("mooncake", "mooncake_transfer.py"), str(pool_bytes)]


def _nixl(transport: str, pool_bytes: int, _: Path) -> list[str]:
    return [*peer_command("nixl", "nixl_transfer.py"), transport, str(pool_bytes)]


@dataclass(frozen=True, slots=True)
class Entrant:
    """Who may take part: what its failures are called, and how it is started."""

    title: str
    command: Callable[[int, Path], Sequence[str]]
    verb: str = ""
    """What it does in a cell, if not what ours do."""


ENTRANTS = {
    "tcp": Entrant("ours over TCP", partial(_ours, "tcp")),
    "unchecked": Entrant("our TCP transport without checksums", partial(_ours, "tcp-unchecked")),
    "shm": Entrant("ours over shared memory", partial(_ours, "shm")),
    "bare": Entrant("the yardstick in C", _bare),
    "memcpy": Entrant("the yardstick in C", _bare, verb="memcpy"),
    "mooncake": Entrant("Mooncake", _mooncake),
    "cma": Entrant("NIXL", partial(_nixl, "cma")),
    "nixl-tcp": Entrant("NIXL", partial(_nixl, "tcp")),
}


@dataclass(frozen=True, slots=True)
class Duel:
    """One figure: ours against theirs in one cell. `of` is `rate` or `cpu`."""

    spec: Spec
    ours: str
    theirs: str
    cell: str
    of: str = "rate"


def _cells(effort: Effort, shapes: Sequence[tuple[int, int]], verb: str) -> dict[str, Cell]:
    """What a turn does, for each shape that the pools have room for."""
    turn, pool = (QUICK_TURN_BYTES, QUICK_POOL_BYTES) if effort.quick else (TURN_BYTES, POOL_BYTES)
    cells = {}
    for block_bytes, batch in shapes:
        cell = Cell(block_bytes, min(batch, pool // block_bytes), max(turn // (block_bytes * batch), 1), verb)
        cells[replace(cell, batch=batch).name] = cell
    return cells


def measure(
    duels: Sequence[Duel], shapes: Sequence[tuple[int, int]], verb: str, effort: Effort, wanted: frozenset[str]
) -> Readings:
    """All wanted duels of an experiment, in the same rounds."""
    chosen = [it for it in duels if it.spec.name in wanted]
    pool = QUICK_POOL_BYTES if effort.quick else POOL_BYTES
    plan: dict[str, dict[str, Cell]] = {}
    for name, cell in _cells(effort, shapes, verb).items():
        whos = dict.fromkeys(who for it in chosen if it.cell == name for who in (it.ours, it.theirs))
        if whos:
            plan[name] = {who: replace(cell, verb=ENTRANTS[who].verb or verb) for who in whos}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory, Contest() as contest:
        enter(contest, dict.fromkeys(who for sides in plan.values() for who in sides), pool, Path(directory))
        samples = contest.run(plan, min(effort.rounds, ROUNDS_MAX), effort.after_turn)
        return {it.spec.name: _judge(contest, it, samples) for it in chosen}


def enter(contest: Contest, whos: Mapping[str, object], pool_bytes: int, directory: Path) -> None:
    """Start the entrants."""
    for who in whos:
        entrant = ENTRANTS[who]
        contest.add(who, entrant.title, partial(entrant.command, pool_bytes, directory), directory / f"{who}.log")


def _judge(contest: Contest, duel: Duel, samples: Mapping[tuple[str, str], Samples]) -> Reading | Unmeasured:
    compare = contest.compare if duel.of == "rate" else contest.compare_cpu
    return compare(duel.ours, duel.theirs, samples, duel.cell)


def _duel(name: str, about: str, ours: str, theirs: str, cell: str, factor: float | None, yardstick: str) -> Duel:
    goal = Goal(at_least=True, factor=factor) if factor is not None else None
    return Duel(Spec(name, "GB/s", about, goal, yardstick), ours, theirs, cell)


def _cpu(name: str, ours: str, theirs: str, yardstick: str, factor: float | None = None) -> Duel:
    goal = Goal(at_least=False, factor=factor) if factor is not None else None
    about = f"CPU time of both ends a GB read, {CPU_CELL}"
    return Duel(Spec(name, "s/GB", about, goal, yardstick), ours, theirs, CPU_CELL, "cpu")


def _experiment(title: str, duels: Sequence[Duel], shapes: Sequence[tuple[int, int]], verb: str = "read") -> Experiment:
    return Experiment(title, tuple(it.spec for it in duels), partial(measure, tuple(duels), tuple(shapes), verb))


BARE_GOALS = {"1MiB/x1": 0.95, "1MiB/x32": 0.95, "4MiB/x1": 0.95, "4MiB/x32": 0.95, "64KiB/x128": 0.9}
MOONCAKE_GOALS = {"1MiB/x1": 1.0, "1MiB/x32": 2.0, "4MiB/x1": 1.0, "4MiB/x32": 2.0, "64KiB/x128": 1.1}


def _reads() -> Experiment:
    scattered = "into scattered blocks of a cold pool"
    duels = [
        _duel(f"tcp/read/{cell}", f"verified, {scattered}", "tcp", "bare", cell, factor, BARE)
        for cell, factor in BARE_GOALS.items()
    ]
    duels += [
        _duel(f"tcp/read-unchecked/{cell}", f"no checksums, {scattered}", "unchecked", "bare", cell, None, BARE)
        for cell in BARE_GOALS
    ]
    duels += [
        _duel(f"mooncake/read/{cell}", f"ours: verified, {scattered}", "tcp", "mooncake", cell, factor, MOONCAKE)
        for cell, factor in MOONCAKE_GOALS.items()
    ]
    duels += [_cpu("tcp/cpu", "tcp", "bare", BARE), _cpu("mooncake/cpu", "tcp", "mooncake", MOONCAKE, 1.0)]
    return _experiment("Reads over TCP on loopback", duels, SHAPES)


def _writes() -> Experiment:
    shapes = ((MIB, 1), (MIB, 32), (64 * KIB, 128))
    cells = ("1MiB/x1", "1MiB/x32", "64KiB/x128")
    about = "ours: verified by the peer before it says so, cold pools"
    duels = [_duel(f"mooncake/write/{it}", about, "tcp", "mooncake", it, 1.0, MOONCAKE) for it in cells]
    return _experiment("Writes over TCP on loopback", duels, shapes, "write")


def _same_host() -> Experiment:
    shapes = ((MIB, 1), (4 * MIB, 1), (MIB, 32))
    cells = ("1MiB/x1", "4MiB/x1", "1MiB/x32")
    about = "another process's memory into ours, verified, cold pools"
    duels = [_duel(f"shm/read/{it}", about, "shm", "memcpy", it, 1.25, MEMCPY) for it in cells]
    duels += [_duel(f"nixl/cma/{it}", f"ours: {about}", "shm", "cma", it, 1.0, CMA) for it in cells]
    duels += [_cpu("nixl/cma/cpu", "shm", "cma", CMA, 1.0)]
    return _experiment("Reads from a process of the same host", duels, shapes)


def _nixl_reads() -> Experiment:
    cells = ("1MiB/x1", "1MiB/x32")
    about = "ours: verified, cold pools"
    duels = [_duel(f"nixl/tcp/{it}", about, "tcp", "nixl-tcp", it, 1.0, NIXL_TCP) for it in cells]
    return _experiment("Reads over TCP against NIXL", duels, ((MIB, 1), (MIB, 32)))


def measure_stalls(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See STALLS."""
    transfers = QUICK_STALL_TRANSFERS if effort.quick else STALL_TRANSFERS
    pool = QUICK_POOL_BYTES if effort.quick else POOL_BYTES
    each = min(transfers, STALL_TURN)
    plan = {"all": dict.fromkeys(("tcp", "mooncake"), Cell(MIB, 1, each))}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory, Contest() as contest:
        enter(contest, plan["all"], pool, Path(directory))
        samples = contest.run(plan, transfers // each, effort.after_turn)
        if reason := contest.reasons.get("tcp"):
            return dict.fromkeys((it.name for it in STALLS.specs), Unmeasured(reason))
        ours, theirs = samples["all", "tcp"].calls, samples["all", "mooncake"].calls
        has_theirs = "mooncake" not in contest.reasons
    stalls, their_stalls = (float(sum(it > STALL_S for it in calls)) for calls in (ours, theirs))
    longest, count = max(ours) * 1e3, len(ours)
    return {
        "tcp/stalls": Reading(stalls, stalls, stalls, count, their_stalls if has_theirs else None),
        "tcp/longest": Reading(longest, longest, longest, count, max(theirs) * 1e3 if has_theirs else None),
    }


STALLS = Experiment(
    "Stalls",
    (
        Spec(
            "tcp/stalls",
            "transfers",
            f"of {STALL_TRANSFERS:,} reads of 1 MiB that took more than {STALL_S * 1e3:.0f} ms",
            Goal(at_least=False, plus=0.0),
            MOONCAKE,
        ),
        Spec("tcp/longest", "ms", "the longest of them", None, MOONCAKE),
    ),
    measure_stalls,
)

SUITE = Suite(
    "transfer",
    "the Transfer Engine over TCP and shared memory, against bare C, Mooncake and NIXL",
    (_reads(), _writes(), STALLS, _same_host(), _nixl_reads()),
)
