"""Engines of the harness that share one real node, and the handles by which tests make either of them fail.

    first, second = served.engine(), served.engine()
    with served.paused(): ...          the node accepts and never answers
    gate = Gate(second, "scatter")     the next load stops before its copy, until `gate.open()`
    below = Below(served, here=1)      all but the first chunk seems to be in a lower tier, until `below.came(...)`

When the test is over nothing may be left: no ticket in the node, nothing tracked, pinned or queued in the engines.
"""

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headwater.config import NodeConfig
from headwater.core.cache import Cache, Space
from headwater.node.client import fetch_status
from headwater.node.driver import Node
from headwater.node.messages import Forget, Match, Matched
from headwater.node.server import EmbeddedServer
from tests.engines.harness import Engine, Shape

CONNECTOR = "headwater.engines.vllm.HeadwaterConnector"
BLOCK, CHUNK = 16, 32
ON_CPU = {"asynchronous": False, "second_runner": False}
ON_GPU = {"asynchronous": True, "second_runner": True}
MODES = pytest.mark.parametrize("mode", [ON_CPU, ON_GPU], ids=["as-on-cpu", "as-on-gpu"])
DENSE = Shape()
WINDOW = Shape(window_tokens=40)
SKIP = {"headwater.skip": True}
WAIT_S = 20.0
QUIET_STEPS = 2_000


class MovedClock:
    """The node's clock: the real one, moved as tests like."""

    def __init__(self) -> None:
        self.moved_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self.moved_s


class Served:
    """A node in a thread of this process, and engines that use it. `node` are settings of every life of the node."""

    def __init__(self, directory: Path, memory: int = 16 << 20, **node: Any) -> None:
        self.directory, self.memory, self.node = directory, memory, node
        self.address = f"unix:{directory}/node.sock"
        self.clock = MovedClock()
        self.engines: list[Engine] = []
        self.embedded: EmbeddedServer | None = None

    def start(self) -> None:
        settings = {"slab": 1 << 20, "prefault": False, "drain_s": 0.1, "metrics": "off", **self.node}
        config = NodeConfig(socket=self.address, host_memory=self.memory, **settings)
        self.embedded = EmbeddedServer(Node(config, self.clock), self.address)

    def stop(self) -> None:
        """The end of this node: to engines it is as if it had been killed, since nothing says goodbye."""
        if self.embedded is not None:
            self.embedded.close()
            self.embedded = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """From the next call on the node accepts, reads, and never answers, as if stopped by a signal."""
        assert self.embedded is not None
        node, resumed = self.embedded.server.node, threading.Event()
        handle = node.handle

        def wait(instance: str, request: Any) -> Any:
            resumed.wait()
            return handle(instance, request)

        node.handle = wait  # type: ignore[method-assign]
        try:
            yield
        finally:
            resumed.set()
            node.handle = handle  # type: ignore[method-assign]

    def move(self, moved_s: float) -> None:
        """Move the node's clock, and wake it, since it may be waiting for a time that is not to come."""
        self.clock.moved_s = moved_s
        fetch_status(self.address, WAIT_S)

    @property
    def cache(self) -> Cache:
        """The node's core; look at it only while the node has nothing to do."""
        assert self.embedded is not None
        return self.embedded.server.node.cache

    @property
    def space(self) -> Space:
        """The only namespace."""
        (space,) = self.cache.spaces
        return space

    def engine(self, shape: Shape = DENSE, mode: dict[str, Any] | None = None, **extra: Any) -> Engine:
        """An engine of this node; `extra` are the plug-in's settings."""
        options = {"node": self.address, "chunk_tokens": CHUNK, "fingerprint": "test-model", **extra}
        engine = Engine(shape, CONNECTOR, options, **(mode or ON_CPU))
        self.engines.append(engine)
        return engine

    def lacks_tickets(self) -> None:
        """Assert that nobody holds anything in the node, which is sound."""
        eventually(lambda: not self.cache.tickets, lambda: f"tickets are left: {self.cache.tickets}")
        fetch_status(self.address, WAIT_S)  # an answer: the node has ended what it was doing
        self.cache.check()

    def close(self) -> None:
        """Run everything idle and assert that nothing is left anywhere."""
        for engine in self.engines:
            engine.run(limit=QUIET_STEPS)
        if self.embedded is not None:
            # Before the engines leave: what they hold in the node would go with them.
            self.lacks_tickets()
        for engine in self.engines:
            engine.close(leftovers)
        self.stop()


def eventually(fact: Callable[[], object], otherwise: Callable[[], object] = lambda: "not so") -> None:
    """Wait for what another thread or process is about to do."""
    until_s = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < until_s, otherwise()
        threading.Event().wait(0.001)


def decider(engine: Engine) -> Any:
    """The plug-in's scheduler side."""
    return engine.connector._scheduling()


def copier(engine: Engine, rank: int = 0) -> Any:
    """The plug-in's side in a rank."""
    return engine.workers[rank].connector._copying


