"""Writes a trace as JSON lines in the format of the traces published with Mooncake (FAST 2025)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from headwater.errors import ConfigError
from headwater.traces.model import Trace, TraceRequest
from headwater.traces.sizes import BlockSize


def as_lines(trace: Trace) -> Iterator[str]:
    """The lines, each with its end. Times are whole milliseconds; fields that say nothing are left out.

    Where lengths alone do not tell the size of a block, the first line with blocks says it as `block_tokens`.
    """
    said = _is_told(trace)
    for request in trace.requests:
        record = _record(request)
        if request.blocks and not said:
            record["block_tokens"] = trace.block_tokens
            said = True
        yield msgspec.json.encode(record).decode() + "\n"


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the file, whole or not at all. Raises ConfigError."""
    try:
        write_whole(Path(path), as_lines(trace))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}; name a file that can be written") from error


def write_whole(target: Path, parts: Iterable[str]) -> None:
    """Write a text file, whole or not at all: what was there stays until all is written. Raises OSError.

    What is there and no file, as /dev/stdout, is written to as it is.
    """
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        return
    part = target.with_name(target.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _record(request: TraceRequest) -> dict[str, object]:
    record: dict[str, object] = {
        "timestamp": round(request.arrival_s * 1000),
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.blocks,
    }
    more = {
        "session": request.session,
        "turn": request.turn,
        "type": request.kind,
        "tenant": request.tenant,
        "priority": request.priority,
    }
    return record | {key: value for key, value in more.items() if value}


def _is_told(trace: Trace) -> bool:
    """Whether a reader finds out the size of a block from the lengths."""
    size = BlockSize()
    for request in trace.requests:
        size.take(request.input_tokens, len(request.blocks), "")
    try:
        return size.found() in (None, trace.block_tokens)
    except ConfigError:
        return False
