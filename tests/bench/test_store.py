"""`headwater bench store` at a small size: real nodes, a real directory, stand-ins for rivals."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.bench import faults, objects, prompts, store, turns
from headwater.bench.harness import Effort, Reading, Unmeasured, conclude
from headwater.bench.objects import Turns, pattern
from headwater.bench.turns import MIB, Cell, turner
from headwater.ports import Bytes

EFFORT = Effort(rounds=1, quick=True)
INSTALLED = turns.PEERS.absolute(), turns.DRIVERS.absolute()
STAND_IN = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    calls = int(line.split()[3])
    print(json.dumps({"seconds": [0.25] * calls, "cpu_s": 0.5 * calls, "peer_cpu_s": 0.25 * calls}), flush=True)
"""


@pytest.fixture(autouse=True)
def _small_and_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "QUICK_AMOUNT_BYTES", 4 * MIB)
    monkeypatch.setattr(store, "QUICK_TURN_BYTES", 2 * MIB)
    monkeypatch.setattr(store, "POOL_BYTES", 8 * MIB)
    monkeypatch.setattr(store, "QUICK_TURN_CALLS", 20)
    monkeypatch.setattr(store, "OTHERS", 1000)
    python = tmp_path / "mooncake/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "mooncake_store.py").write_text(STAND_IN, "utf-8")
    monkeypatch.setattr(turns, "PEERS", tmp_path)
    monkeypatch.setattr(turns, "DRIVERS", tmp_path)
    cores, before = os.sched_getaffinity(0), set(os.listdir("/proc/self/fd"))
    yield
    assert os.sched_getaffinity(0) == cores
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 0


def test_the_suite_has_the_figures_and_what_they_must_reach() -> None:
    goals = {it.name: it.goal.text(it.unit) if it.goal else "" for it in store.SUITE.specs}
    assert goals["store/get/4KiB/idle/p50"] == "<= 75 us"
    assert goals["store/get/4KiB/one-core/p50"] == "<= 25 us"
    assert goals["store/exists/one-key/idle/p50"] == "<= 60 us"
    assert goals["store/exists/one-key/one-core/p50"] == "<= 20 us"
    assert goals["store/exists/batch/idle/rate"] == ">= 2e+06 keys/s"
    assert goals["store/into/1MiB/x1"] == goals["store/into/4MiB/x1"] == ">= 1.25 x yardstick"
    assert goals["directory/locate/p50"] == "<= 1.5 ms"
    assert goals["fault/kill/errors-end"] == "<= 1 s"
    assert goals["fault/pause/longest"] == "<= 1.5 s"
    assert goals["fault/directory/back"] == "<= 10 s"
    assert goals["fault/directory/keys"] == ">= 100 %"
    assert goals["fault/directory/failed"] == goals["fault/kill/wrong"] == "<= 0 reads"


def check(name: str, reading: Reading | Unmeasured, least: float = 0.0) -> Reading:
    assert isinstance(reading, Reading), f"{name}: {reading}"
    assert reading.value >= least
    conclude(next(it for it in store.SUITE.specs if it.name == name), reading)
    return reading


def test_small_calls_beside_a_rival() -> None:
    wanted = {"store/get/4KiB/one-core/p50", "store/exists/batch/idle/rate"}
    readings = store.SMALL_CALLS.measure(EFFORT, frozenset(wanted))
    assert check("store/get/4KiB/one-core/p50", readings["store/get/4KiB/one-core/p50"], 0.1).yardstick_value == 250_000
    assert readings.keys() - wanted == {"store/get/4KiB/one-core/p99"}
    rate = check("store/exists/batch/idle/rate", readings["store/exists/batch/idle/rate"], 1000)
    assert rate.yardstick_value == store.MANY_KEYS / 0.25


def test_objects_of_megabytes_beside_memcpy_and_a_rival() -> None:
    wanted = {"store/into/1MiB/x32", "mooncake/into/1MiB/x32"}
    readings = store.LARGE_GETS.measure(EFFORT, frozenset(wanted))
    assert set(readings) == wanted
    for name, reading in readings.items():
        assert check(name, reading, 1e-3).yardstick_value


def test_prompts_of_another_node() -> None:
    wanted = {"cluster/fetch/1MiB/x32", "mooncake/fetch/1MiB/x32"}
    readings = store.FETCHING.measure(EFFORT, frozenset(wanted))
    assert set(readings) == wanted
    for name, reading in readings.items():
        assert check(name, reading, 1e-4).yardstick_value


def test_without_mooncake_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PEERS", tmp_path / "nowhere")
    readings = store.SMALL_CALLS.measure(EFFORT, frozenset({"store/exists/one-key/idle/p50"}))
    assert check("store/exists/one-key/idle/p50", readings["store/exists/one-key/idle/p50"]).yardstick_value is None


