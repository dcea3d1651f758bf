"""A serving engine as the node sees it: a scheduler that asks, workers that copy, requests that may end any time.

What is simulated is the contract between an engine and the node:
  - a worker copies one part after another and says done when it has stopped, whatever became of the request;
  - a reader takes bytes for right only if it was done before the deadline;
  - the scheduler releases a load at any time, a save only before its workers know of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from headwater.core.hashing import KeyChain
from headwater.sim.host import Host, Resume, Wait
from headwater.sim.memory import Part, part_of
from headwater.sim.schedule import Process
from headwater.sim.workload import CHUNK_TOKENS, Model
from headwater.types import ABSENT, ChunkKey, Loadable, Reservation, TicketKind


@dataclass(slots=True, eq=False)
class Job:
    """The parts that one worker copies for one ticket; `positions[i]` is the chunk of part i in the call."""

    kind: TicketKind
    ticket: int
    deadline_s: float
    parts: list[Part]
    positions: list[int]
    report: Resume
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
            self._host.memory.begin_write(part, f"{self.process.name} for #{job.ticket}")
        else:
            flaw = self._host.memory.flaw(part)
        what = f"{self.process.name} {job.kind.value}s {part} for #{job.ticket}"
        self._host.schedule.after(self._host.copy_s(job.kind), what, lambda: self._copied(job, at, flaw), self.process)

    def _copied(self, job: Job, at: int, flaw: str | None) -> None:
        part = job.parts[at]
        if self._host.copy_fails():
            job.failed.add(job.positions[at])
        elif job.kind is TicketKind.SAVE:
            self._host.memory.end_write(part)
        elif job.stop or not self.is_in_time(job):
            job.failed.add(job.positions[at])
        else:
            self._host.oracle.judge_read(part, (flaw, self._host.memory.flaw(part)))
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


class Request:
    """One request's life: look up, load, compute, save what was computed."""

    def __init__(self, instance: Instance, tokens: list[int], answer: list[int], *, at_once: bool = False) -> None:
        self.instance, self.tokens = instance, tokens
        self._answer, self._at_once, self._host = answer, at_once, instance.host
        self._life = self._live()
        self._open = True
        self._loading = 0
        self._jobs: list[Job] = []

    def start(self) -> None:
        """Begin."""
        self._step(None)

    def cancel(self) -> None:
        """The client is gone: give up what can be given up, tell the workers to stop."""
        if not self._open:
            return
        self._open = False
        self._life.close()
        if self._loading:
            self.instance.release(self._loading)
        stops_saves = self._host.rng.random() < 0.5
        for job in self._jobs:
            # What is read for a request that is gone is read for nobody, so its lease may end at once.
            job.stop = stops_saves or job.kind is TicketKind.LOAD

    def _step(self, answer: Any) -> None:
        if not self._open:
            return
        try:
            wait = self._life.send(answer)
        except StopIteration:
            self._open = False
            return
        wait(self._step)

    def _live(self) -> Generator[Wait, Any, None]:
        chain = KeyChain(self.instance.root, CHUNK_TOKENS)
        chain.extend(self.tokens)
        # An engine computes at least the last token of a prompt itself.
        wanted = chain.keys[: (len(self.tokens) - 1) // CHUNK_TOKENS]
        hit = 0
        for attempt in range(self._host.rng.choice((1, 1, 2, 3))):
            hit = yield self._match(wanted, counts=not attempt)
        local = self._host.rng.randrange(hit + 1) if self._host.rng.random() < 0.4 else 0
        have = (yield from self._load(wanted, local)) if hit > local else local
        # Sometimes it offers everything, also what is held already.
        yield from self._save(chain, self._host.rng.choice((have, have, 0)))
        self.tokens = self.tokens + self._answer
        start = len(chain.keys)
        chain.extend(self.tokens)
        yield from self._save(chain, start)
        self.instance.on_answer(self.tokens)

    def _load(self, keys: list[ChunkKey], local: int) -> Generator[Wait, Any, int]:
        """Load what the node holds beyond `local` chunks; how many chunks are there then."""
        found: Loadable = yield self._ask("load", lambda: self.instance.load(keys, local))
        if not found.ticket:
            return local
        self._loading = found.ticket
        failed: set[int] = yield lambda resume: self._jobs.extend(self.instance.read(found, keys, local, resume))
        self._loading = 0
        # Several groups stand or fall together: which chunks a shorter prefix needs is not what was loaded.
        first_bad = min(failed, default=found.chunks)
        return first_bad if self.instance.has_one_group else found.chunks if not failed else local

    def _save(self, chain: KeyChain, start: int) -> Generator[Wait, Any, None]:
        """Compute and save step by step; the copies go on by themselves."""
        while start < len(chain.keys):
            yield self._host.sleep(self.instance.scheduler)
            end = len(chain.keys) if self._at_once else start + self._host.rng.randrange(1, 4)
            keys, parent = chain.keys[start:end], chain.keys[start - 1] if start else None
            granted: Reservation = yield self._reserve(parent, keys)
            if granted.ticket and self._host.changes_its_mind():
                self.instance.release(granted.ticket)
            elif granted.ticket:
                self._jobs.extend(self.instance.write(granted, keys))
            start += len(keys)

    def _match(self, keys: list[ChunkKey], *, counts: bool) -> Wait:
        return self._ask("match", lambda: self.instance.match(keys, counts=counts))

    def _reserve(self, parent: ChunkKey | None, keys: list[ChunkKey]) -> Wait:
        lacking = self.instance.lacking(len(keys))
        return self._ask("reserve", lambda: self.instance.reserve(parent, keys, lacking))

    def _ask(self, verb: str, call: Callable[[], Any]) -> Wait:
        """One call to the node; a grant that comes too late for this request is given back."""

        def wait(resume: Resume) -> None:
            def arrive(answer: Any) -> None:
                if not self._open and verb != "match" and answer.ticket:
                    self.instance.release(answer.ticket)
                resume(answer)

            self._host.ask(self.instance.owner, self.instance.scheduler, call, arrive)

        return wait


class Instance:
    """One life of a serving engine; when it is restarted, it is another owner."""

    worker_type = Worker

    def __init__(
        self,
        host: Host,
        name: str,
        model: Model,
        space: int,
        on_load: Callable[[], None],
        on_answer: Callable[[list[int]], None],
    ) -> None:
        """`on_load` is called when a load was granted, `on_answer` with the tokens of a request that is through."""
        self.host, self.owner, self.model, self.space = host, name, model, space
        self.on_load, self.on_answer = on_load, on_answer
        self.root = model.namespace.root()
        self.scheduler = Process(name)
        self.workers = [self.worker_type(host, name, rank) for rank in range(model.ranks)]

    @property
    def has_one_group(self) -> bool:
        """Whether a load that fails in the middle still gives a usable prefix."""
        return len(self.model.layout.groups) == 1

    @property
    def processes(self) -> list[Process]:
        """The scheduler and the workers."""
        return [self.scheduler, *(worker.process for worker in self.workers)]

    def lacking(self, count: int) -> frozenset[tuple[int, int]]:
        """Parts of companion groups whose blocks the engine has given up already."""
        groups, rng = range(len(self.model.layout.groups)), self.host.rng
        if self.has_one_group or rng.random() < 0.6:
            return frozenset()
        return frozenset((group, at) for group in groups for at in range(count) if rng.random() < 0.25)

    def match(self, keys: list[ChunkKey], *, counts: bool) -> int:
        """Ask the node."""
        return self.host.node.match(self.owner, self.space, keys, counts=counts)

    def load(self, keys: list[ChunkKey], first: int) -> Loadable:
        """Ask the node, for all ranks."""
        found = self.host.node.load(self.owner, self.space, keys, first, range(self.model.ranks))
        if found.ticket:
            self.on_load()
        return found

    def reserve(
        self, parent: ChunkKey | None, keys: list[ChunkKey], lacking: frozenset[tuple[int, int]]
    ) -> Reservation:
        """Ask the node."""
        return self.host.node.reserve(self.owner, self.space, parent, keys, lacking)

    def release(self, ticket: int) -> None:
        """Tell the node that a ticket is given up."""
        self.host.tell(self.owner, f"{self.owner} gives up #{ticket}", lambda: self._released(ticket))

    def _released(self, ticket: int) -> None:
        self.host.node.release(self.owner, ticket)
        self.host.oracle.stopped(ticket)

    def read(self, found: Loadable, keys: list[ChunkKey], first: int, resume: Resume) -> list[Job]:
        """Have every worker read; `resume` gets the failed chunks, counted from the start of the prompt."""
        waiting, failed = len(self.workers), set[int]()

        def report(of_one: set[int]) -> None:
            nonlocal waiting
            waiting -= 1
            failed.update(first + position for position in of_one)
            if not waiting:
                resume(failed)

        grant = (found.ticket, found.deadline_s, found.addresses)
        return [
            self._post(worker, TicketKind.LOAD, *grant, keys[first:], lambda it: self._tell_scheduler(report, it))
            for worker in self.workers
        ]

    def write(self, granted: Reservation, keys: list[ChunkKey]) -> list[Job]:
        """Have every rank that owns a shard write it."""
        writers = self.workers[: self.model.layout.shards]
        grant = (granted.ticket, granted.deadline_s, granted.addresses)
        return [self._post(it, TicketKind.SAVE, *grant, keys, lambda _: None) for it in writers]

    def _post(
        self,
        worker: Worker,
        kind: TicketKind,
        ticket: int,
        deadline_s: float,
        addresses: tuple[tuple[int, ...], ...],
        keys: list[ChunkKey],
        report: Resume,
    ) -> Job:
        layout = self.model.layout
        shard = min(worker.rank, layout.shards - 1)
        placed = [
            (at, part_of(layout, keys[at], group, shard, place))
            for group, places in enumerate(addresses)
            for at, place in enumerate(places)
            if place != ABSENT
        ]
        job = Job(kind, ticket, deadline_s, [part for _, part in placed], [at for at, _ in placed], report)
        what = f"{worker.process.name} is to {kind.value} #{ticket}"
        self.host.schedule.after(self.host.message_s(), what, lambda: worker.post(job), worker.process)
        return job

    def _tell_scheduler(self, report: Resume, failed: set[int]) -> None:
        self.host.schedule.after(self.host.message_s(), "", lambda: report(failed), self.scheduler)
