"""The cache's flows: what is readable when, who holds what, and what a full or failing cache answers."""

from __future__ import annotations

import random

import pytest

from headwater.core.cache import Cache
from headwater.core.eviction import POLICIES
from headwater.core.pool import Pool
from headwater.types import ABSENT, PAGE_BYTES, ChunkKey, HitRule, KVLayout, Removed, Stored, Tier
from tests.core.examples import (
    LOAD_S,
    SAVE_S,
    all_shards,
    assert_idle,
    chain,
    dense,
    done_by_all,
    granted_slots,
    group,
    hybrid,
    load,
    namespace,
    reserve,
    save,
    small_cache,
)

# ---- save and load -------------------------------------------------------------------------------------------


def test_a_saved_prefix_is_found_and_leased_where_it_was_written() -> None:
    cache, space = small_cache(8)
    keys = chain(3)
    granted = reserve(cache, space, keys)
    assert (granted.covered, granted.deadline_s) == (3, SAVE_S)
    assert cache.match(space, keys) == 0
    done_by_all(cache, space, granted.ticket)
    assert cache.match(space, [*keys, chain(1, seed=5)[0]]) == 3
    found = load(cache, space, keys, now=10.0)
    assert (found.chunks, found.addresses, found.deadline_s) == (3, granted.addresses, 10.0 + LOAD_S)
    done_by_all(cache, space, found.ticket)
    assert_idle(cache)


def test_a_load_leases_only_from_the_first_chunk_that_is_wanted() -> None:
    cache, space = small_cache(8)
    keys = chain(4)
    granted = reserve(cache, space, keys)
    done_by_all(cache, space, granted.ticket)
    found = load(cache, space, keys, first=3)
    assert found.chunks == 4
    assert found.addresses == (granted.addresses[0][3:],)
    assert sum(cache.entries.leases) == 1
    nothing = load(cache, space, keys[:2], first=2)
    assert (nothing.ticket, nothing.chunks, nothing.addresses) == (0, 2, ((),))
    assert cache.release("a", found.ticket)
    assert_idle(cache)


def test_a_miss_holds_nothing() -> None:
    cache, space = small_cache(2)
    found = load(cache, space, chain(3), now=4.0)
    assert (found.ticket, found.chunks, found.addresses, found.deadline_s) == (0, 0, ((),), 4.0)
    assert load(cache, space, []).ticket == 0
    assert reserve(cache, space, []).ticket == 0
    assert_idle(cache)


def test_only_what_is_not_held_is_reserved() -> None:
    cache, space = small_cache(8)
    keys = chain(5)
    save(cache, space, keys[:2])
    granted = reserve(cache, space, keys)
    assert granted.covered == 5
    assert [place == ABSENT for place in granted.addresses[0]] == [True, True, False, False, False]
    again = reserve(cache, space, keys, owner="b")
    assert (again.ticket, again.covered) == (0, 5)
    assert again.addresses == ((ABSENT,) * 5,)


def test_a_save_goes_on_below_its_parent_and_not_without_it() -> None:
    cache, space = small_cache(8)
    keys = chain(4)
    nothing = reserve(cache, space, keys[2:], parent=keys[1])
    assert (nothing.ticket, nothing.covered, nothing.addresses) == (0, 0, ((),))
    save(cache, space, keys[:2])
    assert save(cache, space, keys[2:], parent=keys[1]) == 2
    assert cache.match(space, keys) == 4


def test_changes_are_announced_after_commit_in_order() -> None:
    cache, space = small_cache(2)
    keys = chain(2)
    granted = reserve(cache, space, keys)
    assert cache.take_changes() == []
    done_by_all(cache, space, granted.ticket)
    assert cache.take_changes() == [Stored(space, 0, tuple(keys), Tier.HOST, 2 * PAGE_BYTES)]
    assert cache.take_changes() == []
    save(cache, space, chain(1, seed=1))
    assert cache.take_changes() == [
        Removed(space, 0, (keys[1],), Tier.HOST, PAGE_BYTES, "evicted", space),
        Stored(space, 0, (chain(1, seed=1)[0],), Tier.HOST, PAGE_BYTES),
    ]


