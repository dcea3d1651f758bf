"""A trace played on a fleet: the policies of `core` with a virtual clock, and the accounts of what came of it.

    arrival ──► Conductor: index, policy, admission ──► fetch ──► engine: queue, prefill ──► first token ──► last token
                    │ wait: Shares, asked again                                    │ KV saved to tiers, handed off
                    └ rejected                              death: lost, routed again, or failed

Whatever happens, happens at a time in one of three lists: the trace's arrivals, the ends of engines' passes, and an
agenda of everything else. The earliest is next; arrivals come before passes that end at the same instant. Nothing is
drawn by lot here, so the seed only matters to policies and traces that draw.

    world       the three lists, deaths, chores       conductor   a policy, admission, who waits
    stage       engines, nodes, tiers                 flights     a request's way, loads
    clock       the time, the agenda                  sight       who holds what, as it is known
    account     what is written down                  saving      KV to and from tiers
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

from headwater.core.policies import POLICIES
from headwater.core.routing import Headwater, Knobs
from headwater.errors import ConfigError
from headwater.ports import RoutingPolicy
from headwater.sim.fleet.account import Account
from headwater.sim.fleet.clock import Clock
from headwater.sim.fleet.conductor import Conductor, exchange, needs_held, views
from headwater.sim.fleet.config import FleetConfig
from headwater.sim.fleet.engine import Engine
from headwater.sim.fleet.flights import Flights
from headwater.sim.fleet.prepared import prepare
from headwater.sim.fleet.results import Run
from headwater.sim.fleet.saving import Saving
from headwater.sim.fleet.sight import Sight
from headwater.sim.fleet.stage import Stage
from headwater.sim.fleet.tables import shown
from headwater.traces.model import Trace
from headwater.values import nearest

Progress = Callable[[int, int], None]
SAMPLES, SAMPLES_MAX = 500, 10_000
PROGRESS_EVERY = 256
INF = math.inf


class World:
    """One run. `play` plays it; the object is of no use after that."""

    def __init__(self, trace: Trace, config: FleetConfig, policies: list[RoutingPolicy], seed: int) -> None:
        self._trace, self._config, self._seed = trace, config, seed
        self._prepared = prepare(trace)
        self.stage = stage = Stage(self._prepared, config)
        self._clock = clock = Clock()
        self._account = Account(len(trace.requests), len(stage.engines))
        self.sight = Sight(stage, clock, any(needs_held(policy) for policy in policies))
        self._saving = Saving(stage, clock, self.sight)
        self.flights = Flights(stage, clock, self._account, self._saving)
        alone = len(policies) == 1
        self._conductors = [
            Conductor(f"c{at}", policy, stage, clock, self.sight, self.flights, alone)
            for at, policy in enumerate(policies)
        ]
        self.flights.routers.extend(self._conductors)
        if self.sight.tells or self._saving.late:
            for engine in stage.engines:
                engine.pool.told = []

    # ---- the clock

    def play(self, progress: Progress | None = None) -> Run:
        """From the first arrival until the last request has ended."""
        arrivals = (self._prepared.arrival_s / self._config.load).tolist()
        count = len(arrivals)
        arrivals.append(INF)
        self._plan(arrivals[count - 1] if count else 0.0)
        clock, flights, fire = self._clock, self.flights, self._fire
        agenda, touched = clock.agenda, flights.touched
        at = 0
        while True:
            until_s = arrivals[at]
            if agenda and agenda[0][0] < until_s:
                until_s = agenda[0][0]
            fire(until_s)
            if agenda and agenda[0][0] <= arrivals[at]:
                clock.now, _, call, arguments = heappop(agenda)
                call(*arguments)
            elif at < count:
                clock.now = now = arrivals[at]
                while arrivals[at] == now:
                    flights.arrive(at)
                    at += 1
                if progress is not None and at % PROGRESS_EVERY < 8:
                    progress(self._account.over, count)
            else:
                break
            if touched:
                self._wake()
            clock.left = at < count
        left = list(flights.flying)
        assert not left, f"{len(left)} requests never ended: {left[:9]}"
        if progress is not None:
            progress(count, count)
        settings = self._config.plain() | {"policy": self._conductors[0].policy.name, "trace": self._trace.name}
        return self._account.run(self._prepared, self._config.load, settings, self._seed)

    def _wake(self) -> None:
        """Engines that were given something begin, once all that happens at this instant has happened."""
        now, ends, touched = self._clock.now, self._clock.ends, self.flights.touched
        for engine in touched.values():
            before_s = engine.end_s
            engine.wake(now)
            if engine.end_s != before_s:
                heappush(ends, (engine.end_s, engine.number))
            self._take_news(engine)
        touched.clear()

    def _fire(self, until_s: float) -> None:
        """Let passes end, one after another, until a time, or what they put on the agenda."""
        clock, live, engines, progress = self._clock, self.stage.live, self.stage.engines, self.flights.progress
        ends, agenda, lags = clock.ends, clock.agenda, self._config.signals.load_lag_s > 0
        while ends and ends[0][0] < until_s:
            now, number = heappop(ends)
            engine = engines[number]
            if engine.end_s != now:
                continue
            clock.now = now
            engine.fire()
            for job in engine.prefilling:
                if not lags:
                    progress(job)
            end_s = engine.end_s
            if end_s != INF:
                heappush(ends, (end_s, number))
            self._take_news(engine)
            if not lags:
                live[number].running_tokens = engine.running_tokens
            if agenda and agenda[0][0] < until_s:
                until_s = agenda[0][0]

    def _take_news(self, engine: Engine) -> None:
        """What an engine has to say: first and last tokens, who cannot be served, what its pool holds now."""
        flights = self.flights
        if engine.started:
            for job in engine.started:
                flights.first(job)
            engine.started.clear()
        if engine.ended:
            for job in engine.ended:
                flights.last(job)
            engine.ended.clear()
        if engine.failed:
            for job in engine.failed:
                if job.owner.job is job:
                    flights.fail(job.owner)
            engine.failed.clear()
        if told := engine.pool.told:
            if self._saving.late:
                self._saving.evicted(engine, told)
            if self.sight.tells:
                self.sight.tell(self.stage.places[engine.number], engine.block_tokens, told)
            told.clear()

    # ---- chores and deaths

    def _plan(self, span_s: float) -> None:
        clock = self._clock
        for death in self._config.deaths:
            clock.at(death.at_s, self._die, death.instance)
            if death.back_s is not None:
                startup_s = self.stage.groups[death.instance].startup_s
                clock.at(death.back_s + startup_s, self._come_back, death.instance)
        clock.chore(max(self._config.sample_s or span_s / SAMPLES, span_s / SAMPLES_MAX, 1e-3), self._sample)
        if len(self._conductors) > 1:
            clock.chore(self._config.conductors.exchange_s, self._exchange)

    def _sample(self) -> None:
        self._account.sample(self._clock.now, self.stage.live)

    def _exchange(self) -> None:
        exchange(self._conductors, self._clock.now)

    def _die(self, instance: int) -> None:
        """An instance is gone, and what it held."""
        engine, flights = self.stage.engines[instance], self.flights
        lost = flights.lost_with(instance)
        engine.clear()
        told = engine.pool.told or []
        self.sight.gone(self.stage.places[instance], engine.block_tokens, told)
        told.clear()
        for it in views(self._conductors, self.stage.live, instance):
            it.alive = False
        for flight in lost:
            if flight.job is not None:
                flight.generated = max(flight.generated, flight.job.generated)
            flights.hear_end(flight, None)
        for one in self._conductors:
            one.left(instance)
        for flight in lost:
            flight.router.take_again(flight)

    def _come_back(self, instance: int) -> None:
        for it in views(self._conductors, self.stage.live, instance):
            it.alive = True


def make_policy(name: str, knobs: dict[str, Any] | None = None, seed: int = 0) -> RoutingPolicy:
    """A policy by its name, told to do some things differently. Raises ConfigError for what it does not know."""
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"policy: there is none named {name!r}; the nearest is {nearest(name, POLICIES)!r}")
    knobs = dict(knobs or {})
    about = Knobs if make is Headwater else make
    known = list(inspect.signature(about).parameters)
    for knob in knobs:
        if knob not in known:
            hint = f"the nearest is {nearest(knob, known)!r}" if known else "it has none"
            raise ConfigError(f"policy.knobs.{knob}: {name} has no such knob; {hint}")
        value = knobs[knob]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"policy.knobs.{knob}: {shown(value)} is not a number of 0 or more; write one")
    if "seed" in known:
        knobs.setdefault("seed", seed)
    try:
        return make(Knobs(**knobs)) if make is Headwater else make(**knobs)
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"policy.knobs: {name} does not take these: {error}") from error


def simulate(
    trace: Trace,
    config: FleetConfig,
    *,
    policy: RoutingPolicy | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Run:
    """Play a trace on a fleet with one policy: the config's, another by name, or one that is given. `progress` is told
    how many requests of how many have ended. Raises ConfigError for what cannot be played."""
    count = config.conductors.count
    if policy is None or isinstance(policy, str):
        name = policy or config.policy.name
        knobs = config.policy.knobs if policy is None or policy == config.policy.name else {}
        policies = [make_policy(name, knobs, seed + at) for at in range(count)]
    else:
        policies = [policy, *(copy.deepcopy(policy) for _ in range(count - 1))]
    started_s = time.perf_counter()
    with _uncollected():
        run = World(trace, config, policies, seed).play(progress)
    run.wall_s = time.perf_counter() - started_s
    return run


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles, which would look through the whole trace time and again: what ends in a run
    refers to nothing that refers to it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
