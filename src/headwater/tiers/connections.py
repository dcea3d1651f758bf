"""A fixed number of connections to one server, made when they are needed, one thread on each at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import UnavailableError
from headwater.tiers.endpoint import Endpoint
from headwater.tiers.resp import Connection


class Connections:
    """Up to `count` connections. A connection that failed is closed and made anew by whoever needs it next."""

    def __init__(self, endpoint: Endpoint, count: int) -> None:
        self._endpoint = endpoint
        self._free = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False

    @contextmanager
    def one(self, until_s: float) -> Iterator[Connection]:
        """A connection for this block; waits for one until then. Raises UnavailableError.

        When the block raises, the connection is closed: its replies no longer fit anything.
        """
        if not self._free.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise UnavailableError(f"{self._endpoint.name}: all connections were busy until it was too late")
        try:
            connection = self._take(until_s)
            clean = False
            try:
                yield connection
                clean = True
            finally:
                self._give(connection, clean)
        finally:
            self._free.release()

    def close(self) -> None:
        """Close what is idle; what is in use is closed when its block ends."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for it in idle:
            it.close()

    def _take(self, until_s: float) -> Connection:
        if time.monotonic() >= until_s:
            raise UnavailableError(f"{self._endpoint.name}: asked too late")
        while True:
            with self._lock:
                if self._is_closed:
                    raise UnavailableError(f"{self._endpoint.name}: the tier was closed")
                found = self._idle.pop() if self._idle else None
            if found is None:
                return Connection(self._endpoint, until_s)
            if not found.is_stale():
                return found
            found.close()

    def _give(self, connection: Connection, clean: bool) -> None:
        with self._lock:
            if clean and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()
