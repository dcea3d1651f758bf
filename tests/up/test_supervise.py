"""Supervision of real, small processes: order, death, stubbornness, and that nothing is left, whatever is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.conductor.restarts import HEALTHY_S, LONGEST_S, Restarts
from headwater.errors import ConfigError, UnavailableError
from headwater.up.child import LOG_BYTES, Child, Log
from headwater.up.plan import Kind, Probe, Process
from headwater.up.supervise import check_ports
from tests.conftest import ROOT
from tests.node.conftest import eventually
from tests.up.small import Run, lives, pids, small

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes in the test's folder; all are gone at its end."""
    runs: list[Run] = []

    def start_them(*processes: Process) -> Run:
        runs.append(Run(tmp_path, *processes))
        return runs[-1]

    yield start_them
    for it in runs:
        it.supervisor.stop()
        it.supervisor.stop()
        it.join()
    for name in tmp_path.glob("*.pids"):
        assert not [pid for pid in pids(tmp_path, name.stem) if lives(pid)]


def test_each_waits_for_those_that_it_needs_and_ends_before_them(start: Start, tmp_path: Path) -> None:
    run = start(
        small(tmp_path, "node", kind=Kind.NODE),
        small(tmp_path, "chat", after=("node",)),
        small(tmp_path, "front", kind=Kind.CONDUCTOR, after=("node", "chat")),
    )
    assert run.ready.wait(20)
    run.supervisor.stop()
    run.join()
    assert run.error is None
    order = [(it.name, it.state.value) for it in run.told]
    assert order == [
        *((name, state) for name in ("node", "chat", "front") for state in ("starting", "ready")),
        *((name, state) for name in ("front", "chat", "node") for state in ("ending", "ended")),
    ]
    assert not [it for it in run.told if "killed" in it.text]


def test_what_dies_later_is_started_again_and_the_others_go_on(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "a"), small(tmp_path, "b"))
    assert run.ready.wait(20)
    os.kill(pids(tmp_path, "a")[0], signal.SIGKILL)
    eventually(lambda: run.states("a").count("ready") == 2, 20)
    assert run.states("a") == ["starting", "ready", "down", "starting", "ready"]
    assert run.states("b") == ["starting", "ready"] and len(pids(tmp_path, "b")) == 1
    down = next(it for it in run.told if it.state == "down")
    assert down.text == "ended with code -9; starts again in 0.5 s"


def test_what_dies_with_its_own_children_leaves_none(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "a", "has-child"))
    assert run.ready.wait(20)
    assert all(map(lives, pids(tmp_path, "a"))) and len(pids(tmp_path, "a")) == 2
    # The child has a session of its own: the guard finds it by its mark, at the end of the fixture.


def test_what_dies_once_at_its_start_is_tried_again(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "a", "dies-once"))
    assert run.ready.wait(20)
    assert run.states("a") == ["starting", "down", "starting", "ready"]


def test_what_cannot_be_started_takes_the_fleet_down_with_its_reason(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "node", kind=Kind.NODE), small(tmp_path, "bad", "dies", after=("node",)))
    run.join(30)
    assert isinstance(run.error, UnavailableError)
    assert str(run.error).startswith("bad ended with code 3; the end of ") and str(run.error).endswith("I cannot")
    assert run.states("bad") == ["starting", "down", "starting", "down", "starting", "ended"]
    assert run.states("node")[-2:] == ["ending", "ended"] and not run.ready.is_set()


def test_a_configuration_that_is_refused_is_not_tried_again(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "bad", "hopeless"))
    run.join()
    assert run.states("bad") == ["starting", "ended"] and "code 2" in str(run.error)


def test_who_is_not_ready_in_time_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "mute", "mute", ready_s=0.3))
    run.join()
    assert "mute was not ready within 0.3 s" in str(run.error)


def test_no_program_is_no_fleet(start: Start, tmp_path: Path) -> None:
    missing = Process("x", Kind.ENGINE, ("/nowhere/vllm",), {}, Probe("redis", "/x"), 1.0, 1.0)
    run = start(missing)
    run.join()
    assert str(run.error) == "/nowhere/vllm: No such file or directory"


def test_who_does_not_end_is_killed(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "a", "stubborn", stop_s=0.3))
    assert run.ready.wait(20)
    run.supervisor.stop()
    run.join()
    assert run.told[-1].text == "was killed: it did not end within 0.3 s"


