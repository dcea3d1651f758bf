"""Heads that were seen before, but for their Content-Length: most of those that come.

A client's heads differ in the length of the body only, an instance's in that and, once a second, the date. So a head is
looked up by its bytes without its Content-Length line. This is exact: a head is remembered only if it was read in full
and found good, then it had that line at most once, and where among the headers the line stands means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from headwater._kernels.messages import find

Head = TypeVar("Head")

_STATED = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_STATED_BYTES = len(_STATED[0])
_DIGITS_MAX = 15
_HEADS_MAX, _HEAD_BYTES_MAX = 1024, 2048


class Known(Generic[Head]):
    """What `parse` made of the heads seen lately. What is found is shared: nobody may change it."""

    def __init__(self, parse: Callable[[bytes], Head]) -> None:
        self._parse = parse
        self._stated: dict[bytes, Head] = {}
        """Heads with a Content-Length, by their bytes without it: as `find` looks them up."""
        self.whole: Callable[[bytes, int, int], tuple[Head, bytes] | None] = partial(find, self._stated)
        """The head and the body, if these bytes are one message, whole, with a head that was read before and is within
        limits of bytes and lines: nearly all that are not streamed. None: it is to be read with care."""
        self._others: dict[bytes, Head] = {}
        """Apart from those, for one must never be taken for the other."""

    def read(self, head: bytes) -> tuple[Head, int | None]:
        """The head, and its Content-Length if that may be another than was read before. Raises what `parse` does."""
        found = head.find(_STATED[0])
        if found < 0:
            found = head.find(_STATED[1])
            if found < 0:
                return self._others.get(head) or self._learn(self._others, head, head), None
        end = head.find(b"\r\n", found + _STATED_BYTES)
        if end < 0:
            end = len(head)
        digits = head[found + _STATED_BYTES : end]
        if not digits.isdigit() or len(digits) > _DIGITS_MAX:
            return self._parse(head), None
        key = head[:found] + head[end:]
        return self._stated.get(key) or self._learn(self._stated, key, head), int(digits)

    def _learn(self, heads: dict[bytes, Head], key: bytes, head: bytes) -> Head:
        known = self._parse(head)
        if len(key) <= _HEAD_BYTES_MAX:
            if len(heads) >= _HEADS_MAX:
                heads.clear()
            heads[key] = known
        return known
