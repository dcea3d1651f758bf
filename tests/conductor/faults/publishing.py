"""What vLLM publishes about its KV blocks, for a toy engine: its prompts' blocks over ZeroMQ, with replays.

    with publishing(engine) as said:      # from then on
        InstanceSpec(..., events=said.events, replay=said.replays, block_tokens=BLOCK)

The engine has to have blocks of BLOCK tokens. Everything here runs in the engine's thread.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from tests.conductor.engine import Engine
from tests.conductor.events.engine import BLOCK, ToyEngine
from tests.conductor.events.test_subscription import Publisher

LOOK_S = 0.02
BLOCKS = 1 << 20


class Publishing:
    """One engine's sockets, and what it has said."""

    def __init__(self, engine: Engine, context: zmq.Context[Any]) -> None:
        self._engine, self._publisher = engine, Publisher(context)
        self._publisher.engine = ToyEngine(random.Random(1), 100_000, BLOCKS)
        self.events, self.replays = self._publisher.events, self._publisher.replays
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle

    @property
    def batches(self) -> int:
        """How many were published."""
        return self._publisher.engine.number

    async def open(self) -> None:
        """Publish from now on."""
        self._loop = asyncio.get_running_loop()
        self._engine.stored = self._stored
        self._look()

    async def close(self) -> None:
        """Publish no more."""
        self._engine.stored = None
        self._timer.cancel()
        self._publisher.close()

    def _look(self) -> None:
        self._publisher.serve()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _stored(self, ids: Sequence[int], found: int, salt: str) -> None:
        toy = self._publisher.engine
        events = toy.serve(list(ids[: len(ids) // BLOCK * BLOCK]), salt)
        if events:
            self._publisher.send(toy.publish(events))


@contextmanager
def publishing(engine: Any) -> Iterator[Publishing]:
    """For an engine of `serving`."""
    assert engine.block_tokens == BLOCK, "its blocks have to be those that are published"
    context: zmq.Context[Any] = zmq.Context(io_threads=1)
    it = Publishing(engine, context)
    engine.call(it.open())
    try:
        yield it
    finally:
        engine.call(it.close())
        context.term()
