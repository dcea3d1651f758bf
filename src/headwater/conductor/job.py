"""A request on its way through the Conductor: what was asked, what was decided, what came of it.

Objects that there is one of for every request are msgspec's structures: they are made without a line of Python.

app makes it ──► tokens fills ids ──► brain fills lenses, ask, choice ──► relay counts what comes ──► brain.finished
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from headwater.conductor.http.exchange import Exchange
from headwater.fleet import Ask, Choice, Held
from headwater.fleetfile.model import TenantSpec


class Kind(StrEnum):
    """Which of OpenAI's interfaces."""

    CHAT = "chat"
    COMPLETION = "completion"


class BadRequest(Exception):
    """What a client sent cannot be used: becomes OpenAI's error body. `param` names the field; `message` names what was
    expected, and quotes nothing of a prompt."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


class Parsed(msgspec.Struct):
    """A body that was read and checked."""

    kind: Kind
    known: dict[str, Any] | None
    """All of it, once it was taken apart; see `fields`."""
    model: str
    stream: bool = False
    n: int = 1
    ids: Sequence[int] | None = None
    """A completion's prompt that came as token ids."""
    text: str | None = None
    """A completion's prompt that came as text. Neither: chat, or several prompts in one request."""
    salt: str = ""
    """The client's own `cache_salt`."""
    priority: int = 0
    max_tokens: int | None = None
    session: str = ""
    media: bool = False
    """Images or sound, which are not counted in tokens here."""
    include_usage: bool = False
    wants_ids: bool = False
    """The client itself asked for `return_token_ids`."""
    usual: bool = False
    """It has none but usual fields (`bodies.Usual`): a prompt, and how to sample."""
    body: bytes = b""
    """Of a usual one: what `fields` are read from."""
    digest: bytes = b""
    """Of all that its ids depend on; whoever looks for them makes it."""

    @property
    def fields(self) -> dict[str, Any]:
        """All of it; keys that we do not know are the engine's business."""
        if self.known is None:
            self.known = msgspec.json.decode(self.body)
        return self.known


class How(StrEnum):
    """How a prompt's tokens were found."""

    GIVEN = "given"
    KNOWN = "known"
    """The same text was tokenised lately."""
    LOCAL = "local"
    ENGINE = "engine"
    NONE = "none"
    """They are not known; the request is routed by load. Counted, with a reason."""


class Tokenised(NamedTuple):
    """The prompt's ids, None if they are not known; `reason` says why not, in a word."""

    ids: Sequence[int] | None
    how: How
    reason: str = ""
    seconds: float = 0.0


class Lens(NamedTuple):
    """A request's keys under one (root, tokens per key)."""

    keys: Sequence[bytes]
    tokens: int


class Phase(StrEnum):
    """How far a request has come."""

    ARRIVED = "arrived"
    WAITING = "waiting"
    SENT = "sent"
    ANSWERING = "answering"
    DONE = "done"


# A member is looked up in four times the time that a name of the module takes, and there are several to a request.
WAITING, SENT, ANSWERING, DONE = Phase.WAITING, Phase.SENT, Phase.ANSWERING, Phase.DONE


class Job(msgspec.Struct, eq=False):
    """One request. Times are of the loop's clock (time.monotonic)."""

    id: str
    exchange: Exchange
    tenant: TenantSpec
    parsed: Parsed
    arrived_s: float
    salt: str = ""
    """What engines get as `cache_salt`; '' for none."""
    tokenised: Tokenised | None = None
    lenses: Sequence[Lens] = ()
    held: Held = msgspec.field(default_factory=dict)
    ask: Ask | None = None
    choice: Choice | None = None
    phase: Phase = Phase.ARRIVED
    tries: int = 0
    """How many instances it was sent to."""
    routed_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    answered_tokens: int = 0
    cached_tokens: int | None = None
    """What the engine says that it did not have to compute, if it says so."""
    found_tokens: int | None = None
    """Of a pair: what the decode instance says that it found of what the other has computed."""
    lost: list[str] = msgspec.field(default_factory=list)
    """Instances that it was lost with."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served: an HTTP status, OpenAI's words, and when to come back."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class Target(NamedTuple):
    """Where a job is sent next. `prefill` differs from `decode` in fleets with roles."""

    prefill: int
    decode: int
    lines: bytes
    """Header lines, as they are sent: x-headwater-..., the instance's name and what is reused from where."""


Sent = Callable[[Job, Target], None]
Refused = Callable[[Job, Refusal], None]
