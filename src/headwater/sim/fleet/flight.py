"""A request on its way, and what those who route it and those who carry it ask of each other."""

from __future__ import annotations

from typing import Protocol

from headwater.core.loads import LoadBook
from headwater.fleet import Ask, Choice
from headwater.sim.fleet.engine import Job
from headwater.sim.fleet.results import Ending


class Flight:
    """A request on its way."""

    __slots__ = ("arrival_s", "ask", "choice", "generated", "job", "known", "number", "owed", "retries", "router")

    def __init__(self, number: int, ask: Ask, router: Router, arrival_s: float) -> None:
        self.number = number
        self.ask = ask
        self.router = router
        self.arrival_s = arrival_s
        """As in the trace."""
        self.choice: Choice | None = None
        self.job: Job | None = None
        """What the engines know of it now; what they say of any other is of the past."""
        self.generated = 0
        """Tokens of the answer that came before it was lost with an instance."""
        self.owed = 0
        """Prompt tokens that it adds to the load of its prefill instance."""
        self.known = 0
        """KV tokens that it adds to the load of its decode instance; 0 before its first token."""
        self.retries = 0


class Router(Protocol):
    """Who decides where requests go, and hears what becomes of them."""

    book: LoadBook | None
    """Its own loads, where there are several."""

    def take(self, flight: Flight) -> None:
        """A request has come: route it, now or when it is its turn."""

    def take_again(self, flight: Flight) -> None:
        """A request was lost with an instance: route it anew, if that was not too often yet."""

    def hear_first(self, flight: Flight) -> None:
        """A request's first token came."""

    def hear_end(self, flight: Flight, choice: Choice, tokens: int | None) -> None:
        """A request ended; None: without all its tokens."""


class Carrier(Protocol):
    """Who brings requests to where a router has decided."""

    flying: dict[int, Flight]

    def prepare(self, flight: Flight, choice: Choice, waited_s: float) -> Job:
        """It will go where the choice says; the loads know it already."""

    def send(self, flight: Flight, job: Job, choice: Choice) -> None:
        """It goes there, once what is fetched for it has come."""

    def end(self, flight: Flight, ending: Ending) -> None:
        """It was not served."""

    def fail(self, flight: Flight) -> None:
        """It will never have all its tokens."""
