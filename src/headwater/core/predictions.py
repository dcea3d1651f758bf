"""How far predictions are from what happens, and how much longer than predicted to reckon with.

    predictions = Predictions()
    predictions.observe(Quantity.TTFT, instance=3, predicted=0.8, actual=1.1, now=clock)   # each outcome
    predictions.margin(Quantity.TTFT, 3, now=clock)          # 1.3: nine of ten take at most 1.3 times what is predicted
    predictions.calibration(Quantity.TTFT).bias              # -0.2: predictions are 20 % too short
    outputs = Outputs()
    outputs.observe("acme", "chat", 310)                     # each whole answer
    outputs.expected("acme", "chat", otherwise=256)          # tokens to reckon with for the next one

The margin is a high quantile of actual / predicted over the last outcomes: it heals bias and covers spread in one.
A window forgets, which streaming quantiles (P2) do not: what an engine did an hour ago says little of it now.
It may be below 1, where predictions are too long. Without outcomes it goes back to 1, bit by bit: a margin that keeps
everybody out would otherwise never hear that it is wrong.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from enum import StrEnum

from headwater.core.cost import Calibration

QUANTILE = 0.9
"""How many of the requests that are admitted at the very edge are to meet their SLO. The rest of the edge is lost work;
a higher one turns away more that would have met it."""
WINDOW = 64
"""Outcomes of one instance that count: the 0.9 quantile rests on its six worst."""
WINDOW_ALL = 256
AGE_S = 20.0
"""And none that is older: where a margin lets few in, its window would stay as it is for as long as it takes them."""
LEAST_COUNT = 16
"""From so many outcomes on, an instance is believed as much as the fleet, and the fleet as much as it can be: fewer
have no 0.9 quantile worth the name."""
MARGIN_LEAST, MARGIN_MOST = 0.25, 8.0
"""Estimates off by more are no estimates: a margin beyond would open the door to all, or shut it."""
QUIET_S = 10.0
"""Without outcomes for so long, belief begins to fade: a busy instance has several a second."""
HALF_S = 20.0
"""And is half gone after so much longer, before clients that were turned away for a minute come back."""
NAMES_MAX = 1024
OUTPUT_GAIN = 0.05
"""The share of a new answer in the expected length: lengths spread by about their mean, which is known to 16 % so."""
OUTPUT_WINDOW = 32
OUTPUT_DOUBT = 4
"""A guess that is given counts like so many answers."""


class Quantity(StrEnum):
    """What is predicted of a request."""

    TTFT = "ttft"
    TPOT = "tpot"


TTFT = Quantity.TTFT
FLOOR_S = {Quantity.TTFT: 0.02, Quantity.TPOT: 0.001}
"""Added to both before they are divided: 5 ms instead of 1 are off by a factor of 5, and no SLO cares."""


class Window:
    """The last so many numbers, not older than `age_s`, in order of size as well; 1 us an addition."""

    __slots__ = ("_age_s", "_last", "_size", "_sorted")

    def __init__(self, size: int, age_s: float = math.inf) -> None:
        assert size > 0, f"{size=}"
        self._size, self._age_s = size, age_s
        self._last: deque[tuple[float, float]] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def add(self, value: float, now: float = 0.0) -> list[float]:
        """Add one; the oldest leaves when there are too many, and all that are too old. What there is then, in order of
        size: only to be read, and until the next one."""
        last, ordered = self._last, self._sorted
        while last and (len(last) == self._size or last[0][0] < now - self._age_s):
            del ordered[bisect_left(ordered, last.popleft()[1])]
        last.append((now, value))
        insort(ordered, value)
        return ordered

    def quantile(self, share: float) -> float:
        """The least number that `share` of all do not exceed; only where there is one."""
        return self._sorted[max(math.ceil(share * len(self._sorted)) - 1, 0)]


class _Track:
    """One quantity of one instance, or of all."""

    __slots__ = ("calibration", "heard_s", "margin", "trust", "window")

    def __init__(self, size: int) -> None:
        self.window = Window(size, AGE_S)
        self.calibration = Calibration()
        self.margin = 1.0
        """The quantile itself, not blended."""
        self.trust = 0.0
        self.heard_s = 0.0


class _Tracks:
    """One quantity, of all and of each instance."""

    __slots__ = ("each", "every", "floor_s")

    def __init__(self, floor_s: float) -> None:
        self.every = _Track(WINDOW_ALL)
        self.each: dict[int, _Track] = {}
        self.floor_s = floor_s


class Predictions:
    """Predictions against outcomes, by instance and over all."""

    def __init__(self, quantile: float = QUANTILE) -> None:
        assert 0 < quantile <= 1, f"{quantile=}"
        self._ranks = [max(math.ceil(quantile * count) - 1, 0) for count in range(WINDOW_ALL + 1)]
        """Where the quantile of so many is, in order."""
        self._ttft, self._tpot = _Tracks(FLOOR_S[Quantity.TTFT]), _Tracks(FLOOR_S[Quantity.TPOT])

    def __repr__(self) -> str:
        return f"Predictions(ttft: {self._ttft.every.calibration!r}, tpot: {self._tpot.every.calibration!r})"

    def observe(
        self, quantity: Quantity, instance: int, predicted: float, actual: float, now: float, floor_s: float = 0.0
    ) -> None:
        """What was predicted, without margin, and what came; seconds. Differences well below `floor_s` do not count."""
        tracks = self._ttft if quantity is TTFT else self._tpot
        if floor_s < tracks.floor_s:
            floor_s = tracks.floor_s
        ratio = (actual + floor_s) / (predicted + floor_s)
        track = tracks.each.get(instance)
        if track is None:
            track = tracks.each[instance] = _Track(WINDOW)
        for it in (track, tracks.every):
            it.calibration.add(predicted, actual)
            ordered = it.window.add(ratio, now)
            count = len(ordered)
            it.heard_s = now
            it.margin = min(max(ordered[self._ranks[count]], MARGIN_LEAST), MARGIN_MOST)
            it.trust = count / LEAST_COUNT if count < LEAST_COUNT else 1.0

    def margin(self, quantity: Quantity, instance: int, now: float) -> float:
        """By how much to multiply a prediction to have it hold `quantile` of the times; 1 while nothing is known."""
        tracks = self._ttft if quantity is TTFT else self._tpot
        track = every = tracks.every
        more = (every.margin - 1.0) * every.trust
        own = tracks.each.get(instance)
        if own is not None:
            track = own
            more += (track.margin - 1.0 - more) * track.trust
        quiet_s = now - track.heard_s - QUIET_S
        return 1.0 + (more * 2.0 ** (-quiet_s / HALF_S) if quiet_s > 0 else more)

    def calibration(self, quantity: Quantity, instance: int | None = None) -> Calibration:
        """Relative error and bias of an instance's predictions, or of all."""
        tracks = self._tracks(quantity)
        track = tracks.every if instance is None else tracks.each.get(instance)
        return track.calibration if track is not None else Calibration()

    def left(self, instance: int) -> None:
        """Its number may be given to another."""
        self._ttft.each.pop(instance, None)
        self._tpot.each.pop(instance, None)

    def _tracks(self, quantity: Quantity) -> _Tracks:
        return self._ttft if quantity is Quantity.TTFT else self._tpot


