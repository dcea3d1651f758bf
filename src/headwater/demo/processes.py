"""Child processes that cannot be left behind: a node and vLLM servers, each in a process group of its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.config import child_environment
from headwater.errors import ConfigError, UnavailableError
from headwater.node.client import fetch_status
from headwater.up.engine import events_config
from headwater.up.plug_in import transfer_config

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.1
STOP_S = 15.0
TAIL_LINES = 15


class Child:
    """A process group and the file that its output goes to."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._was_asked = False
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], within_s: float, waiting: Callable[[], None]) -> None:
        """Poll until ready; raises UnavailableError with the end of the log if the process dies or is late."""
        deadline_s = time.monotonic() + within_s
        while not ready():
            if self._process.poll() is not None:
                raise UnavailableError(f"{self.name} ended with code {self._process.returncode}\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{self.name} was not ready within {within_s:.0f} s\n{self.tail()}")
            waiting()
            time.sleep(POLL_S)

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    @property
    def group(self) -> int:
        """The process group's number."""
        return self._process.pid

    def ask_to_end(self) -> None:
        """Tell the group to end, once: a second time would mean "at once"."""
        if not self._was_asked:
            self._was_asked = True
            self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ask the group to end, wait, then end it; returns when no process of the group is left."""
        self.ask_to_end()
        if not self._ends_within(STOP_S):
            self._signal(signal.SIGKILL)
            self._ends_within(STOP_S)
        self._process.wait()

    def _ends_within(self, seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while self._signal(0):
            if time.monotonic() > deadline_s:
                return False
            self._process.poll()
            time.sleep(POLL_S)
        return True

    def _signal(self, number: int) -> bool:
        """Whether the group was there to get the signal."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


class Children:
    """All children of a run: stopped, last started first, however the run ends."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> Child:
        """Start and remember a child."""
        with uninterrupted():
            child = Child(name, command, environment, log)
            self._children.append(child)
        return child

    def end(self, *children: Child) -> None:
        """Stop some of them now, all at the same time."""
        with uninterrupted():
            for child in children:
                child.ask_to_end()
            for child in children:
                child.stop()
                self._children.remove(child)

    def stop(self) -> None:
        """Stop all children; a second Ctrl-C does not leave the rest behind."""
        with uninterrupted():
            while self._children:
                self._children.pop().stop()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals back: one that came between a process's start and the knowledge of it would leave it behind."""
    came: list[int] = []
    before = [signal.signal(number, lambda caught, _: came.append(caught)) for number in ENDING]
    try:
        yield
    finally:
        for number, handler in zip(ENDING, before, strict=True):
            signal.signal(number, handler)
    for caught in came:
        signal.raise_signal(caught)


def start_node(
    children: Children, address: str, memory: str, log: Path, *, disk: str = "", remotes: Sequence[str] = ()
) -> Child:
    """A `headwater node` that answers, with a disk tier and remote tiers if they are given as its flags want them."""
    command = [
        sys.executable, "-m", "headwater", "node",
        "--socket", address, "--host-memory", memory, "--metrics", "off",
    ]  # fmt: skip
    if disk:
        command += ["--disk", disk]
    for url in remotes:
        command += ["--remote", url]
    node = children.start("headwater node", command, child_environment({}), log)

    def answers() -> bool:
        try:
            fetch_status(address)
        except UnavailableError:
            return False
        return True

    node.wait_until(answers, 20.0, lambda: None)
    return node


@dataclass(frozen=True)
class Served:
    """One `vllm serve` instance."""

    name: str
    port: int
    child: Child
    events: str = ""
    """Where it publishes what it holds; empty if it does not."""
    replay: str = ""

    def healthy(self) -> bool:
        """Whether it answers its health check."""
        return answers_health(self.port)


def answers_health(port: int) -> bool:
    """Whether somebody on loopback answers a health check."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def check_model(model: Path) -> None:
    """Raise ConfigError unless there is a model in this directory."""
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: there is no config.json; `make setup` provides one in .cache/models")


def start_vllm(
    children: Children,
    name: str,
    model: Path,
    core: int | None,
    transfer: dict[str, object] | None,
    directory: Path,
    *,
    resettable: bool = False,
    publishes: bool = False,
    flags: Sequence[str] = (),
) -> Served:
    """Start `vllm serve` on a free loopback port, bound to one core if given; it is not ready yet.

    `resettable` has it offer what vLLM has for developers only, such as to empty its own cache; `publishes` has it say
    what it holds, on two more ports; `flags` are more of vLLM's own, and win.
    """
    check_model(model)
    port = free_port()
    vllm = Path(sys.executable).with_name("vllm")
    if not vllm.is_file():
        raise ConfigError(f"{vllm} is missing; install vLLM into this environment (`make setup` does)")
    command = [
        str(vllm), "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "model",
        "--dtype", cpu_dtype(), "--enforce-eager", "--max-model-len", "4096",
        "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps({**transfer, "engine_id": name.lower()})]
    events = f"tcp://127.0.0.1:{free_port()}" if publishes else ""
    replay = f"tcp://127.0.0.1:{free_port()}" if publishes else ""
    if publishes:
        command += ["--kv-events-config", json.dumps(events_config(events, replay))]
    command += flags
    changes: dict[str, str | None] = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": None if core is None else str(core),
        "VLLM_SERVER_DEV_MODE": "1" if resettable else None,
    }
    child = children.start(f"vLLM {name}", command, child_environment(changes), directory / f"vllm-{name}.log")
    return Served(name, port, child, events, replay)


def kv_transfer_config(node: str) -> dict[str, object]:
    """What plugs headwater into vLLM, by the connector's name alone: a plug-in entry point registers it."""
    config = transfer_config(node) | {"kv_connector_extra_config": {"node": node, "chunk_tokens": 128}}
    del config["kv_connector_module_path"]
    return config


def cpu_dtype() -> str:
    """bfloat16 where the CPU computes with it, else float32, which is several times faster there."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
