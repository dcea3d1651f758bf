"""The proxies that are measured beside each other: each a process tree of its own, started on a free port and ready."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headwater.bench.turns import DRIVERS, MISSING, PEERS
from headwater.config import child_environment
from headwater.demo.processes import Child, Children, free_port
from headwater.errors import UnavailableError

START_S = 60.0
QUESTION = b'{"model":"model","max_tokens":1,"prompt":"ready?"}'
KIB = 1024


@dataclass(frozen=True, slots=True)
class System:
    """One of them: `command` says how it is started, of the instances' ports, its own, a folder of its own and the
    model's folder."""

    name: str
    title: str
    command: Callable[[Sequence[int], int, Path, Path], list[str]]


@dataclass(frozen=True, slots=True)
class Running:
    """A system that answers; `child` is None for the engine itself, asked directly."""

    port: int
    child: Child | None
    control: int = 0
    """Where the Conductor is told about instances; 0 for others."""

    def processes(self) -> list[int]:
        """It and all that it has started."""
        return [] if self.child is None else tree(self.child.group)

    def cpu_s(self) -> float:
        """CPU seconds of all its processes and threads so far, of threads that have ended too."""
        return sum(process_cpu_s(it) for it in self.processes())

    def memory_bytes(self) -> int:
        """Resident memory of all its processes that is not files'."""
        return sum(_status(it, "RssAnon") * KIB for it in self.processes())

    def threads(self) -> int:
        """Of all its processes."""
        return sum(_status(it, "Threads") for it in self.processes())


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(it) for it in children.read_text("ascii").split()]
            except OSError:  # a thread that has just ended
                continue
    return found


def process_cpu_s(pid: int) -> float:
    """What `/proc/PID/stat` calls utime + stime, to the nanosecond: the clock of another process's CPU time."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # it has just ended
        return 0.0


def _status(pid: int, field: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{field}:")), 0)


# ---- how each is started


def fleet_file(ports: Sequence[int], port: int, control: int, model: Path, policy: str, tokens: str) -> str:
    """A fleet of instances that run already and publish no events, as YAML."""
    lines = [
        "conductor:",
        f"  listen: 127.0.0.1:{port}",
        f"  control: 127.0.0.1:{control}",
        "  workers: 1",
        f"  policy: {policy}",
        f"  tokens: {tokens}",
        "instances:",
    ]
    for number, it in enumerate(ports):
        lines += [
            f"  - name: engine{number}",
            f"    model: {model}",
            "    served_name: model",
            f"    url: http://127.0.0.1:{it}",
            "    events: off",
            "    capacity_tokens: 4000000",
            "    block_tokens: 16",
        ]
    return "\n".join(lines) + "\n"


def headwater(name: str, title: str, policy: str, tokens: str) -> System:
    """Our Conductor with one worker."""

    def command(ports: Sequence[int], port: int, folder: Path, model: Path) -> list[str]:
        control = free_port()
        (folder / "control").write_text(f"{control}", "ascii")
        file = folder / "fleet.yaml"
        file.write_text(fleet_file(ports, port, control, model, policy, tokens), "utf-8")
        return [sys.executable, "-m", "headwater", "conductor", str(file), "--runtime-dir", str(folder / "run")]

    return System(name, title, command)


def vllm_router(policy: str) -> System:
    """The Rust router at its defaults, but for logs of each request and a port of its metrics."""

    def command(ports: Sequence[int], port: int, folder: Path, model: Path) -> list[str]:
        python = PEERS / "vllm_router/bin/python"
        if not python.exists():
            raise UnavailableError(MISSING)
        return [
            str(python), "-m", "vllm_router.launch_router", "--port", f"{port}", "--policy", policy,
            "--prometheus-port", f"{free_port()}", "--log-level", "error", "--worker-urls",
            *(f"http://127.0.0.1:{it}" for it in ports),
        ]  # fmt: skip

    return System(f"vllm-router-{policy}", f"vllm-router 0.1.17 {policy}", command)


def _aiohttp(ports: Sequence[int], port: int, folder: Path, model: Path) -> list[str]:
    driver = DRIVERS / "aiohttp_proxy.py"
    if not driver.exists():
        raise UnavailableError("run it where benchmarks/ is")
    return [sys.executable, str(driver), f"{port}", f"http://127.0.0.1:{ports[0]}"]


def _splice(ports: Sequence[int], port: int, folder: Path, model: Path) -> list[str]:
    return [sys.executable, "-m", "headwater.bench.proxy_splice", f"{port}", f"{ports[0]}"]


RELAY = headwater("headwater", "headwater, round robin", "round_robin", "none")
ROUTING = headwater("headwater-kv", "headwater, KV routing", "headwater", "local")
ROUND_ROBIN, CACHE_AWARE = vllm_router("round_robin"), vllm_router("cache_aware")
AIOHTTP = System("aiohttp", "a plain aiohttp proxy", _aiohttp)
SPLICE = System("splice", "a raw splice", _splice)


# ---- starting


class Place:
    """What runs during a measurement: the engine on some ports, the clients, the proxies; gone when its block ends."""

    def __init__(self, children: Children, folder: Path, model: Path) -> None:
        self._children, self._folder, self._model = children, folder, model
        self._count = 0

    def origin(self, count: int) -> list[int]:
        """An engine that answers on so many ports."""
        ports = [free_port() for _ in range(count)]
        command = [sys.executable, "-m", "headwater.bench.proxy_origin", *map(str, ports)]
        child = self._start("origin", command)
        child.wait_until(lambda: all(answers(it) for it in ports), START_S, lambda: None)
        return ports

    def start(self, system: System, ports: Sequence[int]) -> Running:
        """One that answers. Raises UnavailableError with the end of its log."""
        port = free_port()
        folder = self._folder / f"{system.name}-{self._count}"
        folder.mkdir()
        child = self._start(system.name, system.command(ports, port, folder, self._model))
        child.wait_until(lambda: answers(port), START_S, lambda: None)
        control = folder / "control"
        return Running(port, child, int(control.read_text("ascii")) if control.exists() else 0)

    def end(self, running: Running) -> None:
        """Stop one."""
        if running.child is not None:
            self._children.end(running.child)

    def _start(self, name: str, command: Sequence[str]) -> Child:
        self._count += 1
        log = self._folder / f"{name}-{self._count}.log"
        return self._children.start(name, command, child_environment(_QUIET), log)


_QUIET: Mapping[str, str | None] = {"HEADWATER_LOG_LEVEL": "warning", "RUST_LOG": "error"}


@contextmanager
def place(folder: Path, model: Path) -> Iterator[Place]:
    """Where processes are started; all of them are gone afterwards."""
    with Children() as children:
        yield Place(children, folder, model)


def reason(error: Exception) -> str:
    """An error in a line: what happened, and the last words of whoever did not start."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return ": ".join(dict.fromkeys((words[0], words[-1].strip()[-300:])))


def answers(port: int) -> bool:
    """Whether a completion through this port is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("POST", "/v1/completions", QUESTION, {"Content-Type": "application/json"})
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
