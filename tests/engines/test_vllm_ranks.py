"""Tensor and pipeline ranks: each stores and reads its own shard, and a chunk is there when all of them have it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engines.harness import Engine, Shape
from tests.engines.oracle import POISON, continuation
from tests.engines.served import BLOCK, CHUNK, DENSE, MODES, SKIP, Faults, Gate, copier, decider, eventually, intercept
from tests.engines.workload import words

RANKS = {
    "one": DENSE,
    "tp2": Shape(tp=2),
    "tp4": Shape(tp=4, heads=1),
    "pp2": Shape(pp=2, layers=4),
    "pp2-uneven": Shape(pp=2, layers=3),
    "tp2-pp2": Shape(tp=2, pp=2),
    "tp2-replicated": Shape(tp=2, replicated=True),
    "tp4-replicated": Shape(tp=4, replicated=True),
    "tp2-pp2-replicated": Shape(tp=2, pp=2, replicated=True),
    "window": Shape(window_tokens=40),
    "tp2-window": Shape(tp=2, window_tokens=20),
}
RANKED = pytest.mark.parametrize("shape", RANKS.values(), ids=RANKS)
PROMPT = words(130, 41)


def save(engine: Engine, name: str = "saved") -> None:
    engine.add(name, PROMPT)
    engine.run()


def ask(engine: Engine, name: str) -> int:
    """Run the prompt, which must come out right; how many tokens were loaded."""
    engine.add(name, PROMPT, max_tokens=5)
    engine.run()
    assert engine.outputs[name] == continuation(PROMPT, 5)
    return engine.loaded_tokens(name)


@MODES
@RANKED
@pytest.mark.parametrize("local", [0, BLOCK], ids=["nothing local", "off the chunk edge"])
def test_poisoned_blocks(served, shape, local, mode) -> None:
    """Every byte of a reported hit is written, in every rank, and not one beside it."""
    first, second = (served.engine(shape, mode) for _ in range(2))
    save(first)
    if local:
        second.add("local", [*PROMPT[:local], 5, 6], transfer=SKIP)
        second.run()
    update = second.connector.update_state_after_alloc
    before: list[dict[str, np.ndarray]] = []
    filled: list[list[int]] = []

    def poison(request: Any, given: Any, external_tokens: int) -> None:
        update(request, given, external_tokens)
        if not external_tokens:
            return
        # The ranks hear of it after this step's scheduling.
        filled.extend([it for it in ids[local // BLOCK : 128 // BLOCK] if it] for ids in given.get_block_ids())
        for worker in second.workers:
            for pages in worker.pages.values():
                pages[sorted(set().union(*filled))] = POISON
            worker.refresh(set().union(*filled))
            before.append({name: pages.copy() for name, pages in worker.pages.items()})

    second.connector.update_state_after_alloc = poison
    second.add("a", PROMPT, max_tokens=5)
    second.run(until=lambda: bool(second.load_log) and not second.loads)
    assert second.load_log[0][1].local_tokens == local
    assert len(filled[0]) == (128 - local) // BLOCK
    for worker, old in zip(second.workers, before, strict=True):
        for name, pages in worker.pages.items():
            mine = filled[worker.groups[name]]
            assert mine
            assert not (pages[mine] == POISON).any()
            # Groups may overlay each other in one tensor, so another group's blocks may be seen here.
            others = sorted(set(range(len(pages))).difference(*filled))
            assert (pages[others] == old[name][others]).all()
    second.run()
    assert second.outputs["a"] == continuation(PROMPT, 5)


@RANKED
def test_each_byte_is_stored_once(served, shape) -> None:
    """Ranks write to places of their own; of ranks that hold the same, one writes."""
    engine = served.engine(shape)
    written: dict[int, set[int]] = {}

    def note(rank: int) -> Callable[..., None]:
        def gather(copy: Callable[..., None], group: int, blocks: Any, places: Any, stride: int, *rest: Any) -> None:
            layers = len(copier(engine, rank)._pages.groups[group].layers)
            base = copier(engine, rank)._session.link.memory.bases[0]
            for layer in range(layers):
                fresh = {int(place) - base + layer * stride for place in places}
                assert not fresh & written.setdefault(rank, set())
                written[rank] |= fresh
            copy(group, blocks, places, stride, *rest)

        return gather

    for rank in range(len(engine.workers)):
        intercept(engine, "gather", note(rank), range(rank, rank + 1))
    save(engine)
    replicas = shape.tp if shape.replicated else 1
    assert set(written) == {rank for rank in range(shape.tp * shape.pp) if rank % shape.tp % replicas == 0}
    assert len(set().union(*written.values())) == sum(map(len, written.values()))
    blocks, groups = 128 // BLOCK, 2 if shape.window_tokens else 1
    layers = shape.layers + (shape.window_layers if shape.window_tokens else 0)
    assert sum(map(len, written.values())) == blocks * layers * shape.tp // replicas
    assert served.space.layout.shards == shape.tp * shape.pp // replicas
    assert served.space.stored_chunks == 4 * groups
    assert served.space.held_bytes == 4 * sum(served.space.slot_bytes)


@MODES
@pytest.mark.parametrize("shape", [Shape(tp=2), Shape(pp=2), Shape(tp=2, window_tokens=40)], ids=["tp2", "pp2", "win"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_chunk_is_there_when_all_ranks_have_written(served, shape, late, mode) -> None:
    first, second = (served.engine(shape, mode) for _ in range(2))
    gate = Gate(first, "gather", range(late, late + 1))
    first.add("a", PROMPT)
    while "a" not in first.finished:
        first.step()
    gate.reached()
    early = copier(first, 1 - late)
    eventually(lambda: not early._saves and not early._loading)
    assert served.space.stored_chunks == 0
    assert ask(second, "too early") == 0
    gate.open()
    first.run()
    second.forget()
    assert ask(second, "later") == 128


@MODES
@pytest.mark.parametrize("failing", range(4))
def test_a_rank_that_cannot_write(served, failing, mode) -> None:
    shape = Shape(tp=2, pp=2)
    first, second = (served.engine(shape, mode) for _ in range(2))
    intercept(first, "gather", Faults(failing, 1.0), range(failing, failing + 1))
    save(first)
    assert served.space.stored_chunks == 0
    assert ask(second, "a") == 0
    assert served.space.stored_chunks == 4


@MODES
@pytest.mark.parametrize("failing", range(4))
def test_a_rank_that_cannot_read(served, failing, mode) -> None:
    shape = Shape(tp=2, pp=2)
    first, second = (served.engine(shape, mode) for _ in range(2))
    save(first)
    intercept(second, "scatter", Faults(failing, 1.0), range(failing, failing + 1))
    assert ask(second, "a") == 128
    assert second.computed_tokens["a"] == 130 + 4


@MODES
@pytest.mark.parametrize("slow", [0, 1])
def test_a_load_is_over_when_the_slowest_rank_is(served, slow, mode) -> None:
    first, second = (served.engine(Shape(tp=2), mode) for _ in range(2))
    save(first)
    gate = Gate(second, "scatter", range(slow, slow + 1))
    second.add("a", PROMPT, max_tokens=5)
    while not gate.entered.is_set():
        second.step()
    for _ in range(10):
        second.step()
    assert "a" in second.loads
    gate.open()
    second.run()
    assert second.outputs["a"] == continuation(PROMPT, 5)
    assert second.computed_tokens["a"] == 2 + 4


@MODES
def test_a_rank_whose_tensors_are_not_what_was_agreed(served, caplog, mode) -> None:
    first, second = (served.engine(Shape(tp=2), mode) for _ in range(2))
    it = copier(first, 1)
    it._mine = replace(it._mine, block_bytes=(2 * it._mine.block_bytes[0],))
    with caplog.at_level(logging.ERROR):
        save(first)
    size = it._mine.block_bytes[0]
    assert f"expected (2, {size // 2}), given (2, {size})" in caplog.text
    assert served.space.stored_chunks == 0
    assert ask(second, "a") == 0
    first.forget()
    assert ask(first, "b") == 128  # rank 0 reads, rank 1 cannot: computed again
    assert first.computed_tokens["b"] == 130 + 4
    assert decider(first)._node.session is not None
    # Every attempt of rank 1 to connect was ended properly: only rank 0s map the memory.
    assert len(served.embedded.server._lifelines) == 2 + 1


def test_every_rank_layout_has_its_own_chunks(served) -> None:
    """No two ways to split the same model over ranks may meet, whichever comes first."""
    shapes = [shape for name, shape in RANKS.items() if "window" not in name]
    for n, shape in enumerate(shapes):
        assert ask(served.engine(shape), f"{n}") == 0
    for n, shape in enumerate(shapes):
        assert ask(served.engine(shape), f"{n} again") == 128 // CHUNK * CHUNK
    assert len(served.cache.spaces) == len(shapes)
