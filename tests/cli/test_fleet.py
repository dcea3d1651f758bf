"""`headwater fleet`, `headwater conductor explain` and `... key`; the control API says what tests like."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.cli import main
from headwater.cli.fleet import report
from headwater.cli.show import console
from tests.conductor.control.rig import Rig, rig, tenant
from tests.servers import free_port

INSTANCE = {
    "name": "a", "number": 0, "model": "m", "role": "prefill", "node": "n0", "alive": True, "draining": False,
    "share": 1.0, "waiting_requests": 3, "waiting_tokens": 4096, "running_requests": 2, "running_tokens": 500,
    "capacity_tokens": 1000,
    "prefill_tokens_s": 12345.6, "decode_step_s": 0.01, "own_requests": 5, "ended_requests": 7, "prompt_tokens": 1000,
    "device_tokens": 400, "fetched_tokens": 250, "health": "closed", "outages": 0, "signals": 3,
}  # fmt: skip
BRAIN = {
    "policy": "headwater",
    "under_way": 5,
    "waiting": {"acme": 2},
    "instances": [
        INSTANCE,
        INSTANCE | {"name": "b\x1b[31m", "number": 1, "alive": False, "health": "open", "node": None},
    ],
}
SIGHT = {
    "keys": 1234567,
    "keys_max": 4194304,
    "sources": {
        "events:0.0": {"instance": "a", "rank": 0, "settled": True, "applied": 99, "gaps": 2, "resyncs": 1},
        "node:n0": {"up": False, "trouble": "no socket", "answers": 0},
    },
    "hottest": [{"key": "abcd1234", "tokens": 2048, "hits": 11, "places": ["device:a", "host:n0"]}],
}
EXPLAINED = {
    "request": "hw-0-1", "model": "m", "tenant": "acme", "priority": 0, "prompt_tokens": 4096, "counted": "local",
    "expected_tokens": 256, "ttft_slo_s": 2.0, "tpot_slo_s": None, "outcome": "whole",
    "tries": [{
        "instance": "b", "decode": "b", "estimated": {"ttft_s": 0.35, "tpot_s": 0.02}, "cached_tokens": 2048,
        "fetched_tokens": 1024, "source": "host:0", "waited_s": 0.012, "verdict": "ok", "left_out": 3,
        "candidates": [
            {"instance": name, "cost_s": cost, "queue_s": 0.1, "fetch_s": 0.05, "prefill_s": 0.2, "decode_s": 1.5,
             "cached_tokens": 2048, "fetched_tokens": 1024} for name, cost in (("b", 0.35), ("a", 0.9))
        ],
    }],
    "took": {
        "first_token_s": 0.41, "per_token_s": 0.021, "whole_s": 3.2, "answered_tokens": 128, "cached_tokens": 3072,
    },
}  # fmt: skip


class Served:
    """A control API in a thread of its own."""

    def __init__(self, folder: Path, change: Callable[[Rig], None], **spec: Any) -> None:
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ended, self._ready = asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(folder, change, spec),))
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self, folder: Path, change: Callable[[Rig], None], spec: dict[str, Any]) -> None:
        async with rig(folder, 2, **spec) as it:
            change(it)
            self.url = it.control.url
            self._ready.set()
            await self._ended.wait()
        await asyncio.sleep(0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()


Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a control API; its URL."""
    served: list[Served] = []

    def start(change: Callable[[Rig], None], **spec: Any) -> str:
        served.append(Served(tmp_path, change, **spec))
        return served[-1].url

    yield start
    for it in served:
        it.close()


def filled(it: Rig) -> None:
    """Two workers of a fleet at work."""
    for worker in it.workers:
        worker.brain.said, worker.sight.said = BRAIN, SIGHT
        worker.counts.observe("ttft_seconds", 0.2)
        acme = worker.tenants.named("acme")
        if acme is not None:
            assert worker.tenants.enter(acme, 1.0) is None
            assert worker.tenants.enter(acme, 1.0) is not None
            worker.tenants.used(acme, 50, 1.0)
        worker.tenants.who(b"Bearer nobody's")
    it.workers[1].brain.known["hw-0-1"] = EXPLAINED


