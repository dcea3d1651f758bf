"""`headwater prefetch`: bring chunks up before anybody asks for them."""

from __future__ import annotations

import argparse

from headwater.cli.operate import add_node, carry_out
from headwater.cli.prompts import Known, add_namespace, add_prompt
from headwater.errors import ConfigError
from headwater.node.messages import Prefetch
from headwater.types import ChunkKey, pack_keys

EXAMPLES = """\
examples:
  headwater prefetch --tokens @system-prompt.json
  headwater prefetch --text @system-prompt.txt --model /models/llama --chat --namespace 3f9a

Chunks come from the nearest tier that has them, in the order of the prompt; what is in HOST memory already is left
there. The command returns when the node has begun; `headwater explain` shows how far it is. Allowed to the node's own
user and to root.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Which chunks."""
    parser.epilog = EXAMPLES
    add_node(parser)
    add_namespace(parser)
    add_prompt(parser)
    parser.add_argument("--key", action="append", default=[], help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Ask for them, and say what the node does."""
    if arguments.key:
        raise ConfigError(
            "--key: a chunk is brought up with all that it hangs on, which a key does not tell; name the prompt, by "
            "--tokens, or --text with --model"
        )

    def wish(it: Known, keys: list[ChunkKey]) -> Prefetch:
        return Prefetch(it.root, pack_keys(keys), is_prompt=True)

    return carry_out(arguments, "prefetch", wish)
