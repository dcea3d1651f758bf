"""The requests that wait for admission: whose turn it is, who has to give way, and whose time is over.

Each model has a line of its own, in the order of `core.shares`: who waits for one model's instances is in nobody's way
at another's. All lines together have `most` places. When they are taken, whoever has more of them than its weight is
due gives one up, its latest, so that a flood of one tenant leaves room for the others; when that is who has just come,
it is turned away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from math import inf

from headwater.conductor.flight import Flight
from headwater.core.shares import Shares
from headwater.fleet import Ask


class Turns:
    """The lines of one worker. One caller at a time."""

    def __init__(self, weights: Mapping[str, float], most: int, wait_s: float) -> None:
        """`wait_s` is how long a request may wait at all."""
        self._weights, self._most, self._wait_s = dict(weights), most, wait_s
        self._lines: dict[str, Shares] = {}
        self._flights: OrderedDict[str, Flight] = OrderedDict()
        """By name, the one that has waited longest first."""
        self._popped: Ask | None = None
        self._tenants: dict[str, OrderedDict[str, Flight]] = {}

    def __repr__(self) -> str:
        return f"Turns({len(self)} of {self._most} places, {len(self._tenants)} tenants, {len(self._lines)} models)"

    def __len__(self) -> int:
        return len(self._flights)

    def waiting(self, model: str) -> int:
        """How many wait for a model's instances."""
        line = self._lines.get(model)
        return len(line) if line is not None else 0

    def models(self) -> list[str]:
        """Those that anybody waits for."""
        return [model for model, line in self._lines.items() if len(line)]

    def tenants(self) -> dict[str, int]:
        """How many of each wait."""
        return {name: len(flights) for name, flights in self._tenants.items()}

    def giving_way(self, tenant: str) -> Flight | None:
        """Who has to leave for one more of this tenant: None if there is room, or if it is the one that comes; tell
        these apart by `is_full`. Nothing is changed."""
        if not self.is_full():
            return None
        mine = (len(self._tenants.get(tenant, ())) + 1) / self._weights.get(tenant, 1.0)
        name = max(self._tenants, key=lambda it: len(self._tenants[it]) / self._weights.get(it, 1.0))
        theirs = len(self._tenants[name]) / self._weights.get(name, 1.0)
        return next(reversed(self._tenants[name].values())) if name != tenant and theirs > mine else None

    def is_full(self) -> bool:
        """Whether all places are taken."""
        return len(self._flights) >= self._most

    def push(self, flight: Flight, work: float, now: float) -> None:
        """It waits from now on; there must be room."""
        assert not self.is_full() and not flight.waits, f"{flight.name} has no place in {self!r}"
        line = self._lines.get(flight.ask.model)
        if line is None:
            line = self._lines[flight.ask.model] = Shares(self._weights)
        line.push(flight.ask, work, now)
        flight.waits, flight.pushed_s = True, now
        self._flights[flight.name] = flight
        self._tenants.setdefault(flight.ask.tenant, OrderedDict())[flight.name] = flight

    def pop(self, model: str, now: float) -> Flight | None:
        """Whose turn it is, who does not wait any more; None if nobody does."""
        line = self._lines.get(model)
        ask = line.pop(now) if line is not None else None
        if ask is None:
            self._lines.pop(model, None)
            return None
        self._popped = ask
        # It keeps its place, and its deadline, until `leave`: it may come back.
        return self._flights[ask.request]

    def find(self, name: str) -> Flight | None:
        """Who waits under that name."""
        return self._flights.get(name)

    def put_back(self, flight: Flight) -> None:
        """Whom `pop` gave last waits on; also if what it asks is put otherwise by now."""
        assert self._popped is not None and self._popped.request == flight.name, f"{flight.name} was not popped last"
        self._lines[flight.ask.model].put_back(self._popped)

    def leave(self, flight: Flight) -> None:
        """It does not wait any more, whether it was popped or not."""
        if not flight.waits:
            return
        flight.waits = False
        del self._flights[flight.name]
        mine = self._tenants[flight.ask.tenant]
        del mine[flight.name]
        if not mine:
            del self._tenants[flight.ask.tenant]
        line = self._lines.get(flight.ask.model)
        if line is not None:
            line.cancel(flight.name)

    def late(self, now: float) -> list[Flight]:
        """Those whose time is over; they still wait."""
        found = []
        for flight in self._flights.values():
            if now < flight.pushed_s + self._wait_s:
                break
            found.append(flight)
        return found

    def waiting_s(self) -> float:
        """Since when the first one waits; infinity if nobody does."""
        for flight in self._flights.values():
            return flight.pushed_s
        return inf

    def deadline_s(self) -> float | None:
        """When the first one's time is over; None if nobody waits."""
        first: Iterable[Flight] = self._flights.values()
        return next((it.pushed_s + self._wait_s for it in first), None)
