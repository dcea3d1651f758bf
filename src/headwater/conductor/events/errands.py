"""Errands to one node: have these chunks brought up to its HOST tier, while the request that needs them is on its way.

One connection and one task to each node. An order is a hint: what finds no room in the queue is dropped, what a node
refuses is not asked again, and a node that is away is asked again with the next order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headwater.conductor.counts import Counts
from headwater.conductor.events.frames import Prefetch, Refused
from headwater.conductor.events.nodes import CONNECT_S, ask, greet
from headwater.errors import HeadwaterError

log = logging.getLogger(__name__)

QUEUE = 64
DONE_S = 5.0


class Errands:
    """One node's. Made and used in the running loop; nothing runs before the first order."""

    def __init__(self, address: str, counts: Counts) -> None:
        """`address` is unix:/path."""
        self._path, self._counts = address.removeprefix("unix:"), counts
        self._queue: asyncio.Queue[Prefetch] = asyncio.Queue(QUEUE)
        self._task: asyncio.Task[None] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def prefetch(self, root: bytes, keys: Sequence[bytes]) -> None:
        """These are a prompt's first chunks, in order, in the namespace of this root."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="headwater-errands")
        try:
            self._queue.put_nowait(Prefetch(root, b"".join(keys), True))
        except asyncio.QueueFull:
            self._counts.add("prefetches", "dropped")

    async def close(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._hang_up()

    async def _run(self) -> None:
        while True:
            await self._do(await self._queue.get())

    async def _do(self, order: Prefetch) -> None:
        try:
            if self._writer is None:
                async with asyncio.timeout(CONNECT_S):
                    self._reader, self._writer = await asyncio.open_unix_connection(self._path)
                    await greet(self._reader, self._writer)
            assert self._reader is not None
            async with asyncio.timeout(DONE_S):
                reply = await ask(self._reader, self._writer, order)
            if isinstance(reply, Refused):
                self._counts.add("prefetches", "refused")
        except (OSError, EOFError, HeadwaterError, TimeoutError) as error:
            self._counts.add("prefetches", "lost")
            log.debug("a node cannot be asked to prefetch: %s", type(error).__name__)
            self._hang_up()

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
