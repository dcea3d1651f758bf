"""KV on its way between DEVICEs and the tiers below: fetched for a prompt, saved once it is computed or late.

Late is when a DEVICE is about to evict: an engine that shows its queue of free blocks lets what is next in it be
saved before it goes. So a chunk is written as soon as it leaves, if the writes before it are less than LATE_S behind;
where they are further behind, the chunk is gone before its turn comes, and lost. What comes before it in the prompt
leaves later, and is written with it if the tier has it not, for without that nobody could find it.
"""

from __future__ import annotations

from headwater.fleet import Choice, Place
from headwater.sim.fleet.clock import Clock
from headwater.sim.fleet.engine import Engine, Job
from headwater.sim.fleet.pool import Path
from headwater.sim.fleet.sight import Sight, Told
from headwater.sim.fleet.stage import Stage
from headwater.sim.fleet.stores import Store
from headwater.types import Tier

BELOW = (Tier.HOST, Tier.DISK, Tier.REMOTE)
LATE_S = 0.5
"""So far ahead of evictions KV is read out that is saved late: as long as a pass or two at full load take."""


class Saving:
    """What moves between the engines of a stage and its tiers."""

    def __init__(self, stage: Stage, clock: Clock, sight: Sight) -> None:
        self._stage, self._clock, self._sight = stage, clock, sight
        self._tiers = stage.tiers
        self._unit = stage.unit_tokens
        self._unit_bytes = stage.unit_tokens * stage.config.kv_bytes_per_token
        about = stage.config.tiers
        self.late = tuple(
            tier
            for tier in BELOW
            if self.stores(tier) and (it := getattr(about, tier.value)) is not None and it.saving == "evicted"
        )
        """The tiers that are written late."""

    def stores(self, tier: Tier) -> bool:
        """Whether there is such a tier."""
        return any(place.tier is tier for place in self._tiers.stores)

    def place(self, tier: Tier, node: int) -> Place:
        """Where a node's KV goes in a tier."""
        return Place(tier, 0 if tier is Tier.REMOTE else node)

    def fetch(self, job: Job, choice: Choice) -> float:
        """Bring what the choice wants from its source, as far as it is still there; when it has come."""
        source, cached = choice.source, choice.cached_tokens
        store = self._tiers.stores.get(source) if source is not None else None
        if store is None or source is None:
            return 0.0
        path = self._stage.unit_paths[job.number]
        until = min(cached + choice.fetched_tokens, store.holds(path) * self._unit)
        if until <= cached:
            return 0.0
        size = self._stage.engines[choice.prefill].block_tokens
        job.fetch_from, job.fetched = cached // size, until // size
        size_bytes = (until - cached) * self._stage.config.kv_bytes_per_token
        return self._tiers.fetch(source, self._stage.nodes[choice.prefill], size_bytes, self._clock.now)

    def computed(self, job: Job, choice: Choice) -> None:
        """A prompt's KV is complete: it goes to the tiers that do not have it yet, and are not written late."""
        path = self._stage.unit_paths[job.number]
        total = sum(units for _, units in path)
        node = self._stage.nodes[choice.prefill]
        for tier in BELOW:
            place = self.place(tier, node)
            store = self._tiers.stores.get(place)
            if store is None or not total:
                continue
            store.used(path, job.found // self._unit)
            if tier in self.late:
                continue
            missing = total - store.holds(path)
            if missing:
                done_s = self._tiers.save(place, node, missing * self._unit_bytes, self._clock.now)
                self._clock.at(done_s, self._put, store, path, total)

    def evicted(self, engine: Engine, told: Told) -> None:
        """A DEVICE has given up blocks, or taken some."""
        each = self._unit // engine.block_tokens
        node = self._stage.nodes[engine.number]
        now = self._clock.now
        for run, before, after in told:
            units = before // each
            if units <= after // each:
                continue
            path = (*self._stage.tree.stem(run), (run, units))
            total = sum(count for _, count in path)
            for tier in self.late:
                place = self.place(tier, node)
                store = self._tiers.stores[place]
                missing = total - store.holds(path)
                if missing and self._tiers.save_wait_s(place, node, now) < LATE_S:
                    self._tiers.save(place, node, missing * self._unit_bytes, now)
                    self._put(store, path, total)

    def _put(self, store: Store, path: Path, total: int) -> None:
        store.put(path, total)
        if store.told:
            self._sight.tell(store.place, self._unit, store.told)
            store.told.clear()
