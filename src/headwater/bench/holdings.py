"""What a fleet's instances hold, told to an index and asked of it, one turn at a time, for whoever keeps the index.

`main` fills the index, says `{}` on stdout, and then answers each line on stdin

    VERB BLOCKS BATCH CALLS all|one
    filled

with one line of JSON. `filled` asks how much memory that took and how long the longest event; the others answer with
each call's seconds and the CPU seconds of this process. Events and questions are of one chain of BLOCKS blocks each;
BATCH is 1. `stored` and `removed` are events, `grown` events of one block each; `everyone`, `somebody`, `half` and
`nobody` are questions for chains that all instances hold, one holds, all hold the half of, none does. Arguments are
made before the clock starts, in the form that the index takes; what a turn changed is changed back, untimed. `one`
binds all threads to one core. The last answers of a turn are compared with what was told.

Half of the chains are held by all instances, the others by one each. Only Python's own library: a rival's has no more.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

QUESTIONS = ("everyone", "somebody", "half", "nobody")
EVENTS = ("stored", "removed", "grown")
CHECKED = 8
"""How many answers of a turn are looked at; to keep all would change what is timed."""
NOBODYS = 1 << 30
"""Chains from here on belong to nobody."""


class Span(NamedTuple):
    """Some blocks of a chain; `chain` is its number, the same everywhere."""

    chain: int
    first: int
    blocks: int


class Index(Protocol):
    """Whoever knows what instances hold. What it is told and asked is prepared by itself, untimed."""

    def stored(self, instance: int, span: Span) -> Callable[[], object]:
        """The call that says that an instance holds this, which follows what it holds."""

    def removed(self, instance: int, span: Span) -> Callable[[], object]:
        """The call that says that an instance holds this no more."""

    def question(self, spans: Sequence[Span]) -> Callable[[], Any]:
        """The call that asks who holds how much of these blocks one after another."""

    def lengths(self, answer: Any) -> dict[int, int]:
        """What it answered: leading blocks by instance."""


def main(index: Index, instances: int, blocks: int, chain_blocks: int) -> None:
    """Answer turns until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    fleet = Holdings(index, instances, blocks, chain_blocks)
    filled = fleet.fill()
    answers.write("{}\n")
    answers.flush()
    for request in sys.stdin:
        answer: object = filled
        if request.strip() != "filled":
            verb, count, _, calls, where = request.split()
            bind(everywhere=where == "all")
            answer = fleet.turn(verb, int(count), int(calls))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def bind(*, everywhere: bool) -> None:
    """Let this process run on all cores, or on one."""
    cores = range(os.cpu_count() or 1)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores if everywhere else {0})


