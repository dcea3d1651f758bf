"""Whether to take a request now: by what is predicted for it, and for those that were taken before.

    admission = Admission(Predictions())
    choice = policy.choose(ask, held, fleet)
    verdict = admission.decide(ask, choice, fleet, waited_s=0.0)
    match verdict.outcome:
        case Outcome.ADMIT:  admission.admitted(ask, choice, verdict, fleet)   # after policy.routed
        case Outcome.WAIT:   ...                     # in Shares; decide anew, with a new choice, after verdict.after_s
        case Outcome.REJECT: ...                     # 429, Retry-After: verdict.after_s; None: it never fits
    admission.started(ask.request, now)              # its first token
    admission.finished(ask.request, tokens, now)     # its last; tokens=None: it was cancelled or lost

Theory of operation. An instance is a line for prefill, and a crowd that decodes. A request is taken if

    ttft     waited + margin * (queue + max(own, room)) <= its SLO                own: fetch, prefill, hand-off
    tpot     margin * (step(then) + spread) <= its SLO
    others   margin * (step(then) + spread + prefill / answer) <= the least SLO of those who decode there
    full     the KV of those who decode then, and its own, fits
    classes  all of this, with two requests of any higher class coming after it      priorities are strict

`then` is when it starts to decode (`crowd`): of those who decode now a part will be gone, and those in prefill decode.
That is Mooncake's early rejection on predicted decode load (arXiv 2407.00079). Rejecting by the present load lets a
crowd in while the last one is in prefill, and nobody while it decodes, for ever up and down. Here, who is admitted
counts from that moment on, and there is no delay for a wave to live in.

`room` is for long prompts, which would be starved otherwise (`owed`); a few of them may also push others over.

`margin` follows the error of the predictions (`predictions`). Whatever it says, an idle instance takes what would fit
without: it costs nobody anything, and tells whether the margin is right. An instance whose speed is only guessed takes
a few whatever the guess says (`trials`), and of a prompt whose length is a guess only the queue is judged.

What many have in common counts once: who computes nearly nothing, because others there compute it before, waits for
their steps, and not for one step each; and the KV of those who begin alike is there once (`common`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from headwater.core.crowd import Crowd, Then
from headwater.core.owed import LONG_SHARE, Owed
from headwater.core.predictions import Predictions, Quantity
from headwater.core.routing import batched_s, is_light
from headwater.core.trials import AGAIN_S, guesses_decode, guesses_prefill, has_place, is_doubtful
from headwater.fleet import Ask, Choice, Fleet, Instance

TTFT, TPOT = Quantity.TTFT, Quantity.TPOT
AFTER_MOST_S = 60.0
"""Nobody is told to come back later than that: the estimate says nothing about a minute from now."""
CLASS_FORGOTTEN_S = 30.0
"""A class that was not seen for so long needs nothing kept: several times what any TTFT SLO waits."""
CLASS_ROOM = 2
"""How many requests of a higher class have room after one that is let in: one would do if they never came in pairs."""
CLASS_FADE = 0.99
"""What each request leaves of the greatest need (or the tightest SLO) of its class: half after 70 requests."""
CLASSES_MAX = 16
TTFT_FLOOR, TPOT_FLOOR = 1 / 8, 1 / 32
"""Errors are taken relative to the prediction plus this share of the SLO: those of short queues are large by ratio, and
say nothing of queues near the SLO, where it matters. TPOT is never so far from its SLO."""
LUCK_TOKENS = 8
"""An outcome of TPOT counts as if so many tokens had come as predicted: in a short answer, one step with a prompt in it
or none is luck, which no margin helps against."""
SLO_STEPS = 8
"""SLOs of those who decode are told apart in eighths of an octave, and no finer: 9 % on the safe side."""

STEPS_KEPT = 256
"""Of so many different SLOs it is remembered where they belong."""


class Outcome(StrEnum):
    """What to do with a request."""

    ADMIT = "admit"
    WAIT = "wait"
    REJECT = "reject"


class Reason(StrEnum):
    """Why."""

    FITS = "fits"
    IDLE = "idle"
    """The instance has nothing else to do."""
    OWED = "owed"
    """It pushes others over their SLO, and is one of the few long prompts that may."""
    TTFT = "ttft"
    """The queue is too long."""
    ROOM = "room"
    """It is kept short for a longer prompt, which is owed."""
    CLASSES = "classes"
    """It is kept short for a higher class."""
    TPOT = "tpot"
    """Too many would decode when it does."""
    OTHERS = "others"
    """It would push others over their SLO."""
    FULL = "full"
    """Not enough KV when it decodes."""
    NEVER = "never"
    """Not even an idle instance would meet its SLO."""
    TRIAL = "trial"
    """It would be too slow by a guess, and is one of the few by which that is found out; or one of the others."""
    NOBODY = "nobody"
    """No instance can serve it."""


OF_DECODING = frozenset({Reason.TPOT, Reason.OTHERS})
"""What depends on how fast an instance decodes."""
ADMIT, FITS, OWED = Outcome.ADMIT, Reason.FITS, Reason.OWED
"""By name, as nearly every decision uses them."""


class Verdict(NamedTuple):
    """`after_s` is when, by the same estimate, it would fit; None where it never would, 0 if it is admitted.

    `ttft_s` and `tpot_s` are what is predicted, without margins; `ttft_s` counts from now.
    """

    outcome: Outcome
    reason: Reason
    after_s: float | None = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0


class _Admitted:
    __slots__ = ("ask", "choice", "first_s", "predicted", "ran_s", "since_s", "slo", "start_s")

    def __init__(self, ask: Ask, choice: Choice, predicted: Verdict, now: float, ran_s: float) -> None:
        self.ask, self.choice, self.predicted, self.since_s = ask, choice, predicted, now
        self.ran_s = ran_s
        """The prefill seconds that it takes from those who decode."""
        self.first_s: float | None = None
        self.start_s = now + predicted.ttft_s
        """When its first token is predicted."""
        slo_s = ask.tpot_slo_s
        self.slo = (ask.priority, _step_below(slo_s)) if slo_s else None
        """As it stands in the book."""


@dataclass(slots=True)
class _Class:
    """What requests of one priority need lately: the tightest SLOs, and the longest time of their own."""

    slo_s: float
    tpot_slo_s: float
    own_s: float
    seen_s: float


class Admission:
    """Decides for one Conductor. Reads the fleet's loads, which are of all Conductors; knows lengths and SLOs only of
    those that it admitted itself. One caller at a time; told the time in `fleet.now`."""

    def __init__(self, predictions: Predictions, *, long_share: float = LONG_SHARE) -> None:
        """`predictions` is told of every outcome here, and of nothing by the caller."""
        assert 0 <= long_share <= 1, f"{long_share=}"
        self.predictions = predictions
        self._books: dict[int, Crowd] = {}
        self._admitted: dict[str, _Admitted] = {}
        self._classes: dict[int, _Class] = {}
        self._owed = Owed(long_share)
        self._line_s = 0.0
        """When those who were told to come back have been served, if all of them do."""

    def __repr__(self) -> str:
        return f"Admission({self.serving} in service, {self._owed.credit_s:.3g} s owed to long prompts)"

    @property
    def serving(self) -> int:
        """How many were admitted and have not ended."""
        return len(self._admitted)

    def decide(self, ask: Ask, choice: Choice | None, fleet: Fleet, waited_s: float = 0.0) -> Verdict:
        """The verdict on a request that has waited so long already. Counts it if it is rejected, and what its class
        needs; holds nothing for it."""
        if choice is None:
            return Verdict(Outcome.REJECT, Reason.NOBODY, None)
        now, at = fleet.now, choice.decode
        queue_s, fetch_s, prefill_s, _, handoff_s = choice.parts
        decode = fleet.instances[at]
        prefill = decode if choice.prefill == at else fleet.instances[choice.prefill]
        if queue_s > 0 and prefill.light_requests:
            queue_s = batched_s(prefill, queue_s)
        # Nobody is kept out for how long a prompt was guessed to be.
        own_s = fetch_s + prefill_s + handoff_s if ask.counted else 0.0
        ttft_s, slo_s = queue_s + own_s, ask.ttft_slo_s or math.inf
        book = self._books.get(at)
        if book is None:
            book = self._books[at] = Crowd()
        tpot_slo_s = ask.tpot_slo_s if ask.tpot_slo_s and ask.output_tokens > 1 else math.inf
        then = book.then(ask, choice, queue_s, ttft_s, now, decode)
        if own_s > slo_s or ask.tokens > decode.capacity_tokens:
            never = Verdict(Outcome.REJECT, Reason.NEVER, None, ttft_s, then[0])
            fits = ask.tokens <= decode.capacity_tokens
            full = then[2] > decode.capacity_tokens
            return self._tried(ask, prefill, decode, never, waited_s, now, slow=True, full=full) if fits else never
        self._see(ask.priority, slo_s, tpot_slo_s, own_s, now)
        if queue_s <= 0 and not book.count and not decode.running_requests:
            return Verdict(Outcome.ADMIT, Reason.IDLE, 0.0, ttft_s, then[0])
        margin = self.predictions.margin(TTFT, choice.prefill, now)
        most_s = _within(slo_s, waited_s, margin, TTFT_FLOOR)
        reason, wait_s = self._queue(ask, choice.prefill, queue_s, own_s, most_s - queue_s, margin, now)
        crowd, crowd_s = self._crowd(ask, tpot_slo_s, choice.decode, own_s, then, decode, now)
        if crowd_s > wait_s:
            reason, wait_s = crowd, crowd_s
        if wait_s <= 0:
            return Verdict(ADMIT, crowd if crowd is OWED else FITS, 0.0, ttft_s, then[0])
        # While it waits here, the queue there gets shorter by as much.
        if max(ttft_s, wait_s + own_s) <= most_s:
            verdict = Verdict(Outcome.WAIT, reason, wait_s, ttft_s, then[0])
        elif decode.times.decode_s(1, ask.tokens) > tpot_slo_s:
            verdict = Verdict(Outcome.REJECT, Reason.NEVER, None, ttft_s, then[0])
        else:
            verdict = Verdict(Outcome.REJECT, reason, 0.0, ttft_s, then[0])
        slow, full = reason not in OF_DECODING, then[2] > decode.capacity_tokens
        verdict = self._tried(ask, prefill, decode, verdict, waited_s, now, slow=slow, full=full)
        if verdict.outcome is not Outcome.REJECT or verdict.after_s is None:
            return verdict
        self._owed.refused(choice.prefill, own_s, now, len(fleet.instances), queued=reason is Reason.TTFT)
        return verdict._replace(after_s=self._come_back(wait_s, own_s, fleet))

    def admitted(self, ask: Ask, choice: Choice, verdict: Verdict, fleet: Fleet) -> None:
        """It was sent where `choice` says."""
        assert ask.request not in self._admitted, f"request {ask.request} is in service already"
        ran_s, times = choice.parts.prefill_s, fleet.instances[choice.prefill].times
        if choice.parts.queue_s > 0 and is_light(ask, choice, times):
            ran_s = max(ran_s - times.prefill_fixed_s, 0.0)
        it = self._admitted[ask.request] = _Admitted(ask, choice, verdict, fleet.now, ran_s)
        own_s = choice.parts.ttft_s - choice.parts.queue_s if ask.counted else 0.0
        self._owed.admitted(choice.prefill, own_s, pays=verdict.reason is Reason.OWED)
        self._book(choice.decode).add(ask.output_tokens, it.start_s, it.slo)

    def started(self, request: str, now: float) -> None:
        """Its first token came. A request that is not known is none of ours, or was on an instance that left."""
        it = self._admitted.get(request)
        if it is None or it.first_s is not None:
            return
        it.first_s = now
        choice = it.choice
        prefill = self._book(choice.prefill)
        self._book(choice.decode).start(it.start_s)
        prefill.ran_s = prefill.ran(now) + it.ran_s
        if not it.ask.counted:
            return
        actual_s = max(now - it.since_s, 0.0)
        floor_s = (it.ask.ttft_slo_s or 0.0) * TTFT_FLOOR
        self.predictions.observe(TTFT, choice.prefill, it.predicted.ttft_s, actual_s, now, floor_s)

    def finished(self, request: str, tokens: int | None, now: float) -> None:
        """It ended, with so many tokens; None if it was cancelled or lost, which says nothing about predictions."""
        it = self._admitted.pop(request, None)
        if it is None:
            return
        self._forget(it)
        if tokens is not None and tokens > 1 and it.first_s is not None:
            predicted_s = it.predicted.tpot_s
            actual_s = (max(now - it.first_s, 0.0) + LUCK_TOKENS * predicted_s) / (tokens - 1 + LUCK_TOKENS)
            floor_s = (it.ask.tpot_slo_s or 0.0) * TPOT_FLOOR
            self.predictions.observe(TPOT, it.choice.decode, predicted_s, actual_s, now, floor_s)

    def left(self, instance: int) -> None:
        """An instance is gone for good, and what was there with it; its number may be given to another."""
        for request, it in list(self._admitted.items()):
            if instance in (it.choice.prefill, it.choice.decode):
                self._forget(self._admitted.pop(request))
        self._books.pop(instance, None)
        self._owed.rooms.pop(instance, None)
        self.predictions.left(instance)

    def _tried(
        self,
        ask: Ask,
        prefill: Instance,
        decode: Instance,
        verdict: Verdict,
        waited_s: float,
        now: float,
        *,
        slow: bool,
        full: bool,
    ) -> Verdict:
        """The verdict on a request that is kept out, unless that is by a guess (`trials`); `slow`: at prefill, or else
        at decoding; `full`: whether its KV would not fit."""
        if verdict.reason is Reason.FULL:
            return verdict
        guess = guesses_prefill(prefill) if slow else guesses_decode(decode) or guesses_prefill(prefill)
        if not guess and not (verdict.reason is Reason.NEVER and is_doubtful(prefill, now)):
            return verdict
        if has_place(prefill, decode, decodes=not slow) and not (full and decode.running_requests):
            return verdict._replace(outcome=Outcome.ADMIT, reason=Reason.TRIAL, after_s=0.0)
        if verdict.outcome is Outcome.WAIT or waited_s < (ask.ttft_slo_s or math.inf):
            return verdict._replace(outcome=Outcome.WAIT, reason=Reason.TRIAL, after_s=AGAIN_S)
        if verdict.after_s is None:
            return verdict._replace(reason=Reason.TRIAL, after_s=0.0)
        return verdict

    def _queue(
        self, ask: Ask, instance: int, queue_s: float, own_s: float, left_s: float, margin: float, now: float
    ) -> tuple[Reason, float]:
        """How much shorter the queue must be; `left_s` is what it leaves of the request's SLO."""
        reason, wait_s = FITS, 0.0
        room_s = self._owed.room_s(instance, now) if self._owed.rooms else 0.0
        if left_s < own_s:
            reason, wait_s = Reason.TTFT, own_s - left_s
        elif left_s < room_s and queue_s > 0:
            reason, wait_s = Reason.ROOM, min(room_s - left_s, queue_s)
        if queue_s > 0 and len(self._classes) > 1:
            more_s = min(self._in_the_way(ask.priority, queue_s + own_s, margin, now), queue_s)
            if more_s > wait_s:
                reason, wait_s = Reason.CLASSES, more_s
        return reason, wait_s

    def _crowd(
        self, ask: Ask, slo_s: float, instance: int, own_s: float, then: Then, decode: Instance, now: float
    ) -> tuple[Reason, float]:
        """How long until few enough decode there; they finish at the most so fast."""
        tpot_s, others_s, tokens, answer, life_s = then
        margin = self.predictions.margin(TPOT, instance, now)
        reason, over = FITS, 1.0
        if tokens > decode.capacity_tokens:
            reason, over = Reason.FULL, tokens / decode.capacity_tokens
        if slo_s < math.inf:
            most_s = _within(slo_s, 0.0, margin, TPOT_FLOOR)
            if tpot_s > most_s * over:
                reason, over = Reason.TPOT, tpot_s / most_s
        book = self._books[instance]
        if book.slos:
            most_s = _within(book.tightest(ask.priority), 0.0, margin, TPOT_FLOOR)
            if others_s > most_s * over:
                if over == 1.0 and self._owed.pays(own_s):
                    return Reason.OWED, 0.0
                reason, over = Reason.OTHERS, others_s / most_s
        if len(self._classes) > 1:
            for other, it in self._classes.items():
                if other > ask.priority and now - it.seen_s < CLASS_FORGOTTEN_S:
                    most_s = _within(it.tpot_slo_s, 0.0, margin, TPOT_FLOOR)
                    higher_s = others_s + CLASS_ROOM * it.own_s / answer
                    if higher_s > most_s * over:
                        reason, over = Reason.CLASSES, higher_s / most_s
        return reason, life_s * math.log(over) if over > 1.0 else 0.0

    def _see(self, priority: int, slo_s: float, tpot_slo_s: float, own_s: float, now: float) -> None:
        it = self._classes.get(priority)
        if it is None:
            if len(self._classes) >= CLASSES_MAX:
                del self._classes[min(self._classes, key=lambda each: self._classes[each].seen_s)]
            self._classes[priority] = _Class(slo_s, tpot_slo_s, own_s, now)
            return
        # Of each, the old one faded or the new one: min() and max() would take three times as long.
        it.slo_s /= CLASS_FADE
        it.tpot_slo_s /= CLASS_FADE
        it.own_s *= CLASS_FADE
        if slo_s < it.slo_s:
            it.slo_s = slo_s
        if tpot_slo_s < it.tpot_slo_s:
            it.tpot_slo_s = tpot_slo_s
        if own_s > it.own_s:
            it.own_s = own_s
        it.seen_s = now

    def _in_the_way(self, priority: int, behind_s: float, margin: float, now: float) -> float:
        """By how much `behind_s` is too long a queue for a request of some higher class."""
        most_s = 0.0
        for other, it in self._classes.items():
            if other > priority and now - it.seen_s < CLASS_FORGOTTEN_S:
                most_s = max(most_s, behind_s + CLASS_ROOM * it.own_s - _within(it.slo_s, 0.0, margin, TTFT_FLOOR))
        return most_s

    def _come_back(self, wait_s: float, own_s: float, fleet: Fleet) -> float:
        """When a rejected request fits: after those that were told so before, so that they do not come all at once."""
        now = fleet.now
        self._line_s = min(max(self._line_s, now) + own_s / len(fleet.instances), now + AFTER_MOST_S)
        return min(max(wait_s, self._line_s - now), AFTER_MOST_S)

    def _book(self, instance: int) -> Crowd:
        book = self._books.get(instance)
        if book is None:
            book = self._books[instance] = Crowd()
        return book

    def _forget(self, it: _Admitted) -> None:
        """Take it out of the books."""
        started = it.first_s is not None
        self._book(it.choice.decode).remove(it.ask.output_tokens, it.start_s, it.slo, started=started)


@lru_cache(STEPS_KEPT)
def _step_below(slo_s: float) -> float:
    below: float = 2.0 ** (math.floor(math.log2(slo_s) * SLO_STEPS) / SLO_STEPS)
    return below


def _within(slo_s: float, waited_s: float, margin: float, floor: float) -> float:
    """What a prediction may be to be kept: margin * (prediction + floor) - floor <= SLO - waited."""
    if slo_s == math.inf:
        return slo_s
    floor_s = slo_s * floor
    return (slo_s - waited_s + floor_s) / margin - floor_s
