"""Mooncake's indexer API: its fields, what is refused by name, what reaches registry and sight, and anything at all."""

from __future__ import annotations

import asyncio
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from headwater.conductor.control import indexer, replies, workers
from headwater.conductor.control.publishers import Publishers
from headwater.conductor.control.replies import Rejected
from headwater.conductor.tenants import new_key
from headwater.errors import RefusedError
from headwater.fleetfile.model import InstanceSpec
from tests.conductor.control.rig import Registry, Worker, drive, rig, tenant, until
from tests.conftest import seed_of

PUBLISHER: dict[str, Any] = {
    "endpoint": "tcp://127.0.0.1:5557",
    "replay_endpoint": "tcp://127.0.0.1:5600",
    "type": "vLLM",
    "modelname": "deepseek",
    "tenant_id": "default",
    "instance_id": "prefill-1",
    "block_size": 128,
    "dp_rank": 0,
    "url": "http://127.0.0.1:8000",
}
QUERY: dict[str, Any] = {"model": "m", "token_ids": [101, 15, 100], "block_size": 64, "tenant_id": "default"}
BY_HASH: dict[str, Any] = {"model": "m", "seq_hashes": [1234567890, 9876543210], "block_size": 64}
FOUND = {"longest_matched": 64, "GPU": 64, "CPU": 0, "DISK": 0, "DP": {"0": 64}}


def raw(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


# ---- fields


@pytest.mark.parametrize(
    ("kind", "fields", "code", "field"),
    [
        (indexer.Publisher, PUBLISHER | {"modelnam": "x"}, "unknown_field", "modelnam"),
        (indexer.Publisher, PUBLISHER | {"a\x1b[31m" + "b" * 999: 1}, "unknown_field", "a?[31m" + "b" * 58),
        (indexer.Publisher, {k: v for k, v in PUBLISHER.items() if k != "endpoint"}, "missing_field", "endpoint"),
        (indexer.Publisher, PUBLISHER | {"block_size": 0}, "wrong_value", "block_size"),
        (indexer.Publisher, PUBLISHER | {"block_size": "16"}, "wrong_value", "block_size"),
        (indexer.Publisher, PUBLISHER | {"dp_rank": -1}, "wrong_value", "dp_rank"),
        (indexer.Publisher, PUBLISHER | {"instance_id": ""}, "wrong_value", "instance_id"),
        (indexer.Publisher, PUBLISHER | {"instance_id": "x" * 257}, "wrong_value", "instance_id"),
        (indexer.Publisher, PUBLISHER | {"endpoint": "ipc:///tmp/x"}, "wrong_value", "endpoint"),
        (indexer.Publisher, PUBLISHER | {"endpoint": "tcp://a:1\nx"}, "wrong_value", "endpoint"),
        (indexer.Publisher, PUBLISHER | {"endpoint": "tcp://a:1;tcp://b:2"}, "wrong_value", "endpoint"),
        (indexer.Publisher, PUBLISHER | {"url": "file:///etc/passwd"}, "wrong_value", "url"),
        (indexer.Publisher, PUBLISHER | {"url": "http://a:1@b:2"}, "wrong_value", "url"),
        (indexer.Publisher, PUBLISHER | {"lora_name": "sql"}, "refused", "lora_name"),
        (indexer.Query, QUERY | {"token_ids": [1, -1]}, "wrong_value", "token_ids[1]"),
        (indexer.Query, QUERY | {"token_ids": [1, 1 << 32]}, "wrong_value", "token_ids[1]"),
        (indexer.Query, QUERY | {"token_ids": "abc"}, "wrong_value", "token_ids"),
        (indexer.Query, QUERY | {"lora_id": 3}, "refused", "lora_name"),
        (indexer.HashQuery, BY_HASH | {"seq_hashes": [1.5]}, "wrong_value", "seq_hashes[0]"),
        (indexer.HashQuery, BY_HASH | {"seq_hashes": ["xyz"]}, "wrong_value", "seq_hashes[0]"),
        (indexer.Gone, {"instance_id": "a", "colour": 1}, "unknown_field", "colour"),
        (indexer.Gone, [1], "wrong_value", None),
    ],
    ids=range(22),
)
def test_what_does_not_fit_is_named(kind: Any, fields: Any, code: str, field: str | None) -> None:
    with pytest.raises(Rejected) as raised:
        indexer.read(raw(fields), kind)
    assert (raised.value.status, raised.value.code, raised.value.field) == (422, code, field)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"nul"], ids=range(6))
def test_what_is_no_json_is_said(body: bytes) -> None:
    for kind in (indexer.Publisher, indexer.Gone, indexer.Query, indexer.HashQuery):
        with pytest.raises(Rejected) as raised:
            indexer.read(body, kind)
        assert raised.value.status in (400, 422)


def test_too_many_tokens_are_refused_and_the_most_are_not() -> None:
    most = indexer.read(raw(QUERY | {"token_ids": [7] * indexer.TOKENS}), indexer.Query)
    assert len(most.token_ids) == indexer.TOKENS
    with pytest.raises(Rejected, match="length"):
        indexer.read(raw(QUERY | {"token_ids": [7] * (indexer.TOKENS + 1)}), indexer.Query)


