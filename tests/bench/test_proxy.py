"""`headwater bench proxy`: how turns become figures, and that every promised figure is there."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from headwater.bench import command, proxy, proxy_latency, proxy_memory, proxy_systems
from headwater.bench.harness import Effort, Reading, Suite, Unmeasured
from headwater.bench.machine import Observer
from headwater.bench.proxy_rounds import Contender, Rounds, Sample
from headwater.bench.proxy_systems import AIOHTTP, CACHE_AWARE, ROUTING, SPLICE, Running, System, fleet_file, place
from headwater.bench.report import Report
from headwater.conductor.control.indexer import Gone, Publisher
from headwater.errors import ConfigError, UnavailableError
from headwater.fleetfile.read import read_fleet

TIMES = {"p50": 0.001, "p99": 0.002, "max": 0.003}


def sample(core: float = 1000.0, wall_s: float = 2.0) -> Sample:
    answer = {"wall_s": wall_s, "requests": 100, "latency": TIMES, "lag": TIMES, "ttft": TIMES}
    return Sample(answer, 100, 100 / core, 8 << 20)


@pytest.fixture
def rounds(tmp_path: Path) -> Rounds:
    return Rounds(None, tmp_path)  # type: ignore[arg-type]


def test_a_core_rate_is_of_cpu_time_and_a_wall_rate_of_the_clock() -> None:
    assert sample(4000.0, 0.5).core == pytest.approx(4000.0)
    assert sample(4000.0, 0.5).wall == pytest.approx(200.0)
    assert sample().time_ms("lag", "p99") == pytest.approx(2.0)
    assert sample().memory_mib == 8


def test_the_ratio_is_the_median_of_the_rounds_ratios(rounds: Rounds) -> None:
    samples = {
        "ours": [sample(200), sample(20), sample(400)],
        "theirs": [sample(100), sample(10), sample(100)],
    }
    found = rounds.compare("ours", "theirs", samples, lambda it: it.core)
    assert isinstance(found, Reading)
    assert found.value == pytest.approx(200)
    assert found.yardstick_value == pytest.approx(100), "2 x in the median round, although medians' ratio is 2 too"
    samples["theirs"] = [sample(100), sample(40), sample(100)]
    found = rounds.compare("ours", "theirs", samples, lambda it: it.core)
    assert isinstance(found, Reading)
    assert found.value / (found.yardstick_value or 1) == pytest.approx(2.0)


def test_the_best_is_the_best_of_each(rounds: Rounds) -> None:
    samples = {"ours": [sample(200), sample(300)], "theirs": [sample(150), sample(100)]}
    found = rounds.best("ours", "theirs", samples, lambda it: it.core)
    assert isinstance(found, Reading)
    assert (found.value, found.yardstick_value) == (pytest.approx(300), pytest.approx(150))


@pytest.mark.parametrize("case", proxy.CASES, ids=lambda it: it.name)
def test_every_figure_of_a_case_is_measured(rounds: Rounds, case: proxy.Case) -> None:
    samples = {it.name: [sample(), sample(2000)] for it in case.contenders(Effort(2))}
    found = proxy.readings(case, rounds, samples)
    assert {it.name for it in case.specs()} == set(found)
    assert all(isinstance(it, Reading) for it in found.values())


def test_without_ours_the_others_are_still_shown(rounds: Rounds) -> None:
    case = proxy.CASES[0]
    samples = {it.name: [sample()] for it in case.contenders(Effort(1))}
    rounds.reasons["ours"] = "no command"
    found = proxy.readings(case, rounds, samples)
    assert found["relay/unary/core"] == Unmeasured("no command")
    assert isinstance(found["relay/unary/vllm-router/core"], Reading)
    assert isinstance(found["relay/unary/splice/core"], Reading)


def test_targets_hold_for_what_is_compared_with_the_router_and_names_are_unique() -> None:
    specs = proxy.SUITE.specs
    assert len({it.name for it in specs}) == len(specs)
    ahead = {it.name for it in specs if it.goal == proxy.AHEAD}
    assert ahead == {"relay/unary/core", "relay/sse/core", "route/unary/core", "route/sse/core"}


def broken(ports: object, port: int, folder: Path, model: Path) -> list[str]:
    return [sys.executable, "-c", "raise SystemExit('no such policy')"]


@pytest.mark.alone
def test_a_case_with_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "QUICK_REQUESTS", 200)
    case = replace(
        proxy.CASES[0],
        ours=SPLICE,
        theirs=AIOHTTP,
        others=(("direct", None, "text"), ("broken", System("broken", "broken", broken), "text")),
    )
    turns: list[int] = []
    effort = Effort(2, quick=True, after_turn=lambda: turns.append(1), model=Path("/no/model"))
    wanted = frozenset(it.name for it in case.specs())
    found = proxy.measure(case, effort, wanted)
    assert len(turns) == 3 * 3
    core = found["relay/unary/core"]
    assert isinstance(core, Reading) and core.yardstick_value is not None
    assert core.value > core.yardstick_value > 100
    assert isinstance(found["relay/unary/direct/wall"], Reading)
    lost = found["relay/unary/broken/core"]
    assert isinstance(lost, Unmeasured)
    assert lost.reason.endswith("no such policy")


@pytest.mark.alone
def test_a_contender_that_answers_wrongly_is_left_out_of_what_follows(tmp_path: Path) -> None:
    case = proxy.CASES[0]
    with place(tmp_path, tmp_path) as where, Rounds(where, tmp_path) as rounds:
        rounds.begin([], where.origin(1))
        turn = replace(case.turn("text", Effort(1, quick=True)), requests=8, connections=2)
        rounds._running["ours"] = Running(1, None)
        samples = rounds.run([Contender("ours", None, turn)], 2, lambda: None)
        assert samples == {"ours": []}
        assert "ConnectionRefused" in rounds.reasons["ours"]


# ---- how the proxies are started


def test_our_fleet_file_is_one_that_the_conductor_reads(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(fleet_file([9001, 9002], 8000, 8001, Path("/models/small"), "round_robin", "none"), "utf-8")
    fleet = read_fleet(path)
    assert (fleet.conductor.listen, fleet.conductor.control) == ("127.0.0.1:8000", "127.0.0.1:8001")
    assert (fleet.conductor.policy, fleet.conductor.tokens, fleet.conductor.workers) == ("round_robin", "none", 1)
    assert [it.url for it in fleet.instances] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    assert all(it.events_off and it.served_name == "model" and it.block_tokens == 16 for it in fleet.instances)


def test_the_router_is_told_about_all_instances_and_that_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_systems, "PEERS", tmp_path)
    with pytest.raises(UnavailableError, match=r"install_peers\.py"):
        CACHE_AWARE.command([1], 2, tmp_path, tmp_path)
    (tmp_path / "vllm_router/bin").mkdir(parents=True)
    (tmp_path / "vllm_router/bin/python").touch()
    command = CACHE_AWARE.command([9001, 9002], 8000, tmp_path, tmp_path)
    assert command[command.index("--policy") + 1] == "cache_aware"
    assert command[command.index("--worker-urls") + 1 :] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]


def test_where_our_control_listens_is_known(tmp_path: Path) -> None:
    ROUTING.command([9001], 8000, tmp_path, tmp_path)
    assert read_fleet(tmp_path / "fleet.yaml").conductor.control.endswith((tmp_path / "control").read_text("ascii"))


# ---- what is added to the first token

METRICS = """# HELP x y
headwater_conductor_tokenising_seconds_bucket{how="local",le="0.1"} 3
headwater_conductor_tokenising_seconds_sum{how="local"} 0.5
headwater_conductor_tokenising_seconds_sum{how="known"} 0.25
headwater_conductor_tokenising_seconds_count{how="local"} 3
headwater_conductor_tokenising_seconds_count{how="known"} 1
headwater_conductor_tokenising_seconds_created 17
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_who_asks_and_who_is_asked_have_no_core_in_common() -> None:
    with ExitStack() as stack:
        ones, others = (stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(2))
        stack.callback(ones.kill)
        stack.callback(others.kill)
        before = os.sched_getaffinity(0)
        proxy_latency.keep_apart([ones.pid], [others.pid])
        first, second = os.sched_getaffinity(ones.pid), os.sched_getaffinity(others.pid)
        assert first | second == before == os.sched_getaffinity(0) and not first & second and first and second


