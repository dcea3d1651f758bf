"""What the scheduler side asks the node before a request is loaded, and how long it lets the request wait.

Theory of operation. A question is asked first when the request arrives, so that the node brings up what lower tiers
hold while the request queues, and again whenever vLLM's scheduler comes to the request, which for one that waits is in
every step, a thousand times a second on an idle engine. In between two polls the last answer stands. A question ends
when the request has its blocks or is over; the node is told if it may still be at work for it.

    ask ──► waiting: vLLM is told to come again ──► final: load so much, compute the rest
                       └─ `wait_s` after the first ask, or without the node: whatever it is, it is final
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.core.cost import PrefillSpeed
from headwater.engines.vllm.stats import CopySums
from headwater.errors import HeadwaterError, ProtocolError, RefusedError, UnavailableError
from headwater.node.client import Session, Supervisor
from headwater.node.messages import Matched
from headwater.types import ChunkKey

POLL_S = 0.002
POLLS_SHARE = 0.1
"""All polls together take at most this share of the time: long prompts have long questions."""
PAUSE_MAX_S = 0.25
NAME_CHARS_MAX = 512
FORGOTTEN_TOGETHER = 32
STEPS_MAX = 64


@dataclass(slots=True)
class Asked:
    """One request's question: since when, of which session, the last answer, and when to ask again.

    `told_s` is when vLLM was first told to come again, `final_s` when the last word was heard, `cut` that the request's
    time is over, so that nothing more is brought up for it.
    """

    name: str
    session: Session
    chunks: int
    since_s: float
    again_s: float
    answer: Matched
    told_s: float | None = None
    final_s: float | None = None
    cut: bool = False


class Questions:
    """The open questions of one engine. Not thread-safe."""

    def __init__(
        self,
        node: Supervisor,
        speed: PrefillSpeed,
        chunk_tokens: int,
        wait_s: float,
        lost: Callable[[Session, HeadwaterError], None],
        sums: CopySums,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """No request waits longer than `wait_s` after it was first asked for; `lost` hears of a session that failed."""
        self._node, self._speed, self._chunk_tokens, self._wait_s = node, speed, chunk_tokens, wait_s
        self._lost, self._sums, self._now = lost, sums, now
        self._asked: dict[str, Asked] = {}
        self._waiting: set[str] = set()
        self._over: list[str] = []

    def __repr__(self) -> str:
        return f"Questions({len(self._asked)} open, {len(self._waiting)} waiting)"

    def __len__(self) -> int:
        return len(self._asked)

    def ask(
        self, request_id: str, keys: Sequence[ChunkKey], local_tokens: int, *, counts: bool, fetches: bool
    ) -> Matched:
        """What the node holds of a request's prompt, of which the engine itself has `local_tokens`.

        Without `fetches` nothing is brought up, and nothing waits. No node holds nothing.
        """
        session, now = self._node.session, self._now()
        asked = self._asked.get(request_id)
        if session is None:
            self._drop(request_id)
            return Matched(0)
        if asked is None or asked.session is not session or asked.chunks != len(keys):
            asked = self._open(request_id, session, len(keys), now)
        elif now < asked.again_s:
            return asked.answer
        name = _name(request_id) if fetches and not asked.cut else ""
        try:
            answer = session.match(keys, counts=counts, request=name, tokens_s=self._tokens_s(len(keys), local_tokens))
        except (UnavailableError, ProtocolError, RefusedError) as error:
            self._lost(session, error)
            self._drop(request_id)
            return Matched(0)
        if not name:  # nothing was asked for that could be worth waiting for
            answer = Matched(answer.chunks, False, asked.answer.disk, asked.answer.remote)
        self._take(request_id, asked, name, answer, now)
        if answer.waiting and self._now() - asked.since_s > self._wait_s:
            asked.cut, asked.again_s = True, now
            self._forget(asked)
            return self.ask(request_id, keys, local_tokens, counts=counts, fetches=False)
        return answer

    def told_to_wait(self, request_id: str) -> None:
        """vLLM's scheduler was told to come again for this request."""
        asked = self._asked[request_id]
        if asked.told_s is None:
            asked.told_s = self._now()

    def end(self, request_id: str) -> None:
        """The request has its blocks, or is over."""
        asked = self._asked.pop(request_id, None)
        self._waiting.discard(request_id)
        if asked is None:
            return
        self._count(asked, asked.cut)
        if asked.name and not asked.cut:
            self._forget(asked)

    def close(self) -> None:
        """Tell the node that everything is over."""
        for request_id in list(self._asked):
            self.end(request_id)
        self._flush()

    def _open(self, request_id: str, session: Session, chunks: int, now: float) -> Asked:
        """A new question; one that takes the place of another waits no longer for that."""
        before = self._asked.get(request_id)
        asked = self._asked[request_id] = Asked("", session, chunks, now, now, Matched(0))
        if before is not None:
            asked.since_s, asked.told_s = before.since_s, before.told_s
        return asked

    def _take(self, request_id: str, asked: Asked, name: str, answer: Matched, began_s: float) -> None:
        """The node has answered."""
        now = self._now()
        asked.name, asked.answer = asked.name or name, answer
        if answer.waiting:
            self._waiting.add(request_id)
            asked.final_s = None
        else:
            self._waiting.discard(request_id)
            asked.final_s = now if asked.final_s is None else asked.final_s
        pause_s = (now - began_s) * len(self._waiting) / POLLS_SHARE
        asked.again_s = now + min(max(POLL_S, pause_s), PAUSE_MAX_S)

    def _drop(self, request_id: str) -> None:
        """There is no node to ask any more."""
        asked = self._asked.pop(request_id, None)
        self._waiting.discard(request_id)
        if asked is not None:
            self._count(asked, cut=asked.answer.waiting or asked.cut)

    def _count(self, asked: Asked, cut: bool) -> None:
        if asked.told_s is not None:
            end_s = self._now() if asked.final_s is None else asked.final_s
            self._sums.waited(max(end_s - asked.told_s, 0.0), cut=cut)

    def _forget(self, asked: Asked) -> None:
        """Have the node forget a request: at once if it works for it, else together with others."""
        self._over.append(asked.name)
        if asked.answer.waiting or asked.cut or len(self._over) >= FORGOTTEN_TOGETHER:
            self._flush()

    def _flush(self) -> None:
        session, names = self._node.session, self._over
        self._over = []
        if session is None or not names:
            return
        try:
            session.forget(names)
        except (UnavailableError, ProtocolError, RefusedError) as error:
            self._lost(session, error)

    def _tokens_s(self, chunks: int, local_tokens: int) -> float:
        """How fast this prompt would be through, 0 if unknown: what the engine has itself takes it no time."""
        tokens = chunks * self._chunk_tokens
        seconds = self._speed.seconds(max(tokens - local_tokens, 1))
        return tokens / seconds if seconds else 0.0