def test_hashes_come_as_numbers_or_as_hex_and_by_either_name() -> None:
    def read(**fields: Any) -> list[int | bytes]:
        return indexer.hashes_of(indexer.read(raw({"model": "m", "block_size": 1} | fields), indexer.HashQuery))

    assert read(seq_hashes=[1, (1 << 64) - 1, -5]) == [1, (1 << 64) - 1, -5]
    assert read(block_hash=["0xAbC", "00ff"]) == [b"\x0a\xbc", b"\x00\xff"]
    for wrong in (
        {},
        {"seq_hashes": [1], "block_hash": [1]},
        {"seq_hashes": [1 << 64]},
        {"seq_hashes": [-1 - (1 << 63)]},
    ):
        with pytest.raises(Rejected) as raised:
            read(**wrong)
        assert raised.value.field == "seq_hashes"


# ---- publishers


def register(registry: Registry, **fields: Any) -> None:
    told = Publishers(registry, lambda: 1, lambda _: None)
    told.register(indexer.read(raw(PUBLISHER | fields), indexer.Publisher))


def test_the_first_rank_brings_the_instance_and_the_others_fit() -> None:
    registry = Registry()
    register(registry, ranks=3, dp_rank=1, endpoint="tcp://127.0.0.1:5558", replay_endpoint="tcp://127.0.0.1:5601")
    spec = registry.specs[0]
    assert spec == InstanceSpec(
        name="prefill-1",
        model="deepseek",
        served_name="deepseek",
        url="http://127.0.0.1:8000",
        events="tcp://127.0.0.1:5557",
        replay="tcp://127.0.0.1:5600",
        ranks=3,
        block_tokens=128,
    )
    register(registry)
    register(registry, dp_rank=2, endpoint="tcp://127.0.0.1:5559", url=None)
    assert len(registry.specs) == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"modelname": "other"}, "modelname"),
        ({"block_size": 16}, "block_size"),
        ({"dp_rank": 1, "endpoint": "tcp://127.0.0.1:5558"}, "dp_rank"),
        ({"endpoint": "tcp://127.0.0.1:5558"}, "endpoint"),
        ({"url": "http://127.0.0.1:8001"}, "url"),
        ({"type": "Mooncake"}, "type"),
        ({"tenant_id": "somebody"}, "tenant_id"),
        ({"additionalsalt": "w8a8"}, "additionalsalt"),
        ({"instance_id": "new", "url": None}, "url"),
        ({"instance_id": "new", "endpoint": "tcp://10.0.0.1:5557"}, "endpoint"),
        ({"instance_id": "new", "replay_endpoint": "tcp://metadata.internal:80"}, "replay_endpoint"),
        ({"instance_id": "new", "dp_rank": 3000, "endpoint": "tcp://127.0.0.1:80"}, "endpoint"),
    ],
    ids=range(12),
)
def test_what_does_not_fit_an_instance_is_refused(fields: dict[str, Any], field: str) -> None:
    registry = Registry()
    register(registry)
    with pytest.raises(RefusedError) as raised:
        register(registry, **fields)
    assert raised.value.field == field
    assert len(registry.specs) == 1


# ---- over HTTP


def test_a_gateway_registers_asks_and_unregisters(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, 2) as it:
            got = await it.ask("POST", "/register", PUBLISHER)
            assert got.json == {"status": "registered successfully", "instance_id": "prefill-1"}
            assert [len(worker.registry.specs) for worker in it.workers] == [2, 2]
            for worker in it.workers:
                worker.sight.held = {"i0": FOUND, "prefill-1": FOUND}
            got = await it.ask("POST", "/query", QUERY | {"cache_salt": "s"})
            assert got.json == {"default": {"i0": FOUND, "prefill-1": FOUND}}
            assert it.workers[0].sight.asked == [("m", (101, 15, 100), "s")]
            got = await it.ask("POST", "/query", QUERY | {"instance_id": "i0"})
            assert got.json == {"default": {"i0": FOUND}}
            got = await it.ask("POST", "/query_by_hash", BY_HASH)
            assert got.json == {"default": {"i0": FOUND}}  # the other one serves another model
            assert it.workers[0].sight.asked[-1] == (1234567890, 9876543210)
            got = await it.ask("POST", "/unregister", {"instance_id": "prefill-1", "dp_rank": 0})
            assert got.json["removed_instances"] == ["prefill-1|default|0"]
            assert [worker.left for worker in it.workers] == [[1], [1]]
            got = await it.ask("POST", "/unregister", {"instance_id": "never"})
            assert (got.status, got.json["removed_instances"]) == (200, [])
            for _ in range(3):
                last = await it.ask("POST", "/register", PUBLISHER | {"instance_id": f"n{_}"})
            assert (last.status, last.json["error"]["field"]) == (422, "instances")

    drive(main)


