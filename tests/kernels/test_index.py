"""The prefix index's table in C gives the same answers as the one of dicts, call by call."""

import gc
import random
import threading
import tracemalloc
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater._kernels import index
from headwater.core.keytable import TICKS, DictTable, KeyTable, MakeTable

WAYS: list[MakeTable] = [DictTable, *([index.make_table] if index.NATIVE else [])]
native = pytest.mark.skipif(not index.NATIVE, reason="built without a compiler")


def key(number: int, size: int = 16) -> bytes:
    return number.to_bytes(2, "little") * (size // 2)


def content(table: KeyTable, size: int = 16) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for shard in range(table.shards):
        keys, packed = table.content(shard)
        values = list(array("I", packed))
        assert values == sorted(values) and len(keys) == size * len(values)
        found |= {keys[size * at : size * (at + 1)]: value for at, value in enumerate(values)}
    return found


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[str, object, object]]:
    numbers = st.lists(st.integers(0, 60), max_size=40)
    steps = st.dictionaries(st.integers(0, 4), st.integers(0, 4), max_size=5)
    one = st.one_of(
        st.tuples(st.just("change"), numbers, steps),
        st.tuples(st.just("runs"), numbers, st.integers(0, 3)),
        st.tuples(st.just("sweep"), st.integers(0, 3), steps),
        st.tuples(st.just("span"), st.integers(0, 20), st.integers(0, 60)),
    )
    return draw(st.lists(one, max_size=40))


