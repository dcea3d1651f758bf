"""A HOST tier with levels below it, and a driver that does what a test tells it to: shared by the tests of moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.core.cache import Cache
from headwater.core.eviction import LRU
from headwater.core.fetch import Answer, Fetches
from headwater.core.history import History
from headwater.core.levels import Admission, Command, Level, Verb
from headwater.core.movement import Movement
from headwater.core.pool import Pool
from headwater.types import ABSENT, PAGE_BYTES, ChunkKey, KVLayout, Outcome, Stored, Tier, Usage
from tests.core.examples import LOAD_S, SAVE_S, assert_idle, dense, namespace, save

Answering = Callable[[Command], list[Outcome] | Usage | None]
RATE = 100.0
"""Tokens a second: a chunk takes 40 ms to compute."""


class Node:
    """The core of one node; `stored` is what its REMOTE tiers hold, by level."""

    def __init__(
        self,
        layout: KVLayout | None = None,
        *,
        host_slots: int = 64,
        disk_slots: int = 64,
        remotes: int = 0,
        admission: Admission = Admission.ALL,
        batch_chunks: int = 2,
        readers: int = 2,
        writers: int = 2,
    ) -> None:
        self.layout = layout or dense()
        sizes = [self.layout.slot_bytes(group) for group in range(len(self.layout.groups))]
        slot = max(sizes)
        batch = batch_chunks * sum(sizes)
        self.host = Cache(Pool([host_slots * slot], slot), LRU, LOAD_S, SAVE_S)
        self.space = self.host.add_space(namespace(self.layout), self.layout)
        self.levels: list[Level] = []
        if disk_slots:
            disk = Cache(Pool([disk_slots * (slot + PAGE_BYTES)], slot + PAGE_BYTES), LRU, 60.0, 60.0, 0, Tier.DISK)
            disk.add_space(namespace(self.layout), self.layout, [size + PAGE_BYTES for size in sizes])
            self.levels.append(Level("disk", Tier.DISK, admission, disk, readers, writers, batch_bytes=batch))
            self.levels[0].spaces[self.space] = 0
        for number in range(remotes):
            name = f"remote{number}"
            self.levels.append(Level(name, Tier.REMOTE, admission, None, readers, writers, batch_bytes=batch))
        self.stored: dict[int, set[tuple[int, ChunkKey]]] = {number: set() for number in range(len(self.levels))}
        self.history = History()
        self.movement = Movement(self.host, self.levels, self.history)
        self.fetches = Fetches(self.movement)
        self.now = 0.0
        self.commands: list[Command] = []
        self.done: list[Command] = []

    @property
    def disk(self) -> Cache:
        """The index of the DISK tier."""
        assert self.levels[0].disk is not None
        return self.levels[0].disk

    def settle(self) -> list[Command]:
        """What the node's loop does after each turn; the commands that are under way now."""
        changes = self.host.take_changes()
        if changes:
            self.movement.heard(changes, self.now)
        self.fetches.go_on(self.now)
        self.commands += self.movement.take_commands()
        self.host.check()
        return self.commands

    def end(self, command: Command, result: Sequence[Outcome] | Usage | None) -> None:
        """One command ends so."""
        self.commands.remove(command)
        self.done.append(command)
        self.movement.ended(command.number, result, self.now, 0.5)
        self.settle()

    def answer(self, command: Command) -> list[Outcome] | Usage | None:
        """What a tier in good health says."""
        here = self.stored[command.level]
        parts = [(part.group, part.key) for part in command.parts]
        on_disk = self.levels[command.level].disk is not None
        if command.verb is Verb.USAGE:
            return Usage(None, None)
        if command.verb is Verb.WRITE:
            here.update(parts)
        elif command.verb is Verb.DELETE:
            here.difference_update(parts)
        elif command.verb is Verb.CLEAR:
            here.clear()
        elif not on_disk:
            return [Outcome.DONE if part in here else Outcome.MISSING for part in parts]
        return [Outcome.DONE] * len(parts)

    def run(self, answer: Answering | None = None, took_s: float = 0.001) -> None:
        """Let all that is under way, and what follows from it, end one after another, each after `took_s`."""
        self.settle()
        for _ in range(10_000):
            if not self.commands:
                return
            self.now += took_s
            command = self.commands[0]
            self.end(command, (answer or self.answer)(command))
        raise AssertionError("moves without end")

    def ask(self, keys: Sequence[ChunkKey], request: str = "r", owner: str = "a", rate: float | None = RATE) -> Answer:
        """One question, and what follows from it."""
        found = self.fetches.ask(owner, request, self.space, keys, rate, self.now)
        assert found.chunks == self.host.match(self.space, keys)
        self.settle()
        return found

    def put_down(self, keys: Sequence[ChunkKey]) -> None:
        """These chunks are in every level, and not in HOST."""
        save(self.host, self.space, keys)
        self.run()
        self.host.clear(self.space)
        self.settle()
        assert self.host.match(self.space, keys) == 0

    def on_disk(self, keys: Sequence[ChunkKey], group: int = 0) -> list[bool]:
        """Which chunks' parts the DISK tier can be read for."""
        return [self.levels[0].serves(self.space, group, key) for key in keys]

    def assert_quiet(self) -> None:
        """Nothing moves, nothing is held, but for what was brought up a moment ago."""
        self.run()
        for _ in range(2):
            self.now += 10.0
            self.fetches.tick(self.now)
            self.host.expire(self.now)
        assert self.movement.idle
        assert self.fetches.active == 0
        assert_idle(self.host)
        for level in self.levels:
            assert (level.reads, level.writes, level.reading_bytes, level.writing_bytes) == (0, 0, 0, 0)
            assert (level.asking, level.stuck) == (0, 0)
            if level.disk is not None:
                assert_idle(level.disk)


def placed(command: Command) -> bool:
    """Whether each part of a command for the DISK tier has a slot there."""
    return all(part.place != ABSENT for part in command.parts)


def announced(cache: Cache) -> set[ChunkKey]:
    """The keys that a cache says it has stored since it was asked last."""
    return {key for change in cache.take_changes() if isinstance(change, Stored) for key in change.keys}
