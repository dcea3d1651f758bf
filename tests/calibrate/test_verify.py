"""Workloads to verify with, the file, and the command, against engines that are known."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.calibrate.calibration import Options, check
from headwater.calibrate.file import Calibrated, write
from headwater.calibrate.fit import FitError, Fitted, Range
from headwater.calibrate.server import Served
from headwater.calibrate.verify import Verified, draw, fleet_of
from headwater.cli import calibrate as command
from headwater.cli.options import add_json
from headwater.enginetimes import EngineTimes
from headwater.errors import ConfigError, RefusedError
from headwater.sim.fleet.config import read_times
from headwater.sim.fleet.world import simulate
from tests.calibrate.conftest import Handler, HttpServer, VirtualEngine

TIMES = EngineTimes(0.0165, 1.52e-5, 4.2e-10, 8.4e-10, 5.7e-3, 2e-5, 5e-8, step_tokens=4096, requests_max=64)
FITTED = Fitted(
    TIMES, FitError(9, 0.01, 0.02, 0.03, 0.04), FitError(8, 0.01, 0.02, 0.03, 0.04),
    Range((16, 2000), (0, 1000), (1, 8), (20, 9000)), ("a note",),
)  # fmt: skip
ENGINE = Calibrated("http://host:1", "2026-01-02T03:04:05+00:00", Served("m", 4096, 16, 65_536), FITTED)


def test_a_workload_has_what_its_trace_says(seed: int) -> None:
    """The trace's blocks are equal where the prompts' tokens are, and only there."""
    work = draw(ENGINE, 60, seed)
    rows = work.trace.requests
    assert len(rows) == len(work.prompts) > 100
    contents: dict[int, tuple[int, ...]] = {}
    for row, prompt in zip(rows, work.prompts, strict=True):
        assert row.input_tokens == len(prompt) <= 2000
        assert len(row.blocks) == -(-len(prompt) // 16)
        for number, block in enumerate(row.blocks):
            assert contents.setdefault(block, prompt[number * 16 : number * 16 + 16]) == prompt[number * 16 :][:16]
    assert len(set(contents.values())) == len(contents)
    shared = sum(len(it.blocks) for it in rows) - len(contents)
    assert shared > len(contents) / 20, "some begin like others"
    assert [it.arrival_s for it in rows] == sorted(it.arrival_s for it in rows)
    assert 30 < rows[-1].arrival_s < 100


def test_the_same_seed_draws_the_same_requests_with_new_contents(seed: int) -> None:
    first, again = draw(ENGINE, 10, seed), draw(ENGINE, 10, seed)
    assert first.trace == again.trace
    assert not set(first.prompts) & set(again.prompts)
    assert draw(ENGINE, 10, seed + 1).trace != first.trace


def test_the_engine_is_as_busy_as_was_asked_for(seed: int) -> None:
    """Twice the load makes requests wait longer, in a simulation with the same times."""

    def ttft_s(load: float) -> float:
        trace = draw(ENGINE, 60, seed, load).trace
        return float(simulate(trace, fleet_of(ENGINE, trace)).ttft_s.mean())

    assert ttft_s(0.9) > 1.2 * ttft_s(0.2)


def test_one_instance_with_the_engines_room(seed: int) -> None:
    trace = draw(ENGINE, 5, seed).trace
    assert fleet_of(ENGINE, trace).instances[0].blocks == 4096
    unknown = replace(ENGINE, served=Served("m"))
    group = fleet_of(unknown, trace).instances[0]
    assert group.capacity_tokens >= sum(it.input_tokens + it.output_tokens for it in trace.requests)


def test_errors_are_shares_of_what_the_engine_took() -> None:
    it = Verified(10, measured_ttft_s=2.0, predicted_ttft_s=1.5, measured_tpot_s=0.1, predicted_tpot_s=0.11, seed=1)
    assert it.ttft_error == pytest.approx(-0.25)
    assert it.tpot_error == pytest.approx(0.1)


def test_an_engine_is_verified_over_http(http: HttpServer) -> None:
    """An engine that answers at once was calibrated as one that takes its time: the error says so."""
    quick = replace(ENGINE, url=http.url, fitted=replace(FITTED, times=replace(TIMES, prefill_fixed_s=0.3)))
    told: list[float] = []
    found = check(http.url, Options(), quick, 0.5, lambda done, what: told.append(done))
    assert found.requests >= 10
    assert found.ttft_error > 1
    assert told[-1] == 1.0
    prompts = [body["prompt"] for path, _, body in http.seen if path == "/v1/completions"]
    assert len(prompts) == found.requests + 1


def test_a_server_of_text_cannot_be_verified(http: HttpServer) -> None:
    def reply(handler: Handler, body: dict[str, object]) -> None:
        if isinstance(body["prompt"], str):
            handler.stream({"choices": [{"text": "a"}]}, {"choices": [], "usage": {"prompt_tokens": 5}})
        else:
            handler.say(400, "text only")

    http.reply = reply
    with pytest.raises(RefusedError, match="token ids"):
        check(http.url, Options(), ENGINE, 0.5, lambda done, what: None)


def test_a_file_is_read_by_what_simulates(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    write(path, ENGINE)
    assert read_times(str(path), 65_536) == TIMES
    text = path.read_text()
    for word in ("model: m", "url: http://host:1", "2026-01-02", "a note", "left_out_p90", "capacity_tokens: 65536"):
        assert word in text
    assert [it.name for it in tmp_path.iterdir()] == ["engine.yaml"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "no" / "engine.yaml", ENGINE)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    add_json(parser)
    command.add_options(parser)
    return parser.parse_args(words)


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Options]]:
    """What the command asks for; the measuring itself is tested elsewhere."""
    asked: list[tuple[str, Options]] = []

    def calibrate(url: str, options: Options, progress: object) -> Calibrated:
        asked.append((url, options))
        return ENGINE

    def verified(*_: object) -> Verified:
        return Verified(30, 2.0, 2.2, 0.1, 0.1, 1)

    monkeypatch.setattr(command, "calibrate", calibrate)
    monkeypatch.setattr(command, "check", verified)
    return asked


def test_the_command_shows_terms_errors_and_range(
    calibrated: list[tuple[str, Options]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "engine.yaml"
    assert command.run(arguments("--calibrate", "http://h", "--verify", "--out", str(out), "--seconds", "9")) == 0
    text = capsys.readouterr().out
    for pattern in (
        r"a prompt token\s+│ +15.2 µs", r"prefill\s+│ +9 │ +1.0 %", "16 to 2,000 new tokens", "note: a note",
        r"first token\s+│ +2 s │ +2.2 s │ +\+10.0%", "wrote",
    ):  # fmt: skip
        assert re.search(pattern, text), pattern
    assert out.exists()
    assert calibrated[0][1].effort.seconds == 9


def test_the_command_as_json(
    calibrated: list[tuple[str, Options]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "hidden")
    words = ("--calibrate", "http://h", "--json", "--verify", "30", "--api-key-env", "ENGINE_KEY", "--seed", "7")
    assert command.run(arguments(*words)) == 0
    out = capsys.readouterr().out
    told = json.loads(out)
    assert told["times"]["prefill_token_s"] == 1.52e-5
    assert told["verified"]["ttft_error"] == pytest.approx(0.1)
    assert calibrated[0][1].key == "hidden"
    assert calibrated[0][1].effort.seed == 7
    assert "hidden" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("--api-key-env", "HEADWATER_TEST_NO_SUCH_KEY"),
        ("--max-length", "0"),
        ("--step-tokens", "-1"),
        ("--request-timeout", "nan"),
        ("--out", "no/such/directory/engine.yaml"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    calibrated: list[tuple[str, Options]], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        command.run(arguments("--calibrate", "http://h", *words))
    assert not calibrated


def test_a_virtual_engine_and_the_simulated_one_agree(seed: int) -> None:
    """One request after the other, far apart: both have the same idea of what the terms mean."""
    trace = draw(ENGINE, 20, seed).trace
    apart = replace(trace, requests=tuple(replace(it, arrival_s=100.0 * at) for at, it in enumerate(trace.requests)))
    run = simulate(apart, fleet_of(ENGINE, apart))
    engine = VirtualEngine(TIMES)
    seen: set[int] = set()
    for row, ttft_s, found in zip(apart.requests, run.ttft_s, run.device_tokens, strict=True):
        assert found == min(sum(it in seen for it in row.blocks) * 16, (row.input_tokens - 1) // 16 * 16)
        seen.update(row.blocks[: row.input_tokens // 16])
        assert ttft_s == pytest.approx(engine.times.prefill_s(row.input_tokens - int(found), int(found)), rel=1e-6)
