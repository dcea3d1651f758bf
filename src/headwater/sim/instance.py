"""A serving engine as the node sees it: a scheduler that asks, workers that copy, requests that may end any time.

What is simulated is the contract between an engine and the node:
  - a worker copies one part after another and says done when it has stopped, whatever became of the request;
  - a reader takes bytes for right only if it was done before the deadline;
  - the scheduler releases a load at any time, a save only before its workers know of it;
  - after a broken connection it first says which tickets it knows: what a lost reply granted, nobody has used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from headwater.core.fetch import Answer
from headwater.core.hashing import KeyChain
from headwater.sim.host import Host, Resume, Wait
from headwater.sim.memory import part_of
from headwater.sim.schedule import Process
from headwater.sim.worker import Job, Worker
from headwater.sim.workload import CHUNK_TOKENS, Model
from headwater.types import ABSENT, ChunkKey, Loadable, Reservation, TicketKind


class Request:
    """One request's life: look up, load, compute, save what was computed."""

    def __init__(self, instance: Instance, tokens: list[int], answer: list[int], *, at_once: bool = False) -> None:
        self.instance, self.tokens = instance, tokens
        self._answer, self._at_once, self._host = answer, at_once, instance.host
        self._life = self._live()
        self._open = True
        self._loading = 0
        self._jobs: list[Job] = []
        self._name = ""

    def start(self) -> None:
        """Begin; without a connection to the node it is computed without a cache, which is no concern of ours."""
        if self.instance.is_connected:
            self.instance.requests.append(self)
            self._step(None)

    def cancel(self) -> None:
        """The client is gone: give up what can be given up, tell the workers to stop."""
        if not self._open:
            return
        self._open = False
        self._life.close()
        if self._loading:
            self.instance.release(self._loading)
        self._forget()
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
        hit = yield from self._look_up(wanted)
        local = self._host.rng.randrange(hit + 1) if self._host.rng.random() < 0.4 else 0
        have = (yield from self._load(wanted, local)) if hit > local else local
        # Sometimes it offers everything, also what is held already.
        yield from self._save(chain, self._host.rng.choice((have, have, 0)))
        self.tokens = self.tokens + self._answer
        start = len(chain.keys)
        chain.extend(self.tokens)
        yield from self._save(chain, start)
        self._forget()
        self.instance.on_answer(self.tokens)

    def _look_up(self, keys: list[ChunkKey]) -> Generator[Wait, Any, int]:
        """How long a prefix the node holds; if it has lower tiers, when it is through with them."""
        if not self._host.has_levels or not keys:
            hit = 0
            for attempt in range(self._host.rng.choice((1, 1, 2, 3))):
                hit = yield self._match(keys, counts=not attempt)
            return hit
        name = self._name = self.instance.new_name()
        while True:
            answer: Answer = yield self._ask("match", lambda: self.instance.ask(name, keys))
            if not answer.waiting:
                return answer.chunks
            yield self._host.pause(self.instance.scheduler)

    def _forget(self) -> None:
        if self._name:
            self.instance.forget(self._name)
            self._name = ""

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
            session = self.instance.session

            def arrive(answer: Any) -> None:
                if session != self.instance.session:
                    return  # it was lost with the connection that it was on
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
        self.session, self.is_connected = 0, True
        self.requests: list[Request] = []
        self._known: dict[int, int] = {}
        self._names = 0
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

    def new_name(self) -> str:
        """A request's name."""
        self._names += 1
        return f"request {self._names}"

    def ask(self, request: str, keys: list[ChunkKey]) -> Answer:
        """Ask the node, which may bring more up."""
        return self.host.node.ask(self.owner, request, self.space, keys)

    def forget(self, request: str) -> None:
        """Tell the node that a request is over."""
        self.host.tell(self.owner, "", lambda: self.host.node.forget(self.owner, request))

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

    def break_session(self) -> None:
        """The scheduler's connection breaks: its requests go on without a cache, replies under way are lost."""
        if not self.is_connected:
            return
        self.session, self.is_connected = self.session + 1, False
        for request in self.requests:
            request.cancel()
        self.requests.clear()
        # The node has handled all that was sent on the old connection before it hears of the new one.
        wait_s = max(self.host.last_word_s(self.owner) - self.host.now, 0.0) + 0.001
        self.host.schedule.after(wait_s, f"{self.owner} connects again", self._reconnect, self.scheduler)

    def _reconnect(self) -> None:
        known = frozenset(self._known)
        self.host.tell(self.owner, "", lambda: self._kept(known))

    def _kept(self, known: frozenset[int]) -> None:
        self.host.node.keep(self.owner, known)
        self.host.oracle.all_stopped(self.owner, known)
        self.is_connected = True

    def release(self, ticket: int) -> None:
        """Tell the node that a ticket is given up."""
        self.host.tell(self.owner, f"{self.owner} gives up #{ticket}", lambda: self._released(ticket))

    def _released(self, ticket: int) -> None:
        self.host.node.release(self.owner, ticket)
        self.host.oracle.stopped(ticket)

    def read(self, found: Loadable, keys: list[ChunkKey], first: int, resume: Resume) -> list[Job]:
        """Have every worker read; `resume` gets the failed chunks, counted from the start of the prompt."""
        failed = set[int]()
        self._known[found.ticket] = len(self.workers)

        def report(of_one: set[int]) -> None:
            failed.update(first + position for position in of_one)
            if self._is_ended_by_all(found.ticket):
                resume(failed)

        grant = (found.ticket, found.deadline_s, found.addresses)
        return [self._post(worker, TicketKind.LOAD, *grant, keys[first:], report) for worker in self.workers]

    def write(self, granted: Reservation, keys: list[ChunkKey]) -> list[Job]:
        """Have every rank that owns a shard write it."""
        writers = self.workers[: self.model.layout.shards]
        self._known[granted.ticket] = len(writers)

        def report(of_one: set[int]) -> None:
            self._is_ended_by_all(granted.ticket)

        grant = (granted.ticket, granted.deadline_s, granted.addresses)
        return [self._post(it, TicketKind.SAVE, *grant, keys, report) for it in writers]

    def _is_ended_by_all(self, ticket: int) -> bool:
        """Count a worker's report about a ticket; whether it was the last."""
        self._known[ticket] -= 1
        if self._known[ticket]:
            return False
        del self._known[ticket]
        return True

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
        parts, positions = [part for _, part in placed], [at for at, _ in placed]
        told = partial(self._tell_scheduler, report)
        job = Job(kind, ticket, deadline_s, parts, positions, told, self.host.memory)
        what = f"{worker.process.name} is to {kind.value} #{ticket}"
        self.host.schedule.after(self.host.message_s(), what, lambda: worker.post(job), worker.process)
        return job

    def _tell_scheduler(self, report: Resume, failed: set[int]) -> None:
        self.host.schedule.after(self.host.message_s(), "", lambda: report(failed), self.scheduler)
