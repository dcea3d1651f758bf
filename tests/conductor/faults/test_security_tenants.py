"""Tenants: whose key opens what, quotas, models, new keys while streams run; nothing of one is seen by another; secrets
and prompts are nowhere but where they belong.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from headwater.conductor.tenants import key_row, new_key
from tests.conductor.canary import Canary, command_lines
from tests.conductor.engine import Gate, Script
from tests.conductor.faults.hostile import all_told, family, message
from tests.conductor.http.rig import looped
from tests.conductor.running import Answer, Fleet, asked, chat, running, until

TOKEN = "control-" + new_key()
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG = "the river rises and falls and rises again " * 8


@dataclass
class Keyed:
    """A Conductor with tenants."""

    fleet: Fleet
    keys: dict[str, str]

    def ask(self, who: str, text: str, path: str = CHAT, **more: Any) -> Answer:
        body = chat(text, **more) if path == CHAT else {"model": "toy", "prompt": text, "max_tokens": 2, **more}
        return self.fleet.post(path, body, headers=bearer(self.keys[who]))

    def control(self, method: str, path: str, body: object = None) -> Answer:
        return self.fleet.control(method, path, body, bearer(TOKEN))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


NAMES: dict[str, dict[str, Any]] = {
    "alice": {}, "bob": {}, "poor": {"requests_per_minute": 3}, "single": {"concurrency": 1},
    "frugal": {"tokens_per_minute": 40}, "narrow": {"models": ["toy"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def it() -> Iterator[Keyed]:
    keys = {name: new_key() for name in NAMES}
    tenants = [{"name": name, "keys": [key_row(keys[name])], **more} for name, more in NAMES.items()]
    with TemporaryDirectory(prefix="hw") as name:
        folder = Path(name)
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        with running(folder, 1, file={"tenants": tenants}, control_token_file=str(folder / "token")) as fleet:
            yield Keyed(fleet, keys)


# ---- routes and credentials

ROUTES = [
    ("POST", CHAT), ("POST", COMPLETION), ("GET", CHAT), ("GET", "/v1/models"), ("GET", "/v1/models/toy"),
    ("POST", "/v1/models"), ("GET", "/metrics"), ("GET", "/explain/x"), ("GET", "/"), ("POST", "/v1/embeddings"),
    ("GET", "/health/"), ("GET", "//health"), ("DELETE", "/v1/models/toy"), ("GET", "/fleet"), ("POST", "/drain"),
]  # fmt: skip
CONTROL = [
    ("GET", "/metrics"), ("GET", "/fleet"), ("GET", "/explain/hw-x-1"), ("POST", "/register"), ("POST", "/unregister"),
    ("POST", "/query"), ("POST", "/query_by_hash"), ("GET", "/no/such"), ("POST", "/health"), ("GET", "/health/"),
]  # fmt: skip
"""Without /drain, which would be the end of it; that is asked last, with wrong credentials only."""


def wrong(right: str) -> dict[str, dict[str, str]]:
    """Credentials that open nothing, by what they are."""
    other = new_key()
    return {
        "none": {}, "empty": bearer(""), "wrong": bearer(other), "truncated": bearer(right[:-1]),
        "longer": bearer(right + "x"), "in upper case": bearer(right.upper()), "digest": bearer(key_row(right)[7:]),
        "row": bearer(key_row(right)), "basic": {"authorization": f"Basic {right}"}, "bare": {"authorization": right},
        "two": {"authorization": f"Bearer {other}, Bearer {right}"}, "long": bearer("x" * 9000),
        "header": {"x-api-key": right}, "cookie": {"cookie": f"key={right}"}, "null": bearer("null"),
    }  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[f"{method} {path}" for method, path in ROUTES])
def test_each_route_is_its_tenants(it: Keyed, method: str, path: str) -> None:
    for what, headers in {**wrong(it.keys["alice"]), "the control token": bearer(TOKEN)}.items():
        answer = asked(it.fleet.port, method, path, b"{}" if method == "POST" else None, headers)
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key"), (what, answer)
        # Nor does it say whether there is such a path, or a query makes a difference.
        assert asked(it.fleet.port, method, path + "?key=" + it.keys["alice"], None, headers).status == 401
    for name in ("alice", "bob"):
        answer = asked(it.fleet.port, method, path, None, bearer(it.keys[name]))
        assert answer.status == (
            200 if (method, path) in (("GET", "/v1/models"), ("GET", "/v1/models/toy")) else answer.status
        )
        assert answer.status not in (401, 403) and answer.status < 500


@pytest.mark.parametrize(("method", "path"), [*CONTROL, ("POST", "/drain")], ids=str)
def test_each_route_of_the_control_api_is_the_operators(it: Keyed, method: str, path: str) -> None:
    others = {f"{name}'s key": bearer(key) for name, key in it.keys.items()}
    for what, headers in {**wrong(TOKEN), **others}.items():
        answer = asked(it.fleet.control_port, method, path, b"{}" if method == "POST" else None, headers)
        if path == "/health" and method == "POST":
            assert answer.status in (400, 401, 405), what
            continue
        assert answer.status == (400 if what == "long" else 401), (what, answer)
    if path != "/drain":
        assert it.control(method, path, {} if method == "POST" else None).status != 401


def test_probes_are_open_and_say_nothing(it: Keyed) -> None:
    assert asked(it.fleet.port, "GET", "/health", None, {}).json == {}
    assert asked(it.fleet.control_port, "GET", "/health", None, {}).json == {"status": "ok"}
    assert asked(it.fleet.control_port, "GET", "/ready", None, {}).json == {"ready": True, "reason": ""}


def test_a_stranger_is_refused_before_its_body(it: Keyed) -> None:
    head = message(b"", more="Expect: 100-continue\r\n").replace(b"Content-Length: 0", b"Content-Length: 1000000")
    found = []

    async def run() -> None:
        found.extend(await all_told(it.fleet.port, head))

    looped(run())
    assert [each.status for each in found] == [401]


# ---- quotas and models


def test_quotas_are_each_tenants_own(it: Keyed) -> None:
    answers = [it.ask("poor", "hi") for _ in range(5)]
    assert [each.status for each in answers] == [200, 200, 200, 429, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert answers[-1].json["error"]["code"] == "rate_limit_exceeded"
    assert it.ask("alice", "hi").status == 200
    while (answer := it.ask("frugal", "hi " * 10)).status == 200:
        pass
    assert answer.status == 429 and int(answer.headers["retry-after"]) >= 1
    assert it.ask("bob", "hi " * 10).status == 200


def test_one_at_a_time(it: Keyed) -> None:
    gate, answers = Gate(), []
    for engine in it.fleet.engines:
        engine.script(Script(gate=gate))
    thread = threading.Thread(target=lambda: answers.append(it.ask("single", "slowly", stream=True)))
    thread.start()
    try:
        until(lambda: any(engine.running for engine in it.fleet.engines), it.fleet.logs)
        assert it.ask("single", "hi").status == 429
    finally:
        gate.open()
        thread.join()
        for engine in it.fleet.engines:
            while engine.next_script() is not engine.otherwise:
                pass
    assert answers[0].status == 200 and it.ask("single", "hi").status == 200


def test_models_are_each_tenants_own(it: Keyed) -> None:
    engine = it.fleet.engines[0]
    asked_for = {
        "endpoint": "tcp://127.0.0.1:5557", "type": "vLLM", "modelname": "secret-model", "instance_id": "second",
        "block_size": 16, "url": engine.url,
    }  # fmt: skip
    assert it.control("POST", "/register", asked_for).status == 200
    try:
        alice, narrow = bearer(it.keys["alice"]), bearer(it.keys["narrow"])
        assert [each["id"] for each in it.fleet.get("/v1/models", alice).json["data"]] == ["toy", "secret-model"]
        assert [each["id"] for each in it.fleet.get("/v1/models", narrow).json["data"]] == ["toy"]
        for path in ("/v1/models/secret-model", "/v1/models/no-such-model"):
            told = it.fleet.get(path, narrow)
            assert told.status == 404 and "secret" not in told.body.decode()
        answers = [it.ask("narrow", "hi", model=name) for name in ("secret-model", "no-such-model")]
        assert [each.status for each in answers] == [404, 404] and answers[0].body == answers[1].body
        assert it.ask("narrow", "hi", model=None).status == 200, "the only one that it may use"
    finally:
        assert it.control("POST", "/unregister", {"instance_id": "second"}).status == 200


# ---- what one sees of another


def cached(answer: Answer) -> int:
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_nobody_hits_what_another_sent(it: Keyed, path: str) -> None:
    text = f"{path} {LONG}"
    first = it.ask("alice", text, path)
    assert first.status == 200 and cached(first) == 0
    again = it.ask("alice", text, path)
    assert cached(again) > 50, "her own"
    salts = {
        each.fields["cache_salt"] for engine in it.fleet.engines for each in engine.asked if text in str(each.fields)
    }
    (alices,) = salts
    for salt in (None, alices, "alice"):
        more = {"cache_salt": salt} if salt else {}
        answer = it.ask("bob", text, path, **more)
        assert cached(answer) == 0, salt
        assert answer.headers["x-headwater-reuse"].startswith("device=0"), answer.headers
        streamed = it.ask("bob", text, path, stream=True, stream_options={"include_usage": True}, **more)
        assert streamed.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 50, "his own"
    all_salts = {each.fields.get("cache_salt") for engine in it.fleet.engines for each in engine.asked}
    assert all(len(each) == 64 for each in all_salts)


def test_the_index_and_explanations_are_the_operators(it: Keyed) -> None:
    answer = it.ask("alice", LONG)
    name = answer.headers["x-request-id"]
    told = it.control("GET", f"/explain/{name}")
    assert told.json["explained"]["tenant"] == "alice"
    for path in (f"/explain/{name}", f"/v1/models/{name}", f"/v1/chat/completions/{name}"):
        assert it.fleet.get(path, bearer(it.keys["bob"])).status == 404
    assert asked(it.fleet.control_port, "GET", f"/explain/{name}", None, bearer(it.keys["bob"])).status == 401


# ---- rotation


def patient(fleet: Fleet, body: object, key: str) -> Answer:
    """An answer that may take long."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=120)
    try:
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json", **bearer(key)})
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def rewritten(fleet: Fleet, tenants: list[dict[str, Any]]) -> None:
    """The file has other tenants, and the Conductor is told."""
    path = fleet.log.parent / "fleet.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "tenants": tenants}))
    os.kill(fleet.process.pid, signal.SIGHUP)


