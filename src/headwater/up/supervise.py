"""Starts what a plan lists, keeps it running, and ends it in order.

Theory of operation. Each process of the plan is in one of these states; one loop moves them, and no thread is used.

    WAITING   not started: somebody of `after` is not ready yet
    STARTING  runs, and is asked twice a second whether it is ready
    READY     was ready; from now on it counts whether it runs
    DOWN      died, or was not ready in time; starts again when its back-off is over (see `conductor.restarts`)
    ENDING    was told to end, and has `stop_s` until it is killed
    ENDED

A process that dies before it ever was ready is tried TRIES times, because somebody watches: then the whole fleet is
taken down, with the end of its log as the reason. What was ready once is started again for ever; the others go on.

`stop` drains: the Conductor first (it takes no more and ends its streams), then engines, nodes, the directory; each
kind at once, and the next when all of it are gone. An engine that only starts has nothing to end, and may not listen to
signals for a minute: it is killed. A second `stop` kills whatever is left.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from headwater.conductor.restarts import Restarts
from headwater.conductor.starting import HOPELESS
from headwater.errors import ConfigError, UnavailableError
from headwater.up.child import Child, Log, is_ready
from headwater.up.guard import MARK, Guard
from headwater.up.plan import Kind, Process

STEP_S = 0.1
ASK_S = 0.5
BOUND_S = 5.0
TRIES = 3
LOGS = "logs"


class State(StrEnum):
    """See above."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a process: its name, its state, and more in words."""

    name: str
    state: State
    text: str = ""


@dataclass(slots=True)
class _Unit:
    """One process and what we know of it."""

    process: Process
    log: Log
    restarts: Restarts
    state: State = State.WAITING
    child: Child | None = None
    since_s: float = 0.0
    """When it came into its state."""
    asked_s: float = float("-inf")
    again_s: float = 0.0
    was_ready: bool = field(default=False)


