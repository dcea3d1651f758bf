"""Metrics and their HTTP door: a real node does scripted work, and every figure is compared with what was done."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.config import MIB, NodeConfig
from headwater.core.hashing import chunk_keys
from headwater.errors import ConfigError, RefusedError
from headwater.metrics import endpoint as door
from headwater.metrics.endpoint import Endpoint
from headwater.metrics.exposition import FETCH_SUMS, HOST, LEVELS, SUMS, TIER_LEVELS, TIER_SUMS, render
from headwater.node.client import Link, Session
from headwater.node.driver import Node
from headwater.node.server import EmbeddedServer
from headwater.types import ChunkKey, KVGroup, KVLayout, Namespace
from tests.node.conftest import eventually

CHUNK_TOKENS = 32
LAYOUT = KVLayout(CHUNK_TOKENS, (KVGroup(16, 32768, (4,)),))
CHUNK_BYTES = LAYOUT.slot_bytes(0)
SPACE = Namespace("m" * 32, "float16", "cpu.avx2.nhd", LAYOUT.fingerprint())
SECRET = "CANARY-7f3a"


@dataclass
class Running:
    """A node with its door, and clients of it."""

    address: str
    server: EmbeddedServer
    endpoint: Endpoint

    def client(self, namespace: Namespace = SPACE, name: str = "a", *, maps: bool = False) -> Session:
        return Session(Link(self.address, name, maps=maps, connect_s=5, call_s=5), namespace, LAYOUT)

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.endpoint.url.removeprefix("http://"), timeout=10)
        try:
            connection.request(method, path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def figures(self) -> dict[str, float]:
        return figures(self.get("/metrics")[1])


def figures(text: str) -> dict[str, float]:
    """Every headwater sample, summed over namespaces; other labels stay in the name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for it in family.samples:
            labels = [f"{name}={it.labels[name]}" for name in ("kind", "verb", "le") if name in it.labels]
            if it.name.startswith("headwater_") and not it.name.endswith("_info"):
                name = ",".join([it.name.removeprefix("headwater_"), *labels])
                found[name] = found.get(name, 0) + it.value
    return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    address = f"unix:{tmp_path}/node.sock"
    config = NodeConfig(socket=address, host_memory=8 * MIB, slab=2 * MIB, drain_s=0.1, prefault=False)
    server = EmbeddedServer(Node(config), address)
    endpoint = Endpoint("127.0.0.1", 0)
    endpoint.start(server.server.ask)
    yield Running(address, server, endpoint)
    endpoint.close()
    server.close()


def prompt(seed: int, chunks: int, namespace: Namespace = SPACE) -> list[ChunkKey]:
    tokens = random.Random(seed).choices(range(50000), k=chunks * CHUNK_TOKENS)
    return chunk_keys(namespace.root(), tokens, CHUNK_TOKENS)


def save(client: Session, keys: list[ChunkKey], failed: tuple[int, ...] = ()) -> int:
    it = client.reserve(keys)
    if it.ticket:
        assert client.done(it.ticket, failed=failed)
    return it.covered


# ---------------------------------------------------------------- figures


