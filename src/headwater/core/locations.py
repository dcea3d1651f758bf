"""What a node remembers of the directory's answers: who holds which chunk. Bounded, and told the time.

An answer is good for `ttl_s`; after that the chunk is to be asked for again, and while the directory is away the old
answer is used however old it is. "Nobody" is only good for `nobody_ttl_s`, because somebody may be computing it now.

Answers lie in two halves. What is found in the old half moves to the young one; when the young half is full it becomes
the old one, and what was not used meanwhile goes: least recently used, for two dict operations. There are many such
pairs, because to grow or to free a dict of half a million entries takes tens of milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headwater.types import Replica

TTL_S = 5.0
NOBODY_TTL_S = 0.2
LIMIT = 1_000_000
PAIRS = 256
PAIR_LEAST = 256
NOBODY_LIMIT = 65_536
FATES_LIMIT = 65_536
Replicas = tuple[Replica, ...]
Answer = tuple[float, Replicas]
"""When it was given, and what it was. Shared by all chunks of a question that have the same holders."""


class Locations:
    """Up to `limit` answers. Numbers of lives that ended are told by `ended`, or `renumbered` when the life goes on."""

    def __init__(self, limit: int = LIMIT, ttl_s: float = TTL_S, nobody_ttl_s: float = NOBODY_TTL_S) -> None:
        assert limit >= 2 and 0 <= nobody_ttl_s <= ttl_s, f"{limit=}, {ttl_s=}, {nobody_ttl_s=}"
        self._ttl_s, self._nobody_ttl_s = ttl_s, nobody_ttl_s
        self._pairs = max(1, min(PAIRS, limit // PAIR_LEAST))
        self._half = limit // self._pairs // 2
        self._young: list[dict[bytes, Answer]] = [{} for _ in range(self._pairs)]
        self._old: list[dict[bytes, Answer]] = [{} for _ in range(self._pairs)]
        self._nobody: OrderedDict[bytes, float] = OrderedDict()
        self._fates: dict[int, int | None] = {}
        """What became of numbers that are no member's: the number that the same life has now, or None."""

    def __repr__(self) -> str:
        return f"Locations({len(self)} chunks, {len(self._nobody)} held by nobody, {len(self._fates)} numbers gone)"

    def __len__(self) -> int:
        """How many answers are kept, those counted twice that are in both halves."""
        return sum(map(len, self._young)) + sum(map(len, self._old))

    def find(self, names: Sequence[bytes], now: float) -> tuple[list[Replicas | None], list[bytes]]:
        """What is known of each chunk, however old, None where nothing is; and the chunks to ask the directory for."""
        known: dict[int, tuple[Answer, Replicas]] = {}
        found: list[Replicas | None] = []
        ask: list[bytes] = []
        young, old, pairs = self._young, self._old, self._pairs
        for name in names:
            pair = name[0] % pairs
            answer = young[pair].get(name)
            if answer is None and (answer := old[pair].get(name)) is not None:
                self._add(name, answer)
            if answer is None:
                at_s = self._nobody.get(name)
                is_fresh = at_s is not None and now - at_s < self._nobody_ttl_s
                found.append(() if is_fresh else None)
            else:
                seen = known.get(id(answer))
                if seen is None:
                    seen = known[id(answer)] = answer, self._today(answer[1])
                replicas = seen[1]
                # With all its holders gone it is as good as not known.
                is_fresh = bool(replicas) and now - answer[0] < self._ttl_s
                found.append(replicas or None)
            if not is_fresh:
                ask.append(name)
        return found, ask

    def merge(self, names: Sequence[bytes], answers: Sequence[Replicas], now: float, *, anew: bool = False) -> None:
        """The directory has answered. One that has begun `anew` has not yet heard of all holders: those known stay."""
        shared: dict[tuple[int, int], tuple[Answer, Answer | None]] = {}
        for name, replicas in zip(names, answers, strict=True):
            if replicas:
                before = self._of(name) if anew else None
                which = id(replicas), id(before)
                if which not in shared:
                    # `before` is held, so that no other gets its id.
                    shared[which] = (now, self._joined(replicas, before)), before
                self._add(name, shared[which][0])
            elif not self._keep(name, now):
                self._drop(name)
                self._holds_nobody(name, now)

    def missed(self, name: bytes, number: int, now: float) -> None:
        """A member that was said to hold a chunk does not."""
        answer = self._of(name)
        if answer is None:
            return
        at_s, replicas = answer
        left = tuple(it for it in self._today(replicas) if it.number != number)
        if left == replicas:
            return
        self._drop(name)
        if left:
            self._add(name, (at_s, left))
        else:
            # The directory may go on to say so: each chunk costs few such misses a second.
            self._holds_nobody(name, now)

    def _keep(self, name: bytes, now: float) -> bool:
        """Whether a chunk was said to be held by somebody who is still there; then it is asked for again soon. A
        directory that has just begun anew does not know yet; and if the chunk has left indeed, that costs one miss."""
        answer = self._of(name)
        if answer is None or not self._today(answer[1]):
            return False
        self._add(name, (now - self._ttl_s + self._nobody_ttl_s, answer[1]))
        return True

    def ended(self, numbers: Iterable[int]) -> None:
        """These numbers are no member's any more; nobody will use them again."""
        for number in numbers:
            self._became(number, None)

    def renumbered(self, number: int, anew: int) -> None:
        """The life that had one number goes on under another, and still holds what it held."""
        self._became(number, anew)

    def clear(self) -> None:
        """Forget everything."""
        for it in (*self._young, *self._old):
            it.clear()
        self._nobody.clear()

    def _became(self, number: int, fate: int | None) -> None:
        assert fate != number
        for earlier, then in self._fates.items():
            if then == number:
                self._fates[earlier] = fate
        self._fates.pop(number, None)
        self._fates[number] = fate
        if len(self._fates) > FATES_LIMIT:
            del self._fates[next(iter(self._fates))]

    def _today(self, replicas: Replicas) -> Replicas:
        """Replicas by the numbers that their holders have now."""
        if not any(it.number in self._fates for it in replicas):
            return replicas
        left: dict[Replica, None] = {}
        for it in replicas:
            number = self._fates.get(it.number, it.number)
            if number is not None:
                left[Replica(number, it.tier)] = None
        return tuple(left)

    def _holds_nobody(self, name: bytes, now: float) -> None:
        self._nobody[name] = now
        self._nobody.move_to_end(name)
        for _ in range(2):
            at_s = next(iter(self._nobody.values()))
            if len(self._nobody) > NOBODY_LIMIT or now - at_s >= self._nobody_ttl_s > 0:
                self._nobody.popitem(last=False)

    def _joined(self, replicas: Replicas, before: Answer | None) -> Replicas:
        if before is None:
            return replicas
        numbers = {it.number for it in replicas}
        return (*replicas, *(it for it in self._today(before[1]) if it.number not in numbers))

    def _of(self, name: bytes) -> Answer | None:
        pair = name[0] % self._pairs
        return self._young[pair].get(name) or self._old[pair].get(name)

    def _drop(self, name: bytes) -> None:
        pair = name[0] % self._pairs
        self._young[pair].pop(name, None)
        self._old[pair].pop(name, None)

    def _add(self, name: bytes, answer: Answer) -> None:
        pair = name[0] % self._pairs
        young = self._young[pair]
        young[name] = answer
        if len(young) >= self._half:
            self._old[pair], self._young[pair] = young, {}
