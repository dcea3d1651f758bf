"""Why no instance can serve a request, or that one will in a moment."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headwater.conductor.earning import Health
from headwater.conductor.job import Job, Refusal
from headwater.fleet import Instance

GRACE_S = 1.0
"""Where nobody is alive, but somebody was just now, requests wait: most who are gone for a moment come back in it."""
GRACE_AGAIN_S = 0.1
RETRY_S = 1.0
"""When to come back to a fleet that has no room for any more, or nobody alive."""


def is_serving(it: Instance, model: str, excluded: Collection[int]) -> bool:
    """Whether it may be asked for this model by a request that was lost with the excluded ones."""
    return it.alive and not it.draining and it.model == model and it.number not in excluded


def refusal_of(
    job: Job,
    tokens: int,
    instances: Collection[Instance],
    excluded: Collection[int],
    health: Health | None,
    now: float,
) -> Refusal | None:
    """What to say to a request of so many tokens that was lost with the excluded ones; None: have it wait a little."""
    mine = [it for it in instances if it.model == job.parsed.model]
    serving = [it for it in mine if is_serving(it, it.model, excluded)]
    counted = job.tokenised is not None and job.tokenised.ids is not None
    if not mine:
        return Refusal(404, "model_not_found", "no instance serves this model")
    if counted and serving and max(it.capacity_tokens for it in serving) < tokens:
        return Refusal(400, "context_length_exceeded", "the prompt is longer than any instance's KV cache")
    if excluded or not _comes_back(mine, health, now):
        return Refusal(503, "no_instance", "no instance can serve it now", RETRY_S)
    return None


def _comes_back(mine: Sequence[Instance], health: Health | None, now: float) -> bool:
    if health is None or any(it.alive and not it.draining for it in mine):
        return False
    outs = [health.out_s(it.number, now) for it in mine if not it.draining]
    return any(out is not None and out < GRACE_S for out in outs)
