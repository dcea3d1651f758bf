"""Prompts that were tokenised lately, by the digest of all that their ids depend on; the texts are not kept."""

from __future__ import annotations

from array import array
from collections import OrderedDict

ENTRY_BYTES = 256
"""What an entry takes beside its ids."""


class Memo:
    """Digest to ids, in a bounded number of bytes; what was not asked for longest goes first."""

    def __init__(self, size_bytes: int) -> None:
        self._room = size_bytes
        self._rows: OrderedDict[bytes, array[int]] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: bytes) -> array[int] | None:
        """A prompt's ids, if they are known. They are shared: nobody changes them."""
        ids = self._rows.get(digest)
        if ids is not None:
            self._rows.move_to_end(digest)
        return ids

    def put(self, digest: bytes, ids: array[int]) -> None:
        """Remember a prompt's ids, unless they alone would take more than a quarter of the room."""
        if digest in self._rows or cost(ids) > self._room // 4:
            return
        self._rows[digest] = ids
        self.used_bytes += cost(ids)
        while self.used_bytes > self._room:
            _, gone = self._rows.popitem(last=False)
            self.used_bytes -= cost(gone)

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()
        self.used_bytes = 0


def cost(ids: array[int]) -> int:
    """The bytes that an entry takes."""
    return ENTRY_BYTES + ids.itemsize * len(ids)
