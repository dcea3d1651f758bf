"""A simulated cluster: nodes with the real core, their instances, a directory, a network, and what goes wrong.

When the last request is answered and the last fault is over, everything is left alone for a while. Then the directory
must say exactly what the living hold, and nobody may hold anything for anybody.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headwater.core.directory import Records
from headwater.core.hashing import KeyChain
from headwater.sim.cluster_directory import FORGET_S, DirectoryServer
from headwater.sim.cluster_faults import (
    ClusterFaults,
    ClusterPlan,
    draw_cluster_faults,
    draw_cluster_plan,
)
from headwater.sim.cluster_instance import CALL_S, Request
from headwater.sim.cluster_life import Site, Sums
from headwater.sim.cluster_node import WAIT_S, ClusterNode, NodeParts
from headwater.sim.cluster_oracle import must
from headwater.sim.cluster_reads import ONE_SIDED
from headwater.sim.network import Host, Listener, LocalClock, Network
from headwater.sim.oracle import Violation
from headwater.sim.schedule import Schedule
from headwater.sim.workload import CHUNK_TOKENS, layouts
from headwater.types import PAGE_BYTES, ChunkKey, Namespace, Replica, Standing, Tier, chunk_name

EVENTS_MAX, EVENTS_NODE_MAX = 100_000, 1_000
QUIET_S = FORGET_S + 8.0
"""How long everything is left alone in the end: a life that is gone is forgotten by then."""
RETURNED_S = 8.0
"""The same where each life is followed by another."""
SLOW = 20.0
ISLAND_MAX = 10
"""Hosts on the smaller side of a cut."""


class ClusterError(AssertionError):
    """A cluster went wrong: names the seed, says how to see it again, and holds the log so far."""

    def __init__(self, seed: int, cause: BaseException, log: list[str]) -> None:
        super().__init__(
            f"seed {seed}, line {len(log)}: {type(cause).__name__}: {cause}; "
            f"replay it with: python -m headwater.sim cluster --seed {seed}"
        )
        self.seed, self.log = seed, log


@dataclass(frozen=True, slots=True)
class ClusterParts(NodeParts):
    """What a cluster is made of."""

    records: type[Records] = Records
    node: type[ClusterNode] = ClusterNode


@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    """What a cluster came to; equal seeds give equal outcomes."""

    seed: int
    nodes: int
    events: int
    messages: int
    lost: int
    sums: Sums
    log_sha256: str


class Prompts:
    """Long beginnings that many share, tails that nobody does, and dialogues that grow."""

    def __init__(self, rng: random.Random, stems: int) -> None:
        self._rng, self._words = rng, 0
        self._stems = [self._fresh(rng.randrange(4, 11)) for _ in range(stems)]
        self._open: list[list[int]] = []

    def next(self) -> list[int]:
        """The tokens of the next prompt."""
        rng, kind = self._rng, self._rng.random()
        if kind < 0.3 and self._open:
            tokens = rng.choice(self._open) + self._fresh(rng.randrange(3))
        elif kind < 0.9:
            tokens = rng.choice(self._stems) + self._fresh(rng.randrange(3))
        else:
            tokens = self._fresh(rng.randrange(1, 6))
        self._open = [*self._open[-3:], tokens]
        return tokens

    def flood(self) -> list[int]:
        """A long one that nobody shares."""
        return self._fresh(self._rng.randrange(8, 25))

    def _fresh(self, chunks: int) -> list[int]:
        first = self._words
        self._words += chunks * CHUNK_TOKENS
        return list(range(first, self._words))


class Cluster:
    """Plays one seed to its end."""

    def __init__(
        self,
        seed: int,
        parts: ClusterParts | None = None,
        plan: ClusterPlan | None = None,
        faults: ClusterFaults | None = None,
    ) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        drawn = draw_cluster_plan(self.rng), draw_cluster_faults(self.rng)
        self.plan, self.faults = plan or drawn[0], faults or drawn[1]
        self.parts, self.schedule, self.sums = parts or ClusterParts(), Schedule(), Sums()
        self.layout = layouts()["dense"]
        self.namespace = Namespace("simulated", "bf16", "simulated", self.layout.fingerprint())
        self.at_rest = False
        self.budget_s = WAIT_S + 2 * CALL_S + 1.0
        self.network = Network(self.schedule, self.rng, self.faults.drops)
        copies = self.faults.directory_lags > 0
        self.directory = DirectoryServer(
            self.schedule, self.network, self._host("directory"), self.parts.records, copies
        )
        self.sites = [self._site(number) for number in range(self.plan.nodes)]
        self._prompts = Prompts(self.rng, self.plan.stems)
        self._root, self._attempts = self.namespace.root(), 0
        self._faults_end_s = 0.0
        self._lives: dict[str, ClusterNode] = {}
        for site in self.sites:
            self._boot(site)

    @property
    def now(self) -> float:
        """True time."""
        return self.schedule.clock.now()

    @property
    def alive(self) -> list[ClusterNode]:
        """Who lives."""
        return list(self._lives.values())

    def attempt(self) -> int:
        """The number of another attempt to compute a chunk."""
        self._attempts += 1
        return self._attempts

    def copy_s(self, holder: Host, chunks: int) -> float:
        """How long so many chunks take from a host."""
        takes_s = chunks * PAGE_BYTES / holder.bytes_s * holder.slow
        if self.rng.random() < self.faults.stalls:
            takes_s += self.rng.choice((self.rng.uniform(0.1, 0.5), self.rng.uniform(0.3, 4.0)))
        return takes_s

    def gives_up(self) -> bool:
        """Whether an instance does not end its save."""
        return self.rng.random() < self.faults.aborts

    def was_lent(self, site: Site) -> None:
        """A good moment for somebody to want all the room."""
        if self.rng.random() < self.faults.floods:
            self._fault(0.5)
            self.schedule.after(self.rng.uniform(0.0, 0.5), "", lambda: self._flood(site))

    def rots(self) -> bool:
        """Whether a chunk arrives with other bytes."""
        return self.rng.random() < self.faults.corrupts

    def play(self) -> ClusterOutcome:
        """Play to the end; raises ClusterError if anything is wrong."""
        try:
            self._play()
        except (
            Violation,
            AssertionError,
            LookupError,
            ArithmeticError,
            TypeError,
            AttributeError,
            ValueError,
        ) as error:
            raise ClusterError(self.seed, error, self.schedule.log) from error
        return ClusterOutcome(
            self.seed,
            len(self.sites),
            self.schedule.events,
            self.network.messages,
            self.network.lost,
            self.sums,
            hashlib.sha256("\n".join(self.schedule.log).encode()).hexdigest(),
        )

    def _play(self) -> None:
        self._plan_request()
        while self.sums.answered < self.plan.requests or self.now < self._faults_end_s:
            self._step()
        quiet_s = QUIET_S if self.faults.stays_away else RETURNED_S
        self.at_rest = True
        self._until(self.now + quiet_s)
        self._check_quiet()
        self._check_directory()

    def _step(self) -> None:
        self.schedule.step()
        must(self.schedule.events < EVENTS_MAX + EVENTS_NODE_MAX * len(self.sites), "something goes round in circles")

    def _until(self, end_s: float) -> None:
        over = [False]

        def end() -> None:
            over[0] = True

        self.schedule.after(end_s - self.now, "", end)
        while not over[0]:
            self._step()

    # ---- in the end -----------------------------------------------------------------------------------

    def _check_quiet(self) -> None:
        must(self.sums.answered == self.sums.requests, f"{self.sums.answered} answers, {self.sums.requests} requests")
        for node in self.alive:
            node.oracle.check()
            node.oracle.check_quiet()
            is_idle = node.movement.idle or node.level.asking_usage
            must(is_idle and not node.fetches.active, f"{node!r} is not at rest: {node.movement!r}")
            must(node.announcing.is_settled, f"{node!r} has not said all")
            busy = [it for it in node.peers.report(node.now) if it.reads or it.reading_bytes]
            must(not busy, f"{node.process.name}: reads are counted that are over: {busy}")
            held = node.level.reads or node.level.reading_bytes or node.level.asking
            must(not held, f"{node.process.name}: {node.level!r} has something left")

    def _check_directory(self) -> None:
        """It says what is true of the living, and nothing of the dead."""
        records, now = self.directory.records, self.directory.now
        members = {it.number: it for it in records.members(now)}
        living = {node.announcing.number: node for node in self.alive}
        must(members.keys() == living.keys(), f"members are {sorted(members)}, those alive {sorted(living)}")
        for number, node in living.items():
            must(members[number].member == node.member, f"{number} is {members[number].member}")
            must(members[number].standing is Standing.SERVING, f"{number} is {members[number].standing}")
        truth: dict[bytes, set[int]] = {}
        for number, node in living.items():
            for key in node.oracle.held:
                truth.setdefault(chunk_name(0, key), set()).add(number)
        self.directory.sweep()
        said = {name: set(it) for name, it in zip(truth, records.locate(list(truth), now), strict=True)}
        for name, numbers in truth.items():
            wanted = {Replica(number, Tier.HOST) for number in numbers}
            must(said[name] == wanted, f"{name.hex()[:6]}: {said[name]} is said, {sorted(numbers)} is true")
        must(len(records) == len(truth), f"{len(records)} chunks are recorded, {len(truth)} are held")

    # ---- who there is ---------------------------------------------------------------------------------

    def _host(self, name: str) -> Host:
        plan, rng = self.plan, self.rng
        offset_s = rng.uniform(0.0, plan.skew_s)
        clock = LocalClock(self.schedule, offset_s, 1.0 + rng.uniform(-plan.drift, plan.drift))
        return Host(name, clock, plan.latency_s / 2, plan.bytes_s)

    def _site(self, number: int) -> Site:
        transports = ("tcp", ONE_SIDED) if self.rng.random() < self.plan.one_sided else ("tcp",)
        return Site(f"node{number}", f"10.0.0.{number}:7420", self._host(f"host{number}"), transports)

    def _boot(self, site: Site) -> None:
        site.epoch += 1
        node = site.life = self._lives[site.name] = self.parts.node(self, site, site.epoch, self.parts)
        self.network.listeners[site.address] = Listener(site.host, node.process, node)

    def _end_life(self, site: Site, again_s: float | None) -> None:
        """This life is over at once; another one begins later, or never."""
        node = self._lives.pop(site.name, None)
        if node is None:
            return
        self.sums.deaths += 1
        node.note("dies")
        node.die()
        site.life = None
        del self.network.listeners[site.address]
        if again_s is not None:
            self._fault(again_s)
            self.schedule.after(again_s, f"{site.name} starts again", lambda: self._boot(site))

    # ---- requests and faults --------------------------------------------------------------------------

    def _plan_request(self) -> None:
        if self.sums.requests < self.plan.requests:
            self.schedule.after(self.rng.uniform(0.0, self.plan.rush_s), "", self._start_request)

    def _start_request(self) -> None:
        self.sums.requests += 1
        self._request(f"request{self.sums.requests}", self._keys(self._prompts.next()))
        self._draw_faults()
        self._plan_request()

    def _keys(self, tokens: list[int]) -> list[ChunkKey]:
        chain = KeyChain(self._root, CHUNK_TOKENS)
        chain.extend(tokens)
        return chain.keys[: self.plan.slots - 2]

    def _request(self, name: str, keys: list[ChunkKey]) -> None:
        site = self.rng.choice(self.sites)
        self.schedule.note(f"{name} of {len(keys)} chunks at {site.name}")
        Request(self, site, name, keys).start()

    def _fault(self, for_s: float) -> None:
        self.sums.faults += 1
        self._faults_end_s = max(self._faults_end_s, self.now + for_s)

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def _draw_faults(self) -> None:
        faults, rng = self.faults, self.rng
        kinds: list[tuple[float, Callable[[], None]]] = [
            (faults.partitions, self._partition),
            (faults.islands, self._island),
            (faults.slow_hosts, self._slow_down),
            (faults.pauses, self._pause),
            (faults.kills, self._kill),
            (faults.leaves, self._leave),
            (faults.directory_is_away, lambda: self._directory_away(rng.uniform(0.2, 8.0))),
            (faults.directory_is_empty, self._directory_empty),
            (faults.directory_lags, self._directory_lags),
            (faults.floods, lambda: self._flood(rng.choice(self.sites))),
            (faults.clears, self._clear),
        ]
        for probability, act in kinds:
            if self._happens(probability):
                delay_s = rng.uniform(0.0, 1.5)
                self._fault(delay_s)
                self.schedule.after(delay_s, "", act)

    def _cut(self, some: list[str], others: list[str]) -> None:
        """Nothing comes through between these hosts, one way or both, for a while."""
        ways = {(one, other) for one in some for other in others}
        kind = self.rng.randrange(3)
        if kind:
            back = {(other, one) for one, other in ways}
            ways = back if kind == 1 else ways | back
        for_s = self.rng.uniform(0.3, 6.0)
        way = ("from", "to", "from and to")[kind]
        self.schedule.note(f"nothing comes {way} {some} for {for_s:.3f} s, of {others[:4]} and {len(others)} in all")
        self.network.cut |= ways
        self._fault(for_s)
        self.schedule.after(for_s, "healed", lambda: self.network.cut.difference_update(ways))

    def _partition(self) -> None:
        names = [site.host.name for site in self.sites]
        self.rng.shuffle(names)
        count = self.rng.randrange(1, min(len(names), ISLAND_MAX))
        self._cut(names[:count], names[count:])

    def _island(self) -> None:
        names = [site.host.name for site in self.sites]
        self._cut(self.rng.sample(names, self.rng.randrange(1, min(len(names), ISLAND_MAX) + 1)), ["directory"])

    def _slow_down(self) -> None:
        host = self.rng.choice(self.sites).host
        host.slow = self.rng.uniform(2.0, SLOW)
        for_s = self.rng.uniform(0.5, 4.0)
        self._fault(for_s)
        self.schedule.note(f"{host.name} is {host.slow:.1f} times slower")

        def over() -> None:
            host.slow = 1.0

        self.schedule.after(for_s, f"{host.name} is itself again", over)

    def _pause(self) -> None:
        node = self._lives.get(self.rng.choice(self.sites).name)
        if node is not None:
            for_s = self.rng.uniform(0.3, 7.0)
            self._fault(for_s)
            node.process.paused_until_s = max(node.process.paused_until_s, self.now + for_s)
            node.note(f"is paused for {for_s:.3f} s")

    def _kill(self) -> None:
        site = self.rng.choice(self.sites)
        again_s = self.rng.choice((0.0, self.rng.uniform(0.0, 1.0), self.rng.uniform(0.0, 5.0)))
        stays_away = self._happens(self.faults.stays_away) and len(self.alive) > 1
        self._end_life(site, None if stays_away else again_s)

    def _leave(self) -> None:
        site = self.rng.choice(self.sites)
        node = self._lives.get(site.name)
        if node is None or len(self.alive) < 2:
            return
        node.standing = Standing.DRAINING
        node.note("drains")
        self._fault(2.0)

        def leave() -> None:
            if self._lives.get(site.name) is node:
                number = node.announcing.number
                node.directory(partial(self.directory.leave, number), 1, lambda _: None)
                self._end_life(site, 1.0)

        self.schedule.after(2.0, "", leave)

    def _directory_away(self, for_s: float) -> None:
        self._fault(for_s)
        self.schedule.note(f"the directory is away for {for_s:.3f} s")
        self.directory.go_away(for_s)

    def _directory_empty(self) -> None:
        self.schedule.note("the directory has lost everything")
        self.directory.lose_all()

    def _directory_lags(self) -> None:
        if self.directory.fall_back():
            self.schedule.note("an older copy of the directory takes over")

    def _flood(self, site: Site) -> None:
        self.sums.requests += 1
        keys = self._keys(self._prompts.flood())
        Request(self, site, f"flood{self.sums.requests}", keys).save()

    def _clear(self) -> None:
        node = self._lives.get(self.rng.choice(self.sites).name)
        if node is not None:
            node.clear()
            node.settle()
