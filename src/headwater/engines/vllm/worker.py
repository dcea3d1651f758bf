"""The rank side of the plug-in: copies between the engine's pages and the node's memory, in a thread of its own.

Theory of operation. The scheduler side's jobs come with each step: loads are queued before the forward pass (the
blocks belong to the load until it is reported), saves after it (their blocks are final then, and pinned). The copy
thread takes loads first. For each job it makes sure that it is connected to the very node life that the job names,
copies, and says done; what it could not do is reported, never swallowed:

    load ok      copied before the lease's deadline, and the node still knew the lease  -> received
    load failed  no node, other epoch, late, copy error     -> received, and its blocks are invalid
    save ok      copied, done                               -> ended, and the scheduler side unpins the blocks
    save failed  the same reasons                           -> ended and failed

A rank says done only for what went well; the ticket of anything else is released by the scheduler side when all ranks
have ended. Should a bug end the thread, all jobs fail from there on, and the engine computes what it cannot load.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from headwater.config import EngineConfig
from headwater.engines.vllm.identity import Ranks
from headwater.engines.vllm.metadata import NULL_BLOCK, LoadJob, NodeInfo, Part, RankLayout, SaveJob, SavesEnded
from headwater.engines.vllm.stats import CopySums
from headwater.errors import HeadwaterError, RefusedError, UnavailableError
from headwater.node.client import Link, Session
from headwater.ports import Addresses, BlockIds, Copy, PagedKV
from headwater.types import ABSENT, KVLayout

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.5
POLL_S = 0.0005
IDLE_WAIT_S = 0.02


@dataclass(slots=True)
class Outcome:
    """What a step reports: requests whose loads ended, and of these which failed with which blocks."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Queued:
    """A job, the node that it belongs to, and the engine's mark after which its blocks may be touched."""

    job: LoadJob | SaveJob
    node: NodeInfo | None
    mark: object


@dataclass(slots=True, eq=False)
class Moving:
    """A job whose copies have been given to the device: those that are not over, and whether one has failed."""

    queued: Queued
    started_s: float = 0.0
    session: Session | None = None
    copies: list[Copy] = field(default_factory=list)
    size_bytes: int = 0
    failed: bool = False


