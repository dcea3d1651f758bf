"""The prefix index against a model that knows every key of every place, under events as they come from real fleets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater._kernels import index as kernels
from headwater.core import prefix
from headwater.core.keytable import DictTable, MakeTable
from headwater.core.prefix import PrefixIndex
from headwater.fleet import Place
from headwater.types import Tier

WAYS: list[MakeTable] = [DictTable, *([kernels.make_table] if kernels.NATIVE else [])]
PLACES = [Place(tier, number) for number in range(3) for tier in (Tier.DEVICE, Tier.HOST)]
A, B, C = PLACES[:3]


def chain(seed: int, count: int, size: int = 16) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(size) for _ in range(count)]


TRUNK = chain(1, 50)
CHAINS = [TRUNK, TRUNK[:20] + chain(2, 30), TRUNK[:33] + chain(3, 3), chain(4, 70)]


class Model:
    """What was said, key by key."""

    def __init__(self) -> None:
        self.held: dict[Place, set[bytes]] = {}

    def length(self, place: Place, keys: Sequence[bytes]) -> int:
        held = self.held.get(place, set())
        return next((at for at, key in enumerate(keys) if key not in held), len(keys))


def agree(index: PrefixIndex, model: Model) -> None:
    """The promise: exact for whom the keys of a chain are a prefix of it; else a claim may jump over holes, and ends
    at a key that is held before one that is not."""
    assert {place: n for place, n in index.counts().items() if n} == {it: len(k) for it, k in model.held.items() if k}
    for keys in CHAINS:
        found = index.find(keys)
        for place in PLACES:
            held, claimed = model.held.get(place, set()), found.get(place, 0)
            true = model.length(place, keys)
            if not any(key in held for key in keys[true:]):
                assert claimed == true, (place, claimed, true)
            assert claimed >= true
            assert claimed == 0 or keys[claimed - 1] in held
            assert claimed == len(keys) or keys[claimed] not in held
        assert list(found.values()) == sorted(found.values(), reverse=True) and 0 not in found.values()
        steps = index.steps(keys)
        assert {place: n for n, mask in steps for place in index.places(mask)} == found
        assert [n for n, _ in steps] == sorted({n for n, _ in steps}, reverse=True)


slices = st.tuples(st.integers(0, len(CHAINS) - 1), st.integers(0, 70), st.integers(0, 70))
events = st.lists(
    st.tuples(
        st.sampled_from(["stored", "stored", "prefix", "removed", "tail", "cleared", "gone", "again", "fill", "tidy"]),
        st.integers(0, len(PLACES) - 1),
        slices,
    ),
    max_size=60,
)


def play(index: PrefixIndex, model: Model, verb: str, place: Place, part: tuple[int, int, int]) -> None:
    keys = CHAINS[part[0]]
    low, high = min(part[1:]), max(part[1:])
    held = model.held.setdefault(place, set())
    if verb == "tidy":
        index.tidy()
    elif verb in ("cleared", "gone"):
        getattr(index, verb)(place)
        held.clear()
    elif verb in ("removed", "tail"):
        keys = keys[low:high] if verb == "removed" else keys[low:]
        index.removed(place, keys)
        held -= set(keys)
    elif verb == "fill":
        both = [place, PLACES[low % len(PLACES)]]
        index.fill(both, keys[:high])
        for it in both:
            model.held.setdefault(it, set()).update(keys[:high])
    else:
        keys = keys[:high] if verb == "prefix" else keys[low:high]
        if verb == "again":  # twice in one event, and in the wrong order
            keys = [*reversed(keys), *keys]
        index.stored(place, keys)
        held |= set(keys)


@settings(max_examples=100)
@given(events, st.sampled_from(WAYS))
def test_agrees_with_what_was_said(script: list[tuple[str, int, tuple[int, int, int]]], make: MakeTable) -> None:
    index, model = PrefixIndex(make_table=make), Model()
    for verb, place, part in script:
        play(index, model, verb, PLACES[place], part)
        agree(index, model)
    other = PrefixIndex(make_table=make)
    for places, keys in index.dump(batch=7):
        assert places and 0 < len(keys) <= 7
        other.fill(places, keys)
    agree(other, model)
    while index.tidy():
        pass
    agree(index, model)
    assert len(index) == len(other) == len(set().union(*model.held.values()))


@pytest.mark.parametrize("make", WAYS)
def test_long_lives_of_many_places(make: MakeTable) -> None:
    """Bits of places that are gone are used again, never while a key can still carry them; sets do not pile up."""
    seed = 5
    print("seed", seed)
    draw = random.Random(seed)
    index, model = PrefixIndex(make_table=make), Model()
    for _ in range(1500):
        verb = draw.choice(["stored", "prefix", "prefix", "tail", "gone", "cleared", "fill"])
        part = (draw.randrange(len(CHAINS)), draw.randrange(71), draw.randrange(71))
        play(index, model, verb, draw.choice(PLACES), part)
        agree(index, model)
    assert index.mask(PLACES).bit_length() <= 3 * len(PLACES)


@pytest.mark.parametrize("make", WAYS)
def test_bits_are_reused_only_after_the_sets_are_clean(make: MakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "CLEANED_SETS", 60)
    index = PrefixIndex(make_table=make)
    keys = chain(6, 40)
    for count in range(40):  # 40 sets
        index.stored(Place(Tier.DEVICE, 0), keys[: count + 1])
        index.stored(Place(Tier.DEVICE, count + 1), keys[: count + 1])
    gone = Place(Tier.DEVICE, 7)
    bit = index.mask([gone])
    index.gone(gone)
    assert index.find(keys).get(gone) is None and gone not in index.counts()
    for number in range(100, 120):
        index.stored(Place(Tier.DEVICE, number), keys[20:21])
        assert index.find(keys)[Place(Tier.DEVICE, 40)] == 40
        assert Place(Tier.DEVICE, number) not in index.find(keys)  # it holds no first block, whoever had its bit before
    assert bit & index.mask([Place(Tier.DEVICE, number) for number in range(100, 120)])


@pytest.mark.parametrize("make", WAYS)
def test_sets_that_no_key_has_are_dropped(make: MakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "IDLE_SETS", 16)
    monkeypatch.setattr(prefix, "KNOWN_STEPS", 64)
    draw = random.Random(8)
    index, model = PrefixIndex(make_table=make), Model()
    places = [Place(Tier.DEVICE, number) for number in range(16)]
    for _ in range(3000):
        place, key = draw.choice(places), [TRUNK[draw.randrange(10)]]
        held = model.held.setdefault(place, set())
        if draw.random() < 0.5:
            index.stored(place, key)
            held |= set(key)
        else:
            index.removed(place, key)
            held -= set(key)
        assert len(index._sets) <= 10 + 16 + 1
    assert index.counts() == {place: len(held) for place, held in model.held.items()}


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("size", [8, 16])
def test_memory_is_bounded_and_what_is_asked_for_stays(make: MakeTable, size: int) -> None:
    index = PrefixIndex(500, size, make)
    hot = chain(9, 60, size)
    index.stored(A, hot)
    for seed in range(100, 300):
        index.stored(B, chain(seed, 30, size))
        assert len(index) <= 500
        assert index.find(hot) == {A: 60}
    assert index.find(chain(299, 30, size)) == {B: 30} and index.find(chain(100, 30, size)) == {}
    assert index.forgotten == 200 * 30 + 60 - len(index)
    dumped = Counter(place for places, keys in index.dump() for place in places for _ in keys)
    assert index.counts() == dict(dumped) and dumped[A] == 60


@pytest.mark.parametrize("make", WAYS)
def test_a_hidden_hole_is_found_when_the_chain_is_walked(make: MakeTable) -> None:
    index = PrefixIndex(2000, make_table=make)
    index.stored(A, TRUNK)
    index.removed(A, TRUNK[5:9])
    assert index.find(TRUNK) == {A: 50}
    for seed in range(100, 120):
        index.stored(B, chain(seed, 40))
    assert index.find(TRUNK) == {A: 5}


@pytest.mark.parametrize("make", WAYS)
def test_what_a_place_that_is_gone_has_left_goes_too(make: MakeTable) -> None:
    index = PrefixIndex(make_table=make)
    index.stored(A, TRUNK)
    index.stored(B, CHAINS[3])
    index.gone(A)
    assert index.find(TRUNK) == {} and index.find(CHAINS[3]) == {B: 70}
    assert len(index) == 120
    while index.tidy():
        pass
    assert len(index) == 70 and index.counts() == {B: 70}


@pytest.mark.parametrize("make", WAYS)
def test_a_set_that_loses_a_place_is_the_set_of_the_others(make: MakeTable) -> None:
    index = PrefixIndex(make_table=make)
    index.fill([A, B], TRUNK)
    index.gone(B)
    index.tidy()
    index.stored(A, CHAINS[3])
    assert "held 120 times by 1 places in 1 sets" in repr(index)


def test_says_what_it_is() -> None:
    index = PrefixIndex(1000)
    index.stored(A, TRUNK)
    index.stored(B, TRUNK[:20])
    assert repr(index) == "PrefixIndex(50 of at most 1000 keys, held 70 times by 2 places in 2 sets, 0 forgotten)"
    assert index.places(index.mask([B, C])) == (B,)
    assert index.find([]) == {} and index.steps([]) == []
    index.removed(C, TRUNK)
    index.gone(C)
    index.stored(A, [])
    assert index.find(TRUNK) == {A: 50, B: 20}


def test_keys_of_another_size_are_refused() -> None:
    index = PrefixIndex(key_bytes=8)
    with pytest.raises(ValueError, match="8 bytes"):
        index.stored(A, TRUNK)
    assert len(index) == 0
