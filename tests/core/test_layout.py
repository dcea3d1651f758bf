"""Where bytes of a chunk are, and how much of a prefix is usable, against models that only count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.layout import companions, longest_usable, main_group, needed_chunks
from headwater.types import PAGE_BYTES, Extent, HitRule, KVGroup, KVLayout, align
from tests.core.examples import dense, group, hybrid

LLAMA_8B_TP2 = KVGroup(block_tokens=16, block_bytes=2 * 16 * 4 * 128 * 2, shard_layers=(32, 32))
MLA = KVGroup(block_tokens=64, block_bytes=64 * (512 + 64) * 2, shard_layers=(61,))
ODD_HEADS = KVGroup(block_tokens=16, block_bytes=2 * 16 * 3 * 83 * 2, shard_layers=(7,))
STAGES = KVGroup(block_tokens=16, block_bytes=1000, shard_layers=(5, 5, 3, 3))

rules = st.one_of(
    st.just((HitRule.ALL, 0)),
    st.just((HitRule.LAST, 0)),
    st.tuples(st.just(HitRule.WINDOW), st.integers(1, 40)),
)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    shards, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        rule, window = draw(rules)
        block_tokens = draw(st.sampled_from([1, 2, 4]))
        layers = tuple(draw(st.lists(st.integers(1, 5), min_size=shards, max_size=shards)))
        groups.append(KVGroup(block_tokens, draw(st.integers(1, 9000)), layers, rule, window))
    return KVLayout(4 * blocks, tuple(groups))


@given(layouts())
def test_parts_are_page_aligned_disjoint_and_fill_the_slot(layout: KVLayout) -> None:
    assert layout.problem() is None
    for index in range(len(layout.groups)):
        end = 0
        for shard in range(layout.shards):
            offset, size = layout.part_offset(index, shard), layout.part_bytes(index, shard)
            assert offset % PAGE_BYTES == 0
            assert offset == align(end)
            assert size == layout.groups[index].shard_layers[shard] * layout.layer_stride_bytes(index)
            end = offset + size
        assert layout.slot_bytes(index) == align(end)


@pytest.mark.parametrize(
    ("one", "chunk_tokens", "parts", "slot_bytes"),
    [
        (LLAMA_8B_TP2, 256, [16 << 20, 16 << 20], 32 << 20),
        # Latent KV is alike on every rank: one shard, written once, whatever the number of ranks.
        (MLA, 256, [61 * 4 * 73728], 61 * 4 * 73728),
        (ODD_HEADS, 16, [7 * 15936], 28 * PAGE_BYTES),
        (STAGES, 32, [10_000, 10_000, 6_000, 6_000], 10 * PAGE_BYTES),
    ],
)
def test_shapes_of_known_attention_kinds(one: KVGroup, chunk_tokens: int, parts: list[int], slot_bytes: int) -> None:
    layout = KVLayout(chunk_tokens, (one,))
    assert layout.problem() is None
    assert [layout.part_bytes(0, shard) for shard in range(layout.shards)] == parts
    assert layout.slot_bytes(0) == slot_bytes
    assert layout.blocks_per_chunk(0) * one.block_tokens == chunk_tokens


def test_later_shards_start_on_the_next_page() -> None:
    layout = KVLayout(32, (STAGES,))
    assert [layout.part_offset(0, shard) // PAGE_BYTES for shard in range(4)] == [0, 3, 6, 8]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (KVLayout(4, ()), "at least one KV group"),
        (KVLayout(0, (group(),)), "chunk_tokens=0"),
        (KVLayout(5, (group(),)), "not a multiple of layout.groups[0].block_tokens=2"),
        (hybrid(group(), replace(group(), block_bytes=0)), "layout.groups[1]: block_tokens=2, block_bytes=0"),
        (hybrid(replace(group(), block_tokens=-2)), "block_tokens=-2"),
        (hybrid(group(shards=2), group(shards=1)), "layout.groups[1].shard_layers=(1,)"),
        (hybrid(replace(group(), shard_layers=())), "shard_layers=()"),
        (hybrid(replace(group(), shard_layers=(1, 0))), "shard_layers=(1, 0)"),
        (hybrid(group(HitRule.WINDOW)), "window_tokens=0 does not fit rule=window"),
        (hybrid(group(HitRule.ALL, window_tokens=3)), "window_tokens=3 does not fit rule=all"),
    ],
)
def test_an_impossible_layout_is_named(layout: KVLayout, words: str) -> None:
    assert words in str(layout.problem())


@given(layouts(), layouts())
def test_fingerprints_are_equal_exactly_for_equal_layouts(one: KVLayout, other: KVLayout) -> None:
    assert (one.fingerprint() == other.fingerprint()) == (one == other)


def test_a_layout_change_of_equal_size_changes_the_fingerprint() -> None:
    base = hybrid(group(pages=2), group(HitRule.WINDOW, window_tokens=4))
    others = [
        hybrid(group(HitRule.WINDOW, window_tokens=4), group(pages=2)),
        hybrid(group(pages=2), group(HitRule.WINDOW, window_tokens=5)),
        hybrid(group(pages=2), group(HitRule.LAST)),
        hybrid(replace(group(pages=2), block_tokens=4, block_bytes=2 * PAGE_BYTES), base.groups[1]),
        hybrid(group(), group(HitRule.WINDOW, window_tokens=4)),
    ]
    assert len({base.fingerprint(), *(it.fingerprint() for it in others)}) == 6


def is_usable(layout: KVLayout, present: dict[int, list[bool]], chunks: int) -> bool:
    """The hit rules in tokens: can attention compute token number chunks * chunk_tokens?"""
    end = chunks * layout.chunk_tokens
    for index, flags in present.items():
        it = layout.groups[index]
        reach = {HitRule.ALL: end, HitRule.WINDOW: it.window_tokens, HitRule.LAST: 1}[it.rule]
        if not all(flags[token // layout.chunk_tokens] for token in range(max(end - reach, 0), end)):
            return False
    return True


@given(layouts(), st.data())
def test_the_longest_usable_prefix_is_what_every_group_has(layout: KVLayout, data: st.DataObject) -> None:
    limit = data.draw(st.integers(0, 12))
    flags = st.lists(st.sampled_from([True, True, True, False]), min_size=limit, max_size=limit)
    present = {index: data.draw(flags) for index in range(len(layout.groups))}
    expected = max(chunks for chunks in range(limit + 1) if chunks == 0 or is_usable(layout, present, chunks))
    assert longest_usable(layout, present, limit) == expected


@given(layouts(), st.integers(0, 20))
def test_needed_chunks_are_those_that_the_rule_reads(layout: KVLayout, chunks: int) -> None:
    for index in range(len(layout.groups)):
        all_there = {index: [True] * chunks}
        needed = needed_chunks(layout, index, chunks)
        for position in range(chunks):
            flags = all_there[index].copy()
            flags[position] = False
            assert (position in needed) != is_usable(layout, {index: flags}, chunks)
        assert len(needed) <= chunks
        assert not chunks or needed.stop == chunks


def test_the_main_group_is_the_first_that_needs_every_chunk() -> None:
    window = group(HitRule.WINDOW, window_tokens=4)
    assert (main_group(dense()), companions(dense())) == (0, ())
    mixed = hybrid(window, group(), group(pages=2))
    assert (main_group(mixed), companions(mixed)) == (1, (0, 2))
    recurrent = hybrid(window, group(HitRule.LAST))
    assert (main_group(recurrent), companions(recurrent)) == (None, (0, 1))


def test_an_extent_has_one_address() -> None:
    assert Extent(0, 4096, 10).address == 4096
    assert Extent(3, 8192, 10).address == (3 << 40) + 8192
