"""Runs that no simulator made, for what sums them up; few imports, for other processes import it."""

import os
import signal
import sys
from typing import Any

import numpy as np

from headwater.sim.fleet.config import FleetConfig
from headwater.sim.fleet.results import Run
from headwater.traces.model import Trace

INTERRUPTED, KILLED, ENDLESS = 2, 3, 4


def nobody_served(count: int, ending: int = 1) -> Run:
    """So many requests, of which none was served."""
    none, zero = np.full(count, np.nan), np.zeros(count, np.int64)
    endings, where, arrivals = np.full(count, ending, np.int8), np.full(count, -1, np.int32), np.arange(count) * 1.0
    return Run({}, 0, arrivals, zero, zero, endings, where, none, none, none, none, zero, zero, zero, zero, zero)


def all_served(count: int) -> Run:
    """So many requests, served by two instances in turn."""
    run, times = nobody_served(count, ending=0), np.linspace(0.1, 0.2, count)
    run.input_tokens, run.output_tokens = np.full(count, 100), np.full(count, 5)
    run.instance, run.ttft_s, run.tpot_s = np.arange(count, dtype=np.int32) % 2, times, times / 10
    run.done_s = run.arrival_s + 1.0
    return run


def play_by_load(trace: Trace, config: FleetConfig, *, seed: int = 0, progress: Any = None) -> Run:
    """Does to its own process what the fleet's load says."""
    if config.load == INTERRUPTED:
        os.kill(os.getpid(), signal.SIGINT)  # as the terminal sends it to all
    if config.load == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.load == ENDLESS:
        sys.stdout.write(f"{os.getpid()}\n")
        sys.stdout.flush()
        signal.pause()
    return nobody_served(1)
