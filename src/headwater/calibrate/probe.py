"""Measures an engine from outside: prefill by length and context, decode by concurrency and context, a step's limit.

Theory of operation. Everything is measured on an idle engine, in phases that each have a share of the time:

    lengths    prompts that nobody has sent before, ever longer, until the next one would take too long
    contexts   the same prompts cut short and continued in a new way: the engine has the first part in its cache
    decode     1, 2, 4, ... streams at a time, with short and long contexts; gaps count while all of them decode
    step       equal prompts sent together: those that fit one step answer together
    again      lengths and contexts, in an order drawn anew, until the time is up

Short before long, so that what a slow engine has no time for is the far end, and the notes say so.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from headwater.calibrate.observations import Decode, Observations, Prefill, StepTokens, step_limit
from headwater.calibrate.server import VOCABULARY, Answer, Dialect, EngineServer, Served

Progress = Callable[[float, str], None]
"""Is told the share that is done, and what is done now."""

SHORTEST, LENGTHS = 16, 9
CONTEXT_SHARES = (0.25, 0.5, 0.9)
SUFFIXES = (32, 256)
DECODE_TOKENS, GAPS_MIN = 17, 4
POINTS_MIN = 4
"""What a fit needs is measured even if there is no time."""
REPEATS_MAX = 7
STEP_PROMPT, STEP_TOKENS_MAX, STEP_SHARE = 512, 24_576, 0.2
UNTOLD_LENGTH = 4096
GROWTH = 1.6
"""A prompt of twice the length is expected to take 2 ** GROWTH times as long: between linear and quadratic."""
SHARES = {"lengths": 0.25, "contexts": 0.35, "decode": 0.65, "step": 0.85, "again": 1.0}
"""When each phase has to end, as a share of the whole time."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure. `length_max` and `step_tokens` are found where they are None."""

    seconds: float = 120.0
    concurrency: int = 8
    length_max: int | None = None
    step_tokens: int | None = None
    seed: int = 0


class Asked(Protocol):
    """What of a server is needed here; see EngineServer."""

    @property
    def dialect(self) -> Dialect:
        """What it takes."""

    def learn(self, prompt: Sequence[int]) -> Answer:
        """The first completion."""

    def complete(self, prompt: Sequence[int], answer_tokens: int) -> Answer:
        """One completion."""

    def together(self, prompts: Sequence[Sequence[int]], answer_tokens: Sequence[int]) -> list[Answer]:
        """Several at the same time."""

    def hit_tokens(self) -> int | None:
        """Tokens that were found in its cache so far."""


