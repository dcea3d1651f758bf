"""The directory of a simulated cluster: the real `Records` behind messages, which may be away, empty, or behind."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwater.core.directory import Records
from headwater.errors import RefusedError
from headwater.sim.cluster_oracle import must
from headwater.sim.network import Answered, Host, Listener
from headwater.sim.schedule import Process, Schedule
from headwater.types import Beat, Listed, Member, Standing

if TYPE_CHECKING:
    from headwater.sim.network import Network

ADDRESS = "directory"
SILENT_S, FORGET_S = 3.0, 12.0
COPY_S, COPIES = 1.5, 4
"""How often a replica of the directory catches up, and how many such moments are kept."""
SWEEP = 256
ROLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Roll:
    """All members at one moment: by number, and the number of each life. One for all that ask at about the same time,
    as lists of a thousand members for each of a thousand nodes would be most of the work of a simulation."""

    members: dict[int, Listed]
    numbers: dict[tuple[str, int], int]


class DirectoryServer:
    """Who listens at the directory's address, and what it knows."""

    def __init__(self, schedule: Schedule, network: Network, host: Host, records: type[Records], copies: bool) -> None:
        self._schedule, self._network, self._host, self._records = schedule, network, host, records
        self._generations = 0
        self._away_until_s = 0.0
        self._heard_s, self._numbers = dict[int, float](), dict[str, int]()
        self._roll: tuple[tuple[int, int], Roll] | None = None
        self._copies: deque[Records] = deque(maxlen=COPIES)
        self.process = Process("directory")
        self.records = self._empty()
        network.listeners[ADDRESS] = Listener(host, self.process, self)
        if copies:
            self._copy()

    @property
    def now(self) -> float:
        """The directory's time."""
        return self._host.clock.now()

    def call(self, act: Callable[[Records, float], Any], reply: Answered) -> None:
        """A node calls: it is answered with a tuple of what `act` says, or of the refusal."""
        answer: Any
        try:
            answer = act(self.records, self._host.clock.now())
        except RefusedError as error:
            answer = error
        reply((answer,))

    def join(self, member: Member, records: Records, now: float) -> int:
        """See `Records.join`."""
        number = records.join(member, now)
        self._heard_s.pop(self._numbers.get(member.name, number), None)
        self._numbers[member.name] = number
        self._heard_s[number] = now
        return number

    def beat(self, number: int, standing: Standing, report: bytes, records: Records, now: float) -> Beat | None:
        """See `Records.beat`. Who was heard of lately, and has not left, is a member: silence is no death."""
        beat = records.beat(number, standing, report, now)
        if beat is None:
            silent_s = now - self._heard_s.pop(number, -math.inf)
            must(silent_s >= FORGET_S, f"{number} was silent for {silent_s:.3f} s and is taken for dead")
        else:
            self._heard_s[number] = now
        return beat

    def leave(self, number: int, records: Records, now: float) -> None:
        """See `Records.leave`."""
        records.leave(number, now)
        self._heard_s.pop(number, None)

    def roll(self, records: Records, now: float) -> Roll:
        """See `Records.members`."""
        at = id(records), int(now / ROLL_S)
        if self._roll is None or self._roll[0] != at:
            members = {it.number: it for it in records.members(now)}
            numbers = {(it.member.name, it.member.epoch): number for number, it in members.items()}
            self._roll = at, Roll(members, numbers)
        return self._roll[1]

    def go_away(self, for_s: float) -> None:
        """Nobody listens for a while."""
        self._away_until_s = max(self._away_until_s, self._schedule.clock.now() + for_s)
        self._network.listeners.pop(ADDRESS, None)
        self._schedule.after(for_s, "the directory is there", self._come_back)

    def lose_all(self) -> None:
        """It restarts with nothing in it."""
        self.records = self._empty()
        self._copies.clear()
        self._heard_s.clear()

    def fall_back(self) -> bool:
        """A replica takes over that knows what was some time ago; False if there is none."""
        if not self._copies:
            return False
        self.records = copy.deepcopy(self._copies[0])
        self._heard_s.clear()
        return True

    def sweep(self) -> None:
        """Drop what ended lives have left behind."""
        while self.records.sweep(SWEEP, self._host.clock.now()):
            pass

    def _come_back(self) -> None:
        if self._schedule.clock.now() >= self._away_until_s:
            self._network.listeners[ADDRESS] = Listener(self._host, self.process, self)

    def _empty(self) -> Records:
        self._generations += 1
        return self._records(f"generation {self._generations}", SILENT_S, FORGET_S)

    def _copy(self) -> None:
        self._copies.append(copy.deepcopy(self.records))
        self._schedule.after(COPY_S, "", self._copy)
