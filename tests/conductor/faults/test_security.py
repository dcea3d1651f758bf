"""What clients, instances and whoever registers may try: forged fields and headers, requests within requests, other
addresses, answers that would be more than one, bodies that would fill the memory. All against a whole Conductor.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from headwater.conductor.tenants import key_row, new_key
from headwater.errors import ConfigError
from headwater.fleetfile.read import read_fleet
from tests.conductor.engine import Received
from tests.conductor.faults.hostile import (
    LOOPBACK,
    Told,
    all_told,
    check_forwarded,
    family,
    first_wins,
    forget_peak,
    listening,
    message,
    mode_of,
    plain_reply,
    rss_bytes,
    tcp_listeners,
    unix_listeners,
    whole,
)
from tests.conductor.http.rig import looped
from tests.conductor.http.test_requests import BAD, HOST
from tests.conductor.running import Fleet, chat, running, until
from tests.servers import free_port

KEY = new_key()
TENANTS = [{"name": "alice", "keys": [key_row(KEY)], "priority": 3}]
AUTHORIZED = f"Authorization: Bearer {KEY}\r\n"
GOOD = message(json.dumps(chat("is all well?")).encode(), more=AUTHORIZED)
MARK = "forged-5c1e"
GROWTH_BYTES = 64 << 20


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    limits = {"header_bytes": 16 << 10, "headers": 33}
    with (
        TemporaryDirectory(prefix="hw") as folder,
        running(Path(folder), file={"tenants": TENANTS}, instance={"capacity_tokens": 1 << 24}, limits=limits) as it,
    ):
        it.headers["authorization"] = f"Bearer {KEY}"
        for engine in it.engines:
            engine.reply = plain_reply
        yield it


@pytest.fixture(autouse=True)
def _fresh(fleet: Fleet) -> None:
    for engine in fleet.engines:
        engine.requests.clear()


def say(fleet: Fleet, *pieces: bytes) -> list[Told]:
    found: list[Told] = []

    async def run() -> None:
        found.extend(await all_told(fleet.port, *pieces))

    looped(run())
    return found


def received(fleet: Fleet) -> list[Received]:
    """What instances were asked for, without probes."""
    return [it for engine in fleet.engines for it in engine.asked]


@contextmanager
def replying(fleet: Fleet, reply: Any) -> Iterator[None]:
    for engine in fleet.engines:
        engine.reply = reply
    try:
        yield
    finally:
        for engine in fleet.engines:
            engine.reply = plain_reply
        until(lambda: fleet.post("/v1/chat/completions", chat("well again?")).status == 200, fleet.logs)


# ---- forged fields

USUAL = '"messages":[{"role":"user","content":"hi"}]'
FORGED: dict[str, tuple[int, str]] = {
    "transfer": (400, '"kv_transfer_params":{"remote_host":"MARK"}'),
    "transfer, null": (200, '"kv_transfer_params":null,"ec_transfer_params":null'),
    "transfer, in disguise": (400, '"\\u006bv_transfer_params":{"remote_host":"MARK"}'),
    "transfer, all in disguise": (400, '"\\u006b\\u0076\\u005f\\u0074ransfer\\u005fparams":{"a":"MARK"}'),
    "transfer, null first": (400, '"kv_transfer_params":null,"kv_transfer_params":{"a":"MARK"}'),
    "transfer, null last": (200, '"kv_transfer_params":{"a":"MARK"},"kv_transfer_params":null'),
    "transfer, null last in disguise": (200, '"kv_transfer_params":{"a":"MARK"},"kv_transfer_param\\u0073":null'),
    "embeddings' transfer": (400, '"ec_transfer_params":{"a":"MARK"}'),
    "hints": (200, '"kv_hints":{"actions":["MARK"]}'),
    "hints, twice": (200, '"kv_hints":1,"kv_h\\u0069nts":{"actions":["MARK"]}'),
    "salt": (200, '"cache_salt":"MARK"'),
    "salt, twice": (200, '"cache_salt":"MARK","cache_salt":"MARK2"'),
    "salt, null last": (200, '"cache_salt":"MARK","cache_sal\\u0074":null'),
    "salt, null first": (200, '"cache_salt":null,"cache_salt":"MARK"'),
    "priority": (200, '"priority":-1000'),
    "priority, twice": (200, '"priority":0,"pr\\u0069ority":-1000'),
    "a name": (200, '"request_id":"MARK"'),
    "arguments": (200, '"vllm_xargs":{"kv_hints":"MARK","ec_x":"MARK","headwater.x":"MARK","k\\u0076_x":"MARK"}'),
    "arguments with transfer": (400, '"vllm_xargs":{"kv_transfer_params":"MARK"}'),
    "arguments, twice": (200, '"vllm_xargs":{"kv_x":"MARK"},"vllm_x\\u0061rgs":{"mine":1}'),
    "arguments, twice, worse last": (200, '"vllm_xargs":{"mine":1},"vllm_xargs":{"kv_x":"MARK"}'),
    "template": (400, '"chat_template":"{{ MARK }}"'),
    "template, in disguise": (400, '"chat\\u005ftemplate":"{{ MARK }}"'),
    "template, in arguments": (400, '"chat_template_kwargs":{"chat_template":"{{ MARK }}"}'),
    "template, null last": (200, '"chat_template":"{{ MARK }}","chat_template":null'),
    "model, another first": (200, '"model":"MARK","model":"toy"'),
    "model, another last": (404, '"model":"toy","model":"MARK"'),
    "ids": (200, '"return_token_ids":false,"stream":true'),
    "usage, twice": (200, '"stream":true,"stream_options":{"include_usage":false},"stream_options":null'),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_what_clients_forge_stays_here(fleet: Fleet, name: str, streamed: bool) -> None:
    status, forged = FORGED[name]
    more = ',"stream":true' if streamed and '"stream"' not in forged else ""
    body = ("{" + USUAL + more + "," + forged.replace("MARK", MARK) + "}").encode()
    it = fleet.post("/v1/chat/completions", body)
    assert it.status == status, it
    assert MARK not in it.body.decode() and MARK not in str(it.headers)
    came = received(fleet)
    assert len(came) == (status == 200)
    for each in came:
        check_forwarded(each)
        fields, first = json.loads(each.body), first_wins(each.body)
        assert len(fields["cache_salt"]) == 64, "the salt is ours"
        assert MARK not in json.dumps(fields) and fields.pop("model", "toy") == "toy"
        first.pop("model", None)
        assert first == fields, "whoever reads it, and however"


HEADERS = {
    "Host": "169.254.169.254", "X-Forwarded-For": MARK, "X-Forwarded-Host": MARK, "X-Forwarded-Proto": MARK,
    "Forwarded": f"for={MARK};host={MARK}", "X-Real-IP": MARK, "X-Headwater-Tenant": MARK, "X-Headwater-Instance": MARK,
    "X-Headwater-Anything": MARK, "X-Data-Parallel-Rank": "7", "X-Request-Id": MARK, "X-Vllm-Priority": "-9",
    "X-API-Key": MARK, "Cookie": f"a={MARK}", "Proxy-Authorization": f"Basic {MARK}", "X-Original-URL": f"/{MARK}",
    "X-Rewrite-URL": f"/{MARK}", "X-HTTP-Method-Override": "DELETE", "Via": MARK, "Content-Type": f"text/{MARK}",
    "Accept-Encoding": MARK, "User-Agent": MARK, "Origin": f"http://{MARK}", "Referer": MARK, "TE": MARK,
}  # fmt: skip


def test_the_headers_that_clients_forge_stay_here(fleet: Fleet) -> None:
    it = fleet.post("/v1/chat/completions", chat("hi"), headers=HEADERS)
    assert it.status == 200 and MARK not in str(it.headers)
    (came,) = received(fleet)
    check_forwarded(came)
    assert MARK not in str(came.headers) and KEY not in str(came.headers)
    assert came.headers["content-type"] == "application/json"
    assert came.headers["host"] in [engine.url.removeprefix("http://") for engine in fleet.engines]


def test_a_key_of_an_instance_is_no_clients_business(fleet: Fleet) -> None:
    it = say(fleet, message(b"", method="GET", path="/v1/models", more="Authorization: Bearer x\r\n" + AUTHORIZED))
    assert [each.status for each in it] == [401], "the first of two keys counts"


@pytest.mark.parametrize("size", [1 << 10, 8 << 10, 15 << 10])
def test_long_headers_go_through_or_are_refused(fleet: Fleet, size: int) -> None:
    answers = say(fleet, message(json.dumps(chat("hi")).encode(), more=AUTHORIZED + f"Baggage: {'x' * size}\r\n"), GOOD)
    assert [it.status for it in answers] == [200, 200]
    assert sorted(len(each.headers.get("baggage", "")) for each in received(fleet)) == [0, size]
    for more in (f"Baggage: {'x' * (16 << 10)}\r\n", "X: y\r\n" * 200):
        answers = say(fleet, message(b"{}", more=AUTHORIZED + more), GOOD)
        assert [it.status for it in answers] == [431]


# ---- requests within requests

SMUGGLED = message(json.dumps(chat(MARK)).encode(), more=AUTHORIZED)


@pytest.mark.parametrize("name", BAD)
def test_no_request_goes_on_within_another(fleet: Fleet, name: str) -> None:
    status, data = BAD[name]
    data = (
        data.replace(b"fffff\r", b"fffffff\r")
        .replace(b" /a HTTP", b" /v1/chat/completions HTTP")
        .replace(HOST, HOST + AUTHORIZED.encode(), 1)
    )
    answers = say(fleet, GOOD + data + SMUGGLED, SMUGGLED)
    assert [it.status for it in answers] == [200, status]
    assert answers[-1].headers["connection"] == "close"
    came = received(fleet)
    assert len(came) == 1 and MARK.encode() not in came[0].body


def test_a_body_that_looks_like_a_request_is_a_body(fleet: Fleet) -> None:
    inner = message(json.dumps(chat(MARK)).encode())
    body = json.dumps(chat(inner.decode())).encode()
    chunked = message(b"", more=AUTHORIZED).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    parts = b"".join(
        b"%x;a=b\r\n%b\r\n" % (len(body[at : at + 50]), body[at : at + 50]) for at in range(0, len(body), 50)
    )
    first = message(body, more=AUTHORIZED)
    answers = say(fleet, first, chunked + parts + b"0\r\nContent-Length: 9\r\nAuthorization: x\r\n\r\n" + GOOD)
    assert [it.status for it in answers] == [200, 200, 200]
    came = received(fleet)
    assert len(came) == 3
    assert sorted(MARK in each.body.decode() for each in came) == [False, True, True]
    for each in came:
        check_forwarded(each)


# ---- other addresses


def test_nothing_in_a_request_makes_us_connect_anywhere(fleet: Fleet) -> None:
    with listening() as (port, count):
        url, body = f"http://127.0.0.1:{port}", json.dumps(chat("hi")).encode()
        lines = (
            b"POST %b/v1/chat/completions HTTP/1.1" % url.encode(),
            b"CONNECT 127.0.0.1:%d HTTP/1.1" % port,
            b"POST //127.0.0.1:%d/v1/chat/completions HTTP/1.1" % port,
            b"POST /@127.0.0.1:%d/v1/chat/completions HTTP/1.1" % port,
        )
        for line in lines:
            rest = message(body, more=AUTHORIZED).partition(b"\r\n")[2]
            (it, *_) = say(fleet, line + b"\r\n" + rest)
            assert it.status in (400, 404), line
        assert not received(fleet)
        told = {"Host": f"127.0.0.1:{port}", "X-Forwarded-Host": f"127.0.0.1:{port}", "X-Upstream": url, "Via": url}
        parts = [
            {"type": "text", "text": url},
            {"type": "image_url", "image_url": {"url": f"{url}/a.png"}},
            {"type": "video_url", "video_url": {"url": f"{url}/a.mp4"}},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "file", "file": {"file_id": url}},
        ]
        wanted = chat(
            "hi", messages=[{"role": "user", "content": parts}], user=url, session_id=url, documents=[{"url": url}]
        )
        it = fleet.post("/v1/chat/completions", wanted, headers=told)
        assert it.status == 200
        assert json.loads(received(fleet)[0].body)["messages"][0]["content"] == parts, (
            "they are the instance's business"
        )
        assert fleet.get("/v1/models", headers=told).status == 200
        assert fleet.get(f"/v1/models/{url}").status == 404
        assert count() == 0


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 300])
def test_no_redirect_is_followed(fleet: Fleet, status: int) -> None:
    with listening() as (port, count):
        place = b"location: http://127.0.0.1:%d/v1/chat/completions" % port
        with replying(fleet, lambda received: whole(status, b'{"moved":"' + MARK.encode() + b'"}', place)):
            for body in (chat("hi"), chat("hi", stream=True)):
                it = fleet.post("/v1/chat/completions", body)
                assert it.status in (502, 503) and "location" not in it.headers
                assert MARK not in it.body.decode() and str(port) not in it.body.decode()
        assert count() == 0


SPLITS = {
    "more headers": b"set-cookie: MARK\r\nlocation: http://MARK/\r\nx-headwater-instance: MARK\r\nx-request-id: MARK",
    "server and type": b"server: MARK\r\nx-powered-by: MARK\r\naccess-control-allow-origin: MARK",
    "a bare CR": b"retry-after: 1\rset-cookie: MARK",
    "a bare LF": b"retry-after: 1\nset-cookie: MARK",
    "a folded line": b"retry-after: 1\r\n set-cookie: MARK",
    "a NUL": b"retry-after: 1\0MARK",
    "two lengths": b"content-length: 2\r\nx: MARK",
    "both framings": b"transfer-encoding: chunked\r\nx: MARK",
    "an encoding": b"content-encoding: gzip\r\nx: MARK",
    "hop by hop": b"connection: retry-after, x\r\nx: MARK\r\nkeep-alive: MARK\r\nupgrade: MARK",
    "a long header": b"x: " + b"MARK" * 5000,
    "high bytes": b"retry-after: \xff\x80MARK",
    "interim": b"",
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("status", [200, 429])
def test_no_answer_says_more_than_it_may(fleet: Fleet, name: str, status: int) -> None:
    lines = SPLITS[name].replace(b"MARK", MARK.encode())
    body = b'{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}'
    data = whole(status, body, *([lines] if lines else []))
    if name == "interim":
        data = b"HTTP/1.1 103 Early\r\nset-cookie: MARK\r\n\r\n" * 2 + data

    # Probes are answered well, so that the instances stay.
    with replying(fleet, lambda received: data if received.method == "POST" else None):
        answers = say(fleet, GOOD, message(b"", "/v1/models", AUTHORIZED, "GET"))
    assert [it.status for it in answers] in ([200, 200], [429, 200], [502, 200], [503, 200])
    it = answers[0]
    ours = {"content-type", "content-length", "date", "x-request-id", "retry-after", "connection"}
    assert {each for each in it.headers if not each.startswith("x-headwater-")} <= ours
    assert it.headers.get("x-headwater-instance", "e0") in ("e0", "e1")
    if name != "high bytes":
        assert MARK not in str(it.headers) + it.body.decode()


REGISTER: dict[str, Any] = {
    "endpoint": "tcp://127.0.0.1:5557", "type": "vLLM", "modelname": "toy", "instance_id": "new", "block_size": 16,
    "url": "http://127.0.0.1:9",
}  # fmt: skip
PLACES = [
    "10.0.0.1", "192.168.0.1", "172.16.0.1", "8.8.8.8", "169.254.169.254", "100.100.100.200", "192.0.0.192",
    "[fd00:ec2::254]", "[::ffff:169.254.169.254]", "[::ffff:10.0.0.1]", "[2002:a9fe:a9fe::1]", "[64:ff9b::a9fe:a9fe]",
    "[fe80::1]", "0.0.0.0", "[::]", "224.0.0.1", "255.255.255.255", "metadata.google.internal", "example.com",
    "localhost.example.com", "127.0.0.1.nip.io", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost.",
]  # fmt: skip


@pytest.mark.parametrize("host", PLACES)
def test_nobody_registers_elsewhere(fleet: Fleet, host: str) -> None:
    before = [it["name"] for it in fleet.state()["brain"]["instances"]]
    asked = REGISTER | {"url": f"http://{host}:80", "endpoint": f"tcp://{host}:5557"}
    it = fleet.control("POST", "/register", asked)
    assert it.status == 422 and it.json["error"]["code"] in ("refused", "wrong_value"), it
    # Nor does an address on loopback help another one in.
    for wrong in ({"endpoint": f"tcp://{host}:5557"}, {"replay_endpoint": f"tcp://{host}:5557"}):
        assert fleet.control("POST", "/register", REGISTER | wrong).status == 422
    assert [it["name"] for it in fleet.state()["brain"]["instances"]] == before


@pytest.mark.parametrize(
    "url",
    ["http://u:p@127.0.0.1:9", "http://127.0.0.1:9/path", "http://127.0.0.1:9?a", "http://127.0.0.1:9#a",
     "ftp://127.0.0.1",
     "file:///etc/passwd", "http://127.0.0.1:9\r\nX: y", "http://127.0.0.1\\@10.0.0.1", "unix:/run/x", "http://", "",
     "//127.0.0.1", "http://127.0.0.1:0", "http://127.0.0.1:70000", "http://[::1%25eth0]:1", "gopher://127.0.0.1:6379/_FLUSHALL"],
    ids=range(16),
)  # fmt: skip
def test_nobody_registers_what_is_no_address(fleet: Fleet, url: str) -> None:
    it = fleet.control("POST", "/register", REGISTER | {"url": url})
    assert it.status == 422, it
    assert url == "" or url not in it.body.decode()


def test_who_registers_is_not_followed_either(fleet: Fleet) -> None:
    """It answers its probes with another address."""
    with listening() as (port, count):
        engine = fleet.engines[0]
        engine.reply = lambda received: whole(302, b"", b"location: http://127.0.0.1:%d/" % port)
        asked = REGISTER | {"url": engine.url, "instance_id": "mover"}
        assert fleet.control("POST", "/register", asked).status == 200
        until(lambda: len(engine.requests) >= 2, fleet.logs)
        engine.reply = plain_reply
        assert fleet.control("POST", "/unregister", {"instance_id": "mover"}).status == 200
        assert count() == 0
    until(lambda: all(it["alive"] for it in fleet.state()["brain"]["instances"]), fleet.logs)


# ---- what is open, and what it takes


def test_only_this_host_reaches_what_is_open(fleet: Fleet) -> None:
    pids = family(fleet.process.pid)
    assert len(pids) == 1 + len(fleet.workers())
    found = tcp_listeners(pids)
    assert {port for _, port in found} == {fleet.port, fleet.control_port}
    assert {address for address, _ in found} <= set(LOOPBACK)
    names = unix_listeners(pids)
    assert names, "workers are asked by their parent"
    for name in names:
        assert name.startswith("/"), "abstract sockets are everybody's"
        assert mode_of(Path(name)) == 0o600 and mode_of(Path(name).parent) == 0o700, name


OPEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no tenants": ({"conductor": {"listen": "0.0.0.0:PORT"}}, ["conductor.listen", "0.0.0.0:PORT", "tenants"]),
    "no tenants, IPv6": ({"conductor": {"listen": "[::]:PORT"}}, ["conductor.listen", "[::]:PORT", "tenants"]),
    "no TLS": (
        {"conductor": {"listen": "0.0.0.0:PORT"}, "tenants": TENANTS},
        ["conductor.listen", "0.0.0.0:PORT", "tls_certificate"],
    ),
    "no token": (
        {"conductor": {"control": "0.0.0.0:PORT"}},
        ["conductor.control", "0.0.0.0:PORT", "control_token_file"],
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_nothing_is_open_to_others_without_credentials(tmp_path: Path, name: str) -> None:
    more, words = OPEN[name]
    with pytest.raises(ConfigError) as refused:
        read_fleet(open_to_others(tmp_path, more, "8080"))
    for word in words:
        assert word.replace("PORT", "8080") in str(refused.value)


def test_who_is_open_to_others_does_not_start(tmp_path: Path) -> None:
    port = free_port()
    file = open_to_others(tmp_path, OPEN["no TLS"][0], str(port))
    command = [sys.executable, "-m", "headwater", "conductor", str(file), "--runtime-dir", str(tmp_path / "r")]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    assert f"conductor.listen: 0.0.0.0:{port} is open to others" in ended.stderr and "tls_certificate" in ended.stderr


def open_to_others(folder: Path, more: dict[str, Any], port: str) -> Path:
    """A fleet file with such settings."""
    conductor = {"listen": f"127.0.0.1:{free_port()}", "control": f"127.0.0.1:{free_port()}", "tokens": "none"}
    conductor |= {setting: value.replace("PORT", port) for setting, value in more["conductor"].items()}
    file = {"instances": [{"name": "a", "model": "toy", "url": "http://127.0.0.1:9"}], **more, "conductor": conductor}
    (folder / "fleet.yaml").write_text(yaml.safe_dump(file))
    return folder / "fleet.yaml"


MANY = {
    "a body beyond the limit": b'{"a":"' + b"x" * (17 << 20) + b'"}',
    "a deep body": b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a deep body of objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "a long deep body": b'{"messages":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}",
    "many values": b'{"a":[' + b"1," * (7 << 20) + b"1]}",
    "many values within the counts": b'{"a":[' + b"1," * 1_300_000 + b"1]}",
    "many texts within the counts": b'{"a":[' + b'"a",' * 1_300_000 + b"1]}",
    "many objects": b'{"messages":[' + b"{}," * (5 << 20) + b"{}]}",
    "many keys": b"{" + b",".join(b'"%x":1' % it for it in range(1_400_000)) + b"}",
    "many messages": b'{"messages":[' + b'{"role":"user"},' * 5000 + b'{"role":"user"}]}',
    "many tools": b"{" + USUAL.encode() + b',"tools":[' + b"{}," * 600 + b"{}]}",
    "a long number": b"{" + USUAL.encode() + b',"n":' + b"9" * (1 << 20) + b"}",
    "a long text that is none": b'{"messages":"' + b"\\u0041" * (2 << 20) + b'"}',
}


@pytest.mark.alone
def test_what_is_too_much_is_refused_and_takes_no_memory(fleet: Fleet) -> None:
    (worker,) = fleet.workers()
    assert (
        fleet.post("/v1/chat/completions", b"{" + USUAL.encode() + b',"pad":"' + b"x" * (1 << 20) + b'"}').status == 200
    )
    forget_peak(worker)
    before = rss_bytes(worker)
    for name, body in MANY.items():
        it = fleet.post("/v1/chat/completions", body)
        grown = rss_bytes(worker, "VmHWM") - before
        print(f"{name}: {len(body)} bytes, {it.status}, the worker grew by up to {grown / 2**20:.1f} MiB")
        assert it.status in (400, 413), (name, it)
        assert grown < GROWTH_BYTES, name
    assert received(fleet)[1:] == []
    bombs = {
        "gzip": gzip.compress(bytes(32 << 20)),
        "deflate": zlib.compress(bytes(32 << 20)),
        "br": b"x",
        "gzip, gzip": b"x",
    }
    for encoding, bomb in bombs.items():
        it = fleet.post("/v1/chat/completions", bomb, headers={"Content-Encoding": encoding})
        assert it.status == 415 and rss_bytes(worker, "VmHWM") - before < GROWTH_BYTES, encoding
    assert fleet.post("/v1/chat/completions", chat("is all well?")).status == 200


@pytest.mark.alone
def test_strangers_fill_no_memory(fleet: Fleet) -> None:
    """Their bodies are refused at their head, wherever they are sent."""
    (worker,) = fleet.workers()
    before = rss_bytes(worker)
    for path in ("/v1/chat/completions", "/v1/models", "/health", "/anything"):
        for framing in (b"Content-Length: 16000000", b"Transfer-Encoding: chunked"):
            head = message(b"", path).replace(b"Content-Length: 0", framing)
            (it, *_) = say(fleet, head, b"f42400\r\n" + b"x" * (1 << 20))
            assert it.status in (400, 401, 405, 413) and it.headers["connection"] == "close", (path, it)
    assert rss_bytes(worker) - before < GROWTH_BYTES
