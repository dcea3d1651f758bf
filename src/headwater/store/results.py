"""What becomes of one object of a batch: values, not exceptions."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """What came of one object's part of a call."""

    DONE = "done"
    MISS = "miss"
    """Nobody has it, or its time is over."""
    EXISTS = "exists"
    """Another put came first with other bytes: those stay."""
    FULL = "full"
    """There is no room for it, whatever may be evicted."""
    REFUSED = "refused"
    """The caller's part of it does not fit: the reason says what."""
    ERROR = "error"
    """It could not be done now; nothing is known of the object."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """What came of one object that was put. DONE: everybody finds these very bytes, by this put or by another."""

    outcome: Outcome
    reason: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class GetResult:
    """What came of one object that was to be read. `length_bytes` is the object's length, which the caller's buffer may
    exceed; after anything but DONE the buffer's content is undefined."""

    outcome: Outcome
    length_bytes: int = 0
    reason: str = ""


MISSED = GetResult(Outcome.MISS)
