"""`headwater up`: a whole fleet on this host, from one file, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from rich.console import Console

from headwater.cli.options import add_json
from headwater.cli.show import console, plain
from headwater.conductor.folder import Lock, private_folder
from headwater.errors import ConfigError
from headwater.fleetfile.model import FleetFile
from headwater.fleetfile.read import VALKEY, read_fleet
from headwater.fleetfile.resolve import fleet_folder
from headwater.up.machine import find_programs, look
from headwater.up.plan import Kind, Plan, make_plan
from headwater.up.supervise import State, Supervisor, Told, check_ports

EXAMPLES = """\
examples:
  headwater up fleet.yaml --dry-run     what would be started, with all flags; nothing is
  headwater up fleet.yaml               start it; the URL for OpenAI's clients is printed when it answers

What dies is started again, after a second, then later and later up to a minute. The first Ctrl-C or SIGTERM drains: the
Conductor ends its streams, then engines, nodes and directory end; the second ends all at once. SIGHUP has the Conductor
read its tenants anew, where there is no terminal. Nothing is left behind, also after a kill -9 of `headwater up`. Each
process's output is in logs/ of the runtime directory. `headwater export` makes manifests of the same file.
"""
STYLES = {State.READY: "green", State.DOWN: "red", State.ENDED: "dim", State.ENDING: "dim"}


def configure(parser: argparse.ArgumentParser) -> None:
    """The file, and what to do with it."""
    parser.epilog = EXAMPLES
    parser.add_argument("fleet", metavar="FLEET.yaml", help="what to run; examples/up.yaml has every setting")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    add_runtime_dir(parser)
    add_json(parser)


def add_runtime_dir(parser: argparse.ArgumentParser) -> None:
    """`--runtime-dir`."""
    parser.add_argument(
        "--runtime-dir",
        metavar="DIR",
        help="private folder for sockets and logs (default: up-CLUSTER in the user's runtime directory)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Start, supervise, drain."""
    if arguments.dry_run:
        fleet = read_fleet(arguments.fleet, look_up=None)
        plan = make_plan(fleet, fleet_folder(fleet, arguments.runtime_dir), look(), find_programs()[0])
        print(json.dumps(as_json(plan), indent=2) if arguments.json else described(plan))
        return 0
    fleet = read_fleet(arguments.fleet)
    programs, missing = find_programs()
    check_programs(fleet, missing)
    with ExitStack() as stack:
        folder = private_folder(fleet_folder(fleet, arguments.runtime_dir), "--runtime-dir")
        stack.callback(Lock(folder / "up.lock", "`headwater up`").close)
        plan = make_plan(fleet, folder, look(), programs)
        check_ports(plan.processes)
        (folder / "directory.sock").unlink(missing_ok=True)
        tell = tell_json if arguments.json else teller(plan)
        supervisor = stack.enter_context(Supervisor(plan.processes, folder, tell, draw=random.random))
        on_signals(supervisor)
        supervisor.run(lambda: tell_ready(plan, arguments.json))
    return 0


def check_programs(fleet: FleetFile, missing: list[str]) -> None:
    """Raise ConfigError if something is to be started that is not here."""
    if "vllm" in missing and any(it.url is None for it in fleet.instances):
        raise ConfigError("there is no `vllm` here; install it into this environment, or name instances by `url`")
    if "directory" in missing and fleet.directory == VALKEY:
        raise ConfigError("there is no valkey-server or redis-server here; install one, or write the directory's URL")


def on_signals(supervisor: Supervisor) -> None:
    """SIGINT and SIGTERM drain, and end at once the second time. SIGHUP is the end of a terminal where there is one."""

    def stop(number: int, frame: FrameType | None) -> None:
        supervisor.stop()

    def hang_up(number: int, frame: FrameType | None) -> None:
        supervisor.send(Kind.CONDUCTOR, signal.SIGHUP)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop if os.isatty(0) else hang_up)


def teller(plan: Plan) -> Callable[[Told], None]:
    """Prints one line for each thing that happens."""
    screen: Console = console()
    width = max(len(it.name) for it in plan.processes)

    def tell(told: Told) -> None:
        text = f"{told.name:{width}}  {told.state.value:8}  {plain(told.text)}".rstrip()
        screen.print(text, style=STYLES.get(told.state), soft_wrap=True)

    return tell


def tell_json(told: Told) -> None:
    """The same for programs."""
    print(json.dumps({"name": told.name, "state": told.state.value, "text": told.text}), flush=True)


def tell_ready(plan: Plan, as_object: bool) -> None:
    """The one URL."""
    text = f"ready: {plan.url}  (headwater fleet shows it; Ctrl-C drains and ends it)"
    print(json.dumps({"url": plan.url}) if as_object else text, flush=True)


def as_json(plan: Plan) -> dict[str, object]:
    """The plan as `--dry-run --json` prints it."""
    return {"url": plan.url, "runtime_dir": str(plan.folder), "processes": [it.shown() for it in plan.processes]}


def described(plan: Plan) -> str:
    """The plan as `--dry-run` prints it: each process as it could be typed into a shell."""
    lines = [f"url          {plan.url}", f"runtime dir  {plan.folder}"]
    for it in plan.processes:
        shown = it.shown()
        after = f", after {', '.join(it.after)}" if it.after else ""
        ports = f", ports {' '.join(map(str, it.ports))}" if it.ports else ""
        lines += ["", f"# {it.name}: {it.kind.value}{after}{ports}"]
        environment, command = shown["environment"], shown["command"]
        assert isinstance(environment, dict) and isinstance(command, list)
        words = [f"{name}={shlex.quote(text)}" for name, text in sorted(environment.items()) if text is not None]
        lines += [f"{word} \\" for word in words]
        lines.append(" ".join(map(shlex.quote, map(str, command))))
    return "\n".join(lines)
