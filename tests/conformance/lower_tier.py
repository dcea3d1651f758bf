"""What every LowerTier must do; subclass it with your own and let pytest collect the subclass.

class TestMine(LowerTierSuite):
    @pytest.fixture
    def tier(self) -> Iterator[LowerTier]:
        tier = Mine()
        yield tier
        tier.close()

A tier with slots of its own overrides `piece` to give each chunk a place.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from headwater.errors import UnavailableError
from headwater.ports import Bytes, LowerTier, Piece
from headwater.types import (
    PAGE_BYTES,
    ChunkKey,
    HitRule,
    Identity,
    KVGroup,
    KVLayout,
    Namespace,
    Origin,
    Outcome,
)

WITHIN_S = 20.0

# Slots of 1, 3, 131 and 384 pages: a state, odd counts, and what is stored in several parts.
LAYOUT = KVLayout(
    64,
    (
        KVGroup(16, 256, (1,), HitRule.LAST),
        KVGroup(16, 1024, (3,)),
        KVGroup(64, 131 * PAGE_BYTES, (1,), HitRule.WINDOW, 64),
        KVGroup(16, 96 << 10, (4,)),
    ),
)
NAMESPACE = Namespace("model", "bfloat16", "test", LAYOUT.fingerprint(), salt="secret")
ORIGIN = Origin.of(NAMESPACE, LAYOUT)


def soon(seconds: float = WITHIN_S) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def identity(number: int, group: int = 1, origin: Origin = ORIGIN) -> Identity:
    """A chunk with this number for its key."""
    parent = (number - 1).to_bytes(16, "little") if number else b""
    return Identity(origin, group, ChunkKey(number.to_bytes(16, "little")), parent)


def memory_of(it: Identity, seed: int | None = None) -> Bytes:
    """HOST memory for a chunk, filled from a seed; zeros without one."""
    room = np.zeros(it.length_bytes + PAGE_BYTES, np.uint8)
    start = -room.ctypes.data % PAGE_BYTES
    memory: Bytes = room[start : start + it.length_bytes]
    if seed is not None:
        memory[:] = np.random.default_rng([seed, it.group]).integers(0, 256, it.length_bytes, np.uint8)
    return memory


def others(it: Identity) -> dict[str, Identity]:
    """Chunks that differ from this one in one thing, and have its length."""
    namespace, layout = it.origin.namespace, it.origin.layout
    twin = replace(layout, groups=(*layout.groups, layout.groups[it.group]))
    widest = replace(layout.groups[it.group], channels=4)
    groups = (*layout.groups[: it.group], widest, *layout.groups[it.group + 1 :])
    return {
        "other weights": replace(it, origin=Origin.of(replace(namespace, model="other"), layout)),
        "other dtype": replace(it, origin=Origin.of(replace(namespace, kv_dtype="float16"), layout)),
        "other tenant": replace(it, origin=Origin.of(replace(namespace, tenant="other"), layout)),
        "other layout": replace(it, origin=Origin(namespace, replace(layout, groups=groups), it.origin.root)),
        "other key": replace(it, key=ChunkKey(bytes(reversed(it.key)))),
        "other group": replace(it, group=len(layout.groups), origin=Origin(namespace, twin, it.origin.root)),
    }


class LowerTierSuite:
    """The contract of `headwater.ports.LowerTier`."""

    TORN = Outcome.MISSING
    """What a read finds of a chunk that several threads write at a time, if not one of theirs whole."""

    @pytest.fixture
    def tier(self) -> Iterator[LowerTier]:
        """An empty tier, closed afterwards."""
        raise NotImplementedError

    def piece(self, tier: LowerTier, it: Identity, memory: Bytes) -> Piece:
        """A piece to give to the tier."""
        return Piece(it, memory)

    def write(self, tier: LowerTier, chunks: Sequence[Identity], seed: int = 1) -> list[Outcome]:
        return tier.write([self.piece(tier, it, memory_of(it, seed)) for it in chunks], soon())

    def read(self, tier: LowerTier, chunks: Sequence[Identity], seed: int = 1) -> list[Outcome]:
        """Outcomes of a read, none of which says DONE for other bytes than those of the seed."""
        pieces = [self.piece(tier, it, memory_of(it)) for it in chunks]
        outcomes = tier.read(pieces, soon())
        assert len(outcomes) == len(pieces)
        for it, outcome in zip(pieces, outcomes, strict=True):
            if outcome is Outcome.DONE:
                assert np.array_equal(it.memory, memory_of(it.identity, seed)), f"DONE, but other bytes: {it.identity}"
        return outcomes

    def test_what_was_written_is_read(self, tier: LowerTier) -> None:
        chunks = [identity(number, group) for number in range(5) for group in range(len(LAYOUT.groups))]
        assert tier.holds(chunks, soon()) == [False] * len(chunks)
        assert self.write(tier, chunks) == [Outcome.DONE] * len(chunks)
        assert tier.holds(chunks, soon()) == [True] * len(chunks)
        assert self.read(tier, chunks) == [Outcome.DONE] * len(chunks)
        assert self.read(tier, chunks[::-1]) == [Outcome.DONE] * len(chunks)

    def test_what_is_not_there_is_missing(self, tier: LowerTier) -> None:
        chunks = [identity(number) for number in range(6)]
        assert self.read(tier, chunks) == [Outcome.MISSING] * 6
        assert self.write(tier, chunks[::2]) == [Outcome.DONE] * 3
        assert tier.holds(chunks, soon()) == [True, False] * 3
        assert self.read(tier, chunks) == [Outcome.DONE, Outcome.MISSING] * 3

    def test_nothing_asked_is_nothing_done(self, tier: LowerTier) -> None:
        assert tier.holds([], soon()) == []
        assert tier.read([], soon()) == []
        assert tier.write([], soon()) == []
        tier.delete([], soon())

    def test_the_last_one_written_counts(self, tier: LowerTier) -> None:
        chunks = [identity(number, group) for number in range(2) for group in range(len(LAYOUT.groups))]
        for seed in (1, 2, 2, 3):
            assert self.write(tier, chunks, seed) == [Outcome.DONE] * len(chunks)
        assert self.read(tier, chunks, seed=3) == [Outcome.DONE] * len(chunks)

    @pytest.mark.parametrize("group", range(len(LAYOUT.groups)))
    def test_what_differs_in_anything_is_not_shared(self, tier: LowerTier, group: int) -> None:
        it = identity(7, group)
        assert self.write(tier, [it]) == [Outcome.DONE]
        for what, other in others(it).items():
            assert other.length_bytes == it.length_bytes
            assert self.read(tier, [other])[0] in (Outcome.MISSING, Outcome.FOREIGN), what
        assert self.read(tier, [it]) == [Outcome.DONE]

    def test_what_was_deleted_is_gone_and_may_be_deleted_again(self, tier: LowerTier) -> None:
        chunks = [identity(number, group) for number in range(3) for group in range(len(LAYOUT.groups))]
        self.write(tier, chunks)
        for _ in range(2):
            tier.delete(chunks[::2], soon())
            assert tier.holds(chunks, soon()) == [at % 2 == 1 for at in range(len(chunks))]
        assert self.read(tier, chunks) == [Outcome.MISSING, Outcome.DONE] * (len(chunks) // 2)
        assert self.write(tier, chunks[::2], seed=1) == [Outcome.DONE] * (len(chunks) // 2)
        assert self.read(tier, chunks) == [Outcome.DONE] * len(chunks)

    def test_a_namespace_is_cleared_and_no_other(self, tier: LowerTier) -> None:
        mine = [identity(number, group) for number in range(3) for group in (0, 3)]
        theirs = [replace(it, origin=others(it)["other tenant"].origin) for it in mine]
        assert tier.clear(ORIGIN, soon()) == 0
        self.write(tier, [*mine, *theirs])
        assert tier.clear(ORIGIN, soon()) == len(mine)
        assert tier.clear(ORIGIN, soon()) == 0
        assert tier.holds([*mine, *theirs], soon()) == [False] * len(mine) + [True] * len(theirs)
        assert self.read(tier, [*mine, *theirs]) == [Outcome.MISSING] * len(mine) + [Outcome.DONE] * len(theirs)

    def test_a_deadline_that_is_over_ends_every_call_at_once(self, tier: LowerTier) -> None:
        chunks = [identity(number) for number in range(4)]
        kept, late = chunks[:2], chunks[2:]
        self.write(tier, kept)
        begun_s = time.monotonic()
        for past in (begun_s - 1, begun_s, 0.0):
            with suppress(UnavailableError):
                assert not any(tier.holds(kept, past))
            with suppress(UnavailableError):
                pieces = [self.piece(tier, it, memory_of(it)) for it in kept]
                assert tier.read(pieces, past) == [Outcome.FAILED] * 2
            with suppress(UnavailableError):
                pieces = [self.piece(tier, it, memory_of(it, 1)) for it in late]
                assert tier.write(pieces, past) == [Outcome.FAILED] * 2
            with suppress(UnavailableError):
                tier.usage(past)
        assert time.monotonic() - begun_s < 1.0
        assert self.read(tier, chunks) == [Outcome.DONE] * 2 + [Outcome.MISSING] * 2

    def test_memory_beside_the_chunk_is_not_touched(self, tier: LowerTier) -> None:
        for group in range(len(LAYOUT.groups)):
            it = identity(1, group)
            wide = np.full(it.length_bytes + 2 * PAGE_BYTES, 0xA5, np.uint8)
            inner = wide[PAGE_BYTES:-PAGE_BYTES]
            inner[:] = memory_of(it, 1)
            piece = self.piece(tier, it, inner)
            assert tier.write([piece], soon()) == [Outcome.DONE]
            assert np.array_equal(inner, memory_of(it, 1)), "write changed what it stores"
            inner[:] = 0
            assert tier.read([piece], soon()) == [Outcome.DONE]
            assert np.array_equal(inner, memory_of(it, 1))
            assert (wide[:PAGE_BYTES] == 0xA5).all() and (wide[-PAGE_BYTES:] == 0xA5).all()

    def test_four_threads_do_not_disturb_each_other(self, tier: LowerTier, seed: int) -> None:
        def life(thread: int) -> int:
            rng = random.Random(seed + thread)
            mine: dict[int, int] = {}
            for step in range(30):
                number = thread * 100 + rng.randrange(8)
                it, at = identity(number, number % len(LAYOUT.groups)), thread * 1000 + step
                choice = rng.random()
                if choice < 0.4:
                    assert self.write(tier, [it], at) == [Outcome.DONE]
                    mine[number] = at
                elif choice < 0.9:
                    assert self.read(tier, [it], mine.get(number, 0)) == [
                        Outcome.DONE if number in mine else Outcome.MISSING
                    ]
                else:
                    tier.delete([it], soon())
                    mine.pop(number, None)
                assert tier.holds([it], soon()) == [number in mine]
            return len(mine)

        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(life, range(4))) > 0

    def test_one_chunk_written_by_four_threads_is_whole(self, tier: LowerTier) -> None:
        """Whoever wins; nobody ever reads a mixture, and what is found instead of a whole chunk is `TORN`."""
        it = identity(1, 3)
        right = {memory_of(it, writer).tobytes() for writer in range(4)}

        def life(writer: int) -> None:
            for _ in range(8):
                assert self.write(tier, [it], writer) == [Outcome.DONE]
                piece = self.piece(tier, it, memory_of(it))
                outcome = tier.read([piece], soon())[0]
                assert outcome in (Outcome.DONE, self.TORN)
                assert outcome is self.TORN or piece.memory.tobytes() in right

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(life, range(4)))
        assert self.write(tier, [it], 0) == [Outcome.DONE]
        assert self.read(tier, [it], 0) == [Outcome.DONE]

    def test_usage_is_known_or_said_to_be_unknown(self, tier: LowerTier) -> None:
        self.write(tier, [identity(1, 3)])
        usage = tier.usage(soon())
        for size in (usage.capacity_bytes, usage.used_bytes):
            assert size is None or size > 0
