"""How a model's prompts become keys: the roots that its instances and nodes count from, and the tokens of a key.

Theory of operation. Of each model there are *ways* to count: (record, tokens a key). Nodes count chunks in the record
that the plug-in registered with them. What engines announce is counted by their blocks, in the model's *home* record:
the first that was registered for the model, so that where blocks are as large as chunks one way does for both; until
there is one, in a record of our own, that no plug-in has. When the home changes (its record is not registered any more
while another one is), everything that engines said is to be counted anew.

The root of a request with a salt is that of the record with this salt, exactly as the plug-in makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headwater._kernels.keys import chunk_keys
from headwater.types import Namespace

ROOTS_MAX = 4096
RECORDS_MAX = 8
"""Of one model: each costs every request of it some time."""


class Base(NamedTuple):
    """A registered record, without its salt, and the root of requests without one."""

    root: bytes
    record: Namespace


class Way(NamedTuple):
    """One way to count a model's tokens."""

    base: Base
    tokens: int


class Registration(NamedTuple):
    """What an engine's plug-in has told a node: `instance` is what the plug-in calls itself."""

    instance: str
    base: Base
    chunk_tokens: int
    kv_bytes_per_token: int


class Roots:
    """The roots of records with salts; the last few thousand are kept."""

    def __init__(self) -> None:
        self._roots: dict[tuple[bytes, str], bytes] = {}

    def __len__(self) -> int:
        return len(self._roots)

    def root(self, base: Base, salt: str) -> bytes:
        """Where a request's keys begin."""
        if not salt:
            return base.root
        found = self._roots.get((base.root, salt))
        if found is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            found = self._roots[base.root, salt] = replace(base.record, adapter="", salt=salt).root()
        return found

    def keys(self, way: Way, salt: str, ids: Sequence[int]) -> Sequence[bytes]:
        """The keys of a prompt. Raises OverflowError or TypeError for what is no token id."""
        return chunk_keys(self.root(way.base, salt), ids, way.tokens)


def own_base(model: str) -> Base:
    """The record of a model that no plug-in has told us of."""
    record = Namespace(model, "", "conductor", "")
    return Base(record.root(), record)


class Model:
    """One served model's ways to count."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.home = own_base(name)
        self.is_registered = False
        self.kv_bytes_per_token = 0
        self.ways: tuple[Way, ...] = ()
        """Those that matter now, in an order of their own."""
        self._chunks: list[Way] = []
        self._blocks: list[int] = []

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {len(self.ways)} ways, {'registered' if self.is_registered else 'unregistered'})"

    def registered(self, registrations: Sequence[Registration]) -> bool:
        """These are all that its plug-ins have registered now, one at least; whether it has a new home."""
        self._chunks = list(dict.fromkeys(Way(it.base, it.chunk_tokens) for it in registrations))[:RECORDS_MAX]
        bases = [it.base for it in self._chunks]
        moves = self.home not in bases
        if moves:
            self.home, self.is_registered = bases[0], True
        self.kv_bytes_per_token = next((it.kv_bytes_per_token for it in registrations if it.base == self.home), 0)
        self._plan()
        return moves

    def is_chunks(self, way: Way) -> bool:
        """Whether nodes count so."""
        return way in self._chunks

    def block_way(self, tokens: int) -> Way:
        """How an engine with blocks of so many tokens is counted."""
        return Way(self.home, tokens)

    def has_blocks(self, sizes: Sequence[int]) -> None:
        """Its instances have blocks of these sizes."""
        self._blocks = list(dict.fromkeys(sizes))
        self._plan()

    def _plan(self) -> None:
        ways = tuple(dict.fromkeys([*map(self.block_way, self._blocks), *self._chunks]))
        if ways != self.ways:
            self.ways = ways
