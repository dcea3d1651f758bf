"""How fast each instance is, learned from the requests that it served: step times in place of a measurement.

    rates = Rates(EngineTimes(...))                      # what to begin with
    rates.prefilled(3, "llama", tokens=900, context=0, seconds=0.11, now=clock)       # each first token
    rates.decoded(3, "llama", requests=4, kv_tokens=5000, seconds=0.021, now=clock)   # each answer, by token
    rates.times(3, "llama")                              # EngineTimes; the same object until they change

Theory of operation. The prior says what a request costs beyond the fixed part, x; what it took is y:

    y = fixed + k * x        the line's fixed and k become the instance's step times, k for all terms of the prior

The line is Siegel's repeated medians (Biometrika 1982): nearly half of all outcomes may be wrong without bending it,
because a prefix was cached after all, or for a pause. Where all prompts are of about one length no line can be told
from them, and where it fits worse than the prior times a factor, the factor is taken.

Only what began on an idle instance says how fast that is. An instance that is never idle, or of which nothing is known
yet, is judged by the rest, its queue counted as a part of the prompt: all of it but half of the first one's, of which
some was over. Whoever has too few outcomes of its own is taken as the middle one of its kind, which is a guess still.
The window is short, and emptied of what is older when the last outcomes all say that it changed: a neighbour that came
to share the machine is known after six requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from headwater.enginetimes import EngineTimes

USUAL = EngineTimes(0.02, 1e-4, decode_fixed_s=0.02, decode_request_s=3e-4, decode_kv_s=1e-8)
"""An engine of which nothing is known: a model of some billion weights on one accelerator, give or take a factor of 5.
Only what the times are to each other matters as long as nothing is learned."""
WINDOW = 16
"""Outcomes that count: more would take longer to forget, and cost more."""
LEAST = 3
"""So few make a median."""
CHANGED_ROW, CHANGED_BY = 6, 1.3
"""So many in a row that are all longer, or all shorter, than the fit by this factor: the instance has changed."""
SPREAD = 2.0
"""The longest of a window is so many times the shortest, or no line is drawn through them."""
QUIET_S = 10.0
"""An instance that was not idle for so long is judged by its busy times."""
K_LEAST, K_MOST = 1e-4, 1e4
FIXED_MOST_S = 60.0
TOKEN_LEAST_S, TOKEN_MOST_S = 1e-9, 10.0
SECONDS_LEAST, SECONDS_MOST = 1e-6, 3600.0
"""What is beyond was no step of an engine."""
SAME = 0.02
"""Changes below this are noise, and everybody keeps what was worked out with the old times."""


def median(values: Iterable[float]) -> float:
    """The middle one in order, or the mean of the two in the middle; there must be one."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Fit(NamedTuple):
    """y = fixed_s + k * x."""

    fixed_s: float
    k: float


