"""What the Conductor adds to the time to first token at half load, beside the engine asked directly.

Arrivals are a Poisson process at half of the rate that a closed loop reaches through the Conductor on this machine,
each a streamed answer to a prompt of 4,096 tokens. A request counts from when it was due, so that nothing is hidden by
a client that waits. Direct and through us take turns in the same rounds with the same arrivals. For prompts that come
as text, the time that the Conductor spent on tokenising, as it counts itself, is taken off.

Where prompts are ids, client and engine have one half of the cores, and the Conductor the other half, in all turns:
what three processes wait for two cores is the load generator's doing, not what the Conductor adds. For text it needs a
core to tokenise with beside its own, so that all share all. What requests wait for each other in the Conductor is in
the figures, and most of them: for ids, in front of it, which at half load is busy for more than half of the time, as
each request takes it longer than when the next one waits already; for text, in front of the tokenizer, which tells of
it only on average.
"""

from __future__ import annotations

import http.client
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Unmeasured, quartiles
from headwater.bench.machine import bind
from headwater.bench.proxy_prompts import Prompts
from headwater.bench.proxy_rounds import Rounds, Turn
from headwater.bench.proxy_systems import ROUTING, Running, place, reason, tree
from headwater.errors import UnavailableError

SIZES = {"ids": 24_050, "text": 20_000}
"""Bodies with prompts of about 4,096 tokens."""
INSTANCES = 2
CONNECTIONS, OPEN_CONNECTIONS = 32, 256
MAX_REQUESTS, QUICK_MAX_REQUESTS = 3000, 600
OPEN_S, QUICK_OPEN_S = 6.0, 2.0
OPEN_LEAST, QUICK_OPEN_LEAST = 1000, 100
"""Requests of a turn: ten of them are beyond the 99th percentile, however slow they come."""
ROUNDS_MAX = 7
TOKENISING = "headwater_conductor_tokenising_seconds"
"""The Conductor's own histogram."""
SETTLE_S = 0.2


def _name(kind: str) -> str:
    return "ttft" if kind == "ids" else "ttft/text"


def _specs() -> tuple[Spec, ...]:
    found = []
    for kind, words in (("ids", "token ids"), ("text", "text, beyond tokenising")):
        goal = Goal(at_least=False, plus=5.0)
        about = f"added to the first token at half load, 4,096-token prompts as {words}"
        found += [
            Spec(f"{_name(kind)}/p50", "ms", f"{about}, medians' difference"),
            Spec(f"{_name(kind)}/p99", "ms", f"{about}, 99th percentiles' difference", goal),
            Spec(f"{_name(kind)}/rate", "req/s", "that half load"),
            Spec(f"{_name(kind)}/direct/p99", "ms", "of the engine asked directly, 99th percentile"),
        ]
        if kind == "text":
            found.append(Spec(f"{_name(kind)}/tokenising", "ms", "a prompt on average, as the Conductor counts it"))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: times to first token directly and through us in ms, and what tokenising took on average."""

    direct_p50: float
    direct_p99: float
    ours_p50: float
    ours_p99: float
    tokenising: float = 0.0

    @property
    def added_p50(self) -> float:
        """What we add, at the median."""
        return self.ours_p50 - self.direct_p50 - self.tokenising

    @property
    def added_p99(self) -> float:
        """What we add, at the 99th percentile. The mean of tokenising is taken off, although the slowest takes more."""
        return self.ours_p99 - self.direct_p99 - self.tokenising


def measure(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See ADDED."""
    readings: dict[str, Reading | Unmeasured] = {}
    for kind in SIZES:
        names = [
            it.name for it in ADDED.specs if it.name in wanted and it.name.startswith("ttft/text") == (kind == "text")
        ]
        if names:
            try:
                readings |= _measure(kind, effort)
            except UnavailableError as error:
                readings |= dict.fromkeys(names, Unmeasured(reason(error)))
    return readings


