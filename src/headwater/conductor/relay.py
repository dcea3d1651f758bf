"""How an answer gets from an instance to a client.

Theory of operation. A Passage is one job's way through it:

    SENT        at an instance, nothing of an answer was sent yet
                  it fails (refused, closed, silent, 5xx, an error with status 200)  -> brain.lost -> WAITING
    ANSWERING   the stream's first token was sent
                  it breaks off: finished already -> its end is sent
                                 can go on elsewhere (`replay`) -> brain.lost -> WAITING
                                 cannot -> an error event and [DONE]
    WAITING     the brain looks for another instance: `_sent` -> SENT or ANSWERING, `_refused` -> the end
    over        brain.finished, tenants.leave: once, whatever came first

The client may leave at any moment: the call is aborted at once, or the brain told that nobody waits any more.

In fleets with roles the request goes to the prefill instance first, for one token, and then whole to the decode
instance, once the brain says that the prompt's KV is in the store, where that finds it; if the first leg fails, the
second recomputes.

Back-pressure: a client that reads slowly pauses its own call only.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headwater.conductor import outbound
from headwater.conductor.answers import LAST_EVENT, error_event, refuse
from headwater.conductor.counts import Counts
from headwater.conductor.http.answers import error_body
from headwater.conductor.http.exchange import Call, Exchange, Headers, Sink, Upstreams
from headwater.conductor.http.parsing import lines_of
from headwater.conductor.job import ANSWERING, DONE, SENT, WAITING, Job, Refusal, Target
from headwater.conductor.legs import Moved, Small, Stream, Usage, Whole, room_of, usage_of
from headwater.conductor.parts import Brain, Registry, Tenants
from headwater.conductor.ranks import HEADER, Ranks
from headwater.conductor.replay import Plan, Story, Translator, Unmovable, body_of, obstacle
from headwater.fleetfile.model import Limits, Times

ROOM_S = 10.0
"""How long an instance may take to say how long its model is."""
_STREAM = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_JSON = b"content-type: application/json\r\n"
_NONE: Headers = []


class Relay:
    """See `parts.Relay`. `migrate`: whether streams of instances that die go on elsewhere."""

    def __init__(
        self,
        upstreams: Upstreams,
        registry: Registry,
        brain: Brain,
        tenants: Tenants,
        counts: Counts,
        limits: Limits,
        times: Times,
        clock: Callable[[], float],
        *,
        migrate: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.upstreams, self.registry, self.brain, self.tenants = upstreams, registry, brain, tenants
        self.counts, self.limits, self.times, self.clock = counts, limits, times, clock
        self.migrate, self.ranks = migrate, ranks
        self.under_way = 0
        """Requests that are here."""
        self._endpoints: dict[int, outbound.Endpoint] = {}

    def __repr__(self) -> str:
        return f"Relay({self.under_way} under way)"

    def endpoint(self, number: int) -> outbound.Endpoint:
        """How to ask an instance; as it is registered now, as numbers are used again."""
        spec, known = self.registry.spec(number), self._endpoints.get(number)
        if known is None or known.spec is not spec:
            known = self._endpoints[number] = outbound.endpoint(spec, self.registry.origin(number))
        return known

    def start(self, job: Job, target: Target) -> None:
        """See `parts.Relay`."""
        self.under_way += 1
        passage = Passage(self, job, job.exchange, self.limits, target)
        job.exchange.watch(passage)
        passage.begin_at(job, target)


class Passage(msgspec.Struct, eq=False):
    """One job's way from instances to its client: the owner of its legs, and the listener of its exchange."""

    _relay: Relay
    job: Job
    exchange: Exchange
    limits: Limits
    _target: Target
    _call: Call | None = None
    _leg: Sink | None = None
    _full: bool = False
    _over: bool = False
    _waits: bool = False
    _is_prefilled: bool = False
    _story: Story | None = None
    _plan: Plan | None = None
    _prompt_tokens: int = 0
    _rank: tuple[int, int] | None = None
    """The instance and the rank that it was sent to by name."""

    # ---- to instances

    def begin_at(self, job: Job, target: Target) -> None:
        """Send it there; also what the brain calls with another target."""
        if self._over:
            return
        self._waits = False
        self._target = target
        if self._plan is not None:
            self._go_on(self._plan)
            return
        job.phase = SENT
        self._is_prefilled = False
        if target.prefill != target.decode:
            self._prefill(target.prefill)
        else:
            self._ask()

    def _prefill(self, number: int) -> None:
        to, path = self._relay.endpoint(number), outbound.PATHS[self.job.parsed.kind]
        body = outbound.prefill_body(to, self.job)
        first_s = min(self._relay.brain.patience_s(self.job), self._relay.times.first_s)
        self._place(to, number, "POST", path, body, Small(self._prefilled), first_s)

    def _prefilled(self, status: int, body: bytes) -> None:
        leg, self._leg, self._call = self._leg, None, None
        why = ""
        if status != 200 or (usage := usage_of(body)) is None:
            why = leg.why if isinstance(leg, Small) and leg.why else "status" if status != 200 else "error"
            self._relay.counts.add("prefill_lost", why)
        else:
            self._is_prefilled = True
            self._count_cached(usage)
        self._relay.brain.prefilled(self.job, why, self._ask)

    def _ask(self) -> None:
        """The request itself."""
        if self._over:
            return
        job, number = self.job, self._target.decode
        to = self._relay.endpoint(number)
        leg: Sink
        if job.parsed.stream:
            why = obstacle(job.parsed) if self._relay.migrate else "off"
            body = outbound.body_to(to, job, asks_ids=not why)
            leg = Stream(self, why)
        else:
            body = outbound.body_to(to, job, asks_ids=False)
            leg = Whole(self)
        self._place(to, number, "POST", outbound.PATHS[job.parsed.kind], body, leg)

    def _go_on(self, plan: Plan) -> None:
        """The rest of a stream; where nobody said how long it may get, the instance is asked for its model's length."""
        if plan.answer_tokens is not None:
            self._move(plan, None)
            return
        number = self._target.decode
        self._place(self._relay.endpoint(number), number, "GET", "/v1/models", b"", Small(self._has_room), ROOM_S)

    def _has_room(self, status: int, body: bytes) -> None:
        assert self._plan is not None
        if status == 200:
            self._move(self._plan, room_of(body))
        else:
            self.cut("status" if status else "closed")

    def _move(self, plan: Plan, room_tokens: int | None) -> None:
        assert self._story is not None
        try:
            fields = body_of(plan, self.job.parsed, room_tokens)
        except Unmovable as error:
            self.stuck(error.reason)
            return
        number = self._target.decode
        to = self._relay.endpoint(number)
        body = outbound.replay_body(to, self.job, fields)
        leg = Moved(self, self._story, Translator(self._story, plan))
        self._relay.counts.add("moved")
        self._place(to, number, "POST", "/v1/completions", body, leg)

    def _place(
        self, to: outbound.Endpoint, number: int, method: str, path: str, body: bytes, leg: Sink,
        first_s: float | None = None,
    ) -> None:  # fmt: skip
        relay = self._relay
        lines = outbound.lines_to(to, self.job)
        if to.spec.ranks > 1 and relay.ranks is not None and method == "POST":
            self._leave_rank()
            rank = relay.ranks.take(number, self.job.lenses)
            if rank is not None:
                self._rank = number, rank
                lines += lines_of([(HEADER, b"%d" % rank)])
        self._leg = leg
        most_s = relay.times.first_s if first_s is None else first_s
        call = relay.upstreams.call(to.origin, method, path, _NONE, body, leg, first_s=most_s, lines=lines)
        if self._leg is leg:
            self._call = call
            if self._full:
                call.pause()

    # ---- what legs tell

    def begin(self) -> None:
        """See `Owner`."""
        job = self.job
        job.first_s = self._relay.clock()
        job.phase = ANSWERING
        self.exchange.start(200, _NONE, _STREAM + self._ours())
        if not self._over:
            self._relay.brain.started(job)

    def progressed(self) -> None:
        """See `Owner`."""
        if not self._over:
            self._relay.brain.progressed(self.job)

    def resumed(self) -> None:
        """See `Owner`."""
        if not self._over:
            self._relay.brain.started(self.job)

    def counted(self, usage: Usage) -> None:
        """See `Owner`."""
        self._prompt_tokens = usage.prompt_tokens
        self.job.answered_tokens = usage.completion_tokens or 0
        if not self._is_prefilled:
            self._count_cached(usage)
        elif usage.prompt_tokens_details is not None:
            self.job.found_tokens = usage.prompt_tokens_details.cached_tokens

    def _count_cached(self, usage: Usage) -> None:
        if usage.prompt_tokens_details is not None:
            self.job.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """See `Owner`."""
        self.exchange.answer(status, _NONE, body, lines + self._ours())
        self._end(whole=status == 200, how="whole" if status == 200 else "client_error")

    def finished(self) -> None:
        """See `Owner`. The leg stays to hear the end of its body, so that the connection can be used again."""
        self.exchange.end()
        self._end(whole=True, how="whole")

    def failed(self, why: str) -> None:
        """See `Owner`."""
        self._drop_call()
        job, relay = self.job, self._relay
        number = self._target.decode
        relay.counts.add("lost", why)
        job.lost.append(relay.registry.spec(number).name)
        job.phase = WAITING
        job.answered_tokens = len(self._story.ids) if self._story is not None else 0
        self._waits = True
        relay.brain.lost(job, number, why, self.begin_at, self._refused)

    def cut(self, why: str) -> None:
        """See `Owner`."""
        leg = self._leg
        if not self.exchange.started:
            self.failed(why)
            return
        self._drop_call()
        try:
            if isinstance(leg, Stream):
                if leg.is_said():
                    self._close(LAST_EVENT)
                    return
                self._story = leg.story()
            assert self._story is not None, "a stream that goes on has a story"
            if self._story.finish:
                self._close(self._story.closing())
                return
            known = self.job.tokenised.ids if self.job.tokenised is not None else None
            self._plan = self._story.plan(known)
        except Unmovable as error:
            self._relay.counts.add("lost", why)
            self.stuck(error.reason)
            return
        self.failed(why)

    def stuck(self, reason: str) -> None:
        """See `Owner`."""
        self._drop_call()
        self._relay.counts.add("unmoved", reason)
        message = "the instance that wrote this answer was lost, and no other could go on with it"
        self.exchange.send(error_event(502, message, "stream_lost"))
        self.exchange.end()
        self._end(whole=False, how="lost")

    def too_long(self) -> None:
        """See `Owner`."""
        self._drop_call()
        if self.exchange.started:
            self.exchange.send(error_event(502, "the instance sent an event beyond the limit", "answer_too_long"))
            self.exchange.end()
        else:
            body = error_body(502, "the instance's answer is beyond the limit", "answer_too_long")
            self.exchange.answer(502, _NONE, body, _JSON + self._ours())
        self._end(whole=False, how="too_long")

    # ---- what the brain tells

    def _refused(self, job: Job, refusal: Refusal) -> None:
        if self._over:
            return
        self._waits = False
        if self.exchange.started:
            self.stuck("refused")
            return
        refuse(self.exchange, refusal, lines=self._ours())
        self._end(whole=False, how="refused")

    # ---- Listener

    def gone(self) -> None:
        """See `Listener`."""
        if self._over:
            return
        self._drop_call()
        if self._waits:
            self._relay.brain.drop(self.job)
        self._end(whole=False, how="left")

    def full(self) -> None:
        """See `Listener`."""
        self._full = True
        if self._call is not None:
            self._call.pause()

    def drained(self) -> None:
        """See `Listener`."""
        self._full = False
        if self._call is not None:
            self._call.resume()

    # ---- inside

    def _ours(self) -> bytes:
        return outbound.named(self._target.lines, self.job)

    def _leave_rank(self) -> None:
        if self._rank is not None and self._relay.ranks is not None:
            self._relay.ranks.ended(*self._rank)
            self._rank = None

    def _drop_call(self) -> None:
        self._leave_rank()
        call, self._call, self._leg = self._call, None, None
        if call is not None:
            call.abort()

    def _close(self, rest: bytes) -> None:
        self.exchange.send(rest)
        self.finished()

    def _end(self, *, whole: bool, how: str) -> None:
        if self._over:
            return
        self._over = True
        # Of us, the call and its leg, none holds the next one any more: nothing is left for the garbage collector.
        call, self._call, self._leg = self._call, None, None
        if self._full and call is not None:
            call.resume()
        if self._rank is not None:
            self._leave_rank()
        job, relay = self.job, self._relay
        relay.under_way -= 1
        job.phase = DONE
        job.ended_s = relay.clock()
        if not self.exchange.closed:
            self.exchange.watch(None)
        prompt = self._prompt_tokens
        if not prompt and job.tokenised is not None and job.tokenised.ids is not None:
            prompt = len(job.tokenised.ids)
        relay.tenants.used(job.tenant, prompt + job.answered_tokens, job.ended_s)
        relay.tenants.leave(job.tenant)
        relay.counts.numbers["ended", how] += 1
        relay.brain.finished(job, whole=whole)
