"""The workers of one Conductor: started, restarted, rolled, drained. Everything here is in the parent's loop.

Theory of operation. A *place* is one of the N workers that there are to be. Each place has a task:

    start a worker ──► ready ──► it ends ──► back-off (`restarts`) ──► start another
          └── not ready within READY_S, or it ends before: killed, back-off

`roll` replaces the workers one after the other: a new one is started in the same place and listens on the same socket
(`listening`); once it is ready it is the place's, and the old one drains beside it, within `roll_s`. A new one that
does not become ready leaves the old one where it is, and `roll` says so. Each worker has a row of the page of quotas,
and each place ROWS_EACH of them: where all are taken when one rolls again, whoever has drained there longest gets
`drain_s` first. Until then nothing is replaced, and who dies is restarted as ever.

Where a worker has died, those who connect wait for the next one, which comes in a second or two and takes the same
socket. Where workers die again and again it is closed, so that all connections come to the other places, and the next
one gets another. So it is where none will be started any more.

`stop` ends all: SIGTERM, `drain_s` and GRACE_S, SIGKILL. A row is cleared when its worker has ended, however it ended,
and free then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headwater.conductor.control.worker import socket_path
from headwater.conductor.listening import Listening
from headwater.conductor.process import Worker
from headwater.conductor.quota_page import QuotaPage
from headwater.conductor.restarts import Restarts
from headwater.conductor.starting import GRACE_S, HOPELESS, READY_S, ROWS_EACH
from headwater.errors import ConfigError, ResourceError, UnavailableError
from headwater.fleetfile.model import FleetFile

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "headwater.conductor.worker")
_STOPPING = "workers are draining, and none is started any more"


class Watching(Protocol):
    """Who asks workers, by row: `control.workers.Workers`."""

    def started(self, row: int) -> None:
        """A worker was started."""

    async def gone(self, row: int) -> None:
        """It has ended."""


class _Place:
    """One of the workers that there are to be, and those that still drain here."""

    def __init__(self, number: int, restarts: Restarts) -> None:
        self.number, self.restarts = number, restarts
        self.worker: Worker | None = None
        self.draining: list[Worker] = []
        """From the one that does so longest."""
        self.news = asyncio.Event()
        """A worker that was this place's has ended."""
        self.keeper: asyncio.Task[None] | None = None
        self._listening: Listening | None = None

    def listening(self, address: str) -> tuple[int, ...]:
        """The descriptors that its workers listen on, one after the other. Raises ConfigError."""
        if self._listening is None:
            self._listening = Listening(address)
        return self._listening.descriptors

    def listen_no_more(self) -> None:
        """But for workers that still do."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def put(self, worker: Worker) -> None:
        """Have this one from now on; it is ready."""
        self.worker = worker
        worker.ended.add_done_callback(lambda _: self.news.set())

    @property
    def rows(self) -> range:
        """Its workers' rows of the page of quotas."""
        return range(self.number * ROWS_EACH, (self.number + 1) * ROWS_EACH)


