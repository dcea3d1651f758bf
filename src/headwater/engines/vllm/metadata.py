"""What the scheduler side tells the ranks each step, and what they tell back; plain data, moved by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from headwater.types import KVLayout, Namespace

NULL_BLOCK = 0
"""vLLM's block 0 belongs to nobody: a table entry that holds no data."""


@dataclass(frozen=True)
class NodeInfo:
    """Which life of which node a job belongs to, and how to reach and greet it."""

    address: str
    name: str
    epoch: int
    instance: str
    namespace: Namespace
    layout: KVLayout


@dataclass(frozen=True)
class Part:
    """One KV group's share of a job: whole chunks, `blocks_per_chunk` block ids each, NULL_BLOCK where none."""

    group: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SaveJob:
    """Copy blocks into reserved slots, then say done. `epoch` is the life of the node that reserved them."""

    ticket: int
    epoch: int
    parts: tuple[Part, ...]
    deadline_s: float


@dataclass(frozen=True)
class LoadJob:
    """Copy leased slots into a request's blocks; `missing` are blocks that no slot was found for.

    A job without a ticket moves nothing: it only reports its missing blocks. `epoch` is the life of the node that
    leased the slots.
    """

    request: str
    ticket: int
    epoch: int
    parts: tuple[Part, ...]
    missing: tuple[int, ...]
    deadline_s: float
    give_up_s: float

    @property
    def blocks(self) -> set[int]:
        """The blocks that this job is to fill."""
        return {*self.missing, *(block for part in self.parts for block in part.blocks if block != NULL_BLOCK)}


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's jobs. `idle` says that no tokens are computed, so that the ranks may wait for a load. The ranks
    report a `step` number, if there is one, when the step is over."""

    node: NodeInfo | None = None
    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    idle: bool = False
    step: int = 0


@dataclass
class SavesEnded(KVConnectorWorkerMetadata):
    """For each save ticket, how many ranks have ended it, and the tickets that some rank could not serve; and the
    number of the step that is over, if it has one."""

    ended: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SavesEnded:
        """The sums of two ranks."""
        assert isinstance(other, SavesEnded)
        ended = dict(self.ended)
        for ticket, count in other.ended.items():
            ended[ticket] = ended.get(ticket, 0) + count
        return SavesEnded(ended, self.failed | other.failed, max(self.step, other.step))


@dataclass(frozen=True)
class RankLayout(KVConnectorHandshakeMetadata):
    """What a rank's tensors really look like: layers and block bytes of each KV group, and the element type."""

    layers: tuple[int, ...]
    block_bytes: tuple[int, ...]
    dtype: str
    layout: str
