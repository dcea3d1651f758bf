"""The chunks that wait to go down to a level: each tenant's in a line of its own, and the lines take turns.

So a tenant that writes more than the level can take keeps only itself waiting, and when too many wait, it is the one
with the longest line whose oldest chunk gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping

from headwater.types import ChunkKey

Chunk = tuple[int, ChunkKey]
"""A namespace's number and a key."""


class Waiting(MutableMapping[Chunk, bool]):
    """Chunks in the order in which they came, by tenant; the value says that a chunk was tried before."""

    def __init__(self) -> None:
        self.tenant_of: Callable[[int], str] = _nobody
        """Whose a namespace is; to be set before anything waits."""
        self._lines: OrderedDict[str, OrderedDict[Chunk, bool]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Chunk]:
        return (chunk for line in self._lines.values() for chunk in line)

    def __getitem__(self, chunk: Chunk) -> bool:
        return self._lines[self.tenant_of(chunk[0])][chunk]

    def __setitem__(self, chunk: Chunk, again: bool) -> None:
        line = self._lines.setdefault(self.tenant_of(chunk[0]), OrderedDict())
        self._count += chunk not in line
        line[chunk] = again

    def __delitem__(self, chunk: Chunk) -> None:
        tenant = self.tenant_of(chunk[0])
        line = self._lines[tenant]
        del line[chunk]
        self._count -= 1
        if not line:
            del self._lines[tenant]

    def put_first(self, chunk: Chunk, *, again: bool) -> None:
        """It is the next of all."""
        self[chunk] = again
        tenant = self.tenant_of(chunk[0])
        self._lines[tenant].move_to_end(chunk, last=False)
        self._lines.move_to_end(tenant, last=False)

    def take_next(self) -> tuple[Chunk, bool]:
        """Take the oldest out of the line whose turn it is; there must be one."""
        tenant, line = next(iter(self._lines.items()))
        self._lines.move_to_end(tenant)
        chunk, again = next(iter(line.items()))
        del self[chunk]
        return chunk, again

    def peek(self, space: int) -> tuple[Chunk, bool] | None:
        """The oldest in the line of a namespace's tenant."""
        line = self._lines.get(self.tenant_of(space))
        return next(iter(line.items())) if line else None

    def drop_one(self) -> None:
        """The oldest of the longest line gives way."""
        line = max(self._lines.values(), key=len)
        del self[next(iter(line))]


def _nobody(space: int) -> str:
    """All namespaces are one tenant's."""
    return ""
