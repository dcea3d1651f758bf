"""`headwater trace export`: one's own production log as a trace that holds no text."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headwater.cli.bars import Bar
from headwater.cli.options import add_json
from headwater.cli.show import show_count
from headwater.cli.tokenizing import load_tokenizer
from headwater.cli.trace_facts import print_facts
from headwater.errors import ConfigError
from headwater.traces.export import FIELDS, Exporter, read_paths
from headwater.traces.facts import facts
from headwater.traces.fields import BadRecord
from headwater.traces.model import Trace, TraceRequest
from headwater.traces.opening import lines
from headwater.traces.read import TIMES
from headwater.traces.write import write

EPILOG = f"""\
examples:
  headwater trace export log.jsonl --out trace.jsonl                            the log has prompt_token_ids
  headwater trace export log.jsonl.gz --out trace.jsonl --tokenizer /models/llama     it has messages or prompt
  headwater trace export log.jsonl --out trace.jsonl --field messages=request.messages \\
      --field completion_tokens=response.usage.completion_tokens --tokenizer /models/llama

A line of the log is a JSON object with a timestamp (seconds or milliseconds since 1970, or ISO 8601), a prompt
(prompt_token_ids; messages or prompt with --tokenizer; or hash_ids with input_length) and the answer's length
(usage.completion_tokens, output_length, or the completion itself). Fields: {", ".join(FIELDS)}.

The trace has block hashes, lengths and times from its beginning, in milliseconds; no text and no token ids. Hashes are
made with a key that is drawn for this export and kept nowhere, then numbered by first use; sessions and tenants are
hashed with it, too. What remains visible is who shares how much with whom, how long, and when.
"""
SHOWN_BAD = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """The log, the trace, and where the log has what."""
    parser.epilog = EPILOG
    parser.add_argument("log", metavar="LOG", help="JSON lines, plain or gzip")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the trace is written")
    parser.add_argument(
        "--block-tokens", type=int, choices=(16, 512), default=512, help="tokens a block (default: 512)"
    )
    name = "folder or name of the model, for its tokenizer and chat template (not downloaded)"
    parser.add_argument("--tokenizer", metavar="DIR|NAME", help=name)
    where = "where the log has a field, as in prompt=request.prompt; may be repeated"
    parser.add_argument("--field", action="append", default=[], metavar="NAME=PATH", help=where)
    parser.add_argument("--time-unit", choices=sorted(TIMES), help="of timestamps that are not times since 1970")
    parser.add_argument("--skip-bad", action="store_true", help="leave out and count lines that cannot be read")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the trace, and say what it is like."""
    log, out = Path(arguments.log), Path(arguments.out)
    if out.exists() and log.exists() and os.path.samefile(log, out):
        raise ConfigError(f"--out {out}: this is the log itself; name another file")
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: no file can be there; name one in a folder that exists")  # before a long log
    tokenizer = load_tokenizer(arguments.tokenizer, "--tokenizer") if arguments.tokenizer is not None else None
    exporter = Exporter(arguments.block_tokens, tokenizer, arguments.time_unit, read_paths(arguments.field))
    bad: list[str] = []
    with Bar("reading the log") as bar:
        requests = list(_requests(log, exporter, bar, bad, skip=arguments.skip_bad))
    if not requests:
        raise ConfigError(f"{log}: no requests{'; first: ' + bad[0] if bad else ''}")
    trace = in_order(requests, out.name.partition(".")[0], arguments.block_tokens)
    write(trace, out)
    found = facts(trace)
    if arguments.json:
        print(json.dumps({"ok": True, "out": str(out), "skipped": len(bad), **found.as_dict()}))
        return 0
    print_facts(found, [f"skipped: {it}" for it in bad[:SHOWN_BAD]])
    skipped = f", {show_count(len(bad))} lines skipped" if bad else ""
    print(f"wrote {out}: {show_count(len(requests))} requests{skipped}; no text, no token ids")
    return 0


def in_order(requests: Sequence[TraceRequest], name: str, block_tokens: int) -> Trace:
    """Requests by arrival, on a clock that begins with the first."""
    ordered = sorted(requests, key=lambda it: it.arrival_s)
    begin = ordered[0].arrival_s
    return Trace(name, block_tokens, tuple(replace(it, arrival_s=round(it.arrival_s - begin, 3)) for it in ordered))


def _requests(log: Path, exporter: Exporter, bar: Bar, bad: list[str], *, skip: bool) -> Iterator[TraceRequest]:
    for number, line in lines(log, bar.advance):
        try:
            yield exporter.take(line)
        except BadRecord as error:
            message = f"{log}, line {number}: {error}"
            if not skip:
                raise ConfigError(f"{message} (such lines can be left out: --skip-bad)") from None
            bad.append(message)
