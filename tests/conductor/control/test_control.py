"""The parent's control API: who may ask what, probes beside stuck workers, explain, drain, metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from pathlib import Path

import pytest

from headwater.conductor.control import workers
from headwater.conductor.control.parent import Control
from headwater.conductor.control.worker import socket_path
from headwater.conductor.control.workers import ASK_S
from headwater.errors import ConfigError
from headwater.fleetfile.model import ConductorSpec, InstanceSpec
from headwater.metrics.conductor import render
from tests.conductor.canary import Canary, command_lines
from tests.conductor.control.rig import Rig, drive, rig, stuck, tenant, until
from tests.servers import free_port

TOKEN = "a token of the tests, long enough"
PUBLISHER = {
    "endpoint": "tcp://127.0.0.1:5557",
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "new",
    "block_size": 16,
    "dp_rank": 0,
    "url": "http://127.0.0.1:9000",
}
QUERY = {"model": "m", "token_ids": [1, 2, 3], "block_size": 16}
ROUTES = [
    ("GET", "/health", None, True),
    ("GET", "/ready", None, True),
    ("GET", "/metrics", None, False),
    ("GET", "/fleet", None, False),
    ("GET", "/explain/known", None, False),
    ("POST", "/register", PUBLISHER, False),
    ("POST", "/unregister", {"instance_id": "new"}, False),
    ("POST", "/query", QUERY, False),
    ("POST", "/query_by_hash", {"model": "m", "seq_hashes": [1], "block_size": 16}, False),
    ("POST", "/drain", None, False),
    ("GET", "/nowhere", None, False),
]


@pytest.fixture
def token(tmp_path: Path) -> str:
    """The path of a file with TOKEN."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("given", ["none", "wrong", "right"])
def test_every_route_but_the_probes_needs_the_token(given: str, tmp_path: Path, token: str) -> None:
    headers = {
        "none": {},
        "wrong": {"Authorization": f"Bearer {TOKEN}x"},
        "right": {"Authorization": f"bearer {TOKEN}"},
    }

    async def main() -> None:
        async with rig(tmp_path, control_token_file=token) as it:
            it.workers[0].brain.known["known"] = {"request": "known"}
            for method, path, body, is_open in ROUTES:
                got = await it.ask(method, path, body, **headers[given])
                if given == "right" or is_open:
                    expected = {"/drain": 202, "/nowhere": 404}.get(path, 200)
                    assert got.status == expected, (path, got)
                else:
                    assert (got.status, got.code) == (401, "no_token"), path
                    assert got.headers["WWW-Authenticate"] == "Bearer"
                    assert TOKEN not in got.text
            assert all(worker.drained == (given == "right") for worker in it.workers)
            assert all(len(worker.registry.specs) == 1 + (given == "right") for worker in it.workers)
            assert it.drained == 0

    drive(main)


def test_without_a_token_web_pages_are_kept_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            for method, path, body, is_open in ROUTES:
                for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example:8001"}):
                    got = await it.ask(method, path, body, **headers)
                    assert got.status == (200 if is_open else 403), (path, headers)
            assert not it.workers[0].drained
            for host in ("localhost", "127.0.0.1:8001", "[::1]:8001"):
                assert (await it.ask("GET", "/fleet", Host=host)).status == 200

    drive(main)