def test_every_figure_agrees_with_a_scripted_workload(running: Running) -> None:
    client = running.client()
    capacity = 8 * MIB // CHUNK_BYTES
    assert capacity == 32
    first, second = prompt(1, 20), prompt(2, 20)
    assert client.match(first).chunks == 0
    assert save(client, first) == 20
    assert client.match(first).chunks == 20
    assert client.match(first, counts=False).chunks == 20
    assert save(client, second) == 20  # evicts 8 of the first
    kept = client.match(first).chunks
    assert kept == 12
    assert save(client, prompt(3, 3), failed=(1,)) == 3  # evicts 3; stores 1, fails 2
    load = client.load(second)
    pending = client.reserve(prompt(4, 2))  # evicts 2 more of the first, which nobody reads
    seen = running.figures()
    asked = 20 + 20 + 20
    assert seen["lookup_tokens_total"] == asked * CHUNK_TOKENS
    assert seen["hit_tokens_total"] == (20 + kept) * CHUNK_TOKENS
    assert seen["miss_tokens_total"] == (asked - 20 - kept) * CHUNK_TOKENS
    assert seen["hit_bytes_total"] == (20 + kept) * CHUNK_BYTES
    assert seen["stored_chunks_total"] == 20 + 20 + 1
    assert seen["stored_bytes_total"] == 41 * CHUNK_BYTES
    assert seen["failed_chunks_total"] == seen["failures_total,kind=failed_chunk"] == 2
    held = client.contains([*first, *second, *prompt(3, 3)]).count(True)
    assert seen["held_chunks"] == held
    assert seen["held_bytes"] == held * CHUNK_BYTES
    assert seen["evicted_chunks_total"] == 41 - held
    assert seen["evicted_bytes_total"] == (41 - held) * CHUNK_BYTES
    assert seen["deleted_chunks_total"] == seen["deleted_bytes_total"] == 0
    assert seen["pool_capacity_bytes"] == 8 * MIB
    assert seen["pool_taken_bytes"] == (held + 2) * CHUNK_BYTES
    assert seen["leases"] == 20
    assert (seen["tickets,kind=load"], seen["tickets,kind=save"]) == (1, 1)
    assert (seen["sessions"], seen["instances"], seen["draining"]) == (1, 1, 0)
    assert client.release([load.ticket, pending.ticket]) == 2
    assert not client.done(load.ticket)
    assert client.clear().deleted == held
    seen = running.figures()
    assert seen["held_bytes"] == seen["held_chunks"] == seen["pool_taken_bytes"] == seen["leases"] == 0
    assert seen["deleted_bytes_total"] == held * CHUNK_BYTES
    assert seen["deleted_chunks_total"] == held
    assert seen["failures_total,kind=unknown_ticket"] == 1
    assert (seen["tickets,kind=load"], seen["tickets,kind=save"]) == (0, 0)
    client.close()


@pytest.mark.parametrize("seed", range(3))
def test_conservation_over_random_work(running: Running, seed: int) -> None:
    print(f"seed={seed}")
    chance = random.Random(seed)
    spaces = [replace(SPACE, tenant="x"), replace(SPACE, tenant="y"), replace(SPACE, model="n" * 32)]
    clients = [running.client(space, f"c{index}") for index, space in enumerate(spaces)]
    asked = hits = 0
    open_tickets: list[tuple[Session, int]] = []
    for _ in range(100):
        which = chance.randrange(3)
        client = clients[which]
        keys = prompt(chance.randrange(6), chance.randrange(1, 16), spaces[which])
        match chance.randrange(5):
            case 0 | 1:
                hits += client.match(keys).chunks
                asked += len(keys)
            case 2:
                save(client, keys, failed=tuple(chance.sample(range(len(keys)), chance.randrange(2))))
            case 3:
                if ticket := (client.load(keys) if chance.random() < 0.5 else client.reserve(keys)).ticket:
                    open_tickets.append((client, ticket))
            case 4 if chance.random() < 0.1:
                client.clear()
        if len(open_tickets) > 2:
            holder, ticket = open_tickets.pop(0)
            holder.release([ticket])
        seen = running.figures()
        for unit in ("tokens", "bytes"):
            assert seen[f"hit_{unit}_total"] + seen[f"miss_{unit}_total"] == seen[f"lookup_{unit}_total"]
        for unit in ("bytes", "chunks"):
            left = seen[f"evicted_{unit}_total"] + seen[f"deleted_{unit}_total"]
            assert seen[f"stored_{unit}_total"] - left == seen[f"held_{unit}"]
        assert seen["lookup_tokens_total"] == asked * CHUNK_TOKENS
        assert seen["hit_tokens_total"] == hits * CHUNK_TOKENS
        assert seen["held_chunks"] * CHUNK_BYTES == seen["held_bytes"] <= seen["pool_taken_bytes"]
        assert seen["pool_taken_bytes"] <= seen["pool_capacity_bytes"]
    assert hits, "the workload never hit"
    assert seen["evicted_chunks_total"], "the workload never evicted"
    for client in clients:
        client.close()


