"""Clients that mean harm: bytes as they like on sockets of their own, forged headers and bodies, and looks at what a
running Conductor has open and holds.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.conductor.engine import Received

WITHIN_S = 10.0
ANSWERED_S = 0.25
"""An answer to a request that is whole comes within this, or the request is not whole."""

TYPED: Mapping[str, tuple[type, ...]] = {
    "model": (str,), "stream": (bool,), "stream_options": (dict,), "cache_salt": (str,), "return_token_ids": (bool,),
    "messages": (list,), "tools": (list,), "stop": (str, list), "chat_template_kwargs": (dict,), "vllm_xargs": (dict,),
}  # fmt: skip
WHOLE: Mapping[str, tuple[int, int]] = {
    "n": (1, 128), "max_tokens": (1, 1 << 31), "max_completion_tokens": (1, 1 << 31), "best_of": (1, 128),
}  # fmt: skip
NEVER = ("kv_transfer_params", "ec_transfer_params", "kv_hints", "request_id", "chat_template", "priority")
"""Of clients, to instances without priorities."""
HEADERS = frozenset({
    "host", "content-type", "content-length", "accept-encoding", "x-request-id", "traceparent", "tracestate", "baggage",
    "x-session-id",
})  # fmt: skip
"""The only ones that an instance gets."""


class Told(NamedTuple):
    """One answer off a socket."""

    status: int
    headers: dict[str, str]
    body: bytes


def message(body: bytes, path: str = "/v1/chat/completions", more: str = "", method: str = "POST") -> bytes:
    """A well-formed request."""
    return f"{method} {path} HTTP/1.1\r\nHost: a\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body


async def told(reader: asyncio.StreamReader, within_s: float = WITHIN_S, *, to_head: bool = False) -> Told:
    """The next answer, `to_head` for one to HEAD; raises IncompleteReadError where there is none."""
    async with asyncio.timeout(within_s):
        return await _told(reader, to_head=to_head)


async def _told(reader: asyncio.StreamReader, *, to_head: bool) -> Told:
    head = b"HTTP/1.1 100"
    while head.startswith(b"HTTP/1.1 100"):
        head = await reader.readuntil(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (it.partition(":") for it in lines)}
    body = b""
    if to_head:
        pass
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        body = await reader.read()
    return Told(int(line.split(" ")[1]), headers, body)


async def all_told(port: int, *pieces: bytes, within_s: float = WITHIN_S) -> list[Told]:
    """Every answer to what is sent on one connection, until the other side closes or says no more for a moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: list[Told] = []
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(within_s):
            while True:
                found.append(await told(reader, within_s if not found else ANSWERED_S))
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        return found
    finally:
        writer.close()


def check_forwarded(received: Received, *, strict: bool = True) -> None:
    """What we promise of everything that an instance is sent; `strict` is for instances that know no priorities."""
    if received.method != "POST":
        assert not received.body
        return
    names = set(received.headers)
    asks = received.path.endswith("completions")
    assert names <= HEADERS | {"accept"}, f"headers {names - HEADERS}"
    assert received.headers.get("accept-encoding", "identity") == "identity"
    assert len(received.names) == len(names), "a header is there twice"
    assert not asks or received.headers["x-request-id"].startswith("hw-")
    fields = json.loads(received.body, parse_constant=_no_constant)
    assert type(fields) is dict
    for name in NEVER if strict else NEVER[:-1]:
        assert fields.get(name) is None, f"{name} came through"
    more = fields.get("vllm_xargs") or {}
    assert not [it for it in more if it.startswith(("kv_", "ec_", "headwater"))], "vllm_xargs came through"
    for name, kinds in TYPED.items():
        assert fields.get(name) is None or type(fields[name]) in kinds, f"{name} is {type(fields[name])}"
    for name, (low, high) in WHOLE.items():
        value = fields.get(name)
        if value is not None and not (name == "best_of" and "prompt" not in fields):
            assert type(value) in (int, float) and value == int(value) and low <= value <= high, name
    if received.path.startswith("/v1/chat"):
        assert fields["messages"] and all(type(it) is dict and type(it["role"]) is str for it in fields["messages"])
        assert all(type(it) is dict for it in fields.get("tools") or ())
    elif asks and fields.get("prompt_embeds") is None:
        assert type(fields["prompt"]) in (str, list) and (fields["prompt"] or fields["prompt"] == "")


