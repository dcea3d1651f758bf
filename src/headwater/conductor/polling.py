"""Who is alive, and what engines say of themselves: each instance is asked every second, one question at a time.

Theory of operation. Each instance has a `Breaker`:

    WELL     GET /health, then GET /metrics, then a pause of `every_s`, give or take a tenth
             two failures in a row, or a word from the data path that nobody listens there   -> SICK, not alive
             a word that it closed a connection: not alive, but asked at once; it answers -> alive. It may have closed
             only that one, and a request that makes every instance do so must not take all of them out for seconds
    SICK     GET /health when the breaker lets a probe through: after 0.1 to 0.2 s, then at longer and longer pauses, of
             5 s at most; it answers -> WELL, alive; if it was away for `AWAY_S`, it is given work slowly at first

An answer to a question that was asked before the data path's word does not count. At most `together` questions are
under way, each with a deadline; those that are due beyond wait for their turn. `Upstreams` carries them all: there are
no tasks, and no connections but its own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from headwater.conductor.http.exchange import Call, Headers, Upstreams
from headwater.conductor.outbound import credentials
from headwater.conductor.registry import Roster
from headwater.conductor.signals import BYTES_MAX, Signals, read_signals
from headwater.conductor.timers import Timer, Timers
from headwater.core.health import Breaker, Health

EVERY_S = 1.0
DEADLINE_S = 5.0
"""An engine that does not say within this that it is well is not: its own loop is stuck. Twice, so that a pause of its
host does not count."""
TOGETHER = 16
FAILURES = 2
AWAY_S = 0.5
"""Who was away for less has only closed a connection."""
SLOW_S, SLOW_SHARE = 5.0, 0.1
"""After being away an instance takes a tenth of its share, and all of it after so long: its caches are empty, and
everybody's requests of the meantime would come at once."""
GONE = frozenset({"refused", "connect"})
"""What the data path says of an instance where nobody listens any more."""
DOUBTED = "closed"
"""What it says where that may be so. Anything else is one request's fault."""


class Polling:
    """Asks all instances of a roster, and writes `alive`."""

    def __init__(
        self,
        roster: Roster,
        upstreams: Upstreams,
        timers: Timers,
        *,
        told: Callable[[int, Signals, float], None],
        changed: Callable[[int, bool], None],
        every_s: float = EVERY_S,
        deadline_s: float = DEADLINE_S,
        together: int = TOGETHER,
        draw: random.Random | None = None,
    ) -> None:
        """`told(number, signals, asked_s)` for each answer of /metrics; `changed(number, alive)` once it is written."""
        self._roster, self._upstreams, self._timers = roster, upstreams, timers
        self._told, self._changed = told, changed
        self._every_s, self._deadline_s, self._together = every_s, deadline_s, together
        self._draw = draw or random.Random()
        self._watched: dict[int, _Watched] = {}
        self._due: deque[_Watched] = deque()
        self._asking = 0
        self._closed = False

    def __repr__(self) -> str:
        out = sum(not it.is_well() for it in self._watched.values())
        return f"Polling({len(self._watched)} instances, {out} of them out, {self._asking} questions under way)"

    def start(self) -> None:
        """Ask all there are and all that join, until `close`."""
        self._roster.watch(self._joined, self._left)
        for number in list(self._roster.instances()):
            self._joined(number)

    def close(self) -> None:
        """Ask nobody any more."""
        self._closed = True
        for number in list(self._watched):
            self._left(number)
        self._due.clear()

    def trouble(self, number: int, why: str) -> None:
        """The data path's word: a request was lost there, and why."""
        it = self._watched.get(number)
        if it is None or not it.is_well():
            return
        if why in GONE:
            it.round += 1
            it.breaker.failed(self._timers.time(), self._draw.random(), unavailable=True)
            self._out(it)
        elif why == DOUBTED and it.out_s is None:
            it.round += 1
            self._out(it)

    def share(self, number: int, now: float) -> float:
        """How much of its usual share of requests it may have: 1 but for a while after it came back."""
        it = self._watched.get(number)
        if it is None or it.back_s is None:
            return 1.0
        share = SLOW_SHARE + (1 - SLOW_SHARE) * (now - it.back_s) / SLOW_S
        if share >= 1.0:
            it.back_s = None
            return 1.0
        return max(share, SLOW_SHARE)

    def answered(self) -> bool | None:
        """Whether any instance has ever said that it is well; None while some were not asked yet."""
        heard = [it.heard for it in self._watched.values()]
        return True if True in heard else None if None in heard else False

    def was_away(self, number: int) -> bool:
        """Whether it has come back lately, and was away for long enough to have begun anew."""
        it = self._watched.get(number)
        return it is not None and it.back_s is not None

    def slow(self) -> list[int]:
        """Those that have come back lately."""
        return [number for number, it in self._watched.items() if it.back_s is not None]

    def out_s(self, number: int, now: float) -> float | None:
        """For how long it has been away; None if it is not."""
        it = self._watched.get(number)
        return None if it is None or it.out_s is None else now - it.out_s

    def state(self, number: int) -> dict[str, Any]:
        """For `headwater fleet`."""
        it = self._watched.get(number)
        if it is None:
            return {}
        return {"health": it.breaker.state.value, "outages": it.breaker.opened, "signals": it.signalled}

    # ---- one instance after the other

    def _joined(self, number: int) -> None:
        it = self._watched[number] = _Watched(number)
        # At once, but not all at the same moment.
        self._later(it, self._every_s * self._draw.random() / 10)

    def _left(self, number: int) -> None:
        it = self._watched.pop(number, None)
        if it is not None:
            it.round += 1
            it.gone = True
            if it.timer is not None:
                it.timer.cancel()
            if it.question is not None:
                it.question.stop()

    def _later(self, it: _Watched, delay_s: float) -> None:
        def due() -> None:
            it.timer = None
            self._due.append(it)
            self._pump()

        if it.timer is not None:
            it.timer.cancel()
        if not it.gone:
            it.timer = self._timers.call_later(delay_s, due)

    def _pump(self) -> None:
        while self._due and self._asking < self._together and not self._closed:
            it = self._due.popleft()
            if it.gone or it.question is not None:
                continue
            now = self._timers.time()
            if it.breaker.allows(now):
                self._ask(it, "/health", self._heard_health)
            else:
                self._later(it, max((it.breaker.next_probe_s or now) - now, 1e-3))

    def _ask(self, it: _Watched, path: str, heard: Callable[[_Watched, _Question], None]) -> None:
        self._asking += 1

        def done(question: _Question) -> None:
            self._asking -= 1
            it.question = None
            if not it.gone:
                heard(it, question)
            self._pump()

        question = it.question = _Question(it.round, self._timers, self._deadline_s, done)
        question.start(self._upstreams, self._roster, it.number, path)

    def _heard_health(self, it: _Watched, question: _Question) -> None:
        now = self._timers.time()
        it.heard = it.heard or (question.status is not None and question.status < 500)
        # Below 500: whoever has no such path is there.
        if question.status is None or question.status >= 500:
            it.breaker.failed(now, self._draw.random())
            if not it.is_well():
                self._out(it)
                return
        elif question.round == it.round:
            was_out = not it.is_well()
            it.breaker.succeeded(now)
            if was_out or it.out_s is not None:
                self._back(it, now)
            self._ask(it, "/metrics", self._heard_metrics)
            return
        self._rest(it)

    def _heard_metrics(self, it: _Watched, question: _Question) -> None:
        if question.status == 200 and question.round == it.round:
            it.signalled = True
            self._told(it.number, read_signals(bytes(question.body)), question.asked_s)
        else:
            it.signalled = False
        self._rest(it)

    def _rest(self, it: _Watched) -> None:
        now = self._timers.time()
        probe_s = it.breaker.next_probe_s
        if probe_s is None and it.out_s is not None:
            probe_s = now  # it is in doubt
        pause_s = self._every_s * (0.9 + 0.2 * self._draw.random()) if probe_s is None else probe_s - now
        self._later(it, max(pause_s, 1e-3))

    def _out(self, it: _Watched) -> None:
        now = self._timers.time()
        if it.out_s is None:
            it.out_s, it.back_s = now, None
            self._roster.instances()[it.number].alive = False
            self._changed(it.number, False)
        if it.question is None:
            self._rest(it)

    def _back(self, it: _Watched, now: float) -> None:
        if it.out_s is not None and now - it.out_s >= AWAY_S:
            it.back_s = now
        it.out_s = None
        self._roster.instances()[it.number].alive = True
        self._changed(it.number, True)


