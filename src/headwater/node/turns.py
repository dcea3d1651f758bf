"""Whose turn it is on the way to a peer: loads before copies that nobody waits for; threads wait here for theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from headwater.core.budget import Budget, Priority


class Turns:
    """The budgets of all peers, by number; `core.budget` says who is next."""

    def __init__(self) -> None:
        self._budgets: dict[int, Budget] = {}
        self._started: set[tuple[int, int]] = set()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Turns({self._budgets!r})"

    def listed(self, numbers: Collection[int], rates: Mapping[int, float]) -> None:
        """These are the peers, and what was measured of them; budgets of others are forgotten."""
        with self._changed:
            self._budgets = {number: it for number, it in self._budgets.items() if number in numbers}
            for number, bytes_s in rates.items():
                if number in self._budgets:
                    self._budgets[number].rate(bytes_s)

    @contextmanager
    def one(self, number: int, priority: Priority, size_bytes: int, until_s: float) -> Iterator[bool]:
        """A turn for this block; False if it has not come in time."""
        with self._changed:
            budget = self._budgets.setdefault(number, Budget())
            ticket = budget.ask(priority, size_bytes, time.monotonic())
            comes = self._wait(number, budget, ticket, until_s)
        try:
            yield comes
        finally:
            with self._changed:
                self._started.discard((number, ticket))
                budget.ended(ticket, time.monotonic())
                self._changed.notify_all()

    def _wait(self, number: int, budget: Budget, ticket: int, until_s: float) -> bool:
        while True:
            now = time.monotonic()
            started = {(number, it) for it in budget.start(now)}
            if started:
                self._started |= started
                self._changed.notify_all()
            if (number, ticket) in self._started:
                return True
            if now >= until_s:
                return False
            next_s = budget.next_s(now)
            self._changed.wait(min(until_s, next_s or until_s) - now)
