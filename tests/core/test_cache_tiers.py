"""What moves between tiers, operators and tenants need of a cache: holds, drops, restores, evictions, shares."""

from __future__ import annotations

import random

import pytest

from headwater.core.cache import Cache
from headwater.core.eviction import POLICIES
from headwater.core.pool import Pool
from headwater.types import ABSENT, PAGE_BYTES, HitRule, KVLayout, Namespace, Removed, TicketKind
from tests.core.examples import (
    LOAD_S,
    SAVE_S,
    assert_idle,
    chain,
    dense,
    done_by_all,
    group,
    hybrid,
    load,
    reserve,
    save,
    small_cache,
)

# ---- hold -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TicketKind.LOAD, TicketKind.PIN])
def test_a_hold_leases_what_is_there_until_its_time(kind: TicketKind) -> None:
    cache, space = small_cache(4)
    keys = chain(4)
    save(cache, space, keys[:2])
    writing = reserve(cache, space, keys[2:3], parent=keys[1])
    ticket, places = cache.hold("", kind, space, [(0, key) for key in keys], 1.0)
    assert [place != ABSENT for place in places] == [True, True, False, False]
    # Held chunks cannot leave, whoever wants the room.
    assert save(cache, space, chain(4, seed=9)) == 1
    assert cache.clear(space) == 1
    assert cache.evict(space, keys) == 0
    assert cache.match(space, keys) == 2
    assert cache.expire(1.0) == 0
    assert cache.expire(1.1) == 1
    assert cache.expired_loads == (kind is TicketKind.LOAD)
    assert ticket not in cache.tickets
    assert cache.evict(space, keys[1:]) == 0  # something is being written that hangs on it
    cache.release("a", writing.ticket)
    assert cache.evict(space, keys[1:]) == 1


def test_a_hold_of_nothing_is_no_ticket() -> None:
    cache, space = small_cache(2)
    assert cache.hold("", TicketKind.PIN, space, [(0, key) for key in chain(2)], 9.0) == (0, [ABSENT, ABSENT])
    assert cache.hold("", TicketKind.PIN, space, [], 9.0) == (0, [])
    assert_idle(cache)


def test_a_hold_is_no_use_and_a_touch_is() -> None:
    cache, space = small_cache(2)
    one, two, three = chain(1), chain(1, seed=1), chain(1, seed=2)
    save(cache, space, one)
    save(cache, space, two)
    cache.release("", cache.hold("", TicketKind.LOAD, space, [(0, one[0])], 9.0)[0])
    save(cache, space, three)
    assert [cache.match(space, keys) for keys in (one, two, three)] == [0, 1, 1]
    cache.touch(space, two)
    save(cache, space, one)
    assert [cache.match(space, keys) for keys in (one, two, three)] == [1, 1, 0]


# ---- drop -----------------------------------------------------------------------------------------------


def test_a_dropped_chunk_is_found_no_more_and_its_slot_outlives_its_readers() -> None:
    cache, space = small_cache(3)
    keys = chain(3)
    save(cache, space, keys)
    cache.take_changes()
    found = load(cache, space, keys)
    place = found.addresses[0][1]
    assert not cache.drop(space, 0, keys[1], place + PAGE_BYTES, "corrupt")
    assert cache.drop(space, 0, keys[1], place, "corrupt")
    assert not cache.drop(space, 0, keys[1], place, "corrupt")
    (change,) = cache.take_changes()
    assert isinstance(change, Removed)
    assert (change.reason, change.keys, change.places) == ("corrupt", (keys[1],), (place,))
    assert cache.match(space, keys) == 1
    cache.check()
    # Its slot is not given away while it is read, and what hung on it is still there.
    assert reserve(cache, space, chain(1, seed=4)).ticket == 0
    done_by_all(cache, space, found.ticket)
    assert cache.is_ready(space, 0, keys[2])
    assert save(cache, space, keys[1:2], parent=keys[0]) == 1
    assert cache.match(space, keys) == 3
    assert cache.clear(space) == 3
    assert_idle(cache)


