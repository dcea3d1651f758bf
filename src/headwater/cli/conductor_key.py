"""`headwater conductor key`: a new API key, and the line that the fleet file has instead of it."""

from __future__ import annotations

import argparse
import json

from headwater.cli.options import add_json, reader
from headwater.conductor.tenants import key_row, new_key
from headwater.values import node_name

EXAMPLES = """\
examples:
  headwater conductor key --tenant acme
  headwater conductor key --json | jq -r .row

The key is shown once and kept nowhere: give it to the tenant. The line with its digest goes into the fleet file. To
rotate a key, add the new line, send the Conductor SIGHUP, give out the new key, and take the old line out later: both
are valid meanwhile.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """`--tenant`, `--json`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--tenant", metavar="NAME", default="NAME", type=reader(node_name), help="whose it is to be")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    key = new_key()
    row = key_row(key)
    if arguments.json:
        print(json.dumps({"key": key, "row": row}))
        return 0
    print(f"key (shown once; give it to the tenant):\n  {key}\n")
    print(f"for the fleet file:\n  tenants:\n    - name: {arguments.tenant}\n      keys: [{json.dumps(row)}]")
    return 0
