"""`headwater version`."""

from __future__ import annotations

import argparse
import json
import platform

from headwater.cli.options import add_json
from headwater.node.messages import PROTOCOL
from headwater.version import VERSION


def configure(parser: argparse.ArgumentParser) -> None:
    """`--json` only."""
    parser.epilog = "Engines and nodes work together when their protocols are equal."
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the versions."""
    found = {"headwater": VERSION, "protocol": PROTOCOL, "python": platform.python_version()}
    if arguments.json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{name} {version}" for name, version in found.items()))
    return 0
