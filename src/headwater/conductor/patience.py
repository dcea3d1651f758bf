"""How long the prefill instance of a pair may take until its decode instance computes the prompt itself; and who was
given up so lately that it gets no prompts.

Theory of operation. A prompt that is given up was computed for nothing, and under load everybody's would be: so the
limit is several times the estimate, the queue's part too, and some seconds more. It is for instances that take
requests and never answer; one that is merely slow teaches its speed, and estimates follow.

Who was given up is left out, for `PAUSE_S` at first. Then one request may try it again, which costs that client its
patience at worst; the others go on without, for twice as long each time, until an answer comes.
"""

from __future__ import annotations

from math import inf

from headwater.enginetimes import EngineTimes
from headwater.fleet import Parts

SPARE_S, FACTOR = 10.0, 4.0
TOKEN_S = 0.02
"""Of an instance whose speed nobody has learned, each token may take so long: a small CPU."""
PAUSE_S, PAUSE_MOST_S = 5.0, 60.0
SILENT = frozenset({"late", "silent"})
"""What the data path says of an instance that takes requests and does not answer."""


def patience_s(parts: Parts, times: EngineTimes, prior: EngineTimes, tokens: int) -> float:
    """Seconds from when a prompt is sent until it is given up. `tokens` has those that wait there before it; times
    like the `prior` were never learned."""
    learned = (times.prefill_token_s, times.prefill_fixed_s) != (prior.prefill_token_s, prior.prefill_fixed_s)
    expected_s = parts.queue_s + parts.prefill_s if learned else tokens * TOKEN_S
    return SPARE_S + FACTOR * (parts.fetch_s + expected_s)


class Tardy:
    """Who was given up lately, by number. Nobody, mostly: ask `left_out` first."""

    def __init__(self) -> None:
        self.left_out: dict[int, tuple[float, float]] = {}
        """Until when, and for how long the next time."""

    def __repr__(self) -> str:
        return f"Tardy({len(self.left_out)} left out)"

    def late(self, number: int, now: float) -> None:
        """It did not answer in time. What was sent to it before it was left out says nothing new."""
        until_s, pause_s = self.left_out.get(number, (-inf, PAUSE_S))
        if until_s < now:
            self.left_out[number] = now + pause_s, min(2 * pause_s, PAUSE_MOST_S)

    def sent(self, number: int, now: float) -> None:
        """A request tries it again, alone for now."""
        found = self.left_out.get(number)
        if found is not None and found[0] < now:
            self.left_out[number] = now + found[1], min(2 * found[1], PAUSE_MOST_S)

    def forget(self, number: int) -> None:
        """It has answered, or is gone."""
        self.left_out.pop(number, None)

    def now(self, now: float) -> set[int]:
        """Those that get nothing now."""
        return {number for number, (until_s, _) in self.left_out.items() if now <= until_s}