def test_a_histogram_is_summed_over_its_labels() -> None:
    assert proxy_latency.histogram(METRICS, proxy_latency.TOKENISING) == (0.75, 4)
    assert proxy_latency.histogram(METRICS, "other") == (0, 0)


def test_what_is_added_is_beyond_the_engine_and_beyond_tokenising() -> None:
    pairs = [proxy_latency.Pair(1.0, 2.0, 4.0, 9.0, 2.5), proxy_latency.Pair(1.0, 2.0, 5.0, 8.0, 2.5)]
    assert pairs[0].added_p50 == pytest.approx(0.5)
    assert pairs[0].added_p99 == pytest.approx(4.5)
    found = proxy_latency.summarise("text", 100.0, pairs) | proxy_latency.summarise("ids", 100.0, pairs)
    assert set(found) == {it.name for it in proxy_latency.ADDED.specs}
    p99 = found["ttft/text/p99"]
    assert isinstance(p99, Reading)
    assert p99.value == pytest.approx(4.0)


def test_a_conductor_that_counts_no_tokenising_is_no_figure() -> None:
    found = proxy_latency.summarise("text", 1.0, [proxy_latency.Pair(1, 1, 1, 1)])
    assert found["ttft/text/tokenising"] == Unmeasured("the Conductor does not tell")