def test_what_is_being_written_is_not_dropped() -> None:
    cache, space = small_cache(2)
    granted = reserve(cache, space, chain(1))
    assert not cache.drop(space, 0, chain(1)[0], granted.addresses[0][0], "corrupt")
    done_by_all(cache, space, granted.ticket)
    assert cache.match(space, chain(1)) == 1


# ---- evict, hanging_on ----------------------------------------------------------------------------------


def test_evict_takes_what_hangs_on_it_in_all_groups() -> None:
    cache, space = small_cache(16, hybrid(group(), group(HitRule.WINDOW, window_tokens=6)))
    keys, other = chain(4), chain(3, seed=1, stem=[1000])
    save(cache, space, keys)
    save(cache, space, other)
    assert cache.parent_of(space, keys[1]) == keys[0]
    assert cache.parent_of(space, keys[0]) is None
    assert len(cache.hanging_on(space, keys[0])) == 12
    assert set(cache.hanging_on(space, keys[2])) == {(at, key) for at in (0, 1) for key in keys[2:]}
    assert cache.hanging_on(space, chain(1, seed=9)[0]) == []
    assert cache.evict(space, keys[1:2]) == 6
    assert (cache.match(space, keys), cache.match(space, other)) == (1, 3)
    assert cache.evict(space, []) == 0
    assert cache.evict(space, [*chain(2, seed=9), *other]) == 6
    assert_idle(cache)
    assert not len(cache.entries)


# ---- restore --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [dense(), hybrid(group(pages=2), group(HitRule.WINDOW, window_tokens=6))])
def test_what_one_life_announced_is_there_in_the_next(layout: KVLayout) -> None:
    cache, space = small_cache(24, layout, slab_slots=4)
    keys, other = chain(5), chain(4, seed=1, stem=[1000, 1001])
    save(cache, space, keys)
    save(cache, space, other)
    cache.evict(space, keys[4:])
    rows = [
        (number, key, cache.parent_of(space, key) or b"", cache.entries.address[row])
        for number, index in enumerate(cache.spaces[space].index)
        for key, row in index.items()
    ]
    rows.sort(key=lambda it: (it[0], [*keys, *other].index(it[1])))
    again, space = small_cache(24, layout, slab_slots=4)
    assert again.restore(space, rows) == [True] * len(rows)
    assert again.take_changes() == []  # nobody needs to be told what it knows
    again.check()
    assert again.spaces[space].held_bytes == cache.spaces[space].held_bytes
    assert (again.match(space, keys), again.match(space, other)) == (4, 4)
    assert again.parent_of(space, other[2]) == keys[1]
    # It leaves as anything else does, children first.
    assert save(again, space, chain(12, seed=5)) > 4
    again.check()
    again.clear(space)
    assert not len(again.entries)
    assert again.pool.taken_slots == 0


