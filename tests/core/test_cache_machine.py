"""Random histories of one cache against a model that knows only sets.

The model does not guess who is evicted: it takes that from the announcements and checks that each was allowed.
Everything else it predicts: what is readable, which tickets are open, which slots must not be given away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headwater.core.cache import Cache
from headwater.core.entries import State
from headwater.core.eviction import POLICIES
from headwater.core.pool import Pool
from headwater.types import ABSENT, PAGE_BYTES, ChunkKey, HitRule, KVLayout, Stored, TicketKind
from tests.core.examples import LOAD_S, SAVE_S, chain, dense, group, hybrid, namespace

LAYOUTS = {
    "dense": dense(),
    "two ranks": dense(shards=2),
    "window": hybrid(group(), group(HitRule.WINDOW, window_tokens=6)),
    "state": hybrid(group(HitRule.LAST, shards=2, pages=2), group(shards=2)),
    "no full": hybrid(group(HitRule.WINDOW, window_tokens=5), group(HitRule.LAST)),
}
OWNERS = ("a", "b", "c")
# Prompts that share stems of one, two and four chunks.
PROMPTS = [
    chain(6),
    chain(6, seed=1, stem=[1000]),
    chain(5, seed=2, stem=[1000, 1001]),
    chain(6, seed=3, stem=[1000, 1001, 1002, 1003]),
    chain(4, seed=4),
]
ABOVE: dict[ChunkKey, ChunkKey | None] = {
    key: before for keys in PROMPTS for key, before in zip(keys, [None, *keys], strict=False)
}

Part = tuple[int, ChunkKey]  # group, key

owners = st.sampled_from(OWNERS)
prompts = st.integers(0, len(PROMPTS) - 1)
lengths = st.integers(0, 6)


@dataclass
class ModelTicket:
    owner: str
    kind: TicketKind
    parts: dict[Part, int]  # part -> position in the call
    slots: list[tuple[int, int]]
    left: set[int]
    deadline_s: float
    failed: set[int] = field(default_factory=set)
    quarantined: bool = False


class CacheMachine(RuleBasedStateMachine):
    """See the module's first lines."""

    layout_name = ""
    policy_name = ""

    @initialize(slabs=st.integers(1, 6))
    def start(self, slabs: int) -> None:
        self.layout: KVLayout = LAYOUTS[self.layout_name]
        pool = Pool([slabs * 4 * PAGE_BYTES], 4 * PAGE_BYTES)
        self.cache = Cache(pool, POLICIES[self.policy_name], LOAD_S, SAVE_S)
        self.space = self.cache.add_space(namespace(self.layout), self.layout)
        self.main = next((i for i, it in enumerate(self.layout.groups) if it.rule is HitRule.ALL), None)
        self.now = 0.0
        self.ready: set[Part] = set()
        self.writing: set[Part] = set()
        self.tickets: dict[int, ModelTicket] = {}
        self.ended: list[int] = []

    # ---- the model ----

    def parent_of(self, part: Part) -> Part | None:
        number, key = part
        if self.main is None:
            return None
        if number != self.main:
            return (self.main, key)
        above = ABOVE[key]
        return None if above is None else (self.main, above)

    def descends(self, part: Part, ancestor: Part) -> bool:
        at: Part | None = part
        while at is not None and at != ancestor:
            at = self.parent_of(at)
        return at == ancestor

    def leased(self) -> set[Part]:
        return {part for it in self.tickets.values() if it.kind is not TicketKind.SAVE for part in it.parts}

    def usable(self, keys: list[ChunkKey]) -> int:
        for chunks in range(len(keys), 0, -1):
            end = chunks * self.layout.chunk_tokens
            needed = set()
            for number, it in enumerate(self.layout.groups):
                reach = {HitRule.ALL: end, HitRule.WINDOW: it.window_tokens, HitRule.LAST: 1}[it.rule]
                needed |= {(number, keys[token // 4]) for token in range(max(0, end - reach), end)}
            if needed <= self.ready:
                return chunks
        return 0

    def expect_changes(self, stored: set[Part], deleted: set[Part], *, room_for: int | None = None) -> None:
        """Take the announcements: exactly these, and evictions only where room was needed and allowed."""
        leased = self.leased()
        for change in self.cache.take_changes():
            for key in change.keys:
                part = (change.group, key)
                if isinstance(change, Stored):
                    assert part in stored
                    stored.remove(part)
                    self.ready.add(part)
                    continue
                assert part in self.ready
                assert part not in leased
                assert not [it for it in self.ready | self.writing if self.parent_of(it) == part], "has a child"
                self.ready.remove(part)
                if change.reason == "deleted":
                    assert part in deleted
                    deleted.remove(part)
                else:
                    assert room_for is not None, "evicted though nobody asked for room"
        assert not stored, "not announced"
        assert not deleted, "not announced"

    def doomed_by(self, parts: set[Part]) -> set[Part]:
        return {it for it in self.ready | self.writing if any(self.descends(it, part) for part in parts)}

    def abort(self, parts: set[Part]) -> set[Part]:
        """The parts stop being written, with all that hangs on them; the READY ones among those."""
        fallen = self.doomed_by({part for part in parts if part in self.writing})
        self.writing -= fallen
        for it in self.tickets.values():
            if it.kind is TicketKind.SAVE:
                it.parts = {part: at for part, at in it.parts.items() if part not in fallen}
        return fallen & self.ready

    def end(self, number: int, *, commit: bool) -> None:
        ticket = self.tickets[number]
        stored: set[Part] = set()
        deleted: set[Part] = set()
        if ticket.kind is TicketKind.SAVE:
            bad = {part for part, at in ticket.parts.items() if not commit or at in ticket.failed}
            deleted = self.abort(bad)
            stored = set(ticket.parts)
            self.writing -= stored
        del self.tickets[number]
        self.ended.append(number)
        # A save may delete and store in one go; the removals come first.
        self.expect_changes(stored, deleted)

    # ---- events ----

    @rule(prompt=prompts, length=lengths)
    def match(self, prompt: int, length: int) -> None:
        keys = PROMPTS[prompt][:length]
        assert self.cache.match(self.space, keys) == self.usable(keys)
        groups = range(len(self.layout.groups))
        held = bytes([all((number, key) in self.ready for number in groups) for key in keys])
        assert self.cache.contains(self.space, keys) == held

    @rule(owner=owners, prompt=prompts, length=lengths, first=st.integers(0, 3))
    def load(self, owner: str, prompt: int, length: int, first: int) -> None:
        keys = PROMPTS[prompt][:length]
        expected = self.usable(keys)
        shards = range(self.layout.shards)
        found = self.cache.load(owner, self.space, keys, first, shards, self.now)
        assert found.chunks == expected
        parts, slots = self.granted(keys[first:], found.addresses)
        assert bool(found.ticket) == bool(parts)
        assert set(parts) <= self.ready
        if parts:
            self.tickets[found.ticket] = ModelTicket(
                owner, TicketKind.LOAD, parts, slots, set(shards), self.now + LOAD_S
            )
        self.expect_changes(set(), set())

    @rule(owner=owners, prompt=prompts, length=lengths, kind=st.sampled_from([TicketKind.LOAD, TicketKind.PIN]))
    def hold(self, owner: str, prompt: int, length: int, kind: TicketKind) -> None:
        wanted = [(number, key) for key in PROMPTS[prompt][:length] for number in range(len(self.layout.groups))]
        ticket, places = self.cache.hold(owner, kind, self.space, wanted, self.now + LOAD_S)
        there = {part: place for part, place in zip(wanted, places, strict=True) if place != ABSENT}
        assert set(there) == set(wanted) & self.ready
        assert bool(ticket) == bool(there)
        if ticket:
            slots = [(place, self.layout.slot_bytes(number)) for (number, _), place in there.items()]
            parts = dict.fromkeys(there, 0)
            self.tickets[ticket] = ModelTicket(owner, kind, parts, slots, {0}, self.now + LOAD_S)
        self.expect_changes(set(), set())

    @rule(prompt=prompts, length=lengths, start=st.integers(0, 5))
    def evict(self, prompt: int, length: int, start: int) -> None:
        keys = PROMPTS[prompt][start : start + length]
        asked = {(number, key) for number in range(len(self.layout.groups)) for key in keys}
        fallen = {it for it in self.ready if any(self.descends(it, part) for part in asked)}
        kept = self.leased() | self.writing
        deleted = {part for part in fallen if not any(self.descends(it, part) for it in kept)}
        assert self.cache.evict(self.space, keys) == len(deleted)
        self.expect_changes(set(), deleted)

    @rule(
        owner=owners,
        prompt=prompts,
        length=lengths,
        start=st.integers(0, 5),
        lacking=st.frozensets(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=2),
    )
    def reserve(self, owner: str, prompt: int, length: int, start: int, lacking: frozenset[tuple[int, int]]) -> None:
        start = min(start, len(PROMPTS[prompt]))
        keys = PROMPTS[prompt][start : start + length]
        parent = PROMPTS[prompt][start - 1] if start else None
        before = self.ready | self.writing
        busy = {page for it in self.tickets.values() for page in it.slots}
        shards = range(self.layout.shards)
        got = self.cache.reserve(owner, self.space, parent, keys, lacking, shards, self.now)
        self.expect_changes(set(), set(), room_for=len(keys))
        parts, slots = self.granted(keys, got.addresses)
        assert bool(got.ticket) == bool(parts)
        assert not set(parts) & before
        assert all((number, at) not in lacking for (number, _), at in parts.items())
        pages = [page for slot in slots for page in self.pages(slot)]
        assert len(set(pages)) == len(pages)
        assert not set(pages) & {page for slot in busy for page in self.pages(slot)}
        if parent is not None and self.main is not None and (self.main, parent) not in before:
            assert got.covered == 0
        for number in range(len(self.layout.groups)):
            assert len(got.addresses[number]) == got.covered
            for at, key in enumerate(keys[: got.covered]):
                assert (number, key) in before or (number, key) in parts or (number, at) in lacking
        self.writing |= set(parts)
        if parts:
            self.tickets[got.ticket] = ModelTicket(owner, TicketKind.SAVE, parts, slots, set(shards), self.now + SAVE_S)

    @rule(data=st.data(), failed=st.sets(st.integers(0, 6), max_size=2))
    def done(self, data: st.DataObject, failed: set[int]) -> None:
        if not self.tickets:
            return
        number = data.draw(st.sampled_from(sorted(self.tickets)))
        ticket = self.tickets[number]
        shard = data.draw(st.sampled_from(sorted(ticket.left)))
        assert self.cache.done(ticket.owner, number, shard, failed, self.now)
        ticket.left.discard(shard)
        ticket.failed |= failed
        if ticket.kind is TicketKind.SAVE and self.now > ticket.deadline_s and not ticket.quarantined:
            ticket.quarantined = True
            self.expect_changes(set(), self.abort(set(ticket.parts)))
        if not ticket.left:
            self.end(number, commit=True)

    @rule(data=st.data(), owner=owners, shard=st.integers(0, 3))
    def stray_message(self, data: st.DataObject, owner: str, shard: int) -> None:
        """A message for a ticket that is unknown, over, or somebody else's: no effect."""
        number = data.draw(st.sampled_from([*self.tickets, *self.ended, 0, 12345]))
        ticket = self.tickets.get(number)
        if ticket is None or ticket.owner != owner:
            assert not self.cache.release(owner, number)
            assert not self.cache.done(owner, number, shard, (), self.now)
        elif shard not in ticket.left:
            assert not self.cache.done(owner, number, shard, (0,), self.now)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tickets:
            number = data.draw(st.sampled_from(sorted(self.tickets)))
            assert self.cache.release(self.tickets[number].owner, number)
            self.end(number, commit=False)

    @rule(owner=owners)
    def close(self, owner: str) -> None:
        held = [number for number, it in self.tickets.items() if it.owner == owner]
        assert self.cache.close(owner) == len(held)
        deleted: set[Part] = set()
        for number in held:
            ticket = self.tickets.pop(number)
            self.ended.append(number)
            if ticket.kind is TicketKind.SAVE:
                self.tickets[number] = ticket
                deleted |= self.abort(set(ticket.parts))
                del self.tickets[number]
        self.expect_changes(set(), deleted)

    @rule(seconds=st.sampled_from([0.5, LOAD_S, SAVE_S + 0.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        late = [n for n, it in self.tickets.items() if self.now > it.deadline_s and not it.quarantined]
        assert self.cache.expire(self.now) == len(late)
        deleted: set[Part] = set()
        for number in late:
            ticket = self.tickets[number]
            if ticket.kind is not TicketKind.SAVE:
                del self.tickets[number]
                self.ended.append(number)
            else:
                ticket.quarantined = True
                deleted |= self.abort(set(ticket.parts))
        self.expect_changes(set(), deleted)

    @rule()
    def clear(self) -> None:
        kept = self.leased() | self.writing
        deleted = {part for part in self.ready if not any(self.descends(it, part) for it in kept)}
        assert self.cache.clear(self.space) == len(deleted)
        self.expect_changes(set(), deleted)

    # ---- what always holds ----

    @invariant()
    def agrees(self) -> None:
        cache = self.cache
        cache.check()
        for state, parts in ((State.READY, self.ready), (State.RESERVED, self.writing)):
            seen = {
                (number, key)
                for number, index in enumerate(cache.spaces[self.space].index)
                for key, row in index.items()
                if cache.entries.state[row] == state
            }
            assert seen == parts
        assert set(cache.tickets) == set(self.tickets)
        quarantined = {number for number, it in cache.tickets.items() if it.quarantined}
        assert quarantined == {number for number, it in self.tickets.items() if it.quarantined}
        # Whoever may still touch a slot finds it taken.
        for it in self.tickets.values():
            for address, _ in it.slots:
                assert cache.pool.entry(address) is not None

    def granted(
        self, keys: list[ChunkKey], addresses: tuple[tuple[int, ...], ...]
    ) -> tuple[dict[Part, int], list[tuple[int, int]]]:
        parts: dict[Part, int] = {}
        slots = []
        for number, places in enumerate(addresses):
            for at, place in enumerate(places):
                if place != ABSENT:
                    parts[number, keys[at]] = at
                    slots.append((place, self.layout.slot_bytes(number)))
        return parts, slots

    @staticmethod
    def pages(slot: tuple[int, int]) -> range:
        return range(slot[0] // PAGE_BYTES, (slot[0] + slot[1]) // PAGE_BYTES)


def machine(layout: str, policy: str) -> type:
    case = type("Machine", (CacheMachine,), {"layout_name": layout, "policy_name": policy}).TestCase
    case.settings = settings(max_examples=30, stateful_step_count=40)
    return case


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_any_history_agrees_with_the_model(layout: str, policy: str) -> None:
    machine(layout, policy)().runTest()
