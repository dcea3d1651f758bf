"""A batch under way: a future whose end means that nothing touches the caller's memory any more."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, wait

from headwater.ports import Link
from headwater.types import Outcome


class Transfer(Future[list[Outcome]]):
    """An outcome for each item of a batch, once it is over; see `concurrent.futures.Future`.

    The memory is the engine's until the transfer is over: `done()` is True, or `result`, `exception` or `cancel` has
    returned. A `result` that raises TimeoutError has not ended anything; `cancel` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._link: Link | None = None
        self._begun = self._void = False
        self._ending = threading.Event()

    @property
    def ending(self) -> bool:
        """Whether it is to end, or has ended, before it is through."""
        return self._ending.is_set()

    def rest(self, seconds: float) -> None:
        """Wait a little, or until it is to end."""
        self._ending.wait(seconds)

    def begin(self) -> bool:
        """Its turn has come; False if it is over before it has begun."""
        with self._guard:
            self._begun = not self._void and not self.ending
        return self._begun and self.set_running_or_notify_cancel()

    def expire(self, items: int) -> None:
        """Its deadline is over: if its turn has not come yet, none of its items is moved."""
        with self._guard:
            if self._begun or self._void:
                return
            self._void = True
        self.set_result([Outcome.FAILED] * items)

    def cancel(self) -> bool:
        """End it, and wait until nothing touches the memory any more; False if it had been over before."""
        self.abort()
        wait((self,))
        return self.cancelled()

    def cancelled(self) -> bool:
        """Whether it ended because of `cancel`; what was moved until then is not known."""
        if super().cancelled():
            return True
        return self.done() and isinstance(self._exception, CancelledError)

    def abort(self) -> None:
        """Have it end soon, without waiting; at once, if its turn has not come yet."""
        with self._guard:
            self._ending.set()
            if self._link is not None:
                self._link.abort()
            never_begins = not self._begun and not self._void
            self._void |= never_begins
        if never_begins:
            super().cancel()
            self.set_running_or_notify_cancel()

    def uses(self, link: Link | None) -> bool:
        """The link that moves its bytes now; False if it must not be used, since the transfer was cancelled."""
        with self._guard:
            self._link = link
            return not self.ending
