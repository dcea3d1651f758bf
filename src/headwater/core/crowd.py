"""Who will decode on an instance at the time when a request gets there, and how fast.

Until then those who decode finish, at the rate that their expected lengths say, and those who are in prefill become
decoders. What prefill takes from them is taken as evenly spread: the prefill seconds that run during one answer, by its
tokens. Of those, the ones in line are known, and the ones that ran lately fade within the time of an answer.
"""

from __future__ import annotations

import math

from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Choice, Instance

LEAST_S = 1e-6
"""For engines whose decoding takes no time at all."""

Then = tuple[float, float, float, float, float]
"""An instance at the time when a request would start to decode there: TPOT; TPOT with what this one's prefill takes
from the others; tokens of KV, what is shared once; an answer's tokens, and its time, in which all but 1/e of those who
decode finish."""


class Crowd:
    """What we admitted to one instance and what has not ended."""

    __slots__ = (
        "chunk_s",
        "coming",
        "count",
        "life_s",
        "outputs",
        "ran_at_s",
        "ran_s",
        "slos",
        "started",
        "starts_s",
        "times",
    )

    def __init__(self) -> None:
        self.count = self.coming = self.started = 0
        self.outputs = 0.0
        self.starts_s = 0.0
        """The sum of the times at which those who are coming are predicted to start."""
        self.times: EngineTimes | None = None
        self.chunk_s = 0.0
        self.ran_s = self.ran_at_s = 0.0
        """Prefill seconds that ran here, fading."""
        self.life_s = 1.0
        """How long an answer takes, as of the last decision."""
        self.slos: dict[tuple[int, float], int] = {}
        """How many have this priority and TPOT SLO."""

    def ran(self, now: float) -> float:
        """The prefill seconds of about the last answer's time."""
        if now > self.ran_at_s:
            self.ran_s *= math.exp((self.ran_at_s - now) / self.life_s)
            self.ran_at_s = now
        return self.ran_s

    def add(self, output_tokens: int, start_s: float, slo: tuple[int, float] | None) -> None:
        """One was admitted, and is predicted to start then."""
        self.count += 1
        self.coming += 1
        self.outputs += output_tokens
        self.starts_s += start_s
        if slo is not None:
            self.slos[slo] = self.slos.get(slo, 0) + 1

    def start(self, start_s: float) -> None:
        """One decodes that was predicted to start at `start_s`."""
        self._arrive(start_s)
        self.started += 1

    def remove(self, output_tokens: int, start_s: float, slo: tuple[int, float] | None, *, started: bool) -> None:
        """One ended that was added so."""
        self.count -= 1
        self.outputs -= output_tokens
        if started:
            self.started -= 1
        else:
            self._arrive(start_s)
        if slo is not None:
            self.slos[slo] -= 1
            if not self.slos[slo]:
                del self.slos[slo]

    def _arrive(self, start_s: float) -> None:
        self.coming -= 1
        # Nothing is left of rounding when nobody is coming.
        self.starts_s = self.starts_s - start_s if self.coming else 0.0

    def tightest(self, priority: int) -> float:
        """The least TPOT SLO of those whom a request of this priority may not push over."""
        least = math.inf
        for other, slo_s in self.slos:
            if other >= priority and slo_s < least:
                least = slo_s
        return least

    def then(self, ask: Ask, choice: Choice, queue_s: float, ttft_s: float, now: float, it: Instance) -> Then:
        """The decode instance when this request's first token is there, were it admitted, after so long a queue."""
        running, kv_tokens, times = it.running_requests, it.running_tokens, it.times
        coming, mine = it.waiting_requests, self.coming
        if coming < mine:
            coming = mine
        answer = self.outputs / self.count if self.count else ask.output_tokens
        if answer < 1.0:
            answer = 1.0
        # Other Conductors' prefills are not known here, but their decoders are in the fleet's loads.
        spread_s = self.ran(now)
        if running > self.started > 0:
            spread_s *= running / self.started
        more_s = 0.0
        if choice.prefill == choice.decode:
            spread_s += queue_s
            more_s = choice.parts.prefill_s if running or coming else 0.0
        if times is not self.times:
            self.times, self.chunk_s = times, times.step_s(times.step_tokens)
        # A step has no more prefill than that.
        spread_s, more_s, chunk_s = spread_s / answer, more_s / answer, self.chunk_s
        if spread_s > chunk_s:
            spread_s = chunk_s
        if more_s > chunk_s:
            more_s = chunk_s
        step_s = times.decode_s(max(coming, running), kv_tokens) or choice.tpot_s
        life_s = self.life_s = answer * (step_s + spread_s) + LEAST_S
        decoders = running * math.exp(-ttft_s / life_s) if running else 0.0
        if coming:
            # Those before it start at all times until then, or when it was predicted of them, if they are ours.
            before_s = now + ttft_s - self.starts_s / mine if mine else ttft_s / 2
            if before_s > ttft_s:
                before_s = ttft_s
            decoders += coming * math.exp(-before_s / life_s) if before_s > 0 else coming
        own = ask.tokens + ask.output_tokens / 2
        tokens = (decoders * kv_tokens / running if running else decoders * ask.tokens) + own
        tpot_s = (times.decode_s(round(decoders) + 1, tokens) or choice.tpot_s) + spread_s
        if it.shared_tokens and running + coming:
            # It is read for each of them, but kept once.
            tokens = max(tokens - it.shared_tokens * decoders / (running + coming), own)
        return tpot_s, tpot_s + more_s, tokens, answer, life_s
