"""Fetch or recompute: how long a prefix is worth bringing up from lower tiers, and how long to wait for it.

Theory of operation, one request:

    TierSpeed     what each batch of a tier took            -> seconds for the next one, with the bytes before it
    PrefillSpeed  what each step of an engine took          -> seconds for a prompt
    best_prefix   the chunks that lower tiers hold, in order -> Plan: how many of them, estimated times
    Patience      while they come: has the wait become a loss? then the rest is cut off and computed
    Calibration   what was estimated against what came

Estimates only choose; they are never trusted. Whatever a tier does after it was chosen, patience bounds the loss:
at most `share` of the time that computing the prompt would have taken, as far as the prefill rate is known.

Prefill is taken as linear in tokens. In truth a late token costs more than an early one, so that a long prefix is
worth a little more than is assumed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.15
"""The share of a new batch in a tier's estimate: a speed is forgotten after about seven batches."""
COLLAPSE_GAIN = 0.5
"""The share of a batch that took more than COLLAPSE times what was expected."""
COLLAPSE = 2.0
SURPRISE_LIMIT = 4.0
"""One batch counts as at most so many times what was expected: a hiccup moves an estimate by 2.5 at the most, a
collapse by any factor is believed after a few batches."""
RIDGE = 0.003
"""The spread of sizes (variance by squared mean) below which latency and bandwidth are not told apart."""
LEAST_SLOPE = 1 / 16
"""The least share of a batch's time that its bytes take: small batches say little of much larger ones."""
LEAST_EXPECTED_S = 1e-4
"""What is expected of a batch at the least, so that a first one from some cache does not make all others surprises."""
LONGEST_S = 1e6
LEAST_SLOPE_S = 1e-18
DISBELIEF = 0.93
"""What each declined fetch takes off an estimate: half after ten."""


def prefill_s(tokens: int, tokens_s: float | None) -> float | None:
    """The time to compute so many tokens; None where the rate is unknown."""
    if tokens_s is None or tokens_s <= 0:
        return None
    return max(tokens, 0) / tokens_s


class Line:
    """Seconds as a line over amounts, by exponentially weighted least squares (weighted mean, variance and covariance,
    updated as in D. H. D. West, 1979).

    The slope is drawn towards "no fixed part" where amounts hardly differ, and kept between 1/16 of the mean and the
    mean of seconds by amount, so that neither part is ever negative and no extrapolation is wild.
    """

    def __init__(self) -> None:
        self.count = 0
        self._amount = self._seconds = self._variance = self._covariance = 0.0

    def add(self, amount: int, seconds: float, gain: float) -> None:
        """Add one point, which counts `gain` against all before; the first ones are a plain mean."""
        gain = max(gain, 1 / (self.count + 1))
        more, more_seconds = amount - self._amount, min(seconds, LONGEST_S) - self._seconds
        self._amount += gain * more
        self._seconds += gain * more_seconds
        self._variance = (1 - gain) * (self._variance + gain * more * more)
        self._covariance = (1 - gain) * (self._covariance + gain * more * more_seconds)
        self.count += 1

    @property
    def measured(self) -> bool:
        """Whether any amount was seen, other than none."""
        return self._amount > 0

    @property
    def slope(self) -> float:
        """Seconds for one more; 0 if no amount was ever seen."""
        if not self.measured:
            return 0.0
        mean = self._seconds / self._amount
        ridge = RIDGE * self._amount * self._amount
        slope = (self._covariance + ridge * mean) / (self._variance + ridge)
        return min(max(slope, LEAST_SLOPE * mean), mean)

    def at(self, amount: float) -> float:
        """Seconds for an amount; only after a first point."""
        slope = self.slope
        return max(self._seconds - slope * self._amount, 0.0) + slope * amount


