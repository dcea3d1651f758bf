"""What a trace is, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `blocks` has a number for each started block; equal numbers are the same block after the same
    blocks, and the last one may cover a partial block. It is empty where the trace says nothing about contents."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""
    turn: int = 0
    kind: str = ""
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, which begins at 0."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
