"""The demo as a user in a hurry runs it: real node, disk, Valkey, vLLM servers and model; and that nothing is left
afterwards."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headwater.demo.beginning import MODEL
from headwater.demo.front import CONDUCTOR, QUICK_SHAPE, ROUND_ROBIN
from tests.e2e.orphans import orphans
from tests.node.conftest import eventually

PAUSE = threading.Event()
SETTLE_S = 20.0
CHUNK, TOKEN_BYTES = 128, 30 * 3 * 64 * 2 * 4
"""Tokens of a chunk; layers x heads x dimensions x (K, V) x bytes of a float."""
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_process")]

KEYS = {
    "act": str,
    "instance": str,
    "prompt_tokens": int,
    "reused_tokens": int,
    "tier": str,
    "tiers": dict,
    "ttft_s": float,
    "ttft_uncached_s": float,
    "bytes_moved": int,
    "identical": bool,
}

WAY_KEYS = {
    "requests": int,
    "failed": int,
    "within_slo": int,
    "goodput": float,
    "ttft_mean_s": float,
    "ttft_p99_s": float,
    "reuse": float,
    "reused": dict,
}


def start_demo(scratch: Path) -> subprocess.Popen[bytes]:
    """`headwater demo --json` in a process group of its own, with its scratch files in `scratch`."""
    # A job in a shell's background ignores Ctrl-C, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (scratch / "out.json").open("wb") as output, (scratch / "err.txt").open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "headwater", "demo", "--quick", "--json", "--logs", str(scratch / "logs")],
                env={**os.environ, "TMPDIR": str(scratch)},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGINT, before)


def left_behind(scratch: Path) -> list[str]:
    """Processes whose command line or environment names the run's directory, its sockets, and its shared memory."""
    found = [str(path) for path in scratch.glob("headwater-demo-*")]
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(scratch).encode() in told:
            found.append(f"process {process.name}: {told[:120]!r}")
    return found


@pytest.fixture(autouse=True)
def _model() -> None:
    assert (MODEL / "config.json").is_file(), f"{MODEL} is missing; run the tests by `make test`, from the repository"


@pytest.mark.timeout(900)
def test_the_demo_shares_and_its_outputs_are_identical(tmp_path: Path) -> None:
    before = orphans()
    demo = start_demo(tmp_path)
    code = demo.wait(timeout=850)
    errors = (tmp_path / "err.txt").read_text()
    assert code == 0, f"{errors}\n{(tmp_path / 'out.json').read_text()}"
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["ok"] is True
    lines = told["requests"]
    for line in lines:
        assert {name: type(value) for name, value in line.items()} == KEYS
    assert all(line["identical"] for line in lines)
    on_b = next(line for line in lines if line["instance"] == "B")
    assert "host" in on_b["tier"]
    assert 500 < on_b["prompt_tokens"] < 700
    assert on_b["reused_tokens"] > on_b["prompt_tokens"] - 2 * CHUNK
    assert on_b["bytes_moved"] >= on_b["reused_tokens"] * TOKEN_BYTES
    assert on_b["ttft_s"] < on_b["ttft_uncached_s"] / 2, "a reused prefix is far quicker on any machine"
    assert [line["act"] for line in lines[-3:]] == ["shared", "restarted", "wiped"]
    *shared, restarted, wiped = lines
    chat = shared[-4:]
    assert [line["instance"] for line in chat] == ["A", "B", "A", "B"]
    assert all("host" in line["tier"] for line in chat[1:]), "each turn finds the other instance's turn in the node"
    assert (restarted["instance"], wiped["instance"]) == ("A", "B")
    assert set(restarted["tiers"]) == {"disk"}, "memory was empty, and the disk is nearer than Valkey"
    assert set(wiped["tiers"]) == {"remote"}, "memory and disk were empty"
    for line in (restarted, wiped):
        assert line["reused_tokens"] > line["prompt_tokens"] - 2 * CHUNK
        assert line["ttft_s"] < line["ttft_uncached_s"] / 2
    burst = told["burst"]
    assert burst["identical"] is True and burst["reused_more"] is True
    robin, conductor = burst[ROUND_ROBIN], burst[CONDUCTOR]
    assert {name: type(value) for name, value in conductor.items()} == WAY_KEYS
    assert robin["requests"] == conductor["requests"] == QUICK_SHAPE.families * QUICK_SHAPE.chats
    assert not robin["failed"] and not conductor["failed"]
    assert robin["reused"] == {} and {"device", "host"} >= conductor["reused"].keys() != set()
    assert not left_behind(tmp_path)
    eventually(lambda: orphans() <= before, SETTLE_S, orphans)


@pytest.mark.timeout(300)
def test_ctrl_c_while_the_engines_start_leaves_nothing(tmp_path: Path) -> None:
    before = orphans()
    demo = start_demo(tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "logs" / "vllm-B.log").exists():
        assert demo.poll() is None, (tmp_path / "err.txt").read_text()
        assert time.monotonic() < deadline, "the engines were never started"
        PAUSE.wait(0.05)
    os.kill(demo.pid, signal.SIGINT)
    assert demo.wait(timeout=60) == 130
    assert not left_behind(tmp_path)
    eventually(lambda: orphans() <= before, SETTLE_S, orphans)
