"""Who may use a link now: hand-offs before loads before replication, and none of them shut out.

Theory of operation. Whoever wants to move bytes *asks*, waits in its priority's queue, is *started*, and *ended*.

    start      as long as less than `depth` bytes are under way, the next one of:
               1  replication that has waited for `PATIENCE_S`, within its share
               2  a load, if no hand-off waits, or hand-offs have overtaken loads by enough: of the bytes that start
                  while both wait, loads have a fifth at the least
               3  a hand-off
               4  replication within its share, or when the link is idle: nobody else waits, is under way, or was
                  within `QUIET_S`

Replication's share: in no second do more bytes of it start than that share of what the link can carry, while others
want it, be they few or many; what it did in idle time before counts. One item always may when that second had none,
however large. It also has no more than half of `depth` under way, so that whoever comes does not wait for long.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass

REPLICATION_SHARE = 0.2
LOAD_SHARE = 0.2
DEPTH_S, LEAST_DEPTH_BYTES = 0.02, 8 << 20
"""So many bytes are under way as the link carries in that time, so that who comes first next does not wait longer."""
PATIENCE_S = 2.0
QUIET_S = 0.02
SECOND_S = 1.0


class Priority(enum.IntEnum):
    """What a transfer is for, the most urgent first."""

    HANDOFF = 0
    LOAD = 1
    REPLICATION = 2


@dataclass(frozen=True, slots=True)
class _Item:
    priority: Priority
    size_bytes: int
    asked_s: float


class _Second:
    """Bytes started in the last second; those of one hundredth are kept as one, and count from its latest."""

    def __init__(self) -> None:
        self._log: deque[tuple[int, float, int]] = deque()
        self.sum = 0

    def add(self, size_bytes: int, now: float) -> None:
        """Bytes start."""
        self.sum += size_bytes
        slot = int(now / SECOND_S * 100)
        if self._log and self._log[-1][0] == slot:
            size_bytes += self._log.pop()[2]
        self._log.append((slot, now, size_bytes))

    def forget(self, now: float) -> None:
        """What is older than a second."""
        while self._log and self._log[0][1] <= now - SECOND_S:
            self.sum -= self._log.popleft()[2]

    @property
    def ends_s(self) -> float:
        """When the oldest entry will be a second old; 0 if there is none."""
        return self._log[0][1] + SECOND_S if self._log else 0.0


class Budget:
    """One link, or one node's part of a network, shared by three priorities."""

    def __init__(self, bytes_s: float = 1e9, replication_share: float = REPLICATION_SHARE) -> None:
        """`bytes_s` is what the link is thought to carry until `rate` says what was measured."""
        assert bytes_s > 0 and 0 < replication_share <= 1, f"{bytes_s=}, {replication_share=}"
        self._bytes_s, self._share = bytes_s, replication_share
        self._waiting = [OrderedDict[int, _Item]() for _ in Priority]
        self._moving: dict[int, _Item] = {}
        self._under_way = [0 for _ in Priority]
        self._second = _Second()
        self._owed = 0.0
        """What loads may start before the next hand-off, in bytes."""
        self._others_s = -QUIET_S
        self._next = 0

    def __repr__(self) -> str:
        waiting = ", ".join(f"{len(self._waiting[it])} {it.name}" for it in Priority)
        return f"Budget({sum(self._under_way)} of {self.depth_bytes} bytes under way; waiting: {waiting})"

    @property
    def depth_bytes(self) -> int:
        """No more is started once so many bytes are under way."""
        return max(int(self._bytes_s * DEPTH_S), LEAST_DEPTH_BYTES)

    @property
    def under_way_bytes(self) -> int:
        """Bytes that were started and have not ended."""
        return sum(self._under_way)

    def rate(self, bytes_s: float) -> None:
        """What the link was measured to carry."""
        assert bytes_s > 0, f"{bytes_s=}"
        self._bytes_s = bytes_s

    def ask(self, priority: Priority, size_bytes: int, now: float) -> int:
        """Wait for a turn; the ticket, which `start` gives back when it has come."""
        assert size_bytes >= 0, f"{size_bytes=}"
        if priority is Priority.LOAD and not self._waiting[priority]:
            self._owed = 0.0
        self._next += 1
        self._waiting[priority][self._next] = _Item(priority, size_bytes, now)
        return self._next

    def start(self, now: float) -> list[int]:
        """The tickets whose turn it is."""
        self._second.forget(now)
        if self._busy():
            self._others_s = now
        found: list[int] = []
        while self.under_way_bytes < self.depth_bytes:
            priority = self._pick(now)
            if priority is None:
                break
            ticket, it = self._waiting[priority].popitem(last=False)
            self._account(it, now)
            self._moving[ticket] = it
            self._under_way[priority] += it.size_bytes
            found.append(ticket)
        return found

    def ended(self, ticket: int, now: float) -> None:
        """What was started is through or given up, or what waits is no longer wanted; unknown tickets are ignored."""
        for queue in self._waiting:
            queue.pop(ticket, None)
        it = self._moving.pop(ticket, None)
        if it is not None:
            self._under_way[it.priority] -= it.size_bytes
            if it.priority is not Priority.REPLICATION:
                self._others_s = now

    def next_s(self, now: float) -> float | None:
        """When `start` may find more though nothing has been asked or ended; None if never."""
        first = next(iter(self._waiting[Priority.REPLICATION].values()), None)
        if first is None:
            return None
        moments = (self._others_s + QUIET_S, self._second.ends_s, first.asked_s + PATIENCE_S)
        return min((it for it in moments if it > now), default=None)

    def _busy(self) -> bool:
        """Whether hand-offs or loads want the link now."""
        urgent = (Priority.HANDOFF, Priority.LOAD)
        return any(self._waiting[it] for it in urgent) or any(it.priority in urgent for it in self._moving.values())

    def _pick(self, now: float) -> Priority | None:
        """Whose first is next."""
        handoff, load, replication = (next(iter(it.values()), None) for it in self._waiting)
        may = replication is not None and self._replication_may(replication, now)
        if replication is not None and may and now - replication.asked_s >= PATIENCE_S:
            return Priority.REPLICATION
        if load is not None and (handoff is None or self._owed >= load.size_bytes):
            return Priority.LOAD
        if handoff is not None:
            return Priority.HANDOFF
        return Priority.REPLICATION if may else None

    def _replication_may(self, it: _Item, now: float) -> bool:
        """Whether replication may start this at all."""
        under_way = self._under_way[Priority.REPLICATION]
        if under_way and under_way + it.size_bytes > self.depth_bytes // 2:
            return False
        return self._in_share(it) or now - self._others_s >= QUIET_S

    def _in_share(self, it: _Item) -> bool:
        return not self._second.sum or self._second.sum + it.size_bytes <= self._share * self._bytes_s * SECOND_S

    def _account(self, it: _Item, now: float) -> None:
        """Something starts: who is owed what then."""
        if it.priority is Priority.REPLICATION:
            self._second.add(it.size_bytes, now)
            return
        self._others_s = now
        if it.priority is Priority.HANDOFF and self._waiting[Priority.LOAD]:
            self._owed += it.size_bytes * LOAD_SHARE / (1 - LOAD_SHARE)
        elif it.priority is Priority.LOAD and self._waiting[Priority.HANDOFF]:
            self._owed -= it.size_bytes
