"""Who is alive: probes, words of the data path, deadlines, and the way back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from headwater.conductor.polling import AWAY_S, DEADLINE_S, EVERY_S, SLOW_S, SLOW_SHARE, Polling
from headwater.conductor.registry import Roster
from headwater.conductor.signals import Signals
from headwater.fleetfile.model import FleetFile
from tests.conductor.brain.rig import TIMES, MadeTimers, MadeUpstreams, spec


class PollingRig:
    """So many instances on ports 100, 101 ..."""

    def __init__(self, count: int = 2, **polling: int) -> None:
        self.timers = MadeTimers()
        self.upstreams = MadeUpstreams(self.timers)
        specs = tuple(spec(f"i{it}", url=f"http://127.0.0.1:{100 + it}") for it in range(count))
        self.roster = Roster(FleetFile("f", (), specs), TIMES)
        self.told: list[tuple[int, Signals, float]] = []
        self.changes: list[tuple[int, bool]] = []
        self.polling = Polling(
            self.roster,
            self.upstreams,
            self.timers,
            told=lambda *it: self.told.append(it),
            changed=lambda *it: self.changes.append(it),
            draw=random.Random(20240903),
            **polling,
        )
        self.polling.start()

    def alive(self) -> list[bool]:
        """Of each instance."""
        return [it.alive for it in self.roster.instances().values()]

    def say(self, number: int, health: tuple[int, bytes] | str | None, metrics: bytes = b"") -> None:
        """What an instance answers from now on."""
        self.upstreams.answers[100 + number] = {"/health": health, "/metrics": (200, metrics)}


def test_everybody_is_asked_every_second() -> None:
    rig = PollingRig(5)
    for number in range(5):
        rig.say(number, (200, b""), b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n")
    rig.timers.run(10.0)
    for number in range(5):
        times = [when for when, port, path in rig.upstreams.asked if port == 100 + number and path == "/health"]
        gaps = [after - before for before, after in pairwise(times)]
        assert all(0.85 * EVERY_S < gap < 1.2 * EVERY_S for gap in gaps) and len(times) in (9, 10, 11)
        assert len(set(gaps)) > 3, "they are spread"
    assert {it[0] for it in rig.told} == set(range(5))
    assert rig.told[0][1].running == 2 and not rig.changes


def test_two_failures_and_it_is_out_until_it_answers() -> None:
    rig = PollingRig()
    rig.timers.run(2.0)
    rig.say(0, (503, b""))
    rig.timers.run(1.1)
    assert rig.alive() == [True, True], "one failure is not enough"
    rig.timers.run(1.2)
    assert rig.alive() == [False, True] and rig.changes == [(0, False)]
    assert rig.polling.out_s(0, rig.timers.now) is not None
    rig.timers.run(20.0)
    asked = [when for when, port, _ in rig.upstreams.asked if port == 100 and when > 1004.0]
    assert max(b - a for a, b in pairwise(asked)) < 5.1
    rig.say(0, (200, b""))
    rig.timers.run(5.2)
    assert rig.alive() == [True, True] and rig.changes[-1] == (0, True)
    assert rig.polling.out_s(0, rig.timers.now) is None


@pytest.mark.parametrize("why", ["refused", "connect", "closed"])
def test_the_data_paths_word_counts_at_once(why: str) -> None:
    rig = PollingRig()
    rig.timers.run(2.0)
    rig.say(0, "refused")
    rig.polling.trouble(0, why)
    assert rig.alive() == [False, True]
    rig.polling.trouble(0, why)
    assert rig.changes == [(0, False)]


def test_one_requests_fault_is_not_the_instances() -> None:
    rig = PollingRig()
    rig.timers.run(2.0)
    for why in ("late", "silent", "malformed") * 3:
        rig.polling.trouble(0, why)
    assert rig.alive() == [True, True]


def test_an_answer_from_before_the_word_does_not_count() -> None:
    rig = PollingRig(1)
    rig.upstreams.after_s = 0.3
    while not rig.upstreams.open:
        rig.timers.step()
    rig.say(0, "refused")
    rig.polling.trouble(0, "refused")
    rig.timers.run(0.35)
    assert rig.alive() == [False]


def test_slow_start_after_a_while_away_and_not_after_a_blink() -> None:
    rig = PollingRig()
    rig.timers.run(2.0)
    rig.polling.trouble(0, "closed")
    rig.timers.run(0.3)
    assert rig.alive() == [True, True] and rig.polling.share(0, rig.timers.now) == 1.0
    assert not rig.polling.was_away(0)
    rig.say(0, "refused")
    rig.polling.trouble(0, "refused")
    rig.timers.run(AWAY_S)
    rig.say(0, (200, b""))
    while not rig.alive()[0]:
        rig.timers.step()
    assert rig.polling.was_away(0) and not rig.polling.was_away(1)
    shares = []
    for _ in range(6):
        shares.append(rig.polling.share(0, rig.timers.now))
        rig.timers.run(SLOW_S / 5)
    assert shares[0] == SLOW_SHARE and shares == sorted(shares) and shares[-1] == 1.0 and shares[1] < 0.5


def test_whether_anybody_has_answered_yet() -> None:
    rig = PollingRig()
    rig.say(0, None)
    rig.say(1, "refused")
    assert rig.polling.answered() is None
    rig.timers.run(1.0)
    assert rig.polling.answered() is None, "one of them has not said anything"
    rig.timers.run(DEADLINE_S)
    assert rig.polling.answered() is False
    rig.say(1, (200, b""))
    rig.timers.run(10.0)
    assert rig.polling.answered() is True
    assert PollingRig(0).polling.answered() is False


def test_no_answer_is_a_failure_after_its_deadline() -> None:
    rig = PollingRig()
    rig.timers.run(2.0)
    rig.say(0, None)
    rig.timers.run(2 * DEADLINE_S + 3.0)
    assert rig.alive() == [False, True] and rig.upstreams.aborted >= 2


def test_questions_under_way_are_bounded() -> None:
    rig = PollingRig(40, together=3)
    rig.upstreams.after_s = 0.02
    rig.timers.run(3.0)
    assert rig.upstreams.most == 3
    assert len({port for _, port, _ in rig.upstreams.asked}) == 40


def test_metrics_that_are_too_long_are_dropped() -> None:
    rig = PollingRig(1)
    rig.say(0, (200, b""), b"x" * (5 << 20))
    rig.timers.run(3.0)
    assert not rig.told and rig.upstreams.aborted >= 2 and rig.alive() == [True]


def test_without_a_path_for_health_it_is_alive() -> None:
    rig = PollingRig(1)
    rig.say(0, (404, b""))
    rig.timers.run(5.0)
    assert rig.alive() == [True]


def test_who_leaves_is_asked_no_more_and_nothing_is_left() -> None:
    rig = PollingRig()
    rig.timers.run(2.0)
    rig.roster.unregister("i0", 1)
    rig.roster.release(0)
    before = len(rig.upstreams.asked)
    rig.timers.run(3.0)
    assert {port for _, port, _ in rig.upstreams.asked[before:]} == {101}
    assert rig.roster.register(spec("new", url="http://127.0.0.1:150"), 2) == 0
    rig.timers.run(1.0)
    assert any(port == 150 for _, port, _ in rig.upstreams.asked)
    rig.polling.close()
    assert rig.upstreams.open == 0 and rig.timers.pending() <= rig.upstreams.aborted
