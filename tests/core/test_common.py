"""What requests have in common is counted once, and everything is given back when they end."""

from __future__ import annotations

import random

import pytest

from headwater.core.common import Common, alike

SEED = 7


def keys_of(*words: int) -> list[bytes]:
    """Keys of everything before them."""
    return [repr(words[: at + 1]).encode() for at in range(len(words))]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000])
def test_a_common_beginning_is_found(length: int) -> None:
    one = keys_of(*range(length))
    assert alike(one, one) == alike(one, [*one, b"x"]) == alike([*one, b"x", b"z"], [*one, b"y"]) == length


def test_what_others_begin_with_is_counted_once() -> None:
    common = Common()
    common.join("a", 3, keys_of(1, 2, 3, 4), 16)
    assert not common.tokens.get(3)
    common.join("b", 3, keys_of(1, 2, 3, 9), 16)
    common.join("c", 3, keys_of(1, 2, 3, 4), 16)
    common.join("d", 3, keys_of(7), 16)
    common.join("e", 4, keys_of(1, 2, 3, 4), 16)
    common.join("f", 3, [], 16)
    assert common.tokens == {3: 3 * 16 + 4 * 16}
    common.leave("b")
    assert common.tokens[3] == 4 * 16
    common.leave("a")
    assert common.tokens[3] == 0, "c is alone with it now"
    common.join("g", 3, keys_of(1, 2), 16)
    assert common.tokens[3] == 2 * 16
    common.left(3)
    common.leave("g")
    assert len(common) == 1 and not common.tokens.get(3)


def test_nothing_is_left_of_many() -> None:
    draw, common, there = random.Random(SEED), Common(), {}
    print(f"seed {SEED}")
    for number in range(3000):
        if there and draw.random() < 0.5:
            common.leave(there.pop(draw.choice(list(there))))
        else:
            words = [draw.randrange(2) for _ in range(draw.randrange(1, 6))]
            there[number] = f"r{number}"
            common.join(f"r{number}", draw.randrange(3), keys_of(*words), 16)
        assert all(it >= 0 for it in common.tokens.values())
    for name in there.values():
        common.leave(name)
    assert not len(common) and not any(common.tokens.values()) and not common._groups