def test_keys_are_replaced_while_streams_run(tmp_path: Path) -> None:
    old, new, gate, answers = new_key(), new_key(), Gate(), []
    file = {"tenants": [{"name": "alice", "keys": [key_row(old)]}]}
    with running(tmp_path, 1, file=file, times={"drain_s": 90.0}) as fleet:

        def status(key: str) -> int:
            try:
                return fleet.post(CHAT, chat("hi"), bearer(key)).status
            except ConnectionError:  # of a worker that is just leaving
                return 0

        assert (status(old), status(new)) == (200, 401)
        (engine,) = fleet.engines
        engine.script(Script(gate=gate))
        thread = threading.Thread(target=lambda: answers.append(patient(fleet, chat("go on", stream=True), old)))
        thread.start()
        try:
            until(lambda: engine.running, fleet.logs)
            rewritten(fleet, [{"name": "alice", "keys": [key_row(old), key_row(new)]}])
            until(lambda: status(new) == 200, fleet.logs, 60.0)
            assert status(old) == 200
            assert engine.running == 1, "the stream is still there"
        finally:
            gate.open()
            thread.join()
        assert answers[0].status == 200 and len(answers[0].events) >= 8
        rewritten(fleet, [{"name": "alice", "keys": [key_row(new)]}])
        until(lambda: status(old) == 401, fleet.logs, 60.0)
        assert status(new) == 200
        # A file without tenants would let everybody in.
        rewritten(fleet, [])
        until(lambda: "would let everybody in" in fleet.logs(), fleet.logs, 60.0)
        assert (status(old), status(new)) == (401, 200)


