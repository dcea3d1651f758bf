"""A node's figures for Prometheus: a view of its state, made at scrape time; nothing is counted here.

Namespaces that differ only in adapter, tenant or salt are summed: who asks is nobody's business but the
client's, and the number of series stays bounded by the number of models. `public_state` is that view as a
dictionary, `NodeCollector` the same in Prometheus' words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headwater.metrics.cluster import of_cluster
from headwater.node.latency import BOUNDS_S

State = dict[str, Any]

SUMS = {
    "lookup_tokens": "Tokens that requests asked for, in whole chunks; hits and misses add up to this.",
    "hit_tokens": "Tokens that were there when a request asked.",
    "miss_tokens": "Tokens that were not there when a request asked.",
    "lookup_bytes": "The KV bytes of the tokens that requests asked for.",
    "hit_bytes": "The KV bytes of the tokens that were there.",
    "miss_bytes": "The KV bytes of the tokens that were not there.",
    "stored_bytes": "Bytes that became readable; less evicted and deleted ones they are what is held.",
    "evicted_bytes": "Bytes that left to make room.",
    "deleted_bytes": "Bytes that left because a client asked, or with a failed save that they hung on.",
    "stored_chunks": "Chunks (one of each KV group) that became readable.",
    "evicted_chunks": "Chunks that left to make room.",
    "deleted_chunks": "Chunks that left because a client asked, or with a failed save that they hung on.",
    "failed_chunks": "Chunks whose save failed, was given up or came too late; they were never readable.",
}
LEVELS = {
    "held_bytes": "Bytes that can be read now.",
    "held_chunks": "Chunks (one of each KV group) that can be read now.",
    "leases": "Chunks (one of each KV group) that running loads keep from leaving, counted once a load.",
}
HOST = {
    "capacity_bytes": "Memory that chunks can use.",
    "taken_bytes": "Memory that chunks use, those being written included.",
    "quarantined_bytes": "Memory of late saves, kept from use until their writers are known to have stopped.",
    "prefaulted_bytes": "Memory whose pages are known to be there.",
}
TIER_SUMS = {
    "hit_tokens": "Tokens that a tier supplied to requests; those of lower tiers were brought up for them.",
    "read_bytes": "Bytes that were brought up from a tier and verified.",
    "written_bytes": "Bytes that went down to a tier.",
    "dropped_chunks": "Chunks that left HOST, or fell out of the queue, before they went down to a tier.",
    "declined": "Fetches that were left out because computing is faster.",
    "opened": "How often a tier was found sick.",
    "probes": "How often a sick tier was tried again.",
    "journal_failures": "Writes of the disk's journal that failed and were tried again.",
    "journal_forgotten_chunks": "Chunks on disk that the journal could not take: they do not outlive the node.",
}
TIER_LEVELS = {
    "capacity_bytes": "What a tier can hold, where that is known.",
    "recovered_chunks": "Chunks on disk that the node took over from the life before.",
    "journal_broken": "1 once the disk's journal is damaged: the next start has to look at every slot.",
    "used_bytes": "What a tier holds, where that is known.",
    "read_bytes_s": "The measured rate of reads, once there was one.",
    "read_latency_s": "The measured latency of reads, once there was one.",
    "write_bytes_s": "The measured rate of writes, once there was one.",
    "write_latency_s": "The measured latency of writes, once there was one.",
    "queued_chunks": "Chunks that wait to go down to a tier.",
    "moving_bytes": "Bytes on their way to or from a tier.",
}
FETCH_SUMS = {
    "begun": "Requests of which HOST did not have everything.",
    "cut": "Fetches that were cut off because they took longer than they were worth.",
    "estimates": "Fetches whose estimated time was compared with what they took.",
}
IDENTITY = ("namespace", "model", "kv_dtype", "layout", "parallel", "chunk_tokens", "chunk_bytes")


def public_state(state: State) -> State:
    """A node's state without adapters and tenants: namespaces that differ only in these (and salt) are summed."""
    merged: dict[str, State] = {}
    for space in state["namespaces"]:
        into = merged.get(space["namespace"])
        if into is None:
            into = merged[space["namespace"]] = {name: space[name] for name in (*IDENTITY, "tier")}
            into |= dict.fromkeys([*SUMS, *LEVELS], 0)
        chunk_bytes, chunk_tokens = space["chunk_bytes"], space["chunk_tokens"]
        for name in [*SUMS, *LEVELS]:
            if name in space:
                into[name] += space[name]
            else:
                into[name] += space[name.replace("_bytes", "_tokens")] // chunk_tokens * chunk_bytes
    return state | {"namespaces": list(merged.values())}


class NodeCollector(Collector):
    """Turns a node's state into metrics."""

    def __init__(self, read: Callable[[], State]) -> None:
        """`read` gives the state (`Server.status`); it is called once a scrape."""
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """One scrape; raises whatever `read` raises."""
        state = public_state(self._read())
        yield from _of_node(state)
        yield from _of_host(state["host"])
        yield from _of_namespaces(state["namespaces"])
        yield from _of_tiers(state["tiers"])
        yield from _of_fetches(state["fetches"])
        yield from of_cluster(state["cluster"])
        yield _of_calls(state["calls"])