@native
@settings(max_examples=150, deadline=None)
@given(
    calls(),
    st.sampled_from([1, 4]),
    st.sampled_from([5, 30]),
    st.sampled_from([8, 16]),
    st.sampled_from([0, TICKS - 3]),
)
def test_same_answers(script: list[tuple[str, object, object]], shards: int, limit: int, size: int, start: int) -> None:
    tables = [make(shards, limit, size) for make in WAYS]
    for number, (verb, what, how) in enumerate(script):
        tick = (start + number // 2) % TICKS
        answers: list[object] = []
        for table in tables:
            if verb == "change":
                step = {old: how.get(old, old) for old in range(5)}  # type: ignore[attr-defined]
                answers.append(table.change([key(it, size) for it in what], step, tick))  # type: ignore[attr-defined]
            elif verb == "runs":
                answers.append(table.runs([key(it, size) for it in what], tick, how))  # type: ignore[attr-defined, arg-type]
            elif verb == "span":
                answers.append(table.runs([key(it, size) for it in range(what, how)], tick, 2))  # type: ignore[call-overload]
            elif what < shards:  # type: ignore[operator]
                step = {old: how.get(old, old) for old in range(5)}  # type: ignore[attr-defined]
                answers.append(table.sweep(what, step))  # type: ignore[arg-type]
        assert all(it == answers[0] for it in answers), (number, verb, answers)
        assert content(tables[0], size) == content(tables[1], size)
        assert len(tables[0]) == len(tables[1]) and tables[0].stamped == tables[1].stamped


@native
def test_many_keys_come_and_go() -> None:
    seed = 11
    print("seed", seed)
    draw = random.Random(seed)
    tables = [make(4, 3000, 16) for make in WAYS]
    known = [draw.randbytes(16) for _ in range(6000)]
    for tick in range(150):
        batch = draw.sample(known, 300)
        step = {0: draw.choice([0, 1, 2]), 1: draw.choice([0, 1, 2]), 2: draw.choice([0, 2])}
        answers = [table.change(batch, step, tick) for table in tables]
        assert answers[0] == answers[1], tick
        assert tables[0].runs(batch, tick, 5) == tables[1].runs(batch, tick, 5)
        assert tables[0].stamped == tables[1].stamped
    assert content(tables[0]) == content(tables[1])
    for shard in range(4):
        assert tables[0].sweep(shard, {1: 0, 2: 2}) == tables[1].sweep(shard, {1: 0, 2: 2})
    assert content(tables[0]) == content(tables[1]) != {}


@pytest.mark.parametrize("make", WAYS)
def test_forgets_what_was_met_least_recently(make: MakeTable) -> None:
    table = make(1, 16, 16)
    for number in range(16):
        table.change([key(number)], {0: 1}, number)
    assert table.runs([key(0)], 16, 3) == [(1, 1)]  # old, so it is met
    assert table.change([key(99)], {0: 7}, 17) == ({0: 1}, {1: 2})
    assert key(0) in content(table) and key(1) not in content(table) and key(2) not in content(table)
    assert len(table) == 15


@pytest.mark.parametrize("make", WAYS)
def test_a_jump_meets_nothing_and_a_walk_everything(make: MakeTable) -> None:
    table = make(1, 1000, 16)
    keys = [key(it) for it in range(40)]
    table.change(keys, {0: 1}, 0)
    table.change(keys[5:6], {1: 0}, 0)  # a hole that no jump looks at
    before = table.stamped
    assert table.runs(keys, 10, 10) == [(1, 40)] and table.stamped == before
    assert table.runs(keys, 11, 10) == [(1, 5)] and table.stamped == before + 5


@pytest.mark.parametrize("make", WAYS)
def test_ticks_wrap(make: MakeTable) -> None:
    table = make(1, 8, 16)
    for number in range(8):
        table.change([key(number)], {0: 1}, (TICKS - 4 + number) % TICKS)
    before = table.stamped
    assert table.runs([key(1)], 5, 8) == [(1, 1)] and table.stamped == before  # met 8 ticks ago
    assert table.runs([key(0)], 5, 8) == [(1, 1)] and table.stamped == before + 1  # met 9 ticks ago
    assert table.change([key(99)], {0: 1}, 6) == ({0: 1}, {1: 1})
    assert key(1) not in content(table) and key(0) in content(table)


@pytest.mark.parametrize("make", WAYS)
def test_refusals_change_nothing(make: MakeTable) -> None:
    table = make(2, 10, 16)
    with pytest.raises(ValueError, match="16 bytes"):
        table.change([key(1), b"short"], {0: 1}, 0)
    assert len(table) == 0
    with pytest.raises(KeyError):
        table.change([key(1)], {}, 0)
    for bad in (-1, 2):
        with pytest.raises(IndexError):
            table.sweep(bad, {})
        with pytest.raises(IndexError):
            table.content(bad)
    for shards, limit, size in ((3, 10, 16), (2048, 10, 16), (0, 10, 16), (1, 0, 16), (1, 10, 12)):
        with pytest.raises(ValueError, match="want"):
            make(shards, limit, size)


@native
def test_a_step_may_not_touch_the_table() -> None:
    table = index.make_table(1, 10, 16)

    class Meddler(dict[int, int]):
        def __missing__(self, old: int) -> int:
            table.change([key(2)], {0: 1}, 0)
            return 1

    with pytest.raises(RuntimeError, match="being changed"):
        table.change([key(1)], Meddler(), 0)
    with pytest.raises((OverflowError, ValueError)):
        table.change([key(1)], {0: -1}, 0)
    with pytest.raises((OverflowError, ValueError)):
        table.change([key(1)], {0: 1 << 32}, 0)
    assert table.change([key(1)], {0: 1}, 0) == ({0: 1}, {})


@native
def test_who_was_slow_to_say_its_keys_does_not_enter_meanwhile() -> None:
    table = index.make_table(1, 10, 16)
    listing, stepping = threading.Event(), threading.Event()

    def slow() -> Iterator[bytes]:
        listing.set()
        assert stepping.wait(10)
        yield key(2)

    class Slow(dict[int, int]):
        def __missing__(self, old: int) -> int:
            stepping.set()
            with pytest.raises(RuntimeError, match="being changed"):
                late.result(10)
            return 1

    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(table.change, slow(), {0: 1}, 0)  # type: ignore[arg-type]
        assert listing.wait(10)
        assert table.change([key(1)], Slow(), 0) == ({0: 1}, {})
    assert content(table) == {key(1): 1}


@native
@pytest.mark.parametrize("said", [-1, 0, (1 << 60) + 1])
def test_a_sequence_has_as_many_keys_as_it_has(said: int) -> None:
    class Liar(list[bytes]):
        def __len__(self) -> int:
            return said

    table = index.make_table(1, 1000, 16)
    keys = Liar(key(it) for it in range(500))
    assert table.change(keys, {0: 1}, 0) == ({0: 500}, {})
    assert table.runs(keys, 0, 0) == [(1, 500)]


@native
def test_nothing_leaks() -> None:
    draw = random.Random(3)
    keys = [draw.randbytes(16) for _ in range(4000)]

    def life() -> None:
        table = index.make_table(8, 300, 16)
        for tick, first in enumerate(range(0, 4000, 500)):
            table.change(keys[first : first + 500], {0: 1, 1: 2}, tick)
            table.runs(keys[first : first + 500], tick, 5)
            with pytest.raises(ValueError, match="bytes"):
                table.change([b"x"], {}, 0)
        for shard in range(8):
            table.content(shard)
            table.sweep(shard, {1: 0, 2: 0})

    life()
    gc.collect()
    tracemalloc.start()
    try:
        life()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            life()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 8192
    finally:
        tracemalloc.stop()
