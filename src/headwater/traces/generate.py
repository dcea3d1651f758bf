"""Conversations that nobody had: for tests, and for traces that say nothing about contents.

A chat begins with one of a few shared system prompts and then grows: each turn's prompt is all that was said before,
the answers too, and a new message. Its whole blocks stay the same from turn to turn; the last, partial one does not.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headwater.errors import ConfigError
from headwater.traces.model import Trace, TraceRequest

OPEN_CHATS = 256
"""So many chats can be gone on with, those that were asked last."""
TRIED_CHATS = 8


@dataclass(frozen=True, slots=True)
class Chats:
    """How people chat. Spreads are log-normal with these medians, times between chats and turns exponential."""

    chats: int = 100
    chats_s: float = 1.0
    """Chats that begin per second."""
    turns: float = 4.0
    """Mean turns of a chat (geometric)."""
    think_s: float = 30.0
    """Mean time from one turn to the next."""
    prompts: int = 3
    prompt_tokens: int = 512
    """The shared system prompts; their lengths are whole blocks."""
    message_tokens: int = 200
    answer_tokens: int = 150
    input_tokens_max: int = 32768


class _Writer:
    """Hands out the numbers of blocks."""

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block size {block_tokens}: write a number of tokens from 1 on, as in 16 or 512")
        self.size = block_tokens
        self._fresh = itertools.count()

    def extend(self, blocks: tuple[int, ...], shared_tokens: int, tokens: int) -> tuple[int, ...]:
        """The blocks of a prompt of `tokens`, the first `shared_tokens` of which `blocks` begin with."""
        kept = blocks[: shared_tokens // self.size]
        return kept + tuple(next(self._fresh) for _ in range(-(-tokens // self.size) - len(kept)))


def chats(seed: int, block_tokens: int, how: Chats | None = None) -> Trace:
    """A trace of multi-turn chats; the same seed gives the same trace."""
    how = how or Chats()
    rng, writer = random.Random(seed), _Writer(block_tokens)
    stem = -(-how.prompt_tokens // block_tokens) * block_tokens
    stems = [writer.extend((), 0, stem) for _ in range(how.prompts)] or [()]
    found: list[TraceRequest] = []
    begin_s = 0.0
    for number in range(how.chats):
        found += _chat(rng, writer, how, f"chat-{number}", begin_s, rng.choice(stems))
        begin_s += rng.expovariate(how.chats_s)
    found.sort(key=lambda it: it.arrival_s)
    start = found[0].arrival_s if found else 0.0
    requests = tuple(replace(it, arrival_s=round(it.arrival_s - start, 3)) for it in found)
    return Trace(f"chats-{seed}", block_tokens, requests)


def _chat(
    rng: random.Random, writer: _Writer, how: Chats, name: str, now: float, blocks: tuple[int, ...]
) -> Iterator[TraceRequest]:
    asked = said = len(blocks) * writer.size
    for turn in itertools.count():
        tokens = said + _length(rng, how.message_tokens)
        if tokens > how.input_tokens_max:
            return
        blocks = writer.extend(blocks, asked, tokens)
        asked, output = tokens, _length(rng, how.answer_tokens)
        yield TraceRequest(now, tokens, output, blocks, session=name, turn=turn)
        if rng.random() * how.turns < 1.0:
            return
        said = tokens + output
        now += rng.expovariate(1.0 / how.think_s)


def _length(rng: random.Random, median: int) -> int:
    return max(1, round(median * rng.lognormvariate(0.0, 0.6)))


def with_sessions(
    trace: Trace, seed: int, block_tokens: int, *, again: float = 0.6, shared_tokens: int = 0, pause_s: float = 5.0
) -> Trace:
    """A trace without blocks as if its requests were turns of chats: a model, not a record.

    Each request goes on, with probability `again`, with the longest of a few chats drawn from those open: last asked
    at least `pause_s` ago, and no longer with its answer than this prompt. Else it begins one, behind `shared_tokens`
    that all have. Arrivals and lengths stay as they are. Raises ConfigError if the trace has blocks.
    """
    if any(it.blocks for it in trace.requests):
        raise ConfigError(f"{trace.name}: has blocks of its own; sessions can only be made up for a trace without any")
    if not 0 <= again <= 1:
        raise ConfigError(f"again {again:g}: write a probability from 0 to 1")
    rng, writer = random.Random(seed), _Writer(block_tokens)
    stem = writer.extend((), 0, shared_tokens // block_tokens * block_tokens)
    waiting: deque[TraceRequest] = deque(maxlen=OPEN_CHATS)
    names, requests = itertools.count(), []
    for request in trace.requests:
        before = _open_chat(rng, waiting, request, pause_s) if rng.random() < again else None
        if before is None:
            blocks = writer.extend(stem, min(request.input_tokens, len(stem) * block_tokens), request.input_tokens)
            session, turn = f"made-up-{next(names)}", 0
        else:
            waiting.remove(before)
            blocks = writer.extend(before.blocks, before.input_tokens, request.input_tokens)
            session, turn = before.session, before.turn + 1
        waiting.append(replace(request, blocks=blocks, session=session, turn=turn))
        requests.append(waiting[-1])
    return Trace(f"{trace.name} with made-up sessions", block_tokens, tuple(requests))


def _open_chat(
    rng: random.Random, waiting: deque[TraceRequest], request: TraceRequest, pause_s: float
) -> TraceRequest | None:
    tried = (waiting[rng.randrange(len(waiting))] for _ in range(min(TRIED_CHATS, len(waiting))))
    fit = [
        it
        for it in tried
        if it.arrival_s + pause_s <= request.arrival_s and it.input_tokens + it.output_tokens < request.input_tokens
    ]
    return max(fit, key=lambda it: it.input_tokens, default=None)
