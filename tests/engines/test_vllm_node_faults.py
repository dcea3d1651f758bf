"""The node is absent, killed, restarted or silent while engines serve: nobody waits, nobody touches what is not his."""

import threading
import time
from typing import Any

import pytest

from headwater.config import EngineConfig
from headwater.engines.vllm import worker
from headwater.node.client import Link
from headwater.node.messages import Load, Reserve
from tests.engines.harness import Engine, Shape
from tests.engines.oracle import continuation
from tests.engines.served import DENSE, MODES, ON_CPU, ON_GPU, WINDOW, Gate, Served, copier, decider, eventually
from tests.engines.workload import check_outputs, words, workload

HEAL_S = 10.0
QUICK = {"metadata_s": 0.3, "connect_s": 0.3}


def ask(engine: Engine, name: str, prompt: list[int], count: int = 5) -> int:
    """Run one request, which must come out right; how many tokens were loaded for it."""
    engine.add(name, prompt, max_tokens=count)
    engine.run()
    assert engine.outputs[name] == continuation(prompt, count)
    return engine.loaded_tokens(name)


def healed(engine: Engine) -> float:
    """Wait until the engine has a session again; how long that took."""
    begun_s = time.monotonic()
    eventually(lambda: decider(engine)._node.session is not None)
    return time.monotonic() - begun_s


def settle(engine: Engine) -> None:
    """Give back what could not be given back without a node: with the first step after it is there again."""
    assert healed(engine) < HEAL_S
    ask(engine, "settle", words(10, 99))


def restart(served: Served, *engines: Engine) -> None:
    """Another life of the node at the same place, known to the engines before they have made a single call."""
    served.stop()
    served.start()
    for engine in engines:
        node = decider(engine)._node
        node.lost(node.session)
        healed(engine)


@MODES
def test_a_node_that_comes_later(served, mode) -> None:
    served.stop()
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    check_outputs(first, workload(first, 1))
    prompt = words(130)
    assert ask(first, "alone", prompt) == ask(second, "alone", prompt) == 0
    served.start()
    assert max(healed(first), healed(second)) < HEAL_S
    first.forget()
    second.forget()
    ask(first, "a", prompt)
    assert ask(second, "b", prompt) == 128


