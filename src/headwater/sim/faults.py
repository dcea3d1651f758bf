"""What goes wrong in a simulated world, and how often.

Each seed turns each kind of fault on or off by itself, so that rare combinations and undisturbed stretches
both happen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities by occasion; zero where the kind is off."""

    copy_fails: float
    """A part's copy fails, leaving torn bytes behind a write."""
    write_is_slow: float
    read_is_slow: float
    """A part's copy takes seconds; what queues behind it gets late as well."""
    message_is_late: float
    """A message takes seconds, so that others overtake it."""
    message_repeats: float
    """A `done` arrives twice."""
    cancels: float
    """A request is cancelled at some moment of its life."""
    changes_of_mind: float
    """A scheduler gives a reservation back instead of using it."""
    breaks: float
    """A scheduler's connection breaks, with replies on it; on the next it says which tickets it knows. (At each
    request's start.)"""
    kills: float
    """An instance is killed: first its scheduler, its workers some time later. (At each request's start.)"""
    pauses: float
    """An instance or one of its workers is stopped and resumed. (At each request's start.)"""
    floods: float
    """While or after a load is read, a long prompt that nobody shares wants all the room at once."""
    strays: float
    """Somebody sends a message for a ticket that is not his. (At each request's start.)"""
    clears: float
    """The operator clears a namespace. (At each request's start.)"""
    tick_stalls: float
    """The node's tick comes seconds late."""
    tier_is_slow: float
    """A command of a lower tier takes seconds."""
    tier_sticks: float
    """A command of a lower tier ends only after its deadline, with nothing done."""
    tier_fails: float
    """One chunk's way to or from a lower tier fails."""
    tier_breaks: float
    """A lower tier as a whole does not work for some time. (At each command's start.)"""
    tier_is_full: float
    """A lower tier has no room for a chunk."""
    chunk_rots: float
    """What is read from a lower tier is damaged, gone or another's."""
    restarts: float
    """The node is killed and started again. (At each request's start.)"""
    spills: float
    """HOST loses all that nobody uses, as if others had needed the room. (At each request's start.)"""
    wishes: float
    """The operator pins, prefetches or evicts. (At each request's start.)"""


def draw_faults(rng: random.Random) -> Faults:
    """The faults of one world."""

    def sometimes(probability: float) -> float:
        return probability if rng.random() < 0.6 else 0.0

    return Faults(
        copy_fails=sometimes(0.1),
        write_is_slow=sometimes(0.05),
        read_is_slow=sometimes(0.25),
        message_is_late=sometimes(0.05),
        message_repeats=sometimes(0.3),
        cancels=sometimes(0.4),
        changes_of_mind=sometimes(0.1),
        breaks=sometimes(0.15),
        kills=sometimes(0.1),
        pauses=sometimes(0.25),
        floods=sometimes(0.5),
        strays=sometimes(0.4),
        clears=sometimes(0.04),
        tick_stalls=sometimes(0.2),
        tier_is_slow=sometimes(0.1),
        tier_sticks=sometimes(0.03),
        tier_fails=sometimes(0.1),
        tier_breaks=sometimes(0.05),
        tier_is_full=sometimes(0.05),
        chunk_rots=sometimes(0.1),
        restarts=sometimes(0.08),
        spills=sometimes(0.7),
        wishes=sometimes(0.2),
    )
