"""The `headwater` command. One subcommand a module, imported only when it is given, so that `--help` is instant
and needs nothing that the subcommand needs.

To add a subcommand, add a line to COMMANDS. Its module has `configure(parser)`, which adds options and may set
the parser's description and epilog, and `run(arguments)`, which returns the exit code: 0 ok, 1 failed, 2 bad
usage or configuration. A ConfigError that leaves `run` is 2, any other HeadwaterError 1, both as one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn, Protocol, cast

from headwater.errors import ConfigError, HeadwaterError
from headwater.places import mask
from headwater.values import nearest
from headwater.version import VERSION


class Parser(argparse.ArgumentParser):
    """A parser that repeats no password of a URL when it refuses a command line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with 2."""
        super().error(mask(message))


class Module(Protocol):
    """What the module of a subcommand offers."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work; the exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """Where a subcommand is, and what it does in a few words."""

    module: str
    summary: str


COMMANDS = {
    "node": Command("headwater.cli.node", "serve this host's KV memory to its engines"),
    "node drain": Command("headwater.cli.drain", "have the others take what only this node holds, before it stops"),
    "up": Command("headwater.cli.up", "start and supervise a whole fleet on this host, as one file describes it"),
    "export": Command("headwater.cli.export", "manifests for Kubernetes or Compose, from the same file"),
    "conductor": Command("headwater.cli.conductor", "the OpenAI-compatible front of a fleet that runs already"),
    "conductor explain": Command("headwater.cli.conductor_explain", "why a request went where it went"),
    "conductor key": Command("headwater.cli.conductor_key", "a new API key, and its digest for the fleet file"),
    "fleet": Command("headwater.cli.fleet", "instances, loads, reuse, tenants and event sources of a fleet"),
    "status": Command("headwater.cli.status", "what a node holds, who uses it, and how often it helps"),
    "cluster": Command("headwater.cli.cluster", "the nodes of a cluster, their links, and what is hot"),
    "tiers": Command("headwater.cli.tiers", "how full, how fast and how well each tier of a node is"),
    "explain": Command("headwater.cli.explain", "where a prompt's chunks are, and why a request missed"),
    "prefetch": Command("headwater.cli.prefetch", "bring chunks up to memory before anybody asks for them"),
    "pin": Command("headwater.cli.pin", "keep chunks in memory for a while"),
    "evict": Command("headwater.cli.evict", "push chunks out of memory"),
    "clear": Command("headwater.cli.clear", "delete prompts or whole namespaces from every tier"),
    "simulate": Command("headwater.cli.simulate", "a recorded workload on a simulated fleet: hits, latencies, goodput"),
    "trace export": Command("headwater.cli.trace_export", "make a trace without text out of one's own request log"),
    "trace facts": Command("headwater.cli.trace_facts", "what a trace is like, and how much of it could be reused"),
    "plan": Command("headwater.cli.plan", "what a fleet needs for a model, each answer with its formula"),
    "doctor": Command("headwater.cli.doctor", "check this host, and say what is missing and what to do"),
    "bench": Command("headwater.bench.command", "measure this machine, each figure beside its yardstick"),
    "demo": Command("headwater.demo.command", "two real vLLM instances share one KV cache through a node"),
    "demo-cluster": Command("headwater.demo.cluster", "three nodes share one KV cache, and things break meanwhile"),
    "config": Command("headwater.cli.config", "the settings in effect and where each one comes from"),
    "version": Command("headwater.cli.version", "versions of headwater, its protocol and Python"),
}

OUTLINE = """\
headwater keeps the KV cache of LLM engines, on one host in shared memory, on many as one cache, so that a prefix which
one engine has computed is not computed again, by itself or by another.

usage: headwater COMMAND [OPTION ...]
       headwater COMMAND --help

commands:
{commands}

a first run:
  headwater doctor                      is this host ready?
  headwater node --host-memory 32GiB    start a node; it prints how to plug vLLM in
  headwater status --watch              see what it holds and how often it hits
  headwater cluster top                 the nodes of a cluster, live

Settings come from flags, HEADWATER_* variables and a TOML file (--config FILE or HEADWATER_CONFIG), in this
order; `headwater config` shows the result. Exit codes: 0 ok, 1 failed, 2 bad usage or configuration.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name = " ".join(arguments[:words])
    if name not in COMMANDS:
        return _without_command(name)
    command = cast(Module, import_module(COMMANDS[name].module))
    parser = Parser(
        prog=f"headwater {name}",
        description=f"{COMMANDS[name].summary[0].upper()}{COMMANDS[name].summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.configure(parser)
    try:
        code = command.run(parser.parse_args(arguments[words:]))
        sys.stdout.flush()
        return code
    except HeadwaterError as error:
        print(f"headwater {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough; Python must not try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def outline() -> str:
    """What `headwater --help` says."""
    width = max(map(len, COMMANDS))
    return OUTLINE.format(commands="\n".join(f"  {name:{width}}  {it.summary}" for name, it in COMMANDS.items()))


def _without_command(name: str) -> int:
    if name in ("-h", "--help", "help"):
        print(outline(), end="")
        return 0
    if name in ("-V", "--version"):
        print(f"headwater {VERSION}")
        return 0
    if name:
        print(f"headwater: no command {name!r}; the nearest is {nearest(name, COMMANDS)!r}", file=sys.stderr)
    else:
        print(outline(), end="", file=sys.stderr)
    return 2
