"""Bringing a request's prefix up from the levels below while the request waits: how far, and for how long.

Theory of operation, one request (named by its instance and its own name):

    ask ─► what HOST has, and which level has the rest; REMOTE levels must be asked first, one after the other
        ─► plan (cost.py): the prefix length with the least estimated time to first token
        ─► reads in prefix order, a few at a time                                     waiting: "ask again"
        ─► over: all of it is in HOST, or patience has ended, or something on the way is not what it was thought to be

Whoever asks again learns how long the prefix is in HOST by now and whether it is worth waiting for more. When a fetch
is over, the answer is final; what is still under way then will be there for the next request. What was brought up is
held for a moment, so that it is still there when the engine loads it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from headwater.core.cost import Calibration, Patience, Plan, Source, Step, best_prefix
from headwater.core.layout import companions, longest_usable, main_group, needed_chunks
from headwater.core.levels import Level
from headwater.core.movement import WRONG, Move, Movement
from headwater.types import ChunkKey, Cleared, HitRule, KVLayout, Outcome, TicketKind, Tier

FETCHES_MAX = 4096
RECORDS_MAX, RECORDED_KEYS_MAX = 512, 131_072
FINAL_S = 60.0
"""How long a final answer stands if nobody says that the request is over."""
HOLD_S = 2.0
HELD_SHARE = 0.25
LOOK_S = 0.5
"""How often a fetch is looked at that nobody asks for."""
STEPS_MAX = 8
"""Into how many steps a way up is cut, to choose how many of them to take."""
HERE = -1
"""The source of a part that is in HOST."""


@dataclass(slots=True)
class Fetch:
    """One request's way up. `sources[g][i]` is who has group g's part of chunk i: HERE, a level, or None; `levels[i]`
    is who else has something of chunk i that the first `target` chunks need, whoever has its main part first."""

    owner: str
    request: str
    space: int
    keys: list[ChunkKey]
    tokens_s: float | None
    began_s: float
    here: int
    patience: Patience
    sources: list[list[int | None]]
    limit_s: float = math.inf
    asked_s: float = 0.0
    levels: list[tuple[int, ...]] = field(default_factory=list)
    next_level: int = 0
    target: int = 0
    issued: int = 0
    asking: int = 0
    reading: int = 0
    plan: Plan | None = None
    why: str = ""
    over_s: float | None = None
    queued: bool = False
    """It is among those that wait for reads."""
    brought: dict[int, int] = field(default_factory=dict)
    """From which level a chunk came."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How many leading chunks are READY in HOST, whether asking again is worth it, and how many of them were brought
    up for this request from DISK and from REMOTE."""

    chunks: int
    waiting: bool
    disk: int = 0
    remote: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """What came of a request's fetch, for people. `why` is empty where all was there or came."""

    request: str
    space: int
    keys: tuple[ChunkKey, ...]
    here: int
    brought: Mapping[str, int]
    chunks: int
    planned: int
    waited_s: float
    estimate_s: float | None
    tokens_s: float | None
    why: str
    at_s: float


