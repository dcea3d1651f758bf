"""The requests that wait at a Conductor: service is shared between tenants, by weight, in tokens of work.

    shares = Shares(weights={"acme": 2.0})
    shares.push(ask, work_tokens(uncached_tokens, ask.output_tokens), now)
    ask = shares.pop(now)            # the next one to be routed, None if nobody waits
    shares.put_back(ask)             # it does not fit anywhere yet: nothing was served

Deficit round robin (Shreedhar, Varghese, SIGCOMM 1995) with debts, and locality within a turn (DLPM, arXiv 2501.14312):

    round r     each line, a tenant's requests of one priority, is due quantum * weight more tokens
    its turn    it is served while it has any of them left, and what the last request takes beyond is its debt
    after it    it sits out as many rounds as the debt takes: they are reckoned, not walked through

So a line that always has requests gets its share of every round within one quantum and one request, whatever others
push. A line that runs empty keeps no credit, only its debt, and that too is forgotten when nobody else waits.
Priorities are strict: while a higher one waits, lower ones get nothing.

While its turn lasts, a line may send first what has the longest prefix in the caches, among its first few; the oldest
goes next once it has waited long enough. Each call is O(log lines), O(window) with prefixes.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import islice

from headwater.fleet import Ask

OUTPUT_WEIGHT = 2.0
"""What an output token costs in prompt tokens: providers' prices say 2 to 5, and VTC (OSDI 2024) takes 2."""
QUANTUM = 8192
"""Tokens of work a round for a weight of 1: a typical engine's step, so that turns do not cut steps in pieces."""
TENANTS_MAX = 1024
OTHERS = "\0others"
"""The line of those who come when there are too many: no tenant has such a name."""
WINDOW = 8
PATIENCE_S = 1.0
"""How long the oldest lets others of its tenant with longer prefixes pass: about the TTFT that a chat may have."""


def work_tokens(uncached_tokens: int, output_tokens: float) -> float:
    """The work of a request, in prompt tokens."""
    return uncached_tokens + OUTPUT_WEIGHT * output_tokens


class _Entry:
    __slots__ = ("ask", "line", "pushed_s", "work")

    def __init__(self, ask: Ask, work: float, line: _Line, now: float) -> None:
        self.ask, self.work, self.line, self.pushed_s = ask, work, line, now


class _Line:
    """One tenant's requests of one priority; `left` is what it may still take in this turn, negative: its debt."""

    __slots__ = ("entries", "left", "name", "queued", "share", "work")

    def __init__(self, name: str, share: float) -> None:
        self.name, self.share = name, share
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.left = 0.0
        self.work = 0.0
        self.queued = False
        """Whether it stands in the order of turns."""


