"""One worker process: all parts of a Conductor, put together, from start to drain.

Theory of operation. `starting` says how its parent starts and ends it. Within:

    made       parts, from the bottom up; instances are asked whether they live; nodes and engines are listened to
    READY_S    until the first round of questions is answered, and tokenizers are loaded
    serving    the port is open, the parent is told
    draining   by REPLACED, by SIGTERM, by a lifeline that ends: no new connections; requests that are under way, or
               still come on those that there are, end within `roll_s` after the first of these, within `drain_s` after
               the others, which may come later. By POST /drain: requests are refused, and nothing ends
    closed     from the top down
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import uvloop

from headwater.conductor.app import App
from headwater.conductor.brain import FleetBrain
from headwater.conductor.control.worker import WorkerControl
from headwater.conductor.counts import Counts
from headwater.conductor.descriptors import fitting, take_all
from headwater.conductor.directory_bus import DirectoryBus
from headwater.conductor.engine_ids import EngineIds
from headwater.conductor.events.errands import NodesErrands
from headwater.conductor.events.lines import by_socket
from headwater.conductor.events.members import ClusterNodes
from headwater.conductor.events.sources import Sources
from headwater.conductor.first import first
from headwater.conductor.http.server import HttpServer
from headwater.conductor.http.tls import listener_context
from headwater.conductor.http.upstream import UpstreamPool
from headwater.conductor.listening import inherited
from headwater.conductor.polling import Polling
from headwater.conductor.quota_page import QuotaPage
from headwater.conductor.ranks import Ranks
from headwater.conductor.registry import Roster
from headwater.conductor.relay import Relay
from headwater.conductor.rotation import Rotation, suffices
from headwater.conductor.sharing import Bus, Sharing
from headwater.conductor.sight import Sight
from headwater.conductor.signals import Signals
from headwater.conductor.starting import HOPELESS, REPLACED, ROWS_EACH, Start, read_start, say_ready
from headwater.conductor.tenants import KeyedTenants
from headwater.conductor.tokens.service import TokensService
from headwater.conductor.workers_bus import WorkersBus
from headwater.core.rates import USUAL
from headwater.errors import ConfigError, HeadwaterError
from headwater.places import parse_remote
from headwater.tiers.remote import endpoint_of
from headwater.values import split_address

log = logging.getLogger(__name__)

SETTLE_S = 3.0
"""So long a worker waits for an instance to answer, or all of them not to, before it takes requests."""
SETTLE_AGAIN_S = 0.05
COLLECT_AFTER = 100_000
"""Objects that are made, and not freed, between two collections: the usual 700 would run one in every few requests."""


class Worker:
    """The parts of one worker. Made, used and closed in the running loop."""

    def __init__(self, start: Start, stack: AsyncExitStack) -> None:
        """Whatever has to be closed is left on `stack`. Raises ConfigError, ResourceError."""
        loop = asyncio.get_running_loop()
        about = start.fleet.conductor
        about = replace(about, limits=fitting(about.limits, take_all()))
        fleet = replace(start.fleet, conductor=about)
        # A name of this life: another one's books begin from nothing.
        self.name = f"{os.urandom(4).hex()}{start.row}"
        self.start, self.fleet, self.counts, self.loop = start, fleet, Counts(), loop
        tls = None
        if about.tls_certificate is not None and about.tls_key is not None:
            tls = listener_context(about.tls_certificate, about.tls_key)
        page = QuotaPage.open(start.quotas, start.row)
        stack.callback(page.close)
        self.tenants = KeyedTenants(fleet.tenants, page, fleet.secret)
        self.roster = Roster(fleet, USUAL, networks=about.networks)
        self.upstreams = UpstreamPool(about.limits, about.times, self.counts)
        stack.push_async_callback(self.upstreams.stop)
        nodes = [(it.name, it.socket) for it in fleet.nodes]
        self.sight = Sight(self.roster.nodes, about.index_keys)
        self.sources = Sources(self.sight, nodes, are_joined=fleet.directory is not None)
        stack.push_async_callback(self.sources.close)
        self.errands = NodesErrands(self.counts)
        stack.push_async_callback(self.errands.close)
        for number, (_, socket) in enumerate(nodes):
            if socket:
                self.errands.joined(number, by_socket(socket))
        self.cluster_nodes: ClusterNodes | None = None
        if about.members is not None and fleet.directory is not None:
            self.cluster_nodes = ClusterNodes(fleet, about.members, self.roster, self.sources, self.errands)
            stack.push_async_callback(self.cluster_nodes.close)
            self.sight.sources["directory"] = self.cluster_nodes.members.state
        self.brain = self._brain()
        self.roster.watch(joined=self._joined, left=self._left)
        for number in self.roster.instances():
            self._joined(number)
        self.polling = Polling(self.roster, self.upstreams, loop, told=self._told, changed=self._changed)
        self.brain.earning.health = self.polling
        stack.callback(self.polling.close)
        self.engine_ids = EngineIds(self.upstreams, self.roster)
        models = {it.served_name: it.model for it in fleet.instances}
        self.tokens = TokensService(models, about.tokens, self.counts, loop, ask=self.engine_ids.ask)
        stack.callback(self.tokens.close)
        self.relay = Relay(
            self.upstreams, self.roster, self.brain, self.tenants, self.counts, about.limits, about.times, loop.time,
            migrate=about.migrate, ranks=Ranks(self.sight.by_rank),
        )  # fmt: skip
        self.app = App(
            self.name,
            self.tenants,
            self.tokens,
            self.brain,
            self.relay,
            self.roster,
            self.counts,
            about.limits,
            loop.time,
        )
        self.server = HttpServer(self.app, about.limits, about.times, self.counts, tls)
        self.control = WorkerControl(
            start.row,
            brain=self.brain,
            sight=self.sight,
            registry=self.roster,
            tenants=self.tenants,
            tokens=self.tokens.state,
            counts=self.counts,
            is_ready=lambda: not (self.app.draining or self.server.draining),
            drain=self.take_no_more,
            leaves=self.brain.depart,
        )
        stack.push_async_callback(self.control.close)
        buses: list[Bus] = [
            WorkersBus(Path(start.directory) / "bus", start.row, about.workers * ROWS_EACH, loop),
        ]
        if fleet.directory is not None:
            directory = DirectoryBus(endpoint_of(parse_remote(fleet.directory)), fleet.cluster, self.counts)
            buses.append(directory)
            stack.push_async_callback(directory.closed)
        self.sharing = Sharing(
            self.brain, self.roster, loop, self.counts, buses, cluster=fleet.cluster, wall_ns=time.time_ns
        )
        stack.callback(self.sharing.close)

    def _brain(self) -> FleetBrain | Rotation:
        fleet, serial = self.fleet, time.time_ns()
        if suffices(fleet):
            return Rotation(fleet, self.roster, self.counts, self.loop, name=self.name, serial=serial)
        brain = FleetBrain(
            fleet,
            self.roster,
            self.sight,
            self.counts,
            self.loop,
            name=self.name,
            serial=serial,
            prefetch=self._prefetch if self.errands or self.cluster_nodes is not None else None,
        )
        brain.fleet.links = self.sources.links
        brain.choosing.kv_bytes_per_token = self.sight.kv_bytes_per_token
        return brain

    def _joined(self, number: int) -> None:
        self.sources.add(number, self.roster.spec(number))

    def _left(self, number: int) -> None:
        self.sources.remove(number)
        self.upstreams.close(self.roster.origin(number))

    def _told(self, number: int, signals: Signals, asked_s: float) -> None:
        self.sight.learned(number, capacity_tokens=signals.capacity_tokens, block_tokens=signals.block_tokens)
        self.brain.told(number, signals, asked_s)

    def _changed(self, number: int, alive: bool) -> None:
        if alive and self.polling.was_away(number):
            self.sources.back(number)
        self.brain.changed(number, alive)

    def _prefetch(self, node: int, model: str, salt: str, keys: Sequence[bytes]) -> None:
        root = self.sight.root(model, salt)
        if root is not None:
            self.errands.prefetch(node, root, keys)

    def take_no_more(self) -> None:
        """Refuse new requests."""
        self.app.draining = True

    async def serve(self, replaced: asyncio.Event, ended: asyncio.Event) -> None:
        """Until one of them, and then until what is under way has ended, or `roll_s` is over, or `drain_s` since
        `ended`. Raises ConfigError."""
        about = self.fleet.conductor
        await self.control.start(Path(self.start.directory))
        self.polling.start()
        self.sharing.start()
        await self._settle(ended)
        host, port = split_address(about.listen)
        await self.server.start(host, int(port), reuse_port=True, listening=inherited(self.start.listening))
        try:
            for name in {it.served_name for it in self.fleet.instances}:
                self.tokens.verify(name)
            say_ready(self.start)
            await first(replaced.wait(), ended.wait())
            if not await first(self.server.drain(about.times.roll_s), ended.wait()):
                await self.server.drain(about.times.drain_s)
        finally:
            await self.server.close()

    async def _settle(self, ended: asyncio.Event) -> None:
        deadline_s = self.loop.time() + SETTLE_S
        while not ended.is_set() and self.loop.time() < deadline_s:
            if self.polling.answered() is not None:
                return
            await asyncio.sleep(SETTLE_AGAIN_S)


async def run(start: Start) -> None:
    """One worker's life. Raises HeadwaterError."""
    loop, replaced, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(REPLACED, replaced.set)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the parent's business

    def orphaned() -> None:
        loop.remove_reader(start.lifeline)
        ended.set()

    loop.add_reader(start.lifeline, orphaned)
    try:
        async with AsyncExitStack() as stack:
            worker = Worker(start, stack)
            gc.collect()
            gc.freeze()
            gc.set_threshold(COLLECT_AFTER, 10, 10)
            await worker.serve(replaced, ended)
    finally:
        loop.remove_reader(start.lifeline)


def main() -> int:
    """The exit code, as `starting` has it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        start = read_start()
        uvloop.run(run(start))
    except ConfigError as error:
        log.error("%s", error)
        return HOPELESS
    except HeadwaterError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