def test_a_tenants_prefixes_are_asked_for_with_its_salt(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, 1, tenants=[tenant("acme", new_key())]) as it:
            worker = it.workers[0]
            assert (await it.ask("POST", "/query", QUERY | {"tenant_id": "acme", "cache_salt": "s"})).status == 200
            acme = worker.tenants.named("acme")
            assert acme is not None
            assert worker.sight.asked[-1][2] == worker.tenants.salt(acme, "s") != "s"
            got = await it.ask("POST", "/query", QUERY | {"tenant_id": "nobody"})
            assert (got.status, got.code) == (404, "no_such_tenant")
            got = await it.ask("POST", "/query_by_hash", BY_HASH | {"tenant_id": "nobody"})
            assert (got.status, got.code) == (404, "no_such_tenant")

    drive(main)


def test_a_worker_that_comes_later_is_told_what_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BEAT_S", 0.02)

    async def main() -> None:
        async with rig(tmp_path, 1) as it:
            for name in ("stays", "leaves"):
                assert (await it.ask("POST", "/register", PUBLISHER | {"instance_id": name})).status == 200
            assert (await it.ask("POST", "/unregister", {"instance_id": "leaves"})).status == 200
            assert (await it.ask("POST", "/register", PUBLISHER | {"instance_id": "x", "url": None})).status == 422
            late = Worker(1, [])
            await late.control.start(tmp_path)
            it.control.workers.started(1)
            await until(lambda: len(late.registry.specs) > 1)
            await it.heard()
            assert [spec.name for spec in late.registry.specs.values()] == ["i0", "stays"]
            assert (await it.ask("GET", "/fleet")).json["registered"] == 1
            await it.control.workers.gone(1)
            await late.control.close()
            late.page.close()

    drive(main)


def test_too_much_at_once_is_told_to_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, 1) as it:
            for _ in range(8):
                await it.control._questions.acquire()
            got = await it.ask("POST", "/query", QUERY)
            assert (got.status, got.code, got.headers["Retry-After"]) == (429, "busy", "1")
            assert (await it.ask("GET", "/health")).status == 200

    drive(main)


def test_bodies_have_a_limit_in_size_and_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "READ_S", 0.1)

    async def main() -> None:
        async with rig(tmp_path, 1) as it:
            for path, most in (("/register", indexer.REGISTER_BYTES), ("/query", indexer.QUERY_BYTES)):
                got = await it.ask("POST", path, io.BytesIO(b" " * (most + 1)))
                assert (got.status, got.code) == (413, "too_large"), path
            assert (await it.ask("POST", "/unregister", b" " * 5000 + raw({"instance_id": "a"}))).status == 200
            assert (await it.ask("POST", "/query", io.BytesIO(raw(QUERY | {"token_ids": [7] * 400_000})))).status == 200
            host, port = it.control.url.removeprefix("http://").split(":")
            for head, status in (
                (b"Content-Length: 10", b" 408 "),
                (b"Content-Length: 99999999999", b" 413 "),
                (b"Transfer-Encoding: chunked", b" 413 "),
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"POST /register HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")
                if b"chunked" in head:
                    writer.write(b"".join(b"1000\r\n" + b" " * 4096 + b"\r\n" for _ in range(8)))
                assert status in await asyncio.wait_for(reader.readline(), 5)
                writer.transport.abort()

    drive(main)


# ---- anything at all

ODD = [None, True, 0, -1, 1 << 70, 1e300, "", "x" * 300, "\ud800", [], {}, [[]], {"a": {}}, ["a"], "tcp://a:99999999"]


def twisted(draw: random.Random) -> bytes:
    """A request that has something wrong with it, mostly."""
    fields: dict[str, Any] = dict(draw.choice([PUBLISHER, QUERY, BY_HASH, {"instance_id": "a"}]))
    for _ in range(draw.randint(0, 3)):
        name = draw.choice([*fields, "lora_name", "lora_id", "ranks", "nonsense", "__class__", "\0"])
        if draw.random() < 0.3:
            fields.pop(name, None)
        else:
            fields[name] = draw.choice(ODD)
    body = bytearray(raw(fields))
    for _ in range(draw.choice([0, 0, 0, 1, 5])):
        place = draw.randrange(len(body))
        body[place : place + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
    return bytes(body)


def test_whatever_comes_is_answered_in_json_and_by_no_5xx(
    tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    seed = seed_of(request.config)
    print(f"seed {seed}")
    draw = random.Random(seed)

    async def main() -> None:
        seen: dict[int, int] = {}
        async with rig(tmp_path, 1) as it:
            for _ in range(1500):
                path = draw.choice(["/register", "/unregister", "/query", "/query_by_hash"])
                body = twisted(draw)
                got = await it.ask("POST", path, body)
                assert got.status in (200, 400, 404, 413, 422), (path, body, got)
                assert isinstance(got.json, dict)
                seen[got.status] = seen.get(got.status, 0) + 1
            for method, path in (("GET", "/query"), ("PUT", "/register"), ("POST", "/fleet"), ("POST", "/%00")):
                got = await it.ask(method, path, b"{}")
                assert got.status in (404, 405)
                assert got.code in ("no_such_path", "method_not_allowed")
            assert (await it.ask("GET", "/query")).headers["Allow"] == "POST"
            assert min(seen[status] for status in (200, 400, 422)) > 20, seen
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    drive(main)
