"""What every run on a trace needs to know of it, worked out once: its prompts as trees, and its columns."""

from __future__ import annotations

import numpy as np

from headwater.sim.fleet.pool import Path
from headwater.sim.fleet.tree import Tree
from headwater.traces.model import Trace


class Prepared:
    """A trace's columns, and its trees by the size of their units. Runs only read it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        rows = trace.requests
        self.names = [str(number) for number in range(len(rows))]
        self.arrival_s = np.array([row.arrival_s for row in rows], np.float64)
        self.input_tokens = np.array([row.input_tokens for row in rows], np.int64)
        self.output_tokens = np.array([row.output_tokens for row in rows], np.int64)
        tenants = tuple(row.tenant for row in rows)
        self.tenants = tenants if any(tenants) else ()
        self.named = any(row.tenant or row.kind for row in rows)
        """Whether requests differ in more than their lengths."""
        self._trees: dict[int, Tree] = {}
        self._paths: dict[tuple[int, int], list[Path]] = {}

    def __repr__(self) -> str:
        return f"<Prepared {self.trace.name}: {len(self.names)} requests, units of {sorted(self._trees)}>"

    def tree(self, unit_tokens: int) -> Tree:
        """The prompts in units of that size. Raises ConfigError if the trace's blocks do not fit them."""
        tree = self._trees.get(unit_tokens)
        if tree is None:
            tree = self._trees[unit_tokens] = Tree(self.trace, unit_tokens)
        return tree

    def paths(self, unit_tokens: int, block_tokens: int) -> list[Path]:
        """Each prompt's whole blocks of an engine whose blocks are so large, in that tree."""
        paths = self._paths.get((unit_tokens, block_tokens))
        if paths is None:
            paths = self._paths[unit_tokens, block_tokens] = self.tree(unit_tokens).paths(self.trace, block_tokens)
        return paths


_LATEST: list[Prepared] = []
"""Runs of a sweep come one after another, all on the same trace."""


def prepare(trace: Trace) -> Prepared:
    """What there is to know of a trace; of the one that was asked for last it is known already."""
    for known in _LATEST:
        if known.trace is trace:
            return known
    prepared = Prepared(trace)
    _LATEST[:] = [prepared]
    return prepared
