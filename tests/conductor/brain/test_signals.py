"""What engines write on /metrics."""

from __future__ import annotations

import random

from headwater.conductor.signals import BYTES_MAX, Signals, read_signals

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b} c"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.2e+04
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 6000.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 120.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="728",engine="0"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
"""


def test_vllm() -> None:
    assert read_signals(VLLM) == Signals(3, 7, 0.25, 12000, 6000, 120, 23296, 32)


def test_ranks_add_up() -> None:
    more = VLLM.replace(b'engine="0"', b'engine="1"').replace(b"0.25", b"0.75")
    assert read_signals(VLLM + more) == Signals(6, 14, 0.5, 24000, 12000, 240, 2 * 23296, 32)


def test_sglang() -> None:
    text = b'sglang:num_running_reqs 2\nsglang:num_queue_reqs{a="b"} 1 1700000000000\nsglang:token_usage 0.5\n'
    text += b"sglang:max_total_num_tokens{} 5000\nsglang:cached_tokens_total 9\n"
    assert read_signals(text) == Signals(2, 1, 0.5, None, 9, None, 5000)


def test_what_is_malformed_is_left_out() -> None:
    text = b"vllm:num_requests_running{} NaN\nvllm:num_requests_waiting{} -3\nvllm:kv_cache_usage_perc{\n"
    text += b'vllm:num_requests_running\nvllm:cache_config_info{block_size="x",num_gpu_blocks="9"} 1\n\xff\xfe\n'
    text += b'vllm:num_requests_running{} 1e300\nvllm:cache_config_info{block_size="0",num_gpu_blocks="9"} 1'
    assert read_signals(text) == Signals()
    assert read_signals(b"vllm:num_requests_running 1\n" + b"#" * BYTES_MAX) == Signals()


def test_nothing_breaks_it() -> None:
    draw = random.Random(20240902)
    for _ in range(300):
        text = bytearray(VLLM)
        for _ in range(draw.randint(1, 30)):
            text[draw.randrange(len(text))] = draw.randrange(256)
        found = read_signals(bytes(text))
        assert found.kv_share is None or 0 <= found.kv_share <= 1
