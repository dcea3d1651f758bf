"""The scheduler harness itself: it runs clean without faults, and every wrong byte or leak is noticed."""

from collections.abc import Callable, Iterator

import pytest

from tests.engines import memory_connector
from tests.engines.harness import Engine, Shape
from tests.engines.oracle import WrongKV, continuation
from tests.engines.workload import check_outputs, words, workload

CONNECTOR = "tests.engines.memory_connector.MemoryConnector"
MODES = pytest.mark.parametrize(
    "mode",
    [{"asynchronous": False, "second_runner": False}, {"asynchronous": True, "second_runner": True}],
    ids=["as-on-cpu", "as-on-gpu"],
)
SHAPES = {
    "dense": Shape(),
    "window": Shape(window_tokens=40),
    "tp2": Shape(tp=2),
    "pp2": Shape(pp=2),
    "tp2-replicated": Shape(tp=2, replicated=True),
}


@pytest.fixture(autouse=True)
def _empty_stores() -> Iterator[None]:
    memory_connector.STORES.clear()
    yield
    memory_connector.STORES.clear()


@MODES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_without_a_connector(shape: Shape, mode: dict) -> None:
    engine = Engine(shape, **mode)
    check_outputs(engine, workload(engine, 1))
    engine.close()


@MODES
def test_preemption(mode: dict) -> None:
    engine = Engine(Shape(blocks=14, max_tokens=200), **mode)
    prompts = {f"{n}": words(60, n) for n in range(4)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=60)
    engine.run()
    assert engine.preemptions
    check_outputs(engine, prompts)
    engine.close()


