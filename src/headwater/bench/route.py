"""`headwater bench route`: policies on recorded workloads, the prefix index, decisions, and the simulator itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

from headwater.bench import index, route_goodput, route_replay
from headwater.bench.decide import decide_samples
from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Series, Spec, Suite, Unmeasured
from headwater.bench.replays import CONVERSATION, Scenario, recorded, unmeasured
from headwater.errors import UnavailableError
from headwater.sim.fleet.world import simulate
from headwater.traces.model import Trace
from headwater.traces.shape import first

MS = 1e3
WORKERS, BLOCKS, PROMPT_TOKENS = 1000, 10_000, 4096
CALLS, QUICK_CALLS = 500, 50


def measure_decide(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See DECIDE."""
    series = Series(1.0)
    calls, blocks = (QUICK_CALLS, BLOCKS // 10) if effort.quick else (CALLS, BLOCKS)
    series.seconds = decide_samples(WORKERS, blocks, PROMPT_TOKENS, calls)
    effort.after_turn()
    return {"decide/p50": series.latency(MS), "decide/p99": series.latency(MS, 99)}


DECIDE = Experiment(
    "One routing decision",
    (
        Spec(
            "decide/p50",
            "ms",
            f"who holds how much, and which is best: {WORKERS:,} instances of {BLOCKS:,} blocks, "
            f"a prompt of {PROMPT_TOKENS:,} tokens",
        ),
        Spec("decide/p99", "ms", "99th percentile", Goal(at_least=False, plus=2.0)),
    ),
    measure_decide,
)

# ---- how fast fleets are simulated


@dataclass(frozen=True, slots=True)
class Size:
    """A fleet to be simulated, by each of `policies`, `rounds` times at most; only the first `requests`, if given."""

    fleet: Scenario
    policies: tuple[str, ...]
    rounds: int
    requests: int = 0
    goal: Goal | None = None

    def name(self, policy: str) -> str:
        """Of its figure."""
        return f"sim/{self.fleet.count}x{self.fleet.blocks}/{policy}/rate"


BOTH = ("headwater", "round_robin")
SIZES = (
    Size(Scenario(8, 16384), BOTH, 3, goal=Goal(at_least=True, plus=50_000)),
    Size(Scenario(8, 4096), BOTH, 3),
    Size(Scenario(8, 65536), BOTH, 3),
    Size(Scenario(64, 16384, 8), BOTH, 1),
    Size(Scenario(1000, 16384, 125), BOTH, 1, requests=4000),
)
"""As many requests an instance and second in all of them."""


def measure_simulator(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See SIMULATOR."""
    try:
        trace = recorded(CONVERSATION, effort)
    except UnavailableError as error:
        return unmeasured(wanted, error)
    readings: dict[str, Reading | Unmeasured] = {}
    for size in SIZES:
        policies = [it for it in size.policies if size.name(it) in wanted]
        part = first(trace, size.requests) if size.requests else trace
        series = {it: Series(float(len(part.requests))) for it in policies}
        for _ in range(min(effort.rounds, size.rounds)):
            for policy in policies:
                series[policy].seconds.append(_seconds(part, size.fleet, policy, effort))
        readings |= {size.name(it): series[it].rate() for it in policies}
    return readings


def _seconds(trace: Trace, fleet: Scenario, policy: str, effort: Effort) -> float:
    """How long one run takes, with the collection of garbage that is usual."""
    config = fleet.fleet(policy)
    gc.collect()
    began_s = effort.clocks.wall()
    simulate(trace, config)
    took_s = effort.clocks.wall() - began_s
    effort.after_turn()
    return took_s


def _size_specs() -> Iterator[Spec]:
    for size in SIZES:
        part = f", the first {size.requests:,} requests" if size.requests else ""
        for policy in size.policies:
            about = f"simulated requests of the conversation trace a second, {size.fleet.about}{part}"
            yield Spec(size.name(policy), "req/s", about, size.goal)


SIMULATOR = Experiment("How fast fleets are simulated", tuple(_size_specs()), measure_simulator)

SUITE = Suite(
    "route",
    "routing, admission and placement on recorded workloads, the prefix index and the simulator, beside Dynamo",
    (
        route_replay.REPLAYS,
        route_goodput.GOODPUT,
        route_goodput.DEGRADE,
        *index.EXPERIMENTS,
        DECIDE,
        SIMULATOR,
    ),
)