# ---- memory


def points(*mib: float, threads: int = 5) -> list[proxy_memory.Point]:
    return [proxy_memory.Point(at, int(it * 2**20), threads) for at, it in enumerate(mib, 1)]


def test_a_plateau_and_a_leak_differ() -> None:
    assert proxy_memory.growth(points(*range(10, 60), *[60] * 50)) == pytest.approx(1.0)
    assert proxy_memory.growth(points(*range(100, 200))) > 1.2


def test_memory_has_all_its_figures_and_is_measured_only_on_request() -> None:
    specs = {it.name for it in proxy_memory.MEMORY.specs}
    assert set(proxy_memory.readings(points(10, 11, 12), 200)) == specs
    found = proxy_memory.measure(Effort(1), frozenset(specs))
    assert found == dict.fromkeys(specs, Unmeasured(proxy_memory.ON_REQUEST))


def test_guests_introduce_themselves_as_the_interface_wants_it() -> None:
    publisher = msgspec.convert(proxy_memory.guest("guest1", 9001, 9002), Publisher)
    assert (publisher.instance_id, publisher.url) == ("guest1", "http://127.0.0.1:9001")
    msgspec.convert({"instance_id": "guest1"}, Gone)


class Refusing(BaseHTTPRequestHandler):
    """Answers everything with 400."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b"no such instance")

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


def test_a_refused_call_is_said() -> None:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = Thread(target=server.handle_request)
    thread.start()
    with pytest.raises(UnavailableError, match=r"/register was answered 400: no such instance"):
        proxy_memory.tell(Running(0, None, server.server_address[1]), "/register", {})
    thread.join()
    server.server_close()


# ---- the command line


@pytest.mark.parametrize(
    ("words", "prompts", "figures"),
    [
        (["--memory"], command.PROMPTS, "memory/"),
        (["--memory", "--quick"], command.QUICK_PROMPTS, "memory/"),
        (["--memory", "--prompts", "5000"], 5000, "memory/"),
        (["--only", "relay/*"], 0, "relay/"),
    ],
    ids=["memory", "quick", "some", "relay"],
)
def test_memory_is_measured_alone_and_only_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, words: list[str], prompts: int, figures: str
) -> None:
    asked: list[tuple[frozenset[str], int]] = []

    def measure(suite: Suite, wanted: frozenset[str], effort: Effort, options: str) -> Report:
        asked.append((wanted, effort.prompts))
        return Report(suite.name, Observer().describe(), ())

    monkeypatch.setattr(command, "measure", measure)
    parser = argparse.ArgumentParser()
    command.configure(parser)
    command.run(parser.parse_args(["proxy", "--json", *words]))
    ((wanted, found),) = asked
    assert found == prompts
    assert wanted and all(it.startswith(figures) for it in wanted)


@pytest.mark.parametrize("count", ["0", "many"])
def test_a_wrong_number_of_prompts_is_named(count: str) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    with pytest.raises(ConfigError, match=f"--prompts {count}: not a whole number"):
        command.run(parser.parse_args(["proxy", "--memory", "--prompts", count]))
