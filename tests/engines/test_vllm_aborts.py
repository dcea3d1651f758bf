"""Requests that end, or lose their blocks, in every state that a load or a save can be in."""

from collections.abc import Callable
from typing import Any

import pytest

from headwater.engines.vllm.metadata import SavesEnded
from tests.engines.harness import Shape
from tests.engines.oracle import continuation
from tests.engines.served import (
    CHUNK,
    DENSE,
    MODES,
    WINDOW,
    Faults,
    Gate,
    Served,
    copier,
    decider,
    intercept,
    leftovers,
)
from tests.engines.vllm_names import RequestStatus
from tests.engines.workload import check_outputs, words

PROMPT = words(150, 21)
SMALL_STEPS = Shape(max_batch_tokens=CHUNK)


class Scene:
    """An engine with a request `victim`, and what stops its copies until the test lets them go."""

    def __init__(self, served: Served, mode: dict, shape: Shape = DENSE) -> None:
        self.served = served
        self.engine = served.engine(shape, mode)
        self.gates: list[Gate] = []
        self.taken: list[Any] = []
        self.shape, self.mode = shape, mode

    def have_saved(self, prompt: list[int]) -> None:
        """Another engine saves a prompt."""
        other = self.served.engine(self.shape, self.mode)
        other.add("saved", prompt)
        other.run()

    def stop(self, name: str) -> Gate:
        self.gates.append(Gate(self.engine, name))
        return self.gates[-1]

    def step_until(self, fact: Callable[[], object]) -> None:
        for _ in range(1000):
            if fact():
                return
            assert self.engine.step(), "the engine has nothing to do any more"
        raise AssertionError("the state was not reached")

    def add(self, name: str = "victim", prompt: list[int] = PROMPT, count: int = 6) -> None:
        self.engine.add(name, prompt, max_tokens=count)

    def take_blocks(self) -> None:
        """Leave the engine fewer blocks than the victim needs."""
        self.taken = self.engine.pool.get_new_blocks(self.engine.pool.get_num_free_blocks() - 3)

    def let_go(self) -> None:
        for gate in self.gates:
            gate.open()
        self.engine.pool.free_blocks(self.taken)
        self.taken = []


# ---- the states ----------------------------------------------------------------------------------------


def waiting(it: Scene) -> None:
    it.add()


def matched_but_without_blocks(it: Scene) -> None:
    """The node holds the prompt; vLLM has no blocks for it and will ask again."""
    it.have_saved(PROMPT)
    it.take_blocks()
    it.add()
    it.step_until(lambda: "victim" in decider(it.engine)._tracked)
    it.engine.step()
    assert decider(it.engine)._tracked["victim"].matched == 4
    assert not it.engine.loads


def load_queued(it: Scene) -> None:
    """Behind another load, which stands still."""
    it.have_saved(PROMPT)
    it.have_saved(words(100, 7))
    gate = it.stop("scatter")
    it.add("before", words(100, 7))
    it.step_until(gate.entered.is_set)
    it.add()
    it.step_until(lambda: any(queued.job.request == "victim" for queued in copier(it.engine)._loads))


def load_running(it: Scene) -> None:
    it.have_saved(PROMPT)
    gate = it.stop("scatter")
    it.add()
    it.step_until(gate.entered.is_set)


def loaded_but_not_scheduled(it: Scene) -> None:
    it.have_saved(PROMPT)
    it.add()
    it.step_until(lambda: "victim" in it.engine.scheduler.finished_recving_kv_req_ids)


def load_failed_but_not_scheduled(it: Scene) -> None:
    it.have_saved(PROMPT)
    intercept(it.engine, "scatter", Faults(0, 1.0))
    it.add()
    it.step_until(lambda: it.engine.load_log and not it.engine.loads)
    assert not it.engine.outputs["victim"]


def prefilling(it: Scene) -> None:
    it.add()
    it.step_until(lambda: it.engine.computed_tokens.get("victim", 0) >= 2 * CHUNK)


def decoding(it: Scene) -> None:
    it.add(count=60)
    it.step_until(lambda: len(it.engine.outputs["victim"]) >= 15)


def save_queued(it: Scene) -> None:
    """Behind another save, which stands still."""
    gate = it.stop("gather")
    it.add("before", words(40, 8), count=60)
    it.step_until(gate.entered.is_set)
    it.add(count=60)
    it.step_until(lambda: len(it.engine.outputs["victim"]) >= 2)
    assert len(decider(it.engine)._pinned) > 1


def save_running(it: Scene) -> None:
    gate = it.stop("gather")
    it.add(count=60)
    it.step_until(lambda: gate.entered.is_set() and it.engine.outputs["victim"])


