"""One worker's answer to each request: the order of things, and nothing else.

Theory of operation. A request goes through these stages; whoever is at work says what becomes of it.

    head      whose key is it, is there such a path                     401, 404, 405, 503
    body      JSON within limits                                        400, 413
    entry     the tenant's quotas, this worker's limits                 429, 503
    tokens    the prompt's ids, off the loop
    route     the brain says where to, or not                           429, 503
    relay     from there on it is the relay's, to its end

Whose head is refused is refused before a long body is read (`admit`); what came in one piece is looked at once.

Until the relay has it, a client that leaves is noticed here, if the request has to wait anywhere: it is dropped where
it is, and its place in the tenant's count given back.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial

from headwater.conductor import bodies
from headwater.conductor.answers import refuse, refuse_bad, refused
from headwater.conductor.counts import Counts
from headwater.conductor.http.exchange import Exchange, Headers, Reply, Request
from headwater.conductor.job import DONE, SENT, WAITING, BadRequest, Job, Kind, Parsed, Refusal, Target, Tokenised
from headwater.conductor.parts import Brain, Registry, Relay, Tenants, Tokens
from headwater.fleetfile.model import Limits, TenantSpec

log = logging.getLogger(__name__)

ASKED = {"/v1/chat/completions": Kind.CHAT, "/v1/completions": Kind.COMPLETION}
MODELS = "/v1/models"
JSON = [(b"content-type", b"application/json")]

HEALTH = "/health"

TEMPLATES = "--trust-request-chat-template"
"""An engine's flag: it runs the chat templates that come with requests."""

