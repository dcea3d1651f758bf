"""Reads recorded workloads, one line at a time.

    Mooncake  {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
              milliseconds; "Mooncake: Trading More Storage for Less Computation", FAST 2025; blocks of 512 tokens
    Bailian   the same with "chat_id", "parent_chat_id", "turn", "type", and seconds; Qwen's traces; blocks of 16 tokens
    Azure     TIMESTAMP,ContextTokens,GeneratedTokens   a CSV of arrivals and lengths, without blocks

Plain or gzip. Optional fields of JSON lines: session, turn, type, tenant, priority, and block_tokens where lengths do
not tell it. What is held grows with the requests and their blocks, not with the file.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from headwater.errors import ConfigError
from headwater.traces.fields import TOKENS_MAX, BadRecord, moment, name, number, numbers, show, whole
from headwater.traces.model import Trace, TraceRequest
from headwater.traces.opening import Advance, lines
from headwater.traces.sizes import BlockSize

TIMES = {"ms": 1e-3, "s": 1.0}
CSV_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSON_FIELDS = frozenset({
    "timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "session", "chat_id", "parent_chat_id",
    "turn", "type", "tenant", "priority",
})  # fmt: skip
UNKNOWN_MAX = 16
SHOWN_BAD = 3


@dataclass(frozen=True, slots=True)
class Opened:
    """A trace, what was noticed while it was read, and how many lines were skipped as bad."""

    trace: Trace
    notes: tuple[str, ...] = ()
    skipped: int = 0


def read(
    path: str | os.PathLike[str],
    *,
    block_tokens: int | None = None,
    time_unit: str | None = None,
    skip_bad: bool = False,
    advance: Advance | None = None,
) -> Opened:
    """The trace in a file.

    Without `block_tokens` it is found out; without `time_unit` ("ms", "s") it is ms, or s for lines with a chat_id.
    A bad line raises ConfigError, or is counted if `skip_bad`; so does a file without requests.
    """
    if time_unit is not None and time_unit not in TIMES:
        raise ConfigError(f"time unit {time_unit!r}: write ms or s")
    source = _Source(Path(path), time_unit, BlockSize(block_tokens), skip_bad)
    requests = list(source.requests(lines(path, advance)))
    return source.finish(requests)


class _Source:
    """One file while it is read."""

    def __init__(self, path: Path, time_unit: str | None, size: BlockSize, skip_bad: bool) -> None:
        self._path, self._unit, self._size, self._skip_bad = path, time_unit, size, skip_bad
        self._bad: list[str] = []
        self._skipped = 0
        self._unknown: dict[str, None] = {}
        self._sessions: dict[str, str] = {}
        self._ids: dict[int, int] = {}

    def requests(self, numbered: Iterator[tuple[int, str]]) -> Iterator[TraceRequest]:
        first = next(numbered, None)
        if first is None:
            raise ConfigError(f"{self._path}: empty; a trace has a request a line")
        line, text = first
        if text.lstrip().startswith("{"):
            yield from self._each(line, text, self._from_json)
            take: Callable[[str], TraceRequest] = self._from_json
        else:
            take = self._from_csv(text, line)
        for line, text in numbered:
            yield from self._each(line, text, take)

    def _each(self, line: int, text: str, take: Callable[[str], TraceRequest]) -> Iterator[TraceRequest]:
        try:
            request = take(text)
            self._size.take(request.input_tokens, len(request.blocks), f"line {line}")
        except BadRecord as error:
            message = f"{self._path}, line {line}: {error}"
            if not self._skip_bad:
                raise ConfigError(f"{message} (bad lines can be skipped: --skip-bad)") from None
            self._skipped += 1
            if len(self._bad) < SHOWN_BAD:
                self._bad.append(message)
        else:
            yield request

    def _from_json(self, text: str) -> TraceRequest:
        record = decode(text)
        if len(self._unknown) < UNKNOWN_MAX:
            self._unknown |= dict.fromkeys(show(it) for it in record if it not in JSON_FIELDS)
        unit = self._unit or ("s" if "chat_id" in record else "ms")
        blocks = numbers(record, "hash_ids")
        request = TraceRequest(
            arrival_s=number(record, "timestamp") * TIMES[unit],
            input_tokens=whole(record, "input_length", 1, TOKENS_MAX),
            output_tokens=whole(record, "output_length", 0, TOKENS_MAX),
            # One object a number: most numbers come again and again.
            blocks=tuple(self._ids.setdefault(it, it) for it in blocks),
            turn=whole(record, "turn", 0, TOKENS_MAX, default=0),
            kind=name(record, "type"),
            tenant=name(record, "tenant"),
            priority=whole(record, "priority", -TOKENS_MAX, TOKENS_MAX, default=0),
            session=name(record, "session") or self._session(record),
        )
        if record.get("block_tokens") is not None:
            self._size.narrow(whole(record, "block_tokens", 1, TOKENS_MAX))
        return request

    def _session(self, record: dict[str, Any]) -> str:
        """The conversation of a chat: that of its parent, else its own; a parent of -1 is none."""
        chat, parent = name(record, "chat_id"), name(record, "parent_chat_id")
        if not chat:
            return ""
        session = self._sessions.get(parent, "") if parent not in ("", "-1") else ""
        self._sessions[chat] = session or chat
        return session or chat

    def _from_csv(self, header: str, line: int) -> Callable[[str], TraceRequest]:
        columns = _cells(header)
        missing = [it for it in CSV_FIELDS if it not in columns]
        if missing:
            raise ConfigError(
                f"{self._path}, line {line}: {show(header.strip())}: neither a JSON object nor a header with "
                f"{','.join(CSV_FIELDS)} (missing: {', '.join(missing)})"
            )
        self._unknown |= dict.fromkeys(show(it) for it in columns if it not in CSV_FIELDS)

        def take(text: str) -> TraceRequest:
            cells = _cells(text)
            if len(cells) != len(columns):
                raise BadRecord("columns", len(cells), f"the header has {len(columns)}")
            row = dict(zip(columns, cells, strict=True))
            record = {it: int(row[it]) if row[it].isdecimal() and len(row[it]) < 20 else row[it] for it in CSV_FIELDS}
            return TraceRequest(
                moment(row[CSV_FIELDS[0]], CSV_FIELDS[0]),
                whole(record, CSV_FIELDS[1], 1, TOKENS_MAX),
                whole(record, CSV_FIELDS[2], 0, TOKENS_MAX),
            )

        return take

    def finish(self, requests: list[TraceRequest]) -> Opened:
        """The trace in order of arrival, which begins at 0."""
        if not requests:
            bad = f"; all of its {self._skipped} lines are bad, first: {self._bad[0]}" if self._bad else ""
            raise ConfigError(f"{self._path}: no requests{bad}")
        notes = []
        if self._skipped:
            notes.append(f"{self._skipped:,} bad lines were skipped, among them: {'; '.join(self._bad)}")
        if self._unknown:
            notes.append(f"fields that mean nothing here: {', '.join(sorted(self._unknown))}")
        late = sum(b.arrival_s < a.arrival_s for a, b in itertools.pairwise(requests))
        if late:
            notes.append(f"{late:,} arrivals were out of order; sorted")
            requests.sort(key=lambda it: it.arrival_s)
        begin = requests[0].arrival_s
        if begin:
            requests = [replace(it, arrival_s=round(it.arrival_s - begin, 6)) for it in requests]
        try:
            size = self._size.found()
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from None
        stem = self._path.name.removesuffix(".gz").rpartition(".")[0] or self._path.name
        return Opened(Trace(stem, size or 0, tuple(requests)), tuple(notes), self._skipped)


def decode(text: str) -> dict[str, Any]:
    """A JSON object; raises BadRecord."""
    try:
        record = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRecord("line", text.strip(), f"not JSON ({error}); write one JSON object a line") from None
    if not isinstance(record, dict):
        raise BadRecord("line", record, "not a JSON object")
    return record


def _cells(text: str) -> list[str]:
    try:
        return [it.strip() for it in next(csv.reader([text.strip("\r\n")], strict=True), [])]
    except csv.Error as error:
        raise BadRecord("line", text.strip(), f"not CSV ({error})") from None