def test_late_saves_and_loads_are_counted_and_quarantined(tmp_path: Path) -> None:
    now = [100.0]

    class Clock:
        def now(self) -> float:
            return now[0]

    config = NodeConfig(socket=f"unix:{tmp_path}/n.sock", host_memory=8 * MIB, slab=2 * MIB, prefault=False)
    node = Node(config, Clock())
    space = node.cache.add_space(SPACE, LAYOUT)
    keys = prompt(1, 4)
    saved = node.cache.reserve("a", space, None, keys, (), (0,), now[0])
    assert node.cache.done("a", saved.ticket, 0, (), now[0])
    node.cache.load("a", space, keys, 0, (0,), now[0])
    late = node.cache.reserve("a", space, None, prompt(2, 3), (), (0,), now[0])
    now[0] += 1000
    assert node.expire() == 2
    door_part = {"sessions": 0, "turned_away": 0, "protocol_errors": 0, "calls": {}}
    seen = figures(render(node.status() | door_part).decode())
    assert (seen["failures_total,kind=expired_load"], seen["failures_total,kind=expired_save"]) == (1, 1)
    assert seen["pool_quarantined_bytes"] == 3 * CHUNK_BYTES
    assert seen["pool_taken_bytes"] == 7 * CHUNK_BYTES
    assert seen["held_bytes"] == 4 * CHUNK_BYTES
    assert node.cache.done("a", late.ticket, 0, (), now[0])
    assert figures(render(node.status() | door_part).decode())["pool_quarantined_bytes"] == 0
    node.close()


def test_an_idle_node_has_flat_figures(running: Running) -> None:
    client = running.client()
    save(client, prompt(1, 4))
    client.match(prompt(1, 4))
    first = running.figures()
    second = running.figures()
    del first["uptime_seconds"], second["uptime_seconds"]
    assert first == second
    client.close()


def test_call_latencies_are_histograms_with_one_sample_a_call(running: Running) -> None:
    client = running.client()
    for _ in range(7):
        client.match(prompt(1, 4))
    seen = running.figures()
    assert seen["call_seconds_count,verb=match"] == seen["call_seconds_bucket,verb=match,le=+Inf"] == 7
    assert seen["call_seconds_count,verb=register"] == 1
    assert 0 < seen["call_seconds_sum,verb=match"] < 7
    by_bound = [value for name, value in seen.items() if name.startswith("call_seconds_bucket,verb=match")]
    assert by_bound == sorted(by_bound)
    assert by_bound[0] <= 7
    client.close()


def test_refusals_protocol_errors_and_sessions_are_counted(running: Running) -> None:
    first = running.client()
    link = Link(running.address, "b", maps=False, connect_s=5, call_s=5)
    with pytest.raises(RefusedError, match=r"namespace\.groups"):
        Session(link, replace(SPACE, groups="x"), LAYOUT)
    link.close()
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(running.address.removeprefix("unix:"))
    stranger.sendall(b"\xff\xff\xff\xffgarbage")
    stranger.settimeout(5)
    assert stranger.recv(10) == b""
    stranger.close()
    seen = running.figures()
    assert seen["failures_total,kind=refused"] == 1
    assert seen["failures_total,kind=protocol"] == 1
    first.close()