def test_a_chunk_is_ready_when_every_shard_has_written_it() -> None:
    cache, space = small_cache(4, dense(shards=4))
    keys = chain(2)
    granted = reserve(cache, space, keys)
    for shard in (2, 0, 3):
        assert cache.done("a", granted.ticket, shard, (), 0.0)
        assert cache.match(space, keys) == 0
        assert cache.contains(space, keys) == b"\0\0"
        assert cache.take_changes() == []
    assert cache.done("a", granted.ticket, 1, (), 0.0)
    assert cache.match(space, keys) == 2


@pytest.mark.parametrize("bad", range(4))
def test_a_failed_chunk_of_any_shard_cuts_the_prefix_there(bad: int) -> None:
    cache, space = small_cache(4, dense(shards=2))
    keys = chain(4)
    granted = reserve(cache, space, keys)
    assert cache.done("a", granted.ticket, 0, (), 0.0)
    assert cache.done("a", granted.ticket, 1, (bad,), 0.0)
    assert cache.match(space, keys) == bad
    assert cache.contains(space, keys) == b"\1" * bad + b"\0" * (4 - bad)
    stored = [key for change in cache.take_changes() if isinstance(change, Stored) for key in change.keys]
    assert stored == keys[:bad]
    assert cache.spaces[space].failed_chunks == 4 - bad
    assert_idle(cache)
    assert save(cache, space, keys) == 4


def test_one_ticket_writes_a_chunk_and_the_herd_waits_for_nothing() -> None:
    cache, space = small_cache(8)
    keys = chain(4)
    grants = [reserve(cache, space, keys, owner=f"engine{number}") for number in range(100)]
    assert [bool(it.ticket) for it in grants] == [True] + [False] * 99
    assert all(it.covered == 4 for it in grants)
    done_by_all(cache, space, grants[0].ticket, owner="engine0")
    loads = [load(cache, space, keys, owner=f"engine{number}") for number in range(100)]
    assert all(it.addresses == grants[0].addresses for it in loads)
    for number, it in enumerate(loads):
        done_by_all(cache, space, it.ticket, owner=f"engine{number}")
    assert_idle(cache)


def test_a_child_of_somebody_elses_open_save_falls_with_it() -> None:
    cache, space = small_cache(8)
    keys = chain(4)
    first = reserve(cache, space, keys[:2])
    second = reserve(cache, space, keys[2:3], parent=keys[1], owner="b")
    third = reserve(cache, space, keys[3:], parent=keys[2], owner="c")
    done_by_all(cache, space, second.ticket, owner="b")
    assert cache.contains(space, keys) == b"\0\0\1\0"
    assert cache.match(space, keys) == 0
    done_by_all(cache, space, first.ticket, failed=[1])
    assert cache.contains(space, keys) == b"\1\0\0\0"
    # c may still be writing: its slot stays taken until it says so, and commits nothing.
    assert cache.pool.taken_slots == 2
    done_by_all(cache, space, third.ticket, owner="c")
    assert cache.contains(space, keys) == b"\1\0\0\0"
    assert_idle(cache)
    held = cache.take_changes()
    assert [type(it).__name__ for it in held] == ["Stored", "Removed", "Stored"]


def test_a_chunk_can_be_saved_again_while_its_late_writer_is_in_quarantine() -> None:
    cache, space = small_cache(2)
    keys = chain(1)
    late = reserve(cache, space, keys)
    cache.expire(SAVE_S + 1)
    fresh = reserve(cache, space, keys, owner="b", now=SAVE_S + 1)
    assert not set(granted_slots(fresh.addresses)) & set(granted_slots(late.addresses))
    done_by_all(cache, space, fresh.ticket, owner="b", now=SAVE_S + 1)
    done_by_all(cache, space, late.ticket, now=SAVE_S + 2)
    assert cache.match(space, keys) == 1
    found = load(cache, space, keys, now=SAVE_S + 2)
    assert found.addresses == fresh.addresses


