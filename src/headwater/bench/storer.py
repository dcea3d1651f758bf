"""Our side of `bench store`: a client of our Store, and a node; `python -m headwater.bench.storer TOTAL_BYTES`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from headwater.bench import objects
from headwater.bench.peers import Peer, node_process
from headwater.ports import Bytes
from headwater.store import Outcome, Store

CALL_S = 30.0
ROOM = 4
"""So many times the bytes of the objects of one size."""


class Ours:
    """Objects in one node."""

    def __init__(self, store: Store, node: Peer) -> None:
        self._store, self._node = store, node

    def put(self, items: Mapping[str, Bytes]) -> None:
        """See `objects.Shelf`."""
        for it in self._store.put(list(items.items())):
            if it.outcome is not Outcome.DONE:
                raise SystemExit(f"put: {it.outcome.name} {it.reason}")

    def get(self, key: str) -> bytes:
        """See `objects.Shelf`."""
        (found,) = self._store.get([key])
        if found is None:
            raise SystemExit(f"get: {key} is not there")
        return found

    def into(self, keys: Sequence[str], places: Sequence[Bytes]) -> None:
        """See `objects.Shelf`."""
        for it in self._store.get_into(keys, places):
            if it.outcome is not Outcome.DONE:
                raise SystemExit(f"get_into: {it.outcome.name} {it.reason}")

    def exists(self, keys: Sequence[str]) -> int:
        """See `objects.Shelf`."""
        return sum(self._store.exists(keys))

    def register(self, memory: Bytes) -> None:
        """See `objects.Shelf`: any memory will do."""

    def processes(self) -> Sequence[int]:
        """See `objects.Shelf`."""
        return [self._node.pid]

    def control(self, words: Sequence[str]) -> dict[str, Any]:
        """See `objects.Shelf`."""
        raise SystemExit(f"cannot {words[0]}")


if __name__ == "__main__":
    total_bytes = int(sys.argv[1])
    with node_process(ROOM * total_bytes) as its_node, closing(Store(its_node.address, call_s=CALL_S)) as its_store:
        objects.main(Ours(its_store, its_node), total_bytes)
