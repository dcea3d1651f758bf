"""Why a chunk is where it is, or is not: what the node remembers, beside what other namespaces have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headwater.cli.prompts import Known
from headwater.cli.show import plain, show_span
from headwater.types import Namespace

EVENTS = {
    "evicted": "evicted from",
    "deleted": "deleted from",
    "corrupt": "found corrupt in",
    "damaged": "in a damaged place of",
    "refused": "encrypted with a key that is gone, or not to be brought back, in",
    "missing": "found missing in",
    "foreign": "found overwritten in",
    "newer": "found written by a newer headwater in",
    "failed": "not read or written by",
    "full": "turned away, full, by",
}
"""The words for what became of a chunk; others are shown as they are."""

State = dict[str, Any]
Spaces = Mapping[str, Known]
"""Namespaces by their roots in hex."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the node knows of chunks in one namespace, and as whose request it was asked. `is_prompt` says that they
    are a prompt's, from its start on."""

    it: Known
    record: Namespace
    chunks: tuple[State, ...]
    is_prompt: bool = True

    @property
    def reach_tokens(self) -> int:
        """Tokens of the prefix of which every chunk is somewhere."""
        held = next((position for position, it in enumerate(self.chunks) if not it["where"]), len(self.chunks))
        return held * self.it.chunk_tokens

    @property
    def is_blank(self) -> bool:
        """Whether the node has never heard of any of it."""
        return not any(it["where"] or it["last"] for it in self.chunks)


def explain_chunks(found: Found, everyone: Sequence[Found], spaces: Spaces) -> State:
    """One namespace's part of the answer, for programs and as the source of what people read."""
    others = [it for it in everyone if it is not found]
    chunks = [
        {
            "position": position,
            "first_token": position * found.it.chunk_tokens if found.is_prompt else None,
            **chunk,
            "why": "" if chunk["where"] else why(found, position, chunk, others, spaces),
        }
        for position, chunk in enumerate(found.chunks)
    ]
    shown = {it.name: getattr(found.it.record, it.name) for it in fields(Namespace) if it.name != "salt"}
    return {
        "namespace": found.it.name,
        "record": shown,
        "chunk_tokens": found.it.chunk_tokens,
        "held_prefix_tokens": found.reach_tokens if found.is_prompt else None,
        "chunks": chunks,
    }


def why(found: Found, position: int, chunk: State, others: Sequence[Found], spaces: Spaces) -> str:
    """Why a chunk is nowhere, as far as anybody knows."""
    last = chunk["last"]
    reasons = [last_event(last, spaces) if last else "never stored here, or so long ago that the node forgot"]
    reasons += [f"{plain(name)} did not answer" for name in chunk.get("silent", ())]
    end = (position + 1) * found.it.chunk_tokens
    holder = max((it for it in others if it.reach_tokens >= end), key=lambda it: it.reach_tokens, default=None)
    if holder is not None:
        there = f"namespace {holder.it.name}" if holder.it.name != found.it.name else "another part of this namespace"
        reasons.append(f"{there} has these tokens and differs in {differences(found, holder)}")
    return "; ".join(reasons)


def last_event(last: State, spaces: Spaces) -> str:
    """`evicted from host 12 s ago, for namespace 3f9a00112233, tenant blue`."""
    said = (
        f"{EVENTS.get(last['event'], plain(last['event']))} {plain(last['tier'])} {show_span(last['seconds_ago'])} ago"
    )
    cause = spaces.get(last["for_namespace"] or "")
    if cause is None:
        return said
    whose = f", tenant {plain(cause.record.tenant)}" if cause.record.tenant else ""
    return f"{said}, for namespace {cause.name}{whose}"


def differences(here: Found, there: Found) -> str:
    """The fields in which two namespaces differ, with both values; the values of salts are nobody's business."""
    found = []
    for it in fields(Namespace):
        ours, theirs = getattr(here.record, it.name), getattr(there.record, it.name)
        if ours != theirs:
            values = "" if it.name == "salt" else f" ({_short(ours)} here, {_short(theirs)} there)"
            found.append(it.name + values)
    return ", ".join(found) or "salt"


def _short(value: str) -> str:
    return plain(value[:40]) or "none"
