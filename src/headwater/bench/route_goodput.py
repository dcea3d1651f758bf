"""What is left when there is too much: requests that meet both SLOs under overload, and TTFT without news.

Goodput counts what is served within its SLO, per second of arrivals. The fleet is so small that the conversation trace
as recorded almost fills it; twice and four times that is overload. What others than ours do without admission is played
too, and the best of all is the yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Unmeasured
from headwater.bench.replays import CONVERSATION, SYNTHETIC, Outcome, Scenario, exact, is_wanted, played, recorded
from headwater.bench.replays import unmeasured as all_unmeasured
from headwater.core.policies import POLICIES
from headwater.errors import UnavailableError
from headwater.sim.fleet.config import SloConfig
from headwater.sim.fleet.summary import summarise
from headwater.sim.fleet.world import simulate
from headwater.traces.model import Trace

OURS = "headwater"
LOADS = tuple(Scenario(4, 4096, load) for load in (1, 2, 4))
SLOS = {"2s-50ms": SloConfig(2.0, 0.05), "30s-100ms": SloConfig(30.0, 0.1)}
"""Of an interactive service, and of Mooncake's paper (FAST'25)."""
GAIN = 1.3
WITHOUT = "the best of all policies without admission"


def measure_goodput(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See GOODPUT."""
    try:
        trace = recorded(CONVERSATION, effort)
    except UnavailableError as error:
        return all_unmeasured(wanted, error)
    readings: dict[str, Reading | Unmeasured] = {}
    for it in LOADS:
        if is_wanted(wanted, f"goodput/{it.name}/"):
            without = best_without(trace, it, effort)
            for title, slo in SLOS.items():
                settings = {"admission": True, "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}}
                found = played(trace, it.fleet(OURS, settings), effort)
                name = f"goodput/{it.name}/{title}"
                kept = 100 * found.goodput_share * found.requests / max(found.served, 1)
                readings[f"{name}/rate"] = exact(found.goodput_rps, without[title])
                readings[f"{name}/kept"] = exact(kept)
    return readings


def best_without(trace: Trace, it: Scenario, effort: Effort) -> dict[str, float]:
    """For each SLO the best goodput of all policies, which know nothing of SLOs: one run each says it for all."""
    found = dict.fromkeys(SLOS, 0.0)
    for policy in POLICIES:
        run = simulate(trace, it.fleet(policy))
        effort.after_turn()
        for title, slo in SLOS.items():
            found[title] = max(found[title], summarise(run, slo, it.count).goodput_rps)
    return found


def _goodput_specs() -> Iterator[Spec]:
    for it in LOADS:
        goal = Goal(at_least=True, factor=GAIN) if it.load > 1 else None
        for title, slo in SLOS.items():
            about = f"TTFT {slo.ttft_s:g} s and {1e3 * slo.tpot_s:g} ms a token, with admission, {it.about}"
            yield Spec(f"goodput/{it.name}/{title}/rate", "req/s", about, goal, WITHOUT)
            yield Spec(f"goodput/{it.name}/{title}/kept", "%", "of those that are admitted, so many meet both")


GOODPUT = Experiment("Goodput under an SLO, with admission", tuple(_goodput_specs()), measure_goodput)

# ---- without news

FLEET = Scenario(8, 16384)
TRACES = {"conversation": CONVERSATION, "synthetic": SYNTHETIC}
NEVER_S, SAMPLE_S = 1e5, 60.0
SIGNALS: dict[str, tuple[str, dict[str, Any]]] = {
    "late": ("what is held is known 10 s late, loads 1 s", {"event_lag_s": 10.0, "load_lag_s": 1.0}),
    "very-late": ("what is held is known 60 s late, loads 10 s", {"event_lag_s": 60.0, "load_lag_s": 10.0}),
    "no-events": ("nothing is known of what is held", {"events": "missing"}),
    "no-events-late": ("nothing is known of what is held, loads 10 s late", {"events": "missing", "load_lag_s": 10.0}),
    "nothing": ("nothing is known but what was routed", {"events": "missing", "load_lag_s": NEVER_S}),
}
WORSE = 1.05
BLIND = "round robin, which needs no signals"


def measure_degrade(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See DEGRADE."""
    readings: dict[str, Reading | Unmeasured] = {}
    for title, name in TRACES.items():
        names = frozenset(it for it in wanted if it.startswith(f"degrade/{title}/"))
        if not names:
            continue
        try:
            trace = recorded(name, effort)
        except UnavailableError as error:
            readings |= all_unmeasured(names, error)
            continue
        blind = Outcome.of(played(trace, FLEET.fleet("round_robin"), effort)).ttft_ms
        for kind, (_, signals) in SIGNALS.items():
            if (figure := f"degrade/{title}/{kind}/ttft") in names:
                config = FLEET.fleet(OURS, {"signals": signals, "sample_s": SAMPLE_S})
                ours = Outcome.of(played(trace, config, effort)).ttft_ms
                readings[figure] = exact(ours, blind)
    return readings


DEGRADE = Experiment(
    "Late and missing signals",
    tuple(
        Spec(f"degrade/{title}/{kind}/ttft", "ms", f"mean TTFT, {about}", Goal(at_least=False, factor=WORSE), BLIND)
        for title in TRACES
        for kind, (about, _) in SIGNALS.items()
    ),
    measure_degrade,
)
