"""What a routing policy is told and what it answers: instances, where a prompt's KV is, the request, the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

from headwater.enginetimes import EngineTimes
from headwater.types import Tier


class Role(StrEnum):
    """What an instance does."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Place(NamedTuple):
    """Where KV can be: DEVICE of an instance, HOST or DISK of a node, REMOTE (number 0: the one store of all nodes)."""

    tier: Tier
    number: int


@dataclass(slots=True)
class Instance:
    """One serving engine as its Conductor knows it; the driver changes it in place, a policy only reads it.

    Loads are of all Conductors together, as far as known. `heard_s` is when the engine or another Conductor last said
    anything about them; before that they are only what we routed there ourselves.
    """

    number: int
    times: EngineTimes
    capacity_tokens: int
    """How many tokens of KV its DEVICE holds."""
    role: Role = Role.BOTH
    node: int | None = None
    model: str = ""
    """Requests of another model cannot be served."""
    alive: bool = True
    draining: bool = False
    heard_s: float = 0.0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    """Uncached prompt tokens that were routed here and are not computed yet."""
    running_requests: int = 0
    """Requests that decode."""
    running_tokens: int = 0
    """The KV tokens of those requests."""
    late_s: float = 0.0
    """How far what is known of its loads lags behind, of our own requests too."""
    shared_tokens: int = 0
    """KV that is there once and counted more often: what requests that wait or run there begin with, as others do."""
    light_requests: int = 0
    """Of those that wait, how many compute next to nothing, as what they begin with is there or is being computed."""
    prefill_learned_s: float = inf
    decode_learned_s: float = inf
    """When a request last taught these of its `times`. -inf: none has yet, they are a guess; inf: they are certain."""
    untaught_answers: int = 0
    """How many answers ended here while one of these was a guess."""


@dataclass(slots=True)
class Link:
    """One way to bring KV to a node: latency_s + (queued_bytes + bytes) / bytes_s; the driver keeps it current."""

    latency_s: float
    bytes_s: float
    queued_bytes: int = 0

    def seconds(self, size_bytes: int) -> float:
        """How long so many more bytes take from now on."""
        return self.latency_s + (self.queued_bytes + size_bytes) / self.bytes_s


@dataclass(slots=True, unsafe_hash=True)
class Ask:
    """A request to be routed. `keys` are its whole blocks' keys in order, `block_tokens` tokens each.

    Never changed once it is made, nor is a Choice: they are not `frozen` because making one would take three times as
    long, and one of each is made for every request.
    """

    request: str
    tokens: int
    keys: Sequence[bytes]
    block_tokens: int
    output_tokens: int = 256
    """How many tokens it is expected to answer."""
    model: str = ""
    session: str = ""
    tenant: str = ""
    priority: int = 0
    """Higher goes first."""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    counted: bool = True
    """Whether `tokens` were counted; else they are a guess, good for comparing loads and no more."""


Held = Mapping[Place, int]
"""How many leading tokens of the prompt each place holds; places that hold nothing are left out."""


class Parts(NamedTuple):
    """The estimated seconds of one choice."""

    queue_s: float = 0.0
    fetch_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    handoff_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.fetch_s + self.prefill_s + self.handoff_s


@dataclass(slots=True, unsafe_hash=True)
class Choice:
    """Where a request goes. `prefill` and `decode` are the same number unless the fleet is disaggregated."""

    prefill: int
    decode: int
    parts: Parts
    cached_tokens: int = 0
    """Leading tokens that the prefill instance's DEVICE holds."""
    fetched_tokens: int = 0
    """Tokens after those that are fetched from `source`."""
    source: Place | None = None
    tpot_s: float = 0.0
    """The estimated time per output token."""


@dataclass(slots=True)
class Fleet:
    """Everything that a policy may look at. `links[(source, node)]` leads from a place to a node's instances; from one
    that is not listed nothing can be fetched. `now` is the caller's clock."""

    instances: Mapping[int, Instance]
    kv_bytes_per_token: int = 0
    links: Mapping[tuple[Place, int], Link] = field(default_factory=dict)
    now: float = 0.0