def finished_with_saves_under_way(it: Scene) -> None:
    gate = it.stop("gather")
    it.add(count=1)
    it.step_until(lambda: gate.entered.is_set() and "victim" in it.engine.finished)
    assert decider(it.engine)._pinned


STATES = [
    waiting,
    matched_but_without_blocks,
    load_queued,
    load_running,
    loaded_but_not_scheduled,
    load_failed_but_not_scheduled,
    prefilling,
    decoding,
    save_queued,
    save_running,
    finished_with_saves_under_way,
]
SHAPES = {"dense": SMALL_STEPS, "window": Shape(max_batch_tokens=CHUNK, window_tokens=40), "tp2": Shape(tp=2)}


@MODES
@pytest.mark.parametrize(
    ("shape", "during_a_step"),
    [*(pytest.param(shape, False, id=name) for name, shape in SHAPES.items()), (SMALL_STEPS, True)],
)
@pytest.mark.parametrize("state", STATES, ids=[it.__name__ for it in STATES])
def test_abort(served, state, shape, during_a_step, mode) -> None:
    scene = Scene(served, mode, shape)
    engine = scene.engine
    state(scene)
    if during_a_step:
        engine.step(abort=["victim"])
    else:
        engine.abort("victim")
    # Blocks that are still being written to, or read, must not be given to these.
    for n in range(4):
        engine.add(f"after {n}", words(90, 30 + n), max_tokens=4)
    for _ in range(8):
        engine.step()
    scene.let_go()
    engine.run()
    assert engine.finished["victim"] in ("abort", "length")
    assert engine.outputs["victim"] == continuation(PROMPT, len(engine.outputs["victim"]))
    check_outputs(engine, {f"after {n}": words(90, 30 + n) for n in range(4)})
    engine.check_empty()
    served.lacks_tickets()
    # The next one that asks the same gets the right thing.
    engine.add("heir", PROMPT, max_tokens=20)
    engine.run()
    assert engine.outputs["heir"] == continuation(PROMPT, 20)


PREEMPTIBLE = [prefilling, decoding, save_queued, save_running]


@MODES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("state", PREEMPTIBLE, ids=[it.__name__ for it in PREEMPTIBLE])
def test_preemption(served, state, shape, mode) -> None:
    """The blocks are gone at once; what is being saved from them is pinned, and the request comes back."""
    scene = Scene(served, mode, shape)
    engine = scene.engine
    state(scene)
    engine.preempt("victim")
    assert engine.scheduler.requests["victim"].status == RequestStatus.PREEMPTED
    engine.add("thief", words(90, 40), max_tokens=4)
    for _ in range(8):
        engine.step()
    scene.let_go()
    engine.run()
    count = 6 if state is prefilling else 60
    assert engine.preemptions
    assert engine.outputs["victim"] == continuation(PROMPT, count)
    assert engine.outputs["thief"] == continuation(words(90, 40), 4)
    served.lacks_tickets()
    other = served.engine(shape, mode)
    other.add("other", PROMPT, max_tokens=count)
    other.run()
    assert other.outputs["other"] == engine.outputs["victim"]
    assert other.loaded_tokens("other") >= 128


@MODES
def test_the_engine_waits_for_pinned_blocks(served, mode) -> None:
    """vLLM is told that blocks will come back, and stays awake for them, as long as saves are under way."""
    scene = Scene(served, mode)
    connector = scene.engine.connector
    assert not connector.has_pending_block_frees()
    finished_with_saves_under_way(scene)
    for _ in range(5):
        scene.engine.step()
    assert connector.has_pending_block_frees()
    assert connector.has_pending_push_work()
    assert scene.engine.scheduler.has_requests()
    scene.let_go()
    scene.engine.run()
    assert not connector.has_pending_block_frees()
    assert not connector.has_pending_push_work()


@MODES
def test_preempted_requests_come_back_through_the_node(served, mode) -> None:
    """Too few blocks for all: requests lose theirs again and again, and load what was saved of them."""
    engine = served.engine(Shape(blocks=14, max_tokens=200), mode)
    prompts = {f"{n}": words(60, n) for n in range(6)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=60)
    engine.run()
    check_outputs(engine, prompts)
    assert engine.preemptions
    assert engine.load_log


@MODES
@pytest.mark.parametrize("state", STATES, ids=[it.__name__ for it in STATES])
def test_an_engine_that_shuts_down(served, state, mode) -> None:
    """In whatever state it is: its ranks end their copies, the node frees all that it held."""
    scene = Scene(served, mode)
    state(scene)
    engine = scene.engine
    served.engines.remove(engine)
    engine.scheduler.shutdown()
    scene.let_go()
    threads = [copier(engine)._thread]
    for worker in engine.workers:
        worker.connector.shutdown()
    assert not any(it.is_alive() for it in threads)
    served.lacks_tickets()
    other = served.engine(DENSE, mode)
    other.add("other", PROMPT, max_tokens=5)
    other.run()
    assert other.outputs["other"] == continuation(PROMPT, 5)


