"""One simulated world: a node, some instances, their users and what goes wrong, all from one seed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import partial

from headwater.core.cache import Cache
from headwater.core.eviction import POLICIES
from headwater.core.hashing import KeyChain
from headwater.sim.faults import draw_faults
from headwater.sim.host import Host
from headwater.sim.instance import Instance, Request
from headwater.sim.node import SimulatedNode
from headwater.sim.oracle import Oracle, Violation
from headwater.sim.schedule import Process
from headwater.sim.tiering import Parts
from headwater.sim.workload import CHUNK_TOKENS, Conversations, Model, draw_plan
from headwater.types import KEY_BYTES, PAGE_BYTES, ChunkKey

# Short against what slow copies and pauses take, so that deadlines matter.
LOAD_S, SAVE_S = 1.5, 3.0
EVENTS_MAX = 20_000
PARTS = Parts()


class SimulationError(AssertionError):
    """A world went wrong: names the seed, says how to see it again, and holds the log so far."""

    def __init__(self, seed: int, cause: BaseException, log: list[str]) -> None:
        super().__init__(
            f"seed {seed}, event {len(log)}: {type(cause).__name__}: {cause}; "
            f"replay it with: python -m headwater.sim --seed {seed}"
        )
        self.seed, self.log = seed, log


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a world came to; equal seeds give equal outcomes."""

    seed: int
    events: int
    requests: int
    lookup_tokens: int
    hit_tokens: int
    reads: int
    stored: int
    evicted: int
    expired: int
    written_below: int
    read_below: int
    fetches: int
    fetches_cut: int
    log_sha256: str


