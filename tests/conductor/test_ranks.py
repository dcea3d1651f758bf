"""Engines with several data-parallel ranks: which one gets a request, and that nothing is left of those that ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headwater.conductor.job import Lens
from headwater.conductor.ranks import HEADER, REQUEST_TOKENS, Ranks
from tests.conductor.engine import Gate, Script
from tests.conductor.relays import House, house, run


def ranks(*held: int) -> Ranks:
    def by_rank(number: int, lenses: Sequence[Lens]) -> Sequence[int]:
        return held

    return Ranks(by_rank)


@pytest.mark.parametrize(
    ("held", "rank"), [((), None), ((0, 0), None), ((96, 96), None), ((0, 16, 0), 1), ((64, 32), 0)], ids=str
)
def test_the_rank_that_holds_most_if_one_holds_more(held: tuple[int, ...], rank: int | None) -> None:
    it = ranks(*held)
    assert it.take(3, ()) == rank and len(it) == (rank is not None)
    if rank is not None:
        it.ended(3, rank)
    assert not len(it)


def test_unless_more_wait_there_than_that_saves() -> None:
    it = ranks(2 * REQUEST_TOKENS, 0)
    assert [it.take(0, ()) for _ in range(4)] == [0, 0, 0, None]
    assert it.take(1, ()) == 0, "another instance"
    it.ended(0, 0)
    assert it.take(0, ()) == 0


def named(it: House, at: int) -> list[str | None]:
    return [each.headers.get(HEADER.decode()) for each in it.engines[at].asked]


def test_the_engine_is_told_and_it_is_counted_to_the_end() -> None:
    async def test() -> None:
        async with house(3, spec={"ranks": 2}, prefill=0) as it:
            it.relay.ranks = counted = ranks(0, 4096)
            for script, stream in ((Script(), False), (Script(), True), (Script(close_at=2), True)):
                it.engines[1].script(script)
                client = it.ask(stream=stream, max_tokens=6)
                await client.ended()
            await it.settled()
            assert named(it, 0) == ["1"] * 3 and named(it, 1) == ["1"] * 3 and named(it, 2) == ["1"]
            assert not len(counted)

    run(test())


def test_a_client_that_leaves_is_counted_no_more() -> None:
    async def test() -> None:
        async with house(1, spec={"ranks": 2}) as it:
            it.relay.ranks = counted = ranks(0, 4096)
            it.engines[0].script(Script(gate=Gate(0)))
            client = it.ask(stream=True, max_tokens=6)
            async with asyncio.timeout(10):
                while not it.engines[0].running:
                    await asyncio.sleep(0)
            assert len(counted) == 1
            client.leave()
            await it.settled()
            assert not len(counted)

    run(test())


def test_nor_one_that_waits_for_another_instance() -> None:
    async def test() -> None:
        async with house(2, spec={"ranks": 2}) as it:
            it.relay.ranks = counted = ranks(0, 4096)
            it.brain.holds = True
            it.engines[0].script(Script(close_at=0))
            client = it.ask(stream=True, max_tokens=6)
            async with asyncio.timeout(10):
                while not it.brain.waiting:
                    await asyncio.sleep(0)
            assert not len(counted)
            it.brain.waiting[0][0](it.jobs[0], it.brain.targets[0])
            assert len(counted) == 1
            await client.ended()
            await it.settled()
            assert not len(counted)

    run(test())


def test_an_engine_with_one_rank_is_told_nothing_nor_is_what_a_client_says() -> None:
    async def test() -> None:
        async with house(1) as it:
            it.relay.ranks = ranks(0, 4096)
            await it.ask(headers=[(HEADER, b"7")], max_tokens=2).ended()
            await it.settled()
            assert named(it, 0) == [None]

    run(test())
