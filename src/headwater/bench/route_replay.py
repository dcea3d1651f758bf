"""Simulated fleets on the conversation trace, beside Dynamo's own replay of it.

First our simulator is held against theirs where nothing depends on a policy: round robin, with the same trace, capacity
and step times. Then policies are compared, ours with the best that their KV router says in the same run, each figure
with the best of its own. Everything of theirs but `prefill_load_scale` is at its defaults.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Unmeasured
from headwater.bench.replays import (
    CONVERSATION,
    Outcome,
    Scenario,
    Theirs,
    dynamo,
    exact,
    is_wanted,
    played,
    recorded,
    unmeasured,
)
from headwater.core.policies import POLICIES
from headwater.errors import UnavailableError
from headwater.traces.model import Trace

MOCKER = "Dynamo 1.6.1, its replay by round robin"
ROUTER = "Dynamo 1.6.1, its KV router, the best of prefill_load_scale 1, 2, 8 and 32"
SCALES = (1.0, 2.0, 8.0, 32.0)
CALIBRATED = tuple(Scenario(8, blocks, load) for blocks in (16384, 4096) for load in (1, 2))
REUSE_PERCENT, TTFT_PERCENT = 5.0, 10.0
REPLAYED = (Scenario(8, 16384), Scenario(8, 16384, 2), Scenario(8, 4096))
OURS = "headwater"
OTHERS = tuple(name for name in POLICIES if name != OURS)
TOKEN_BYTES = 131_072
"""Of KV: Llama-3.1-8B's."""
REMOTE_BYTES_S, REMOTE_LATENCY_S = 10_000_000_000, 1e-3
SHARED = REPLAYED[0]
TIERS = {
    OURS: ("demand", "evicted"),
    "learned": ("learned", "evicted"),
    "lru": ("lru", "evicted"),
    "lru-at-once": ("lru", "computed"),
}
"""What the shared tier keeps, and when KV is saved there: ours, and others for comparison."""
NODES = "nodes"
LOCAL_BYTES_S, LOCAL_LATENCY_S = 25_000_000_000, 1e-4
"""Of a node's own DRAM: a PCIe 4 x16 link."""


