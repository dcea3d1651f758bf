"""`headwater trace facts`: what a trace is like, and the most that any cache could reuse of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.table import Table

from headwater.cli.bars import Bar
from headwater.cli.options import add_json
from headwater.cli.show import console, plain, show_count, show_span
from headwater.traces.facts import Facts, Spread, facts
from headwater.traces.read import TIMES, Opened, read

EPILOG = """\
examples:
  headwater trace facts conversation_trace.jsonl
  headwater trace facts trace.jsonl.gz --block-tokens 16 --json

Formats: JSON lines as published with Mooncake (milliseconds) or as Qwen-Bailian (chat_id, seconds), and CSV with
TIMESTAMP,ContextTokens,GeneratedTokens as Azure's. reuse max is what a cache that forgets nothing would serve.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The trace."""
    parser.epilog = EPILOG
    parser.add_argument("trace", metavar="FILE", help="a trace, plain or gzip")
    add_reading(parser)
    add_json(parser)


def add_reading(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options of how a trace is read."""
    parser.add_argument("--block-tokens", type=int, metavar="N", help="tokens a block (default: found out)")
    parser.add_argument("--time-unit", choices=sorted(TIMES), help="of timestamps (default: ms; s with chat_id)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out and count lines that cannot be read")


def read_trace(arguments: argparse.Namespace) -> Opened:
    """The trace that is named, read as those options say."""
    with Bar("reading the trace") as bar:
        return read(
            arguments.trace,
            block_tokens=arguments.block_tokens,
            time_unit=arguments.time_unit,
            skip_bad=arguments.skip_bad,
            advance=bar.advance,
        )


def run(arguments: argparse.Namespace) -> int:
    """Print the facts."""
    opened = read_trace(arguments)
    found = facts(opened.trace)
    if arguments.json:
        print(json.dumps({"ok": True, "skipped": opened.skipped, "notes": opened.notes, **found.as_dict()}))
    else:
        print_facts(found, opened.notes)
    return 0


def print_facts(found: Facts, notes: Sequence[str]) -> None:
    """The facts as a table; what was noticed goes to standard error."""
    for note in notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    rate = f" ({found.requests / found.span_s:.3g} a second)" if found.span_s else ""
    table = Table("trace", plain(found.name))
    table.add_row("requests", show_count(found.requests) + rate)
    table.add_row("span", show_span(found.span_s))
    table.add_row("prompt tokens", _spread(found.input_tokens))
    table.add_row("answer tokens", _spread(found.output_tokens))
    if found.blocks:
        unique = f"{show_count(found.blocks)}, {show_count(found.blocks_unique)} of them different"
        table.add_row("blocks", f"{unique}, of {found.block_tokens} tokens")
        table.add_row("reuse max", f"{found.reuse_max:.1%} of the prompt tokens, in a cache that forgets nothing")
        table.add_row("until used again", _spread(found.gap_s, " s"))
    if found.sessions or found.tenants:
        table.add_row("sessions, tenants", f"{show_count(found.sessions)}, {show_count(found.tenants)}")
    console().print(table)


def _spread(it: Spread, unit: str = "") -> str:
    values = {"mean": it.mean, "p50": it.p50, "p90": it.p90, "p99": it.p99, "max": it.most}
    return ", ".join(f"{name} {value:,.0f}" for name, value in values.items()) + unit
