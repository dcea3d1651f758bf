"""`headwater bench proxy`: the Conductor's data path beside the Rust `vllm-router`, in the same rounds.

Client, proxy and engine share the machine; the engine (proxy_origin) computes nothing. What counts is the CPU time of
all the proxy's processes: a core's rate is what it could do if it had nothing else to do. Behind the comparison with
the router stand a plain aiohttp proxy, a raw splice (the limit of a proxy in Python), and the engine asked directly.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headwater.bench import proxy_latency, proxy_memory
from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Suite, Unmeasured
from headwater.bench.proxy_prompts import Prompts
from headwater.bench.proxy_rounds import Contender, Rounds, Sample, Turn
from headwater.bench.proxy_systems import (
    AIOHTTP,
    CACHE_AWARE,
    RELAY,
    ROUND_ROBIN,
    ROUTING,
    SPLICE,
    System,
    place,
)

ROUNDS_MAX = 8
BODY_BYTES = 3600
CONNECTIONS, REQUESTS, QUICK_REQUESTS = 32, 12_800, 3200
TOKENISED = 10
STREAMS, CHUNKS, QUICK_CHUNKS = 96, 400, 100
AHEAD = Goal(at_least=True, factor=1.2)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: ours and theirs, and what else takes its turns for information."""

    name: str
    about: str
    streams: bool
    instances: int
    ours: System
    theirs: System
    ours_kind: str = "text"
    others: tuple[tuple[str, System | None, str], ...] = ()
    """Name, system (None: the engine itself), kind of prompts."""
    goal: Goal | None = AHEAD

    @property
    def unit(self) -> str:
        """Of rates."""
        return "chunks/s" if self.streams else "req/s"

    @property
    def times(self) -> str:
        """Which time its percentiles are of."""
        return "lag" if self.streams else "latency"

    def turn(self, kind: str, effort: Effort) -> Turn:
        """What each is asked for."""
        chunks = QUICK_CHUNKS if effort.quick else CHUNKS
        prompts = Prompts(kind, BODY_BYTES, stream=self.streams, max_tokens=chunks if self.streams else 16)
        if self.streams:
            return Turn("streams", STREAMS, STREAMS, prompts)
        return Turn("unary", CONNECTIONS, QUICK_REQUESTS if effort.quick else REQUESTS, prompts)

    def slow(self, turn: Turn) -> Turn:
        """The same for a contender that tokenises, so much longer that a tenth of the requests will do."""
        return turn if self.streams else replace(turn, requests=max(turn.requests // TOKENISED, 1))

    def contenders(self, effort: Effort) -> list[Contender]:
        """Ours, theirs, others."""
        sides: tuple[tuple[str, System | None, str], ...] = (
            ("ours", self.ours, self.ours_kind),
            ("theirs", self.theirs, "text"),
            *self.others,
        )
        found = [Contender(name, system, self.turn(kind, effort)) for name, system, kind in sides]
        return [replace(it, turn=self.slow(it.turn)) if it.name == "text" else it for it in found]

    @property
    def shown(self) -> tuple[tuple[str, System | None, str], ...]:
        """Whose own figures are shown: theirs (which may be there while ours is not) and others."""
        return (("vllm-router", self.theirs, "theirs"), *((name, system, name) for name, system, _ in self.others))

    def specs(self) -> Iterator[Spec]:
        """Its figures."""
        title, beside = self.name, self.theirs.title
        what = "events of streams" if self.streams else f"requests of {BODY_BYTES:,} B"
        core = f"{self.unit} per core"
        yield Spec(f"{title}/core", core, f"{self.about}: {what} a second of CPU time", self.goal, beside)
        yield Spec(f"{title}/best", core, "the same, the best round of each", None, beside)
        yield Spec(f"{title}/cpu", "us", f"CPU time {'an event' if self.streams else 'a request'}", None, beside)
        yield Spec(f"{title}/wall", self.unit, "by the clock, client and engine on the same cores", None, beside)
        times = "from the engine's write to the client's read" if self.streams else "from request to answer"
        yield Spec(f"{title}/p50", "ms", times, None, beside)
        yield Spec(f"{title}/p99", "ms", f"{times}, 99th percentile", None, beside)
        if self.streams:
            yield Spec(f"{title}/ttft", "ms", f"first event, all {STREAMS} streams begun at once", None, beside)
        yield Spec(f"{title}/memory", "MiB", "resident, all processes, at the end of a turn", None, beside)
        for name, system, _ in self.shown:
            who = f"{system.title if system else 'no proxy'}{', prompts as text' if system == self.ours else ''}"
            if system is not None:
                yield Spec(f"{title}/{name}/core", core, who, None, beside)
            yield Spec(f"{title}/{name}/wall", self.unit, who, None, beside)
            yield Spec(f"{title}/{name}/p50", "ms", who, None, beside)


def _core(sample: Sample) -> float:
    return sample.core


def _wall(sample: Sample) -> float:
    return sample.wall


def _cpu_us(sample: Sample) -> float:
    return sample.cpu_s / sample.count * 1e6


def _memory(sample: Sample) -> float:
    return sample.memory_mib


def _time(what: str, percent: str) -> Callable[[Sample], float]:
    return lambda it: it.time_ms(what, percent)


def readings(case: Case, rounds: Rounds, samples: dict[str, list[Sample]]) -> Readings:
    """All figures of a case."""
    found: dict[str, Reading | Unmeasured] = {}
    p50 = _time(case.times, "p50")
    values = {
        "core": _core,
        "cpu": _cpu_us,
        "wall": _wall,
        "p50": p50,
        "p99": _time(case.times, "p99"),
        "memory": _memory,
    }
    if case.streams:
        values["ttft"] = _time("ttft", "p50")
    for what, value in values.items():
        found[f"{case.name}/{what}"] = rounds.compare("ours", "theirs", samples, value)
    found[f"{case.name}/best"] = rounds.best("ours", "theirs", samples, _core)
    for name, system, contender in case.shown:
        chosen = {"core": _core, "wall": _wall, "p50": p50} if system is not None else {"wall": _wall, "p50": p50}
        for what, value in chosen.items():
            found[f"{case.name}/{name}/{what}"] = rounds.compare(contender, "theirs", samples, value)
    return found


def measure(case: Case, effort: Effort, wanted: frozenset[str]) -> Readings:
    """All figures of one case. Others are left out if none of their figures is wanted."""
    asked = [it for it in case.contenders(effort) if _is_wanted(case, it.name, wanted)]
    with _stage(effort) as (ports_of, rounds):
        rounds.begin(asked, ports_of(case.instances))
        samples = rounds.run(asked, min(effort.rounds, ROUNDS_MAX), effort.after_turn)
        for name, _, _ in case.others:
            if name not in samples:
                rounds.reasons[name] = "not asked for"
        return readings(case, rounds, samples)


def _is_wanted(case: Case, contender: str, wanted: frozenset[str]) -> bool:
    return contender in ("ours", "theirs") or any(it.startswith(f"{case.name}/{contender}/") for it in wanted)


@contextmanager
def _stage(effort: Effort) -> Iterator[tuple[Callable[[int], list[int]], Rounds]]:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        folder = Path(directory)
        with place(folder, effort.model) as where, Rounds(where, folder) as rounds:
            yield where.origin, rounds


_BESIDE = (("aiohttp", AIOHTTP, "text"), ("splice", SPLICE, "text"), ("direct", None, "text"))
_AS_TEXT = (("text", ROUTING, "text"),)
CASES = (
    Case("relay/unary", "passing on, round robin", False, 1, RELAY, ROUND_ROBIN, others=_BESIDE),
    Case(
        "relay/sse", f"passing on, {STREAMS} streams, an event each 10 ms", True, 1, RELAY, ROUND_ROBIN, others=_BESIDE
    ),
    Case(
        "route/unary", "KV routing, prompts as token ids, 4 instances", False, 4, ROUTING, CACHE_AWARE, "ids", _AS_TEXT
    ),
    Case("route/sse", f"KV routing, {STREAMS} streams, 4 instances", True, 4, ROUTING, CACHE_AWARE, "ids", _AS_TEXT),
    Case("route/unary/2", "KV routing, 2 instances", False, 2, ROUTING, CACHE_AWARE, "ids", goal=None),
    Case("route/unary/8", "KV routing, 8 instances", False, 8, ROUTING, CACHE_AWARE, "ids", goal=None),
)
TITLES = {
    "relay/unary": "Requests passed on",
    "relay/sse": "Streams passed on",
    "route/unary": "Requests routed by their KV",
    "route/sse": "Streams routed by their KV",
    "route/unary/2": "Two instances",
    "route/unary/8": "Eight instances",
}
EXPERIMENTS: Sequence[Experiment] = tuple(
    Experiment(TITLES[it.name], tuple(it.specs()), partial(measure, it)) for it in CASES
)

SUITE = Suite(
    "proxy",
    "the Conductor's data path beside vllm-router, aiohttp and a raw splice",
    (*EXPERIMENTS, proxy_latency.ADDED, proxy_memory.MEMORY),
)
