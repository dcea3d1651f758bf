"""The plug-in's numbers against what really happened, through vLLM's own machinery and in the node's status."""

import copy
import random
from typing import Any

import prometheus_client
import pytest

from headwater.engines.vllm.stats import COUNTERS, HISTOGRAMS, HeadwaterStats
from headwater.node.client import fetch_status
from tests.engines.harness import Engine, Shape
from tests.engines.served import CHUNK, DENSE, MODES, SKIP, Faults, intercept
from tests.engines.vllm_names import KVConnectorLogging, KVConnectorProm
from tests.engines.workload import words

CHUNK_BYTES = 4096
"""Of the dense shape: 2 layers of 2 blocks of 1 KiB."""


def total(engine: Engine) -> dict[str, Any]:
    """The sums of all steps, as vLLM adds them up."""
    logged, before = KVConnectorLogging(engine.config.kv_transfer_config), copy.deepcopy(engine.stats)
    for it in engine.stats:
        logged.observe(it)
    assert engine.stats == before  # they are other readers' too
    return logged.transfer_stats_accumulator.data if engine.stats else HeadwaterStats().data


@MODES
def test_bytes_copies_and_failures_are_counted(served, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    for n in range(3):
        for engine in (first, second):
            engine.add(f"{n}", words(100, n))
            engine.run()
    saved, loaded = total(first), total(second)
    assert (saved["saved_bytes"], saved["loaded_bytes"]) == (9 * CHUNK_BYTES, 0)
    assert (loaded["saved_bytes"], loaded["loaded_bytes"]) == (0, 9 * CHUNK_BYTES)
    assert len(loaded["load_seconds"]) == 3
    assert all(0 < it < 60 for it in loaded["load_seconds"] + saved["save_seconds"])
    assert saved["failed_saves"] == loaded["failed_loads"] == 0
    intercept(second, "scatter", Faults(0, 1.0))
    intercept(second, "gather", Faults(0, 1.0))
    second.forget()
    second.add("failing", [*words(100, 0), *words(32, 9)])
    second.run()
    failed = total(second)
    assert (failed["failed_loads"], failed["failed_saves"]) == (1, 1)
    assert failed["loaded_bytes"] == 9 * CHUNK_BYTES
    assert sorted(failed) == sorted([*COUNTERS, *HISTOGRAMS])


@MODES
def test_all_ranks_are_in_the_sums(served, mode) -> None:
    first, second = (served.engine(Shape(tp=2), mode) for _ in range(2))
    for engine in (first, second):
        engine.add("a", words(100))
        engine.run()
    assert total(first)["saved_bytes"] == total(second)["loaded_bytes"] == 2 * 3 * CHUNK_BYTES
    assert len(total(second)["load_seconds"]) == 2


@MODES
def test_what_a_full_node_and_a_shrunken_hit_cost_is_counted(serve, mode) -> None:
    served = serve(1 << 20)
    first, second = (served.engine(Shape(head_size=64, max_tokens=1000, blocks=100), mode) for _ in range(2))
    first.add("a", words(20 * CHUNK))
    first.run()
    assert total(first)["short_saves"] >= 1
    update = second.connector.update_state_after_alloc

    def late(request: Any, blocks: Any, external_tokens: int) -> None:
        if external_tokens:
            served.cache.clear(0)
        update(request, blocks, external_tokens)

    second.connector.update_state_after_alloc = late
    second.add("b", words(20 * CHUNK)[: 4 * CHUNK])
    second.run()
    assert (total(second)["short_loads"], total(second)["failed_loads"]) == (1, 1)


def test_an_idle_engine_reports_nothing(served) -> None:
    engine = served.engine()
    engine.add("a", words(100))
    engine.run()
    known, reports = total(engine), len(engine.stats)
    engine.add("b", words(10), transfer=SKIP)
    engine.run()
    for _ in range(20):
        engine.step()
    assert len(engine.stats) == reports
    assert total(engine) == known


def test_sums_add_up_and_start_anew() -> None:
    one = HeadwaterStats({**HeadwaterStats().data, "loaded_bytes": 3_000_000, "load_seconds": [0.5]})
    two = HeadwaterStats({**HeadwaterStats().data, "loaded_bytes": 4_000_000, "load_seconds": [0.25, 1.0]})
    assert HeadwaterStats().is_empty()
    assert not one.is_empty()
    both = one.aggregate(two)
    assert both.data["loaded_bytes"] == 7_000_000
    assert both.data["load_seconds"] == [0.5, 0.25, 1.0]
    assert both.reduce()["loaded MB"] == 7.0
    both.reset()
    assert both.is_empty()
    assert two.data["loaded_bytes"] == 4_000_000


def test_a_log_line_says_what_moved(served) -> None:
    engine = served.engine()
    engine.add("a", words(100))
    engine.run()
    logged, lines = KVConnectorLogging(engine.config.kv_transfer_config), []
    for it in engine.stats:
        logged.observe(it)
    logged.log(lambda text, *values: lines.append(text % values))
    assert len(lines) == 1
    assert "saved MB=0.0" in lines[0]
    logged.log(lambda text, *values: lines.append(text % values))
    assert len(lines) == 1


@pytest.fixture
def registry(monkeypatch):
    """Metrics of one test do not meet those of another."""
    fresh = prometheus_client.CollectorRegistry()
    for kind in (prometheus_client.Counter, prometheus_client.Histogram, prometheus_client.Gauge):
        monkeypatch.setattr(kind.__init__, "__kwdefaults__", None)
        defaults = list(kind.__init__.__defaults__)
        monkeypatch.setattr(
            kind.__init__,
            "__defaults__",
            tuple(fresh if it is prometheus_client.REGISTRY else it for it in defaults),
        )
    return fresh


def test_prometheus_shows_every_engine_with_the_right_sums(served, registry) -> None:
    engines = [served.engine() for _ in range(2)]
    for n in range(4):
        for engine in engines:
            engine.add(f"{n}", words(100, n))
            engine.run()
    prom = KVConnectorProm(engines[0].config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    for index, engine in enumerate(engines):
        for _ in range(2):
            prom.observe(total(engine), index)
    for index, engine in enumerate(engines):
        labels, expected = {"model_name": "m", "engine": f"{index}"}, total(engine)
        for name in COUNTERS:
            assert registry.get_sample_value(f"vllm:headwater_{name}_total", labels) == 2 * expected[name], name
        for name in HISTOGRAMS:
            count = registry.get_sample_value(f"vllm:headwater_{name}_count", labels)
            assert count == 2 * len(expected[name]), name
            seconds = registry.get_sample_value(f"vllm:headwater_{name}_sum", labels)
            assert seconds == pytest.approx(2 * sum(expected[name])), name
    assert registry.get_sample_value("vllm:headwater_loaded_bytes_total", {"model_name": "m", "engine": "1"}) > 0


@MODES
def test_the_nodes_hit_rate_is_the_truth(served, mode, seed) -> None:
    """Lookups, hits and misses against a model that remembers every prefix whose KV was computed."""
    engines = [served.engine(DENSE, mode) for _ in range(2)]
    rng, held = random.Random(seed), set()
    asked = hit = 0
    common = words(200, seed)
    for n in range(40):
        engine = rng.choice(engines)
        prompt = common[: rng.randrange(200)] + words(rng.randrange(1, 60), rng.randrange(8))
        whole = range(CHUNK, len(prompt) + 1, CHUNK)
        asked += len(whole) * CHUNK
        hit += next((end for end in reversed(whole) if tuple(prompt[:end]) in held), 0)
        engine.forget()
        engine.add(f"{n}", prompt, max_tokens=rng.randrange(1, 50))
        engine.run()
        computed = (prompt + engine.outputs[f"{n}"])[:-1]
        held |= {tuple(computed[:end]) for end in range(CHUNK, len(computed) + 1, CHUNK)}
    (space,) = fetch_status(served.address)["namespaces"]
    assert (space["lookup_tokens"], space["hit_tokens"]) == (asked, hit)
    assert space["miss_tokens"] == asked - hit
    assert space["replicas"] == space["stored_chunks"] == len(held)
    assert hit
    assert hit < asked
    for engine in engines:
        for _ in range(10):
            engine.step()
    assert fetch_status(served.address)["namespaces"] == [space]


@MODES
def test_a_request_is_counted_once_however_often_it_asks(served, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    first.add("a", words(100))
    first.run()
    taken = second.pool.get_new_blocks(second.pool.get_num_free_blocks() - 2)
    second.add("b", words(100))
    for _ in range(20):
        second.step()
    second.pool.free_blocks(taken)
    second.run()
    (space,) = fetch_status(served.address)["namespaces"]
    assert (space["lookup_tokens"], space["hit_tokens"]) == (192, 96)
