"""A large table from keys to small numbers, changed by whole batches: what the prefix index stands on.

Theory of operation. A key's first two bytes name its *shard*; every shard grows and forgets by itself, so no pause is
longer than a shard is large. Each key has a *value* (0 is the same as absent) and the *tick* at which it was last met.
A *step* says what becomes of which value; it is asked for those that occur and may find out as it is asked, but not
touch the table. When a full shard is to take another key, it first forgets the eighth of its limit that was met least
recently, and what is as old as the youngest of that.

    change: key ──► old value (0: absent) ──step──► new value (0: forget the key)
    runs:   keys ──► [(value, end), ...], equal neighbours together, as far as keys are known

`runs` jumps: it looks at every 16th key, and where two of those have different values it halves the way between them
until it knows where the value changes. It meets no key by that. But if one of those that it looks at was not met for
more than `fresh` ticks, it walks instead: looks at every key, and meets it.

Ticks count upwards and wrap at 32 bits: a key that was not met for 2**31 of them counts as it comes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

SHARDS_MAX = 1024
TICKS = 1 << 32
KEY_SIZES = (8, 16)
STRIDE = 16


class KeyTable(Protocol):
    """One caller at a time. A key of another length than the table's is a ValueError, and nothing has changed."""

    def __len__(self) -> int:
        """How many keys there are."""

    @property
    def shards(self) -> int:
        """A power of two."""

    @property
    def stamped(self) -> int:
        """How often a key was met at another tick than before, or for the first time."""

    def change(
        self, keys: Sequence[bytes], step: Mapping[int, int], tick: int, /
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Take every key a step; how many keys of which old value did, and how many of which value were forgotten."""

    def runs(self, keys: Sequence[bytes], tick: int, fresh: int, /) -> list[tuple[int, int]]:
        """The values of the keys up to the first that is absent. What a jump does not look at is not checked either."""

    def sweep(self, shard: int, step: Mapping[int, int], /) -> dict[int, int]:
        """Take every key of a shard a step, meeting none; how many of which value did."""

    def content(self, shard: int, /) -> tuple[bytes, bytes]:
        """All keys of a shard one after another, and their values as native u32, sorted by these."""


class MakeTable(Protocol):
    """How to make an empty table; a shard holds at most `shard_limit` keys."""

    def __call__(self, shards: int, shard_limit: int, key_bytes: int) -> KeyTable: ...


class _StaleError(Exception):
    """A jump has met a key that was not met for long."""


class DictTable:
    """A KeyTable of dicts: for where there is no other, several times slower and larger than the one in C."""

    def __init__(self, shards: int, shard_limit: int, key_bytes: int) -> None:
        if not 1 <= shards <= SHARDS_MAX or shards & (shards - 1):
            raise ValueError(f"shards: want a power of two up to {SHARDS_MAX}")
        if shard_limit < 1:
            raise ValueError("shard_limit: want at least 1")
        if key_bytes not in KEY_SIZES:
            raise ValueError("key_bytes: want 8 or 16")
        self.stamped = 0
        self._limit, self._key_bytes, self._tick = shard_limit, key_bytes, 0
        self._shards: list[dict[bytes, tuple[int, int]]] = [{} for _ in range(shards)]
        self._slot: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def shards(self) -> int:
        """See KeyTable."""
        return len(self._shards)

    def change(
        self, keys: Sequence[bytes], step: Mapping[int, int], tick: int, /
    ) -> tuple[dict[int, int], dict[int, int]]:
        """See KeyTable."""
        self._check(keys)
        self._tick = tick
        moved: Counter[int] = Counter()
        forgotten: Counter[int] = Counter()
        for key in keys:
            shard = self._shard_of(key)
            slot = shard.get(key)
            old = slot[0] if slot else 0
            new = step[old]
            moved[old] += 1
            if new:
                if slot is None and len(shard) >= self._limit:
                    forgotten += self._forget(shard)
                self._put(shard, key, new, slot)
            elif slot:
                del shard[key]
        return dict(moved), dict(forgotten)

    def runs(self, keys: Sequence[bytes], tick: int, fresh: int, /) -> list[tuple[int, int]]:
        """See KeyTable."""
        self._tick = tick
        try:
            return self._leap(keys, fresh)
        except _StaleError:
            return list(self._walk(keys))

    def sweep(self, shard: int, step: Mapping[int, int], /) -> dict[int, int]:
        """See KeyTable."""
        table = self._shards[self._numbered(shard)]
        moved = Counter(value for value, _ in table.values())
        stays = ((key, (step[value], tick)) for key, (value, tick) in table.items())
        self._shards[shard] = {key: slot for key, slot in stays if slot[0]}
        return dict(moved)

    def content(self, shard: int, /) -> tuple[bytes, bytes]:
        """See KeyTable."""
        items = sorted(self._shards[self._numbered(shard)].items(), key=lambda it: it[1][0])
        return b"".join(key for key, _ in items), array("I", (value for _, (value, _) in items)).tobytes()

    def _probe(self, key: bytes, fresh: int) -> int:
        self._check((key,))
        slot = self._shard_of(key).get(key)
        if slot is None:
            return 0
        if (self._tick - slot[1]) % TICKS > fresh:
            raise _StaleError
        return slot[0]

    def _leap(self, keys: Sequence[bytes], fresh: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        low, at_low = 0, self._probe(keys[0], fresh) if keys else 0
        if not at_low:
            return found

        def between(low: int, at_low: int, high: int, at_high: int) -> bool:
            """The runs that end in (low, high]; whether the prefix goes on."""
            if at_low == at_high:
                return True
            if high == low + 1:
                found.append((at_low, high))
                return at_high != 0
            middle = low + (high - low) // 2
            at_middle = self._probe(keys[middle], fresh)
            return between(low, at_low, middle, at_middle) and between(middle, at_middle, high, at_high)

        while low < len(keys) - 1:
            high = min(low + STRIDE, len(keys) - 1)
            at_high = self._probe(keys[high], fresh)
            if not between(low, at_low, high, at_high):
                return found
            low, at_low = high, at_high
        return [*found, (at_low, len(keys))]

    def _walk(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        last = end = 0
        for key in keys:
            self._check((key,))
            shard = self._shard_of(key)
            slot = shard.get(key)
            if slot is None:
                break
            self._put(shard, key, slot[0], slot)
            if slot[0] != last:
                if last:
                    yield last, end
                last = slot[0]
            end += 1
        if last:
            yield last, end

    def _shard_of(self, key: bytes) -> dict[bytes, tuple[int, int]]:
        return self._shards[int.from_bytes(key[:2], "little") & (len(self._shards) - 1)]

    def _numbered(self, shard: int) -> int:
        if not 0 <= shard < len(self._shards):
            raise IndexError(f"shard {shard} of {len(self._shards)}")
        return shard

    def _check(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if len(key) != self._key_bytes:
                raise ValueError(f"a key has {self._key_bytes} bytes here, not {len(key)}")

    def _put(self, shard: dict[bytes, tuple[int, int]], key: bytes, value: int, before: tuple[int, int] | None) -> None:
        if before is None or before[1] != self._tick:
            self.stamped += 1
        if (value, self._tick) != self._slot:
            self._slot = (value, self._tick)  # neighbours share it
        shard[key] = self._slot

    def _forget(self, shard: dict[bytes, tuple[int, int]]) -> Counter[int]:
        ages = sorted(((self._tick - tick) % TICKS for _, tick in shard.values()), reverse=True)
        least = ages[max(self._limit // 8, 1) - 1]
        victims = [key for key, (_, tick) in shard.items() if (self._tick - tick) % TICKS >= least]
        return Counter(shard.pop(key)[0] for key in victims)
