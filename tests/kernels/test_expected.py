"""Expected keys in C and in Python: the same answers, call by call."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater._kernels import expected
from headwater._kernels.expected import Expected, PlainExpected

native = pytest.mark.skipif(not expected.NATIVE, reason="built without a compiler")
BOTH = pytest.mark.parametrize(
    "kind", [pytest.param(Expected, id="c", marks=native), pytest.param(PlainExpected, id="plain")]
)


def key(number: int) -> bytes:
    return number.to_bytes(2, "little") * 8


def keys(*numbers: int) -> list[bytes]:
    return [key(it) for it in numbers]


@BOTH
def test_what_two_expect_is_lost_with_the_second(kind: type[PlainExpected]) -> None:
    it = kind()
    assert it.expect(keys(1, 2, 3), 0, 10) == it.expect(keys(1, 2), 0, 10) == []
    assert len(it) == 3
    assert it.unexpect(keys(1, 2, 3)) == keys(3)
    assert it.unexpect(keys(1, 2, 9)) == keys(1, 2)
    assert (it.unexpect(keys(1)), len(it)) == ([], 0)


@BOTH
def test_what_is_held_is_not_expected_but_by_whom_expects_it_already(kind: type[PlainExpected]) -> None:
    it = kind()
    it.expect(keys(2), 0, 10)
    it.expect(keys(1, 2, 3, 4), 3, 10)
    assert it.unexpect(keys(1, 2, 3, 4)) == keys(4)
    assert it.unexpect(keys(2)) == keys(2)


@BOTH
def test_the_oldest_go_first_and_ends_before_beginnings(kind: type[PlainExpected]) -> None:
    it = kind()
    it.expect(keys(1, 2), 0, 4)
    it.expect(keys(3, 4), 0, 4)
    assert it.expect(keys(1, 5), 0, 4) == keys(2)
    assert it.expect(keys(6, 7), 0, 4) == keys(4, 3)
    assert it.expect([], 0, 1) == keys(5, 1, 7)
    assert it.expect(keys(8, 9), 0, 0) == keys(6, 9, 8)


@BOTH
def test_what_is_known_of_otherwise_is_not_expected(kind: type[PlainExpected]) -> None:
    it = kind()
    it.expect(keys(1, 2, 3), 0, 9)
    it.expect(keys(1, 2, 3), 0, 9)
    it.discard(keys(2, 7))
    assert len(it) == 2
    assert it.unexpect(keys(1, 2, 3)) == []
    it.clear()
    assert len(it) == 0 and it.unexpect(keys(1)) == [] and it.expect(keys(1), 0, 1) == []


@BOTH
@pytest.mark.parametrize("bad", [b"", b"short", bytes(17), None, 5], ids=repr)
def test_what_is_no_key_is_refused_and_nothing_has_changed(kind: type[PlainExpected], bad: object) -> None:
    it = kind()
    it.expect(keys(1, 2), 0, 9)
    given_keys = [key(1), bad, key(3)]
    for call in (lambda: it.expect(given_keys, 0, 9), lambda: it.unexpect(given_keys), lambda: it.discard(given_keys)):  # type: ignore[arg-type]
        with pytest.raises((ValueError, TypeError)):
            call()
    assert it.unexpect(keys(1, 2, 3)) == keys(1, 2)


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[str, list[int], int, int]]:
    # Prompts share beginnings, and some have a key twice; few keys, so that all of them meet.
    numbers = st.one_of(
        st.lists(st.integers(0, 12), max_size=8), st.builds(lambda end: list(range(end)), st.integers(0, 20))
    )
    verbs = st.sampled_from(["expect", "expect", "expect", "unexpect", "discard", "clear"])
    return draw(st.lists(st.tuples(verbs, numbers, st.integers(0, 9), st.integers(0, 16)), max_size=40))


@native
@settings(max_examples=300, deadline=None)
@given(calls())
def test_same_answers(script: list[tuple[str, list[int], int, int]]) -> None:
    plain, fast = PlainExpected(), Expected()
    for verb, numbers, held, most in script:
        if verb == "expect":
            assert plain.expect(keys(*numbers), held, most) == fast.expect(keys(*numbers), held, most)
        elif verb == "unexpect":
            assert plain.unexpect(keys(*numbers)) == fast.unexpect(tuple(keys(*numbers)))
        elif verb == "discard":
            plain.discard(keys(*numbers))
            fast.discard(keys(*numbers))
        elif len(numbers) > 6:
            plain.clear()
            fast.clear()
        assert len(plain) == len(fast)
    assert plain.expect([], 0, 0) == fast.expect([], 0, 0)


@native
def test_many_keys_come_and_go() -> None:
    """Through several doublings of the array, with holes in it."""
    draw = random.Random(41)
    plain, fast = PlainExpected(), Expected()
    known = [draw.randbytes(16) for _ in range(9000)]
    for turn in range(400):
        most = 5000 if turn < 200 else 3000
        at, size = draw.randrange(len(known)), draw.randrange(200)
        batch = known[at : at + size]
        assert plain.expect(batch, size // 4, most) == fast.expect(batch, size // 4, most)
        if turn % 3 == 0:
            lost = draw.sample(known, 500)
            assert plain.unexpect(lost) == fast.unexpect(lost)
        if turn % 7 == 0:
            told = draw.sample(known, 100)
            plain.discard(told)
            fast.discard(told)
        assert len(plain) == len(fast)
    assert len(fast) > 2000
    assert plain.expect([], 0, 0) == fast.expect([], 0, 0)


@native
def test_nothing_is_left_behind() -> None:
    it = Expected()
    draw = random.Random(42)
    batches = [[draw.randbytes(16) for _ in range(500)] for _ in range(8)]
    gc.collect()
    tracemalloc.start()
    for _ in range(3):
        for batch in batches:
            it.expect(batch, 0, 1500)
            it.unexpect(batch[:100])
        for bad in (b"x", None):
            for call in (it.unexpect, it.discard):
                with pytest.raises((ValueError, TypeError)):
                    call([*batches[0], bad])  # type: ignore[list-item]
    it.clear()
    del call
    gc.collect()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 20_000
