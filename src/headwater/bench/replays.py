"""Recorded workloads: where they are, what comes of them on a simulated fleet, and what Dynamo's own replay says.

A simulation says the same each time, so one run is a figure. Theirs runs in a process of its own with Dynamo's Python,
`benchmarks/dynamo_replay.py`, on the same file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headwater.bench.harness import Effort, Reading, Unmeasured
from headwater.bench.turns import Turner, peer_command, turner
from headwater.errors import UnavailableError
from headwater.sim.fleet.config import FleetConfig, parse_fleet
from headwater.sim.fleet.summary import Summary, summarise
from headwater.sim.fleet.world import simulate
from headwater.traces.model import Trace
from headwater.traces.read import read
from headwater.traces.shape import first

CONVERSATION, SYNTHETIC = "conversation_trace", "synthetic_trace"
SOURCE = "github.com/kvcache-ai/Mooncake, folder FAST25-release/traces"
QUICK_REQUESTS = 1500
TRACE_BLOCK_TOKENS, BLOCK_TOKENS = 512, 64
REPLAY_S = 300.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet of equal instances, and how many times as fast as recorded requests come."""

    count: int
    blocks: int
    load: int = 1

    @property
    def name(self) -> str:
        """`8x16384/x2`."""
        return f"{self.count}x{self.blocks}/x{self.load}"

    @property
    def about(self) -> str:
        """For people."""
        return f"{self.count} instances of {self.blocks:,} blocks, load x{self.load}"

    @property
    def tokens(self) -> int:
        """What all instances hold together."""
        return self.count * self.blocks * BLOCK_TOKENS

    def fleet(self, policy: str, more: Mapping[str, Any] | None = None) -> FleetConfig:
        """Its description, with more settings."""
        group = {"count": self.count, "blocks": self.blocks, "block_tokens": BLOCK_TOKENS, "times": "mocker"}
        return parse_fleet({"instances": [group], "load": self.load, "policy": policy, **(more or {})})


class Outcome(NamedTuple):
    """What is compared of a replay."""

    reuse: float
    ttft_ms: float

    @classmethod
    def of(cls, summary: Summary) -> Outcome:
        """Of one of ours."""
        return cls(summary.reuse.overall, 1e3 * summary.ttft.mean_s)


def trace_path(name: str, effort: Effort) -> Path:
    """Where a public trace is. Raises UnavailableError with where to get it."""
    path = effort.traces / f"{name}.jsonl"
    if not path.exists():
        raise UnavailableError(f"needs {path}: get it from {SOURCE}, or name its folder with --traces")
    return path


def recorded(name: str, effort: Effort) -> Trace:
    """A public trace, or its beginning. Raises UnavailableError without it."""
    trace = read(trace_path(name, effort)).trace
    return first(trace, QUICK_REQUESTS) if effort.quick else trace


def played(trace: Trace, config: FleetConfig, effort: Effort) -> Summary:
    """What comes of it."""
    run = simulate(trace, config)
    effort.after_turn()
    return summarise(run, config.slo, config.instance_count)


def exact(value: float, yardstick: float | None = None) -> Reading:
    """What is the same each time."""
    return Reading(value, value, value, 1, yardstick)


def is_wanted(wanted: frozenset[str], prefix: str) -> bool:
    """Whether any figure that begins so is."""
    return any(it.startswith(prefix) for it in wanted)


def unmeasured(wanted: frozenset[str], reason: object) -> dict[str, Reading | Unmeasured]:
    """All of them, for the same reason."""
    return dict.fromkeys(wanted, Unmeasured(str(reason)))


class Theirs:
    """Dynamo's replay. What it was asked before it is not asked again."""

    def __init__(self, turner: Turner | None, reason: str, trace: Mapping[str, Any], effort: Effort) -> None:
        self._turner, self._reason, self._trace, self._effort = turner, reason, trace, effort
        self._known: dict[str, Outcome] = {}

    def play(self, it: Scenario, router: str, scale: float | None = None) -> Outcome:
        """One replay, by round robin or by its KV router with a scale of prefill load. Raises UnavailableError."""
        order = {
            **self._trace,
            "trace_block_tokens": TRACE_BLOCK_TOKENS,
            "workers": it.count,
            "blocks": it.blocks,
            "block_tokens": BLOCK_TOKENS,
            "speedup": it.load,
            "router": router,
        }
        if scale is not None:
            order["router_config"] = {"prefill_load_scale": scale}
        request = json.dumps(order)
        if request not in self._known:
            if self._turner is None:
                raise UnavailableError(self._reason)
            try:
                answer = self._turner.ask(request, REPLAY_S)
            except UnavailableError as error:
                self._turner, self._reason = None, str(error)
                raise
            self._known[request] = Outcome(answer["reuse"], answer["ttft_mean_ms"])
            self._effort.after_turn()
        return self._known[request]


@contextmanager
def dynamo(effort: Effort, folder: Path) -> Iterator[Theirs]:
    """Dynamo's replay of the conversation trace, which says why if it cannot be had."""
    path = trace_path(CONVERSATION, effort)
    trace: dict[str, Any] = {"trace": str(path)}
    if effort.quick:
        with open(path, encoding="utf-8") as lines:
            trace = {"requests": [json.loads(line) for line in itertools.islice(lines, QUICK_REQUESTS)]}
    with ExitStack() as stack:
        it, reason = None, ""
        try:
            command = peer_command("dynamo", "dynamo_replay.py")
            it = stack.enter_context(turner("Dynamo's replay", command, folder / "dynamo.log"))
        except UnavailableError as error:
            reason = str(error)
        yield Theirs(it, reason, trace, effort)
