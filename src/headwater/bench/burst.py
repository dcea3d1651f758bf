"""`headwater bench burst`: a burst of chats that share prefixes, on real vLLM, with headwater and without.

Four `vllm serve` processes, two a side, on two cores: those of side A have the plug-in, share a node and stand behind a
Conductor; those of side B have nothing but vLLM's own prefix caching, and are asked in turns (round robin). One side is
asked at a time, in the order A B B A, each pair with prompts that nobody has seen. Engines' caches are smaller than the
prefixes of a burst but larger than half of them, as they are in a fleet with more system prompts than room.

How fast the machine is decides the pace: one cold prefill is timed first, arrivals are PACE times as many as one
engine could prefill, and the SLO of goodput is SLO_COLD such times.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Suite, Unmeasured, quartiles
from headwater.bench.proxy_systems import answers, reason
from headwater.config import child_environment
from headwater.demo.burst import Burst, Request, Result, ask, burst, chats, same_answers, summary
from headwater.demo.processes import Children, Served, check_model, cpu_dtype, free_port, start_node
from headwater.errors import ConfigError, UnavailableError

PACE, SLO_COLD = 4.0, 2.0
ROUNDS_MAX, QUICK_ROUNDS = 3, 1
WARM_UPS = 2
BLOCK_TOKENS, CHUNK_TOKENS = 32, 128
CACHE_BLOCKS = 320
"""Of each engine: 10,240 tokens, where the prefixes of a burst are about 18,000."""
MODEL_TOKENS = 2048
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


def engine_command(
    vllm: Path, model: Path, port: int, name: str, node: str | None, events: tuple[int, int] | None
) -> list[str]:
    """One engine; with the plug-in if there is a node, and events on those ports (events, replay) of loopback."""
    command = [
        str(vllm), "serve", str(model), "--host", "127.0.0.1", "--port", f"{port}", "--served-model-name", "model",
        "--dtype", cpu_dtype(), "--enforce-eager", "--max-model-len", f"{MODEL_TOKENS}",
        "--block-size", f"{BLOCK_TOKENS}", "--num-gpu-blocks-override", f"{CACHE_BLOCKS}",
        "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if node is not None:
        transfer = {
            "kv_connector": "HeadwaterConnector",
            "kv_connector_module_path": "headwater.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": name,
            "kv_connector_extra_config": {"node": node, "chunk_tokens": CHUNK_TOKENS},
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    if events is not None:
        # vLLM binds only where there is a `*` or `::`, and `*` would tell prompts to the network.
        publisher = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://[::ffff:127.0.0.1]:{events[0]}",
            "replay_endpoint": f"tcp://127.0.0.1:{events[1]}",
        }
        command += ["--kv-events-config", json.dumps(publisher)]
    return command


def fleet_file(
    model: Path, port: int, control: int, node: str, engines: Sequence[tuple[Served, tuple[int, int]]]
) -> str:
    """The fleet of side A, all of which runs already, as YAML."""
    lines = [
        "conductor:",
        f"  listen: 127.0.0.1:{port}",
        f"  control: 127.0.0.1:{control}",
        "nodes:",
        "  - name: node",
        f"    socket: {node}",
        "instances:",
    ]
    for served, (events, replay) in engines:
        lines += [
            f"  - name: {served.name}",
            f"    model: {model}",
            "    served_name: model",
            "    node: node",
            f"    url: http://127.0.0.1:{served.port}",
            f"    events: tcp://127.0.0.1:{events}",
            f"    replay: tcp://127.0.0.1:{replay}",
            f"    capacity_tokens: {CACHE_BLOCKS * BLOCK_TOKENS}",
            f"    block_tokens: {BLOCK_TOKENS}",
        ]
    return "\n".join(lines) + "\n"


@contextmanager
def sides(model: Path) -> Iterator[Sides]:
    """Both sides, ready; all processes are gone afterwards. Raises UnavailableError or ConfigError."""
    check_model(model)
    vllm = Path(sys.executable).with_name("vllm")
    if not vllm.is_file():
        raise ConfigError(f"{vllm} is missing; install vLLM into this environment (`make setup` does)")
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory, Children() as children:
        folder = Path(directory)
        node = f"unix:{folder}/node.sock"
        start_node(children, node, NODE_MEMORY, folder / "node.log")
        ours, theirs = [], []
        for number in range(2):
            core = cores[number % len(cores)]
            events = (free_port(), free_port())
            ours.append((_engine(children, vllm, model, f"a{number}", core, node, events, folder), events))
            theirs.append(_engine(children, vllm, model, f"b{number}", core, None, None, folder))
        port = free_port()
        file = folder / "fleet.yaml"
        file.write_text(fleet_file(model, port, free_port(), node, ours), "utf-8")
        command = [sys.executable, "-m", "headwater", "conductor", str(file), "--runtime-dir", str(folder / "run")]
        conductor = children.start(
            "the Conductor", command, child_environment({"HEADWATER_LOG_LEVEL": "warning"}), folder / "conductor.log"
        )
        conductor.wait_until(lambda: answers(port), START_S, lambda: None)
        yield Sides(
            {
                "headwater": (f"http://127.0.0.1:{port}",),
                "round robin": tuple(f"http://127.0.0.1:{it.port}" for it in theirs),
            },
            {"headwater": tuple(it for it, _ in ours), "round robin": tuple(theirs)},
        )


def _engine(
    children: Children,
    vllm: Path,
    model: Path,
    name: str,
    core: int,
    node: str | None,
    events: tuple[int, int] | None,
    folder: Path,
) -> Served:
    """One engine that answers: they start one after the other, because they share cores."""
    port = free_port()
    changes = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
    }
    command = engine_command(vllm, model, port, name, node, events)
    served = Served(name, port, children.start(f"vLLM {name}", command, child_environment(changes), folder / name))
    served.child.wait_until(served.healthy, START_S, lambda: None)
    return served


def cold_s(engines: Sequence[Served], shape: Burst) -> float:
    """How long an engine takes until the first token of a chat that it has not seen; the first ones warm it up."""
    times = []
    for engine in engines:
        for number in range(WARM_UPS + 1):
            seed = f"{engine.name} {number}"
            request = unseen(shape, seed)
            found = ask("127.0.0.1", engine.port, request, "model", time.monotonic())
        times.append(found.ttft_s)
    return statistics.fmean(times)


def unseen(shape: Burst, seed: str) -> Request:
    """One chat of a shape whose prefix is nobody else's."""
    (request,) = chats(replace(shape, families=1, chats=1, seed=hash_of(seed)))
    return request


def hash_of(text: str) -> int:
    """A number that is the same in every run, unlike Python's own."""
    return int.from_bytes(text.encode(), "big") + (1 << 64)


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
