"""Whole runs: the mock engine's own figures, the same seed twice, nobody lost, and each tier and fault on its own."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headwater.core.policies import POLICIES
from headwater.core.rivals import RoundRobin
from headwater.errors import ConfigError
from headwater.fleet import Ask, Choice, Fleet, Held, Place
from headwater.sim.fleet import sight
from headwater.sim.fleet.config import FleetConfig, parse_fleet
from headwater.sim.fleet.results import Ending, Run
from headwater.sim.fleet.saving import LATE_S
from headwater.sim.fleet.tiers import Tiers
from headwater.sim.fleet.world import SAMPLES_MAX, World, make_policy, simulate
from headwater.traces.model import Trace, TraceRequest
from headwater.types import Tier

SERVED, REJECTED, FAILED = Ending.SERVED, Ending.REJECTED, Ending.FAILED
Row = tuple[int, int, int, int, float, float, int]

# Of ai-dynamo-runtime 1.6.1's replay with one worker and blocks of 64 tokens: arrival in ms, prompt, answer, the first
# of its 512-token blocks, which are numbered on; and what came of it: ms to the first token, the last token's time,
# reused tokens.
MOCKER: dict[str, tuple[int, list[Row]]] = {
    "a prompt comes while another is answered": (16384, [
        (0, 1000, 50, 1, 32.1059, 364.9158, 0),
        (50, 2000, 5, 11, 59.6163, 133.1957, 0),
    ]),
    "the last block of a cached prompt is computed": (16384, [
        (0, 1024, 50, 1, 32.4907, 350.8879, 0),
        (50, 1024, 5, 1, 28.9300, 119.0652, 960),
        (60, 1030, 5, 1, 41.3683, 124.9116, 1024),
    ]),
    "together in one step": (16384, [
        (0, 1000, 3, 1, 95.2536, 107.2071, 0),
        (0, 1100, 3, 101, 95.2536, 107.2071, 0),
        (0, 1200, 3, 201, 95.2536, 107.2071, 0),
        (0, 1300, 3, 301, 95.2536, 107.2071, 0),
    ]),
    "no room to start, and none to go on": (330, [
        (0, 1000, 100, 1, 32.1059, 1345.0772, 0),
        (1, 20000, 3, 10, 471.0149, 540.0061, 0),
        (2, 100, 3, 60, 564.2843, 583.2944, 0),
    ]),
    "the rest of a step goes to the next prompt": (800, [
        (0, 20000, 10, 110, 507.4108, 1049.7218, 0),
        (1, 20000, 3, 10, 869.6960, 935.1484, 0),
    ]),
    "the oldest blocks are evicted": (40, [
        (0, 1024, 3, 1, 32.4907, 78.9811, 0),
        (200, 1500, 3, 11, 40.2238, 297.3505, 0),
        (400, 1024, 3, 1, 17.4749, 463.9652, 960),
        (600, 1500, 3, 11, 16.9269, 674.0535, 1472),
    ]),
}  # fmt: skip


def fleet(count: int = 4, blocks: int = 400, **more: Any) -> FleetConfig:
    return parse_fleet({"instances": [{"count": count, "blocks": blocks}], **more})


def sessions(seed: int, count: int = 120, rate: float = 20.0) -> Trace:
    """Conversations that go on, all of them after the same first block."""
    draw = random.Random(seed)
    now, fresh = 0.0, 1
    talks: list[list[int]] = [[0] for _ in range(count // 6)]
    rows = []
    for _ in range(count):
        now += draw.expovariate(rate)
        number = draw.randrange(len(talks))
        talk = talks[number]
        more = draw.randint(1, 4)
        talk.extend(range(fresh, fresh + more))
        fresh += more
        tokens = 512 * len(talk) - draw.randrange(512)
        rows.append(TraceRequest(now, tokens, draw.randint(1, 60), tuple(talk), session=str(number)))
        if len(talk) > 24:
            talks[number] = [0]
    return Trace(f"sessions {seed}", 512, tuple(rows))


def found(run: Run) -> int:
    """Prompt tokens that were not computed."""
    tiers = (run.device_tokens, run.host_tokens, run.disk_tokens, run.peer_tokens, run.remote_tokens)
    return sum(int(it.sum()) for it in tiers)


def check(run: Run) -> None:
    """Everybody ended once, and what is said of them fits."""
    served = run.ending == SERVED
    assert set(run.ending.tolist()) <= {int(it) for it in Ending}
    assert np.isfinite(run.ttft_s[served]).all()
    assert (run.ttft_s[served] > 0).all()
    assert (run.done_s[served] >= run.arrival_s[served] + run.ttft_s[served] - 1e-9).all()
    assert np.isnan(run.ttft_s[~served]).all()
    tiers = (run.device_tokens, run.host_tokens, run.disk_tokens, run.peer_tokens, run.remote_tokens)
    assert (sum(tiers) <= run.input_tokens).all()
    assert (run.instance[served] >= 0).all()


@pytest.mark.parametrize("case", MOCKER)
def test_as_the_mock_engine_does(case: str) -> None:
    blocks, rows = MOCKER[case]
    trace = Trace(
        case,
        512,
        tuple(
            TraceRequest(row[0] / 1e3, row[1], row[2], tuple(range(row[3], row[3] + -(-row[1] // 512)))) for row in rows
        ),
    )
    run = simulate(trace, fleet(1, blocks), policy="round_robin")
    assert (run.ttft_s * 1e3).tolist() == pytest.approx([row[4] for row in rows], abs=1e-3)
    assert (run.done_s * 1e3).tolist() == pytest.approx([row[5] for row in rows], abs=1e-3)
    assert run.device_tokens.tolist() == [row[6] for row in rows]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everybody_and_twice_the_same(policy: str) -> None:
    trace = sessions(1)
    run, again = (simulate(trace, fleet(), policy=policy, seed=5) for _ in range(2))
    check(run)
    assert (run.ending == SERVED).all()
    assert run.log_hash == again.log_hash
    assert run.log_hash != simulate(sessions(2), fleet(), policy=policy, seed=5).log_hash


def test_the_index_says_what_the_pools_say(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = sessions(3, 200)
    more: dict[str, Any] = {
        "kv_bytes_per_token": "64KiB",
        "tiers": {"host": {"size": "2GiB", "bytes_s": "20GB/s"}, "remote": {"size": "8GiB", "bytes_s": "10GB/s"}},
        "link": {"bytes_s": "5GB/s"},
        "deaths": [{"instance": 1, "at_s": 3.0, "back_s": 3.0}],
    }
    looked = simulate(trace, fleet(**more))
    monkeypatch.setattr(sight, "LOOKED_AT", 0)
    told = simulate(trace, fleet(**more))
    assert looked.log_hash == told.log_hash
    assert looked.device_tokens.sum() > 0
    blind = simulate(trace, fleet(**more, signals={"events": "missing"}))
    late = simulate(trace, fleet(**more, signals={"event_lag_s": 0.5, "load_lag_s": 0.2}))
    for run in (blind, late):
        check(run)
        assert found(run) < found(looked)


def test_nothing_is_left_behind() -> None:
    trace = sessions(4, 200, rate=80)
    played = World(trace, fleet(2, 120), [make_policy("headwater")], 0)
    run = played.play()
    check(run)
    for engine in played.stage.engines:
        assert engine.pool.active == 0
        assert not engine.waiting
        assert not engine.decoding
    for it in played.stage.live.values():
        assert (it.waiting_requests, it.waiting_tokens, it.running_requests) == (0, 0, 0)
    assert not played.flights.flying
    assert sum(engine.preemptions for engine in played.stage.engines) > 0


def test_deaths_lose_nobody_while_somebody_lives() -> None:
    trace = sessions(6, 200, rate=60)
    deaths = [{"instance": 0, "at_s": 1.0, "back_s": 2.0}, {"instance": 1, "at_s": 1.5}]
    run = simulate(trace, fleet(3, deaths=deaths))
    check(run)
    late = World(trace, fleet(3, deaths=deaths, signals={"load_lag_s": 0.3}), [make_policy("headwater")], 0)
    check(late.play())
    for it in late.stage.live.values():
        assert (it.waiting_requests, it.waiting_tokens, it.running_requests) == (0, 0, 0)
    assert (run.ending == SERVED).all()
    after = run.instance[run.arrival_s > 1.6]
    assert 1 not in after
    assert 0 in run.instance[run.arrival_s > 2.1]
    assert run.log_hash != simulate(trace, fleet(3)).log_hash


def test_late_news_of_a_lost_instance_say_nothing_of_the_next() -> None:
    trace = Trace("one", 512, (TraceRequest(0.0, 20_000, 50, tuple(range(40))),))
    first_s = 0.42
    signals = {"load_lag_s": 0.2}
    deaths = [{"instance": 0, "at_s": first_s + 0.1}]
    run = simulate(trace, fleet(2, 4000, signals=signals, deaths=deaths, sample_s=0.05))
    assert run.ttft_s[0] < first_s
    between = (run.sample_s > first_s + 0.25) & (run.sample_s < first_s + 0.4)
    assert run.running[between].sum() == 0
    assert (run.waiting_tokens[between, 1] > 0).all()


def test_loads_are_known_as_late_as_they_are_said_to_be() -> None:
    """The first prompt is computed after 0.42 s, in three passes; nobody hears of any of it for a second."""
    seen = []

    class Looking(RoundRobin):
        def choose(self, ask: Ask, held: Held, fleet: Fleet) -> Choice | None:
            it = fleet.instances[0]
            seen.append((it.waiting_tokens, it.running_requests, it.running_tokens))
            return super().choose(ask, held, fleet)

    rows = [TraceRequest(0.0, 20_000, 500, tuple(range(40)))]
    rows += [TraceRequest(at_s, 600, 2, (int(1e6 * at_s), 99)) for at_s in (0.35, 0.9, 1.5)]
    run = simulate(Trace("late", 512, tuple(rows)), fleet(1, 4000, signals={"load_lag_s": 1.0}), policy=Looking())
    assert 0.4 < run.ttft_s[0] < 0.45
    assert seen == [(0, 0, 0), (20_000, 0, 0), (20_600, 0, 0), (600, 1, 20_000)]


def test_when_all_are_dead_requests_fail_and_no_one_waits_for_ever() -> None:
    trace = sessions(7, 60, rate=30)
    run = simulate(trace, fleet(1, deaths=[{"instance": 0, "at_s": 1.0}]))
    check(run)
    assert (run.ending[run.arrival_s > 1.0] == FAILED).all()
    assert (run.ending == SERVED).any()


def test_a_request_is_not_sent_again_and_again() -> None:
    trace = Trace("one", 512, (TraceRequest(0.0, 8000, 400, tuple(range(16))),))
    deaths = [{"instance": at % 2, "at_s": 0.1 * (at + 1), "back_s": 0.1 * (at + 1) + 0.05} for at in range(8)]
    assert simulate(trace, fleet(2, deaths=deaths, retries=3)).ending.tolist() == [FAILED]
    assert simulate(trace, fleet(2, deaths=deaths, retries=20)).ending.tolist() == [SERVED]


def twice(first: int, second: int, gap_s: float = 5.0) -> Trace:
    """The same prompt again, after a while."""
    blocks = tuple(range(16))
    return Trace("twice", 512, (TraceRequest(0.0, first, 2, blocks), TraceRequest(gap_s, second, 2, blocks)))


def test_a_fetch_takes_latency_and_bandwidth_and_saves_the_prefill() -> None:
    config = fleet(
        2,
        blocks=4000,
        kv_bytes_per_token="128KiB",
        tiers={"remote": {"size": "8GiB", "bytes_s": "4GB/s", "latency_s": "2ms"}},
        policy="round_robin",
    )
    policy = make_policy("headwater", {"late": 1e3})  # it goes to the one that was not given anything yet
    run = simulate(twice(8192, 8192), config, policy=policy)
    assert run.instance.tolist() == [0, 1]
    times = config.instances[0].times
    fetched = 8191 // 64 * 64
    assert run.remote_tokens.tolist() == [0, fetched]
    carried_s = 2e-3 + 8191 * 131072 / 4e9
    assert run.ttft_s[1] == pytest.approx(carried_s + times.step_s(8192 - fetched), rel=1e-6)
    assert run.predicted_ttft_s[1] == pytest.approx(run.ttft_s[1], rel=0.01)


def test_each_source_is_counted_as_what_it_is() -> None:
    base = {"kv_bytes_per_token": "16KiB", "link": {"bytes_s": "50GB/s"}}
    tier = {"size": "8GiB", "bytes_s": "50GB/s"}
    for tiers, per_host, name in (
        ({"host": tier}, 2, "host_tokens"),
        ({"disk": tier}, 2, "disk_tokens"),
        ({"host": tier}, 1, "peer_tokens"),
        ({"remote": tier}, 1, "remote_tokens"),
    ):
        groups = [{"count": 2, "blocks": 4000, "instances_per_host": per_host}]
        config = parse_fleet({"instances": groups, "tiers": tiers, **base})
        run = simulate(twice(8192, 8000), config, policy=make_policy("headwater", {"late": 1e3}))
        assert run.instance.tolist() == [0, 1]
        assert getattr(run, name)[1] > 7000, name
        assert run.device_tokens[1] == 0


def test_what_is_saved_later_cannot_be_fetched_sooner() -> None:
    config = fleet(2, blocks=4000, kv_bytes_per_token="16KiB", tiers={"remote": {"size": "8GiB", "bytes_s": "4GB/s"}})
    saved_s = config.instances[0].times.step_s(8192) + 8192 * 16384 / 4e9
    for gap_s, fetched in ((saved_s - 0.01, 0), (saved_s + 0.01, 8128)):
        run = simulate(twice(8192, 8192, gap_s), config, policy=make_policy("headwater", {"late": 1e3}))
        assert run.remote_tokens.tolist() == [0, fetched]


class Mistaken(RoundRobin):
    """Takes it that the shared tier holds everything."""

    def choose(self, ask: Ask, held: Held, fleet: Fleet) -> Choice | None:
        choice = super().choose(ask, held, fleet)
        assert choice is not None
        return replace(choice, source=Place(Tier.REMOTE, 0), fetched_tokens=ask.tokens, cached_tokens=0)


def test_what_is_not_there_any_more_is_computed() -> None:
    config = fleet(2, blocks=4000, kv_bytes_per_token="16KiB", tiers={"remote": {"size": "64MiB", "bytes_s": "4GB/s"}})
    run = simulate(twice(8192, 8192), config, policy=Mistaken())
    there = 64 * 1024 // 16  # tokens
    assert run.remote_tokens.tolist() == [0, there]
    assert run.ttft_s[0] == pytest.approx(config.instances[0].times.step_s(8192))


def test_transfers_queue_where_they_share_a_way() -> None:
    config = fleet(
        2,
        kv_bytes_per_token="1KiB",
        tiers={"remote": {"size": "1GiB", "bytes_s": 1000, "latency_s": 1, "total_bytes_s": 1500}},
    )
    tiers = Tiers(config, 2, 512)
    remote = Place(Tier.REMOTE, 0)
    link = tiers.links[remote, 0]
    assert tiers.fetch(remote, 0, 3000, 10.0) == 14.0
    assert tiers.fetch(remote, 0, 3000, 10.0) == 17.0
    assert tiers.fetch(remote, 1, 3000, 10.0) == 17.0  # 9000 bytes have come through the common part by then
    tiers.refresh(12.0)
    assert link.queued_bytes == 4000
    assert link.seconds(1000) == 6.0
    tiers.refresh(20.0)
    assert link.queued_bytes == 0


def test_prefill_and_decode_apart() -> None:
    config = parse_fleet(
        {
            "instances": [
                {"count": 2, "blocks": 800, "role": "prefill"},
                {"count": 2, "blocks": 800, "role": "decode"},
            ],
            "kv_bytes_per_token": "64KiB",
            "link": {"bytes_s": "10GB/s", "latency_s": "1ms"},
        }
    )
    trace = sessions(8, 120, rate=10)
    run = simulate(trace, config)
    check(run)
    assert (run.ending == SERVED).all()
    assert set(run.instance.tolist()) == {0, 1}
    one = Trace("one", 512, (TraceRequest(0.0, 1000, 3, (1, 2)),))
    run = simulate(one, config)
    times = config.instances[0].times
    handed_s = 1e-3 + 1000 * 65536 / 10e9
    assert run.ttft_s[0] == pytest.approx(times.step_s(1000) + handed_s, rel=1e-9)
    assert run.done_s[0] == pytest.approx(run.ttft_s[0] + times.decode_s(1, 1001) + times.decode_s(1, 1002), rel=1e-9)
    lost = [{"instance": 2, "at_s": 1.0, "back_s": 3.0}, {"instance": 0, "at_s": 2.0, "back_s": 2.5}]
    config = parse_fleet({**_tree(config), "deaths": lost})
    run = simulate(trace, config)
    check(run)
    assert (run.ending == SERVED).all()


def _tree(config: FleetConfig) -> dict[str, Any]:
    groups = [{"count": it.count, "blocks": it.blocks, "role": it.role.value} for it in config.instances]
    return {"instances": groups, "kv_bytes_per_token": "64KiB", "link": {"bytes_s": "10GB/s", "latency_s": "1ms"}}


def test_several_conductors_share_a_fleet() -> None:
    trace = sessions(9, 200, rate=60)
    alone = simulate(trace, fleet(4))
    shared = simulate(trace, fleet(4, conductors={"count": 3, "exchange_s": 0.05}))
    check(shared)
    assert (shared.ending == SERVED).all()
    assert np.nanmean(shared.ttft_s) < 2 * np.nanmean(alone.ttft_s)
    deaf = simulate(trace, fleet(4, conductors={"count": 3, "exchange_s": 1000.0}))
    assert deaf.log_hash != shared.log_hash


def test_admission_keeps_its_promise_under_overload() -> None:
    trace = sessions(10, 400, rate=150)
    slo = {"ttft_s": 0.5, "tpot_s": 0.2}
    everybody = simulate(trace, fleet(2, slo=slo))
    chosen = simulate(trace, fleet(2, slo=slo, admission=True))
    check(chosen)
    assert (chosen.ending == REJECTED).any()
    good = [(run.ttft_s[run.ending == SERVED] <= 0.5).sum() for run in (everybody, chosen)]
    assert good[1] > good[0]


def test_load_squeezes_the_arrivals() -> None:
    trace = sessions(11, 60, rate=5)
    run = simulate(trace, fleet(load=4.0))
    assert run.arrival_s[-1] == pytest.approx(trace.requests[-1].arrival_s / 4)
    assert np.nanmean(run.ttft_s) > np.nanmean(simulate(trace, fleet()).ttft_s)


def test_what_is_larger_than_an_instance_fails_alone() -> None:
    rows = (TraceRequest(0.0, 5000, 3, tuple(range(10))), TraceRequest(0.0, 500, 3, (99,)))
    run = simulate(Trace("two", 512, rows), fleet(2, blocks=20), policy="round_robin")
    assert run.ending.tolist() == [FAILED, SERVED]


def test_blocks_of_the_trace_and_of_the_engine_differ() -> None:
    rows = tuple(TraceRequest(float(at), 100, 2, tuple(range(7))) for at in range(2))
    run = simulate(Trace("fine", 16, rows), parse_fleet({"instances": [{"blocks": 50, "block_tokens": 32}]}))
    assert run.device_tokens.tolist() == [0, 96]
    unknown = tuple(TraceRequest(float(at), 100, 2) for at in range(2))
    run = simulate(Trace("unknown", 16, unknown), parse_fleet({"instances": [{"blocks": 50, "block_tokens": 32}]}))
    assert run.device_tokens.tolist() == [0, 0]
    with pytest.raises(ConfigError, match="block_tokens"):
        simulate(Trace("odd", 48, rows), parse_fleet({"instances": [{"blocks": 50, "block_tokens": 64}]}))
    with pytest.raises(ConfigError, match="block_tokens: engines' blocks of 48"):
        simulate(sessions(1), parse_fleet({"instances": [{"blocks": 500, "block_tokens": 48}]}))


def test_an_empty_trace_is_over_at_once() -> None:
    run = simulate(Trace("empty", 512, ()), fleet())
    assert run.ttft_s.size == 0


def test_progress_goes_to_the_end_and_samples_are_taken() -> None:
    seen: list[tuple[int, int]] = []
    trace = sessions(12, 100)
    run = simulate(trace, fleet(sample_s=0.5), progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (100, 100)
    assert run.sample_s[0] == pytest.approx(0.5)
    assert run.waiting_tokens.shape == run.running.shape == (run.sample_s.size, 4)
    assert run.running.max() > 0


def test_samples_are_bounded() -> None:
    run = simulate(sessions(12, 30, rate=0.2), fleet(sample_s=1e-6))
    assert SAMPLES_MAX / 2 < run.sample_s.size <= 2 * SAMPLES_MAX


def test_what_came_late_is_not_believed_of_who_has_died() -> None:
    """News of what an instance held reach the index after its death; the next life holds nothing."""
    trace = sessions(3, 200)
    deaths = [{"instance": number, "at_s": 4.0, "back_s": 4.0} for number in range(4)]
    world = World(trace, fleet(signals={"event_lag_s": 1.0}, deaths=deaths), [make_policy("headwater")], 0)
    world.play()
    index = world.sight.index
    assert index is not None
    for place, engine in zip(world.stage.places, world.stage.engines, strict=True):
        holds = sum(blocks // 8 for _, blocks in engine.pool.resident())
        assert index.counts().get(place, 0) == holds


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("headwatr", {}, "'headwater'"),
        ("headwater", {"stick_s": 1}, "'sticky_s'"),
        ("dynamo", {"prefill_scale": 1}, "'prefill_load_scale'"),
        ("headwater", {"sticky_s": "x"}, "sticky_s: 'x' is not a number"),
        ("headwater", {"work": -1}, "work: -1 is not a number of 0 or more"),
        ("dynamo", {"prefill_load_scale": float("nan")}, "nan is not a number"),
    ],
)
def test_unknown_policies_and_knobs_name_the_nearest(name: str, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_policy(name, knobs)


def in_turn(prompts: tuple[int, ...], saving: str, size: str = "8GiB", bytes_s: float = 4e9) -> World:
    """One instance with room for one prompt of those that come in turn, each of 8,192 tokens, and a tier below it."""
    rows = (TraceRequest(5.0 * at, 8192, 2, tuple(range(16 * it, 16 * it + 16))) for at, it in enumerate(prompts))
    remote = {"size": size, "bytes_s": int(bytes_s), "saving": saving}
    config = fleet(1, 150, kv_bytes_per_token="16KiB", tiers={"remote": remote})
    return World(Trace("in turn", 512, tuple(rows)), config, [make_policy("headwater")], 0)


def test_a_tier_that_is_written_late_adds_to_what_the_device_holds() -> None:
    one_prompt = "128MiB"
    late = in_turn((0, 1, 0), "evicted", one_prompt).play()
    left = 150 - 128 - 1  # the second prompt and its answer took the place of the first one's end
    assert late.device_tokens.tolist() == [0, 0, left * 64]
    assert late.remote_tokens.tolist() == [0, 0, 8191 // 64 * 64 - left * 64]
    assert late.log_hash == in_turn((0, 1, 0), "evicted", one_prompt).play().log_hash
    # Written at once, the second prompt has taken the place of the first one there as well.
    assert in_turn((0, 1, 0), "computed", one_prompt).play().remote_tokens.tolist() == [0, 0, 0]


def test_a_link_that_is_too_slow_loses_what_is_saved_late() -> None:
    # The first prompt is written when the second comes, the second one's turn is 5 s later.
    for carried_s, kept in ((5 + 2 * LATE_S, [16, 0]), (5 + LATE_S / 2, [16, 16])):
        world = in_turn((0, 1, 2), "evicted", bytes_s=8192 * 16384 / carried_s)
        world.play()
        store = world.stage.tiers.stores[Place(Tier.REMOTE, 0)]
        assert [store.holds(path) for path in world.stage.unit_paths[:2]] == kept


def test_a_tier_written_late_takes_nothing_before_it_is_evicted() -> None:
    for saving, fetched in (("computed", 8128), ("evicted", 0)):
        remote = {"size": "8GiB", "bytes_s": "50GB/s", "saving": saving}
        config = fleet(2, blocks=4000, kv_bytes_per_token="16KiB", tiers={"remote": remote})
        run = simulate(twice(8192, 8192), config, policy=make_policy("headwater", {"late": 1e3}))
        assert run.instance.tolist() == [0, 1]
        assert run.remote_tokens.tolist() == [0, fetched]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_works_with_late_news_and_several_conductors(policy: str) -> None:
    trace = sessions(13, 60, rate=40)
    signals = {"event_lag_s": 0.1, "load_lag_s": 0.05}
    run = simulate(trace, fleet(signals=signals, conductors={"count": 2, "exchange_s": 0.02}), policy=policy)
    check(run)
    assert (run.ending == SERVED).all()


@pytest.mark.parametrize("policy", ["headwater", "dynamo", "least_load"])
def test_nobody_knows_how_long_an_answer_is_before_it_has_ended(policy: str) -> None:
    trace = sessions(14, 150, rate=40)
    rows = list(trace.requests)
    rows[20] = replace(rows[20], output_tokens=rows[20].output_tokens + 40)
    longer = replace(trace, requests=tuple(rows))
    runs = [simulate(it, fleet(3), policy=policy) for it in (trace, longer)]
    before = runs[0].arrival_s <= runs[0].done_s[20]
    assert 25 < before.sum() < 150
    assert (runs[0].instance[before] == runs[1].instance[before]).all()
    assert runs[0].log_hash != runs[1].log_hash


def test_a_policy_that_looks_at_no_holders_is_not_told_of_them() -> None:
    class Blind(RoundRobin):
        needs_held = False

        def choose(self, ask: Ask, held: Held, fleet: Fleet) -> Choice | None:
            assert not held
            return super().choose(ask, held, fleet)

    trace = sessions(15, 60)
    blind, seeing = simulate(trace, fleet(), policy=Blind()), simulate(trace, fleet(), policy="round_robin")
    assert blind.instance.tolist() == seeing.instance.tolist()
    assert blind.device_tokens.tolist() == seeing.device_tokens.tolist()
