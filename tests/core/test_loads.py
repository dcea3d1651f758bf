"""The load book: our own requests, what other Conductors and engines say, and several books that share a fleet."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.loads import LoadBook, Published, Totals, evened
from headwater.core.rivals import LeastLoad
from headwater.fleet import Choice, Parts
from tests.core.fleets import ask_of, fleet_of, prefer


def test_a_request_from_beginning_to_end() -> None:
    book = LoadBook("a")
    book.routed(ask_of(1000, "r"), Choice(0, 1, Parts(), cached_tokens=200, fetched_tokens=300), 0.0)
    assert book.load(0, 0.0) == Totals(1, 500)
    book.progressed("r", 400, 0, 1.0)
    assert book.load(0, 1.0) == Totals(1, 100)
    book.prefilled("r", 2.0)
    assert (book.load(0, 2.0), book.load(1, 2.0)) == (Totals(), Totals(0, 0, 1, 1000))
    book.prefilled("r", 2.0)  # said twice
    book.progressed("r", 500, 7, 3.0)
    assert book.load(1, 3.0) == Totals(0, 0, 1, 1007)
    book.finished("r", 4.0)
    book.finished("r", 4.0)
    assert (book.load(0, 4.0), book.load(1, 4.0)) == (Totals(), Totals())


def test_routed_again_after_it_was_lost() -> None:
    book = LoadBook("a")
    for number in (0, 1):
        book.routed(ask_of(1000, "r"), prefer(number), 0.0)
    assert (book.load(0, 0.0), book.load(1, 0.0)) == (Totals(), Totals(1, 1000))


def test_an_instance_that_left_takes_all_with_it() -> None:
    book = LoadBook("a")
    book.routed(ask_of(1000, "waits"), Choice(0, 1, Parts()), 0.0)
    book.routed(ask_of(1000, "runs"), Choice(1, 0, Parts()), 0.0)
    book.prefilled("runs", 0.0)
    book.heard(Published("b", 1, {0: Totals(5, 5, 5, 5), 1: Totals(2)}), 0.0)
    book.told(0, 0.0, 50, 50, now=0.0)
    book.left(0)
    assert book.load(0, 0.0) == Totals()
    assert book.load(1, 0.0) == Totals(2)
    for name in ("waits", "runs"):
        book.finished(name, 1.0)  # late words of them change nothing
    assert book.load(0, 1.0) == Totals()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("rpxf"), st.integers(0, 4), st.integers(0, 900)), max_size=40))
def test_own_loads_are_the_sum_of_what_is_under_way(steps: list[tuple[str, int, int]]) -> None:
    book, now = LoadBook("a", history_s=1.0), 0.0
    under_way: dict[str, list[int]] = {}  # waiting, running
    for what, which, size in steps:
        now += 0.1
        name = f"r{which}"
        if what == "r":
            book.routed(ask_of(1000, name), prefer(which % 2), now)
            under_way[name] = [1000, 0]
        elif what == "p":
            book.prefilled(name, now)
            if name in under_way and not under_way[name][1]:
                under_way[name] = [0, 1000]
        elif what == "x":
            book.progressed(name, size, size, now)
            if name in under_way:
                waiting, running = under_way[name]
                under_way[name] = [0, 1000 + size] if running else [min(waiting, 1000 - size), 0]
        else:
            book.finished(name, now)
            under_way.pop(name, None)
        for number in (0, 1):
            there = [it for name, it in under_way.items() if int(name[1:]) % 2 == number]
            waiting, running = [it[0] for it in there if not it[1]], [it[1] for it in there if it[1]]
            expected = Totals(len(waiting), sum(waiting), len(running), sum(running))
            assert book.load(number, now) == expected
            assert book.publish().totals.get(number, Totals()) == expected


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("rrpxf"), st.integers(0, 4), st.integers(0, 4)), max_size=60))
def test_what_was_ours_at_a_moment_is_without_all_that_came_later(steps: list[tuple[str, int, int]]) -> None:
    """Changes are not kept in the order in which they reach an engine: what is routed takes a while, what ends none."""
    book, now = LoadBook("a", flight_s=0.1, history_s=1.0), 0.0
    for what, which, wait in steps:
        now += wait * 0.03
        name = f"r{which}"
        if what == "r":
            book.routed(ask_of(1000, name), prefer(0), now)
        elif what == "p":
            book.prefilled(name, now)
        elif what == "x":
            book.progressed(name, 100 * wait, wait, now)
        else:
            book.finished(name, now)
        for ago in range(-4, 20):
            then = now - ago * 0.03
            wanted = book.own(0)
            for when, *change in book._accounts[0].changes if 0 in book._accounts else ():
                if when > then:
                    wanted = wanted.plus(Totals(*change), -1)
            assert book.own_at(0, then) == wanted


# ---- other Conductors


def test_later_words_replace_earlier_ones() -> None:
    book = LoadBook("a", ttl_s=10.0)
    book.heard(Published("b", 2, {0: Totals(2, 200)}), 0.0)
    book.heard(Published("b", 2, {0: Totals(9, 900)}), 1.0)  # twice
    book.heard(Published("b", 1, {0: Totals(1, 100)}), 1.0)  # late
    book.heard(Published("a", 7, {0: Totals(7, 700)}), 1.0)  # ourselves
    assert book.load(0, 1.0) == Totals(2, 200)
    book.heard(Published("c", 1, {0: Totals(0, 0, 3, 300)}), 1.0)
    assert book.load(0, 1.0) == Totals(2, 200, 3, 300)
    book.heard(Published("b", 3, {1: Totals(1, 50)}), 2.0)  # what is not named is nothing
    assert (book.load(0, 2.0), book.load(1, 2.0)) == (Totals(0, 0, 3, 300), Totals(1, 50))


def test_who_says_bye_or_nothing_counts_no_more() -> None:
    book = LoadBook("a", ttl_s=10.0)
    for name in ("b", "c"):
        book.heard(Published(name, 1, {0: Totals(1, 100)}), 0.0)
    other = LoadBook("b")
    other.routed(ask_of(100), prefer(0), 0.0)
    late = other.publish()
    assert late == Published("b", 1, {0: Totals(1, 100)}, Totals(1, 100))
    book.heard(other.bye(), 1.0)
    book.heard(late, 2.0)
    assert book.load(0, 2.0) == Totals(1, 100)
    assert book.load(0, 9.9) == Totals(1, 100)
    assert book.load(0, 10.0) == Totals()


def test_filled_in_for_a_policy() -> None:
    book, fleet = LoadBook("a", ttl_s=10.0), fleet_of(2)
    book.routed(ask_of(100), prefer(0), 1.0)
    book.fill(fleet.instances, 1.0)
    it = fleet.instances[0]
    assert (it.waiting_requests, it.waiting_tokens, it.running_requests, it.running_tokens) == (1, 100, 0, 0)
    assert it.heard_s == 0.0
    book.heard(Published("b", 1, {1: Totals(4, 400, 2, 20)}), 2.0)
    book.told(0, 3.0, 1, 0, now=3.0)
    book.fill(fleet.instances, 3.0)
    other = fleet.instances[1]
    assert (other.waiting_requests, other.waiting_tokens, other.running_requests, other.running_tokens) == (
        4,
        400,
        2,
        20,
    )
    assert (it.heard_s, other.heard_s) == (3.0, 2.0)
    # Of whom nothing is heard any more, only our own are left.
    book.fill(fleet.instances, 13.0)
    assert (it.waiting_tokens, other.waiting_tokens, other.heard_s) == (100, 0, 2.0)


# ---- engines


def test_what_an_engine_says_corrects_drift() -> None:
    book = LoadBook("a", ttl_s=10.0, flight_s=0.1)
    book.routed(ask_of(1000, "lost without a word"), prefer(0), 0.0)
    book.routed(ask_of(1000, "real"), prefer(0), 0.0)
    book.told(0, 1.0, 1, 3, waiting_tokens=900, running_tokens=5000, now=1.1)
    assert book.load(0, 1.1) == Totals(1, 900, 3, 5000)
    book.prefilled("real", 2.0)
    assert book.load(0, 2.0) == Totals(0, 0, 4, 6000)
    book.finished("real", 3.0)
    assert book.load(0, 3.0) == Totals(0, 0, 3, 5000)
    book.told(0, 4.0, 0, 0, now=4.0)
    assert book.load(0, 4.0) == Totals()
    # Without a further word it is forgotten.
    assert book.load(0, 13.9) == Totals()
    assert book.load(0, 14.0) == Totals(1, 1000)


def test_what_was_on_its_way_is_not_taken_for_drift() -> None:
    book = LoadBook("a", flight_s=0.1)
    book.routed(ask_of(1000, "old"), prefer(0), 0.0)
    book.routed(ask_of(700, "on its way"), prefer(0), 0.95)
    book.told(0, 1.0, 1, 0, waiting_tokens=1000, now=1.0)  # it knows the old one only
    assert book.load(0, 1.0) == Totals(2, 1700)
    # Said late: what has come and gone since then is not in it either.
    book.routed(ask_of(300, "new"), prefer(0), 1.5)
    book.prefilled("old", 1.6)
    book.finished("on its way", 1.6)
    book.told(0, 1.1, 2, 0, waiting_tokens=1700, now=1.7)
    assert book.load(0, 1.7) == Totals(1, 300, 1, 1000)
    # A first token that comes before the engine is thought to have the request leaves nothing behind.
    book.routed(ask_of(50, "quick"), prefer(1), 2.0)
    book.prefilled("quick", 2.02)
    book.told(1, 2.05, 0, 1, running_tokens=50, now=2.06)
    assert book.load(1, 2.06) == Totals(0, 0, 1, 50)
    assert book.load(1, 3.0) == Totals(0, 0, 1, 50)


def test_tokens_that_an_engine_does_not_count_follow_its_requests() -> None:
    book = LoadBook("a", flight_s=0.0)
    for name in ("one", "two"):
        book.routed(ask_of(1000, name), prefer(0), 0.0)
    book.told(0, 1.0, 3, 0, now=1.0)
    assert book.load(0, 1.0) == Totals(3, 3000)


def test_old_words_of_an_engine_are_passed_over() -> None:
    book = LoadBook("a", ttl_s=10.0, history_s=5.0)
    book.told(0, 2.0, 1, 0, now=2.0)
    book.told(0, 1.0, 9, 0, now=2.0)
    assert book.load(0, 2.0) == Totals(1)
    book.told(1, 2.0, 9, 0, now=7.1)
    assert book.load(1, 7.1) == Totals()


def test_what_is_kept_of_the_past_is_bounded() -> None:
    book = LoadBook("a", flight_s=0.05, history_s=5.0)
    for number in range(2000):
        book.routed(ask_of(10, f"r{number}"), prefer(0), number / 10)
        book.finished(f"r{number}", number / 10)
    assert len(book._accounts[0].changes) <= 2 * 51 + 2


# ---- several Conductors, one fleet


TICKS = 1000


@cache
def unevenness(
    conductors: int, *, lost: float = 0.0, delay_s: float = 0.0, pinned: float = 0.0, every: int = 1
) -> float:
    """How far the busiest of 8 instances was above the mean, in requests, averaged over time. 40 requests of 2 s come
    each second, at Conductors drawn by lot. They route by least load, but for the share `pinned`, which goes to the
    first instance. They publish every 20 ms, or the `every`th time;
    messages are late, lost and doubled."""
    draw, fleet = random.Random(5), fleet_of(8)
    books = [LoadBook(f"c{number}", ttl_s=5.0) for number in range(conductors)]
    policies = [LeastLoad() for _ in books]
    running = [0] * 8
    ends: list[tuple[float, int, str, int]] = []
    mail: list[tuple[float, int, Published]] = []
    over = 0.0
    for tick in range(TICKS):  # of 20 ms
        now = tick / 50
        while ends and ends[0][0] <= now:
            _, number, name, instance = ends.pop(0)
            books[number].finished(name, now)
            running[instance] -= 1
        for number, book in enumerate(books):
            if tick % every:
                break
            message = book.publish()
            for to in range(conductors):
                for _ in range(0 if to == number else draw.choice((1, 1, 2))):
                    mail += [(now + draw.uniform(0, 2) * delay_s, to, message)] * (draw.random() >= lost)
        due = [it for it in mail if it[0] <= now]
        mail = [it for it in mail if it[0] > now]
        draw.shuffle(due)
        for _, to, message in due:
            books[to].heard(message, now)
        if draw.random() < 0.8:
            number = draw.randrange(conductors)
            ask = ask_of(1000, f"r{tick}")
            books[number].fill(fleet.instances, now)
            choice = prefer(0) if draw.random() < pinned else policies[number].choose(ask, {}, fleet)
            assert choice is not None
            policies[number].routed(ask, choice, fleet)
            books[number].routed(ask, choice, now)
            running[choice.prefill] += 1
            ends.append((now + 2.0, number, ask.request, choice.prefill))
        over += max(running) - sum(running) / 8
    return over / TICKS


def test_four_conductors_spread_as_one_does() -> None:
    alone = unevenness(1)
    assert alone < 0.6
    # About as many requests come within a message's delay as may be placed wrongly.
    assert unevenness(4) < alone + 0.5
    assert unevenness(4, delay_s=0.02, lost=0.2) < alone + 1.5


@pytest.mark.parametrize("every", [5, 50])
def test_to_say_seldom_is_not_worse_than_to_say_nothing(every: int) -> None:
    """At 0.1 s and 1 s, most requests come where others do not know of them; a third of what is said is lost."""
    assert unevenness(4, every=every, delay_s=0.01, lost=0.3) < unevenness(4, lost=1.0) + 0.3


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9), st.floats(0.001, 1e5))
def test_evened_out(amounts: list[int], more: float) -> None:
    found, total = evened(amounts, more), sum(amounts)
    # The order stays, and the sum; what is over the level keeps its part, and what is under it is at one level.
    assert sorted(range(len(amounts)), key=lambda at: (found[at], amounts[at], at)) == sorted(
        range(len(amounts)), key=lambda at: (amounts[at], at)
    )
    assert sum(found) == pytest.approx(total, abs=len(amounts))
    stays = total / (total + more)
    for amount, now in zip(amounts, found, strict=True):
        assert now >= amount * stays - 1
        assert now == pytest.approx(amount * stays, abs=1) or now == min(found)


def test_what_others_said_fades_into_what_they_do_at_their_pace() -> None:
    book, fleet = LoadBook("a", ttl_s=10.0), fleet_of(2)

    def filled(now: float) -> list[int]:
        book.fill(fleet.instances, now)
        return [it.waiting_tokens for it in fleet.instances.values()]

    book.heard(Published("b", 1, {0: Totals(0, 3000)}, Totals(0, 9000)), 0.0)
    assert filled(5.0) == [3000, 0]  # nothing is known of its pace
    book.heard(Published("b", 3, {0: Totals(0, 3000)}, Totals(0, 10_000)), 5.0)
    assert filled(5.0) == [3000, 0]
    # 200 a second: after 5 s another 1,000 are where nothing was, and of all that there is 1 / 4 is done.
    assert filled(10.0) == [2250, 750]
    book.heard(Published("b", 4, {0: Totals(0, 3000)}, Totals(0, 10_000)), 10.0)  # its pace was none, for long
    before = filled(15.0)
    assert before[0] > 2950
    book.routed(ask_of(500), prefer(1), 15.0)  # our own are exact
    assert filled(15.0) == [before[0], before[1] + 500]
    assert book.load(0, 15.0).waiting_tokens == 3000


def test_who_comes_back_under_its_name_is_believed() -> None:
    book, old = LoadBook("a", ttl_s=10.0), LoadBook("b", serial=1000)
    for number in range(3):
        old.routed(ask_of(100, f"r{number}"), prefer(0), number / 10)
        book.heard(old.publish(), number / 10)
    last = old.publish()
    new = LoadBook("b", serial=2000)
    book.heard(new.publish(), 1.0)
    assert book.load(0, 1.0) == Totals()
    book.heard(last, 1.1)
    assert book.load(0, 1.1) == Totals()
    new.routed(ask_of(70, "new"), prefer(1), 1.2)
    book.heard(new.publish(), 1.2)
    assert (book.load(0, 1.2), book.load(1, 1.2)) == (Totals(), Totals(1, 70))


def test_each_sees_the_load_that_others_make() -> None:
    """A tenth of all goes to one instance, which is most of what it can take: the rest must go elsewhere."""
    assert unevenness(4, pinned=0.1, delay_s=0.02, lost=0.2) < unevenness(1, pinned=0.1) + 1.5
    assert unevenness(4, pinned=0.1, lost=1.0) > unevenness(4, pinned=0.1, delay_s=0.02, lost=0.2) + 1.0


@pytest.mark.parametrize("seed", range(3))
def test_messages_lost_doubled_and_late_leave_nothing_behind(seed: int) -> None:
    draw, books = random.Random(seed), [LoadBook(f"c{number}", ttl_s=60.0) for number in range(3)]
    mail: list[Published] = []
    for step in range(300):
        now, number = step / 10, draw.randrange(3)
        name = f"{number}/{draw.randrange(8)}"
        if draw.random() < 0.6:
            books[number].routed(ask_of(100, name), prefer(draw.randrange(4)), now)
        else:
            books[number].finished(name, now)
        if draw.random() < 0.5:
            mail += [books[number].publish()] * draw.choice((0, 1, 2))
        draw.shuffle(mail)
        for message in mail[: draw.randrange(3)]:
            books[draw.randrange(3)].heard(message, now)
    for book in books:
        message = book.publish()
        for other in books:
            other.heard(message, 30.0)
    for number in range(4):
        loads = {book.load(number, 30.0) for book in books}
        assert len(loads) == 1, f"seed {seed}: {loads}"
