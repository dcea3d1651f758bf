"""What a node remembers of the directory's answers."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import locations
from headwater.core.locations import NOBODY_TTL_S, TTL_S, Locations
from headwater.types import Replica
from tests.core.directories import DISK, HOST, name

A, B, C = (Replica(it, HOST) for it in (1, 2, 3))
ONE, TWO = name(1), name(2)


def test_the_unknown_is_asked_for_in_order() -> None:
    assert Locations().find([TWO, ONE], 0) == ([None, None], [TWO, ONE])
    assert Locations().find([], 0) == ([], [])


def test_an_answer_is_good_for_a_while_and_then_used_but_asked_for() -> None:
    kept = Locations()
    kept.merge([ONE, TWO], [(A, B), (C,)], 10)
    assert kept.find([ONE, TWO], 10 + TTL_S - 0.01) == ([(A, B), (C,)], [])
    assert kept.find([ONE, TWO], 10 + TTL_S) == ([(A, B), (C,)], [ONE, TWO])
    assert kept.find([ONE], 1e6) == ([(A, B)], [ONE])
    kept.merge([ONE], [(B,)], 20)
    assert kept.find([ONE, TWO], 20) == ([(B,), (C,)], [TWO])


def test_nobody_is_good_for_less() -> None:
    kept = Locations()
    kept.merge([ONE], [()], 10)
    assert kept.find([ONE], 9.99 + NOBODY_TTL_S) == ([()], [])
    assert kept.find([ONE], 10.001 + NOBODY_TTL_S) == ([None], [ONE])
    kept.merge([ONE], [(A,)], 11)
    kept.merge([ONE], [()], 11.1)
    # A directory that has just begun anew knows nobody: the holder is tried, and asked for again soon.
    assert kept.find([ONE], 11.1) == ([(A,)], [])
    assert kept.find([ONE], 11.101 + NOBODY_TTL_S) == ([(A,)], [ONE])
    kept.missed(ONE, A.number, 11.2)
    kept.merge([ONE], [()], 11.2)
    assert kept.find([ONE], 11.2) == ([()], [])
    kept.merge([ONE], [(A,)], 11.25)
    assert kept.find([ONE], 11.3) == ([(A,)], [])


def test_a_directory_that_has_begun_anew_makes_no_holder_forgotten() -> None:
    """One that reads what it then holds itself announces that before the holder does."""
    kept = Locations()
    kept.merge([ONE, TWO], [(A, B), (B,)], 10)
    said = (C, Replica(B.number, DISK))
    kept.merge([ONE, TWO], [said, said], 11, anew=True)
    assert kept.find([ONE, TWO], 11)[0] == [(*said, A), said]
    kept.ended([A.number])
    kept.merge([ONE, TWO], [(C,), ()], 12, anew=True)
    assert kept.find([ONE, TWO], 12)[0] == [(C, Replica(B.number, DISK)), said]
    kept.merge([ONE], [(C,)], 13)
    assert kept.find([ONE], 13)[0] == [(C,)]


def test_a_miss_takes_out_one_holder_of_one_chunk() -> None:
    kept = Locations()
    kept.merge([ONE, TWO], [(A, Replica(1, DISK), B)] * 2, 0)
    kept.missed(ONE, 1, 0)
    kept.missed(ONE, 7, 0)
    kept.missed(name(9), 1, 0)
    assert kept.find([ONE, TWO], 0) == ([(B,), (A, Replica(1, DISK), B)], [])
    kept.missed(ONE, 2, 1)
    assert kept.find([ONE], 1) == ([()], [])
    assert kept.find([ONE], 1.001 + NOBODY_TTL_S) == ([None], [ONE])


def test_a_number_that_ended_is_in_no_answer() -> None:
    kept = Locations()
    kept.merge([ONE, TWO], [(A, B), (A,)], 0)
    kept.ended([1])
    assert kept.find([ONE, TWO], 0) == ([(B,), None], [TWO])
    # An answer that was under way when the member left.
    kept.merge([TWO], [(A, C)], 0)
    assert kept.find([TWO], 0) == ([(C,)], [])


def test_a_life_that_goes_on_under_another_number_is_found_by_it() -> None:
    kept = Locations()
    kept.merge([ONE, TWO], [(A, B), (Replica(11, HOST), A)], 0)
    kept.renumbered(1, 11)
    assert kept.find([ONE, TWO], 0) == ([(Replica(11, HOST), B), (Replica(11, HOST),)], [])
    kept.renumbered(11, 21)
    assert kept.find([ONE], 0) == ([(Replica(21, HOST), B)], [])
    kept.missed(ONE, 21, 0)
    assert kept.find([ONE], 0) == ([(B,)], [])
    kept.ended([21])
    assert kept.find([TWO], 0) == ([None], [TWO])


@pytest.mark.parametrize("pairs", [1, 4])
def test_what_is_used_stays_and_all_is_bounded(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "PAIRS", pairs)
    monkeypatch.setattr(locations, "PAIR_LEAST", 250)
    kept = Locations(limit=1000)
    kept.merge([ONE], [(A,)], 0)
    most = 0
    for start in range(100, 20_000, 100):
        many = [name(it) for it in range(start, start + 100)]
        kept.merge(many, [(A,)] * 100, 0)
        assert kept.find([ONE], 0)[0] == [(A,)]
        assert None not in kept.find(many, 0)[0]
        most = max(most, len(kept))
    assert 700 <= most <= 1000
    assert kept.find([name(100)], 0) == ([None], [name(100)])


def test_the_memory_of_nobody_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "NOBODY_LIMIT", 100)
    kept = Locations()
    kept.merge([ONE], [(A,)], 0)
    names = [name(it) for it in range(10, 500)]
    kept.merge(names, [()] * len(names), 0)
    found, ask = kept.find(names, 0)
    assert found[-100:] == [()] * 100
    assert len(ask) == len(names) - 100
    assert kept.find([ONE], 0) == ([(A,)], [])
    for at in range(60):
        kept.merge([name(1000 + at)], [()], 1 + at / 1000)
    assert "60 held by nobody" in repr(kept), "what is no longer good goes"


def test_fates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "FATES_LIMIT", 10)
    kept = Locations()
    kept.ended(range(100, 130))
    assert "10 numbers gone" in repr(kept)


def test_clear_forgets_everything() -> None:
    kept = Locations()
    kept.merge([ONE, TWO], [(A,), ()], 0)
    kept.clear()
    assert kept.find([ONE, TWO], 0) == ([None, None], [ONE, TWO])


def test_an_answer_costs_few_bytes() -> None:
    kept = Locations()
    rng = random.Random(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(120):
        names = [rng.randbytes(17) for _ in range(250)]
        kept.merge(names, [(A, B)] * 250, 0)
        del names
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert size / len(kept) < 170


Step = tuple[str, int, int]
steps = st.tuples(
    st.sampled_from(("merge", "nobody", "miss", "end", "renumber", "find")), st.integers(0, 5), st.integers(1, 4)
)


@given(st.lists(steps, max_size=40))
def test_it_never_names_who_is_gone(said: list[Step]) -> None:
    kept = Locations(limit=6)
    now, latest = 0.0, {it: it for it in range(1, 5)}
    for verb, what, who in said:
        now += 0.05
        number = latest[who]
        if verb == "merge":
            kept.merge([name(what)], [tuple(Replica(latest[it], HOST) for it in range(1, who + 1))], now)
        elif verb == "nobody":
            kept.merge([name(what)], [()], now)
            assert kept.find([name(what)], now) == ([()], [])
        elif verb == "miss":
            kept.missed(name(what), number, now)
            [found] = kept.find([name(what)], now)[0]
            assert number not in {it.number for it in found or ()}
        elif verb in ("end", "renumber"):
            latest[who] = number + 10
            kept.ended([number]) if verb == "end" else kept.renumbered(number, number + 10)
        found, ask = kept.find([name(it) for it in range(6)], now)
        for at, it in enumerate(found):
            assert {replica.number for replica in it or ()} <= set(latest.values())
            assert it is not None or name(at) in ask
        assert len(kept) <= 6
