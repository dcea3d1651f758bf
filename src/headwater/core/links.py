"""The peers of a node: whom to read from, over what, for how long, and how many reads at once.

Theory of operation. The members that the directory lists, but ourselves, are the *peers*; what is known of one is
forgotten when it is listed no more. Each has a breaker, and so has each transport to it.

    choose      chunks and who holds them   -> Choice: one Read for each holder and kind of memory
    began       a read of a peer begins     -> Begun; None: not now (sick, or as many reads under way as it may have)
    stalled     it has not ended in `stall_s`: counts against the peer; `may_go_on` says whether to read elsewhere
    succeeded, failed, abandoned            the read is over: one of them, once for each `began`

Cost of a holder: the seconds until it would be through with what is asked of it already and with this. A peer that is
new, or was sick or silent, has one read at a time, then two, four, and so on (slow start). A sick peer is asked
again by one read of what nobody else holds, or by the driver (`probes`).

A read that goes on at another holder while the first may yet answer is a *hedge*. Hedges are at most 5 % of all reads,
so that a cluster that is slow because it is overloaded does not get more to do; peers found sick are left at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headwater.core.health import Breaker, Health
from headwater.core.paths import Distance, Path, common_transports, disk_line, distance, slower
from headwater.types import Listed, Member, Replica, Standing, Tier

OPEN_S = 2e-3
"""What one more request is taken to cost: as long as others are through by then, it is not worth it."""
FIRST_READS, ALL_READS = 1, 64
"""Reads of a peer at a time: at first, and at the most."""
HEDGE_SHARE, HEDGE_BURST = 0.05, 4.0
USUAL_BYTES = 1 << 20
MIX = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk to read: who holds it, and its bytes."""

    replicas: Sequence[Replica]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """What to ask of one holder: `chunks` are indices into what was wanted, in its order."""

    number: int
    tier: Tier
    chunks: tuple[int, ...]
    size_bytes: int
    expected_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Every wanted chunk is in one read, or `busy`: its holders are well and have as many reads under way as they may,
    or `nowhere`: nobody holds it who may be asked. `unknown` are numbers that are no member: stale entries."""

    reads: tuple[Read, ...]
    busy: tuple[int, ...]
    nowhere: tuple[int, ...]
    unknown: frozenset[int]


@dataclass(frozen=True, slots=True)
class PathReport:
    """One transport to a peer, for people; None is never measured."""

    transport: str
    tier: Tier
    latency_s: float | None
    bytes_s: float | None
    reads: int
    failures: int
    health: Health


@dataclass(frozen=True, slots=True)
class PeerReport:
    """One peer, for people."""

    number: int
    name: str
    standing: Standing
    distance: Distance
    health: Health
    seen_s: float
    reads: int
    reads_max: int
    reading_bytes: int
    hedges: int
    paths: tuple[PathReport, ...]


@dataclass(slots=True)
class _Way:
    """One transport to a peer."""

    breaker: Breaker = field(default_factory=Breaker)
    paths: dict[Tier, Path] = field(default_factory=dict)


class _Peer:
    """What is known of one member."""

    def __init__(self, own: Member, listed: Listed, now: float) -> None:
        self.listed, self.seen_s = listed, now
        self.breaker = Breaker()
        self.ways: dict[str, _Way] = {}
        self.reads = self.reading_bytes = self.hedges = 0
        self.reads_max = FIRST_READS
        self.suspicion = 0
        """Reads in a row that stalled or failed."""
        self.update(own, listed)

    def update(self, own: Member, listed: Listed) -> None:
        """The directory says something new."""
        if self.listed.standing is Standing.SILENT is not listed.standing:
            self.reads_max = FIRST_READS
        self.listed, self.distance = listed, distance(own, listed.member)
        names = common_transports(own, listed.member)
        self.ways = {name: self.ways.get(name) or _Way() for name in names}

    def path(self, transport: str, tier: Tier, now: float) -> Path:
        """The path of a transport that it has."""
        paths = self.ways[transport].paths
        if tier not in paths:
            paths[tier] = Path(transport, self.distance, now)
        return paths[tier]

    def line(self, transport: str, tier: Tier, now: float) -> tuple[float, float]:
        """What is expected of a read, without what waits: seconds before the first byte, and seconds a byte."""
        path = self.path(transport, tier, now)
        return disk_line(self.line(transport, Tier.HOST, now), path, now) if slower(tier) else path.line(now)

    def transports(self, tier: Tier, size_bytes: int, now: float) -> list[str]:
        """Those that may be tried, cheapest first; sick ones whose probe is due come last."""

        def cost(name: str) -> tuple[bool, float]:
            latency_s, byte_s = self.line(name, tier, now)
            return self.ways[name].breaker.state is not Health.WELL, latency_s + size_bytes * byte_s

        return sorted((it for it, way in self.ways.items() if _may(way.breaker, now)), key=cost)


def _may(breaker: Breaker, now: float) -> bool:
    """Whether `allows` would say yes; asking does not make anybody the probe."""
    return breaker.next_probe_s is None or now >= breaker.next_probe_s


@dataclass(slots=True)
class Begun:
    """A read that is under way. After `stall_s` without progress it has stalled; the rest is for `Peers` alone."""

    number: int
    transport: str
    tier: Tier
    size_bytes: int
    began_s: float
    stall_s: float
    peer: _Peer
    way: _Way
    path: Path
    over: bool = False

    def end(self) -> _Peer:
        """It is under way no more. The peer may have been forgotten meanwhile, which does no harm."""
        assert not self.over, f"a read of {self.number} ended twice"
        self.over = True
        self.peer.reads -= 1
        self.peer.reading_bytes -= self.size_bytes
        return self.peer


@dataclass(slots=True)
class _Holder:
    """A peer and a kind of memory while a choice is made."""

    number: int
    tier: Tier
    last_resort: bool
    ahead_s: float
    byte_s: float
    mixed: int
    full: bool
    chunks: list[int] = field(default_factory=list)
    size_bytes: int = 0

    def cost(self, size_bytes: int) -> tuple[bool, float, int]:
        """Last resorts after all others; then who would be through first; then whoever, but not the same for all."""
        ends_s = self.ahead_s + (self.size_bytes + size_bytes) * self.byte_s
        return self.last_resort, ends_s if self.chunks else ends_s + OPEN_S, self.mixed


class Peers:
    """Everything a node knows about the other members."""

    def __init__(self, own: Member, number: int = -1) -> None:
        """`number` is our own, once we have joined (`renumber`); it is no peer."""
        self._own, self._number = own, number
        self._peers: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._hedge_credit = HEDGE_BURST
        self.begun = self.hedges = 0

    def __repr__(self) -> str:
        sick = sum(it.breaker.state is not Health.WELL for it in self._peers.values())
        return f"Peers({len(self)}, {sick} of them sick, {self.begun} reads, {self.hedges} hedges)"

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, number: int) -> bool:
        return number in self._peers

    def renumber(self, number: int) -> None:
        """We joined under this number."""
        self._number = number
        self._peers.pop(number, None)

    # ---- who is there ------------------------------------------------------------------------------

    def listed(self, members: Iterable[Listed], now: float) -> None:
        """All members as of now: those that are not among them are forgotten."""
        there = {it.number: it for it in members if it.number != self._number}
        self._gone &= there.keys()
        self._peers = {number: it for number, it in self._peers.items() if number in there}
        for number, listed in there.items():
            if number in self._peers:
                self._peers[number].update(self._own, listed)
            elif number not in self._gone:
                self._peers[number] = _Peer(self._own, listed, now)

    def left(self, number: int) -> None:
        """Another life answers at its address, or it said that it leaves: it is no peer, whatever is listed."""
        if self._peers.pop(number, None) is not None:
            self._gone.add(number)

    def member(self, number: int) -> Member | None:
        """Whom to connect to."""
        peer = self._peers.get(number)
        return peer.listed.member if peer is not None else None

    def serves(self, number: int, now: float) -> bool:
        """Whether it may be read from now: a peer that is silent, or sick and not due to be tried, promises nothing."""
        peer = self._peers.get(number)
        return peer is not None and peer.listed.standing is not Standing.SILENT and _may(peer.breaker, now)

    # ---- whom to ask -------------------------------------------------------------------------------

    def choose(self, wanted: Sequence[Wanted], now: float, without: Collection[int] = ()) -> Choice:
        """Which holder for each chunk: few requests, and all of them through at about the same time.

        `without` are holders that have failed this request already. Nothing changes before `began`.
        """
        usual_bytes = max((it.size_bytes for it in wanted), default=0)
        numbers = {(it.number, it.tier) for chunk in wanted for it in chunk.replicas}
        unknown = frozenset(number for number, _ in numbers if number not in self._peers and number != self._number)
        holders: dict[tuple[int, Tier], _Holder] = {}
        for number, tier in numbers:
            holder = self._holder(number, tier, usual_bytes, now) if number not in without else None
            if holder is not None:
                holders[number, tier] = holder
        options: list[list[_Holder]] = []
        for chunk in wanted:
            found = (holders.get((it.number, it.tier)) for it in chunk.replicas)
            options.append([it for it in found if it is not None])
        busy: list[int] = []
        # Who has no choice comes first, so that those that have one can go round them.
        for index in sorted(range(len(wanted)), key=lambda at: len(options[at])):
            size_bytes = wanted[index].size_bytes
            free = [it for it in options[index] if not it.full]
            if free:
                best = min(free, key=lambda it: it.cost(size_bytes))
                best.chunks.append(index)
                best.size_bytes += size_bytes
            elif options[index]:
                busy.append(index)
        nowhere = tuple(index for index, found in enumerate(options) if not found)
        reads = sorted((self._read(it) for it in holders.values() if it.chunks), key=lambda it: it.chunks)
        return Choice(tuple(reads), tuple(sorted(busy)), nowhere, unknown)

    def _holder(self, number: int, tier: Tier, size_bytes: int, now: float) -> _Holder | None:
        """A peer as a holder; None if it may not be asked."""
        peer = self._peers.get(number)
        if peer is None or peer.listed.standing is Standing.SILENT or not _may(peer.breaker, now):
            return None
        names = peer.transports(tier, size_bytes, now)
        if not names:
            return None
        latency_s, byte_s = peer.line(names[0], tier, now)
        doubt = float(1 << min(peer.suspicion, 6))
        sick = Health.WELL not in {peer.ways[name].breaker.state for name in names}
        last = sick or peer.breaker.state is not Health.WELL or peer.listed.standing is Standing.DRAINING
        ahead_s = doubt * (latency_s + peer.reading_bytes * byte_s)
        mixed = (number ^ self._number) * MIX & 0xFFFF_FFFF
        return _Holder(number, tier, last, ahead_s, doubt * byte_s, mixed, peer.reads >= peer.reads_max)

    @staticmethod
    def _read(it: _Holder) -> Read:
        expected_s = it.ahead_s + it.size_bytes * it.byte_s
        return Read(it.number, it.tier, tuple(sorted(it.chunks)), it.size_bytes, expected_s)

    def transports(self, number: int, tier: Tier, now: float, size_bytes: int = USUAL_BYTES) -> list[str]:
        """What to try in turn for a read of this kind of memory, by measured cost; sick ones last, and only when they
        are due to be tried again."""
        peer = self._peers.get(number)
        return peer.transports(tier, size_bytes, now) if peer is not None else []

    def batch_bytes(self, number: int, transport: str, tier: Tier, now: float) -> int:
        """How many bytes to ask of it in one request at the most, or one chunk."""
        peer = self._peers.get(number)
        return peer.path(transport, tier, now).batch_bytes(now) if peer and transport in peer.ways else 0

    def probes(self, now: float) -> list[tuple[int, str]]:
        """Peers and transports that are sick and due to be tried, with something small, by `began` as any other."""
        due: list[tuple[int, str]] = []
        for number, peer in self._peers.items():
            if peer.listed.standing is not Standing.SILENT and _may(peer.breaker, now):
                well = peer.breaker.state is Health.WELL
                names = peer.transports(Tier.HOST, 0, now)
                sick = [it for it in names if peer.ways[it].breaker.state is not Health.WELL]
                due += [(number, it) for it in (sick if well else names[:1])]
        return due

    # ---- what becomes of reads ---------------------------------------------------------------------

    def began(self, number: int, transport: str, tier: Tier, size_bytes: int, now: float) -> Begun | None:
        """A read begins; None if it may not now. What began is reported once: `succeeded`, `failed` or `abandoned`."""
        peer = self._peers.get(number)
        if peer is None or transport not in peer.ways or peer.reads >= peer.reads_max:
            return None
        way = peer.ways[transport]
        if not (_may(peer.breaker, now) and _may(way.breaker, now)):
            return None
        # Both: who asks when one of them is sick is the probe of both.
        peer.breaker.allows(now)
        way.breaker.allows(now)
        path = peer.path(transport, tier, now)
        path.tried(now)
        peer.reads += 1
        peer.reading_bytes += size_bytes
        self.begun += 1
        self._hedge_credit = min(self._hedge_credit + HEDGE_SHARE, HEDGE_BURST)
        return Begun(number, transport, tier, size_bytes, now, path.stall_s(size_bytes), peer, way, path)

    def stalled(self, read: Begun, now: float, jitter: float) -> None:
        """A read has made no progress for `stall_s`, each time that it has not. It is still under way."""
        read.peer.suspicion += 1
        read.way.breaker.slow(now, jitter)
        read.peer.breaker.slow(now, jitter)

    def may_go_on(self, read: Begun) -> bool:
        """Whether what a stalled read has not brought may be read elsewhere by now; True is counted as a hedge, unless
        the peer is sick or gone."""
        if self._peers.get(read.number) is not read.peer or read.peer.breaker.state is not Health.WELL:
            return True
        if self._hedge_credit < 1:
            return False
        self._hedge_credit -= 1
        self.hedges += 1
        read.peer.hedges += 1
        return True

    def succeeded(self, read: Begun, now: float, came_bytes: int | None = None) -> None:
        """A read is over, and the peer answered as it should. `came_bytes` is what it had of what it was asked for, if
        that is not all: nothing is learned of its speed from what it did not have."""
        peer = read.end()
        if peer.breaker.state is not Health.WELL:
            peer.reads_max = FIRST_READS
        else:
            peer.reads_max = min(peer.reads_max + 1, ALL_READS)
        peer.suspicion = 0
        peer.breaker.succeeded(now)
        read.way.breaker.succeeded(now)
        size_bytes = read.size_bytes if came_bytes is None else came_bytes
        if size_bytes or not read.size_bytes:
            read.path.observe(size_bytes, max(now - read.began_s, 0.0))

    def failed(self, read: Begun, now: float, jitter: float, *, unavailable: bool = False) -> None:
        """A read is over, and failed; `unavailable` says that the transport does not work at all. A peer none of whose
        transports works is sick at once. The next of `transports` may do better."""
        peer = read.end()
        peer.suspicion += 1
        read.path.failures += 1
        read.way.breaker.failed(now, jitter, unavailable=unavailable)
        dead = all(it.breaker.state is Health.SICK for it in peer.ways.values())
        peer.breaker.failed(now, jitter, unavailable=dead)

    def abandoned(self, read: Begun, now: float) -> None:
        """A read is over without success for which the peer is not to blame, or which had stalled: that was counted
        then. The time that it was given counts if it is more than would have been needed."""
        read.end()
        read.path.failures += 1
        seconds = now - read.began_s
        latency_s, byte_s = read.path.line(now)
        if seconds > latency_s + read.size_bytes * byte_s:
            read.path.observe(read.size_bytes, seconds)

    # ---- for people ---------------------------------------------------------------------------------

    def report(self, now: float) -> list[PeerReport]:
        """Every peer as it is now."""
        return [self._report(number, peer, now) for number, peer in sorted(self._peers.items())]

    @staticmethod
    def _report(number: int, peer: _Peer, now: float) -> PeerReport:
        paths = tuple(
            PathReport(
                name, tier, it.speed.latency_s, it.speed.bytes_s, it.speed.batches, it.failures, way.breaker.state
            )
            for name, way in peer.ways.items()
            for tier, it in way.paths.items()
        )
        return PeerReport(
            number,
            peer.listed.member.name,
            peer.listed.standing,
            peer.distance,
            peer.breaker.state,
            now - peer.seen_s,
            peer.reads,
            peer.reads_max,
            peer.reading_bytes,
            peer.hedges,
            paths,
        )

    def rates(self) -> Mapping[int, float]:
        """Bytes a second to each peer as measured, over the best of its paths; those that were never are left out."""
        found: dict[int, float] = {}
        for number, peer in self._peers.items():
            rates = (path.speed.bytes_s or 0.0 for way in peer.ways.values() for path in way.paths.values())
            best = max(rates, default=0.0)
            if 0 < best < math.inf:
                found[number] = best
        return found
