"""`headwater node drain`: have the other nodes pull what only this one holds, and say when it may be stopped."""

from __future__ import annotations

import argparse
import json
import sys
import time

from rich.progress import Progress

from headwater.cli.operate import add_node, address_of, ask
from headwater.cli.show import show_size
from headwater.node.messages import Drain

EXAMPLES = """\
examples:
  headwater node drain
  headwater node drain --node unix:/run/headwater/node.sock && systemctl stop headwater

The node goes on serving its engines and its peers; nothing new is given to it. What others hold already is left where
it is, and what only this node holds is pulled by those with room for it, most valuable first. Exit code 1: some of it
has no place elsewhere, and would be computed again.
"""
LOOK_S = 0.5


def configure(parser: argparse.ArgumentParser) -> None:
    """`--node`, `--json`."""
    parser.epilog = EXAMPLES
    add_node(parser)


def run(arguments: argparse.Namespace) -> int:
    """Begin to drain, and wait until it is done; 1 if it cannot be."""
    address = address_of(arguments)
    state = ask(address, Drain())
    with Progress(*Progress.get_default_columns(), disable=arguments.json, transient=True) as progress:
        task = progress.add_task("draining", total=None)
        while not state["done"] and not state["stuck"]:
            time.sleep(LOOK_S)
            state = ask(address, Drain(begins=False))
            whole = state["left_bytes"] + state["safe_bytes"]
            progress.update(task, total=max(whole, 1), completed=state["safe_bytes"])
    if arguments.json:
        print(json.dumps(state))
    elif state["done"]:
        print(f"drained: all {show_size(state['safe_bytes'])} are held by others, too; it may be stopped")
    else:
        print(f"not drained: {show_size(state['left_bytes'])} are held here alone: {state['stuck']}", file=sys.stderr)
    return 0 if state["done"] else 1