class WorkerSide:
    """One rank's copies. `before_forward`, `after_forward` and `collect` are called by the engine's thread."""

    def __init__(self, config: EngineConfig, ranks: Ranks, pp_rank: int, tp_rank: int) -> None:
        self._config, self._ranks = config, ranks
        self._shard = ranks.shard(pp_rank, tp_rank)
        self._rank = pp_rank * ranks.tp + tp_rank
        self._writes = ranks.writes(tp_rank)
        self._pages: PagedKV | None = None
        self._mine: RankLayout | None = None
        self._loads: deque[Queued] = deque()
        self._saves: deque[Queued] = deque()
        self._current: Queued | None = None
        self._moving: list[Moving] = []
        self._loading: set[str] = set()
        self._changed = threading.Condition()
        self._outcome = Outcome()
        self._ended = SavesEnded()
        self._link: Link | None = None
        self._session: Session | None = None
        self._prefault_stop = threading.Event()
        self._prefault: threading.Thread | None = None
        self._retry_at_s = 0.0
        self._closing = self._stopped = False
        self.sums = CopySums()
        self._thread = threading.Thread(target=self._run, name="headwater-copies", daemon=True)

    def register(self, pages: PagedKV, mine: RankLayout, instance: str) -> None:
        """The engine's pages exist: map the node's memory if there is a node already, and start copying.

        Mapping and pinning take seconds for a large node and must not happen while the engine captures graphs, so
        now is better than at the first request.
        """
        self._pages, self._mine = pages, mine
        if self._config.node:
            try:
                self._open(self._config.node, instance)
            except HeadwaterError as error:
                log.info("no node yet: %s", error)
        self._thread.start()

    @property
    def layout(self) -> RankLayout | None:
        """What this rank's tensors look like, once they exist."""
        return self._mine

    # ---- the engine's thread --------------------------------------------------------------------------

    def before_forward(self, loads: Iterable[LoadJob], node: NodeInfo | None) -> None:
        """Queue this step's loads."""
        queued = list(loads)
        mark = self._pages_in_use.mark() if queued else None
        with self._changed:
            for job in queued:
                self._loads.append(Queued(job, node, mark))
                self._loading.add(job.request)
            self._changed.notify_all()
            self._fail_if_stopped()

    def after_forward(self, saves: Iterable[SaveJob], node: NodeInfo | None) -> None:
        """The step's KV is final: queue its saves."""
        queued = list(saves)
        mark = self._pages_in_use.mark() if queued else None
        with self._changed:
            self._saves.extend(Queued(job, node, mark) for job in queued)
            self._changed.notify_all()
            self._fail_if_stopped()

    def collect(self, *, idle: bool) -> Outcome:
        """What ended since the last call; in an idle step, wait a moment for a load rather than spin."""
        with self._changed:
            if idle and self._loading and not self._outcome.received:
                self._changed.wait_for(lambda: bool(self._outcome.received), IDLE_WAIT_S)
            outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def take_ended(self) -> SavesEnded | None:
        """The saves that ended since the last call, None if there are none."""
        with self._changed:
            ended, self._ended = self._ended, SavesEnded()
        return ended if ended.ended else None

    def close(self) -> None:
        """End the thread after the copy under way; jobs that wait are dropped, their tickets end with us."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._disconnect()
        if self._pages is not None:
            self._pages.close()

    # ---- the copy thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work, POLL_S if self._moving else None)
                    if self._closing and not self._moving:
                        return
                    self._current = None if self._closing else self._next()
                if self._current is not None:
                    self._begin(self._current)
                    self._current = None
                self._settle()
        finally:
            with self._changed:
                self._stopped = True
                unfinished = [it.queued for it in self._moving]
                if self._current is not None:
                    unfinished.append(self._current)
                for it in unfinished:
                    log.critical("a bug has ended the copy thread; this engine goes on without headwater")
                    self._report(it.job, ok=False)
                self._fail_if_stopped()

    def _has_work(self) -> bool:
        return bool(self._closing or self._loads or self._saves)

    def _next(self) -> Queued | None:
        if self._loads:
            return self._loads.popleft()
        return self._saves.popleft() if self._saves else None

    def _begin(self, queued: Queued) -> None:
        """Start a job's copies, or report it at once."""
        job = queued.job
        if isinstance(job, SaveJob) and not self._writes:
            self._report(job, ok=True)
            return
        until_s = job.deadline_s if isinstance(job, SaveJob) else min(job.deadline_s, job.give_up_s)
        # A job of an earlier life of the node, or made while there was none, says nothing about the link of today.
        current = queued.node is not None and queued.node.epoch == job.epoch
        if current and job.ticket and time.monotonic() <= until_s:
            moving = Moving(queued)
            moving.failed = self._attempt(partial(self._start, moving)) is None
            if moving.copies or not moving.failed:
                self._moving.append(moving)
                return
        self._report(job, ok=False)

    def _settle(self) -> None:
        """Report the jobs whose copies are all over, failed or not: only then are their blocks and slots free."""
        for it in list(self._moving):
            for copy in list(it.copies):
                over = self._attempt(copy.done)
                if over is not False:
                    it.copies.remove(copy)
                    it.failed |= over is None
            if it.copies or it not in self._moving:
                continue
            self._moving.remove(it)
            self._report(it.queued.job, ok=not it.failed and self._attempt(partial(self._end, it)) is True)

    def _attempt(self, act: Callable[[], T]) -> T | None:
        """The door where operating failures become an outcome: None."""
        try:
            return act()
        except RefusedError as error:
            log.error("the node refuses this rank: %s", error)
        except RuntimeError as error:  # what torch raises
            log.warning("a copy failed: %s", error)
        except (HeadwaterError, OSError) as error:
            log.warning("a copy failed: %s", error)
            self._disconnect()
        return None

    def _start(self, moving: Moving) -> bool:
        """Give every block of a job to the device; when this raises, some may be on their way."""
        queued, pages = moving.queued, self._pages_in_use
        job = queued.job
        session = moving.session = self._connected(queued.node, job.epoch)
        moving.started_s = time.monotonic()
        start = pages.start_gather if isinstance(job, SaveJob) else pages.start_scatter
        for part in job.parts:
            blocks, places = self._places(session, part)
            if len(blocks):
                stride_bytes = session.layout.layer_stride_bytes(part.group)
                moving.copies.append(start(part.group, blocks, places, stride_bytes, queued.mark))
                group = session.layout.groups[part.group]
                moving.size_bytes += len(blocks) * group.block_bytes * group.shard_layers[self._shard]
        return True

    def _end(self, it: Moving) -> bool:
        """The copies of a job are over: whether they count."""
        job = it.queued.job
        assert it.session is not None, "a job whose copies all began has one"
        # The bytes are good only if the ticket still held when the copy had ended: by the clock, and by the node.
        ended_s = time.monotonic()
        shard = self._shard if isinstance(job, SaveJob) else self._rank
        if ended_s > job.deadline_s or not it.session.done(job.ticket, shard):
            return False
        add = self.sums.saved if isinstance(job, SaveJob) else self.sums.loaded
        add(it.size_bytes, ended_s - it.started_s)
        return True

    def _places(self, session: Session, part: Part) -> tuple[BlockIds, Addresses]:
        """The blocks to copy and where the layer-0 bytes of each are in this process."""
        memory = session.link.memory
        assert memory is not None, "a rank's link maps memory"
        layout = session.layout
        per_chunk = layout.blocks_per_chunk(part.group)
        offset = layout.part_offset(part.group, self._shard)
        slots = np.array([0 if it == ABSENT else memory.address(it) for it in part.slots], dtype=np.uint64)
        steps = np.arange(per_chunk, dtype=np.uint64) * np.uint64(layout.groups[part.group].block_bytes)
        places = (slots[:, None] + (steps + np.uint64(offset))[None, :]).reshape(-1)
        blocks = np.array(part.blocks, dtype=np.int64)
        wanted = blocks != NULL_BLOCK
        return blocks[wanted], np.ascontiguousarray(places[wanted])

    @property
    def _pages_in_use(self) -> PagedKV:
        assert self._pages is not None, "jobs come only after the pages are registered"
        return self._pages

    # ---- the node -------------------------------------------------------------------------------------

    def _connected(self, node: NodeInfo | None, epoch: int) -> Session:
        """A session with the life of the node that a job was made for; raises UnavailableError."""
        if node is None or node.epoch != epoch:
            raise UnavailableError("the node that this job was made for is gone")
        wanted = (node.name, node.epoch)
        if self._session is not None and self._session.link.node == wanted:
            return self._session
        if self._link is not None and self._link.node != wanted:
            self._disconnect()
        if time.monotonic() < self._retry_at_s:
            raise UnavailableError("the node could not be reached a moment ago")
        try:
            self._session = self._register_with(node)
        finally:
            # From the end of the attempt on: one that has waited in vain must not be followed by the next at once.
            self._retry_at_s = 0.0 if self._session is not None else time.monotonic() + RETRY_S
        return self._session

    def _register_with(self, node: NodeInfo) -> Session:
        if self._link is None:
            self._open(node.address, node.instance)
        link = self._link
        assert link is not None, "opened above"
        if link.node != (node.name, node.epoch):
            raise UnavailableError("the node was restarted after this job was made")
        self._check_layout(node.layout)
        return Session(link, node.namespace, node.layout)

    def _open(self, address: str, instance: str) -> None:
        """Connect and map the node's memory."""
        self._link = Link(
            address, instance, maps=True, connect_s=self._config.connect_s, call_s=self._config.metadata_s
        )
        self._attach(self._link)

    def _attach(self, link: Link) -> None:
        memory = link.memory
        assert memory is not None, "a rank's link maps memory"
        # The first touch of a mapped page costs as much as copying it; let a thread go ahead of the copies.
        self._prefault_stop.clear()
        self._prefault = threading.Thread(
            target=memory.prefault, args=(self._prefault_stop,), name="headwater-map", daemon=True
        )
        self._prefault.start()
        self._pages_in_use.attach(memory.bases, memory.sizes)

    def _disconnect(self) -> None:
        if self._prefault is not None:
            self._prefault_stop.set()
            self._prefault.join()
            self._prefault = None
        self._session = None
        if self._link is not None:
            self._pages_in_use.detach()
            self._link.close()
            self._link = None
        moving, self._moving = self._moving, []
        for it in moving:
            self._report(it.queued.job, ok=False)

    def _check_layout(self, layout: KVLayout) -> None:
        """Whether this rank's tensors are what the layout says; raises RefusedError naming both values."""
        mine = self._mine
        assert mine is not None, "jobs come only after the pages are registered"
        for index, group in enumerate(layout.groups):
            expected = (group.shard_layers[self._shard], group.block_bytes)
            given = (mine.layers[index], mine.block_bytes[index])
            if expected != given:
                raise RefusedError(
                    f"layout.groups[{index}] (layers, block bytes)", f"{expected}", f"{given}", "ranks must agree"
                )

    # ---- outcomes -------------------------------------------------------------------------------------

    def _report(self, job: LoadJob | SaveJob, *, ok: bool) -> None:
        with self._changed:
            if isinstance(job, SaveJob):
                self._report_save(job, ok=ok)
            else:
                self._report_load(job, ok=ok)
            self._changed.notify_all()

    def _report_load(self, job: LoadJob, *, ok: bool) -> None:
        invalid = set(job.missing) if ok else job.blocks
        self._outcome.received.add(job.request)
        self._loading.discard(job.request)
        if invalid:
            self._outcome.failed.add(job.request)
            self._outcome.invalid |= invalid
            self.sums.failed_loads += 1

    def _report_save(self, job: SaveJob, *, ok: bool) -> None:
        self._ended.ended[job.ticket] = self._ended.ended.get(job.ticket, 0) + 1
        if not ok:
            self._ended.failed.add(job.ticket)
            self.sums.failed_saves += 1

    def _fail_if_stopped(self) -> None:
        """Nobody serves the jobs that wait any more, and nobody writes: they have failed."""
        while self._stopped and (self._loads or self._saves):
            self._report((self._loads or self._saves).popleft().job, ok=False)
