"""What was measured of an engine: medians are taken here, once; everything after is about these numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefill:
    """The seconds to the first token of `tokens` prompt tokens after `context` cached ones, on an idle engine."""

    tokens: int
    context: int
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.times)


@dataclass(frozen=True, slots=True)
class Decode:
    """The seconds between tokens while `requests` requests decode, whose contexts are `kv_tokens` long in all."""

    requests: int
    kv_tokens: float
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.times)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """How many prompt tokens one step took when more waited; `is_limit` if more did wait, else it is a lower bound."""

    tokens: int
    is_limit: bool


@dataclass(frozen=True, slots=True)
class Observations:
    """All of one engine. `notes` say what was left out, and why."""

    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]
    step_tokens: StepTokens | None = None
    notes: tuple[str, ...] = ()


def step_limit(arrived_s: Sequence[float], tokens_each: int, apart_s: float) -> StepTokens | None:
    """The tokens of one step, from when the first tokens of equal prompts came that were sent together.

    Prompts that are done in the same step answer together: times less than `apart_s` apart are one step. The first
    step may have begun before all had arrived, and is believed only if it has a usual number; the last one may be
    what was left. None if nothing can be said.
    """
    times = sorted(arrived_s)
    steps: list[int] = []
    for number, at_s in enumerate(times):
        if number and at_s - times[number - 1] < apart_s:
            steps[-1] += 1
        else:
            steps.append(1)
    fullest = max(steps, default=0)
    if fullest < 2:
        return None  # a step holds less than two of them: how much less cannot be seen
    tokens = fullest * tokens_each
    usual = _usual(tokens, tokens_each)
    first_is_full = len(steps) > 1 and steps[0] == fullest and usual is not None
    if fullest == max(steps[1:-1], default=0) or first_is_full:
        return StepTokens(usual or tokens, True)
    return StepTokens(tokens, False)


def _usual(tokens: int, within: int) -> int | None:
    """The power of two less than one prompt away, as limits nearly always are; None if there is none."""
    below = 1 << (tokens.bit_length() - 1)
    nearest = min(below, below << 1, key=lambda it: abs(it - tokens))
    return nearest if abs(nearest - tokens) < within else None
