"""`headwater clear`: delete from every tier."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from headwater.cli.operate import Answer, Target, add_keys, add_node, address_of, ask, carry_out, targets
from headwater.cli.options import reader
from headwater.cli.prompts import Known, add_namespace, add_prompt
from headwater.errors import ConfigError
from headwater.node.messages import Evict
from headwater.types import ChunkKey, pack_keys
from headwater.values import parse_duration

EXAMPLES = """\
examples:
  headwater clear --namespace 3f9a                   everything that one model has cached, in every tier
  headwater clear --namespace 3f9a --tenant blue     one tenant's part of it
  headwater clear --all                              everything that this node knows
  headwater clear --tokens @prompt.json              the chunks of one prompt

Of a namespace, nothing that was stored before is served again by this node, whatever becomes of it, but for what the
answer names: `kept` is what engines are reading or writing at this moment; `pending` are remote tiers that have not
deleted it yet. The node leaves the namespace alone there until they have, and goes on trying; the command waits for
them for --wait seconds, then says which and ends with status 1. Say it again to know whether they still are. A node
that is restarted meanwhile forgets what is pending. Pins of the namespace end.

Of a prompt, host memory and the disk also lose all that continues it. Remote tiers cannot tell what continues it, and
lose the named chunks alone, some time later: what continues them cannot be reached through this prompt any more until
it is stored again. Pinned chunks and those in use stay (`kept`).

In a cluster the memory and disks of the other nodes are cleared, too; `peers` is pending while one that is not silent
could not be told. Remote tiers are shared: what is deleted there is gone for other nodes too, which may store it again.
Clearing what is empty is no error. Allowed to the node's own user and to root.
"""
WAIT_S, POLL_S = 5.0, 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Which chunks, or which namespaces."""
    parser.epilog = EXAMPLES
    add_node(parser)
    add_namespace(parser)
    parser.add_argument("--all", action="store_true", help="every namespace that the node knows")
    add_prompt(parser)
    add_keys(parser)
    parser.add_argument(
        "--wait", metavar="TIME", type=reader(waiting_time), default=WAIT_S,
        help=f"how long to wait for remote tiers; 0 does not (default: {WAIT_S:g}s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Delete, and say how much; 1 while remote tiers have yet to do it."""

    def wish(it: Known, keys: list[ChunkKey]) -> Evict:
        return Evict(it.root, pack_keys(keys), True)

    until_s = time.monotonic() + arguments.wait
    address = address_of(arguments)

    def wait(it: Known, answer: Answer) -> Answer:
        pending = answer.get("pending", [])
        while pending and time.monotonic() < until_s:
            time.sleep(POLL_S)
            pending = ask(address, Evict(it.root, b"", True, begins=False))["pending"]
        return answer | ({"pending": pending} if "pending" in answer else {})

    return carry_out(arguments, "clear", wish, _choose, wait)


def waiting_time(value: object) -> float:
    """A duration, or 0."""
    return 0.0 if value in ("0", 0) else parse_duration(value)


def _choose(arguments: argparse.Namespace, found: Sequence[Known]) -> list[Target]:
    named = arguments.namespace is not None or arguments.tenant is not None
    chunks = arguments.tokens is not None or arguments.text is not None or arguments.key
    if arguments.all and (named or chunks):
        raise ConfigError("--all and a choice of less: leave one of them out")
    if chunks:
        return targets(arguments, found)
    if not named and not arguments.all:
        raise ConfigError("what is to be cleared? name --namespace, --tenant or a prompt, or say --all")
    return [(it, []) for it in found]
