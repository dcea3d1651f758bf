"""A request as the brain keeps it, from when it was taken until it ended or was refused."""

from __future__ import annotations

import msgspec

from headwater.conductor.explaining import Record
from headwater.conductor.job import Job, Refused, Sent
from headwater.conductor.timers import Timer
from headwater.fleet import Ask, Choice


class Flight(msgspec.Struct, eq=False):
    """One job. `name` is its name in book, admission and shares: ours, so that no two are the same whatever clients
    call theirs."""

    name: str
    job: Job
    ask: Ask
    sent: Sent
    refused: Refused
    asked: Ask
    """As it was asked at first; in `ask` of one that goes on elsewhere, the prompt has what was answered."""
    choice: Choice | None = None
    """None while it is at no instance."""
    excluded: set[int] = msgspec.field(default_factory=set)
    """Instances that it was lost with."""
    waits: bool = False
    pushed_s: float = 0.0
    first_s: float = 0.0
    """When its first token came from this instance; 0 if it has not."""
    answered: bool = False
    """Whether a first token came from anywhere."""
    presumed_s: float = 0.0
    """When it is taken to have begun, where nobody says so; 0 if somebody does, or it has."""
    handed: bool = False
    """Of a pair: whether its first leg is over."""
    computed_s: float = 0.0
    """When that had computed the prompt; 0 if it has not."""
    handing: Timer | None = None
    """When the prompt's KV is looked for next."""
    taught: bool = False
    """Whether its first token has taught how fast its instance is."""
    losses: int = 0
    queued: tuple[int, int] = (0, 0)
    """Requests and tokens that waited there when it was sent."""
    decoders: tuple[int, int] = (0, 0)
    """Requests and KV tokens that decoded there at its first token, itself included."""
    counted_tokens: int = 0
    """What of its answer is in the book."""
    record: Record | None = None
