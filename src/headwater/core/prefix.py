"""PrefixIndex: who holds how long a prefix, told by events, asked once a request.

Theory of operation. A table leads from each known key to the *set of places* that hold it. Sets are interned: a set is
a number, and the integer behind it has a bit for each place; all chunks of a conversation have the same one. An event
takes its keys from sets to sets (`stored`: with the place, `removed`: without it), and what becomes of a set is worked
out once and remembered, so that a batch costs little more than its lookups.

    stored, removed, fill ──► table.change(keys, step) ──► how many keys left which set for which
    steps, find           ──► table.runs(keys)         ──► runs of keys with the same set ──► places that drop out
    gone, cleared         ──► its bit is dead at once; sets, then keys, are cleaned a little with every later event

Keys are chained and carry their namespace and block size (they are in the chain's root), so one table serves all.

What a query promises. A place holds a prefix of n when it was said to hold each of the first n keys. Engines evict from
the end, so that is found by looking at every 16th key and, where two of those have different sets, halving the way
between them: the last key of a claim is always one that was looked at, and so is the one after it. A hole that a lost
event has left ends the prefix there, unless it lies between two keys that were looked at (then it is shorter than 16
blocks) and the claim is too long, until the chain is walked: whenever a key of it was not met for a quarter of the
table's memory. A wrong claim costs an estimate; whoever fetches or computes finds out what is there.

Events may come twice, late, in any order, or not at all: each is idempotent and says something about its own keys only.
What was said stays until it is unsaid, so that after a gap the caller says `cleared` and tells everything again.

Memory is bounded by `limit` keys: those that were met least recently, by an event or a walk, are forgotten. A set is a
few hundred bytes at 1,000 places; those that no key has are dropped.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, pairwise
from typing import cast

from headwater.core.keytable import SHARDS_MAX, TICKS, DictTable, MakeTable
from headwater.fleet import Place
from headwater.types import KEY_BYTES

LIMIT = 1 << 24
SHARD_KEYS = 4096
"""Smaller tables have fewer shards."""
GRAINS = 256
"""How many ticks it takes to meet as many keys as there can be: how finely old is told from new."""
FRESH = GRAINS // 4
"""A chain is walked, and all of it met, when a key of it was not met for so many ticks."""
IDLE_SETS, KNOWN_STEPS, KNOWN_PLACES = 1024, 1 << 16, 1024
CLEANED_SETS = 256
"""How many sets an event cleans of dead places."""
BATCH = 4096
ZERO_ONE = bytes.maketrans(b"01", b"\0\1")


class _Step(dict[int, int]):
    """What becomes of a set when places are added or taken away; found out when asked."""

    __slots__ = ("_add", "_drop", "_sets")

    def __init__(self, sets: _Sets, add: int = 0, drop: int = 0) -> None:
        super().__init__()
        self._sets, self._add, self._drop = sets, add, drop

    def __missing__(self, old: int) -> int:
        sets = self._sets
        new = self[old] = sets.number(sets.masks[old] & sets.live & ~self._drop | self._add)
        sets.known_steps += 1
        return new


class _Sets:
    """Interned sets of places: `masks[number]`, and how many keys have each. Number 0 is the empty set."""

    __slots__ = ("_free", "_idle", "_numbers", "_steps", "known_steps", "live", "masks", "members")

    def __init__(self) -> None:
        self.masks = [0]
        self.members = [0]
        self.live = 0
        self.known_steps = 0
        self._numbers = {0: 0}
        self._free: list[int] = []
        self._idle: set[int] = set()
        self._steps: dict[tuple[int, int], _Step] = {}

    def __len__(self) -> int:
        return len(self.masks) - len(self._free) - 1

    def number(self, mask: int) -> int:
        """The set with exactly these places; what is new has no members yet."""
        found = self._numbers.get(mask)
        if found is None:
            if self._free:
                found = self._free.pop()
                self.masks[found] = mask
            else:
                found = len(self.masks)
                self.masks.append(mask)
                self.members.append(0)
            self._numbers[mask] = found
        return found

    def step(self, add: int, drop: int) -> _Step:
        """The step that adds some places and takes others away."""
        step = self._steps.get((add, drop))
        if step is None:
            step = self._steps[add, drop] = _Step(self, add, drop)
            self.known_steps += 1
        return step

    def forget_steps(self) -> None:
        """What was found out holds no more."""
        self._steps.clear()
        self.known_steps = 0

    def moved(self, counts: Mapping[int, int], step: Mapping[int, int]) -> None:
        """So many keys of each set have taken the step."""
        members = self.members
        for old, count in counts.items():
            if (new := step[old]) != old:
                members[new] += count
                self.left(old, count)

    def left(self, number: int, count: int) -> None:
        """So many keys have the set no more."""
        self.members[number] -= count
        if not self.members[number]:
            self._idle.add(number)

    def tidy(self) -> None:
        """Drop the sets that no key has, when they are many; not while a step is being taken."""
        if len(self._idle) >= IDLE_SETS:
            for number in self._idle - {0}:
                if not self.members[number]:
                    self._unname(number)
                    self.masks[number] = 0
                    self._free.append(number)
            self._idle.clear()
            self.forget_steps()
        elif self.known_steps > KNOWN_STEPS:
            self.forget_steps()

    def clean(self, number: int, dead: int) -> int:
        """Take dead places out of a set; how many keys are in nobody's set by that."""
        mask = self.masks[number]
        if not mask & dead:
            return 0
        self._unname(number)
        self.masks[number] = mask & ~dead
        self._numbers.setdefault(mask & ~dead, number)
        return 0 if mask & self.live else self.members[number]

    def _unname(self, number: int) -> None:
        mask = self.masks[number]
        if self._numbers.get(mask) == number and mask:
            del self._numbers[mask]


