"""Runs in processes of their own: who is interrupted, killed or orphaned, and that nothing outlives anything."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.errors import ResourceError
from headwater.sim.fleet.config import parse_fleet
from headwater.sim.fleet.sweep import Cell, grid, sweep
from headwater.traces.model import Trace
from tests.sim.fleet.plays import ENDLESS, INTERRUPTED, KILLED, play_by_load

ROOT = Path(__file__).resolve().parents[3]
TRACE = Trace("t", 16, ())
TREE = {"instances": [{"count": 2, "blocks": 600, "block_tokens": 16}]}
ORPHANS = f"""
from headwater.sim.fleet.config import parse_fleet
from headwater.sim.fleet.sweep import grid, sweep
from headwater.traces.model import Trace
from tests.sim.fleet.plays import play_by_load
sweep(Trace("t", 16, ()), grid({TREE}, parse_fleet, [("load", [{ENDLESS}] * 2)]), play_by_load, jobs=2)
"""


def cells(*loads: int) -> list[Cell]:
    return grid(TREE, parse_fleet, [("load", loads)])


def test_an_interrupt_is_the_parents_and_ends_all_processes() -> None:
    def interrupt(done: float, total: float) -> None:
        raise KeyboardInterrupt(f"{done:g} of {total:g}")

    with pytest.raises(KeyboardInterrupt, match="1 of 2"):  # and does not wait for the run that never ends
        sweep(TRACE, cells(INTERRUPTED, ENDLESS), play_by_load, jobs=2, advance=interrupt)


def test_a_process_that_is_killed_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ResourceError, match="use fewer than --jobs 2"):
        sweep(TRACE, cells(KILLED, KILLED), play_by_load, jobs=2)


def test_no_process_outlives_its_parent() -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    line = [sys.executable, "-c", ORPHANS]
    parent = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    assert parent.stdout is not None
    with parent.stdout:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        ended, _, _ = select.select([child], [], [], 20)
    os.close(child)
    assert ended
