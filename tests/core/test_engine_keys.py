"""Engines' own hashes become the keys that requests are asked with."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.engine_keys import EngineHash, EngineKeys
from headwater.core.hashing import chunk_keys
from headwater.types import ChunkKey, Media, Namespace

ROOT = Namespace("sha256:0123", "bfloat16", "flash.nhd.16", "g0").root()
TOKENS = [it * 7919 % 50_000 for it in range(64)]


@pytest.mark.parametrize("names", [list(range(-8, 8)), [bytes([it]) * 32 for it in range(16)]])
def test_golden_in_one_event_and_block_by_block(names: list[EngineHash]) -> None:
    wanted = chunk_keys(ROOT, TOKENS, 4)
    at_once = EngineKeys(ROOT, 4)
    assert at_once.stored(names, None, TOKENS) == wanted
    singly, parent, found = EngineKeys(ROOT, 4), None, []
    for at, name in enumerate(names):
        keys = singly.stored([name], parent, TOKENS[4 * at : 4 * at + 4])
        assert keys is not None
        found += keys
        parent = name
    assert found == wanted
    assert singly.removed(names[3:5]) == wanted[3:5] and singly.removed(names[3:5]) == []
    assert singly.unknown == 2 and len(singly) == 14


def test_golden_vector() -> None:
    keys = EngineKeys(ROOT, 4).stored([1, 2], None, range(8))
    assert keys is not None and [it.hex() for it in keys] == [it.hex() for it in chunk_keys(ROOT, range(8), 4)]


def test_media_counts_from_the_first_of_these_tokens() -> None:
    wanted = chunk_keys(ROOT, TOKENS[:32], 8, (Media("sha256:cat", 10, 9),))
    keys = EngineKeys(ROOT, 8)
    assert keys.stored([1], None, TOKENS[:8]) == wanted[:1]
    assert keys.stored([2, 3, 4], 1, TOKENS[8:32], (Media("sha256:cat", 2, 9),)) == wanted[1:]


def test_an_unknown_parent_is_told_and_changes_nothing() -> None:
    keys = EngineKeys(ROOT, 4)
    assert keys.stored([2], 1, TOKENS[:4]) is None
    assert keys.unknown == 1 and len(keys) == 0 and keys.removed([2]) == []


def test_refusals_change_nothing() -> None:
    keys = EngineKeys(ROOT, 4)
    with pytest.raises(ValueError, match="not 3 tokens"):
        keys.stored([1], None, TOKENS[:3])
    with pytest.raises(OverflowError):
        keys.stored([1, 2], None, [*TOKENS[:7], 1 << 32])
    assert len(keys) == 0
    assert keys.stored([], None, []) == []


def test_cleared() -> None:
    keys = EngineKeys(ROOT, 4, 4)
    keys.stored([1, 2, 3, 4, 5], None, TOKENS[:20])
    keys.cleared()
    assert len(keys) == 0 and keys.lapsed() == [] and keys.stored([2], 1, TOKENS[:4]) is None


def test_memory_is_bounded_and_what_is_built_upon_stays() -> None:
    keys = EngineKeys(ROOT, 4, 32)
    wanted = chunk_keys(ROOT, TOKENS, 4)
    keys.stored(range(16), None, TOKENS)
    for name in range(100, 160):
        assert keys.stored([name], 3, [name] * 4) is not None
        assert len(keys) <= 32
    lapsed = keys.lapsed()
    assert set(wanted) - set(lapsed) == {wanted[3]} and keys.lapsed() == []
    assert keys.forgotten == len(lapsed) == 16 + 60 - len(keys)
    assert keys.removed([3, 15]) == [wanted[3]]
    assert repr(keys).startswith("EngineKeys(") and "32 hashes of 4 tokens, 1 unknown" in repr(keys)


def test_what_is_announced_again_stays() -> None:
    keys = EngineKeys(ROOT, 4, 16)
    keys.stored(range(16), None, TOKENS)
    keys.stored([0], None, TOKENS[:4])
    keys.stored([99], 15, TOKENS[:4])
    assert keys.lapsed() == chunk_keys(ROOT, TOKENS, 4)[1:3] and keys.removed([0]) != []


def test_a_hash_that_means_another_block_has_left_the_first() -> None:
    keys = EngineKeys(ROOT, 4)
    first = keys.stored([1, 2], None, TOKENS[:8])
    assert first is not None and keys.stored([1], None, TOKENS[:4]) == first[:1] and keys.lapsed() == []
    second = keys.stored([2], None, TOKENS[8:12])
    assert keys.lapsed() == first[1:] and keys.removed([2]) == second != first[1:]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["stored", "removed", "cleared"]), st.integers(0, 19), st.integers(1, 4))))
def test_against_a_model(script: list[tuple[str, int, int]]) -> None:
    """Events in any order and number: what is known is a plain map from hash to key."""
    draw = random.Random(4)
    parents = [None, *(draw.randrange(it) for it in range(1, 24))]
    blocks = [[draw.randrange(50_000) for _ in range(4)] for _ in parents]

    def path(name: int) -> list[int]:
        parent = parents[name]
        return [*(path(parent) if parent is not None else []), *blocks[name]]

    def key_of(name: int) -> ChunkKey:
        return chunk_keys(ROOT, path(name), 4)[-1]

    keys, model = EngineKeys(ROOT, 4), dict[int, ChunkKey]()
    for verb, name, count in script:
        if verb == "cleared":
            keys.cleared()
            model.clear()
        elif verb == "removed":
            names = list(range(name, name + count))
            assert keys.removed(names) == [model.pop(it) for it in names if it in model]
        else:
            parent = parents[name]
            found = keys.stored([name], parent, blocks[name])
            if parent is None or parent in model:
                model[name] = key_of(name)
                assert found == [model[name]]
            else:
                assert found is None
        assert len(keys) == len(model)
