"""The load kit of `headwater bench proxy`: prompts, the engine that computes nothing, the clients, the splice."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headwater.bench import proxy_client, proxy_origin, proxy_systems
from headwater.bench.proxy_client import WrongAnswer, body_of, check_stream, events_of
from headwater.bench.proxy_prompts import Prompts, http_request
from headwater.bench.proxy_systems import SPLICE, Place, Running, place, process_cpu_s, tree

MODEL = Path("/no/model")


def body(request: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request[request.index(b"\r\n\r\n") + 4 :])
    return found


# ---- prompts


@pytest.mark.parametrize("kind", ["text", "ids"])
@pytest.mark.parametrize(("size", "shared"), [(600, 0.7), (3600, 0.7), (3600, 0.0), (24_000, 0.7)])
def test_requests_have_the_size_and_are_all_different(kind: str, size: int, shared: float) -> None:
    requests = Prompts(kind, size, shared).requests(300)
    assert len(set(requests)) == 300
    for it in requests:
        assert abs(len(it) - it.index(b"\r\n\r\n") - 4 - size) <= 32
        assert http_request("/v1/completions", json.dumps(body(it), separators=(",", ":")).encode()) == it


def test_the_same_seed_makes_the_same_requests_and_another_one_others() -> None:
    assert Prompts(seed=3).requests(20) == Prompts(seed=3).requests(20)
    assert not set(Prompts(seed=3).requests(20)) & set(Prompts(seed=4).requests(20))


def test_prompts_share_prefixes_by_zipfs_law_and_nothing_else() -> None:
    prompts = [str(body(it)["prompt"]) for it in Prompts("text", 3600, shared=0.7, families=8).requests(400)]
    heads = Counter(it[: 3600 * 6 // 10] for it in prompts)
    assert len(heads) == 8
    assert heads.most_common(1)[0][1] > 2 * min(heads.values())
    assert len({it[: 3600 * 3 // 4] for it in prompts}) == 400


def test_ids_are_of_the_vocabulary() -> None:
    for request in Prompts("ids", 3600).requests(5):
        ids = body(request)["prompt"]
        assert 500 < len(ids) < 700
        assert 0 <= min(ids) <= max(ids) < 40_000


# ---- the engine reads requests by hand


def test_a_request_is_taken_only_when_it_is_whole() -> None:
    (request,) = Prompts("text", 400).requests(1)
    for cut in range(len(request)):
        assert proxy_origin.split(request[:cut]) is None
    path, found, rest = proxy_origin.split(request + b"GET ") or (b"", b"", b"")
    assert (path, rest) == (b"/v1/completions", b"GET ")
    assert found == request[-len(found) :]
    assert json.loads(found) == body(request)


def test_a_chunked_request_is_understood() -> None:
    data = b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert proxy_origin.split(data[:-1]) is None
    path, found, rest = proxy_origin.split(data) or (b"", b"", b"")
    assert (path, rest) == (b"/x", b"")
    assert b"{}" in found


@pytest.mark.parametrize(("said", "count"), [(b'"max_tokens":400,', 400), (b'"max_tokens": 7}', 7), (b"{}", 16)])
def test_how_many_events_are_asked_for(said: bytes, count: int) -> None:
    assert proxy_origin.number(said, b"max_tokens", 16) == count


# ---- real processes


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, int]]:
    with place(tmp_path_factory.mktemp("kit"), MODEL) as where:
        (port,) = where.origin(1)
        yield where, port


def test_the_engine_answers_what_routers_ask(stage: tuple[Place, int]) -> None:
    asked = [("GET", "/health"), ("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions/render")]
    connection = http.client.HTTPConnection("127.0.0.1", stage[1], timeout=5)
    found = []
    for method, path in asked:
        connection.request(method, path, b"{}" if method == "POST" else None)
        answer = connection.getresponse()
        answer.read()
        found.append(answer.status)
    connection.close()
    assert found == [200, 200, 200, 404]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_are_told_only_where_they_are_asked_for(stage: tuple[Place, int], path: str) -> None:
    found = {}
    for ids in (False, True):
        connection = http.client.HTTPConnection("127.0.0.1", stage[1], timeout=5)
        asked = {"stream": True, "max_tokens": 3, "return_token_ids": ids}
        connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
        events = [it for it in connection.getresponse().read().split(b"\n\n") if it]
        connection.close()
        assert events[-1] == b"data: [DONE]"
        choices = [json.loads(it.removeprefix(b"data: "))["choices"][0] for it in events[:-1]]
        assert choices[-1]["finish_reason"] == "length"
        found[ids] = [it.get("token_ids") for it in choices]
        assert ["prompt_token_ids" in it for it in choices] == [ids, False, False]
    assert found == {False: [None] * 3, True: [[300], [301], [302]]}


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_prompts_are_told_as_ids_and_usage_where_it_is_asked_for(stage: tuple[Place, int], kind: str) -> None:
    (request,) = Prompts(kind, 600, stream=True, max_tokens=2).requests(1)
    asked = body(request) | {"return_token_ids": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", stage[1], timeout=5)
    connection.request("POST", "/v1/completions", json.dumps(asked, separators=(",", ":")))
    events = [json.loads(it[6:]) for it in connection.getresponse().read().split(b"\n\n")[:-2]]
    connection.close()
    assert [len(it["choices"]) for it in events] == [1, 1, 0]
    assert events[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
    told = events[0]["choices"][0]["prompt_token_ids"]
    assert told == asked["prompt"] if kind == "ids" else len(told) > 100


def play(port: int, do: str, count: int, *, connections: int = 4, chunks: int = 5, **more: Any) -> dict[str, Any]:
    prompts = Prompts(stream=do != "unary", max_tokens=chunks)
    turn = {"do": do, "port": port, "connections": connections, "requests": count, "prompts": asdict(prompts)}
    return proxy_client.take(json.dumps({**turn, **more}))


@pytest.fixture(scope="module")
def doors(stage: tuple[Place, int]) -> dict[str, int]:
    return {"direct": stage[1], "splice": stage[0].start(SPLICE, [stage[1]]).port}


@pytest.mark.parametrize("door", ["direct", "splice"])
def test_clients_get_all_whole_answers(doors: dict[str, int], door: str) -> None:
    found = play(doors[door], "unary", 200)
    assert found["requests"] == 200
    assert 0 < found["latency"]["p50"] <= found["latency"]["p99"] <= found["latency"]["max"] < found["wall_s"]


@pytest.mark.parametrize("door", ["direct", "splice"])
def test_clients_get_all_events(doors: dict[str, int], door: str) -> None:
    found = play(doors[door], "streams", 12, chunks=6)
    assert (found["requests"], found["chunks"]) == (12, 72)
    assert found["wall_s"] >= 3 * 5 * proxy_origin.GAP_S
    assert 0 < found["lag"]["p50"] < found["ttft"]["max"] < found["wall_s"]


def test_an_open_loop_asks_at_its_own_pace_and_counts_from_when_it_was_due(doors: dict[str, int]) -> None:
    found = play(doors["direct"], "open", 60, chunks=1, rate=300.0, connections=8)
    assert found["requests"] == 60
    assert 0.1 < found["wall_s"] < 2.0
    crowded = play(doors["direct"], "open", 30, chunks=4, rate=300.0, connections=1)
    assert crowded["ttft"]["max"] > 10 * 3 * proxy_origin.GAP_S, "waiting for a connection is part of the time"


class Wrong(threading.Thread):
    """Answers every request on one connection with the same bytes, then closes it."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]

    def run(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(self._answer)
        self._socket.close()


@pytest.mark.parametrize(
    ("do", "answer", "said"),
    [
        ("unary", proxy_origin.whole("503 Busy", b"{}"), "status 503"),
        ("unary", proxy_origin.whole("200 OK", b'{"error":{}}'), "status 200"),
        ("unary", b"", "closed after 0 pieces"),
        ("unary", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "closed after 1 pieces"),
        ("streams", proxy_origin.STREAM_HEAD + b"0\r\n\r\n", "0 of 5 events"),
        ("streams", proxy_origin.whole("429 No", b"{}"), "status 429"),
    ],
    ids=["busy", "error", "nothing", "short", "empty", "refused"],
)
def test_a_wrong_answer_fails_the_turn(do: str, answer: bytes, said: str) -> None:
    server = Wrong(answer)
    server.start()
    found = play(server.port, do, 1, connections=1)
    server.join()
    assert said in found["failed"]


# ---- streams are taken apart and checked


def stream(count: int = 4, *, chat: bool = False) -> list[bytes]:
    """The events of a whole stream."""
    form = proxy_origin.CHAT if chat else proxy_origin.COMPLETION
    return [form % (it, b"null", b"", time.monotonic_ns()) for it in range(count)] + [b"data: [DONE]\n\n"]


def framed(pieces: list[bytes]) -> bytes:
    return proxy_origin.STREAM_HEAD + b"".join(b"%x\r\n%b\r\n" % (len(it), it) for it in [*pieces, b""])


def arrive(data: bytes, *cuts: int) -> list[tuple[int, bytes]]:
    edges = [0, *cuts, len(data)]
    now = time.monotonic_ns()
    return [(now + index, data[a:b]) for index, (a, b) in enumerate(itertools.pairwise(edges))]


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_is_read_however_it_was_cut(chat: bool) -> None:
    events = b"".join(stream(3, chat=chat))
    for size in (1, 7, 100, 10_000):
        data = framed([events[at : at + size] for at in range(0, len(events), size)])
        for cut in range(1, len(data), 41):
            assert len(check_stream(arrive(data, cut), 3)) == 3


def test_an_event_counts_when_its_last_byte_has_come() -> None:
    data = framed(stream(2))
    first = data.index(b"\n\n") + 2
    pieces = arrive(data, first - 1, first + 2)
    assert [at - pieces[0][0] for at, _ in events_of(pieces)] == [1, 2, 2]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda it: it[1:],
        lambda it: [it[0], *it],
        lambda it: [it[1], it[0], *it[2:]],
        lambda it: it[:-1],
        lambda it: [*it[:2], it[2][:-2], *it[3:]],
        lambda it: [*it[:-1], b'data: {"error":{}}\n\n', it[-1]],
    ],
    ids=["first missing", "doubled", "swapped", "no end", "joined", "error"],
)
def test_a_stream_with_something_missing_or_doubled_is_refused(spoil: Any) -> None:
    with pytest.raises((WrongAnswer, ValueError)):
        check_stream(arrive(framed(spoil(stream()))), 4)