# ---- secrets and prompts


def serves(fleet: Fleet, key: str) -> bool:
    try:
        return fleet.get("/v1/models", bearer(key)).status == 200
    except OSError:  # nobody listens at this moment
        return False


def test_secrets_and_prompts_are_nowhere_else(tmp_path: Path) -> None:
    mine, other = Canary(), new_key()
    tenants = [{"name": "mine", "keys": [key_row(mine.key)]}, {"name": "other", "keys": [key_row(other)]}]
    (tmp_path / "secret").write_text(mine.secret)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "theirs").write_text(mine.engine_key)
    (tmp_path / "theirs").chmod(0o600)
    file = {"tenants": tenants, "secret_file": str(tmp_path / "secret")}
    times = {"silent_s": 0.5, "first_s": 0.5}
    instance = {"api_key_file": str(tmp_path / "theirs")}
    with running(tmp_path, file=file, times=times, retries=1, instance=instance) as fleet:
        seen: dict[str, object] = {}
        good = chat(mine.words, cache_salt=mine.salt)
        ids = {"model": "toy", "prompt": mine.ids, "max_tokens": 3, "cache_salt": mine.salt}
        own = [fleet.post(CHAT, {**good, **more}, bearer(mine.key)) for more in ({}, {"stream": True})]
        own.append(fleet.post(COMPLETION, ids, bearer(mine.key)))
        assert [each.status for each in own] == [200, 200, 200]
        name = own[0].headers["x-request-id"]
        for script in (
            Script(status=500), Script(error_body=True), Script(close_at=2, torn=True), Script(hang_at=1),
            Script(silent=True),
            Script(short=True), Script(status=401), Script(error_at=2),
        ):  # fmt: skip
            for engine in fleet.engines:
                engine.otherwise = script
            for body in (good, {**good, "stream": True}):
                answer = fleet.post(CHAT, body, bearer(mine.key))
                assert answer.status in (200, 502, 503, 504)
                seen[f"an answer to its own client, {script}"] = answer.headers
        for engine in fleet.engines:
            engine.otherwise = Script()
        os.kill(fleet.workers()[0], signal.SIGKILL)
        bad: list[Any] = [
            {**good, "n": mine.words}, {**good, "stop": {mine.words: 1}}, {**good, "stream": mine.salt},
            {**good, "messages": mine.words}, {**good, "messages": [{"role": mine.words}]},
            {**good, "model": mine.words},
            {**good, "cache_salt": [mine.salt]}, {**good, "kv_transfer_params": {mine.words: mine.ids}},
            {**good, "tools": mine.words}, {**ids, "prompt": [*mine.ids, "x"]}, mine.words.encode(),
            b'{"messages": "' + mine.words.encode(), {**good, "chat_template": mine.words}, {mine.words: mine.ids},
        ]  # fmt: skip
        until(lambda: serves(fleet, other), fleet.logs, 30.0)
        for number, body in enumerate(bad):
            for key in (mine.key, mine.key[:-1]):
                answer = fleet.post(CHAT, body, bearer(key))
                assert 400 <= answer.status < 500, (number, answer)
                seen[f"the refusal of {number}"] = answer.body
        path = f"/{mine.words.split()[0]}?key={mine.key}"
        seen["the refusal of a path"] = fleet.get(path, bearer(mine.key)).body
        seen["another's answer"] = fleet.post(CHAT, chat("hi"), bearer(other)).body
        seen["another's explanation"] = fleet.get(f"/explain/{name}", bearer(other)).body
        for what in ("/metrics", "/fleet", f"/explain/{name}", "/ready", f"/explain/{mine.words.split()[0]}"):
            seen[what] = fleet.control("GET", what).body if "word" not in what else ""
        wrong_query = {"model": mine.words, "token_ids": "x", "block_size": 4}
        seen["the refusal of a query"] = fleet.control("POST", "/query", wrong_query).body
        long = fleet.control("GET", "/fleet", headers=bearer(mine.key + "x" * 9000))
        assert long.status in (400, 401)
        fleet.control("GET", "/fleet", headers={"x" * 9000: mine.key})
        seen["command lines and environments"] = command_lines()
        seen["names of files"] = "\n".join(map(str, tmp_path.rglob("*")))
        pids = family(fleet.process.pid)
        assert len(pids) == 2
        seen["names of threads"] = "".join(
            task.read_text() for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/comm")
        )
        asked = [it for engine in fleet.engines for it in engine.requests]
        assert {it.path for it in asked} >= {CHAT, COMPLETION, "/health", "/metrics"}
        assert all(it.headers.get("authorization") == f"Bearer {mine.engine_key}" for it in asked)
    seen["the log"] = fleet.logs()
    assert "Traceback" not in fleet.logs()
    mine.sees_none(seen)
