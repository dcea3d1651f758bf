"""The figures of routing: on a small made-up trace, with a stand-in that speaks as Dynamo's replay does."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.bench import replays, route, route_goodput, route_replay, turns
from headwater.bench.harness import Effort, Experiment, Reading, Readings, Unmeasured, conclude
from headwater.bench.replays import CONVERSATION, SYNTHETIC, Scenario
from headwater.bench.suites import SUITES
from headwater.core.policies import POLICIES
from headwater.errors import UnavailableError
from headwater.traces.generate import Chats, chats

SEED = 5
SMALL = Scenario(2, 1024)
ROWS = {"round_robin": (0.4, 200.0), 1.0: (0.5, 120.0), 2.0: (0.45, 100.0), 8.0: (0.3, 110.0), 32.0: (0.2, 130.0)}
STAND_IN = f"""
import json, sys
rows = {ROWS!r}
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    open("orders", "a").write(line)
    order = json.loads(line)
    reuse, ttft_ms = rows[order.get("router_config", {{}}).get("prefill_load_scale", order["router"])]
    print(json.dumps({{"reuse": reuse, "ttft_mean_ms": ttft_ms}}), flush=True)
"""
NEVER_READY = "raise SystemExit('no such processor')"


@pytest.fixture
def effort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Effort:
    """Two traces of a few chats, and small fleets."""
    print(f"seed {SEED}")
    trace = chats(SEED, replays.TRACE_BLOCK_TOKENS, Chats(chats=12, chats_s=4.0, think_s=2.0, message_tokens=600))
    lines = [
        json.dumps(
            {
                "timestamp": round(1000 * it.arrival_s),
                "input_length": it.input_tokens,
                "output_length": it.output_tokens,
                "hash_ids": it.blocks,
            }
        )
        for it in trace.requests
    ]
    for name in (CONVERSATION, SYNTHETIC):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    return Effort(rounds=2, traces=tmp_path)


def dynamo(path: Path, monkeypatch: pytest.MonkeyPatch, text: str = STAND_IN) -> None:
    """The peer's Python and driver, as if they were installed."""
    (path / "dynamo_replay.py").write_text(text, "utf-8")
    python = path / "dynamo/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(turns, "PEERS", path)
    monkeypatch.setattr(turns, "DRIVERS", path)


def orders(path: Path) -> list[dict[str, object]]:
    """What the stand-in was asked for."""
    file = path / "orders"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def take(experiment: Experiment, effort: Effort, *prefixes: str) -> Readings:
    """Its figures that begin so, each with a reading or a reason, whose goals can be held against it."""
    specs = [it for it in experiment.specs if it.name.startswith(prefixes or "")]
    assert specs
    readings = experiment.measure(effort, frozenset(it.name for it in specs))
    for spec in specs:
        if isinstance(reading := readings[spec.name], Reading):
            conclude(spec, reading)
    return readings


def value(readings: Readings, name: str) -> float:
    reading = readings[name]
    assert isinstance(reading, Reading), f"{name}: {reading}"
    return reading.value


def test_all_of_it_is_in_the_suite_once() -> None:
    names = [it.name for it in SUITES["route"].specs]
    assert len(names) == len(set(names))
    kinds = {it.split("/")[0] for it in names}
    assert kinds == {"calibrate", "replay", "shared", "goodput", "degrade", "index", "decide", "sim"}
    for it in SUITES["route"].specs:
        assert it.goal is None or not it.goal.factor or it.yardstick, it.name


@pytest.mark.parametrize(
    "experiment", [route_replay.REPLAYS, route_goodput.GOODPUT, route_goodput.DEGRADE, route.SIMULATOR]
)
def test_without_the_traces_it_is_said_where_to_get_them(experiment: Experiment, tmp_path: Path) -> None:
    readings = take(experiment, Effort(1, traces=tmp_path / "nowhere"))
    reasons = {it.reason for it in readings.values() if isinstance(it, Unmeasured)}
    assert len(readings) == len(experiment.specs)
    assert all("kvcache-ai/Mooncake" in it and "--traces" in it and "nowhere" in it for it in reasons)


