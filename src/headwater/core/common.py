"""What requests at one instance begin with in common: KV that is there once, and counted for each of them.

Each is compared with the oldest one there that has its first key: their common beginning is found by halving, as keys
are of everything before them. So it is never found to be more than is there, and of two families that part early, one
is taken to have less in common than it has.
"""

from __future__ import annotations

from collections.abc import Sequence


class Common:
    """Of one Conductor's requests, at all instances."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        """By instance, how many are counted more often than they are there; only to be read."""
        self._groups: dict[tuple[int, bytes], dict[str, Sequence[bytes]]] = {}
        """Those at an instance with one first key, the oldest first."""
        self._shared: dict[str, tuple[tuple[int, bytes], int]] = {}

    def __repr__(self) -> str:
        return f"Common({len(self._shared)} requests in {len(self._groups)} groups)"

    def __len__(self) -> int:
        return len(self._shared)

    def join(self, request: str, instance: int, keys: Sequence[bytes], block_tokens: int) -> None:
        """One more there, which is in none; nothing without keys."""
        if not keys:
            return
        at = instance, keys[0]
        group = self._groups.get(at)
        if group is None:
            self._groups[at] = {request: keys}
            self._shared[request] = at, 0
            return
        shared = alike(next(iter(group.values())), keys) * block_tokens
        group[request] = keys
        self._shared[request] = at, shared
        self.tokens[instance] = self.tokens.get(instance, 0) + shared

    def leave(self, request: str) -> None:
        """It is over there. Whoever is the oldest then is counted whole."""
        found = self._shared.pop(request, None)
        if found is None:
            return
        at, shared = found
        group = self._groups[at]
        del group[request]
        if not group:
            del self._groups[at]
        elif not shared:
            oldest = next(iter(group))
            shared = self._shared[oldest][1]
            self._shared[oldest] = at, 0
        if shared:
            self.tokens[at[0]] -= shared

    def left(self, instance: int) -> None:
        """It is gone, and what was there with it."""
        for at in [at for at in self._groups if at[0] == instance]:
            for request in self._groups.pop(at):
                del self._shared[request]
        self.tokens.pop(instance, None)


def alike(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading keys are the same, of which the first is."""
    low, high = 1, min(len(one), len(other))
    if one[high - 1] == other[high - 1]:
        return high
    while low < high:
        half = (low + high) // 2
        if one[half] == other[half]:
            low = half + 1
        else:
            high = half
    return low