class TierSpeed:
    """Latency and bandwidth of one tier in one direction: seconds = latency + bytes / bandwidth.

    Worse news is believed quickly, better news slowly: a batch that took twice what was expected counts half, any
    other 15 %. Load is in the figures, as batches were measured under it.
    """

    def __init__(self, lanes: int = 1) -> None:
        """`lanes` is how many batches the tier serves at once: bytes queued before us are shared among them."""
        assert lanes > 0, f"lanes={lanes}"
        self._lanes = lanes
        self._line = Line()
        self._belief = 1.0

    def __repr__(self) -> str:
        if not self.batches:
            return "TierSpeed(never measured)"
        rate = f"{self.bytes_s / 1e6:.3g} MB/s" if self.bytes_s is not None else "rate unknown"
        return f"TierSpeed({(self.latency_s or 0.0) * 1e3:.3g} ms + {rate}, {self.batches} batches)"

    @property
    def batches(self) -> int:
        """How many were measured."""
        return self._line.count

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Add one batch, from its start to its end. One that was given up counts with the time it was given."""
        assert size_bytes >= 0 and seconds >= 0, f"{size_bytes=}, {seconds=}"
        expected = max(self._line.at(size_bytes), LEAST_EXPECTED_S) if self.batches else math.inf
        gain = COLLAPSE_GAIN if seconds > COLLAPSE * expected else GAIN
        self._line.add(size_bytes, min(seconds, SURPRISE_LIMIT * expected), gain)
        self._belief = 1.0

    def declined(self) -> None:
        """A fetch was left out because of this estimate: believe it a little less, so that a tier that was slow is
        tried again some time. The next batch says whether it still is."""
        self._belief *= DISBELIEF

    def seconds(self, size_bytes: int, queued_bytes: int = 0) -> float | None:
        """How long a batch would take behind `queued_bytes` of others; None if nothing was ever measured."""
        if not self.batches:
            return None
        return self._belief * self._line.at(size_bytes + queued_bytes / self._lanes)

    @property
    def latency_s(self) -> float | None:
        """The time of a batch of no bytes; None if nothing was ever measured."""
        return self._line.at(0) if self.batches else None

    @property
    def bytes_s(self) -> float | None:
        """The rate of a long batch; None if no bytes were ever measured."""
        return 1 / max(self._line.slope, LEAST_SLOPE_S) if self._line.measured else None


class PrefillSpeed:
    """How fast an engine computes prompts: seconds of a step = what any step takes + what its prompt tokens take.

    Better news is believed quickly, worse news slowly, the opposite of a tier: an engine taken for slower than it is
    makes requests wait too long for a cache, one taken for faster only makes them compute what could be fetched.
    """

    def __init__(self, step_tokens: int) -> None:
        """`step_tokens` is how many tokens the engine computes in one step at the most."""
        assert step_tokens > 0, f"step_tokens={step_tokens}"
        self._step_tokens = step_tokens
        self._line = Line()

    def __repr__(self) -> str:
        if not self.steps:
            return "PrefillSpeed(never measured)"
        return (
            f"PrefillSpeed({self._line.at(0) * 1e3:.3g} ms + {1 / self._line.slope:.4g} tokens/s, {self.steps} steps)"
        )

    @property
    def steps(self) -> int:
        """How many were measured."""
        return self._line.count

    def observe(self, tokens: int, seconds: float) -> None:
        """Add a step that computed so many prompt tokens, whatever else it computed."""
        assert tokens > 0 and seconds >= 0, f"{tokens=}, {seconds=}"
        expected = max(self._line.at(tokens), LEAST_EXPECTED_S) if self.steps else math.inf
        gain = COLLAPSE_GAIN if seconds * COLLAPSE < expected else GAIN
        self._line.add(tokens, min(max(seconds, LEAST_EXPECTED_S), COLLAPSE * expected), gain)

    def seconds(self, tokens: int) -> float | None:
        """The time to compute a prompt of so many tokens, step by step; None if nothing was ever measured."""
        if not self.steps:
            return None
        whole, rest = divmod(max(tokens, 0), self._step_tokens)
        return whole * self._line.at(self._step_tokens) + (self._line.at(rest) if rest else 0.0)


@dataclass(frozen=True, slots=True)
class Source:
    """A lower tier as one request sees it: its speed, and the bytes that wait there before the request's own."""

    speed: TierSpeed
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The next chunk of a prompt: its tokens, its bytes, and which source has it; None is HOST, where it is ready."""

    tokens: int
    size_bytes: int
    source: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How many leading steps to fetch, the estimated time until they are in HOST, and that of computing the rest.

    `guessed` says that some source was never measured, or the prefill rate is unknown: then the times are too short.
    `limited` says that more would be worth it, and would take too long.
    """

    steps: int
    fetch_s: float
    rest_s: float
    guessed: bool
    limited: bool = False

    @property
    def ttft_s(self) -> float:
        """The estimated time to the first token."""
        return self.fetch_s + self.rest_s


