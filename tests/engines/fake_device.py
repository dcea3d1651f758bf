"""A device whose streams are queues and whose scheduler is an adversary: it runs whatever the events allow.

Work is queued, and run only when it must be (somebody waits) or by chance. Which stream goes next is drawn from the
seed: streams take turns, starve, or run far ahead of the others. Every copy is torn in two, so that others come in
between. A wait that is missing shows as wrong bytes; waits that can never end raise.
"""

import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

GARBAGE = 0xA5


@dataclass(eq=False)
class FakeEvent:
    """A point in a stream."""

    over: bool = False


@dataclass(eq=False)
class FakeStream:
    """Work in order: something to run, an event to set, or an event to wait for."""

    name: str
    queue: deque[Callable[[], None] | tuple[str, FakeEvent]] = field(default_factory=deque)

    def runnable(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        return not isinstance(head, tuple) or head[0] == "record" or head[1].over


class FakeDevice:
    """See the module. `cut` names a line of the caller: what it asks for is left out (see `cut_lines`).

    `lines` collects, for each kind of ordering call, the lines from which it was called.
    """

    def __init__(self, seed: int, cut: tuple[str, int] | None = None, pins: bool = True) -> None:
        self.random = random.Random(seed)
        self.eagerness = self.random.choice([0.0, 0.0, 0.2, 0.6])
        self.streams: list[FakeStream] = []
        self.compute = self.stream("compute")
        self.favourites: list[FakeStream] = []
        self.cut, self.lines = cut, set[tuple[str, int]]()
        self.pins, self.pinned = pins, dict[int, int]()
        self.fail_after: int | None = None

    # ---- what the adversary does ----------------------------------------------------------------------

    def step(self) -> bool:
        """Run one thing; False when nothing can run."""
        able = [it for it in self.streams if it.runnable()]
        if not able:
            return False
        if not self.favourites or self.random.random() < 0.15:
            self.favourites = self.random.sample(self.streams, len(self.streams))
        stream = min(able, key=self.favourites.index)
        head = stream.queue.popleft()
        if not isinstance(head, tuple):
            head()
        elif head[0] == "record":
            head[1].over = True
        return True

    def perhaps(self) -> None:
        """Run a little, or nothing."""
        while self.random.random() < self.eagerness and self.step():
            pass

    def drain(self) -> None:
        """Run all that was given to all streams."""
        while self.step():
            pass
        stuck = [it.name for it in self.streams if it.queue]
        assert not stuck, f"streams {stuck} wait for ever"

    def give(self, stream: FakeStream, work: Callable[[], None]) -> None:
        """Queue work; `fail_after` makes one of these calls fail."""
        if self.fail_after is not None:
            if self.fail_after == 0:
                self.fail_after = None
                raise RuntimeError("injected: launch failed")
            self.fail_after -= 1
        stream.queue.append(work)
        self.perhaps()

    def left_out(self, kind: str) -> bool:
        """Whether the calling line is the one to leave out."""
        line = (kind, sys._getframe(2).f_lineno)
        self.lines.add(line)
        return line == self.cut

    # ---- the Device protocol --------------------------------------------------------------------------

    def stream(self, name: str = "") -> FakeStream:
        self.streams.append(FakeStream(name or f"stream {len(self.streams)}"))
        self.favourites = []
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self.compute

    def record(self, stream: FakeStream) -> FakeEvent:
        if self.left_out("record"):
            return FakeEvent(over=True)
        event = FakeEvent()
        stream.queue.append(("record", event))
        self.perhaps()
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if not self.left_out("wait"):
            stream.queue.append(("wait", event))

    def finished(self, event: FakeEvent) -> bool:
        self.step()
        return event.over

    def synchronize(self, event: FakeEvent) -> None:
        if self.left_out("synchronize"):
            return
        while not event.over:
            assert self.step(), "waits for an event that nothing can end"

    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), GARBAGE, dtype=torch.uint8)

    def upload(self, stream: FakeStream, numbers: np.ndarray) -> torch.Tensor:
        kept, target = torch.from_numpy(numbers.copy()), torch.zeros(len(numbers), dtype=torch.int64)
        self.give(stream, lambda: target.copy_(kept))
        return target

    def take(self, stream: FakeStream, pages: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> None:
        assert target.shape == (pages.shape[0], len(ids), pages.shape[2])
        for part in self.torn(len(ids)):
            self.give(stream, lambda part=part: target[:, part].copy_(pages.index_select(1, ids[part])))

    def put(self, stream: FakeStream, pages: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> None:
        assert source.shape == (pages.shape[0], len(ids), pages.shape[2])
        for part in self.torn(len(ids)):
            self.give(stream, lambda part=part: pages.index_copy_(1, ids[part], source[:, part]))

    def copy(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.is_contiguous() and source.is_contiguous()
        for part in self.torn(len(target)):
            self.give(stream, lambda part=part: target[part].copy_(source[part]))

    def torn(self, length: int) -> list[slice]:
        middle = self.random.randint(0, length)
        return [slice(0, middle), slice(middle, length)]

    def pin(self, address: int, size_bytes: int) -> bool:
        if self.pins:
            assert address not in self.pinned, "pinned twice"
            self.pinned[address] = size_bytes
        return self.pins

    def unpin(self, address: int) -> None:
        del self.pinned[address]
