"""Requests that begin alike and come at once: their common prefix is computed at two instances, and not at each.

Theory of operation. Five hundred equal prompts that nobody holds arrive within a millisecond. The first goes somewhere,
and is taken to be held there. To the policy, though, each of those that follow makes the queue there longer by a step
of its own, and soon every other instance looks better, where all of it would be computed again.

    leader     a request that computes most of its prompt: the keys of its prefix, at a few depths, lead to its instance
    follower   one that shares at least a quarter of its prompt with a leader; if there are `COPIES` instances with such
               leaders, and one of these would have it computed soon by the steps that it will really take, with
               everybody who waits in one batch, it goes to one of these

A leader counts until its first token and for `LINGER_S` more: then the prefix is where it is known to be, and the
policy knows best. It counts on for who came before that, and was tokenised or waited for admission meanwhile: the rest
of a herd. How deep two prompts are alike is looked up at depths 1, 4, 16 ... keys: it is found to be at least a quarter
of what it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter

from headwater.fleet import Choice

COPIES = 2
LEADER_TOKENS = 256
"""Fewer are computed sooner than anything is looked up."""
SHARE = 1 / 16
"""Of a prompt, as it is looked up."""
DEPTHS = tuple(4**power for power in range(12))
LINGER_S = 1.0
PATIENCE = 4.0
"""A follower waits at a leader for up to so many times what it would take to compute all of it elsewhere."""
LEADERS_MAX = 4096
_Places = dict[bytes, dict[int, int]]
"""How many leaders with this key there are at each instance."""


def _last(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    return (keys[-1],)


MARKS: list[Callable[[Sequence[bytes]], tuple[bytes, ...]]] = [
    _last,
    *(itemgetter(*(depth - 1 for depth in DEPTHS[:count]), -1) for count in range(1, len(DEPTHS) + 1)),
]
"""The keys at the first so many depths, and the last."""


class Alike:
    """The leaders of one Conductor. Keys are those of one model's finest lens, so that models do not mix."""

    def __init__(self) -> None:
        self._leaders: dict[str, tuple[tuple[bytes, ...], int]] = {}
        """By request: its keys at those depths, and its instance."""
        self._firsts: dict[bytes, str | _Places] = {}
        """Whom a first key leads to: to one leader, as nearly always, or to all keys of several."""
        self._ending: deque[tuple[float, str]] = deque()

    def __repr__(self) -> str:
        return f"Alike({len(self._leaders)} leaders, {len(self._firsts)} beginnings)"

    def __len__(self) -> int:
        return len(self._leaders)

    def lead(self, request: str, keys: Sequence[bytes], tokens: int, choice: Choice) -> None:
        """A request was sent there; it leads if it has to compute enough."""
        computed = tokens - choice.cached_tokens - choice.fetched_tokens
        if computed < LEADER_TOKENS or 2 * computed < tokens or not keys:
            return
        if request in self._leaders:
            self.lost(request)
        while len(self._leaders) >= LEADERS_MAX:
            if not self._ending:
                return
            self.lost(self._ending.popleft()[1])
        leader = self._leaders[request] = MARKS[bisect_left(DEPTHS, len(keys))](keys), choice.prefill
        known = self._firsts.get(keys[0])
        if known is None:
            self._firsts[keys[0]] = request
            return
        if isinstance(known, str):
            other, known = known, {}
            self._firsts[keys[0]] = known
            _count(known, *self._leaders[other])
        _count(known, *leader)

    def started(self, request: str, now: float) -> None:
        """Its first token came."""
        if request in self._leaders:
            self._ending.append((now + LINGER_S, request))

    def lost(self, request: str) -> None:
        """It leads nobody any more."""
        found = self._leaders.pop(request, None)
        if found is None:
            return
        marks, number = found
        known = self._firsts[marks[0]]
        if isinstance(known, str):
            del self._firsts[marks[0]]
            return
        for key in marks:
            places = known[key]
            places[number] -= 1
            if not places[number]:
                del places[number]
                if not places:
                    del known[key]
        if not known:
            del self._firsts[marks[0]]

    def places(self, keys: Sequence[bytes], block_tokens: int, tokens: int, since_s: float) -> set[int] | None:
        """The instances where enough of this prompt is being computed; None if those are too few to keep to. `since_s`
        is when the first of those came who are to be placed, now or later."""
        ending = self._ending
        while ending and ending[0][0] <= since_s:
            self.lost(ending.popleft()[1])
        # Whoever has any key in common has the first.
        known = self._firsts.get(keys[0]) if keys else None
        if known is None or isinstance(known, str) or len(known[keys[0]]) < COPIES:
            return None
        found = set(known.get(keys[-1], ()))
        least = SHARE * tokens / block_tokens
        for depth in DEPTHS:
            if least <= depth < len(keys):
                found |= known.get(keys[depth - 1], {}).keys()
        return found if len(found) >= COPIES else None


def _count(known: _Places, marks: Sequence[bytes], number: int) -> None:
    for key in marks:
        places = known.setdefault(key, {})
        places[number] = places.get(number, 0) + 1
