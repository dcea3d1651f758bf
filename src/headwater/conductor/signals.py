"""What an engine says of itself on /metrics, as far as routing cares: vLLM's and SGLang's names.

A dozen names are looked for, and only their lines are read: vLLM writes a thousand lines, most of them buckets of
histograms, and to look at each takes milliseconds, in which nobody else is served. Engines with several data-parallel
ranks write one line a rank: requests and capacities add up, shares are averaged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

BYTES_MAX = 4 << 20
"""Of the text; a longer one is not read at all."""
COUNT_MAX = 1 << 40
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Signals:
    """None: the engine does not say it."""

    running: int | None = None
    waiting: int | None = None
    kv_share: float | None = None
    """Of its KV cache in use, 0 to 1."""
    queried_tokens: int | None = None
    """Prompt tokens looked up in its prefix cache, ever."""
    hit_tokens: int | None = None
    """Those that were found there."""
    external_hit_tokens: int | None = None
    """Those that came from a connector."""
    capacity_tokens: int | None = None
    block_tokens: int | None = None


_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_share",
    "vllm:gpu_cache_usage_perc": "kv_share",
    "vllm:prefix_cache_queries_total": "queried_tokens",
    "vllm:prefix_cache_hits_total": "hit_tokens",
    "vllm:external_prefix_cache_hits_total": "external_hit_tokens",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_share",
    "sglang:max_total_num_tokens": "capacity_tokens",
    "sglang:prompt_tokens_total": "queried_tokens",
    "sglang:cached_tokens_total": "hit_tokens",
}
_AFTER = (b"{", b" ")
"""What a name ends at, so that none is taken for another that begins alike."""
_INFO = "vllm:cache_config_info"
_SHARES = {"kv_share"}


def read_signals(text: bytes) -> Signals:
    """What of a text in Prometheus' format is known here; whatever is malformed is left out."""
    found = Signals()
    if len(text) > BYTES_MAX:
        return found
    text = b"\n" + text
    counts: dict[str, int] = {}
    for name, field in _NAMES.items():
        for line in _lines(text, name):
            value = _value(line)
            if value is None:
                continue
            counts[field] = counts.get(field, 0) + 1
            known = getattr(found, field)
            if field in _SHARES:
                setattr(found, field, (known or 0.0) + value)
            else:
                setattr(found, field, (known or 0) + round(value))
    for line in _lines(text, _INFO):
        _read_info(found, line)
    for field in _SHARES & counts.keys():
        setattr(found, field, min(getattr(found, field) / counts[field], 1.0))
    return found


def _lines(text: bytes, name: str) -> Iterator[str]:
    """The lines that say something of this name; each follows a line end."""
    mark = f"\n{name}".encode()
    at = text.find(mark)
    while at >= 0:
        after, end = at + len(mark), text.find(b"\n", at + 1)
        if text[after : after + 1] in _AFTER:
            yield text[at + 1 : end if end >= 0 else len(text)].decode("utf-8", "replace")
        at = text.find(mark, after)


def _value(line: str) -> float | None:
    """The number of a line: after the labels, before a time stamp, if there is one."""
    rest = line[line.rfind("}") + 1 :].split() if "}" in line else line.split()[1:]
    try:
        value = float(rest[0]) if rest else math.nan
    except ValueError:
        return None
    return value if 0 <= value <= COUNT_MAX else None


def _read_info(found: Signals, line: str) -> None:
    """vLLM's configuration comes as labels."""
    labels = dict(_LABEL.findall(line))
    blocks, tokens = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if tokens.isdecimal() and 0 < int(tokens[:9]) <= 1 << 20:
        found.block_tokens = int(tokens[:9])
        if blocks.isdecimal() and len(blocks) <= 12 and int(blocks) > 0:
            found.capacity_tokens = (found.capacity_tokens or 0) + int(blocks) * found.block_tokens
