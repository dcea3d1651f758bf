"""The two machine-readable promises of `headwater bench`: the shape of `--json`, and the names of the figures."""

import io
import json
from typing import Any

from rich.console import Console

from headwater.bench.harness import Goal, Reading, Spec, conclude
from headwater.bench.machine import Observer
from headwater.bench.report import Report, show_number
from headwater.bench.suites import SUITES

NUMBER, OPTIONAL_NUMBER = (int, float), (int, float, type(None))
FIGURE: dict[str, Any] = {
    "name": str,
    "value": NUMBER,
    "unit": str,
    "yardstick": (str, type(None)),
    "yardstick_value": OPTIONAL_NUMBER,
    "ratio": OPTIONAL_NUMBER,
    "target": (str, type(None)),
    "met": (bool, type(None)),
    "cpu_s_per_gb": OPTIONAL_NUMBER,
}
FAST = Spec("copy/fast", "GB/s", "a | b", Goal(at_least=True, factor=1.25), "memcpy")
SLOW = Spec("copy/slow", "GB/s", "slower", Goal(at_least=True, factor=2), "memcpy")
PLAIN = Spec("node/start", "s", "start")


def example() -> Report:
    results = (
        conclude(FAST, Reading(10.0, 9.0, 11.0, 25, 6.0, 0.0999)),
        conclude(SLOW, Reading(10.0, 9.0, 11.0, 25, 6.0, 0.1)),
        conclude(PLAIN, Reading(0.5, 0.4, 0.6, 5)),
    )
    return Report("node", Observer().describe(), results, ((Spec("call/x", "us", ""), "one core only"),), " --quick")


def test_json_is_the_contract() -> None:
    said = json.loads(example().json())
    assert set(said) == {"machine", "figures", "missing"}
    assert said["missing"] == [{"name": "call/x", "reason": "one core only"}]
    assert isinstance(said["machine"], dict)
    assert {"cpu", "cores", "kernel", "huge_pages", "load_before", "load_after", "steal_percent"} <= set(
        said["machine"]
    )
    assert [it["name"] for it in said["figures"]] == ["copy/fast", "copy/slow", "node/start"]
    for figure in said["figures"]:
        assert list(figure) == list(FIGURE)
        for key, kinds in FIGURE.items():
            assert isinstance(figure[key], kinds), f"{key}={figure[key]!r}"
    fast, slow, plain = said["figures"]
    assert (fast["met"], slow["met"], plain["met"]) == (True, False, None)
    assert fast["ratio"] == fast["value"] / fast["yardstick_value"]


def test_markdown_has_every_figure_its_target_and_what_is_missing() -> None:
    text = example().markdown()
    rows = [line for line in text.splitlines() if line.startswith("| copy/fast")]
    assert rows == ["| copy/fast | 10 | 9 - 11 | GB/s | 6 | 1.67 | >= 1.25 x yardstick | yes | 0.100 | a \\| b; n=25 |"]
    assert "| copy/slow | 10 | 9 - 11 | GB/s | 6 | 1.67 | >= 2 x yardstick | no |" in text
    assert "| node/start | 0.5 | 0.4 - 0.6 | s | - | - | - | - | - | start; n=5 |" in text
    assert "Not measured: `call/x`: one core only." in text
    assert "headwater bench node --quick" in text
    assert "memcpy" in text


def test_the_terminal_has_every_figure_too() -> None:
    out = io.StringIO()
    example().print(Console(file=out, width=200))
    for word in ("copy/fast", "copy/slow", "node/start", "1.67", "one core only", "load average"):
        assert word in out.getvalue()


def test_numbers_keep_three_figures_and_whole_parts() -> None:
    assert [show_number(it) for it in (0.07314, 8.754, 112.4, 3412345.6)] == ["0.0731", "8.75", "112", "3,412,346"]


def test_names_of_figures_are_stable_and_unique() -> None:
    names = [spec.name for spec in SUITES["node"].specs]
    assert len(names) == len(set(names))
    promised = {
        *(
            f"{verb}/{shape}/1-thread"
            for verb in ("save", "load")
            for shape in ("llama-8b", "smollm2-bf16", "smollm2-fp32")
        ),
        "save/llama-8b/2-threads",
        "load/llama-8b/2-threads",
        "lookup/4k/hit/p50",
        "lookup/128k/hit/p50",
        "lookup/128k/hit/cpu",
        "keys/batch-4096",
        "call/two-cores/p50",
        "call/one-core/p50",
        "node/start",
        "node/bookkeeping",
    }
    assert promised <= set(names)
    assert all(spec.goal for spec in SUITES["node"].specs if spec.name in promised)
