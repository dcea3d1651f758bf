"""An engine that publishes what it caches, as vLLM does, and a line that loses, doubles and delays what it says."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.conductor.events.batches import Batch, read_batch
from headwater.conductor.events.ordering import Ordering
from headwater.core.hashing import chunk_keys

BLOCK = 4


def salted(salt: str) -> bytes:
    """A root for each salt."""
    return hashlib.sha256(salt.encode()).digest()


class ToyEngine:
    """One life after another of an engine: its blocks by name, and what it has published."""

    def __init__(self, draw: random.Random, buffer: int, capacity: int = 40) -> None:
        self.draw, self.capacity = draw, capacity
        self.time_s = 1000.0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.number = 0
        self.cached: dict[int, bytes] = {}
        """The keys of what is cached, by the engine's names, oldest first."""
        self.children: dict[int, int] = {}

    def restart(self) -> None:
        """Another life, with nothing cached, counting from 0."""
        self.buffer.clear()
        self.cached.clear()
        self.number = 0

    @property
    def keys(self) -> set[bytes]:
        """What is cached now."""
        return set(self.cached.values())

    def step(self) -> tuple[int, bytes]:
        """Serve a prompt or clear the cache; what is published of it."""
        events: list[dict[str, Any]] = []
        if self.draw.random() < 0.03:
            self.cached.clear()
            events.append({"type": "AllBlocksCleared"})
        else:
            salt = self.draw.choice(["", "", "s"])
            prompt = [self.draw.randrange(3) for _ in range(self.draw.randrange(1, 6) * BLOCK)]
            events += self.serve(prompt, salt)
        return self.publish(events)

    def serve(self, prompt: Sequence[int], salt: str = "") -> list[dict[str, Any]]:
        """Cache a prompt's blocks."""
        keys = chunk_keys(salted(salt), prompt, BLOCK)
        names = [int.from_bytes(key[-8:], "big") for key in keys]
        held = next((at for at, name in enumerate(names) if name not in self.cached), len(names))
        events: list[dict[str, Any]] = []
        for name in names[:held]:
            self.cached[name] = self.cached.pop(name)  # used lately
        while self.cached and len(self.cached) + len(names) - held > self.capacity:
            oldest = next(iter(self.cached))
            del self.cached[oldest]
            events.append({"type": "BlockRemoved", "block_hashes": [oldest], "medium": "GPU", "group_idx": 0})
        new = names[held:]
        if new:
            extra = [[salt] if salt and not held and not at else None for at in range(len(new))]
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": new,
                    "parent_block_hash": names[held - 1] if held else None,
                    "token_ids": prompt[held * BLOCK :],
                    "block_size": BLOCK,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": extra,
                    "group_idx": 0,
                }
            )
            self.cached |= dict(zip(new, keys[held:], strict=True))
        return events

    def publish(self, events: list[dict[str, Any]]) -> tuple[int, bytes]:
        """Number a batch."""
        self.time_s += self.draw.uniform(0.001, 1.0)
        frame = self.number, msgspec.msgpack.encode([self.time_s, events, 0])
        self.buffer.append(frame)
        self.number += 1
        return frame

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """What is remembered from there on."""
        return [it for it in self.buffer if it[0] >= first]


def parse(payload: bytes) -> Batch:
    """A batch."""
    return read_batch(payload)


class Line:
    """Carries frames to an Ordering, with faults; replays come whole, or, with `holes`, sometimes not."""

    def __init__(self, draw: random.Random, engine: ToyEngine, ordering: Ordering, rate: float) -> None:
        self.draw, self.engine, self.ordering, self.rate = draw, engine, ordering, rate
        self.late: list[tuple[int, bytes]] = []
        self.faults = 0

    def carry(self, frame: tuple[int, bytes]) -> None:
        """Deliver a frame, or not."""
        fault = self.draw.choice(["lose", "double", "late"]) if self.draw.random() < self.rate else ""
        self.faults += bool(fault)
        if fault == "late":
            self.late.append(frame)
        elif fault != "lose":
            for _ in range(2 if fault == "double" else 1):
                self.deliver(frame)
        if self.late and self.draw.random() < 0.5:
            self.deliver(self.late.pop(self.draw.randrange(len(self.late))))

    def deliver(self, frame: tuple[int, bytes]) -> None:
        """One frame, as it is."""
        self.ordering.came(frame[0], parse(frame[1]))

    def serve(self, between: Callable[[], None] = lambda: None, most: int = 100) -> None:
        """Answer replays until none is wanted; `between` happens while one is under way."""
        for _ in range(most):
            first = self.ordering.wants
            if first is None:
                return
            frames = self.engine.replay(first)
            between()
            for number, payload in frames:
                self.ordering.replayed(number, parse(payload))
            self.ordering.replay_ended()
        raise AssertionError(f"it never has enough: {self.ordering!r}")
