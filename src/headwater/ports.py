"""The Protocols that carry headwater: each has an in-memory sibling and a conformance suite in `tests/conformance`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headwater.fleet import Ask, Choice, Fleet, Held
from headwater.types import (
    ABSENT,
    Announced,
    Beat,
    Extent,
    Identity,
    Listed,
    Member,
    Origin,
    Outcome,
    Replica,
    Standing,
    Usage,
)

Addresses = npt.NDArray[np.uint64]
BlockIds = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Clock(Protocol):
    """The only source of time; drivers hold one, the core is told the time."""

    def now(self) -> float:
        """Monotonic seconds, comparable across the processes of one host."""


class EvictionPolicy(Protocol):
    """Which resident chunk leaves next. Entries are small integers, chosen and re-used by the caller."""

    def insert(self, entry: int, key: bytes, parent: int = -1) -> None:
        """A chunk became resident; `entry` is not known to the policy at this moment.

        `parent` is the entry of what it hangs on, -1 if there is none; the policy may get to know that one later.
        """

    def access(self, entry: int) -> None:
        """A resident chunk was used."""

    def remove(self, entry: int) -> None:
        """A chunk left for another reason than `victim`; unknown entries are ignored."""

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """Forget and return the next entry to leave among those that are evictable; None if there is none."""

    def __len__(self) -> int:
        """How many entries are resident."""


class Copy(Protocol):
    """A copy that was started; until it is done, its blocks and its node memory stay leased."""

    def done(self) -> bool:
        """Whether all bytes are where they belong, for whoever looks from now on."""


class PagedKV(Protocol):
    """An engine's KV pages on its device, and the copies between them and mapped node memory.

    For block i of a call, `places[i]` is the process-local address of its layer-0 bytes in a part; layer l
    is `l * layer_stride_bytes` further on. `after` is what `mark` returned: the copy touches the blocks only
    when the engine's work up to that mark is over.
    """

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """For each KV group its number of layers and the bytes of a block in one of them."""

    def attach(self, bases: Sequence[int], sizes: Sequence[int]) -> None:
        """Node memory was mapped at `bases`; it stays mapped until `detach` returns."""

    def detach(self) -> None:
        """Finish what is under way and let go of the node memory, which is unmapped next."""

    def mark(self) -> object:
        """Called by the engine's thread: the point in its work after all that it has given to the device."""

    def start_gather(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: Any = None
    ) -> Copy:
        """Begin to copy device blocks into node memory. When this raises, nothing is under way."""

    def start_scatter(
        self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int, after: Any = None
    ) -> Copy:
        """Begin to copy node memory into device blocks. When this raises, nothing is under way."""

    def close(self) -> None:
        """Give up threads and device memory; nothing may be called afterwards."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk's bytes on their way between HOST memory and a lower tier.

    `memory` is its slot in HOST memory, uint8[identity.length_bytes], page-aligned, leased or reserved by the caller
    until the call returns. `place` is its slot in a tier that has slots of its own (DISK), ABSENT elsewhere. With
    `background` nobody waits for it, and others go first.
    """

    identity: Identity
    memory: Bytes
    place: int = ABSENT
    background: bool = False


