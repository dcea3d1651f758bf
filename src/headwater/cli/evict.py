"""`headwater evict`: push chunks out of HOST memory."""

from __future__ import annotations

import argparse

from headwater.cli.operate import add_keys, add_node, carry_out
from headwater.cli.prompts import Known, add_namespace, add_prompt
from headwater.node.messages import Evict
from headwater.types import ChunkKey, pack_keys

EXAMPLES = """\
examples:
  headwater evict --tokens @prompt.json                    a prompt's chunks, in every namespace that has them
  headwater evict --text @prompt.txt --model /models/llama --chat --namespace 3f9a
  headwater evict --key 0f1e2d3c4b5a69788796a5b4c3d2e1f0 --below      from the tiers below, too

What hangs on an evicted chunk goes with it; what engines are reading stays. Copies in lower tiers stay as well, and
come back when they are asked for, unless --below is given. Evicting what is not there is no error. `headwater clear`
deletes whole namespaces. Allowed to the node's own user and to root.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Which chunks, and from how far down."""
    parser.epilog = EXAMPLES
    add_node(parser)
    add_namespace(parser)
    add_prompt(parser)
    add_keys(parser)
    below = "also from the disk, from remote tiers, and from all other nodes"
    parser.add_argument("--below", action="store_true", help=below)


def run(arguments: argparse.Namespace) -> int:
    """Evict, and say how much."""

    def wish(it: Known, keys: list[ChunkKey]) -> Evict:
        return Evict(it.root, pack_keys(keys), arguments.below)

    return carry_out(arguments, "evict", wish)