class World:
    """Plays one seed to its end; the parts are replaced by tests that break them on purpose."""

    def __init__(
        self,
        seed: int,
        parts: Parts = PARTS,
        instance_type: type[Instance] = Instance,
    ) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.faults, self.plan = draw_faults(self.rng), draw_plan(self.rng)
        self._parts, self._caches = parts, list[Cache]()
        self.host = Host(self._make_cache(), self.rng, self.faults, self.plan, parts)
        self._spaces = {it: number for number, it in enumerate(self.plan.models)}
        self.schedule = self.host.schedule
        self._conversations = Conversations(self.rng)
        self._instance_type = instance_type
        self._lives = self.requests = 0
        self.instances = [self._boot(model) for model in self.plan.instances]

    @property
    def node(self) -> SimulatedNode:
        """The node in its present life."""
        return self.host.node

    @property
    def oracle(self) -> Oracle:
        """Who judges it."""
        return self.host.oracle

    @property
    def cache(self) -> Cache:
        """Its HOST tier."""
        return self.host.cache

    def _make_cache(self) -> Cache:
        """An empty HOST tier that knows all namespaces."""
        slab_bytes = self.plan.slab_pages * PAGE_BYTES
        pool = self._parts.pool([self.plan.slabs * slab_bytes], slab_bytes)
        quotas = {tenant: slabs * slab_bytes for tenant, slabs in self.plan.quotas.items()}
        epoch = len(self._caches) << 20
        cache = self._parts.cache(pool, POLICIES[self.plan.policy], LOAD_S, SAVE_S, epoch, quotas=quotas)
        for it in self.plan.models:
            cache.add_space(it.namespace, it.layout)
        self._caches.append(cache)
        return cache

    def play(self) -> Outcome:
        """Play to the end; raises SimulationError if anything is wrong."""
        try:
            self._play()
        except (Violation, AssertionError, LookupError, ArithmeticError, TypeError, ValueError) as error:
            raise SimulationError(self.seed, error, self.schedule.log) from error
        spaces = [space for cache in self._caches for space in cache.spaces]
        return Outcome(
            self.seed,
            self.schedule.events,
            self.requests,
            sum(it.lookup_tokens for it in spaces),
            sum(it.hit_tokens for it in spaces),
            self.host.reads + self.oracle.reads,
            sum(it.stored_chunks for it in spaces),
            self.host.evicted + self.oracle.evicted,
            sum(it.expired_loads + it.expired_saves for it in self._caches),
            self.host.moved("written"),
            self.host.moved("read"),
            self.host.begun,
            self.host.cut,
            hashlib.sha256("\n".join(self.schedule.log).encode()).hexdigest(),
        )

    def _play(self) -> None:
        self._plan_request()
        while len(self.schedule):
            self.host.step()
            if self.schedule.events > EVENTS_MAX:
                raise Violation(f"more than {EVENTS_MAX} events: something goes round in circles")
        self.oracle.check_quiet()
        self._check_levels()
        self._check_room()

    def _check_levels(self) -> None:
        """Nothing moves between the tiers, and nothing is held for moves."""
        tiering = self.node.tiering
        if not tiering.movement.idle or tiering.fetches.active:
            raise Violation(f"something goes on that nobody will end: {tiering.movement!r}, {tiering.fetches!r}")
        for level in tiering.levels:
            if level.reads or level.writes or level.reading_bytes or level.writing_bytes:
                raise Violation(f"{level!r}: {level.reading_bytes} and {level.writing_bytes} bytes are left")
        if tiering.disk_oracle is not None:
            tiering.disk_oracle.check_quiet()
            tiering.disk_oracle.check_bytes()

    def _check_room(self) -> None:
        """Nothing is in use: a save gets all the room there is, and deleting everything frees everything."""
        for space, it in enumerate(self.cache.spaces):
            fresh = ChunkKey(hashlib.sha256(it.namespace.root()).digest()[:KEY_BYTES])
            for other, of_other in enumerate(self.cache.spaces):
                if of_other.share is not it.share:  # who holds what it is entitled to gives no room
                    self.node.clear(other)
            granted = self.node.reserve("last", space, None, [fresh], frozenset())
            if not granted.ticket:
                raise Violation(f"nothing is in use and there is no room: {self.cache!r}")
            self.node.release("last", granted.ticket)
            self.oracle.stopped(granted.ticket)
            self.node.clear(space)
            self.node.settle()
            self.oracle.check()
        # What was written because of that goes, too.
        while len(self.schedule):
            self.host.step()
        for space in range(len(self.cache.spaces)):
            self.node.clear(space)
        self.node.settle()
        while len(self.schedule):
            self.host.step()
        disk = self.node.tiering.disk_oracle
        for cache in (self.cache, *([disk.cache] if disk is not None else [])):
            if cache.pool.taken_slots or len(cache.entries):
                raise Violation(f"everything was deleted and something is left: {cache!r}")

    def _plan_request(self) -> None:
        if self.requests < self.plan.requests:
            self.schedule.after(self.rng.uniform(0.0, self.plan.rush_s), "", self._start_request)

    def _start_request(self) -> None:
        self.requests += 1
        rng, faults = self.rng, self.faults
        instance = rng.choice(self.instances)
        request = Request(instance, self._conversations.prompt(), self._conversations.answer())
        self._begin(request)
        if rng.random() < faults.cancels:
            delay_s = rng.expovariate(2.0)
            self.schedule.after(delay_s, f"{instance.owner} loses a client", request.cancel, instance.scheduler)
        if rng.random() < faults.breaks:
            self.schedule.after(rng.uniform(0.0, 2.0), "", instance.break_session, instance.scheduler)
        if rng.random() < faults.kills:
            self.schedule.after(rng.uniform(0.0, 2.0), "", lambda: self._kill(rng.choice(self.instances)))
        if rng.random() < faults.pauses:
            self.schedule.after(rng.uniform(0.0, 2.0), "", self._pause)
        if rng.random() < faults.strays:
            self.schedule.after(rng.uniform(0.0, 2.0), "", self._stray)
        if rng.random() < faults.clears:
            space = rng.randrange(len(self.cache.spaces))
            self.schedule.after(rng.uniform(0.0, 2.0), "", lambda: self.node.clear(space))
        if rng.random() < faults.restarts and self.plan.has_levels:
            self.schedule.after(rng.uniform(0.0, 2.0), "", self._restart)
        if rng.random() < faults.spills and self.plan.has_levels:
            self.node.spill(instance.space)
        if rng.random() < faults.wishes and self.plan.has_levels:
            self.schedule.after(rng.uniform(0.0, 2.0), "", lambda: self._wish(instance, request.tokens))
        self._plan_request()

    def _restart(self) -> None:
        """kill -9 of the node; the instances connect to the next one."""
        self.host.restart(self._make_cache())
        for instance in self.instances:
            instance.break_session()

    def _wish(self, instance: Instance, tokens: list[int]) -> None:
        """An operator wants something for a prompt's beginning."""
        chain = KeyChain(instance.root, CHUNK_TOKENS)
        chain.extend(tokens)
        keys = chain.keys[: self.rng.randrange(len(chain.keys) + 1)]
        kind = self.rng.randrange(3)
        if kind == 0:
            self.node.pin(instance.space, keys, self.rng.uniform(0.1, 3.0))
        elif kind == 1 and keys:
            self.node.prefetch(instance.space, keys)
        else:
            self.node.evict(instance.space, keys, below=self.rng.random() < 0.5)

    def _load_was_granted(self) -> None:
        """A good moment for somebody to want all the room."""
        if self.rng.random() < self.faults.floods:
            flood = Request(self.rng.choice(self.instances), self._conversations.flood(), [], at_once=True)
            self.schedule.after(self.rng.uniform(0.0, 4.0), "", lambda: self._begin(flood))

    def _begin(self, request: Request) -> None:
        instance = request.instance
        self.schedule.note(f"{instance.owner} starts a request of {len(request.tokens)} tokens")
        self.schedule.after(0.0, "", request.start, instance.scheduler)

    def _boot(self, model: Model) -> Instance:
        self._lives += 1
        name, space = f"engine{self._lives}", self._spaces[model]
        return self._instance_type(self.host, name, model, space, self._load_was_granted, self._conversations.remember)

    def _kill(self, instance: Instance) -> None:
        """kill -9: the scheduler dies, its workers go on for a while; only when all are gone does the node learn."""
        self.schedule.note(f"{instance.owner} is killed")
        self.instances[self.instances.index(instance)] = self._boot(instance.model)
        instance.scheduler.alive = False
        last_s = 0.0
        for worker in instance.workers:
            dies_s = self.rng.choice((0.0, self.rng.uniform(0.0, 1.0), self.rng.uniform(0.0, 8.0)))
            last_s = max(last_s, dies_s)
            self.schedule.after(dies_s, f"{worker.process.name} dies", partial(self._die, worker.process))
        self.scheduler_died(instance)
        self.schedule.after(last_s + self.host.message_s(), "", lambda: self._all_died(instance))

    def scheduler_died(self, instance: Instance) -> None:
        """The node sees one connection of an instance close: no reason to free anything."""

    @staticmethod
    def _die(process: Process) -> None:
        process.alive = False

    def _all_died(self, instance: Instance) -> None:
        # A connection ends after all that was sent on it.
        wait_s = self.host.last_word_s(instance.owner) - self.host.now
        if wait_s >= 0.0:
            self.schedule.after(wait_s + 0.001, "", lambda: self._all_died(instance))
            return
        self.node.close(instance.owner)
        self.oracle.all_stopped(instance.owner)

    def _pause(self) -> None:
        instance = self.rng.choice(self.instances)
        until_s = self.host.now + self.rng.uniform(0.5, 9.0)
        whole = self.rng.random() < 0.5
        for process in instance.processes if whole else [self.rng.choice(instance.workers).process]:
            process.paused_until_s = max(process.paused_until_s, until_s)
            self.schedule.note(f"{process.name} is paused until {process.paused_until_s:.4f}")

    def _stray(self) -> None:
        """A message about a ticket of somebody else, or of nobody."""
        tickets = list(self.cache.tickets)
        ticket = self.rng.choice(tickets) if tickets else self.rng.randrange(100)
        if self.rng.random() < 0.5:
            self.oracle.judge_foreign(self.node.done("stranger", ticket, self.rng.randrange(3), ()))
        else:
            self.oracle.judge_foreign(self.node.release("stranger", ticket))
