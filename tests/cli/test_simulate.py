"""`headwater simulate` from a file to tables, JSON, plots and a page; what it refuses; and that its processes end."""

from __future__ import annotations

import base64
import errno
import json
import re
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headwater.cli import calibrate, simulate, simulate_plots
from headwater.cli.simulate_page import page
from headwater.cli.simulate_rows import Rows, labels, seconds, tables
from headwater.errors import ConfigError
from headwater.fleetfile.tables import read_yaml
from headwater.sim.fleet.config import parse_fleet
from headwater.sim.fleet.summary import summarise
from headwater.sim.fleet.sweep import Swept
from headwater.traces.generate import Chats, chats
from headwater.traces.write import write
from tests.commands import Command, ran
from tests.sim.fleet.plays import all_served, nobody_served

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fleet.yaml"
FLEET = "instances:\n  - {count: 2, blocks: 600, block_tokens: 16}\n"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs `headwater simulate` in a folder with a trace, `t.jsonl`, and a fleet, `fleet.yaml`."""
    monkeypatch.chdir(tmp_path)
    write(chats(7, 16, Chats(chats=25, chats_s=2.0)), "t.jsonl")
    Path("fleet.yaml").write_text(FLEET)

    return partial(ran, capsys, "simulate")


def settled(text: str) -> dict[str, Any]:
    """What `--json` printed, without the time that the simulation took."""
    found: dict[str, Any] = json.loads(text)
    for it in found["runs"]:
        del it["wall_s"], it["simulated_rps"]
    return found


def test_tables_say_what_came_of_each_run(command: Command) -> None:
    ended = command(
        "t.jsonl", "--fleet", "fleet.yaml", "--policy", "headwater,round_robin", "--load", "1,8", "--jobs=1"
    )
    assert (ended.code, ended.err) == (0, "")
    assert "fleet: fleet.yaml: 2 × 600 blocks of 16 tokens" in ended.out and "4 runs in" in ended.out
    rows = [re.split(r"\s*│\s*", it.strip("│ \n")) for it in ended.out.splitlines() if it.startswith("│")]
    assert [it[:2] for it in rows[:4]] == [
        ["headwater", "1"], ["headwater", "8"], ["round_robin", "1"], ["round_robin", "8"],
    ]  # fmt: skip
    assert float(rows[0][2].removesuffix(" %")) > float(rows[2][2].removesuffix(" %")) > 0


def test_json_is_the_same_for_the_same_seed_alone_or_in_company(command: Command) -> None:
    common = ("t.jsonl", "--fleet", "fleet.yaml", "--json", "--seed", "5")
    both = command(*common, "--sweep", "instances.0.blocks=600,900", "--jobs", "2")
    again = command(*common, "--sweep", "instances.0.blocks=600,900", "--jobs", "1")
    assert both.code == 0 and settled(both.out) == settled(again.out)
    found = settled(both.out)
    assert [it["settings"] for it in found["runs"]] == [
        {"policy": "headwater", "load": 1.0, "instances.0.blocks": 600},
        {"policy": "headwater", "load": 1.0, "instances.0.blocks": 900},
    ]
    assert found["seed"] == 5 and found["trace"]["requests"] == found["runs"][0]["requests"] > 25
    alone = settled(command(*common, "--set", "instances.0.blocks=900").out)["runs"][0]
    assert {**alone, "settings": 0} == {**found["runs"][1], "settings": 0}
    assert alone["log_hash"] != found["runs"][0]["log_hash"]


def test_part_of_a_trace_without_contents_with_and_without_sessions(command: Command) -> None:
    rows = "".join(f"2023-11-16 18:17:{n % 60:02}.0,{100 + 30 * n},5\n" for n in range(60))
    Path("a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    bare = command("a.csv", "--fleet", "fleet.yaml", "--json", "--first", "40")
    assert "note: the trace says nothing about contents, so nothing is reused; see --made-up-sessions" in bare.err
    found = settled(bare.out)["runs"][0]
    assert (found["requests"], found["reuse"]["overall"]) == (40, 0.0)
    made = command("a.csv", "--fleet", "fleet.yaml", "--json", "--made-up-sessions", "1")
    assert "note: sessions are made up" in made.err and settled(made.out)["runs"][0]["reuse"]["overall"] > 0
    assert command("t.jsonl", "--made-up-sessions", "1").err.endswith("for a trace without any\n")


def test_plots_are_png_and_the_page_needs_nothing_else(command: Command) -> None:
    name = "<script>x&'\"</script>".replace("/", "")
    Path(f"{name}.jsonl").write_bytes(Path("t.jsonl").read_bytes())
    arguments = (f"{name}.jsonl", "--fleet", "fleet.yaml", "--load", "4", "--png", "plots", "--html", "r.html")
    ended = command(*arguments)
    assert ended.code == 0 and ended.out.count("wrote plots/") == 6 and "wrote r.html" in ended.out
    for path in Path("plots").iterdir():
        width, height = png_size(path.read_bytes())
        assert width > 800 and height > 400
    assert {it.stem for it in Path("plots").iterdir()} == {"reuse", "ttft", "tpot", "goodput", "balance", "queue"}
    seen = Seen(Path("r.html").read_text("utf-8"))
    assert "script" not in seen.tags and seen.tags.count("table") == 4 and seen.tags.count("img") == 6
    assert f"Simulated: {name}" in seen.text and "per token p99" in seen.text
    for image in seen.images:
        svg = ElementTree.fromstring(base64.b64decode(image.removeprefix("data:image/svg+xml;base64,")))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"https?://", re.sub(r"base64,[^\"]*", "", seen.source))
    assert all(it.startswith("data:image/svg+xml;base64,") for it in seen.images) and not seen.links


def png_size(content: bytes) -> tuple[int, int]:
    """Width and height of a PNG, that ends as one."""
    assert content[:16] == b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" and content.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


class Seen(HTMLParser):
    """What a browser sees of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.tags, self.images, self.links, self.text = source, list[str](), list[str](), list[str](), ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "src":
                self.images.append(value or "")
            if name in ("href", "onload", "onclick", "action"):
                self.links.append(f"{name}={value}")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_escapes_every_string() -> None:
    evil = '<img src=x onerror="a">&'
    source = page(evil, {evil: evil}, [Rows(evil, (evil,), ((evil,),), 1)], [])
    seen = Seen(source)
    assert "img" not in seen.tags and seen.text.count(evil) == 7