def test_clear_deletes_what_nobody_uses() -> None:
    cache, space = small_cache(16)
    other = cache.add_space(namespace(dense(), "other"), dense())
    keys, fork = chain(6), chain(6, seed=1, stem=[1000, 1001, 1002])
    save(cache, space, keys)
    save(cache, space, fork)
    save(cache, other, chain(3))
    assert keys[:3] == fork[:3]
    leased = load(cache, space, keys[:4])
    open_save = reserve(cache, space, chain(1, seed=7))
    cache.take_changes()
    assert cache.clear(space) == 5
    assert cache.contains(space, keys) == b"\1\1\1\1\0\0"
    assert cache.contains(other, chain(3)) == b"\1\1\1"
    assert {it.reason for it in cache.take_changes() if isinstance(it, Removed)} == {"deleted"}
    assert cache.spaces[space].deleted_bytes == 5 * PAGE_BYTES
    done_by_all(cache, space, leased.ticket)
    cache.release("a", open_save.ticket)
    assert cache.clear(space) == 4
    assert cache.spaces[space].held_bytes == 0
    assert_idle(cache)


def test_namespaces_do_not_see_each_other() -> None:
    cache, space = small_cache(8)
    other = cache.add_space(namespace(dense(), "other"), dense())
    save(cache, space, chain(3))
    assert cache.match(other, chain(3)) == 0
    # Real keys differ as well; equal ones are still told apart by the handle.
    assert chain(3, model="other") != chain(3)
    save(cache, other, chain(3))
    assert cache.pool.taken_slots == 6


# ---- a full cache --------------------------------------------------------------------------------------------


def test_a_full_cache_means_a_shorter_prefix() -> None:
    cache, space = small_cache(3)
    granted = reserve(cache, space, chain(5))
    assert granted.covered == 3
    assert [len(places) for places in granted.addresses] == [3]
    none = reserve(cache, space, chain(5, seed=1), owner="b")
    assert (none.ticket, none.covered, none.addresses) == (0, 0, ((),))
    done_by_all(cache, space, granted.ticket)
    leased = load(cache, space, chain(3))
    assert reserve(cache, space, chain(5, seed=1), owner="b").covered == 0
    done_by_all(cache, space, leased.ticket)
    assert save(cache, space, chain(5, seed=1), owner="b") == 3


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_endless_unique_prompts_never_fail_and_never_exceed_the_memory(policy: str) -> None:
    cache, space = small_cache(10, policy=POLICIES[policy])
    for seed in range(300):
        assert save(cache, space, chain(4, seed=seed)) == 4
        assert cache.pool.taken_bytes <= 10 * PAGE_BYTES
        cache.check()
    it = cache.spaces[space]
    assert it.stored_chunks == 1200
    assert it.stored_bytes - it.evicted_bytes == it.held_bytes == cache.pool.taken_bytes


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_parent_never_leaves_before_its_child(policy: str) -> None:
    cache, space = small_cache(12, policy=POLICIES[policy])
    rng = random.Random(3)
    parents: dict[ChunkKey, ChunkKey | None] = {}
    held: set[ChunkKey] = set()
    for turn in range(400):
        stem = [1000 + i for i in range(rng.randrange(5))]
        keys = chain(rng.randrange(1, 9), seed=rng.randrange(12), stem=stem)
        parents.update(zip(keys, [None, *keys], strict=False))
        have = cache.match(space, keys)
        load(cache, space, keys[: rng.randrange(have + 1)])
        cache.close("a")
        save(cache, space, keys[have:], parent=keys[have - 1] if have else None)
        for change in cache.take_changes():
            for key in change.keys:
                if isinstance(change, Stored):
                    held.add(key)
                else:
                    held.remove(key)
                    assert not [it for it in held if parents[it] == key], f"turn {turn}: parent left first"
        cache.check()


