"""Which bytes of a paged copy travel together: pure arithmetic over places, no device.

A piece is some blocks times some layers that fit one staging buffer and lie, on the host, one after another:

    positions  start ....... end        of the job's block list; their places are adjacent
    layers     first .. first + layers
    bytes      [layer][block][block_bytes] in staging; on the host the same, where `whole`: one copy a piece.
               Not whole (a chunk of which only some blocks are wanted): one copy a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headwater.ports import Addresses


@dataclass(frozen=True, slots=True)
class Piece:
    """See the module; `address` is the host address of its first byte."""

    start: int
    end: int
    first: int
    layers: int
    address: int
    whole: bool

    @property
    def blocks(self) -> int:
        """How many blocks it has of each layer."""
        return self.end - self.start


def split(
    places: Addresses, block_bytes: int, layers: int, layer_stride_bytes: int, piece_bytes: int
) -> list[list[Piece]]:
    """The pieces of a job, grouped by layers: each group is complete in its layers, and groups go by layer.

    No piece is above `piece_bytes`, which is at least `block_bytes`.
    """
    spans = _spans(places, block_bytes, piece_bytes // block_bytes)
    if not spans:
        return []
    widest = max(end - start for start, end in spans)
    step = max(1, min(layers, piece_bytes // (widest * block_bytes)))
    groups = []
    for first in range(0, layers, step):
        count = min(step, layers - first)
        group = []
        for start, end in spans:
            whole = (end - start) * block_bytes == layer_stride_bytes
            address = int(places[start]) + first * layer_stride_bytes
            group.append(Piece(start, end, first, count, address, whole))
        groups.append(group)
    return groups


def _spans(places: Addresses, block_bytes: int, longest: int) -> list[tuple[int, int]]:
    """Runs of positions with adjacent places, cut into spans of at most `longest` blocks."""
    breaks = np.flatnonzero(np.diff(places) != np.uint64(block_bytes)) + 1
    spans = []
    for start, end in pairwise([0, *breaks.tolist(), len(places)] if len(places) else []):
        spans += [(it, min(it + longest, end)) for it in range(start, end, longest)]
    return spans
