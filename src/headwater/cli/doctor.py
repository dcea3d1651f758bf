"""`headwater doctor`: is this host ready?"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from headwater.cli.options import add_config, add_json, add_setting, flag_of, read_config, reader
from headwater.cli.show import console
from headwater.doctor import Finding, Verdict, examine
from headwater.values import socket_address

EXAMPLES = """\
examples:
  headwater doctor                          for a node with the settings of this environment
  headwater doctor --host-memory 64GiB      would that fit?
  headwater doctor --disk /nvme/kv:500GiB --remote redis://kv:6379    are these tiers fit for use?
  headwater doctor --node unix:/run/headwater/node.sock     is that node up, and does it speak our protocol?

ok: fine. warn: works, but slower, or not tested. fail: does not work; the exit code is 1. Run it once where the
node runs and once in the environment of each vLLM.
"""
MARKS = {Verdict.OK: ("ok", "green"), Verdict.WARN: ("warn", "yellow"), Verdict.FAIL: ("FAIL", "bold red")}


def configure(parser: argparse.ArgumentParser) -> None:
    """`--node`, `--host-memory`, `--disk`, `--remote`, `--json`."""
    parser.epilog = EXAMPLES
    add_config(parser)
    for name in ("node.host_memory", "node.disk", "node.remotes"):
        add_setting(parser, name, flag_of(name))
    node = "a node that should be running, unix:/PATH; its absence is a failure then"
    parser.add_argument("--node", metavar="ADDRESS", type=reader(socket_address), help=node)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if one is a failure."""
    config = read_config(arguments).config.node
    if arguments.node:
        config = replace(config, socket=arguments.node)
    findings = list(examine(config, node_expected=arguments.node is not None))
    failed = any(it.verdict is Verdict.FAIL for it in findings)
    if arguments.json:
        checks = [
            {"name": it.name, "verdict": it.verdict.value, "found": it.found, "remedy": it.remedy} for it in findings
        ]
        print(json.dumps({"ok": not failed, "checks": checks}, indent=2))
    else:
        _print(findings)
    return int(failed)


def _print(findings: list[Finding]) -> None:
    screen = console()
    width = max(len(it.name) for it in findings)
    for it in findings:
        mark, style = MARKS[it.verdict]
        screen.print(f"{mark:5}", style=style, end="")
        screen.print(f"{it.name:{width}}  {it.found}", soft_wrap=True)
        if it.remedy:
            screen.print(f"{'':5}{'':{width}}  -> {it.remedy}", soft_wrap=True)
    counts = {verdict: sum(it.verdict is verdict for it in findings) for verdict in Verdict}
    screen.print(f"\n{counts[Verdict.OK]} ok, {counts[Verdict.WARN]} warnings, {counts[Verdict.FAIL]} failures")
