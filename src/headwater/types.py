"""The nouns of headwater: what a KV cache is made of, and nothing that acts.

Plain frozen dataclasses; msgspec sends them over the wire as they are.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import NewType

ChunkKey = NewType("ChunkKey", bytes)
"""16 bytes that name one chunk: its whole token prefix and everything else that changes its bytes."""

KEY_BYTES = 16
_run = struct.Struct(f"{KEY_BYTES}s" * 64)
"""Many keys a step: one at a time costs eight times as much."""
PAGE_BYTES = 4096
SEGMENT_SHIFT = 40
"""An address is `segment << SEGMENT_SHIFT | offset_bytes`: one integer for a place in a node's memory."""
ABSENT = (1 << 64) - 1
"""The address that means "no place": a part that was not granted or is not needed."""


LATER_FIELDS = {"lossy"}


class Tier(enum.Enum):
    """Where bytes can be kept, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"

    __hash__ = object.__hash__
    """Members are one of a kind; the hash that enums have is a call of Python for each place in a mapping."""


class HitRule(enum.Enum):
    """Which chunks of a prefix a KV group needs for the prefix to be usable."""

    ALL = "all"
    """Full attention: every chunk."""
    WINDOW = "window"
    """Sliding window: the chunks that cover the last `window_tokens` tokens."""
    LAST = "last"
    """Recurrent state: the last chunk only."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`length_bytes` bytes at `offset_bytes` of one registered region of a node."""

    segment: int
    offset_bytes: int
    length_bytes: int

    @property
    def address(self) -> int:
        """The extent's place as one integer."""
        return self.segment << SEGMENT_SHIFT | self.offset_bytes


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that changes KV bytes for equal tokens; equal records, and only those, share a cache.

    `model` is a fingerprint of config and weights, not the served name. `layout` names backend, ISA and
    physical order, `groups` is `KVLayout.fingerprint()`. `adapter` is the content id of a LoRA adapter,
    `salt` the request's cache salt; both are empty where there is none. `lossy` names the codec (`int8`) that may
    have changed the bytes on their way through a lower tier; empty where they are always exact. Media are part of
    the chunk keys (see `core.hashing`), so that a text prefix before an image stays shareable.
    """

    model: str
    kv_dtype: str
    layout: str
    groups: str
    parallel: str = "tp1.pp1"
    adapter: str = ""
    tenant: str = ""
    salt: str = ""
    lossy: str = ""

    def encode(self) -> bytes:
        """The record as bytes, injectively: every field is tagged with its name and its length. Fields that came after
        the first release of keys are left out while they are empty, so that keys never change."""
        parts = [b"headwater.namespace.1"]
        for it in fields(self):
            value = getattr(self, it.name).encode("utf-8", "surrogatepass")
            if value or it.name not in LATER_FIELDS:
                parts.append(b"%s:%d:%s" % (it.name.encode(), len(value), value))
        return b"\n".join(parts)

    def root(self) -> bytes:
        """The 32 bytes from which every key chain of this namespace starts."""
        return hashlib.sha256(self.encode()).digest()


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One group of layers that share a block table, seen by one shard.

    `block_bytes` is one block of one layer of one shard. `shard_layers[r]` is the number of layers that
    shard r holds: tensor-parallel ranks hold all layers of their stage, pipeline stages hold their own.
    `channels` is the number of consecutive elements in a block that lossy codecs may scale one by one (the heads
    times the head size of one token's K or V), 0 where the bytes are opaque to us.
    """

    block_tokens: int
    block_bytes: int
    shard_layers: tuple[int, ...]
    rule: HitRule = HitRule.ALL
    window_tokens: int = 0
    channels: int = 0


