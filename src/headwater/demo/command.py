"""`headwater demo`: start a node and two vLLM instances, ask them, and show what was shared."""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.demo.processes import Children, Served, check_model, kv_transfer_config, start_node, start_vllm
from headwater.demo.story import CHAT_TURNS, Line, as_json, reused_on_other, steps, tell

MODEL = Path(".cache/models/SmolLM2-135M-Instruct")
START_S = 300.0
EXAMPLES = """\
The same, by hand:
  headwater node --host-memory 1GiB
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"HeadwaterConnector","kv_role":"kv_both",
    "kv_load_failure_policy":"recompute","kv_connector_extra_config":{"node":"unix:/path/it/printed"}}'

Exit code 0 only if every answer is identical to the one computed without any cache, and instance B reused what
instance A had computed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `headwater demo`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--model", type=Path, default=MODEL, help=f"directory of a small chat model (default: {MODEL})")
    parser.add_argument("--host-memory", default="1GiB", metavar="SIZE", help="memory of the node (default: 1GiB)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 only if all outputs are identical and B reused A's prefix."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _as_interrupt)
    check_model(arguments.model)
    console = Console(stderr=arguments.json, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="headwater-demo-") as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        lines = _perform(arguments.model.resolve(), arguments.host_memory, Path(scratch), logs, console)
    result = as_json(lines)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _show(lines, console)
    return 0 if result["ok"] else 1


def _perform(model: Path, memory: str, scratch: Path, logs: Path, console: Console) -> list[Line]:
    total = 3 + len(list(steps())) + len(CHAT_TURNS)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Children() as children, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting a node", total=total)

        def begin(what: str) -> None:
            progress.update(task, description=what, advance=1)

        address = f"unix:{scratch}/node.sock"
        start_node(children, address, memory, logs / "node.log")
        begin("starting vLLM A and B (half a minute)")
        cores = sorted(os.sched_getaffinity(0))
        binds = [cores[0], cores[1]] if len(cores) > 1 else [None, None]
        servers: dict[str, Served] = {}
        for name, core in zip("AB", binds, strict=True):
            servers[name] = start_vllm(children, name, model, core, kv_transfer_config(address), logs)
        for it in servers.values():
            it.child.wait_until(it.healthy, START_S, lambda: None)
            progress.advance(task)
        return tell(servers, address, begin)


def _show(lines: Sequence[Line], console: Console) -> None:
    table = Table(title="Two vLLM instances, one KV cache")
    for name in ("#", "instance", "prompt tokens", "reused from tier", "TTFT", "TTFT without cache", "faster", "moved"):
        table.add_column(name, justify="right" if name not in ("instance", "reused from tier") else "left")
    table.add_column("identical output")
    for number, line in enumerate(lines, 1):
        table.add_row(
            str(number),
            line.instance,
            f"{line.prompt_tokens:,}",
            f"{line.reused_tokens:,} ({line.tier})",
            f"{line.ttft_s:.2f} s",
            f"{line.ttft_uncached_s:.2f} s",
            f"{line.ttft_uncached_s / line.ttft_s:.1f} x" if line.ttft_s else "",
            f"{line.bytes_moved / 1e6:.1f} MB",
            "[green]yes[/]" if line.identical else "[red]NO[/]",
        )
    console.print(table)
    same = sum(line.identical for line in lines)
    shared = "B reused A's prefix" if reused_on_other(lines) else "B did NOT reuse A's prefix"
    console.print(f"{same} of {len(lines)} outputs identical to the run without a cache; {shared}.")


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
