"""A few engines that prefill in chunks and decode in a batch, seeded arrivals, a driver with or without admission."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.core.admission import Admission, Outcome, Verdict
from headwater.enginetimes import EngineTimes
from headwater.fleet import Ask, Choice, Fleet, Instance, Parts

TIMES = EngineTimes(
    0.002, 1e-4, decode_fixed_s=0.010, decode_request_s=0.0005, decode_kv_s=1e-7, step_tokens=2048, requests_max=256
)
"""10k prompt tokens a second; 10 ms a step."""


def slower(times: EngineTimes, factor: float) -> EngineTimes:
    """An engine all of whose steps take so many times longer."""
    return replace(
        times,
        prefill_fixed_s=times.prefill_fixed_s * factor,
        prefill_token_s=times.prefill_token_s * factor,
        decode_fixed_s=times.decode_fixed_s * factor,
        decode_request_s=times.decode_request_s * factor,
        decode_kv_s=times.decode_kv_s * factor,
    )


@dataclass(slots=True)
class Served:
    """One request's life."""

    ask: Ask
    arrived_s: float
    outputs: int
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    left_tokens: int = 0

    @property
    def good(self) -> bool:
        if self.first_s is None or self.last_s is None:
            return False
        tpot_s = (self.last_s - self.first_s) / max(self.outputs - 1, 1)
        ask = self.ask
        return self.first_s - self.arrived_s <= (ask.ttft_slo_s or 1e9) and tpot_s <= (ask.tpot_slo_s or 1e9)


class Engine:
    """Steps of at most `step_tokens` prompt tokens, first come first served, and a token for all who decode."""

    def __init__(self, instance: Instance, times: EngineTimes) -> None:
        self.instance, self.times = instance, times
        self.prefilling: deque[Served] = deque()
        self.ends: list[tuple[int, int, Served]] = []
        self.steps = self.started = 0
        self.busy = False

    def add(self, it: Served) -> None:
        it.left_tokens = it.ask.tokens
        self.prefilling.append(it)
        self.instance.waiting_requests += 1
        self.instance.waiting_tokens += it.ask.tokens

    def step(self) -> tuple[float, list[Served]]:
        """How long the next step takes, and whose prompts it completes."""
        room, done = self.times.step_tokens, []
        for it in self.prefilling:
            tokens = min(room, it.left_tokens)
            it.left_tokens -= tokens
            room -= tokens
            if it.left_tokens:
                break
            done.append(it)
        for _ in done:
            self.prefilling.popleft()
        computed = self.times.step_tokens - room
        self.instance.waiting_tokens -= computed
        running = self.instance
        took_s = self.times.step_s(computed) + self.times.decode_s(running.running_requests, running.running_tokens)
        return took_s, done

    def stepped(self, done: list[Served]) -> list[Served]:
        """Who ended, now that the step is over."""
        instance = self.instance
        self.steps += 1
        instance.running_tokens += instance.running_requests
        ended = []
        while self.ends and self.ends[0][0] <= self.steps:
            it = heapq.heappop(self.ends)[2]
            instance.running_requests -= 1
            instance.running_tokens -= it.ask.tokens + it.outputs
            ended.append(it)
        for it in done:
            instance.waiting_requests -= 1
            instance.running_requests += 1
            instance.running_tokens += it.ask.tokens + 1
            self.started += 1
            heapq.heappush(self.ends, (self.steps + it.outputs - 1, self.started, it))
        return ended


@dataclass(slots=True)
class Reached:
    """A prompt is at its engine."""

    engine: Engine
    served: Served


def arrivals(
    seed: int,
    rate: float,
    seconds: float,
    lengths: Callable[[random.Random], tuple[int, int]],
    output_tokens: int = 64,
    **asked: Any,
) -> list[Served]:
    """Poisson arrivals; `lengths` draws prompt and answer, which is expected to have `output_tokens`."""
    draw, at = random.Random(seed), 0.0
    found: list[Served] = []
    while (at := at + draw.expovariate(rate)) < seconds:
        tokens, outputs = lengths(draw)
        ask = Ask(f"{seed}-{len(found)}", tokens, (), 64, output_tokens=output_tokens, **asked)
        found.append(Served(ask, at, outputs))
    return found


