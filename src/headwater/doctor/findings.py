"""What a check says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `remedy` is empty when all is well."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
