"""What a trace is like: load, lengths, and how much of it any cache could serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwater.traces.model import Trace

POINTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and maximum of some numbers; all 0 if there are none."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of these values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        found = np.asarray(values, np.float64)
        p50, p90, p99 = (float(it) for it in np.percentile(found, POINTS))
        return cls(float(found.mean()), p50, p90, p99, float(found.max()))


@dataclass(frozen=True, slots=True)
class Facts:
    """`reuse_max` is prompt tokens found / prompt tokens, in a cache that forgets nothing; `gap_s` is the time between
    a block and its next use, `blocks` all started blocks and `blocks_unique` those that differ."""

    name: str
    requests: int
    span_s: float
    input_tokens: Spread
    output_tokens: Spread
    block_tokens: int
    blocks: int
    blocks_unique: int
    reuse_max: float
    gap_s: Spread
    sessions: int
    tenants: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def facts(trace: Trace) -> Facts:
    """What can be said of a trace without a simulation."""
    used: dict[int, float] = {}
    gaps: list[float] = []
    asked = hit = blocks = 0
    for request in trace.requests:
        asked += request.input_tokens
        blocks += len(request.blocks)
        found = next((at for at, it in enumerate(request.blocks) if it not in used), len(request.blocks))
        hit += min(found * trace.block_tokens, request.input_tokens)
        for it in request.blocks:
            if it in used:
                gaps.append(request.arrival_s - used[it])
            used[it] = request.arrival_s
    return Facts(
        name=trace.name,
        requests=len(trace.requests),
        span_s=trace.requests[-1].arrival_s if trace.requests else 0.0,
        input_tokens=Spread.of([it.input_tokens for it in trace.requests]),
        output_tokens=Spread.of([it.output_tokens for it in trace.requests]),
        block_tokens=trace.block_tokens,
        blocks=blocks,
        blocks_unique=len(used),
        reuse_max=hit / asked if asked else 0.0,
        gap_s=Spread.of(gaps),
        sessions=len({it.session for it in trace.requests if it.session}),
        tenants=len({it.tenant for it in trace.requests if it.tenant}),
    )
