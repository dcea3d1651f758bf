"""What came of one simulated run: a row a request, and the load of each instance over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Ending(IntEnum):
    """How a request ended."""

    SERVED = 0
    REJECTED = 1
    """By admission, before it began."""
    FAILED = 2
    """No instance could serve it, or it was lost with one."""


@dataclass(slots=True)
class Run:
    """One policy on one trace and one fleet. Arrays have an element a request, in order of arrival; of requests that
    were not served the times are NaN and the tokens 0. `settings` says what was simulated, as plain values."""

    settings: dict[str, Any]
    seed: int
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    ending: npt.NDArray[np.int8]
    instance: npt.NDArray[np.int32]
    """Where it prefilled; -1 if nowhere."""
    ttft_s: Floats
    tpot_s: Floats
    """Mean seconds per output token after the first; NaN for answers of one token."""
    done_s: Floats
    """When its last token came, on the clock of `arrival_s`."""
    predicted_ttft_s: Floats
    device_tokens: Ints
    """Prompt tokens found in the instance's DEVICE; the others likewise, as fetched."""
    host_tokens: Ints
    disk_tokens: Ints
    peer_tokens: Ints
    remote_tokens: Ints
    tenants: tuple[str, ...] = ()
    """Of each request; empty if the trace has none."""
    sample_s: Floats = field(default_factory=lambda: np.zeros(0))
    waiting_tokens: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Uncached prompt tokens that wait, a row a sample and a column an instance; `running` likewise."""
    running: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    wall_s: float = 0.0
    """How long the simulation took."""
    log_hash: str = ""
    """Of everything that happened, in order: the same seed gives the same hash."""
