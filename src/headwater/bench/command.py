"""`headwater bench NAME`: measure this machine."""

from __future__ import annotations

import argparse
import fnmatch
import signal
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headwater.bench.harness import MODEL, TRACES, Effort, Result, Spec, Suite, Unmeasured, conclude
from headwater.bench.machine import Observer
from headwater.bench.report import Report, list_table
from headwater.bench.suites import SUITES
from headwater.errors import ConfigError
from headwater.values import nearest, whole_number

ROUNDS, QUICK_ROUNDS = 25, 3
PROMPTS, QUICK_PROMPTS = 1_000_000, 20_000
WIDE = 180
EXAMPLES = """\
examples:
  headwater bench                            all figures of the node
  headwater bench node --only 'save/*'       some of them
  headwater bench node --json                for programs
  headwater bench --list                     what can be measured, and the targets

Each figure is a median over interleaved rounds, beside its yardstick from the same rounds. Measure on a machine
that does nothing else: the report says how busy it was.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `headwater bench`."""
    parser.epilog = EXAMPLES
    parser.add_argument("suite", nargs="?", default="node", metavar="NAME", help=f"one of {', '.join(SUITES)} (node)")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="figures by name; may be repeated")
    parser.add_argument("--repeat", metavar="ROUNDS", help=f"rounds to take the median of (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"small amounts, {QUICK_ROUNDS} rounds: for a look only")
    parser.add_argument("--model", type=Path, default=MODEL, metavar="DIR", help=f"for `bench vllm` (default: {MODEL})")
    traces = f"for `bench route`: Mooncake's public traces (default: {TRACES})"
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help=traces)
    memory = f"for `bench proxy`: only memory and threads, through --prompts N different prompts ({PROMPTS:,})"
    parser.add_argument("--memory", action="store_true", help=memory)
    parser.add_argument("--prompts", metavar="N", help=argparse.SUPPRESS)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, for programs")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for documents")
    form.add_argument("--list", action="store_true", help="say what can be measured, and measure nothing")


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. The exit code says that the figures were taken, not that their targets were met."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if arguments.list:
        console.print(list_table(list(SUITES.values())))
        return 0
    suite = SUITES.get(arguments.suite)
    if suite is None:
        raise ConfigError(f"no suite {arguments.suite!r}; the nearest is {nearest(arguments.suite, SUITES)!r}")
    effort = Effort(
        _rounds(arguments),
        arguments.quick,
        model=arguments.model.resolve(),
        traces=arguments.traces.resolve(),
        prompts=_prompts(arguments),
    )
    wanted = select(suite, arguments.only or (["memory/*"] if arguments.memory else None))
    # SIGTERM like Ctrl-C: on the way out, the processes that we have started end too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = measure(suite, wanted, effort, _options(arguments))
    finally:
        signal.signal(signal.SIGTERM, before)
    if arguments.json:
        print(report.json())
    elif arguments.markdown:
        print(report.markdown(), end="")
    else:
        report.print(console)
    return 0


def select(suite: Suite, patterns: list[str] | None) -> frozenset[str]:
    """The names of the figures that any pattern matches, all without one; ConfigError for one that matches none."""
    names = [spec.name for spec in suite.specs]
    if not patterns:
        return frozenset(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if fnmatch.fnmatchcase(name, pattern) or pattern in name}
        if not found:
            raise ConfigError(f"--only {pattern}: no such figure; the nearest is {nearest(pattern, names)!r}")
        chosen |= found
    return frozenset(chosen)


def measure(suite: Suite, wanted: frozenset[str], effort: Effort, options: str = "") -> Report:
    """Run every experiment that has a wanted figure."""
    observer = Observer()
    chosen = [it for it in suite.experiments if wanted & {spec.name for spec in it.specs}]
    results: list[Result] = []
    missing: list[tuple[Spec, str]] = []
    with _progress() as progress:
        task = progress.add_task("", total=len(chosen))
        for number, experiment in enumerate(chosen):
            progress.update(task, description=experiment.title, completed=number, refresh=True)
            readings = experiment.measure(replace(effort, after_turn=progress.refresh), wanted)
            for spec in experiment.specs:
                if spec.name not in wanted:
                    continue
                reading = readings[spec.name]
                if isinstance(reading, Unmeasured):
                    missing.append((spec, reading.reason))
                else:
                    results.append(conclude(spec, reading))
        progress.update(task, completed=len(chosen), refresh=True)
    return Report(suite.name, observer.describe(), tuple(results), tuple(missing), options)


def _progress() -> Progress:
    """On stderr, drawn only between turns: a thread that draws would run inside what is timed."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal, transient=True)


def _rounds(arguments: argparse.Namespace) -> int:
    if arguments.repeat is None:
        return QUICK_ROUNDS if arguments.quick else ROUNDS
    try:
        return whole_number(1, 100_000)(arguments.repeat)
    except ConfigError as error:
        raise ConfigError(f"--repeat {arguments.repeat}: {error}") from None


def _prompts(arguments: argparse.Namespace) -> int:
    if not arguments.memory:
        return 0
    if arguments.prompts is None:
        return QUICK_PROMPTS if arguments.quick else PROMPTS
    try:
        return whole_number(100, 100_000_000)(arguments.prompts)
    except ConfigError as error:
        raise ConfigError(f"--prompts {arguments.prompts}: {error}") from None


def _options(arguments: argparse.Namespace) -> str:
    """What else was on the command line, as far as it changes figures."""
    parts = [f" --only '{it}'" for it in arguments.only or ()]
    parts += [f" --repeat {arguments.repeat}"] if arguments.repeat else []
    parts += [" --memory"] if arguments.memory else []
    parts += [f" --prompts {arguments.prompts}"] if arguments.prompts else []
    return "".join([*parts, " --quick" if arguments.quick else ""])