class Supervisor:
    """All processes of a plan. A context: whatever happens, nothing is left at its end."""

    def __init__(
        self,
        processes: Sequence[Process],
        folder: Path,
        tell: Callable[[Told], None],
        *,
        draw: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` is private and ours; `draw` is a number from 0 to below 1 by chance."""
        self._tell, self._clock = tell, clock
        logs = folder / LOGS
        logs.mkdir(mode=0o700, exist_ok=True)
        self._units = [_Unit(it, Log(logs / f"{it.name}.log"), Restarts(draw)) for it in processes]
        self._mark = uuid4().hex
        self._stops = 0
        self._bound_s = clock()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._guard: Guard | None = None

    def __repr__(self) -> str:
        return f"Supervisor({', '.join(f'{it.process.name} {it.state}' for it in self._units)})"

    def __enter__(self) -> Self:
        self._guard = Guard(self._mark)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for unit in self._units:
            if unit.child is not None:
                self._end(unit)
        if self._guard is not None:
            self._guard.close()
        read, write, self._wake_read, self._wake_write = self._wake_read, self._wake_write, -1, -1
        os.close(read)
        os.close(write)

    # ---- what signals' handlers may call

    def stop(self) -> None:
        """Drain; a second time: end at once; after the end: nothing."""
        self._stops += 1
        if self._wake_write >= 0:
            with suppress(BlockingIOError):
                os.write(self._wake_write, b"\0")

    def send(self, kind: Kind, number: signal.Signals) -> None:
        """A signal for the processes of a kind."""
        for unit in self._units:
            if unit.process.kind is kind and unit.child is not None:
                unit.child.send(number)

    # ---- the loop

    def run(self, all_ready: Callable[[], None]) -> None:
        """Until `stop`, then until all have ended. `all_ready` is called once, when everything was ready for the first
        time. Raises UnavailableError, after everything has ended, if something could not be started at all."""
        told = False
        failure: UnavailableError | None = None
        while not self._stops and failure is None:
            try:
                for unit in self._units:
                    self._step(unit)
            except UnavailableError as error:
                failure = error
                break
            if not told and all(it.was_ready for it in self._units):
                told = True
                all_ready()
            self._bound_logs()
            self._wait()
        self._drain()
        if failure is not None:
            raise failure

    def states(self) -> dict[str, State]:
        """What each process is doing."""
        return {it.process.name: it.state for it in self._units}

    def _wait(self) -> None:
        readable, _, _ = select.select([self._wake_read], [], [], STEP_S)
        if readable:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 512)

    def _bound_logs(self) -> None:
        if self._clock() - self._bound_s >= BOUND_S:
            self._bound_s = self._clock()
            for unit in self._units:
                unit.log.bound()

    def _step(self, unit: _Unit) -> None:
        if unit.state is State.WAITING:
            if self._may_start(unit):
                self._start(unit)
        elif unit.state is State.DOWN:
            if self._clock() >= unit.again_s:
                self._start(unit)
        elif unit.child is not None and unit.child.code() is not None:
            self._died(unit, f"ended with code {unit.child.code()}", hopeless=unit.child.code() == HOPELESS)
        elif unit.state is State.STARTING:
            self._ask(unit)

    def _may_start(self, unit: _Unit) -> bool:
        ready = {it.process.name for it in self._units if it.was_ready}
        return ready.issuperset(unit.process.after)

    def _start(self, unit: _Unit) -> None:
        process = unit.process
        self._become(unit, State.STARTING, f"log in {unit.log.path}")
        unit.child = Child(process.command, {**process.environment, MARK: self._mark}, unit.log)
        if self._guard is not None:
            self._guard.add(unit.child.group)

    def _ask(self, unit: _Unit) -> None:
        now = self._clock()
        if now - unit.asked_s >= ASK_S:
            unit.asked_s = now
            if is_ready(unit.process.probe):
                unit.was_ready = True
                self._become(unit, State.READY, f"after {self._clock() - unit.since_s:.0f} s")
                return
        if now - unit.since_s > unit.process.ready_s:
            self._died(unit, f"was not ready within {unit.process.ready_s:g} s", hopeless=True)

    def _died(self, unit: _Unit, why: str, *, hopeless: bool) -> None:
        lived_s = self._clock() - unit.since_s if unit.state is State.READY else 0.0
        self._end(unit)
        wait_s = unit.restarts.died(lived_s)
        if not unit.was_ready and (hopeless or unit.restarts.deaths >= TRIES):
            self._become(unit, State.ENDED, why)
            raise UnavailableError(f"{unit.process.name} {why}; the end of {unit.log.path}:\n{unit.log.tail()}")
        unit.again_s = self._clock() + wait_s
        self._become(unit, State.DOWN, f"{why}; starts again in {wait_s:.1f} s")

    def _end(self, unit: _Unit) -> None:
        """Nothing is left of it."""
        if unit.child is not None:
            unit.child.kill()
            if self._guard is not None:
                self._guard.drop(unit.child.group)
            unit.child = None

    def _become(self, unit: _Unit, state: State, text: str = "") -> None:
        unit.state, unit.since_s = state, self._clock()
        self._tell(Told(unit.process.name, state, text))

    # ---- the end

    def _drain(self) -> None:
        for kind in (Kind.CONDUCTOR, Kind.ENGINE, Kind.NODE, Kind.DIRECTORY):
            mine = [it for it in self._units if it.process.kind is kind and it.child is not None]
            for unit in mine:
                assert unit.child is not None
                if kind is Kind.ENGINE and unit.state is State.STARTING:
                    unit.child.kill()
                else:
                    unit.child.send(signal.SIGTERM)
                self._become(unit, State.ENDING)
            while mine := [it for it in mine if not self._has_ended(it)]:
                self._wait()

    def _has_ended(self, unit: _Unit) -> bool:
        assert unit.child is not None
        text = ""
        if self._clock() - unit.since_s > unit.process.stop_s:
            text = f"was killed: it did not end within {unit.process.stop_s:g} s"
        elif self._stops > 1:
            text = "was killed"
        elif not unit.child.is_gone():
            return False
        self._end(unit)
        self._become(unit, State.ENDED, text)
        return True


def check_ports(processes: Sequence[Process]) -> None:
    """Raise ConfigError if another program has a port that one of these needs."""
    for process in processes:
        for port in process.ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError as error:
                    text = f"port {port}: {error.strerror}; stop who has it, or name another one in the file"
                    raise ConfigError(f"{process.name}: {text}") from None
