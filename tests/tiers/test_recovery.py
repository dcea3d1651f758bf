"""What a restart believes of a journal that missed something, and in which order chunks come back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.ports import Piece
from headwater.tiers.direct_io import aligned_buffer
from headwater.tiers.journal import ROW
from headwater.tiers.recovery import Recovered, consistent, parents_first
from headwater.tiers.slab_files import SlabFiles
from headwater.types import PAGE_BYTES, HitRule, Identity, Outcome
from tests.tiers.disks import LARGE, SLAB_BYTES, SMALL, Slots, chunk, content, opened, origin, read_back

SLOT, LARGE_SLOT = 3 * PAGE_BYTES, 6 * PAGE_BYTES
ORIGINS = {1: SMALL, 2: LARGE}
SEGMENT = 1 << 40


@dataclass
class Files:
    """As much of slab files as matters here: two segments of four slabs, the second one cut to three."""

    kept: tuple[int, ...] = (4 * SLAB_BYTES, 3 * SLAB_BYTES)
    slab_bytes: int = SLAB_BYTES


def believed(*notes: tuple[int, object, int], number: int | None = None, size: int = 0) -> list[tuple[int, str]]:
    """Of notes (place, name, origin), from old to young, those that are believed."""
    rows = np.zeros(len(notes), ROW)
    names = {}
    for age, (place, name, of) in enumerate(notes):
        it = chunk(name, ORIGINS.get(of, SMALL))
        names[it.key] = str(name)
        row = rows[age]
        row["place"], row["age"], row["origin"], row["key"] = place, age, of, np.void(it.key)
        row["slot_bytes"] = size or (LARGE_SLOT if of == 2 else SLOT)
    found, wrong = consistent(rows, ORIGINS, cast("SlabFiles", Files()), slot_bytes)
    assert sorted([it.place for it in found] + wrong) == sorted(place for place, _, _ in notes)
    return [(it.place, names[it.identity.key]) for it in found]


def slot_bytes(identity: Identity) -> int:
    return PAGE_BYTES + identity.length_bytes


def test_what_agrees_is_believed() -> None:
    notes = [(0, "a", 1), (SLOT, "b", 1), (SLAB_BYTES, "a", 2), (SEGMENT + LARGE_SLOT, "b", 2)]
    assert believed(*notes) == [(place, name) for place, name, _ in notes]
    assert believed() == []


def test_of_two_slot_sizes_in_a_slab_the_younger_counts() -> None:
    assert believed((0, "a", 1), (SLOT, "b", 1), (LARGE_SLOT, "c", 2)) == [(LARGE_SLOT, "c")]
    assert believed((0, "c", 2), (4 * SLOT, "a", 1), (SEGMENT, "d", 2)) == [(4 * SLOT, "a"), (SEGMENT, "d")]


def test_of_two_slots_for_a_chunk_the_younger_counts() -> None:
    assert believed((0, "a", 1), (SLOT, "b", 1), (2 * SLOT, "a", 1)) == [(SLOT, "b"), (2 * SLOT, "a")]
    assert believed((0, "a", 1), (SEGMENT, "a", 2)) == [(0, "a"), (SEGMENT, "a")], "these are two chunks"


def test_of_two_chunks_in_a_slot_the_younger_counts() -> None:
    assert believed((0, "a", 1), (0, "b", 1)) == [(0, "b")]


@pytest.mark.parametrize(
    "place",
    [
        1,
        SLOT + PAGE_BYTES,
        5 * SLOT,  # the rest of a slab
        4 * SLAB_BYTES,  # behind a segment
        SEGMENT + 3 * SLAB_BYTES,  # behind what was kept of a segment
        2 * SEGMENT,
        (1 << 62),
    ],
)
def test_where_no_slot_can_be_nothing_is(place: int) -> None:
    assert believed((place, "a", 1), (SEGMENT, "b", 1)) == [(SEGMENT, "b")]


def test_what_nothing_is_known_of_is_not_believed() -> None:
    assert believed((0, "a", 3)) == []
    assert believed((0, "a", 1), size=SLOT + PAGE_BYTES) == []
    assert believed((0, "a", 1), size=1 << 62) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 60).map(lambda it: it * PAGE_BYTES), st.integers(0, 9), st.sampled_from([1, 2])),
        max_size=40,
    )
)
def test_what_is_believed_never_overlaps(notes: Sequence[tuple[int, object, int]]) -> None:
    rows = np.zeros(len(notes), ROW)
    for age, (place, name, of) in enumerate(notes):
        rows[age]["place"], rows[age]["age"], rows[age]["origin"] = place, age, of
        rows[age]["key"] = np.void(chunk(name, ORIGINS[of]).key)
        rows[age]["slot_bytes"] = LARGE_SLOT if of == 2 else SLOT
    found, _ = consistent(rows, ORIGINS, cast("SlabFiles", Files()), slot_bytes)
    taken = sorted((it.place, it.place + it.slot_bytes) for it in found)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    assert len({it.identity for it in found}) == len(found)


def test_a_scan_prefers_the_copy_that_is_whole(tmp_path: Path) -> None:
    """A chunk that was torn, and later stored elsewhere; in both orders of their places."""
    for torn in (0, 1):
        directory = tmp_path / str(torn)
        with opened(directory) as tier:
            slots = Slots(tier)
            pieces = [slots.store([chunk("x")])[0] for _ in range(2)]
            tier._files.write(pieces[torn].place + 2 * PAGE_BYTES, [aligned_buffer(PAGE_BYTES)])
        (directory / "journal-1.db").unlink()
        with opened(directory) as tier:
            (found,) = tier.recover()
            assert found.place == pieces[1 - torn].place
            assert read_back(tier, [Piece(found.identity, content(found.identity), found.place)]) == [Outcome.DONE]


# ---- the order of what comes back --------------------------------------------------------------------------


@given(
    parents=st.lists(st.integers(-3, 30), max_size=30),
    shuffled=st.randoms(use_true_random=False),
    hybrid=st.booleans(),
)
def test_parents_come_first_in_any_tree(parents: list[int], shuffled: random.Random, hybrid: bool) -> None:
    """Entry i hangs on entry parents[i]: an earlier one, a later one, itself, one that is not there, or none (< 0)."""
    of = origin(2, rules=(HitRule.WINDOW, HitRule.ALL)) if hybrid else SMALL
    main = 1 if hybrid else 0
    found = []
    for number, parent in enumerate(parents):
        above = chunk(parent, of) if parent >= 0 else None
        for group in range(2 if hybrid else 1):
            found.append(Recovered(chunk(number, of, above, group), len(found) * SLOT, SLOT))
    shuffled.shuffle(found)
    ordered = list(parents_first(found))
    assert sorted(ordered, key=lambda it: it.place) == sorted(found, key=lambda it: it.place)
    at = {(it.identity.group, it.identity.key): position for position, it in enumerate(ordered)}
    for number, parent in enumerate(parents):
        seen, line = set(), number
        while 0 <= line < len(parents) and line not in seen:
            seen.add(line)
            line = parents[line]
        if 0 <= line < len(parents):
            continue  # they hang on each other
        mine = at[main, chunk(number, of).key]
        if 0 <= parent < len(parents):
            assert at[main, chunk(parent, of).key] < mine
        if hybrid:
            assert mine < at[0, chunk(number, of).key]


def test_without_a_tree_the_order_is_that_of_age() -> None:
    flat = origin(2, rules=(HitRule.WINDOW, HitRule.LAST))
    found = [Recovered(chunk(number, flat, chunk(number + 1, flat)), number * SLOT, SLOT) for number in range(9)]
    assert list(parents_first(found)) == found
