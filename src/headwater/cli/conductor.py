"""`headwater conductor`: the OpenAI-compatible front of a fleet whose engines and nodes run already."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from headwater.cli.options import add_json, add_setting
from headwater.cli.up import add_runtime_dir
from headwater.conductor.control.parent import Control
from headwater.conductor.folder import Lock, private_folder
from headwater.conductor.serving import serve
from headwater.conductor.workers import Crew, Watching
from headwater.config import load_config
from headwater.fleetfile.model import ConductorSpec, FleetFile
from headwater.fleetfile.read import read_fleet
from headwater.fleetfile.resolve import fleet_folder, resolve
from headwater.metrics.conductor import render
from headwater.up.plan import url_of

EXAMPLES = """\
examples:
  headwater conductor fleet.yaml        what `headwater up` starts last; engines and nodes of the file run already

Instances without a `url`, and nodes without a `socket`, are looked for where `headwater up` starts them. SIGHUP reads
the file again: tenants, keys, instances and limits are replaced by a rolling restart of the workers, and no stream is
cut that ends within conductor.times.roll_s. The first SIGTERM or Ctrl-C drains for drain_s, the second ends at once.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The file."""
    parser.epilog = EXAMPLES
    parser.add_argument("fleet", metavar="FLEET.yaml", help="the fleet; examples/up.yaml has every setting")
    add_runtime_dir(parser)
    add_setting(parser, "log.level", "--log-level")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    level = load_config(overrides={"log.level": getattr(arguments, "log.level")}).config.log.level
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = read_fleet(arguments.fleet)
    with ExitStack() as stack:
        folder = private_folder(fleet_folder(given, arguments.runtime_dir), "--runtime-dir")
        stack.callback(Lock(folder / "conductor.lock", "a Conductor").close)
        for stale in folder.glob("worker-*.sock"):
            stale.unlink(missing_ok=True)
        fleet = resolve(given, folder)
        asyncio.run(
            serve(
                fleet,
                folder,
                lambda: resolve(read_fleet(arguments.fleet), folder),
                make_control,
                make_crew,
                lambda: print(greeting(fleet, arguments.json), flush=True),
            )
        )
    return 0


def greeting(fleet: FleetFile, as_object: bool) -> str:
    """The one line that says that requests are taken."""
    count, url = len(fleet.instances), url_of(fleet)
    return json.dumps({"url": url, "instances": count}) if as_object else f"serving {count} instances at {url}"


def make_control(spec: ConductorSpec, folder: Path, drain: Callable[[], None]) -> Control:
    """The control API."""
    return Control(spec, folder, render, drain)


def make_crew(fleet: FleetFile, folder: Path, watching: Watching) -> Crew:
    """The workers."""
    return Crew(fleet, folder, watching, draw=random.random)
