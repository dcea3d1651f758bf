"""From which length on fetching a prefix is quicker than computing it.

    fetch       latency + bytes of the prefix / rate
    recompute   prefill(prefix + 1) - prefill(1 after the prefix): what is saved. The last token of a prompt is always
                computed, and with it go the weights' reading and a step's fixed part, which fetching does not save.

Each length of whole chunks is compared, so that any number of changes is found, or none. Who wins at a length is who
takes less time for all of it; what a prefix that is fetched in part would cost is the router's question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headwater.plan.speed import Speed


@dataclass(frozen=True, slots=True)
class Change:
    """From `tokens` on, fetching wins or does not."""

    tokens: int
    fetching: bool


def saved_s(speed: Speed, tokens: int) -> float:
    """The prefill that a prefix of `tokens` tokens saves a request that has one token more."""
    return speed.prefill_s(tokens + 1) - speed.prefill_s(1, tokens)


def changes(
    lengths: Iterable[int], fetch_s: Callable[[int], float], compute_s: Callable[[int], float]
) -> tuple[Change, ...]:
    """Where the winner changes over growing lengths; the first entry is the shortest length's winner."""
    found: list[Change] = []
    for tokens in lengths:
        fetching = fetch_s(tokens) < compute_s(tokens)
        if not found or found[-1].fetching != fetching:
            found.append(Change(tokens, fetching))
    return tuple(found)


def least_fetch_bytes_s(
    prefix: int, hidden_size: int, gqa: float, width: float, flops_s: float, attention: float = 4, matrices: float = 22
) -> float:
    """The rate above which reuse of a prefix of `prefix` tokens pays: G * 2ds / (gqa * (a*p*d + b*d^2)).

    Qin et al., "Mooncake", FAST'25, section 3: a layer's prefill is a*n^2*d + b*n*d^2 operations and keeps 2*n*d*s/gqa
    bytes; a = 4 and b = 22 are their figures for Llama's layers; G is operations a second, not reduced by any mfu.
    """
    per_token = gqa * (attention * prefix * hidden_size + matrices * hidden_size**2)
    return flops_s * 2 * hidden_size * width / per_token