class Line:
    """The last outcomes of one kind of one instance, and the line through them."""

    __slots__ = ("_fit", "_prior_fixed_s", "_row", "points")

    def __init__(self, prior_fixed_s: float) -> None:
        self._prior_fixed_s = prior_fixed_s
        self.points: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._fit: Fit | None = None
        self._row = 0
        """How many of the last outcomes were too long (positive) or too short (negative), without one between."""

    def add(self, x: float, y: float) -> None:
        """One more outcome; older ones go when it is the last that says that things have changed."""
        fit = self.fit()
        if fit is not None:
            share = y / max(fit.fixed_s + fit.k * x, SECONDS_LEAST)
            if share > CHANGED_BY:
                self._row = max(self._row, 0) + 1
            elif share < 1 / CHANGED_BY:
                self._row = min(self._row, 0) - 1
            else:
                self._row = 0
        self.points.append((x, y))
        self._fit = None
        if abs(self._row) >= CHANGED_ROW:
            while len(self.points) > CHANGED_ROW:
                self.points.popleft()
            self._row = 0

    def fit(self) -> Fit | None:
        """The line, or None while there are too few points."""
        if self._fit is None and len(self.points) >= LEAST:
            self._fit = self._best()
        return self._fit

    def _best(self) -> Fit:
        factor = median(y / max(self._prior_fixed_s + x, SECONDS_LEAST) for x, y in self.points)
        scaled = Fit(self._prior_fixed_s * factor, factor)
        line = self._line()
        if line is None or self._error(scaled) <= self._error(line):
            line = scaled
        return Fit(min(max(line.fixed_s, 0.0), FIXED_MOST_S), min(max(line.k, K_LEAST), K_MOST))

    def _line(self) -> Fit | None:
        """Repeated medians; None where the points are too close together, or become less with more work."""
        least, most = min(x for x, _ in self.points), max(x for x, _ in self.points)
        if most < SPREAD * least or most <= 0:
            return None
        apart = (most - least) / WINDOW
        slopes = []
        for x, y in self.points:
            these = [(y - other_y) / (x - other_x) for other_x, other_y in self.points if abs(x - other_x) > apart]
            if these:
                slopes.append(median(these))
        k = median(slopes) if slopes else 0.0
        fixed_s = median(y - k * x for x, y in self.points)
        if fixed_s < 0:
            fixed_s, k = 0.0, median(y / x for x, y in self.points if x > 0)
        return Fit(fixed_s, k) if k > 0 else None

    def _error(self, fit: Fit) -> float:
        return median(abs(fit.fixed_s + fit.k * x - y) / y for x, y in self.points)


class _Learned:
    """One instance."""

    __slots__ = ("decode", "idle_s", "kind", "prefill", "times")

    def __init__(self, kind: str, prior: EngineTimes) -> None:
        self.kind = kind
        self.prefill = Line(prior.prefill_fixed_s)
        self.decode = Line(prior.decode_fixed_s)
        self.idle_s = -math.inf
        """When it was last found idle."""
        self.times = prior


