"""What several workers say as one fleet, and their counts as metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headwater.conductor.control.merge import RETIRED, Counted, merged, percentiles
from headwater.conductor.counts import BOUNDS_S, Counts
from headwater.metrics.conductor import ABOUT, FAMILIES, LABELS, PREFIX, Kind, render
from tests.conftest import ROOT


def state(**parts: object) -> dict[str, object]:
    return {"brain": {}, "sight": {}, "tenants": {}} | parts


def test_what_each_counts_is_added_up_and_what_all_know_is_the_largest() -> None:
    one = {"name": "a", "number": 2, "own_requests": 1, "running_requests": 7, "share": 0.5, "alive": True}
    other = {"name": "a", "number": 2, "own_requests": 3, "running_requests": 5, "share": 1.0, "alive": False}
    both = {"name": "a", "number": 2, "own_requests": 4, "running_requests": 7, "share": 0.75, "alive": False}
    found = merged(
        [
            state(brain={"instances": [one], "waiting": {"t": 1}, "policy": "headwater", "under_way": 2}),
            state(brain={"instances": [other, {"name": "b"}], "waiting": {"t": 2, "u": 5}, "policy": "kind"}),
        ]
    )["brain"]
    assert found["instances"] == [both, {"name": "b"}]
    assert found["waiting"] == {"t": 3, "u": 5}
    assert (found["policy"], found["under_way"]) == ("headwater/kind", 2)


def test_the_hottest_of_all_come_first() -> None:
    rows = [{"key": f"k{number}", "hits": number, "tokens": 100, "places": ["a"]} for number in range(20)]
    others = [rows[3] | {"hits": 40, "places": ["b"]}]
    found = merged([state(sight={"hottest": rows}), state(sight={"hottest": others})])
    hottest = found["sight"]["hottest"]
    assert hottest[0] == {"key": "k3", "hits": 43, "tokens": 100, "places": ["a", "b"]}
    assert [row["hits"] for row in hottest[1:]] == list(range(19, 4, -1))


plain = st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3)
names = st.sampled_from(["name", "key", "a", "hits", "hottest"])
anything = st.recursive(
    plain, lambda it: st.lists(it, max_size=3) | st.dictionaries(names, it, max_size=3), max_leaves=9
)


@given(st.lists(st.fixed_dictionaries({"brain": anything, "sight": anything, "tenants": anything}), max_size=3))
def test_no_state_makes_it_fail(states: list[dict[str, object]]) -> None:
    assert set(merged(states)) == {"brain", "sight", "tenants", "tokens"}


def test_of_one_worker_nothing_changes() -> None:
    said = {"instances": [{"name": "a", "x": 1.5, "y": None, "z": [1, 2]}], "waiting": {}, "policy": "p"}
    assert merged([state(brain=said)])["brain"] == said


# ---- counts


def counts(**numbers: float) -> dict[str, object]:
    made = Counts()
    for name, value in numbers.items():
        made.add(name, "", value)
    return made.state()


def test_counts_of_workers_that_ended_stay() -> None:
    counted = Counted()
    counted.take({0: {"pid": 1, "counts": counts(a=5)}, 1: {"pid": 2, "counts": counts(a=7)}}, {0, 1})
    counted.take({0: {"pid": 9, "counts": counts(a=1)}}, {0, 1})  # another process in the same row
    assert counted.ended == 1
    assert counted.sums()["numbers"] == [["a", "", 13]]
    counted.take({}, {0})
    assert counted.ended == 2
    assert set(counted.by_row) == {0, RETIRED}
    assert counted.sums()["numbers"] == [["a", "", 13]]


@given(st.lists(st.floats(1e-4, 100), min_size=1, max_size=50))
def test_percentiles_are_the_bounds_that_so_many_stayed_within(seconds: list[float]) -> None:
    made = Counts()
    for it in seconds:
        made.observe("t", it, "x" if it < 1 else "y")
    found = percentiles(made.state(), "t", BOUNDS_S)
    assert found is not None
    assert found["count"] == len(seconds)
    for word, part in (("p50_s", 0.5), ("p90_s", 0.9)):
        within = sum(it <= found[word] for it in seconds)
        assert within >= part * len(seconds) or found[word] == BOUNDS_S[-1]
    assert percentiles(made.state(), "other", BOUNDS_S) is None


# ---- metrics


def counted_names() -> Iterator[tuple[str, str]]:
    """What the Conductor counts, by reading it: the method and the name."""
    for path in sorted((ROOT / "src/headwater/conductor").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("add", "set", "observe")
                and re.search(r"counts$", ast.unparse(node.func.value))
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield node.func.attr, str(node.args[0].value)


def test_everything_that_is_counted_is_described() -> None:
    found = set(counted_names())
    assert found, "nothing is counted"
    missing = sorted(name for _, name in found if name not in FAMILIES)
    assert not missing, f"add to FAMILIES in metrics/conductor.py: {missing}"
    for how, name in found:
        kinds = {"add": (Kind.SUM,), "set": (Kind.LEVEL, Kind.EACH), "observe": (Kind.SECONDS,)}[how]
        assert FAMILIES[name].kind in kinds, f"{name} is counted by {how}()"


def test_what_is_scraped_can_be_read_and_has_words_for_everything() -> None:
    made = Counts()
    for name, family in FAMILIES.items():
        label = "word" if family.label else ""
        if family.kind is Kind.SECONDS:
            made.observe(name, 0.3, label)
        else:
            made.add(name, label, 2)
    text = render({0: made.state(), 4: made.state()}, dict.fromkeys(ABOUT, 1.0)).decode()
    ours = [it for it in text_string_to_metric_families(text) if it.name.startswith(PREFIX)]
    assert len(ours) == len(FAMILIES) + len(ABOUT)
    for metric in ours:
        assert len(metric.documentation) > 10, metric.name
        assert metric.type != "unknown"
        for sample in metric.samples:
            assert set(sample.labels) <= {it.label for it in FAMILIES.values()} | {"worker", "le"}
    refused = next(it for it in ours if it.name == PREFIX + "refused")
    assert refused.samples[0].value == 4
    assert "seconds_seconds" not in text


def test_what_is_not_described_is_shown_all_the_same() -> None:
    made = Counts()
    made.add("news", "x", 3)
    made.observe("news", 0.1)
    text = render({0: made.state()}, {}).decode()
    assert f'{PREFIX}news{{label="x"}} 3.0' in text
    assert f'{PREFIX}news_seconds_count{{label=""}} 1.0' in text


def test_labels_do_not_grow_without_bound() -> None:
    made = Counts()
    for number in range(10 * LABELS):
        made.add("refused", f"code{number:04}")
    text = render({0: made.state()}, {}).decode()
    rows = re.findall(rf'^{PREFIX}refused_total{{code="(\w+)"}} (\S+)$', text, re.MULTILINE)
    assert len(rows) == LABELS + 1
    assert sum(float(value) for _, value in rows) == 10 * LABELS
    assert dict(rows)["other"] == f"{9.0 * LABELS}"