@pytest.mark.parametrize("address", ["0.0.0.0:8001", "10.1.2.3:8001", "[::]:8001", "headwater.example:8001"])
def test_others_reach_it_only_with_a_token(address: str, tmp_path: Path, token: str) -> None:
    with pytest.raises(ConfigError, match="control_token_file"):
        Control(ConductorSpec(control=address), tmp_path, render, lambda: None)
    Control(ConductorSpec(control=address, control_token_file=token), tmp_path, render, lambda: None)
    os.chmod(token, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Control(ConductorSpec(control=address, control_token_file=token), tmp_path, render, lambda: None)
    Path(token).write_text("short")
    os.chmod(token, 0o600)
    with pytest.raises(ConfigError, match="openssl rand"):
        Control(ConductorSpec(control=address, control_token_file=token), tmp_path, render, lambda: None)


def test_a_taken_port_is_said_with_the_remedy(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        one, other = (
            Control(ConductorSpec(control=f"127.0.0.1:{port}"), tmp_path, render, lambda: None) for _ in range(2)
        )
        await one.start()
        with pytest.raises(ConfigError, match="choose another port"):
            await other.start()
        await one.close()
        await other.close()

    drive(main)


def test_a_workers_socket_is_for_this_user_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, 1) as it:
            path = socket_path(tmp_path, 0)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            await it.workers[0].control.close()
            assert not path.exists()

    drive(main)


# ---- probes


def test_ready_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BEAT_S", 0.02)

    async def reasons(it: Rig, expected: str) -> None:
        deadline_s = time.monotonic() + 10
        while True:
            got = await it.ask("GET", "/ready")
            if got.json["reason"] == expected:
                break
            assert time.monotonic() < deadline_s, got
        assert got.status == (503 if expected else 200)
        assert got.json["ready"] is not bool(expected)

    async def main() -> None:
        async with rig(tmp_path) as it:
            await reasons(it, "")
            for worker in it.workers:
                worker.registry.here[0].alive = False
            await reasons(it, "no instance is alive")
            it.workers[1].registry.here[0].alive = True
            await reasons(it, "")
            it.workers[1].ready = False
            await reasons(it, "no instance is alive")
            it.workers[0].ready = False
            await reasons(it, "no worker is ready")
            assert (await it.ask("GET", "/health")).status == 200
            it.workers[0].ready = it.workers[1].ready = True
            await reasons(it, "")
            assert (await it.ask("POST", "/drain")).status == 202
            await reasons(it, "draining")
            assert (await it.ask("POST", "/drain")).status == 202
            await it.control.workers.ask_all("POST", "/drain")
            assert [worker.drained for worker in it.workers] == [1, 1]
            assert (await it.ask("GET", "/health")).status == 200
        assert it.drained == 1

    drive(main)


def test_before_any_worker_is_heard_it_is_not_ready(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, 0) as it:
            assert (await it.ask("GET", "/health")).status == 200
            assert (await it.ask("GET", "/ready")).json["reason"] == "no worker is ready"
            it.control.workers.started(7)  # it never listens
            assert (await it.ask("GET", "/ready")).status == 503
            assert (await it.ask("GET", "/fleet")).json["workers"][0]["trouble"]
            assert (await it.ask("POST", "/query", QUERY)).code == "unavailable"

    drive(main)


def test_a_stuck_worker_delays_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, 2) as it, stuck(tmp_path, 2):
            it.workers[1].brain.known["known"] = {"request": "known"}
            it.control.workers.started(2)
            for path in ("/health", "/ready", "/explain/known"):
                began_s = time.monotonic()
                assert (await it.ask("GET", path)).status == 200
                assert time.monotonic() - began_s < ASK_S / 2, path
            began_s = time.monotonic()
            fleet = (await it.ask("GET", "/fleet")).json
            assert ASK_S / 2 < time.monotonic() - began_s < ASK_S + 1
            assert [bool(row["trouble"]) for row in fleet["workers"]] == [False, False, True]
            assert "did not answer within 1 s" in fleet["workers"][2]["trouble"]
            got = await it.ask("GET", "/explain/other")
            assert (got.status, got.code) == (503, "unavailable")
            assert "worker 2" in got.text
            slow = [asyncio.create_task(it.ask("GET", "/fleet")) for _ in range(20)]
            began_s = time.monotonic()
            for _ in range(50):
                assert (await it.ask("GET", "/health")).status == 200
            assert time.monotonic() - began_s < ASK_S
            await asyncio.gather(*slow)
            assert (await it.ask("POST", "/query", QUERY)).status == 200
            await it.control.workers.gone(2)

    drive(main)


def test_a_worker_that_was_heard_long_ago_does_not_count(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, 1) as it:
            assert (await it.ask("GET", "/ready")).status == 200
            clock = it.control.workers._clock
            await it.workers[0].control.close()
            it.control.workers._clock = lambda: clock() + 3.5
            assert (await it.ask("GET", "/ready")).json["reason"] == "no worker is ready"

    drive(main)


# ---- explain


