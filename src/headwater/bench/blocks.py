"""Blocks between two processes, turn by turn, for whoever can move them: ours, and in their own Python our rivals.

`main` forks the peer that is read from, says `{}` on stdout when all is ready, and then answers each line on stdin

    read|write BLOCK_BYTES BATCH CALLS cold|warm

with one line of JSON, as `bare_tcp.c` does: each call's seconds, and the CPU seconds of both processes. Offsets walk
through a random order of all blocks of both pools, which are shared memory in small pages and larger than the caches;
warm repeats the same blocks. After each turn the last call's blocks are compared with where they came from.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np


class Pool:
    """Shared memory that is all there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.map = mmap.mmap(-1, size)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def fill(self, seed: int) -> None:
        """Bytes that differ from word to word."""
        words = self.bytes.view(np.uint64)
        words[:] = np.arange(seed, seed + len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Mover(Protocol):
    """Reads from or writes to the peer's pool: `places` are offsets in ours, `offsets` in its."""

    def move(self, verb: str, places: Sequence[int], offsets: Sequence[int], block_bytes: int) -> None:
        """One batch; returns when the bytes are there. Raises SystemExit if they are not."""


def main(
    serve: Callable[[Pool], str],
    connect: Callable[[Pool, str], Mover],
    pool_bytes: int,
    end: Callable[[], None] = lambda: None,
) -> None:
    """Answer turns until stdin ends. `serve` runs in the peer and says in one line what `connect` has to know; `end` is
    the last that either process does."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # some libraries print
    remote, pool = Pool(pool_bytes), Pool(pool_bytes)
    remote.fill(1)
    pool.fill(2)
    words, spoken = os.pipe()
    alive, ours = os.pipe()
    peer = os.fork()
    if not peer:
        os.close(ours)
        os.close(words)
        os.write(spoken, f"{serve(remote)}\n".encode())
        os.read(alive, 1)  # ends with the other process
        end()
        os.kill(os.getpid(), signal.SIGKILL)  # no library has a say in how
    os.close(alive)
    os.close(spoken)
    with os.fdopen(words, encoding="ascii") as said:
        line = said.readline().strip()
    if not line:
        raise SystemExit("the peer has ended")
    turns = Turns(connect(pool, line), remote, pool, ~peer << 3 | 2)  # what clock_getcpuclockid(peer) says
    answers.write("{}\n")
    answers.flush()
    for request in sys.stdin:
        verb, block_bytes, batch, calls, kind = request.split()
        answer = turns.turn(verb, int(block_bytes), int(batch), int(calls), kind == "cold")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    end()
    os.close(ours)
    os.waitpid(peer, 0)
    os.kill(os.getpid(), signal.SIGKILL)


class Turns:
    """Timed calls of one mover."""

    def __init__(self, mover: Mover, remote: Pool, pool: Pool, peer_clock: int) -> None:
        self._mover, self._remote, self._pool, self._peer_clock = mover, remote, pool, peer_clock
        self._random = random.Random(1)

    def turn(self, verb: str, block_bytes: int, batch: int, calls: int, cold: bool) -> dict[str, object]:
        """`calls` batches of blocks."""
        order = [range(0, self._pool.size - block_bytes + 1, block_bytes)] * 2
        here, there = (self._random.sample(it, len(it)) for it in order)
        assert batch <= len(here), "the pool is too small for the batch"
        seconds, move, clock = [0.0] * calls, self._mover.move, time.perf_counter
        places: list[int] = []
        offsets: list[int] = []
        gc.collect()
        gc.disable()
        cpu_s, peer_cpu_s = time.process_time(), time.clock_gettime(self._peer_clock)
        for call in range(calls):
            first = call * batch if cold else 0
            places = [here[it % len(here)] for it in range(first, first + batch)]
            offsets = [there[it % len(there)] for it in range(first, first + batch)]
            before_s = clock()
            move(verb, places, offsets, block_bytes)
            seconds[call] = clock() - before_s
        cpu_s, peer_cpu_s = time.process_time() - cpu_s, time.clock_gettime(self._peer_clock) - peer_cpu_s
        gc.enable()
        for place, offset in zip(places, offsets, strict=True):
            mine, its = self._pool.bytes[place:][:block_bytes], self._remote.bytes[offset:][:block_bytes]
            if not np.array_equal(mine, its):
                raise SystemExit("a block has other bytes than its source")
        return {"seconds": seconds, "cpu_s": cpu_s, "peer_cpu_s": peer_cpu_s}
