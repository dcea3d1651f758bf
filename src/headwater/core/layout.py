"""Hit rules: how much of a prefix is usable, and which chunks of it a reader needs.

A cached prefix is usable only up to the point where every KV group has what its rule asks for:

    chunks      0    1    2    3    4 | n = 5 usable chunks
    ALL         x    x    x    x    x
    WINDOW(w)                  x    x   those that cover the last w tokens before token n * chunk_tokens
    LAST                            x   the state after chunk n - 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from headwater.types import HitRule, KVLayout


@lru_cache(maxsize=256)
def main_group(layout: KVLayout) -> int | None:
    """The first group that needs every chunk: the one whose rows form the prefix tree; None if there is none."""
    for index, group in enumerate(layout.groups):
        if group.rule is HitRule.ALL:
            return index
    return None


@lru_cache(maxsize=256)
def companions(layout: KVLayout) -> tuple[int, ...]:
    """All groups but the main one."""
    main = main_group(layout)
    return tuple(index for index in range(len(layout.groups)) if index != main)


def needed_chunks(layout: KVLayout, group: int, chunks: int) -> range:
    """The chunks of a usable prefix of `chunks` chunks that a group's layers read."""
    it = layout.groups[group]
    if it.rule is HitRule.ALL:
        return range(chunks)
    if it.rule is HitRule.LAST:
        return range(max(chunks - 1, 0), chunks)
    first_token = max(chunks * layout.chunk_tokens - it.window_tokens, 0)
    return range(first_token // layout.chunk_tokens, chunks)


def longest_usable(layout: KVLayout, present: Mapping[int, Sequence[bool]], limit: int) -> int:
    """The longest prefix of at most `limit` chunks that every group in `present` can serve.

    `present[g][i]` says whether group g's part of chunk i is there.
    """
    runs = {group: _runs(flags) for group, flags in present.items()}
    for chunks in range(limit, 0, -1):
        if all(runs[group][chunks - 1] >= len(needed_chunks(layout, group, chunks)) for group in present):
            return chunks
    return 0


def _runs(flags: Sequence[bool]) -> list[int]:
    """For each position, how many chunks in a row end there."""
    runs, length = [], 0
    for flag in flags:
        length = length + 1 if flag else 0
        runs.append(length)
    return runs
