"""What other threads want done by the node's loop, which alone may touch the core."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from headwater.errors import HeadwaterError, UnavailableError

T = TypeVar("T")
Errand = Callable[[float], None]


class Answer(Generic[T]):
    """What one thread waits for and the loop gives, at once or later; unless the thread has stopped waiting by then."""

    def __init__(self) -> None:
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._value: list[T] = []
        self._error: HeadwaterError | None = None
        self._abandoned = False

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it; whoever goes to some length for an answer looks first."""
        return not self._abandoned and not self._changed.is_set()

    def give(self, value: T) -> bool:
        """Answer; False if nobody takes it: what it holds is the caller's to let go."""
        with self._lock:
            if not self.is_wanted:
                return False
            self._value.append(value)
            self._changed.set()
            return True

    def refuse(self, error: HeadwaterError) -> bool:
        """Have this raised where it is waited for; False if nobody waits."""
        with self._lock:
            if not self.is_wanted:
                return False
            self._error = error
            self._changed.set()
            return True

    def wait(self, until_s: float) -> T:
        """The answer; raises what it was refused with, or UnavailableError if there is none by then."""
        self._changed.wait(max(until_s - time.monotonic(), 0.0))
        with self._lock:
            if not self._changed.is_set():
                self._abandoned = True
                raise UnavailableError("the node's loop has no answer in time")
        if self._error is not None:
            raise self._error
        return self._value[0]


class Errands:
    """Errands for the loop, in order. Each is told the time and must not block."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` makes the loop call `run` soon; from any thread."""
        self._wake = wake
        self._waiting: deque[Errand] = deque()
        self._asked: dict[Answer[object], None] = {}
        self._ended = False

    def tell(self, errand: Errand) -> None:
        """Have something done; nobody waits for it. After `end` it is dropped."""
        if not self._ended:
            self._waiting.append(errand)
            self._wake()

    def ask(self, begin: Callable[[float, Answer[T]], None], until_s: float) -> T:
        """Have something done that gives an answer, at once or later: `begin` gives it, or sees to it, or raises.

        Raises UnavailableError if there is none by then. What has not begun by then is not begun.
        """
        answer: Answer[T] = Answer()

        def errand(now: float) -> None:
            if not answer.is_wanted:
                return
            try:
                begin(now, answer)
            except HeadwaterError as error:
                answer.refuse(error)

        known: Answer[object] = answer  # type: ignore[assignment]
        self._asked[known] = None
        try:
            self.tell(errand)
            if self._ended:
                raise UnavailableError("the node is ending")
            return answer.wait(until_s)
        finally:
            self._asked.pop(known, None)

    def run(self, now: float) -> None:
        """Do what waits, as far as it was there when this was called; for the loop."""
        for _ in range(len(self._waiting)):
            self._waiting.popleft()(now)

    def end(self) -> None:
        """The loop is over: who asks, or has asked, is told so."""
        self._ended = True
        self._waiting.clear()
        for asked in list(self._asked):
            asked.refuse(UnavailableError("the node is ending"))
