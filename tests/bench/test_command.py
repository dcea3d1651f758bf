"""`headwater bench` as a command, with a suite of fake experiments."""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.bench import command
from headwater.bench.harness import Effort, Experiment, Reading, Readings, Spec, Suite, Unmeasured
from headwater.errors import ConfigError


class Fakes:
    """A suite whose experiments note what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[frozenset[str], Effort]] = []
        first = Experiment("first", (Spec("a/one", "s", "one"), Spec("a/two", "s", "two")), self.measure)
        second = Experiment("second", (Spec("b/three", "s", "three"),), self.measure)
        self.suite = Suite("fake", "for tests", (first, second))

    def measure(self, effort: Effort, wanted: frozenset[str]) -> Readings:
        self.asked.append((wanted, effort))
        return {
            "a/one": Reading(1.0, 1.0, 1.0, 1),
            "a/two": Reading(2.0, 2.0, 2.0, 1),
            "b/three": Unmeasured("no such device"),
        }


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    monkeypatch.setattr(command, "SUITES", {"fake": fakes.suite})
    return fakes


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(list(words)))


def test_everything_is_measured_and_reported_in_order(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake", "--json") == 0
    assert [it["name"] for it in json.loads(capsys.readouterr().out)["figures"]] == ["a/one", "a/two"]
    assert [effort.rounds for _, effort in fakes.asked] == [command.ROUNDS] * 2


def test_what_is_missing_is_said(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake", "--markdown") == 0
    assert "Not measured: `b/three`: no such device." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("patterns", "names", "experiments"),
    [
        (["a/*"], ["a/one", "a/two"], 1),
        (["two"], ["a/two"], 1),
        (["one", "three"], ["a/one"], 2),
    ],
)
def test_only(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], patterns: list[str], names: list[str], experiments: int
) -> None:
    options = [word for pattern in patterns for word in ("--only", pattern)]
    assert run("fake", "--json", *options) == 0
    assert [it["name"] for it in json.loads(capsys.readouterr().out)["figures"]] == names
    assert len(fakes.asked) == experiments


def test_quick_and_repeat(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    run("fake", "--quick")
    run("fake", "--quick", "--repeat", "7")
    run("fake", "--repeat", "9")
    efforts = [(effort.rounds, effort.quick) for _, effort in fakes.asked[::2]]
    assert efforts == [(command.QUICK_ROUNDS, True), (7, True), (9, False)]
    assert "--repeat 9" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_all_that_it_has_started(number: int) -> None:
    command_line = [sys.executable, "-m", "headwater", "bench", "--only", "call/one-core", "--repeat", "100000"]
    with subprocess.Popen(command_line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        children: set[int] = set()
        while len(children) < 2 and bench.poll() is None:  # the node and the echo
            children |= children_of(bench.pid)
        bench.send_signal(number)
        assert bench.wait(30) == 130
    assert len(children) == 2
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def children_of(pid: int) -> set[int]:
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()))
    except FileNotFoundError:
        return set()


def test_list_measures_nothing(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    assert not fakes.asked
    assert "a/one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fakr"], "no suite 'fakr'; the nearest is 'fake'"),
        (["fake", "--only", "a/onw"], "--only a/onw: no such figure; the nearest is 'a/one'"),
        (["fake", "--repeat", "0"], "--repeat 0: not a whole number from 1"),
        (["fake", "--repeat", "x"], "--repeat x: not a whole number from 1"),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_bad_usage_names_the_word_and_the_remedy(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        run(*words)
    assert said in str(refusal.value)
