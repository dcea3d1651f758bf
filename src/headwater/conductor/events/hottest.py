"""Which prefixes are met most: the counts of a few, by "space saving" (Metwally, Agrawal, El Abbadi: Efficient
Computation of Frequent and Top-k Elements in Data Streams, ICDT 2005).

A key that is not counted takes the place of the one met least, and goes on from its count: so a count is too high by at
most the least one, and whatever is met more often than that is among them.
"""

from __future__ import annotations

from typing import NamedTuple

ROOM = 64


class Hot(NamedTuple):
    """A prefix: the key of its last block, how many tokens it has, how often it was met at most."""

    key: bytes
    tokens: int
    hits: int


class Hottest:
    """Up to `room` keys and their counts."""

    def __init__(self, room: int = ROOM) -> None:
        assert room > 0, f"room={room}"
        self._room = room
        self._hits: dict[bytes, int] = {}
        self._tokens: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._hits)

    def met(self, key: bytes, tokens: int) -> None:
        """A prompt had this prefix, of so many tokens."""
        hits = self._hits
        count = hits.get(key)
        if count is None:
            count = 0
            if len(hits) >= self._room:
                least = min(hits, key=hits.__getitem__)
                count = hits.pop(least)
                del self._tokens[least]
            self._tokens[key] = tokens
        hits[key] = count + 1

    def top(self, count: int) -> list[Hot]:
        """Those met most."""
        keys = sorted(self._hits, key=self._hits.__getitem__, reverse=True)[:count]
        return [Hot(key, self._tokens[key], self._hits[key]) for key in keys]
