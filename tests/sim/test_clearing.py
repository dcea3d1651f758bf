"""Worlds in which somebody clears all the time, remotes are down, and nodes are killed: what was stored before a clear
is never seen again. Each mutant breaks one rule of it, and the simulator must notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headwater.core.levels import Level, Verb
from headwater.core.movement import Movement
from headwater.sim import world
from headwater.sim.faults import Faults, draw_faults
from headwater.sim.tiering import Parts
from headwater.sim.world import World
from headwater.types import Cleared
from tests.sim.test_mutants import Mutant

SEEDS = 150


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every world has clears, and tiers that do not answer while they happen."""

    def draw(rng: random.Random) -> Faults:
        return replace(
            draw_faults(rng), clears=0.4, restarts=0.1, tier_breaks=0.05, tier_sticks=0.05, tier_is_slow=0.1, strays=0.0
        )

    monkeypatch.setattr(world, "draw_faults", draw)


class ForgetsToClear(Movement):
    """A CLEAR that failed is not repeated."""

    def _cleared(self, level: Level, space: int, now: float, *, done: bool) -> None:
        super()._cleared(level, space, now, done=True)


class ReadsWhileClearing(Level):
    """A REMOTE tier is used as if it had deleted already."""

    @property
    def clearing(self) -> dict[int, None]:
        """Nothing, for whoever looks."""
        return Nothing(self._real)

    @clearing.setter
    def clearing(self, real: dict[int, None]) -> None:
        self._real = real


class Nothing(dict[int, None]):
    """What is to be cleared, which nobody finds in it."""

    def __init__(self, real: dict[int, None]) -> None:
        super().__init__(real)
        self._real = real

    def __contains__(self, space: object) -> bool:
        return False

    def setdefault(self, space: int, default: None = None) -> None:
        self._real.setdefault(space)

    def move_to_end(self, space: int) -> None:
        """See `OrderedDict`."""

    def __delitem__(self, space: int) -> None:
        self._real.pop(space, None)


class ClearsTooEarly(Movement):
    """A CLEAR does not wait for the writes of that namespace that are under way."""

    def _go_on_clearing(self, level: Level, now: float) -> None:
        hidden = {number: move for number, move in self._moves.items() if move.command.verb is Verb.WRITE}
        self._moves = {number: move for number, move in self._moves.items() if number not in hidden}
        super()._go_on_clearing(level, now)
        self._moves |= hidden


class CommitsVoidMoves(Movement):
    """What was on its way when its namespace was cleared arrives."""

    def clear(self, space: int, now: float) -> Cleared:
        moves, self._moves = self._moves, {}
        self.host.void = self._ignored  # type: ignore[method-assign]
        cleared = super().clear(space, now)
        del self.host.void  # type: ignore[misc]
        self._moves = moves | self._moves
        return cleared

    @staticmethod
    def _ignored(ticket: int) -> None:
        """Nothing is void."""


class Unchanging(dict[int, int]):
    """Names that stay what they are."""

    def __setitem__(self, space: int, times: int) -> None:
        """Nothing changes."""


class KeepsNamesOnDisk(World):
    """What is cleared keeps its name on disk, and only the journal is told."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        if self.host.below.disk is not None:
            self.host.below.disk.retired = Unchanging()


MUTANTS: dict[str, Mutant] = {
    **{it.__name__: Mutant(Parts(movement=it)) for it in (ForgetsToClear, ClearsTooEarly, CommitsVoidMoves)},
    "ReadsWhileClearing": Mutant(Parts(level=ReadsWhileClearing)),
    "KeepsNamesOnDisk": Mutant(world_type=KeepsNamesOnDisk),
}


def levelled() -> Iterator[int]:
    """The seeds of worlds that have something below HOST."""
    return (seed for seed in range(SEEDS) if World(seed).plan.has_levels)


def test_what_was_cleared_is_never_seen_again() -> None:
    assert [said for seed in levelled() if (said := Mutant().play(seed))] == []


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    said = next((said for seed in levelled() if (said := MUTANTS[name].play(seed))), None)
    assert said, f"{name} went unnoticed for {SEEDS} seeds"
    print(said)
