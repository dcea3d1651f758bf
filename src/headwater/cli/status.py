"""`headwater status`: what a node holds, who uses it, and how often it helps."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from headwater.cli.options import add_config, add_json, read_config, reader
from headwater.cli.show import console, plain, show_count, show_share, show_size, show_span
from headwater.cli.tiers import troubles
from headwater.errors import UnavailableError
from headwater.node.client import fetch_status
from headwater.values import parse_duration, socket_address

EXAMPLES = """\
examples:
  headwater status                                 the node of this user, or the one of HEADWATER_NODE_SOCKET
  headwater status --node unix:/run/headwater/node.sock
  headwater status --watch                         again and again, until Ctrl-C
  headwater status --json | jq '.namespaces[].held_bytes'

hit rate: of the tokens that requests asked for (in whole chunks), the share that was there. leases: chunks
that running loads are reading. quarantine: memory of saves that came too late, kept until their writers are
known to have stopped.
"""
TIMEOUT_S = 1.0

State = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """`--node`, `--watch`, `--json`."""
    parser.epilog = EXAMPLES
    add_config(parser)
    parser.add_argument(
        "--node", metavar="ADDRESS", type=reader(socket_address), help="the node, unix:/PATH (default: node.socket)"
    )
    watch = "show it again every so often, until Ctrl-C (default: 2s)"
    parser.add_argument("--watch", nargs="?", const=2.0, type=reader(parse_duration), metavar="DURATION", help=watch)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the state; raises UnavailableError without a node."""
    address = arguments.node or read_config(arguments).config.node.socket
    if arguments.watch is not None:
        _watch(address, arguments.watch, arguments.json)
        return 0
    try:
        state = fetch_status(address, TIMEOUT_S)
    except UnavailableError as error:
        raise UnavailableError(f"{error}; start one with `headwater node`, or name it with --node") from error
    if arguments.json:
        print(json.dumps(state))
    else:
        console().print(report(address, state))
    return 0


def report(address: str, state: State) -> RenderableType:
    """A state as tables."""
    return Group(_summary(address, state), "", _namespaces(state["namespaces"]))


def _watch(address: str, every_s: float, as_json: bool) -> None:
    """Until Ctrl-C; a node that is away is said to be, and looked for again."""
    try:
        if as_json:
            while True:
                print(json.dumps(_fetch_or_error(address)), flush=True)
                time.sleep(every_s)
        with Live(console=console(), auto_refresh=False) as live:
            while True:
                state = _fetch_or_error(address)
                live.update(state["error"] if "error" in state else report(address, state), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _fetch_or_error(address: str) -> State:
    try:
        return fetch_status(address, TIMEOUT_S)
    except UnavailableError as error:
        return {"error": str(error)}


def _summary(address: str, state: State) -> Table:
    host, tickets, expired = state["host"], state["tickets"], state["expired"]
    taken, capacity = host["taken_bytes"], host["capacity_bytes"]
    quarantine = f", {show_size(host['quarantined_bytes'])} in quarantine" if host["quarantined_bytes"] else ""
    trouble = {
        "loads expired": expired["load"],
        "saves expired": expired["save"],
        "refused": state["refused"],
        "turned away": state["turned_away"],
        "protocol errors": state["protocol_errors"],
        "unknown tickets": state["unknown_tickets"],
    }
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "node", f"{state['node'][:8]} at {address}, headwater {state['version']}, protocol {state['protocol']}"
    )
    table.add_row("up", show_span(state["uptime_s"]) + (", draining" if state["draining"] else ""))
    table.add_row("memory", f"{show_size(taken)} of {show_size(capacity)} ({show_share(taken, capacity)}){quarantine}")
    below = [f"{plain(it['name'])} {show_size(it['used_bytes'] or 0)} {it['health']}" for it in state["tiers"][1:]]
    table.add_row("below", ", ".join(below) or "no lower tier")
    table.add_row("engines", f"{state['instances']} alive; {state['sessions']} connections, this one included")
    table.add_row("running", f"{tickets['load']} loads, {tickets['save']} saves")
    told = [f"{count} {name}" for name, count in trouble.items() if count]
    told += [f"{plain(it['name'])} {why}" for it in state["tiers"] for why in troubles(it)]
    table.add_row("trouble", ", ".join(told) or "none")
    return table


def _namespaces(spaces: list[State]) -> RenderableType:
    if not spaces:
        return "no engine has registered yet"
    table = Table(box=None, pad_edge=False)
    for name in ("namespace", "model", "dtype", "tenant", "tier"):
        table.add_column(name, no_wrap=name != "tenant")
    for name in ("chunks", "held", "leases", "asked tokens", "hit rate", "stored", "evicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for it in spaces:
        table.add_row(
            it["namespace"],
            plain(it["model"][:16]),
            plain(it["kv_dtype"]),
            plain(it["tenant"]) or "-",
            it["tier"],
            show_count(it["held_chunks"]),
            show_size(it["held_bytes"]),
            show_count(it["leases"]),
            show_count(it["lookup_tokens"]),
            show_share(it["hit_tokens"], it["lookup_tokens"]),
            show_size(it["stored_bytes"]),
            show_size(it["evicted_bytes"]),
        )
    return table
