"""Two workers behind one port: what one is told the other learns, and requests find either."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conductor.engine import serving
from tests.conductor.running import chat, running, until

pytestmark = pytest.mark.alone


def test_workers_share_a_port_their_loads_and_what_registers(tmp_path: Path) -> None:
    with serving(model="other") as late, running(tmp_path, engines=1, workers=2) as fleet:
        instances = {"e0", "late"}
        registered = {
            "endpoint": "tcp://127.0.0.1:1", "type": "vLLM", "modelname": "other", "instance_id": "late",
            "block_size": 16, "dp_rank": 0, "url": late.url,
        }  # fmt: skip
        answer = fleet.control("POST", "/register", registered)
        assert answer.status == 200, answer.body

        def known() -> list[set[str]]:
            """The models that each of some connections, to either worker, is told of."""
            return [{it["id"] for it in fleet.get("/v1/models").json["data"]} for _ in range(8)]

        until(lambda: all(it == {"toy", "other"} for it in known()), known)
        for _ in range(8):
            answer = fleet.post("/v1/chat/completions", chat("hello", model="other"))
            assert (answer.status, answer.headers["x-headwater-instance"]) == (200, "late"), answer.body
        prefixes = {fleet.post("/v1/chat/completions", chat(f"{it}")).headers["x-request-id"][:12] for it in range(24)}
        assert len(prefixes) == 2, "both workers answer"
        assert {it["name"] for it in fleet.state()["brain"]["instances"]} == instances

        # A worker that was started again learns what was registered while it was away.
        before = set(fleet.workers())
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(set(fleet.workers()) - before) == 1 and len(fleet.workers()) == 2, fleet.logs)
        until(lambda: fleet.state()["ready"] and all(it == {"toy", "other"} for it in known()), known)
