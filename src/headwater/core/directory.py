"""The directory as a state machine: who is a member, and which members hold which chunks. Told the time.

Theory of operation.

    join       a life gets a number, never used again; older lives of its name end      -> AWAKE
    AWAKE      beats; SILENT_S without a beat                                           -> SILENT
    SILENT     listed as such, what it holds stays; a beat -> AWAKE; FORGET_S without   -> ended
    ended      left, forgotten, or followed by a newer life: its number is no member's; what entries say of it counts
               for nothing, and is dropped when a batch meets it, and by `sweep`

An entry is a chunk's holders, oldest first, each a number and the tiers that it holds the chunk in. A server does the
same in `directory/redis.py`, and is compared with this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headwater.errors import RefusedError
from headwater.types import NAME_BYTES, Announced, Beat, Listed, Member, Replica, Standing, Tier

SILENT_S = 3.0
FORGET_S = 60.0
TICKS_A_SECOND = 62_500
"""Of the clock that numbers come from: since 1970 they fill 6 bytes in 142 years."""
MOST_CHANGES = 4096
"""Changes in one batch."""
MOST_HOLDERS = 64
"""Holders that an entry keeps; of what more members hold, they are enough to read from."""
MOST_REPORT_BYTES = 32 << 10
MOST_SERIAL = (1 << 53) - 1
MOST_EPOCH = (1 << 63) - 1
TIERS = {1: (Tier.HOST,), 2: (Tier.DISK,), 3: (Tier.HOST, Tier.DISK)}
JOIN_AGAIN = "join again and announce everything"

Entry = tuple[int, ...]
"""For each holder `number << 2 | bits`."""


@dataclass(slots=True)
class _Life:
    member: Member
    heard_s: float
    serial: int = 0
    standing: Standing = Standing.SERVING
    report: bytes = b""


class Records:
    """What a directory knows; `now` may go back, as it does where another server takes over. `generation` is another
    for each that starts empty."""

    def __init__(self, generation: str, silent_s: float = SILENT_S, forget_s: float = FORGET_S) -> None:
        assert 0 < silent_s < forget_s, f"{silent_s=}, {forget_s=}"
        self.generation = generation
        self._silent_s, self._forget_s = silent_s, forget_s
        self._lives: dict[int, _Life] = {}
        self._numbers: dict[str, int] = {}
        # Both in the order of their last beats, so that whoever is due is in front.
        self._awake: dict[int, None] = {}
        self._silent: dict[int, None] = {}
        self._last = 0
        self._version = 0
        self._entries: dict[bytes, Entry] = {}
        self._shared: dict[Entry, Entry] = {}
        self._ended = self._swept = 0
        self._sweeping: Iterator[bytes] | None = None

    def __repr__(self) -> str:
        return (
            f"Records({self.generation}, {len(self._awake)} members and {len(self._silent)} silent ones, "
            f"{len(self._entries)} chunks)"
        )

    def __len__(self) -> int:
        return len(self._entries)

    def join(self, member: Member, now: float) -> int:
        """See `ports.Directory`."""
        check_member(member)
        self._settle(now)
        number = self._numbers.get(member.name)
        if number is not None:
            life = self._lives[number]
            if life.member.epoch > member.epoch:
                raise newer_life(member, life.member.epoch)
            if life.member.epoch == member.epoch:
                self._version += life.member != member
                life.member = member
                self._heard(number, now)
                return number
            self._end(number)
        # The time in it keeps numbers apart even where a directory comes back with what it knew some time ago.
        self._last = number = max(self._last + 1, int(now * TICKS_A_SECOND))
        self._lives[number] = _Life(member, now)
        self._numbers[member.name] = number
        self._awake[number] = None
        self._version += 1
        return number

    def beat(self, number: int, standing: Standing, report: bytes, now: float) -> Beat | None:
        """See `ports.Directory`."""
        check_beat(standing, report)
        self._settle(now)
        life = self._lives.get(number)
        if life is None:
            return None
        self._version += life.standing is not standing
        life.standing, life.report = standing, report
        self._heard(number, now)
        return Beat(self.generation, life.serial, self._version)

    def announce(self, number: int, serial: int, changes: Sequence[Announced], now: float) -> bytes:
        """See `ports.Directory`; a serial that leaves some out is refused like an unknown number: what was in between
        is lost."""
        check_batch(serial, changes)
        self._settle(now)
        life = self._lives.get(number)
        if life is None:
            raise unknown_number(number)
        if serial > life.serial + 1:
            raise serial_gap(serial, life.serial)
        if serial == life.serial + 1:
            life.serial = serial
            return bytes([self._apply(number, it) for it in changes])
        return bytes([self._others(number, it.name) for it in changes])

    def locate(self, names: Sequence[bytes], now: float) -> list[tuple[Replica, ...]]:
        """See `ports.Directory`."""
        check_names(names)
        self._settle(now)
        known: dict[Entry, tuple[Replica, ...]] = {(): ()}
        found = []
        for name in names:
            entry = self._entries.get(name, ())
            replicas = known.get(entry)
            if replicas is None:
                alive = (it for it in entry if it >> 2 in self._lives)
                replicas = known[entry] = tuple(Replica(it >> 2, tier) for it in alive for tier in TIERS[it & 3])
            found.append(replicas)
        return found

    def members(self, now: float) -> list[Listed]:
        """See `ports.Directory`; in the order of their numbers."""
        self._settle(now)
        return [
            Listed(number, it.member, self._standing(number, it), now - it.heard_s, it.report)
            for number, it in sorted(self._lives.items())
        ]

    def leave(self, number: int, now: float) -> None:
        """See `ports.Directory`."""
        self._settle(now)
        if number in self._lives:
            self._end(number)

    def sweep(self, budget: int, now: float) -> bool:
        """Drop what ended lives have left in up to `budget` entries; whether there is more to look at."""
        self._settle(now)
        if self._sweeping is None:
            if self._swept == self._ended:
                return False
            self._swept = self._ended
            self._sweeping = iter(list(self._entries))
        for _ in range(budget):
            name = next(self._sweeping, None)
            if name is None:
                self._sweeping = None
                return self._swept != self._ended
            if name in self._entries:
                self._put(name, self._alive(self._entries[name]))
        return True

    def _standing(self, number: int, life: _Life) -> Standing:
        return Standing.SILENT if number in self._silent else life.standing

    def _heard(self, number: int, now: float) -> None:
        self._lives[number].heard_s = now
        if number in self._silent:
            del self._silent[number]
            self._version += 1
        else:
            del self._awake[number]
        self._awake[number] = None

    def _settle(self, now: float) -> None:
        """Those who have not been heard of fall silent, or are forgotten. A beat of the future counts as one of now,
        and who was silent stays so: a clock that went back must not keep the dead alive."""
        for those, latest_s in ((self._awake, now), (self._silent, now - self._silent_s)):
            for life in map(self._lives.__getitem__, reversed(those)):
                if life.heard_s <= latest_s:
                    break
                life.heard_s = latest_s
        while (number := next(iter(self._awake), None)) is not None:
            if now - self._lives[number].heard_s < self._silent_s:
                break
            del self._awake[number]
            self._silent[number] = None
            self._version += 1
        while (number := next(iter(self._silent), None)) is not None:
            if now - self._lives[number].heard_s < self._forget_s:
                break
            self._end(number)

    def _end(self, number: int) -> None:
        life = self._lives.pop(number)
        del self._numbers[life.member.name]
        self._awake.pop(number, None)
        self._silent.pop(number, None)
        self._version += 1
        self._ended += 1

    def _alive(self, entry: Entry) -> Entry:
        return tuple(it for it in entry if it >> 2 in self._lives)

    def _others(self, number: int, name: bytes) -> int:
        return sum(it >> 2 != number for it in self._alive(self._entries.get(name, ())))

    def _apply(self, number: int, change: Announced) -> int:
        """Do one change; how many others hold that chunk."""
        holders = list(self._alive(self._entries.get(change.name, ())))
        bit = bit_of(change.tier)
        place = next((at for at, it in enumerate(holders) if it >> 2 == number), None)
        if place is None:
            others = len(holders)
            if change.present and others < MOST_HOLDERS:
                holders.append(number << 2 | bit)
        else:
            others = len(holders) - 1
            holders[place] = holders[place] | bit if change.present else holders[place] & ~bit
            if not holders[place] & 3:
                del holders[place]
        self._put(change.name, tuple(holders))
        return others

    def _put(self, name: bytes, entry: Entry) -> None:
        if not entry:
            self._entries.pop(name, None)
            return
        # Chunks of a prompt have the same holders: one tuple for all keeps a million entries small.
        shared = self._shared.setdefault(entry, entry)
        if len(self._shared) > MOST_CHANGES:
            self._shared.clear()
        self._entries[name] = shared


def check_member(member: Member) -> None:
    """What no directory takes."""
    if not 0 < len(member.name.encode()) <= 255:
        raise RefusedError("member.name", "1 to 255 bytes", repr(member.name[:80]), "give the node another name")
    if not 0 <= member.epoch <= MOST_EPOCH:
        raise RefusedError("member.epoch", f"0 to {MOST_EPOCH}", str(member.epoch), "use nanoseconds since 1970")


def check_beat(standing: Standing, report: bytes) -> None:
    """A member may serve or drain, and its report is small."""
    if standing is Standing.SILENT:
        raise RefusedError("standing", "serving or draining", standing.value, "only the directory says who is silent")
    if len(report) > MOST_REPORT_BYTES:
        raise RefusedError("report", f"at most {MOST_REPORT_BYTES} bytes", str(len(report)), "say less in it")


def check_batch(serial: int, changes: Sequence[Announced]) -> None:
    """A batch has a serial, is bounded, and speaks of chunks in HOST and DISK."""
    if not 0 < serial <= MOST_SERIAL:
        raise RefusedError("serial", f"1 to {MOST_SERIAL}", str(serial), "count batches from 1")
    if len(changes) > MOST_CHANGES:
        raise RefusedError("changes", f"at most {MOST_CHANGES}", str(len(changes)), "announce them in several batches")
    check_names([it.name for it in changes])
    for it in changes:
        if it.tier is not Tier.HOST and it.tier is not Tier.DISK:
            raise RefusedError("tier", "host or disk", it.tier.value, "announce what peers can read from this node")


def bit_of(tier: Tier) -> int:
    """What stands for a tier in an entry; two of them may be set."""
    return 1 if tier is Tier.HOST else 2


def check_names(names: Sequence[bytes]) -> None:
    """A name has 17 bytes."""
    if odd := set(map(len, names)) - {NAME_BYTES}:
        raise RefusedError("name", f"{NAME_BYTES} bytes", str(min(odd)), "name chunks by chunk_name()")


def newer_life(member: Member, epoch: int) -> RefusedError:
    """Two processes go by the same name, and the other one started later."""
    remedy = f"another node goes by the name {member.name!r}: stop this one, or give it a name of its own"
    return RefusedError("member.epoch", f"at least {epoch}", str(member.epoch), remedy)


def unknown_number(number: int) -> RefusedError:
    """The directory has no such member, or has it no longer."""
    return RefusedError("number", "a member's", str(number), JOIN_AGAIN)


def serial_gap(serial: int, last: int) -> RefusedError:
    """The directory has lost batches that it had applied."""
    return RefusedError("serial", f"at most {last + 1}", str(serial), JOIN_AGAIN)
