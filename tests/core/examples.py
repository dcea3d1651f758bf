"""Small layouts, namespaces, keys and caches that the tests of the core share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.core.cache import Cache
from headwater.core.eviction import LRU
from headwater.core.hashing import chunk_keys
from headwater.core.pool import Pool
from headwater.ports import EvictionPolicy
from headwater.types import (
    ABSENT,
    PAGE_BYTES,
    ChunkKey,
    HitRule,
    KVGroup,
    KVLayout,
    Loadable,
    Namespace,
    Reservation,
)

CHUNK_TOKENS = 4
LOAD_S, SAVE_S = 2.0, 5.0


def group(
    rule: HitRule = HitRule.ALL, *, window_tokens: int = 0, pages: int = 1, shards: int = 1, block_tokens: int = 2
) -> KVGroup:
    """A KV group whose part of a chunk is exactly `pages` pages for each shard."""
    block_bytes = pages * PAGE_BYTES * block_tokens // CHUNK_TOKENS
    return KVGroup(block_tokens, block_bytes, (1,) * shards, rule, window_tokens)


def dense(pages: int = 1, shards: int = 1) -> KVLayout:
    """One full-attention group."""
    return KVLayout(CHUNK_TOKENS, (group(pages=pages, shards=shards),))


def hybrid(*groups: KVGroup) -> KVLayout:
    """Several groups that share a chunk size."""
    return KVLayout(CHUNK_TOKENS, groups)


def namespace(layout: KVLayout, model: str = "m") -> Namespace:
    """A namespace for a layout."""
    return Namespace(model, "bf16", "test", layout.fingerprint())


def chain(count: int, *, seed: int = 0, stem: Sequence[int] = (), model: str = "m") -> list[ChunkKey]:
    """Real keys of a prompt of `count` chunks: the chunks named in `stem`, then chunks that only `seed` has."""
    words = [*stem, *(1000 + seed * 100 + position for position in range(count - len(stem)))]
    tokens = [word for word in words for _ in range(CHUNK_TOKENS)]
    return chunk_keys(namespace(dense(), model).root(), tokens, CHUNK_TOKENS)


def small_cache(
    slots: int, layout: KVLayout | None = None, policy: Callable[[], EvictionPolicy] = LRU, *, slab_slots: int = 1
) -> tuple[Cache, int]:
    """A cache with room for `slots` slots of the layout's first group, and the handle of one namespace."""
    layout = layout or dense()
    slab_bytes = layout.slot_bytes(0) * slab_slots
    pool = Pool([layout.slot_bytes(0) * slots], slab_bytes)
    cache = Cache(pool, policy, LOAD_S, SAVE_S)
    return cache, cache.add_space(namespace(layout), layout)


def all_shards(cache: Cache, space: int) -> tuple[int, ...]:
    """Every shard of a namespace's layout."""
    return tuple(range(cache.spaces[space].layout.shards))


def reserve(
    cache: Cache,
    space: int,
    keys: Sequence[ChunkKey],
    *,
    parent: ChunkKey | None = None,
    owner: str = "a",
    lacking: frozenset[tuple[int, int]] = frozenset(),
    now: float = 0.0,
) -> Reservation:
    """Reserve for all shards."""
    return cache.reserve(owner, space, parent, keys, lacking, all_shards(cache, space), now)


def load(
    cache: Cache, space: int, keys: Sequence[ChunkKey], *, first: int = 0, owner: str = "a", now: float = 0.0
) -> Loadable:
    """Load for all shards."""
    return cache.load(owner, space, keys, first, all_shards(cache, space), now)


def done_by_all(
    cache: Cache, space: int, ticket: int, *, owner: str = "a", failed: Sequence[int] = (), now: float = 0.0
) -> None:
    """Every shard says done."""
    for shard in all_shards(cache, space):
        assert cache.done(owner, ticket, shard, failed, now)


def save(
    cache: Cache,
    space: int,
    keys: Sequence[ChunkKey],
    *,
    parent: ChunkKey | None = None,
    owner: str = "a",
    lacking: frozenset[tuple[int, int]] = frozenset(),
    now: float = 0.0,
) -> int:
    """Reserve and commit at once; how many of the keys are held now."""
    granted = reserve(cache, space, keys, parent=parent, owner=owner, lacking=lacking, now=now)
    if granted.ticket:
        done_by_all(cache, space, granted.ticket, owner=owner, now=now)
    return granted.covered


def granted_slots(places: Sequence[Sequence[int]]) -> list[int]:
    """The addresses of a grant that are places."""
    return [address for group_places in places for address in group_places if address != ABSENT]


def assert_idle(cache: Cache) -> None:
    """Nothing is held: every row is readable, unleased, and no ticket is open."""
    cache.check()
    assert not cache.tickets
    assert not any(cache.entries.leases)
    assert repr(cache).startswith("Cache(0 reserved, "), repr(cache)
    assert " 0 quarantined, 0 tickets" in repr(cache), repr(cache)
