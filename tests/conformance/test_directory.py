"""The directory of one process keeps the contract; that of a server does in `tests/directory`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwater.directory.memory import MemoryDirectory
from headwater.directory.open import open_directory
from headwater.errors import UnavailableError
from tests.conformance.directory import DirectorySuite, Elapse, beat, holders, joined, soon
from tests.core.directories import stored


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def elapse(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> Iterator[MemoryDirectory]:
    directory = MemoryDirectory(now=lambda: clock.now_s)
    yield directory
    directory.close()


class TestMemoryDirectory(DirectorySuite):
    @pytest.fixture
    def directory(self, memory: MemoryDirectory) -> MemoryDirectory:
        return memory

    @pytest.fixture
    def elapse(self, clock: Clock) -> Elapse:
        return clock.elapse


def test_a_sick_one_answers_nobody(memory: MemoryDirectory) -> None:
    [a] = joined(memory, "a")
    memory.sick = True
    with pytest.raises(UnavailableError, match="away"):
        beat(memory, a)
    memory.sick = False
    beat(memory, a)


def test_it_may_lose_everything(memory: MemoryDirectory) -> None:
    [a] = joined(memory, "a")
    memory.announce(a, 1, stored(1), soon())
    before = beat(memory, a)
    memory.forget_all()
    assert holders(memory, 1) == []
    [again] = joined(memory, "a")
    assert beat(memory, again).generation != before.generation


def test_a_sweep_drops_what_is_left(memory: MemoryDirectory) -> None:
    [a] = joined(memory, "a")
    memory.announce(a, 1, stored(*range(3000)), soon())
    assert memory.sweep(soon()) is False
    memory.leave(a, soon())
    assert len(memory.records) == 3000
    assert memory.sweep(soon()) is False
    assert len(memory.records) == 0


@pytest.mark.parametrize("url", ["", "memory"])
def test_without_a_server_it_is_this_process(url: str) -> None:
    assert isinstance(open_directory(url), MemoryDirectory)
