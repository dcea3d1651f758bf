"""One instance after the other: by the order of the policy of that name, and what is told of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.conductor.asking import tokens_of
from headwater.conductor.counts import Counts
from headwater.conductor.job import How, Job, Kind, Parsed, Phase, Tokenised
from headwater.conductor.patience import FACTOR, SPARE_S, TOKEN_S
from headwater.conductor.registry import Roster
from headwater.conductor.rotation import Rotation, suffices
from headwater.conductor.signals import Signals
from headwater.core.rivals import RoundRobin
from headwater.fleet import Ask, Fleet, Role
from headwater.fleetfile.model import ConductorSpec, FleetFile, InstanceSpec, Limits, Slo, TenantSpec, Times
from tests.conductor.brain.rig import NOBODY, TIMES, Client, MadeExchange, MadeTimers, headers_of, prompt, spec
from tests.conductor.brain.test_brain import MadeHealth


class Rig:
    """A rotation over so many instances that serve nothing by themselves."""

    def __init__(self, specs: Sequence[InstanceSpec] | int = 3, **about: Any) -> None:
        if isinstance(specs, int):
            specs = [spec(f"i{number}", capacity_tokens=100_000) for number in range(specs)]
        self.timers, self.counts, self.names = MadeTimers(), Counts(), 0
        self.file = FleetFile("fleet.yaml", (), tuple(specs), ConductorSpec(policy="round_robin", **about))
        self.roster = Roster(self.file, TIMES)
        self.brain = Rotation(self.file, self.roster, self.counts, self.timers, name="a")

    def take(self, tokens: int | None = 900, *, stream: bool = True, body: bytes = b"{}", model: str = "m") -> Client:
        self.names += 1
        exchange: Any = MadeExchange(body, [])
        ids = None if tokens is None else prompt(1, tokens)
        tokenised = Tokenised(ids, How.NONE if ids is None else How.LOCAL)
        parsed = Parsed(Kind.COMPLETION, {}, model, stream=stream)
        job = Job(f"r{self.names}", exchange, NOBODY, parsed, self.timers.time(), tokenised=tokenised)
        client = Client(job)
        self.brain.take(job, client.sent, client.refused)
        return client

    def finish(self, client: Client, tokens: int = 20, *, whole: bool = True) -> None:
        client.job.answered_tokens = tokens
        self.brain.finished(client.job, whole=whole)

    def is_still(self) -> bool:
        state = self.brain.state()
        idle = not any(it["own_requests"] for it in state["instances"])
        return idle and not state["under_way"] and not state["waiting"]


def refused(client: Client) -> tuple[int, str]:
    assert client.refusal is not None and not client.targets
    return client.refusal.status, client.refusal.code


def test_where_it_suffices() -> None:
    file = Rig().file
    assert suffices(file)
    assert not suffices(replace(file, conductor=replace(file.conductor, policy="headwater")))
    promised = replace(file, slo=Slo(ttft_s=1.0))
    assert not suffices(promised)
    assert suffices(replace(promised, conductor=replace(file.conductor, admission=False)))
    assert not suffices(replace(file, tenants=(TenantSpec("gold", slo=Slo(tpot_s=0.1)),)))


def test_a_request_from_beginning_to_end() -> None:
    rig = Rig(2)
    clients = [rig.take() for _ in range(4)]
    assert [it.at for it in clients] == [0, 1, 0, 1]
    client = clients[1]
    job, target = client.job, client.targets[0]
    assert (job.phase, job.tries, job.routed_s) == (Phase.SENT, 1, rig.timers.now)
    assert headers_of(target) == {b"x-headwater-instance": b"i1", b"x-headwater-reuse": b"device=0"}
    rig.timers.run(0.2)
    job.first_s = rig.timers.now  # whoever relays may have written it
    rig.brain.started(job)
    rig.timers.run(0.5)
    rig.brain.started(job)
    rig.brain.progressed(job)
    job.cached_tokens = 448
    rig.finish(client, 11)
    rig.finish(client, 11)
    numbers, said = rig.counts.numbers, rig.brain.explained(job.id)
    assert job.phase is Phase.DONE and job.ended_s == rig.timers.now
    assert numbers["outcomes", "whole"] == 1 and numbers["prompt_tokens", ""] == 900
    assert numbers["reused_tokens", "device"] == 448
    assert rig.counts.histograms["ttft_seconds", ""][-1] == pytest.approx(0.2)
    assert rig.counts.histograms["tpot_seconds", ""][-1] == pytest.approx(0.05)
    assert said is not None and json.dumps(said) and said["counted"] == "local" and said["outcome"] == "whole"
    assert [(it["instance"], it["decode"]) for it in said["tries"]] == [("i1", "i1")]
    assert said["took"]["first_token_s"] == pytest.approx(0.2) and said["took"]["cached_tokens"] == 448
    row = rig.brain.state()["instances"][1]
    assert (row["own_requests"], row["ended_requests"], row["prompt_tokens"]) == (1, 1, 900)
    for it in clients:
        rig.finish(it, whole=False)
    assert rig.is_still() and numbers["outcomes", "cut"] == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["take", "large", "down", "up", "drain", "undrain"]), max_size=40),
    st.lists(st.integers(0, 4), min_size=40, max_size=40),
)
def test_the_order_is_that_of_the_policy(steps: list[str], numbers: list[int]) -> None:
    sizes = [4000, 100_000, 100_000, 4000, 100_000]
    rig = Rig([spec(f"i{number}", capacity_tokens=size) for number, size in enumerate(sizes)])
    policy, instances = RoundRobin(), rig.roster.instances()
    for what, number in zip(steps, numbers, strict=False):
        it = instances[number]
        if what in ("take", "large"):
            tokens = 900 if what == "take" else 5000
            ask, fleet = Ask("r", tokens, (), 16, model="m"), Fleet(instances)
            expected = policy.choose(ask, {}, fleet)
            client = rig.take(tokens)
            assert (client.at if client.targets else None) == (expected.prefill if expected is not None else None)
            if expected is not None:
                policy.routed(ask, expected, fleet)
        elif what in ("down", "up"):
            it.alive = what == "up"
        else:
            it.draining = what == "drain"


def test_too_many_too_long_no_such_model_and_nobody_alive() -> None:
    rig = Rig(2, limits=Limits(requests=2))
    clients = [rig.take(), rig.take()]
    assert refused(rig.take()) == (503, "overloaded")
    rig.finish(clients[0])
    assert refused(rig.take(100_001)) == (400, "context_length_exceeded")
    rig.roster.instances()[0].capacity_tokens = rig.roster.instances()[1].capacity_tokens = 1000
    guessed = rig.take(None, body=b"x" * 800_000)
    assert guessed.targets, "a guess is no reason to refuse anybody"
    rig.finish(guessed)
    assert refused(rig.take(model="other")) == (404, "model_not_found")
    for it in rig.roster.instances().values():
        it.alive = False
    assert refused(rig.take()) == (503, "no_instance")
    rig.finish(clients[1])
    assert rig.is_still() and rig.timers.pending() == 0


def test_lost_goes_elsewhere_and_never_back() -> None:
    rig = Rig(3, retries=2)
    health = rig.brain.earning.health = MadeHealth()
    client = rig.take()
    for why in ("refused", "closed"):
        rig.brain.lost(client.job, client.at, why, client.sent, client.refused)
    assert len({it.prefill for it in client.targets}) == 3 and client.job.tries == 3
    rig.brain.lost(client.job, client.at, "late", client.sent, client.refused)
    assert client.refusal is not None and client.refusal.status == 502 and rig.is_still()
    assert [it[1] for it in health.troubles] == ["refused", "closed", "late"]
    said = rig.brain.explained(client.job.id)
    assert said is not None and [it["lost"] for it in said["tries"]] == ["refused", "closed", "late"]
    alone = Rig(1)
    client = alone.take()
    alone.brain.lost(client.job, 0, "refused", client.sent, client.refused)
    assert client.refusal is not None and client.refusal.status == 503


def test_who_is_gone_for_a_moment_is_waited_for() -> None:
    rig = Rig(1, limits=Limits(waiting=2), times=Times(wait_s=30.0))
    health = rig.brain.earning.health = MadeHealth()
    it = rig.roster.instances()[0]
    it.alive, health.out[0] = False, rig.timers.now
    client, other, third = rig.take(), rig.take(), rig.take()
    assert client.waits and other.waits and client.job.phase is Phase.WAITING
    assert refused(third) == (429, "overloaded") and rig.brain.state()["waiting"] == {"": 2}
    rig.brain.drop(other.job)
    rig.brain.drop(other.job)
    rig.timers.run(0.5)
    it.alive = True
    del health.out[0]
    rig.timers.run(0.2)
    assert client.targets and other.waits and rig.timers.pending() == 0
    it.alive, health.out[0] = False, rig.timers.now
    late = rig.take()
    rig.timers.run(0.3)
    assert late.waits
    it.alive = True
    rig.brain.changed(0, True)
    assert late.targets, "at once"
    it.alive, health.out[0] = False, rig.timers.now
    never = rig.take()
    rig.timers.run(1.5)
    assert refused(never) == (503, "no_instance") and rig.counts.numbers["outcomes", "dropped"] == 1
    rig.finish(client)
    rig.finish(late)
    assert rig.is_still() and rig.timers.pending() == 0


def test_nobody_waits_longer_than_is_said() -> None:
    rig = Rig(1, times=Times(wait_s=0.45))
    health = rig.brain.earning.health = MadeHealth()
    rig.roster.instances()[0].alive, health.out[0] = False, rig.timers.now
    client = rig.take()
    rig.timers.run(0.6)
    assert refused(client) == (503, "overloaded") and rig.counts.numbers["limited", "late"] == 1


def test_slow_start_gives_a_part_of_the_share() -> None:
    rig = Rig(4)
    health = rig.brain.earning.health = MadeHealth()
    health.shares[0] = 0.25
    rig.brain.changed(0, True)

    def count(requests: int) -> int:
        clients = [rig.take() for _ in range(requests)]
        for client in clients:
            rig.finish(client)
        return sum(it.at == 0 for it in clients)

    assert 18 <= count(400) <= 32, "a quarter of a quarter"
    health.shares.clear()
    assert 95 <= count(400) <= 105
    alone = Rig(1)
    health = alone.brain.earning.health = MadeHealth()
    health.shares[0] = 0.1
    alone.brain.changed(0, True)
    assert all(alone.take().targets for _ in range(5)), "rather that one than nobody"


def test_of_instances_with_roles_each_does_its_part() -> None:
    roles = [Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE, Role.DECODE]
    rig = Rig([spec(f"i{number}", role=role) for number, role in enumerate(roles)])
    clients = [rig.take() for _ in range(6)]
    pairs = [(it.targets[0].prefill, it.targets[0].decode) for it in clients]
    assert pairs == [(0, 1), (2, 3), (0, 4), (2, 1), (0, 3), (2, 4)]
    assert headers_of(clients[0].targets[0])[b"x-headwater-prefill"] == b"i0"
    tokens = tokens_of(clients[0].job) + tokens_of(clients[2].job) + tokens_of(clients[4].job)
    assert rig.brain.patience_s(clients[0].job) == pytest.approx(SPARE_S + FACTOR * TOKEN_S * tokens)
    told: list[str] = []
    rig.brain.prefilled(clients[0].job, "", lambda: told.append("then"))
    rig.finish(clients[0])
    rig.brain.prefilled(clients[0].job, "", lambda: told.append("too late"))
    assert told == ["then"]
    for it in clients:
        rig.finish(it, whole=False)
    assert rig.is_still()
    only = Rig([spec("i0", role=Role.PREFILL)])
    assert refused(only.take()) == (503, "no_instance")


def test_who_joins_gets_its_turn_and_who_leaves_is_forgotten() -> None:
    rig = Rig(2)
    clients = [rig.take(), rig.take()]
    assert rig.roster.register(spec("new", capacity_tokens=100_000), 1) == 2
    assert [rig.take().at for _ in range(3)] == [2, 0, 1]
    rig.roster.unregister("i0", 2)
    rig.timers.run(0.1)
    assert rig.roster.by_name("i0") == 0, "its requests are served to their end"
    assert [rig.take().at for _ in range(3)] == [2, 1, 2]
    for request in range(1, 9):
        job = Job(f"r{request}", clients[0].job.exchange, NOBODY, clients[0].job.parsed, 0.0)
        rig.brain.finished(job, whole=True)
    assert rig.roster.by_name("i0") is None and rig.is_still()
    assert rig.roster.register(spec("other", capacity_tokens=100_000), 3) == 0
    assert rig.brain.state()["instances"][-1]["ended_requests"] == 0
    client = rig.take()
    assert headers_of(client.targets[0])[b"x-headwater-instance"] == [b"other", b"i1", b"new"][client.at]


def test_what_engines_say_and_what_is_remembered() -> None:
    rig = Rig([spec("i0")], explained=2)
    rig.brain.told(0, Signals(running=3, waiting=2, capacity_tokens=5000), rig.timers.now)
    rig.brain.told(7, Signals(running=3, waiting=2), rig.timers.now)
    row = rig.brain.state()["instances"][0]
    assert (row["capacity_tokens"], row["waiting_requests"], row["running_requests"]) == (5000, 2, 3)
    clients = [rig.take() for _ in range(3)]
    assert rig.brain.explained(clients[0].job.id) is None and rig.brain.explained(clients[1].job.id) is not None
    rig.finish(clients[2])
    ride = rig.brain._memory[clients[2].job.id]
    assert ride.job is None and ride.sent is None and ride.refused is None, "nothing of the prompt is kept"
