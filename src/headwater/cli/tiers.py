"""`headwater tiers`: how full, how fast and how well each tier of a node is."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from headwater.cli.operate import add_node, address_of, ask
from headwater.cli.show import console, plain, show_count, show_share, show_size, show_span
from headwater.node.messages import Tiers

EXAMPLES = """\
examples:
  headwater tiers
  headwater tiers --json | jq '.tiers[] | select(.health != "well")'

hits: of the tokens that requests asked for, the share that came from this tier. read and write: latency and bandwidth
as measured by what was moved, not as promised by the device. queued: chunks that wait to go down, and bytes on their
way. dropped: chunks that left HOST before their turn came. A sick tier is skipped, and tried again by itself; below
the table is why it was last found so.
"""

ERRORS = ("corrupt", "damaged", "failed", "full", "newer", "refused")
"""What is trouble; that a chunk is not there, or another in its place, is an ordinary miss."""

State = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """`--node`, `--json`."""
    parser.epilog = EXAMPLES
    add_node(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the tiers."""
    state = ask(address_of(arguments), Tiers())
    if arguments.json:
        print(json.dumps(state))
    else:
        console().print(report(state))
    return 0


def report(state: State) -> RenderableType:
    """The tiers as a table, nearest first."""
    table = Table(box=None, pad_edge=False)
    for name in ("tier", "health"):
        table.add_column(name, no_wrap=name != "tier")
    for name in ("capacity", "used", "hits", "read", "write", "queued", "was read", "was written", "dropped", "errors"):
        table.add_column(name, justify="right", no_wrap=True)
    for it in state["tiers"]:
        table.add_row(*_row(it), style="bold red" if it["health"] != "well" else None)
    told = [f"{plain(it['name'])}: {why}" for it in state["tiers"] if (why := ", ".join(troubles(it)))]
    return Group(table, "", *told, _fetches(state["fetches"]))


def troubles(it: State) -> list[str]:
    """What is wrong with a tier, in words."""
    found, error = [], it.get("last_error")
    if it["health"] != "well":
        reason = f" ({plain(error['reason'])}, {show_span(error['seconds_ago'])} ago)" if error else ""
        found.append(plain(it["health"]) + reason)
    if it.get("full"):
        found.append("full")
    if it.get("journal_broken"):
        found.append("its journal is damaged, the next start looks at every slot instead")
    if it.get("journal_failures"):
        found.append(f"{show_count(it['journal_failures'])} writes of its journal failed")
    if it.get("journal_forgotten_chunks"):
        count = show_count(it["journal_forgotten_chunks"])
        found.append(f"{count} chunks are not in its journal and will not outlive the node")
    return found


def _fetches(it: State) -> str:
    if not it["begun"]:
        return "no request has been brought anything from below host memory yet"
    error = (
        f"estimates were off by {100 * it['estimate_error']:.0f} % on average" if it["estimates"] else "none measured"
    )
    return (
        f"requests that waited for lower tiers: {show_count(it['begun'])}, {show_count(it['cut'])} cut short; {error}"
    )


def _row(it: State) -> list[str]:
    capacity, used = it["capacity_bytes"], it["used_bytes"]
    share = f" ({show_share(used, capacity)})" if capacity and used is not None else ""
    row = [
        plain(it["name"]),
        plain(it["health"]) + (", full" if it.get("full") else ""),
        "-" if capacity is None else show_size(capacity),
        ("-" if used is None else show_size(used)) + share,
        show_share(it["hit_tokens"], it["lookup_tokens"]),
    ]
    if it["tier"] == "host":  # engines move these bytes themselves
        return [*row, *["-"] * 7]
    errors = ", ".join(f"{show_count(it['errors'][kind])} {kind}" for kind in ERRORS if it["errors"].get(kind))
    return [
        *row,
        _speed(it["read_latency_s"], it["read_bytes_s"]),
        _speed(it["write_latency_s"], it["write_bytes_s"]),
        f"{show_count(it['queued_chunks'])} + {show_size(it['moving_bytes'])}",
        show_size(it["read_bytes"]),
        show_size(it["written_bytes"]),
        show_count(it["dropped_chunks"]),
        errors or "none",
    ]


def _speed(latency_s: float | None, bytes_s: float | None) -> str:
    """`0.4 ms, 2.1 GiB/s`; a dash before anything was measured."""
    if latency_s is None:
        return "-"
    return f"{latency_s * 1e3:.3g} ms" + ("" if bytes_s is None else f", {show_size(bytes_s)}/s")