class PrefixIndex:
    """Which places hold how many leading blocks of a prompt; one caller at a time.

    `make_table` is `DictTable`, or the one in C that `_kernels.index` has, with the same answers. Keys have
    `key_bytes` bytes, 8 or 16. `limit` is how many distinct keys are kept at most, an equal share in each shard.
    """

    def __init__(self, limit: int = LIMIT, key_bytes: int = KEY_BYTES, make_table: MakeTable = DictTable) -> None:
        assert limit > 0, f"limit={limit}"
        shards = SHARDS_MAX
        while shards > 1 and limit // shards < SHARD_KEYS:
            shards //= 2
        self.limit, self.forgotten = limit, 0
        self._key_bytes = key_bytes
        self._table = make_table(shards, limit // shards, key_bytes)
        self._sets = _Sets()
        self._bits: dict[Place, int] = {}
        self._places: list[Place | None] = []
        self._free_bits: list[int] = []
        self._dead = self._leaving = 0
        self._to_clean = range(0)
        self._swept = 0
        self._orphans = False
        self._known: dict[int, dict[Place, None]] = {}
        self._tick = self._stamped = 0
        self._grain = max(limit // GRAINS, 1)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        held = sum(self.counts().values())
        return (
            f"PrefixIndex({len(self)} of at most {self.limit} keys, held {held} times by {len(self._bits)} places "
            f"in {len(self._sets)} sets, {self.forgotten} forgotten)"
        )

    # ---- events ---------------------------------------------------------------------------------------------

    def stored(self, place: Place, keys: Sequence[bytes]) -> None:
        """A place holds these blocks, in any order."""
        self._change(keys, self._sets_step(add=(place,)))

    def removed(self, place: Place, keys: Sequence[bytes]) -> None:
        """A place holds these blocks no more."""
        bit = self._bits.get(place)
        if bit is None:
            self._tidy()
        else:
            self._change(keys, (0, 1 << bit))

    def fill(self, places: Iterable[Place], keys: Sequence[bytes]) -> None:
        """All of these places hold all of these blocks: what `dump` says of another index."""
        self._change(keys, self._sets_step(add=places))

    def cleared(self, place: Place) -> None:
        """A place holds nothing more; it may be told of again at once. Takes no longer for a place that held much."""
        bit = self._bits.pop(place, None)
        if bit is not None:
            self._places[bit] = None
            self._dead |= 1 << bit
            self._sets.live &= ~(1 << bit)
            self._sets.forget_steps()
            self._known.clear()

    def gone(self, place: Place) -> None:
        """A place is no more; what is told of it later counts for another of the same name."""
        self.cleared(place)

    # ---- queries --------------------------------------------------------------------------------------------

    def steps(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """How many leading blocks which places hold exactly: (blocks, mask), most first; those that hold none are left
        out. As many entries as there are different lengths, however many places: `places` and `mask` translate."""
        masks = self._sets.masks
        alive, start = self._sets.live, 0
        found = []
        for number, end in self._table.runs(keys, self._tick, FRESH):
            mask = masks[number] & alive
            if mask != alive:
                if start:
                    found.append((start, alive ^ mask))
                alive = mask
                if not alive:
                    break
            start = end
        if start and alive:
            found.append((start, alive))
        found.reverse()
        return found

    def find(self, keys: Sequence[bytes], each: int = 1) -> dict[Place, int]:
        """How many leading blocks each place holds, most first; those that hold none are left out. With the tokens of
        a block as `each`, how many tokens."""
        held: dict[Place, int] = {}
        for blocks, mask in self.steps(keys):
            held |= dict.fromkeys(self._of(mask), blocks * each)
        return held

    def places(self, mask: int) -> tuple[Place, ...]:
        """Whom a mask of `steps` means, until the next event."""
        return tuple(self._of(mask))

    def mask(self, places: Iterable[Place]) -> int:
        """The mask of those of the places that hold anything, until the next event."""
        bits = self._bits
        return sum(1 << bits[place] for place in set(places) if place in bits)

    # ---- content --------------------------------------------------------------------------------------------

    def counts(self) -> dict[Place, int]:
        """How many blocks each place holds; takes a while when sets are many."""
        found = dict.fromkeys(self._bits, 0)
        for mask, members in zip(self._sets.masks, self._sets.members, strict=True):
            if members and (live := mask & self._sets.live):
                for place in self._of(live):
                    found[place] += members
        return found

    def dump(self, batch: int = BATCH) -> Iterator[tuple[tuple[Place, ...], list[bytes]]]:
        """Everything, to `fill` another index with: at most `batch` keys at a time, with all places that hold them.

        Events may come between; what they change in parts that were already dumped they must tell the other as well.
        """
        size = self._key_bytes
        for shard in range(self._table.shards):
            keys, packed = self._table.content(shard)
            values = array("I", packed)
            ends = [bisect_right(values, value) for value in sorted(set(values))]
            groups = [(first, end, self._sets.masks[values[first]]) for first, end in pairwise((0, *ends))]
            named = [(first, end, self.places(mask & self._sets.live)) for first, end, mask in groups]
            for first, end, places in named:
                for start in range(first, end if places else first, batch):
                    part = range(start, min(start + batch, end))
                    yield places, [keys[at * size : (at + 1) * size] for at in part]

    def tidy(self) -> bool:
        """Work off a little of what places that are gone have left, as every event does; whether there is more."""
        self._tidy()
        return bool(self._dead or self._leaving or self._orphans)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _sets_step(self, add: Iterable[Place]) -> tuple[int, int]:
        mask = 0
        for place in add:
            bit = self._bits.get(place)
            mask |= 1 << (self._bit_for(place) if bit is None else bit)
        return mask, 0

    def _bit_for(self, place: Place) -> int:
        if self._free_bits:
            bit = self._free_bits.pop()
            self._places[bit] = place
        else:
            bit = len(self._places)
            self._places.append(place)
        self._bits[place] = bit
        self._sets.live |= 1 << bit
        return bit

    def _change(self, keys: Sequence[bytes], what: tuple[int, int]) -> None:
        self._tidy()
        step = self._sets.step(*what)
        moved, forgotten = self._table.change(keys, step, self._tick)
        self._sets.moved(moved, step)
        for number, count in forgotten.items():
            self._sets.left(number, count)
            self.forgotten += count
        self._advance()

    def _advance(self) -> None:
        met = self._table.stamped - self._stamped
        if met >= self._grain:
            ticks = met // self._grain
            self._tick = (self._tick + ticks) % TICKS
            self._stamped += ticks * self._grain

    def _of(self, mask: int) -> dict[Place, None]:
        found = self._known.get(mask)
        if found is None:
            if len(self._known) >= KNOWN_PLACES:
                self._known.clear()
            # Every place with the bit of its own: no step of Python for each.
            bits = f"{mask:b}".encode()[::-1].translate(ZERO_ONE)
            places: dict[Place | None, None] = dict.fromkeys(compress(self._places, bits))
            assert None not in places, "a mask outlived its places"
            found = self._known[mask] = cast("dict[Place, None]", places)
        return found

    def _tidy(self) -> None:
        self._sets.tidy()
        if self._leaving or self._dead:
            self._clean_sets()
        elif self._orphans:
            self._sweep_shard()

    def _clean_sets(self) -> None:
        if not self._leaving:  # sets that are made from now on have none of these places
            self._leaving, self._dead = self._dead, 0
            self._to_clean = range(1, len(self._sets.masks))
        for number in self._to_clean[:CLEANED_SETS]:
            if self._sets.clean(number, self._leaving):
                self._orphans, self._swept = True, 0
        self._to_clean = self._to_clean[CLEANED_SETS:]
        if not self._to_clean:  # no set has them any more: their bits are free
            while self._leaving:
                self._free_bits.append((self._leaving & -self._leaving).bit_length() - 1)
                self._leaving &= self._leaving - 1

    def _sweep_shard(self) -> None:
        step = self._sets.step(0, 0)
        self._sets.moved(self._table.sweep(self._swept, step), step)
        self._swept += 1
        self._orphans = self._swept < self._table.shards
