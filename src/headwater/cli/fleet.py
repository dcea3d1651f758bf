"""`headwater fleet`: instances with their roles, loads and reuse, who asks and waits, event sources, what is hot."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from headwater.cli.conductor_asking import add_control, error_of, fetch
from headwater.cli.options import add_json, reader
from headwater.cli.show import console, plain, show_count, show_share, show_span
from headwater.errors import UnavailableError
from headwater.values import parse_duration

EXAMPLES = """\
examples:
  headwater fleet                                  the Conductor of this host, at 127.0.0.1:8001
  headwater fleet --watch                          again and again, until Ctrl-C
  headwater fleet --control http://10.0.0.5:8001 --token-file token
  headwater fleet --json | jq '.brain.instances[] | select(.alive | not)'

device, fetched: of the tokens of prompts that were answered, the share that the instance had itself and the share that
it fetched from memory, disk, another node or the store. gaps: events of an engine that were missed; a resync forgets
all that was known of it and learns it anew. A key is the beginning of a prefix's key, and tells nothing of its text.
Exit code 1: the fleet does not serve.
"""
HOT_SHOWN = 10
SOURCE_TROUBLE = ("gaps", "replays", "resyncs", "restarts", "dropped", "malformed", "overflows", "unreadable", "losses")

State = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """`--control`, `--token-file`, `--watch`, `--json`."""
    parser.epilog = EXAMPLES
    add_control(parser)
    watch = "show it again every so often, until Ctrl-C (default: 2s)"
    parser.add_argument("--watch", nargs="?", const=2.0, type=reader(parse_duration), metavar="DURATION", help=watch)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the fleet; 1 if it does not serve. Raises UnavailableError without a Conductor."""
    if arguments.watch is not None:
        return _watch(arguments)
    state = read_state(arguments)
    if arguments.json:
        print(json.dumps(state))
    else:
        console().print(report(state))
    return 0 if state.get("ready") else 1


def read_state(arguments: argparse.Namespace) -> State:
    """What the control API says of the fleet; raises UnavailableError."""
    status, state = fetch(arguments, "/fleet")
    if status != 200:
        raise UnavailableError(f"{arguments.control} answered {status}: {plain(error_of(state))}")
    return state


def report(state: State) -> RenderableType:
    """A fleet as tables."""
    brain, sight, tenants = (_dict(state.get(name)) for name in ("brain", "sight", "tenants"))
    instances = _dicts(brain.get("instances"))
    parts: list[RenderableType] = [_summary(state, instances), "", _instances(instances)]
    waiting = _dict(brain.get("waiting"))
    for table in (
        _tenants(_dicts(tenants.get("rows")), waiting),
        _sources(_dict(sight.get("sources"))),
        _hottest(_dicts(sight.get("hottest"))),
        _workers(_dicts(state.get("workers"))),
    ):
        if table is not None:
            parts += ["", table]
    return Group(*parts)


def _watch(arguments: argparse.Namespace) -> int:
    """Until Ctrl-C; a Conductor that is away is said to be, and looked for again."""
    try:
        if arguments.json:
            while True:
                print(json.dumps(_state_or_error(arguments)), flush=True)
                time.sleep(arguments.watch)
        with Live(console=console(), auto_refresh=False) as live:
            while True:
                state = _state_or_error(arguments)
                away = state.get("unavailable")
                live.update(report(state) if away is None else str(away), refresh=True)
                time.sleep(arguments.watch)
    except KeyboardInterrupt:
        return 0


def _state_or_error(arguments: argparse.Namespace) -> State:
    try:
        return read_state(arguments)
    except UnavailableError as error:
        return {"unavailable": str(error)}


def _summary(state: State, instances: Sequence[State]) -> Table:
    brain, sight = _dict(state.get("brain")), _dict(state.get("sight"))
    serving = sum(_standing(it) == "serving" for it in instances)
    answers = "yes" if state.get("ready") else f"no: {plain(str(state.get('reason')))}"
    table = Table.grid(padding=(0, 2))
    version, policy = plain(str(state.get("version"))), plain(str(brain.get("policy") or state.get("policy")))
    table.add_row("conductor", f"at {plain(str(state.get('listen')))}, headwater {version}, policy {policy}")
    table.add_row("up", show_span(_number(state.get("uptime_s"))))
    table.add_row("serves", f"{answers}; {serving} of {len(instances)} instances")
    waiting = sum(map(_number, _dict(brain.get("waiting")).values()))
    table.add_row("requests", f"{show_count(int(_number(brain.get('under_way'))))} under way, {waiting:.0f} waiting")
    for name, words in (("ttft_seconds", "first token"), ("tpot_seconds", "each token")):
        if found := _dict(_dict(state.get("latencies")).get(name)):
            half, most = (show_span(_number(found.get(it))) for it in ("p50_s", "p90_s"))
            table.add_row(words, f"half within {half}, 90 % within {most}, of {_number(found.get('count')):,.0f}")
    if "keys" in sight:
        table.add_row("index", f"{show_count(sight['keys'])} keys of at most {show_count(sight.get('keys_max', 0))}")
    if unknown := _number(_dict(state.get("tenants")).get("unknown_keys")):
        table.add_row("unknown keys", show_count(int(unknown)))
    return table