class Fetches:
    """All fetches of a node; pure, like the movement that it drives."""

    def __init__(self, movement: Movement, patience_share: float = 0.10, wait_s: float = 5.0) -> None:
        """No request waits longer than `wait_s`, and what would take longer is not begun."""
        self._movement, self._host, self._levels = movement, movement.host, movement.levels
        self._share, self._wait_s = patience_share, wait_s
        self._too_long = f"longer than {wait_s:g} s"
        self._fetches: dict[tuple[str, str], Fetch] = {}
        self._over: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._waiting: deque[Fetch] = deque()
        self._held: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._held_bytes = 0
        self.records: OrderedDict[str, Record] = OrderedDict()
        self._recorded_keys = 0
        self.calibration = Calibration()
        self.cut = self.begun = 0
        movement.on_room = self.go_on

    def __repr__(self) -> str:
        return f"Fetches({self.active} active of {len(self._fetches)}, {self._held_bytes} bytes held)"

    @property
    def active(self) -> int:
        """How many are not over."""
        return len(self._fetches) - len(self._over)

    def ask(
        self, owner: str, request: str, space: int, keys: Sequence[ChunkKey], tokens_s: float | None, now: float
    ) -> Answer:
        """How long a request's prefix is in HOST, bringing more of it up if that is worth it."""
        fetch = self._fetches.get((owner, request))
        if fetch is not None and (fetch.space != space or len(fetch.keys) != len(keys) or fetch.keys[-1] != keys[-1]):
            self._give_up(fetch, "asked for something else", now)
            fetch = None
        chunks = self._host.match(space, keys)
        if fetch is None:
            if chunks == len(keys) or not self._levels or not self._has_place():
                record = Record(request, space, tuple(keys), chunks, {}, chunks, chunks, 0.0, None, tokens_s, "", now)
                self._record(record)
                return Answer(chunks, waiting=False)
            fetch = self._begin(owner, request, space, keys, chunks, tokens_s, self._share, now)
            # What it reads may have taken the room of what was there.
            chunks = self._host.match(space, keys)
        fetch.asked_s = now
        self._look(fetch, chunks, now)
        counts = {Tier.DISK: 0, Tier.REMOTE: 0}
        for number, count in self._brought(fetch, chunks).items():
            counts[self._levels[number].tier] += count
        return Answer(chunks, fetch.over_s is None, counts[Tier.DISK], counts[Tier.REMOTE])

    def prefetch(self, owner: str, request: str, space: int, keys: Sequence[ChunkKey], now: float) -> int:
        """Bring up all that the levels have, whatever it costs; how many chunks were not in HOST."""
        here = self._host.match(space, keys)
        if here == len(keys) or not self._levels:
            return 0
        known = self._fetches.get((owner, request))
        if known is not None and known.over_s is None:
            return len(keys) - here
        if known is not None:
            self._give_up(known, "", now)
        if not self._has_place():
            return 0
        fetch = self._begin(owner, request, space, keys, here, None, math.inf, now)
        self._look(fetch, self._host.match(space, keys), now)
        return len(keys) - here

    def is_over(self, owner: str, request: str) -> bool:
        """Whether nothing more will come for a request."""
        fetch = self._fetches.get((owner, request))
        return fetch is None or fetch.over_s is not None

    def forget(self, owner: str, requests: Collection[str], now: float) -> int:
        """Requests are over, or do not want it any more; how many were known."""
        known = [self._fetches[owner, it] for it in requests if (owner, it) in self._fetches]
        for fetch in known:
            self._give_up(fetch, "cancelled", now)
        return len(known)

    def forget_owner(self, owner: str, now: float) -> None:
        """An instance is gone."""
        self.forget(owner, [request for name, request in self._fetches if name == owner], now)

    def tick(self, now: float) -> None:
        """Now and then: end what nobody asks for any more, and what was held long enough."""
        for fetch in self._fetches.values():
            if fetch.over_s is None and now - fetch.asked_s >= LOOK_S:
                self._look(fetch, self._host.match(fetch.space, fetch.keys), now)
        while self._over:
            fetch = self._fetches[next(iter(self._over))]
            if fetch.over_s is None or now - fetch.over_s <= FINAL_S:
                break
            self._remove(fetch)
        self._let_go(now)
        self.go_on(now)

    # ---- the way of one fetch -------------------------------------------------------------------------

    def _begin(
        self,
        owner: str,
        request: str,
        space: int,
        keys: Sequence[ChunkKey],
        here: int,
        tokens_s: float | None,
        share: float,
        now: float,
    ) -> Fetch:
        """A new fetch, of which HOST has `here` chunks."""
        layout = self._host.spaces[space].layout
        total = (len(keys) - here) * layout.chunk_tokens
        # A prefetch by an operator (infinite share) ends when it is through; a request, when it does not pay.
        limit_s = self._wait_s if share < math.inf else math.inf
        floor_s = 0.1 if share < math.inf else math.inf
        patience = Patience(total, tokens_s, share, floor_s, limit_s)
        sources = [self._sources(space, group, keys) for group in range(len(layout.groups))]
        fetch = Fetch(owner, request, space, list(keys), tokens_s, now, here, patience, sources, limit_s, asked_s=now)
        fetch.target = fetch.issued = here
        self._fetches[owner, request] = fetch
        self.begun += 1
        self._extend(fetch, now)
        return fetch

    def _sources(self, space: int, group: int, keys: Sequence[ChunkKey]) -> list[int | None]:
        """Who has one group's part of each chunk; what REMOTE levels have is not known yet."""
        found: list[int | None] = [HERE if it else None for it in self._host.which_ready(space, group, keys)]
        for number, level in enumerate(self._levels):
            served = level.serves_which(space, group, keys) if level.well else None
            if served is not None:
                pairs = zip(found, served, strict=True)
                found = [number if source is None and it else source for source, it in pairs]
        return found

    def _extend(self, fetch: Fetch, now: float) -> None:
        """Plan with what is known by now, and ask the next level about the rest."""
        layout = self._host.spaces[fetch.space].layout
        reach = _reach(layout, fetch.sources, len(fetch.keys))
        self._plan(fetch, layout, reach, now)
        while reach < len(fetch.keys) and not fetch.asking and fetch.next_level < len(self._levels):
            number = fetch.next_level
            fetch.next_level += 1
            level = self._levels[number]
            if level.disk is not None or not level.well or fetch.space in level.clearing:
                continue
            parts = [
                (group, key)
                for group, row in enumerate(fetch.sources)
                for key, source in zip(fetch.keys[fetch.here :], row[fetch.here :], strict=True)
                if source is None
            ]
            if parts:
                fetch.asking += 1
                self._movement.ask(number, fetch.space, parts, now, partial(self._told, fetch, number))

    def _plan(self, fetch: Fetch, layout: KVLayout, reach: int, now: float) -> None:
        if reach <= fetch.here:
            return
        steps, chunks, used = self._steps(fetch, layout, reach)
        sources = [self._speed(number) for number in range(len(self._levels))]
        rest = (len(fetch.keys) - reach) * layout.chunk_tokens
        plan = best_prefix(steps, rest, fetch.tokens_s, sources, fetch.began_s + fetch.limit_s - now)
        target = _reach(layout, fetch.sources, min(fetch.here + plan.steps * chunks, reach))
        fetch.why = ""
        if target < reach and (plan.limited or fetch.tokens_s):
            fetch.why = self._too_long if plan.limited else "slower than computing it"
            for number in used:
                self._levels[number].reading.declined()
                self._levels[number].sums.declined += 1
        if target > fetch.target:
            fetch.plan, fetch.target = plan, target
            # So that its own reads do not take the room of what it has.
            self._host.touch(fetch.space, fetch.keys[: fetch.here])
            self._aim(fetch)

    def _steps(self, fetch: Fetch, layout: KVLayout, reach: int) -> tuple[list[Step], int, set[int]]:
        """The way from `here` to `reach` as the cost model sees it: steps of so many chunks each, the last perhaps of
        fewer; and the levels that it needs."""
        sizes = self._host.spaces[fetch.space].slot_bytes
        chunks = -(-(reach - fetch.here) // STEPS_MAX)
        row, only = fetch.sources[0][fetch.here : reach], fetch.sources[0][fetch.here]
        if len(fetch.sources) == 1 and only is not None and only != HERE and row.count(only) == len(row):
            # One group, all from one level: nearly always.
            counts = [min(chunks, len(row) - first) for first in range(0, len(row), chunks)]
            return [Step(it * layout.chunk_tokens, it * sizes[0], only) for it in counts], chunks, {only}
        levels = _levels(layout, fetch.sources, reach)
        bytes_of = [0] * reach
        for group, row in enumerate(fetch.sources):
            for at in needed_chunks(layout, group, reach):
                if row[at] is not None and row[at] != HERE:
                    bytes_of[at] += sizes[group]
        steps = []
        for first in range(fetch.here, reach, chunks):
            end = min(first + chunks, reach)
            # Of several levels the last is taken: it is the slowest.
            source = max((number for of_one in levels[first:end] for number in of_one), default=None)
            steps.append(Step((end - first) * layout.chunk_tokens, sum(bytes_of[first:end]), source))
        return steps, chunks, {number for of_one in levels[fetch.here :] for number in of_one}

    def _aim(self, fetch: Fetch) -> None:
        """The target is another: what needs to be read for it?"""
        layout = self._host.spaces[fetch.space].layout
        fetch.levels = _levels(layout, fetch.sources, fetch.target)
        if fetch.issued < fetch.target and not fetch.queued:
            fetch.queued = True
            self._waiting.append(fetch)

    def _cut(self, fetch: Fetch, parts: Collection[tuple[int, int]], why: str) -> None:
        """These (group, chunk) parts will not come: aim at the longest prefix that can do without them."""
        layout = self._host.spaces[fetch.space].layout
        for group, at in parts:
            fetch.sources[group][at] = None
        target = _reach(layout, fetch.sources, fetch.target)
        if target < fetch.target:
            fetch.target, fetch.why = max(target, fetch.here), why
            # A shorter prefix may need windows and states that the longer one did not.
            fetch.issued = fetch.here if companions(layout) else min(fetch.issued, fetch.target)
            self._aim(fetch)

    def _speed(self, number: int) -> Source:
        level = self._levels[number]
        return Source(level.reading, level.reading_bytes)

    def _told(self, fetch: Fetch, number: int, move: Move, outcomes: list[Outcome], now: float) -> None:
        """A REMOTE level has said what it has."""
        fetch.asking -= 1
        held = set()
        for part, it in zip(move.command.parts, outcomes, strict=True):
            if it is Outcome.DONE:
                if not self._levels[number].is_useless(fetch.space, part.group, part.key):
                    held.add((part.group, part.key))
            elif it in WRONG:
                self._levels[number].unknow(fetch.space, part.group, part.key)
        if fetch.over_s is not None:
            return
        for group, row in enumerate(fetch.sources):
            for at, key in enumerate(fetch.keys):
                if row[at] is None and (group, key) in held:
                    row[at] = number
        self._extend(fetch, now)

    # ---- reads ----------------------------------------------------------------------------------------

    def go_on(self, now: float) -> None:
        """Start the reads for which there is room, one of each fetch in turn."""
        progress = True
        while progress and self._waiting and any(self._has_room(level) for level in self._levels):
            progress = False
            stuck: list[Fetch] = []
            for _ in range(len(self._waiting)):
                fetch = self._waiting.popleft()
                fetch.queued = False
                if fetch.over_s is not None:
                    continue
                started = self._issue(fetch, now)
                progress |= started
                if fetch.issued >= fetch.target or fetch.queued:
                    continue
                fetch.queued = True
                # Whoever got nothing is the first next time.
                (self._waiting if started else stuck).append(fetch)
            self._waiting.extendleft(reversed(stuck))

    def _issue(self, fetch: Fetch, now: float) -> bool:
        """Start the next read of a fetch; False if there is none or no room for it."""
        while fetch.issued < fetch.target:
            first, numbers = fetch.issued, fetch.levels[fetch.issued]
            if not numbers:  # it is in HOST
                fetch.issued += 1
                continue
            if not all(self._has_room(self._levels[number]) for number in numbers):
                return False
            end = fetch.issued = self._batch_end(fetch, first)
            keys, parent = fetch.keys[first:end], fetch.keys[first - 1] if first else None
            wanted = self._wanted(fetch, first, end)
            started = False
            for number in numbers:
                parts = [(group, fetch.keys[at]) for group, at in wanted if fetch.sources[group][at] == number]
                ended = partial(self._came, fetch, number, first)
                patient = fetch.limit_s == math.inf  # it is nobody's request
                move = self._movement.read(number, fetch.space, keys, parts, parent, now, ended, background=patient)
                started |= move is not None
                fetch.reading += move is not None
            self._check_started(fetch, wanted)
            if started:
                return True
        return False

    def _check_started(self, fetch: Fetch, wanted: Sequence[tuple[int, int]]) -> None:
        """Each of the parts that were to be brought must now be in HOST or on its way there."""
        index = self._host.spaces[fetch.space].index
        lost = [(group, at) for group, at in wanted if fetch.keys[at] not in index[group]]
        if not lost:
            return
        group, at = min(lost, key=lambda it: it[1])
        level = self._levels[fetch.sources[group][at] or 0]
        there = level.disk is None or level.serves(fetch.space, group, fetch.keys[at])
        self._cut(fetch, lost, "no room in HOST" if there else f"evicted from {level.name} on the way")

    def _has_room(self, level: Level) -> bool:
        busy = level.reads and level.reading_bytes >= level.moving_bytes_max
        return level.well and level.reads < 2 * level.readers and not busy

    def _batch_end(self, fetch: Fetch, first: int) -> int:
        levels, end = fetch.levels, first + 1
        batch_bytes = min(self._levels[number].batch_bytes for number in levels[first])
        limit = min(first + max(batch_bytes // sum(self._host.spaces[fetch.space].slot_bytes), 1), fetch.target)
        while end < limit and levels[end] == levels[first]:
            end += 1
        return end

    def _wanted(self, fetch: Fetch, first: int, end: int) -> list[tuple[int, int]]:
        """The (group, chunk) parts of these chunks that levels have and the target needs."""
        layout = self._host.spaces[fetch.space].layout
        wanted = []
        for group, row in enumerate(fetch.sources):
            needed = needed_chunks(layout, group, fetch.target)
            wanted += [(group, at) for at in range(first, end) if at in needed and row[at] not in (None, HERE)]
        return wanted

    def _came(self, fetch: Fetch, number: int, first: int, move: Move, outcomes: list[Outcome], now: float) -> None:
        """A read of this fetch has ended."""
        fetch.reading -= 1
        failed = self._movement.arrived(move, outcomes, now)
        for part in move.command.parts:
            if part.key not in failed:
                fetch.brought.setdefault(first + move.position[part.key], number)
        if fetch.over_s is not None:
            return
        if failed:
            wrong = [it for it in outcomes if it in WRONG]
            why = f"{wrong[0].value} in {self._levels[number].name}" if wrong else f"{self._levels[number].name} failed"
            parts = [(part.group, first + move.position[part.key]) for part in move.command.parts if part.key in failed]
            self._cut(fetch, parts, why)
        self._look(fetch, self._host.match(fetch.space, fetch.keys), now)

    def _look(self, fetch: Fetch, chunks: int, now: float) -> None:
        """Is it over?"""
        if fetch.over_s is not None:
            return
        tokens = max(chunks - fetch.here, 0) * self._host.spaces[fetch.space].layout.chunk_tokens
        waits = chunks < fetch.target or fetch.asking
        if waits and fetch.patience.expired(now - fetch.began_s, tokens):
            fetch.why = self._too_long if now - fetch.began_s > fetch.limit_s else "slower than expected"
            self.cut += 1
        elif waits and (fetch.asking or fetch.reading or self._under_way(fetch, chunks)):
            return
        elif waits:
            fetch.why = fetch.why or "evicted on the way"
        self._end(fetch, chunks, now)
        if fetch.owner:
            for number, count in self._brought(fetch, chunks).items():
                tokens = count * self._host.spaces[fetch.space].layout.chunk_tokens
                self._levels[number].sums.hit_tokens += tokens
        self._hold(fetch, chunks, now)

    def _under_way(self, fetch: Fetch, chunks: int) -> bool:
        """Whether more than the first `chunks` can still come, although none of its reads is under way: its next read
        waits for its turn, or somebody else brings or writes what is missing."""
        numbers = next((it for it in fetch.levels[fetch.issued :] if it), ())
        if numbers:
            sick = [self._levels[number].name for number in numbers if not self._levels[number].well]
            if sick:
                fetch.why = f"{sick[0]} failed"
            return not sick
        it, ready = self._host.spaces[fetch.space], self._host.is_ready
        if it.main is not None and not ready(fetch.space, it.main, fetch.keys[chunks]):
            return fetch.keys[chunks] in it.index[it.main]
        return any(
            fetch.keys[at] in it.index[group] and not ready(fetch.space, group, fetch.keys[at])
            for group in it.companions
            for at in needed_chunks(it.layout, group, fetch.target)
        )

    def _end(self, fetch: Fetch, chunks: int, now: float) -> None:
        fetch.over_s = now
        self._over[fetch.owner, fetch.request] = None
        waited_s = now - fetch.began_s
        plan = fetch.plan
        if plan is not None and chunks >= fetch.target and not plan.guessed and fetch.brought:
            self.calibration.add(plan.fetch_s, waited_s)
        counts = self._brought(fetch, chunks)
        record = Record(
            fetch.request,
            fetch.space,
            tuple(fetch.keys),
            fetch.here,
            {self._levels[number].name: count for number, count in counts.items()},
            chunks,
            fetch.target,
            waited_s,
            None if plan is None else plan.fetch_s,
            fetch.tokens_s,
            fetch.why,
            now,
        )
        self._record(record)

    def _brought(self, fetch: Fetch, chunks: int) -> dict[int, int]:
        """How many of the first `chunks` chunks came from each level."""
        counts: dict[int, int] = {}
        for at, number in fetch.brought.items():
            if at < chunks:
                counts[number] = counts.get(number, 0) + 1
        return counts

    def _has_place(self) -> bool:
        """Whether one more fetch is allowed; the oldest that is over gives way."""
        if len(self._fetches) >= FETCHES_MAX and self._over:
            self._remove(self._fetches[next(iter(self._over))])
        return len(self._fetches) < FETCHES_MAX

    def _remove(self, fetch: Fetch) -> None:
        name = (fetch.owner, fetch.request)
        self._fetches.pop(name, None)
        self._over.pop(name, None)

    def _record(self, record: Record) -> None:
        old = self.records.pop(record.request, None)
        self._recorded_keys += len(record.keys) - (len(old.keys) if old else 0)
        self.records[record.request] = record
        while len(self.records) > RECORDS_MAX or (self._recorded_keys > RECORDED_KEYS_MAX and len(self.records) > 1):
            _, gone = self.records.popitem(last=False)
            self._recorded_keys -= len(gone.keys)

    def _give_up(self, fetch: Fetch, why: str, now: float) -> None:
        if fetch.over_s is None:
            fetch.why = why
            self._end(fetch, self._host.match(fetch.space, fetch.keys), now)
        self._remove(fetch)

    def _hold(self, fetch: Fetch, chunks: int, now: float) -> None:
        """Keep what was brought up until the engine has had time to load it."""
        size = sum(self._host.spaces[fetch.space].slot_bytes) * max(chunks - fetch.here, 0)
        if not size or self._held_bytes + size > HELD_SHARE * self._host.pool.capacity_bytes:
            return
        groups = range(len(fetch.sources))
        parts = [(group, key) for group in groups for key in fetch.keys[fetch.here : chunks]]
        ticket, _ = self._host.hold("", TicketKind.PIN, fetch.space, parts, now + HOLD_S)
        if ticket:
            self._held[ticket] = (now + HOLD_S, size)
            self._held_bytes += size

    def clear(self, space: int, now: float, *, here_only: bool = False) -> Cleared:
        """See `Movement.clear`; what is on its way up for requests does not arrive."""
        for fetch in self._fetches.values():
            if fetch.space == space and fetch.over_s is None:
                fetch.why = "the namespace was cleared"
                self._end(fetch, 0, now)
        self.let_go_all()
        return self._movement.clear(space, now, here_only=here_only)

    def let_go_all(self) -> None:
        """Hold nothing any more that was brought up: somebody wants it gone."""
        self._let_go(math.inf)

    def _let_go(self, now: float) -> None:
        while self._held:
            ticket, (until_s, size) = next(iter(self._held.items()))
            if now <= until_s:
                return
            del self._held[ticket]
            self._held_bytes -= size
            if ticket in self._host.tickets:
                self._host.release("", ticket)


def _reach(layout: KVLayout, sources: Sequence[Sequence[int | None]], limit: int) -> int:
    """How many chunks are usable once everything that anybody has is in HOST."""
    for group, row in enumerate(sources):
        if layout.groups[group].rule is HitRule.ALL and None in row[:limit]:
            limit = row.index(None)
    if all(it.rule is HitRule.ALL for it in layout.groups):
        return limit
    present = {group: [source is not None for source in row[:limit]] for group, row in enumerate(sources)}
    return longest_usable(layout, present, limit)


def _levels(layout: KVLayout, sources: Sequence[Sequence[int | None]], chunks: int) -> list[tuple[int, ...]]:
    """For each of `chunks` chunks, the levels that have parts which that prefix needs, that of the main part first."""
    if len(sources) == 1 and layout.groups[0].rule is HitRule.ALL:
        return [() if source is None or source == HERE else (source,) for source in sources[0][:chunks]]
    found: list[tuple[int, ...]] = [()] * chunks
    lead = main_group(layout) or 0
    for group in (lead, *(it for it in range(len(sources)) if it != lead)):
        row = sources[group]
        for at in needed_chunks(layout, group, chunks):
            source = row[at]
            if source is not None and source != HERE and source not in found[at]:
                found[at] = (*found[at], source)
    return found