def test_metrics_say_nothing_about_prompts_tenants_or_salts(running: Running) -> None:
    space = replace(SPACE, tenant=f"{SECRET}-tenant", salt=f"{SECRET}-salt", adapter=f"{SECRET}-adapter")
    client = running.client(space, f"{SECRET}-instance")
    keys = prompt(1, 4, space)
    save(client, keys)
    client.load(keys)
    text = running.get("/metrics")[1] + running.get("/status")[1]
    assert SECRET not in text
    root = space.root().hex()
    assert root[:12] not in text
    for key in keys:
        assert key.hex()[:8] not in text
    assert SPACE.root().hex()[:12] in text, "the namespace without its secrets has a name"
    client.close()


def test_namespaces_that_differ_in_who_asks_are_one_series(running: Running) -> None:
    clients = [running.client(replace(SPACE, tenant=name), name) for name in ("x", "y")]
    for client, name in zip(clients, ("x", "y"), strict=True):
        save(client, prompt(1, 4, replace(SPACE, tenant=name)))
    text = running.get("/metrics")[1]
    assert text.count("headwater_held_chunks{") == 1
    assert figures(text)["held_chunks"] == 8
    (space,) = json.loads(running.get("/status")[1])["namespaces"]
    assert (space["held_chunks"], space["held_bytes"]) == (8, 8 * CHUNK_BYTES)
    for client in clients:
        client.close()


def test_every_figure_is_explained(running: Running) -> None:
    running.client().close()
    families = {it.name: it for it in text_string_to_metric_families(running.get("/metrics")[1])}
    assert {f"headwater_{name}" for name in [*SUMS, *LEVELS]} <= families.keys()
    assert {f"headwater_pool_{name}" for name in HOST} <= families.keys()
    assert {f"headwater_tier_{name}" for name in [*TIER_SUMS, *TIER_LEVELS]} <= families.keys()
    assert {f"headwater_fetches_{name}" for name in FETCH_SUMS} <= families.keys()
    for name, family in families.items():
        assert family.documentation, name


def test_tiers_show_what_went_down_and_came_up(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/node.sock"
    config = NodeConfig(socket=address, host_memory=4 * MIB, slab=2 * MIB, disk=f"{tmp_path}/kv:64MiB", prefault=False)
    server = EmbeddedServer(Node(config), address)
    client = Session(Link(address, "a", maps=True, connect_s=5, call_s=5), SPACE, LAYOUT)

    def tier() -> dict[str, float]:
        text = render(server.server.ask().result(5)).decode()
        samples = [it for family in text_string_to_metric_families(text) for it in family.samples]
        return {it.name.removeprefix("headwater_tier_"): it.value for it in samples if it.labels.get("name") == "disk"}

    def quiet() -> bool:
        return bool(server.server.ask().result(5)["quiet"])

    try:
        first, second = prompt(1, 12), prompt(2, 12)
        for keys in (first, second):  # the second pushes the first out of HOST, which is on the disk by then
            save(client, keys)
            eventually(quiet)
        assert tier()["written_bytes_total"] == 24 * CHUNK_BYTES
        assert tier()["read_bytes_total"] == 0
        assert client.match(first).chunks == 4
        eventually(lambda: not client.match(first, request="r").waiting)
        found = client.match(first, request="r")
        assert (found.chunks, found.disk, found.remote) == (12, 8, 0)
        seen = tier()
        assert seen["read_bytes_total"] == 8 * CHUNK_BYTES
        assert seen["hit_tokens_total"] == 8 * CHUNK_TOKENS
        assert (seen["well"], seen["full"], seen["moving_bytes"], seen["queued_chunks"]) == (1, 0, 0, 0)
        assert seen["used_bytes"] >= 24 * CHUNK_BYTES
        assert (seen["recovered_chunks"], seen["journal_broken"], seen["journal_failures_total"]) == (0, 0, 0)
        assert seen["journal_forgotten_chunks_total"] == 0
        assert seen["read_bytes_s"] > 0 < seen["write_bytes_s"]
    finally:
        client.close()
        server.close()


# ---------------------------------------------------------------- the door


def test_paths_and_methods(running: Running) -> None:
    assert running.get("/health") == (200, "ok\n")
    assert running.get("/ready") == (200, "ok\n")
    assert running.get("/metrics?name=x")[0] == 200
    assert json.loads(running.get("/status")[1])["draining"] is False
    assert running.get("/status", "HEAD") == (200, "")
    assert running.get("/")[0] == 404
    assert running.get("/metrics/")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert running.get("/metrics", method)[0] == 405


def exchange(running: Running, request: bytes) -> bytes:
    host, port = running.endpoint.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        while part := connection.recv(65536):
            reply += part
    return reply


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"garbage\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n", b"400"),
        (b"GET\x00 /metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 5000 + b"\r\n\r\n", b"200"),
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"", b"400"),
    ],
)
def test_bad_requests(running: Running, request_bytes: bytes, status: bytes) -> None:
    assert exchange(running, request_bytes).startswith(b"HTTP/1.1 " + status)
    assert running.get("/health")[0] == 200