def align(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a chunk of `chunk_tokens` tokens is laid out in memory: a slot for each group, all shards in it.

    A slot is the shards' parts one after another, each starting on a page; a part is layer-major
    `[layer][block][block_bytes]`. KV that every rank holds alike (MLA) is declared with one shard and
    written by one rank.
    """

    chunk_tokens: int
    groups: tuple[KVGroup, ...]

    @property
    def shards(self) -> int:
        """The number of ranks that write a part of each chunk."""
        return len(self.groups[0].shard_layers)

    def blocks_per_chunk(self, group: int) -> int:
        """Blocks of one chunk in a group."""
        return self.chunk_tokens // self.groups[group].block_tokens

    def part_bytes(self, group: int, shard: int) -> int:
        """Bytes of one shard's part of one chunk, without padding."""
        it = self.groups[group]
        return it.shard_layers[shard] * self.blocks_per_chunk(group) * it.block_bytes

    def part_offset(self, group: int, shard: int) -> int:
        """Where a shard's part starts in the slot."""
        return sum(align(self.part_bytes(group, earlier)) for earlier in range(shard))

    def slot_bytes(self, group: int) -> int:
        """Bytes of a slot: all shards' parts, whole pages."""
        return self.part_offset(group, self.shards)

    def layer_stride_bytes(self, group: int) -> int:
        """Distance between a block's places in consecutive layers of a part."""
        return self.blocks_per_chunk(group) * self.groups[group].block_bytes

    def fingerprint(self) -> str:
        """A digest of the layout; two sides with equal fingerprints agree on every offset."""
        text = [f"chunk={self.chunk_tokens}"]
        for it in self.groups:
            layers = ",".join(map(str, it.shard_layers))
            channels = f"/{it.channels}" if it.channels else ""
            text.append(f"{it.block_tokens}/{it.block_bytes}/{layers}/{it.rule.value}/{it.window_tokens}{channels}")
        return hashlib.sha256("|".join(text).encode()).hexdigest()[:32]

    def problem(self) -> str | None:
        """What makes this layout impossible, in words that name the field and the value; None if sound."""
        if not self.groups:
            return "layout.groups is empty; a layout needs at least one KV group"
        for index, it in enumerate(self.groups):
            where = f"layout.groups[{index}]"
            if it.block_tokens <= 0 or it.block_bytes <= 0:
                return f"{where}: block_tokens={it.block_tokens}, block_bytes={it.block_bytes} must be positive"
            if self.chunk_tokens <= 0 or self.chunk_tokens % it.block_tokens:
                return f"chunk_tokens={self.chunk_tokens} is not a multiple of {where}.block_tokens={it.block_tokens}"
            if len(it.shard_layers) != self.shards or not self.shards or min(it.shard_layers) <= 0:
                return f"{where}.shard_layers={it.shard_layers} must list a positive layer count for each shard"
            if (it.rule is HitRule.WINDOW) != (it.window_tokens > 0):
                return f"{where}: window_tokens={it.window_tokens} does not fit rule={it.rule.value}"
        return None


@dataclass(frozen=True, slots=True)
class Origin:
    """What a lower tier knows of a namespace: the record without its salt, its root, and the layout of its chunks."""

    namespace: Namespace
    layout: KVLayout
    root: bytes

    @classmethod
    def of(cls, namespace: Namespace, layout: KVLayout) -> Origin:
        """The origin of a registered namespace; its salt, which may be secret, is kept only inside the root."""
        return cls(replace(namespace, salt=""), layout, namespace.root())


@dataclass(frozen=True, slots=True)
class Identity:
    """What one KV group's part of a chunk is: all that must be equal for its bytes to be used. `parent` is the key of
    the chunk before, empty at the start of a prompt; it follows from the key and is kept to restore the tree."""

    origin: Origin
    group: int
    key: ChunkKey
    parent: bytes = field(default=b"", compare=False)

    @property
    def length_bytes(self) -> int:
        """Bytes of the slot: all shards' parts, whole pages."""
        return self.origin.layout.slot_bytes(self.group)


class Outcome(enum.Enum):
    """What became of one chunk's way to or from a lower tier."""

    DONE = "done"
    MISSING = "missing"
    """It is not there."""
    FOREIGN = "foreign"
    """Another chunk is in its place: the index was behind. It is a miss."""
    NEWER = "newer"
    """A newer headwater wrote it: a miss, and left alone."""
    CORRUPT = "corrupt"
    """Its bytes are not what was written."""
    DAMAGED = "damaged"
    """That place of the medium cannot be read or written, while others can."""
    FULL = "full"
    """There is no room for it."""
    REFUSED = "refused"
    """The tier's codec does not take it, or cannot bring it back: no key for its tenant, numbers that are not finite.
    It says nothing against the tier or the bytes."""
    FAILED = "failed"
    """The tier could not do it now; nothing is known of the bytes."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier can hold and holds, in bytes; None where it cannot tell."""

    capacity_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Media:
    """One image, audio or video item of a prompt: a content hash and the token positions it fills."""

    identifier: str
    offset_tokens: int
    length_tokens: int


class TicketKind(enum.Enum):
    """What a ticket holds: leases on replicas to read, reserved slots to write, or leases that only keep replicas."""

    LOAD = "load"
    SAVE = "save"
    PIN = "pin"


@dataclass(frozen=True, slots=True)
class Loadable:
    """A leased prefix: `addresses[g][i]` is the slot of chunk `first + i` in group g, or ABSENT where the
    group's hit rule does not need it. `chunks` counts from the start of the prompt. Readers check
    `deadline_s` (CLOCK_MONOTONIC) after their copy and then say done; `ticket` 0 holds nothing.
    """

    ticket: int
    chunks: int
    addresses: tuple[tuple[int, ...], ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots to write: `addresses[g][i]` for key i, or ABSENT where it is held already or there is no room.

    The first `covered` keys will all be held once this ticket commits. `ticket` 0 reserved nothing.
    """

    ticket: int
    covered: int
    addresses: tuple[tuple[int, ...], ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Replicas became READY in a tier (said after commit, never before); `places` are their slots' addresses."""

    namespace: int
    group: int
    keys: tuple[ChunkKey, ...]
    tier: Tier
    size_bytes: int
    places: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Removed:
    """Replicas left a tier. `reason` is `evicted`, `deleted` or `corrupt`; `cause` is the namespace that needed the
    room, -1 if none did."""

    namespace: int
    group: int
    keys: tuple[ChunkKey, ...]
    tier: Tier
    size_bytes: int
    reason: str
    cause: int = -1
    places: tuple[int, ...] = field(default=(), compare=False)


Changed = Stored | Removed


@dataclass(frozen=True, slots=True)
class Cleared:
    """What came of a deletion: how many parts of chunks left this node, how many stayed because engines or pins use
    them, how many pins were ended, and the REMOTE tiers that have not yet deleted what they have."""

    deleted: int
    kept: int
    pins: int = 0
    pending: tuple[str, ...] = ()


def split_keys(packed: bytes) -> list[ChunkKey]:
    """The keys of a packed run of 16-byte keys; raises ValueError when the length is not a multiple of 16."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"packed keys: {len(packed)} bytes is not a multiple of {KEY_BYTES}")
    keys: list[ChunkKey] = []
    bulk = len(packed) // _run.size * _run.size
    if bulk:
        keys.extend(chain.from_iterable(_run.iter_unpack(memoryview(packed)[:bulk])))
    keys += [ChunkKey(packed[start : start + KEY_BYTES]) for start in range(bulk, len(packed), KEY_BYTES)]
    return keys


def pack_keys(keys: Iterable[ChunkKey]) -> bytes:
    """The reverse of `split_keys`."""
    return b"".join(keys)


NAME_BYTES = KEY_BYTES + 1


def chunk_name(group: int, key: ChunkKey) -> bytes:
    """What a directory calls one KV group's part of a chunk: 17 bytes, the same in all namespaces and on all nodes."""
    return key + bytes((group,))


def split_name(name: bytes) -> tuple[int, ChunkKey]:
    """The group and the key of a chunk's name."""
    return name[KEY_BYTES], ChunkKey(name[:KEY_BYTES])


class Standing(enum.Enum):
    """What a member takes part in."""

    SERVING = "serving"
    DRAINING = "draining"
    """It is read from, and nothing more is given to it."""
    SILENT = "silent"
    """It has not been heard of for a while: it is not chosen, and what it holds is not forgotten."""


@dataclass(frozen=True, slots=True)
class Member:
    """One life of a node: `name` stays over restarts, `epoch` does not, and addresses are no identity.

    `address` is HOST:PORT of its TCP listener, `socket` the path of its Unix listener, empty where there is none.
    `host` is equal for those that can pass descriptors to each other. `labels` are an operator's words for where it is
    (zone, switch, nic). `oldest` and `newest` are the peer protocols that it speaks.
    """

    name: str
    epoch: int
    address: str
    socket: str = ""
    host: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    transports: tuple[str, ...] = ("tcp",)
    version: str = ""
    oldest: int = 1
    newest: int = 1
    capacity_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """A member as the directory knows it. `number` is this life's, never used again; `report` is what its last beat
    brought along, as JSON for people and programs; `heard_s` is how long ago that was."""

    number: int
    member: Member
    standing: Standing
    heard_s: float
    report: bytes = b""


@dataclass(frozen=True, slots=True)
class Replica:
    """Who holds a chunk, by its number in the directory, and in which tier."""

    number: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Announced:
    """A chunk became readable in a tier of the announcing node, or left it."""

    name: bytes
    tier: Tier
    present: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """The directory's answer to a beat. `generation` is another after it has lost everything; `serial` is that of the
    last batch that it has of this node; `members` changes whenever somebody joins, leaves, drains or falls silent."""

    generation: str
    serial: int
    members: int