def first_wins(body: bytes) -> Any:
    """A body as somebody reads it for whom the first of equal keys counts."""
    return json.loads(body, object_pairs_hook=lambda pairs: dict(reversed(pairs)))


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def plain_reply(received: Received) -> bytes | None:
    """An instance's answer to anything: two events or a small body; nothing for what is not a request for answers."""
    if received.path == "/tokenize":
        return whole(200, b'{"tokens":[1,2,3],"count":3,"max_model_len":2048}')
    if received.method != "POST":
        return None
    if not json.loads(received.body).get("stream"):
        return whole(200, b'{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}')
    event = b'data: {"id":"x","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)


def whole(status: int, body: bytes, *lines: bytes) -> bytes:
    """An instance's answer in one piece, with these header lines."""
    head = [b"HTTP/1.1 %d X" % status, b"content-type: application/json", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


@contextmanager
def listening() -> Iterator[tuple[int, Callable[[], int]]]:
    """A port where nobody has any business, and how many came there nevertheless."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        count, ended = 0, threading.Event()

        def accept() -> None:
            nonlocal count
            while not ended.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                count += 1
                connection.close()

        server.settimeout(0.05)
        thread = threading.Thread(target=accept, name="catch-all")
        thread.start()
        try:
            yield server.getsockname()[1], lambda: count
        finally:
            ended.set()
            thread.join()


# ---- what a process has open


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for it in found:
        try:
            tasks = list(Path(f"/proc/{it}/task").iterdir())
            found += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # it ended meanwhile
            continue
    return found


def sockets_of(pids: Sequence[int]) -> set[str]:
    """The inodes of their sockets."""
    found = set()
    for pid in pids:
        for it in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(it.readlink())
            except OSError:  # closed meanwhile
                continue
            if match := re.fullmatch(r"socket:\[(\d+)\]", target):
                found.add(match[1])
    return found


def tcp_listeners(pids: Sequence[int]) -> list[tuple[str, int]]:
    """(address in hex as the kernel writes it, port) of each listening TCP socket, and bound UDP ones."""
    inodes, found = sockets_of(pids), []
    for name, states in (("tcp", {"0A"}), ("tcp6", {"0A"}), ("udp", {"07", "01"}), ("udp6", {"07", "01"})):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[9] in inodes and columns[3] in states:
                address, _, port = columns[1].partition(":")
                found.append((address, int(port, 16)))
    return found


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def unix_listeners(pids: Sequence[int]) -> list[str]:
    """Names of listening Unix sockets; abstract ones begin with @."""
    inodes, found = sockets_of(pids), []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        listens = int(columns[3], 16) & 0x10000
        if columns[6] in inodes and listens:
            found.append(columns[7] if len(columns) > 7 else "")
    return found


def mode_of(path: Path) -> int:
    """Its permissions."""
    return stat.S_IMODE(path.stat().st_mode)


def rss_bytes(pid: int, field: str = "VmRSS") -> int:
    """Of a process; VmHWM is the most it ever had."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def forget_peak(pid: int) -> None:
    """VmHWM begins anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Mann-Whitney: the chance that one of `hits` takes longer than one of `misses`, ties halved."""
    ranked = sorted([(it, 0) for it in hits] + [(it, 1) for it in misses])
    below, wins, at = 0, 0.0, 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        ours = sum(which == 0 for _, which in ranked[at:end])
        theirs = end - at - ours
        wins += ours * (below + theirs / 2)
        below += theirs
        at = end
    return wins / (len(hits) * len(misses))
