"""The burst of chats: made, sent in turns, summed up; and how `headwater bench burst` sets it up."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headwater.bench import burst as bench
from headwater.bench.harness import Effort, Reading
from headwater.demo import burst as demo
from headwater.demo import front
from headwater.demo.burst import Burst, Result, burst, chats, reused, same_answers, summary
from headwater.demo.processes import Children, Served
from headwater.fleetfile.read import read_fleet

SMALL = Burst(families=3, chats=4, prefix_tokens=40, question_tokens=5, rate=400.0)


class FakeEngine(ThreadingHTTPServer):
    """Answers chats as vLLM does, and remembers them."""

    daemon_threads = False

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.name, self.status, self.cut = name, 200, False
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    """One streamed chat."""

    server: FakeEngine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.send_response(self.server.status)
        self.send_header("x-headwater-instance", self.server.name)
        self.send_header("x-headwater-reuse", "device=32, host=128")
        self.end_headers()
        question = body["messages"][1]["content"]
        events: list[Any] = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": question[:4]}}]},
            {"choices": [{"delta": {"content": "!"}}]},
            {"choices": [], "usage": {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 160}}},
        ]
        for event in events[: 1 if self.server.cut else None]:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    found = [FakeEngine("a"), FakeEngine("b")]
    threads = [threading.Thread(target=it.serve_forever, args=(0.01,)) for it in found]
    for it in threads:
        it.start()
    yield found
    for engine, thread in zip(found, threads, strict=True):
        engine.shutdown()
        thread.join()
        engine.server_close()


# ---- the chats


def test_a_burst_is_the_same_for_the_same_seed_and_new_for_another() -> None:
    assert chats(SMALL) == chats(SMALL)
    prefixes = {it.messages[0]["content"] for it in chats(SMALL)}
    assert not prefixes & {it.messages[0]["content"] for it in chats(replace(SMALL, seed=1))}


def test_families_share_their_prefix_and_nothing_else() -> None:
    requests = chats(replace(SMALL, chats=30))
    assert Counter(it.family for it in requests) == dict.fromkeys(range(3), 30)
    assert len({(it.family, it.messages[0]["content"]) for it in requests}) == 3
    assert len({it.messages[1]["content"] for it in requests}) == 90
    assert len(chats(SMALL)[0].messages[0]["content"].split()) == 40
    assert [it.family for it in requests] != sorted(it.family for it in requests)


def test_arrivals_keep_the_rate() -> None:
    due = [it.due_s for it in chats(replace(SMALL, chats=400, rate=10.0))]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(120.0, rel=0.1)


# ---- sending


def test_one_url_gets_everything_and_several_take_turns(engines: list[FakeEngine]) -> None:
    requests = chats(SMALL)
    answered: list[int] = []
    through = burst(requests, [engines[0].url], answered=lambda: answered.append(1))
    assert (len(engines[0].asked), len(engines[1].asked), len(answered)) == (12, 0, 12)
    robin = burst(requests, [it.url for it in engines])
    assert [it.instance for it in robin] == ["a", "b"] * 6
    assert [it.family for it in robin] == [it.family for it in requests]
    assert same_answers(through, robin) == 12
    assert through[0].text == requests[0].messages[1]["content"][:4] + "!"
    assert (through[0].prompt_tokens, through[0].cached_tokens) == (200, 160)
    assert through[0].reused == (("device", 32), ("host", 128))
    assert {(it["min_tokens"], it["max_tokens"]) for it in engines[0].asked} == {(SMALL.answer_tokens,) * 2}
    assert {it["temperature"] for it in engines[0].asked} == {0}


def test_times_count_from_when_a_request_was_due(engines: list[FakeEngine]) -> None:
    for it in burst(chats(SMALL), [engines[0].url]):
        assert 0 < it.ttft_s <= it.total_s < 5


def test_a_failure_is_a_result(engines: list[FakeEngine]) -> None:
    engines[0].status, engines[1].cut = 429, True
    results = burst(chats(SMALL), [it.url for it in engines])
    assert all("429" in it.failure for it in results[::2])
    assert all("without a token" in it.failure for it in results[1::2])
    assert {it.ttft_s for it in results} == {math.inf}
    found = summary(results, 1.0)
    assert (found.failed, found.within, found.goodput) == (12, 0, 0.0)
    assert found.ttft_mean_s == demo.PATIENCE_S
    assert same_answers(results, results) == 0


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("", ()),
        ("device=16", (("device", 16),)),
        ("host=128;disk=64", (("host", 128), ("disk", 64))),
        ("device=0, moon=9, host=x, remote", ()),
    ],
)
def test_what_the_headers_say_of_reuse(header: str, found: tuple[tuple[str, int], ...]) -> None:
    assert reused(header) == found


# ---- figures


def result(due_s: float, ttft_s: float, text: str = "x", **more: Any) -> Result:
    return Result(due_s, 0, ttft_s, ttft_s, 100, 60, text, reused=(("host", 60),), **more)


def test_goodput_is_what_met_the_slo_a_second_of_arrivals() -> None:
    results = [result(0.0, 0.5), result(1.0, 1.0), result(2.0, 3.0), result(3.0, 1.5)]
    found = summary(results, 1.0)
    assert (found.requests, found.within) == (4, 2)
    assert found.goodput == pytest.approx(2 / 4.0)
    assert found.ttft_mean_s == pytest.approx(1.5)
    assert (found.ttft_p50_s, found.ttft_p99_s) == (1.25, 3.0)
    assert found.reuse == pytest.approx(0.6)
    assert found.reused == {"host": 240}
    assert summary(results + results, 1.0).goodput == pytest.approx(2 / 4.0), "two bursts, one after the other"


def test_the_table_shows_both_ways() -> None:
    out = StringIO()
    made = demo.table({"headwater": [result(0.0, 0.5)], "round robin": [result(0.0, 2.0, failure="no")]}, 1.0)
    Console(file=out, width=200).print(made)
    said = out.getvalue()
    assert "headwater" in said and "host 60" in said and "1 failed" in said and "60%" in said


# ---- the bench


def test_both_sides_get_the_same_chats_and_take_turns_in_being_first(engines: list[FakeEngine]) -> None:
    urls = {"headwater": (engines[0].url,), "round robin": (engines[1].url,)}
    turns: list[int] = []
    found = bench.play(urls, SMALL, 2, 1.0, Effort(2, after_turn=lambda: turns.append(1)))
    assert len(turns) == 2 * 2 * 12
    asked = [Counter(it["messages"][1]["content"] for it in engine.asked) for engine in engines]
    assert asked[0] == asked[1]
    assert len({it["messages"][0]["content"] for it in engines[0].asked}) == 6, "new prompts each round"
    assert len(found.all("headwater")) == 24


def test_every_figure_is_there(engines: list[FakeEngine]) -> None:
    urls = {"headwater": (engines[0].url,), "round robin": (engines[0].url, engines[1].url)}
    found = bench.readings(bench.play(urls, SMALL, 1, 5.0, Effort(1)))
    assert set(found) == {it.name for it in bench.SUITE.specs}
    for name in ("burst/goodput", "burst/ttft/mean"):
        it = found[name]
        assert isinstance(it, Reading)
        assert it.yardstick_value
    equal = found["burst/equal"]
    assert isinstance(equal, Reading)
    assert equal.value == 100


def test_the_pace_is_that_of_a_warm_engine_and_a_prefix_that_nobody_has_seen(engines: list[FakeEngine]) -> None:
    served = [Served(it.name, it.server_address[1], None) for it in engines]  # type: ignore[arg-type]
    assert 0 < bench.cold_s(served, SMALL) < 5
    prefixes = [it["messages"][0]["content"] for engine in engines for it in engine.asked]
    assert len(prefixes) == 2 * (bench.WARM_UPS + 1) == len(set(prefixes))


class NoChildren(Children):
    """Starts nothing, and remembers what it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[list[str]] = []

    def start(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> Any:
        self.commands.append(list(command))
        return SimpleNamespace(wait_until=lambda *_: None)


def test_engines_differ_in_the_plug_in_and_events_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    children = NoChildren()
    ours = bench._engine(children, tmp_path, "a0", 0, "unix:/node", tmp_path)
    theirs = bench._engine(children, tmp_path, "a0", 0, None, tmp_path)
    with_us, without = (
        [it for it in words if it != str(port)]
        for words, port in zip(children.commands, (ours.port, theirs.port), strict=True)
    )
    at = with_us.index("--kv-transfer-config")
    extra = with_us[at : at + 4]
    assert with_us[:at] + with_us[at + 4 :] == without
    assert json.loads(extra[1])["kv_connector_extra_config"]["node"] == "unix:/node"
    assert extra[2] == "--kv-events-config" and "*" not in json.loads(extra[3])["endpoint"]
    assert without[-len(bench.FLAGS) :] == list(bench.FLAGS), "the last ones win"


def test_our_fleet_file_is_one_that_the_conductor_reads(tmp_path: Path) -> None:
    engines = [
        Served(f"A{it}", 9001 + it, None, f"tcp://127.0.0.1:{9101 + it}", f"tcp://127.0.0.1:{9201 + it}")  # type: ignore[arg-type]
        for it in range(2)
    ]
    path = tmp_path / "fleet.yaml"
    path.write_text(front.fleet_file(Path("/models/small"), 8000, 8001, "unix:/node", engines), "utf-8")
    fleet = read_fleet(path)
    assert [(it.name, it.events, it.replay) for it in fleet.instances] == [
        ("a0", "tcp://127.0.0.1:9101", "tcp://127.0.0.1:9201"),
        ("a1", "tcp://127.0.0.1:9102", "tcp://127.0.0.1:9202"),
    ]
    assert [it.node for it in fleet.instances] == ["node", "node"]
    assert fleet.conductor.policy == "headwater"