def _measure(kind: str, effort: Effort) -> Readings:
    prompts = Prompts(kind, SIZES[kind], stream=True, max_tokens=1)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        folder = Path(directory)
        with place(folder, effort.model) as where, Rounds(where, folder) as rounds:
            ports = where.origin(INSTANCES)
            others = tree(os.getpid())[1:]
            ours, direct = where.start(ROUTING, ports), Running(ports[0], None)
            if kind == "ids":
                keep_apart(others, ours.processes())
            most = QUICK_MAX_REQUESTS if effort.quick else MAX_REQUESTS
            closed = Turn("streams", CONNECTIONS, most, prompts)
            rounds.clients.play(ours, closed, -2)
            rate = rounds.clients.play(ours, closed, -1).wall / 2
            open_s, least = (QUICK_OPEN_S, QUICK_OPEN_LEAST) if effort.quick else (OPEN_S, OPEN_LEAST)
            requests = max(round(rate * open_s), least)
            turn = Turn("open", OPEN_CONNECTIONS, requests, prompts, {"rate": rate, "settle": SETTLE_S})
            pairs = []
            for number in range(min(effort.rounds, ROUNDS_MAX)):
                pairs.append(_pair(rounds, {"direct": direct, "ours": ours}, turn, number))
                effort.after_turn()
    return summarise(kind, rate, pairs)


def keep_apart(ones: Sequence[int], others: Sequence[int]) -> None:
    """Give some processes one half of the cores, and others the other half; nothing where there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if half:
        for process in ones:
            bind(process, cores[:half])
        for process in others:
            bind(process, cores[half:])


def _pair(rounds: Rounds, sides: dict[str, Running], turn: Turn, number: int) -> Pair:
    times: dict[str, tuple[float, float]] = {}
    spent = 0.0
    for name in sorted(sides, reverse=bool(number % 2)):
        before = tokenising(sides[name].control) if sides[name].control else (0.0, 0.0)
        sample = rounds.clients.play(sides[name], turn, number)
        times[name] = sample.time_ms("ttft", "p50"), sample.time_ms("ttft", "p99")
        if sides[name].control:
            after = tokenising(sides[name].control)
            count = after[1] - before[1]
            spent = (after[0] - before[0]) / count * 1e3 if count else 0.0
    return Pair(*times["direct"], *times["ours"], spent)


def summarise(kind: str, rate: float, pairs: list[Pair]) -> Readings:
    """Medians over rounds."""

    def reading(values: list[float]) -> Reading:
        low, middle, high = quartiles(values)
        return Reading(middle, low, high, len(values))

    name = _name(kind)
    found: dict[str, Reading | Unmeasured] = {
        f"{name}/p50": reading([it.added_p50 for it in pairs]),
        f"{name}/p99": reading([it.added_p99 for it in pairs]),
        f"{name}/rate": reading([rate]),
        f"{name}/direct/p99": reading([it.direct_p99 for it in pairs]),
    }
    if kind == "text":
        spent = statistics.fmean(it.tokenising for it in pairs)
        found[f"{name}/tokenising"] = (
            reading([it.tokenising for it in pairs]) if spent else Unmeasured("the Conductor does not tell")
        )
    return found


def tokenising(control: int) -> tuple[float, float]:
    """Seconds and prompts so far, over all labels, from the Conductor's metrics; zeros if it does not tell."""
    return histogram(metrics(control), TOKENISING)


def metrics(control: int) -> str:
    """What it says of itself. Raises UnavailableError."""
    connection = http.client.HTTPConnection("127.0.0.1", control, timeout=5.0)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"the Conductor's metrics cannot be read: {error}") from error
    finally:
        connection.close()


def histogram(text: str, name: str) -> tuple[float, float]:
    """Sum and count of a histogram, over all its labels, in the exposition format."""
    totals = {"sum": 0.0, "count": 0.0}
    for line in text.splitlines():
        head = line.split("{", 1)[0].split(" ", 1)[0]
        for what in totals:
            if head == f"{name}_{what}":
                totals[what] += float(line.rsplit(" ", 1)[1])
    return totals["sum"], totals["count"]


ADDED = Experiment("What is added to the first token at half load", _specs(), measure)
