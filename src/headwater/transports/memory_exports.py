"""Exports of plain memory: registered regions, and in them anything by segment, offset and length.

What the Transfer Engine serves, and what tests are made with. Nothing is ever moved or replaced here, so a loan ends
only in time; a region leaves when nobody has it lent any more.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headwater.errors import RefusedError, UnavailableError
from headwater.ports import Bytes, Lent, Memory
from headwater.transports.wire import MOST_REGIONS
from headwater.types import Extent, Outcome

_name = struct.Struct("<IQQ")
_nothing = _name.pack(0xFFFFFFFF, 0, 0)
LOAN_S = 30.0
Topic = Callable[[str, bytes, float], bytes]
"""Who asks, the message, until when."""


def region_name(segment: int, offset_bytes: int, length_bytes: int) -> bytes:
    """What peers call a piece of a region."""
    return _name.pack(segment, offset_bytes, length_bytes)


@dataclass(slots=True)
class _Region:
    memory: Memory
    writable: bool
    bytes: Bytes
    size: int
    told: bool
    loans: int = 0
    leaving: bool = False


@dataclass(slots=True)
class RegionLoan:
    """Pieces of regions, until they are given back."""

    exports: MemoryExports
    parts: Sequence[Lent | Outcome]
    regions: list[_Region]
    deadline_s: float
    ended: bool = False
    done: list[bool] = field(default_factory=list)
    checksums: list[int | None] = field(default_factory=list)

    def give_back(self, done: Sequence[bool], checksums: Sequence[int | None]) -> list[Outcome]:
        """See `ports.Loan`."""
        assert not self.ended, "a loan is given back once"
        self.ended, self.done, self.checksums = True, list(done), list(checksums)
        self.exports.end(self)
        return [Outcome.DONE if it else Outcome.FAILED for it in done]


class MemoryExports:
    """Registered memory, for peers that name the realm; see `ports.Exports`. Any thread may call anything."""

    def __init__(self, realm: bytes = b"", loan_s: float = LOAN_S) -> None:
        self.realm, self.loan_s = realm, loan_s
        self.available = True
        self.loans = 0
        """How many are out."""
        self._regions: dict[int, _Region] = {}
        self._next = 0
        self._told = 0
        self._topics: dict[str, Topic] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def __repr__(self) -> str:
        return f"MemoryExports({len(self._regions)} regions, {self.loans} loans)"

    def add(self, memory: Bytes, descriptor: int | None = None, *, writable: bool = True) -> int:
        """Register uint8[n]; its number. It stays the caller's, who must not let go of it before `remove`.

        Of more than MOST_REGIONS at a time, peers are not told where the rest lies: that goes over connections."""
        with self._changed:
            number, told = self._next, self._told < MOST_REGIONS
            region = _Region(Memory(descriptor, memory, number, writable), writable, memory, len(memory), told)
            self._regions[number] = region
            self._next, self._told = number + 1, self._told + told
            return number

    def remove(self, segment: int, until_s: float) -> None:
        """Nobody gets this region any more, and when this returns nobody has it. Raises UnavailableError if somebody
        still had it at `until_s`; nobody new gets it all the same, and it may be tried again."""
        with self._changed:
            assert 0 <= segment < self._next, f"segment {segment} of {self._next}"
            region = self._regions.get(segment)
            if region is None:
                return
            region.leaving = True
            while region.loans:
                if not self._changed.wait(max(until_s - time.monotonic(), 0.0)) and time.monotonic() >= until_s:
                    raise UnavailableError(f"segment {segment} is still lent {region.loans} times")
            if self._regions.pop(segment, None) is not None:  # somebody else may have waited, too
                self._told -= region.told

    def on(self, topic: str, answer: Topic) -> None:
        """Answer messages of a topic."""
        self._topics[topic] = answer

    def regions(self) -> Sequence[Memory]:
        """See `ports.Exports`."""
        with self._changed:
            return [it.memory for it in self._regions.values() if it.told]

    def lend(self, peer: str, realm: bytes, names: Sequence[bytes], until_s: float) -> RegionLoan:
        """See `ports.Exports`."""
        return self._lend(realm, names, writes=False)

    def accept(
        self, peer: str, realm: bytes, names: Sequence[bytes], sizes: Sequence[int], until_s: float
    ) -> RegionLoan:
        """See `ports.Exports`."""
        return self._lend(realm, names, writes=True)

    def told(self, peer: str, topic: str, body: bytes, until_s: float) -> bytes:
        """See `ports.Exports`."""
        answer = self._topics.get(topic)
        if answer is None:
            raise RefusedError("topic", " or ".join(sorted(self._topics)) or "none", topic, "ask for what is known")
        return answer(peer, body, until_s)

    def end(self, loan: RegionLoan) -> None:
        """A loan is over."""
        with self._lock:
            self.loans -= 1
            for it in loan.regions:
                it.loans -= 1
                if it.leaving:
                    self._changed.notify_all()

    def _lend(self, realm: bytes, names: Sequence[bytes], *, writes: bool) -> RegionLoan:
        if realm != self.realm:
            raise RefusedError("realm", repr(self.realm), repr(realm), "ask who registered that memory")
        if not self.available:
            raise UnavailableError("nothing is lent now")
        parts: list[Lent | Outcome] = []
        used: dict[int, _Region] = {}
        last, region = -1, None
        packed = b"".join(names)
        if set(map(len, names)) - {_name.size}:  # names that are none of ours find nothing
            packed = b"".join(it if len(it) == _name.size else _nothing for it in names)
        with self._changed:
            for segment, offset, length in _name.iter_unpack(packed):
                if segment != last:
                    last, region = segment, self._regions.get(segment)
                if region is None or region.leaving or offset + length > region.size:
                    parts.append(Outcome.MISSING)
                elif writes and not region.writable:
                    parts.append(Outcome.REFUSED)
                else:
                    used[segment] = region
                    extent = Extent(segment, offset, length) if region.told else None
                    parts.append(Lent(region.bytes[offset : offset + length], extent))
            lent = list(used.values())
            for it in lent:
                it.loans += 1
            self.loans += 1
        return RegionLoan(self, parts, lent, time.monotonic() + self.loan_s)