def test_round_robin_is_held_against_theirs(effort: Effort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo(tmp_path, monkeypatch)
    readings = take(route_replay.REPLAYS, effort, "calibrate/8x4096/x2/")
    ours = value(readings, "calibrate/8x4096/x2/reuse")
    assert 0 < ours < 1
    assert value(readings, "calibrate/8x4096/x2/reuse-error") == pytest.approx(100 * abs(ours / 0.4 - 1))
    ttft = readings["calibrate/8x4096/x2/ttft"]
    assert isinstance(ttft, Reading) and ttft.yardstick_value == 200.0
    (order,) = orders(tmp_path)
    wanted = {"workers": 8, "blocks": 4096, "block_tokens": 64, "trace_block_tokens": 512, "speedup": 2}
    assert order == wanted | {"router": "round_robin", "trace": str(tmp_path / f"{CONVERSATION}.jsonl")}


def test_ours_stands_beside_the_best_of_each_column(
    effort: Effort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamo(tmp_path, monkeypatch)
    readings = take(route_replay.REPLAYS, effort, "replay/8x16384/x1/", "shared/")
    for name in ("replay/8x16384/x1/headwater", "shared/8x16384/x1/headwater"):
        reuse, ttft = readings[f"{name}/reuse"], readings[f"{name}/ttft"]
        assert isinstance(reuse, Reading) and isinstance(ttft, Reading)
        assert (reuse.yardstick_value, ttft.yardstick_value) == (0.5, 100.0)
    assert {it.split("/")[3] for it in readings if it.startswith("replay/")} == set(POLICIES)
    assert value(readings, "replay/8x16384/x1/headwater/reuse") > value(readings, "replay/8x16384/x1/session/reuse")
    scales = [it["router_config"] for it in orders(tmp_path)]
    # Once each, though two figures need them.
    assert scales == [{"prefill_load_scale": scale} for scale in route_replay.SCALES]


@pytest.mark.parametrize(
    ("text", "said"), [(None, "run benchmarks/install_peers.py"), (NEVER_READY, "no such processor")]
)
def test_without_the_peer_the_rest_is_measured(
    effort: Effort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    if text is not None:
        dynamo(tmp_path, monkeypatch, text)
    readings = take(route_replay.REPLAYS, effort, "calibrate/8x4096/x1/", "replay/8x4096/x1/headwater/", "shared/")
    missing = {name for name, it in readings.items() if isinstance(it, Unmeasured) and said in it.reason}
    assert missing == {
        *(f"calibrate/8x4096/x1/{it}" for it in ("reuse", "reuse-error", "ttft", "ttft-error")),
        *(f"replay/8x4096/x1/headwater/{it}" for it in ("reuse", "ttft")),
        *(f"shared/8x16384/x1/{it}/ttft" for it in ("headwater", "nodes")),
    }
    assert value(readings, "shared/8x16384/x1/headwater/reuse") > 0


def test_a_quick_look_is_at_the_same_beginning_here_and_there(
    effort: Effort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamo(tmp_path, monkeypatch)
    monkeypatch.setattr(replays, "QUICK_REQUESTS", 3)
    quick = replace(effort, quick=True)
    assert len(replays.recorded(CONVERSATION, quick).requests) == 3
    with replays.dynamo(quick, tmp_path) as theirs:
        theirs.play(SMALL, "round_robin")
    (order,) = orders(tmp_path)
    assert isinstance(order["requests"], list) and len(order["requests"]) == 3 and "trace" not in order


def test_a_replay_that_dies_is_not_asked_again(effort: Effort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo(
        tmp_path, monkeypatch, "import sys\nprint('{}', flush=True)\nsys.stdin.readline()\nsys.exit('out of blocks')"
    )
    asked = []
    ask = turns.Turner.ask

    def noted(it: turns.Turner, request: str, patience_s: float = 1.0) -> dict[str, object]:
        asked.append(request)
        return ask(it, request, patience_s)

    monkeypatch.setattr(turns.Turner, "ask", noted)
    with replays.dynamo(effort, tmp_path) as theirs:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="Dynamo's replay does not go on: out of blocks"):
                theirs.play(SMALL, "kv", 1.0)
    assert len(asked) == 1  # one that is silent would take its time again for each figure


def test_goodput_is_compared_with_the_best_without_admission(effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = Scenario(2, 128, 8)
    monkeypatch.setattr(route_goodput, "LOADS", (crowded,))
    policies = {it: POLICIES[it] for it in ("headwater", "round_robin", "least_load")}
    monkeypatch.setattr(route_goodput, "POLICIES", policies)
    specs = tuple(route_goodput._goodput_specs())
    readings = take(replace(route_goodput.GOODPUT, specs=specs), effort)
    trace = replays.recorded(CONVERSATION, effort)
    for title, slo in route_goodput.SLOS.items():
        settings = {"slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}}
        each = [replays.played(trace, crowded.fleet(it, settings), effort).goodput_rps for it in policies]
        rate = readings[f"goodput/2x128/x8/{title}/rate"]
        assert isinstance(rate, Reading) and rate.yardstick_value == max(each) > min(each)
        assert 0 < value(readings, f"goodput/2x128/x8/{title}/kept") <= 100
    assert all(it.goal is not None for it in specs if it.name.endswith("/rate"))


def test_signals_reach_the_policy(effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_goodput, "FLEET", SMALL)
    readings = take(route_goodput.DEGRADE, effort, "degrade/synthetic/")
    assert len(readings) == len(route_goodput.SIGNALS)
    blind = readings["degrade/synthetic/no-events/ttft"]
    live = replays.played(replays.recorded(SYNTHETIC, effort), SMALL.fleet("headwater"), effort)
    robin = replays.played(replays.recorded(SYNTHETIC, effort), SMALL.fleet("round_robin"), effort)
    assert isinstance(blind, Reading) and blind.yardstick_value == pytest.approx(1e3 * robin.ttft.mean_s)
    assert blind.value > 1e3 * live.ttft.mean_s


def test_simulations_are_timed(effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    size = route.Size(SMALL, ("round_robin",), 9, requests=4)
    monkeypatch.setattr(route, "SIZES", (size,))
    clocks = replace(effort.clocks, wall=lambda: 0.5 * next(now))
    readings = route.measure_simulator(replace(effort, clocks=clocks), frozenset({size.name("round_robin")}))
    rate = readings["sim/2x1024/round_robin/rate"]
    assert isinstance(rate, Reading) and rate.value == 8.0 and rate.samples == effort.rounds


def test_decisions_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "WORKERS", 4)
    monkeypatch.setattr(route, "PROMPT_TOKENS", 256)
    readings = take(route.DECIDE, Effort(1, quick=True))
    assert 0 < value(readings, "decide/p50") <= value(readings, "decide/p99")
