"""What the figures were measured on, and what else the machine was doing meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import headwater
from headwater import _kernels


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine at the time of a run; part of the contract of `--json`, so fields are never renamed or dropped.

    `load_before` and `load_after` are the 1-minute load averages, `steal_percent` the share of this run's CPU
    time that the hypervisor gave to others, `busy_percent` the share that was used by anybody, us included.
    """

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    hypervisor: bool
    huge_pages: str
    shared_huge_pages: str
    python: str
    headwater: str
    copies: str
    taken_at: str
    load_before: float
    load_after: float
    steal_percent: float
    busy_percent: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Ticks:
    total: int
    idle: int
    steal: int


def bind(process: int, cores: Iterable[int]) -> None:
    """Have all threads of a process run on these cores only, and those that they start."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)


class Observer:
    """Notes the machine's state when made, and describes the machine and the time between when asked."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc, self._sys = proc, sys
        self._load, self._ticks = self._read_load(), self._read_ticks()

    def describe(self) -> Machine:
        """The machine, and what happened on it since this observer was made."""
        ticks = self._read_ticks()
        spent = max(ticks.total - self._ticks.total, 1)
        info = self._read(self._proc / "cpuinfo")
        return Machine(
            cpu=_value(info, "model name") or platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=int((_value(self._read(self._proc / "meminfo"), "MemTotal") or "0 kB").split()[0]) * 1024,
            kernel=platform.release(),
            hypervisor="hypervisor" in (_value(info, "flags") or "").split(),
            huge_pages=self._chosen("enabled"),
            shared_huge_pages=self._chosen("shmem_enabled"),
            python=platform.python_version(),
            headwater=headwater.__version__,
            copies=_kernels.ISA,
            taken_at=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            load_before=self._load,
            load_after=self._read_load(),
            steal_percent=round(100 * (ticks.steal - self._ticks.steal) / spent, 2),
            busy_percent=round(100 - 100 * (ticks.idle - self._ticks.idle) / spent, 1),
        )

    def _read_load(self) -> float:
        return float((self._read(self._proc / "loadavg") or "0").split()[0])

    def _read_ticks(self) -> _Ticks:
        """The first line of /proc/stat: user nice system idle iowait irq softirq steal, summed over all cores."""
        numbers = [int(it) for it in self._read(self._proc / "stat").partition("\n")[0].split()[1:9]]
        numbers += [0] * (8 - len(numbers))
        return _Ticks(sum(numbers), numbers[3] + numbers[4], numbers[7])

    def _chosen(self, setting: str) -> str:
        """The word in brackets of a transparent-huge-page setting: `always [madvise] never`."""
        text = self._read(self._sys / "kernel/mm/transparent_hugepage" / setting)
        return text.partition("[")[2].partition("]")[0] or "unknown"

    @staticmethod
    def _read(path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except OSError:  # a kernel or a sandbox without it; the description says so by its absence
            return ""


def _value(text: str, name: str) -> str | None:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