def _name(request_id: str) -> str:
    """A request's name for the node: vLLM's, unless its client has made it absurdly long."""
    return request_id if len(request_id) <= NAME_CHARS_MAX else hashlib.sha256(request_id.encode()).hexdigest()


class StepTimes:
    """Learns the prefill rate: which steps computed prompt tokens, and how long they took.

    A step takes from the moment it was decided, or from the end of the step before if that was later (vLLM decides one
    step ahead), until its result is there: the engine's idle time is in none. Steps in which requests only decode say
    nothing of prefill; in the others, decoding is part of what a prompt costs at this load.
    """

    def __init__(self, speed: PrefillSpeed, now: Callable[[], float] = time.monotonic) -> None:
        self._speed, self._now = speed, now
        self._began: deque[tuple[int, int, float]] = deque(maxlen=STEPS_MAX)
        self._number = 0
        self._last_s = 0.0

    def began(self, output: Any) -> int:
        """A step was decided: its number, which the ranks report with its result; 0 if nobody need report it."""
        drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
        counts = [count - len(drafts.get(name, ())) for name, count in output.num_scheduled_tokens.items()]
        # One token is a decode, or the last of a prompt that was loaded, which is as short.
        tokens = sum(count for count in counts if count > 1)
        if not tokens:
            return 0
        self._number += 1
        self._began.append((self._number, tokens, self._now()))
        return self._number

    def ended(self, number: int) -> None:
        """The result of a step is there, of the one with this number, or of one without."""
        now = self._now()
        while number and self._began and self._began[0][0] <= number:
            began, tokens, at_s = self._began.popleft()
            if began == number:
                self._speed.observe(tokens, now - max(at_s, self._last_s))
        self._last_s = now
