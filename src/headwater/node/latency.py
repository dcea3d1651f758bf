"""How long calls take: counts by upper bound, cheap enough to be kept for every call."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)


class Latency:
    """A histogram: `counts[i]` calls took at most `BOUNDS_S[i]` and more than the bound before, the last had none."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
