"""Several Conductors, or several workers of one, tell each other their loads; workers of one, who has registered, too.

Theory of operation. A bus carries messages from each to all, may lose any, and never makes the sender wait. Every
`PERIOD_S`, and at once when much has changed, each says its own totals (`core.loads`), which repair whatever was lost:

    Said      totals by the instances' names: numbers are everybody's own; the last one of a Conductor names nobody
    Changed   instances that were registered or unregistered at run time; only from workers of this host

In `Said` there is the stamp of the latest change that its sender knows. Who knows a later one says all of its changes,
at most every `REPEAT_S`: so a worker that was started again, or heard nothing for a while, learns of them.

Whatever comes is data of strangers: it is read by a schema with bounds, and dropped and counted where it does not fit,
is of another cluster, or of one Conductor too many. Registrations that come from a bus that is not of this host alone
are dropped: whoever can write to a directory may not direct our requests elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from headwater.conductor.brain import FleetBrain
from headwater.conductor.counts import Counts
from headwater.conductor.registry import INSTANCES_MAX, NAME_CHARACTERS, Change, Roster
from headwater.conductor.rotation import Rotation
from headwater.conductor.timers import Timer, Timers
from headwater.core.loads import Published, Totals
from headwater.errors import RefusedError
from headwater.fleet import Role
from headwater.fleetfile.model import InstanceSpec

PERIOD_S = 0.2
LOOK_S = 0.02
BIG_TOKENS = 8192
"""So many prompt tokens sent anywhere since the last message are a step of an engine: others should know."""
REPEAT_S = 1.0
CONDUCTORS_MAX = 256
FORGOTTEN_S = 30.0
CHANGES = 64
"""In one message."""
MESSAGE_BYTES = 256 << 10
VERSION = 1

_Text = Annotated[str, Meta(max_length=512)]
_Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS)]
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Stamp = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Totals = tuple[_Count, _Count, _Count, _Count]


class Said(msgspec.Struct, tag="said", array_like=True, frozen=True):
    """One Conductor's loads."""

    version: int
    cluster: _Name
    conductor: _Name
    serial: _Stamp
    begun: _Totals
    totals: Annotated[dict[_Name, _Totals], Meta(max_length=INSTANCES_MAX)]
    newest: _Stamp


class Joined(msgspec.Struct, array_like=True, frozen=True):
    """An instance that was registered at run time: what of InstanceSpec such a one can have."""

    model: _Text
    served_name: _Text
    url: _Text
    role: Role
    node: _Name | None
    events: _Text | None
    replay: _Text | None
    events_off: bool
    ranks: Annotated[int, Meta(ge=1, le=1024)]
    capacity_tokens: Annotated[int, Meta(ge=1, le=1 << 40)] | None
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None


class Changed(msgspec.Struct, tag="changed", array_like=True, frozen=True):
    """What became of names at run time; without an instance they were taken out."""

    version: int
    cluster: _Name
    conductor: _Name
    changes: Annotated[list[tuple[_Stamp, _Name, Joined | None]], Meta(max_length=CHANGES)]


Received = Callable[[bytes], None]


class Bus(Protocol):
    """From each to all; may lose messages. Used in the loop only."""

    local: bool
    """Whether only this user's processes on this host can send on it."""

    def start(self, received: Received) -> None:
        """Call this for each message from now on; also for our own, perhaps."""

    def send(self, message: bytes) -> None:
        """Send it or drop it, at once."""

    def close(self) -> None:
        """Send what can be sent at once, and nothing more."""


