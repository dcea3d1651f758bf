"""Whether a tier or a peer is asked at all: a circuit breaker, told the time and what came of each operation.

Theory of operation.

    WELL      everybody may ask; `failures` failures or overdue operations in a row, or one that says that
              the whole tier does not work                                                   -> SICK
    SICK      nobody may ask until the next probe is due; the first to ask then is the probe -> PROBING
    PROBING   nobody else may ask; it fails -> SICK, twice as long; it succeeds              -> WELL
              a probe that nobody reports within the longest pause is taken as failed by whoever asks next

Any success heals, also that of an operation begun before. Pauses grow from 0.1 s to 5 s and are spread over their
upper half by the caller's `jitter`, a number in [0, 1), so that the nodes that share a tier do not come all at once.
A tier that fails again soon after it healed goes on with the pause that it had reached.
"""

from __future__ import annotations

import enum
import math

FIRST_S = 0.2
"""The first pause, before jitter: 0.1 to 0.2 s."""
LONGEST_S = 5.0


class Health(enum.Enum):
    """What a breaker thinks of what is behind it."""

    WELL = "well"
    SICK = "sick"
    PROBING = "probing"


class Breaker:
    """One tier's or peer's health; at most ten tries a second get through while it is sick."""

    def __init__(self, failures: int = 3, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        assert failures > 0 and 0 < first_s <= longest_s, f"{failures=}, {first_s=}, {longest_s=}"
        self._failures, self._first_s, self._longest_s = failures, first_s, longest_s
        self.state = Health.WELL
        self.opened = 0
        """How often it went from WELL to SICK."""
        self.probes = 0
        self.failed_operations = 0
        self.slow_operations = 0
        self._row = 0
        self._pause_s = first_s
        self._due_s = 0.0
        self._healed_s = -math.inf

    def __repr__(self) -> str:
        return (
            f"Breaker({self.state.value}, {self._row} failures in a row, opened {self.opened} times, "
            f"{self.probes} probes)"
        )

    @property
    def next_probe_s(self) -> float | None:
        """The moment from which `allows` lets the next probe through; None while it is well."""
        return None if self.state is Health.WELL else self._due_s

    def allows(self, now: float) -> bool:
        """Whether to ask now. When sick, True makes the caller the probe, who must report what came of it."""
        if self.state is Health.WELL:
            return True
        if now < self._due_s:
            return False
        self.state = Health.PROBING
        self.probes += 1
        self._due_s = now + self._longest_s
        return True

    def succeeded(self, now: float) -> None:
        """An operation did what it should."""
        if self.state is not Health.WELL:
            self.state = Health.WELL
            self._healed_s = now
        self._row = 0

    def failed(self, now: float, jitter: float, *, unavailable: bool = False) -> None:
        """An operation failed; `unavailable` says that the tier as a whole does not work."""
        self.failed_operations += 1
        self._worse(now, jitter, unavailable)

    def slow(self, now: float, jitter: float, *, unavailable: bool = False) -> None:
        """An operation did not end by its deadline; see `failed`."""
        self.slow_operations += 1
        self._worse(now, jitter, unavailable)

    def _worse(self, now: float, jitter: float, unavailable: bool) -> None:
        assert 0 <= jitter < 1, f"{jitter=}"
        self._row += 1
        if self.state is Health.PROBING:
            self._pause(now, jitter, 2 * self._pause_s)
        elif self.state is Health.WELL and (unavailable or self._row >= self._failures):
            self.opened += 1
            again = now - self._healed_s <= self._longest_s
            self._pause(now, jitter, 2 * self._pause_s if again else self._first_s)

    def _pause(self, now: float, jitter: float, pause_s: float) -> None:
        self.state = Health.SICK
        self._pause_s = min(pause_s, self._longest_s)
        self._due_s = now + self._pause_s * (1 + jitter) / 2
