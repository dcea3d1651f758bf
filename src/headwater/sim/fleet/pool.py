"""An engine's blocks and the prefixes in them: LRU, exact to the block, at a cost that hardly depends on how many.

All prompts of a trace are known before it is played, so their blocks form a tree that can be cut at its forks once,
into *runs*: blocks that are only ever used one after another. A pool keeps of a run how many of its blocks are
resident, how many of those requests hold, and where its idle ones are cut into pieces of equal age:

    0           held           resident      length of the run
    |-- held by --|-- newer --|-- older --|-- absent --|
        requests      idle        idle

Requests give blocks back from their end, so what is deeper is always older, and an eviction always shortens a run at
its resident end, and a run before those that it follows. Blocks of generated tokens can never be asked for again;
they are idle pieces of no run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Path = tuple[tuple[int, int], ...]
"""A prompt's runs in order, and how many blocks of each: all of them, but for the last."""

COMPACT = 4096
"""How many idle pieces may be queued before those that were taken again are swept out."""


class Span:
    """A run's blocks in one pool; see above. `holds` has the blocks that each request holds of it."""

    __slots__ = ("held", "holds", "idle", "resident", "run")

    def __init__(self, run: int) -> None:
        self.run = run
        self.resident = 0
        self.held = 0
        self.holds: list[int] = []
        self.idle: list[Piece] = []
        """Deepest and oldest first."""


class Piece:
    """Idle blocks [low, high) of a run that became idle together; of generated tokens if there is no span."""

    __slots__ = ("high", "low", "span")

    def __init__(self, low: int, high: int, span: Span | None) -> None:
        self.low = low
        self.high = high
        self.span = span


class Held:
    """What one request holds of a pool: leading blocks of its path, and blocks that nobody else can use."""

    __slots__ = ("blocks", "deepest", "path", "private", "spans")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spans: list[Span] = []
        self.deepest = 0
        """How many blocks of the last span."""
        self.blocks = 0
        """Of the path, in all."""
        self.private = 0


class Pool:
    """`capacity` blocks. Blocks that no request holds stay until their room is needed, oldest first.

    If `told` is a list, each change of how many blocks of a run are resident is appended as (run, before, after).
    """

    __slots__ = ("active", "capacity", "free", "queue", "spans", "told")

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, f"{capacity=}"
        self.capacity = capacity
        self.free = capacity
        """Blocks with nothing in them."""
        self.active = 0
        """Blocks that requests hold."""
        self.spans: dict[int, Span] = {}
        self.queue: deque[Piece] = deque()
        self.told: list[tuple[int, int, int]] | None = None

    def __repr__(self) -> str:
        idle = self.capacity - self.free - self.active
        return f"<Pool of {self.capacity} blocks: {self.active} active, {idle} idle, {self.free} free>"

    def leading(self, path: Path) -> int:
        """How many leading blocks of a path are resident."""
        get = self.spans.get
        found = 0
        for run, blocks in path:
            span = get(run)
            if span is None:
                break
            resident = span.resident
            if resident < blocks:
                return found + resident
            found += blocks
        return found

    def find(self, path: Path) -> tuple[int, int]:
        """How many leading blocks of a path are resident, and how many of those some request holds."""
        get = self.spans.get
        found = held = 0
        for run, blocks in path:
            span = get(run)
            if span is None:
                break
            here = span.resident
            if here > blocks:
                here = blocks
            found += here
            held += span.held if span.held < here else here  # noqa: FURB136  (half the time of min)
            if here < blocks:
                break
        return found, held

    def take(self, count: int) -> None:
        """Make `count` blocks active, emptying the oldest idle ones if need be; the caller knows that they suffice."""
        self.active += count
        free = self.free - count
        if free >= 0:
            self.free = free
            return
        self.free = 0
        self._evict(-free)

    def _evict(self, count: int) -> None:
        queue, told = self.queue, self.told
        while count > 0:
            piece = queue[0]
            low, high, span = piece.low, piece.high, piece.span
            size = high - low
            if size <= count:
                queue.popleft()
                if not size:
                    continue
                left = low
                if span is not None:
                    del span.idle[0]
            else:
                left = piece.high = high - count
            count -= high - left
            if span is None:
                continue
            span.resident = left
            if told is not None:
                told.append((span.run, high, left))
            if not left:
                del self.spans[span.run]

    def grow(self, held: Held, count: int) -> None:
        """Hold `count` more blocks of the path: those that are resident, and room for the others, which count as
        resident from now on."""
        path, spans, known = held.path, held.spans, self.spans
        held.blocks += count
        at = len(spans) - 1
        has = held.deepest
        while count > 0:
            if at < 0 or has == path[at][1]:
                at += 1
                run, length = path[at]
                span = known.get(run)
                if span is None:
                    span = known[run] = Span(run)
                spans.append(span)
                has = 0
            else:
                length = path[at][1]
                span = spans[at]
                span.holds.remove(has)
            more = length - has
            if more > count:
                more = count
            count -= more
            has += more
            span.holds.append(has)
            if has <= span.held:
                continue
            resident = span.resident
            if span.idle:
                self._wake(span, has)
            span.held = has
            if has > resident:
                span.resident = has
                new = has - resident
                self.active += new
                free = self.free = self.free - new
                if free < 0:
                    self.free = 0
                    self._evict(-free)
                if self.told is not None:
                    self.told.append((span.run, resident, has))
        held.deepest = has

    def _wake(self, span: Span, until: int) -> None:
        """The idle blocks of a run before `until` are held again."""
        until_resident = until if until < span.resident else span.resident  # noqa: FURB136
        self.active += until_resident - span.held
        idle = span.idle
        while idle:
            piece = idle[-1]
            if piece.high > until:
                piece.low = until
                break
            idle.pop()
            piece.high = piece.low

    def release(self, held: Held, generated: int = 0) -> None:
        """Let go of all, deepest first. `generated` whole blocks of generated tokens stay idle until their room is
        needed; the other private ones are free at once."""
        queue = self.queue
        private = held.private
        active = self.active - private
        self.free += private - generated
        if generated:
            queue.append(Piece(0, generated, None))
        spans, path = held.spans, held.path
        has = held.deepest
        for at in range(len(spans) - 1, -1, -1):
            span = spans[at]
            holds = span.holds
            holds.remove(has)
            if has == span.held and has not in holds:
                top = max(holds) if holds else 0
                piece = Piece(top, has, span)
                span.idle.append(piece)
                queue.append(piece)
                span.held = top
                active -= has - top
            has = path[at - 1][1]
        self.active = active
        held.spans = []
        held.deepest = held.blocks = held.private = 0
        if len(queue) > COMPACT and len(queue) > 4 * len(self.spans):
            self.queue = deque(piece for piece in queue if piece.high > piece.low)

    def clear(self) -> None:
        """Forget everything: the engine is gone."""
        if self.told is not None:
            self.told.extend((span.run, span.resident, 0) for span in self.spans.values())
        self.spans.clear()
        self.queue.clear()
        self.free = self.capacity
        self.active = 0

    def resident(self) -> Sequence[tuple[int, int]]:
        """Each run of which something is resident, and how many blocks."""
        return [(run, span.resident) for run, span in self.spans.items()]
