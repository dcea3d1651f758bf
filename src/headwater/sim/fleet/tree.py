"""The prompts of a trace as one tree, cut at its forks into runs; see `pool`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

from headwater.errors import ConfigError
from headwater.sim.fleet.pool import Path
from headwater.traces.model import Trace

KEY_BYTES = 8
OWN = 1 << 62
"""Numbers from here on are of blocks that the trace says nothing about."""


class Keys(Sequence[bytes]):
    """The keys of a prompt's whole units, worked out when somebody looks at them: most policies never do."""

    __slots__ = ("_found", "_units")

    def __init__(self, units: npt.NDArray[np.int64]) -> None:
        self._units = units
        self._found: tuple[bytes, ...] | None = None

    @property
    def all(self) -> tuple[bytes, ...]:
        """Every one."""
        if self._found is None:
            whole = self._units.astype("<i8").tobytes()
            self._found = tuple(whole[at : at + KEY_BYTES] for at in range(0, len(whole), KEY_BYTES))
        return self._found

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.all)

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[bytes, ...]: ...

    def __getitem__(self, at: int | slice) -> bytes | tuple[bytes, ...]:
        return self.all[at]


class Tree:
    """What each request's prompt has in common with the others', in *units* of `unit_tokens`: the trace's blocks, or
    the engines' where those are larger.

    `units[i]` are the runs of request i's prompt, and how many units of each it has begun. `runs[run]` has a key for
    each unit of a run, `prompts[i]` those of request i's whole units.
    """

    def __init__(self, trace: Trace, unit_tokens: int) -> None:
        if unit_tokens % trace.block_tokens:
            raise ConfigError(
                f"block_tokens: engines' blocks of {unit_tokens} tokens do not fit the trace's of "
                f"{trace.block_tokens}; one must be a multiple of the other"
            )
        self.unit_tokens = unit_tokens
        rows = _rows(trace, unit_tokens)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(rows), np.int64, int(ends[-1]) if rows else 0)
        starts = [0, *ends[:-1].tolist()] if rows else []
        self.prompts = [
            Keys(flat[start : start + row.input_tokens // unit_tokens])
            for start, row in zip(starts, trace.requests, strict=True)
        ]
        begins, run_of = _cut(flat, np.array(starts, np.int64))
        self.runs = _longest(flat, begins, run_of)
        self.units = _paths(starts, len(flat), begins.tolist(), run_of.tolist())
        self._stems: dict[int, Path] = {}

    def stem(self, run: int) -> Path:
        """The runs before a run."""
        if not self._stems:
            self._stems = {run: path[:at] for path in self.units for at, (run, _) in enumerate(path)}
        return self._stems[run]

    def paths(self, trace: Trace, block_tokens: int) -> list[Path]:
        """Each prompt's whole blocks of an engine whose blocks are so large."""
        each, odd = divmod(self.unit_tokens, block_tokens)
        if odd:
            raise ConfigError(
                f"block_tokens: engines' blocks of {block_tokens} tokens do not fit units of {self.unit_tokens}; "
                "one must be a multiple of the other"
            )
        return [
            tuple(_blocks(path, each, row.input_tokens // block_tokens))
            for path, row in zip(self.units, trace.requests, strict=True)
        ]


def _rows(trace: Trace, unit_tokens: int) -> list[tuple[int, ...] | range]:
    """Each prompt's units. A unit of several blocks is known by the last of them."""
    step = unit_tokens // trace.block_tokens
    rows: list[tuple[int, ...] | range] = []
    own = OWN
    for row in trace.requests:
        count = -(-row.input_tokens // unit_tokens)
        if not row.blocks:
            rows.append(range(own, own + count))
            own += count
        elif step == 1:
            rows.append(row.blocks[:count])
        else:
            rows.append((*row.blocks[step - 1 :: step], row.blocks[-1])[:count])
    return rows


def _cut(
    flat: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where runs begin in the prompts laid end to end, and the number of each of those runs."""
    if not flat.size:
        return flat, flat
    units, number = np.unique(flat, return_inverse=True)
    is_start = np.zeros(flat.size, bool)
    is_start[starts[starts < flat.size]] = True
    parents, children = number[:-1][~is_start[1:]], number[1:][~is_start[1:]]
    least, most = np.full(units.size, units.size), np.full(units.size, -1)
    np.minimum.at(least, parents, children)
    np.maximum.at(most, parents, children)
    forks = (most >= 0) & (least != most)
    is_begin = is_start.copy()
    is_begin[1:] |= forks[number[:-1]]
    begins = np.flatnonzero(is_begin)
    return begins, np.unique(number[begins], return_inverse=True)[1]


def _longest(flat: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], run_of: npt.NDArray[np.int64]) -> list[Keys]:
    """Each run as far as any prompt goes in it."""
    lengths = np.diff(begins, append=flat.size)
    order = np.lexsort((lengths, run_of))
    is_last = np.diff(run_of[order], append=-1) != 0
    longest = order[is_last]
    return [Keys(flat[begin : begin + length]) for begin, length in zip(begins[longest], lengths[longest], strict=True)]


def _paths(starts: list[int], size: int, begins: list[int], run_of: list[int]) -> list[Path]:
    """Each prompt's runs, with the number of units that it has of each."""
    pieces = [(run, after - begin) for run, (begin, after) in zip(run_of, pairwise([*begins, size]), strict=True)]
    paths: list[Path] = []
    at = 0
    for end in [*starts[1:], size]:
        first = at
        while at < len(begins) and begins[at] < end:
            at += 1
        paths.append(tuple(pieces[first:at]))
    return paths if starts else []


def _blocks(path: Path, each: int, whole: int) -> Iterable[tuple[int, int]]:
    for run, units in path:
        blocks = min(units * each, whole)
        if blocks:
            yield run, blocks
        whole -= blocks
