"""What must be true in a simulated world, found without asking the code that is judged.

The oracle knows what was announced, what bytes the memory really holds, and who may still touch them. From that
it judges every answer of the node, every read, and, after every event, the whole state. The hit rules are
written here a second time, token by token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headwater.core.cache import Cache, Space
from headwater.core.entries import State
from headwater.sim.memory import Memory, Part, part_of
from headwater.types import ABSENT, ChunkKey, HitRule, KVLayout, Loadable, Reservation, Stored


class Violation(AssertionError):
    """The cache lied, leaked, or broke an invariant."""


def needed_chunks(layout: KVLayout, group: int, chunks: int) -> set[int]:
    """Which of the first `chunks` chunks a group reads to compute the token after them."""
    it = layout.groups[group]
    end = chunks * layout.chunk_tokens
    reach = {HitRule.ALL: end, HitRule.WINDOW: it.window_tokens, HitRule.LAST: 1}[it.rule]
    return {token // layout.chunk_tokens for token in range(max(end - reach, 0), end)}


class Oracle:
    """Judges one cache; every method raises Violation where something is wrong."""

    def __init__(self, cache: Cache, memory: Memory) -> None:
        self._cache, self._memory = cache, memory
        self._announced: list[list[set[ChunkKey]]] = [[set() for _ in space.layout.groups] for space in cache.spaces]
        self._held_bytes = [0] * len(cache.spaces)
        self._asked = [0] * len(cache.spaces)
        self._hit = [0] * len(cache.spaces)
        # Who may still touch a page: its one writer, and its readers with their deadlines, by ticket.
        self._writing: dict[int, tuple[str, int]] = {}
        self._reading: dict[int, dict[int, tuple[str, float]]] = {}
        self._known_parts: dict[tuple[int, int, ChunkKey, int], list[Part]] = {}
        self._deadlines: dict[int, float] = {}
        self._above: dict[ChunkKey, ChunkKey] = {}  # the chunk before a chunk, as prompts had it
        self.reads = self.evicted = 0

    # ---- the node's answers ---------------------------------------------------------------------------

    def judge_match(self, space: int, keys: Sequence[ChunkKey], hit: int) -> None:
        """A hit is the longest prefix of which every group has what its rule asks for."""
        self._above.update(zip(keys[1:], keys, strict=False))
        layout, held = self._cache.spaces[space].layout, self._announced[space]
        groups = range(len(layout.groups))
        expected = next(
            chunks
            for chunks in range(len(keys), -1, -1)
            if all(keys[at] in held[group] for group in groups for at in needed_chunks(layout, group, chunks))
        )
        _must(hit == expected, f"hit of {hit} chunks, {expected} are usable")

    def count_lookup(self, space: int, asked: int, hit: int) -> None:
        """Keep the sums that the cache must keep too."""
        self._asked[space] += asked * self._cache.spaces[space].layout.chunk_tokens
        self._hit[space] += hit * self._cache.spaces[space].layout.chunk_tokens

    def judge_load(self, owner: str, space: int, keys: Sequence[ChunkKey], first: int, found: Loadable) -> None:
        """A load names exactly the slots that the rules need; they are leased until the deadline."""
        self.judge_match(space, keys, found.chunks)
        layout = self._cache.spaces[space].layout
        for group, places in enumerate(found.addresses):
            needed = needed_chunks(layout, group, found.chunks)
            granted = {at for at, place in enumerate(places, first) if place != ABSENT}
            _must(granted == {at for at in needed if at >= first}, f"load of group {group} names {granted}")
            for at in granted:
                for part in self._parts(space, group, keys[at], places[at - first]):
                    for page in part.pages:
                        self._reading.setdefault(page, {})[found.ticket] = owner, found.deadline_s

    def judge_reserve(self, owner: str, space: int, keys: Sequence[ChunkKey], granted: Reservation, now: float) -> None:
        """No slot is given away that somebody may still write to or rely on."""
        self._deadlines[granted.ticket] = granted.deadline_s
        for group, places in enumerate(granted.addresses):
            _must(len(places) == granted.covered, f"{len(places)} places for {granted.covered} covered chunks")
            for at, place in enumerate(places):
                if place == ABSENT:
                    continue
                for part in self._parts(space, group, keys[at], place):
                    self._claim(part, owner, granted.ticket, now)

    def judge_done(self, ticket: int, now: float) -> None:
        """A save that comes after its deadline stores nothing."""
        stored = self._hear()
        _must(not stored or now <= self._deadlines[ticket], f"ticket {ticket} stored {stored} after its deadline")

    def judge_tick(self, now: float) -> None:
        """No ticket outlives its deadline, but for the quarantine of what may still be written."""
        late = [number for number, it in self._cache.tickets.items() if now > it.deadline_s and not it.quarantined]
        _must(not late, f"tickets {late} are past their deadlines")

    def judge_foreign(self, answer: bool) -> None:
        """A message for a ticket that is not the sender's does nothing."""
        _must(not answer, "a ticket was ended by somebody who does not own it")

    # ---- copies ---------------------------------------------------------------------------------------

    def judge_read(self, part: Part, flaws: Sequence[str | None]) -> None:
        """A reader takes these bytes for right; `flaws` were seen at the start and at the end of its copy."""
        self.reads += 1
        for flaw in flaws:
            _must(flaw is None, f"a reader was told that bytes are right: {flaw}")

    def stopped(self, ticket: int) -> None:
        """A ticket's slots are touched by nobody any more."""
        self._writing = {page: it for page, it in self._writing.items() if it[1] != ticket}
        for readers in self._reading.values():
            readers.pop(ticket, None)

    def all_stopped(self, owner: str, known: Collection[int] = ()) -> None:
        """No process of an owner touches anything any more, but for tickets that are known to it."""
        self._writing = {page: it for page, it in self._writing.items() if it[0] != owner or it[1] in known}
        for page, readers in self._reading.items():
            left = {ticket: it for ticket, it in readers.items() if it[0] != owner or ticket in known}
            self._reading[page] = left

    # ---- after every event ----------------------------------------------------------------------------

    def check(self) -> None:
        """The cache's own invariants, its announcements, its prefixes and its sums."""
        cache = self._cache
        cache.check()
        self._hear()
        for number, space in enumerate(cache.spaces):
            self._check_prefixes(space)
            for group, index in enumerate(space.index):
                ready = {key for key, row in index.items() if cache.entries.state[row] == State.READY}
                _must(ready == self._announced[number][group], "announced and readable chunks differ")
            _must(space.held_bytes == self._held_bytes[number], "stored - evicted - deleted is not what is held")
            _must(space.lookup_tokens == self._asked[number], "lookups are not counted right")
            _must(space.hit_tokens == self._hit[number], "hits are not counted right")

    def check_bytes(self) -> None:
        """The memory holds the right bytes for all that is readable."""
        address, flaw_of = self._cache.entries.address, self._memory.flaw
        for number, groups in enumerate(self._announced):
            for group, keys in enumerate(groups):
                index = self._cache.spaces[number].index[group]
                for key in keys:
                    for part in self._parts(number, group, key, address[index[key]]):
                        if flaw := flaw_of(part):
                            raise Violation(f"a readable chunk is not what it says: {flaw}")

    def check_quiet(self) -> None:
        """Nobody does anything any more: nothing may be held."""
        cache = self._cache
        _must(not cache.tickets, f"tickets are open and nobody uses them: {sorted(cache.tickets)}")
        _must(not any(cache.entries.leases), "leases are left")
        states = [State(state) for state in cache.entries.state if state not in (State.FREE, State.READY)]
        _must(not states, f"rows are left in {states}")

    def _check_prefixes(self, space: Space) -> None:
        """No chunk is there without the chunk before it, and no companion without its chunk."""
        full = [group for group, it in enumerate(space.layout.groups) if it.rule is HitRule.ALL]
        if not full:
            return
        main = space.index[full[0]]
        for index in space.index:
            for key in index:
                if key not in main:
                    raise Violation(f"{key.hex()[:6]} has a companion and is not there itself")
                before = self._above.get(key)
                if before is not None and before not in main:
                    raise Violation(f"{key.hex()[:6]} is there without the chunk before it")

    def _hear(self) -> int:
        """Take the announcements in; how many replicas were stored."""
        stored = 0
        for change in self._cache.take_changes():
            held, keys = self._announced[change.namespace][change.group], set(change.keys)
            if isinstance(change, Stored):
                _must(not keys & held, "something was announced twice")
                held |= keys
                self._held_bytes[change.namespace] += change.size_bytes
                stored += len(keys)
            else:
                _must(keys <= held, "the removal of something was announced that never was")
                held -= keys
                self._held_bytes[change.namespace] -= change.size_bytes
                self.evicted += len(keys) if change.reason == "evicted" else 0
        return stored

    # ---- inside ---------------------------------------------------------------------------------------

    def _parts(self, space: int, group: int, key: ChunkKey, slot: int) -> list[Part]:
        place = (space, group, key, slot)
        parts = self._known_parts.get(place)
        if parts is None:
            layout = self._cache.spaces[space].layout
            parts = [part_of(layout, key, group, shard, slot) for shard in range(layout.shards)]
            self._known_parts[place] = parts
        return parts

    def _claim(self, part: Part, owner: str, ticket: int, now: float) -> None:
        for page in part.pages:
            writer = self._writing.get(page)
            _must(writer is None, f"{part} was given away while {writer} may write there")
            readers = [number for number, (_, until) in self._reading.get(page, {}).items() if now < until]
            _must(not readers, f"{part} was given away while tickets {readers} read there")
            self._reading.pop(page, None)
            self._writing[page] = owner, ticket


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
