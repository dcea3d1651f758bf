"""Instances that have come back lately: each request that is sent anywhere earns such a one a part of its share, and
each that it gets costs a whole one. Who has not earned one is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headwater.fleet import Instance

EARNED_MOST = 2.0


class Health(Protocol):
    """What is asked of `Polling`."""

    def trouble(self, number: int, why: str) -> None:
        """A request was lost there."""

    def share(self, number: int, now: float) -> float:
        """How much of its usual share of requests an instance may have."""

    def out_s(self, number: int, now: float) -> float | None:
        """For how long it has been away; None if it is not."""

    def state(self, number: int) -> dict[str, Any]:
        """For `headwater fleet`."""


class Earning:
    """Who is slow to come back, and how much it has earned. Nobody, mostly: ask `earned` first."""

    def __init__(self, instances: Mapping[int, Instance]) -> None:
        self._instances = instances
        self.health: Health | None = None
        self.earned: dict[int, float] = {}
        """Of instances that have come back lately, how many requests they may have."""

    def slow(self, now: float) -> set[int]:
        """Those that may have none now; those that have been back long enough are as all others again."""
        slow = set()
        for number in list(self.earned):
            if self.health is None or self.health.share(number, now) >= 1.0:
                del self.earned[number]
            elif self.earned[number] < 1.0:
                slow.add(number)
        return slow

    def sent(self, prefill: int, decode: int, now: float) -> None:
        """A request was sent there."""
        if self.health is None:
            return
        alive = sum(it.alive for it in self._instances.values())
        for number, earned in self.earned.items():
            spent = number in (prefill, decode)
            self.earned[number] = min(earned + self.health.share(number, now) / max(alive, 1), EARNED_MOST) - spent

    def changed(self, number: int, alive: bool, now: float) -> None:
        """An instance has gone or has come back."""
        self.earned.pop(number, None)
        if alive and self.health is not None and self.health.share(number, now) < 1.0:
            self.earned[number] = 0.0

    def left(self, number: int) -> None:
        """Its number may be given to another."""
        self.earned.pop(number, None)
