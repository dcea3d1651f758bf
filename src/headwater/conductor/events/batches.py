"""What vLLM publishes about its KV blocks, read: one payload becomes a batch of events.

A payload is the msgpack array [time, [events], data-parallel rank]. Events are maps with a `type` (vLLM 0.26 and later)
or arrays that begin with it (0.23 and earlier); blocks are named by integers or bytes. Fields and kinds of event that
are not known here are passed over, so that a newer engine is still understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

import msgspec

from headwater.errors import ProtocolError

EVENTS_MAX = 65_536
"""Of one batch; an engine's step has a few."""


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that follow each other and their parent became cached."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks are cached no more."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is cached any more."""


class _StoredArray(Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


Event: TypeAlias = Stored | Removed | Cleared
_Array: TypeAlias = _StoredArray | _RemovedArray | _ClearedArray


class Batch(NamedTuple):
    """One step's events. `time` is the engine's own clock; `unknown` counts events of kinds that are not known here."""

    time: float
    events: Sequence[Event]
    rank: int | None
    unknown: int = 0


class _Maps(msgspec.Struct, array_like=True, gc=False):
    time: float
    events: list[Event]
    rank: int | None = None


class _Parts(msgspec.Struct, array_like=True, gc=False):
    time: float
    events: list[msgspec.Raw]
    rank: int | None = None


UNDECODABLE = (msgspec.DecodeError, msgspec.ValidationError, OverflowError, UnicodeError, RecursionError)
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_maps = msgspec.msgpack.Decoder(_Maps)
_parts = msgspec.msgpack.Decoder(_Parts)
_map: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_array: msgspec.msgpack.Decoder[_Array] = msgspec.msgpack.Decoder(_Array)
_any = msgspec.msgpack.Decoder()


def read_batch(payload: bytes) -> Batch:
    """The batch of a payload; raises ProtocolError, which quotes nothing of it, for what is none."""
    try:
        it = _maps.decode(payload)
        return _checked(Batch(it.time, it.events, it.rank))
    except UNDECODABLE:
        return _read_parts(payload)


def _read_parts(payload: bytes) -> Batch:
    """Event by event: some are arrays, or of a kind that is not known."""
    try:
        parts = _parts.decode(payload)
        found = [_read_event(part) for part in parts.events[: EVENTS_MAX + 1]]
    except UNDECODABLE as error:
        raise ProtocolError(f"not a batch of KV events: {type(error).__name__}") from None
    events = [it for it in found if it is not None]
    return _checked(Batch(parts.time, events, parts.rank, len(found) - len(events)))


def _read_event(part: msgspec.Raw) -> Event | None:
    first = bytes(memoryview(part)[:1])[0]
    is_array = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)
    try:
        return (_array if is_array else _map).decode(part)
    except UNDECODABLE:
        if _kind(_any.decode(part), is_array=is_array) in KINDS:
            raise
        return None


def _kind(event: object, *, is_array: bool) -> object:
    if is_array and isinstance(event, list) and event and isinstance(event[0], str):
        return event[0]
    kind = event.get("type") if isinstance(event, dict) else None
    if not isinstance(kind, str):
        raise msgspec.ValidationError("an event without a kind")
    return kind


def _checked(batch: Batch) -> Batch:
    if not isfinite(batch.time) or len(batch.events) + batch.unknown > EVENTS_MAX:
        raise ProtocolError("a batch of KV events without a time, or with too many events")
    return batch
