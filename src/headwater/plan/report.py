"""All answers to one question, in the order in which they build on each other."""

from __future__ import annotations

from headwater.plan.answer import Answer
from headwater.plan.memory import (
    capacity_answer,
    chunk_answer,
    model_answer,
    tiers_answer,
    token_answer,
    transfer_answer,
)
from headwater.plan.question import Question
from headwater.plan.work import cost_answer, fetch_answer, speed_answer, split_answer


def answers(ask: Question) -> tuple[Answer, ...]:
    """Everything. Raises ConfigError where the values do not fit together."""
    ask.check()
    found = (
        model_answer(ask),
        token_answer(ask),
        chunk_answer(ask),
        transfer_answer(ask),
        capacity_answer(ask),
        tiers_answer(ask),
        speed_answer(ask),
        fetch_answer(ask),
        split_answer(ask),
        cost_answer(ask),
    )
    return tuple(it for it in found if it is not None)
