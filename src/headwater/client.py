"""The public Python client: use a node's cache without any engine.

    with Client("unix:/run/headwater/node.sock", namespace, layout) as cache:
        keys = cache.keys(token_ids)
        with cache.save(keys) as saving:
            for position in saving.positions:
                saving.part(position)[:] = kv_bytes[position]      # straight into the node's memory
        with cache.load(keys, wait_s=1.0) as held:                 # so long for what only lower tiers have
            for position in range(held.chunks):
                use(held.part(position))                           # straight from it, no copy

`torch.from_numpy` turns a part into a tensor over the same memory.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from headwater._kernels.keys import chunk_keys
from headwater.errors import UnavailableError
from headwater.node.client import open_session
from headwater.tiers.host import MappedMemory
from headwater.types import ABSENT, ChunkKey, Cleared, KVLayout, Loadable, Media, Namespace, Reservation

Bytes = npt.NDArray[np.uint8]
POLL_S = 0.002
PATIENCE_SHARE = 0.10
"""The share of the time to compute a prompt that a node waits for its lower tiers (`core.fetch`)."""


class _Parts:
    """The parts of some chunks in mapped memory."""

    def __init__(self, memory: MappedMemory, layout: KVLayout, addresses: Sequence[Sequence[int]], first: int) -> None:
        self._memory, self._layout, self._addresses, self._first = memory, layout, addresses, first

    def _part(self, position: int, group: int, shard: int) -> Bytes:
        offset = position - self._first
        slots = self._addresses[group]
        if not 0 <= offset < len(slots) or slots[offset] == ABSENT:
            raise IndexError(f"chunk {position} of group {group} has no part here")
        place = slots[offset] + self._layout.part_offset(group, shard)
        return np.frombuffer(self._memory.view(place, self._layout.part_bytes(group, shard)), dtype=np.uint8)


class Saving(_Parts):
    """Reserved slots: fill them inside the `with` block, which commits them when it ends without an exception."""

    def __init__(self, memory: MappedMemory, layout: KVLayout, reserved: Reservation) -> None:
        super().__init__(memory, layout, reserved.addresses, 0)
        self.covered = reserved.covered
        """How many of the keys, from the first, will be held; fewer than asked when the node is full."""
        self.failed: set[int] = set()
        """Positions that are not to be committed; add to it what could not be filled."""
        self.positions = [
            position
            for position in range(reserved.covered)
            if any(position < len(group) and group[position] != ABSENT for group in reserved.addresses)
        ]
        """The positions to fill; the others are held already or are being written by somebody else."""

    def part(self, position: int, group: int = 0, shard: int = 0) -> Bytes:
        """The writable bytes of one shard's part of chunk `position`: uint8[part_bytes], valid inside the block.

        Raises IndexError for a part that is not ours to write.
        """
        return self._part(position, group, shard)


class Loading(_Parts):
    """A leased prefix of `chunks` chunks: read it inside the `with` block, which ends the lease."""

    def __init__(self, memory: MappedMemory, layout: KVLayout, held: Loadable, first: int) -> None:
        super().__init__(memory, layout, held.addresses, first)
        self.chunks = held.chunks
        self.deadline_s = held.deadline_s

    def part(self, position: int, group: int = 0, shard: int = 0) -> Bytes:
        """The read-only bytes of one shard's part of chunk `position`: uint8[part_bytes], valid inside the block.

        Raises IndexError for a chunk before `first`, beyond `chunks`, or not needed by the group's hit rule.
        """
        part = self._part(position, group, shard)
        part.flags.writeable = False
        return part


class Client:
    """One process's access to a node: match, save, load. Not thread-safe; use one a thread."""

    def __init__(
        self, node: str, namespace: Namespace, layout: KVLayout, *, connect_s: float = 1.0, call_s: float = 1.0
    ) -> None:
        """Connect to `unix:/path` and register; raises UnavailableError, or RefusedError naming both values."""
        self._instance = f"client-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._requests = 0
        self._session = open_session(
            node, self._instance, namespace, layout, maps=True, connect_s=connect_s, call_s=call_s
        )
        self._namespace, self._layout = namespace, layout
        self._root = namespace.root()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; everything that this client held is released. Parts must not be used any more."""
        self._session.close()

    def keys(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> list[ChunkKey]:
        """The keys of all whole chunks of a token sequence."""
        return chunk_keys(self._root, tokens, self._layout.chunk_tokens, media)

    def match(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks are held; changes nothing."""
        return self._session.match(keys).chunks

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which chunks are held, each for itself."""
        return self._session.contains(keys)

    @contextmanager
    def save(self, keys: Sequence[ChunkKey], parent: ChunkKey | None = None) -> Iterator[Saving]:
        """Reserve slots for the keys that are not held, to be filled inside the block; then they are committed.

        `parent` is the key before keys[0] when the prompt does not start there. An exception inside the block
        commits nothing and frees the slots.
        """
        shards = range(self._layout.shards)
        reserved = self._session.reserve(keys, parent, shards=shards)
        saving = Saving(self._memory, self._layout, reserved)
        committed = False
        try:
            yield saving
            committed = True
        finally:
            if reserved.ticket and committed:
                for shard in shards:
                    self._session.done(reserved.ticket, shard, sorted(saving.failed))
            elif reserved.ticket:
                self._session.release([reserved.ticket])

    @contextmanager
    def load(self, keys: Sequence[ChunkKey], first: int = 0, wait_s: float = 0.0) -> Iterator[Loading]:
        """Lease the held prefix, from chunk `first` on, for the time of the block.

        With `wait_s` the node first brings up what only its lower tiers hold; the lease is on what is there when all
        of it has come, nothing more can come, or the time is over (5 s at the most, then the node gives up).

        Raises UnavailableError at the end of a block that lasted longer than the lease: what it read may be
        somebody else's bytes and must be thrown away.
        """
        if wait_s > 0.0:
            self._wait(keys, wait_s)
        held = self._session.load(keys, first)
        try:
            yield Loading(self._memory, self._layout, held, first)
        finally:
            late = bool(held.ticket) and time.monotonic() > held.deadline_s
            if held.ticket:
                self._session.release([held.ticket])
        if late:
            raise UnavailableError("the lease ended before the block did; discard what was read")

    def prefetch(self, keys: Sequence[ChunkKey]) -> int:
        """Have the node begin to bring up what only its lower tiers hold of a prefix, without waiting for it; how many
        leading chunks can be loaded already."""
        return self._session.match(keys, counts=False, request=self._new_request("prefetch")).chunks

    def clear(self, wait_s: float = 0.0) -> Cleared:
        """Delete every chunk of this namespace that nobody uses, in every tier; pins of it end.

        Once this returns, nothing that was stored before is ever served again by this node, with two exceptions, which
        the answer names: the chunks that were `kept`, since engines are reading or writing them, and those of a
        REMOTE tier that is `pending`: this node leaves the namespace alone there until the tier has deleted it, but a
        node that is restarted before forgets that it should. `wait_s` is how long to wait for such tiers.
        Raises RefusedError if the disk tier cannot take the deletion down: then it does not outlive the node.
        """
        cleared = self._session.clear()
        until_s = time.monotonic() + wait_s
        pending = cleared.pending
        while pending and time.monotonic() < until_s:
            time.sleep(min(POLL_S, max(until_s - time.monotonic(), 0.0)))
            pending = self._session.still_clearing()
        return replace(cleared, pending=pending)

    def _wait(self, keys: Sequence[ChunkKey], wait_s: float) -> None:
        """Ask the node for a prefix until all that its lower tiers have of it is in HOST, at most `wait_s`."""
        request = self._new_request("load")
        # Who waits so long would need longer than that to compute a single chunk: the node's patience is ours.
        tokens_s = PATIENCE_SHARE * self._layout.chunk_tokens / wait_s
        until_s = time.monotonic() + wait_s
        while self._session.match(keys, counts=False, request=request, tokens_s=tokens_s).waiting:
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                break
            time.sleep(min(POLL_S, left_s))
        self._session.forget([request])

    def _new_request(self, purpose: str) -> str:
        self._requests += 1
        return f"{self._instance}/{purpose}-{self._requests}"

    @property
    def _memory(self) -> MappedMemory:
        memory = self._session.link.memory
        if memory is None:
            raise UnavailableError("the connection to the node was lost; open a new Client")
        return memory
