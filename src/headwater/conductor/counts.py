"""What a worker counts, for the parent's /metrics: plain numbers by name and label, and histograms of seconds.

Names and labels are few and fixed; nothing that a client sends becomes one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Any

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Counts:
    """Counters, gauges and histograms of one worker."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], float] = defaultdict(int)
        self.histograms: dict[tuple[str, str], list[float]] = {}
        """Counts of each bucket and of those beyond, then the sum."""

    def add(self, name: str, label: str = "", count: float = 1) -> None:
        """So many more."""
        self.numbers[name, label] += count

    def set(self, name: str, value: float, label: str = "") -> None:
        """A gauge."""
        self.numbers[name, label] = value

    def observe(self, name: str, seconds: float, label: str = "") -> None:
        """One more duration."""
        key = (name, label)
        row = self.histograms.get(key)
        if row is None:
            row = self.histograms[key] = [0.0] * (len(BOUNDS_S) + 2)
        row[bisect_left(BOUNDS_S, seconds)] += 1
        row[-1] += seconds

    def state(self) -> dict[str, Any]:
        """All of it, to be sent to the parent."""
        return {
            "numbers": [[name, label, value] for (name, label), value in self.numbers.items()],
            "histograms": [[name, label, row] for (name, label), row in self.histograms.items()],
        }
