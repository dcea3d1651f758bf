"""What tests of a node with lower tiers share: a tier that is as slow as one likes, and requests that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.config import NodeConfig
from headwater.node import tiering
from headwater.node.client import Session, fetch_status
from headwater.node.messages import Matched
from headwater.places import RemoteSpec
from headwater.ports import LowerTier, Piece
from headwater.tiers.codec import Codec
from headwater.types import ChunkKey, Identity, Origin, Outcome, Usage
from tests.node.conftest import Rig, eventually
from tests.node.peers import is_whole, keys, read, save

PAUSE = threading.Event()
POLL_S = 0.002
CHUNKS = 8


def with_tiers(config: NodeConfig, **changes: Any) -> NodeConfig:
    """The tests' node, with a little less HOST memory and some lower tiers."""
    return replace(config, **{"host_memory": 1 << 20, "drain_s": 10.0, "disk_reserve": 0, **changes})


@contextmanager
def rigged(config: NodeConfig) -> Iterator[Rig]:
    """A node in this process for this block; afterwards all its caches are sound."""
    rig = Rig(config)
    try:
        yield rig
    finally:
        rig.close()
        for level in rig.node.tiering.levels:
            if level.disk is not None:
                level.disk.check()


def settle(address: str, within_s: float = 30.0) -> None:
    """Wait until nothing moves and nothing waits to."""
    eventually(lambda: fetch_status(address)["quiet"], within_s, seen=lambda: fetch_status(address)["tiers"])


def tier(address: str, number: int = 1) -> dict[str, Any]:
    """What a node says of one of its tiers; 0 is HOST."""
    tiers: Any = fetch_status(address)["tiers"]
    found: dict[str, Any] = tiers[number]
    return found


def save_all(session: Session, names: Sequence[str], address: str = "", count: int = CHUNKS) -> None:
    """Save a prompt for each name; with an address, wait for each until it has gone down."""
    for name in names:
        save(session, keys(count, name))
        if address:
            settle(address)


def bring(session: Session, wanted: Sequence[ChunkKey], request: str, tokens_s: float = 10.0) -> Matched:
    """Ask as an engine does until there is nothing more to wait for."""
    it = session.match(wanted, request=request, tokens_s=tokens_s)
    while it.waiting:
        PAUSE.wait(POLL_S)
        it = session.match(wanted, counts=False, request=request, tokens_s=tokens_s)
    session.forget([request])
    return it


def load(session: Session, wanted: Sequence[ChunkKey]) -> int:
    """Load a prefix and check every byte of it; how many chunks."""
    got = session.load(wanted)
    data = [read(session, place) for place in got.addresses[0]]
    if got.ticket:
        session.done(got.ticket)
    wrong = [at for at, it in enumerate(data) if not is_whole(wanted[at], it)]
    assert not wrong, f"wrong bytes in chunks {wrong}"
    return got.chunks


class SlowTier:
    """A tier behind a line of `bytes_s`, whose every call takes `latency_s` longer; both may be changed at any time."""

    def __init__(self, inner: LowerTier, bytes_s: float, latency_s: float = 0.0) -> None:
        self.inner, self.bytes_s, self.latency_s = inner, bytes_s, latency_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def _pass(self, size_bytes: int, until_s: float) -> bool:
        """Wait for bytes to go over the line; False if they are not through in time."""
        with self._lock:
            began_s = max(time.monotonic(), self._free_at_s)
            self._free_at_s = min(began_s + size_bytes / self.bytes_s, max(until_s, began_s))
            through_s = began_s + size_bytes / self.bytes_s + self.latency_s
        PAUSE.wait(max(min(through_s, until_s) - time.monotonic(), 0.0))
        return through_s <= until_s

    def _move(
        self, move: Callable[[Sequence[Piece], float], list[Outcome]], pieces: Sequence[Piece], until_s: float
    ) -> list[Outcome]:
        self._pass(0, until_s)
        done: list[Outcome] = []
        for piece in pieces:
            through = self._pass(len(piece.memory), until_s)
            done += move([piece], until_s) if through and time.monotonic() < until_s else [Outcome.FAILED]
        return done

    def read(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`."""
        return self._move(self.inner.read, pieces, until_s)

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """See `LowerTier`."""
        return self._move(self.inner.write, pieces, until_s)

    def holds(self, identities: Sequence[Identity], until_s: float) -> list[bool]:
        """See `LowerTier`."""
        self._pass(0, until_s)
        return self.inner.holds(identities, until_s)

    def delete(self, identities: Sequence[Identity], until_s: float) -> None:
        """See `LowerTier`."""
        self.inner.delete(identities, until_s)

    def clear(self, origin: Origin, until_s: float) -> int:
        """See `LowerTier`."""
        return self.inner.clear(origin, until_s)

    def usage(self, until_s: float) -> Usage:
        """See `LowerTier`."""
        self._pass(0, until_s)
        return self.inner.usage(until_s)

    def close(self) -> None:
        """See `LowerTier`."""
        self.inner.close()


def plug(monkeypatch: pytest.MonkeyPatch, tiers: dict[str, LowerTier]) -> tuple[str, ...]:
    """Have nodes use these tiers for remotes of these names; the URLs to give them."""

    def open_remote(spec: RemoteSpec, codec: Codec | None = None) -> LowerTier:
        return tiers[spec.host]

    monkeypatch.setattr(tiering, "open_remote", open_remote)
    return tuple(f"redis://{name}" for name in tiers)


def disk_of(folder: Path, size: str = "64MiB") -> str:
    """A disk tier in a folder, as a setting."""
    return f"{folder / 'disk'}:{size}"


class Still:
    """Whether a disk tier's journal has not been written to for longer than a batch of it is held back."""

    def __init__(self, directory: Path) -> None:
        self._path, self._seen, self._since_s = directory / "journal-1.db-wal", 0, 0.0

    def __call__(self) -> bool:
        seen = self._path.stat().st_mtime_ns
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        return time.monotonic() - self._since_s > 0.5
