"""Many runs of one trace, at once where there are processors for it: a grid of policies, loads and fleets.

Runs share nothing, so that each gives the same figures alone, in any company and in any order. A run in a process of
its own is told everything and answers with its figures only; the processes end with this one, however it ends.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from headwater.errors import ConfigError, ResourceError
from headwater.sim.fleet.config import FleetConfig
from headwater.sim.fleet.results import Run
from headwater.sim.fleet.summary import Summary, summarise
from headwater.traces.model import Trace

PR_SET_PDEATHSIG = 1
RUNS_A_PROCESS = 1 << 30
"""Any limit makes the executor start fresh processes instead of forking this one with its threads."""
RUNS_MAX = 10_000
Tree = dict[str, Any]
Advance = Callable[[float, float], None]
"""Told how much of the work is done, and of how much, in runs."""
Progress = Callable[[int, int], None]
"""Told how many requests of how many are done."""


class Play(Protocol):
    """Plays a trace on a fleet; a function of a module, for it is called in other processes."""

    def __call__(self, trace: Trace, config: FleetConfig, *, seed: int = 0, progress: Progress | None = None) -> Run:
        """The run."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run to be made; `settings` are its policy, its load, and what else the cells of a grid differ in, by name."""

    config: FleetConfig
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Swept:
    """What was run, and what came of it."""

    settings: dict[str, Any]
    summary: Summary


def change(tree: Tree, path: str, value: Any) -> Tree:
    """A copy of a tree of settings with one of them changed; `tiers.remote.size` leads into it, numbers into lists."""
    changed = deepcopy(tree)
    *steps, last = path.split(".")
    place: Any = changed
    for step in steps:
        place = place[_index(place, step, path)] if isinstance(place, list) else place.setdefault(step, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"{path}: {step} is a value, not a section; name a setting of the fleet")
    place[_index(place, last, path) if isinstance(place, list) else last] = value
    return changed


def _index(place: Sequence[Any], step: str, path: str) -> int:
    if not step.isdecimal() or int(step) >= len(place):
        raise ConfigError(f"{path}: {step} leads into a list of {len(place)}; write a number from 0 on")
    return int(step)


def read_change(text: str) -> tuple[str, Any]:
    """A setting and its value from `PATH=VALUE`, the value as in YAML. Raises ConfigError."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise ConfigError(f"{text!r}: write PATH=VALUE, as in tiers.remote.size=64GiB")
    try:
        return path, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{text!r}: {value!r} is no value; write it as in the fleet's file") from None


def read_sweep(text: str) -> tuple[str, list[Any]]:
    """A setting and its values, with commas between, each of them once. Raises ConfigError."""
    path, _, values = text.partition("=")
    found: list[Any] = []
    for it in values.split(","):
        if it.strip() and (value := read_change(f"{path}={it.strip()}")[1]) not in found:
            found.append(value)
    if not found:
        raise ConfigError(f"{text!r}: write PATH=VALUE,VALUE, as in tiers.remote.size=0,64GiB,128GiB")
    return path, found


def grid(
    tree: Tree,
    parse: Callable[[Tree], FleetConfig],
    sweeps: Sequence[tuple[str, Sequence[Any]]],
    seed: int = 0,
) -> list[Cell]:
    """A cell for each combination of values of settings, the last setting changing fastest. Raises ConfigError for a
    fleet that cannot be, before anything is run."""
    if (total := math.prod(len(values) for _, values in sweeps)) > RUNS_MAX:
        raise ConfigError(f"{total:,} runs: more than {RUNS_MAX:,}; sweep fewer values")
    cells = []
    for values in itertools.product(*(values for _, values in sweeps)):
        changes = tuple(zip((path for path, _ in sweeps), values, strict=True))
        changed = tree
        for path, value in changes:
            changed = change(changed, path, value)
        config = parse(changed)
        more = [it for it in changes if it[0] not in ("policy", "load")]
        cells.append(Cell(config, seed, (("policy", config.policy.name), ("load", config.load), *more)))
    return cells


def sweep(
    trace: Trace,
    cells: Sequence[Cell],
    play: Play,
    *,
    jobs: int = 1,
    advance: Advance | None = None,
) -> list[Swept]:
    """Run all cells, at most `jobs` at a time, and give their figures in the order of the cells.

    With more than one job the program's main module must be importable without effect (`if __name__ == ...`), as
    Python asks of all who start processes. Raises ResourceError if a process is killed.
    """
    if jobs > 1 and len(cells) > 1:
        found = _apart(trace, cells, play, min(jobs, len(cells)), advance)
    else:
        found = [_one(trace, it, play, _within(advance, at, len(cells))) for at, it in enumerate(cells)]
    return [Swept(dict(cell.settings), it) for cell, it in zip(cells, found, strict=True)]


def _one(trace: Trace, cell: Cell, play: Play, progress: Progress | None = None) -> Summary:
    run = play(trace, cell.config, seed=cell.seed, progress=progress)
    return summarise(run, cell.config.slo, cell.config.instance_count)


def _within(advance: Advance | None, at: int, total: int) -> Progress | None:
    """What one run says of its progress, as a part of all."""
    if advance is None:
        return None
    return lambda done, requests: advance(at + (done / requests if requests else 1.0), total)


def _apart(trace: Trace, cells: Sequence[Cell], play: Play, jobs: int, advance: Advance | None) -> list[Summary]:
    pool = ProcessPoolExecutor(jobs, initializer=_begin, initargs=(os.getpid(),), max_tasks_per_child=RUNS_A_PROCESS)
    try:
        futures: list[Future[Summary]] = [pool.submit(_one, trace, it, play) for it in cells]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            if advance is not None:
                advance(done, len(cells))
        return [it.result() for it in futures]
    except BrokenProcessPool as error:
        raise ResourceError(
            f"a simulation was killed, most likely for memory; use fewer than --jobs {jobs} or a shorter trace"
        ) from error
    finally:
        _end(pool)


def _begin(parent: int) -> None:
    """In a fresh process: the keyboard's interrupt is for the parent, and without it there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _end(pool: ProcessPoolExecutor) -> None:
    """End the processes now, whatever they are at; `terminate_workers` of Python 3.14."""
    processes: Mapping[int, Any] = dict(getattr(pool, "_processes", None) or {})
    pool.shutdown(wait=False, cancel_futures=True)
    for it in processes.values():
        it.terminate()
    pool.shutdown(wait=True)
