"""The YAML file of one calibrated engine: its step times, and how far to trust them.

`times` alone is read by what simulates and plans (`sim/fleet/config.read_times`); the rest is for people.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from headwater.calibrate.fit import Fitted
from headwater.calibrate.server import Served
from headwater.errors import ConfigError

DIGITS = 6
HEAD = """\
# Step times of an engine, measured over HTTP and fitted (seconds; see `measured` for where the fit is no guess).
# A fleet file takes it as `times: THIS FILE`.
"""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What is known of an engine after it was measured."""

    url: str
    """Without credentials."""
    date: str
    served: Served
    fitted: Fitted

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in the file and in JSON."""
        return {
            "times": _rounded(asdict(self.fitted.times)),
            "model": self.served.model,
            "url": self.url,
            "date": self.date,
            "block_tokens": self.served.block_tokens,
            "capacity_tokens": self.served.capacity_tokens,
            "measured": {name: list(span) for name, span in asdict(self.fitted.measured).items()},
            "errors": {
                "prefill": _rounded(asdict(self.fitted.prefill)),
                "decode": _rounded(asdict(self.fitted.decode)),
            },
            "notes": list(self.fitted.notes),
        }


def write(path: Path, calibrated: Calibrated) -> None:
    """Write the file, whole or not at all; raises ConfigError if it cannot be written."""
    text = HEAD + yaml.safe_dump(calibrated.as_dict(), sort_keys=False, allow_unicode=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{it:.{DIGITS}g}") if isinstance(it, float) else it for name, it in numbers.items()}
