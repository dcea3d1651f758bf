"""`headwater simulate`: a recorded workload on a simulated fleet."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from headwater.cli import calibrate, simulate_plots
from headwater.cli.bars import Bar
from headwater.cli.options import add_json
from headwater.cli.show import console, plain, show_count, show_span
from headwater.cli.simulate_page import page
from headwater.cli.simulate_rows import Rows, tables
from headwater.cli.trace_facts import add_reading, read_trace
from headwater.core.policies import POLICIES
from headwater.errors import ConfigError
from headwater.fleetfile.tables import read_yaml
from headwater.plan.configs import read_config
from headwater.plan.known import known_shape
from headwater.plan.kv import token_bytes
from headwater.sim.fleet.config import FleetConfig, parse_fleet
from headwater.sim.fleet.sweep import Cell, Swept, Tree, change, grid, read_change, read_sweep, sweep
from headwater.sim.fleet.world import make_policy, simulate
from headwater.traces.facts import Facts, facts
from headwater.traces.generate import with_sessions
from headwater.traces.read import Opened
from headwater.traces.shape import first
from headwater.traces.write import write_whole

EPILOG = """\
examples:
  headwater simulate conversation_trace.jsonl
  headwater simulate trace.jsonl --fleet fleet.yaml --policy headwater,round_robin --load 1,2,4 --html report.html
  headwater simulate trace.jsonl --fleet fleet.yaml --sweep tiers.host.size=0,64GiB,128GiB --json
  headwater simulate azure.csv --made-up-sessions 0.6 --set slo.ttft_s=1s
  headwater simulate --calibrate http://127.0.0.1:8000 --out times.yaml --verify

Without --fleet: 8 instances of 16,384 blocks of 64 tokens, instance caches only, step times of an 8B model on one large
GPU as ai-dynamo's mocker has them. examples/fleet.yaml shows what a fleet's file may say. --set and --sweep take
any setting of that file, as in instances.0.blocks=4096. Each combination is one run; the same seed gives the same run.

The trace: JSON lines as published with Mooncake or as Qwen-Bailian, or Azure's CSV, plain or gzip; your own from
`headwater trace export`. A CSV says nothing about contents, so nothing is reused, unless --made-up-sessions P: each
request then goes on, with probability P, with an earlier one that fits by length. That is a model, not a record.

In the tables: goodput is what met both SLOs; "busiest / mean" compares the prompt tokens that instances computed, over
the whole run and by windows of time (1 is even); "TTFT predicted within" is the median error of the router's estimate.
"""
DEFAULT_FLEET: Tree = {"instances": [{"count": 8, "blocks": 16384, "block_tokens": 64, "times": "mocker"}]}
BARE_BLOCK_TOKENS = 16
"""Of traces without blocks; fits the blocks of any engine."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The trace, the fleet, what is varied, and where the answer goes."""
    parser.epilog = EPILOG
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="a trace, plain or gzip")
    parser.add_argument("--fleet", metavar="FILE", help="YAML file of the fleet (default: see below)")
    vary = parser.add_argument_group("what is varied (each combination is one run)")
    vary.add_argument("--policy", action="append", metavar="NAME,...", help=f"any of {', '.join(POLICIES)}")
    vary.add_argument("--load", metavar="X,...", help="so many times as many requests a second, as in 1,2,4")
    several = "several values of a setting of the fleet; may be repeated"
    vary.add_argument("--sweep", action="append", default=[], metavar="PATH=V,...", help=several)
    vary.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="one setting of the fleet")
    trace = parser.add_argument_group("the trace")
    add_reading(trace)
    trace.add_argument("--first", type=int, metavar="N", help="only the first N requests")
    sessions = "for a trace without blocks: make up who goes on with whose prompt"
    trace.add_argument("--made-up-sessions", type=float, metavar="P", help=sessions)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: one a processor)")
    parser.add_argument("--png", metavar="DIRECTORY", help="write plots as PNG files")
    parser.add_argument("--html", metavar="FILE", help="write tables and plots as one page that needs nothing else")
    add_json(parser)
    calibrate.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and say what came of it; or measure an engine for simulations to come."""
    if arguments.calibrate is not None:
        if arguments.trace is not None:
            raise ConfigError(f"--calibrate measures an engine and plays no trace; leave {arguments.trace} out")
        return calibrate.run(arguments)
    if not arguments.trace:
        raise ConfigError("TRACE is missing; name a trace, as in headwater simulate conversation_trace.jsonl")
    if arguments.out is not None:
        raise ConfigError("--out is for --calibrate; write what is simulated with --html, --png or --json")
    _check_targets(arguments)
    tree, base = _fleet(arguments)
    cells = _cells(arguments, tree, base)
    opened = _open(arguments)
    trace, known = opened.trace, facts(opened.trace)
    with Bar(f"simulating {show_count(len(cells))} runs" if len(cells) > 1 else "simulating") as bar:
        runs = sweep(trace, cells, simulate, jobs=_jobs(arguments, len(cells)), advance=bar.advance)
    for note in opened.notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    about = _about(known, cells[0].config, arguments)
    if arguments.json:
        print(json.dumps(_as_dict(known, opened, tree, arguments.seed, runs)))
    else:
        _print(about, runs)
    sys.stdout.flush()  # what was found is not lost when a disk is full
    written = _write(arguments, about, runs)
    if not arguments.json:
        for path in written:
            print(f"wrote {path}")
    return 0


def _fleet(arguments: argparse.Namespace) -> tuple[Tree, Path]:
    """The fleet's settings with those of --set, and the folder that paths in it are relative to."""
    path = Path(arguments.fleet) if arguments.fleet is not None else None
    tree = DEFAULT_FLEET if path is None else read_yaml(path)
    for text in arguments.set:
        tree = change(tree, *read_change(text))
    return tree, path.parent if path is not None else Path()