def leftovers(engine: Engine) -> dict[str, Any]:
    """What an idle engine's plug-in still remembers, and should not."""
    scheduling = decider(engine)
    found = {
        name: getattr(scheduling, name)
        for name in ("_tracked", "_loads", "_saves", "_pinned", "_loading", "_failed", "_owed")
    }
    if len(scheduling._questions):
        found["_questions"] = scheduling._questions
    for rank in range(len(engine.workers)):
        copying = copier(engine, rank)
        found |= {f"rank {rank}: {name}": getattr(copying, name) for name in ("_loads", "_saves", "_loading")}
    return {name: value for name, value in found.items() if value}


def intercept(engine: Engine, name: str, around: Callable[..., None], ranks: range | None = None) -> None:
    """Have `around(copy, group, blocks, places, stride)` called in place of each gather or scatter of some ranks."""
    for rank in ranks or range(len(engine.workers)):
        pages = copier(engine, rank)._pages
        setattr(pages, name, functools.partial(around, getattr(pages, name)))


class Gate:
    """Stops an engine's copies of one kind before they begin, until `open`. What comes after passes."""

    def __init__(self, engine: Engine, name: str, ranks: range | None = None) -> None:
        self.entered, self._opened = threading.Event(), threading.Event()
        intercept(engine, name, self._wait, ranks)

    def _wait(self, copy: Callable[..., None], *arguments: Any) -> None:
        self.entered.set()
        assert self._opened.wait(WAIT_S)
        copy(*arguments)

    def open(self) -> None:
        self._opened.set()

    def reached(self) -> None:
        """Wait until a copy stands here."""
        assert self.entered.wait(WAIT_S)


class Below:
    """The node's answers as if only the first `here` chunks of what it holds were in its memory and the others came
    from a lower tier: "wait", until the test says how many have come, as a last word or not."""

    def __init__(self, served: Served, here: int = 0, tier: str = "disk") -> None:
        assert served.embedded is not None
        node = served.embedded.server.node
        self.first, self.here, self.tier, self.waiting = here, here, tier, True
        self.asked: list[Match] = []
        self.forgotten: list[str] = []
        self._handle = node.handle
        node.handle = self._answer  # type: ignore[method-assign]

    def came(self, chunks: int, *, waiting: bool = False) -> None:
        self.here, self.waiting = chunks, waiting

    def _answer(self, instance: str, request: Any) -> Any:
        if isinstance(request, Forget):
            self.forgotten += request.requests
        if not isinstance(request, Match):
            return self._handle(instance, request)
        if request.request:
            self.asked.append(request)
        held = self._handle(instance, Match(request.space, request.keys, counts=False)).chunks
        waits = bool(request.request and held and self.waiting)
        if request.counts and not waits:
            self._handle(instance, Match(request.space, request.keys, counts=True))
        chunks = min(held, self.here)
        return Matched(chunks, waits, **{self.tier: max(chunks - self.first, 0)})


class Faults:
    """Fails a seeded share of copies, half of them after moving a part of their blocks; torch raises RuntimeError."""

    def __init__(self, seed: int, share: float) -> None:
        self.random, self.share, self.failed = random.Random(seed), share, 0

    def __call__(self, copy: Callable[..., None], group: int, blocks: Any, places: Any, *rest: Any) -> None:
        if self.random.random() >= self.share:
            copy(group, blocks, places, *rest)
            return
        self.failed += 1
        some = self.random.randrange(len(blocks) + 1) if self.random.random() < 0.5 else 0
        copy(group, blocks[:some], places[:some], *rest)
        raise RuntimeError("injected")


class LateCopies:
    """Copies that go on by themselves, as a device's do: each is made when it is asked for the n-th time.

    With a share of failures, a copy is refused at once, or fails while it is on its way. When the node's memory is
    let go of, what is on its way is made first.
    """

    def __init__(self, engine: Engine, seed: int, share: float = 0.0, longest: int = 8) -> None:
        self.random, self.share, self.longest, self.failed = random.Random(seed), share, longest, 0
        self.under_way: list[LateCopy] = []
        for rank in range(len(engine.workers)):
            pages = copier(engine, rank)._pages
            for name in ("start_gather", "start_scatter"):
                setattr(pages, name, functools.partial(self.start, pages, getattr(pages, name)))
            pages.detach = functools.partial(self.detach, pages, pages.detach)

    def start(self, pages: Any, copy: Callable[..., Any], *arguments: Any) -> "LateCopy":
        fails = self.random.random() < self.share
        self.failed += fails
        if fails and self.random.random() < 0.5:
            raise RuntimeError("injected: refused")
        polls = self.random.randrange(self.longest + 1)
        self.under_way.append(LateCopy(self, pages, functools.partial(copy, *arguments), polls, fails))
        return self.under_way[-1]

    def detach(self, pages: Any, detach: Callable[[], None]) -> None:
        for it in [it for it in self.under_way if it.pages is pages]:
            it.make()
        detach()


@dataclass(eq=False)
class LateCopy:
    """One of them."""

    copies: LateCopies
    pages: Any
    act: Callable[[], Any]
    polls: int
    fails: bool

    def make(self) -> None:
        if self in self.copies.under_way:
            self.copies.under_way.remove(self)
            self.act()

    def done(self) -> bool:
        self.polls -= 1
        if self.polls >= 0:
            return False
        self.make()
        if self.fails:
            raise RuntimeError("injected: failed on its way")
        return True
