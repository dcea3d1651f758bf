"""Whether a fit holds: a workload that was not measured goes to the engine, and to a simulated one with the fit.

Requests come by chance (Poisson), in lengths spread evenly over their logarithms, some with a beginning that others
have too. The same arrivals, lengths and shared blocks make the trace that is simulated. Prompts stay within what was
measured: how far a fit carries beyond that is not what is asked here.
"""

from __future__ import annotations

import math
import random
import secrets
import statistics
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from headwater.calibrate.file import Calibrated
from headwater.calibrate.probe import Progress
from headwater.calibrate.server import VOCABULARY, Answer, EngineServer
from headwater.errors import RefusedError
from headwater.sim.fleet.config import FleetConfig, Group, PolicyConfig
from headwater.sim.fleet.results import Ending
from headwater.sim.fleet.world import simulate
from headwater.traces.model import Trace, TraceRequest

LOAD = 0.5
"""The share of the time in which the engine is expected to be busy."""
SHORTEST = 32
ANSWERS = (4, 32)
SHARED, BEGINNINGS = 0.3, 3
"""How many requests begin like others, and how many such beginnings there are."""
UNTOLD_BLOCK = 16
REQUESTS_MIN, REQUESTS_MAX = 10, 1000


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace, and the prompts that it stands for."""

    trace: Trace
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """Mean times of the engine and of the simulation, in seconds."""

    requests: int
    measured_ttft_s: float
    predicted_ttft_s: float
    measured_tpot_s: float
    predicted_tpot_s: float
    seed: int

    @property
    def ttft_error(self) -> float:
        """How far the predicted mean time to the first token is off, as a share of the measured one."""
        return self.predicted_ttft_s / self.measured_ttft_s - 1

    @property
    def tpot_error(self) -> float:
        """The same of the time per output token."""
        return self.predicted_tpot_s / self.measured_tpot_s - 1


def draw(calibrated: Calibrated, seconds: float, seed: int, load: float = LOAD) -> Workload:
    """A workload of about so many seconds that keeps the engine busy for a share of them, by the fit's own estimate."""
    # Contents never repeat, or what an earlier run has sent would be found in the engine's cache.
    drawn, contents = random.Random(seed), random.Random(secrets.randbits(64))
    block = calibrated.served.block_tokens or UNTOLD_BLOCK
    measured = calibrated.fitted.measured
    longest = measured.prefill_tokens[1]
    kept = longest // 2 // block
    beginnings = [[_token(contents) for _ in range(kept * block)] for _ in range(BEGINNINGS)]
    prompts: list[tuple[int, ...]] = []
    rows: list[TraceRequest] = []
    seen: set[int] = set()
    unused, busy_s = BEGINNINGS * kept, 0.0
    while len(rows) < REQUESTS_MIN or (busy_s < load * seconds and len(rows) < REQUESTS_MAX):
        tokens = round(math.exp(drawn.uniform(math.log(min(SHORTEST, longest)), math.log(longest))))
        shared = drawn.randrange(BEGINNINGS) if drawn.random() < SHARED else None
        start = [] if shared is None else beginnings[shared][: (tokens - 1) // block * block]
        leading, count = len(start) // block, -(-tokens // block)
        own = range(unused, unused + count - leading)
        first = (shared or 0) * kept
        blocks = (*range(first, first + leading), *own)
        unused += len(own)
        prompts.append((*start, *(_token(contents) for _ in range(tokens - len(start)))))
        rows.append(TraceRequest(0.0, tokens, drawn.randint(*ANSWERS), blocks))
        busy_s += _alone_s(calibrated, rows[-1], sum(it in seen for it in blocks[:leading]) * block)
        seen.update(blocks[: tokens // block])
    gap_s = busy_s / len(rows) / load
    arrivals_s = [0.0, *accumulate(drawn.expovariate(1 / gap_s) for _ in rows[1:])]
    requests = tuple(replace(row, arrival_s=at_s) for row, at_s in zip(rows, arrivals_s, strict=True))
    return Workload(Trace(f"drawn with seed {seed}", block, requests), tuple(prompts))


def _alone_s(calibrated: Calibrated, it: TraceRequest, cached: int) -> float:
    """How long the engine needs for a request if it has no other."""
    times = calibrated.fitted.times
    step_s = times.decode_s(1, it.input_tokens + it.output_tokens / 2)
    return times.prefill_s(it.input_tokens - cached, cached) + (it.output_tokens - 1) * step_s


def verify(calibrated: Calibrated, server: EngineServer, seconds: float, seed: int, progress: Progress) -> Verified:
    """Play a workload on the engine, simulate it with the fit, compare; `server` knows how to ask (see calibrate).

    Raises RefusedError for a server that takes no token ids: what its prompts have in common cannot be told.
    """
    if not server.dialect.token_ids:
        raise RefusedError("server", "one that takes prompts as token ids", "one that takes text only", "leave it out")
    workload = draw(calibrated, seconds, seed)
    try:
        trace, answers = play(server, workload, progress)
    except BaseException:
        server.close()
        raise
    run = simulate(trace, fleet_of(calibrated, trace), seed=seed)
    assert (run.ending == Ending.SERVED).all(), "one instance serves everything that the engine did"
    gaps = [(it.token_s[-1] - it.token_s[0]) / (len(it.token_s) - 1) for it in answers if len(it.token_s) > 1]
    return Verified(
        len(answers),
        statistics.fmean(it.ttft_s for it in answers),
        float(run.ttft_s.mean()),
        statistics.fmean(gaps) if gaps else math.nan,
        float(np.nanmean(run.tpot_s)) if gaps else math.nan,
        seed,
    )


def fleet_of(calibrated: Calibrated, trace: Trace) -> FleetConfig:
    """A fleet of one instance, as the engine is; where the server does not say its room, with room for the trace."""
    block = trace.block_tokens
    room = calibrated.served.capacity_tokens
    if room is None:
        room = sum(it.input_tokens + it.output_tokens + 2 * block for it in trace.requests)
    group = Group(blocks=max(room // block, 1), block_tokens=block, times=calibrated.fitted.times)
    return FleetConfig((group,), policy=PolicyConfig("round_robin"), sample_s=0.0)


def play(server: EngineServer, workload: Workload, progress: Progress) -> tuple[Trace, list[Answer]]:
    """Send every request at its time, however many are under way. The trace is as it came to be: when requests were
    really sent, and how long the answers were."""
    rows, count = workload.trace.requests, len(workload.prompts)
    answers = server.together(
        workload.prompts,
        [it.output_tokens for it in rows],
        [it.arrival_s for it in rows],
        lambda done: progress(done / count, f"{done} of {count} requests"),
    )
    began_s = min(it.sent_s for it in answers)
    happened = [
        replace(row, arrival_s=it.sent_s - began_s, output_tokens=len(it.token_s))
        for row, it in zip(rows, answers, strict=True)
    ]
    happened.sort(key=lambda it: it.arrival_s)
    return replace(workload.trace, requests=tuple(happened)), answers


def _token(contents: random.Random) -> int:
    return contents.randrange(VOCABULARY.start, VOCABULARY.stop)
