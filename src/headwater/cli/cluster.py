"""`headwater cluster`: who is in the cluster, how full and how fast, and what is hot; `headwater cluster top`, live."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from headwater.cli.options import add_config, add_json, add_setting, flag_of, read_config, reader
from headwater.cli.show import console, plain, show_count, show_share, show_size, show_span
from headwater.directory.open import open_directory
from headwater.errors import ConfigError, UnavailableError
from headwater.node.reports import read_report
from headwater.ports import Directory
from headwater.types import Listed, Standing
from headwater.values import parse_duration

EXAMPLES = """\
examples:
  headwater cluster --directory redis://kv:6379 --cluster prod
  headwater cluster top                            again and again, until Ctrl-C
  headwater cluster --json | jq '.members[] | select(.standing != "serving")'

It asks the directory alone, so it also works where no node runs. An epoch is one life of a node: a restarted one has
another. heard: how long ago the node's last beat was; a silent node is not chosen, and what it holds is not forgotten.
served: what other nodes have read from it. links: as measured by what was moved, seen from the first node.
"""
CALL_S = 2.0
HOT_SHOWN = 10

State = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """`top`, `--directory`, `--cluster`, `--every`, `--json`."""
    parser.epilog = EXAMPLES
    parser.add_argument("view", nargs="?", choices=("list", "top"), default="list", help="once (list), or live (top)")
    add_config(parser)
    for name in ("node.directory", "node.cluster"):
        add_setting(parser, name, flag_of(name))
    parser.add_argument("--every", type=reader(parse_duration), default=1.0, metavar="DURATION", help="pace of top")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the cluster; 1 if somebody is silent."""
    config = read_config(arguments).config.node
    if not config.directory:
        raise ConfigError("node.directory is empty: name the cluster's directory with --directory redis://HOST:6379")
    if arguments.view == "top" and arguments.json:
        raise ConfigError("top with --json: a live view is for people; leave one of them")
    directory = open_directory(config.directory, config.cluster)
    try:
        if arguments.view == "top":
            return _watch(directory, config.cluster, arguments.every)
        state = read_state(directory, config.cluster)
    finally:
        directory.close()
    if arguments.json:
        print(json.dumps(state))
    else:
        console().print(report(state))
    return 1 if any(it["standing"] == Standing.SILENT.value for it in state["members"]) else 0


def read_state(directory: Directory, cluster: str) -> State:
    """What the directory says of the cluster; raises UnavailableError."""
    began_s = time.monotonic()
    members = directory.members(began_s + CALL_S)
    answered_s = time.monotonic() - began_s
    return {
        "cluster": cluster,
        "directory_answered_s": round(answered_s, 6),
        "members": [_member(it) for it in sorted(members, key=lambda it: (it.member.name, it.number))],
        "hot": _hot(members),
    }


