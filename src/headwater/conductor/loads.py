"""The fleet's loads as policies read them, written no more often than they have to be.

`LoadBook.fill` works all instances out anew, from three accounts; with several Conductors it costs as much as the
choice itself. So it is called every `FILL_S` (`FILL_ALONE_S` where there are no others), and when somebody else has
said something. In between only our own requests change anything: an instance is then what it was at that time, and what
we have there more or less since.
"""

from __future__ import annotations

from headwater.conductor.registry import Roster
from headwater.core.common import Common
from headwater.core.loads import NOTHING, LoadBook, Published, Totals
from headwater.core.routing import is_light
from headwater.fleet import Ask, Choice, Instance

FILL_S = 0.01
"""The others' unseen arrivals are guessed from their pace: they do not change by a request within this."""
FILL_ALONE_S = 0.25
"""Without others only what an engine once said changes by itself, when it is too old."""
STEP_TOKENS = 32
"""An answer's new tokens are counted so many at a time: a step's time does not change for fewer."""


class Loads:
    """Owns the book; writes the instances' loads and `heard_s`."""

    def __init__(self, book: LoadBook, roster: Roster) -> None:
        self.book = book
        self._instances = roster.instances()
        self._common = Common()
        self._light: set[str] = set()
        """Those that wait and are light. Both of our own requests; those of others are counted whole."""
        self._base: dict[int, Totals] = {}
        """What each instance had at the last fill besides what was ours."""
        self._touched: set[int] = set()
        self._fill_s = float("-inf")
        """When all of it is due."""
        self.begun_tokens = 0
        """Uncached prompt tokens that we sent anywhere, ever: how much others do not know of yet."""

    def routed(self, ask: Ask, choice: Choice, now: float) -> None:
        """See `LoadBook.routed`; the instances are up to date afterwards."""
        self.book.routed(ask, choice, now)
        self._common.join(ask.request, choice.decode, ask.keys, ask.block_tokens)
        self._share(choice.decode)
        it = self._instances[choice.prefill]
        if is_light(ask, choice, it.times):
            self._light.add(ask.request)
            it.light_requests += 1
        self.begun_tokens += ask.tokens - choice.cached_tokens - choice.fetched_tokens
        self._touched.add(choice.prefill)
        self.refresh(now)

    def prefilled(self, request: str, choice: Choice, now: float) -> None:
        """See `LoadBook.prefilled`."""
        self.book.prefilled(request, now)
        self._lighten(request, choice)
        self._touch(choice)

    def progressed(self, request: str, choice: Choice, answered_tokens: int, now: float) -> None:
        """See `LoadBook.progressed`, for a request that decodes."""
        self.book.progressed(request, 0, answered_tokens, now)
        self._touched.add(choice.decode)

    def finished(self, request: str, choice: Choice, now: float) -> None:
        """See `LoadBook.finished`."""
        self.book.finished(request, now)
        self._common.leave(request)
        self._lighten(request, choice)
        self._share(choice.decode)
        self._touch(choice)

    def heard(self, message: Published, now: float) -> None:
        """See `LoadBook.heard`."""
        self.book.heard(message, now)
        self._fill_s = float("-inf")

    def told(self, instance: int, waiting: int, running: int, sampled_s: float, now: float) -> None:
        """An engine's own word on how many requests it has.

        Engines count a request as running from its first step on, and we from its first token on: who is in prefill is
        taken as waiting here, as far as we know of such. They count when a step ends, and within a long one tell of the
        time before it: what we know it to have it has, whatever it says.
        """
        ours = self.book.own_at(instance, sampled_s)
        total = max(waiting + running, ours.waiting_requests + ours.running_requests)
        waiting = min(max(self.book.load(instance, now).waiting_requests, waiting), total)
        self.book.told(instance, sampled_s, waiting, total - waiting, now=now)
        self._fill_s = float("-inf")

    def left(self, instance: int) -> None:
        """See `LoadBook.left`."""
        self.book.left(instance)
        self._common.left(instance)
        self._base.pop(instance, None)
        self._touched.discard(instance)

    def refresh(self, now: float) -> None:
        """Bring the instances up to date."""
        if now >= self._fill_s:
            self._fill(now)
        elif self._touched:
            for number in self._touched:
                it, base = self._instances.get(number), self._base.get(number)
                if it is None:
                    continue
                if base is None:  # it has joined since
                    self._fill(now)
                    return
                _write(it, base, self.book.own(number))
            self._touched.clear()

    def _fill(self, now: float) -> None:
        book, base = self.book, self._base
        book.fill(self._instances, now)
        for number, it in self._instances.items():
            waiting, waiting_tokens, running, running_tokens = book.own(number)
            others = Totals(
                it.waiting_requests - waiting,
                it.waiting_tokens - waiting_tokens,
                it.running_requests - running,
                it.running_tokens - running_tokens,
            )
            base[number] = others if any(others) else NOTHING
        self._touched.clear()
        self._fill_s = now + (FILL_S if book.drifts else FILL_ALONE_S)

    def _lighten(self, request: str, choice: Choice) -> None:
        """It does not wait any more."""
        if request in self._light:
            self._light.discard(request)
            it = self._instances.get(choice.prefill)
            if it is not None:
                it.light_requests -= 1

    def _share(self, number: int) -> None:
        it = self._instances.get(number)
        if it is not None:
            it.shared_tokens = self._common.tokens.get(number, 0)

    def _touch(self, choice: Choice) -> None:
        self._touched.add(choice.prefill)
        self._touched.add(choice.decode)


def _write(it: Instance, base: Totals, own: Totals) -> None:
    """Their sum; nothing is below nothing, as where the engine knew of fewer than we did."""
    waiting, waiting_tokens, running, running_tokens = own
    if base is not NOTHING:
        waiting, waiting_tokens = max(base[0] + waiting, 0), max(base[1] + waiting_tokens, 0)
        running, running_tokens = max(base[2] + running, 0), max(base[3] + running_tokens, 0)
    it.waiting_requests, it.waiting_tokens = waiting, waiting_tokens
    it.running_requests, it.running_tokens = running, running_tokens
