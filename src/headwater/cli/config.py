"""`headwater config`: the settings in effect and where each one comes from."""

from __future__ import annotations

import argparse
import json

from rich.table import Table

from headwater.cli.options import SPELLINGS, add_config, add_json, read_config
from headwater.cli.show import console, show_setting
from headwater.config import SETTINGS, Effective, public, variable

EXAMPLES = f"""\
examples:
  headwater config                                  every setting, its value, and where the value comes from
  headwater config --check --config node.toml       is this file right? exit code 2 if not
  HEADWATER_NODE_SLAB=64MiB headwater config --json

A file has the sections [node], [engine] and [log]:

  [node]
  host_memory = "32GiB"
  require = {{kv_dtype = "bfloat16"}}
  disk = "/nvme/kv:500GiB"
  remotes = ["redis://user:password@kv:6379", "s3://bucket/prefix"]

The variable of node.host_memory is {variable("node.host_memory")}, and so on. Variables win over the file, flags
of `headwater node` and vLLM's kv_connector_extra_config over both. Passwords in URLs are never shown. Keep them in
a file of mode 0600 or in {variable("node.remotes")} and {variable("engine.remotes")}: every user of the host can
read the flags of a process, and vLLM logs its kv_connector_extra_config.
{SPELLINGS}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """`--config`, `--check`, `--json`."""
    parser.epilog = EXAMPLES
    add_config(parser)
    parser.add_argument("--check", action="store_true", help="only say whether all settings are right")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the effective settings."""
    effective = read_config(arguments)
    changed = sum(origin != "default" for origin in effective.origin.values())
    if arguments.json:
        settings = {
            name: {"value": public(name, effective.value(name)), "origin": effective.origin[name]} for name in SETTINGS
        }
        print(json.dumps({"ok": True, "settings": settings}, indent=None if arguments.check else 2))
    elif arguments.check:
        print(f"ok: {len(SETTINGS)} settings, {changed} of them not the default")
    else:
        console().print(_table(effective))
    return 0


def _table(effective: Effective) -> Table:
    table = Table("setting", "value", "from", "what for", box=None, pad_edge=False)
    for name, it in SETTINGS.items():
        origin = effective.origin[name]
        style = "dim" if origin == "default" else "bold"
        table.add_row(name, show_setting(name, effective.value(name)), origin, it.metadata["help"], style=style)
    return table