def test_an_answer_with_a_length_has_no_framing() -> None:
    assert [it for _, it in body_of(arrive(proxy_origin.whole("200 OK", b"{}")))] == [b"{}"]


# ---- CPU time and memory of others

SPIN = """
import subprocess, sys, time
def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until: pass
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
spin(0.2)
print("spun", flush=True)
sys.stdin.read()
child.stdin.close()
child.wait()
"""


def test_cpu_time_is_that_of_the_kernels_own_count_and_of_all_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = process_cpu_s(process.pid)
        fields = Path(f"/proc/{process.pid}/stat").read_text("ascii").rpartition(")")[2].split()
        ticks = (int(fields[11]) + int(fields[12])) / 100
        assert found >= 0.2
        assert abs(found - ticks) <= 0.03
        assert len(tree(process.pid)) == 2
        running = Running(0, type("Child", (), {"group": process.pid})())
        assert running.cpu_s() > found
        assert running.memory_bytes() > 1 << 20
        assert running.threads() == 2
        assert process.stdin is not None
        process.stdin.close()
    assert process_cpu_s(process.pid) == 0.0


def test_a_proxy_that_does_not_start_is_reported_with_its_last_words(stage: tuple[Place, int]) -> None:
    def command(ports: object, port: int, folder: Path, model: Path) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no such policy')"]

    with pytest.raises(proxy_systems.UnavailableError, match="no such policy"):
        stage[0].start(proxy_systems.System("broken", "broken", command), [1])
