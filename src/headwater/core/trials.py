"""Who may go where a guess says that it would be too slow: to a few at a time, nobody is refused by a guess.

Theory of operation. How fast an instance is, its own requests teach (`rates`). Before any has, its times are a guess:
by them a queue is judged as well as can be, but whom they would keep out is let through while fewer than `TRIALS` wait
there, and where it is decoding that is too slow, while fewer than so many decode. `LEAST` outcomes make a rate, and
then it is judged by that. The others wait meanwhile, until their goal cannot be met any more. Loads are those of all
Conductors: so many are all that is at stake at an instance, however many have learned nothing.

Some answers teach nothing: one in one piece says when it ended, but not what of its time was prefill, nor what was
queue or decoding, and to take the rest from a guess would make another guess of it. Where `LEAST` answers have ended
and it is a guess still, it keeps nobody out, however many are there, until it is learned.

What was learned is a guess again after `DOUBT_S` without any outcome, if nothing is there and all are kept out by it:
an instance that was slow when it began, and is not any more, would never be known for it.
"""

from __future__ import annotations

from math import inf

from headwater.core.rates import LEAST
from headwater.fleet import Instance

TRIALS = 4
"""One more than make a rate: one may be cancelled, or answer nothing."""
AGAIN_S = 0.05
"""Who waits for a rate is asked again after so long: about a first token's time."""
DOUBT_S = 30.0


def guesses_prefill(it: Instance) -> bool:
    """Whether no request has taught its prefill times."""
    return it.prefill_learned_s == -inf


def guesses_decode(it: Instance) -> bool:
    """Whether no answer has taught its decode times."""
    return it.decode_learned_s == -inf


def count_ended(it: Instance) -> None:
    """An answer ended there, before anything was learned of it."""
    if it.untaught_answers < LEAST and (guesses_prefill(it) or guesses_decode(it)):
        it.untaught_answers += 1


def is_untaught(it: Instance) -> bool:
    """Whether it is a guess still, though as many answers have ended there as teach what can be learned."""
    return it.untaught_answers >= LEAST and (guesses_prefill(it) or guesses_decode(it))


def is_doubtful(it: Instance, now: float) -> bool:
    """Whether it is idle, and was too long ago told anything of."""
    return not it.waiting_requests and not it.running_requests and now - it.prefill_learned_s > DOUBT_S


def has_place(prefill: Instance, decode: Instance, *, decodes: bool) -> bool:
    """Whether one more may try; `decodes`: it is decoding that is to be tried."""
    if is_untaught(decode if decodes else prefill):
        return True
    waiting = prefill.waiting_requests
    if decodes:
        waiting += decode.running_requests
    return waiting < TRIALS
