"""Keeps chunks in this process's memory: the sibling of the real lower tiers, for the simulator, tests and examples."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from headwater.errors import UnavailableError
from headwater.ports import Bytes, Piece
from headwater.types import Identity, Origin, Outcome, Usage

Name = tuple[bytes, int, bytes]


class MemoryTier:
    """A dict of copies, up to `capacity_bytes`; what does not fit is FULL. `sick` makes every call fail."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.sick = False
        self._capacity_bytes, self._used_bytes = capacity_bytes, 0
        self._kept: dict[Name, tuple[Identity, Bytes]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryTier({len(self._kept)} chunks, {self._used_bytes} of {self._capacity_bytes} bytes)"

    def holds(self, identities: Sequence[Identity], until_s: float) -> list[bool]:
        """See `LowerTier`."""
        self._check(until_s)
        with self._lock:
            return [_name(it) in self._kept for it in identities]

    def read(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`."""
        self._check(until_s)
        return [self._read(it) if time.monotonic() < until_s else Outcome.FAILED for it in pieces]

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`."""
        self._check(until_s)
        return [self._write(it) if time.monotonic() < until_s else Outcome.FAILED for it in pieces]

    def delete(self, identities: Sequence[Identity], until_s: float) -> None:
        """See `LowerTier`."""
        self._check(until_s)
        with self._lock:
            for it in identities:
                self._forget(_name(it))

    def clear(self, origin: Origin, until_s: float) -> int:
        """See `LowerTier`."""
        self._check(until_s)
        with self._lock:
            found = [it for it in self._kept if it[0] == origin.root]
            for name in found:
                self._forget(name)
        return len(found)

    def usage(self, until_s: float) -> Usage:
        """See `LowerTier`."""
        self._check(until_s)
        return Usage(self._capacity_bytes, self._used_bytes)

    def close(self) -> None:
        """See `LowerTier`."""
        with self._lock:
            self._kept.clear()
            self._used_bytes = 0

    def _check(self, until_s: float) -> None:
        if self.sick:
            raise UnavailableError("the tier in memory was made sick")
        if time.monotonic() >= until_s:
            raise UnavailableError("the tier in memory was asked too late")

    def _read(self, piece: Piece) -> Outcome:
        with self._lock:
            found = self._kept.get(_name(piece.identity))
        if found is None:
            return Outcome.MISSING
        identity, content = found
        if identity != piece.identity:
            return Outcome.FOREIGN
        piece.memory[:] = content
        return Outcome.DONE

    def _write(self, piece: Piece) -> Outcome:
        content: Bytes = np.array(piece.memory)
        with self._lock:
            self._forget(_name(piece.identity))
            if self._used_bytes + len(content) > self._capacity_bytes:
                return Outcome.FULL
            self._kept[_name(piece.identity)] = piece.identity, content
            self._used_bytes += len(content)
        return Outcome.DONE

    def _forget(self, name: Name) -> None:
        found = self._kept.pop(name, None)
        if found is not None:
            self._used_bytes -= len(found[1])


def _name(identity: Identity) -> Name:
    return identity.origin.root, identity.group, identity.key
