"""A Conductor's figures for Prometheus: what its workers count, added up, and what their parent knows of them.

A view, made at scrape time: nothing is counted here. Which families there are is this table; each has one label at
most, whose values are words of the Conductor's own. A worker's number becomes a label only where a sum would make no
sense.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from headwater.conductor.control.merge import RETIRED
from headwater.conductor.counts import BOUNDS_S

State = dict[str, Any]
PREFIX = "headwater_conductor_"
LABELS = 64
"""So many values a label may have; those after them are added up as `other`."""


class Kind(StrEnum):
    """What may be done with the numbers of several workers."""

    SUM = "sum"
    """Only goes up: added up, also over workers that have ended."""
    LEVEL = "level"
    """A level that each worker has for itself: added up over those that run."""
    EACH = "each"
    """A level of which a sum makes no sense: one for each worker."""
    SECONDS = "seconds"
    """A histogram."""


class Family(NamedTuple):
    """One name in `Counts`."""

    kind: Kind
    text: str
    label: str = ""


FAMILIES: dict[str, Family] = {
    "refused": Family(Kind.SUM, "Requests that were not served, by the code of the error.", "code"),
    "limited": Family(Kind.SUM, "Those of them that were too many or waited too long, by the limit.", "limit"),
    "rejected": Family(Kind.SUM, "Requests that admission turned away, by reason.", "reason"),
    "ended": Family(Kind.SUM, "Answers that ended, by how.", "how"),
    "outcomes": Family(Kind.SUM, "Requests that were routed, by what became of them.", "outcome"),
    "lost": Family(Kind.SUM, "Requests that an instance lost, by why.", "why"),
    "prefill_lost": Family(Kind.SUM, "Requests that a prefill instance lost, by why.", "why"),
    "moved": Family(Kind.SUM, "Streams that another instance went on with."),
    "unmoved": Family(Kind.SUM, "Streams that no other instance could go on with, by reason.", "reason"),
    "instances_changed": Family(Kind.SUM, "How often an instance went out or came back.", "how"),
    "unpaired": Family(Kind.SUM, "Requests that one instance of a fleet with roles served alone, by why.", "why"),
    "handoffs": Family(Kind.SUM, "Prompts' KV on its way from prefill to decode: stored in time, or late.", "how"),
    "prefetches": Family(Kind.SUM, "Prefetches that were ordered from nodes, or dropped.", "how"),
    "prompt_tokens": Family(Kind.SUM, "Tokens of prompts whose answers have ended."),
    "reused_tokens": Family(Kind.SUM, "Those of them that were not computed, by the tier that had them.", "tier"),
    "shared": Family(Kind.SUM, "What other workers and Conductors said: heard, or not used and why.", "why"),
    "prompts": Family(Kind.SUM, "Prompts by how their tokens were found.", "how"),
    "tokens_unknown": Family(Kind.SUM, "Prompts that were routed without their tokens, by reason.", "reason"),
    "tokens_mismatch": Family(Kind.SUM, "Prompts whose tokens an engine counted otherwise, by model.", "model"),
    "http_connections": Family(Kind.LEVEL, "Connections of clients."),
    "http_connections_refused": Family(Kind.SUM, "Connections of clients that were too many."),
    "http_buffered_bytes": Family(Kind.LEVEL, "Bodies above 64 KiB that are held."),
    "http_bodies_refused": Family(Kind.SUM, "Bodies that were too many at once."),
    "http_malformed": Family(Kind.SUM, "What came and was no request within the limits, by status.", "status"),
    "http_clients_gone": Family(Kind.SUM, "Clients that left before their answer was whole."),
    "http_clients_stalled": Family(Kind.SUM, "Clients that were cut off because they read nothing."),
    "upstream_connections": Family(Kind.SUM, "Connections to instances that were opened."),
    "upstream_stale": Family(Kind.SUM, "Connections to instances that were closed while idle; the request went again."),
    "upstream_lost": Family(Kind.SUM, "Answers of instances that did not come to an end, by why.", "why"),
    "ttft_seconds": Family(Kind.SECONDS, "From a request's arrival to its first token."),
    "tpot_seconds": Family(Kind.SECONDS, "Between tokens, on average over a stream."),
    "tokenising": Family(Kind.SECONDS, "Time to find a prompt's tokens."),
}
ABOUT: dict[str, tuple[Kind, str]] = {
    "uptime_seconds": (Kind.LEVEL, "Since the Conductor started."),
    "ready": (Kind.LEVEL, "1 while requests are served."),
    "draining": (Kind.LEVEL, "1 while the Conductor is stopping."),
    "workers": (Kind.LEVEL, "Workers that are meant to run."),
    "workers_heard": (Kind.LEVEL, "Workers that were heard lately."),
    "workers_ended": (Kind.SUM, "Workers that ended, as far as they were seen."),
    "instances_alive": (Kind.LEVEL, "Instances that are alive and take requests."),
}


def render(counts: Mapping[int, State], about: Mapping[str, float]) -> bytes:
    """The counts of each worker by its row, and what the parent knows, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once([*_of_parent(about), *_of_numbers(counts), *_of_histograms(counts)]))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Once(Collector):
    """Families that were made already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_parent(about: Mapping[str, float]) -> Iterator[Metric]:
    for name, (kind, text) in ABOUT.items():
        made = CounterMetricFamily if kind is Kind.SUM else GaugeMetricFamily
        yield made(PREFIX + name, text, value=about.get(name, 0.0))


def _of_numbers(counts: Mapping[int, State]) -> Iterator[Metric]:
    found: dict[str, dict[tuple[int, str], float]] = {}
    for row, state in counts.items():
        for name, label, value in state.get("numbers", ()):
            found.setdefault(name, {})[row, label] = value
    for name, family in FAMILIES.items():
        if family.kind is not Kind.SECONDS:
            yield _numbers(name, family, found.pop(name, {}))
    for name, values in sorted(found.items()):
        labels = ["label"] if any(label for _, label in values) else []
        unknown = UnknownMetricFamily(PREFIX + name, "Not described yet.", labels=labels)
        for label, value in _bounded(_summed(values)).items():
            unknown.add_metric([label] if labels else [], value)
        yield unknown


def _numbers(name: str, family: Family, values: Mapping[tuple[int, str], float]) -> Metric:
    labels = ([family.label] if family.label else []) + (["worker"] if family.kind is Kind.EACH else [])
    made = CounterMetricFamily if family.kind is Kind.SUM else GaugeMetricFamily
    metric = made(PREFIX + name, family.text, labels=labels)
    alive = {key: value for key, value in values.items() if family.kind is Kind.SUM or key[0] != RETIRED}
    if family.kind is Kind.EACH:
        for (row, label), value in sorted(alive.items()):
            metric.add_metric(([label] if family.label else []) + [str(row)], value)
        return metric
    for label, value in _bounded(_summed(alive) or ({} if family.label else {"": 0.0})).items():
        metric.add_metric([label] if family.label else [], value)
    return metric


def _of_histograms(counts: Mapping[int, State]) -> Iterator[Metric]:
    found: dict[str, dict[str, list[float]]] = {}
    for state in counts.values():
        for name, label, row in state.get("histograms", ()):
            into = found.setdefault(name, {}).setdefault(label, [0.0] * len(row))
            into[:] = [a + b for a, b in zip(into, row, strict=True)]
    bounds = [*(repr(bound) for bound in BOUNDS_S), "+Inf"]
    for name in [*(it for it, family in FAMILIES.items() if family.kind is Kind.SECONDS), *sorted(found)]:
        rows = found.pop(name, None)
        family = FAMILIES.get(name, Family(Kind.SECONDS, "Not described yet.", "label"))
        if rows is None:
            continue
        labels = [family.label] if family.label else []
        metric = HistogramMetricFamily(f"{PREFIX}{name.removesuffix('_seconds')}_seconds", family.text, labels=labels)
        for label, row in rows.items():
            buckets = list(zip(bounds, accumulate(row[:-1]), strict=True))
            metric.add_metric([label] if labels else [], buckets, row[-1])
        yield metric


def _summed(values: Mapping[tuple[int, str], float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for (_, label), value in values.items():
        sums[label] = sums.get(label, 0.0) + value
    return sums


def _bounded(values: Mapping[str, float]) -> dict[str, float]:
    """Not more labels than LABELS: a bug that makes labels of what clients send must not fill Prometheus."""
    if len(values) <= LABELS:
        return dict(sorted(values.items()))
    kept = dict(sorted(values.items())[:LABELS])
    kept["other"] = kept.get("other", 0.0) + sum(value for label, value in values.items() if label not in kept)
    return kept
