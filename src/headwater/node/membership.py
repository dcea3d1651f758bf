"""The threads that talk to the directory for a node: one beats, one announces. Neither touches the core.

Theory of operation. A beat is small and has a thread, a connection and a deadline of its own, so that nothing that
carries data can make the node look dead. What comes of each call is told to the loop as an errand. While the directory
is away both try again with pauses that grow from 0.1 to 5 s, spread so that nodes do not come all at once.

    beat thread      leave and join, if this life has no number or stands for nothing under it ─► beat ─► loop
                     members, if they have changed
    announce thread  a batch from the loop ─► announce ─► applied / refused / perhaps not arrived ─► loop
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from headwater.core.announcing import Batch, Stamp
from headwater.core.health import Breaker, Health
from headwater.errors import HeadwaterError, RefusedError, UnavailableError
from headwater.ports import Directory
from headwater.types import Beat, Listed, Member, Standing

log = logging.getLogger(__name__)

BEAT_S = 1.0
SWEEP_EVERY_S, SWEEP_S = 5.0, 0.1
HURRY_S = 0.1
CALL_S = 1.0
"""How long a call to the directory may take."""
MEMBERS_S, MEMBER_S, CHANGED_S = 10.0, 0.05, 0.008
"""How old the list of members, with what they report, may get although nobody came or went: so long for each member, so
that the directory has not more to do in a large cluster than it can, and so long at the most; and how long for each
member once somebody did."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the loop has to say at a beat. `behind` is the number under which it stands for nothing any more."""

    standing: Standing
    report: bytes
    stamp: Stamp
    behind: int | None


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a beat has brought: this life's number, whether it is new, and the directory's answer."""

    number: int
    joined: bool
    stamp: Stamp
    beat: Beat | None


class Membership:
    """A node's place in the directory; `vitals`, `pulse`, `listed` and `announced` are called by the threads."""

    def __init__(
        self,
        directory: Directory,
        member: Callable[[], Member],
        vitals: Callable[[], Vitals],
        pulse: Callable[[Pulse], None],
        listed: Callable[[list[Listed], int], None],
        announced: Callable[[Batch, bytes | RefusedError | None], None],
    ) -> None:
        """`listed` is told of the members, and of our number, whenever they have changed. `announced` is told of each
        batch: how many others hold each chunk of it, or why it was refused, or None if it may not have arrived."""
        self._directory, self._member, self._vitals = directory, member, vitals
        self._pulse, self._listed, self._announced = pulse, listed, announced
        self._breaker = Breaker(failures=1)
        self._number: int | None = None
        self._seen: int | None = None
        self._seen_s = 0.0
        self._count = 0
        self._sweep_s = 0.0
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._hurry = threading.Event()
        self._ending = threading.Event()
        self.trouble = ""
        """Why the directory does not answer, or does not take this node."""
        self._threads = [
            threading.Thread(target=self._beat_on, name="headwater-beat", daemon=True),
            threading.Thread(target=self._announce_on, name="headwater-announce", daemon=True),
        ]

    @property
    def is_well(self) -> bool:
        """Whether the directory answered last time."""
        return self._breaker.state is Health.WELL

    def start(self) -> None:
        """Join the cluster and stay in it."""
        for it in self._threads:
            it.start()

    def hurry(self) -> None:
        """Beat now: the standing has changed."""
        self._hurry.set()

    def announce(self, batch: Batch) -> None:
        """Hand a batch over; one at a time."""
        self._batches.put(batch)

    def close(self, until_s: float) -> bool:
        """Leave and end the threads; whether they have ended. The directory is the caller's to close then."""
        self._ending.set()
        self._hurry.set()
        self._batches.put(None)
        for it in self._threads:
            if it.is_alive():
                it.join(max(until_s - time.monotonic(), 0.0))
        return not any(it.is_alive() for it in self._threads)

    # ---- the threads ----------------------------------------------------------------------------------

    def _beat_on(self) -> None:
        while not self._ending.is_set():
            now = time.monotonic()
            if self._breaker.allows(now):
                self._beat_once()
            # However much there is to hurry for: not more than ten times a second.
            self._ending.wait(HURRY_S)
            self._hurry.wait(self._pause_s(now))
            self._hurry.clear()
        if self._number is not None and self.is_well:
            try:
                self._directory.leave(self._number, time.monotonic() + CALL_S)
            except HeadwaterError as error:  # it will find out by our silence
                log.info("cannot take leave of the directory: %s", error)

    def _pause_s(self, began_s: float) -> float:
        due = self._breaker.next_probe_s
        next_s = began_s + BEAT_S if due is None else due
        return max(next_s - time.monotonic(), 0.01)

    def _beat_once(self) -> None:
        try:
            pulse = self._call()
        except (UnavailableError, RefusedError) as error:
            if self.is_well or str(error) != self.trouble:
                log.warning("directory: %s", error)
            self.trouble = str(error)
            self._breaker.failed(time.monotonic(), random.random(), unavailable=True)
            self._seen = None
            return
        if not self.is_well:
            log.info("directory: it answers again")
        self.trouble = ""
        self._breaker.succeeded(time.monotonic())
        self._pulse(pulse)

    def _call(self) -> Pulse:
        vitals = self._vitals()
        joins = self._number is None or self._number == vitals.behind
        if joins:
            if self._number is not None:
                self._directory.leave(self._number, time.monotonic() + CALL_S)
            self._number = self._directory.join(self._member(), time.monotonic() + CALL_S)
            self._seen = None
        assert self._number is not None
        beat = self._directory.beat(self._number, vitals.standing, vitals.report, time.monotonic() + CALL_S)
        now = time.monotonic()
        # When everybody comes or goes, not every node may read the whole list each time.
        changed = beat is not None and beat.members != self._seen
        old_s = self._count * CHANGED_S if changed else min(self._count * MEMBER_S, MEMBERS_S)
        if beat is not None and (joins or now - self._seen_s >= old_s):
            members = self._directory.members(now + CALL_S)
            self._listed(members, self._number)
            self._seen, self._seen_s, self._count = beat.members, now, len(members)
        return Pulse(self._number, joins, vitals.stamp, beat)

    def _sweep(self) -> None:
        """Now and then, a little of what others left behind; all nodes share the work."""
        now = time.monotonic()
        if now >= self._sweep_s:
            self._sweep_s = now + SWEEP_EVERY_S
            try:
                self._directory.sweep(now + SWEEP_S)
            except HeadwaterError as error:
                log.debug("directory: %s", error)

    def _announce_on(self) -> None:
        while (batch := self._batches.get()) is not None:
            answer: bytes | RefusedError | None = None
            try:
                answer = self._directory.announce(batch.number, batch.serial, batch.changes, time.monotonic() + CALL_S)
            except RefusedError as error:  # the directory has lost us
                answer = error
            except UnavailableError as error:
                log.debug("directory: batch %d of %d changes: %s", batch.serial, len(batch.changes), error)
            else:
                self._sweep()
            if not self._ending.is_set():
                self._announced(batch, answer)
