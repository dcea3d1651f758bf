"""`headwater conductor explain`: why a request went where it went, and what it really took."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from rich.console import Group, RenderableType
from rich.table import Table

from headwater.cli.conductor_asking import add_control, error_of, fetch
from headwater.cli.options import add_json
from headwater.cli.show import console, plain, show_count
from headwater.errors import UnavailableError

EXAMPLES = """\
examples:
  headwater conductor explain hw-1a2b-3c           the id of the response header x-request-id
  headwater conductor explain hw-1a2b-3c --json | jq '.explained.tries[0].candidates'

queue: what waits there before it. fetch: bringing KV from where it is. prefill: computing the rest. cost: what the
policy compares, which may count more than this request's own seconds. A request that was lost and sent again has
several tries.
"""

State = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """The id, `--control`, `--token-file`, `--json`."""
    parser.epilog = EXAMPLES
    parser.add_argument("request", metavar="REQUEST-ID", help="as the response's headers say it")
    add_control(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print it; raises UnavailableError if it is not remembered."""
    status, state = fetch(arguments, "/explain/" + quote(arguments.request, safe=""))
    if status != 200:
        hint = "; conductor.explained in the fleet file says how many are remembered" if status == 404 else ""
        raise UnavailableError(f"{plain(arguments.request)}: {plain(error_of(state))}{hint}")
    if arguments.json:
        print(json.dumps(state))
    else:
        console().print(report(state))
    return 0


def report(state: State) -> RenderableType:
    """A request as text and tables."""
    it = state["explained"]
    parts: list[RenderableType] = [_summary(state.get("worker"), it)]
    tries = it.get("tries") or []
    for place, each in enumerate(tries, 1):
        parts += ["", _choice(each, place, len(tries)), _candidates(each)]
        if each.get("left_out"):
            parts.append(f"and {show_count(each['left_out'])} more instances, which are not remembered")
    if not tries:
        parts += ["", "it was not sent to any instance"]
    return Group(*parts)


def _summary(worker: object, it: State) -> Table:
    took = it.get("took") or {}
    table = Table.grid(padding=(0, 2))
    tenant = f", tenant {plain(it['tenant'])}" if it.get("tenant") else ""
    table.add_row("request", f"{plain(str(it.get('request')))}, model {plain(str(it.get('model')))}{tenant}")
    counted = plain(str(it.get("counted") or "-"))
    table.add_row("prompt", f"{show_count(it.get('prompt_tokens') or 0)} tokens (counted: {counted})")
    goals = [f"{word} {_time(it.get(name))}" for name, word in _GOALS if it.get(name) is not None]
    table.add_row("goals", ", ".join(goals) or "none")
    table.add_row("outcome", f"{plain(str(it.get('outcome')))}, by worker {worker}")
    told = [f"{word} {_time(took.get(name))}" for name, word in _TOOK if took.get(name) is not None]
    table.add_row("it took", ", ".join(told) or "not known yet")
    if took.get("answered_tokens") is not None:
        cached = took.get("cached_tokens")
        engine = "the engine does not say what it reused" if cached is None else f"{show_count(cached)} were reused"
        found = took.get("found_tokens")
        handed = "" if found is None else f"; {show_count(found)} were found by the one that answered"
        table.add_row("tokens", f"{show_count(took['answered_tokens'])} answered; of the prompt {engine}{handed}")
    return table


def _choice(it: State, place: int, tries: int) -> str:
    """Where it went, and why in one sentence."""
    which = f"try {place} of {tries}: " if tries > 1 else ""
    decode = "" if it.get("decode") in (None, it.get("instance")) else f", to decode at {plain(str(it['decode']))}"
    estimated = it.get("estimated") or {}
    said = f"{which}chosen {plain(str(it.get('instance')))}{decode}: first token estimated in "
    said += _time(estimated.get("ttft_s"))
    if decode:
        said += f", {_time(estimated.get('handoff_s'))} of it to hand it over"
    reused = [f"{show_count(it['cached_tokens'])} tokens there"] if it.get("cached_tokens") else []
    if it.get("fetched_tokens"):
        reused.append(f"{show_count(it['fetched_tokens'])} fetched from {plain(str(it.get('source')))}")
    said += f", with {' and '.join(reused)}" if reused else ", with nothing to reuse"
    if it.get("needless"):
        said += ", as nothing would be handed over to it"
    if it.get("waited_s"):
        said += f"; it waited {_time(it['waited_s'])} before"
    if it.get("prefill_lost"):
        said += f"; its prompt was not computed there ({plain(str(it['prefill_lost']))})"
    if it.get("lost"):
        said += f"; it was lost there ({plain(str(it['lost']))})"
    return said


def _candidates(it: State) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("candidate", no_wrap=True)
    for name in ("cost", "queue", "fetch", "prefill", "decode", "cached", "fetched"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in it.get("candidates") or []:
        is_chosen = row.get("instance") == it.get("instance")
        table.add_row(
            ("> " if is_chosen else "  ") + plain(str(row.get("instance") or "(gone)")),
            *(_time(row.get(name)) for name in ("cost_s", "queue_s", "fetch_s", "prefill_s", "decode_s")),
            *(show_count(row.get(name) or 0) for name in ("cached_tokens", "fetched_tokens")),
            style="bold" if is_chosen else None,
        )
    return table


def _time(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return "-"
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"


_GOALS = (("ttft_slo_s", "first token within"), ("tpot_slo_s", "each token within"))
_TOOK = (
    ("prefilled_s", "its prompt"),
    ("first_token_s", "first token"),
    ("per_token_s", "each token"),
    ("whole_s", "in all"),
)
