"""Without a configured node the engine brings its own, which leaves nothing behind."""

import math
import os
import stat
import threading
from pathlib import Path

import pytest

from headwater.config import runtime_dir
from headwater.errors import ConfigError, ResourceError
from tests.engines.harness import Engine, Shape
from tests.engines.oracle import continuation
from tests.engines.served import CHUNK, CONNECTOR, MODES, eventually, leftovers
from tests.engines.test_vllm_metrics import total
from tests.engines.workload import check_outputs, words, workload

EXTRA = {"host_memory": "16MiB", "chunk_tokens": CHUNK, "fingerprint": "test-model"}


@pytest.fixture(autouse=True)
def _own_runtime_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def sockets() -> list[Path]:
    return [it for it in runtime_dir().iterdir() if it.is_socket()] if runtime_dir().exists() else []


@MODES
@pytest.mark.parametrize("shape", [Shape(), Shape(tp=2, window_tokens=40)], ids=["dense", "tp2-window"])
def test_an_engine_with_a_node_of_its_own(shape, mode) -> None:
    engine = Engine(shape, CONNECTOR, EXTRA, **mode)
    prompt = words(130)
    engine.add("a", prompt, max_tokens=5)
    engine.run()
    engine.forget()
    engine.add("b", prompt, max_tokens=5)
    engine.run()
    assert engine.outputs["a"] == engine.outputs["b"] == continuation(prompt, 5)
    assert engine.loaded_tokens("b") == 128
    check_outputs(engine, workload(engine, 1))
    engine.close(leftovers)


def test_two_engines_in_one_process_share_nothing() -> None:
    first, second = (Engine(Shape(), CONNECTOR, EXTRA) for _ in range(2))
    assert len(sockets()) == 2
    assert all(stat.S_IMODE(it.stat().st_mode) == 0o600 for it in sockets())
    for engine in (first, second):
        engine.add("a", words(130), max_tokens=5)
        engine.run()
        assert engine.loaded_tokens("a") == 0
    first.close(leftovers)
    assert len(sockets()) == 1
    second.forget()
    second.add("b", words(130), max_tokens=5)
    second.run()
    assert second.loaded_tokens("b") == 128
    second.close(leftovers)


@MODES
def test_an_engine_started_again_has_what_its_disk_kept(tmp_path, mode) -> None:
    extra, prompt = {**EXTRA, "disk": f"{tmp_path}/kv:64MiB"}, words(130)
    first = Engine(Shape(), CONNECTOR, extra, **mode)
    first.add("a", prompt, max_tokens=5)
    first.run()
    disk = first.connector._embedded.server.node.tiering.levels[0].disk
    eventually(lambda: disk.spaces and disk.spaces[0].stored_chunks == 128 // CHUNK, lambda: disk)
    first.close(leftovers)
    second = Engine(Shape(), CONNECTOR, extra, **mode)
    # Endless patience: a busy machine may take longer than a request should wait.
    second.connector._embedded.server.node.tiering.fetches._share = math.inf
    second.add("b", prompt, max_tokens=5)
    second.run()
    assert second.outputs["b"] == continuation(prompt, 5)
    assert second.loaded_tokens("b") == total(second)["disk_tokens"] == 128
    assert total(second)["cut_waits"] == 0
    second.close(leftovers)


def test_nothing_is_left_after_twenty_engines() -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for n in range(20):
        engine = Engine(Shape(), CONNECTOR, EXTRA)
        engine.add("a", words(130, n))
        engine.run()
        engine.close(leftovers)
    assert not list(runtime_dir().iterdir())
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_more_memory_than_there_is_refuses_the_start() -> None:
    engine = None
    with pytest.raises(ResourceError, match=r"needs \d+ bytes"):
        engine = Engine(Shape(), CONNECTOR, {**EXTRA, "host_memory": "900GiB"})
    assert engine is None
    assert not sockets()


def test_a_runtime_directory_of_somebody_else_is_refused() -> None:
    runtime_dir().mkdir(mode=0o777, parents=True)
    runtime_dir().chmod(0o777)
    with pytest.raises(ConfigError, match="0700"):
        Engine(Shape(), CONNECTOR, EXTRA)
