"""Evict what earns the least: expected uses per time that it would stay, learned from the cache's own history.

Theory of operation. An entry is of one of six *kinds*: how often it was used again (0, 1, 2 or more) and whether its
chain went on behind it when it was last used. Each kind has a queue from the longest unused to the last used.
For every kind and *age* (uses of the whole cache since its own last use, in bands of half an octave) two sums are kept:

    uses       how often an entry of that kind was used again at that age
    exposure   for how long, all together, entries of that kind were of that age

    uses / exposure up to the best horizon = worth:  for each kind, at each age   (`_weigh`)
    victim: of the six oldest entries, the one that is worth least at its age

Evicted entries are followed further as *ghosts* (a fingerprint, the kind and the time of the last use), so that a kind
that leaves too early is seen to be missed, and an entry that comes back has its count of uses again. Exposure is
measured by a round through all entries and ghosts, one of each for every use. The sums fade: what is older than a few
times the cache's own turnover counts little. Where a kind has little experience, it is taken for what has been used
once less, and that for the average; and where there is none, worth falls with age alike for all kinds, which is LRU.

Worth is the "hit density" of Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density",
NSDI 2018, with the best horizon of Gittins' index in place of their all-time average. Sums are integers, so that
equal histories give equal victims everywhere. Memory: 23 bytes an entry, 18 an entry for ghosts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from headwater.core.queues import NONE, Parked, Queues

MOST_USES = 2
KINDS = 2 * (MOST_USES + 1)
PARKED = KINDS
"""The queue behind those of the kinds."""

CLOCK_MASK = 0xFFFF_FFFF
BANDS = 64
ROUND = 64
"""So many entries, and so many ghosts, are looked at after so many uses."""
LEARN_SHARE, LEARN_LEAST = 8, 512
"""Worth is computed anew when an eighth of the entries were used, and not more often than this many uses."""
FADE_SHIFT = 5
"""Each time, a 32nd of the sums is forgotten."""
USE = 1 << 10
"""What one use adds to a sum, so that sums of few uses fade as well."""
GHOST_SHARE, GHOSTS_LEAST = 2, 8192
FIRST_GUESS = 0.5
"""Without experience: how often an entry is used again while its age grows by as much again."""


def band(age: int) -> int:
    """Two bands for each power of two: 0 and 1, 1.5 (never), 2, 3, 4-5, 6-7, 8-11, 12-15, ..."""
    if age < 2:
        return 0
    octave = age.bit_length() - 1
    return 2 * octave + (age >> octave - 1 & 1)


STARTS = [(1.5 if it & 1 else 1.0) * 2.0 ** (it // 2) for it in range(BANDS + 1)]
WIDTHS = [STARTS[it + 1] - STARTS[it] for it in range(BANDS)]


def best_rates(gains: Sequence[float], costs: Sequence[float]) -> list[float]:
    """For each start i the highest sum(gains[i:j]) / sum(costs[i:j]) over all ends j; all costs are positive."""
    rates = [0.0] * len(gains)
    runs: list[tuple[float, float]] = []
    for at in range(len(gains) - 1, -1, -1):
        gain, cost = gains[at], costs[at]
        # A later run that is better than this one makes this one better: they become one.
        while runs and runs[-1][0] * cost > gain * runs[-1][1]:
            more = runs.pop()
            gain, cost = gain + more[0], cost + more[1]
        runs.append((gain, cost))
        rates[at] = gain / cost
    return rates


class Ghosts:
    """What is known of entries that left: a table with one place for each fingerprint; a newcomer takes its place."""

    def __init__(self) -> None:
        self._prints, self._used_at, self._kinds = array("I"), array("I"), array("b")

    def __len__(self) -> int:
        """Places, empty or not."""
        return len(self._kinds)

    def fit(self, places: int) -> None:
        """Have about so many places; forgets all when there were far fewer, which is so only until a cache is full."""
        if len(self) < places * 3 // 4:
            self._prints, self._used_at = array("I", bytes(4 * places)), array("I", bytes(4 * places))
            self._kinds = array("b", [NONE]) * places

    def add(self, fingerprint: int, kind: int, used_at: int) -> None:
        """Remember what left."""
        place = fingerprint % len(self)
        self._prints[place], self._kinds[place], self._used_at[place] = fingerprint, kind, used_at

    def take(self, fingerprint: int) -> tuple[int, int] | None:
        """Forget a ghost; its kind and last use, None if it is not known."""
        place = fingerprint % len(self) if self._kinds else 0
        if not self._kinds or self._kinds[place] == NONE or self._prints[place] != fingerprint:
            return None
        kind, self._kinds[place] = self._kinds[place], NONE
        return kind, self._used_at[place]

    def at(self, place: int) -> tuple[int, int]:
        """The kind (NONE: nobody) and last use of who is at a place."""
        return self._kinds[place], self._used_at[place]


class Learned:
    """The entry leaves that is worth least by experience."""

    def __init__(self) -> None:
        self._queues = Queues(KINDS + 1)
        self._parked = Parked(self._queues, PARKED)
        self._freed: list[int] = []
        self._kinds, self._extended = array("b"), array("b")
        self._used_at, self._prints, self._parents = array("I"), array("I"), array("i")
        self._ghosts = Ghosts()
        self._left = NONE
        self._now = self._entry_at = self._ghost_at = 0
        self._learn_at = LEARN_LEAST
        self._uses = [[0] * BANDS for _ in range(KINDS)]
        self._exposure = [[0] * BANDS for _ in range(KINDS)]
        self._worth: list[list[float]] = []
        self._weigh()

    def __len__(self) -> int:
        return sum(self._queues.sizes)

    def __repr__(self) -> str:
        *kinds, parked = self._queues.sizes
        return f"Learned({kinds}, parked={parked}, ghosts<={len(self._ghosts)})"

    def insert(self, entry: int, key: bytes, parent: int = NONE) -> None:
        """See `ports.EvictionPolicy`."""
        self._tick()
        self._fit(max(entry, parent))
        fingerprint = int.from_bytes(key[:4], "little")
        ghost, uses = self._ghosts.take(fingerprint), 0
        if ghost is not None:
            kind, used_at = ghost
            uses = kind // 2
            if entry != self._left or fingerprint != self._prints[entry]:
                # Else it was only put back, nobody has used it.
                uses = min(uses + 1, MOST_USES)
                self._uses[kind][band(self._now - used_at & CLOCK_MASK)] += USE
        self._prints[entry], self._parents[entry] = fingerprint, parent
        self._push(entry, uses)
        if parent != NONE and not self._extended[parent]:
            self._extended[parent] = 1
            if NONE != self._queues.queue_of(parent) != PARKED:
                self._queues.take(parent)
                self._push(parent, self._kinds[parent] // 2)

    def access(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        self._tick()
        kind = self._kinds[entry]
        self._uses[kind][band(self._now - self._used_at[entry] & CLOCK_MASK)] += USE
        self._queues.take(entry)
        self._push(entry, min(kind // 2 + 1, MOST_USES))

    def remove(self, entry: int) -> None:
        """See `ports.EvictionPolicy`."""
        if self._queues.queue_of(entry) != NONE:
            self._queues.take(entry)
            self._leave(entry)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """See `ports.EvictionPolicy`."""
        entry = self._next(evictable)
        if entry is not None:
            self._leave(entry)
            self._ghosts.fit(max(GHOSTS_LEAST, GHOST_SHARE * (len(self) + 1)))
            self._ghosts.add(self._prints[entry], self._kinds[entry], self._used_at[entry])
            self._left = entry
        return entry

    def _next(self, evictable: Callable[[int], bool]) -> int | None:
        """Take the next victim out of its queue."""
        queues = self._queues
        while self._freed:
            entry = self._freed.pop()
            if queues.queue_of(entry) == PARKED and evictable(entry):
                queues.take(entry)
                return entry
        found = self._parked.take_old(evictable) if len(self._parked) else None
        while found is None:
            entry = self._least_worth()
            if entry == NONE:
                return self._parked.take_any(evictable)
            queues.take(entry)
            if evictable(entry):
                return entry
            self._parked.park(entry)
        return found

    def _least_worth(self) -> int:
        """The oldest entry of the kind whose oldest is worth least, the older of two that are worth the same."""
        found, least, oldest = NONE, 0.0, 0
        for kind, worth in enumerate(self._worth):
            entry = self._queues.oldest(kind)
            if entry != NONE:
                age = self._now - self._used_at[entry] & CLOCK_MASK
                rate = worth[band(age)]
                if found == NONE or rate < least or (rate == least and age > oldest):
                    found, least, oldest = entry, rate, age
        return found

    def _push(self, entry: int, uses: int) -> None:
        kind = 2 * uses + self._extended[entry]
        self._kinds[entry], self._used_at[entry] = kind, self._now & CLOCK_MASK
        self._queues.push(kind, entry)

    def _leave(self, entry: int) -> None:
        """An entry has left its queue for good; its parent may be free to go."""
        self._extended[entry] = 0
        parent = self._parents[entry]
        if parent != NONE and self._queues.queue_of(parent) == PARKED and len(self._freed) < len(self):
            # One that is left out for want of victims is found by the round through the parked.
            self._freed.append(parent)

    def _fit(self, entry: int) -> None:
        while len(self._kinds) <= entry:
            self._kinds.append(0)
            self._extended.append(0)
            self._used_at.append(0)
            self._prints.append(0)
            self._parents.append(NONE)

    def _tick(self) -> None:
        self._now += 1
        if self._now % ROUND == 0:
            self._expose()
            if self._now >= self._learn_at:
                self._learn_at = self._now + max(LEARN_LEAST, len(self) // LEARN_SHARE)
                self._weigh()
                self._fade()

    def _expose(self) -> None:
        """The next entries and ghosts of the round: each stands for the time until the round comes by again."""
        now, queue_of = self._now, self._queues.queue_of
        count = len(self._kinds)
        for _ in range(ROUND if count else 0):
            self._entry_at = entry = (self._entry_at + 1) % count
            if queue_of(entry) != NONE:
                self._exposure[self._kinds[entry]][band(now - self._used_at[entry] & CLOCK_MASK)] += count
        count = len(self._ghosts)
        for _ in range(ROUND if count else 0):
            self._ghost_at = (self._ghost_at + 1) % count
            kind, used_at = self._ghosts.at(self._ghost_at)
            if kind != NONE:
                self._exposure[kind][band(now - used_at & CLOCK_MASK)] += count

    def _weigh(self) -> None:
        """Compute what each kind is worth at each age, from the sums and one life more that goes as is usual."""
        usual, growth = [], FIRST_GUESS
        for at, (start, width) in enumerate(zip(STARTS[:BANDS], WIDTHS, strict=True)):
            uses = sum(it[at] for it in self._uses) / USE + growth / start * width
            growth = uses / (sum(it[at] for it in self._exposure) + width) * start
            usual.append(growth / start)
        rates = [usual, usual]
        self._worth = []
        for uses_at, exposure_at in zip(self._uses, self._exposure, strict=True):
            before = rates[-2]
            gains = [it / USE + rate * width for it, rate, width in zip(uses_at, before, WIDTHS, strict=True)]
            costs = [it + width for it, width in zip(exposure_at, WIDTHS, strict=True)]
            rates.append([gain / cost for gain, cost in zip(gains, costs, strict=True)])
            self._worth.append(best_rates(gains, costs))

    def _fade(self) -> None:
        for sums in (*self._uses, *self._exposure):
            sums[:] = [it - (it >> FADE_SHIFT) for it in sums]