NOBODY = Refusal(401, "invalid_api_key", "no valid API key was given; send Authorization: Bearer KEY")
DRAINING = Refusal(503, "draining", "this Conductor is stopping; try again", 1.0)
BUSY = Refusal(503, "overloaded", "too many requests are in progress; try again", 1.0)
NO_BODY = Refusal(413, "body_too_large", "nothing is to be sent here")
NO_PATH = Refusal(404, "not_found", f"no such path; there are {', '.join([*ASKED, MODELS])}")
USE_GET = Refusal(405, "method_not_allowed", "use GET")
USE_POST = Refusal(405, "method_not_allowed", "use POST")
ALLOW = {USE_GET: [(b"allow", b"GET")], USE_POST: [(b"allow", b"POST")]}


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

    def admit(self, method: str, path: str, headers: Headers) -> Reply | None:
        """See `parts.Handler`."""
        key = next((value for name, value in headers if name == b"authorization"), None)
        refusal = NO_BODY if path == HEALTH else self._objection(method, path, self._tenants.who(key))
        if refusal is None:
            return None
        self._counts.add("refused", refusal.code)
        return refused(refusal, ALLOW.get(refusal))

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later."""
        request = exchange.request
        method, path = request.method, request.path
        tenant = self._tenants.who(request.named.get(b"authorization"))
        refusal = self._objection(method, path, tenant)
        if refusal is not None:
            self._refuse(exchange, refusal)
        elif path == HEALTH:
            exchange.answer(200, JSON, b"{}")
        else:
            assert tenant is not None, "nobody is objected to"
            if path in ASKED:
                self._ask(exchange, tenant)
            else:
                self._models(exchange, tenant)

    def _objection(self, method: str, path: str, tenant: TenantSpec | None) -> Refusal | None:
        """Why a request is not served, as far as its head tells."""
        if path == HEALTH:
            return None
        if tenant is None:
            return NOBODY
        if path in ASKED:
            if method != "POST":
                return USE_POST
            if self.draining:
                return DRAINING
            return BUSY if self._entered >= self._limits.waiting else None
        if path == MODELS or path.startswith(MODELS + "/"):
            return None if method in ("GET", "HEAD") else USE_GET
        return NO_PATH

    # ---- models

    def models(self, tenant: TenantSpec) -> list[str]:
        """The names of what is served to a tenant, in the fleet's order."""
        names = dict.fromkeys(it.model for it in self._registry.instances().values())
        return [name for name in names if not tenant.models or name in tenant.models]

    def _models(self, exchange: Exchange, tenant: TenantSpec) -> None:
        names, wanted = self.models(tenant), exchange.request.path[len(MODELS) + 1 :]
        if not wanted:
            exchange.answer(200, JSON, bodies.models(names))
        elif wanted in names:
            exchange.answer(200, JSON, bodies.model(wanted))
        else:
            self._refuse(exchange, Refusal(404, "model_not_found", "there is no such model here"))

    # ---- requests

    def _ask(self, exchange: Exchange, tenant: TenantSpec) -> None:
        try:
            parsed = self._read(exchange.request, tenant)
        except BadRequest as error:
            self._counts.add("refused", error.code or "bad_request")
            refuse_bad(exchange, error)
            return
        now = self._clock()
        after_s = self._tenants.enter(tenant, now)
        if after_s is not None:
            self._refuse(exchange, Refusal(429, "rate_limit_exceeded", "this key's quota is used up", after_s))
            return
        salt = self._tenants.salt(tenant, parsed.salt)
        job = Job(f"{self._prefix}{next(self._serial):x}", exchange, tenant, parsed, now, salt)
        self._entered += 1
        known = self._tokens.known(parsed, salt)
        if known is not None:
            self._route(job, known)
        else:
            exchange.watch(_Early(self, job))
            self._tokens.find(parsed, partial(self._found, job))

    def _found(self, job: Job, tokenised: Tokenised) -> None:
        """Its tokens are known by now, unless the client has left."""
        if job.phase is not DONE:
            self._route(job, tokenised)

    def _route(self, job: Job, tokenised: Tokenised) -> None:
        job.tokenised, numbers = tokenised, self._counts.numbers
        numbers["prompts", tokenised.how] += 1
        if tokenised.reason:
            numbers["tokens_unknown", tokenised.reason] += 1
        if tokenised.seconds:
            self._counts.observe("tokenising", tokenised.seconds)
        if tokenised.ids is not None and len(tokenised.ids) > self._limits.prompt_tokens:
            most = self._limits.prompt_tokens
            self._end(job)
            refuse_bad(job.exchange, BadRequest(f"the prompt is longer than {most} tokens", "prompt", 400))
            return
        job.phase = WAITING
        self._brain.take(job, self._sent, self._refused)
        if job.phase is WAITING:
            job.exchange.watch(_Early(self, job))

    def _sent(self, job: Job, target: Target) -> None:
        self._entered -= 1
        job.phase = SENT
        self._relay.start(job, target)

    def _refused(self, job: Job, refusal: Refusal) -> None:
        self._end(job)
        self._refuse(job.exchange, refusal)

    def _end(self, job: Job) -> None:
        """It does not come to the relay."""
        self._entered -= 1
        job.phase = DONE
        job.exchange.watch(None)
        self._tenants.leave(job.tenant)

    def left(self, job: Job) -> None:
        """A client has left that waited for tokens or for its turn."""
        waits = job.phase is WAITING
        self._end(job)
        self._counts.add("ended", "left")
        if waits:
            self._brain.drop(job)

    def _read(self, request: Request, tenant: TenantSpec) -> Parsed:
        parsed = bodies.read(request, self._limits)
        if not self._serves(tenant, parsed.model):
            names = self.models(tenant)
            if parsed.model or len(names) != 1:
                there = ", ".join(names) or "none"
                raise BadRequest(f"there is no such model; there are: {there}", "model", 404, "model_not_found")
            parsed.model = names[0]
        if parsed.kind is Kind.CHAT and bodies.has_template(parsed) and not self._takes_templates(parsed.model):
            raise BadRequest(f"expected none: no instance here is started with {TEMPLATES}", "chat_template")
        return parsed

    def _serves(self, tenant: TenantSpec, name: str) -> bool:
        """Whether `models` has this name; nearly always the first instance says so."""
        if tenant.models and name not in tenant.models:
            return False
        for it in self._registry.instances().values():  # noqa: SIM110, any() takes twice as long
            if it.model == name:
                return True
        return False

    def _takes_templates(self, model: str) -> bool:
        """Whether all instances of a model run what clients bring: their operator has to have said so."""
        specs = [self._registry.spec(number) for number in self._registry.instances()]
        return all(TEMPLATES in it.flags for it in specs if it.served_name == model)

    def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        self._counts.add("refused", refusal.code)
        refuse(exchange, refusal, ALLOW.get(refusal))


class _Early:
    """Listens for a client whose request has to wait before the relay has it."""

    __slots__ = ("_app", "_job")

    def __init__(self, app: App, job: Job) -> None:
        self._app, self._job = app, job

    def gone(self) -> None:
        """Nothing was sent yet."""
        self._app.left(self._job)

    def full(self) -> None:
        """Nothing is sent yet."""

    def drained(self) -> None:
        """Nothing is sent yet."""
