"""Memory and threads of a running Conductor through very many prompts, while instances come and go.

Every prompt is another one, so that whatever keeps something for each prompt grows without end. Instances join and
leave through the control interface, evenly spread, each under a name that was not there before.
"""

from __future__ import annotations

import http.client
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headwater.bench.harness import Effort, Experiment, Goal, Reading, Readings, Spec, Unmeasured
from headwater.bench.proxy_prompts import Prompts
from headwater.bench.proxy_rounds import MIB, Rounds, Turn
from headwater.bench.proxy_systems import ROUTING, Running, place, reason
from headwater.demo.processes import free_port
from headwater.errors import UnavailableError

JOINS = 200
TURNS = 100
CONNECTIONS = 32
BODY_BYTES = 3600
INSTANCES = 2
CALL_S = 10.0
ON_REQUEST = "takes minutes: --memory"


@dataclass(frozen=True, slots=True)
class Point:
    """What the Conductor holds after so many prompts."""

    prompts: int
    memory_bytes: int
    threads: int


def growth(points: list[Point]) -> float:
    """Memory at the end over memory at half way: 1 is a plateau. Means of a tenth of the points each, because memory
    is given back in steps."""
    width = max(len(points) // 10, 1)
    middle = len(points) // 2
    early, late = points[middle : middle + width], points[-width:]
    return _mean(late) / _mean(early)


def _mean(points: list[Point]) -> float:
    return sum(it.memory_bytes for it in points) / len(points)


def readings(points: list[Point], joins: int) -> Readings:
    """All figures of a run."""

    def one(value: float) -> Reading:
        return Reading(value, value, value, len(points))

    first, last = points[0], points[-1]
    return {
        "memory/growth": one(growth(points)),
        "memory/start": one(first.memory_bytes / MIB),
        "memory/half": one(points[len(points) // 2].memory_bytes / MIB),
        "memory/end": one(last.memory_bytes / MIB),
        "memory/most": one(max(it.memory_bytes for it in points) / MIB),
        "memory/threads": one(last.threads - first.threads),
        "memory/prompts": one(last.prompts),
        "memory/joins": one(joins),
    }


def measure(effort: Effort, wanted: frozenset[str]) -> Readings:
    """See MEMORY."""
    names = [it.name for it in MEMORY.specs if it.name in wanted]
    if not effort.prompts:
        return dict.fromkeys(names, Unmeasured(ON_REQUEST))
    try:
        return _measure(effort)
    except UnavailableError as error:
        return dict.fromkeys(names, Unmeasured(reason(error)))


def _measure(effort: Effort) -> Readings:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        folder = Path(directory)
        with place(folder, effort.model) as where, Rounds(where, folder) as rounds:
            ports = where.origin(INSTANCES + 1)
            ours = where.start(ROUTING, ports[:INSTANCES])
            each = -(-effort.prompts // TURNS)
            turn = Turn("unary", CONNECTIONS, each, Prompts("ids", BODY_BYTES, shared=0.0))
            points: list[Point] = []
            joined = 0
            for number in range(TURNS):
                names = [f"guest{number}-{it}" for it in range(JOINS // TURNS)]
                for name in names:
                    tell(ours, "/register", guest(name, ports[-1], free_port()))
                rounds.clients.play(ours, turn, number)
                for name in names:
                    tell(ours, "/unregister", {"instance_id": name})
                joined += len(names)
                points.append(Point((number + 1) * each, ours.memory_bytes(), ours.threads()))
                effort.after_turn()
    return readings(points, joined)


def guest(name: str, port: int, events: int) -> dict[str, object]:
    """How an instance introduces itself to the indexer's interface, with where it serves. Nobody publishes events
    there, so that the Conductor has to try again and again until the instance leaves."""
    return {
        "instance_id": name,
        "modelname": "model",
        "type": "vLLM",
        "endpoint": f"tcp://127.0.0.1:{events}",
        "url": f"http://127.0.0.1:{port}",
        "block_size": 16,
        "dp_rank": 0,
    }


def tell(conductor: Running, path: str, said: dict[str, object]) -> None:
    """One call of the control interface. Raises UnavailableError unless it is taken."""
    connection = http.client.HTTPConnection("127.0.0.1", conductor.control, timeout=CALL_S)
    try:
        connection.request("POST", path, json.dumps(said), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        words = answer.read(500).decode(errors="replace")
        if answer.status >= http.client.BAD_REQUEST:
            raise UnavailableError(f"{path} was answered {answer.status}: {words}")
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"the Conductor's control does not answer: {error}") from error
    finally:
        connection.close()


MEMORY = Experiment(
    "Memory through many prompts, instances that come and go",
    (
        Spec(
            "memory/growth", "x", "private memory of all processes, end over half way", Goal(at_least=False, plus=1.05)
        ),
        Spec("memory/start", "MiB", "after 1 % of the prompts"),
        Spec("memory/half", "MiB", "half way"),
        Spec("memory/end", "MiB", "at the end"),
        Spec("memory/most", "MiB", "the most at any time"),
        Spec("memory/threads", "threads", "more at the end than after 1 %", Goal(at_least=False)),
        Spec("memory/prompts", "prompts", "each another one"),
        Spec("memory/joins", "joins", "instances that came and left"),
    ),
    measure,
)
