"""`headwater bench transfer` at a small size: real processes of ours and the yardstick in C, stand-ins for rivals."""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headwater.bench import transfer, turns
from headwater.bench.blocks import Pool, Turns
from headwater.bench.harness import Effort, Reading, Series, Unmeasured, conclude
from headwater.bench.mover import KINDS
from headwater.bench.turns import MIB, Cell, Contest, Samples, compile_bare, turner
from headwater.errors import UnavailableError

EFFORT = Effort(rounds=1, quick=True)
INSTALLED = turns.PEERS.absolute(), turns.DRIVERS.absolute()
STAND_IN = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    calls = int(line.split()[3])
    print(json.dumps({"seconds": [0.25] * calls, "cpu_s": 0.5 * calls, "peer_cpu_s": 0.25 * calls}), flush=True)
"""


def stand_in(path: Path, monkeypatch: pytest.MonkeyPatch, text: str = STAND_IN) -> None:
    """Let every rival be this script."""
    for peer, driver in (("mooncake", "mooncake_transfer.py"), ("nixl", "nixl_transfer.py")):
        python = path / peer / "bin/python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.symlink_to(sys.executable)
        (path / driver).write_text(text, "utf-8")
    monkeypatch.setattr(turns, "PEERS", path)
    monkeypatch.setattr(turns, "DRIVERS", path)


@pytest.fixture(autouse=True)
def _small_and_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transfer, "QUICK_POOL_BYTES", 8 * MIB)
    monkeypatch.setattr(transfer, "QUICK_TURN_BYTES", 2 * MIB)
    monkeypatch.setattr(transfer, "QUICK_STALL_TRANSFERS", 8)
    monkeypatch.setattr(turns, "PEERS", tmp_path / "nowhere")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(transfer.tempfile, "tempdir", str(scratch))
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert not list(scratch.iterdir())
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 0


def test_the_suite_has_the_figures_and_what_they_must_reach() -> None:
    goals = {it.name: it.goal.text(it.unit) if it.goal else "" for it in transfer.SUITE.specs}
    for cell in ("1MiB/x1", "1MiB/x32", "4MiB/x1", "4MiB/x32"):
        assert goals[f"tcp/read/{cell}"] == ">= 0.95 x yardstick"
        assert goals[f"mooncake/read/{cell}"] == f">= {2 if 'x32' in cell else 1} x yardstick"
    assert goals["tcp/read/64KiB/x128"] == ">= 0.9 x yardstick"
    assert goals["mooncake/read/64KiB/x128"] == ">= 1.1 x yardstick"
    assert goals["shm/read/1MiB/x1"] == goals["shm/read/4MiB/x1"] == ">= 1.25 x yardstick"
    assert goals["tcp/stalls"] == "<= 0 transfers"
    assert {it.split("/")[0] for it in goals} == {"tcp", "mooncake", "shm", "nixl"}


def check(name: str, reading: Reading | Unmeasured) -> Reading:
    assert isinstance(reading, Reading), f"{name}: {reading}"
    assert reading.value > 0
    spec = next(it for it in transfer.SUITE.specs if it.name == name)
    conclude(spec, reading)  # a goal relative to a yardstick finds it
    return reading


@pytest.mark.parametrize("name", ["tcp/read/1MiB/x1", "tcp/read-unchecked/64KiB/x128", "shm/read/1MiB/x1"])
def test_ours_beside_the_yardstick(name: str) -> None:
    experiment = next(it for it in transfer.SUITE.experiments if name in {spec.name for spec in it.specs})
    readings = experiment.measure(EFFORT, frozenset({name}))
    assert set(readings) == {name}  # and nobody else was started
    reading = check(name, readings[name])
    assert reading.yardstick_value and reading.cpu_s_per_gb
    assert reading.samples == EFFORT.rounds


def test_ours_beside_a_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    names = frozenset({"mooncake/read/1MiB/x1", "mooncake/read/1MiB/x32", "mooncake/cpu"})
    readings = transfer.SUITE.experiments[0].measure(EFFORT, names)
    assert check("mooncake/read/1MiB/x1", readings["mooncake/read/1MiB/x1"]).yardstick_value == pytest.approx(
        MIB / 1e9 / 0.25
    )
    # The pools have room for 8 blocks: so many are a batch then, for both.
    assert check("mooncake/cpu", readings["mooncake/cpu"]).yardstick_value == pytest.approx(0.75 / (8 * MIB / 1e9))


def test_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    name = "mooncake/write/1MiB/x1"
    check(name, transfer.SUITE.experiments[1].measure(EFFORT, frozenset({name}))[name])


def test_stalls_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    readings = transfer.STALLS.measure(EFFORT, frozenset())
    stalls = readings["tcp/stalls"]
    assert isinstance(stalls, Reading)
    assert (stalls.samples, stalls.yardstick_value) == (8, 8)
    assert check("tcp/longest", readings["tcp/longest"]).yardstick_value == pytest.approx(250.0)


def test_without_a_rival_ours_is_measured_all_the_same() -> None:
    readings = transfer.STALLS.measure(EFFORT, frozenset())
    assert check("tcp/longest", readings["tcp/longest"]).yardstick_value is None
    readings = transfer.SUITE.experiments[0].measure(EFFORT, frozenset({"mooncake/cpu"}))
    assert readings == {"mooncake/cpu": Unmeasured("run benchmarks/install_peers.py")}


def test_without_a_compiler_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.shutil, "which", lambda *_, **__: None)
    readings = transfer.SUITE.experiments[0].measure(EFFORT, frozenset({"tcp/read/1MiB/x1"}))
    assert readings == {"tcp/read/1MiB/x1": Unmeasured(turns.NO_COMPILER)}


# ---- processes that take turns ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_bare(tmp_path_factory.mktemp("bare"))


@pytest.mark.parametrize("verb", ["read", "memcpy"])
@pytest.mark.parametrize("how", ["cold", "warm"])
def test_the_yardstick(bare: Path, tmp_path: Path, verb: str, how: str) -> None:
    with turner("C", [str(bare), "4"], tmp_path / "log") as process:
        for block, batch in ((4096, 1), (65536, 64), (MIB, 3)):
            turn = process.turn(Cell(block, batch, 5, verb, how))
            assert len(turn.seconds) == 5 and min(turn.seconds) > 0 and turn.cpu_s > 0


def test_the_yardstick_refuses_what_does_not_fit(bare: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(UnavailableError, match="C does not go on: bare_tcp: cannot do read 1048576 5 1 cold"),
        turner("C", [str(bare), "4"], tmp_path / "log") as process,
    ):
        process.turn(Cell(MIB, 5, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_our_movers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "headwater.bench.mover", kind, str(4 * MIB)]
    with turner("ours", command, tmp_path / "log") as process:
        for block, batch in ((4096, 1), (65536, 40)):
            assert len(process.turn(Cell(block, batch, 5)).seconds) == 5
        if kind == "tcp":
            assert len(process.turn(Cell(65536, 3, 5, "write")).seconds) == 5
    assert not list(tmp_path.glob("headwater-*"))


class Copier:
    """Moves within one process; `lose` says that the last byte of each block stays behind."""

    def __init__(self, remote: Pool, pool: Pool, *, lose: bool = False) -> None:
        self._remote, self._pool, self._lose = remote, pool, lose
        self.asked: list[tuple[list[int], list[int]]] = []

    def move(self, verb: str, places: Sequence[int], offsets: Sequence[int], block_bytes: int) -> None:
        self.asked.append((list(places), list(offsets)))
        for place, offset in zip(places, offsets, strict=True):
            end = block_bytes - self._lose
            self._pool.bytes[place : place + end] = self._remote.bytes[offset : offset + end]


def local_turns(*, lose: bool = False) -> tuple[Copier, Turns]:
    remote, pool = Pool(64 << 10), Pool(64 << 10)
    remote.fill(1)
    pool.fill(99)
    copier = Copier(remote, pool, lose=lose)
    return copier, Turns(copier, remote, pool, ~os.getpid() << 3 | 2)


def test_blocks_are_asked_for_in_random_orders_without_repeats() -> None:
    copier, it = local_turns()
    assert len(it.turn("read", 4096, 4, 4, cold=True)["seconds"]) == 4  # type: ignore[arg-type]
    for which in (0, 1):
        order = [offset for asked in copier.asked for offset in asked[which]]
        assert sorted(order) == list(range(0, 64 << 10, 4096)) != order
    assert copier.asked[0][0] != copier.asked[0][1]
    copier.asked.clear()
    it.turn("read", 4096, 4, 3, cold=False)
    assert copier.asked[0] == copier.asked[2]


def test_a_mover_that_loses_a_byte_is_found() -> None:
    _, it = local_turns(lose=True)
    with pytest.raises(SystemExit, match="other bytes"):
        it.turn("read", 4096, 4, 1, cold=True)


# ---- contests -----------------------------------------------------------------------------------------------


def scripted(seconds: Sequence[float], end: str = "") -> list[str]:
    """A process whose turns take so long, one after another, and that then ends."""
    text = f"""