def _instances(rows: Sequence[State]) -> RenderableType:
    if not rows:
        return "there are no instances: name some in the fleet file, or register them"
    table = _table(("instance", "role", "node", "model", "state"), (
        "waiting", "tokens", "running", "KV tokens", "KV full", "prefill/s", "answered", "device", "fetched"
    ))  # fmt: skip
    for it in rows:
        standing, prompt = _standing(it), _number(it.get("prompt_tokens"))
        table.add_row(
            *(plain(str(it.get(name) or "-")) for name in ("name", "role", "node", "model")),
            standing,
            *(_count(it.get(name)) for name in ("waiting_requests", "waiting_tokens")),
            *(_count(it.get(name)) for name in ("running_requests", "running_tokens")),
            show_share(_number(it.get("running_tokens")), _number(it.get("capacity_tokens"))),
            _count(it.get("prefill_tokens_s")),
            _count(it.get("ended_requests")),
            *(show_share(_number(it.get(name)), prompt) for name in ("device_tokens", "fetched_tokens")),
            style=None if standing == "serving" else "bold red",
        )
    return table


def _standing(it: State) -> str:
    """What may be expected of an instance."""
    if not it.get("alive"):
        return f"out ({plain(str(it['health']))})" if it.get("health") else "out"
    if it.get("draining"):
        return "draining"
    share = _number(it.get("share", 1.0))
    return "serving" if share >= 1 else f"back, {100 * share:.0f} %"


def _tenants(rows: Sequence[State], waiting: Mapping[str, Any]) -> Table | None:
    if [it.get("tenant") for it in rows] in ([], [""]) and not any(_dict(it.get("refused")) for it in rows):
        return None
    table = _table(("tenant", "refused by quota"), ("in progress", "waiting", "tokens"))
    for it in rows:
        name = str(it.get("tenant"))
        refused = ", ".join(f"{_count(count)} {plain(why)}" for why, count in _dict(it.get("refused")).items())
        numbers = (_count(it.get("in_progress")), _count(waiting.get(name, 0)), _count(it.get("spent_tokens")))
        table.add_row(plain(name) or "-", refused or "-", *numbers)
    return table


def _sources(sources: Mapping[str, Any]) -> Table | None:
    if not sources:
        return None
    table = _table(("events from", "instance", "state", "trouble"), ("batches",))
    for name, said in sources.items():
        it = _dict(said)
        is_well = bool(it.get("settled", it.get("up")))
        told = [f"{_count(it[word])} {word}" for word in SOURCE_TROUBLE if it.get(word)]
        told += [plain(str(it["trouble"]))] if it.get("trouble") else []
        instance = plain(str(it.get("instance") or "-")) + (f" rank {it['rank']}" if it.get("rank") else "")
        batches = _count(it.get("applied", it.get("answers")))
        row = (plain(name), instance, "well" if is_well else "behind", ", ".join(told) or "-", batches)
        table.add_row(*row, style=None if is_well else "bold red")
    return table


def _hottest(rows: Sequence[State]) -> Table | None:
    if not rows:
        return None
    table = _table(("hottest prefixes", "held by"), ("tokens", "met"))
    for it in rows[:HOT_SHOWN]:
        places = ", ".join(plain(str(place)) for place in it.get("places") or ())
        table.add_row(plain(str(it.get("key"))), places or "-", _count(it.get("tokens")), _count(it.get("hits")))
    return table


def _workers(rows: Sequence[State]) -> Table | None:
    table = _table(("worker", "state", "trouble"), ("pid", "heard"))
    for it in rows:
        state = "draining" if it.get("draining") else "ready" if it.get("ready") else "not ready"
        heard = "never" if it.get("heard_s") is None else f"{show_span(_number(it['heard_s']))} ago"
        trouble = plain(str(it.get("trouble") or "-"))
        row = (str(it.get("worker")), state, trouble, str(it.get("pid") or "-"), heard)
        table.add_row(*row, style="bold red" if it.get("trouble") else None)
    return table if rows else None


def _table(words: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in words:
        table.add_column(name, no_wrap=name not in ("trouble", "held by", "refused by quota"))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[State]:
    return [it for it in value if isinstance(it, dict)] if isinstance(value, list) else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _count(value: object) -> str:
    return show_count(round(value)) if isinstance(value, int | float) else "-"
