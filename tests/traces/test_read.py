"""Traces of every format are read, and what cannot be read is refused with the file, line, field, value and remedy."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.traces import opening
from headwater.traces.fields import NUMBER_MAX
from headwater.traces.model import Trace, TraceRequest
from headwater.traces.read import read
from headwater.traces.write import as_lines, write

GOOD = {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}


def save(folder: Path, *records: dict[str, Any] | str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(it if isinstance(it, str) else json.dumps(it) for it in records) + "\n")
    return path


def test_mooncake_lines_are_read(tmp_path: Path) -> None:
    opened = read(save(tmp_path, GOOD, GOOD | {"timestamp": 2500, "input_length": 1400, "hash_ids": [1, 3, 4]}))
    assert opened.trace == Trace(
        "trace",
        512,
        (TraceRequest(0.0, 700, 5, (1, 2)), TraceRequest(1.5, 1400, 5, (1, 3, 4))),
    )
    assert opened.notes == () and opened.skipped == 0


def test_bailian_lines_are_in_seconds_and_form_sessions(tmp_path: Path) -> None:
    def turn(chat: int, parent: int, at_s: float, number: int) -> dict[str, Any]:
        lengths = {"input_length": 40, "output_length": 9, "hash_ids": [1, 2, 2 + chat], "type": "text"}
        return {"chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, "turn": number, **lengths}

    opened = read(save(tmp_path, turn(1, -1, 0.5, 1), turn(2, -1, 1.0, 1), turn(3, 1, 61.125, 2), turn(4, 3, 99, 3)))
    assert opened.trace.block_tokens == 16
    assert [it.session for it in opened.trace.requests] == ["1", "2", "1", "1"]
    assert [it.arrival_s for it in opened.trace.requests] == [0.0, 0.5, 60.625, 98.5]
    assert [(it.turn, it.kind) for it in opened.trace.requests] == [(1, "text"), (1, "text"), (2, "text"), (3, "text")]
    assert read(tmp_path / "trace.jsonl", time_unit="ms").trace.requests[2].arrival_s == pytest.approx(0.060625)


CSV = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,3180,8\n"
)


@pytest.mark.parametrize("packed", [False, True])
def test_azure_csv_is_read_plain_or_gzip(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("azure.csv.gz" if packed else "azure.csv")
    path.write_bytes(gzip.compress(CSV.encode(), mtime=0) if packed else CSV.replace("\n", "\r\n").encode())
    opened = read(path)
    assert opened.trace == Trace("azure", 0, (TraceRequest(0.0, 4808, 10), TraceRequest(1.0, 3180, 8)))
    assert opened.notes == ()


def test_optional_fields_a_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    more = {"session": "s", "turn": 2, "type": "chat", "tenant": 7, "priority": -1, "colour": "red"}
    opened = read(save(tmp_path, "\ufeff" + json.dumps(GOOD | more), "", "  "))
    request = opened.trace.requests[0]
    assert (request.session, request.turn, request.kind, request.tenant, request.priority) == ("s", 2, "chat", "7", -1)
    assert opened.notes == ("fields that mean nothing here: 'colour'",)


def test_unsorted_arrivals_are_sorted_and_noted(tmp_path: Path) -> None:
    times = [3000, 1000, 1000, 2000]
    opened = read(save(tmp_path, *(GOOD | {"timestamp": at, "output_length": n} for n, at in enumerate(times))))
    assert [(it.arrival_s, it.output_tokens) for it in opened.trace.requests] == [(0, 1), (0, 2), (1, 3), (2, 0)]
    assert opened.notes == ("1 arrivals were out of order; sorted",)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line = '{': not JSON"),
        ('{"timestamp": ' + "[" * 100_000, f'line = \'{{"timestamp": {"[" * 42}...: not JSON (maximum recursion depth'),
        ("[]", "line = []: not a JSON object"),
        ('{"input_length": 3}', "timestamp = None: is missing; write a time"),
        (GOOD | {"timestamp": -1}, "timestamp = -1: write a time"),
        (GOOD | {"timestamp": "2026"}, "timestamp = '2026': write a time"),
        (GOOD | {"timestamp": True}, "timestamp = True"),
        (GOOD | {"input_length": 0, "hash_ids": []}, "input_length = 0: write a whole number from 1"),
        (GOOD | {"input_length": 700.5}, "input_length = 700.5"),
        (GOOD | {"input_length": 1 << 31}, "input_length = 2147483648: write a whole number from 1 to 1073741824"),
        (GOOD | {"output_length": -1}, "output_length = -1"),
        (GOOD | {"output_length": True}, "output_length = True"),
        (GOOD | {"hash_ids": "1,2"}, "hash_ids = '1,2': write a list"),
        (GOOD | {"hash_ids": [1, "x\n\x1b"]}, r"hash_ids = 'x\n\x1b': its items are whole numbers"),
        (GOOD | {"hash_ids": [1, -2]}, "hash_ids = -2"),
        (GOOD | {"hash_ids": [1, NUMBER_MAX + 1]}, f"hash_ids = {NUMBER_MAX + 1}"),
        (GOOD | {"hash_ids": [1, 2, 3]}, "hash_ids = '3 for 700 tokens': these are blocks of 234 to 349 tokens"),
        (GOOD | {"session": ["a"]}, "session = ['a']: write text"),
        (GOOD | {"turn": -1}, "turn = -1"),
        (GOOD | {"tenant": "x" * 2000}, "tenant = 'xxx"),
        (GOOD | {"priority": "high"}, "priority = 'high'"),
        (GOOD | {"block_tokens": 16}, "block_tokens = 16: elsewhere it is 350 to 699"),
    ],
)
def test_a_bad_line_is_refused_or_skipped(tmp_path: Path, line: dict[str, Any] | str, said: str) -> None:
    path = save(tmp_path, GOOD, GOOD, line, GOOD | {"timestamp": 3000})
    with pytest.raises(ConfigError, match=re.escape(f"{path}, line 3: {said}")) as refused:
        read(path)
    assert "--skip-bad" in str(refused.value) and "\n" not in str(refused.value)
    opened = read(path, skip_bad=True)
    assert len(opened.trace.requests) == 3 and opened.skipped == 1
    assert opened.notes[0].startswith(f"1 bad lines were skipped, among them: {path}, line 3: {said}")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2023-11-16 18:17:03,1", "columns = 2: the header has 3"),
        ("yesterday,1,2", "TIMESTAMP = 'yesterday': write an ISO 8601 time"),
        ("2023-11-16 18:17:03,many,2", "ContextTokens = 'many': write a whole number"),
        ("2023-11-16 18:17:03,0,2", "ContextTokens = 0"),
        ("2023-11-16 18:17:03,1,-2", "GeneratedTokens = '-2'"),
        ('"2023', "line = '\"2023': not CSV"),
    ],
)
def test_a_bad_row_is_refused(tmp_path: Path, row: str, said: str) -> None:
    path = save(tmp_path, *CSV.split("\n")[:2], row, name="a.csv")
    with pytest.raises(ConfigError, match=re.escape(f"{path}, line 3: {said}")):
        read(path)
    assert read(path, skip_bad=True).skipped == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty; a trace has a request a line"),
        (b"\n\n", "empty"),
        (
            b"a,b\n1,2\n",
            "line 1: 'a,b': neither a JSON object nor a header with TIMESTAMP,ContextTokens,GeneratedTokens",
        ),
        (b"TIMESTAMP,ContextTokens\n", "missing: GeneratedTokens"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (b'{"timestamp": 1}\n\xff\xfe\n', "line 2: not UTF-8"),
        (gzip.compress(CSV.encode() * 50, mtime=0)[:60], "trace: Compressed file ended"),
        (b"\x1f\x8bnonsense", "name a file that can be read, plain or gzip"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        read(path, skip_bad=True)
    assert str(path) in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=f"{path}: .*; name a file"):
            read(path)
    with pytest.raises(ConfigError, match="time unit 'h': write ms or s"):
        read(tmp_path, time_unit="h")


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LINE_BYTES_MAX", 1 << 20)
    path = tmp_path / "zeros.gz"
    path.write_bytes(gzip.compress(b"0" * (3 << 20), mtime=0))
    with pytest.raises(ConfigError, match="line 1: longer than 1 MiB"):
        read(path)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512, 1024])
def test_the_block_size_is_found_out(tmp_path: Path, size: int) -> None:
    lengths = [size, size + 1, 5 * size - 3, 40 * size]
    lines = [GOOD | {"input_length": it, "hash_ids": list(range(-(-it // size)))} for it in lengths]
    assert read(save(tmp_path, *lines)).trace.block_tokens == size


def test_an_odd_block_size_is_found_out_where_lengths_leave_no_other(tmp_path: Path) -> None:
    lines = [GOOD | {"input_length": it, "hash_ids": [1, 2]} for it in (200, 101)]
    assert read(save(tmp_path, *lines)).trace.block_tokens == 100


def test_an_ambiguous_block_size_has_to_be_said(tmp_path: Path) -> None:
    path = save(tmp_path, GOOD | {"input_length": 20, "hash_ids": [1]})
    with pytest.raises(ConfigError, match=rf"{path}: block size: several .*\(32, 64, .*as in --block-tokens 512"):
        read(path)
    assert read(path, block_tokens=64).trace.block_tokens == 64
    with pytest.raises(ConfigError, match=r"line 1: hash_ids = '1 for 20 tokens'.*but the block size asked for is 16"):
        read(path, block_tokens=16)
    with pytest.raises(ConfigError, match="block size 0: write"):
        read(path, block_tokens=0)
    odd = [GOOD | {"input_length": it, "hash_ids": [1, 2]} for it in (64, 65)]
    with pytest.raises(ConfigError, match=r"several agree with every line \(all from 33 to 63\)"):
        read(save(tmp_path, *odd))


def test_a_trace_is_written_and_read_back(tmp_path: Path) -> None:
    requests = (
        TraceRequest(0.0, 20, 0, (0, 1)),
        TraceRequest(0.125, 33, 4, (0, 2, 9), "s", 1, "chat", "blue", 3),
        TraceRequest(9.0, 5, 1),
    )
    trace = Trace("out", 16, requests)
    write(trace, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl").trace == trace
    assert [it.name for it in tmp_path.iterdir()] == ["out.jsonl"]
    more = (
        '{"timestamp":125,"input_length":33,"output_length":4,"hash_ids":[0,2,9],"session":"s","turn":1,"type":"chat",'
    )
    more += '"tenant":"blue","priority":3}\n'
    assert list(as_lines(trace)) == [
        '{"timestamp":0,"input_length":20,"output_length":0,"hash_ids":[0,1]}\n',
        more,
        '{"timestamp":9000,"input_length":5,"output_length":1,"hash_ids":[]}\n',
    ]


def test_a_block_size_that_lengths_do_not_tell_is_written(tmp_path: Path) -> None:
    trace = Trace("out", 64, (TraceRequest(0.0, 5, 1), TraceRequest(0.0, 20, 1, (7,)), TraceRequest(0.0, 9, 1, (8,))))
    lines = list(as_lines(trace))
    assert ["block_tokens" in it for it in lines] == [False, True, False]
    write(trace, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl").trace == trace


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "none" / "out", tmp_path / "folder"):
        with pytest.raises(ConfigError, match=f"{target}: .*name a file that can be written"):
            write(Trace("out", 16, ()), target)
    assert [it.name for it in tmp_path.iterdir()] == ["folder"]


def test_what_is_there_and_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    nothing = tmp_path / "null"
    nothing.symlink_to("/dev/null")
    write(Trace("out", 16, ()), nothing)
    assert nothing.is_symlink() and [it.name for it in tmp_path.iterdir()] == ["null"]