def test_a_reservation_does_not_evict_the_prefix_that_it_extends() -> None:
    cache, space = small_cache(4)
    keys = chain(8)
    save(cache, space, keys[:2])
    save(cache, space, chain(2, seed=1))
    # keys[1] is the oldest leaf; making room for its child must take the other prompt's instead.
    granted = reserve(cache, space, keys[2:], parent=keys[1])
    assert granted.covered == 2
    assert cache.match(space, keys[:2]) == 2
    assert cache.match(space, chain(2, seed=1)) == 0


def test_a_grant_names_no_slot_twice_even_when_it_evicts_on_the_way() -> None:
    cache, space = small_cache(6)
    for seed in range(40):
        save(cache, space, chain(3, seed=seed))
        granted = reserve(cache, space, chain(6, seed=100 + seed))
        slots = granted_slots(granted.addresses)
        assert len(set(slots)) == len(slots) == 6
        cache.check()
        cache.release("a", granted.ticket)


def two_sizes(slabs: int) -> tuple[Cache, int, int]:
    """A cache of slabs that hold four small slots or one large."""
    small, large = dense(), dense(pages=4)
    cache = Cache(Pool([slabs * 4 * PAGE_BYTES], 4 * PAGE_BYTES), POLICIES["lru"], LOAD_S, SAVE_S)
    return cache, cache.add_space(namespace(small), small), cache.add_space(namespace(large, "large"), large)


def test_a_model_with_other_chunk_sizes_gets_a_cold_slab() -> None:
    cache, small, large = two_sizes(3)
    save(cache, small, chain(12))
    assert cache.match(small, chain(12)) == 12
    assert save(cache, large, chain(1, model="large")) == 1
    cache.check()
    assert cache.match(large, chain(1, model="large")) == 1
    # A whole slab left, with what hung on it: never a hole in the middle of a prefix.
    held = cache.match(small, chain(12))
    assert sum(cache.contains(small, chain(12))) == held <= 8
    # And the small ones get it back.
    for seed in range(1, 5):
        assert save(cache, small, chain(4, seed=seed)) == 4
        cache.check()


def test_a_slab_in_use_is_not_taken_from_its_users() -> None:
    cache, small, large = two_sizes(2)
    save(cache, small, chain(8))
    leased = load(cache, small, chain(8), first=7)
    writing = reserve(cache, small, [])
    assert writing.ticket == 0
    assert save(cache, large, chain(2, model="large")) <= 1
    assert cache.match(small, chain(8)) == 8
    cache.check()
    done_by_all(cache, small, leased.ticket)
    assert save(cache, large, chain(2, model="large")) == 2
    assert cache.match(small, chain(8)) == 0
    assert_idle(cache)


def test_the_parent_of_what_is_being_placed_keeps_its_slab() -> None:
    # One slab: the parent's group and the companion have other sizes, so room for the companion would cost the parent.
    layout = hybrid(group(), group(HitRule.LAST, pages=4))
    cache = Cache(Pool([4 * PAGE_BYTES], 4 * PAGE_BYTES), POLICIES["lru"], LOAD_S, SAVE_S)
    space = cache.add_space(namespace(layout), layout)
    save(cache, space, chain(1), lacking=frozenset({(1, 0)}))
    assert cache.contains(space, chain(1)) == b"\0"
    granted = reserve(cache, space, chain(1))
    assert (granted.ticket, granted.covered) == (0, 0)
    cache.check()
    assert cache.pool.taken_slots == 1


