"""Bytes move without the GIL."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from headwater._kernels import Kernels
from tests.kernels.arena import IMPLEMENTATIONS, memory, name, noise

PIECE, COUNT = 4 << 20, 64  # 256 MiB
SOURCE = noise(PIECE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=name)
@pytest.mark.usefixtures("nobody_is_made_to_yield")
def test_another_thread_runs_during_a_copy(implementation: Kernels) -> None:
    target = memory(PIECE * COUNT)
    targets = np.arange(COUNT, dtype=np.uint64) * np.uint64(PIECE) + np.uint64(target.at())
    sources, lengths = np.full(COUNT, SOURCE.at(), np.uint64), np.full(COUNT, PIECE, np.uint64)

    def runs_during_the_copy() -> bool:
        go, ran = threading.Lock(), threading.Event()
        go.acquire()
        thread = threading.Thread(target=lambda: (go.acquire(), ran.set()))
        thread.start()
        go.release()
        implementation.copyv(targets, sources, lengths)
        seen = ran.is_set()
        thread.join()
        return seen

    # A busy machine may leave the other thread without a core for one copy; without the GIL it never runs in any.
    assert any(runs_during_the_copy() for _ in range(10))