def test_locating() -> None:
    readings = store.LOCATING.measure(EFFORT, frozenset())
    assert check("directory/locate/p50", readings["directory/locate/p50"], 0.01).samples == 10


# ---- faults -------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_killed_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "PROMPTS", 4)
    with faults.cluster() as cluster:
        reads = cluster.read(lambda: os.kill(cluster.holders[0].pid, signal.SIGKILL), 0.4)
        assert cluster.known() == faults.PROMPTS // 2
    assert reads.wrong == 0 and len(reads.seconds) > 3


@pytest.mark.alone
def test_a_directory_that_comes_back_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "QUICK_AFTER_S", 0.2)
    monkeypatch.setattr(faults, "PROMPTS", 4)
    readings = faults.RESTART.measure(EFFORT, frozenset())
    for name in ("fault/directory/back", "fault/directory/keys", "fault/directory/failed"):
        check(name, readings[name])


def test_what_counts_as_failed() -> None:
    reads = faults.Reads([0.1] * 99 + [5.0], [(0.5, 0.02), (0.7, 0.3), (3.0, 0.05)])
    assert reads.last_failure_s(0.1) == 0.7
    assert reads.last_failure_s(0.0) == 3.0
    assert faults.Reads([0.1]).last_failure_s(0.0) == 0.0
    assert reads.p99_s == 5.0


# ---- objects ------------------------------------------------------------------------------------------------


class Dictionary:
    """A shelf; `fault` is what is wrong with it."""

    def __init__(self, fault: str = "") -> None:
        self._held: dict[str, Bytes] = {}
        self._fault = fault
        self.asked: list[str] = []

    def put(self, items: Mapping[str, Bytes]) -> None:
        self._held = {key: data.copy() for key, data in items.items()}
        for data in self._held.values():
            data[-1] ^= self._fault == "byte"

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return self._held[key].tobytes()

    def into(self, keys: Sequence[str], places: Sequence[Bytes]) -> None:
        for key, place in zip(keys, places, strict=True):
            place[:] = self._held[key]

    def exists(self, keys: Sequence[str]) -> int:
        return len(keys) - (self._fault == "gone")

    def register(self, memory: Bytes) -> None:
        pass

    def processes(self) -> Sequence[int]:
        return []

    def control(self, words: Sequence[str]) -> dict[str, Any]:
        return {}


def test_objects_are_asked_for_in_a_random_order() -> None:
    shelf = Dictionary()
    it = Turns(shelf, 64 << 10)
    assert len(it.turn("get", 4096, 1, 16)["seconds"]) == 16
    assert sorted(shelf.asked) == sorted(f"4096/{number}" for number in range(16))
    assert shelf.asked != [f"4096/{number}" for number in range(16)]
    for verb in ("into", "exists"):
        assert len(it.turn(verb, 4096, 3, 2)["seconds"]) == 2


@pytest.mark.parametrize(
    ("fault", "verb", "said"),
    [("byte", "get", "other bytes"), ("byte", "into", "other bytes"), ("gone", "exists", "gone")],
)
def test_a_store_that_is_wrong_is_found(fault: str, verb: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        Turns(Dictionary(fault), 64 << 10).turn(verb, 4096, 2, 2)


def test_patterns_say_whose_they_are() -> None:
    assert len({pattern(number, 4096).tobytes() for number in range(50)}) == 50
    assert np.array_equal(pattern(7, 4096)[:64], pattern(7, 64))


def test_prompts_share_no_key() -> None:
    keys = [key for purpose in ("a", "b") for number in range(5) for key in prompts.prompt(number, 4, purpose)]
    assert len(set(keys)) == len(keys)


@pytest.mark.skipif(not (INSTALLED[0] / "mooncake").exists(), reason="benchmarks/install_peers.py was not run")
def test_mooncake_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PEERS", INSTALLED[0])
    monkeypatch.setattr(turns, "DRIVERS", INSTALLED[1])
    command = [*turns.peer_command("mooncake", "mooncake_store.py"), str(4 * MIB)]
    with turner("Mooncake", command, tmp_path / "log") as process:
        for verb, batch in (("get", 1), ("into", 1), ("into", 8), ("exists", 1), ("exists", 50)):
            assert len(process.turn(Cell(4096, batch, 3, verb, "all")).seconds) == 3


def test_binding_is_undone() -> None:
    before = os.sched_getaffinity(0)
    objects.bind([], everywhere=False)
    assert len(os.sched_getaffinity(0)) == 1
    objects.bind([], everywhere=True)
    assert os.sched_getaffinity(0) == before
