"""Blocks through Mooncake's Transfer Engine, TCP, two processes, one turn at a time; run by Mooncake's Python.

    PYTHONPATH=src .cache/peers/mooncake/bin/python benchmarks/mooncake_transfer.py POOL_BYTES

See `headwater.bench.blocks` for what it is asked and answers. Everything is at Mooncake's defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mooncake.engine import TransferEngine

from headwater.bench.blocks import Pool, main

HOST = "127.0.0.1"


def start(pool: Pool) -> TransferEngine:
    """An engine with the pool registered."""
    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(pool.address, pool.size):
        raise SystemExit("Mooncake's Transfer Engine does not start")
    return engine


serving: list[TransferEngine] = []


def serve(pool: Pool) -> str:
    """The peer: where it is, and where its pool lies."""
    serving.append(start(pool))
    return f"{HOST}:{serving[0].get_rpc_port()} {pool.address}"


class Mooncake:
    """An engine that moves to and from one other."""

    def __init__(self, pool: Pool, words: str) -> None:
        self._engine, self._base = start(pool), pool.address
        self._target, address = words.split()
        self._remote = int(address)

    def move(self, verb: str, places: Sequence[int], offsets: Sequence[int], block_bytes: int) -> None:
        """See `headwater.bench.blocks.Mover`."""
        engine = self._engine
        if len(places) == 1:
            call = engine.transfer_sync_read if verb == "read" else engine.transfer_sync_write
            code = call(self._target, self._base + places[0], self._remote + offsets[0], block_bytes)
        else:
            call = engine.batch_transfer_sync_read if verb == "read" else engine.batch_transfer_sync_write
            here, there = [self._base + it for it in places], [self._remote + it for it in offsets]
            code = call(self._target, here, there, [block_bytes] * len(places))
        if code:
            raise SystemExit(f"Mooncake's {verb} failed with code {code}")


if __name__ == "__main__":
    main(serve, Mooncake, int(sys.argv[1]))