@MODES
@pytest.mark.parametrize("shape", [DENSE, WINDOW, Shape(tp=2)], ids=["dense", "window", "tp2"])
def test_a_node_that_dies_and_comes_back_while_engines_serve(served, shape, mode, seed) -> None:
    engines = [served.engine(shape, mode) for _ in range(2)]
    for life in range(3):
        prompts: list[dict[str, list[int]]] = [{}, {}]
        for n in range(8):
            for engine, asked in zip(engines, prompts, strict=True):
                asked[f"{life}-{n}"] = words(60, life) + words(30, n // 2)
                engine.add(f"{life}-{n}", asked[f"{life}-{n}"], max_tokens=12)
                for _ in range(3):
                    engine.step()
            if n == 3:
                served.stop()
            elif n == 5:
                served.start()
        for engine, asked in zip(engines, prompts, strict=True):
            engine.run()
            check_outputs(engine, asked)
            engine.forget()
        assert max(healed(it) for it in engines) < HEAL_S
    last = words(130, seed)
    ask(engines[0], "last", last)
    assert ask(engines[1], "last", last) == 128


def test_a_save_of_an_earlier_life_writes_nothing(served) -> None:
    """Its slots are somebody else's in the node that is there now."""
    first, second, third = (served.engine(DENSE, ON_GPU) for _ in range(3))
    first.add("a", words(130), max_tokens=31)
    while "a" not in first.finished:
        first.step()
    # One step ahead of the sampled tokens, the last chunk is reserved when the request ends, for the next step.
    assert decider(first)._saves
    restart(served, first, second, third)
    theirs = words(130, 2)
    ask(second, "theirs", theirs)
    first.run()
    assert ask(third, "b", theirs) == 128


@MODES
@pytest.mark.parametrize("kind", ["load", "save"])
def test_jobs_of_an_earlier_life_touch_nothing(served, kind, mode) -> None:
    """The node is replaced after slots were leased or reserved in it, and before the ranks hear of them."""
    first, second, third = (served.engine(DENSE, mode) for _ in range(3))
    mine, theirs = words(130), words(130, 2)
    if kind == "load":
        ask(second, "mine", mine)
    build = first.connector.build_connector_meta
    replaced = []

    def late(scheduled: Any) -> Any:
        meta = build(scheduled)
        if replaced or not (meta.loads if kind == "load" else meta.saves):
            return meta
        replaced.append(meta)
        restart(served, first, second, third)
        second.forget()
        ask(second, "theirs", theirs)
        meta.node = decider(first)._info
        name, epoch = decider(first)._node.session.link.node
        meta.node = type(meta.node)(**{**vars(meta.node), "name": name, "epoch": epoch})
        return meta

    first.connector.build_connector_meta = late
    ask(first, "a", mine)
    assert replaced
    third.forget()
    assert ask(third, "b", theirs) == 128


@MODES
def test_a_node_that_stops_answering_costs_one_call(served, mode) -> None:
    engine = served.engine(DENSE, mode, **QUICK)
    ask(engine, "before", words(130))
    with served.paused():
        begun_s = time.monotonic()
        for n in range(30):
            ask(engine, f"{n}", words(100, n))
        # One call of the scheduler's and one of the copy thread's may have waited, not one a request.
        assert time.monotonic() - begun_s < 30 * QUICK["metadata_s"] / 2
    assert healed(engine) < HEAL_S
    engine.forget()
    ask(engine, "again", words(130, 5))
    engine.forget()
    assert ask(engine, "and again", words(130, 5)) == 128


def test_deadlines_that_are_promised() -> None:
    config = EngineConfig()
    assert (config.connect_s, config.metadata_s, config.load_s) == (1.0, 1.0, 5.0)


@MODES
def test_a_node_that_stops_answering_while_it_is_read(served, mode) -> None:
    """Without its word that the lease still held, a copy is worth nothing."""
    first, second = (served.engine(DENSE, mode, **QUICK) for _ in range(2))
    prompt = words(130)
    ask(first, "a", prompt)
    gate = Gate(second, "scatter")
    second.add("b", prompt, max_tokens=5)
    while not gate.entered.is_set():
        second.step()
    begun_s = time.monotonic()
    with served.paused():
        gate.open()
        second.run()
        assert second.outputs["b"] == continuation(prompt, 5)
        assert second.computed_tokens["b"] == 130 + 4
        assert time.monotonic() - begun_s < 20 * QUICK["metadata_s"]
    settle(second)
    second.forget()
    eventually(lambda: time.monotonic() > copier(second)._retry_at_s)
    assert ask(second, "again", prompt) == 128
    assert second.computed_tokens["again"] == 2 + 4


def test_ranks_do_not_queue_up_before_a_silent_node(served, monkeypatch) -> None:
    """With many jobs waiting, the copy thread tries to connect now and then, not once a job."""
    engine = served.engine(DENSE, ON_CPU, **QUICK)
    attempts = []

    class Counted(Link):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            attempts.append(arguments)
            super().__init__(*arguments, **options)

    gate = Gate(engine, "gather")
    monkeypatch.setattr(worker, "Link", Counted)
    for n in range(16):
        engine.add(f"{n}", words(40, n))
    while len(decider(engine)._pinned) < 8:
        engine.step()
    begun_s = time.monotonic()
    assert len(copier(engine)._saves) >= 7
    with served.paused():
        gate.open()
        engine.run()
        spent_s = time.monotonic() - begun_s
    assert len(attempts) <= 2 + spent_s / (worker.RETRY_S + QUICK["connect_s"])
    settle(engine)


@MODES
def test_what_has_left_a_window_is_not_saved(served, mode) -> None:
    """A node that comes while a long request runs: the first blocks of sliding-window layers are gone by then."""
    shape = Shape(max_batch_tokens=32, window_tokens=40)
    served.stop()
    first, second = (served.engine(shape, mode) for _ in range(2))
    prompt = words(150)
    first.add("a", prompt, max_tokens=60)
    while len(first.outputs["a"]) < 3:
        first.step()
    served.start()
    healed(first)
    healed(second)
    first.run()
    assert first.outputs["a"] == continuation(prompt, 60)
    whole = prompt + first.outputs["a"]
    held = (len(whole) - 1) // 32 * 32
    for end, loaded in ((70, 0), (held + 1, held)):
        second.forget()
        second.add(f"{end}", whole[:end], max_tokens=3)
        second.run()
        assert second.outputs[f"{end}"] == continuation(whole[:end], 3)
        assert second.loaded_tokens(f"{end}") == loaded


@MODES
@pytest.mark.parametrize("restarted", [False, True], ids=["resumed", "restarted"])
def test_what_could_not_be_given_back_is_given_back_later(served, restarted, mode) -> None:
    """A rank that cannot say done, and a scheduler that cannot release for it, until the node answers again."""
    engine = served.engine(DENSE, mode, **QUICK)
    gate = Gate(engine, "gather")
    engine.add("a", words(130), max_tokens=2)
    while not gate.entered.is_set():
        engine.step()
    with served.paused():
        gate.open()
        engine.run()
        eventually(lambda: decider(engine)._node.session is None)
        assert decider(engine)._owed
    if restarted:
        served.stop()
        served.start()
    settle(engine)
    assert not decider(engine)._owed
    served.lacks_tickets()
    if restarted:  # tickets of the life before mean nothing to it
        assert served.cache.unknown_tickets == 0


def test_a_node_that_refuses(serve) -> None:
    served = serve(require={"kv_dtype": "auto:bfloat16"})
    engine = served.engine()
    assert ask(engine, "a", words(130)) == 0
    refusal = decider(engine)._node.refusal
    assert (refusal.field, refusal.expected, refusal.given) == ("namespace.kv_dtype", "auto:bfloat16", "auto:float32")
    served.stop()
    served.node = {}
    served.start()
    assert healed(engine) < HEAL_S
    engine.forget()
    ask(engine, "b", words(130))
    engine.forget()
    assert ask(engine, "c", words(130)) == 128


@MODES
@pytest.mark.parametrize("verb", [Load, Reserve])
def test_a_ticket_whose_announcement_was_lost_is_given_back(served, verb, mode) -> None:
    """The node has granted it, its reply came too late, and the ranks keep the instance alive."""
    prompt = words(130)
    ask(served.engine(DENSE, mode), "a", words(70))
    engine = served.engine(DENSE, mode, **QUICK)
    ask(engine, "b", words(40, 3))
    node = served.embedded.server.node
    handle, resumed = node.handle, threading.Event()

    def answer_late(instance: str, request: Any) -> Any:
        reply = handle(instance, request)
        if isinstance(request, verb):
            resumed.wait()
        return reply

    node.handle = answer_late
    try:
        ask(engine, "c", prompt)
    finally:
        node.handle = handle
        resumed.set()
    assert healed(engine) < HEAL_S
    assert served.cache.tickets, "the scene did not come about"
    settle(engine)
    served.lacks_tickets()
    engine.forget()
    ask(engine, "d", prompt)
    engine.forget()
    assert ask(engine, "e", prompt) == 128
