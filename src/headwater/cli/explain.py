"""`headwater explain`: where each chunk of a prompt is, or what came of a request."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich.table import Table

from headwater.cli.operate import add_keys, add_node, address_of, ask, check_count, known
from headwater.cli.prompts import Known, add_namespace, add_prompt, namespaces, prompt_tokens, read_keys
from headwater.cli.reasons import Found, State, explain_chunks
from headwater.cli.show import console, plain, show_count, show_span
from headwater.errors import ConfigError
from headwater.node.messages import Explain
from headwater.types import ChunkKey, Tier, pack_keys

EXAMPLES = """\
examples:
  headwater explain chatcmpl-6f1d2a                            what came of a request that an engine has named so
  headwater explain "Once upon a time" --model /models/llama   where each chunk of a prompt is, and why others are not
  headwater explain @chat.txt --model /models/llama --chat --namespace 3f9a
  headwater explain --tokens @prompt.json --json

A chunk that is nowhere was never stored, or has left: by whom and when is said as far as the node remembers. A tier
with a question mark did not answer, so nobody knows (in JSON: null among `remotes`). If another namespace has the same
tokens, the fields that differ are named: only equal namespaces share. Allowed to the node's own user and to root.
"""
HOST, DISK = Tier.HOST.value, Tier.DISK.value
KEY_DIGITS = 12
REMOTES_S, AGAIN_S = 3.0, 0.02
_IDS = re.compile(r"\s*\[?\s*[0-9]+\s*(,\s*[0-9]+\s*)+\]?\s*")


def configure(parser: argparse.ArgumentParser) -> None:
    """A request, or a prompt."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "what", nargs="?", metavar="PROMPT|REQUEST-ID", help="a prompt if --model is given, or token ids"
    )
    add_node(parser)
    add_namespace(parser)
    add_prompt(parser)
    add_keys(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain; 1 if the node has nothing to say."""
    request = _request(arguments)
    if request is not None:
        return _explain_request(arguments, request)
    tokens, keys = prompt_tokens(arguments), read_keys(arguments.key)
    if (tokens is None) == (not keys):
        raise ConfigError(
            "what is to be explained? name a request, a prompt (--tokens, or --text with --model) or --key"
        )
    address = address_of(arguments)
    everyone = known(address)
    asked = namespaces(arguments, everyone)
    found = [_ask(address, arguments, it, tokens, keys) for it in asked]
    others = [] if tokens is None else _others(address, arguments, everyone, asked, tokens)
    spaces = {it.root.hex(): it for it in everyone}
    states = [explain_chunks(it, [*found, *others], spaces) for it in found]
    if arguments.json:
        print(json.dumps({"ok": True, "prompt_tokens": None if tokens is None else len(tokens), "namespaces": states}))
    else:
        _print(found, states)
    return 0 if any(not it.is_blank for it in found) else 1


def _request(arguments: argparse.Namespace) -> str | None:
    """The request that is asked about; None, with the prompt in its option, if it is a prompt."""
    what: str | None = arguments.what
    if what is None:
        return None
    if arguments.tokens is not None or arguments.text is not None or arguments.key:
        raise ConfigError(f"{plain(what[:80])!r} and an option that names a prompt: leave one of them out")
    if arguments.model is not None:
        arguments.text = what
    elif _IDS.fullmatch(what) or what.startswith("@"):
        arguments.tokens = what
    elif re.search(r"\s", what):
        raise ConfigError("a prompt's text needs --model for its tokenizer; a request's name has no spaces")
    else:
        return what
    return None


# ---- a prompt ----------------------------------------------------------------------------------------------


def _ask(
    address: str, arguments: argparse.Namespace, it: Known, tokens: Sequence[int] | None, keys: list[ChunkKey]
) -> Found:
    if tokens is not None:
        keys = it.keys(tokens, arguments.adapter, arguments.salt)
    check_count(it, keys)
    record = replace(it.record, adapter=arguments.adapter or it.record.adapter, salt=arguments.salt)
    return Found(it, record, _chunks(address, it.root, keys), tokens is not None)


def _chunks(address: str, root: bytes, keys: Sequence[ChunkKey]) -> tuple[State, ...]:
    """What the node says of each chunk, with the names of the tiers that have it."""
    if not keys:
        return ()
    wish = Explain(root, pack_keys(keys))
    answer, until_s = ask(address, wish), time.monotonic() + REMOTES_S
    while answer["waiting"] and time.monotonic() < until_s:  # remote tiers are asked in the background
        time.sleep(AGAIN_S)
        answer = ask(address, wish)
    remotes = [name for name in answer["tiers"] if name != DISK]

    def where(chunk: State) -> list[str]:
        near = [name for name, there in ((HOST, chunk["host"]), (DISK, chunk["disk"])) if there]
        return near + [name for name, there in zip(remotes, chunk["remotes"], strict=True) if there]

    def silent(chunk: State) -> list[str]:
        return [name for name, there in zip(remotes, chunk["remotes"], strict=True) if there is None]

    return tuple(chunk | {"where": where(chunk), "silent": silent(chunk)} for chunk in answer["chunks"])


def _others(
    address: str,
    arguments: argparse.Namespace,
    everyone: Sequence[Known],
    asked: Sequence[Known],
    tokens: Sequence[int],
) -> list[Found]:
    """The same prompt where it was not asked: in other namespaces, and without the adapter and the salt."""
    there = [it for it in everyone if it not in asked or arguments.adapter or arguments.salt]
    return [Found(it, it.record, _chunks(address, it.root, it.keys(tokens))) for it in there]


# ---- for people --------------------------------------------------------------------------------------------


def _print(found: Sequence[Found], states: Sequence[State]) -> None:
    screen = console()
    if not found:
        screen.print("the node knows no namespace yet: no engine has registered")
    for it, state in zip(found, states, strict=True):
        chunks, size = state["chunks"], state["chunk_tokens"]
        record = it.it.record
        whose = f", tenant {plain(record.tenant)}" if record.tenant else ""
        screen.print(
            f"namespace {it.it.name}: {plain(record.model[:16])}, {plain(record.kv_dtype)}{whose}", soft_wrap=True
        )
        held = sum(bool(chunk["where"]) for chunk in chunks)
        prefix = f", {show_count(it.reach_tokens // size)} from the start without a gap" if it.is_prompt else ""
        screen.print(f"{show_count(len(chunks))} chunks of {size} tokens, {show_count(held)} of them held{prefix}")
        if chunks:
            screen.print(_table(chunks, size))
        screen.print("")


def _table(chunks: Sequence[State], size: int) -> Table:
    table = Table("chunks", "tokens", "key", "where", "why not", box=None, pad_edge=False)
    for first, last in _runs(chunks):
        span = f"{first['position']}" + (f"-{last['position']}" if last is not first else "")
        tokens = "-" if first["first_token"] is None else f"{first['first_token']}-{last['first_token'] + size - 1}"
        where = ", ".join([*map(plain, first["where"]), *(f"{plain(it)}?" for it in first["silent"])]) or "-"
        table.add_row(span, tokens, first["key"][:KEY_DIGITS], where, first["why"])
    return table


def _runs(chunks: Sequence[State]) -> Iterator[tuple[State, State]]:
    """Neighbours with the same fate, first and last of each run; when exactly they left may differ."""

    def fate(chunk: State) -> tuple[object, ...]:
        return tuple(chunk["where"]), tuple(chunk["silent"]), re.sub(r" [0-9][^,;]* ago", "", chunk["why"])

    for _, run in groupby(chunks, key=fate):
        members = list(run)
        yield members[0], members[-1]


# ---- a request ---------------------------------------------------------------------------------------------


def _explain_request(arguments: argparse.Namespace, request: str) -> int:
    address = address_of(arguments)
    record = ask(address, Explain(b"", b"", request))["request"]
    spaces = {it.root.hex(): it for it in known(address)}
    it = spaces[record["namespace"]]
    keys = [ChunkKey(bytes.fromhex(key)) for key in record["keys"]]
    found = Found(it, it.record, _chunks(address, it.root, keys))
    state = explain_chunks(found, [found], spaces)
    if arguments.json:
        print(json.dumps({"ok": True, "request": record, "namespaces": [state]}))
    else:
        console().print(request_report(record, it.name), soft_wrap=True)
        console().print("\nwhere its chunks are now:")
        _print([found], [state])
    return 0


def request_report(record: State, namespace: str) -> str:
    """What came of a request, in sentences."""
    brought = ", ".join(f"{show_count(count)} from {plain(name)}" for name, count in record["brought"].items() if count)
    estimate = "" if record["estimate_s"] is None else f", estimated {show_span(record['estimate_s'])}"
    waited = f"waited {show_span(record['waited_s'])}{estimate}"
    lines = [
        f"request {plain(record['request'])} in namespace {namespace}, {show_span(record['seconds_ago'])} ago",
        f"asked for {show_count(len(record['keys']))} chunks, {show_count(record['host'])} of them in host memory",
        f"planned to load {show_count(record['planned'])}, brought up {brought or 'none'}, {waited}",
        f"loaded {show_count(record['chunks'])}",
    ]
    computed = len(record["keys"]) - record["chunks"]
    if computed > 0:
        lines[-1] += f", computed {show_count(computed)}: {plain(record['why']) or 'held nowhere'}"
    return "\n".join(lines)