def test_room_is_found_though_the_oldest_leaf_shares_its_slab_with_what_is_being_written() -> None:
    layout = hybrid(group(), group(HitRule.LAST, pages=2))
    cache = Cache(Pool([8 * PAGE_BYTES], 4 * PAGE_BYTES), POLICIES["lru"], LOAD_S, SAVE_S)
    space = cache.add_space(namespace(layout), layout)
    save(cache, space, chain(8), lacking=frozenset((1, at) for at in range(8)))
    assert cache.pool.taken_slots == 8
    # The new chunk takes the place of the one leaf, in its slab; its companion needs the other slab.
    assert reserve(cache, space, chain(1, seed=1)).covered == 1
    cache.check()


def test_emptying_a_slab_of_long_chains_takes_linear_time() -> None:
    small, large = dense(), dense(pages=2048)
    cache = Cache(Pool([2048 * PAGE_BYTES], 2048 * PAGE_BYTES), POLICIES["lru"], LOAD_S, SAVE_S)
    first, second = cache.add_space(namespace(small), small), cache.add_space(namespace(large, "l"), large)
    asked = 0
    is_leaf = cache.entries.is_leaf

    def counting(row: int) -> bool:
        nonlocal asked
        asked += 1
        return is_leaf(row)

    cache.entries.is_leaf = counting  # type: ignore[method-assign]
    save(cache, first, chain(2048))
    assert save(cache, second, chain(1, model="l")) == 1
    assert asked < 5 * 2048
    asked = 0
    cache.clear(second)
    save(cache, first, chain(2048))
    assert cache.clear(first) == 2048
    assert asked < 5 * 2048


# ---- several KV groups ---------------------------------------------------------------------------------------

WINDOW = group(HitRule.WINDOW, window_tokens=6)  # two chunks
MIXES = {
    "window": hybrid(group(), WINDOW),
    "state": hybrid(group(HitRule.LAST, pages=2), group()),
    "three": hybrid(WINDOW, group(), group(HitRule.LAST)),
    "two full": hybrid(group(), group()),
    "no full": hybrid(WINDOW, group(HitRule.LAST)),
    "window only": hybrid(WINDOW),
}


def roomy(layout: KVLayout) -> tuple[Cache, int]:
    cache = Cache(Pool([256 * PAGE_BYTES], 8 * PAGE_BYTES), POLICIES["lru"], LOAD_S, SAVE_S)
    return cache, cache.add_space(namespace(layout), layout)


