"""One way to one peer: how far it is, what a read over it costs, and when a read has stalled.

What was never measured is guessed from the distance. A guess is an optimist, so that a way that may be good is tried;
so is what was measured long ago, so that a way that was slow is tried again, by one read in `STALE_S`.
"""

from __future__ import annotations

import enum
import math

from headwater.core.cost import TierSpeed
from headwater.types import Member, Tier

STALE_S = 30.0
"""After that a measurement counts for no less than the guess would."""
LEAST_STALL_S, MOST_STALL_S, LAST_STALL_S = 0.05, 0.5, 1.0
"""A read is abandoned after 0.05 to 0.5 s; one that takes that long as a rule, after 1 s at the most."""
DEVIATIONS = 4.0
PATIENCE = 1.5
"""A read is given at the least so many times what is expected of it."""
SPREAD_GAIN = 0.25
FIRST_SPREAD = 0.5
"""The share of the expected time by which a read is taken to be off before any was measured."""
MOST_SPREAD = 8.0
BATCH_S = 0.1
"""What one request to a peer is meant to take, so that one that does not end soon is seen to have stalled."""


class Distance(enum.IntEnum):
    """How far a peer is, nearest first."""

    PROCESS = 0
    HOST = 1
    SWITCH = 2
    ZONE = 3
    FAR = 4


GUESSES: dict[Distance, tuple[float, float]] = {
    Distance.PROCESS: (20e-6, 4e9),
    Distance.HOST: (100e-6, 3e9),
    Distance.SWITCH: (200e-6, 2.5e9),
    Distance.ZONE: (500e-6, 1.2e9),
    Distance.FAR: (5e-3, 0.25e9),
}
"""Seconds before the first byte, and bytes a second, over TCP."""
GAINS: dict[str, float] = {"local": 4.0, "shm": 3.0, "nixl": 2.0}
"""By how much another transport is taken to be better than TCP where it can be used."""
DISK_LATENCY_S, DISK_BYTES_S = 1e-3, 1.5e9
"""What a holder's disk is taken to add."""
DISK_LEAST_S = 2e-4


def distance(own: Member, peer: Member) -> Distance:
    """How far a peer is, from host names and labels: process, switch or nic, zone."""

    def same(label: str) -> bool:
        return bool(own.labels.get(label)) and own.labels.get(label) == peer.labels.get(label)

    if own.host and own.host == peer.host:
        return Distance.PROCESS if same("process") else Distance.HOST
    if same("switch") or same("nic"):
        return Distance.SWITCH
    return Distance.ZONE if same("zone") else Distance.FAR


def common_transports(own: Member, peer: Member) -> tuple[str, ...]:
    """What both have and can use with each other, in the order of ours."""
    away = distance(own, peer)
    reach = {
        "local": away is Distance.PROCESS,
        "shm": away <= Distance.HOST and bool(peer.socket),
        "tcp": bool(peer.address),
    }
    return tuple(it for it in own.transports if it in peer.transports and reach.get(it, True))


class Path:
    """Reads of one kind of memory of one peer over one transport."""

    def __init__(self, transport: str, away: Distance, now: float) -> None:
        latency_s, bytes_s = GUESSES[away]
        gain = GAINS.get(transport, 1.0)
        self.guess = latency_s / gain, 1 / (bytes_s * gain)
        self.speed = TierSpeed()
        self.failures = 0
        self._spread = FIRST_SPREAD
        self._tried_s = now

    def __repr__(self) -> str:
        return f"Path({self.speed!r}, spread {self._spread:.2f}, {self.failures} failures)"

    def line(self, now: float) -> tuple[float, float]:
        """What is expected: seconds before the first byte, and seconds a byte."""
        latency_s, bytes_s = self.speed.latency_s, self.speed.bytes_s
        if latency_s is None or bytes_s is None:
            return self.guess
        if now - self._tried_s >= STALE_S:
            return min(latency_s, self.guess[0]), min(1 / bytes_s, self.guess[1])
        return latency_s, 1 / bytes_s

    def tried(self, now: float) -> None:
        """A read began: what comes of it will be known, so that nobody else need try."""
        self._tried_s = now

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Add what a read took, from its start to its end or to when it was given up."""
        expected_s = self.speed.seconds(size_bytes)
        if expected_s:
            off = min(abs(seconds - expected_s) / expected_s, MOST_SPREAD)
            self._spread += SPREAD_GAIN * (off - self._spread)
        self.speed.observe(size_bytes, seconds)

    def stall_s(self, size_bytes: int) -> float:
        """How long a read of so many bytes is waited for: what is expected and four mean deviations, as for the
        retransmission timer of RFC 6298, within bounds."""
        expected_s = self.speed.seconds(size_bytes)
        if expected_s is None:
            return MOST_STALL_S
        usual_s = expected_s * (1 + DEVIATIONS * self._spread)
        bounded_s = min(max(usual_s, LEAST_STALL_S), MOST_STALL_S)
        return max(bounded_s, min(PATIENCE * expected_s, LAST_STALL_S))

    def batch_bytes(self, now: float) -> int:
        """How many bytes to ask for in one request."""
        latency_s, byte_s = self.line(now)
        return math.floor(max(BATCH_S - latency_s, BATCH_S / 4) / byte_s)


def disk_line(host: tuple[float, float], disk: Path, now: float) -> tuple[float, float]:
    """What is expected of a read from a peer's disk, given that of its memory: never better."""
    if disk.speed.bytes_s is None:
        return host[0] + DISK_LATENCY_S, host[1] + 1 / DISK_BYTES_S
    latency_s, byte_s = disk.line(now)
    return max(latency_s, host[0] + DISK_LEAST_S), max(byte_s, host[1])


def slower(tier: Tier) -> bool:
    """Whether the holder has to bring bytes up before it can send them."""
    return tier in (Tier.DISK, Tier.REMOTE)
