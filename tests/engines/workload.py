"""Seeded requests for the harness: shared prefixes, late arrivals, aborts, long outputs."""

import random

from tests.engines.harness import Engine
from tests.engines.oracle import VOCABULARY, continuation


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def workload(engine: Engine, seed: int) -> dict[str, list[int]]:
    """Requests that share prefixes of several lengths, added at several times, some aborted, all run to the end."""
    rng = random.Random(seed)
    common = words(90, seed)
    prompts = {}
    for n in range(10):
        name = f"{seed}-{n}"
        prompts[name] = common[: rng.randrange(91)] + words(rng.randrange(1, 60), rng.randrange(10**6))
        engine.add(name, prompts[name], max_tokens=rng.randrange(1, 40))
        for _ in range(rng.randrange(4)):
            engine.step(abort=[rng.choice(list(prompts))] if rng.random() < 0.15 else [])
        if rng.random() < 0.15:
            engine.abort(rng.choice(list(prompts)))
    engine.run()
    return prompts


def check_outputs(engine: Engine, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        assert engine.outputs[name] == continuation(prompt, len(engine.outputs[name])), name
        assert engine.finished[name] in ("length", "abort"), name
