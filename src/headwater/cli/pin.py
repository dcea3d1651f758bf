"""`headwater pin`: keep chunks in HOST memory for a while."""

from __future__ import annotations

import argparse
import getpass
import json
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from headwater.cli.operate import Answer, Target, add_keys, add_node, address_of, ask, carry_out, targets
from headwater.cli.options import reader
from headwater.cli.prompts import NAME_DIGITS, Known, add_namespace, add_prompt
from headwater.cli.show import console, plain, show_count, show_size, show_span
from headwater.errors import ConfigError
from headwater.node.messages import Pin, Pins
from headwater.types import ChunkKey, pack_keys
from headwater.values import parse_duration

TTL_S = 3600.0
OWNER_CHARS_MAX = 100
EXAMPLES = """\
examples:
  headwater pin --tokens @system-prompt.json --ttl 1h
  headwater pin --text @system-prompt.txt --model /models/llama --chat --owner search-team --ttl 8h
  headwater pin --release --owner search-team            all that it has pinned, in every namespace
  headwater pin --list                                   who has pinned how much, and for how long

Only what is in HOST memory is pinned (`headwater prefetch` brings it there), and it counts against nobody's time but
--ttl's: then it may be evicted as ever. Pinning the same chunks again, as the same owner, sets a new end. Pins are the
running node's and end with it: pin again after a restart. Allowed to the node's own user and to root.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Which chunks, how long, in whose name."""
    parser.epilog = EXAMPLES
    add_node(parser)
    add_namespace(parser)
    add_prompt(parser)
    add_keys(parser)
    parser.add_argument(
        "--ttl",
        type=reader(parse_duration),
        metavar="DURATION",
        help="how long they are pinned, up to 24h (default: 1h)",
    )
    parser.add_argument("--owner", metavar="NAME", help="in whose name (default: this user's)")
    parser.add_argument("--release", action="store_true", help="end all pins of the owner")
    parser.add_argument("--list", action="store_true", help="show the pins that there are, whoever made them")


def run(arguments: argparse.Namespace) -> int:
    """Pin, release or list, and say how much."""
    if arguments.list:
        return _list(arguments)
    owner = _user() if arguments.owner is None else arguments.owner
    if not 0 < len(owner) <= OWNER_CHARS_MAX or not owner.isprintable():
        raise ConfigError(f"--owner {owner[:OWNER_CHARS_MAX]!r}: write 1 to {OWNER_CHARS_MAX} printable characters")
    if arguments.release:
        if arguments.ttl is not None:
            raise ConfigError("--ttl with --release: a pin that ends has no time; leave one of them out")
        return carry_out(arguments, "release", lambda it, keys: Pin(it.root, b"", owner, 0.0), _choose_all)
    ttl_s = TTL_S if arguments.ttl is None else arguments.ttl

    def wish(it: Known, keys: list[ChunkKey]) -> Pin:
        return Pin(it.root, pack_keys(keys), owner, ttl_s)

    return carry_out(arguments, "pin", wish, targets)


def _list(arguments: argparse.Namespace) -> int:
    given = (arguments.release, arguments.ttl, arguments.owner, arguments.tokens, arguments.text, arguments.key)
    if any(it not in (None, False, []) for it in given):
        raise ConfigError("--list shows all pins; leave the other options out")
    answer = ask(address_of(arguments), Pins())
    if arguments.json:
        print(json.dumps({"ok": True, **answer}))
    else:
        console().print(_table(answer["pins"]))
    return 0


def _table(pins: Sequence[Answer]) -> RenderableType:
    if not pins:
        return "nothing is pinned"
    table = Table("owner", "namespace", "tenant", box=None, pad_edge=False)
    for name in ("chunks", "bytes", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for it in pins:
        who = [plain(it["pinner"]), it["namespace"][:NAME_DIGITS], plain(it["tenant"]) or "-"]
        table.add_row(*who, show_count(it["chunks"]), show_size(it["bytes"]), show_span(it["seconds_left"]))
    return table


def _choose_all(arguments: argparse.Namespace, found: Sequence[Known]) -> list[Target]:
    if arguments.tokens is not None or arguments.text is not None or arguments.key:
        raise ConfigError("--release ends all pins of the owner; leave the prompt and the keys out")
    return [(it, []) for it in found]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many containers
        return "operator"
