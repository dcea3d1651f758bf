"""How much is loaded and saved at every length around chunk, block and batch edges, whatever the engine has itself."""

import pytest

from tests.engines.harness import Shape
from tests.engines.oracle import continuation
from tests.engines.served import BLOCK, CHUNK, DENSE, MODES, ON_CPU, ON_GPU, SKIP, WINDOW
from tests.engines.workload import check_outputs, words, workload

EDGES = sorted({edge + step for edge in range(0, 3 * CHUNK + 1, BLOCK) for step in (-1, 0, 1)} - {-1, 0})
SHAPES = {
    "dense": DENSE,
    "window": WINDOW,
    "window-only": Shape(layers=0, window_tokens=40),
    "tp2": Shape(tp=2),
    "pp2": Shape(pp=2),
    "tp2-replicated": Shape(tp=2, replicated=True),
    "tp2-pp2": Shape(tp=2, pp=2),
    "tp2-window": Shape(tp=2, window_tokens=20),
}


@MODES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_second_engine_reuses_what_the_first_saved(served, shape, mode) -> None:
    first, second = (served.engine(shape, mode) for _ in range(2))
    prompt = words(150, 7)
    first.add("a", prompt, max_tokens=20)
    first.run()
    second.add("b", prompt, max_tokens=20)
    second.run()
    assert first.outputs["a"] == second.outputs["b"] == continuation(prompt, 20)
    assert second.loaded_tokens("b") == 128
    check_outputs(first, workload(first, 3))
    check_outputs(second, workload(second, 3))


@pytest.mark.parametrize(
    ("shape", "mode", "lengths"),
    [
        pytest.param(DENSE, ON_CPU, range(1, 3 * CHUNK + 2), id="dense-as-on-cpu"),
        pytest.param(DENSE, ON_GPU, EDGES, id="dense-as-on-gpu"),
        pytest.param(WINDOW, ON_CPU, EDGES, id="window-as-on-cpu"),
        pytest.param(WINDOW, ON_GPU, EDGES, id="window-as-on-gpu"),
    ],
)
def test_every_length_with_every_local_hit(served, shape, mode, lengths) -> None:
    """The engine's own prefix cache ends anywhere: on a chunk edge, inside a chunk, before or after what is held."""
    first, second = (served.engine(shape, mode) for _ in range(2))
    text = words(3 * CHUNK + 1, 1)
    first.add("text", text)
    first.run()
    for length in lengths:
        for hit in range(0, length + 1, BLOCK):
            second.forget()
            if hit:
                second.add(f"{length}/{hit}/local", [*text[:hit], (text[hit] + 1) % 1000], transfer=SKIP)
                second.run()
            second.add(f"{length}/{hit}", text[:length], max_tokens=2)
            second.run()
            local = min(hit, (length - 1) // BLOCK * BLOCK)  # the last token is always computed
            if shape.window_tokens and second.load_log and second.load_log[-1][0] == f"{length}/{hit}":
                local = second.load_log[-1][1].local_tokens  # vLLM keeps only some of a window's blocks
            loaded = max(length // CHUNK * CHUNK - local, 0)
            assert second.loaded_tokens(f"{length}/{hit}") == loaded, (length, hit)
            assert second.computed_tokens[f"{length}/{hit}"] == max(length - local - loaded, 1) + 1, (length, hit)
            assert second.outputs[f"{length}/{hit}"] == continuation(text[:length], 2), (length, hit)
            assert second.finished[f"{length}/{hit}"] == "length"


@MODES
@pytest.mark.parametrize("batch", [BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 47, 64])
@pytest.mark.parametrize("shape", [DENSE, WINDOW], ids=["dense", "window"])
def test_prefill_in_pieces_saves_whole_chunks(served, shape, batch, mode) -> None:
    first = served.engine(Shape(max_batch_tokens=batch, window_tokens=shape.window_tokens), mode)
    second = served.engine(shape, mode, save=False)
    saved = 0
    for length in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK, 130):
        name, prompt = f"{length}", words(length, length)
        first.add(name, prompt)
        first.run()
        saved += length // CHUNK * (2 if shape.window_tokens else 1)  # a replica for each KV group
        assert (served.space.stored_chunks, served.space.failed_chunks) == (saved, 0), length
        second.add(name, prompt, max_tokens=3)
        second.run()
        assert second.loaded_tokens(name) == length // CHUNK * CHUNK
        assert second.outputs[name] == continuation(prompt, 3)


@MODES
def test_requests_side_by_side_save_and_load_their_own(served, mode) -> None:
    first, second = (served.engine(Shape(max_batch_tokens=50), mode) for _ in range(2))
    prompts = {f"{n}": words(40, 0) + words(20 + 13 * n, n) for n in range(6)}
    for engine in (first, second):
        for name, prompt in prompts.items():
            engine.add(name, prompt, max_tokens=5)
        engine.run()
        check_outputs(engine, prompts)
    for name, prompt in prompts.items():
        assert second.loaded_tokens(name) == len(prompt) // CHUNK * CHUNK


@MODES
def test_a_herd_with_one_prefix(served, mode) -> None:
    """Many equal prefixes at once, on two engines: each chunk is written once, nobody waits for another's."""
    engines = [served.engine(Shape(blocks=128), mode) for _ in range(3)]
    prompts = {f"{n}": words(96, 9) + words(20, n % 4) for n in range(40)}
    for warm in (False, True):
        for name, prompt in prompts.items():
            for engine in engines[2:] if warm else engines[:2]:
                engine.add(name, prompt, max_tokens=2)
        busy = True
        while busy:
            busy = False
            for engine in engines:
                busy |= engine.step()
        assert served.space.stored_chunks == 3
        assert served.space.failed_chunks == 0
    for engine in engines:
        check_outputs(engine, {name: it for name, it in prompts.items() if name in engine.outputs})
    assert all(engines[2].computed_tokens[it] <= 20 + 1 for it in prompts)


@MODES
@pytest.mark.parametrize("prompt_tokens", [511, 500, 480])
def test_the_longest_request(served, prompt_tokens, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    prompt, rest = words(prompt_tokens, 3), 512 - prompt_tokens
    for engine in (first, second):
        engine.add("longest", prompt, max_tokens=rest)
        engine.run()
        assert engine.outputs["longest"] == continuation(prompt, rest)
    # The last token that is sampled has no KV: 511 tokens have, which is 15 chunks.
    assert served.space.stored_chunks == 15
    assert second.loaded_tokens("longest") == prompt_tokens // CHUNK * CHUNK
