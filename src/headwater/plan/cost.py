"""What a million tokens cost, with and without the cache.

    input    dollars a second of the instance * prefill seconds / input tokens: cached ones cost nothing to compute
    output   dollars a second of the instance * step(b) / b
    cache    dollars a second of the instance's tiers / input tokens a second

At the batch that `split` finds for instances that do both, and at its rate; idle time is in `busy`, the share of the
time that the instance works.
"""

from __future__ import annotations

from dataclasses import dataclass

MONTH_S = 730 * 3600.0
"""8,760 hours a year by twelve."""
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars. What is here by default is no price list: give your own."""

    gpu_hour: float = 2.5
    dram_gb_month: float = 0.25
    ssd_gb_month: float = 0.01


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars for a million tokens."""

    input: float
    output: float
    cache: float
    """Of input tokens, for the tiers."""

    def mixed(self, input_tokens: int, output_tokens: int) -> float:
        """For a million tokens of both kinds, as requests have them."""
        whole = (self.input + self.cache) * input_tokens + self.output * output_tokens
        return whole / (input_tokens + output_tokens)


def instance_dollars_s(prices: Prices, tp: int) -> float:
    """An instance's GPUs."""
    return prices.gpu_hour * tp / 3600


def tiers_dollars_s(prices: Prices, host_bytes: float, disk_bytes: float) -> float:
    """An instance's share of DRAM and SSD."""
    month = prices.dram_gb_month * host_bytes / GIGABYTE + prices.ssd_gb_month * disk_bytes / GIGABYTE
    return month / MONTH_S


def token_cost(
    dollars_s: float, tiers_s: float, input_tokens: int, prefill_s: float, step_s: float, batch: int, rate: float,
    busy: float,
) -> Cost:  # fmt: skip
    """`rate` is requests a second while the instance works."""
    million = 1e6 / busy
    return Cost(
        million * dollars_s * prefill_s / input_tokens,
        million * dollars_s * step_s / batch,
        million * tiers_s / (rate * input_tokens),
    )
