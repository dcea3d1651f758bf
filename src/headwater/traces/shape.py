"""Changes of a trace: faster, a part of it, several as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from headwater.errors import ConfigError
from headwater.traces.model import Trace, TraceRequest


def faster(trace: Trace, load: float) -> Trace:
    """The same requests in 1/load of the time: 2 is twice the load."""
    if not math.isfinite(load) or load <= 0:
        raise ConfigError(f"load {load:g}: write a number above 0, as in 2 for twice as many requests a second")
    if load == 1:
        return trace
    return replace(trace, requests=tuple(replace(it, arrival_s=it.arrival_s / load) for it in trace.requests))


def between(trace: Trace, begin_s: float, end_s: float) -> Trace:
    """The requests that arrive at `begin_s` or later and before `end_s`."""
    if not 0 <= begin_s < end_s:
        raise ConfigError(f"from {begin_s:g} s to {end_s:g} s: write a span of time that begins at 0 or later")
    return _from_zero(trace, [it for it in trace.requests if begin_s <= it.arrival_s < end_s])


def first(trace: Trace, count: int) -> Trace:
    """The first `count` requests, or all."""
    if count < 1:
        raise ConfigError(f"the first {count} requests: write a number from 1 on")
    return replace(trace, requests=trace.requests[:count])


def merge(traces: Sequence[Trace]) -> Trace:
    """All requests of several traces, by arrival. What is a block of one is none of another; sessions stay apart."""
    sizes = {it.block_tokens for it in traces if any(one.blocks for one in it.requests)}
    if not traces or len(sizes) > 1:
        raise ConfigError(f"merge: blocks of {sorted(sizes)} tokens; traces with blocks of one size are needed")
    numbers: dict[tuple[int, int], int] = {}

    def apart(which: int, request: TraceRequest) -> TraceRequest:
        blocks = tuple(numbers.setdefault((which, it), len(numbers)) for it in request.blocks)
        session = f"{which}:{request.session}" if request.session else ""
        return replace(request, blocks=blocks, session=session)

    requests = [apart(which, it) for which, trace in enumerate(traces) for it in trace.requests]
    requests.sort(key=lambda it: it.arrival_s)
    return Trace("+".join(it.name for it in traces), max(sizes, default=0), tuple(requests))


def _from_zero(trace: Trace, requests: Iterable[TraceRequest]) -> Trace:
    kept = list(requests)
    begin = kept[0].arrival_s if kept else 0.0
    return replace(trace, requests=tuple(replace(it, arrival_s=it.arrival_s - begin) for it in kept))