class _Watched:
    __slots__ = ("back_s", "breaker", "gone", "heard", "number", "out_s", "question", "round", "signalled", "timer")

    def __init__(self, number: int) -> None:
        self.number = number
        self.breaker = Breaker(failures=FAILURES)
        self.round = 0
        """Questions of an earlier round were asked before something happened."""
        self.out_s: float | None = None
        self.back_s: float | None = None
        self.signalled = False
        self.heard: bool | None = None
        """Whether it has ever said that it is well."""
        self.timer: Timer | None = None
        self.question: _Question | None = None
        self.gone = False

    def is_well(self) -> bool:
        return self.breaker.state is Health.WELL


class _Question:
    """One GET, its answer and its deadline; `done` is called once, with no status if nothing came of it."""

    quick = whole = None

    def __init__(self, round_: int, timers: Timers, deadline_s: float, done: Callable[[_Question], None]) -> None:
        self.round = round_
        self.status: int | None = None
        self.body = bytearray()
        self.asked_s = timers.time()
        self._done: Callable[[_Question], None] | None = done
        self._call: Call | None = None
        self._deadline_s = deadline_s
        self._timer = timers.call_later(deadline_s, self._late)

    def start(self, upstreams: Upstreams, roster: Roster, number: int, path: str) -> None:
        """Send it; it may be over when this returns."""
        headers = [(b"accept", b"text/plain"), *credentials(roster.spec(number))]
        origin = roster.origin(number)
        call = upstreams.call(origin, "GET", path, headers, b"", self, first_s=self._deadline_s)
        if self._done is None:
            call.abort()
        else:
            self._call = call

    def stop(self) -> None:
        """Nobody wants the answer any more."""
        self.status = None
        self._end(abort=True)

    def head(self, status: int, headers: Headers) -> None:
        """See `Sink`."""
        self.status = status

    def data(self, data: bytes) -> None:
        """See `Sink`."""
        if len(self.body) + len(data) > BYTES_MAX:
            self.status = None
            self._end(abort=True)
        elif self._done is not None:
            self.body += data

    def end(self) -> None:
        """See `Sink`."""
        self._end(abort=False)

    def lost(self, why: str, *, sent: bool) -> None:
        """See `Sink`."""
        self.status = None
        self._end(abort=False)

    def _late(self) -> None:
        self.status = None
        self._end(abort=True)

    def _end(self, *, abort: bool) -> None:
        done, self._done = self._done, None
        call, self._call = self._call, None
        if done is None:
            return
        self._timer.cancel()
        if abort and call is not None:
            call.abort()
        done(self)
