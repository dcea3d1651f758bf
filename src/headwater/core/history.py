"""What became of chunks that are not there any more: bounded, and only for people who ask why."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headwater.types import ChunkKey, Removed

EVENTS_MAX = 32_768


@dataclass(frozen=True, slots=True)
class Event:
    """The last thing that happened to a chunk: where, what (`evicted`, `deleted`, `corrupt`, ...), when, and the
    namespace that needed its room, -1 if none did."""

    where: str
    what: str
    at_s: float
    cause: int = -1


class History:
    """The last event of each of the chunks that lately left."""

    def __init__(self) -> None:
        self._events: OrderedDict[ChunkKey, Event] = OrderedDict()

    def __repr__(self) -> str:
        return f"History({len(self._events)} chunks)"

    def removed(self, change: Removed, now: float) -> None:
        """A tier has announced that chunks left."""
        event = Event(change.tier.value, change.reason, now, change.cause)
        for key in change.keys[-EVENTS_MAX:]:
            self._add(key, event)

    def note(self, key: ChunkKey, where: str, what: str, now: float) -> None:
        """Something else happened to a chunk."""
        self._add(key, Event(where, what, now))

    def last(self, key: ChunkKey) -> Event | None:
        """What happened to a chunk last, as far as it is remembered."""
        return self._events.get(key)

    def _add(self, key: ChunkKey, event: Event) -> None:
        self._events[key] = event
        self._events.move_to_end(key)
        if len(self._events) > EVENTS_MAX:
            self._events.popitem(last=False)