class Rates:
    """Step times of all instances. Seconds; numbers of instances are the fleet's, kinds are names of models."""

    def __init__(self, prior: EngineTimes, *, measured: bool = False) -> None:
        """`prior` gives the shape, and the scale until something is known: a guess, or `measured` at these instances.
        None of its terms may be negative."""
        self.prior, self.measured = prior, measured
        self._instances: dict[int, _Learned] = {}
        self._kinds: dict[str, EngineTimes] = {}

    def __repr__(self) -> str:
        known = sum(it.prefill.fit() is not None for it in self._instances.values())
        return f"Rates({known} of {len(self._instances)} instances are known by their own requests)"

    def prefilled(
        self,
        instance: int,
        kind: str,
        tokens: int,
        context: int,
        seconds: float,
        now: float,
        queued_tokens: int = 0,
        queued_requests: int = 0,
    ) -> None:
        """A first token came `seconds` after its request was sent: so many tokens were computed after `context` cached
        ones, behind so many others that waited. What is no time is dropped."""
        if tokens <= 0 or not SECONDS_LEAST <= seconds <= SECONDS_MOST:
            return
        it, prior = self._of(instance, kind), self.prior
        steps: float = -(-tokens // prior.step_tokens)
        x = prior.prefill_s(tokens, context) - steps * prior.prefill_fixed_s
        if queued_tokens <= 0:
            it.idle_s = now
        elif now - it.idle_s <= QUIET_S and it.prefill.fit() is not None:
            return
        else:
            # Half of the first one's was over, as seen at any moment.
            requests = max(queued_requests, 1) - 0.5
            x += queued_tokens * prior.prefill_token_s * requests / (requests + 0.5)
            steps += requests
        it.prefill.add(max(x, 0.0) / steps, seconds / steps)

    def decoded(self, instance: int, kind: str, requests: int, kv_tokens: float, seconds: float) -> None:
        """An answer's tokens came every `seconds`, while so many requests with so much KV decoded there."""
        if requests <= 0 or not SECONDS_LEAST <= seconds <= SECONDS_MOST:
            return
        x = self.prior.decode_s(requests, kv_tokens) - self.prior.decode_fixed_s
        self._of(instance, kind).decode.add(max(x, 0.0), seconds)

    def times(self, instance: int, kind: str) -> EngineTimes:
        """Its step times, from its own requests, its kind's or the prior."""
        it = self._instances.get(instance)
        common = self._kinds.get(kind, self.prior)
        if it is None:
            return common
        prefill, decode = it.prefill.fit(), it.decode.fit()
        if prefill is None and decode is None:
            return common
        found = self._made(prefill or self._fit_of(common)[0], decode or self._fit_of(common)[1])
        if not _alike(found, it.times):
            it.times = found
            self._renew(kind)
        return it.times

    def known(self, instance: int) -> tuple[bool, bool]:
        """Whether its prefill, and its decoding, are known by requests of its own: what others of its kind have taught
        is only a better guess."""
        it = self._instances.get(instance)
        return (False, False) if it is None else (it.prefill.fit() is not None, it.decode.fit() is not None)

    def left(self, instance: int) -> None:
        """Its number may be given to another."""
        self._instances.pop(instance, None)

    def _of(self, instance: int, kind: str) -> _Learned:
        it = self._instances.get(instance)
        if it is None or it.kind != kind:
            it = self._instances[instance] = _Learned(kind, self.prior)
        return it

    def _renew(self, kind: str) -> None:
        """The middle instance of a kind, term by term, stands for those of which nothing is known."""
        mine = [it for it in self._instances.values() if it.kind == kind]
        prefill, decode = _middle(mine, lambda it: it.prefill), _middle(mine, lambda it: it.decode)
        common = self._kinds.get(kind, self.prior)
        found = self._made(prefill or self._fit_of(common)[0], decode or self._fit_of(common)[1])
        if not _alike(found, common):
            self._kinds[kind] = found

    def _made(self, prefill: Fit, decode: Fit) -> EngineTimes:
        prior, k = self.prior, prefill.k
        return replace(
            prior,
            prefill_fixed_s=prefill.fixed_s,
            prefill_token_s=min(max(prior.prefill_token_s * k, TOKEN_LEAST_S), TOKEN_MOST_S),
            prefill_token2_s=prior.prefill_token2_s * k,
            prefill_context_s=prior.prefill_context_s * k,
            decode_fixed_s=decode.fixed_s,
            decode_request_s=prior.decode_request_s * decode.k,
            decode_kv_s=prior.decode_kv_s * decode.k,
            decode_kv2_s=prior.decode_kv2_s * decode.k,
        )

    def _fit_of(self, times: EngineTimes) -> tuple[Fit, Fit]:
        """The lines that would make these times of the prior."""
        prior = self.prior
        k = times.prefill_token_s / prior.prefill_token_s
        decodes = [(times.decode_request_s, prior.decode_request_s), (times.decode_kv_s, prior.decode_kv_s)]
        decode_k = next((mine / theirs for mine, theirs in decodes if theirs > 0), 1.0)
        return Fit(times.prefill_fixed_s, k), Fit(times.decode_fixed_s, decode_k)


def _middle(instances: list[_Learned], line: Callable[[_Learned], Line]) -> Fit | None:
    fits = [fit for it in instances if (fit := line(it).fit()) is not None]
    if not fits:
        return None
    return Fit(median(it.fixed_s for it in fits), median(it.k for it in fits))


def _alike(one: EngineTimes, other: EngineTimes) -> bool:
    """Whether no term differs by enough to matter."""
    pairs = (
        (one.prefill_fixed_s, other.prefill_fixed_s),
        (one.prefill_token_s, other.prefill_token_s),
        (one.decode_fixed_s, other.decode_fixed_s),
        (one.decode_request_s, other.decode_request_s),
        (one.decode_kv_s, other.decode_kv_s),
    )
    return all(abs(mine - theirs) <= SAME * max(mine, theirs) for mine, theirs in pairs)