def measure(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See REPLAYS."""
    try:
        trace = recorded(CONVERSATION, effort)
    except UnavailableError as error:
        return unmeasured(wanted, error)
    readings: dict[str, Reading | Unmeasured] = {}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name, dynamo(effort, Path(name)) as theirs:
        for it in CALIBRATED:
            if is_wanted(wanted, f"calibrate/{it.name}/"):
                readings |= _calibrate(it, trace, theirs, effort)
        for it in REPLAYED:
            readings |= _replay(it, trace, theirs, effort, wanted)
        if is_wanted(wanted, "shared/"):
            readings |= _share(trace, theirs, effort, wanted)
    return readings


# ---- round robin, here and there


def _calibrate(it: Scenario, trace: Trace, theirs: Theirs, effort: Effort) -> Readings:
    names = [f"calibrate/{it.name}/{figure}" for figure in ("reuse", "reuse-error", "ttft", "ttft-error")]
    try:
        peer = theirs.play(it, "round_robin")
    except UnavailableError as error:
        return unmeasured(frozenset(names), error)
    ours = Outcome.of(played(trace, it.fleet("round_robin"), effort))
    values = []
    for mine, its in zip(ours, peer, strict=True):
        values += [exact(mine, its), exact(100 * abs(mine / its - 1))]
    return dict(zip(names, values, strict=True))


def _calibrate_specs(it: Scenario) -> Iterator[Spec]:
    name = f"calibrate/{it.name}"
    yield Spec(f"{name}/reuse", "", f"prompt tokens found, round robin, {it.about}", None, MOCKER)
    yield Spec(f"{name}/reuse-error", "%", "how far that is from theirs", Goal(at_least=False, plus=REUSE_PERCENT))
    yield Spec(f"{name}/ttft", "ms", f"mean TTFT, round robin, {it.about}", None, MOCKER)
    yield Spec(f"{name}/ttft-error", "%", "how far that is from theirs", Goal(at_least=False, plus=TTFT_PERCENT))


# ---- policies, instance caches only


def best(theirs: Theirs, it: Scenario) -> Outcome:
    """The most reuse and the least TTFT of their KV router. Raises UnavailableError."""
    rows = [theirs.play(it, "kv", scale) for scale in SCALES]
    return Outcome(max(row.reuse for row in rows), min(row.ttft_ms for row in rows))


def _replay(it: Scenario, trace: Trace, theirs: Theirs, effort: Effort, wanted: frozenset[str]) -> Readings:
    readings: dict[str, Reading | Unmeasured] = {}
    for policy in (OURS, *OTHERS):
        name = f"replay/{it.name}/{policy}"
        if is_wanted(wanted, f"{name}/"):
            ours = Outcome.of(played(trace, it.fleet(policy), effort))
            if policy == OURS:
                readings |= _beside(name, ours, theirs, it)
            else:
                readings |= {f"{name}/reuse": exact(ours.reuse), f"{name}/ttft": exact(ours.ttft_ms)}
    return readings


def _beside(name: str, ours: Outcome, theirs: Theirs, it: Scenario) -> Readings:
    """Ours beside their best; without them, what has a goal that does not need them."""
    names = (f"{name}/reuse", f"{name}/ttft")
    try:
        peer = best(theirs, it)
    except UnavailableError as error:
        goals = {spec.name: spec.goal for spec in REPLAYS.specs}
        found: dict[str, Reading | Unmeasured] = {}
        for figure, value in zip(names, ours, strict=True):
            goal = goals[figure]
            found[figure] = Unmeasured(str(error)) if goal is not None and goal.factor else exact(value)
        return found
    return {figure: exact(*values) for figure, *values in zip(names, ours, peer, strict=True)}


def _replay_specs(it: Scenario) -> Iterator[Spec]:
    goals = (Goal(at_least=True, factor=1.0), Goal(at_least=False, factor=1.0))
    if it == SHARED:
        goals = (Goal(at_least=True, plus=0.225), Goal(at_least=False, plus=260.0))
    about = f"instance caches only, {it.about}"
    for policy in (OURS, *OTHERS):
        reuse, ttft = goals if policy == OURS else (None, None)
        beside = ROUTER if policy == OURS else None
        yield Spec(f"replay/{it.name}/{policy}/reuse", "", f"prompt tokens found, {about}", reuse, beside)
        yield Spec(f"replay/{it.name}/{policy}/ttft", "ms", f"mean TTFT, {about}", ttft, beside)


# ---- with a shared tier


def shared_tier(keeping: str, saving: str) -> dict[str, Any]:
    """Settings of a fleet with a shared tier as large as its instances' KV in all."""
    tier = {
        "size": SHARED.tokens * TOKEN_BYTES,
        "bytes_s": REMOTE_BYTES_S,
        "latency_s": REMOTE_LATENCY_S,
        "keeping": keeping,
        "saving": saving,
    }
    return {"kv_bytes_per_token": TOKEN_BYTES, "tiers": {"remote": tier}}


def pooled_nodes() -> dict[str, Any]:
    """The same memory as the DRAM of the nodes, which read each other's at the shared tier's speed."""
    host = shared_tier(*TIERS[OURS])["tiers"]["remote"] | {"bytes_s": LOCAL_BYTES_S, "latency_s": LOCAL_LATENCY_S}
    host["size"] //= SHARED.count
    link = {"bytes_s": REMOTE_BYTES_S, "latency_s": REMOTE_LATENCY_S}
    return {"kv_bytes_per_token": TOKEN_BYTES, "tiers": {"host": host}, "link": link}


def _share(trace: Trace, theirs: Theirs, effort: Effort, wanted: frozenset[str]) -> Readings:
    readings: dict[str, Reading | Unmeasured] = {}
    fleets = {title: shared_tier(*how) for title, how in TIERS.items()} | {NODES: pooled_nodes()}
    for title, settings in fleets.items():
        name = f"shared/{SHARED.name}/{title}"
        if is_wanted(wanted, f"{name}/"):
            ours = Outcome.of(played(trace, SHARED.fleet(OURS, settings), effort))
            if title in (OURS, NODES):
                readings |= _beside(name, ours, theirs, SHARED)
            else:
                readings |= {f"{name}/reuse": exact(ours.reuse), f"{name}/ttft": exact(ours.ttft_ms)}
    return readings


def _share_specs() -> Iterator[Spec]:
    size = f"{SHARED.tokens * TOKEN_BYTES / 2**40:g} TiB shared, {REMOTE_BYTES_S / 1e9:g} GB/s a node"
    nodes = f"the same as DRAM of the nodes, {LOCAL_BYTES_S / 1e9:g} GB/s of their own"
    abouts = {title: f"{size}, keeping {keeping}, saving {saving}" for title, (keeping, saving) in TIERS.items()}
    for title, about in (abouts | {NODES: nodes}).items():
        has_goal = title in (OURS, NODES)
        reuse = Goal(at_least=True, plus=0.31) if has_goal else None
        ttft = Goal(at_least=False, factor=0.85) if has_goal else None
        beside = ROUTER if has_goal else None
        name = f"shared/{SHARED.name}/{title}"
        yield Spec(f"{name}/reuse", "", f"prompt tokens found, {about}", reuse, beside)
        yield Spec(f"{name}/ttft", "ms", f"mean TTFT, {about}", ttft, beside)


REPLAYS = Experiment(
    "The conversation trace, replayed here and by Dynamo",
    (
        *(spec for it in CALIBRATED for spec in _calibrate_specs(it)),
        *(spec for it in REPLAYED for spec in _replay_specs(it)),
        *_share_specs(),
    ),
    measure,
)
