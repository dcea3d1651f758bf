"""The simulated cluster: many seeds, the same story each time, a thousand nodes, and a failure that is replayed."""

from __future__ import annotations

import json
import random

import pytest

from headwater.sim import __main__ as command
from headwater.sim.cluster import Cluster, ClusterParts
from headwater.sim.cluster_faults import ClusterFaults, ClusterPlan
from headwater.sim.network import Host, Listener, LocalClock, Network
from headwater.sim.schedule import Process, Schedule
from tests.sim.test_cluster_mutants import BelievesBytes

THOUSAND = ClusterPlan(
    nodes=1000,
    slots=24,
    requests=1000,
    rush_s=0.008,
    stems=30,
    tokens_s=40.0,
    chunk_s=0.01,
    lease_s=1.0,
    tick_s=0.5,
    latency_s=0.0005,
    bytes_s=1e8,
    batch_chunks=8,
    replicas=3,
    skew_s=1e6,
    drift=0.0005,
    one_sided=0.5,
)
THEIR_FAULTS = ClusterFaults(
    drops=0.001,
    partitions=0.003,
    islands=0.003,
    slow_hosts=0.02,
    pauses=0.02,
    kills=0.02,
    stays_away=0.0,
    leaves=0.005,
    directory_is_away=0.002,
    directory_is_empty=0.001,
    directory_lags=0.0,
    corrupts=0.02,
    stalls=0.02,
    floods=0.01,
    aborts=0.02,
    clears=0.01,
)


def test_many_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["cluster", "--seeds", "0:120", "--json"]) == 0
    total = json.loads(capsys.readouterr().out)
    print(total)
    # A simulation in which nothing happens proves nothing.
    assert total["seeds"] == 120
    assert total["answered"] == total["requests"] > 4_000
    assert total["hit_chunks"] > 5_000
    assert total["pulled"] > 700
    assert total["transfers"] > 1_000
    assert total["joins"] > 800
    assert min(total[name] for name in ("hedges", "stale", "deaths", "late", "corrupt")) > 20
    assert min(total[name] for name in ("refused", "orders")) > 3


@pytest.mark.timeout(300)
def test_a_thousand_nodes() -> None:
    outcome = Cluster(1, plan=THOUSAND, faults=THEIR_FAULTS).play()
    print(outcome)
    assert outcome.nodes == 1000
    assert outcome.sums.pulled > 500
    assert outcome.sums.deaths > 5


def test_a_seed_is_the_same_story_every_time() -> None:
    assert Cluster(3).play() == Cluster(3).play()
    assert Cluster(3).play().log_sha256 != Cluster(4).play().log_sha256


def test_a_failure_names_its_seed_and_how_to_replay_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Cluster", lambda seed: Cluster(seed, ClusterParts(transfer=BelievesBytes)))
    assert command.main(["cluster", "--seeds", "0:60"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    seed = said.split("WRONG: seed ")[1].split(",")[0]
    assert f"replay it with: python -m headwater.sim cluster --seed {seed}" in said
    assert command.main(["cluster", "--seed", seed]) == 1
    plan, *_, end = capsys.readouterr().out.splitlines()
    assert plan.startswith("ClusterPlan(")
    assert "WRONG: seed" in end


class Talk:
    """Two hosts, one of which answers."""

    def __init__(self, drops: float = 0.0) -> None:
        self.schedule = Schedule()
        self.network = Network(self.schedule, random.Random(1), drops)
        clock = LocalClock(self.schedule, 1000.0, 1.0)
        self.asker, self.server = Host("a", clock, 0.01, 1e6), Host("b", clock, 0.01, 1e6)
        self.process = Process("b")
        self.network.listeners["b:1"] = Listener(self.server, self.process, "server")
        self.said: list[tuple[float, object]] = []

    def ask(self, size_bytes: int = 100) -> list[tuple[float, object]]:
        """What the caller was told, and when."""

        def told(answer: object) -> None:
            self.said.append((self.schedule.clock.now(), answer))

        def serve(server: object, reply: object) -> None:
            assert callable(reply)
            reply(server)

        self.network.call(self.asker, Process("a"), "b:1", size_bytes, serve, lambda _: size_bytes, told, 1.0)
        while len(self.schedule):
            self.schedule.step()
        return self.said


def test_a_call_is_answered_after_two_ways_and_its_bytes() -> None:
    (at_s, answer), *more = Talk().ask(100_000)
    assert answer == "server" and not more
    assert 0.2 + 2 * 0.01 <= at_s <= 0.2 + 2 * 0.02, "a tenth of a second on each wire, and the way's latency twice"


def test_a_call_that_is_lost_ends_by_its_time_and_one_that_breaks_at_once() -> None:
    for way in (("a", "b"), ("b", "a")):
        talk = Talk()
        talk.network.cut.add(way)
        assert talk.ask() == [(1.0, None)]
    talk = Talk()
    del talk.network.listeners["b:1"]
    ((at_s, answer),) = talk.ask()
    assert answer is None and at_s < 0.1
    ((at_s, answer),) = Talk(drops=1.0).ask()
    assert answer is None and at_s < 0.1


def test_who_is_paused_answers_later_and_who_is_dead_not_at_all() -> None:
    talk = Talk()
    talk.process.paused_until_s = 0.5
    ((at_s, answer),) = talk.ask()
    assert answer == "server" and 0.5 < at_s < 0.6
    talk = Talk()
    talk.process.paused_until_s = 5.0
    assert talk.ask() == [(1.0, None)]
    talk = Talk()
    talk.process.alive = False
    assert talk.ask() == [(1.0, None)]
