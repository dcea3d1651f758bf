"""What a tier keeps that stands behind several DEVICEs: what it will be asked for, not what is used most.

Theory of operation. Each DEVICE keeps what was used last, by its engine's own rule. A tier of the same size that also
keeps what was used last holds the same chunks again, and serves next to nothing. So two things are told apart here,
which for a cache that stands alone are one:

    a use      makes a chunk younger and counts for its kind, whoever served it
    a demand   a use that no DEVICE could serve: by the tier (`access`), or by nobody, it was computed (`absent`)

`Learned` asks how many uses are to be expected for the room and time that a chunk takes; this policy asks the same of
demands only. A chunk that a DEVICE will serve earns nothing as long as it does so, and the time until then is a cost.
For this a policy must hear of every request, not only of those that come to the tier. Its driver says, chunk by chunk
in the order of the prompt:

    the tier holds it    a DEVICE served it -> `met`      the tier served it -> `access`
    the tier has it not  -> `absent`, with whether a DEVICE served it
    it is saved          -> `insert`: no use, only now the tier holds it; its past is found again by its key

*When* chunks are saved decides more than any ranking (`docs/routing.md` has the figures):

    at once   when they were computed. A chunk that the tier drops while a DEVICE holds it is lost for good when that
              evicts it, so that what is on a DEVICE takes room here without being asked for.
    late      when a DEVICE is about to evict them (engines that show their queue of free blocks allow it: vLLM's
              own SimpleCPUOffloadConnector does so with `lazy_offload`). Tier and DEVICEs are then nearly one cache of
              both sizes. Chunks come with their age, and wait in queues of their own until they are asked for.

In both cases a request that goes elsewhere than to the DEVICE that holds its prefix needs that prefix saved first.

Chunks that the tier does not hold are followed as ghosts, in a table with a fixed number of places (9 bytes each) that
should be about twice what tier and DEVICEs hold: with fewer, chunks come without their past, as new ones.

"Hit density": Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018. That
second-level caches see another workload, and must rank by what the first level misses: Zhou, Philbin and Li, "The
multi-queue replacement algorithm for second level buffer caches", USENIX ATC 2001; that saving on eviction makes
both levels one: Wong and Wilkes, "My cache or yours? Making storage more exclusive", USENIX ATC 2002. Classes by turn
with learned distributions of the time to reuse: Wang et al., "KVCache cache in the wild", arXiv 2506.02634.
"""

from __future__ import annotations

from collections.abc import Callable

from headwater.core.learned import CLOCK_MASK, MOST_USES, USE, Learned, band
from headwater.core.queues import NONE

GHOSTS = 1 << 16
"""Enough for 16,000 chunks in the tier and as many on the DEVICEs, twice; 590 KB."""
LATE = 1
"""The low bit of a kind: it was saved late, and not used since."""


class Keeping(Learned):
    """The entry leaves for which the least demand is to be expected."""

    def __init__(self, late: bool = True, ghosts: int = GHOSTS) -> None:
        """`late`: chunks are saved when a DEVICE is about to evict them."""
        assert ghosts > 0, f"{ghosts=}"
        super().__init__()
        self._late = LATE if late else 0
        self._ghosts.fit(ghosts)

    def __repr__(self) -> str:
        *kinds, parked = self._queues.sizes
        return f"Keeping({kinds}, parked={parked}, {'late' if self._late else 'at once'}, ghosts<={len(self._ghosts)})"

    def insert(self, entry: int, key: bytes, parent: int = NONE) -> None:
        """See `ports.EvictionPolicy`; it is no use, but of a chunk of which nothing was known."""
        self._fit(entry)
        fingerprint = int.from_bytes(key[:4], "little")
        ghost = self._ghosts.take(fingerprint)
        if ghost is None:
            self._tick()
            kind, used_at = 0, self._now & CLOCK_MASK
        else:
            kind, used_at = ghost[0] | self._late, ghost[1]
        self._prints[entry], self._parents[entry] = fingerprint, parent
        self._kinds[entry], self._used_at[entry] = kind, used_at
        self._queues.push(kind, entry)

    def access(self, entry: int) -> None:
        """The tier served it."""
        self._again(entry, demand=True)

    def met(self, entry: int) -> None:
        """It was used by a request, and a DEVICE served it."""
        self._again(entry, demand=False)

    def absent(self, key: bytes, held: bool) -> None:
        """A chunk was used that is not resident; `held` by the DEVICE that used it, or else computed by it."""
        self._tick()
        fingerprint = int.from_bytes(key[:4], "little")
        ghost = self._ghosts.take(fingerprint)
        kind = self._used(*ghost, demand=not held) if ghost is not None else 0
        self._ghosts.add(fingerprint, kind, self._now & CLOCK_MASK)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """See `ports.EvictionPolicy`."""
        entry = self._next(evictable)
        if entry is not None:
            self._ghosts.add(self._prints[entry], self._kinds[entry], self._used_at[entry])
            self._leave(entry)
        return entry

    def _again(self, entry: int, demand: bool) -> None:
        self._tick()
        kind = self._used(self._kinds[entry], self._used_at[entry], demand)
        self._queues.take(entry)
        self._push(entry, kind // 2)

    def _used(self, kind: int, used_at: int, demand: bool) -> int:
        """Count a use of a chunk of that kind; what kind it is now."""
        if demand:
            self._uses[kind][band(self._now - used_at & CLOCK_MASK)] += USE
        return 2 * min(kind // 2 + 1, MOST_USES)
