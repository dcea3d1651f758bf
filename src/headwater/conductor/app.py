"""One worker's answer to each request: the order of things, and nothing else.

Theory of operation. A request goes through these stages; whoever is at work says what becomes of it.

    head      whose key is it, is there such a path                     401, 403, 404, 405
    body      JSON within limits                                        400, 413
    entry     the tenant's quotas, this worker's limits                 429, 503
    tokens    the prompt's ids, off the loop
    route     the brain says where to, or not                           429, 503
    relay     from there on it is the relay's, to its end

Until the relay has it, a client that leaves is noticed here: whatever the stage, the request is dropped where it is,
and its place in the tenant's count given back.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from headwater.conductor import bodies
from headwater.conductor.answers import refuse, refuse_bad
from headwater.conductor.counts import Counts
from headwater.conductor.http.exchange import Exchange, Request
from headwater.conductor.job import BadRequest, Job, Kind, Parsed, Phase, Refusal, Target, Tokenised
from headwater.conductor.parts import Brain, Registry, Relay, Tenants, Tokens
from headwater.fleetfile.model import Limits, TenantSpec

log = logging.getLogger(__name__)

ASKED = {"/v1/chat/completions": Kind.CHAT, "/v1/completions": Kind.COMPLETION}
MODELS = "/v1/models"
JSON = [(b"content-type", b"application/json")]

NOBODY = Refusal(401, "invalid_api_key", "no valid API key was given; send Authorization: Bearer KEY")
DRAINING = Refusal(503, "draining", "this Conductor is stopping; try again", 1.0)
BUSY = Refusal(503, "overloaded", "too many requests are in progress; try again", 1.0)


class App:
    """The handler of a worker's HttpServer. `name` makes its request ids unique in the fleet."""

    def __init__(
        self,
        name: str,
        tenants: Tenants,
        tokens: Tokens,
        brain: Brain,
        relay: Relay,
        registry: Registry,
        counts: Counts,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.draining = False
        self._prefix, self._serial = f"hw-{name}-", itertools.count(1)
        self._tenants, self._tokens, self._brain, self._relay = tenants, tokens, brain, relay
        self._registry, self._counts, self._limits, self._clock = registry, counts, limits, clock
        self._entered = 0
        """Requests that are not the relay's yet."""

    def __repr__(self) -> str:
        return f"App({self._prefix}, {self._entered} on their way to the relay)"

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later."""
        request = exchange.request
        tenant = self._tenants.who(request.header(b"authorization"))
        if request.path == "/health":
            exchange.answer(200, JSON, b"{}")
        elif tenant is None:
            self._refuse(exchange, NOBODY)
        elif request.path in ASKED:
            self._ask(exchange, tenant)
        elif request.path == MODELS or request.path.startswith(MODELS + "/"):
            self._models(exchange, tenant)
        else:
            known = ", ".join([*ASKED, MODELS])
            self._refuse(exchange, Refusal(404, "not_found", f"no such path; there are {known}"))

    # ---- models

    def models(self, tenant: TenantSpec) -> list[str]:
        """The names of what is served to a tenant, in the fleet's order."""
        names = dict.fromkeys(it.model for it in self._registry.instances().values())
        return [name for name in names if not tenant.models or name in tenant.models]

    def _models(self, exchange: Exchange, tenant: TenantSpec) -> None:
        if exchange.request.method not in ("GET", "HEAD"):
            self._wrong_method(exchange, "GET")
            return
        names, wanted = self.models(tenant), exchange.request.path[len(MODELS) + 1 :]
        if not wanted:
            exchange.answer(200, JSON, bodies.models(names))
        elif wanted in names:
            exchange.answer(200, JSON, bodies.model(wanted))
        else:
            self._refuse(exchange, Refusal(404, "model_not_found", "there is no such model here"))

    def _wrong_method(self, exchange: Exchange, allowed: str) -> None:
        refusal = Refusal(405, "method_not_allowed", f"use {allowed}")
        self._refuse(exchange, refusal, [(b"allow", allowed.encode())])

    # ---- requests

    def _ask(self, exchange: Exchange, tenant: TenantSpec) -> None:
        if exchange.request.method != "POST":
            self._wrong_method(exchange, "POST")
            return
        if self.draining:
            self._refuse(exchange, DRAINING)
            return
        try:
            parsed = self._read(exchange.request, tenant)
        except BadRequest as error:
            self._counts.add("refused", error.code or "bad_request")
            refuse_bad(exchange, error)
            return
        if self._entered >= self._limits.waiting:
            self._refuse(exchange, BUSY)
            return
        now = self._clock()
        after_s = self._tenants.enter(tenant, now)
        if after_s is not None:
            self._refuse(exchange, Refusal(429, "rate_limit_exceeded", "this key's quota is used up", after_s))
            return
        job = Job(f"{self._prefix}{next(self._serial):x}", exchange, tenant, parsed, now)
        job.salt = self._tenants.salt(tenant, parsed.salt)
        _Entry(self, job).begin()

    def _read(self, request: Request, tenant: TenantSpec) -> Parsed:
        parsed = bodies.read(request, self._limits)
        names = self.models(tenant)
        if not parsed.model and len(names) == 1:
            parsed.model = names[0]
        if parsed.model not in names:
            there = ", ".join(names) or "none"
            raise BadRequest(f"there is no such model; there are: {there}", "model", 404, "model_not_found")
        return parsed

    def _refuse(self, exchange: Exchange, refusal: Refusal, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self._counts.add("refused", refusal.code)
        refuse(exchange, refusal, headers or [])


class _Entry:
    """A request until the relay has it; the client's leaving ends it."""

    __slots__ = ("_app", "_ended", "_job")

    def __init__(self, app: App, job: Job) -> None:
        self._app, self._job, self._ended = app, job, False

    def begin(self) -> None:
        """Ask for its tokens."""
        self._app._entered += 1
        self._job.exchange.watch(self)
        if not self._ended:
            self._app._tokens.start(self._job.parsed, self._tokenised, self._job.salt)

    def _tokenised(self, tokenised: Tokenised) -> None:
        if self._ended:
            return
        app, job = self._app, self._job
        job.tokenised = tokenised
        app._counts.add("prompts", tokenised.how)
        if tokenised.reason:
            app._counts.add("tokens_unknown", tokenised.reason)
        if tokenised.seconds:
            app._counts.observe("tokenising", tokenised.seconds)
        if tokenised.ids is not None and len(tokenised.ids) > app._limits.prompt_tokens:
            most = app._limits.prompt_tokens
            self._end()
            refuse_bad(job.exchange, BadRequest(f"the prompt is longer than {most} tokens", "prompt", 400))
            return
        job.phase = Phase.WAITING
        app._brain.take(job, self._sent, self._refused)

    def _sent(self, target: Target) -> None:
        if self._ended:
            return
        self._leave_entry()
        self._app._relay.start(self._job, target)

    def _refused(self, refusal: Refusal) -> None:
        if not self._ended:
            self._end()
            self._app._refuse(self._job.exchange, refusal)

    def _leave_entry(self) -> None:
        self._ended = True
        self._app._entered -= 1

    def _end(self) -> None:
        self._leave_entry()
        self._job.phase = Phase.DONE
        self._job.exchange.watch(None)
        self._app._tenants.leave(self._job.tenant)

    # ---- Listener

    def gone(self) -> None:
        """The client has left before anything was sent."""
        if self._ended:
            return
        waits = self._job.phase is Phase.WAITING
        self._end()
        self._app._counts.add("ended", "left")
        if waits:
            self._app._brain.drop(self._job)

    def full(self) -> None:
        """Nothing is sent yet."""

    def drained(self) -> None:
        """Nothing is sent yet."""