def resident_bytes() -> int:
    """How much memory this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def numbers_of(span: Span, bits: int) -> list[int]:
    """Numbers that nobody else has, one for each block."""
    draw = random.Random(span.chain)
    return [draw.getrandbits(bits) for _ in range(span.first + span.blocks)][span.first :]


class Holdings:
    """A fleet, told to one index."""

    def __init__(self, index: Index, instances: int, blocks: int, chain_blocks: int) -> None:
        self._index, self._instances, self._chain_blocks = index, instances, chain_blocks
        self._random = random.Random(1)
        chains = blocks // chain_blocks
        self.shared = range(chains // 2)
        rest = chains - len(self.shared)
        self.owner = {len(self.shared) + it: it // rest for it in range(rest * instances)}
        self._next = NOBODYS

    def fill(self) -> dict[str, float]:
        """Tell everything, in a random order: bytes of memory that it took, and the longest event's CPU seconds."""
        whole = [(it, chain) for chain in self.shared for it in range(self._instances)]
        whole += [(it, chain) for chain, it in self.owner.items()]
        self._random.shuffle(whole)
        gc.collect()
        before, longest_s = resident_bytes(), 0.0
        for instance, chain in whole:
            tell = self._index.stored(instance, Span(chain, 0, self._chain_blocks))
            start_s = time.thread_time()
            tell()
            longest_s = max(longest_s, time.thread_time() - start_s)
        gc.collect()
        held = len(whole) * self._chain_blocks
        return {"bytes": resident_bytes() - before, "held": held, "longest_s": longest_s}

    def turn(self, verb: str, blocks: int, calls: int) -> dict[str, Any]:
        """`calls` timed calls."""
        blocks = min(blocks, self._chain_blocks)
        if verb in QUESTIONS:
            return self._ask(verb, blocks, calls)
        before, timed, after = self._events(verb, blocks, calls)
        for call in before:
            call()
        seconds, cpu_s = timed_calls(timed)[:2]
        for call in after:
            call()
        return {"seconds": seconds, "cpu_s": cpu_s, "peer_cpu_s": 0.0}

    def _ask(self, verb: str, blocks: int, calls: int) -> dict[str, Any]:
        wanted, questions = [], []
        for _ in range(calls):
            spans, lengths = self._question(verb, blocks)
            questions.append(self._index.question(spans))
            wanted.append(lengths)
        seconds, cpu_s, answers = timed_calls(questions)
        for answer, lengths in zip(answers, wanted[-len(answers) :], strict=True):
            if (found := self._index.lengths(answer)) != lengths:
                raise SystemExit(f"{verb}: the index says {found}, not {lengths}")
        return {"seconds": seconds, "cpu_s": cpu_s, "peer_cpu_s": 0.0}

    def _question(self, verb: str, blocks: int) -> tuple[list[Span], dict[int, int]]:
        chain = self._random.choice(self.shared)
        if verb == "everyone":
            return [Span(chain, 0, blocks)], dict.fromkeys(range(self._instances), blocks)
        if verb == "somebody":
            chain, instance = self._random.choice(list(self.owner.items()))
            return [Span(chain, 0, blocks)], {instance: blocks}
        if verb == "half":
            spans = [Span(chain, 0, blocks // 2), Span(self._nobodys(), 0, blocks - blocks // 2)]
            return spans, dict.fromkeys(range(self._instances), blocks // 2)
        return [Span(self._nobodys(), 0, blocks)], {}

    def _nobodys(self) -> int:
        self._next += 1
        return self._next

    def _events(self, verb: str, blocks: int, calls: int) -> tuple[list[Callable[[], object]], ...]:
        index = self._index
        if verb == "grown":  # a conversation that is decoded: one block after the other
            spans = [Span(self._nobodys(), it % blocks, 1) for it in range(calls)]
            spans = [it._replace(chain=spans[at - it.first].chain) for at, it in enumerate(spans)]
            instances = [spans[at - it.first].chain % self._instances for at, it in enumerate(spans)]
            told = list(zip(instances, spans, strict=True))
            back = [index.removed(*it) for it in reversed(told)]
            return [], [index.stored(*it) for it in told], back
        picked = self._random.sample([*self.owner.items(), *((it, 0) for it in self.shared)], calls)
        events = [(instance, Span(chain, 0, blocks)) for chain, instance in picked]
        removed, stored = [index.removed(*it) for it in events], [index.stored(*it) for it in events]
        return (removed, stored, []) if verb == "stored" else ([], removed, stored)


def timed_calls(calls: Sequence[Callable[[], object]]) -> tuple[list[float], float, list[object]]:
    """Each call's seconds, the CPU seconds of all, and what the last of them gave."""
    seconds, clock = [0.0] * len(calls), time.perf_counter
    answers: deque[object] = deque(maxlen=CHECKED)
    gc.collect()
    gc.disable()
    cpu_s = time.process_time()
    for at, call in enumerate(calls):
        before_s = clock()
        answer = call()
        seconds[at] = clock() - before_s
        answers.append(answer)
    cpu_s = time.process_time() - cpu_s
    gc.enable()
    return seconds, cpu_s, list(answers)