class Crew:
    """All workers of one Conductor."""

    def __init__(
        self,
        fleet: FleetFile,
        folder: Path,
        watching: Watching,
        *,
        draw: Callable[[], float],
        command: Sequence[str] = COMMAND,
        environment: Mapping[str, str | None] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        """`fleet` is resolved and has a secret; `folder` is private. Raises ResourceError."""
        self.fleet = fleet
        self._folder, self._watching, self._command, self._ready_s = folder, watching, tuple(command), ready_s
        self._environment = dict(environment or {})
        count = fleet.conductor.workers
        self._quotas = QuotaPage.create(count * ROWS_EACH)
        self._lifeline_read, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._places = [_Place(it, Restarts(draw)) for it in range(count)]
        self._endings: set[asyncio.Task[None]] = set()
        self._clearing: dict[Worker, asyncio.Task[None]] = {}
        """By workers that have not ended, or whose rows are not cleared yet."""
        self._rolls, self._rolling = asyncio.Lock(), asyncio.Lock()
        """One roll at a time; and whoever starts a worker, one at a time."""
        self._stopping = False

    def __repr__(self) -> str:
        return f"Crew({', '.join(f'{it.number}: {it.worker}' for it in self._places)})"

    @property
    def running(self) -> list[Worker]:
        """The workers of all places, without those that drain."""
        return [it.worker for it in self._places if it.worker is not None]

    @property
    def restarts(self) -> int:
        """How many workers have died."""
        return sum(it.restarts.total for it in self._places)

    async def start(self) -> None:
        """Start all, and wait until each is ready or has died once; who died is started again. Raises ConfigError if
        one says that it never can, UnavailableError if none is ready."""
        _raise_first(await asyncio.gather(*(self._fill(it) for it in self._places), return_exceptions=True))
        if not self.running:
            raise UnavailableError("no worker could be started; what they say is above")
        for place in self._places:
            place.keeper = asyncio.create_task(self._keep(place))

    async def roll(self, fleet: FleetFile) -> None:
        """Replace all workers by such with another fleet, one after the other. Raises UnavailableError as soon as one
        does not become ready: those that are replaced by then stay so, the others are as before, and later ones get
        what all had before. Raises ConfigError if a worker refuses the fleet."""
        async with self._rolls:
            if self._stopping:
                raise UnavailableError(_STOPPING)
            await asyncio.gather(*map(self._make_room, self._places))  # takes long, and who dies meanwhile is restarted
            async with self._rolling:
                await self._replace_all(fleet)

    def stop_restarting(self) -> None:
        """From now on a worker that ends has ended: somebody has told them to drain."""
        self._stopping = True
        for place in self._places:
            place.listen_no_more()
            if place.keeper is not None:
                place.keeper.cancel()

    async def stop(self) -> None:
        """Drain all, each within its `drain_s`, and kill who is left after that; then nothing is left."""
        self.stop_restarting()
        await self._keepers_end()
        await asyncio.gather(*map(self._end, self._all()))

    async def close(self) -> None:
        """Whatever is left is killed. May be called again."""
        self.stop_restarting()
        await self._keepers_end()
        await self._kill(self._all())
        await asyncio.gather(*self._endings)
        if self._lifeline_read >= 0:
            os.close(self._lifeline_read)
            os.close(self._lifeline_write)
            self._lifeline_read = -1
            self._quotas.close()

    def kill(self) -> None:
        """End all at once; `stop`, which waits for them, goes on at once."""
        for worker in self._all():
            worker.kill()

    async def failed(self) -> None:
        """Returns when a place is kept no more, by `stop_restarting`; raises what went wrong, if that is why."""
        keepers = [it.keeper for it in self._places if it.keeper is not None]
        await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
        await self._keepers_end(only_ended=True)

    # ---- one place

    async def _keep(self, place: _Place) -> None:
        """Start another worker whenever a place has none."""
        while True:
            if (worker := place.worker) is not None:
                place.news.clear()
                if not worker.ended.done():
                    await place.news.wait()  # not for this one: another may replace it, and end before it
                    continue
                place.worker = None
                self._died(place, worker)
            await asyncio.sleep(place.restarts.wait_s)
            async with self._rolling:
                if place.worker is None:
                    await self._refill(place)

    def _died(self, place: _Place, worker: Worker) -> None:
        now = asyncio.get_running_loop().time()
        wait_s = place.restarts.died(now - worker.ready_s if worker.ready_s else 0.0)
        text = "worker %d (pid %d) ended with code %d; another one starts in %.1f s"
        log.warning(text, place.number, worker.pid, worker.ended.result(), wait_s)
        if place.restarts.deaths > 1:
            place.listen_no_more()

    async def _refill(self, place: _Place) -> None:
        try:
            await self._fill(place)
        except ConfigError as error:
            log.error("worker %d: %s", place.number, error)
            place.restarts.died(0.0)
            place.listen_no_more()

    async def _fill(self, place: _Place) -> None:
        """Start a worker in an empty place; if it does not become ready, the place stays empty, and that is a death."""
        try:
            place.put(await self._launch(place))
        except (UnavailableError, ResourceError) as error:
            wait_s = place.restarts.died(0.0)
            place.listen_no_more()
            log.warning("%s; another one starts in %.1f s", error, wait_s)

    async def _replace_all(self, fleet: FleetFile) -> None:
        before, self.fleet = self.fleet, fleet
        try:
            for place in self._places:
                await self._replace(place)
        except (ConfigError, ResourceError, UnavailableError):
            self.fleet = before
            raise

    async def _replace(self, place: _Place) -> None:
        if place.worker is None:
            return  # its keeper starts one with the new fleet
        new, old = await self._launch(place), place.worker
        place.put(new)
        if old is not None:  # else it has died meanwhile
            place.draining.append(old)
            old.replaced()
            self._in_background(self._await_end(place, old))

    async def _await_end(self, place: _Place, old: Worker) -> None:
        """It drains as long as it may."""
        await self._ends(old, old.fleet.conductor.times.roll_s)
        place.draining.remove(old)
        if code := old.ended.result():
            log.warning("worker %d (pid %d) ended with code %d while it drained", place.number, old.pid, code)

    async def _make_room(self, place: _Place) -> None:
        """Where there is no row beside those that drain and the place's own worker, end whoever has drained longest. A
        row that the worker has left by dying is its successor's."""
        draining = [it for it in place.draining if it in self._clearing]
        if len(draining) > ROWS_EACH - 2:
            oldest = draining[0]
            log.warning("worker %d: the one with pid %d, which still drains, has to end now", place.number, oldest.pid)
            await self._end(oldest)

    async def _end(self, worker: Worker) -> None:
        """Drain it within `drain_s`."""
        worker.drain()
        await self._ends(worker, worker.fleet.conductor.times.drain_s)

    async def _ends(self, worker: Worker, within_s: float) -> None:
        """Wait until it has ended and its row is free, and kill it if it has not after so long."""
        await asyncio.wait([worker.ended], timeout=within_s + GRACE_S)
        await self._kill([worker])
        if (clearing := self._clearing.get(worker)) is not None:
            await asyncio.shield(clearing)

    def _free_row(self, place: _Place) -> int | None:
        taken = {it.row for it in self._clearing}
        return next((it for it in place.rows if it not in taken), None)

    async def _launch(self, place: _Place) -> Worker:
        """A worker that is ready. Raises ResourceError, UnavailableError or ConfigError, and then nothing is left of
        it."""
        if self._stopping:
            raise UnavailableError(_STOPPING)
        row = self._free_row(place)
        if row is None:
            raise ResourceError(f"all of worker {place.number}'s rows are taken by such that drain")
        worker = Worker(
            self._command,
            self.fleet,
            row,
            self._folder,
            self._quotas.descriptor,
            self._lifeline_read,
            self._environment,
            place.listening(self.fleet.conductor.listen),
        )
        self._watching.started(row)
        ending = self._clearing[worker] = self._in_background(self._clear_after(worker))
        try:
            async with asyncio.timeout(self._ready_s):
                is_ready = await asyncio.shield(worker.ready)
        except TimeoutError:
            is_ready = False
        except asyncio.CancelledError:
            worker.kill()
            raise
        if is_ready and not self._stopping:
            return worker
        had_ended = worker.ended.done()
        worker.kill()
        await asyncio.shield(ending)
        if is_ready:
            raise UnavailableError(_STOPPING)  # since it was started
        code = worker.ended.result()
        if had_ended and code == HOPELESS:
            raise ConfigError(f"worker {place.number} cannot use this file; why is above")
        why = f"ended with code {code}" if had_ended else f"was not ready within {self._ready_s:g} s"
        raise UnavailableError(f"worker {place.number} (pid {worker.pid}) {why}")

    async def _clear_after(self, worker: Worker) -> None:
        """Once it has ended, nothing of it counts any more."""
        await worker.ended
        self._quotas.clear(worker.row)
        socket_path(self._folder, worker.row).unlink(missing_ok=True)  # of one that was killed
        await self._watching.gone(worker.row)
        del self._clearing[worker]

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    async def _keepers_end(self, *, only_ended: bool = False) -> None:
        keepers = [it.keeper for it in self._places if it.keeper is not None and (it.keeper.done() or not only_ended)]
        _raise_first(await asyncio.gather(*keepers, return_exceptions=True))

    def _all(self) -> list[Worker]:
        return [it for place in self._places for it in (*filter(None, (place.worker,)), *place.draining)]

    async def _kill(self, workers: Sequence[Worker]) -> None:
        left = [it for it in workers if not it.ended.done()]
        for worker in left:
            log.warning("worker with pid %d did not end in time and was killed", worker.pid)
            worker.kill()
        if workers:
            await asyncio.wait([it.ended for it in workers])


def _raise_first(results: Sequence[BaseException | None]) -> None:
    """The first error among the outcomes of tasks; that one was cancelled is none."""
    for result in results:
        if isinstance(result, Exception):
            raise result
