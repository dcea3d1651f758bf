"""Carries out what the core orders for a tier below HOST: threads that block in the tier's calls, and a way back.

Theory of operation. Each level has its own threads, and each kind of command its own *lane* among them, with a queue:
a stuck write never stands before a read, a stuck read never before the question whether the level is well, and a stuck
level never before another. The core bounds what is under way, so the queues are short. Each command ends exactly once,
with outcomes, with the tier's usage, or with None if the tier as a whole did not work; ends are taken by the node's
loop, which is woken for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from headwater.core.levels import ASKING_MAX, Command, Verb
from headwater.errors import HeadwaterError, UnavailableError
from headwater.places import mask
from headwater.ports import LowerTier, Piece
from headwater.tiers.host import MappedMemory
from headwater.types import ABSENT, PAGE_BYTES, Identity, Origin, Outcome, Usage, align

log = logging.getLogger(__name__)

LOG_S = 10.0
ERROR_CHARS_MAX = 300
Result = list[Outcome] | Usage | None
Ended = tuple[int, Result]


def lanes(readers: int, writers: int) -> dict[Verb, int]:
    """How many threads each kind of command gets on a level that may have so many reads and writes under way."""
    others = {Verb.HOLDS: ASKING_MAX, Verb.USAGE: 1, Verb.DELETE: 1, Verb.CLEAR: 1}
    return {Verb.READ: readers, Verb.WRITE: writers, **others}


class Carrier:
    """The threads of one level."""

    def __init__(
        self,
        name: str,
        tier: LowerTier,
        threads: Mapping[Verb, int],
        memory: MappedMemory,
        origin: Callable[[int], Origin],
        ended: Callable[[Ended], None],
    ) -> None:
        """`threads` says how many commands of each kind are carried out at once; see `lanes`. `origin` gives a
        namespace by its number in HOST; `ended` is called by the threads and must not block."""
        self.name, self.tier = name, tier
        self._memory, self._origin, self._ended = memory, origin, ended
        self._orders: dict[Verb, SimpleQueue[Command | None]] = {verb: SimpleQueue() for verb in threads}
        self._origins: dict[int, Origin] = {}
        """What namespaces were called when moves were ordered: they may have another name by now."""
        self.last_error: tuple[float, str] | None = None
        """When the tier as a whole last failed, and its reason, without credentials."""
        self._complain_from_s = 0.0
        self._ending = False
        self._threads: list[threading.Thread] = []
        for verb, count in threads.items():
            for _ in range(count):
                self._start(verb)

    def order(self, command: Command) -> None:
        """Have a command carried out."""
        if command.verb in (Verb.READ, Verb.WRITE):
            self._origins[command.number] = self._origin(command.space)
        self._orders[command.verb].put(command)

    def end(self) -> None:
        """Let the calls under way be the last; what was ordered and has not begun is dropped."""
        self._ending = True
        for orders in self._orders.values():
            orders.put(None)

    def close(self, until_s: float) -> bool:
        """Wait for the threads, after `end`, and close the tier; False if a call is stuck in it, which then keeps it
        open."""
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            log.error("%s: a call does not return; leaving it behind", self.name)
            return False
        self.tier.close()
        return True

    # ---- inside ---------------------------------------------------------------------------------------

    def _start(self, verb: Verb) -> None:
        name = f"headwater-{self.name[:20]}-{verb.value}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, args=(verb,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, verb: Verb) -> None:
        orders = self._orders[verb]
        while (command := orders.get()) is not None:
            if self._ending:
                continue
            result: Result = None
            whole = False
            try:
                result = self._carry_out(command)
                whole = True
            finally:
                self._ended((command.number, result))
                if not whole:
                    # A bug, which Python tells of as it ends this thread; the level must not lose its threads by it.
                    self._start(verb)
        orders.put(None)  # for the others of this lane

    def _carry_out(self, command: Command) -> Result:
        try:
            return self._call(command)
        except HeadwaterError as error:
            self._complain(command, error)
            return None
        except OSError as error:  # what a tier did not foresee is its failure, not the node's
            self._complain(command, error)
            return None

    def _call(self, command: Command) -> Result:
        until_s = command.until_s
        if command.verb is Verb.USAGE:
            return self.tier.usage(until_s)
        origin = self._origins.pop(command.number, None) or self._origin(command.space)
        if command.verb is Verb.CLEAR:
            self.tier.clear(origin, until_s)
            return []
        if command.verb is Verb.HOLDS:
            asked = [Identity(self._origin(it.space), it.group, it.key) for it in command.parts]
            held = self.tier.holds(asked, until_s)
            return [Outcome.DONE if it else Outcome.MISSING for it in held]
        identities = [Identity(origin, it.group, it.key, it.parent) for it in command.parts]
        if command.verb is Verb.DELETE:
            self.tier.delete(identities, until_s)
            return [Outcome.DONE] * len(identities)
        pieces = [
            Piece(it, self._memory.array(part.address, it.length_bytes), part.place, command.background)
            for it, part in zip(identities, command.parts, strict=True)
        ]
        if command.verb is Verb.READ:
            return self.tier.read(pieces, until_s)
        return self._write(pieces, command, until_s)

    def _write(self, pieces: Sequence[Piece], command: Command, until_s: float) -> list[Outcome]:
        for piece in pieces:
            clear_gaps(piece)
        if any(part.place != ABSENT for part in command.parts):
            return self.tier.write(pieces, until_s)
        # Others may have written it already: then once is enough, unless it is of no use.
        there = self.tier.holds([it.identity for it in pieces], until_s)
        held = [it and not part.anew for it, part in zip(there, command.parts, strict=True)]
        lacking = [piece for piece, there in zip(pieces, held, strict=True) if not there]
        outcomes = iter(self.tier.write(lacking, until_s) if lacking else ())
        return [Outcome.DONE if there else next(outcomes) for there in held]

    def _complain(self, command: Command, error: Exception) -> None:
        now = time.monotonic()
        self.last_error = now, mask(f"{command.verb.value}: {error}")[:ERROR_CHARS_MAX]
        if now >= self._complain_from_s:
            self._complain_from_s = now + LOG_S
            level = logging.WARNING if isinstance(error, UnavailableError) else logging.ERROR
            log.log(level, "%s: %s failed: %s", self.name, command.verb.value, error)


def clear_gaps(piece: Piece) -> None:
    """Zero the bytes of a slot that no shard writes: they hold what was there before, perhaps another tenant's."""
    layout, group = piece.identity.origin.layout, piece.identity.group
    for shard in range(layout.shards):
        size = layout.part_bytes(group, shard)
        start = layout.part_offset(group, shard)
        if size % PAGE_BYTES:
            piece.memory[start + size : start + align(size)] = 0


class Ends:
    """What has ended and the loop has not yet heard of."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._ended: deque[Ended] = deque()
        self._wake = wake

    def add(self, ended: Ended) -> None:
        """A command has ended; from any thread."""
        self._ended.append(ended)
        self._wake()

    def take(self) -> list[Ended]:
        """All that has ended since the last call; for the loop."""
        taken = []
        while self._ended:
            taken.append(self._ended.popleft())
        return taken
