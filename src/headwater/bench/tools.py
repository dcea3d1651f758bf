"""Other people's programs that are yardsticks: found where `make setup` or the system has them, started and read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater.config import child_environment, search_path
from headwater.demo.processes import free_port
from headwater.demo.valkey import answers, valkey_command
from headwater.errors import ConfigError, UnavailableError

TOOLS = Path(".cache/tools")
"""Where `scripts/get_tools.py` unpacks Debian's fio and Redis."""
RUN_S = 300.0


def program(name: str) -> list[str] | None:
    """How to run a program: from the system, or from `TOOLS` with the libraries that came along; None without it."""
    installed = shutil.which(name, path=search_path())
    if installed is not None:
        return [installed]
    unpacked = (TOOLS / "usr/bin" / name).resolve()
    if not unpacked.exists():
        return None
    libraries = [
        str(path) for base in ("usr/lib", "lib") for path in sorted((TOOLS / base).resolve().glob("*-linux-gnu"))
    ]
    nested = [str(path) for folder in libraries for path in sorted(Path(folder).iterdir()) if path.is_dir()]
    return ["env", f"LD_LIBRARY_PATH={':'.join([*libraries, *nested])}", str(unpacked)]


def missing(name: str) -> str:
    """Why a figure that needs a program cannot be had."""
    return f"needs {name}: install it, or run scripts/get_tools.py"


def fio(file: Path, verb: str, piece_bytes: int, total_bytes: int, threads: int) -> float:
    """The bytes a second that fio reads or writes: psync, O_DIRECT, each thread in its own part of the file.

    Raises UnavailableError if it fails.
    """
    command = program("fio")
    assert command is not None, "the caller has looked"
    part = total_bytes // threads
    words = _run(
        [
            *command, "--name=yardstick", f"--filename={file}", f"--rw={verb}", f"--bs={piece_bytes}", f"--size={part}",
            f"--offset_increment={part}", f"--numjobs={threads}", "--thread", "--direct=1", "--ioengine=psync",
            "--overwrite=1", "--group_reporting", "--output-format=json",
        ]
    )  # fmt: skip
    return float(json.loads(words[words.index("{") :])["jobs"][0][verb]["bw_bytes"])


def redis_benchmark(port: int, verb: str, value_bytes: int, count: int, connections: int) -> float:
    """The bytes a second that redis-benchmark sets or gets, values of one size; raises UnavailableError."""
    command = program("redis-benchmark")
    assert command is not None, "the caller has looked"
    words = _run(
        [
            *command, "-p", f"{port}", "-t", verb, "-d", f"{value_bytes}", "-n", f"{count}", "-c", f"{connections}",
            "-r", f"{count}", "--csv",
        ]
    )  # fmt: skip
    row = next(line for line in reversed(words.splitlines()) if verb.upper() in line.upper())
    return float(row.split(",")[1].strip('"')) * value_bytes


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        list(command), env=child_environment({}), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    if done.returncode:
        raise UnavailableError(f"{Path(command[-1]).name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


@contextmanager
def valkey(directory: Path, memory: str = "2gb") -> Iterator[int]:
    """A Valkey server on a free loopback port, with everything in memory; the port. Raises ConfigError without one."""
    port = free_port()
    command = valkey_command(port, directory, memory)
    with open(os.devnull, "wb") as nowhere:
        server = subprocess.Popen(command, env=child_environment({}), stdout=nowhere, stderr=nowhere)
    try:
        until_s = time.monotonic() + 20.0
        while not answers(port):
            if server.poll() is not None or time.monotonic() > until_s:
                raise ConfigError("Valkey does not start; try it by hand: " + " ".join(command))
            time.sleep(0.02)
        yield port
    finally:
        server.terminate()
        server.wait()
