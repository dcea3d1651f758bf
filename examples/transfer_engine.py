"""Move bytes between two processes with the Transfer Engine alone: no node, no directory.

python examples/transfer_engine.py
"""

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from headwater.transfer import Engine, Outcome

SIZE = 16 << 20
BLOCK = 1 << 20


def export(pipe: Connection) -> None:
    """The other process: it lends memory, and waits to be told that its peer is through."""
    with Engine("exporter") as engine:
        segment = engine.register(SIZE)  # memory of the engine's own: peers on this host map it
        segment.memory[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
        room = bytearray(BLOCK)
        engine.register(room, writable=True)  # memory of ours, which peers may write to
        pipe.send_bytes(engine.descriptor())
        for note in engine.notifications(wait_s=30.0):
            if note.topic == "written":
                print(f"exporter: {note.peer} has written {bytes(room[:5])!r}")
            else:
                return


def read_all(engine: Engine, descriptor: bytes) -> None:
    """Reads in a batch, a future, and a coroutine; then a write and a notification."""
    peer = engine.connect(descriptor)
    print(f"reader: connected to {peer.name} by {' or '.join(peer.transports)}")
    target = np.empty(SIZE, np.uint8)
    items = [(0, offset, BLOCK, target[offset : offset + BLOCK]) for offset in range(0, SIZE, BLOCK)]
    began_s = time.perf_counter()
    outcomes = engine.read(peer, items, deadline_s=5.0)
    took_s = time.perf_counter() - began_s
    print(f"reader: {outcomes.count(Outcome.DONE)} of {len(items)} blocks, {SIZE / took_s / 1e9:.1f} GB/s")

    transfer = engine.submit_read(peer, items[:8])  # the memory is the engine's until this is over
    print(f"reader: in the background: {transfer.result(timeout=5.0).count(Outcome.DONE)} of 8 blocks")
    print(f"reader: as a coroutine: {asyncio.run(engine.aread(peer, items[:1]))[0].value}")

    engine.write(peer, [(1, 0, 5, b"hello")])
    engine.notify(peer, "written")
    engine.notify(peer, "bye")


def main() -> None:
    """Start the exporter in a process of its own, and read from it."""
    ours, theirs = multiprocessing.Pipe()
    processes = multiprocessing.get_context("spawn")
    exporter = processes.Process(target=export, args=(theirs,))
    exporter.start()
    with Engine("reader", transports=("shm", "tcp")) as engine:
        read_all(engine, ours.recv_bytes())
    exporter.join(10)


if __name__ == "__main__":
    main()