def test_explain_asks_all_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, 3, explained=77) as it:
            it.workers[2].brain.known["a/b?c%20"] = {"request": "a/b?c%20", "tries": []}
            got = await it.ask("GET", "/explain/a%2Fb%3Fc%2520")
            assert (got.status, got.json["worker"]) == (200, 2)
            got = await it.ask("GET", "/explain/none")
            assert (got.status, got.code) == (404, "not_remembered")
            assert "the last 77" in got.text
            assert (await it.ask("GET", "/explain/" + "x" * 200)).status == 400

    drive(main)


# ---- metrics


def test_metrics_are_added_up_and_never_go_back(tmp_path: Path) -> None:
    def value(text: str, name: str) -> float:
        return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[-1])

    name = 'headwater_conductor_refused_total{code="overloaded"}'

    async def main() -> None:
        async with rig(tmp_path, 2) as it:
            for worker in it.workers:
                worker.counts.add("refused", "overloaded", 5)
                worker.counts.set("http_connections", 3)
                worker.counts.observe("tokenising", 0.002)
            text = (await it.ask("GET", "/metrics")).text
            assert value(text, name) == 10
            assert value(text, "headwater_conductor_http_connections") == 6
            assert value(text, 'headwater_conductor_tokenising_seconds_bucket{le="0.0025"}') == 2
            assert value(text, "headwater_conductor_ready") == 1
            assert "# HELP headwater_conductor_refused_total Requests" in text
            await it.workers[1].control.close()  # it does not answer: its last word counts
            it.workers[0].counts.add("refused", "overloaded")
            text = (await it.ask("GET", "/metrics")).text
            assert value(text, name) == 11
            await it.control.workers.gone(1)  # it has ended: what it counted stays, what it had open does not
            text = (await it.ask("GET", "/metrics")).text
            assert value(text, name) == 11
            assert value(text, "headwater_conductor_http_connections") == 3
            assert value(text, "headwater_conductor_workers_ended_total") == 1
            assert value(text, 'headwater_conductor_tokenising_seconds_bucket{le="+Inf"}') == 2

    drive(main)


# ---- nothing leaks


def test_nobodys_secrets_are_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    canary = Canary()
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with rig(tmp_path, 1, tenants=[tenant("t", canary.key)]) as it:
            texts: dict[str, object] = {}
            it.workers[0].tenants.who(b"Bearer " + canary.key.encode())
            asked = QUERY | {"token_ids": canary.ids, "tenant_id": "t", "cache_salt": canary.salt}
            assert (await it.ask("POST", "/query", asked)).status == 200
            for place, body in enumerate(
                [
                    asked | {"model": 7},
                    asked | {"token_ids": canary.words},
                    asked | {"token_ids": [*canary.ids, canary.key]},
                    asked | {"tenant_id": canary.key},
                    asked | {"cache_salt": [canary.salt]},
                    asked | {"block_size": canary.words},
                    canary.words.encode(),
                    PUBLISHER | {"endpoint": canary.key},
                ]
            ):
                path = "/register" if isinstance(body, dict) and "endpoint" in body else "/query"
                got = await it.ask("POST", path, body, Authorization=f"Bearer {canary.key}")
                assert 400 <= got.status < 500
                texts[f"error {place}"] = got.text
            for path in ("/metrics", "/fleet", "/health", "/ready", f"/explain/{canary.key}"):
                texts[path] = (await it.ask("GET", path)).text
            texts["reprs"] = [it.workers[0].tenants, it.control, it.workers[0].control]
            canary.sees_none({**texts, "the log": caplog.text, "command lines": command_lines()})

    drive(main)


def test_the_canary_is_seen() -> None:
    canary = Canary()
    for text in (f"key={canary.key}", canary.salt.upper(), [canary.ids[0]], {"a": canary.words.split()[1]}):
        with pytest.raises(AssertionError, match="there has") as raised:
            canary.sees_none({"there": text})
        assert canary.key not in str(raised.value)


def test_instances_that_are_there_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with rig(tmp_path, 1) as it:
            monkeypatch.setattr(workers, "BEAT_S", 0.02)
            it.workers[0].registry.add(InstanceSpec("i1", "m", "m"))
            it.workers[0].registry.here[0].draining = True
            beats = it.control.workers.beats
            await until(lambda: (beats()[0] or {}).get("instances") == 2)
            assert (beats()[0] or {}).get("alive") == 1

    drive(main)
