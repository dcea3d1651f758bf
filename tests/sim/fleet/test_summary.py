"""The figures of a run against hand-computed ones, also of one that served not all, or nobody; and grids of runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headwater.errors import ConfigError
from headwater.sim.fleet.config import FleetConfig, SloConfig, parse_fleet
from headwater.sim.fleet.results import Ending, Run
from headwater.sim.fleet.summary import CURVE, summarise
from headwater.sim.fleet.sweep import Cell, change, grid, read_change, read_sweep, sweep
from headwater.traces.model import Trace
from tests.sim.fleet.plays import nobody_served

NAN = math.nan
TREE = {"instances": [{"count": 4, "blocks": 100, "block_tokens": 16}], "policy": "round_robin"}
SERVED, REJECTED, FAILED = (int(it) for it in Ending)


def whole(*numbers: int) -> Any:
    return np.asarray(numbers, np.int64)


def real(*numbers: float) -> Any:
    return np.asarray(numbers, np.float64)


def small_run() -> Run:
    """Six requests on instances 0 and 1 of 4: four served, one rejected, one failed."""
    return Run(
        settings={},
        seed=0,
        arrival_s=real(10, 11, 12, 13, 14, 20),
        input_tokens=whole(100, 200, 300, 400, 0, 0),
        output_tokens=whole(10, 1, 10, 10, 0, 0),
        ending=np.asarray([SERVED, SERVED, SERVED, SERVED, REJECTED, FAILED], np.int8),
        instance=np.asarray([0, 1, 0, 0, -1, -1], np.int32),
        ttft_s=real(1, 2, 3, 1, NAN, NAN),
        tpot_s=real(0.05, NAN, 0.05, 0.2, NAN, NAN),
        done_s=real(12, 13, 16, 18, NAN, NAN),
        predicted_ttft_s=real(1.5, NAN, 2, 1, 9, NAN),
        device_tokens=whole(0, 100, 0, 50, 0, 0),
        host_tokens=whole(0, 0, 100, 0, 0, 0),
        disk_tokens=whole(0, 0, 10, 0, 0, 0),
        peer_tokens=whole(0, 0, 0, 20, 0, 0),
        remote_tokens=whole(0, 0, 0, 30, 0, 0),
        sample_s=real(10, 10.5, 19, 40),
        waiting_tokens=np.asarray([[0, 5, 0, 0], [7, 1, 0, 0], [2, 0, 0, 3], [99, 99, 99, 99]], np.int64),
        wall_s=0.5,
        log_hash="abc",
    )


def test_every_figure_by_hand() -> None:
    it = summarise(small_run(), SloConfig(ttft_s=2.0, tpot_s=0.1), 4)
    assert (it.requests, it.served, it.rejected, it.failed) == (6, 4, 1, 1)
    assert it.span_s == 10.0
    reuse = it.reuse
    assert (reuse.device, reuse.host, reuse.disk, reuse.peer, reuse.remote) == (0.15, 0.1, 0.01, 0.02, 0.03)
    assert reuse.overall == pytest.approx(0.31)
    assert (it.ttft.mean_s, it.ttft.p50_s) == (1.75, 1.5)
    assert it.ttft.p90_s == pytest.approx(2.7) and it.ttft.p99_s == pytest.approx(2.97)
    assert (it.tpot.mean_s, it.tpot.p50_s) == (pytest.approx(0.1), 0.05)
    assert len(it.ttft.curve_s) == len(CURVE) and (it.ttft.curve_s[0], it.ttft.curve_s[-1]) == (1.0, 3.0)
    # Both SLOs: the first, and the second, whose one token has no time per token. 3 is late, 4 is slow.
    assert (it.goodput_rps, it.goodput_share) == (0.2, pytest.approx(2 / 6))
    # Computed: 100, 100, 190, 300; so 590 at instance 0 and 100 at 1, with a mean of 172.5 for four.
    assert it.balance.imbalance == pytest.approx(590 / 172.5)
    assert it.balance.at_s == tuple(10.5 + n for n in range(10))
    # In each of the first four windows one instance of four does all.
    assert it.balance.by_window[:4] == (4.0, 4.0, 4.0, 4.0) and all(map(math.isnan, it.balance.by_window[4:]))
    assert it.balance.imbalance_windows == 4.0
    assert it.balance.busiest_tokens == (7, 0, 0, 0, 0, 0, 0, 0, 0, 3)
    # Errors of 0.5, -1 and 0, of 1, 3 and 1.
    assert it.prediction.error_s == pytest.approx(0.5) and it.prediction.bias_s == pytest.approx(-1 / 6)
    assert it.prediction.error_share == pytest.approx(1 / 3)
    assert (it.wall_s, it.simulated_rps, it.log_hash) == (0.5, 12.0, "abc")


def test_the_fleet_is_as_large_as_its_samples_where_nobody_says() -> None:
    run = small_run()
    assert summarise(run).balance.imbalance == pytest.approx(590 / 172.5)
    bare = replace(run, sample_s=real(), waiting_tokens=np.zeros((0, 0), np.int64))
    assert summarise(bare).balance.imbalance == pytest.approx(590 / 345)
    assert summarise(bare).balance.busiest_tokens == ()


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("ending", [Ending.REJECTED, Ending.FAILED])
def test_of_a_run_that_served_nobody_nothing_is_made_up(count: int, ending: Ending) -> None:
    it = summarise(nobody_served(count, int(ending)))
    assert (it.requests, it.served, it.rejected + it.failed) == (count, 0, count)
    unknown = (it.reuse.overall, it.ttft.mean_s, it.tpot.p99_s, it.balance.imbalance, it.prediction.error_s)
    assert all(map(math.isnan, unknown))
    assert it.goodput_share == 0.0 if count else math.isnan(it.goodput_share)
    plain = it.as_dict()
    assert plain["ttft"] == {"mean_s": None, "p50_s": None, "p90_s": None, "p99_s": None, "curve_s": []}
    json.dumps(plain, allow_nan=False)


def test_requests_that_arrive_at_once_have_the_span_until_the_last_token() -> None:
    run = small_run()
    run.arrival_s = np.full(6, 10.0)
    it = summarise(run, SloConfig(ttft_s=2.0, tpot_s=0.1))
    assert it.span_s == 8.0 and it.goodput_rps == 0.25
    assert it.balance.by_window[0] == pytest.approx(590 / 172.5)
    run.done_s = run.arrival_s
    it = summarise(run)
    assert it.span_s == 0.0 and math.isnan(it.goodput_rps) and it.balance.imbalance == pytest.approx(590 / 172.5)


def test_what_is_met_exactly_is_met() -> None:
    it = summarise(small_run(), SloConfig(ttft_s=3.0, tpot_s=0.2))
    assert it.goodput_share == pytest.approx(4 / 6)
    assert summarise(small_run(), SloConfig(ttft_s=0.5, tpot_s=0.2)).goodput_share == 0.0


def test_a_setting_is_changed_in_a_copy() -> None:
    tree = {"tiers": {"host": {"size": 1}}, "instances": [{"blocks": 5}]}
    assert change(tree, "tiers.host.size", 2) == {"tiers": {"host": {"size": 2}}, "instances": [{"blocks": 5}]}
    assert change(tree, "instances.0.blocks", 6)["instances"] == [{"blocks": 6}]
    assert change(tree, "slo.ttft_s", 1)["slo"] == {"ttft_s": 1}
    assert tree == {"tiers": {"host": {"size": 1}}, "instances": [{"blocks": 5}]}
    for path, said in (
        ("instances.1.blocks", "leads into a list of 1"),
        ("instances.x", "leads into a list of 1"),
        ("instances.0.blocks.more", "blocks is a value, not a section"),
    ):
        with pytest.raises(ConfigError, match=said):
            change(tree, path, 1)


def test_settings_and_their_values_are_read_as_in_the_file() -> None:
    assert read_change("tiers.remote.size=64GiB") == ("tiers.remote.size", "64GiB")
    assert read_change("admission=true") == ("admission", True)
    assert read_sweep("load=1, 2.5,4") == ("load", [1, 2.5, 4])
    for bad in ("load", "=1", "a..b=1", ".a=1", "a=[", "a={b"):
        with pytest.raises(ConfigError, match="write"):
            read_change(bad)
    for bad in ("load", "load=", "load=,"):
        with pytest.raises(ConfigError, match="write PATH=VALUE"):
            read_sweep(bad)


def test_a_grid_has_all_combinations_in_order() -> None:
    cells = grid(TREE, parse_fleet, [("policy", ["a", "b"]), ("load", [1, 2]), ("instances.0.blocks", [7, 8])], seed=3)
    found = [(it.config.policy.name, it.config.load, it.config.instances[0].blocks) for it in cells]
    assert found == [(p, load, n) for p in "ab" for load in (1, 2) for n in (7, 8)]
    assert dict(cells[1].settings) == {"policy": "a", "load": 1.0, "instances.0.blocks": 8}
    assert {it.seed for it in cells} == {3}
    assert [dict(it.settings) for it in grid(TREE, parse_fleet, [])] == [{"policy": "round_robin", "load": 1.0}]
    with pytest.raises(ConfigError, match="blocks"):
        grid(TREE, parse_fleet, [("instances.0.blocks", [7, -8])])
    with pytest.raises(ConfigError, match="10,100 runs: more than"):
        grid(TREE, parse_fleet, [("load", list(range(1, 102))), ("retries", list(range(100)))])


def play(trace: Trace, config: FleetConfig, *, seed: int = 0, progress: Any = None) -> Run:
    run = small_run()
    run.ttft_s = run.ttft_s * config.load + seed
    if progress is not None:
        progress(3, 6)
        progress(6, 6)
    return run


def test_runs_are_summed_up_in_the_order_of_the_cells_with_progress() -> None:
    cells = grid(TREE, parse_fleet, [("load", [1, 3])], seed=10)
    told: list[tuple[float, float]] = []
    found = sweep(Trace("none", 16, ()), cells, play, advance=lambda done, total: told.append((done, total)))
    assert [it.settings["load"] for it in found] == [1.0, 3.0]
    assert [it.summary.ttft.mean_s for it in found] == [11.75, 15.25]
    assert told == [(0.5, 2), (1.0, 2), (1.5, 2), (2.0, 2)]
    # The fleet's SLO and its number of instances are those that count.
    assert found[0].summary.slo == SloConfig() and found[0].summary.balance.imbalance == pytest.approx(590 / 172.5)


def test_a_cell_alone_gives_what_it_gives_in_a_grid() -> None:
    cells = grid(TREE, parse_fleet, [("load", [1, 3])])
    alone = sweep(Trace("none", 16, ()), [Cell(cells[1].config, cells[1].seed, cells[1].settings)], play)
    assert alone == sweep(Trace("none", 16, ()), cells, play)[1:]
