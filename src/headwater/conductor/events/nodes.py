"""A watch over one node: what its tiers hold, which engines are registered with it, how fast it is.

Theory of operation. One task for each node, in the worker's loop; `lines` says how a node is reached:

    connect ─► who is there? ─► Watch ─► Watched ─► told ─► Watch ...
       ▲                                                │
       └── pause, 0.1 to 5 s ◄── any failure, silence ◄─┘   forgotten: HOST and DISK of this node

An answer comes within about a second if nothing has changed; without one for `SILENT_S` the node is taken for gone.
With each answer's number and serial the next question acknowledges it; a new number means that all is told anew.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Protocol

from headwater.conductor.events.frames import Figure, Registered, Watch, Watched
from headwater.conductor.events.lines import Dial, Line, expect
from headwater.conductor.events.namespaces import Base, Registration
from headwater.errors import HeadwaterError, ProtocolError
from headwater.transports.server import printable
from headwater.types import ChunkKey, Tier, split_keys

log = logging.getLogger(__name__)

CONNECT_S, SILENT_S = 1.0, 5.0
PAUSE_S, PAUSE_S_MAX = 0.1, 5.0
ROOT_BYTES = 32


class Listener(Protocol):
    """Who wants to know what a node holds: `sight.Sight`."""

    def registered(self, node: int, registrations: list[Registration]) -> None:
        """These are all that engines have registered with a node now."""

    def node_changed(self, node: int, tier: Tier, stored: list[ChunkKey], removed: list[ChunkKey]) -> None:
        """A tier of a node has stored and removed chunks."""

    def node_forgotten(self, node: int) -> None:
        """Nothing of what a node has told is true any more."""


Figures = Callable[[int, str, tuple[Figure, ...]], None]
"""A node's number, its name in its cluster, and what it has measured."""


class NodeWatch:
    """One node's watch. `start` and `close` are called in the running loop."""

    def __init__(self, number: int, dial: Dial, listener: Listener, figures: Figures) -> None:
        self.number, self._dial = number, dial
        self._listener, self._figures = listener, figures
        self._task: asyncio.Task[None] | None = None
        self.is_up = False
        self.trouble = ""
        self.answers = self.dumps = self.losses = 0
        self._told: tuple[int, int] = (0, 0)

    def __repr__(self) -> str:
        return f"NodeWatch({self.number}, {'up' if self.is_up else self.trouble or 'not yet up'})"

    def start(self) -> None:
        """Watch from now on."""
        self._task = asyncio.get_running_loop().create_task(self._watch(), name=f"watch-node-{self.number}")

    def end(self) -> None:
        """Tell nothing more; what it has told is forgotten."""
        if self._task is not None:
            self._task.cancel()
        if self.is_up:
            self.is_up = False
            self._listener.node_forgotten(self.number)

    async def close(self) -> None:
        """End it, and wait until nothing is left of it."""
        self.end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def state(self) -> dict[str, object]:
        """For people."""
        return {
            "up": self.is_up,
            "trouble": self.trouble,
            "answers": self.answers,
            "dumps": self.dumps,
            "losses": self.losses,
        }

    # ---- inside -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        pause_s = PAUSE_S
        while True:
            trouble = await self._once()
            if self.is_up:
                self.is_up, pause_s = False, PAUSE_S
                self.losses += 1
                self._listener.node_forgotten(self.number)
            if trouble != self.trouble:
                log.warning("node %d: %s", self.number, trouble)
            self.trouble = trouble
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    async def _once(self) -> str:
        """One connection, to its end; why it ended."""
        line: Line | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                line = await self._dial()
            self._told = (0, 0)
            while True:
                async with asyncio.timeout(SILENT_S):
                    reply = await line.ask(Watch(*self._told))
                self._heard(expect(Watched, reply))
        except (OSError, HeadwaterError) as error:
            # What a stranger says may be in it.
            return printable(str(error)) or type(error).__name__
        finally:
            if line is not None:
                line.close()

    def _heard(self, it: Watched) -> None:
        listener = self._listener
        if it.number != self._told[0]:
            self.dumps += 1
            listener.node_forgotten(self.number)
        self.is_up, self.trouble = True, ""
        self.answers += 1
        self._told = it.number, it.serial
        if it.instances is not None:
            listener.registered(self.number, [_registration(one) for one in it.instances])
        for move in it.moves:
            listener.node_changed(self.number, _tier(move.tier), _keys(move.stored), _keys(move.removed))
        if it.figures is not None:
            self._figures(self.number, it.node, it.figures)


def _registration(it: Registered) -> Registration:
    if len(it.root) != ROOT_BYTES or it.chunk_tokens <= 0:
        raise ProtocolError("a registration that is none")
    return Registration(it.instance, Base(it.root, it.namespace), it.chunk_tokens, it.kv_bytes_per_token)


def _tier(name: str) -> Tier:
    try:
        return Tier(name)
    except ValueError:
        raise ProtocolError("a tier that is not known here") from None


def _keys(packed: bytes) -> list[ChunkKey]:
    try:
        return split_keys(packed)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