@MODES
def test_lookups_that_never_come_to_anything(served, mode) -> None:
    """What is matched and never loaded is not held: everything can leave."""
    scene = Scene(served, mode)
    scene.have_saved(PROMPT)
    engine = scene.engine
    engine.add("own", PROMPT)
    engine.run()
    for n in range(300):
        engine.add(f"{n}", PROMPT[: 20 + n % 130])  # the engine has all of it itself
        engine.step()
        if n % 3 == 0:
            engine.abort(f"{n}")
    engine.run()
    served.lacks_tickets()
    assert served.cache.clear(0) == 4


@MODES
@pytest.mark.parametrize("shape", [DENSE, WINDOW], ids=["dense", "window"])
def test_hundreds_of_aborted_loads(served, shape, mode) -> None:
    scene = Scene(served, mode, shape)
    scene.have_saved(PROMPT)
    engine = scene.engine
    for n in range(250):
        engine.run()
        engine.forget()
        engine.add(f"{n}", PROMPT, max_tokens=2)
        for _ in range(n % 5):
            engine.step()
        engine.abort(f"{n}")
    engine.run()
    assert engine.pool.get_num_free_blocks() == engine.free_blocks
    served.lacks_tickets()


def test_news_of_what_is_not_known(served) -> None:
    """Late, repeated and foreign messages are ignored, and nothing is kept of them."""
    engine = served.engine()
    it = decider(engine)
    for _ in range(2):
        it.ranks_ended(SavesEnded({7: 1, 8: 2}, {7}))
        it.load_failed({"nobody"})
        it.invalid_blocks({1, 2, 3})
        it.received({"nobody"})
    engine.add("a", PROMPT)
    engine.run()
    it.received({"a"})
    it.load_failed({"a"})
    assert not leftovers(engine)
    assert served.cache.unknown_tickets == 0


# ---- resets --------------------------------------------------------------------------------------------


@MODES
def test_resetting_the_cache_forgets_what_the_node_holds(served, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    first.add("a", PROMPT, max_tokens=2)
    first.run()
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    assert served.space.held_bytes == 0
    second.add("b", PROMPT, max_tokens=2)
    second.run()
    assert second.loaded_tokens("b") == 0
    first.add("c", PROMPT, max_tokens=2)
    first.run()
    assert first.loaded_tokens("c") == 128


@MODES
@pytest.mark.parametrize("state", [load_running, save_running], ids=["load", "save"])
def test_a_reset_says_when_it_was_not_whole(served, state, mode) -> None:
    scene = Scene(served, mode)
    state(scene)
    assert scene.engine.connector.reset_cache() is False
    scene.let_go()
    scene.engine.run()
    assert scene.engine.connector.reset_cache() is True
    assert served.space.held_bytes == 0


@MODES
@pytest.mark.parametrize("preempted", [False, True])
def test_what_was_computed_before_a_reset_is_not_saved_after_it(served, preempted, mode) -> None:
    """A reset follows a change of the weights: only what is computed again may be shared."""
    first = served.engine(DENSE, mode)
    first.add("a", PROMPT, max_tokens=80)
    while len(first.outputs["a"]) < 20 or decider(first).saving:
        first.step()
    assert first.connector.reset_cache() is True
    if preempted:
        first.preempt("a")
    first.run()
    assert first.outputs["a"] == continuation(PROMPT, 80)
    assert len(served.space.index[0]) == ((150 + 80 - 1) // CHUNK if preempted else 0)
    first.add("b", words(100, 9))
    first.run()
    assert len(served.space.index[0]) >= 3


@MODES
def test_a_request_saves_again_what_has_left_in_between(served, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    first.add("a", PROMPT, max_tokens=80)
    while len(first.outputs["a"]) < 20 or decider(first).saving:
        first.step()
    assert served.cache.clear(0) == 5
    first.run()
    whole = PROMPT + first.outputs["a"]
    second.add("b", whole, max_tokens=2)
    second.run()
    assert second.loaded_tokens("b") == (len(whole) - 1) // CHUNK * CHUNK


@MODES
def test_a_reset_without_a_node_says_so(served, mode) -> None:
    engine = served.engine(DENSE, mode)
    served.stop()
    engine.add("a", PROMPT)
    engine.run()
    assert engine.connector.reset_cache() is False
