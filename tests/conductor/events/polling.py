"""How tests in an event loop wait for a fact."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

STEP_S = 0.002


async def eventually(fact: Callable[[], object], within_s: float = 10.0) -> None:
    """Look until the fact holds; fails after `within_s`."""
    until_s = time.monotonic() + within_s
    never = asyncio.Event()
    while not fact():
        assert time.monotonic() < until_s, f"not so within {within_s} s"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), STEP_S)