class Probe:
    """One measurement of one server; `run` may be called once."""

    def __init__(
        self,
        server: Asked,
        served: Served,
        effort: Effort,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._served, self._effort, self._progress = server, served, effort, progress
        self._random = random.Random(effort.seed)
        # A prompt that an earlier run has sent would be found in the engine's cache, so contents never repeat.
        self._contents = random.Random(secrets.randbits(64))
        self._clock, self._began_s = clock, clock()
        self._per_number = 1.0
        self._prefills: dict[tuple[int, int], list[float]] = {}
        self._decodes: dict[tuple[int, int], Decode] = {}
        self._known: dict[int, list[int]] = {}
        self._ttft_s: dict[int, float] = {}
        self._notes: list[str] = []

    def run(self) -> Observations:
        """All phases."""
        self._warm_up()
        self._lengths()
        has_contexts = self._contexts()
        self._decode()
        step = self._step()
        self._again(has_contexts)
        prefills = tuple(Prefill(*at, tuple(times)) for at, times in sorted(self._prefills.items()))
        self._progress(1.0, "done")
        return Observations(prefills, tuple(self._decodes.values()), step, tuple(self._notes))

    def fresh(self, tokens: int) -> list[int]:
        """A prompt of about so many tokens that nobody has sent."""
        count = max(round(tokens / self._per_number), 1)
        return [self._contents.randrange(VOCABULARY.start, VOCABULARY.stop) for _ in range(count)]

    def _warm_up(self) -> None:
        self._progress(0.0, "warming up")
        if self._served.busy:
            self._notes.append(f"the server had {self._served.busy} requests of others: its times include them")
        prompt = self.fresh(SHORTEST * 4)
        answer = self._server.learn(prompt)
        if not self._server.dialect.token_ids:
            self._per_number = answer.prompt_tokens / len(prompt)
            self._notes.append("the server takes no token ids: prompts were text, whose lengths are what it says")
        self._server.complete(self.fresh(SHORTEST * 8), 4)

    def _lengths(self) -> None:
        longest = self._longest()
        ratio = (longest / SHORTEST) ** (1 / (LENGTHS - 1))
        lengths = sorted({round(SHORTEST * ratio**step) for step in range(LENGTHS)})
        for number, tokens in enumerate(lengths):
            if number >= POINTS_MIN and not self._fits("lengths", self._expected_s(tokens)):
                self._notes.append(
                    f"prompts longer than {lengths[number - 1]} tokens were not measured: no time for {tokens}"
                )
                break
            self._progress(self._share_done(), f"prefill of {tokens} tokens")
            prompt = self.fresh(tokens)
            self._ttft_s[tokens] = self._measure(prompt)
            self._known[tokens] = prompt

    def _longest(self) -> int:
        told = self._served.length_max
        if told is None and self._effort.length_max is None:
            self._notes.append(f"the server does not say how long prompts may be: {UNTOLD_LENGTH} tokens were taken")
        longest = min(self._effort.length_max or told or UNTOLD_LENGTH, told or 1 << 40)
        room = self._served.capacity_tokens
        if room is not None:
            longest = min(longest, room)
        return max(longest - DECODE_TOKENS - 1, SHORTEST * 2)

    def _contexts(self) -> bool:
        """Whether the engine found the cached parts."""
        found = 0
        for prompt, tokens in self._continued():
            if not self._fits("contexts", self._expected_s(tokens)):
                break
            self._progress(self._share_done(), f"prefill of {tokens} tokens after {len(prompt) - tokens} cached ones")
            found += self._measure_cached(prompt)
        if not found:
            self._notes.append("no cached prefix was found or told: the cost of context follows from that of length")
        return found > 0

    def _continued(self) -> list[tuple[list[int], int]]:
        """Prompts of which the engine knows the first part, and how many tokens are new."""
        longest = max(self._known)
        wishes = []
        for share in CONTEXT_SHARES:
            kept = self._blocks(round(longest * share))
            if kept:
                start = self._known[longest][: round(kept / self._per_number)]
                wishes += [(start + self.fresh(new), new) for new in SUFFIXES if kept + new <= longest]
        return wishes

    def _blocks(self, tokens: int) -> int:
        """Down to whole blocks, which is what an engine finds again."""
        block = self._served.block_tokens or 16
        return tokens // block * block

    def _measure(self, prompt: Sequence[int]) -> float:
        answer = self._server.complete(prompt, 1)
        cached = answer.cached_tokens or 0
        self._note_prefill(answer, cached)
        return answer.ttft_s

    def _measure_cached(self, prompt: Sequence[int]) -> bool:
        before = self._server.hit_tokens()
        answer = self._server.complete(prompt, 1)
        cached = answer.cached_tokens
        if cached is None:
            after = self._server.hit_tokens()
            cached = None if before is None or after is None else after - before
        if not cached or cached >= answer.prompt_tokens:
            return False
        self._note_prefill(answer, cached)
        return True

    def _note_prefill(self, answer: Answer, cached: int) -> None:
        self._prefills.setdefault((answer.prompt_tokens - cached, cached), []).append(answer.ttft_s)

    def _decode(self) -> None:
        """Each point's prompts are the first ones of the same few, so that the engine knows most of them."""
        streams = [1 << power for power in range(self._effort.concurrency.bit_length())]
        long = self._decode_context(streams[-1])
        prompts = [self.fresh(long) for _ in range(streams[-1])]
        # The ends of both ranges first: what there is no time for shall be between them.
        wishes = [(count, context) for count in streams for context in (SHORTEST, long)]
        wishes += [(count, long // 4) for count in streams if long // 4 > SHORTEST]
        for count, context in wishes:
            cost_s = count * self._expected_s(context) + DECODE_TOKENS * self._step_s(count)
            if len(self._decodes) >= POINTS_MIN and not self._fits("decode", cost_s):
                self._notes.append(f"{count} streams of {context} tokens were not measured: no time")
                continue
            self._progress(self._share_done(), f"{count} streams with {context} tokens of context")
            cut = [it[: max(round(context / self._per_number), 1)] for it in prompts[:count]]
            self._decode_point(count, context, cut)

    def _decode_context(self, count: int) -> int:
        """The longest context for which so many prompts can be computed in a third of the phase, and kept."""
        time_s = (SHARES["decode"] * self._effort.seconds - self._spent_s()) / 3
        room = (self._served.capacity_tokens or 1 << 40) * 0.8 / count - 2 * DECODE_TOKENS
        fitting = [it for it, ttft_s in self._ttft_s.items() if count * ttft_s <= time_s and it <= room]
        return max(fitting, default=SHORTEST * 2)

    def _decode_point(self, count: int, context: int, prompts: Sequence[Sequence[int]]) -> None:
        for tokens in (DECODE_TOKENS, 2 * DECODE_TOKENS):
            found = common_gaps(self._server.together(prompts, [tokens] * count))
            if found is not None:
                self._decodes[count, context] = found
                return
        self._notes.append(f"{count} streams of {context} tokens never decoded all at the same time")

    def _step(self) -> StepTokens | None:
        if self._effort.step_tokens is not None:
            return StepTokens(self._effort.step_tokens, True)
        each = max(it for it in self._ttft_s if it <= STEP_PROMPT)
        ttft_s = self._ttft_s[each]
        left_s = min(SHARES["step"] * self._effort.seconds - self._spent_s(), STEP_SHARE * self._effort.seconds)
        room = (self._served.capacity_tokens or 1 << 40) * 0.8
        count = min(int(left_s / ttft_s), int(min(room, STEP_TOKENS_MAX) / each))
        if count < 2:
            return None
        self._progress(self._share_done(), f"{count} prompts of {each} tokens together")
        answers = self._server.together([self.fresh(each) for _ in range(count)], [1] * count)
        return step_limit([it.token_s[0] for it in answers], each, 0.3 * ttft_s)

    def _again(self, has_contexts: bool) -> None:
        for _ in range(REPEATS_MAX - 1):
            wishes: list[tuple[list[int], int, bool]] = [(self.fresh(it), it, False) for it in self._ttft_s]
            if has_contexts:
                wishes += [(prompt, tokens, True) for prompt, tokens in self._continued()]
            self._random.shuffle(wishes)
            tried = 0
            for prompt, tokens, cached in wishes:
                if self._fits("again", self._expected_s(tokens)):
                    self._progress(self._share_done(), f"prefill of {tokens} tokens again")
                    tried += 1
                    if cached:
                        self._measure_cached(prompt)
                    else:
                        self._measure(prompt)
            if not tried:
                return

    def _expected_s(self, tokens: int) -> float:
        """What a prompt is expected to take, from the nearest length that was measured."""
        if not self._ttft_s:
            return 0.0
        nearest = min(self._ttft_s, key=lambda it: abs(it - tokens))
        return float(self._ttft_s[nearest] * max(tokens / nearest, 1.0) ** GROWTH)

    def _step_s(self, count: int) -> float:
        """What a decode step of so many is expected to take, from the fewest to the most that were measured."""
        known = [it for it in self._decodes.values() if it.requests <= count]
        return max((it.seconds * count / it.requests for it in known), default=0.0)

    def _spent_s(self) -> float:
        return self._clock() - self._began_s

    def _share_done(self) -> float:
        return min(self._spent_s() / self._effort.seconds, 0.99)

    def _fits(self, phase: str, seconds: float) -> bool:
        return self._spent_s() + seconds <= SHARES[phase] * self._effort.seconds


def common_gaps(answers: Sequence[Answer]) -> Decode | None:
    """The gaps between tokens while all of the answers decoded; None if that was too short to say anything."""
    begin_s = max(it.token_s[0] for it in answers)
    end_s = min(it.token_s[-1] for it in answers)
    gaps: list[float] = []
    kv_tokens = 0.0
    for it in answers:
        within = [number for number, at_s in enumerate(it.token_s) if begin_s <= at_s <= end_s]
        if len(within) <= GAPS_MIN:
            return None
        gaps += _gaps([it.token_s[number] for number in within])
        kv_tokens += it.prompt_tokens + (within[0] + within[-1]) / 2
    return Decode(len(answers), kv_tokens, tuple(gaps))


def _gaps(token_s: Sequence[float]) -> list[float]:
    """The gaps between tokens; only their mean where many come in bursts, as of a server that is late."""
    gaps = [after - before for before, after in pairwise(token_s)]
    mean = (token_s[-1] - token_s[0]) / len(gaps)
    return [mean] if sum(it < mean / 4 for it in gaps) > len(gaps) / 4 else gaps


def measure(server: EngineServer, served: Served, effort: Effort, progress: Progress) -> Observations:
    """Measure a server; whatever ends it early, none of its requests is left running."""
    try:
        return Probe(server, served, effort, progress).run()
    except BaseException:
        server.close()
        raise
