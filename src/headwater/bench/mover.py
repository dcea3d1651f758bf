"""Our side of `bench transfer`: blocks through our Transfer Engine; `python -m headwater.bench.mover KIND POOL_BYTES`.

KIND is what the blocks go over: `tcp`, `shm`, or `tcp-unchecked`, which is the TCP transport alone, without checksums.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

from headwater.bench.blocks import Mover, Pool, main
from headwater.errors import UnavailableError
from headwater.ports import Item, Link
from headwater.transfer import Credentials, Engine, Outcome, Peer
from headwater.transports.memory_exports import MemoryExports, region_name
from headwater.transports.server import PeerServer
from headwater.transports.tcp import Tcp
from headwater.types import Member

CLUSTER, REALM, CALL_S = "bench", b"bench", 60.0
TOKEN = Credentials((b"0123456789abcdef",))
KINDS = ("tcp", "tcp-unchecked", "shm")
engines: list[Engine] = []
servers: list[PeerServer] = []
"""What lives as long as the process."""


def serve(kind: str, pool: Pool) -> str:
    """Lend the pool; over shared memory, a segment of the engine's own with the same bytes."""
    if kind == "tcp-unchecked":
        memory = MemoryExports(REALM)
        memory.add(pool.bytes)
        members: list[Member] = []
        server = PeerServer(lambda: members[0], CLUSTER, memory, TOKEN, ("127.0.0.1", 0))
        members.append(Member("peer", 1, server.address))
        server.start()
        servers.append(server)
        return msgspec.json.encode(members[0]).decode()
    engine = Engine("peer", cluster=CLUSTER, credentials=TOKEN, transports=(kind,))
    if kind == "shm":
        engine.register(pool.size).memory[:] = pool.bytes
    else:
        engine.register(pool.bytes, writable=True)
    engines.append(engine)
    return engine.descriptor().hex()


class ByEngine:
    """Reads and writes of an engine; `other` is its peer."""

    def __init__(self, engine: Engine, other: Peer, pool: Pool) -> None:
        self._engine, self._other, self._pool = engine, other, pool
        (self._segment,) = other.segments

    def move(self, verb: str, places: Sequence[int], offsets: Sequence[int], block_bytes: int) -> None:
        """See `blocks.Mover`."""
        items = [
            (self._segment, offset, block_bytes, self._pool.bytes[place : place + block_bytes])
            for place, offset in zip(places, offsets, strict=True)
        ]
        call = self._engine.read if verb == "read" else self._engine.write
        _check(verb, call(self._other, items, CALL_S))


class ByLink:
    """Reads and writes of one link."""

    def __init__(self, link: Link, pool: Pool) -> None:
        self._link, self._pool = link, pool

    def move(self, verb: str, places: Sequence[int], offsets: Sequence[int], block_bytes: int) -> None:
        """See `blocks.Mover`."""
        items = [
            Item(region_name(0, offset, block_bytes), self._pool.bytes[place : place + block_bytes])
            for place, offset in zip(places, offsets, strict=True)
        ]
        call = self._link.read if verb == "read" else self._link.write
        _check(verb, call(REALM, items, time.monotonic() + CALL_S))


def _check(verb: str, outcomes: Sequence[Outcome]) -> None:
    if any(it is not Outcome.DONE for it in outcomes):
        raise SystemExit(f"{verb}: {', '.join(sorted({it.name for it in outcomes}))}")


def connect(kind: str, pool: Pool, words: str) -> Mover:
    """A mover over one transport."""
    if kind == "tcp-unchecked":
        peer = msgspec.json.decode(words, type=Member)
        me = Member("bench", 1, "")
        return ByLink(Tcp(me, CLUSTER, TOKEN, checksums=False).connect(peer, time.monotonic() + CALL_S), pool)
    engine = Engine("bench", cluster=CLUSTER, credentials=TOKEN, transports=(kind,))
    engines.append(engine)
    try:
        return ByEngine(engine, engine.connect(bytes.fromhex(words), CALL_S), pool)
    except UnavailableError as error:
        raise SystemExit(f"the peer cannot be reached: {error}") from None


def end() -> None:
    """Leave no file behind."""
    for it in engines:
        it.close()


if __name__ == "__main__":
    of = sys.argv[1]
    main(lambda pool: serve(of, pool), lambda pool, words: connect(of, pool, words), int(sys.argv[2]), end)
