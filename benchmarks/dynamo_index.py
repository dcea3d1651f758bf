"""Dynamo's RadixTree, told and asked one turn at a time; run by Dynamo's Python.

    PYTHONPATH=src .cache/peers/dynamo/bin/python benchmarks/dynamo_index.py INSTANCES BLOCKS CHAIN_BLOCKS

See `headwater.bench.holdings` for what it is asked and answers. Its events are JSON, which is made before the clock
starts and read by it; its questions are lists of integers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dynamo._core import RadixTree

from headwater.bench import holdings
from headwater.bench.holdings import Span, numbers_of

BITS = 63


class Tree:
    """The tree as an index of instances."""

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._events = 0

    def stored(self, instance: int, span: Span) -> Callable[[], object]:
        """See `holdings.Index`."""
        before = numbers_of(Span(span.chain, 0, span.first), BITS)
        numbers = numbers_of(span, BITS)
        blocks = [{"block_hash": it, "tokens_hash": it} for it in numbers]
        return self._event(instance, {"stored": {"parent_hash": before[-1] if before else None, "blocks": blocks}})

    def removed(self, instance: int, span: Span) -> Callable[[], object]:
        """See `holdings.Index`."""
        return self._event(instance, {"removed": {"block_hashes": numbers_of(span, BITS)}})

    def question(self, spans: Sequence[Span]) -> Callable[[], Any]:
        """See `holdings.Index`."""
        return partial(self._ask, [number for span in spans for number in numbers_of(span, BITS)])

    def lengths(self, answer: Any) -> dict[int, int]:
        """See `holdings.Index`."""
        return {instance: blocks for (instance, _), blocks in answer.items()}

    def _event(self, instance: int, data: object) -> Callable[[], object]:
        self._events += 1
        event = {"event_id": self._events, "dp_rank": 0, "data": data}
        return partial(self._tree.apply_event, instance, json.dumps(event).encode())

    def _ask(self, numbers: list[int]) -> object:
        return self._tree.find_matches(numbers).scores


if __name__ == "__main__":
    holdings.main(Tree(), *map(int, sys.argv[1:4]))
