"""Who asks what in a simulated world: models, instances, and prompts that share stems and grow by turns."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headwater.types import PAGE_BYTES, HitRule, KVGroup, KVLayout, Namespace

CHUNK_TOKENS = 4


def _group(rule: HitRule, pages: int, shards: int, window_tokens: int = 0) -> KVGroup:
    return KVGroup(CHUNK_TOKENS, pages * PAGE_BYTES, (1,) * shards, rule, window_tokens)


def layouts() -> dict[str, KVLayout]:
    """The kinds of models that can meet in one node; their slots have one to four pages."""
    full, window, last = HitRule.ALL, HitRule.WINDOW, HitRule.LAST
    return {
        "dense": KVLayout(CHUNK_TOKENS, (_group(full, 1, 1),)),
        "two ranks": KVLayout(CHUNK_TOKENS, (_group(full, 1, 2),)),
        "large": KVLayout(CHUNK_TOKENS, (_group(full, 4, 1),)),
        "latent": KVLayout(CHUNK_TOKENS, (_group(full, 3, 1),)),
        "window": KVLayout(CHUNK_TOKENS, (_group(full, 1, 2), _group(window, 1, 2, 6))),
        "state": KVLayout(CHUNK_TOKENS, (_group(last, 2, 1), _group(full, 1, 1))),
        "no full": KVLayout(CHUNK_TOKENS, (_group(window, 1, 1, 5), _group(last, 1, 1))),
    }


READERS = {"latent": 2}
"""Ranks that read KV which only one writes (a kind that is not named has a reader for each shard)."""


@dataclass(frozen=True, slots=True)
class Model:
    """What an instance serves: its cache identity, its layout and how many ranks run it."""

    kind: str
    namespace: Namespace
    layout: KVLayout
    ranks: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The fixed sizes of one world."""

    models: tuple[Model, ...]
    instances: tuple[Model, ...]
    slab_pages: int
    slabs: int
    requests: int
    rush_s: float
    """The longest time between two requests."""
    policy: str
    quotas: dict[str, int]
    """Slabs by tenant."""
    disk_slabs: int
    remotes: int
    remote_pages: int
    remotes_evict: bool
    admission: str
    latency_s: float
    bytes_s: float
    moving_pages: int
    batch_pages: int
    tokens_s: float | None
    """How fast the instances compute, as far as they say."""

    @property
    def has_levels(self) -> bool:
        """Whether there is anything below HOST."""
        return bool(self.disk_slabs or self.remotes)


def draw_plan(rng: random.Random) -> Plan:
    """One to two models, two to three instances, little memory, so that everything is contested."""
    levels = rng.random() < 0.5
    kinds = rng.sample(sorted(layouts()), rng.choice((1, 1, 1, 2) if levels else (1, 1, 2)))
    models = []
    shares = rng.random() < 0.4
    for kind in kinds:
        layout = layouts()[kind]
        tenant = f"tenant of {kind}" if shares else ""
        namespace = Namespace(kind, "bf16", "simulated", layout.fingerprint(), tenant=tenant)
        models.append(Model(kind, namespace, layout, READERS.get(kind, layout.shards)))
    instances = [models[0], models[0], *models[1:]]
    slabs = rng.randrange(2, 8)
    quotas = {models[0].namespace.tenant: rng.randrange(slabs)} if shares and rng.random() < 0.6 else {}
    return Plan(
        models=tuple(models),
        instances=tuple(instances),
        slab_pages=rng.choice((4, 8)),
        slabs=slabs,
        requests=rng.randrange(12, 26) if levels else rng.randrange(7, 18),
        rush_s=rng.choice((0.6, 1.2, 2.0) if levels else (0.2, 0.6, 1.2)),
        policy=rng.choice(("lru", "s3fifo")),
        quotas=quotas,
        disk_slabs=rng.choice((0, 1, 6, 30, 30)) if levels else 0,
        remotes=rng.choice((0, 0, 1, 1, 2)) if levels else 0,
        remote_pages=rng.choice((8, 60, 10_000)),
        remotes_evict=rng.random() < 0.5,
        admission=rng.choice(("all", "all", "all", "auto", "reused")),
        latency_s=rng.choice((0.0005, 0.003, 0.02)),
        bytes_s=rng.choice((1e6, 1e7, 1e9)),
        moving_pages=rng.choice((2, 8, 64)),
        batch_pages=rng.choice((1, 4, 16)),
        tokens_s=rng.choice((None, 10.0, 20.0, 100.0)),
    )


class Conversations:
    """Prompts of users: a few system prompts, dialogues that grow, and the odd unique one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._words = 100
        self._stems = [self._fresh(rng.randrange(5, 17)) for _ in range(2)]
        self._open: list[list[int]] = []

    def _fresh(self, count: int) -> list[int]:
        self._words += count
        return list(range(self._words - count, self._words))

    def prompt(self) -> list[int]:
        """The tokens of the next prompt."""
        rng = self._rng
        kind = rng.random()
        if self._open and kind < 0.35:
            return rng.choice(self._open) + self._fresh(rng.randrange(1, 7))
        if kind < 0.8:
            stem = rng.choice(self._stems)
            shared = len(stem) if rng.random() < 0.7 else rng.randrange(1, len(stem))
            return stem[:shared] + self._fresh(rng.randrange(1, 6))
        return self._fresh(rng.randrange(4, 21))

    def flood(self) -> list[int]:
        """The tokens of a long prompt that nobody shares."""
        return self._fresh(self._rng.randrange(24, 100))

    def answer(self) -> list[int]:
        """The tokens that a model generates."""
        return self._fresh(self._rng.randrange(0, 7))

    def remember(self, tokens: list[int]) -> None:
        """A dialogue that users may go on with."""
        self._open.append(tokens)
        if len(self._open) > 4:
            self._open.pop(0)