def report(state: State) -> RenderableType:
    """The cluster as tables."""
    members = state["members"]
    table = Table(box=None, pad_edge=False)
    for name in ("node", "standing", "number", "epoch", "address", "labels"):
        table.add_column(name, no_wrap=name != "labels")
    for name in ("memory", "used", "disk", "heard", "served", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    for it in members:
        table.add_row(*_member_row(it), style="bold red" if it["standing"] == Standing.SILENT.value else None)
    serving = sum(it["standing"] == Standing.SERVING.value for it in members)
    capacity, used = (sum(it["report"].get(name, 0) for it in members) for name in ("capacity_bytes", "used_bytes"))
    said = f"cluster {plain(state['cluster'])}: {serving} of {len(members)} nodes serve, "
    said += f"{show_size(used)} of {show_size(capacity)} used; the directory answered in "
    said += show_span(state["directory_answered_s"])
    parts: list[RenderableType] = [said, "", table]
    if links := _links(members):
        parts += ["", links]
    if state["hot"]:
        parts += ["", _hot_table(state["hot"])]
    return Group(*parts)


def _watch(directory: Directory, cluster: str, every_s: float) -> int:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            try:
                live.update(report(read_state(directory, cluster)), refresh=True)
            except UnavailableError as error:
                live.update(f"the directory does not answer: {error}", refresh=True)
            time.sleep(every_s)


def _member(it: Listed) -> State:
    member = it.member
    return {
        "name": member.name,
        "number": it.number,
        "epoch": member.epoch,
        "standing": it.standing.value,
        "heard_s": round(it.heard_s, 3),
        "address": member.address,
        "host": member.host,
        "labels": member.labels,
        "transports": list(member.transports),
        "version": member.version,
        # Whatever a node says of itself must not hide the others: what makes no sense is left out.
        "report": msgspec.to_builtins(read_report(it.report)),
    }


def _member_row(it: State) -> list[str]:
    told = it["report"]
    capacity, used = told.get("capacity_bytes", 0), told.get("used_bytes", 0)
    lookups, hits = told.get("lookup_tokens", 0), told.get("hit_tokens", 0)
    return [
        plain(it["name"]),
        it["standing"],
        str(it["number"]),
        f"{it['epoch']:x}"[-8:],
        plain(it["address"]),
        ",".join(f"{plain(name)}={plain(value)}" for name, value in it["labels"].items()) or "-",
        show_size(capacity),
        f"{show_size(used)} ({show_share(used, capacity)})",
        show_size(told["disk_used_bytes"]) if told.get("disk_capacity_bytes") else "-",
        f"{show_span(it['heard_s'])} ago",
        show_size(told.get("served_bytes", 0)),
        show_share(hits, lookups),
    ]


def _links(members: Sequence[State]) -> RenderableType | None:
    """Who reads from whom, how fast."""
    names = {it["number"]: it["name"] for it in members}
    rows = [(it["name"], link) for it in members for link in it["report"].get("peers", ())]
    rows = [(name, link) for name, link in rows if link.get("number") in names]
    if not rows:
        return None
    table = Table(box=None, pad_edge=False)
    for name in ("reader", "from", "by", "health"):
        table.add_column(name, no_wrap=True)
    for name in ("latency", "bandwidth", "read", "in flight", "hedged"):
        table.add_column(name, justify="right", no_wrap=True)
    for reader_name, link in rows:
        latency, rate = link.get("latency_s"), link.get("bytes_s")
        table.add_row(
            plain(reader_name),
            plain(names[link["number"]]),
            plain(str(link.get("transport", "-"))),
            plain(str(link.get("health", "-"))),
            "-" if latency is None else f"{latency * 1e3:.3g} ms",
            "-" if rate is None else f"{show_size(rate)}/s",
            show_size(link.get("read_bytes", 0)),
            show_size(link.get("in_flight_bytes", 0)),
            show_count(link.get("hedged", 0)),
            style=None if link.get("health") == "well" else "bold red",
        )
    return table


def _hot(members: Sequence[Listed]) -> list[State]:
    """The hottest prefixes over all nodes."""
    found: dict[str, State] = {}
    for it in members:
        for hot in _member(it)["report"].get("hot", ()):
            if not isinstance(hot, dict) or not isinstance(hot.get("prefix"), str):
                continue
            known = found.setdefault(hot["prefix"], {"prefix": hot["prefix"], "rate": 0.0, "readers": 0, "nodes": []})
            known["rate"] += float(hot.get("rate", 0.0))
            known["readers"] = max(known["readers"], int(hot.get("readers", 0)))
            known["replicas"] = max(known.get("replicas", 0), int(hot.get("replicas", 0)))
            known["nodes"].append(it.member.name)
    return sorted(found.values(), key=lambda hot: -hot["rate"])[:HOT_SHOWN]


def _hot_table(hot: Sequence[State]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    table.add_column("hottest prefixes", no_wrap=True)
    for name in ("reads/s", "readers", "replicas"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("said by")
    for it in hot:
        nodes = ", ".join(map(plain, it["nodes"]))
        table.add_row(plain(it["prefix"]), f"{it['rate']:.3g}", str(it["readers"]), str(it["replicas"]), nodes)
    return table
