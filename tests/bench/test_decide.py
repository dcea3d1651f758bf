"""Routing decisions as they are measured: what the fleet holds, and one duration a decision."""

from __future__ import annotations

from headwater.bench.decide import chain_keys, decide_samples, filled_index
from headwater.fleet import Place
from headwater.types import Tier


def test_every_instance_holds_something_of_every_prompt() -> None:
    index, chains = filled_index(workers=20, blocks=64, chain_blocks=16)
    assert chains == 8
    held = index.find(chain_keys(0, 16))
    assert held == {Place(Tier.DEVICE, number): 16 if number < 10 else 2 for number in range(20)}


def test_one_duration_a_decision() -> None:
    samples = decide_samples(workers=4, blocks=64, prompt_tokens=256, calls=20)
    assert len(samples) == 20 and min(samples) > 0
