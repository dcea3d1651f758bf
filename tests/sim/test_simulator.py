"""The simulator itself: hundreds of seeds, the same story in every process, and a failure that can be replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from headwater.core.entries import State
from headwater.sim import __main__ as command
from headwater.sim import world
from headwater.sim.faults import Faults, draw_faults
from headwater.sim.memory import Memory, part_of
from headwater.sim.node import SimulatedNode
from headwater.sim.schedule import Process, Schedule
from headwater.sim.tiering import Parts
from headwater.sim.workload import Plan, draw_plan, layouts
from headwater.sim.world import World
from tests.sim import test_clearing, test_mutants, test_mutants_below
from tests.sim.test_mutants import CommitsFailedChunks

SOURCE = Path(command.__file__).parents[2]


def start(seeds: str, hash_seed: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-m", "headwater.sim", "--seeds", seeds, "--json"],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def sums_of(runs: list[subprocess.Popen[str]]) -> Iterator[dict[str, int]]:
    for run in runs:
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        yield json.loads(out)


def test_hundreds_of_seeds() -> None:
    # With the real core the seeds that catch mutants are fine.
    assert max(test_mutants.SEEDS, test_mutants_below.SEEDS, test_clearing.SEEDS) <= 400
    first, second = sums_of([start("0:200", "1"), start("200:400", "2")])
    total = {name: first[name] + second[name] for name in first if name not in ("log_sha256", "seconds")}
    print(total, first["seconds"], second["seconds"])
    # A simulation in which nothing happens proves nothing.
    assert total["seeds"] == 400
    assert total["requests"] > 4_000
    assert total["hit_tokens"] > total["lookup_tokens"] / 10
    assert total["reads"] > 1_000
    assert total["stored"] > 4_800
    assert total["evicted"] > 2_400
    assert total["expired"] > 600
    assert total["written_below"] > 2_400
    assert total["read_below"] > 280
    assert total["fetches"] > 2_000
    assert total["fetches_cut"] > 160


def test_a_seed_is_the_same_story_in_every_process() -> None:
    stories = {it["log_sha256"] for it in sums_of([start("0:40", hash_seed) for hash_seed in ("0", "7", "random")])}
    assert len(stories) == 1
    assert World(3).play() == World(3).play()
    assert World(3).play().log_sha256 != World(4).play().log_sha256


def test_a_replay_writes_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "5"]) == 0
    plan, faults, *log, end = capsys.readouterr().out.splitlines()
    assert plan.startswith("Plan(")
    assert faults.startswith("Faults(")
    assert any(" reserve " in line for line in log)
    assert [float(line.split()[0]) for line in log] == sorted(float(line.split()[0]) for line in log)
    assert World(5).play().log_sha256 in end


def test_a_failure_names_its_seed_and_how_to_replay_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "World", lambda seed: World(seed, Parts(cache=CommitsFailedChunks)))
    assert command.main(["--seeds", "0:60"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "WRONG: seed " in said
    seed = said.split("WRONG: seed ")[1].split(",")[0]
    assert f"replay it with: python -m headwater.sim --seed {seed}" in said
    assert command.main(["--seed", seed]) == 1
    assert "WRONG: seed" in capsys.readouterr().out


def test_where_nothing_goes_wrong_below_all_that_is_in_host_goes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk is forgotten on its way down, whatever engines do."""

    def plan(rng: Random) -> Plan:
        return replace(draw_plan(rng), admission="all", disk_slabs=60, remotes=1, remote_pages=100_000)

    def faults(rng: Random) -> Faults:
        of_tiers = dict.fromkeys(("tier_is_slow", "tier_sticks", "tier_fails", "tier_breaks", "tier_is_full"), 0.0)
        return replace(draw_faults(rng), **of_tiers, chunk_rots=0.0, restarts=0.0, clears=0.0, wishes=0.0)

    checked = 0

    def check(node: SimulatedNode) -> None:
        nonlocal checked
        cache = node.cache
        for number, space in enumerate(cache.spaces):
            for number_of_group, index in enumerate(space.index):
                for key, row in index.items():
                    assert cache.entries.state[row] == State.READY
                    missing = [it.name for it in node.tiering.levels if not it.has(number, number_of_group, key)]
                    assert not missing, f"{key.hex()} is not in {missing}"
                    checked += 1

    class Checked(World):
        def _check_room(self) -> None:
            check(self.node)
            super()._check_room()

    monkeypatch.setattr(world, "draw_plan", plan)
    monkeypatch.setattr(world, "draw_faults", faults)
    for seed in range(60):
        Checked(seed).play()
    assert checked > 300


@pytest.mark.parametrize("bad", ["7", "3:3", "5:2", "a:b", ":", "-1:4"])
def test_a_range_of_no_seeds_is_refused(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main([f"--seeds={bad}"])
    assert stopped.value.code == 2
    assert "not a range of seeds" in capsys.readouterr().err


def test_events_happen_in_order_to_those_who_live() -> None:
    schedule, seen = Schedule(), list[str]()
    dead, paused = Process("dead"), Process("paused")
    for what, delay_s, process in [
        ("late", 2.0, None),
        ("first", 1.0, None),
        ("second", 1.0, paused),
        ("never", 1.5, dead),
        ("last", 5.0, None),
    ]:
        schedule.after(delay_s, what, lambda what=what: seen.append(what), process)
    dead.alive, paused.paused_until_s = False, 3.0
    while len(schedule):
        schedule.step()
    assert seen == ["first", "late", "second", "last"]
    assert schedule.events == 4
    assert [line.split() for line in schedule.log] == [
        ["1.0000", "first"],
        ["2.0000", "late"],
        ["3.0000", "second"],
        ["5.0000", "last"],
    ]
    with pytest.raises(AssertionError):
        schedule.clock.advance(4.0)


def test_memory_knows_torn_foreign_and_unwritten_bytes() -> None:
    cleared = set[int]()
    memory, layout = Memory(cleared), layouts()["large"]
    mine = part_of(layout, b"mine" * 4, 0, 0, 8 * 4096)
    other = part_of(layout, b"else" * 4, 0, 0, 10 * 4096)
    assert "unwritten" in str(memory.flaw(mine))
    memory.begin_write(mine, "engine1/0")
    assert "torn by engine1/0" in str(memory.flaw(mine))
    memory.end_write(mine, 1)
    assert memory.flaw(mine) is None
    cleared.add(1)
    assert "page 0 of 6d696e.0.0@8 was stored by #1 before its namespace was cleared" in str(memory.flaw(mine))
    cleared.clear()
    memory.begin_write(other, "engine2/0")
    memory.end_write(other, 2)
    assert "page 2 of 6d696e.0.0@8 is 656c73.0.0 page 0" in str(memory.flaw(mine))
