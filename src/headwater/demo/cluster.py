"""`headwater demo-cluster`: three nodes, a directory and two vLLM instances, all of them real; then things break."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.demo.cluster_stage import NODES, Network, Stage, open_network
from headwater.demo.cluster_story import ENGINES, Fact, Story, as_json
from headwater.demo.command import MODEL
from headwater.demo.guard import GuardedChildren
from headwater.demo.processes import check_model
from headwater.demo.story import Line
from headwater.demo.tables import end_on_signals, requests_table, yes
from headwater.demo.valkey import valkey_program

EXAMPLES = """\
The same, on real hosts:
  headwater node --cluster prod --directory redis://kv:6379 --listen 0.0.0.0:7420 --token-file /etc/headwater/token
  headwater cluster --directory redis://kv:6379 --cluster prod

Exit code 0 only if every answer is identical to the one computed without any cache, no request failed, prefixes came
from the hosts where they were, and everything that was broken healed in time.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `headwater demo-cluster`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--model", type=Path, default=MODEL, help=f"directory of a small chat model (default: {MODEL})")
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE", help="memory of each node (default: 512MiB)")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces, even as root")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 only if all outputs are identical and all facts are true."""
    end_on_signals()
    check_model(arguments.model)
    valkey_program()
    console = Console(stderr=arguments.json, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="headwater-demo-") as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        with open_network(loopback=arguments.loopback) as network:
            console.print(f"three nodes: {network.words}")
            story = _perform(arguments, network, Path(scratch), logs, console)
    result = as_json(network.words, story.lines, story.facts)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _show(story.lines, story.facts, console)
    return 0 if result["ok"] else 1


def _perform(arguments: argparse.Namespace, network: Network, scratch: Path, logs: Path, console: Console) -> Story:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with GuardedChildren() as children, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting Valkey and three nodes", total=None)

        def begin(what: str) -> None:
            progress.update(task, description=what)

        stage = Stage(children, network, arguments.model.resolve(), arguments.host_memory, scratch, logs)
        stage.start_directory()
        for name in NODES:
            stage.start_node(name)
        begin("starting vLLM A and B (half a minute)")
        stage.start_engines(ENGINES)
        story = Story(stage, begin)
        story.play()
        return story


def _show(lines: Sequence[Line], facts: Sequence[Fact], console: Console) -> None:
    console.print(requests_table("Three nodes, one KV cache", lines, moved=False))
    told = Table()
    for name in ("act", "what must be true", "is it", "took", "allowed"):
        told.add_column(name, justify="right" if name in ("took", "allowed") else "left")
    for fact in facts:
        told.add_row(fact.act, fact.text, yes(fact.true), _seconds(fact.seconds), _seconds(fact.within_s))
    console.print(told)
    same = sum(line.identical for line in lines)
    console.print(f"{same} of {len(lines)} outputs identical to the run without a cache; no request failed.")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
