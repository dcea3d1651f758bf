"""One publisher's batches in order, each once: what a subscriber makes of serial numbers, told of everything by others.

Theory of operation. A publisher numbers its batches from 0 and keeps the last of them to be replayed. `next` is the
number of the batch that is to be applied next; None until anything is known of this publisher.

    batch comes   number = next                        -> apply
                  number > next                        -> gap: it waits, `wants` a replay from the last one applied
                  number < next, time not after ours   -> it came twice, or late, or is of an earlier life: dropped
                  number < next, time after ours       -> the engine has begun anew: forget, `wants` a replay from 0
    replay        begins with the last batch applied, of the time that we know   -> apply what follows, then what waits
                  begins with a later one                                        -> beyond the publisher's memory:
                                                        forget, go on from there
                  has it with another time, or has nothing                       -> another life: forget, replay from 0
                  ends too early, has holes, fails     -> again, TRIES times; then forget, go on with what waits

The batch before `next` is replayed as well, because only that tells one life of an engine from another: a new life may
have published as much as the old one before we hear of it. For the same reason, and because nobody notices that the
last batch was lost, `check` wants such a replay now and then. A batch that cannot be read leaves us without what it
said: everything is forgotten, and what comes next counts.

`apply` and `forget` are called in the order in which things are to be taken for true. An engine offers no list of what
it holds: after `forget` its blocks become known again as it publishes them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from headwater.conductor.events.batches import Batch

WAITING_MAX = 4096
"""Batches that wait for a replay; of more, the later ones are lost, and are a gap afterwards."""
REMEMBERED = 256
"""Batches whose times are known, to tell what came twice."""
TRIES = 3
OLD_RUN = 3
"""So many old numbers in a row, one after another, are a new life of an engine whose clock went back."""


@dataclass(slots=True)
class Sums:
    """What has happened to one publisher's batches."""

    applied: int = 0
    gaps: int = 0
    replays: int = 0
    resyncs: int = 0
    """How often everything was forgotten: a new life, a batch that could not be read, or a gap that nobody can fill."""
    restarts: int = 0
    dropped: int = 0
    """Batches that came twice or late."""
    malformed: int = 0
    overflows: int = 0
    """Batches that found no room to wait."""


class Ordering:
    """For one caller. `wants` is the number that a replay is to begin with, None if none is wanted; the caller says
    `replayed` for each batch of it, then `replay_ended` or `replay_failed`."""

    def __init__(self, apply: Callable[[Batch], None], forget: Callable[[], None], *, replays: bool) -> None:
        """`replays`: whether the publisher can be asked for one."""
        self._apply, self._forget, self._replays = apply, forget, replays
        self.sums = Sums()
        self.next: int | None = None
        self.wants: int | None = 0 if replays else None
        self._newest = float("-inf")
        self._times: OrderedDict[int, float | None] = OrderedDict()
        self._waiting: deque[tuple[int, Batch | None]] = deque()
        self._found = False
        """The replay has what joins it to what was applied."""
        self._moved = False
        self._anew = False
        self._tries = 0
        self._old: tuple[int, int] = (0, 0)

    def __repr__(self) -> str:
        return f"Ordering(next {self.next}, {len(self._waiting)} waiting, {self.sums})"

    @property
    def is_settled(self) -> bool:
        """Whether everything that came was applied."""
        return self.wants is None and not self._waiting

    def came(self, number: int, batch: Batch | None) -> None:
        """The publisher has sent a batch; None for one that cannot be read."""
        if self.wants is not None:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append((number, batch))
            else:
                self.sums.overflows += 1
            return
        if self.next is None or number == self.next:
            self._take(number, batch)
        elif number > self.next:
            self.sums.gaps += 1
            if self._replays:
                self._waiting.append((number, batch))
                self._want(max(self.next - 1, 0))
            else:
                self._resync()
                self._take(number, batch)
        elif self._is_new_life(number, batch):
            self.sums.restarts += 1
            self._resync()
            if self._replays:
                self._want(0)  # which brings this one, too
            else:
                self._take(number, batch)
        else:
            self.sums.dropped += 1

    def check(self) -> None:
        """Ask whether there is more than we have, and of the same life."""
        if self._replays and self.wants is None:
            self._want(max((self.next or 0) - 1, 0))

    def again(self) -> None:
        """What was applied was lost: begin with the oldest batch that there is."""
        self._resync()
        if self._replays:
            self._want(0)

    # ---- a replay ---------------------------------------------------------------------------------------

    def replayed(self, number: int, batch: Batch | None) -> None:
        """The next batch of the replay that was wanted."""
        if self.wants is None or self._anew:
            return
        if not self._found:
            if not self.next:
                self.next = number
            elif number == self.next - 1 and self._times.get(number) == _time(batch):
                self._found = True
                return
            elif number >= self.next:
                self._resync()
                self.next = number
            else:
                self._anew = True
                return
            self._found = True
        if number == self.next:
            self._take(number, batch)
            self._moved = True

    def replay_ended(self) -> None:
        """It was complete, as far as the publisher knows."""
        if self.wants is None:
            return
        if self._found or (self.wants == 0 and not self.next and not self._anew):
            self.wants = None
            self.next = self.next or 0
            self._tries = 0 if self._moved else self._tries + 1
            self._go_on()
            return
        self.sums.restarts += 1
        self._resync()
        self._want(0)

    def replay_failed(self) -> None:
        """It did not come to its end in time."""
        if self.wants is None:
            return
        self._tries += 1
        if self._tries < TRIES or not self._waiting:
            # With nothing that waits there is nothing to go on with either.
            self._want(max((self.next or 0) - 1, 0))
            return
        self._give_up()

    # ---- inside -----------------------------------------------------------------------------------------

    def _want(self, number: int) -> None:
        self.wants = number
        self.sums.replays += 1
        self._found = self._moved = self._anew = False

    def _go_on(self) -> None:
        """Take what waits as if it came now."""
        if self._tries >= TRIES and self._waiting:
            self._give_up()
            return
        waiting, self._waiting = self._waiting, deque()
        while waiting and self.wants is None:
            number, batch = waiting.popleft()
            self.came(number, batch)
        self._waiting.extend(waiting)
        if not self._waiting:
            self._tries = 0

    def _give_up(self) -> None:
        """Go on with what waits, without what is missing."""
        self._tries = 0
        self.wants = None
        self._resync()
        self.next = self._waiting[0][0]
        self._go_on()

    def _take(self, number: int, batch: Batch | None) -> None:
        self.next = number + 1
        self._times[number] = _time(batch)
        if len(self._times) > REMEMBERED:
            self._times.popitem(last=False)
        self._old = (0, 0)
        if batch is None:
            self.sums.malformed += 1
            self.sums.resyncs += 1
            self._forget()
            return
        self._newest = max(self._newest, batch.time)
        self.sums.applied += 1
        self._apply(batch)

    def _resync(self) -> None:
        self.sums.resyncs += 1
        self.next = None
        self._newest = float("-inf")
        self._times.clear()
        self._forget()

    def _is_new_life(self, number: int, batch: Batch | None) -> bool:
        if batch is None or self._times.get(number) == batch.time:
            return False
        if batch.time > self._newest:
            return True
        after, run = self._old
        run = run + 1 if number == after and run else 1
        self._old = number + 1, run
        return run >= OLD_RUN


def _time(batch: Batch | None) -> float | None:
    return None if batch is None else batch.time
