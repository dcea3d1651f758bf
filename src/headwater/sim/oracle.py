"""What must be true in a simulated world, found without asking the code that is judged.

The oracle knows what was announced, what bytes the memory really holds, and who may still touch them. From that
it judges every answer of the node, every read, and, after every event, the whole state. The hit rules are
written here a second time, token by token.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headwater.core.cache import Cache, Space
from headwater.core.entries import State
from headwater.core.fetch import Answer
from headwater.core.levels import ASKING_MAX, QUEUE_KEYS_MAX, Admission, Command, Level, Verb
from headwater.sim.memory import Memory, Part, part_of
from headwater.sim.workload import Plan
from headwater.types import (
    ABSENT,
    PAGE_BYTES,
    Changed,
    ChunkKey,
    Cleared,
    HitRule,
    KVLayout,
    Loadable,
    Reservation,
    Stored,
)

WAIT_S = 5.0


class Violation(AssertionError):
    """The cache lied, leaked, or broke an invariant."""


def needed_chunks(layout: KVLayout, group: int, chunks: int) -> set[int]:
    """Which of the first `chunks` chunks a group reads to compute the token after them."""
    it = layout.groups[group]
    end = chunks * layout.chunk_tokens
    reach = {HitRule.ALL: end, HitRule.WINDOW: it.window_tokens, HitRule.LAST: 1}[it.rule]
    return {token // layout.chunk_tokens for token in range(max(end - reach, 0), end)}


@dataclass(slots=True)
class Wait:
    """A request that asks until its answer is final."""

    began_s: float
    here: int
    is_over: bool = False


class Oracle:
    """Judges one cache; every method raises Violation where something is wrong."""

    def __init__(self, cache: Cache, memory: Memory, plan: Plan) -> None:
        self._cache, self._memory, self._plan = cache, memory, plan
        self.calls = 0
        self._announced: list[list[set[ChunkKey]]] = [[set() for _ in space.layout.groups] for space in cache.spaces]
        self._held_bytes = [0] * len(cache.spaces)
        self._saved: list[set[int]] = [set() for _ in cache.spaces]
        self._asked = [0] * len(cache.spaces)
        self._hit = [0] * len(cache.spaces)
        # Who may still touch a page: its one writer, and its readers with their deadlines, by ticket.
        self._writing: dict[int, tuple[str, int]] = {}
        self._reading: dict[int, dict[int, tuple[str, float]]] = {}
        self._known_parts: dict[tuple[int, int, ChunkKey, int], list[Part]] = {}
        self._deadlines: dict[int, float] = {}
        self.above: dict[ChunkKey, ChunkKey] = {}  # the chunk before a chunk, as prompts had it
        self.reads = self.evicted = 0
        self._heard: list[Changed] = []
        self._used = set[ChunkKey]()
        self._orders: dict[int, Command] = {}
        self._disk: dict[int, dict[int, Verb]] = {}  # which commands read or write a place
        self._waits: dict[tuple[str, str], Wait] = {}

    # ---- the node's answers ---------------------------------------------------------------------------

    def judge_match(self, space: int, keys: Sequence[ChunkKey], hit: int) -> None:
        """A hit is the longest prefix of which every group has what its rule asks for."""
        self.above.update(zip(keys[1:], keys, strict=False))
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
        self._used.update(keys[: found.chunks])
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
        self._saved[space].add(granted.ticket)
        for group, places in enumerate(granted.addresses):
            _must(len(places) == granted.covered, f"{len(places)} places for {granted.covered} covered chunks")
            for at, place in enumerate(places):
                if place == ABSENT:
                    continue
                for part in self._parts(space, group, keys[at], place):
                    self._claim(part, owner, granted.ticket, now)

    def judge_clear(self, space: int, cleared: Cleared) -> set[int]:
        """What is left is what somebody uses, and was told; the tickets whose bytes nobody must see any more."""
        self._hear()
        for readers in self._reading.values():  # pins have ended
            for ticket in [it for it, (owner, _) in readers.items() if not owner and it > 0]:
                if ticket not in self._cache.tickets:
                    del readers[ticket]
        left = [(group, row) for group, index in enumerate(self._cache.spaces[space].index) for row in index.values()]
        _must(cleared.kept == len(left), f"{cleared.kept} are said to be kept, {len(left)} are")
        leased = {row for it in self._cache.tickets.values() if it.owner for row in it.rows}
        used = {above for _, row in left if row in leased for above in self._with_ancestors(row)}
        _must({row for _, row in left} == used, "something was kept that nobody uses")
        slots = self._cache.spaces[space].slot_bytes
        pages = [
            page
            for group, row in left
            for page in self._memory.get(_pages(self._cache.entries.address[row], slots[group]))
        ]
        kept = {page[4] for page in pages if isinstance(page, tuple)} | set(self._cache.tickets)
        saved, self._saved[space] = self._saved[space], self._saved[space] & kept
        return saved - kept

    def _with_ancestors(self, row: int) -> list[int]:
        rows = [row]
        while (above := self._cache.entries.parent[rows[-1]]) >= 0:
            rows.append(above)
        return rows

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

    # ---- lower tiers ----------------------------------------------------------------------------------

    def hear(self) -> list[Changed]:
        """Take the announcements in; all that the node has not heard yet."""
        self._hear()
        heard, self._heard = self._heard, []
        return heard

    def judge_ask(
        self, name: tuple[str, str], space: int, keys: Sequence[ChunkKey], answer: Answer, now: float
    ) -> None:
        """An answer says what is in HOST; who is made to wait waits no longer than that can pay."""
        self._hear()
        self.judge_match(space, keys, answer.chunks)
        _must(answer.disk + answer.remote <= answer.chunks, "more was brought up than is there")
        wait = self._waits.get(name)
        if wait is None:
            wait = self._waits[name] = Wait(now, answer.chunks)
        _must(not (answer.waiting and wait.is_over), "a request waits again after its final answer")
        wait.is_over |= not answer.waiting
        if not answer.waiting:
            return
        tokens = self._cache.spaces[space].layout.chunk_tokens
        arrived, total = (answer.chunks - wait.here) * tokens, (len(keys) - wait.here) * tokens
        limit_s = WAIT_S
        if self._plan.tokens_s is None:
            # Each chunk that arrives is worth another tenth of a second, also one that is gone again by now.
            limit_s = min(limit_s, 0.1 * (len(keys) - wait.here + 1))
        else:
            limit_s = min(limit_s, 0.1 * total / self._plan.tokens_s + max(arrived, 0) / self._plan.tokens_s)
        _must(now - wait.began_s <= limit_s + 1e-9, f"a request waits for {now - wait.began_s} s, which cannot pay")

    def forget(self, name: tuple[str, str]) -> None:
        """A request is over."""
        self._waits.pop(name, None)

    def judge_pin(
        self, space: int, parts: Sequence[tuple[int, ChunkKey]], places: Sequence[int], ticket: int, until_s: float
    ) -> None:
        """What is there is pinned, and stays where it is."""
        for (group, key), place in zip(parts, places, strict=True):
            _must((place != ABSENT) == (key in self._announced[space][group]), "a pin holds what is there, no more")
            for part in self._parts(space, group, key, place) if place != ABSENT else ():
                for page in part.pages:
                    self._reading.setdefault(page, {})[ticket] = "", until_s

    def judge_order(self, command: Command, level: Level) -> None:
        """What is under way is bounded."""
        if command.verb in (Verb.READ, Verb.WRITE):
            others = [it for it in self._orders.values() if (it.level, it.verb) == (command.level, command.verb)]
            moving = sum(it.size_bytes for it in others)
            _must(not others or moving < level.moving_bytes_max, f"{level.name}: {moving} bytes are moving already")
            most = 2 * level.readers if command.verb is Verb.READ else level.writers
            _must(len(others) < most, f"{level.name}: {len(others)} commands are under way already")
            one = max(self._cache.spaces[command.space].slot_bytes) * len(self._cache.spaces[command.space].index)
            _must(command.size_bytes <= max(level.batch_bytes, one), f"{level.name}: a batch of {command.size_bytes}")
            useless = level.admission is Admission.REUSED and command.verb is Verb.WRITE
            _must(not useless or all(part.key in self._used for part in command.parts), "what nobody used goes down")
            _must(len(level.queue) <= QUEUE_KEYS_MAX, "too many chunks are queued")
        if command.verb is Verb.HOLDS:
            others = [it for it in self._orders.values() if (it.level, it.verb) == (command.level, command.verb)]
            _must(len(others) < ASKING_MAX, f"{level.name}: {len(others)} questions are under way already")
            _must(len(set(command.parts)) == len(command.parts), f"{level.name}: one question asks something twice")
        self._orders[-command.number] = command

    def claim_pages(self, pages: range, ticket: int, now: float) -> None:
        """A read from a lower tier writes here."""
        self._claim_pages(pages, f"{pages.start:x}", "", ticket, now)

    def read_pages(self, pages: range, ticket: int) -> None:
        """A write to a lower tier reads here."""
        for page in pages:
            _must(page not in self._writing, f"page {page:x} goes down while {self._writing.get(page)} writes there")
            self._reading.setdefault(page, {})[ticket] = "", math.inf

    def disk_is_used(self, place: int, ticket: int, verb: Verb) -> None:
        """A command reads or writes a slot on DISK: never while another writes there, or writes while one reads."""
        users = self._disk.setdefault(place, {})
        clash = [number for number, it in users.items() if Verb.WRITE in (it, verb)]
        _must(not clash, f"{place:x} on DISK is used by commands {clash} and {ticket} at once")
        users[ticket] = verb

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
        for users in self._disk.values() if ticket < 0 else ():
            users.pop(ticket, None)
        self._orders.pop(ticket, None)

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
                before = self.above.get(key)
                if before is not None and before not in main:
                    raise Violation(f"{key.hex()[:6]} is there without the chunk before it")

    def _hear(self) -> int:
        """Take the announcements in; how many replicas were stored."""
        stored = 0
        changes = self._cache.take_changes()
        self._heard += changes
        self._judge_shares(changes)
        for change in changes:
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

    def _judge_shares(self, changes: Sequence[Changed]) -> None:
        """Nobody who holds no more than it is entitled to loses anything because somebody else wants room."""
        if len(self._cache.spaces) == 1:
            return
        tenants = [space.namespace.tenant for space in self._cache.spaces]
        held = dict.fromkeys(tenants, 0)
        for tenant, size in zip(tenants, self._held_bytes, strict=True):
            held[tenant] += size
        for change in changes:
            tenant = tenants[change.namespace]
            if isinstance(change, Stored):
                held[tenant] += change.size_bytes
            elif change.reason == "evicted" and change.cause >= 0 and tenants[change.cause] != tenant:
                entitled = self._entitled(tenant, {it for it in held if held[it] or it == tenants[change.cause]})
                _must(held[tenant] > entitled, f"{tenant} has {held[tenant]} of {entitled} bytes and must give some")

    def _entitled(self, tenant: str, holding: set[str]) -> int:
        quotas = {it: slabs * self._cache.pool.slab_bytes for it, slabs in self._plan.quotas.items() if it in holding}
        if tenant in quotas:
            return quotas[tenant]
        return max(self._cache.pool.capacity_bytes - sum(quotas.values()), 0) // (len(holding) - len(quotas))

    def _claim(self, part: Part, owner: str, ticket: int, now: float) -> None:
        self._claim_pages(part.pages, str(part), owner, ticket, now)

    def _claim_pages(self, pages: range, name: str, owner: str, ticket: int, now: float) -> None:
        for page in pages:
            writer = self._writing.get(page)
            _must(writer is None, f"{name} was given away while {writer} may write there")
            readers = [number for number, (_, until) in self._reading.get(page, {}).items() if now < until]
            _must(not readers, f"{name} was given away while tickets {readers} read there")
            self._reading.pop(page, None)
            self._writing[page] = owner, ticket


def _pages(address: int, size_bytes: int) -> range:
    return range(address // PAGE_BYTES, (address + size_bytes) // PAGE_BYTES)


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
