"""When a process that died is started again: after a second, then later and later, until it has lived well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_S, LONGEST_S = 1.0, 60.0
HEALTHY_S = 60.0
"""Who was ready for so long has recovered: the next death is a new story."""
JITTER = 0.5


@dataclass(slots=True)
class Restarts:
    """The deaths of one process, and how long to wait after each: 1 s, 2 s, 4 s ... 60 s, up to a half less by chance,
    so that what died together does not come back together."""

    draw: Callable[[], float]
    """From 0 to below 1."""
    deaths: int = field(default=0, init=False)
    """In a row."""
    total: int = field(default=0, init=False)
    wait_s: float = field(default=0.0, init=False)
    """What `died` said last."""

    def died(self, ready_s: float) -> float:
        """Seconds until it is started again; it had been ready for so long, 0 if never."""
        self.deaths = 1 if ready_s >= HEALTHY_S else self.deaths + 1
        self.total += 1
        longest = min(LONGEST_S, FIRST_S * 2.0 ** min(self.deaths - 1, 16))
        self.wait_s = longest * (1 - JITTER * self.draw())
        return self.wait_s