def test_without_anything_to_draw_with_nothing_is_simulated(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for flag in ("--html", "--png"):
        ended = command("no such trace", flag, "x")
        assert ended.code == 2 and "pip install 'headwater[plots]'" in ended.err
    assert command("t.jsonl", "--fleet", "fleet.yaml", "--first", "3").code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "TRACE is missing; name a trace"),
        (("none.jsonl",), "none.jsonl: No such file"),
        (("t.jsonl", "--fleet", "none.yaml"), "none.yaml: No such file"),
        (("t.jsonl", "--fleet", "t.jsonl"), "t.jsonl"),
        (("t.jsonl", "--policy", "round"), "there is none named 'round'"),
        (("t.jsonl", "--load", "1,x"), "load: "),
        (("t.jsonl", "--load", "0"), "load: "),
        (("t.jsonl", "--load", ","), "'load=,': write PATH=VALUE,VALUE"),
        (("t.jsonl", "--set", "policy"), "'policy': write PATH=VALUE"),
        (("t.jsonl", "--set", "polici=x"), "polici: is not a setting here; the nearest is policy"),
        (("t.jsonl", "--set", "instances.0.blocks=many"), "instances[0].blocks: 'many' is not a whole number"),
        (("t.jsonl", "--sweep", "instances.3.blocks=1,2"), "leads into a list of 1"),
        (("t.jsonl", "--sweep", "retries=1", "--sweep", "retries=2"), "--sweep retries: is varied twice"),
        (("t.jsonl", "--jobs", "0"), "--jobs 0: write a number from 1 on"),
        (("t.jsonl", "--first", "0"), "the first 0 requests"),
        (("t.jsonl", "--block-tokens", "512"), "the block size asked for is 512"),
        (("t.jsonl", "--first", "3", "--html", "no/r.html"), "--html 'no/r.html': No such file or directory"),
        (("t.jsonl", "--first", "3", "--html", "."), "--html '.': Is a directory; name a place"),
        (("none.jsonl", "--html", "r.html"), "none.jsonl: No such file"),
        (("t.jsonl", "--out", "times.yaml"), "--out is for --calibrate"),
        (("t.jsonl", "--calibrate", "http://127.0.0.1:1"), "plays no trace; leave t.jsonl out"),
        (("t.jsonl", "--first", "3", "--png", "t.jsonl"), "--png 't.jsonl': File exists; name a place"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(command: Command, arguments: tuple[str, ...], said: str) -> None:
    ended = command(*arguments)
    assert ended.code == 2 and said in ended.err and ended.err.startswith("headwater simulate: ")
    assert ended.err.count("\n") == 1 and not ended.out
    assert Path("t.jsonl").stat().st_size > 1000 and not Path("no").exists() and not Path("r.html").exists()


def test_an_error_names_the_fleets_file_if_it_is_the_files(command: Command) -> None:
    Path("odd.yaml").write_text(FLEET + "polici: x\n")
    assert "simulate: odd.yaml: polici: is not a setting" in command("t.jsonl", "--fleet", "odd.yaml").err
    ended = command("t.jsonl", "--fleet", "fleet.yaml", "--set", "polici=x")
    assert "simulate: polici: is not a setting" in ended.err
    Path("odd.yaml").write_text(FLEET + "policy: {name: [headwater]}\n")
    ended = command("t.jsonl", "--fleet", "odd.yaml", "--policy", "headwater", "--first", "3")
    assert ended.code == 0  # the name is not asked for
    assert "odd.yaml: policy.name: " in command("t.jsonl", "--fleet", "odd.yaml").err


def test_what_was_found_is_said_even_if_it_cannot_be_written(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(target: Path, parts: list[str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(simulate, "write_whole", full)
    ended = command("t.jsonl", "--fleet", "fleet.yaml", "--first", "3", "--html", "r.html", "--json")
    assert ended.code == 2 and settled(ended.out)["runs"] and "--html 'r.html': No space left on device" in ended.err


def test_equal_values_are_one_run(command: Command) -> None:
    varied = ("--load", "1,1,1.0", "--policy", "session,session")
    ended = command("t.jsonl", "--fleet", "fleet.yaml", "--first", "3", "--json", *varied)
    assert [it["settings"] for it in settled(ended.out)["runs"]] == [{"policy": "session", "load": 1.0}]


def test_an_engine_is_measured_instead(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(url: str, *_: object) -> None:
        measured.append(url)
        raise ConfigError("measured enough")

    monkeypatch.setattr(calibrate, "calibrate", measure)

    ended = command("--calibrate", "http://127.0.0.1:1", "--out", "times.yaml")
    assert measured == ["http://127.0.0.1:1"] and "measured enough" in ended.err


def test_plots_tell_policies_by_colour_and_loads_by_line_or_panel() -> None:
    settings = [{"policy": policy, "load": load} for policy in ("a", "b") for load in (1.0, 2.0)]
    runs = [Swept(it, summarise(all_served(8))) for it in settings]
    drawn = {it.name: it.figure for it in simulate_plots.plots(runs)}
    lines = [it for it in drawn["ttft"].axes[0].lines if it.get_label() != " SLO: 2 s"]
    assert [(it.get_color(), it.get_linestyle()) for it in lines] == [
        ("C0", "-"),
        ("C0", "--"),
        ("C1", "-"),
        ("C1", "--"),
    ]
    assert len(drawn["ttft"].axes[0].lines) == 5
    panels = drawn["balance"].axes
    assert [it.get_title("left") for it in panels] == ["load ×1", "load ×2"]
    assert [[it.get_color() for it in panel.lines] for panel in panels] == [["C0", "C1"]] * 2
    for name in ("ttft", "tpot", "goodput", "balance"):  # nothing is drawn under a legend
        figure = drawn[name]
        assert len(figure.legends) == 1 and not any(it.get_legend() for it in figure.axes)


def test_the_example_fleet_is_one_and_so_is_what_its_comments_show(command: Command) -> None:
    config = parse_fleet(read_yaml(EXAMPLE))
    assert config.instance_count == 8 and config.kv_bytes_per_token == 128 << 10
    settings = "role|startup_s|disk|remote|conductors|deaths|signals"
    shown = re.sub(rf"(?m)^( *)# (?=  - \{{|(?:{settings}):)", r"\1", EXAMPLE.read_text())
    Path("all.yaml").write_text(shown)
    everything = parse_fleet(read_yaml(Path("all.yaml")))
    assert everything.tiers.disk and everything.tiers.remote and everything.conductors.count == 2
    assert everything.deaths and everything.signals.event_lag_s == 0.05 and everything.instances[0].startup_s == 60
    times = re.findall(r"times: (\{.*\})", EXAMPLE.read_text())
    assert len(times) == 1 and command("t.jsonl", "--first", "3", "--set", f"instances.0.times={times[0]}").code == 0
    assert command("t.jsonl", "--first", "3", "--fleet", str(EXAMPLE), "--set", "model=llama-3.1-8b").code == 0


def test_the_bytes_of_a_well_known_model_are_known(command: Command) -> None:
    Path("fleet.yaml").write_text(FLEET + "model: llama-3.1-8b\ntiers: {host: {size: 1GiB, bytes_s: 10GB}}\n")
    assert command("t.jsonl", "--first", "3", "--fleet", "fleet.yaml").code == 0
    ended = command("t.jsonl", "--fleet", "fleet.yaml", "--set", "model=unheard-of")
    assert ended.code == 2 and "unheard-of" in ended.err


def test_a_run_in_which_nobody_was_served_can_be_shown() -> None:
    runs = [Swept({"policy": "a", "load": 1.0}, summarise(nobody_served(3)))]
    assert tables(runs)[0].rows == (("a", "-", "0", "3", "0"),)
    assert all(it == "-" for it in tables(runs)[1].rows[0][1:])
    assert [it.name for it in simulate_plots.plots(runs)] == ["reuse", "goodput"]


def test_labels_and_numbers_as_people_read_them() -> None:
    summary = summarise(nobody_served(1))
    runs = [Swept({"policy": "$a_b", "load": load, "x.y": "1GiB"}, summary) for load in (1.0, 2.5)]
    assert labels(runs) == ["$a_b ×1", "$a_b ×2.5"]
    assert [seconds(it) for it in (0.0123456, 0.99949, 0.9996, 12.345, 1234.5)] == [
        "12.3 ms", "999 ms", "1 s", "12.3 s", "1,234 s",
    ]  # fmt: skip
    svg = next(it for it in simulate_plots.plots(runs) if it.name == "goodput").svg()
    assert svg == next(it for it in simulate_plots.plots(runs) if it.name == "goodput").svg()
