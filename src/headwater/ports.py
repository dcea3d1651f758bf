"""The Protocols that carry headwater: each has an in-memory sibling and a conformance suite in `tests/conformance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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


class PagedKV(Protocol):
    """An engine's KV pages on its device, and the copies between them and mapped node memory.

    For block i of a call, `places[i]` is the process-local address of its layer-0 bytes in a part; layer l
    is `l * layer_stride_bytes` further on.
    """

    def gather(self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int) -> None:
        """Copy device blocks into node memory; when it returns, the bytes are there."""

    def scatter(self, group: int, blocks: BlockIds, places: Addresses, layer_stride_bytes: int) -> None:
        """Copy node memory into device blocks; when it returns, later work on the device sees the bytes."""
