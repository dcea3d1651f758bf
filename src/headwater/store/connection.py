"""A client's way to its node: one life of the connection, and the memory that came with it."""

from __future__ import annotations

import os
import threading
import uuid
from typing import TypeVar

import numpy as np

from headwater.errors import HeadwaterError, ProtocolError, RefusedError, UnavailableError
from headwater.node.client import Link
from headwater.node.messages import Enter, Entered, Release, Reply, Request
from headwater.node.object_table import TRUSTED, TableReader
from headwater.ports import Bytes
from headwater.types import SEGMENT_SHIFT

R = TypeVar("R", bound=Reply)
_OFFSET = (1 << SEGMENT_SHIFT) - 1


class Connection:
    """A connected, mapped node. Calls may come from several threads; the memory stays mapped while this object lives,
    also after the connection is lost, so that nobody who still copies from it meets a hole."""

    def __init__(self, node: str, tenant: str, connect_s: float, call_s: float) -> None:
        """Connect; raises UnavailableError, or RefusedError if node and client do not fit together."""
        self._lock = threading.Lock()
        self.process = os.getpid()
        """Whose connection this is: a forked child shares the socket, and must not use it."""
        instance = f"store-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._link = link = Link(node, instance, maps=True, connect_s=connect_s, call_s=call_s)
        try:
            entered = link.call(Enter(tenant), Entered)
            memory = link.memory
            assert memory is not None, "a link that maps has memory"
            self.slab_bytes = entered.slab_bytes
            self.segments: list[Bytes] = [
                memory.array(segment << SEGMENT_SHIFT, size) for segment, size in enumerate(memory.sizes)
            ]
            self._views = [it.data for it in self.segments]
            self.bases = list(memory.bases)
            """The segments' addresses in this process."""
            self.table = TableReader(self.part(entered.table, entered.table_bytes))
            if not self.table.is_table:
                raise ProtocolError("the node's table of objects is not one that this version reads")
        except HeadwaterError:
            link.close()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether the node is gone."""
        return self._link.is_lost

    @property
    def lists_all(self) -> bool:
        """Whether an object that the table does not list is nowhere."""
        return TRUSTED and self.table.is_complete

    def has(self, address: int, length_bytes: int) -> bool:
        """Whether so many bytes at a node's address are mapped memory."""
        segment = address >> SEGMENT_SHIFT
        return segment < len(self._views) and (address & _OFFSET) + length_bytes <= len(self._views[segment])

    def part(self, address: int, length_bytes: int) -> Bytes:
        """Mapped memory at a node's address."""
        start = address & _OFFSET
        return self.segments[address >> SEGMENT_SHIFT][start : start + length_bytes]

    def view(self, address: int, length_bytes: int) -> memoryview:
        """The same, sooner, for few bytes."""
        start = address & _OFFSET
        return self._views[address >> SEGMENT_SHIFT][start : start + length_bytes]

    def local(self, address: int) -> int:
        """A node's address in this process."""
        return self.bases[address >> SEGMENT_SHIFT] + (address & _OFFSET)

    def call(self, request: Request, kind: type[R]) -> R:
        """See `Link.call`."""
        self._check_process()
        with self._lock:
            if self._link.is_lost:
                raise UnavailableError("the node has closed the connection")
            return self._link.call(request, kind)

    def _check_process(self) -> None:
        if self.process != os.getpid():
            raise UnavailableError("this connection is the parent process's")

    def release(self, tickets: tuple[int, ...]) -> None:
        """End leases."""
        if tickets:
            self.call_quietly(Release(tickets))

    def call_quietly(self, request: Request) -> None:
        """Tell the node something that may be lost with the connection: then it knows it anyway."""
        try:
            self._check_process()
            with self._lock:
                self._link.call(request, object)  # type: ignore[type-var]
        except (UnavailableError, ProtocolError, RefusedError):
            return

    def abandon(self) -> None:
        """In a child that was forked: close its copy of the socket, whose owner goes on; views stay as they are."""
        self._lock = threading.Lock()  # a thread of the parent may have had the other
        self._link.close()

    def close(self) -> None:
        """Disconnect: what this client had leased or pinned is released."""
        with self._lock:
            self._link.close()


def empty(length_bytes: int) -> Bytes:
    """Memory for what is read."""
    return np.empty(length_bytes, np.uint8)
