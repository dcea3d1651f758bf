"""A whole Conductor over a prefill instance that takes prompts and never answers."""

from __future__ import annotations

import time
from pathlib import Path

from headwater.conductor.patience import SPARE_S
from tests.conductor.engine import Gate, Script
from tests.conductor.running import chat, running
from tests.node.conftest import eventually


def test_a_prefill_instance_that_hangs_costs_one_request_some_seconds(tmp_path: Path) -> None:
    file = {"nodes": [{"name": "node", "socket": f"unix:{tmp_path}/none.sock"}]}
    roles = ("prefill", "decode")
    about = lambda number, _: {"role": roles[number], "node": "node"}  # noqa: E731
    with running(tmp_path, 2, file=file, about=about) as fleet:
        first, _ = fleet.engines
        answer = fleet.post("/v1/chat/completions", chat("how are you"))
        assert answer.headers["x-headwater-prefill"] == "e0"
        first.otherwise = Script(gate=Gate(0))
        began_s = time.monotonic()
        answer = fleet.post("/v1/chat/completions", chat("hello there"))
        took_s = time.monotonic() - began_s
        assert answer.status == 200 and answer.headers["x-headwater-prefill"] == "e0"
        assert SPARE_S <= took_s < SPARE_S + 8, "the patience for a short prompt"
        eventually(lambda: first.aborted == 1)

        began_s, asked = time.monotonic(), len(first.asked)
        for text in ("who is there", "nobody"):
            answer = fleet.post("/v1/chat/completions", chat(text))
            assert answer.status == 200 and "x-headwater-prefill" not in answer.headers
        assert len(first.asked) == asked and time.monotonic() - began_s < SPARE_S / 2
        assert [len(it.asked) for it in fleet.engines] == [2, 4]
