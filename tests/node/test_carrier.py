"""The threads of one level: every command ends once, whatever the tier does, and the last ones end with the node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from headwater.core.levels import Command, Part, Verb
from headwater.errors import UnavailableError
from headwater.node.carrier import ERROR_CHARS_MAX, Carrier, Ended, Ends, lanes
from headwater.ports import Piece
from headwater.tiers.host import MappedMemory, create_memory
from headwater.tiers.memory import MemoryTier
from headwater.types import ChunkKey, KVGroup, KVLayout, Origin, Outcome
from tests.node.conftest import eventually
from tests.node.peers import LAYOUT, SLOT_BYTES, keys, namespace

UNEVEN = KVLayout(16, (KVGroup(16, 5000, (1, 1)),))
"""Two shards of 5,000 bytes: each is followed by a gap up to the next page."""


def origin(layout: KVLayout = LAYOUT) -> Origin:
    return Origin(namespace(layout), layout, namespace(layout).root())


def command(number: int, verb: Verb, wanted: Sequence[ChunkKey] = (), size: int = SLOT_BYTES) -> Command:
    """A command about chunks whose slots lie one after another in HOST."""
    parts = tuple(Part(0, key, address=at * size) for at, key in enumerate(wanted))
    return Command(number, 0, verb, 0, parts, len(parts) * size, time.monotonic() + 5.0)


class Tier(MemoryTier):
    """A tier whose reads do as they are told, and which notes the writes that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[ChunkKey] = []
        self.instead: Callable[[], object] = time.monotonic
        self.is_closed = False

    def read(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        self.instead()
        return super().read(pieces, until_s)

    def write(self, pieces: Sequence[Piece], until_s: float) -> list[Outcome]:
        self.written += [it.identity.key for it in pieces]
        return super().write(pieces, until_s)

    def close(self) -> None:
        self.is_closed = True
        super().close()


class Rigged:
    """A carrier with one thread for reads, and what it has ended."""

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        self.memory: MappedMemory = create_memory(1 << 20, "memfd", lock=False)
        self.tier, self.woken, self.taken = Tier(), threading.Event(), list[Ended]()
        self.ends = Ends(self.woken.set)
        self.carrier = Carrier("tier", self.tier, lanes(1, 1), self.memory, lambda space: origin(layout), self.ends.add)

    def do(self, it: Command) -> object:
        """Carry it out and return what came of it."""
        self.carrier.order(it)
        eventually(self._has_ended)
        number, result = self.taken.pop()
        assert number == it.number
        return result

    def _has_ended(self) -> bool:
        self.taken += self.ends.take()
        return bool(self.taken)


@pytest.fixture
def rigged() -> Iterator[Rigged]:
    it = Rigged()
    yield it
    it.carrier.end()
    it.carrier.close(time.monotonic() + 5.0)
    it.memory.close()


def test_what_goes_down_comes_up(rigged: Rigged) -> None:
    wanted = keys(3)
    for at, key in enumerate(wanted):
        rigged.memory.array(at * SLOT_BYTES, SLOT_BYTES)[:] = key[0]
    assert rigged.do(command(1, Verb.WRITE, wanted)) == [Outcome.DONE] * 3
    assert rigged.do(command(2, Verb.HOLDS, [*wanted, *keys(1, "other")])) == [Outcome.DONE] * 3 + [Outcome.MISSING]
    rigged.memory.array(0, 3 * SLOT_BYTES)[:] = 0
    assert rigged.do(command(3, Verb.READ, [*wanted, *keys(1, "other")])) == [Outcome.DONE] * 3 + [Outcome.MISSING]
    for at, key in enumerate(wanted):
        assert (rigged.memory.array(at * SLOT_BYTES, SLOT_BYTES) == key[0]).all()
    assert rigged.do(command(4, Verb.DELETE, wanted[:1])) == [Outcome.DONE]
    assert rigged.do(command(5, Verb.HOLDS, wanted)) == [Outcome.MISSING, Outcome.DONE, Outcome.DONE]
    assert rigged.do(command(6, Verb.CLEAR)) == []
    assert rigged.do(command(7, Verb.HOLDS, wanted)) == [Outcome.MISSING] * 3


def test_what_another_node_wrote_is_not_written_again(rigged: Rigged) -> None:
    wanted = keys(4)
    rigged.do(command(1, Verb.WRITE, wanted[1:3]))
    rigged.tier.written.clear()
    assert rigged.do(command(2, Verb.WRITE, wanted)) == [Outcome.DONE] * 4
    assert rigged.tier.written == [wanted[0], wanted[3]]
    assert rigged.do(command(3, Verb.WRITE, wanted)) == [Outcome.DONE] * 4
    assert rigged.tier.written == [wanted[0], wanted[3]]


def test_what_no_shard_writes_goes_down_as_zeros() -> None:
    it = Rigged(UNEVEN)
    size = UNEVEN.slot_bytes(0)
    it.memory.array(0, size)[:] = 7
    it.do(command(1, Verb.WRITE, keys(1), size))
    it.memory.array(0, size)[:] = 9
    it.do(command(2, Verb.READ, keys(1), size))
    slot = it.memory.array(0, size)
    for shard in range(2):
        start = UNEVEN.part_offset(0, shard)
        assert (slot[start : start + 5000] == 7).all()
        assert not slot[start + 5000 : start + size // 2].any(), "another tenant's bytes may have been there"
    it.carrier.end()
    it.carrier.close(time.monotonic() + 5.0)
    del slot
    it.memory.close()


@pytest.mark.parametrize("error", [UnavailableError("it is away"), OSError(5, "Input/output error")])
def test_a_tier_that_fails_ends_the_command(rigged: Rigged, error: Exception) -> None:
    def fail() -> None:
        raise error

    rigged.tier.instead = fail
    assert rigged.do(command(1, Verb.READ, keys(2))) is None
    rigged.tier.instead = time.monotonic
    assert rigged.do(command(2, Verb.READ, keys(2))) == [Outcome.MISSING] * 2, "its thread goes on"


def test_a_bug_in_a_tier_ends_the_command_and_costs_no_thread(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda it: told.append(it.exc_type))

    def fail() -> None:
        raise ZeroDivisionError

    rigged.tier.instead = fail
    for number in range(3):
        assert rigged.do(command(number, Verb.READ, keys(2))) is None
    rigged.tier.instead = time.monotonic
    assert rigged.do(command(4, Verb.READ, keys(2))) == [Outcome.MISSING] * 2
    eventually(lambda: told == [ZeroDivisionError] * 3)


def test_a_crowd_of_failures_is_one_line_of_log(rigged: Rigged, caplog: pytest.LogCaptureFixture) -> None:
    rigged.tier.sick = True
    for number in range(20):
        assert rigged.do(command(number, Verb.HOLDS, keys(1))) is None
    assert [it.getMessage() for it in caplog.records] == ["tier: holds failed: the tier in memory was made sick"]


def test_the_end_drops_what_has_not_begun_and_leaves_behind_what_is_stuck() -> None:
    it, gate, begun = Rigged(), threading.Event(), threading.Event()

    def stick() -> None:
        begun.set()
        gate.wait(20.0)

    it.tier.instead = stick
    it.carrier.order(command(1, Verb.READ, keys(1)))
    it.carrier.order(command(2, Verb.READ, keys(1)))
    assert begun.wait(5.0)
    it.carrier.end()
    assert it.carrier.close(time.monotonic() + 0.05) is False
    assert not it.tier.is_closed, "somebody is in it"
    it.memory.close()
    gate.set()
    assert it.carrier.close(time.monotonic() + 5.0) is True
    assert it.tier.is_closed
    assert [number for number, _ in it.ends.take()] == [1], "its memory was gone by then"


def test_the_last_failure_is_kept_with_its_reason_and_without_credentials(rigged: Rigged) -> None:
    rigged.do(command(1, Verb.USAGE))
    assert rigged.carrier.last_error is None

    def fail(text: str) -> Callable[[], object]:
        def instead() -> object:
            raise UnavailableError(text)

        return instead

    for number, text in enumerate(("redis://me:s3cret@kv:1 is gone", "another" + "x" * 5000), 2):
        rigged.tier.instead = fail(text)
        began_s = time.monotonic()
        assert rigged.do(command(number, Verb.READ, keys(1))) is None
        assert rigged.carrier.last_error is not None
        at_s, reason = rigged.carrier.last_error
        assert began_s <= at_s <= time.monotonic()
        assert reason == f"read: {text}".replace("me:s3cret", "***")[:ERROR_CHARS_MAX]
