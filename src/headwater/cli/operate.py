"""What the commands of an operator share: which node, which chunks of which namespaces, and one answer for all."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from headwater.cli.options import add_config, add_json, read_config, reader
from headwater.cli.prompts import Known, namespaces, prompt_tokens, read_keys
from headwater.cli.show import show_count
from headwater.errors import ConfigError, UnavailableError
from headwater.node.client import ask_operator
from headwater.node.messages import KEYS_MAX, Namespaces, Wish
from headwater.types import ChunkKey
from headwater.values import socket_address

WORDS = {
    "chunks": "chunks were not in host memory and are looked for below",
    "kept": "kept, since engines or pins use them",
    "pins": "pins ended",
}
"""What the node counts, where its name does not say it."""
RARE = ("kept", "pins")
"""What is not worth a word where it is 0."""

Target = tuple[Known, list[ChunkKey]]
Answer = dict[str, Any]


def add_node(parser: argparse.ArgumentParser) -> None:
    """`--config`, `--node`, `--json`."""
    add_config(parser)
    parser.add_argument(
        "--node", metavar="ADDRESS", type=reader(socket_address), help="the node, unix:/PATH (default: node.socket)"
    )
    add_json(parser)


def add_keys(parser: argparse.ArgumentParser) -> None:
    """`--key`."""
    parser.add_argument("--key", action="append", default=[], metavar="HEX", help="a chunk's key; may be repeated")


def address_of(arguments: argparse.Namespace) -> str:
    """The node that a command line means."""
    address: str = arguments.node or read_config(arguments).config.node.socket
    return address


def ask(address: str, wish: Wish) -> Answer:
    """The node's answer; raises UnavailableError with the remedy."""
    try:
        answer = ask_operator(address, wish)
    except UnavailableError as error:
        raise UnavailableError(f"{error}; start one with `headwater node`, or name it with --node") from error
    assert isinstance(answer, dict)
    return answer


def known(address: str) -> list[Known]:
    """The namespaces of a node."""
    return [Known.read(it) for it in ask(address, Namespaces())["namespaces"]]


def targets(arguments: argparse.Namespace, found: Sequence[Known]) -> list[Target]:
    """The chunks that a command line names in each of these namespaces; raises ConfigError if it names none."""
    tokens, keys = prompt_tokens(arguments), read_keys(arguments.key)
    if tokens is not None and keys:
        raise ConfigError("--key and a prompt: name the one or the other")
    if tokens is None and not keys:
        raise ConfigError(
            "which chunks? name them by --tokens, --text with --model, or --key; for a whole namespace there is "
            "`headwater clear`"
        )
    chosen = [(it, keys if tokens is None else it.keys(tokens, arguments.adapter, arguments.salt)) for it in found]
    for it, its_keys in chosen:
        check_count(it, its_keys)
        if tokens is not None and not its_keys:
            shortest = (
                f"{len(tokens)} tokens are less than one chunk of {it.chunk_tokens}, so nothing is cached of them"
            )
            raise ConfigError(f"the prompt is too short for namespace {it.name}: {shortest}")
    return chosen


def check_count(it: Known, keys: Sequence[ChunkKey]) -> None:
    """Raises ConfigError for more keys than a call may have."""
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{len(keys)} chunks in namespace {it.name}, at most {KEYS_MAX} in one command; name fewer")


def carry_out(
    arguments: argparse.Namespace,
    verb: str,
    make: Callable[[Known, list[ChunkKey]], Wish],
    choose: Callable[[argparse.Namespace, Sequence[Known]], list[Target]] = targets,
    wait: Callable[[Known, Answer], Answer] | None = None,
) -> int:
    """Send one wish for each namespace that a command line names, and print what the node says, once `wait` has waited
    for what is still pending then; 1 if something is."""
    address = address_of(arguments)
    done = []
    chosen = choose(arguments, namespaces(arguments, known(address)))
    for (it, keys), first in [(target, ask(address, make(*target))) for target in chosen]:
        answer = first if wait is None else wait(it, first)
        done.append({"namespace": it.name, "tenant": it.record.tenant, "keys": len(keys), **answer})
    pending = sorted({name for answer in done for name in answer.get("pending", ())})
    totals: dict[str, int] = {}
    for answer in done:
        for name, value in answer.items():
            if isinstance(value, int) and not isinstance(value, bool):
                totals[name] = totals.get(name, 0) + value
    if arguments.json:
        print(json.dumps({"ok": not pending, "namespaces": done, "total": totals}))
    elif not done:
        print(f"{verb}: the node knows no namespace yet, so there is nothing to do")
    else:
        told = {name: it for name, it in totals.items() if name != "keys" and (it or name not in RARE)}
        counts = ", ".join(f"{show_count(it)} {WORDS.get(name, name)}" for name, it in told.items())
        asked = f"{show_count(totals['keys'])} keys" if totals["keys"] else "all"
        print(f"{verb}: {counts or 'done'} ({asked} in {len(done)} namespace{'s' if len(done) > 1 else ''})")
    if pending and not arguments.json:
        print(f"{verb}: not yet in {', '.join(pending)}; the node goes on trying; say it again to know more")
    return 1 if pending else 0
