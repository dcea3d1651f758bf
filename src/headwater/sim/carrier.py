"""Carries out what the core orders for a tier below HOST, in virtual time: slowly, late, in part, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from headwater.core.cache import Cache
from headwater.core.levels import Command, Part, Verb
from headwater.sim.below import HEADER_PAGES, Bytes, Disk, Name, Remote
from headwater.sim.faults import Faults
from headwater.sim.memory import Memory
from headwater.sim.oracle import Oracle
from headwater.sim.schedule import Schedule
from headwater.types import PAGE_BYTES, Outcome, Usage

Result = list[Outcome] | Usage | None


class SimulatedCarrier:
    """One level's way to its tier. Every command ends once, as long as the node lives."""

    def __init__(
        self,
        tier: Disk | Remote,
        host: Cache,
        memory: Memory,
        oracle: Oracle,
        schedule: Schedule,
        rng: Random,
        faults: Faults,
        latency_s: float,
        bytes_s: float,
        ended: Callable[[Command, Result], None],
    ) -> None:
        """`ended` is told a command and what came of it."""
        self.tier, self.alive = tier, True
        self._host, self._memory, self._oracle = host, memory, oracle
        self._schedule, self._rng, self._faults = schedule, rng, faults
        self._latency_s, self._bytes_s, self._ended = latency_s, bytes_s, ended
        self._down_until_s = 0.0
        self._names: dict[int, list[Name]] = {}

    def order(self, command: Command) -> None:
        """Begin a command; from now on its targets are torn and its sources are read."""
        self._names[command.number] = [self._name(command, part) for part in command.parts]
        self._begin(command)
        now, rng, faults = self._schedule.clock.now(), self._rng, self._faults
        if rng.random() < faults.tier_breaks:
            self._down_until_s = now + rng.uniform(0.1, 4.0)
        if now < self._down_until_s:
            self._schedule.after(rng.uniform(0.001, 0.02), "", lambda: self._end(command, "down"))
            return
        if rng.random() < faults.tier_sticks:
            late_s = command.until_s - now + rng.uniform(0.0, 3.0)
            self._schedule.after(late_s, "", lambda: self._end(command, "stuck"))
            return
        took_s = self._latency_s * rng.uniform(0.5, 1.5) + command.size_bytes / self._bytes_s
        if rng.random() < faults.tier_is_slow:
            took_s += rng.uniform(0.1, 2.0)
        in_time = now + took_s < command.until_s
        self._schedule.after(took_s, "", lambda: self._end(command, "" if in_time else "stuck"))

    def _begin(self, command: Command) -> None:
        ticket = -command.number
        for part in command.parts if command.verb in (Verb.READ, Verb.WRITE) else ():
            pages = self._pages(command, part)
            if command.verb is Verb.READ:
                self._oracle.claim_pages(pages, ticket, self._schedule.clock.now())
                self._memory.tear(pages, f"read {command.number}")
                if isinstance(self.tier, Disk):
                    self._oracle.disk_is_used(part.place, ticket, Verb.READ)
                if self._rng.random() < self._faults.chunk_rots:
                    self._rot(command, part)
            else:
                self._oracle.read_pages(pages, ticket)
                if isinstance(self.tier, Disk):
                    self._oracle.disk_is_used(part.place, ticket, Verb.WRITE)
                    self.tier.begin_write(part.place, self._disk_bytes(command, part), command.number)

    def _end(self, command: Command, trouble: str) -> None:
        if not self.alive:
            return
        if trouble == "" and self._schedule.clock.now() < self._down_until_s:
            trouble = "down"
        result: Result
        if trouble == "down":
            result = None
        elif command.verb is Verb.USAGE:
            result = None if trouble else self._usage()
        elif trouble and command.verb is Verb.CLEAR:
            result = None
        elif trouble:
            result = [Outcome.FAILED] * len(command.parts)
        else:
            result = self._carry_out(command)
        said = "nothing" if result is None else "usage" if isinstance(result, Usage) else [it.value for it in result]
        self._schedule.note(f"level {command.level} {command.verb.value} {command.number} -> {said}")
        self._oracle.stopped(-command.number)
        del self._names[command.number]
        self._ended(command, result)

    def _carry_out(self, command: Command) -> list[Outcome]:
        if command.verb is Verb.CLEAR:
            if isinstance(self.tier, Remote):
                self.tier.forget([name for name in self.tier.parts if name[0] == command.space])
            return []
        if isinstance(self.tier, Remote) and command.verb is Verb.DELETE:
            self.tier.forget([self._name(command, part) for part in command.parts])
        if command.verb is Verb.DELETE:
            return [Outcome.DONE] * len(command.parts)
        if command.verb is Verb.HOLDS:
            assert isinstance(self.tier, Remote), "a DISK tier is not asked"
            there = [(part.space, part.group, part.key) in self.tier.parts for part in command.parts]
            return [Outcome.DONE if it else Outcome.MISSING for it in there]
        move = self._read if command.verb is Verb.READ else self._write
        outcomes = []
        for part, name in zip(command.parts, self._names[command.number], strict=True):
            fails = self._rng.random() < self._faults.tier_fails
            outcomes.append(Outcome.FAILED if fails else move(command, part, name))
        return outcomes

    def _read(self, command: Command, part: Part, name: Name) -> Outcome:
        if isinstance(self.tier, Disk):
            outcome, content = self.tier.read(part.place, name, self._disk_bytes(command, part))
        else:
            outcome, content = self.tier.read(name)
        if outcome is Outcome.DONE:
            self._memory.put(self._pages(command, part), content)
        return outcome

    def _write(self, command: Command, part: Part, name: Name) -> Outcome:
        if self._rng.random() < self._faults.tier_is_full:
            return Outcome.FULL
        content: Bytes = self._memory.get(self._pages(command, part))
        if isinstance(self.tier, Remote):
            return self.tier.write(name, content, anew=part.anew)
        if part.place in self.tier.broken:
            return Outcome.DAMAGED
        self.tier.end_write(part.place, name, content, command.number)
        return Outcome.DONE

    def _rot(self, command: Command, part: Part) -> None:
        name = self._name(command, part)
        if isinstance(self.tier, Disk):
            self.tier.damage(part.place, self._rng.randrange(5))
        elif (kind := self._rng.randrange(4)) < 2:
            self.tier.forget([name])
        elif name in self.tier.parts:
            (self.tier.rotten if kind == 2 else self.tier.refused).add(name)

    def _usage(self) -> Usage:
        if isinstance(self.tier, Disk):
            return Usage(None, None)
        return Usage(self.tier.capacity_pages * PAGE_BYTES, self.tier.used_pages * PAGE_BYTES)

    def _name(self, command: Command, part: Part) -> Name:
        name = command.space, part.group, part.key
        return self.tier.named(name) if isinstance(self.tier, Disk) else name

    def _pages(self, command: Command, part: Part) -> range:
        size = self._host.spaces[command.space].slot_bytes[part.group]
        return range(part.address // PAGE_BYTES, (part.address + size) // PAGE_BYTES)

    def _disk_bytes(self, command: Command, part: Part) -> int:
        return self._host.spaces[command.space].slot_bytes[part.group] + HEADER_PAGES * PAGE_BYTES
