"""A real engine is measured, and its fit predicts requests that it was not fitted to."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.calibrate.calibration import Options, calibrate, check
from headwater.calibrate.file import write
from headwater.calibrate.probe import Effort
from headwater.demo.beginning import MODEL
from headwater.demo.command import START_S
from headwater.demo.processes import Children, start_vllm
from headwater.sim.fleet.config import read_times

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(600)]

MEASURE_S, VERIFY_S = 25.0, 12.0
ERROR_MAX = 0.35
"""On a machine that others use as well; docs/benchmarks.md has what a quiet one gives."""


def test_a_fit_predicts_an_unseen_workload(tmp_path: Path, seed: int) -> None:
    with Children() as children:
        server = start_vllm(children, "A", MODEL.resolve(), None, None, tmp_path)
        server.child.wait_until(server.healthy, START_S, lambda: None)
        url = f"http://127.0.0.1:{server.port}"
        effort = Effort(MEASURE_S, concurrency=4, length_max=384, step_tokens=2048, seed=seed)
        options = Options(effort=effort)
        calibrated = calibrate(url, options, lambda done, what: None)
        verified = check(url, options, calibrated, VERIFY_S, lambda done, what: None)
    served, fitted = calibrated.served, calibrated.fitted
    print(f"{fitted.times}\n{fitted.prefill}\n{fitted.decode}\n{fitted.notes}\n{verified}")
    print(f"mean TTFT of {verified.requests} unseen requests: {verified.ttft_error:+.1%} (seed {seed})")
    assert (served.model, served.length_max, served.block_tokens) == ("model", 4096, 128)
    assert served.capacity_tokens is not None
    assert served.capacity_tokens % 128 == 0
    assert fitted.measured.prefill_context[1] >= 128, "its own prefix cache was found and used"
    write(tmp_path / "engine.yaml", calibrated)
    assert read_times(str(tmp_path / "engine.yaml"), 1 << 20).prefill_token_s > 0
    assert abs(verified.ttft_error) < ERROR_MAX
