"""Processes that move blocks or use a store, one turn at a time, whoever wrote them: ours, a rival's, bare C.

Each reads requests from stdin and answers each with a line of JSON; the first line says that it is ready. See `blocks`.
"""

from __future__ import annotations

import json
import select
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import headwater
from headwater.bench.harness import GB, Reading, Series, Unmeasured
from headwater.config import child_environment, search_path
from headwater.demo.processes import uninterrupted
from headwater.errors import UnavailableError

READY_S, TURN_S, STOP_S = 60.0, 60.0, 10.0
PEERS, DRIVERS = Path(".cache/peers"), Path("benchmarks")
MISSING = "run benchmarks/install_peers.py"
SOURCE = Path(__file__).with_name("bare_tcp.c")
NO_COMPILER = "needs a C compiler (cc) for the yardstick: install gcc"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cell:
    """What a turn does: `calls` calls for so many blocks or objects; `how` is `cold` or `warm` for blocks, and for
    objects on which cores, `all` or `one`."""

    block_bytes: int
    batch: int
    calls: int
    verb: str = "read"
    how: str = "cold"

    @property
    def name(self) -> str:
        """`1MiB/x32`."""
        return f"{size_name(self.block_bytes)}/x{self.batch}"

    @property
    def call_gb(self) -> float:
        """What one call moves."""
        return self.block_bytes * self.batch / GB

    @property
    def request(self) -> str:
        """As processes are asked for it."""
        return f"{self.verb} {self.block_bytes} {self.batch} {self.calls} {self.how}"


def size_name(size: int) -> str:
    """`64KiB`, `4MiB`."""
    return f"{size // MIB}MiB" if size % MIB == 0 else f"{size // 1024}KiB"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a process said of one turn."""

    seconds: tuple[float, ...]
    cpu_s: float
    """Of both ends."""

    @property
    def call_s(self) -> float:
        """Mean of a call."""
        return statistics.fmean(self.seconds)


class Turner:
    """A process that takes turns; `title` is for messages."""

    def __init__(self, title: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.title, self._process, self._log = title, process, log

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Until it says that it is ready. Raises UnavailableError with its last words."""
        self.answer(READY_S)

    def turn(self, cell: Cell) -> Turn:
        """One turn. Raises UnavailableError with the process's last words."""
        found = self.ask(cell.request)
        return Turn(tuple(found["seconds"]), found["cpu_s"] + found["peer_cpu_s"])

    def ask(self, request: str, patience_s: float = TURN_S) -> dict[str, Any]:
        """One request and its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{request}\n".encode())
        except BrokenPipeError:
            raise self._failure() from None
        return self.answer(patience_s)

    def answer(self, patience_s: float) -> dict[str, Any]:
        """The next line that it says."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], patience_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Let it end by itself, or end it; its descriptors are closed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _failure(self) -> UnavailableError:
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return UnavailableError(f"{self.title} does not go on: {last[0][-300:] if last else 'it says nothing'}")


@contextmanager
def turner(
    title: str, command: Sequence[str], log: Path, settings: Mapping[str, str | None] | None = None
) -> Iterator[Turner]:
    """A process that is ready to take turns; gone when the context ends. Raises UnavailableError."""
    process = None
    environment = child_environment({**(settings or {}), "PYTHONPATH": str(Path(headwater.__file__).parent.parent)})
    try:
        with open(log, "wb") as words, uninterrupted():
            process = subprocess.Popen(
                list(command), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, bufsize=0
            )
        found = Turner(title, process, log)
        found.wait_ready()
        yield found
    finally:
        if process is not None:
            Turner(title, process, log).stop()


def peer_command(peer: str, driver: str) -> list[str]:
    """How to run a rival's driver by its own Python; UnavailableError if the rival is not installed."""
    python, script = PEERS / peer / "bin/python", DRIVERS / driver
    if not python.exists() or not script.exists():
        raise UnavailableError(MISSING)
    return [str(python), str(script)]


def compile_bare(directory: Path) -> Path:
    """The yardstick in C, built with the system's compiler. Raises UnavailableError without one."""
    compiler = shutil.which("cc", path=search_path()) or shutil.which("gcc", path=search_path())
    if compiler is None:
        raise UnavailableError(NO_COMPILER)
    program = directory / "bare_tcp"
    done = subprocess.run(
        [compiler, "-O2", "-o", str(program), str(SOURCE)],
        env=child_environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"{compiler} cannot build {SOURCE.name}: {done.stderr.strip()[-300:]}")
    return program


@dataclass(slots=True)
class Samples:
    """What one contender did in one cell: a turn's mean call for each round, and all calls."""

    series: Series
    calls: list[float] = field(default_factory=list)


class Contest:
    """Contenders that take turns in the same rounds; one that cannot begin or go on is left out of what follows, and
    `reasons` says why."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._turners: dict[str, Turner] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, who: str, title: str, command: Callable[[], Sequence[str]], log: Path) -> None:
        """A contender, started and ready."""
        try:
            self._turners[who] = self._stack.enter_context(turner(title, command(), log))
        except UnavailableError as error:
            self.reasons[who] = str(error)

    def run(
        self, cells: Mapping[str, Mapping[str, Cell]], rounds: int, after_turn: Callable[[], object]
    ) -> dict[tuple[str, str], Samples]:
        """Each contender's turn in each cell, once for nothing and then in so many rounds; by cell and contender.
        `cells` says what which contender does in which cell."""
        found = {
            (name, who): Samples(Series(cell.call_gb)) for name, sides in cells.items() for who, cell in sides.items()
        }
        for number in range(-1, rounds):
            for name, sides in cells.items():
                order = list(sides.items())
                shift = max(number, 0) % len(order)
                for who, cell in order[shift:] + order[:shift]:
                    if (turn := self._turn(who, cell)) is not None and number >= 0:
                        samples = found[name, who]
                        samples.series.seconds.append(turn.call_s)
                        samples.series.cpu_s += turn.cpu_s / len(turn.seconds)
                        samples.calls += turn.seconds
                    after_turn()
        return found

    def _turn(self, who: str, cell: Cell) -> Turn | None:
        if who in self.reasons:
            return None
        try:
            return self._turners[who].turn(cell)
        except UnavailableError as error:
            self.reasons[who] = str(error)
            return None

    def compare(
        self, ours: str, theirs: str, samples: Mapping[tuple[str, str], Samples], cell: str
    ) -> Reading | Unmeasured:
        """Our rate beside theirs. The ratio that is reported is the median of the rounds' ratios, which a machine that
        is busy now and then disturbs less than the ratio of the medians; their rate is ours divided by it."""
        for who in (ours, theirs):
            if who in self.reasons:
                return Unmeasured(self.reasons[who])
        mine, its = samples[cell, ours].series, samples[cell, theirs].series
        ratio = statistics.median(its_s / mine_s for mine_s, its_s in zip(mine.seconds, its.seconds, strict=True))
        reading = mine.rate(in_gb=True)
        return replace(reading, yardstick_value=reading.value / ratio)

    def compare_cpu(
        self, ours: str, theirs: str, samples: Mapping[tuple[str, str], Samples], cell: str
    ) -> Reading | Unmeasured:
        """CPU seconds a GB, of both ends."""
        for who in (ours, theirs):
            if who in self.reasons:
                return Unmeasured(self.reasons[who])
        mine, its = (samples[cell, who].series for who in (ours, theirs))
        value = mine.cpu_s / len(mine.seconds) / mine.amount
        beside = its.cpu_s / len(its.seconds) / its.amount
        return Reading(value, value, value, len(mine.seconds), beside)
