"""`headwater demo`: start a node and two vLLM instances, ask them, and show what was shared and what came back.

Theory of operation.

    shared      Valkey, a node with a disk, A and B run; the document is computed once
    burst       a Conductor over A and B: many chats at once, against the same with round robin and no cache (`front`)
    restarted   A, B and the node are stopped and started again: memory is empty, the disk is not
    wiped       the node is stopped, its disk deleted, a new node started: only Valkey still has the document

A answers in the second act, B in the third: so no engine has the document in its own cache, and one restart of both is
enough. B is given the address of the last node from its restart on, and finds it when it is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headwater.demo.beginning import Begun, add_options, begun, told
from headwater.demo.burst import Burst, table
from headwater.demo.front import CONDUCTOR, QUICK_SHAPE, ROUND_ROBIN, SHAPE, Bursts, play_bursts, start_conductor
from headwater.demo.processes import Child, Children, Served, kv_transfer_config, start_node, start_vllm
from headwater.demo.story import (
    CHAT_TURNS,
    FACTS,
    QUICK_FACTS,
    RESTARTED,
    WIPED,
    Line,
    as_json,
    came_from,
    reused_on_other,
    steps,
    tell,
    tell_again,
    wait_for_engine,
    wait_for_rest,
)
from headwater.demo.tables import requests_table, yes
from headwater.demo.valkey import start_valkey
from headwater.types import Tier

START_S = 300.0
DISK = "512MiB"
EXAMPLES = """\
The same, by hand:
  headwater node --host-memory 1GiB --disk /var/tmp/kv:512MiB --remote valkey://127.0.0.1:6379
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"HeadwaterConnector","kv_role":"kv_both",
    "kv_load_failure_policy":"recompute","kv_connector_extra_config":{"node":"unix:/path/it/printed"}}'

All of it at once, behind one URL:  headwater up examples/up.yaml

Exit code 0 only if every answer is identical to the one computed without any cache, instance B reused what instance
A had computed, the Conductor's burst reused more than the one without it, and the document came back from the disk
after a restart and from Valkey after the disk was deleted.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `headwater demo`."""
    parser.epilog = EXAMPLES
    add_options(parser, "1GiB", "the node")
    parser.add_argument("--quick", action="store_true", help="the same acts with a short document and a small burst")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 only if all outputs are identical and every act found the prefix where it should be."""
    with begun(arguments) as it:
        lines, bursts = _perform(it, quick=arguments.quick)
    return told(arguments, as_json(lines, bursts), lambda: _show(lines, bursts, it.console))


def _perform(it: Begun, *, quick: bool) -> tuple[list[Line], Bursts]:
    facts, shape = (QUICK_FACTS, QUICK_SHAPE) if quick else (FACTS, SHAPE)
    total = 8 + len(list(steps(facts))) + len(CHAT_TURNS)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Children() as children, Progress(*columns, console=it.console, transient=True) as progress:
        task = progress.add_task("starting Valkey and a node", total=total)

        def begin(what: str) -> None:
            progress.update(task, description=what, advance=1)

        return Stage(children, it.model, it.memory, it.scratch, it.logs).play(facts, shape, begin)


class Stage:
    """The processes of the demo, and where they keep things."""

    def __init__(self, children: Children, model: Path, memory: str, scratch: Path, logs: Path) -> None:
        self._children, self._model, self._memory, self._logs = children, model, memory, logs
        self._scratch, self._disk = scratch, scratch / "disk"
        self._address, self._last_address = f"unix:{scratch}/node.sock", f"unix:{scratch}/last.sock"
        self._remote = start_valkey(children, scratch / "valkey", logs / "valkey.log")
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [cores[0], cores[1]] if len(cores) > 1 else [None, None]

    def play(self, facts: int, shape: Burst, begin: Callable[[str], None]) -> tuple[list[Line], Bursts]:
        """All acts, with a document of so many facts and a burst of this shape; `begin` is told what comes next."""
        children = self._children
        node = self._start_node(self._address, "node")
        begin("starting vLLM A and B (half a minute)")
        servers = self._start_engines(self._logs, {"A": self._address, "B": self._address})
        lines, plain = tell(servers, self._address, facts, begin)

        begin("starting a Conductor")
        front, port = start_conductor(
            children, self._model, self._address, list(servers.values()), self._scratch, self._logs / "conductor.log"
        )
        bursts = play_bursts(list(servers.values()), port, shape, begin)
        children.end(front)

        begin("restarting the node and both engines (half a minute)")
        wait_for_rest(self._address)
        children.end(*(it.child for it in servers.values()))
        children.end(node)
        node = self._start_node(self._address, f"node-{RESTARTED}")
        logs = self._logs / RESTARTED
        servers = self._start_engines(logs, {"A": self._address, "B": self._last_address})
        begin("same question on A, after the restart")
        lines.append(tell_again(RESTARTED, servers["A"], self._address, facts, plain["A"]))

        begin("deleting the disk")
        wait_for_rest(self._address)
        children.end(node)
        shutil.rmtree(self._disk)
        self._start_node(self._last_address, f"node-{WIPED}")
        wait_for_engine(self._last_address)
        begin("same question on B, with nothing but Valkey")
        lines.append(tell_again(WIPED, servers["B"], self._last_address, facts, plain["B"]))
        return lines, bursts

    def _start_node(self, address: str, name: str) -> Child:
        log, disk = self._logs / f"{name}.log", f"{self._disk}:{DISK}"
        return start_node(self._children, address, self._memory, log, disk=disk, remotes=[self._remote])

    def _start_engines(self, logs: Path, addresses: dict[str, str]) -> dict[str, Served]:
        logs.mkdir(parents=True, exist_ok=True)
        servers: dict[str, Served] = {}
        for (name, address), core in zip(addresses.items(), self._cores, strict=True):
            servers[name] = start_vllm(
                self._children, name, self._model, core, kv_transfer_config(address), logs, publishes=True
            )
        for it in servers.values():
            it.child.wait_until(it.healthy, START_S, lambda: None)
        return servers


def _show(lines: Sequence[Line], bursts: Bursts, console: Console) -> None:
    console.print(requests_table("Two vLLM instances, one KV cache", lines, moved=True))
    console.print(table(bursts.results, bursts.slo_s, "A burst of chats that share prefixes, over both instances"))
    same = sum(line.identical for line in lines)
    facts = {
        "B reused A's prefix": reused_on_other(lines),
        f"reused more than {ROUND_ROBIN}, by {CONDUCTOR}": bursts.identical and bursts.reused_more,
        "the disk had it after a restart": came_from(lines, RESTARTED, Tier.DISK),
        "Valkey had it after the disk was deleted": came_from(lines, WIPED, Tier.REMOTE),
    }
    said = "; ".join(f"{yes(true)}: {fact}" for fact, true in facts.items())
    console.print(f"{same} of {len(lines)} outputs identical to the run without a cache. {said}.")
