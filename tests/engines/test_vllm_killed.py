"""Engines that are killed in the middle of a save or a load: all is freed at once, nothing half-written is seen."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.config import runtime_dir
from tests.engines.engine_process import POINTS, EngineServer
from tests.engines.harness import Engine
from tests.engines.oracle import continuation
from tests.engines.served import CHUNK, CONNECTOR, DENSE, eventually
from tests.engines.workload import words

PROMPT = words(130, 61)
FREED_S = 5.0
"""Far below any lease: it is the kernel that tells the node, by closing what the dead had open."""


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    it = EngineServer()
    yield it
    it.close()


@pytest.mark.parametrize("mode", ["as-on-cpu", "as-on-gpu"])
@pytest.mark.parametrize("point", POINTS)
def test_killed(served, server, tmp_path, point, mode) -> None:
    loading = "load" in point or "leased" in point
    first = served.engine()
    if loading:
        first.add("saved", PROMPT)
        first.run()
        first.forget()
    others = served.embedded.server.sessions
    stored = served.cache.spaces[0].stored_chunks if served.cache.spaces else 0
    server.start(point=point, prompt=PROMPT, extra={"node": served.address}, mode=mode, runtime=str(tmp_path))
    if point != "all done":
        assert len(served.cache.tickets) >= 1
    server.kill()
    killed_s = time.monotonic()
    eventually(lambda: not served.cache.tickets and served.embedded.server.sessions == others)
    assert time.monotonic() - killed_s < FREED_S
    served.lacks_tickets()
    # Nothing of what it was writing is there, everything that it was reading is, and can leave.
    expected = {"all done": 4 * CHUNK}.get(point, 4 * CHUNK if loading else 0)
    assert served.space.stored_chunks - stored == (4 if point == "all done" else 0)
    first.add("a", PROMPT, max_tokens=5)
    first.run()
    assert first.outputs["a"] == continuation(PROMPT, 5)
    assert first.loaded_tokens("a") == expected
    assert served.cache.clear(0) == 4


def test_a_killed_engine_with_an_embedded_node(server, tmp_path, monkeypatch) -> None:
    """Its memory goes with it; the name of its socket is swept by the next engine, the names of the living are not."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shared = sorted(Path("/dev/shm").iterdir())
    extra = {"host_memory": "16MiB", "chunk_tokens": CHUNK, "fingerprint": "test-model"}
    living = Engine(DENSE, CONNECTOR, extra)
    names = {it.name for it in runtime_dir().iterdir()}
    server.start(point="half saved", prompt=PROMPT, extra=extra, mode="as-on-cpu", runtime=str(tmp_path))
    stale = {it.name for it in runtime_dir().iterdir()} - names
    assert sorted(Path(it).suffix for it in stale) == [".lock", ".sock"]
    server.kill()
    eventually(lambda: not Path(f"/proc/{server.pid}").exists())
    assert stale <= {it.name for it in runtime_dir().iterdir()}
    assert sorted(Path("/dev/shm").iterdir()) == shared
    other = Engine(DENSE, CONNECTOR, extra)
    left = {it.name for it in runtime_dir().iterdir()}
    assert names <= left
    assert not stale & left
    for engine in (living, other):
        engine.add("a", PROMPT, max_tokens=5)
        engine.run()
        engine.forget()
        engine.add("b", PROMPT, max_tokens=5)
        engine.run()
        assert engine.loaded_tokens("b") == 128
        engine.close()
    assert not list(runtime_dir().iterdir())
