"""A request's way from its arrival to its end, and what is counted meanwhile.

    arrive ─► Conductor ─► prepare, send ─► fetch ─► Engine ─► first token ─► last token ─► end
                                                       └► hand over to another Engine ─┘

What is known of loads is changed when news of it come (`_hear...`), which may be later than it happens. Nothing here
tells anybody how long an answer will be: that is the engine's alone, until the answer has ended.
"""

from __future__ import annotations

from headwater.core.predictions import Outputs
from headwater.fleet import Ask, Choice
from headwater.sim.fleet.account import Account
from headwater.sim.fleet.clock import Clock
from headwater.sim.fleet.engine import Engine, Job
from headwater.sim.fleet.flight import Flight, Router
from headwater.sim.fleet.results import Ending
from headwater.sim.fleet.saving import Saving
from headwater.sim.fleet.stage import Stage
from headwater.types import Tier

OUTPUT_TOKENS = 256
"""How long an answer is expected to be before any has ended."""
EXPECTED_WEIGHT = 50
"""For so many answers that counts."""


class Flights:
    """All requests on their way, by number."""

    def __init__(self, stage: Stage, clock: Clock, account: Account, saving: Saving) -> None:
        self._stage, self._clock, self._account, self._saving = stage, clock, account, saving
        self.routers: list[Router] = []
        """Requests go to them in turn."""
        self.flying: dict[int, Flight] = {}
        self.touched: dict[int, Engine] = {}
        """Engines that were given something at this instant."""
        config = stage.config
        self._load, self._lag_s, self._model = config.load, config.signals.load_lag_s, config.model
        self._slo = config.slo.ttft_s, config.slo.tpot_s
        self._live, self._engines = stage.live, stage.engines
        self._rows, self._names = stage.prepared.trace.requests, stage.prepared.names
        self._prompts, self._unit = stage.tree.prompts, stage.unit_tokens
        self._saves = bool(stage.tiers.stores)
        self._outputs = Outputs() if stage.prepared.named else None
        """Answers are as long as the tenant's and the kind's usually are; else as all are."""
        self._output_sum, self._output_count = OUTPUT_TOKENS * EXPECTED_WEIGHT, EXPECTED_WEIGHT

    def __repr__(self) -> str:
        return f"<Flights: {len(self.flying)} on their way, {self._account.over} ended>"

    # ---- there

    def arrive(self, number: int) -> None:
        """A request of the trace arrives."""
        row = self._rows[number]
        ttft_s, tpot_s = self._slo
        if self._outputs is None:
            output = int(self._output_sum / self._output_count)
        else:
            output = int(self._outputs.expected(row.tenant, row.kind, OUTPUT_TOKENS))
        ask = Ask(
            self._names[number],
            row.input_tokens,
            self._prompts[number],
            self._unit,
            output,
            self._model,
            row.session,
            row.tenant,
            row.priority,
            ttft_s,
            tpot_s,
        )
        router = self.routers[number % len(self.routers)]
        flight = self.flying[number] = Flight(number, ask, router, row.arrival_s)
        router.take(flight)

    def prepare(self, flight: Flight, choice: Choice, waited_s: float) -> Job:
        """It will go where the choice says; the loads know it already."""
        number = flight.number
        target = choice.prefill
        size = self._engines[target].block_tokens
        row = self._rows[number]
        pair = choice.decode != target
        tokens = row.input_tokens
        path = self._stage.paths[size][number]
        job = Job(number, tokens, 1 if pair else row.output_tokens, path, tokens // size, flight)
        if flight.generated:
            job.known += flight.generated
            if not pair:
                job.generated = flight.generated
        flight.choice, flight.job = choice, job
        uncached = tokens - choice.cached_tokens - choice.fetched_tokens
        if uncached < 0:
            uncached = 0
        flight.owed = uncached
        live = self._live[target]
        live.waiting_requests += 1
        live.waiting_tokens += uncached
        account = self._account
        account.changed.add(target)
        if account.instance[number] < 0:
            queue_s, fetch_s, prefill_s, _, handoff_s = choice.parts
            account.predicted[number] = queue_s + fetch_s + prefill_s + handoff_s + waited_s
        account.instance[number] = target
        return job

    def send(self, flight: Flight, job: Job, choice: Choice) -> None:
        """It goes there, once what is fetched for it has come."""
        if choice.source is not None:
            ready_s = self._saving.fetch(job, choice)
            if ready_s > self._clock.now:
                self._clock.at(ready_s, self._enqueue, flight, job, choice.prefill)
                return
        self._enqueue(flight, job, choice.prefill)

    def _enqueue(self, flight: Flight, job: Job, target: int) -> None:
        if flight.job is job:
            engine = self._engines[target]
            engine.waiting.append(job)
            self.touched[target] = engine

    # ---- on the way

    def progress(self, job: Job) -> None:
        """A part of a prompt has been computed: so much less waits."""
        flight: Flight = job.owner
        choice = flight.choice
        if flight.job is not job or choice is None:
            return
        rest = job.known - job.computed
        if rest < flight.owed:
            self._live[choice.prefill].waiting_tokens -= flight.owed - rest
            flight.owed = rest
            self._account.changed.add(choice.prefill)
            if (book := flight.router.book) is not None:
                book.progressed(flight.ask.request, job.computed - job.found, 0, self._clock.now)

    def first(self, job: Job) -> None:
        """A prompt is complete: its first token, unless that is the decode instance's to give."""
        flight: Flight = job.owner
        choice = flight.choice
        if flight.job is not job or choice is None:
            return
        if not job.given:
            self._account.device[job.number] = job.found
            if flight.retries:  # where it was lost it may have been counted already
                self._account.fetched_nothing(job.number)
            if job.fetched:
                self._count_fetched(job, choice)
            if self._saves:
                self._saving.computed(job, choice)
            if choice.prefill != choice.decode:
                return
        number, now, account = job.number, self._clock.now, self._account
        if account.first[number] != account.first[number]:  # it is not a number yet
            account.first[number] = now
            account.ttft[number] = now - flight.arrival_s / self._load
        if self._lag_s:
            self._clock.at(now + self._lag_s, self._hear_first, flight, job)
        else:
            self._hear_first(flight, job)

    def _hear_first(self, flight: Flight, job: Job) -> None:
        """Whoever counts loads hears of it."""
        choice = flight.choice
        if flight.job is not job or choice is None or flight.known:
            return
        live = self._live[choice.prefill]
        live.waiting_requests -= 1
        live.waiting_tokens -= flight.owed
        flight.owed = 0
        tokens = flight.known = flight.ask.tokens
        self._account.changed.add(choice.prefill)
        if choice.decode != choice.prefill:
            live = self._live[choice.decode]
            self._account.changed.add(choice.decode)
        live.running_requests += 1
        live.running_tokens += tokens
        flight.router.hear_first(flight)

    def _count_fetched(self, job: Job, choice: Choice) -> None:
        """Where the prompt's fetched tokens came from."""
        assert choice.source is not None
        tier, place = choice.source
        account, size = self._account, self._engines[choice.prefill].block_tokens
        if tier is Tier.REMOTE:
            column = account.remote
        elif place != self._stage.nodes[choice.prefill]:
            column = account.peer
        else:
            column = account.host if tier is Tier.HOST else account.disk
        column[job.number] = job.fetched * size - job.found

    def last(self, job: Job) -> None:
        """An engine has given a request's last token, or its prompt's KV to be handed off."""
        flight: Flight = job.owner
        choice = flight.choice
        if flight.job is not job or choice is None:
            return
        number, now = job.number, self._clock.now
        if choice.prefill != choice.decode and not job.given:
            nodes = self._stage.nodes
            size_bytes = job.tokens * self._stage.config.kv_bytes_per_token
            ready_s = self._stage.tiers.hand_off(nodes[choice.prefill], nodes[choice.decode], size_bytes, now)
            self._clock.at(ready_s, self._hand_over, flight, job)
            return
        row, account = self._rows[number], self._account
        tokens = row.output_tokens
        account.done[number] = now
        if job.output > 1:
            account.tpot[number] = (now - account.first[number]) / (job.output - 1)
        if self._outputs is not None:
            self._outputs.observe(row.tenant, row.kind, tokens)
        self._output_sum += tokens
        self._output_count += 1
        del self.flying[number]
        account.end(number, Ending.SERVED)
        if self._lag_s:
            self._clock.at(now + self._lag_s, self.hear_end, flight, tokens)
        else:
            self.hear_end(flight, tokens)

    def _hand_over(self, flight: Flight, job: Job) -> None:
        """The prompt's KV is at the decode instance."""
        if flight.job is not job or flight.choice is None:
            return
        number, target = flight.number, flight.choice.decode
        row = self._rows[number]
        size = self._engines[target].block_tokens
        path = self._stage.paths[size][number]
        given = Job(number, row.input_tokens, row.output_tokens, path, row.input_tokens // size, flight)
        given.given = True
        given.generated = flight.generated
        given.known += flight.generated
        flight.job = given
        self._enqueue(flight, given, target)

    # ---- over

    def hear_end(self, flight: Flight, tokens: int | None) -> None:
        """Whoever counts loads hears that a request ended, or was lost; None: without all its tokens."""
        choice = flight.choice
        if choice is None:
            return
        if flight.known:
            live = self._live[choice.decode]
            self._account.changed.add(choice.decode)
            live.running_requests -= 1
            live.running_tokens = max(live.running_tokens - flight.known, 0)
            flight.known = 0
        else:
            live = self._live[choice.prefill]
            self._account.changed.add(choice.prefill)
            live.waiting_requests -= 1
            live.waiting_tokens -= flight.owed
            flight.owed = 0
        flight.router.hear_end(flight, choice, tokens)
        flight.choice = flight.job = None

    def end(self, flight: Flight, ending: Ending) -> None:
        """It was not served."""
        del self.flying[flight.number]
        self._account.end(flight.number, ending)
        self.hear_end(flight, None)

    def fail(self, flight: Flight) -> None:
        """It will never have all its tokens."""
        flight.job = None
        self.end(flight, Ending.FAILED)

    def lost_with(self, instance: int) -> list[Flight]:
        """Whose KV is, or would have been, in an instance that died."""
        lost = []
        for flight in self.flying.values():
            choice = flight.choice
            if choice is None or instance not in (choice.prefill, choice.decode):
                continue
            if not flight.known or choice.decode == instance:
                lost.append(flight)
        return lost