def _cells(arguments: argparse.Namespace, tree: Tree, base: Path) -> list[Cell]:
    """The runs that are asked for. An error names the file if it is the file's, and no option's."""
    sweeps = _sweeps(arguments, tree)
    try:
        return grid(tree, lambda it: _parse(it, base), sweeps, arguments.seed)
    except ConfigError as error:
        if arguments.fleet is not None and _refusal(read_yaml(Path(arguments.fleet)), base) == str(error):
            raise ConfigError(f"{arguments.fleet}: {error}") from None
        raise


def _refusal(tree: Tree, base: Path) -> str | None:
    try:
        _parse(tree, base)
    except ConfigError as error:
        return str(error)
    return None


def _parse(tree: Tree, base: Path) -> FleetConfig:
    def kv_bytes(model: str) -> int:
        path = base / model
        shape = read_config(path) if path.exists() else known_shape(model)
        return round(token_bytes(shape, shape.kv_width))

    config = parse_fleet(tree, base=base, kv_bytes=kv_bytes)
    make_policy(config.policy.name, config.policy.knobs)  # refuses what it does not know, before anything is run
    return config


def _sweeps(arguments: argparse.Namespace, tree: Tree) -> list[tuple[str, Sequence[Any]]]:
    """What is varied: policies and loads first, as the file says them if nothing is asked for."""
    policies = [it.strip() for text in arguments.policy or () for it in text.split(",") if it.strip()]
    loads: Sequence[object] = read_sweep(f"load={arguments.load}")[1] if arguments.load is not None else ()
    said = tree.get("policy")  # with its knobs, if it has any
    known = {said["name"]: said} if isinstance(said, dict) and isinstance(said.get("name"), str) else {}
    found: list[tuple[str, Sequence[Any]]] = []
    found += [("policy", [known.get(it, it) for it in dict.fromkeys(policies)])] if policies else []
    found += [("load", loads)] if loads else []
    found += [read_sweep(it) for it in arguments.sweep]
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"--sweep {max(names, key=names.count)}: is varied twice; give all its values at once")
    return found