import json, sys
print("{{}}", flush=True)
for seconds in {json.dumps(list(seconds))}:
    sys.stdin.readline()
    print(json.dumps({{"seconds": [seconds, seconds], "cpu_s": 1, "peer_cpu_s": 1}}), flush=True)
sys.stdin.readline()
raise SystemExit({end!r})
"""
    return [sys.executable, "-c", text]


def test_what_is_reported_is_the_median_of_the_rounds_ratios(tmp_path: Path) -> None:
    ours, theirs = [9.0, 1.0, 2.0, 4.0], [9.0, 4.0, 4.0, 4.0]  # the first is for nothing
    with Contest() as contest:
        contest.add("ours", "ours", lambda: scripted(ours), tmp_path / "ours")
        contest.add("theirs", "theirs", lambda: scripted(theirs), tmp_path / "theirs")
        cell = Cell(500_000_000, 2, 2)
        found = contest.run({"it": {"ours": cell, "theirs": cell}}, 3, lambda: None)
        reading = contest.compare("ours", "theirs", found, "it")
    assert isinstance(reading, Reading)
    assert reading.value == 0.5  # GB/s of our median turn
    assert reading.yardstick_value == reading.value / statistics.median([4.0, 2.0, 1.0])
    assert reading.cpu_s_per_gb == 1.0  # a turn is two calls of 1 GB, and both ends count
    assert found["it", "ours"].calls == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_who_ends_is_left_out_and_quoted(tmp_path: Path) -> None:
    with Contest() as contest:
        contest.add("ours", "ours", lambda: scripted([1.0] * 9), tmp_path / "ours")
        contest.add("theirs", "Mooncake", lambda: scripted([1.0] * 2, "no more"), tmp_path / "theirs")
        contest.add("nobody", "Nobody", lambda: turns.peer_command("nobody", "nobody.py"), tmp_path / "nobody")
        cell = Cell(4096, 1, 2)
        found = contest.run({"it": dict.fromkeys(("ours", "theirs", "nobody"), cell)}, 3, lambda: None)
        assert contest.compare("ours", "theirs", found, "it") == Unmeasured("Mooncake does not go on: no more")
        assert contest.compare("ours", "nobody", found, "it") == Unmeasured(turns.MISSING)
        assert len(found["it", "ours"].series.seconds) == 3


def test_cpu_of_both_ends_is_compared() -> None:
    contest = Contest()
    samples = {
        ("it", who): Samples(Series(2.0, [1.0, 1.0], cpu_s=cpu_s)) for who, cpu_s in (("ours", 1.0), ("theirs", 4.0))
    }
    reading = contest.compare_cpu("ours", "theirs", samples, "it")
    assert isinstance(reading, Reading)
    assert (reading.value, reading.yardstick_value) == (0.25, 1.0)


@pytest.mark.parametrize("peer", ["mooncake", "nixl"])
def test_the_rivals_themselves(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (INSTALLED[0] / peer).exists():
        pytest.skip(f"{peer} is not there: benchmarks/install_peers.py")
    monkeypatch.setattr(turns, "PEERS", INSTALLED[0])
    monkeypatch.setattr(turns, "DRIVERS", INSTALLED[1])
    entrant = transfer.ENTRANTS["cma" if peer == "nixl" else peer]
    with turner(peer, entrant.command(4 * MIB, tmp_path), tmp_path / "log") as process:
        for verb in ("read", "write"):
            assert len(process.turn(Cell(65536, 8, 3, verb)).seconds) == 3