def test_an_engine_that_only_starts_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    run = start(
        small(tmp_path, "a", "mute", "stubborn", stop_s=600),
        small(tmp_path, "node", "mute", kind=Kind.NODE),
    )
    eventually(lambda: pids(tmp_path, "a") and pids(tmp_path, "node"), 20)
    eventually(lambda: (tmp_path / "a").exists() and (tmp_path / "node").exists(), 20)
    run.supervisor.stop()
    run.join()
    assert run.states("a") == ["starting", "ending", "ended"]
    assert run.error is None and run.told[-1].text == "", "others are asked"


def test_who_is_killed_leaves_no_shared_memory(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "a", "shares"))
    assert run.ready.wait(20)
    first = Path("/dev/shm") / (tmp_path / "a.shm").read_text()
    assert first.exists()
    os.kill(pids(tmp_path, "a")[0], signal.SIGKILL)
    eventually(lambda: run.states("a").count("ready") == 2, 20)
    assert not first.exists()


def test_a_second_stop_does_not_wait(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "a", "stubborn", stop_s=600))
    assert run.ready.wait(20)
    run.supervisor.stop()
    eventually(lambda: "ending" in run.states("a"))
    assert lives(pids(tmp_path, "a")[0])
    run.supervisor.stop()
    run.join()
    assert run.told[-1].text == "was killed"


def test_a_signal_reaches_a_kind_of_process(start: Start, tmp_path: Path) -> None:
    run = start(small(tmp_path, "front", "hangs-up", kind=Kind.CONDUCTOR), small(tmp_path, "a"))
    assert run.ready.wait(20)
    run.supervisor.send(Kind.CONDUCTOR, signal.SIGHUP)
    eventually((tmp_path / "front.hup").exists)
    assert lives(pids(tmp_path, "a")[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda it: it.name)
def test_a_supervisor_that_is_killed_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.up.small", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
        started = [*pids(tmp_path, "a"), *pids(tmp_path, "b")]
        assert len(started) == 3 and all(map(lives, started))
        # One of them is stubborn: it takes a second SIGTERM, and two that come at once are one.
        eventually(lambda: run.send_signal(number) or run.poll() is not None, 10)
    eventually(lambda: not any(map(lives, started)), 10)


def test_a_log_is_bounded_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = Log(tmp_path / "a.log", most_bytes=1000)
    descriptor = log.open()
    try:
        os.write(descriptor, b"x" * 600 + b"\n")
        log.bound()
        assert (tmp_path / "a.log").stat().st_size == 601
        os.write(descriptor, b"y" * 600 + b"\n")
        log.bound()
        os.write(descriptor, b"the last\n")
    finally:
        os.close(descriptor)
    assert (tmp_path / "a.log").read_bytes() == b"the last\n" and log.tail() == "the last"
    assert (tmp_path / "a.log.1").stat().st_size == 1202
    assert {it.stat().st_mode & 0o777 for it in tmp_path.iterdir()} == {0o600}
    assert Log(tmp_path / "none").tail() == "" and LOG_BYTES > 1 << 20


def test_an_environment_is_ours_with_changes(tmp_path: Path) -> None:
    log = Log(tmp_path / "a.log")
    child = Child((sys.executable, "-S", "-c", "import os; print(os.environ['A'], 'HOME' in os.environ)"),
                  {"A": "1", "HOME": None}, log)  # fmt: skip
    eventually(lambda: child.code() is not None)
    child.kill()
    assert log.tail() == "1 False"


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = Process("chat", Kind.ENGINE, (), {}, Probe("http", ""), 1.0, 1.0, ports=(port,))
        with pytest.raises(ConfigError, match=f"chat: port {port}: Address already in use"):
            check_ports([process])
    check_ports([process])


def test_the_longer_it_dies_the_later_it_comes_back() -> None:
    restarts = Restarts(lambda: 0.0)
    assert [restarts.died(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, LONGEST_S, LONGEST_S]
    assert restarts.died(HEALTHY_S - 0.1) == LONGEST_S and restarts.died(HEALTHY_S) == 1
    assert restarts.total == 10
    assert Restarts(lambda: 0.999).died(0.0) == pytest.approx(0.5, rel=0.01)