class Sharing:
    """One worker's part in it; also where instances are registered, so that all workers hear of them."""

    def __init__(
        self,
        brain: FleetBrain | Rotation,
        roster: Roster,
        timers: Timers,
        counts: Counts,
        buses: Sequence[Bus],
        *,
        cluster: str,
        wall_ns: Callable[[], int],
    ) -> None:
        """`wall_ns` stamps changes: of two changes of one name the later counts."""
        self._brain, self._roster, self._timers, self._counts = brain, roster, timers, counts
        self._buses, self._cluster, self._wall_ns = buses, cluster, wall_ns
        self._name = brain.loads.book.name
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Said | Changed)
        self._heard: dict[str, float] = {}
        self._said_s = self._repeated_s = float("-inf")
        self._said_tokens = 0
        self._timer: Timer | None = None

    def __repr__(self) -> str:
        return f"Sharing({self._name} on {len(self._buses)} buses, heard of {sorted(self._heard)})"

    def start(self) -> None:
        """Say and hear, until `close`."""
        for bus in self._buses:
            bus.start(self._receiver(bus))
        self._look()

    def close(self) -> None:
        """Say bye: our requests end with us."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._say(self._brain.loads.book.bye())
        for bus in self._buses:
            bus.close()

    # ---- instances

    def register(self, spec: InstanceSpec) -> int:
        """See `Roster.register`; all workers hear of it."""
        number = self._roster.register(spec, self._stamp())
        self._repeat()
        return number

    def unregister(self, name: str) -> bool:
        """No more requests for it; it is gone when the last one has ended. False if there is none of that name."""
        known = self._roster.unregister(name, self._stamp()) is not None
        if known:
            self._repeat()
        return known

    def _stamp(self) -> int:
        return max(self._wall_ns(), self._roster.newest + 1)

    # ---- what we say

    def _look(self) -> None:
        now = self._timers.time()
        tokens = self._brain.loads.begun_tokens
        if now - self._said_s >= PERIOD_S or tokens - self._said_tokens >= BIG_TOKENS:
            self._said_s, self._said_tokens = now, tokens
            self._say(self._brain.loads.book.publish())
        self._timer = self._timers.call_later(LOOK_S, self._look)

    def _say(self, message: Published) -> None:
        totals = {
            name: tuple(max(it, 0) for it in each)
            for number, each in message.totals.items()
            if (name := self._roster.name(number))
        }
        said = (VERSION, self._cluster, message.conductor, message.serial, tuple(message.begun))
        self._send(self._encoder.encode(("said", *said, totals, self._roster.newest)), local=False)

    def _repeat(self) -> None:
        self._repeated_s = self._timers.time()
        changes = self._roster.changes()
        for at in range(0, len(changes), CHANGES):
            some = [(it.stamp, it.name, _joined(it.spec)) for it in changes[at : at + CHANGES]]
            message = Changed(VERSION, self._cluster, self._name, some)
            self._send(self._encoder.encode(message), local=True)

    def _send(self, message: bytes, *, local: bool) -> None:
        if len(message) > MESSAGE_BYTES:
            self._counts.add("shared", "too long")
            return
        for bus in self._buses:
            if bus.local or not local:
                bus.send(message)

    # ---- what we hear

    def _receiver(self, bus: Bus) -> Received:
        return lambda message: self._received(message, local=bus.local)

    def _received(self, data: bytes, *, local: bool) -> None:
        if len(data) > MESSAGE_BYTES:
            self._counts.add("shared", "too long")
            return
        try:
            message = self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError):
            self._counts.add("shared", "malformed")
            return
        if message.version != VERSION or message.cluster != self._cluster:
            self._counts.add("shared", "foreign")
        elif message.conductor != self._name:
            if isinstance(message, Said):
                self._hear(message, local=local)
            elif local:
                self._change(message)
            else:
                self._counts.add("shared", "foreign")

    def _hear(self, message: Said, *, local: bool) -> None:
        now = self._timers.time()
        if message.conductor not in self._heard and len(self._heard) >= CONDUCTORS_MAX:
            self._heard = {name: when for name, when in self._heard.items() if now - when < FORGOTTEN_S}
            if len(self._heard) >= CONDUCTORS_MAX:
                self._counts.add("shared", "too many")
                return
        self._heard[message.conductor] = now
        self._counts.add("shared", "heard")
        totals = {
            number: Totals(*each)
            for name, each in message.totals.items()
            if (number := self._roster.by_name(name)) is not None
        }
        self._brain.heard(Published(message.conductor, message.serial, totals, Totals(*message.begun)))
        if local and message.newest < self._roster.newest and now - self._repeated_s >= REPEAT_S:
            self._repeat()

    def _change(self, message: Changed) -> None:
        for stamp, name, joined in message.changes:
            try:
                self._roster.heard(Change(stamp, name, _spec(name, joined) if joined is not None else None))
            except RefusedError:
                self._counts.add("shared", "refused")


def _joined(spec: InstanceSpec | None) -> Joined | None:
    if spec is None:
        return None
    return Joined(
        spec.model,
        spec.served_name,
        spec.url or "",
        spec.role,
        spec.node,
        spec.events,
        spec.replay,
        spec.events_off,
        spec.ranks,
        spec.capacity_tokens,
        spec.block_tokens,
    )


def _spec(name: str, it: Joined) -> InstanceSpec:
    return InstanceSpec(
        name,
        it.model,
        it.served_name,
        it.role,
        it.node,
        it.url,
        events=it.events,
        replay=it.replay,
        events_off=it.events_off,
        ranks=it.ranks,
        capacity_tokens=it.capacity_tokens,
        block_tokens=it.block_tokens,
    )
