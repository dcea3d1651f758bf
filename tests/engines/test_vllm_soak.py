"""Everything at once, at random: two engines, one node, faults of every kind; outputs are right and nothing is left."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.engines.harness import Engine, Shape
from tests.engines.oracle import continuation
from tests.engines.served import Faults, LateCopies, Served, decider, eventually, intercept
from tests.engines.workload import words

RUNS = 30
QUICK = {"metadata_s": 0.2, "connect_s": 0.2, "load_s": 1.0}


def shape_of(rng: random.Random) -> Shape:
    window = rng.choice([0, 0, 20, 40])
    tp, pp = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
    return Shape(
        blocks=rng.choice([44, 64]) if window else rng.choice([16, 24, 64]),
        window_tokens=window,
        tp=tp,
        pp=pp,
        replicated=not window and rng.random() < 0.3,
        head_size=rng.choice([4, 64]),
        max_tokens=200,
        max_batch_tokens=rng.choice([32, 50, 64] if window else [32, 50, 64, 200]),
        long_prefill_tokens=rng.choice([0, 0, 40]),
    )


@dataclass
class Asked:
    """What a request was, to know what must come out."""

    engine: Engine
    prompt: list[int]
    salt: str | None


@dataclass
class Soak:
    """One seeded run."""

    rng: random.Random
    served: Served
    engines: list[Engine]
    asked: dict[str, Asked] = field(default_factory=dict)

    def ask(self, common: list[int]) -> None:
        rng, engine = self.rng, self.rng.choice(self.engines)
        prompt = common[: rng.randrange(100)] + words(rng.randrange(1, 30), rng.randrange(4))
        salt, name = rng.choice([None, None, "s"]), f"{len(self.asked)}"
        self.asked[name] = Asked(engine, prompt, salt)
        skips = {"skip_reading": True} if rng.random() < 0.05 else {}
        engine.add(name, prompt, rng.randrange(1, 40), salt=salt, **skips)

    def disturb(self) -> None:
        rng, engine = self.rng, self.rng.choice(self.engines)
        mine = [name for name, it in self.asked.items() if it.engine is engine and name not in engine.finished]
        kind = rng.random()
        if kind < 0.35 and mine:
            engine.abort(rng.choice(mine))
        elif kind < 0.45 and mine:
            engine.step(abort=[rng.choice(mine)])
        elif kind < 0.6 and mine:
            engine.preempt(rng.choice(mine))
        elif kind < 0.8:
            engine.run()
            engine.forget()
        elif kind < 0.9:
            engine.connector.reset_cache()
        else:
            self.served.stop()
            for _ in range(rng.randrange(3)):
                engine.step()
            self.served.start()

    def check(self) -> None:
        for name, it in self.asked.items():
            out = it.engine.outputs[name]
            assert out == continuation(it.prompt, len(out), salt=it.salt), name
            assert it.engine.finished[name] in ("length", "abort"), name


@pytest.mark.parametrize("run", range(RUNS))
def test_soak(serve: Any, seed: int, run: int) -> None:
    rng = random.Random(f"{seed}/{run}")
    shape, small = shape_of(rng), rng.random() < 0.5
    served = serve((1 if small else 16) << 20, eviction=rng.choice(["lru", "s3fifo"]))
    mode = {"asynchronous": rng.random() < 0.5, "second_runner": rng.random() < 0.5}
    extra = {"chunk_tokens": rng.choice([16, 32, 48]), "copy_threads": rng.choice([1, 2]), **QUICK}
    engines = [served.engine(shape, mode, **extra) for _ in range(2)]
    share = rng.choice([0.0, 0.1, 0.3])
    for engine in engines:
        if rng.random() < 0.5:
            LateCopies(engine, rng.randrange(1 << 30), share)
        else:
            for name in ("gather", "scatter"):
                intercept(engine, name, Faults(rng.randrange(1 << 30), share))
    soak, common = Soak(rng, served, engines), words(120, run)
    for _ in range(30):
        soak.ask(common)
        for _ in range(rng.randrange(5)):
            rng.choice(engines).step()
        if rng.random() < 0.25:
            soak.disturb()
    for engine in engines:
        engine.run()
    soak.check()
    for engine in engines:  # what could not be given back without a node is given back with the next step
        eventually(lambda engine=engine: decider(engine)._node.session is not None)
        engine.add("last", words(10, 5))
        engine.run()
