"""What the parts of a worker offer each other; one implementation each, and fakes in tests. All in the worker's loop.

app      Handler.handle(exchange) for each request: bodies.read -> tenants.enter -> tokens.known -> brain.take
brain    take(job, sent, refused) calls one of the two, at once or later; then relay.start(job, target)
relay    tells the brain: started, progressed, lost (-> another target), finished, always exactly once at the end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headwater.conductor.http.exchange import Exchange, Headers, Origin, Reply
from headwater.conductor.job import Job, Lens, Parsed, Refused, Sent, Target, Tokenised
from headwater.fleet import Held, Instance
from headwater.fleetfile.model import InstanceSpec, TenantSpec


class Handler(Protocol):
    """Who answers requests."""

    def admit(self, method: str, path: str, headers: Headers) -> Reply | None:
        """Before a body is read that is not here with its head: what the request is refused with; None to read it.
        `handle` checks all of it again."""

    def handle(self, exchange: Exchange) -> None:
        """Answer this one, now or later."""


class Tenants(Protocol):
    """Who asks, and whether they may now."""

    def who(self, authorization: bytes | None) -> TenantSpec | None:
        """Whose key this is; None if nobody's. In constant time for keys of the same length."""

    def enter(self, tenant: TenantSpec, now: float) -> float | None:
        """One more request in progress; None if it is taken, else seconds until it may be tried again."""

    def used(self, tenant: TenantSpec, tokens: int, now: float) -> None:
        """Tokens of its prompt and answer, once they are known."""

    def leave(self, tenant: TenantSpec) -> None:
        """One request less in progress."""

    def salt(self, tenant: TenantSpec, salt: str) -> str:
        """The cache_salt that engines get: '' only where there is one tenant and no salt of the client's."""


class Tokens(Protocol):
    """Prompts in token ids."""

    def known(self, parsed: Parsed, salt: str = "") -> Tokenised | None:
        """A prompt's ids where they are known, or nobody can find them; None: `find` them. `salt` keeps apart who must
        not be answered faster for what another has sent."""

    def find(self, parsed: Parsed, done: Callable[[Tokenised], None]) -> None:
        """Find a prompt's ids off the loop that were just not known; `done` is called in the loop, mostly later."""


class Registry(Protocol):
    """The instances that there are: from the fleet file, and those that registered since. Numbers are small and stay
    with an instance as long as it is there."""

    def spec(self, number: int) -> InstanceSpec:
        """What was said of it."""

    def origin(self, number: int) -> Origin:
        """Where it listens."""

    def instances(self) -> Mapping[int, Instance]:
        """What policies read."""

    def by_name(self, name: str) -> int | None:
        """Its number; None if there is none of that name."""


class Sight(Protocol):
    """Who holds what."""

    def lenses(self, model: str, salt: str, ids: Sequence[int], *, again: bool = False) -> Sequence[Lens]:
        """A prompt's keys, once for each way of counting them that matters for this model. `again`: these ids are
        another request's too, by the same object, and may be more requests'."""

    def held(self, model: str, lenses: Sequence[Lens]) -> Held:
        """How many leading tokens each place holds."""

    def expect(self, number: int, lenses: Sequence[Lens]) -> None:
        """A prompt was sent there: taken to be held, until events say otherwise."""

    def unexpect(self, number: int, lenses: Sequence[Lens]) -> None:
        """It was lost there: what no event has confirmed is not held."""

    def stored(self, number: int, model: str, lenses: Sequence[Lens]) -> bool | None:
        """Whether other instances find a prompt's whole chunks where this one's node has put them; None if nobody
        would tell us."""

    def left(self, number: int) -> None:
        """An instance is gone."""

    def state(self) -> dict[str, Any]:
        """For `headwater fleet`: sources of events with their gaps and resyncs, keys, hottest prefixes."""


class Brain(Protocol):
    """Where requests go."""

    def take(self, job: Job, sent: Sent, refused: Refused) -> None:
        """Route a request: one of the two is called, at once or later, unless it is dropped before."""

    def drop(self, job: Job) -> None:
        """A request that waits is not wanted any more: none of its two is called."""

    def started(self, job: Job) -> None:
        """Its first token came."""

    def prefilled(self, job: Job, why: str, then: Callable[[], None]) -> None:
        """The prefill instance of a pair is done with it, or has failed it, and why. `then` is called when the decode
        instance may be asked, at once or later, unless the request ends before."""

    def patience_s(self, job: Job) -> float:
        """How long the prefill instance of a pair, to which it is sent now, may take."""

    def progressed(self, job: Job) -> None:
        """More of its answer came: `job.answered_tokens` in all."""

    def lost(self, job: Job, number: int, why: str, sent: Sent, refused: Refused) -> None:
        """The instance failed it: route it anew, to another one if there is one."""

    def finished(self, job: Job, *, whole: bool) -> None:
        """It ended; `whole` if it was answered to its end."""

    def explained(self, request: str) -> dict[str, Any] | None:
        """The candidates with their seconds, the choice, and what it took; None if it is not remembered."""

    def state(self) -> dict[str, Any]:
        """For `headwater fleet`: instances with role, load, rates, hit rates, health; who waits."""


class Relay(Protocol):
    """How an answer gets from an instance to a client."""

    def start(self, job: Job, target: Target) -> None:
        """Send a request and pass its answer on, to its end."""