class _Lengths:
    __slots__ = ("count", "mean", "window")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.window = Window(OUTPUT_WINDOW)

    def add(self, tokens: int) -> None:
        self.count += 1
        self.mean += max(OUTPUT_GAIN, 1 / self.count) * (tokens - self.mean)
        self.window.add(tokens)


class Outputs:
    """How long answers are, by tenant and kind of request (a name that the caller chooses; a model, an endpoint).

    Only whole answers are told, none that were cut off or cancelled. The longest unheard of are forgotten.
    """

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        assert names_max > 0, f"{names_max=}"
        self._max = names_max
        self._lengths: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()
        self._all = _Lengths()

    def __repr__(self) -> str:
        return f"Outputs({len(self._lengths)} names of at most {self._max}, {self._all.mean:.0f} tokens)"

    def __len__(self) -> int:
        return len(self._lengths)

    def observe(self, tenant: str, kind: str, tokens: int) -> None:
        """A whole answer came."""
        assert tokens >= 0, f"{tokens=}"
        lengths = self._lengths.get((tenant, kind))
        if lengths is None:
            if len(self._lengths) >= self._max:
                self._lengths.popitem(last=False)
            lengths = self._lengths[tenant, kind] = _Lengths()
        self._lengths.move_to_end((tenant, kind))
        lengths.add(tokens)
        self._all.add(tokens)

    def expected(self, tenant: str, kind: str, otherwise: float) -> float:
        """The mean length; drawn towards that of all, and that towards `otherwise`, where little is known."""
        every, lengths = self._all, self._lengths.get((tenant, kind))
        guess = otherwise + (every.mean - otherwise) * every.count / (every.count + OUTPUT_DOUBT)
        if lengths is None:
            return guess
        return guess + (lengths.mean - guess) * lengths.count / (lengths.count + OUTPUT_DOUBT)

    def longest(self, tenant: str, kind: str, otherwise: float, quantile: float = QUANTILE) -> float:
        """The length that so many answers do not exceed; `otherwise` until OUTPUT_DOUBT of them are known."""
        lengths = self._lengths.get((tenant, kind), self._all)
        return lengths.window.quantile(quantile) if lengths.count >= OUTPUT_DOUBT else otherwise
