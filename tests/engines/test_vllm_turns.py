"""Conversations that alternate between engines, and the settings and request fields that say what is shared."""

import pytest

from tests.engines.harness import Shape
from tests.engines.oracle import continuation
from tests.engines.served import BLOCK, CHUNK, DENSE, MODES, SKIP, WINDOW, decider
from tests.engines.vllm_names import torch
from tests.engines.workload import words


@MODES
@pytest.mark.parametrize("shape", [DENSE, WINDOW, Shape(tp=2)], ids=["dense", "window", "tp2"])
def test_each_turn_reuses_the_whole_conversation_so_far(served, shape, mode) -> None:
    engines = [served.engine(shape, mode) for _ in range(2)]
    history, with_kv = words(50), 0
    for turn in range(8):
        engine = engines[turn % 2]
        history += words(17, turn)
        engine.forget()
        engine.add(f"{turn}", history, max_tokens=30)
        engine.run()
        assert engine.loaded_tokens(f"{turn}") == with_kv // CHUNK * CHUNK, turn
        assert engine.outputs[f"{turn}"] == continuation(history, 30)
        history += engine.outputs[f"{turn}"]
        with_kv = len(history) - 1  # the last token was sampled, not computed


@MODES
def test_turns_also_build_on_what_the_engine_has_itself(served, mode) -> None:
    engines = [served.engine(DENSE, mode) for _ in range(2)]
    history, with_kv, own = words(50), 0, [0, 0]
    for turn in range(8):
        engine = engines[turn % 2]
        history += words(9, turn)
        engine.add(f"{turn}", history, max_tokens=20)
        engine.run()
        local, held = own[turn % 2] // BLOCK * BLOCK, with_kv // CHUNK * CHUNK
        assert engine.loaded_tokens(f"{turn}") == max(held - local, 0), turn
        assert engine.outputs[f"{turn}"] == continuation(history, 20)
        history += engine.outputs[f"{turn}"]
        with_kv = own[turn % 2] = len(history) - 1


@MODES
def test_generated_tokens_are_saved_only_if_wanted(served, mode) -> None:
    prompt = words(70)
    first, second = (served.engine(DENSE, mode, save_decode=False) for _ in range(2))
    first.add("a", prompt, max_tokens=60)
    first.run()
    second.add("b", prompt + first.outputs["a"], max_tokens=2)
    second.run()
    assert second.loaded_tokens("b") == 64
    assert served.space.stored_chunks == 2 + 2  # of 130 tokens the second engine's prompt has them all


@MODES
def test_an_engine_that_saves_nothing_still_loads(served, mode) -> None:
    reader, writer = served.engine(DENSE, mode, save=False), served.engine(DENSE, mode)
    reader.add("a", words(100, 1), max_tokens=40)
    reader.run()
    assert served.space.stored_chunks == 0
    writer.add("b", words(100, 2))
    writer.run()
    reader.add("c", words(100, 2))
    reader.run()
    assert reader.loaded_tokens("c") == 96
    assert served.space.stored_chunks == 3


@MODES
def test_short_hits_are_computed(served, mode) -> None:
    first, second = served.engine(DENSE, mode), served.engine(DENSE, mode, min_load_tokens=64)
    text = words(100)
    first.add("a", text)
    first.run()
    for held, loaded in ((32, 0), (64, 64), (96, 96)):
        second.forget()
        second.add(f"{held}", text[: held + 1])
        second.run()
        assert second.loaded_tokens(f"{held}") == loaded
    assert served.space.stored_chunks == 3


@MODES
def test_a_request_can_opt_out(served, mode) -> None:
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    prompt = words(100)
    first.add("secret", prompt, max_tokens=40, transfer=SKIP)
    first.run()
    assert (served.space.stored_chunks, served.space.lookup_tokens) == (0, 0)
    first.forget()
    first.add("open", prompt, max_tokens=40, transfer={"headwater.skip": False, "of-another": 1})
    first.run()
    second.add("secret", prompt, max_tokens=40, transfer=SKIP)
    second.run()
    assert second.loaded_tokens("secret") == 0
    assert second.outputs["secret"] == first.outputs["open"] == continuation(prompt, 40)


@pytest.mark.parametrize("sent", [{}, {"headwater.skip": 0}, {"headwater.skip": None}, {"skip": [1]}], ids=str)
def test_transfer_parameters_that_mean_nothing(served, sent) -> None:
    engine = served.engine()
    engine.add("a", words(100), transfer=sent)
    engine.run()
    assert engine.outputs["a"] == continuation(words(100), 1)
    assert served.space.stored_chunks == 3


@MODES
def test_a_request_that_may_not_read_the_cache_still_fills_it(served, mode) -> None:
    """vLLM asks so for prompt logprobs: every token must be computed."""
    first, second = (served.engine(DENSE, mode) for _ in range(2))
    prompt = words(100)
    for engine in (first, second):
        engine.add("a", prompt, skip_reading=True)
        engine.run()
        assert (engine.loaded_tokens("a"), engine.computed_tokens["a"]) == (0, 100)
    assert (served.space.stored_chunks, served.space.lookup_tokens) == (3, 0)
    second.forget()
    second.add("b", prompt)
    second.run()
    assert second.loaded_tokens("b") == 96


@MODES
def test_prompts_whose_tokens_do_not_tell_all_are_left_alone(served, mode) -> None:
    """Embeddings instead of tokens, and streaming sessions, which rewrite their own tokens."""
    engine = served.engine(DENSE, mode)
    prompt = words(100)
    engine.add("embeds", prompt, max_tokens=40, fields={"prompt_embeds": torch.zeros(100, 4)})
    engine.run()
    engine.forget()
    engine.add("session", prompt, max_tokens=40, fields={"resumable": True})
    for _ in range(50):
        engine.step()
    assert len(engine.outputs["session"]) == 40
    engine.abort("session")
    engine.run()
    decider(engine)  # has registered its namespace
    assert (served.space.stored_chunks, served.space.lookup_tokens) == (0, 0)
