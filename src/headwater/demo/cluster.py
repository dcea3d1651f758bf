"""`headwater demo-cluster`: three nodes, a directory and two vLLM instances, all of them real; then things break."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.demo.beginning import Begun, add_options, begun, told
from headwater.demo.cluster_stage import NODES, Network, Stage, open_network
from headwater.demo.cluster_story import ENGINES, Fact, Story, as_json
from headwater.demo.guard import GuardedChildren
from headwater.demo.story import Line
from headwater.demo.tables import requests_table, yes

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
    add_options(parser, "512MiB", "each node")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces, even as root")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 only if all outputs are identical and all facts are true."""
    with begun(arguments) as it, open_network(loopback=arguments.loopback) as network:
        it.console.print(f"three nodes: {network.words}")
        story = _perform(it, network)
    result = as_json(network.words, story.lines, story.facts)
    return told(arguments, result, lambda: _show(story.lines, story.facts, it.console))


def _perform(it: Begun, network: Network) -> Story:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with GuardedChildren() as children, Progress(*columns, console=it.console, transient=True) as progress:
        task = progress.add_task("starting Valkey and three nodes", total=None)

        def begin(what: str) -> None:
            progress.update(task, description=what)

        stage = Stage(children, network, it.model, it.memory, it.scratch, it.logs)
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
    table = Table()
    for name in ("act", "what must be true", "is it", "took", "allowed"):
        table.add_column(name, justify="right" if name in ("took", "allowed") else "left")
    for fact in facts:
        table.add_row(fact.act, fact.text, yes(fact.true), _seconds(fact.seconds), _seconds(fact.within_s))
    console.print(table)
    same = sum(line.identical for line in lines)
    console.print(f"{same} of {len(lines)} outputs identical to the run without a cache; no request failed.")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
