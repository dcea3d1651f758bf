"""Memory that a thread keeps for the length of a call."""

from __future__ import annotations

import threading

import numpy as np

from headwater.ports import Bytes


class Scratch(threading.local):
    """A buffer for each thread, as large as the largest that was asked for. It outlives the call: fresh memory costs
    more than what is done in it."""

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, np.uint8)

    def take(self, size_bytes: int) -> Bytes:
        """uint8[size_bytes] of undefined content, this thread's until it takes again."""
        if len(self._buffer) < size_bytes:
            self._buffer = np.empty(size_bytes, np.uint8)
        return self._buffer[:size_bytes]