def test_a_fleet_as_tables(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(filled, tenants=[replace(tenant("acme", "a key of the tests"), concurrency=1)])
    assert main(["fleet", "--control", url]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    for word in ("prefill", "n0", "serving", "4,096", "500", "50.0 %", "12,346", "14", "40.0 %", "25.0 %"):
        assert word in lines["a"], word
    assert "out (open)" in lines["b?[31m"]
    assert "\x1b" not in shown
    for word in ("yes; 1 of 2 instances", "10 under way, 4 waiting", "1,234,567 keys of at most 4,194,304"):
        assert word in shown
    assert "half within 0.25 s, 90 % within 0.25 s, of 2" in lines["first"]
    assert lines["acme"].split() == ["acme", "2", "concurrency", "2", "4", "100"]
    assert "well" in lines["events:0.0"]
    assert "2 gaps, 1 resyncs" in lines["events:0.0"]
    assert "behind" in lines["node:n0"]
    assert "no socket" in lines["node:n0"]
    assert lines["abcd1234"].split() == ["abcd1234", "device:a,", "host:n0", "2,048", "22"]
    assert [line.split()[1] for line in shown.splitlines() if line[:2] in ("0 ", "1 ")] == ["ready", "ready"]
    assert lines["unknown"].split() == ["unknown", "keys", "2"]


def test_a_fleet_for_programs(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(filled)
    assert main(["fleet", "--control", url, "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    a = state["brain"]["instances"][0]
    # Loads are of all workers already; what each has done is added up.
    assert (a["waiting_requests"], a["own_requests"], a["prompt_tokens"], a["number"]) == (3, 10, 2000, 0)
    assert a["prefill_tokens_s"] == pytest.approx(12345.6)
    assert (state["sight"]["keys"], state["sight"]["sources"]["events:0.0"]["gaps"]) == (1234567, 2)
    assert state["sight"]["hottest"] == [
        {"key": "abcd1234", "tokens": 2048, "hits": 22, "places": ["device:a", "host:n0"]}
    ]
    assert [row["trouble"] for row in state["workers"]] == ["", ""]


def test_a_fleet_that_does_not_serve_is_exit_code_1(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(lambda it: it.control.draining())
    assert main(["fleet", "--control", url]) == 1
    assert "no: draining" in capsys.readouterr().out


@pytest.mark.parametrize(
    "state", [{}, {"brain": [], "sight": 1, "workers": [None]}, {"brain": {"instances": [{}]}}], ids=range(3)
)
def test_what_is_missing_is_no_error(state: dict[str, Any]) -> None:
    screen = console()
    with screen.capture() as captured:
        screen.print(report(state))
    assert "conductor" in captured.get()


def test_watching_says_when_the_conductor_is_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("headwater.cli.fleet.time.sleep", pause)
    assert main(["fleet", "--control", f"http://127.0.0.1:{free_port()}", "--watch", "3s", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [set(row) for row in rows] == [{"unavailable"}] * 2
    assert looks == [3.0, 3.0]


def test_explain_shows_the_candidates_the_choice_and_what_it_took(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(filled)
    assert main(["conductor", "explain", "hw-0-1", "--control", url]) == 0
    shown = capsys.readouterr().out
    for words in (
        "hw-0-1, model m, tenant acme",
        "4,096 tokens (counted: local)",
        "first token within 2 s",
        "whole, by worker 1",
        "first token 410 ms, each token 21 ms, in all 3.2 s",
        "128 answered; of the prompt 3,072 were reused",
        "chosen b: first token estimated in 350 ms, with 2,048 tokens there and 1,024 fetched from host:0",
        "it waited 12 ms before",
        "3 more instances",
    ):
        assert words in shown, words
    rows = [line.split() for line in shown.splitlines() if line.startswith(("> b", "  a"))]
    assert rows[0] == "> b 350 ms 100 ms 50 ms 200 ms 1.5 s 2,048 1,024".split()  # noqa: SIM905
    assert rows[1][:3] == ["a", "900", "ms"]
    assert main(["conductor", "explain", "hw-0-1", "--control", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"worker": 1, "explained": EXPLAINED}


def test_explain_of_a_pair_names_both_and_what_went_wrong(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    only = {**EXPLAINED["tries"][0], "instance": "b", "decode": "d", "prefill_lost": "late"}
    told = {**EXPLAINED, "tries": [only], "took": {**EXPLAINED["took"], "prefilled_s": 0.2, "found_tokens": 2048}}
    url = serve(lambda it: it.workers[1].brain.known.update({"hw-0-1": told}))
    assert main(["conductor", "explain", "hw-0-1", "--control", url]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("chosen b, to decode at d: ", "its prompt 200 ms", "; 2,048 were found by the one that answered"):
        assert words in shown, words
    assert "; its prompt was not computed there (late)" in shown


def test_an_id_that_nobody_remembers_is_said_with_how_many_are(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(lambda it: None, explained=1234)
    assert main(["conductor", "explain", "hw-\x1b-9", "--control", url]) == 1
    said = capsys.readouterr().err
    assert "hw-?-9: no worker remembers such a request; the last 1,234 of each worker are remembered" in said
    assert "conductor.explained" in said


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("http://127.0.0.1:{free}", 1, "start one with `headwater up"),
        ("ftp://127.0.0.1:1", 2, "not http://HOST:PORT"),
        ("127.0.0.1:8001", 2, "not http://HOST:PORT"),
        ("http://user:pw@127.0.0.1:1", 2, "not http://HOST:PORT"),
        ("http://127.0.0.1:99999", 2, "not http://HOST:PORT"),
    ],
    ids=["nobody", "ftp", "bare", "user", "port"],
)
def test_where_no_conductor_is_the_remedy_is_named(
    url: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["fleet"], ["conductor", "explain", "x"]):
        assert main([*command, "--control", url.format(free=free_port())]) == code
        said = capsys.readouterr().err
        assert words in said
        assert "pw" not in said


def test_the_token_is_read_from_a_private_file(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "control.token"
    token.write_text("a token of the tests, long enough")
    token.chmod(0o600)
    url = serve(filled, control_token_file=str(token))
    assert main(["fleet", "--control", url]) == 2
    assert "name its file with --token-file" in capsys.readouterr().err
    assert main(["fleet", "--control", url, "--token-file", str(token)]) == 0
    token.chmod(0o644)
    assert main(["fleet", "--control", url, "--token-file", str(token)]) == 2
    assert "chmod 600" in capsys.readouterr().err


def test_a_key_is_printed_once_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conductor", "key", "--tenant", "acme"]) == 0
    shown = capsys.readouterr().out
    key = next(line.strip() for line in shown.splitlines() if line.strip().startswith("sk-hw-"))
    assert shown.count(key) == 1
    assert f'- name: acme\n      keys: ["sha256:{hashlib.sha256(key.encode()).hexdigest()}"]' in shown
    assert main(["conductor", "key", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["row"] == f"sha256:{hashlib.sha256(row['key'].encode()).hexdigest()}"
    assert row["key"] != key
