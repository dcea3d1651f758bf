"""Whether to give prefill and decode instances of their own, and how many each.

One kind of request: P seconds of prefill (what is not cached), m output tokens, a step of b requests takes step(b).

    together   a token waits for its step and for the prefills of its batch mates, so that
               tpot(b) = step(b) + b * P / m        rate(b) = b / (m * tpot(b)) = 1 / (P + m * step(b) / b)
    apart      prefill rate = busy / P     decode rate = b / (m * step(b))     tpot(b) = step(b)
               the hand-off is in TTFT, and its link allows bandwidth / bytes
    TTFT       P + hand-off + wait, wait = busy * P / (2 * (1 - busy)) (M/D/1), so that with s = SLO - P - hand-off
               busy <= 2 s / (P + 2 s); for both

Prefills go first, as engines do that care for TTFT. b is the largest that keeps tpot, a mean, within its SLO, fits in
KV memory and in the engine. The best ratio is P : D = decode rate : prefill rate; apart then serves
1 / (1 / prefill rate + 1 / decode rate) an instance, a fleet of whole instances a little less. Splitting pays if this
is more than together serves. DistServe (OSDI'24) and Splitwise (ISCA'24) argue alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.plan.speed import Speed


@dataclass(frozen=True, slots=True)
class Load:
    """The one kind of request, and its SLOs."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_slo_s: float
    """Without what fetching the cached tokens takes of it."""
    tpot_slo_s: float

    @property
    def mean_context(self) -> float:
        """Tokens of KV that a request has while it decodes, on average."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Split:
    """Requests a second of one instance each way; None where no batch or no load meets the SLOs."""

    prefill_s: float
    handoff_s: float
    together: float | None
    together_batch: int
    prefill: float | None
    decode: float | None
    decode_batch: int

    @property
    def apart(self) -> float | None:
        """An instance's share when the ratio is the best one."""
        if not self.prefill or not self.decode:
            return None
        return 1 / (1 / self.prefill + 1 / self.decode)

    @property
    def ratio(self) -> float | None:
        """Prefill instances for each decode instance."""
        return self.decode / self.prefill if self.prefill and self.decode else None

    def best_prefills(self, instances: int) -> int | None:
        """How many of a fleet's instances should prefill, so that the slower side is the fastest."""
        prefill, decode = self.prefill, self.decode
        if not prefill or not decode or instances < 2:
            return None
        return max(range(1, instances), key=lambda count: min(count * prefill, (instances - count) * decode))

    def fleet_apart(self, instances: int) -> float | None:
        """What a fleet serves with the best whole numbers of both."""
        prefills = self.best_prefills(instances)
        if not prefills or not self.prefill or not self.decode:
            return None
        return min(prefills * self.prefill, (instances - prefills) * self.decode)


def busy_share(prefill_s: float, spare_s: float) -> float:
    """How busy with prefills of `prefill_s` an instance may be so that they wait `spare_s` on average."""
    return 2 * spare_s / (prefill_s + 2 * spare_s) if spare_s > 0 else 0.0


def split(speed: Speed, load: Load, batch_max: int, handoff_s: float, handoff_rate: float) -> Split:
    """Both ways; `handoff_rate` is how many hand-offs a second a prefill instance's link carries."""
    prefill_s = speed.prefill_s(load.input_tokens - load.cached_tokens, load.cached_tokens)
    context, count, slo = load.mean_context, load.output_tokens, load.tpot_slo_s

    def step(batch: int) -> float:
        return speed.decode_s(batch, batch * context)

    mixed = _largest(batch_max, lambda batch: step(batch) + batch * prefill_s / count <= slo)
    alone = _largest(batch_max, lambda batch: step(batch) <= slo)
    together_busy = busy_share(prefill_s, load.ttft_slo_s - prefill_s)
    apart_busy = busy_share(prefill_s, load.ttft_slo_s - prefill_s - handoff_s)
    together = min(1 / (prefill_s + count * step(mixed) / mixed), together_busy / prefill_s) if mixed else 0.0
    return Split(
        prefill_s,
        handoff_s,
        together or None,
        mixed,
        min(apart_busy / prefill_s, handoff_rate) or None,
        alone / (count * step(alone)) if alone else None,
        alone,
    )


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest batch up to `most` of which something holds that, once it fails, fails for all larger ones; or 0."""
    low, high = 0, max(most, 0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
