"""`headwater bench burst`: a burst of chats that share prefixes, on real vLLM, with headwater and without.

Four `vllm serve` processes, two a side, on two cores: those of side A have the plug-in, share a node and stand behind a
Conductor; those of side B have nothing but vLLM's own prefix caching, and are asked in turns (round robin). One side is
asked at a time, in the order A B B A, each pair with prompts that nobody has seen. Engines' caches are smaller than the
prefixes of a burst but larger than half of them, as they are in a fleet with more system prompts than room.

How fast the machine is decides the pace: one cold prefill is timed first, arrivals are PACE times as many as one
engine could prefill, and the SLO of goodput is SLO_COLD such times.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Suite, Unmeasured, quartiles
from headwater.bench.proxy_systems import reason
from headwater.demo.burst import PACE, SLO_COLD, Burst, Result, ask, burst, chats, same_answers, summary, unseen
from headwater.demo.front import start_conductor
from headwater.demo.processes import Children, Served, check_model, kv_transfer_config, start_node, start_vllm
from headwater.errors import UnavailableError

ROUNDS_MAX, QUICK_ROUNDS = 3, 1
WARM_UPS = 2
CACHE_BLOCKS, BLOCK_TOKENS = 320, 32
"""Of each engine: 10,240 tokens, where the prefixes of a burst are about 18,000."""
FLAGS = (
    "--max-model-len", "2048", "--block-size", f"{BLOCK_TOKENS}", "--num-gpu-blocks-override", f"{CACHE_BLOCKS}",
)  # fmt: skip
NODE_MEMORY = "2GiB"
START_S = 600.0
SHAPE, QUICK_SHAPE = Burst(), Burst(families=8, chats=3)
SIDES = ("headwater", "round robin")


@dataclass(frozen=True, slots=True)
class Sides:
    """Where each side is asked, and its engines."""

    urls: dict[str, tuple[str, ...]]
    engines: dict[str, tuple[Served, ...]]


@dataclass(slots=True)
class Bursts:
    """The results of all rounds by side, with what they are held against."""

    slo_s: float
    rate: float
    rounds: list[dict[str, list[Result]]] = field(default_factory=list)

    def all(self, side: str) -> list[Result]:
        """One side's, round after round."""
        return [it for one in self.rounds for it in one[side]]


@contextmanager
def sides(model: Path) -> Iterator[Sides]:
    """Both sides, ready; all processes are gone afterwards. Raises UnavailableError or ConfigError."""
    check_model(model)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory, Children() as children:
        folder = Path(directory)
        node = f"unix:{folder}/node.sock"
        start_node(children, node, NODE_MEMORY, folder / "node.log")
        ours, theirs = [], []
        for number in range(2):
            core = cores[number % len(cores)]
            ours.append(_engine(children, model, f"a{number}", core, node, folder))
            theirs.append(_engine(children, model, f"b{number}", core, None, folder))
        for it in (*ours, *theirs):
            it.child.wait_until(it.healthy, START_S, lambda: None)
        _, port = start_conductor(children, model, node, ours, folder, folder / "conductor.log")
        yield Sides(
            {
                "headwater": (f"http://127.0.0.1:{port}",),
                "round robin": tuple(f"http://127.0.0.1:{it.port}" for it in theirs),
            },
            {"headwater": tuple(ours), "round robin": tuple(theirs)},
        )


def _engine(children: Children, model: Path, name: str, core: int, node: str | None, folder: Path) -> Served:
    """One engine, with the plug-in if there is a node."""
    transfer = None if node is None else kv_transfer_config(node)
    return start_vllm(children, name, model, core, transfer, folder, publishes=node is not None, flags=FLAGS)


def cold_s(engines: Sequence[Served], shape: Burst) -> float:
    """How long an engine takes until the first token of a chat that it has not seen; the first ones warm it up."""
    times = []
    for engine in engines:
        for number in range(WARM_UPS + 1):
            request = unseen(shape, f"{engine.name} {number}")
            found = ask("127.0.0.1", engine.port, request, "model", time.monotonic())
        times.append(found.ttft_s)
    return statistics.fmean(times)