def render(state: State) -> bytes:
    """A state in Prometheus' text format, with the process's own figures (CPU, memory, descriptors)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(lambda: state))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _of_node(state: State) -> Iterator[Metric]:
    about = {name: str(state[name]) for name in ("version", "protocol", "node", "eviction")}
    yield InfoMetricFamily("headwater_node", "Which node this is.", value=about)
    yield GaugeMetricFamily("headwater_uptime_seconds", "Since the node started.", value=state["uptime_s"])
    yield GaugeMetricFamily("headwater_draining", "1 while the node is stopping.", value=int(state["draining"]))
    yield GaugeMetricFamily("headwater_sessions", "Open connections.", value=state["sessions"])
    yield GaugeMetricFamily("headwater_instances", "Registered engines with a process alive.", value=state["instances"])
    tickets = GaugeMetricFamily("headwater_tickets", "Running loads and saves.", labels=["kind"])
    for kind, count in state["tickets"].items():
        tickets.add_metric([kind], count)
    yield tickets
    failures = CounterMetricFamily("headwater_failures", "What went wrong, by kind.", labels=["kind"])
    for kind, count in _failures(state).items():
        failures.add_metric([kind], count)
    yield failures


def _failures(state: State) -> dict[str, int]:
    return {
        "expired_load": state["expired"]["load"],
        "expired_save": state["expired"]["save"],
        "unknown_ticket": state["unknown_tickets"],
        "refused": state["refused"],
        "turned_away": state["turned_away"],
        "protocol": state["protocol_errors"],
        "failed_chunk": sum(space["failed_chunks"] for space in state["namespaces"]),
    }


def _of_host(host: State) -> Iterator[Metric]:
    for name, text in HOST.items():
        gauge = GaugeMetricFamily(f"headwater_pool_{name}", text, labels=["tier"])
        gauge.add_metric(["host"], host[name])
        yield gauge


def _of_namespaces(spaces: list[State]) -> Iterator[Metric]:
    about = InfoMetricFamily("headwater_namespace", "What a namespace is.", labels=["namespace"])
    for space in spaces:
        about.add_metric([space["namespace"]], {name: str(space[name])[:64] for name in IDENTITY[1:]})
    yield about
    for name, text in SUMS.items():
        counter = CounterMetricFamily(f"headwater_{name}", text, labels=["namespace", "tier"])
        for space in spaces:
            counter.add_metric([space["namespace"], space["tier"]], space[name])
        yield counter
    for name, text in LEVELS.items():
        gauge = GaugeMetricFamily(f"headwater_{name}", text, labels=["namespace", "tier"])
        for space in spaces:
            gauge.add_metric([space["namespace"], space["tier"]], space[name])
        yield gauge


def _of_tiers(tiers: list[State]) -> Iterator[Metric]:
    health = GaugeMetricFamily(
        "headwater_tier_well", "1 while a tier may be used, 0 while it is sick.", labels=["name"]
    )
    full = GaugeMetricFamily("headwater_tier_full", "1 while a tier is left alone because it is full.", labels=["name"])
    errors = CounterMetricFamily(
        "headwater_tier_errors", "Chunks whose way to or from a tier failed, by outcome.", labels=["name", "outcome"]
    )
    for tier in tiers:
        health.add_metric([tier["name"]], int(tier["health"] == "well"))
        full.add_metric([tier["name"]], int(tier.get("full", False)))
        for outcome, count in tier.get("errors", {}).items():
            errors.add_metric([tier["name"], outcome], count)
    yield from (health, full, errors)
    for name, text in TIER_SUMS.items():
        counter = CounterMetricFamily(f"headwater_tier_{name}", text, labels=["name"])
        for tier in tiers:
            if name in tier:
                counter.add_metric([tier["name"]], tier[name])
        yield counter
    for name, text in TIER_LEVELS.items():
        gauge = GaugeMetricFamily(f"headwater_tier_{name}", text, labels=["name"])
        for tier in tiers:
            if tier.get(name) is not None:
                gauge.add_metric([tier["name"]], tier[name])
        yield gauge


def _of_fetches(fetches: State) -> Iterator[Metric]:
    for name, text in FETCH_SUMS.items():
        yield CounterMetricFamily(f"headwater_fetches_{name}", text, value=fetches[name])
    text = "How far estimated fetch times were from what they took lately, as a share of it."
    yield GaugeMetricFamily("headwater_fetches_estimate_error", text, value=fetches["estimate_error"])


def _of_calls(calls: dict[str, State]) -> Metric:
    text = "Time that the node's loop spent on a call, by verb."
    family = HistogramMetricFamily("headwater_call_seconds", text, labels=["verb"])
    bounds = [*(repr(bound) for bound in BOUNDS_S), "+Inf"]
    for verb, latency in calls.items():
        buckets = list(zip(bounds, accumulate(latency["counts"]), strict=True))
        family.add_metric([verb.lower()], buckets, latency["sum_s"])
    return family
