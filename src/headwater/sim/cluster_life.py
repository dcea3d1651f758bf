"""What the parts of a simulated cluster know of each other: the world around a node, and a node's one life."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headwater.core.announcing import Announcing
from headwater.core.cache import Cache
from headwater.core.fetch import Answer
from headwater.core.levels import Command
from headwater.core.links import Peers
from headwater.core.locations import Locations
from headwater.sim.cluster_directory import DirectoryServer
from headwater.sim.cluster_faults import ClusterFaults, ClusterPlan
from headwater.sim.cluster_oracle import SlotMemory
from headwater.sim.network import Answered, Host, Network
from headwater.sim.schedule import Process, Schedule
from headwater.types import ChunkKey, KVLayout, Loadable, Member, Namespace, Outcome, Reservation, Usage

Result = list[Outcome] | Usage | None


@dataclass(slots=True)
class Sums:
    """What has happened in a cluster; a simulation in which nothing does proves nothing."""

    requests: int = 0
    answered: int = 0
    hit_chunks: int = 0
    pulled: int = 0
    transfers: int = 0
    loans: int = 0
    hedges: int = 0
    stale: int = 0
    corrupt: int = 0
    late: int = 0
    refused: int = 0
    joins: int = 0
    deaths: int = 0
    orders: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A peer's request. `peer` is its number, `expected` whom it takes us for."""

    peer: int
    expected: Member
    keys: tuple[ChunkKey, ...]


@dataclass(slots=True, eq=False)
class Site:
    """Where a node lives: what stays over its lives."""

    name: str
    address: str
    host: Host
    transports: tuple[str, ...]
    life: Life | None = None
    epoch: int = 0


class Around(Protocol):
    """The world as a node and its instances see it."""

    rng: random.Random
    schedule: Schedule
    network: Network
    plan: ClusterPlan
    faults: ClusterFaults
    sums: Sums
    directory: DirectoryServer
    layout: KVLayout
    namespace: Namespace
    at_rest: bool
    """Nothing is begun any more that nobody has asked for."""
    budget_s: float
    """How long a request may wait for its answer."""

    @property
    def now(self) -> float:
        """True time."""

    def attempt(self) -> int:
        """The number of another attempt to compute a chunk."""

    def copy_s(self, holder: Host, chunks: int) -> float:
        """How long so many chunks take from a host."""

    def rots(self) -> bool:
        """Whether a chunk arrives with other bytes."""

    def gives_up(self) -> bool:
        """Whether an instance does not end its save."""

    def was_lent(self, site: Site) -> None:
        """Chunks were lent there."""


class Lender(Protocol):
    """What peers call."""

    def stream(self, asked: Asked, reply: Answered) -> None:
        """Lend chunks, send them, and take the loan back."""

    def grant(self, asked: Asked, reply: Answered) -> None:
        """Lend chunks to a reader that takes them from memory itself."""

    def give_back(self, ticket: int) -> None:
        """A loan is over."""


class Life(Protocol):
    """One life of a node, for those around it."""

    process: Process
    member: Member
    cache: Cache
    memory: SlotMemory
    announcing: Announcing
    locations: Locations
    peers: Peers
    touched: bool

    @property
    def cluster(self) -> Around:
        """The world around it."""

    @property
    def site(self) -> Site:
        """Where it lives."""

    @property
    def lender(self) -> Lender:
        """What peers call."""

    @property
    def now(self) -> float:
        """Its host's time."""

    def after(self, local_s: float, act: Callable[[], None]) -> None:
        """Plan something by its host's clock."""

    def settle(self) -> None:
        """Let everything that has happened have its effects."""

    def end(self, command: Command, result: Result) -> None:
        """A command has come to its end."""

    def served(self, reader: int, keys: Sequence[ChunkKey], size_bytes: int) -> None:
        """A peer reads chunks from here."""

    def writer_of(self, ticket: int) -> str:
        """Who writes for a ticket."""

    def ask(self, request: str, keys: Sequence[ChunkKey]) -> Answer:
        """See `Fetches.ask`."""

    def forget(self, request: str) -> None:
        """See `Fetches.forget`."""

    def load(self, request: str, keys: Sequence[ChunkKey]) -> Loadable:
        """See `Cache.load`."""

    def reserve(self, request: str, parent: ChunkKey | None, keys: Sequence[ChunkKey]) -> Reservation:
        """See `Cache.reserve`."""

    def done(self, request: str, ticket: int) -> bool:
        """See `Cache.done`."""

    def release(self, request: str, ticket: int) -> None:
        """See `Cache.release`."""