def usable_tokens(layout: KVLayout, has: list[list[bool]], count: int) -> int:
    """The longest usable prefix by trying every length, token by token."""
    for chunks in range(count, 0, -1):
        end = chunks * layout.chunk_tokens
        reach = [{HitRule.ALL: end, HitRule.WINDOW: it.window_tokens, HitRule.LAST: 1}[it.rule] for it in layout.groups]
        if all(
            has[number][token // layout.chunk_tokens]
            for number in range(len(layout.groups))
            for token in range(max(0, end - reach[number]), end)
        ):
            return chunks
    return 0


@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize("seed", range(25))
def test_a_usable_hit_is_what_every_group_has(mix: str, seed: int) -> None:
    layout, rng = MIXES[mix], random.Random(seed)
    cache, space = roomy(layout)
    keys, groups = chain(8), range(len(layout.groups))
    lacking = frozenset((number, at) for number in groups for at in range(8) if rng.random() < 0.2)
    save(cache, space, keys, lacking=lacking)
    cache.check()
    has = [[key in cache.spaces[space].index[number] for key in keys] for number in groups]
    expected = usable_tokens(layout, has, 8)
    assert cache.match(space, keys) == expected
    assert cache.contains(space, keys) == bytes([all(has[number][at] for number in groups) for at in range(8)])
    first = rng.randrange(8)
    found = load(cache, space, keys, first=first)
    assert found.chunks == expected
    for number in groups:
        reach = {HitRule.ALL: 8, HitRule.WINDOW: 2, HitRule.LAST: 1}[layout.groups[number].rule]
        read = [at for at in range(first, expected) if at >= expected - reach]
        places = found.addresses[number]
        assert [at for at, place in enumerate(places, first) if place != ABSENT] == read
    # What is missing is filled in under what is there, and then all of it is usable.
    save(cache, space, keys)
    assert cache.match(space, keys) == 8
    cache.release("a", found.ticket)
    assert_idle(cache)


def test_a_part_that_the_caller_lacks_ends_the_prefix_only_in_the_main_group() -> None:
    cache, space = roomy(MIXES["three"])
    keys = chain(4)
    granted = reserve(cache, space, keys, lacking=frozenset({(1, 2), (0, 0)}))
    assert granted.covered == 2
    assert [[place == ABSENT for place in places] for places in granted.addresses] == [
        [True, False],
        [False, False],
        [False, False],
    ]
    done_by_all(cache, space, granted.ticket)
    # Once somebody else holds the main part, the rest can be saved without it.
    save(cache, space, keys, owner="b")
    assert reserve(cache, space, keys, lacking=frozenset({(1, 2)})).covered == 4


def test_evicting_one_groups_part_shortens_the_hit() -> None:
    layout = MIXES["window"]
    cache = Cache(Pool([8 * PAGE_BYTES], PAGE_BYTES), POLICIES["lru"], LOAD_S, SAVE_S)
    space = cache.add_space(namespace(layout), layout)
    keys = chain(4)
    save(cache, space, keys)
    assert cache.match(space, keys) == 4
    cache.spaces[space].share.policy.remove(row := cache.spaces[space].index[1][keys[3]])
    cache._remove(row, "evicted")
    assert cache.match(space, keys) == 3
    assert load(cache, space, keys).chunks == 3


def test_a_chunk_is_placed_in_all_its_groups_or_in_none() -> None:
    layout = hybrid(group(), group(HitRule.LAST))
    cache = Cache(Pool([5 * PAGE_BYTES], PAGE_BYTES), POLICIES["lru"], LOAD_S, SAVE_S)
    space = cache.add_space(namespace(layout), layout)
    granted = reserve(cache, space, chain(4))
    assert granted.covered == 2
    assert cache.pool.taken_slots == 4
    assert cache.spaces[space].failed_chunks == 0
    cache.check()


# ---- faults, after public bug reports ------------------------------------------------------------------------


def test_b032_a_thousand_lookups_without_a_load_pin_nothing() -> None:
    cache, space = small_cache(8)
    save(cache, space, chain(8))
    before = repr(cache)
    for _ in range(1000):
        assert cache.match(space, chain(8)) == 8
        assert cache.contains(space, chain(8)) == b"\1" * 8
    assert repr(cache) == before
    assert save(cache, space, chain(8, seed=1)) == 8
    assert cache.match(space, chain(8)) == 0
    assert_idle(cache)


def test_b034_five_hundred_aborts_leak_nothing() -> None:
    cache, space = small_cache(16, dense(shards=2))
    save(cache, space, chain(4))
    rng = random.Random(34)
    for turn in range(500):
        found = load(cache, space, chain(4))
        granted = reserve(cache, space, chain(5, seed=turn), parent=None)
        for ticket in (found.ticket, granted.ticket):
            if rng.random() < 0.5:
                cache.done("a", ticket, rng.randrange(2), (), 0.0)
            assert cache.release("a", ticket)
        cache.check()
    assert cache.pool.taken_slots == 4
    assert_idle(cache)


def test_b038_an_aborted_writers_slot_is_not_given_away_while_it_may_write() -> None:
    cache, space = small_cache(2, dense(shards=2))
    late = reserve(cache, space, chain(2))
    cache.expire(SAVE_S + 0.1)
    for turn in range(20):
        assert reserve(cache, space, chain(2, seed=turn), owner="b", now=SAVE_S + turn).covered == 0
    assert cache.done("a", late.ticket, 0, (), SAVE_S + 30)
    assert reserve(cache, space, chain(2), owner="b", now=SAVE_S + 31).covered == 0
    assert cache.done("a", late.ticket, 1, (), SAVE_S + 32)
    assert reserve(cache, space, chain(2), owner="b", now=SAVE_S + 33).covered == 2
    assert cache.expired_saves == 1


def test_b040_late_repeated_and_foreign_messages_change_nothing() -> None:
    cache, space = small_cache(4, dense(shards=2))
    granted = reserve(cache, space, chain(2))
    done_by_all(cache, space, granted.ticket)
    before = repr(cache)
    for _ in range(10):
        assert not cache.done("a", granted.ticket, 0, (0, 1), 99.0)
        assert not cache.release("a", granted.ticket)
        assert not cache.done("zombie", granted.ticket + 1, 0, (), 99.0)
    assert repr(cache) == before
    assert cache.unknown_tickets == 30
    assert cache.match(space, chain(2)) == 2


def test_b041_eviction_between_lookup_and_load_shortens_the_hit() -> None:
    cache, space = small_cache(6)
    keys = chain(6)
    save(cache, space, keys)
    assert cache.match(space, keys) == 6
    save(cache, space, chain(2, seed=1))
    found = load(cache, space, keys)
    assert found.chunks == 4
    assert len(granted_slots(found.addresses)) == 4
    # From here on the hit is a promise: the rest may churn, these four stay where they are.
    for seed in range(2, 30):
        save(cache, space, chain(6, seed=seed))
    assert cache.match(space, keys[:4]) == 4
    assert cache.spaces[space].index[0][keys[3]] == cache.pool.entry(found.addresses[0][3])


def test_b043_a_lease_holds_until_its_deadline_and_ends_with_it() -> None:
    cache, space = small_cache(2)
    save(cache, space, chain(2))
    found = load(cache, space, chain(2), now=100.0)
    assert found.deadline_s == 100.0 + LOAD_S
    cache.expire(found.deadline_s)
    assert reserve(cache, space, chain(2, seed=1), owner="b", now=found.deadline_s).covered == 0
    cache.expire(found.deadline_s + 0.001)
    assert reserve(cache, space, chain(2, seed=1), owner="b", now=103.0).covered == 2
    assert not cache.done("a", found.ticket, 0, (), 103.0)
    assert cache.expired_loads == 1


def test_a_commit_at_the_deadline_counts_and_after_it_does_not() -> None:
    for now, held in ((SAVE_S, 2), (SAVE_S + 0.001, 0)):
        cache, space = small_cache(2)
        granted = reserve(cache, space, chain(2))
        assert cache.done("a", granted.ticket, 0, (), now)
        assert cache.match(space, chain(2)) == held
        assert len(cache.take_changes()) == (1 if held else 0)
        assert_idle(cache)


def test_b051_more_loads_and_saves_than_room_all_get_an_answer() -> None:
    cache, space = small_cache(2)
    save(cache, space, chain(2))
    loads = [load(cache, space, chain(2), owner=f"e{number}") for number in range(50)]
    saves = [reserve(cache, space, chain(2, seed=1 + number), owner=f"e{number}") for number in range(50)]
    assert all(it.chunks == 2 for it in loads)
    assert all(it.covered == 0 for it in saves)
    for number in range(50):
        cache.close(f"e{number}")
    assert_idle(cache)


def test_b090_sums_agree_with_a_known_workload() -> None:
    cache, space = small_cache(4)
    it = cache.spaces[space]
    for asked, hit in ((10, 0), (10, 4), (3, 3)):
        cache.count_lookup(space, asked, hit)
    assert (it.lookup_tokens, it.hit_tokens) == (23 * 4, 7 * 4)
    before = (it.lookup_tokens, it.hit_tokens, it.stored_bytes)
    for now in range(60):
        cache.expire(float(now))
        cache.match(space, chain(3))
    assert (it.lookup_tokens, it.hit_tokens, it.stored_bytes) == before


def test_b094_fifty_killed_engines_leave_nothing() -> None:
    cache, space = small_cache(8, dense(shards=2))
    save(cache, space, chain(2), owner="survivor")
    kept = load(cache, space, chain(2), owner="survivor")
    rows = len(cache.entries.keys)
    for number in range(50):
        owner = f"engine#{number}"
        load(cache, space, chain(2), owner=owner)
        granted = reserve(cache, space, chain(3, seed=number), owner=owner)
        cache.done(owner, granted.ticket, 1, (), 0.0)
        reserve(cache, space, chain(3, seed=1000 + number), owner=owner)
        if number % 2:
            cache.expire(SAVE_S + 1)
            kept = load(cache, space, chain(2), owner="survivor")
        assert cache.close(owner) == (2 if number % 2 else 3)
        assert cache.close(owner) == 0
        cache.check()
    assert cache.pool.taken_slots == 2
    assert len(cache.tickets) == 1
    assert len(cache.entries.keys) <= rows + 6
    cache.release("survivor", kept.ticket)
    assert_idle(cache)


def test_a_client_that_lies_about_a_parent_hurts_nobody() -> None:
    cache, space = small_cache(8)
    keys, other = chain(2), chain(2, seed=1)
    save(cache, space, keys[:1])
    lie = reserve(cache, space, other[:1], owner="liar")
    save(cache, space, keys[1:], parent=other[0], owner="liar")
    found = load(cache, space, keys)
    assert found.chunks == 2
    cache.release("liar", lie.ticket)
    cache.check()
    assert all(cache.pool.entry(place) is not None for place in found.addresses[0])
    done_by_all(cache, space, found.ticket)
    assert_idle(cache)


def test_repeated_keys_in_one_call_are_one_chunk() -> None:
    cache, space = small_cache(8)
    one, two = chain(2)
    granted = reserve(cache, space, [one, two, one, two, one])
    assert (granted.covered, len(granted_slots(granted.addresses))) == (5, 2)
    done_by_all(cache, space, granted.ticket)
    found = load(cache, space, [one, one, two])
    assert found.chunks == 3
    cache.check()
    done_by_all(cache, space, found.ticket)
    assert_idle(cache)


def test_ticket_numbers_of_two_lives_of_a_node_do_not_meet() -> None:
    def first_ticket(epoch: int) -> int:
        cache = Cache(Pool([PAGE_BYTES], PAGE_BYTES), POLICIES["lru"], LOAD_S, SAVE_S, epoch)
        return reserve(cache, cache.add_space(namespace(dense()), dense()), chain(1)).ticket

    assert first_ticket(0) != 0
    assert first_ticket(10**18) - first_ticket(0) == 10**18


def test_a_cache_explains_itself() -> None:
    cache, space = small_cache(4)
    save(cache, space, chain(1))
    reserve(cache, space, chain(1, seed=1))
    reserve(cache, space, chain(1, seed=2), now=100.0)
    cache.expire(50.0)
    assert repr(cache) == (
        "Cache(1 reserved, 1 ready, 1 quarantined, 2 tickets, "
        "Pool(3 slots of [4096] bytes taken, 12288/16384 bytes, 1/4 slabs unassigned))"
    )
    assert all_shards(cache, space) == (0,)


def test_tickets_that_their_owner_does_not_know_of_end() -> None:
    cache, space = small_cache(8)
    known = cache.reserve("engine", space, None, chain(2), (), (0,), 0.0)
    lost = cache.reserve("engine", space, None, chain(2, seed=1), (), (0,), 0.0)
    other = cache.reserve("other", space, None, chain(2, seed=2), (), (0,), 0.0)
    assert cache.keep("engine", {known.ticket}) == 1
    assert set(cache.tickets) == {known.ticket, other.ticket}
    assert not cache.done("engine", lost.ticket, 0, (), 0.0)
    assert cache.reserve("third", space, None, chain(2, seed=1), (), (0,), 0.0).ticket, "the slots' keys are free again"
    cache.check()
