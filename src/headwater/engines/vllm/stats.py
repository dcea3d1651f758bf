"""What the plug-in reports through vLLM's own metrics: `vllm:headwater_*` on the engine's /metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32
    CacheHitSource = None

SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
COUNTERS = {
    "loaded_bytes": "Bytes copied from the node into the engine's KV blocks.",
    "saved_bytes": "Bytes copied from the engine's KV blocks into the node.",
    "failed_loads": "Loads that ended in recompute.",
    "failed_saves": "Saves that stored nothing.",
    "short_loads": "Loads that found less than was promised: something left in between.",
    "short_saves": "Saves that the node had no room for, in whole or in part.",
    "host_tokens": "Tokens loaded from what the node had in memory.",
    "disk_tokens": "Tokens loaded that the node had brought up from its disk for the request.",
    "remote_tokens": "Tokens loaded that the node had brought up from a remote tier for the request.",
    "waits": "Requests that waited for lower tiers instead of being scheduled.",
    "cut_waits": "Waits that ended because time was over or the node was gone.",
}
HISTOGRAMS = {
    "load_seconds": "Time of one request's load copy.",
    "save_seconds": "Time of one save copy.",
    "wait_seconds": "Time that one request waited for lower tiers.",
}


@dataclass(frozen=True, slots=True)
class HitTokens:
    """A load's tokens by the tier that had them: the node's memory, its disk, a remote tier."""

    host: int = 0
    disk: int = 0
    remote: int = 0

    @classmethod
    def of(cls, tokens: int, disk: int, remote: int) -> HitTokens:
        """Split a load of which so many tokens at most were brought up. What came from below lies at the prefix's end,
        which is loaded, behind what the engine may have itself."""
        remote = min(remote, tokens)
        disk = min(disk, tokens - remote)
        return cls(tokens - remote - disk, disk, remote)

    def sources(self) -> dict[Any, int]:
        """The same in vLLM's words (0.32), which have none for a remote store."""
        if CacheHitSource is None:
            return {}
        words = (CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.EXTERNAL_UNSPECIFIED)
        return {word: tokens for word, tokens in zip(words, (self.host, self.disk, self.remote), strict=True) if tokens}


@dataclass
class CopySums:
    """Sums of one side since its last report; a rank's are written by its copy thread, taken by the engine's."""

    loaded_bytes: int = 0
    saved_bytes: int = 0
    failed_loads: int = 0
    failed_saves: int = 0
    short_loads: int = 0
    short_saves: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    waits: int = 0
    cut_waits: int = 0
    load_seconds: list[float] = field(default_factory=list)
    save_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """Add one load."""
        with self._lock:
            self.loaded_bytes += size_bytes
            self.load_seconds.append(seconds)

    def saved(self, size_bytes: int, seconds: float) -> None:
        """Add one save."""
        with self._lock:
            self.saved_bytes += size_bytes
            self.save_seconds.append(seconds)

    def waited(self, seconds: float, *, cut: bool) -> None:
        """Add one request's wait."""
        with self._lock:
            self.waits += 1
            self.cut_waits += cut
            self.wait_seconds.append(seconds)

    def supplied(self, hit: HitTokens) -> None:
        """Add one load's tokens."""
        with self._lock:
            self.host_tokens += hit.host
            self.disk_tokens += hit.disk
            self.remote_tokens += hit.remote

    def take(self) -> HeadwaterStats | None:
        """The sums as vLLM wants them, and start anew; None if nothing happened."""
        with self._lock:
            data: dict[str, Any] = {name: getattr(self, name) for name in (*COUNTERS, *HISTOGRAMS)}
            if not any(data.values()):
                return None
            for name in COUNTERS:
                setattr(self, name, 0)
            for name in HISTOGRAMS:
                setattr(self, name, [])
        return HeadwaterStats(data)


@dataclass
class HeadwaterStats(KVConnectorStats):
    """One interval's sums: integers add, lists of seconds are joined."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.data = {**dict.fromkeys(COUNTERS, 0), **{name: [] for name in HISTOGRAMS}}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> HeadwaterStats:
        """Add another rank's or interval's sums."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's log line."""
        data: dict[str, Any] = self.data
        return {
            "loaded MB": round(data["loaded_bytes"] / 1e6, 1),
            "saved MB": round(data["saved_bytes"] / 1e6, 1),
            "failed loads": data["failed_loads"],
            "waits": data["waits"],
        }


class HeadwaterPromMetrics(KVConnectorPromMetrics):
    """The same sums as Prometheus metrics of the serving front end."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            metric = self._counter_cls(name=f"vllm:headwater_{name}", documentation=text, labelnames=labelnames)
            self._metrics[name] = self._for_engines(metric, per_engine_labelvalues)
        for name, text in HISTOGRAMS.items():
            metric = self._histogram_cls(
                name=f"vllm:headwater_{name}", documentation=text, buckets=SECONDS_BUCKETS, labelnames=labelnames
            )
            self._metrics[name] = self._for_engines(metric, per_engine_labelvalues)

    @staticmethod
    def _for_engines(metric: Any, labelvalues: Any) -> dict[int, Any]:
        return {index: metric.labels(*values) for index, values in labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take over one interval's sums."""
        for name in COUNTERS:
            self._metrics[name][engine_idx].inc(transfer_stats_data[name])
        for name in HISTOGRAMS:
            for seconds in transfer_stats_data[name]:
                self._metrics[name][engine_idx].observe(seconds)
