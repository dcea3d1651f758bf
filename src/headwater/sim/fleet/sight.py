"""How Conductors know which place holds how much of a prompt: three ways, of the same answers where news take no time.

looks   each pool is asked when somebody asks for it: a few instances, or a policy that looks at few of them
table   changes go into a table of which places hold how much of each run: many instances
index   changes go, late, to the index of `core`, as they would in a real fleet
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from headwater._kernels.index import make_table
from headwater.core.prefix import PrefixIndex
from headwater.fleet import Held, Place
from headwater.sim.fleet.clock import Clock
from headwater.sim.fleet.stage import Stage
from headwater.sim.fleet.tree import KEY_BYTES
from headwater.types import Tier

LOOKED_AT = 16
"""Of so few instances, asking each takes less time than a table that is told of each change."""
INDEX_KEYS = 1 << 26
"""More than a trace has: the simulated index forgets nothing."""
DEVICE = Tier.DEVICE
Default = TypeVar("Default")
Told = Sequence[tuple[int, int, int]]
"""Runs, how many blocks of each were resident, and how many are."""


class Looked(Mapping[Place, int]):
    """What places hold of a prompt, asked for when somebody looks; of no use after that instant."""

    __slots__ = ("_all", "_number", "_sight")

    def __init__(self, sight: Sight, number: int) -> None:
        self._sight, self._number = sight, number
        self._all: dict[Place, int] | None = None

    def __repr__(self) -> str:
        return f"Looked({self.all()})"

    def all(self) -> dict[Place, int]:
        """Every place that holds something."""
        if self._all is None:
            self._all = self._sight.look(self._number)
        return self._all

    @overload
    def get(self, key: Place, /) -> int | None: ...

    @overload
    def get(self, key: Place, /, default: int | Default) -> int | Default: ...

    def get(self, key: Place, /, default: int | Default | None = None) -> int | Default | None:
        """Of one place."""
        if self._all is not None:
            return self._all.get(key, default)
        return self._sight.look_at(self._number, key) or default

    def __getitem__(self, key: Place) -> int:
        found = self.get(key, 0)
        if not found:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[Place]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def items(self) -> ItemsView[Place, int]:
        """See dict."""
        return self.all().items()


class Sight:
    """What is known of who holds what. `tells` says whether it is to be told of changes."""

    def __init__(self, stage: Stage, clock: Clock, needed: bool) -> None:
        """`needed`: whether the policy looks at more than the place that it chooses."""
        signals = stage.config.signals
        self._stage, self._clock = stage, clock
        self._unit = stage.unit_tokens
        self._runs = stage.tree.runs
        self._lag_s = signals.event_lag_s
        self._is_blind = signals.events != "live"
        is_late = signals.event_lag_s > 0
        self._looks = not self._is_blind and not is_late and (not needed or len(stage.engines) <= LOOKED_AT)
        self.tells = not self._is_blind and not self._looks
        self.index = PrefixIndex(INDEX_KEYS, KEY_BYTES, make_table) if is_late and self.tells else None
        self._lives: dict[Place, int] = {}
        """How often each instance has died."""
        self._table: list[dict[Place, int]] = []
        """For each run, the places that hold of it and how many tokens."""
        if self.tells and not is_late:
            self._table = [{} for _ in self._runs]
        self._seen = [
            (place, engine.pool.leading, stage.paths[engine.block_tokens], self._unit // engine.block_tokens)
            for place, engine in zip(stage.places, stage.engines, strict=True)
        ]
        self._stores = stage.tiers.stores
        if self.tells:
            for store in self._stores.values():
                store.told = []

    def held(self, number: int) -> Held:
        """How many leading tokens of a prompt each place holds, in whole units."""
        if self._looks:
            return Looked(self, number)
        if self.index is not None:
            found = self.index.find(self._stage.tree.prompts[number].all)
            return {place: units * self._unit for place, units in found.items()}
        if self._is_blind:
            return {}
        return self._look_up(number)

    def look(self, number: int) -> dict[Place, int]:
        """Ask every place."""
        unit = self._unit
        held = {}
        for place, leading, paths, each in self._seen:
            if found := leading(paths[number]) // each:
                held[place] = found * unit
        if self._stores:
            path = self._stage.unit_paths[number]
            for place, store in self._stores.items():
                if found := store.holds(path):
                    held[place] = found * unit
        return held

    def look_at(self, number: int, place: Place) -> int:
        """Ask one place."""
        if place[0] is DEVICE:
            _, leading, paths, each = self._seen[place[1]]
            return leading(paths[number]) // each * self._unit
        store = self._stores.get(place)
        return store.holds(self._stage.unit_paths[number]) * self._unit if store is not None else 0

    def _look_up(self, number: int) -> dict[Place, int]:
        """Follow the prompt's runs: who has all of one may have some of the next."""
        unit, table = self._unit, self._table
        held: dict[Place, int] = {}
        before = 0
        for run, units in self._stage.unit_paths[number]:
            here = table[run]
            whole = units * unit
            if before:
                going_on = False
                for place, tokens in here.items():
                    if held.get(place) == before:
                        held[place] = before + min(tokens, whole)
                        going_on = True
                if not going_on:
                    break
            elif units < len(self._runs[run]):
                held = {place: min(tokens, whole) for place, tokens in here.items()}
            else:
                held = here.copy()
            before += whole
        return held

    def tell(self, place: Place, block_tokens: int, told: Told) -> None:
        """Pass on what has changed in a place, now or as late as such news are."""
        each = self._unit // block_tokens
        if self.index is None:
            unit, table = self._unit, self._table
            for run, _, after in told:
                if tokens := after // each * unit:
                    table[run][place] = tokens
                else:
                    table[run].pop(place, None)
        elif news := self._news(each, told):
            life = self._lives.get(place, 0)
            self._clock.at(self._clock.now + self._lag_s, self._hear, place, life, news)

    def _news(self, each: int, told: Told) -> list[tuple[bool, list[bytes]]]:
        """The keys that were stored, those that were removed, and so on, in order."""
        runs = self._runs
        news: list[tuple[bool, list[bytes]]] = []
        for run, before, after in told:
            before, after = before // each, after // each
            if before == after:
                continue
            is_stored = before < after
            part = runs[run].all[before:after] if is_stored else runs[run].all[after:before]
            if news and news[-1][0] is is_stored:
                news[-1][1].extend(part)
            else:
                news.append((is_stored, list(part)))
        return news

    def _hear(self, place: Place, life: int, news: list[tuple[bool, list[bytes]]]) -> None:
        index = self.index
        assert index is not None
        if life != self._lives.get(place, 0):
            return  # it has died since it said so
        for is_stored, keys in news:
            if is_stored:
                index.stored(place, keys)
            else:
                index.removed(place, keys)

    def gone(self, place: Place, block_tokens: int, told: Told) -> None:
        """An instance died, which everybody knows at once; `told` is that it holds nothing any more."""
        if self.index is not None:
            self.index.gone(place)
            self._lives[place] = self._lives.get(place, 0) + 1
        elif self.tells:
            self.tell(place, block_tokens, told)
