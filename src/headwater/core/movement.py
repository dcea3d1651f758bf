"""Moves between HOST and the levels below: what goes down and when, and the tickets that make a move safe.

Theory of operation. The mover is one more owner of tickets, in the name of nobody (`OWNER`). Its tickets have no
deadline: it waits for its own I/O, and what it moves at a time is bounded.

    down   a chunk is committed in HOST, or used again ─► is it wanted below? ─► queue (keys, not bytes)
           its turn: leased in HOST, reserved on DISK ─► WRITE ─► committed on DISK, released in HOST
    up     a fetch asks (fetch.py): leased on DISK, reserved in HOST ─► READ ─► committed in HOST, released on DISK

A chunk goes down to DISK after all before it: those that are missing there go first, from HOST, where they must be. A
chunk that has left HOST before its turn is dropped. Bytes that turn out wrong are dropped from the level and counted.

    command ended ─► some DONE: the level is well ─► tickets end ─► announce
                 └─► nothing but FAILED, or the level as a whole: breaker; nothing is known of the bytes

A command that does not end counts as slow once, a moment after its deadline, and with what it says once it ends.
Questions to a level go together: two are under way at a time, what comes meanwhile waits and makes up the next one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headwater.core.cache import Cache
from headwater.core.health import Health
from headwater.core.history import History
from headwater.core.levels import ASKING_MAX, Admission, Command, Level, Part, Verb
from headwater.types import ABSENT, Changed, ChunkKey, Cleared, Outcome, Stored, TicketKind, Usage

OWNER = ""
"""No instance has this name."""
READ_S, WRITE_S, ASK_S, CLEAR_S = 5.0, 30.0, 1.0, 60.0
DELETE_PARTS, DELETE_PART_S = 4096, 0.002
"""How many parts are deleted in one command, and the time for each beyond `ASK_S`."""
FULL_S = 10.0
"""How long a level that is full is left alone."""
USAGE_S = 10.0
CLEAR_AGAIN_S = 5.0
"""How long after a CLEAR that failed the next one goes out."""
LATE_S = 1.0
"""How long after its deadline a command is taken for stuck."""
ASKED_PARTS_MAX, WAITING_PARTS_MAX = 4096, 1 << 20
"""Parts that one command asks for on behalf of several, so that it ends in time; and those that may wait to be."""
TOGETHER_MAX = 64
"""Chunks of one prompt that go down in one command."""
TURNS_MAX = 4096
"""Chunks whose turn may come at one time: of those that waited long, for a sick level, most have left HOST."""

USELESS = {Outcome.CORRUPT, Outcome.REFUSED}
"""What says that a chunk is there and nobody can use it."""
BAD_PLACE = {Outcome.CORRUPT, Outcome.DAMAGED}
"""What says that a slot of a DISK tier had better not be used again."""
WRONG = {Outcome.MISSING, Outcome.FOREIGN, Outcome.NEWER} | USELESS | BAD_PLACE
"""What says that a chunk is not to be had where it was thought to be."""
TROUBLE = {Outcome.FAILED, Outcome.DAMAGED}
"""What says nothing good of a tier."""
Ended = Callable[["Move", list[Outcome], float], None]


@dataclass(frozen=True, slots=True)
class Question:
    """Whether a REMOTE level has some parts: asked together with others, or waiting to be."""

    space: int
    parts: tuple[Part, ...]
    asked_s: float
    ended: Ended


@dataclass(slots=True)
class Move:
    """A command under way, and the tickets that hold its bytes: 0 where there is none."""

    command: Command
    began_s: float
    host_ticket: int = 0
    disk_ticket: int = 0
    position: dict[ChunkKey, int] = field(default_factory=dict)
    """Where a chunk is in the call that reserved its slots."""
    again: bool = False
    """It was tried before and found no room, or a place that is damaged."""
    late: bool = False
    """Its deadline is long over."""
    questions: list[Question] = field(default_factory=list)
    rest: ChunkKey | None = None
    """The chunk whose turn it was, if only chunks before it are written yet."""
    void: bool = False
    """What it moves was cleared meanwhile."""
    ended: Ended | None = None
    """Whom to tell."""


class Movement:
    """One node's moves; pure: told what happened, it leaves commands in `take_commands`."""

    def __init__(self, host: Cache, levels: Sequence[Level], history: History) -> None:
        self.host, self.levels, self.history = host, list(levels), history
        self.on_room: Callable[[float], None] = _ignore
        """Called when something ended, so that reads that wait can go on."""
        self._moves: dict[int, Move] = {}
        self._commands: list[Command] = []
        self._next_number = 1
        self._questions: list[deque[Question]] = [deque() for _ in self.levels]
        self._waiting_parts = 0
        for level in self.levels:
            level.queue.tenant_of = self._tenant

    def __repr__(self) -> str:
        return f"Movement({len(self._moves)} commands under way, {self.levels!r})"

    def take_commands(self) -> list[Command]:
        """What is to be done now, in order."""
        commands, self._commands = self._commands, []
        return commands

    @property
    def idle(self) -> bool:
        """Whether no command is under way."""
        return not self._moves

    # ---- down -----------------------------------------------------------------------------------------

    def heard(self, changes: Sequence[Changed], now: float) -> None:
        """What HOST has announced: new chunks may go down, and what left is remembered."""
        for change in changes:
            if not isinstance(change, Stored):
                self.history.removed(change, now)
                continue
            space, parts = change.namespace, [(change.group, key) for key in change.keys]
            if change.group == self.host.spaces[space].main and self.levels:
                # What was committed before the chunk that it hangs on could not go down then.
                parts += self.host.hanging_on(space, change.keys[0])
            for level in self.levels:
                self._offer(level, space, parts, used=False)
        if changes:
            self.write(now)

    def used(self, space: int, keys: Sequence[ChunkKey], now: float) -> None:
        """Chunks in HOST were used again: now they are worth keeping."""
        groups = range(len(self.host.spaces[space].index))
        for level in self.levels:
            # In prefix order, so that whole prompts go down at a time.
            self._offer(level, space, [(group, key) for key in keys for group in groups], used=True)
            if level.disk is not None and space in level.spaces:
                level.disk.touch(level.spaces[space], keys)
        self.write(now)

    def write(self, now: float) -> None:
        """Start what may be written now."""
        for level in self.levels:
            for _ in range(TURNS_MAX):
                if not level.queue or not level.well or now < level.full_until_s or level.writes >= level.writers:
                    break
                if level.writing_bytes >= level.moving_bytes_max:
                    break
                (space, key), again = level.queue.take_next()
                self._write_from(level, space, key, now, again=again)

    def _offer(self, level: Level, space: int, parts: Sequence[tuple[int, ChunkKey]], *, used: bool) -> None:
        ready = self.host.is_ready
        for group, key in parts:
            if level.wants(space, group, key, used=used) and ready(space, group, key):
                level.enqueue(space, key)

    def _write_from(self, level: Level, space: int, key: ChunkKey, now: float, *, again: bool) -> None:
        """Begin to write a chunk, with those before it that are missing below and those next in the queue."""
        groups = range(len(self.host.spaces[space].index))
        if not any(self.host.is_ready(space, group, key) for group in groups):
            level.sums.dropped_chunks += 1
            return
        keys = self._chain(level, space, key, again=again)
        wanted = [(g, k) for k in keys for g in groups if not level.has(space, g, k)]
        host_ticket, addresses = self.host.hold(OWNER, TicketKind.LOAD, space, wanted, math.inf)
        here = {part: address for part, address in zip(wanted, addresses, strict=True) if address != ABSENT}
        disk_ticket, places = 0, {}
        if level.disk is not None and here:
            lacking = frozenset((g, at) for at, k in enumerate(keys) for g in groups if (g, k) not in here)
            above = self.host.parent_of(space, keys[0])
            number = level.spaces[space]
            got = level.disk.reserve(OWNER, number, above, keys, lacking, (0,), now, math.inf)
            disk_ticket = got.ticket
            places = {(g, keys[at]): place for g, row in enumerate(got.addresses) for at, place in enumerate(row)}
        parts = tuple(
            Part(g, k, self._above(space, k), address, places.get((g, k), ABSENT), anew=level.is_useless(space, g, k))
            for (g, k), address in here.items()
            if level.disk is None or places.get((g, k), ABSENT) != ABSENT
        )
        level.sums.dropped_chunks += len({k for _, k in wanted} - {part.key for part in parts})
        if not parts:
            self._release(level, host_ticket, disk_ticket)
            return
        move = self._order(level, Verb.WRITE, space, parts, now + WRITE_S, now)
        move.host_ticket, move.disk_ticket, move.again = host_ticket, disk_ticket, again
        move.position = {k: at for at, k in enumerate(keys)}
        move.rest = key if key not in move.position else None
        move.ended = self._written
        level.writes += 1
        level.writing_bytes += move.command.size_bytes

    def _chain(self, level: Level, space: int, key: ChunkKey, *, again: bool) -> list[ChunkKey]:
        """The chunks to write at once, in prefix order: `key` with those before it and after it, or the first of them
        if they are too many."""
        host, main = self.host, self.host.spaces[space].main
        most = max(level.batch_bytes // sum(host.spaces[space].slot_bytes), 1)
        keys = [key]
        above = host.parent_of(space, key)
        while main is not None and level.disk is not None and above is not None and not level.has(space, main, above):
            keys.append(above)
            above = host.parent_of(space, above)
        keys.reverse()
        if len(keys) > most:
            return keys[:most]
        while len(keys) < min(most, TOGETHER_MAX) and (waiting := level.queue.peek(space)) is not None:
            (other, following), tried = waiting
            if other != space or tried != again or host.parent_of(space, following) != keys[-1]:
                break
            del level.queue[other, following]
            keys.append(following)
        return keys

    def _written(self, move: Move, outcomes: list[Outcome], now: float) -> None:
        command = move.command
        space, level = command.space, self.levels[command.level]
        level.writes -= 1
        level.writing_bytes -= command.size_bytes
        done = [not move.void and it is Outcome.DONE for it in outcomes]
        failed = {move.position[part.key] for part, it in zip(command.parts, done, strict=True) if not it}
        if move.disk_ticket and level.disk is not None:
            for part, outcome in zip(command.parts, outcomes, strict=True):
                if outcome is Outcome.DAMAGED:
                    level.disk.pool.condemn(part.place)
            level.disk.done(OWNER, move.disk_ticket, 0, failed, now)
        if move.host_ticket:
            self.host.release(OWNER, move.host_ticket)
        for part, it in zip(command.parts, done, strict=True):
            if it and level.disk is None:
                level.know(space, part.group, part.key)
            # What hung on a chunk that failed is not there either.
            if it and level.has(space, part.group, part.key):
                level.sums.written_bytes += self.host.spaces[space].slot_bytes[part.group]
                level.sums.written_chunks += 1
        if move.void:
            self._go_on_clearing(level, now)
        elif Outcome.FULL in outcomes or Outcome.DAMAGED in outcomes:
            lacking = {part.key for part in command.parts if not level.has(space, part.group, part.key)}
            left = [key for key in move.position if key in lacking]
            if Outcome.FULL in outcomes:
                self._no_room(level, move, left, now)
            elif move.again:
                level.sums.dropped_chunks += len(left)
            else:
                self._again(level, move, left)
        elif move.rest is not None and not failed:
            level.put_first(space, move.rest, again=move.again)
        self.write(now)

    def _no_room(self, level: Level, move: Move, keys: Sequence[ChunkKey], now: float) -> None:
        """The level says that it is full: evict and try once more, then leave it alone for a while."""
        space = move.command.space
        if level.disk is not None and not move.again:
            sizes = level.disk.spaces[level.spaces[space]].slot_bytes
            rooms = [level.disk.make_room(level.spaces[space], size) for size in sizes]
            if all(rooms):
                self._again(level, move, keys)
                return
        level.full_until_s = level.usage_at_s = now + FULL_S
        level.sums.dropped_chunks += len(keys)

    def _again(self, level: Level, move: Move, keys: Sequence[ChunkKey]) -> None:
        """Try these chunks once more, elsewhere."""
        for key in reversed([*keys, *([] if move.rest is None else [move.rest])]):
            level.put_first(move.command.space, key, again=True)

    # ---- up -------------------------------------------------------------------------------------------

    def read(
        self,
        level_number: int,
        space: int,
        keys: Sequence[ChunkKey],
        wanted: Sequence[tuple[int, ChunkKey]],
        parent: ChunkKey | None,
        now: float,
        ended: Ended,
        *,
        background: bool = False,
    ) -> Move | None:
        """Begin to bring these (group, key) parts of consecutive chunks up; None, with nothing changed, if there is no
        room in HOST or nothing to bring: parts that HOST has or is getting are left out. `background` says that nobody
        waits for them."""
        level = self.levels[level_number]
        assert space not in level.clearing, f"{level.name} is yet to delete namespace {space}"
        disk_ticket, places = 0, {}
        if level.disk is not None:
            disk_ticket, found = level.disk.hold(OWNER, TicketKind.LOAD, level.spaces[space], wanted, math.inf)
            places = {part: place for part, place in zip(wanted, found, strict=True) if place != ABSENT}
            wanted = list(places)
            level.disk.touch(level.spaces[space], [key for _, key in wanted])
        ask = set(wanted)
        groups = range(len(self.host.spaces[space].index))
        lacking = frozenset((g, at) for at, key in enumerate(keys) for g in groups if (g, key) not in ask)
        got = self.host.reserve(OWNER, space, parent, keys, lacking, (0,), now, math.inf)
        parts = tuple(
            Part(g, keys[at], keys[at - 1] if at else parent or b"", address, places.get((g, keys[at]), ABSENT))
            for g, row in enumerate(got.addresses)
            for at, address in enumerate(row)
            if address != ABSENT
        )
        if not parts:
            self._release(level, got.ticket, disk_ticket)
            return None
        move = self._order(level, Verb.READ, space, parts, now + READ_S, now, background=background)
        move.host_ticket, move.disk_ticket = got.ticket, disk_ticket
        move.position = {key: at for at, key in enumerate(keys)}
        move.ended = ended
        level.reads += 1
        level.reading_bytes += move.command.size_bytes
        return move

    def arrived(self, move: Move, outcomes: Sequence[Outcome], now: float) -> set[ChunkKey]:
        """A read has ended: commit what came; the chunks that did not."""
        command = move.command
        level = self.levels[command.level]
        level.reads -= 1
        level.reading_bytes -= command.size_bytes
        failed: dict[ChunkKey, int] = {}
        wrong: list[Part] = []
        for part, outcome in zip(command.parts, outcomes, strict=True):
            if outcome is Outcome.DONE and not move.void:
                level.sums.read_bytes += self.host.spaces[command.space].slot_bytes[part.group]
                level.sums.read_chunks += 1
                if level.disk is None:
                    level.know(command.space, part.group, part.key)
                continue
            failed[part.key] = move.position[part.key]
            if outcome in WRONG:
                self._drop(level, command.space, part, outcome, now)
                if outcome is Outcome.CORRUPT:
                    wrong.append(part)  # what is refused may be good for another node, which has its key
        self.host.done(OWNER, move.host_ticket, 0, list(failed.values()), now)
        if move.disk_ticket and level.disk is not None:
            level.disk.release(OWNER, move.disk_ticket)
        if wrong and level.disk is None:
            self._order(level, Verb.DELETE, command.space, tuple(wrong), now + ASK_S, now)
        return set(failed)

    def ask(
        self, level_number: int, space: int, parts: Sequence[tuple[int, ChunkKey]], now: float, ended: Ended
    ) -> None:
        """Ask a REMOTE level that is well which parts it has. Where it does not answer, all of them are FAILED."""
        asked = tuple(Part(group, key, space=space) for group, key in parts)
        self._questions[level_number].append(Question(space, asked, now, ended))
        self._waiting_parts += len(asked)
        self._ask_waiting(level_number, now)

    def _ask_waiting(self, number: int, now: float) -> None:
        """Ask what waits, as much as may be under way; what waited too long is not asked any more."""
        level, waiting = self.levels[number], self._questions[number]
        while waiting and level.asking < ASKING_MAX and level.well and now - waiting[0].asked_s <= ASK_S:
            together = [self._next_question(waiting)]
            count = len(together[0].parts)
            while waiting and (count := count + len(waiting[0].parts)) <= ASKED_PARTS_MAX:
                together.append(self._next_question(waiting))
            parts = tuple(dict.fromkeys(part for it in together for part in it.parts))
            level.asking += 1
            move = self._order(level, Verb.HOLDS, together[0].space, parts, now + ASK_S, now)
            move.questions, move.ended = together, self._answered
        unheard = []
        while waiting and (
            not level.well or now - waiting[0].asked_s > ASK_S or self._waiting_parts > WAITING_PARTS_MAX
        ):
            unheard.append(self._next_question(waiting))
        for it in unheard:
            command = Command(0, number, Verb.HOLDS, it.space, it.parts, 0, now)
            it.ended(Move(command, it.asked_s), [Outcome.FAILED] * len(it.parts), now)

    def _next_question(self, waiting: deque[Question]) -> Question:
        question = waiting.popleft()
        self._waiting_parts -= len(question.parts)
        return question

    def _answered(self, move: Move, outcomes: list[Outcome], now: float) -> None:
        """A question has ended: each that asked is told what it asked for."""
        command = move.command
        self.levels[command.level].asking -= 1
        said = dict(zip(command.parts, outcomes, strict=True))
        for it in move.questions:
            its = Move(replace(command, space=it.space, parts=it.parts), move.began_s)
            # What is being deleted is not there, whatever was said before.
            cleared = it.space in self.levels[command.level].clearing
            it.ended(its, [Outcome.FAILED if cleared else said[part] for part in it.parts], now)
        self._ask_waiting(command.level, now)

    # ---- deletions ------------------------------------------------------------------------------------

    def clear(self, space: int, now: float, *, here_only: bool = False) -> Cleared:
        """Delete a namespace everywhere, but for what engines use; its pins end. Nothing of it that was
        stored before comes back: moves under way are void, and REMOTE tiers are left alone until they have done it;
        with `here_only` they are not told to.

        On DISK it must get another name as well, before its slots are used again: see `node.tiering`.
        """
        pins = [
            number
            for number, it in self.host.tickets.items()
            if it.kind is TicketKind.PIN and self.host.entries.space[it.rows[0]] == space
        ]
        for number in pins:
            self.host.release(OWNER, number)
        count = self.host.clear(space, OWNER)
        for move in self._moves.values():
            move.void |= move.command.space == space and move.command.verb in (Verb.READ, Verb.WRITE)
        for level in self.levels:
            for queued in [it for it in level.queue if it[0] == space]:
                del level.queue[queued]
            if level.disk is None:
                level.forget_all()
                if not here_only:
                    level.clearing.setdefault(space)
            elif space in level.spaces:
                count += level.disk.clear(level.spaces[space], OWNER)
        for level in self.levels:
            self._go_on_clearing(level, now)
        kept = sum(map(len, self.host.spaces[space].index))
        return Cleared(count, kept, len(pins), self.pending(space))

    def pending(self, space: int) -> tuple[str, ...]:
        """The REMOTE tiers that have yet to delete a namespace."""
        return tuple(level.name for level in self.levels if space in level.clearing)

    def _go_on_clearing(self, level: Level, now: float) -> None:
        """Order the next CLEAR of a REMOTE level: one at a time, and none before the last write of that namespace."""
        if level.is_clearing or not level.clearing or not level.well or now < level.clear_from_s:
            return
        number = self.levels.index(level)
        commands = [move.command for move in self._moves.values()]
        writing = {it.space for it in commands if it.level == number and it.verb is Verb.WRITE}
        if level.admission is Admission.NONE:
            # Peers are told last: they read from the other tiers, and from each other.
            writing |= {it for other in self.levels if other is not level for it in other.clearing}
        space = next((it for it in level.clearing if it not in writing), None)
        if space is not None:
            level.is_clearing = True
            self._order(level, Verb.CLEAR, space, (), now + CLEAR_S, now)

    def _cleared(self, level: Level, space: int, now: float, *, done: bool) -> None:
        """A CLEAR has ended; one that failed is tried again, after the others."""
        level.is_clearing = False
        if not done:
            level.clearing.move_to_end(space)
            level.clear_from_s = now + CLEAR_AGAIN_S
            return
        del level.clearing[space]
        for other in self.levels:
            if other is not level:
                self._go_on_clearing(other, now)
        index = self.host.spaces[space].index
        keys = dict.fromkeys(key for of_group in index for key in of_group)
        self._offer(level, space, [(group, key) for key in keys for group in range(len(index))], used=False)
        self.write(now)
        self._go_on_clearing(level, now)

    def evict(self, space: int, keys: Sequence[ChunkKey], now: float, below: bool) -> Cleared:
        """Delete chunks, and all that hangs on them, from HOST and, if `below`, from every level; of REMOTE tiers only
        these very chunks, as far as they can be reached."""
        count = self.host.evict(space, keys)
        for level in self.levels if below else ():
            for key in keys:
                level.queue.pop((space, key), None)
            if level.disk is None:
                groups = range(len(self.host.spaces[space].index))
                parts = [Part(group, key) for key in keys for group in groups]
                for part in parts:
                    level.unknow(space, part.group, part.key)
                self._delete(level, space, parts, now)
            elif space in level.spaces:
                count += level.disk.evict(level.spaces[space], keys)
        kept = sum(key in index for index in self.host.spaces[space].index for key in keys)
        return Cleared(count, kept)

    def _delete(self, level: Level, space: int, parts: Sequence[Part], now: float) -> None:
        """Have a REMOTE level delete parts, some at a time: one after another, so that each batch has its own time."""
        until_s = now
        for start in range(0, len(parts), DELETE_PARTS):
            batch = tuple(parts[start : start + DELETE_PARTS])
            until_s += ASK_S + DELETE_PART_S * len(batch)
            self._order(level, Verb.DELETE, space, batch, until_s, now)

    # ---- ends -----------------------------------------------------------------------------------------

    def ended(self, number: int, result: Sequence[Outcome] | Usage | None, now: float, jitter: float) -> None:
        """A command has ended: with outcomes, with the level's usage, or with None when the level as a whole did not
        work. `jitter` is a number in [0, 1)."""
        move = self._moves.pop(number)
        command = move.command
        level = self.levels[command.level]
        if command.verb is Verb.USAGE:
            level.asking_usage = False
        if command.verb is Verb.READ and move.late:
            level.stuck -= 1
        if command.verb is Verb.CLEAR:
            self._cleared(level, command.space, now, done=result is not None)
        if isinstance(result, Usage) != (command.verb is Verb.USAGE) or (
            isinstance(result, Sequence) and len(result) != len(command.parts)
        ):
            result = None  # it is not an answer to what was asked
        if result is None:
            self._unavailable(level, move, now, jitter)
        elif isinstance(result, Usage):
            level.usage = result
            level.breaker.succeeded(now)
        elif command.parts:
            self._judge(level, move, result, now, jitter)
        if move.ended is not None:
            outcomes = [Outcome.FAILED] * len(command.parts) if result is None or isinstance(result, Usage) else result
            if command.verb in (Verb.READ, Verb.WRITE):
                level.sums.outcomes.update(outcomes)
            move.ended(move, list(outcomes), now)
        self._measure(level, move, result, now)
        self.on_room(now)

    def tick(self, now: float, jitter: float = 0.5) -> None:
        """About twice a second: find out what is stuck, probe what is sick, ask how full the others are, write on."""
        for move in self._moves.values():
            if not move.late and now >= move.command.until_s + LATE_S:
                self._late(move, now, jitter)
        for number, level in enumerate(self.levels):
            self._ask_waiting(number, now)
            self._go_on_clearing(level, now)
            if level.asking_usage:
                continue
            due = now >= level.usage_at_s if level.breaker.state is Health.WELL else level.breaker.allows(now)
            if due:
                level.usage_at_s = now + USAGE_S
                level.asking_usage = True
                self._order(level, Verb.USAGE, 0, (), now + ASK_S, now)
        self.write(now)

    def _late(self, move: Move, now: float, jitter: float) -> None:
        """A command does not end. If it is the probe, the level as a whole does not work; else that is asked next."""
        level, verb = self.levels[move.command.level], move.command.verb
        move.late = True
        level.breaker.slow(now, jitter, unavailable=verb is Verb.USAGE)
        level.stuck += verb is Verb.READ
        level.usage_at_s = min(level.usage_at_s, now)

    def _judge(self, level: Level, move: Move, result: Sequence[Outcome], now: float, jitter: float) -> None:
        if any(it not in TROUBLE for it in result):
            level.breaker.succeeded(now)
        elif now < move.command.until_s:
            level.breaker.failed(now, jitter)
        elif not move.late:
            level.breaker.slow(now, jitter)

    def _unavailable(self, level: Level, move: Move, now: float, jitter: float) -> None:
        """The level as a whole did not work, or one connection to it; a question more or less does not tell which, nor
        does what is only slow, so the probe goes out to find out. A deletion that fails may only be forbidden."""
        verb, is_overdue = move.command.verb, now >= move.command.until_s
        level.usage_at_s = min(level.usage_at_s, now)
        if verb in (Verb.DELETE, Verb.CLEAR):
            return
        if verb is Verb.USAGE or not (verb is Verb.HOLDS or is_overdue):
            level.breaker.failed(now, jitter, unavailable=True)
        elif not move.late:
            level.breaker.slow(now, jitter)
        if not is_overdue:
            level.forget_all()  # what was restarted or flushed breaks its connections, and may have lost everything

    def _measure(self, level: Level, move: Move, result: Sequence[Outcome] | Usage | None, now: float) -> None:
        speed = {Verb.READ: level.reading, Verb.WRITE: level.writing}.get(move.command.verb)
        if speed is None or result is None or isinstance(result, Usage):
            return
        # One that was given up counts with the time it was given: that is how slowness is learned.
        if any(it is Outcome.DONE for it in result) or now >= move.command.until_s:
            speed.observe(move.command.size_bytes, max(now - move.began_s, 0.0))

    def _drop(self, level: Level, space: int, part: Part, outcome: Outcome, now: float) -> None:
        """A level does not have what it was thought to have."""
        if level.disk is not None:
            if outcome in BAD_PLACE:
                level.disk.pool.condemn(part.place)  # the read that found out still leases it
            level.disk.drop(level.spaces[space], part.group, part.key, part.place, outcome.value)
        elif outcome in USELESS:
            level.distrust(space, part.group, part.key)
        else:
            level.unknow(space, part.group, part.key)
        self.history.note(part.key, level.name, outcome.value, now)

    def _order(
        self,
        level: Level,
        verb: Verb,
        space: int,
        parts: tuple[Part, ...],
        until_s: float,
        now: float,
        *,
        background: bool = False,
    ) -> Move:
        sizes = self.host.spaces[space].slot_bytes if parts else ()
        # With a question nothing moves, and not all of it need be of this namespace.
        size = 0 if verb is Verb.HOLDS else sum(sizes[part.group] for part in parts)
        command = Command(self._next_number, self.levels.index(level), verb, space, parts, size, until_s, background)
        self._next_number += 1
        self._commands.append(command)
        move = self._moves[command.number] = Move(command, now)
        return move

    def _release(self, level: Level, host_ticket: int, disk_ticket: int) -> None:
        if host_ticket:
            self.host.release(OWNER, host_ticket)
        if disk_ticket and level.disk is not None:
            level.disk.release(OWNER, disk_ticket)

    def _tenant(self, space: int) -> str:
        return self.host.spaces[space].namespace.tenant

    def _above(self, space: int, key: ChunkKey) -> bytes:
        return self.host.parent_of(space, key) or b""


def _ignore(now: float) -> None:
    """Nobody waits."""
