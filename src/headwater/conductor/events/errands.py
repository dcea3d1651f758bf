"""Errands to one node: have these chunks brought up to its HOST tier, while the request that needs them is on its way.

One connection and one task to each node. An order is a hint: what finds no room in the queue is dropped, what a node
refuses is not asked again, and a node that is away is asked again with the next order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headwater.conductor.counts import Counts
from headwater.conductor.events.frames import Prefetch, Refused, Reply
from headwater.conductor.events.lines import Dial, Line
from headwater.conductor.events.nodes import CONNECT_S
from headwater.errors import HeadwaterError, RefusedError

log = logging.getLogger(__name__)

QUEUE = 64
DONE_S = 5.0


class NodesErrands:
    """Those to all nodes, by number."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._nodes: dict[int, Errands] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._nodes)

    def joined(self, number: int, dial: Dial) -> None:
        """A node can be asked from now on."""
        self._nodes[number] = Errands(dial, self._counts)

    def left(self, number: int) -> None:
        """It cannot any more."""
        errands = self._nodes.pop(number, None)
        if errands is not None:
            task = asyncio.get_running_loop().create_task(errands.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def prefetch(self, number: int, root: bytes, keys: Sequence[bytes]) -> None:
        """See `Errands`; of a node that cannot be asked, nothing."""
        errands = self._nodes.get(number)
        if errands is not None:
            errands.prefetch(root, keys)

    async def close(self) -> None:
        """End them all."""
        await asyncio.gather(*(it.close() for it in self._nodes.values()), *self._ending)


class Errands:
    """One node's. Made and used in the running loop; nothing runs before the first order."""

    def __init__(self, dial: Dial, counts: Counts) -> None:
        self._dial, self._counts = dial, counts
        self._queue: asyncio.Queue[Prefetch] = asyncio.Queue(QUEUE)
        self._task: asyncio.Task[None] | None = None
        self._line: Line | None = None

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
            reply = await self._ask(order)
            if isinstance(reply, Refused):
                self._counts.add("prefetches", "refused")
        except RefusedError:
            self._counts.add("prefetches", "refused")
        except (OSError, HeadwaterError) as error:
            self._counts.add("prefetches", "lost")
            log.debug("a node cannot be asked to prefetch: %s", type(error).__name__)
            self._hang_up()

    async def _ask(self, order: Prefetch) -> Reply:
        if self._line is not None:
            try:
                async with asyncio.timeout(DONE_S):
                    return await self._line.ask(order)
            except TimeoutError:
                raise
            except OSError:  # nodes of other hosts end connections over which nothing was said for a minute
                self._hang_up()
        async with asyncio.timeout(CONNECT_S):
            self._line = await self._dial()
        async with asyncio.timeout(DONE_S):
            return await self._line.ask(order)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None
