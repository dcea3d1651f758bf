"""A rank of a serving engine as the node sees it: copies for one ticket after another, and says done."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headwater.sim.host import Host, Resume
from headwater.sim.memory import Memory, Part
from headwater.sim.schedule import Process
from headwater.types import TicketKind


@dataclass(slots=True, eq=False)
class Job:
    """The parts that one worker copies for one ticket; `positions[i]` is the chunk of part i in the call."""

    kind: TicketKind
    ticket: int
    deadline_s: float
    parts: list[Part]
    positions: list[int]
    report: Resume
    memory: Memory
    """What was mapped when the job came; a restarted node has another."""
    stop: bool = False
    failed: set[int] = field(default_factory=set)


class Worker:
    """One rank: copies for one load and for one save at a time, in the order in which they came."""

    def __init__(self, host: Host, owner: str, rank: int) -> None:
        self.process = Process(f"{owner}/{rank}")
        self.rank = rank
        self._host, self._owner = host, owner
        self._lanes: dict[TicketKind, deque[Job]] = {kind: deque() for kind in TicketKind}

    def post(self, job: Job) -> None:
        """Take a job on."""
        lane = self._lanes[job.kind]
        lane.append(job)
        if len(lane) == 1:
            self._copy(job, 0)

    def _copy(self, job: Job, at: int) -> None:
        if job.stop or not self.is_in_time(job):
            job.failed.update(job.positions[at:])
            at = len(job.parts)
        if at == len(job.parts):
            self._end(job)
            return
        part = job.parts[at]
        flaw = None
        if job.kind is TicketKind.SAVE:
            job.memory.begin_write(part, f"{self.process.name} for #{job.ticket}")
        else:
            flaw = job.memory.flaw(part)
        what = f"{self.process.name} {job.kind.value}s {part} for #{job.ticket}"
        self._host.schedule.after(self._host.copy_s(job.kind), what, lambda: self._copied(job, at, flaw), self.process)

    def _copied(self, job: Job, at: int, flaw: str | None) -> None:
        part = job.parts[at]
        if self._host.copy_fails():
            job.failed.add(job.positions[at])
        elif job.kind is TicketKind.SAVE:
            job.memory.end_write(part, job.ticket)
        elif job.stop or not self.is_in_time(job):
            job.failed.add(job.positions[at])
        else:
            self._host.oracle.judge_read(part, (flaw, job.memory.flaw(part)))
        self._copy(job, at + 1)

    def is_in_time(self, job: Job) -> bool:
        """Whether it is worth beginning, and, for a reader after its copy, whether the bytes count."""
        return self._host.now < job.deadline_s

    def _end(self, job: Job) -> None:
        lane = self._lanes[job.kind]
        lane.popleft()
        self._host.worker_is_done(self._owner, job.ticket, self.rank, frozenset(job.failed))
        job.report(job.failed)
        if lane:
            self._copy(lane[0], 0)
