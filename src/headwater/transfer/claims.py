"""Who writes where: no byte is written by two requests at a time, nor by one that its sender has given up since.

A request whose connection is gone may still be under way here: the thread of that connection drains what had arrived.
Were the same range written again meanwhile, over another connection, the older bytes could come last. So a request
claims its ranges until it has ended, and who wants some of them waits, or is told to come again. One that has not even
begun when its sender gave it up is found by its number: senders number what they write, and say with each request
below which number nothing counts any more.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.errors import UnavailableError

WAIT_S = 0.25
"""How long a request waits for others to end before it is told to come again."""
SENDERS_MAX = 4096
_name = struct.Struct("<IQQ")
_mark = struct.Struct("<QQQ")
Span = tuple[int, int, int]
"""Segment, first byte, byte behind the last."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A request's number in the life of its sender, and the first number there that still counts."""

    epoch: int
    serial: int
    floor: int

    def encode(self) -> bytes:
        """As bytes, for the end of a realm."""
        return _mark.pack(self.epoch, self.serial, self.floor)


def parse_mark(data: bytes) -> Mark | None:
    """The reverse; None for what is none."""
    return Mark(*_mark.unpack(data)) if len(data) == _mark.size else None


@dataclass(slots=True, eq=False)
class Claim:
    """The ranges of one request: sorted, apart from each other, and only looked at when there is another request."""

    names: Sequence[bytes]
    _spans: list[Span] | None = None

    @property
    def spans(self) -> list[Span]:
        """Its ranges."""
        if self._spans is None:
            self._spans = _spans(self.names)
        return self._spans

    def meets(self, other: Claim) -> bool:
        """Whether a byte belongs to both."""
        mine, theirs = iter(self.spans), iter(other.spans)
        one, two = next(mine, None), next(theirs, None)
        while one is not None and two is not None:
            if one[0] == two[0] and one[1] < two[2] and two[1] < one[2]:
                return True
            if (one[0], one[2]) <= (two[0], two[2]):
                one = next(mine, None)
            else:
                two = next(theirs, None)
        return False


class Claims:
    """All claims of an exporter. Any thread may call anything."""

    def __init__(self) -> None:
        self._claims: set[Claim] = set()
        self._floors: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._ended = threading.Condition()

    def __repr__(self) -> str:
        return f"Claims({len(self._claims)} requests write)"

    def take(self, peer: str, mark: Mark | None, names: Sequence[bytes], until_s: float) -> Claim:
        """Claim these ranges. Raises UnavailableError while another request has some of them, and for a request that
        its sender has given up."""
        claim = Claim(names)
        until_s = min(until_s, time.monotonic() + WAIT_S)
        with self._ended:
            if mark is not None:
                self._raise_floor((peer, mark.epoch), mark.floor)
            while True:
                if mark is not None and mark.serial < self._floors.get((peer, mark.epoch), 0):
                    raise UnavailableError(f"{peer} has given up its request {mark.serial}")
                if not any(claim.meets(it) for it in self._claims):
                    self._claims.add(claim)
                    return claim
                if not self._ended.wait(max(until_s - time.monotonic(), 0.0)) and time.monotonic() >= until_s:
                    raise UnavailableError("another request still writes there")

    def end(self, claim: Claim) -> None:
        """A request is over."""
        with self._ended:
            self._claims.discard(claim)
            self._ended.notify_all()

    def _raise_floor(self, sender: tuple[str, int], floor: int) -> None:
        self._floors[sender] = max(self._floors.pop(sender, 0), floor)
        if len(self._floors) > SENDERS_MAX:
            self._floors.popitem(last=False)


def _spans(names: Sequence[bytes]) -> list[Span]:
    found = sorted(_name.unpack(it) for it in names if len(it) == _name.size)
    spans: list[Span] = []
    for segment, offset, length in found:
        end = offset + length
        if spans and spans[-1][0] == segment and offset <= spans[-1][2]:
            spans[-1] = segment, spans[-1][1], max(spans[-1][2], end)
        else:
            spans.append((segment, offset, end))
    return spans