def best_prefix(
    steps: Sequence[Step],
    rest_tokens: int,
    tokens_s: float | None,
    sources: Sequence[Source],
    limit_s: float = math.inf,
) -> Plan:
    """The number of leading steps that minimises fetch + prefill of what is left, among those that take no longer than
    `limit_s` to fetch; the smallest if several do.

    Each source delivers its chunks in order, and all sources at the same time. `rest_tokens` follow the last step and
    are computed in any case. A source that was never measured is taken as free, and so is everything when the prefill
    rate is unknown: trying is how it becomes known, and patience bounds what it costs.
    """
    left = sum(step.tokens for step in steps) + rest_tokens
    all_s = prefill_s(left, tokens_s)
    best = 0, 0.0, all_s or 0.0, all_s is None
    least_s = math.inf if all_s is None else all_s
    sums = [0] * len(sources)
    fetch_s, guessed, limited = 0.0, all_s is None, False
    for count, step in enumerate(steps, 1):
        left -= step.tokens
        if step.source is not None:
            sums[step.source] += step.size_bytes
            took = _seconds(sources[step.source], sums[step.source])
            guessed |= took is None
            fetch_s = max(fetch_s, took or 0.0)
        rest_s = 0.0 if all_s is None else left / (tokens_s or 1.0)
        if all_s is None or fetch_s + rest_s < least_s:
            if fetch_s > limit_s:
                limited = True
            else:
                best, least_s = (count, fetch_s, rest_s, guessed), fetch_s + rest_s
    return Plan(*best, limited)


def _seconds(source: Source, size_bytes: int) -> float | None:
    return source.speed.seconds(size_bytes, source.queued_bytes)


class Patience:
    """How long one request may wait for chunks to arrive in HOST.

    With a known rate: debt = waited - prefill of what has arrived, and patience ends when the debt exceeds `share` of
    the prefill of everything. Since debt + prefill(total) = waited + prefill(rest), whoever asks every p seconds and
    computes the rest when it has ended starts decoding after at most (1 + share) * prefill(total) + p.

    With an unknown rate: it ends after `floor_s` in which nothing arrived. In both cases it ends at `limit_s`.
    `total_tokens` and `arrived_tokens` count from what HOST held at first, so that nobody waits on the credit of it.
    """

    def __init__(
        self,
        total_tokens: int,
        tokens_s: float | None,
        share: float = 0.10,
        floor_s: float = 0.1,
        limit_s: float = math.inf,
    ) -> None:
        self._total_s = prefill_s(total_tokens, tokens_s)
        self._tokens_s = tokens_s
        self._share, self._floor_s, self._limit_s = share, floor_s, limit_s
        self._arrived_tokens = 0
        self._progress_s = 0.0

    def expired(self, waited_s: float, arrived_tokens: int) -> bool:
        """Whether to cut off what has not arrived, `waited_s` after the request asked first."""
        return waited_s > self._end_s(waited_s, arrived_tokens)

    def remaining_s(self, waited_s: float, arrived_tokens: int) -> float:
        """How long until patience ends if nothing more arrives."""
        return max(self._end_s(waited_s, arrived_tokens) - waited_s, 0.0)

    def _end_s(self, waited_s: float, arrived_tokens: int) -> float:
        if arrived_tokens > self._arrived_tokens:
            self._arrived_tokens, self._progress_s = arrived_tokens, waited_s
        credit_s = prefill_s(arrived_tokens, self._tokens_s)
        if self._total_s is None or credit_s is None:
            return min(self._progress_s + self._floor_s, self._limit_s)
        return min(self._share * self._total_s + credit_s, self._limit_s)


class Calibration:
    """How far estimates were from outcomes: |estimated - actual| / actual, times below 1 ms counted as 1 ms."""

    def __init__(self) -> None:
        self.count = 0
        self.error = 0.0
        """The recent mean, each outcome counting at most 10; 0.2 means 20 % off."""
        self.bias = 0.0
        """The same with its sign: positive where estimates were too long."""
        self.worst = 0.0

    def __repr__(self) -> str:
        return (
            f"Calibration({self.error:.0%} off, bias {self.bias:+.0%}, worst {self.worst:.0%}, {self.count} outcomes)"
        )

    def add(self, estimated_s: float, actual_s: float) -> None:
        """Add one outcome."""
        assert estimated_s >= 0 and actual_s >= 0, f"{estimated_s=}, {actual_s=}"
        off = (estimated_s - actual_s) / max(actual_s, 1e-3)
        self.count += 1
        gain = 1 / self.count if self.count < 10 else 0.1
        by = abs(off)
        if by > self.worst:
            self.worst = by
        if by > 10.0:
            by, off = 10.0, 10.0 if off > 0 else -10.0
        self.error += gain * (by - self.error)
        self.bias += gain * (off - self.bias)
