"""Engines in processes of their own, which stop at a chosen point and are killed there.

A server, started once, imports vLLM (seconds) and forks an engine for each order (milliseconds). It has one thread,
which a test process has not. Orders come as JSON lines on its input; what engines say goes to its output.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.harness import Engine
from tests.engines.oracle import continuation
from tests.engines.served import CHUNK, CONNECTOR, DENSE, ON_CPU, ON_GPU, intercept

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0

POINTS = (
    "slots reserved",
    "half saved",
    "saved, not done",
    "slots leased",
    "half loaded",
    "loaded, not done",
    "all done",
)


class EngineServer:
    """Starts one engine at a time; its own end is the end of all."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
        )
        self.pid = 0
        self.read = bytearray()

    def start(self, **order: Any) -> None:
        """Have an engine forked; see `play`. Returns when it stands at its point."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        self.pid = self.hear()["pid"]
        said = self.hear()
        assert said == {"at": order["point"]}, said

    def hear(self) -> Any:
        """The next thing that an engine says."""
        assert self.process.stdout is not None
        until_s = time.monotonic() + WAIT_S
        while b"\n" not in self.read:
            ready, _, _ = select.select([self.process.stdout], [], [], max(until_s - time.monotonic(), 0))
            assert ready, "the engine says nothing"
            part = os.read(self.process.stdout.fileno(), 4096)
            assert part, "the engines' server has ended"
            self.read += part
        line, _, rest = self.read.partition(b"\n")
        self.read = bytearray(rest)
        return json.loads(line)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def tell(value: Any) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def play(point: str, prompt: list[int], extra: dict[str, Any], mode: str, runtime: str) -> None:
    """Run one request and stay for ever at a point of its life."""
    os.environ["XDG_RUNTIME_DIR"] = runtime
    extra = {"chunk_tokens": CHUNK, "fingerprint": "test-model", **extra}
    engine = Engine(DENSE, CONNECTOR, extra, **(ON_GPU if mode == "as-on-gpu" else ON_CPU))

    def stay(here: str) -> None:
        if here == point:
            tell({"at": here})
            threading.Event().wait()

    def around(half: str, whole: str) -> Callable[..., None]:
        def copy_and_stay(copy: Callable[..., None], group: int, blocks: Any, places: Any, *rest: Any) -> None:
            middle = len(blocks) // 2
            copy(group, blocks[:middle], places[:middle], *rest)
            stay(half)
            copy(group, blocks[middle:], places[middle:], *rest)
            stay(whole)

        return copy_and_stay

    intercept(engine, "gather", around("half saved", "saved, not done"))
    intercept(engine, "scatter", around("half loaded", "loaded, not done"))
    build = engine.connector.build_connector_meta

    def build_and_stay(scheduled: Any) -> Any:
        meta = build(scheduled)
        if meta.saves:
            stay("slots reserved")
        if meta.loads:
            stay("slots leased")
        return meta

    engine.connector.build_connector_meta = build_and_stay
    engine.add("a", prompt, max_tokens=5)
    engine.run()
    assert engine.outputs["a"] == continuation(prompt, 5)
    stay("all done")


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            os.close(0)
            tell({"pid": os.getpid()})
            try:
                play(**json.loads(line))
            finally:
                os._exit(1)


if __name__ == "__main__":
    serve()
