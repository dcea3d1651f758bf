"""Engines in processes of their own."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

from headwater.transfer import Engine
from tests.node.peers import Channel, serve_orders

SIZE = 8 << 20


def pattern(name: str, size: int = SIZE) -> np.ndarray:
    """Bytes that tell whose they are, at every place."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def lender(channel: Channel, name: str, transports: list[str], listen: str = "127.0.0.1:0") -> None:
    """An engine with a segment to read, one to write, and an echo of what it is notified of."""
    with Engine(name, transports=transports, listen=listen) as engine:
        segment = engine.register(SIZE)
        segment.memory[:] = pattern(name)
        engine.register(SIZE, writable=True)
        channel.tell({"descriptor": engine.descriptor().decode(), "address": engine.member.address})
        channel.stay()


ROLES: dict[str, Any] = {"lender": lender}

if __name__ == "__main__":
    serve_orders(int(sys.argv[1]), ROLES)