def _open(arguments: argparse.Namespace) -> Opened:
    opened = read_trace(arguments)
    trace = opened.trace if arguments.first is None else first(opened.trace, arguments.first)
    notes = list(opened.notes)
    if arguments.made_up_sessions is not None:
        size = arguments.block_tokens or BARE_BLOCK_TOKENS
        trace = with_sessions(trace, arguments.seed, size, again=arguments.made_up_sessions)
        notes.append("sessions are made up: reuse is that of a model, not of this workload")
    elif not any(it.blocks for it in trace.requests):
        trace = replace(trace, block_tokens=BARE_BLOCK_TOKENS)
        notes.append("the trace says nothing about contents, so nothing is reused; see --made-up-sessions")
    return Opened(trace, tuple(notes), opened.skipped)


def _jobs(arguments: argparse.Namespace, runs: int) -> int:
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(f"--jobs {arguments.jobs}: write a number from 1 on")
    return min(runs, arguments.jobs or len(os.sched_getaffinity(0)))


def _about(known: Facts, config: FleetConfig, arguments: argparse.Namespace) -> dict[str, str]:
    """What was simulated, for people."""
    instances = ", ".join(
        f"{it.count} × {show_count(it.blocks)} blocks of {it.block_tokens} tokens" for it in config.instances
    )
    reuse = f", of which {known.reuse_max:.1%} could be reused" if known.blocks else ""
    return {
        "trace": f"{known.name}: {show_count(known.requests)} requests in {show_span(known.span_s)}",
        "prompt tokens": f"{known.input_tokens.mean:,.0f} in the mean{reuse}",
        "fleet": f"{arguments.fleet or 'default'}: {instances}",
        "seed": str(arguments.seed),
    }


def _check_targets(arguments: argparse.Namespace) -> None:
    """Refuse files that cannot be written before, not after, minutes of simulation; and leave none behind."""
    if arguments.png is None and arguments.html is None:
        return
    simulate_plots.check()
    if arguments.png is not None:
        with _writing("--png", arguments.png):
            Path(arguments.png).mkdir(parents=True, exist_ok=True)
            _try_folder(Path(arguments.png))
    if arguments.html is not None:
        with _writing("--html", arguments.html):
            if Path(arguments.html).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            _try_folder(Path(arguments.html).parent)


def _try_folder(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"?")


@contextmanager
def _writing(flag: str, target: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag} {target!r}: {reason}; name a place that can be written") from error


def _write(arguments: argparse.Namespace, about: dict[str, str], runs: Sequence[Swept]) -> list[Path]:
    """Files that were asked for."""
    if arguments.png is None and arguments.html is None:
        return []
    plots = simulate_plots.plots(runs)
    written = []
    if arguments.png is not None:
        with _writing("--png", arguments.png):
            written += simulate_plots.write_png(plots, Path(arguments.png))
    if arguments.html is not None:
        with _writing("--html", arguments.html):
            write_whole(Path(arguments.html), [page(f"Simulated: {about['trace']}", about, tables(runs), plots)])
        written.append(Path(arguments.html))
    return written


def _as_dict(known: Facts, opened: Opened, tree: Tree, seed: int, runs: Sequence[Swept]) -> dict[str, Any]:
    return {
        "ok": True,
        "trace": known.as_dict(),
        "notes": opened.notes,
        "skipped": opened.skipped,
        "fleet": tree,
        "seed": seed,
        "runs": [{"settings": it.settings, **it.summary.as_dict()} for it in runs],
    }


def _print(about: dict[str, str], runs: Sequence[Swept]) -> None:
    screen = console()
    for name, value in about.items():
        screen.print(f"{name}: {plain(value)}")
    for it in tables(runs):
        screen.print(_table(it))
    wall_s = sum(it.summary.wall_s for it in runs)
    requests = sum(it.summary.requests for it in runs)
    rate = f", {requests / wall_s:,.0f} requests a second" if wall_s > 0 and math.isfinite(wall_s) else ""
    count = "1 run" if len(runs) == 1 else f"{show_count(len(runs))} runs"
    screen.print(f"{count} in {show_span(wall_s)} of simulation{rate}")


def _table(rows: Rows) -> Table:
    columns = (
        Column(name, justify="left" if at < rows.left else "right", no_wrap=at < rows.left)
        for at, name in enumerate(rows.columns)
    )
    table = Table(*columns, title=rows.title, title_justify="left")
    for row in rows.rows:
        table.add_row(*map(plain, row))
    return table