class LowerTier(Protocol):
    """Who keeps chunks below DRAM.

    Calls block, come from the tier's worker threads, several at a time, and end by `until_s` (CLOCK_MONOTONIC): what
    is not through by then is FAILED. They raise UnavailableError when the tier as a whole does not work; then nothing
    is known of any piece. Bytes are verified here: DONE of a read means that exactly what was written is in `memory`.
    """

    def holds(self, identities: Sequence[Identity], until_s: float) -> list[bool]:
        """Which chunks are there, in one round trip; a hint, the read decides."""

    def read(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """Fill each piece's memory; after anything but DONE its content is undefined."""

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        """Store each piece's memory; nothing but DONE makes a chunk findable."""

    def delete(self, identities: Sequence[Identity], until_s: float) -> None:
        """Forget chunks; those that are not there are ignored."""

    def clear(self, origin: Origin, until_s: float) -> int:
        """Forget every chunk of a namespace; how many. Asked for by an operator, never on the way of a request."""

    def usage(self, until_s: float) -> Usage:
        """How full the tier is; also the probe of a tier that was sick: raises UnavailableError while it still is."""

    def close(self) -> None:
        """Let go of everything; no call may be under way."""


class Directory(Protocol):
    """Which node holds which chunk; lossy and rebuildable: what it says is a hint, and what it lost is said again.

    Calls block, come from several threads, end by `until_s` (CLOCK_MONOTONIC) and raise UnavailableError when the
    directory does not answer. A batch is applied whole or not at all.
    """

    def join(self, member: Member, until_s: float) -> int:
        """This life's number, the same if it joins again; lives of the same name with an older epoch end. Raises
        RefusedError if a newer one is there."""

    def beat(self, number: int, standing: Standing, report: bytes, until_s: float) -> Beat | None:
        """I am alive; None if the directory does not know this number (any more): join again, announce everything."""

    def announce(self, number: int, serial: int, changes: Sequence[Announced], until_s: float) -> bytes:
        """Apply a batch, `serial` counting from 1; one that was applied already is not applied again. The answer has
        a byte for each change: how many other members hold that chunk, at most 255.

        Raises RefusedError if the number is unknown.
        """

    def locate(self, names: Sequence[bytes], until_s: float) -> list[tuple[Replica, ...]]:
        """Who holds these chunks, as far as known, the asker included; in one round trip."""

    def members(self, until_s: float) -> list[Listed]:
        """Who is there, those that are silent included."""

    def leave(self, number: int, until_s: float) -> None:
        """This life is over, and what it held with it."""

    def sweep(self, until_s: float) -> bool:
        """Drop some of what ended lives have left behind; whether there is more to do."""

    def close(self) -> None:
        """Let go of connections; no call may be under way."""


@dataclass(slots=True)
class Item:
    """One named thing to be moved, and the caller's memory for it: read into, or written from."""

    name: bytes
    memory: Bytes


@dataclass(slots=True)
class Lent:
    """Memory that a peer may read, or fill, while its loan lasts. `extent` is its place in the exporter's segments, for
    transports that go there themselves. `checksum` is the xxh3-64 of a thing that does not change, where it is known.
    """

    memory: Bytes
    extent: Extent | None = None
    checksum: int | None = None


class Loan(Protocol):
    """What one request of a peer may touch: an entry for each name, in order; an Outcome where there is nothing."""

    parts: Sequence[Lent | Outcome]
    deadline_s: float
    """Until when memory that is read is what it was; after it the reader throws away what it got."""

    def give_back(self, done: Sequence[bool], checksums: Sequence[int | None]) -> list[Outcome]:
        """The request is over, once, from any thread: what was moved whole and in time, and its xxh3-64 where somebody
        has computed it. The answer is for writes: DONE is said only for what everybody can find from now on."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One region that an exporter lends from: its descriptor, if there is one that others may map, its mapping in this
    process, what extents call it, and whether peers may write it: if not, they get a descriptor that cannot be written.
    """

    descriptor: int | None
    memory: Bytes
    number: int = 0
    writable: bool = False


class Exports(Protocol):
    """What a process lets its peers read and write. Calls come from the threads of connections."""

    def regions(self) -> Sequence[Memory]:
        """Those that are there, by rising numbers. A number is never used again, and a later region has a higher one; a
        region stays as long as anything of it is lent."""

    def lend(self, peer: str, realm: bytes, names: Sequence[bytes], until_s: float) -> Loan:
        """Things to be read. Raises RefusedError if this realm is not served, UnavailableError if nothing is now."""

    def accept(self, peer: str, realm: bytes, names: Sequence[bytes], sizes: Sequence[int], until_s: float) -> Loan:
        """Room for things to be written, which are not findable before they are given back as done."""

    def told(self, peer: str, topic: str, body: bytes, until_s: float) -> bytes:
        """A message and its answer. Raises RefusedError for a topic that is not known."""


class Link(Protocol):
    """A connection to one peer, for one thread at a time.

    Calls end by `until_s` (CLOCK_MONOTONIC), or later if only later nothing touches the items' memory any more. They
    raise UnavailableError when the connection is of no further use: then nothing is known of any item. They raise
    RefusedError, and the connection stays good, when the peer does not serve what was asked.
    """

    peer: Member

    def read(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """Fill the items' memory, which has the length of what is read; after anything but DONE its content is
        undefined. DONE means verified: exactly the peer's bytes, and the loan had not ended."""

    def write(self, realm: bytes, items: Sequence[Item], until_s: float) -> list[Outcome]:
        """Give the items to the peer; DONE means that it has verified and kept them."""

    def ask(self, topic: str, body: bytes, until_s: float) -> bytes:
        """A message and its answer, at most 4 MiB each."""

    def moved_bytes(self) -> int:
        """How much has come over this link so far, from any thread: what tells slow from stalled; 0 where nobody
        knows."""

    def abort(self) -> None:
        """From any thread: the call under way ends as soon as nothing touches memory any more; the link is of no
        further use."""

    def close(self) -> None:
        """Let go; no call may be under way."""


class Transport(Protocol):
    """Who can move bytes to and from other processes."""

    name: str

    def connect(self, peer: Member, until_s: float) -> Link:
        """A link to exactly this life of a node. Raises UnavailableError if it cannot be reached, RefusedError if
        another is there, or it does not take us for one of its cluster."""

    def close(self) -> None:
        """Let go of what all links share; none may be open."""


class RoutingPolicy(Protocol):
    """Which instance serves a request; see `fleet` for the words. One caller at a time; told the time in `fleet.now`.

    The driver calls `choose`, and if it follows the choice `routed`, later `finished`, also for a request that was
    cancelled or lost. Deterministic: the same calls give the same choices.
    """

    name: str

    def choose(self, ask: Ask, held: Held, fleet: Fleet) -> Choice | None:
        """The choice; None if no instance can serve the request. Changes nothing that later choices depend on."""

    def routed(self, ask: Ask, choice: Choice, fleet: Fleet) -> None:
        """The request was sent where `choice` says; the driver has already added it to the loads of the instances."""

    def finished(self, ask: Ask, choice: Choice) -> None:
        """The request ended, however."""

    def left(self, instance: int) -> None:
        """An instance is gone for good; its number may be given to another."""
