"""The rows of a node's cache: one a replica, in columns, so that a million rows stay small.

A row is named by its number, which is re-used after the row is freed. Rows form a forest: the parent of a
chunk is the chunk before it, the parent of a companion (another KV group's part of a chunk) is the chunk.

    parent <──────── row ────────> first_child
                     │  elder / next: the doubly linked list of its siblings
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterator, Sequence

from headwater.types import ChunkKey

NONE = -1


class State(enum.IntEnum):
    """FREE rows are not in use. RESERVED: being written. READY: readable. DOOMED: not findable any more, but
    its slot is kept from re-use until its writers are known to have stopped (quarantine), or its last readers."""

    FREE = 0
    RESERVED = 1
    READY = 2
    DOOMED = 3


class Entries:
    """Columns of replicas and the links between them; no decisions here."""

    def __init__(self) -> None:
        self.keys: list[ChunkKey] = []
        self.address = array("Q")
        self.state = array("b")
        self.leases = array("I")
        self.space = array("H")
        self.group = array("B")
        self.parent = array("i")
        self._first_child, self._next, self._elder = array("i"), array("i"), array("i")
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.keys) - len(self._free)

    @property
    def has_free(self) -> bool:
        """Whether rows were freed whose numbers are not yet used again."""
        return bool(self._free)

    def next_row(self) -> int:
        """The number that `add` will give to the next row."""
        return self._free[-1] if self._free else len(self.keys)

    def add(self, key: ChunkKey, space: int, group: int, address: int, parent: int) -> int:
        """A new RESERVED row under `parent` (or NONE)."""
        if self._free:
            row = self._free.pop()
        else:
            row = len(self.keys)
            self.keys.append(key)
            for column in (self.address, self.state, self.leases, self.space, self.group):
                column.append(0)
            for links in (self.parent, self._first_child, self._next, self._elder):
                links.append(NONE)
        if parent != NONE:
            assert parent != row and self.state[parent] in (State.RESERVED, State.READY), f"parent {parent} is gone"
        self.keys[row], self.address[row] = key, address
        self.space[row], self.group[row], self.leases[row] = space, group, 0
        self.state[row] = State.RESERVED
        self.parent[row], self._first_child[row], self._elder[row], self._next[row] = parent, NONE, NONE, NONE
        if parent != NONE:
            head = self._first_child[parent]
            self._next[row] = head
            if head != NONE:
                self._elder[head] = row
            self._first_child[parent] = row
        return row

    def detach(self, row: int) -> None:
        """Take a row out of its parent's children."""
        parent, elder, younger = self.parent[row], self._elder[row], self._next[row]
        if elder != NONE:
            self._next[elder] = younger
        elif parent != NONE:
            self._first_child[parent] = younger
        if younger != NONE:
            self._elder[younger] = elder
        self.parent[row] = self._elder[row] = self._next[row] = NONE

    def unlink(self, rows: Sequence[int], stays: Collection[int]) -> None:
        """Detach rows from their parents and children. A child of one of them is among `rows`, or is unlinked later;
        a parent, too, unless it `stays`."""
        parent, first_child, elder, following = self.parent, self._first_child, self._elder, self._next
        if stays:
            for row in rows:
                if parent[row] in stays:
                    self.detach(row)
        for row in rows:
            parent[row] = first_child[row] = elder[row] = following[row] = NONE

    def free(self, row: int) -> None:
        """Give a detached row's number back."""
        assert self.state[row] != State.FREE, f"row {row} is freed twice"
        assert self.parent[row] == NONE and self._first_child[row] == NONE, f"row {row} is still linked"
        assert not self.leases[row], f"row {row} is freed with {self.leases[row]} leases"
        self.state[row] = State.FREE
        self.keys[row] = ChunkKey(b"")
        self._free.append(row)

    def free_all(self, rows: Sequence[int]) -> None:
        """Give the numbers of many unlinked rows back."""
        state, leases, keys = self.state, self.leases, self.keys
        free, nothing = int(State.FREE), ChunkKey(b"")
        for row in rows:
            assert state[row] != free and not leases[row], f"row {row} is freed twice, or with {leases[row]} leases"
            state[row] = free
            keys[row] = nothing
        self._free.extend(rows)

    def is_leaf(self, row: int) -> bool:
        """Whether nothing resident hangs on this row."""
        return self._first_child[row] == NONE

    def children(self, row: int) -> Iterator[int]:
        """The rows right under a row."""
        child = self._first_child[row]
        while child != NONE:
            yield child
            child = self._next[child]

    def subtree(self, row: int) -> list[int]:
        """A row and all its descendants, ancestors first."""
        found = [row]
        for it in found:
            found.extend(self.children(it))
        return found
