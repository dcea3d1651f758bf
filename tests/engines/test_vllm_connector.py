"""The plug-in under vLLM's real scheduler: engines share a real node, and every KV byte that is read is checked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.config import NodeConfig
from headwater.core.cache import Cache
from headwater.node.driver import Node
from headwater.node.server import EmbeddedServer
from tests.engines.harness import Engine, Shape
from tests.engines.oracle import continuation
from tests.engines.workload import check_outputs, words, workload

CONNECTOR = "headwater.engines.vllm.HeadwaterConnector"
MODES = pytest.mark.parametrize(
    "mode",
    [{"asynchronous": False, "second_runner": False}, {"asynchronous": True, "second_runner": True}],
    ids=["as-on-cpu", "as-on-gpu"],
)
SHAPES = {
    "dense": Shape(),
    "window": Shape(window_tokens=40),
    "window-only": Shape(layers=0, window_tokens=40),
    "tp2": Shape(tp=2),
    "pp2": Shape(pp=2),
    "tp2-replicated": Shape(tp=2, replicated=True),
    "tp2-pp2": Shape(tp=2, pp=2),
}


class Served:
    """A node in a thread of this process, and engines that use it."""

    def __init__(self, directory: Path, memory: int = 64 << 20) -> None:
        self.directory, self.memory = directory, memory
        self.address = f"unix:{directory}/node.sock"
        self.engines: list[Engine] = []
        self.embedded: EmbeddedServer | None = None
        self.start()

    def start(self) -> None:
        config = NodeConfig(socket=self.address, host_memory=self.memory, slab=1 << 20, metrics="off")
        self.embedded = EmbeddedServer(Node(config), self.address)

    def stop(self) -> None:
        if self.embedded is not None:
            self.embedded.close()
            self.embedded = None

    @property
    def cache(self) -> Cache:
        assert self.embedded is not None
        return self.embedded.server.node.cache

    def engine(self, shape: Shape = SHAPES["dense"], mode: dict[str, Any] | None = None, **extra: Any) -> Engine:
        options = {"node": self.address, "chunk_tokens": 32, "fingerprint": "test-model", **extra}
        engine = Engine(shape, CONNECTOR, options, **(mode or {}))
        self.engines.append(engine)
        return engine


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    it = Served(tmp_path)
    yield it
    for engine in it.engines:
        engine.close()
    it.cache.check()
    assert not it.cache.tickets, f"tickets are left: {it.cache.tickets}"
    it.stop()


@MODES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_second_engine_reuses_what_the_first_saved(served: Served, shape: Shape, mode: dict) -> None:
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
    assert served.cache.spaces[0].hit_tokens