class _Class:
    """The lines of one priority: whose turn it is, and in which order the others' come."""

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}
        self.turns: list[tuple[int, int, _Line]] = []
        """A heap of (round, order of arrival, line)."""
        self.round = 0
        self.order = 0
        self.current: _Line | None = None
        self.waiting = 0

    def enter(self, line: _Line, round_: int) -> None:
        """Its turn comes in this round, after those who are there already."""
        self.order += 1
        heappush(self.turns, (round_, self.order, line))
        line.queued = True

    def next_line(self) -> _Line:
        """The line to be served; there must be one that waits."""
        line = self.current
        while True:
            if line is not None and line.entries and line.left > 0:
                self.current = line
                return line
            if line is not None:
                self._end_turn(line)
            self.round, _, line = heappop(self.turns)
            line.queued = False
            line.left += line.share

    def _end_turn(self, line: _Line) -> None:
        self.current = None
        if line.entries or line.left < 0:  # never with anything left: who has both goes on
            missed = int(-line.left // line.share)
            line.left += missed * line.share
            self.enter(line, self.round + 1 + missed)
        else:
            # Its debt is paid, if it had one. What it has left now it does not save.
            del self.lines[line.name]


class Shares:
    """Who waits, and who is next. One caller at a time; a request's name is its own while it waits."""

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        quantum: float = QUANTUM,
        tenants_max: int = TENANTS_MAX,
        prefix: Callable[[Ask], int] | None = None,
        window: int = WINDOW,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Tenants without a weight have 1. `prefix` says how many leading tokens of a prompt are cached; None: each
        line is served in its order."""
        self._weights = dict(weights or {})
        assert quantum > 0 and all(it > 0 for it in self._weights.values()), f"{quantum=}, {self._weights=}"
        assert tenants_max > 0 and window > 0, f"{tenants_max=}, {window=}"
        self._quantum, self._tenants_max = quantum, tenants_max
        self._prefix, self._window, self._patience_s = prefix, window, patience_s
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []
        self._entries: dict[str, _Entry] = {}
        self._popped: _Entry | None = None

    def __repr__(self) -> str:
        return f"Shares({len(self)} wait, priorities {self._priorities[::-1]})"

    def __len__(self) -> int:
        return len(self._entries)

    def waiting(self, priority: int, tenant: str) -> tuple[int, float]:
        """How many requests of a tenant wait, and their work."""
        found = self._classes.get(priority)
        line = found.lines.get(tenant) if found is not None else None
        return (len(line.entries), line.work) if line is not None else (0, 0.0)

    def push(self, ask: Ask, work: float, now: float = 0.0) -> None:
        """A request waits from now on."""
        assert ask.request not in self._entries, f"request {ask.request} waits already"
        assert work > 0, f"{work=}"
        here = self._classes.get(ask.priority)
        if here is None:
            here = self._classes[ask.priority] = _Class()
            insort(self._priorities, ask.priority)
        line = here.lines.get(ask.tenant) or self._new_line(here, ask.tenant)
        entry = _Entry(ask, work, line, now)
        self._add(here, entry)

    def pop(self, now: float = 0.0) -> Ask | None:
        """The next request, which is served now and does not wait any more; None if nobody does."""
        if not self._entries:
            return None
        here = self._classes[self._priorities[-1]]
        line = here.next_line()
        entry = self._pick(line, now)
        line.left -= entry.work
        self._remove(entry)
        self._popped = entry
        return entry.ask

    def put_back(self, ask: Ask) -> None:
        """What was popped last was not served: it is its line's first, and was not taken off its share."""
        entry = self._popped
        assert entry is not None and entry.ask is ask, f"{ask.request} was not popped last"
        self._popped = None
        here = self._classes.get(ask.priority)
        if here is None or here.lines.get(entry.line.name) is not entry.line:
            # Nobody waited any more, and everything about the line was forgotten.
            self.push(ask, entry.work, entry.pushed_s)
            return
        entry.line.left += entry.work
        self._add(here, entry)
        entry.line.entries.move_to_end(ask.request, last=False)

    def cancel(self, request: str) -> bool:
        """It does not wait any more, if it did."""
        entry = self._entries.get(request)
        if entry is None:
            return False
        self._remove(entry)
        return True

    def _new_line(self, here: _Class, tenant: str) -> _Line:
        name = tenant if len(here.lines) < self._tenants_max else OTHERS
        line = here.lines.get(name)
        if line is None:
            line = here.lines[name] = _Line(name, self._quantum * self._weights.get(name, 1.0))
            here.enter(line, here.round + 1)
        return line

    def _add(self, here: _Class, entry: _Entry) -> None:
        line, request = entry.line, entry.ask.request
        line.entries[request] = entry
        line.work += entry.work
        self._entries[request] = entry
        here.waiting += 1

    def _remove(self, entry: _Entry) -> None:
        """Take it out; a priority where nobody waits is forgotten, debts and all: they hurt nobody."""
        line, priority = entry.line, entry.ask.priority
        del line.entries[entry.ask.request]
        del self._entries[entry.ask.request]
        line.work = line.work - entry.work if line.entries else 0.0
        here = self._classes[priority]
        here.waiting -= 1
        if not here.waiting:
            del self._classes[priority]
            self._priorities.remove(priority)

    def _pick(self, line: _Line, now: float) -> _Entry:
        oldest = next(iter(line.entries.values()))
        if self._prefix is None or now - oldest.pushed_s > self._patience_s:
            return oldest
        best, longest = oldest, -1
        for entry in islice(line.entries.values(), self._window):
            found = self._prefix(entry.ask)
            if found > longest:
                best, longest = entry, found
        return best
