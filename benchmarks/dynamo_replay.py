"""Dynamo's own replay of a trace on its mock engines, in the Python that has ai-dynamo-runtime.

Says `{"ready": true}`, then reads one JSON object a line and writes one a line:

    {"trace": "conversation_trace.jsonl", "trace_block_tokens": 512, "workers": 8, "blocks": 16384, "block_tokens": 64,
     "router": "round_robin" | "kv", "router_config": {"prefill_load_scale": 2}, "speedup": 1, "rows": false}

`requests` instead of `trace` has the rows of a trace themselves. With `rows`, the answer has each request's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("DYN_LOG", "error")  # it would tell of every choice, and take its time for it

from dynamo._core import KvRouterConfig, run_mocker_trace_replay

ROW = {
    "arrival_ms": "arrival_time_ms",
    "admit_ms": "first_admit_ms",
    "first_token_ms": "first_token_ms",
    "last_token_ms": "last_token_ms",
    "ttft_ms": "ttft_ms",
    "reused_tokens": "reused_input_tokens",
    "input_tokens": "input_length",
    "output_tokens": "output_length",
    "worker": "decode_worker_idx",
}


def replay(order: dict[str, Any]) -> dict[str, Any]:
    """Play one order, and sum it up. Times in milliseconds, as the replay has them."""
    rows = bool(order.get("rows"))
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as given:
        for row in order.get("requests", ()):
            given.write(json.dumps(row) + "\n")
        given.flush()
        more: dict[str, Any] = {}
        if order.get("router_config"):
            more["router_config"] = KvRouterConfig(**order["router_config"])
        if order.get("event_lag_ms"):
            more["kv_event_lag_ms"] = order["event_lag_ms"]
        engine = {"num_gpu_blocks": order["blocks"], "block_size": order.get("block_tokens", 64)}
        started = time.perf_counter()
        report = run_mocker_trace_replay(
            [order.get("trace") or given.name],
            extra_engine_args={"engine": engine | order.get("engine", {})},
            num_workers=order.get("workers", 1),
            router_mode={"kv": "kv_router"}.get(order.get("router", ""), order.get("router", "round_robin")),
            arrival_speedup_ratio=float(order.get("speedup", 1.0)),
            trace_block_size=order.get("trace_block_tokens", 512),
            capture_per_request=rows,
            **more,
        )
        wall_s = time.perf_counter() - started
    said = report.summary
    answer = {
        "requests": said["num_requests"],
        "completed": said["completed_requests"],
        "reuse": said["first_admission_prefix_cache_reused_ratio"],
        "wall_s": wall_s,
    }
    for name in ("ttft", "itl", "tpot"):
        for kind, theirs in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p99", "p99")):
            answer[f"{name}_{kind}_ms"] = said[f"{theirs}_{name}_ms"]
    if rows:
        answer["rows"] = [{ours: row[theirs] for ours, theirs in ROW.items()} for row in report.per_request]
    return answer


def main() -> None:
    """Answer orders until there are no more."""
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip():
            sys.stdout.write(json.dumps(replay(json.loads(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