def test_what_cannot_be_where_it_was_is_refused() -> None:
    cache, space = small_cache(8, slab_slots=4)
    keys = chain(5)
    places = [0, 0, PAGE_BYTES // 2, 8 * PAGE_BYTES, 1 << 40]
    rows = [(0, key, b"", place) for key, place in zip(keys, places, strict=True)]
    assert cache.restore(space, rows) == [True, False, False, False, False]
    cache.check()
    with pytest.raises(AssertionError):
        cache.restore(space, [(0, keys[1], b"", 4096), (0, keys[1], b"", 8192)])


def test_a_restored_chunk_without_its_parent_hangs_on_nothing() -> None:
    cache, space = small_cache(4)
    keys = chain(2)
    assert cache.restore(space, [(0, keys[1], keys[0], 0)]) == [True]
    assert cache.match(space, keys) == 0
    assert cache.parent_of(space, keys[1]) is None
    assert save(cache, space, keys) == 2
    assert cache.match(space, keys) == 2
    cache.clear(space)
    assert_idle(cache)


@pytest.mark.parametrize("seed", range(20))
def test_a_restored_pool_allocates_what_is_left_and_only_that(seed: int) -> None:
    rng = random.Random(seed)
    pages, slab = 12, 12 * PAGE_BYTES
    pool, sizes = Pool([4 * slab], slab), [PAGE_BYTES * it for it in (1, 2, 3, 4)]
    held: dict[int, int] = {}
    for entry in range(60):
        size = rng.choice(sizes)
        address = pool.allocate(size, entry)
        if address is not None:
            held[address] = size
    for address in rng.sample(sorted(held), len(held) // 2):
        pool.free(address)
        del held[address]
    again = Pool([4 * slab], slab)
    slots = list(held.items())
    rng.shuffle(slots)
    assert all(again.restore(slots, 100))
    again.check()
    assert again.taken_bytes == pool.taken_bytes
    assert [again.entry(address) for address, _ in slots] == list(range(100, 100 + len(slots)))
    assert not any(again.restore(slots, 500))
    again.check()
    taken = {page for at, size in slots for page in range(at // PAGE_BYTES, (at + size) // PAGE_BYTES)}
    for entry in range(1000, 1000 + 4 * pages):
        address = again.allocate(PAGE_BYTES, entry)
        if address is None:
            break
        assert address // PAGE_BYTES not in taken
        taken.add(address // PAGE_BYTES)
    again.check()


# ---- shares ---------------------------------------------------------------------------------------------


def tenants(slots: int, quotas: dict[str, int], *names: str, policy: str = "lru", slab_slots: int = 1) -> Cache:
    """A cache of one-page slots, with a namespace for each tenant; quotas are slots."""
    pool = Pool([slots * PAGE_BYTES], slab_slots * PAGE_BYTES)
    sizes = {tenant: count * PAGE_BYTES for tenant, count in quotas.items()}
    cache = Cache(pool, POLICIES[policy], LOAD_S, SAVE_S, quotas=sizes)
    for name in names:
        add(cache, name, dense())
    return cache


def add(cache: Cache, tenant: str, layout: KVLayout) -> int:
    return cache.add_space(Namespace("m", "bf16", "test", layout.fingerprint(), tenant=tenant), layout)


def held(cache: Cache) -> list[int]:
    """Slots that each namespace has."""
    return [space.held_bytes // PAGE_BYTES for space in cache.spaces]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("quotas", "kept"), [({"b": 12}, 12), ({"a": 4}, 16), ({}, 10), ({"a": 8, "b": 12}, 12)])
def test_a_flood_by_one_tenant_leaves_the_other_what_is_its_own(policy: str, quotas: dict[str, int], kept: int) -> None:
    cache = tenants(20, quotas, "a", "b", policy=policy)
    victims = [chain(2, seed=seed) for seed in range(10)]
    for keys in victims:
        save(cache, 1, keys)
    assert held(cache) == [0, 20]
    for seed in range(200):
        save(cache, 0, chain(3, seed=seed))
        cache.check()
    assert held(cache)[1] == kept
    # The young ones of the victim's are those that stay, and nothing leaves any more.
    if policy == "lru":
        assert [cache.match(1, keys) for keys in victims] == [0] * (10 - kept // 2) + [2] * (kept // 2)
    cache.take_changes()
    save(cache, 0, chain(3, seed=999))
    assert {change.namespace for change in cache.take_changes()} == {0}
    # It gets back what it is entitled to, and no more.
    for seed in range(100, 130):
        save(cache, 1, chain(2, seed=seed))
    assert held(cache)[1] in (kept, kept + 1)


def test_alone_a_tenant_may_have_all_and_unused_quotas_are_lent() -> None:
    cache = tenants(10, {"b": 6}, "a", "b")
    save(cache, 0, chain(10))
    assert held(cache) == [10, 0]
    assert save(cache, 1, chain(8, seed=1)) == 6
    assert held(cache) == [4, 6]
    cache.check()


def test_a_tenant_above_its_share_gives_way_to_a_new_one() -> None:
    cache = tenants(12, {}, "a", "b", "c")
    for seed in range(12):
        save(cache, 0, chain(1, seed=seed))
    for seed in range(12):
        save(cache, 1, chain(1, seed=seed))
    assert held(cache) == [6, 6, 0]
    for seed in range(12):
        save(cache, 2, chain(1, seed=seed))
    assert held(cache) == [4, 4, 4]
    cache.check()


def test_a_quota_of_nothing_keeps_nothing() -> None:
    cache = tenants(4, {"a": 0}, "a", "b")
    save(cache, 0, chain(4))
    assert save(cache, 1, chain(4, seed=1)) == 4
    assert held(cache) == [0, 4]
    assert save(cache, 0, chain(1)) == 0
    cache.check()


def test_leased_chunks_of_whoever_has_too_much_are_passed_over() -> None:
    cache = tenants(6, {}, "a", "b")
    save(cache, 0, chain(6))
    found = load(cache, 0, chain(6))
    assert save(cache, 1, chain(2, seed=1)) == 0
    done_by_all(cache, 0, found.ticket)
    assert save(cache, 1, chain(2, seed=1)) == 2
    assert_idle(cache)


def test_room_for_another_size_is_not_made_of_what_others_are_entitled_to() -> None:
    """One slab holds chunks of a tenant that has too much and of one that has not."""
    cache = tenants(8, {}, "a", "b", slab_slots=4)
    wide = add(cache, "c", dense(pages=4))
    for seed in range(3):
        save(cache, 0, chain(1, seed=seed))
    save(cache, 1, chain(1, seed=50))
    for seed in range(3, 6):
        save(cache, 0, chain(1, seed=seed))
    save(cache, 1, chain(1, seed=51))
    assert held(cache) == [6, 2, 0]
    save(cache, wide, chain(1, seed=70))
    assert held(cache)[1] == 2
    cache.check()
    # Alone with the one that has too much, it gets its slab.
    cache.evict(1, [*chain(1, seed=50), *chain(1, seed=51)])
    save(cache, wide, chain(1, seed=70))
    assert cache.match(wide, chain(1, seed=70)) == 1
    cache.check()


def test_make_room_takes_one_even_if_there_is_room() -> None:
    cache, space = small_cache(4)
    save(cache, space, chain(2))
    assert cache.make_room(space, PAGE_BYTES)
    assert cache.match(space, chain(2)) == 1
    assert cache.make_room(space, PAGE_BYTES)
    assert not cache.make_room(space, PAGE_BYTES)
    assert_idle(cache)


@pytest.mark.parametrize("seed", range(30))
def test_shares_hold_in_any_history(seed: int) -> None:
    rng = random.Random(seed)
    names = ("a", "b", "c")
    quotas = {name: rng.randrange(8) for name in names if rng.random() < 0.5}
    cache = tenants(16, quotas, *names, policy=rng.choice(sorted(POLICIES)))
    tickets: list[tuple[int, int]] = []
    for step in range(200):
        space = rng.randrange(3)
        keys = chain(4, seed=rng.randrange(12))[: rng.randrange(1, 5)]
        before = held(cache)
        if rng.random() < 0.7:
            save(cache, space, keys)
        elif rng.random() < 0.5 and (found := load(cache, space, keys)).ticket:
            tickets.append((space, found.ticket))
        elif tickets:
            done_by_all(cache, *tickets.pop(rng.randrange(len(tickets))))
        cache.check()
        holding = {name for name, count in zip(names, before, strict=True) if count} | {names[space]}
        rest = 16 - sum(quotas.get(name, 0) for name in holding)
        without = max(sum(name not in quotas for name in holding), 1)
        for other, name in enumerate(names):
            entitled = quotas.get(name, max(rest, 0) // without)
            if other != space and before[other] <= entitled:
                assert held(cache)[other] == before[other], f"step {step}: {name} gave room"
