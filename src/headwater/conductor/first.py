"""Waiting for whatever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def first(*waits: Awaitable[object]) -> bool:
    """Wait for the first of these, end the others, raise what it raised; whether it was the first in the list."""
    tasks = [asyncio.ensure_future(it) for it in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return tasks[0] in done
