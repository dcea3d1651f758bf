"""Runs command lines in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from headwater.cli import main


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, read."""
        return json.loads(self.out)


Command = Callable[..., Ended]


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    """Runs a command line to its end."""
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    return Ended(code, *capsys.readouterr())
