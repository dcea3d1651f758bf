"""Leaders count for those who came before they had ended, however late these are placed."""

from __future__ import annotations

from headwater.conductor.alike import LEADERS_MAX, LINGER_S, Alike
from headwater.fleet import Choice, Parts

KEYS = [bytes([it]) * 32 for it in range(64)]
TOKENS = 16 * len(KEYS)


def choice(number: int) -> Choice:
    return Choice(number, number, Parts(prefill_s=0.1))


def led(*numbers: int) -> Alike:
    alike = Alike()
    for number in numbers:
        alike.lead(f"r{number}", KEYS, TOKENS, choice(number))
    return alike


def test_who_came_before_the_end_follows_and_who_came_later_does_not() -> None:
    alike = led(0, 1)
    for number in (0, 1):
        alike.started(f"r{number}", 10.0)
    assert alike.places(KEYS, 16, TOKENS, 10.0 + LINGER_S / 2) == {0, 1}
    assert alike.places(KEYS, 16, TOKENS, 10.0 + LINGER_S) is None
    assert not len(alike)


def test_leaders_that_have_begun_make_room_for_others() -> None:
    alike = Alike()
    for number in range(LEADERS_MAX):
        alike.lead(f"r{number}", [number.to_bytes(32, "big")] * 64, TOKENS, choice(0))
    alike.lead("late", KEYS, TOKENS, choice(1))
    assert len(alike) == LEADERS_MAX and "late" not in alike._leaders
    alike.started("r7", 1.0)
    alike.lead("late", KEYS, TOKENS, choice(1))
    assert len(alike) == LEADERS_MAX and "late" in alike._leaders and "r7" not in alike._leaders