@MODES
@pytest.mark.parametrize("loads", [{"asynchronous": False}, {"delay_steps": 1}, {"delay_steps": 5}], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_second_engine_loads(shape: Shape, loads: dict, mode: dict) -> None:
    extra = {"store": "shared", **loads}
    first, second = (Engine(shape, CONNECTOR, extra, **mode) for _ in range(2))
    check_outputs(first, workload(first, 2))
    prompts = workload(second, 2)
    check_outputs(second, prompts)
    assert sum(second.loaded_tokens(it) for it in prompts) > 100
    first.close()
    second.close()


@pytest.mark.parametrize("blocks", [14, 20])
def test_loads_under_preemption(blocks: int) -> None:
    engine = Engine(Shape(blocks=blocks, max_tokens=200), CONNECTOR, {"store": "own", "delay_steps": 3})
    prompts = {f"{n}": words(60, n % 3) for n in range(12)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=60)
        engine.step()
    engine.run()
    assert engine.preemptions
    assert any(load.external_tokens for _, load in engine.load_log)
    check_outputs(engine, prompts)
    engine.close()


def test_chat_turns_reuse_generated_tokens() -> None:
    engine = Engine(Shape(), CONNECTOR, {"store": "own"})
    history = words(50)
    for turn in range(4):
        history += words(20, turn)
        engine.forget()
        engine.add(f"{turn}", history, max_tokens=30)
        engine.run()
        assert engine.loaded_tokens(f"{turn}") == (0 if turn == 0 else (len(history) - 21) // 16 * 16)
        history += engine.outputs[f"{turn}"]
    engine.close()


@pytest.mark.parametrize("failing", range(8))
@pytest.mark.parametrize("shape", [SHAPES["dense"], SHAPES["window"]], ids=["dense", "window"])
def test_failed_loads_are_recomputed(shape: Shape, failing: int) -> None:
    prompt = words(150)
    for extra in ({"store": "own"}, {"store": "own", "failing": failing, "delay_steps": 2}):
        engine = Engine(shape, CONNECTOR, extra)
        engine.add("a", prompt, max_tokens=5)
        engine.run()
        assert engine.outputs["a"] == continuation(prompt, 5)
        engine.close()
    if shape.window_tokens:  # the whole request failed, and this connector then refuses to load it again
        assert (engine.loaded_tokens("a"), engine.computed_tokens["a"]) == (144, 150 + 4)
    elif failing == 0:  # nothing was left of the load, so the scheduler asked again, and that load went well
        assert (engine.loaded_tokens("a"), engine.computed_tokens["a"]) == (2 * 144, 6 + 4)
    else:
        assert (engine.loaded_tokens("a"), engine.computed_tokens["a"]) == (144, 150 - failing * 16 + 4)


@pytest.mark.parametrize("failing", range(9))
def test_failed_synchronous_loads_are_recomputed(failing: int) -> None:
    prompt = fill_store()
    engine = Engine(Shape(), CONNECTOR, {"store": "own", "failing": failing, "asynchronous": False})
    engine.add("a", prompt, max_tokens=5)
    engine.run()
    assert engine.outputs["a"] == continuation(prompt, 5)
    assert (engine.loaded_tokens("a"), engine.computed_tokens["a"]) == (144, 6 + 150 - failing * 16 + 4)
    engine.close()


def fill_store(count: int = 150) -> list[int]:
    """Save the KV of a prompt in the store `own`, and return the prompt."""
    prompt = words(count)
    engine = Engine(Shape(), CONNECTOR, {"store": "own"})
    engine.add("first", prompt)
    engine.run()
    engine.close()
    return prompt


def run_one_ahead(prompt: list[int], load: dict) -> None:
    engine = Engine(Shape(), CONNECTOR, {"store": "own", "failing": 2, **load}, asynchronous=True)
    engine.add("a", prompt, max_tokens=9)
    engine.run()
    assert engine.outputs["a"] == continuation(prompt, 9)
    engine.close()


def run_abort_after_failure(prompt: list[int], load: dict) -> None:
    engine = Engine(Shape(), CONNECTOR, {"store": "own", "failing": 2, **load})
    engine.add("a", prompt)
    engine.step()
    engine.abort("a")
    engine.add("b", [*prompt, 5, 6], max_tokens=9)
    engine.run()
    assert engine.outputs["b"] == continuation([*prompt, 5, 6], 9)
    engine.close()


@pytest.mark.parametrize("run", [run_one_ahead, run_abort_after_failure])
def test_why_loads_must_be_asynchronous(run: Callable[[list[int], dict], None]) -> None:
    """Blocks of a synchronous load are in vLLM's prefix cache before the load is known to have worked.

    When it fails they stay there until they are recomputed, so another request can find them (here after an abort),
    and the step that was scheduled ahead of the news reads them. Blocks of an asynchronous load are entered later.
    """
    prompt = fill_store()
    run(prompt, {"asynchronous": True})
    with pytest.raises(WrongKV):
        run(prompt, {"asynchronous": False})


def test_policy_fail_ends_the_request() -> None:
    prompt = words(100)
    for extra in ({"store": "own"}, {"store": "own", "failing": 2}):
        engine = Engine(Shape(), CONNECTOR, extra, policy="fail")
        engine.add("a", prompt)
        engine.run()
        engine.close()
    assert engine.finished["a"] == "error"


def test_adapters_salts_and_media_differ() -> None:
    prompt = words(120)
    kinds = [{}, {"salt": "x"}, {"salt": "y"}, {"adapter": "one"}, {"adapter": "two"}]
    kinds += [{"media": [("cat", 20, 30)]}, {"media": [("dog", 20, 30)]}, {"media": [("cat", 21, 30)]}]
    outputs = []
    for store in ("cold", "warm"):
        engine = Engine(Shape(), CONNECTOR, {"store": "own"})
        for n, kind in enumerate(kinds):
            engine.add(f"{n}", prompt, max_tokens=3, **kind)
            engine.run()
            assert engine.outputs[f"{n}"] == continuation(prompt, 3, **kind)
            # The text before the first image is shared, and in this engine's own cache already.
            assert store == "cold" or engine.loaded_tokens(f"{n}") == (96 if "media" in kind else 112)
        outputs = list(engine.outputs.values())
        engine.close()
    assert len({tuple(it) for it in outputs}) == len(kinds)


FAULTS = ["flipped", "wrong-block", "stray", "not-written", "salt-blind"]


@pytest.mark.parametrize(
    ("fault", "asynchronous"), [*((it, way) for it in FAULTS for way in (False, True)), ("told-early", True)]
)
def test_the_oracle_notices(fault: str, asynchronous: bool) -> None:
    prompt = words(100)
    clean = Engine(Shape(), CONNECTOR, {"store": "own", "fault": "salt-blind" if fault == "salt-blind" else ""})
    clean.add("a", prompt, salt="one")
    clean.run()
    clean.close()
    extra = {"store": "own", "fault": fault, "asynchronous": asynchronous, "delay_steps": 3}
    faulty = Engine(Shape(), CONNECTOR, extra)
    faulty.add("b", prompt, salt="two" if fault == "salt-blind" else "one")
    with pytest.raises(WrongKV):
        faulty.run()
    assert faulty.loaded_tokens("b")


@pytest.mark.parametrize(("fault", "message"), [("never-freed", "still busy"), ("pinned", "not back in the pool")])
def test_leaks_are_noticed(fault: str, message: str) -> None:
    engine = Engine(Shape(), CONNECTOR, {"store": "own", "fault": ""})
    engine.add("a", words(40))
    engine.run()
    engine.connector.fault = fault
    engine.connector.bind_gpu_block_pool(engine.pool)
    engine.add("b", words(50))
    with pytest.raises(AssertionError, match=message):
        close_soon(engine)


def close_soon(engine: Engine) -> None:
    engine.run(limit=200)
    engine.close()
