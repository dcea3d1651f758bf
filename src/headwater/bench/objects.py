"""Objects in a store, one turn at a time, for whoever keeps them: ours, and in their own Python our rivals.

`main` says `{}` on stdout when all is ready, and then answers each line on stdin

    get|into|exists OBJECT_BYTES BATCH CALLS all|one

with one line of JSON: each call's seconds, and the CPU seconds of this process and of those that it works with. get is
the store's call that returns bytes, into the one that fills the caller's memory, exists asks whether objects are there.
Objects are asked for in a random order, into places in a random order. `one` binds all processes to one core. What the
last call of a turn brought is compared with what was put.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Bytes = Any
"""uint8[n]."""
AMOUNT_BYTES = 256 << 20
MOST = 2000
"""How many objects of one size there are at most; fewer if they make `AMOUNT_BYTES`."""


class Shelf(Protocol):
    """Whoever keeps objects."""

    def put(self, items: Mapping[str, Bytes]) -> None:
        """Keep objects. Raises SystemExit if it cannot."""

    def get(self, key: str) -> Sequence[int]:
        """An object as bytes."""

    def into(self, keys: Sequence[str], places: Sequence[Bytes]) -> None:
        """Fill the places. Raises SystemExit if it cannot."""

    def exists(self, keys: Sequence[str]) -> int:
        """How many are there."""

    def register(self, memory: Bytes) -> None:
        """Places will be in this memory."""

    def processes(self) -> Sequence[int]:
        """The others that work for us."""

    def control(self, words: Sequence[str]) -> dict[str, Any]:
        """The answer to any other request."""


def main(shelf: Shelf, total_bytes: int = AMOUNT_BYTES) -> None:
    """Answer turns until stdin ends."""
    answers = answer_file()
    turns = Turns(shelf, total_bytes)
    answers.write("{}\n")
    answers.flush()
    for request in sys.stdin:
        words = request.split()
        if words[0] in turns.verbs:
            verb, object_bytes, batch, calls, where = words
            bind(shelf.processes(), everywhere=where == "all")
            answer = turns.turn(verb, int(object_bytes), int(batch), int(calls))
        else:
            answer = shelf.control(words)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def answer_file() -> Any:
    """What is written here is read by who asks; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def bind(processes: Sequence[int], *, everywhere: bool) -> None:
    """Let this process and others run on all cores, or on one and the same."""
    cores = range(os.cpu_count() or 1)
    for process in (os.getpid(), *processes):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores if everywhere else {0})


class Turns:
    """Timed calls to one shelf."""

    def __init__(self, shelf: Shelf, total_bytes: int) -> None:
        self._shelf, self._total_bytes = shelf, total_bytes
        self._random = random.Random(1)
        self._map = mmap.mmap(-1, max(total_bytes, mmap.PAGESIZE))
        self._pool = np.frombuffer(self._map, np.uint8)
        self._pool[:] = 1
        shelf.register(self._pool)
        self._held: dict[int, dict[str, Bytes]] = {}
        self.verbs = {"get", "into", "exists"}

    def turn(self, verb: str, object_bytes: int, batch: int, calls: int) -> dict[str, Any]:
        """`calls` calls for so many objects each."""
        held = self._objects(object_bytes)
        keys, places = list(held), self._places(object_bytes)
        self._random.shuffle(keys)
        self._random.shuffle(places)
        seconds, clock, shelf = [0.0] * calls, time.perf_counter, self._shelf
        asked: list[str] = []
        targets: list[Bytes] = []
        got: Sequence[int] = b""
        clocks = [~it << 3 | 2 for it in shelf.processes()]  # as clock_getcpuclockid says
        gc.collect()
        gc.disable()
        cpu_s, peer_cpu_s = time.process_time(), sum(map(time.clock_gettime, clocks))
        for call in range(calls):
            asked = [keys[it % len(keys)] for it in range(call * batch, call * batch + batch)]
            targets = [places[it % len(places)] for it in range(call * batch, call * batch + batch)]
            before_s = clock()
            if verb == "get":
                got = shelf.get(asked[0])
            elif verb == "into":
                shelf.into(asked, targets)
            elif shelf.exists(asked) != batch:
                raise SystemExit("an object is gone")
            seconds[call] = clock() - before_s
        cpu_s = time.process_time() - cpu_s
        peer_cpu_s = sum(map(time.clock_gettime, clocks)) - peer_cpu_s
        gc.enable()
        found = [np.frombuffer(got, np.uint8)] if verb == "get" else targets if verb == "into" else []  # type: ignore[call-overload]
        for key, it in zip(asked, found, strict=False):
            if not np.array_equal(held[key], it):
                raise SystemExit(f"{key} has other bytes than were put")
        return {"seconds": seconds, "cpu_s": cpu_s, "peer_cpu_s": peer_cpu_s}

    def _objects(self, object_bytes: int) -> dict[str, Bytes]:
        if object_bytes not in self._held:
            count = min(self._total_bytes // object_bytes, MOST)
            held = {f"{object_bytes}/{number}": pattern(number, object_bytes) for number in range(count)}
            self._shelf.put(held)
            self._held[object_bytes] = held
        return self._held[object_bytes]

    def _places(self, object_bytes: int) -> list[Bytes]:
        ends = range(object_bytes, len(self._pool) + 1, object_bytes)
        return [self._pool[it - object_bytes : it] for it in ends]


def pattern(number: int, size: int) -> Bytes:
    """Bytes that say whose they are."""
    words = np.arange(number << 32, (number << 32) + size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found: Bytes = words.view(np.uint8)
    return found


def address_of(array: Bytes) -> int:
    """Where an array lies."""
    place: int = array.ctypes.data
    return place
