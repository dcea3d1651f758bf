"""How both demos begin and end: their common options, what has to be there, a folder for the run, and what is told."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from headwater.demo.processes import check_model
from headwater.demo.valkey import valkey_program

MODEL = Path(".cache/models/SmolLM2-135M-Instruct")


@dataclass(frozen=True)
class Begun:
    """What a demo runs with; `scratch` is gone when it ends."""

    model: Path
    memory: str
    scratch: Path
    logs: Path
    console: Console


def add_options(parser: argparse.ArgumentParser, memory: str, whose: str) -> None:
    """The options that both have; `memory` is usual for `whose`."""
    parser.add_argument("--model", type=Path, default=MODEL, help=f"directory of a small chat model (default: {MODEL})")
    parser.add_argument("--host-memory", default=memory, metavar="SIZE", help=f"memory of {whose} (default: {memory})")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


@contextmanager
def begun(arguments: argparse.Namespace) -> Iterator[Begun]:
    """Begin. Raises ConfigError, before anything is started, if there is no model or no Valkey here."""
    _end_on_signals()
    check_model(arguments.model)
    valkey_program()
    console = Console(stderr=arguments.json, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="headwater-demo-") as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        yield Begun(arguments.model.resolve(), arguments.host_memory, Path(scratch), logs, console)


def told(arguments: argparse.Namespace, result: Mapping[str, object], show: Callable[[], None]) -> int:
    """Tell the result as it is wanted; the exit code."""
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show()
    return 0 if result["ok"] else 1


def _end_on_signals() -> None:
    """Let a signal end the demo as Ctrl-C does, with everything that it has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _as_interrupt)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of a signal."""
    raise KeyboardInterrupt
