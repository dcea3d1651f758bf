"""Figures beside LMCache: with a stand-in that speaks as its driver does, and with itself where it is installed."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.bench import disk, rivals, tiers
from headwater.bench.harness import Effort, Reading, Readings, Unmeasured, conclude
from headwater.bench.rivals import RIVALS, Rival, measure

EFFORT = Effort(rounds=3, quick=True)
FILES, SERVER = (next(it for it in RIVALS if it.name == name) for name in ("fs", "resp"))
INSTALLED = rivals.PYTHON.absolute(), rivals.DRIVER.absolute()
TOTAL = 1 << 20
STORE_S, LOAD_S, CPU_S = 0.5, 0.25, 0.125
STAND_IN = f"""
import json, os, pathlib, sys
pathlib.Path("calls").open("a").write(f"{{os.getpid()}} {{' '.join(sys.argv[1:])}}\\n")
turns = pathlib.Path("turns").open("a", buffering=1)
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    turns.write(line)
    seconds = {{"store": {STORE_S}, "load": {LOAD_S}}}[line.strip()]
    print(json.dumps({{"seconds": seconds, "cpu_s": {CPU_S}}}), flush=True)
"""


def figures(rival: Rival) -> frozenset[str]:
    return frozenset(it.name for it in rival.specs)


def stand_in(path: Path, monkeypatch: pytest.MonkeyPatch, text: str = STAND_IN) -> None:
    driver = path / "driver.py"
    driver.write_text(text, "utf-8")
    monkeypatch.setattr(rivals, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(rivals, "DRIVER", driver)


def check(rival: Rival, readings: Readings) -> dict[str, Reading]:
    """All of its figures, taken and sane."""
    taken = {}
    for spec in rival.specs:
        reading = readings[spec.name]
        assert isinstance(reading, Reading), f"{spec.name}: {reading}"
        assert reading.value > 0 and reading.low <= reading.high, f"{spec.name}: {reading}"
        conclude(spec, reading)  # a goal relative to a yardstick finds it
        taken[spec.name] = reading
    return taken


@pytest.fixture(autouse=True)
def _small_and_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # where the bench puts its files
    monkeypatch.setitem(rivals.SIZES, "2MiB", 64 << 10)
    monkeypatch.setitem(rivals.SIZES, "32MiB", 256 << 10)
    monkeypatch.setattr(rivals, "TOTALS", {False: (TOTAL, TOTAL), True: (TOTAL, TOTAL)})
    monkeypatch.setattr(disk, "SLAB_BYTES", 4 << 20)
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert not list(tmp_path.glob(".headwater-bench-*"))
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 0
    calls = tmp_path / "calls"
    for line in calls.read_text("utf-8").splitlines() if calls.exists() else []:
        assert not Path(f"/proc/{line.split()[0]}").exists()


def test_the_suite_has_the_figures() -> None:
    names = [it.name for it in tiers.SUITE.specs if it.name.startswith("lmcache/")]
    both = [f"{verb}/{size}" for size in ("2MiB", "32MiB") for verb in ("store", "load")]
    full = [f"lmcache/{rival}/{it}" for rival in ("fs", "fs_native", "fs_native_direct", "resp") for it in both]
    assert sorted(names) == sorted(
        [*full, "lmcache/redis/store/2MiB", "lmcache/redis/load/2MiB", *(f"lmcache/{it.name}/cpu" for it in RIVALS)]
    )
    goals = {it.goal.text(it.unit) if it.goal else None for it in tiers.SUITE.specs if it.name in full}
    assert goals == {">= 1 x yardstick"}


@pytest.mark.parametrize("rival", [FILES, SERVER], ids=lambda it: it.name)
def test_ours_is_held_against_what_lmcache_says(rival: Rival, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    taken = check(rival, measure(rival, EFFORT, figures(rival)))
    for size in ("2MiB", "32MiB"):
        assert taken[f"lmcache/{rival.name}/store/{size}"].yardstick_value == pytest.approx(TOTAL / 1e9 / STORE_S)
        assert taken[f"lmcache/{rival.name}/load/{size}"].yardstick_value == pytest.approx(TOTAL / 1e9 / LOAD_S)
    assert taken[f"lmcache/{rival.name}/cpu"].yardstick_value == pytest.approx(CPU_S / (TOTAL / 1e9))
    calls = [line.split()[1:] for line in (tmp_path / "calls").read_text("utf-8").splitlines()]
    assert [(it[0], it[2], it[3]) for it in calls] == [
        (rival.adapter, f"{64 << 10}", f"{TOTAL}"),
        (rival.adapter, f"{256 << 10}", f"{TOTAL}"),
    ]
    turns = (tmp_path / "turns").read_text("utf-8").split()
    assert turns == ["store", "load"] * (1 + EFFORT.rounds) * 2  # one that is not counted, for each size


@pytest.mark.parametrize(("wanted", "sizes"), [("lmcache/fs/load/32MiB", [256 << 10]), ("lmcache/fs/cpu", [64 << 10])])
def test_only_what_is_wanted_is_measured(
    wanted: str, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    assert isinstance(measure(FILES, EFFORT, frozenset({wanted}))[wanted], Reading)
    calls = (tmp_path / "calls").read_text("utf-8").splitlines()
    assert [int(line.split()[3]) for line in calls] == sizes


def test_options_reach_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    direct = next(it for it in RIVALS if it.options)
    measure(direct, EFFORT, frozenset({f"lmcache/{direct.name}/cpu"}))
    assert (tmp_path / "calls").read_text("utf-8").split()[-1] == "--direct"


@pytest.mark.parametrize("rival", RIVALS, ids=lambda it: it.name)
def test_without_lmcache_it_is_said_how_to_get_it(rival: Rival, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "PYTHON", Path("nowhere/bin/python"))
    readings = measure(rival, EFFORT, figures(rival))
    assert readings == dict.fromkeys(figures(rival), Unmeasured("run benchmarks/install_peers.py"))


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit('no torch here')",
        "import sys\nprint('{}', flush=True)\nsys.stdin.readline()\nraise SystemExit('no torch here')",
        "import sys\nprint('{}', flush=True)\nsys.stdin.close()\nraise SystemExit('no torch here')",
    ],
    ids=["at the start", "in a turn", "between turns"],
)
def test_an_lmcache_that_gives_up_is_quoted(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, text)
    readings = measure(FILES, EFFORT, figures(FILES))
    assert readings == dict.fromkeys(figures(FILES), Unmeasured("LMCache does not go on: no torch here"))


def test_a_silent_lmcache_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "TURN_S", 0.05)
    monkeypatch.setattr(rivals, "STOP_S", 0.05)
    endless = STAND_IN.split("for line", maxsplit=1)[0] + "import threading\nthreading.Event().wait()"
    stand_in(tmp_path, monkeypatch, endless)
    readings = measure(FILES, EFFORT, figures(FILES))
    assert readings == dict.fromkeys(figures(FILES), Unmeasured("LMCache does not go on: it says nothing"))


@pytest.mark.skipif(not INSTALLED[0].exists(), reason="LMCache is not there: benchmarks/install_peers.py")
def test_lmcache_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "PYTHON", INSTALLED[0])
    monkeypatch.setattr(rivals, "DRIVER", INSTALLED[1])
    wanted = frozenset({"lmcache/resp/cpu"})
    assert isinstance(measure(SERVER, EFFORT, wanted)["lmcache/resp/cpu"], Reading)
