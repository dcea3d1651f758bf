"""The demo's act with a Conductor: a burst of chats over both instances, by round robin without a cache, then by it.

Both ways the same chats arrive at the same times at the same two instances. For the first, each request keeps out of
headwater's cache, and has a salt that nothing else has: so what an instance has in its own cache from that burst it may
use, as it would without headwater, and nothing of the second.
"""

from __future__ import annotations

import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.config import child_environment
from headwater.demo.burst import PACE, SLO_COLD, Burst, Result, ask, burst, chats, same_answers, summary, unseen
from headwater.demo.processes import Child, Children, Served, answers_health, free_port

SHAPE, QUICK_SHAPE = Burst(families=5, chats=4, prefix_tokens=700), Burst(families=4, chats=3, prefix_tokens=300)
ROUND_ROBIN, CONDUCTOR = "round robin, no shared cache", "the Conductor"
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Bursts:
    """What came of the same chats both ways."""

    slo_s: float
    results: dict[str, list[Result]]

    @property
    def identical(self) -> bool:
        """Whether every answer was the same both ways."""
        return same_answers(self.results[ROUND_ROBIN], self.results[CONDUCTOR]) == len(self.results[CONDUCTOR])

    @property
    def reused_more(self) -> bool:
        """Whether less was computed for the second burst than for the first."""
        before, after = (summary(self.results[it], self.slo_s) for it in (ROUND_ROBIN, CONDUCTOR))
        return after.reuse > before.reuse and not after.failed

    def as_json(self) -> dict[str, object]:
        """For programs."""
        told: dict[str, object] = {"slo_s": self.slo_s, "identical": self.identical, "reused_more": self.reused_more}
        for name, results in self.results.items():
            it = summary(results, self.slo_s)
            told[name] = {
                "requests": it.requests,
                "failed": it.failed,
                "within_slo": it.within,
                "goodput": round(it.goodput, 3),
                "ttft_mean_s": round(it.ttft_mean_s, 4),
                "ttft_p99_s": round(it.ttft_p99_s, 4),
                "reuse": round(it.reuse, 4),
                "reused": dict(it.reused),
            }
        return told


def start_conductor(
    children: Children, model: Path, node: str, servers: Sequence[Served], scratch: Path, log: Path
) -> tuple[Child, int]:
    """A Conductor over instances that run, and its port; ready."""
    port, file = free_port(), scratch / "fleet.yaml"
    file.write_text(fleet_file(model, port, free_port(), node, servers), encoding="utf-8")
    command = [sys.executable, "-m", "headwater", "conductor", str(file), "--runtime-dir", str(scratch / "front")]
    child = children.start("the Conductor", command, child_environment({}), log)
    child.wait_until(lambda: answers_health(port), START_S, lambda: None)
    return child, port


def fleet_file(model: Path, port: int, control: int, node: str, servers: Sequence[Served]) -> str:
    """The fleet, all of which runs already. It is YAML, of which JSON is a part."""
    instances = [
        {
            "name": it.name.lower(),
            "model": str(model),
            "served_name": "model",
            "node": "node",
            "url": f"http://127.0.0.1:{it.port}",
            **({"events": it.events, "replay": it.replay} if it.events else {"events": "off"}),
        }
        for it in servers
    ]
    fleet = {
        "conductor": {"listen": f"127.0.0.1:{port}", "control": f"127.0.0.1:{control}"},
        "nodes": [{"name": "node", "socket": node}],
        "instances": instances,
    }
    return json.dumps(fleet, indent=2)


def play_bursts(servers: Sequence[Served], port: int, shape: Burst, begin: Callable[[str], None]) -> Bursts:
    """The same chats both ways; `begin` is told what comes next."""
    begin("a burst of chats, round robin without a shared cache")
    cold_s = statistics.fmean(_cold_s(it, shape) for it in servers)
    requests = chats(replace(shape, rate=PACE / cold_s))
    urls = [f"http://127.0.0.1:{it.port}" for it in servers]
    before = burst(requests, urls, more=_apart())
    begin("the same burst through the Conductor")
    after = burst(requests, [f"http://127.0.0.1:{port}"])
    return Bursts(SLO_COLD * cold_s, {ROUND_ROBIN: before, CONDUCTOR: after})


def _cold_s(server: Served, shape: Burst) -> float:
    """How long an instance takes until the first token of such a chat, if it has nothing of it."""
    request = unseen(shape, server.name)
    return ask("127.0.0.1", server.port, request, "model", time.monotonic(), _apart()).ttft_s


def _apart() -> dict[str, object]:
    """What keeps requests out of headwater's cache, and away from all that others have left in the engine's own."""
    return {"cache_salt": secrets.token_hex(8), "kv_transfer_params": {"headwater.skip": True}}
