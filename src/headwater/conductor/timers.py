"""Time as the worker's loop has it: an asyncio loop, or a test's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """It is not made any more."""


class Timers(Protocol):
    """What of an event loop those need who only wait for times."""

    def time(self) -> float:
        """Monotonic seconds."""

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call it in the loop after so many seconds."""
