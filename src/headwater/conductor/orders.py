"""Orders to nodes: what a request needs is fetched to its node's HOST tier while it is on its way and in the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.conductor.asking import coarsest
from headwater.conductor.counts import Counts
from headwater.conductor.job import Job
from headwater.fleet import Choice, Instance
from headwater.types import Tier

ORDERS_S = 200.0
"""Orders a second, to all nodes: beyond that they have more to do than they can."""
Prefetch = Callable[[int, str, str, Sequence[bytes]], None]
"""A node, by its number, is to have these first chunks of a prompt (of a model, with a salt) in its HOST tier; it may
do so or not. Called in the loop."""


class Orders:
    """Gives them where fetching pays, as the policy found it."""

    def __init__(self, prefetch: Prefetch, counts: Counts) -> None:
        self._prefetch, self._counts = prefetch, counts
        self._credit, self._since_s = ORDERS_S, 0.0

    def sent(self, job: Job, choice: Choice, target: Instance, now: float) -> None:
        """A request was sent there. What its node's HOST tier has already, the engine fetches itself."""
        source, node = choice.source, target.node
        if source is None or node is None or source == (Tier.HOST, node):
            return
        self._credit = min(self._credit + max(now - self._since_s, 0.0) * ORDERS_S, ORDERS_S)
        self._since_s = now
        if self._credit < 1.0:
            self._counts.add("prefetches", "dropped")
            return
        lens = coarsest(job.lenses)
        # From the start on: a node cannot tell from a key what its chunk hangs on.
        keys = lens.keys[: (choice.cached_tokens + choice.fetched_tokens) // lens.tokens]
        if keys:
            self._credit -= 1.0
            self._counts.add("prefetches", "ordered")
            self._prefetch(node, job.parsed.model, job.salt, keys)