def play(urls: dict[str, tuple[str, ...]], shape: Burst, rounds: int, slo_s: float, effort: Effort) -> Bursts:
    """All rounds: both sides get the same chats, and the sides take turns in being first."""
    found = Bursts(slo_s, shape.rate)
    for number in range(rounds):
        requests = chats(replace(shape, seed=shape.seed + number))
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        results: dict[str, list[Result]] = {}
        for side in order:
            results[side] = burst(requests, urls[side], answered=effort.after_turn)
        found.rounds.append(results)
    return found


def readings(found: Bursts) -> Readings:
    """All figures: ours, with those of round robin beside them."""
    ours, theirs = ([summary(one[side], found.slo_s) for one in found.rounds] for side in SIDES)

    def beside(mine: list[float], its: list[float]) -> Reading:
        low, middle, high = quartiles(mine)
        return Reading(middle, low, high, len(mine), statistics.median(its))

    equal = sum(same_answers(one["headwater"], one["round robin"]) for one in found.rounds)
    count = sum(len(one["headwater"]) for one in found.rounds)

    def alone(value: float) -> Reading:
        return Reading(value, value, value, len(found.rounds))

    return {
        "burst/goodput": beside([it.goodput for it in ours], [it.goodput for it in theirs]),
        "burst/ttft/mean": beside([it.ttft_mean_s for it in ours], [it.ttft_mean_s for it in theirs]),
        "burst/ttft/p50": beside([it.ttft_p50_s for it in ours], [it.ttft_p50_s for it in theirs]),
        "burst/ttft/p99": beside([it.ttft_p99_s for it in ours], [it.ttft_p99_s for it in theirs]),
        "burst/reuse": beside([it.reuse * 100 for it in ours], [it.reuse * 100 for it in theirs]),
        "burst/failed": beside([float(it.failed) for it in ours], [float(it.failed) for it in theirs]),
        "burst/equal": alone(100 * equal / count),
        "burst/slo": alone(found.slo_s),
        "burst/rate": alone(found.rate),
    }


def measure(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See SUITE."""
    shape = QUICK_SHAPE if effort.quick else SHAPE
    rounds = QUICK_ROUNDS if effort.quick else min(effort.rounds, ROUNDS_MAX)
    try:
        with sides(effort.model) as stage:
            prefill_s = cold_s(stage.engines["round robin"], shape)
            cold_s(stage.engines["headwater"], shape)
            shape = replace(shape, rate=PACE / prefill_s)
            return readings(play(stage.urls, shape, rounds, SLO_COLD * prefill_s, effort))
    except UnavailableError as error:
        return dict.fromkeys(wanted, Unmeasured(reason(error)))


BESIDE = "the same chats to vLLM with its own prefix caching, round robin"
SUITE = Suite(
    "burst",
    "a burst of chats that share prefixes on two real vLLM instances, through the Conductor and round robin",
    (
        Experiment(
            "Bursts of chats on four vLLM servers (this takes minutes)",
            (
                Spec(
                    "burst/goodput",
                    "req/s",
                    f"requests with a first token within {SLO_COLD:g} times a cold prefill, a second of arrivals",
                    Goal(at_least=True, factor=2.0),
                    BESIDE,
                ),
                Spec("burst/ttft/mean", "s", "mean time to first token", Goal(at_least=False, factor=0.5), BESIDE),
                Spec("burst/ttft/p50", "s", "its median", None, BESIDE),
                Spec("burst/ttft/p99", "s", "its 99th percentile", None, BESIDE),
                Spec("burst/reuse", "%", "of the prompts' tokens that nobody had to compute", None, BESIDE),
                Spec("burst/failed", "requests", "without an answer", Goal(at_least=False), BESIDE),
                Spec("burst/equal", "%", "answers that are the same both ways"),
                Spec("burst/slo", "s", "the limit of goodput"),
                Spec("burst/rate", "req/s", "arrivals"),
            ),
            measure,
        ),
    ),
)