def test_too_large_a_request_is_cut_off(running: Running) -> None:
    host, port = running.endpoint.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (3 * door.REQUEST_BYTES))
        try:
            assert connection.recv(12) == b"HTTP/1.1 431"
        except ConnectionResetError:  # the rest of what we sent met a closed door
            return


def test_slow_clients_neither_block_others_nor_stay(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "REQUEST_S", 1.0)
    host, port = running.endpoint.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port)), timeout=10) for _ in range(door.CONNECTIONS - 1)]
    for connection in slow:
        connection.sendall(b"GET /metr")
    assert running.get("/health") == (200, "ok\n")
    for connection in slow:
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass
        finally:
            connection.close()


def test_clients_that_do_not_read_do_not_stay(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "REQUEST_S", 1.0)
    monkeypatch.setattr(door, "CONNECTIONS", 1)
    monkeypatch.setattr(door, "render", lambda state: b"x" * (16 * MIB))
    host, port = running.endpoint.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert deaf.recv(8) == b"HTTP/1.1"
        assert running.get("/health")[0] == 503, "it has the only place"
        while running.get("/health")[0] != 200:
            pass


def test_more_connections_than_places_are_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "CONNECTIONS", 0)
    assert running.get("/health") == (503, "too many connections\n")


def test_a_node_that_does_not_answer_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "ANSWER_S", 0.05)
    endpoint = Endpoint("127.0.0.1", 0)
    endpoint.start(Future)
    running = Running("", None, endpoint)  # type: ignore[arg-type]
    for path in ("/health", "/ready", "/metrics", "/status"):
        assert running.get(path)[0] == 503
    assert running.get("/nowhere")[0] == 404
    endpoint.close()


def test_a_draining_node_is_alive_but_not_ready(running: Running) -> None:
    running.server.server.node.draining = True
    assert running.get("/health") == (200, "ok\n")
    assert running.get("/ready") == (503, "draining\n")


def test_after_its_end_a_node_answers_nothing(running: Running) -> None:
    running.server.close()
    assert running.get("/health")[0] == 503


def test_a_busy_port_is_refused(running: Running) -> None:
    port = int(running.endpoint.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"node\.metrics = 127\.0\.0\.1:{port}: .*in use; .*choose another port"):
        Endpoint("127.0.0.1", port)


def test_closing_cuts_open_connections_and_leaves_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    endpoint = Endpoint("127.0.0.1", 0)
    endpoint.start(Future)
    address = endpoint.url.removeprefix("http://").split(":")
    connection = socket.create_connection((address[0], int(address[1])), timeout=10)
    connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
    endpoint.close()
    endpoint.close()
    try:
        assert connection.recv(1) == b""
    except ConnectionResetError:
        pass
    finally:
        connection.close()
    assert threading.active_count() == before
    Endpoint(address[0], int(address[1])).close()
