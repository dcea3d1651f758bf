"""The Protocols that carry headwater: each has an in-memory sibling and a conformance suite in `tests/conformance`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
BlockIds = npt.NDArray[np.int64]


class Clock(Protocol):
    """The only source of time; drivers hold one, the core is told the time."""

    def now(self) -> float:
        """Monotonic seconds, comparable across the processes of one host."""


class EvictionPolicy(Protocol):
    """Which resident chunk leaves next. Entries are small integers, chosen and re-used by the caller."""

    def insert(self, entry: int, key: bytes) -> None:
        """A chunk became resident; `entry` is not known to the policy at this moment."""

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