class World:
    """All of it. `decide` is given what `Admission.decide` is; None: everybody is admitted."""

    def __init__(self, engines: int = 2, factor: float = 1.0, delay_s: float = 0.0) -> None:
        """Steps take `factor` times what is predicted; prompts reach their engine after `delay_s`, which is."""
        capacity_tokens = 400_000
        self.delay_s = delay_s
        self.fleet = Fleet({it: Instance(it, TIMES, capacity_tokens) for it in range(engines)})
        self.engines = [Engine(it, slower(TIMES, factor)) for it in self.fleet.instances.values()]

    def choose(self, ask: Ask) -> Choice:
        """The shortest queue."""
        at = min(self.fleet.instances.values(), key=lambda it: (it.waiting_tokens, it.running_requests))
        queue_s, prefill_s = TIMES.prefill_s(at.waiting_tokens), TIMES.prefill_s(ask.tokens)
        parts = Parts(queue_s=queue_s, fetch_s=self.delay_s, prefill_s=prefill_s)
        tpot_s = TIMES.decode_s(at.running_requests + 1, at.running_tokens + ask.tokens)
        return Choice(at.number, at.number, parts, tpot_s=tpot_s)

    def run(
        self,
        requests: list[Served],
        admission: Admission | None = None,
        decide: Callable[[Ask, Choice, Fleet, float], Verdict] | None = None,
        retries: int = 0,
    ) -> None:
        """Until all have been served or turned away."""
        decide = decide or (admission.decide if admission is not None else None)
        events: list[tuple[float, int, object]] = [(it.arrived_s, at, it) for at, it in enumerate(requests)]
        heapq.heapify(events)
        order = len(events)
        tries: dict[str, int] = {}

        def later(at_s: float, what: object) -> None:
            nonlocal order
            order += 1
            heapq.heappush(events, (at_s, order, what))

        def step(engine: Engine) -> None:
            if engine.busy or not (engine.prefilling or engine.ends):
                return
            took_s, done = engine.step()
            engine.busy = True
            later(self.fleet.now + took_s, (engine, done))

        while events:
            self.fleet.now, _, what = heapq.heappop(events)
            now = self.fleet.now
            if isinstance(what, Reached):
                what.engine.add(what.served)
                step(what.engine)
                continue
            if isinstance(what, tuple):
                engine, done = what
                for it in engine.stepped(done):
                    it.last_s = now
                    if admission is not None:
                        admission.finished(it.ask.request, it.outputs, now)
                for it in done:
                    it.first_s = now
                    if admission is not None:
                        admission.started(it.ask.request, now)
                engine.busy = False
                step(engine)
                continue
            assert isinstance(what, Served)
            ask = what.ask
            choice = self.choose(ask)
            if decide is not None:
                verdict = decide(ask, choice, self.fleet, now - what.arrived_s)
                what.verdicts.append(verdict)
                if verdict.outcome is not Outcome.ADMIT:
                    tries[ask.request] = tries.get(ask.request, 0) + (verdict.outcome is Outcome.REJECT)
                    if verdict.outcome is Outcome.WAIT:
                        later(now + max(verdict.after_s or 0.0, 0.2), what)
                    elif tries[ask.request] <= retries and verdict.after_s is not None:
                        what.arrived_s = now + verdict.after_s
                        later(what.arrived_s, what)
                    continue
                if admission is not None:
                    admission.admitted(ask, choice, verdict, self.fleet)
            what.sent_s = now
            later(now + self.delay_s, Reached(self.engines[choice.prefill], what))


def goodput(requests: list[Served], seconds: float) -> float:
    """Requests a second that met all of their SLOs."""
    return sum(it.good for it in requests) / seconds
