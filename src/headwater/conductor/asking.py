"""What a request asks of the fleet: how long its prompt and its answer are, who asks, and how soon it wants them.

A tenant's own SLOs are the fleet's where it has none. A request may say by `x-headwater-ttft-slo` and
`x-headwater-tpot-slo`, in seconds, that it wants less than that, or anything where nobody else has said it: what is
promised to others may depend on it.

`priority` is vLLM's: lower goes first. Among tenants it only ever lowers what the tenant has; without tenants,
everybody may say how urgent it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from headwater.conductor.flight import Flight
from headwater.conductor.http.exchange import Headers
from headwater.conductor.job import How, Job, Lens, Refused, Sent
from headwater.conductor.nobody import is_serving
from headwater.conductor.parts import Sight
from headwater.core.predictions import Outputs
from headwater.fleet import Ask, Held, Instance
from headwater.fleetfile.model import FleetFile

OUTPUT_TOKENS = 256
BYTES_A_TOKEN = 4
"""Of a body of JSON, most of it English; only to know whether a prompt that was not tokenised is long."""
GUESS_MOST, MEDIA_MOST = 1 << 15, 2048
"""And it is not taken to be longer than so: most of a large body is something else, and with images or sound nearly all
of it."""
GUESS_SHARE = 4
"""A prompt of unknown length that is guessed to fit nowhere is taken for so much of the smallest instance's room."""
PRIORITIES = 7
"""So many steps up or down: admission keeps something back for each class that it has seen."""
TTFT_SLO, TPOT_SLO = b"x-headwater-ttft-slo", b"x-headwater-tpot-slo"
SLO_LENGTH = len(TTFT_SLO)
"""Of both: most headers are told apart by that."""
SLO_LEAST_S, SLO_MOST_S = 1e-3, 3600.0


class Asking:
    """Makes flights of jobs."""

    def __init__(self, file: FleetFile, sight: Sight, outputs: Outputs, *, needs_held: bool) -> None:
        self._slo, self._sight, self._outputs, self._needs_held = file.slo, sight, outputs, needs_held
        self._has_tenants = bool(file.tenants)
        self._serial = 0

    def flight(self, job: Job, sent: Sent, refused: Refused) -> Flight:
        """A job's flight; fills its `lenses`, `held` and `ask`."""
        parsed, tokenised, tenant = job.parsed, job.tokenised, job.tenant
        tokens, job.lenses = tokens_of(job), ()
        if tokenised is not None and tokenised.ids is not None:
            again = tokenised.how is How.KNOWN
            job.lenses = self._sight.lenses(parsed.model, job.salt, tokenised.ids, again=again)
        lenses = job.lenses
        finest = lenses[0] if len(lenses) == 1 else min(lenses, key=_tokens_of, default=NO_LENS)
        output, most = self._outputs.expected(tenant.name, output_kind(job), OUTPUT_TOKENS), parsed.max_tokens
        if most is not None and most < output:
            output = most
        ttft_s, tpot_s = self._slos(job, job.exchange.request.headers)
        priority = tenant.priority
        if parsed.priority:
            priority = self._priority(priority, parsed.priority)
        self._serial += 1
        name = str(self._serial)
        job.ask = Ask(
            name,
            tokens,
            finest.keys,
            finest.tokens,
            max(round(output), 1) * parsed.n,
            parsed.model,
            parsed.session,
            tenant.name,
            priority,
            ttft_s,
            tpot_s,
            tokenised is not None and tokenised.ids is not None,
        )
        if lenses and self._needs_held:
            job.held = self._sight.held(parsed.model, lenses)
        return Flight(name, job, job.ask, sent, refused, job.ask)

    def held(self, job: Job) -> Held:
        """Who holds what of it now."""
        return self._sight.held(job.parsed.model, job.lenses) if job.lenses and self._needs_held else {}

    def _slos(self, job: Job, headers: Headers) -> tuple[float | None, float | None]:
        ttft_s = job.tenant.slo.ttft_s or self._slo.ttft_s
        tpot_s = job.tenant.slo.tpot_s or self._slo.tpot_s
        for name, value in headers:
            if len(name) == SLO_LENGTH:
                if name == TTFT_SLO:
                    ttft_s = _less_urgent(ttft_s, value)
                elif name == TPOT_SLO:
                    tpot_s = _less_urgent(tpot_s, value)
        return ttft_s, tpot_s

    def _priority(self, tenants: int, asked: int) -> int:
        return tenants - min(max(asked, 0 if self._has_tenants else -PRIORITIES), PRIORITIES)


NO_LENS = Lens((), 1)


def _tokens_of(lens: Lens) -> int:
    return lens.tokens


def tokens_of(job: Job) -> int:
    """How long its prompt is, or about how long."""
    tokenised = job.tokenised
    if tokenised is not None and tokenised.ids is not None:
        return len(tokenised.ids) or 1
    guess = len(job.exchange.request.body) // BYTES_A_TOKEN or 1
    return min(guess, MEDIA_MOST if job.parsed.media else GUESS_MOST)


def as_it_fits(ask: Ask, instances: Iterable[Instance], excluded: Collection[int]) -> Ask | None:
    """The same with a guess that everybody has room for; None if it is none, or that keeps nobody from serving it."""
    if ask.counted:
        return None
    least = min((it.capacity_tokens for it in instances if is_serving(it, ask.model, excluded)), default=ask.tokens)
    return replace(ask, tokens=max(least // GUESS_SHARE, 1)) if least < ask.tokens else None


def output_kind(job: Job) -> str:
    """Under which name lengths of answers are remembered, besides the tenant's."""
    return job.parsed.kind + job.parsed.model


def coarsest(lenses: Sequence[Lens]) -> Lens:
    """The lens of nodes, whose chunks are whole numbers of engines' blocks."""
    return max(lenses, key=_tokens_of, default=NO_LENS)


def _less_urgent(own_s: float | None, asked: bytes) -> float | None:
    """What a request asks for, but nothing tighter than its tenant has; nonsense is nothing."""
    try:
        asked_s = float(asked)
    except ValueError:
        return own_s
    if not math.isfinite(asked_s) or not SLO_LEAST_S <= asked_s <= SLO_MOST_S:
        return own_s
    return asked_s if own_s is None else max(own_s, asked_s)
