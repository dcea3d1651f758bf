"""Turns of several proxies in the same rounds, and what they come to: CPU time a request, a core's rate, ratios.

Contenders are asked by the same client process for the same amounts, one at a time, each round beginning with another
one; the first round warms up and is not counted. A contender that cannot begin or go on is left out, and `reasons` says
why. What is compared is the median of the rounds' ratios, which a machine that is busy now and then disturbs less than
the ratio of medians.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headwater.bench.harness import Reading, Unmeasured, quartiles
from headwater.bench.proxy_prompts import Prompts
from headwater.bench.proxy_systems import Place, Running, System, reason
from headwater.bench.turns import Turner, turner
from headwater.errors import UnavailableError

CLIENT = (sys.executable, "-m", "headwater.bench.proxy_client")
PATIENCE_S = 300.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """What a contender is asked for; see proxy_client."""

    do: str
    connections: int
    requests: int
    prompts: Prompts
    more: Mapping[str, Any] = field(default_factory=dict)

    def line(self, port: int, seed: int) -> str:
        """As the client process reads it."""
        prompts = asdict(replace(self.prompts, seed=seed))
        return json.dumps(
            {
                "do": self.do,
                "port": port,
                "connections": self.connections,
                "requests": self.requests,
                "prompts": prompts,
                **self.more,
            }
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn. `answer` is what the client says; `count` how many requests or chunks it was."""

    answer: Mapping[str, Any]
    count: int
    cpu_s: float
    memory_bytes: int

    @property
    def core(self) -> float:
        """How many one core could do in a second."""
        return self.count / self.cpu_s if self.cpu_s else 0.0

    @property
    def wall(self) -> float:
        """How many a second there were, on a machine that client and engine share."""
        return self.count / float(self.answer["wall_s"])

    @property
    def memory_mib(self) -> float:
        """Resident, at the end of the turn."""
        return self.memory_bytes / MIB

    def time_ms(self, what: str, percent: str) -> float:
        """`latency`, `ttft` or `lag`, in ms."""
        return float(self.answer[what][percent]) * 1e3


class Clients:
    """The client process."""

    def __init__(self, process: Turner) -> None:
        self._process = process

    def play(self, running: Running, turn: Turn, seed: int) -> Sample:
        """One turn. Raises UnavailableError if an answer was missing or wrong."""
        before_s = running.cpu_s()
        answer = self._process.ask(turn.line(running.port, seed), PATIENCE_S)
        cpu_s = running.cpu_s() - before_s
        if "failed" in answer:
            raise UnavailableError(answer["failed"])
        count = answer.get("chunks", answer["requests"])
        return Sample(answer, count, cpu_s, running.memory_bytes())


@dataclass(frozen=True, slots=True)
class Contender:
    """A system and what it is asked for; contenders of one system share its process. None: the engine itself."""

    name: str
    system: System | None
    turn: Turn


class Rounds:
    """Contenders that take turns. A context: the client process is there while it lasts."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.reasons: dict[str, str] = {}
        self._place, self._folder = place, folder
        self._running: dict[str, Running] = {}
        self._stack = ExitStack()
        self.clients: Clients

    def __enter__(self) -> Self:
        self.clients = Clients(self._stack.enter_context(turner("the clients", CLIENT, self._folder / "clients")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def begin(self, contenders: Sequence[Contender], ports: Sequence[int]) -> None:
        """Start what is needed; who cannot start is noted in `reasons`."""
        started: dict[str, Running | str] = {}
        for it in contenders:
            name = it.system.name if it.system else ""
            if name not in started:
                started[name] = self._start(it.system, ports)
            found = started[name]
            if isinstance(found, str):
                self.reasons[it.name] = found
            else:
                self._running[it.name] = found

    def _start(self, system: System | None, ports: Sequence[int]) -> Running | str:
        if system is None:
            return Running(ports[0], None)
        try:
            return self._place.start(system, ports)
        except UnavailableError as error:
            return reason(error)

    def running(self, name: str) -> Running | None:
        """The process of a contender; None if it is not there."""
        return None if name in self.reasons else self._running[name]

    def run(
        self, contenders: Sequence[Contender], rounds: int, after_turn: Callable[[], object]
    ) -> dict[str, list[Sample]]:
        """One uncounted turn each, then so many rounds; samples by contender, one a round."""
        samples: dict[str, list[Sample]] = {it.name: [] for it in contenders}
        for number in range(-1, rounds):
            shift = max(number, 0) % len(contenders)
            for it in (*contenders[shift:], *contenders[:shift]):
                if it.name in self.reasons:
                    continue
                try:
                    sample = self.clients.play(self._running[it.name], it.turn, number)
                except UnavailableError as error:
                    self.reasons[it.name] = reason(error)
                    continue
                if number >= 0:
                    samples[it.name].append(sample)
                after_turn()
        return samples

    def compare(
        self, ours: str, theirs: str | None, samples: Mapping[str, Sequence[Sample]], value: Callable[[Sample], float]
    ) -> Reading | Unmeasured:
        """A value of ours beside theirs."""
        if ours in self.reasons:
            return Unmeasured(self.reasons[ours])
        mine = [value(it) for it in samples[ours]]
        beside = None
        if theirs is not None and theirs not in self.reasons:
            ratio = statistics.median(a / b for a, b in zip(mine, map(value, samples[theirs]), strict=True))
            beside = statistics.median(mine) / ratio if ratio else None
        low, middle, high = quartiles(mine)
        return Reading(middle, low, high, len(mine), beside)

    def best(
        self, ours: str, theirs: str | None, samples: Mapping[str, Sequence[Sample]], value: Callable[[Sample], float]
    ) -> Reading | Unmeasured:
        """The largest value of ours beside the largest of theirs."""
        if ours in self.reasons:
            return Unmeasured(self.reasons[ours])
        mine = max(value(it) for it in samples[ours])
        beside = None
        if theirs is not None and theirs not in self.reasons:
            beside = max(value(it) for it in samples[theirs])
        return Reading(mine, mine, mine, len(samples[ours]), beside)
