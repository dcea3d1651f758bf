"""One engine: continuous batching with chunked prefill, as vLLM's scheduler does it.

A pass takes one token of every request that decodes and fills up with prompt tokens, first of prompts that are begun,
then of those that wait, first come first served. It lasts as long as its prefill step and its decode step together; at
its end each decoding request has one more token, and each prompt that is complete its first. When a request needs a
block and none is left, the one that came last loses its blocks and waits again, in front.

Without prompts a pass only decodes, and so do all that follow until a request ends or comes. Their times are one
closed sum (a *stretch*): nothing is done for a token.

Every decoding request gets one token a pass. So with the number of passes `step` as the clock, a request's length,
the sum of all lengths, the pass in which it ends and those in which it needs a block are known when it first decodes:

    computed(step) = known + step - first        known tokens were computed when it had its first token, at `first`
    a new block is needed in a pass if `step` = first - known (modulo the block size)
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import Any

from headwater.enginetimes import EngineTimes
from headwater.sim.fleet.pool import Held, Path, Pool


class Job(Held):
    """A request in an engine."""

    __slots__ = (
        "again",
        "begun_s",
        "computed",
        "fetch_from",
        "fetched",
        "finish",
        "first",
        "first_s",
        "found",
        "generated",
        "given",
        "known",
        "number",
        "output",
        "owner",
        "prompt",
        "tokens",
    )

    def __init__(self, number: int, tokens: int, output: int, path: Path, prompt: int, owner: Any = None) -> None:
        # Held's own fields as well: one call less for each request.
        self.path = path
        self.spans = []
        self.deepest = self.blocks = self.private = 0
        self.number = number
        self.owner = owner
        """The driver's."""
        self.tokens = tokens
        self.output = output if output > 0 else 1
        self.prompt = prompt
        """Whole blocks of the prompt."""
        self.known = tokens
        """Tokens that are to be computed before it decodes."""
        self.computed = 0
        self.given = False
        """Its KV comes from where it was prefilled: it decodes as soon as there is room."""
        self.again = False
        """It was preempted, and has to compute everything."""
        self.generated = 0
        self.first = 0
        """The pass after which it began to decode."""
        self.finish = -1
        """The pass after which it has all its tokens."""
        self.fetch_from = 0
        self.fetched = 0
        """Leading blocks that have been fetched; they are of use if those before `fetch_from` are found."""
        self.found = -1
        """Tokens that were found in the pool when it was first begun; -1 before."""
        self.begun_s = inf
        self.first_s = inf


class Engine:
    """The driver appends to `waiting` and calls `wake`, and calls `fire` when `end_s` has come; `end_s` is infinite
    while the engine has nothing to do.

    `started`, `ended` and `failed` are the driver's to empty: who got the first token, who the last one, and who can
    never fit.
    """

    __slots__ = (
        "_base",
        "_cross",
        "_finishing",
        "_now_s",
        "_passing",
        "_seconds_of",
        "_sure_kv",
        "_take",
        "block_tokens",
        "blocked",
        "decoding",
        "end_s",
        "ended",
        "failed",
        "number",
        "pool",
        "preemptions",
        "prefilling",
        "ready",
        "started",
        "step",
        "times",
        "waiting",
    )

    def __init__(self, number: int, times: EngineTimes, blocks: int, block_tokens: int) -> None:
        self.number = number
        self.times = times
        self.block_tokens = block_tokens
        self.pool = Pool(blocks)
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.ready: list[Job] = []
        """Those whose prompt will be complete at the end of this pass."""
        self.decoding: dict[int, Job] = {}
        self.started: list[Job] = []
        self.ended: list[Job] = []
        self.failed: list[Job] = []
        self.preemptions = 0
        self.step = 0
        self.end_s = inf
        self.blocked = False
        """Somebody waits for room or a slot, which only an end gives."""
        self._now_s = 0.0
        self._passing = False
        self._take = 0
        """Passes of the stretch."""
        self._base = 0
        self._cross = [0] * block_tokens
        self._finishing: list[tuple[int, int, Job]] = []
        self._seconds_of = (
            times.prefill_fixed_s,
            times.prefill_token_s,
            times.prefill_token2_s,
            times.prefill_context_s,
            times.decode_fixed_s,
            times.decode_request_s,
            times.decode_kv_s,
            times.decode_kv2_s,
        )
        self._sure_kv = _sure_kv(times, blocks * block_tokens)

    @property
    def running_tokens(self) -> int:
        """The KV tokens of those that decode."""
        return self._base + self.step * len(self.decoding)

    def wake(self, now_s: float) -> None:
        """Requests have joined `waiting`, all that do so at this instant; `end_s` may come earlier by that."""
        if self.end_s == inf:
            self._begin(now_s)
        elif not self._passing and not self.blocked:
            self._shorten(now_s)

    def fire(self) -> None:
        """The pass or stretch is over: tokens come out, and the next one begins."""
        now_s = self.end_s
        if self._passing:
            self.step += 1
        elif self._take:
            need = self._crossings(self._take)
            if need:
                self.pool.take(need)
            self.step += self._take
        step, decoding, finishing = self.step, self.decoding, self._finishing
        while finishing and finishing[0][0] <= step:
            job = heappop(finishing)[2]
            if job.finish == step and decoding.pop(job.number, None) is not None:
                self._leave(job)
                job.finish = -1
                self.ended.append(job)
        if self.ready:
            for job in self.ready:
                self._emit_first(job, now_s)
            self.ready = []
        self._begin(now_s)

    def _emit_first(self, job: Job, now_s: float) -> None:
        step, known = self.step, job.known
        job.generated = generated = job.generated + 1
        if job.first_s == inf:
            job.first_s = now_s
            self.started.append(job)
        job.first = step
        if generated >= job.output:
            size = self.block_tokens
            job.private = -(-known // size) - job.prompt
            self.pool.release(job, known // size - job.prompt)
            self.ended.append(job)
            return
        job.finish = finish = step + job.output - generated
        heappush(self._finishing, (finish, job.number, job))
        self.decoding[job.number] = job
        self._base += known + 1 - step
        self._cross[(step - known) % self.block_tokens] += 1

    def _leave(self, job: Job) -> None:
        """One that decoded, and is no longer in `decoding`, gives its blocks back."""
        size, known, first = self.block_tokens, job.known, job.first
        self._base -= known + 1 - first
        self._cross[(first - known) % size] -= 1
        computed = known + self.step - first
        job.private = -(-computed // size) - job.prompt
        self.pool.release(job, computed // size - job.prompt)

    def _crossings(self, steps: int) -> int:
        """How many new blocks the next `steps` passes need."""
        size = self.block_tokens
        cross = self._cross
        low = self.step % size
        high = low + steps
        if high <= size:
            return sum(cross[low:high])
        rounds, rest = divmod(steps, size)
        high = low + rest
        need = rounds * len(self.decoding) + sum(cross[low:high])
        return need + sum(cross[: high - size]) if high > size else need

    def _preempt(self) -> None:
        """The last that came loses its blocks and waits again, in front."""
        self.preemptions += 1
        if self.prefilling:
            job = self.prefilling.pop()
            self.pool.release(job)
        else:
            job = self.decoding.popitem()[1]
            generated = job.generated + self.step - job.first
            self._leave(job)
            job.generated = generated
            job.known = job.tokens + generated
            job.finish = -1
        job.computed = job.fetched = 0
        job.again = True
        self.waiting.appendleft(job)

    def _begin(self, now_s: float) -> None:
        """Plan the pass or the stretch that starts now."""
        pool, decoding = self.pool, self.decoding
        self._now_s = now_s
        self._passing = False
        preempted = False
        need = 0
        if decoding:
            at = self.step % self.block_tokens
            while self._cross[at] > pool.capacity - pool.active:
                self._preempt()
                preempted = True
            need = self._cross[at]
        if not preempted and not self.prefilling and not self.waiting:
            self.blocked = False
            self._stretch(now_s)
            return
        if need:
            pool.take(need)
        tokens, products = self._prefill(preempted)
        if not tokens:
            if need:
                # Decoding alone counts its blocks when the stretch is over.
                pool.active -= need
                pool.free += need
            if preempted and not decoding:
                self._begin(now_s)  # this pass was empty
            else:
                self._stretch(now_s)
            return
        fixed_s, token_s, token2_s, context_s, decode_s, request_s, kv_s, kv2_s = self._seconds_of
        took_s = fixed_s + tokens * (token_s + token2_s * tokens)
        took_s += context_s * products
        if requests := len(decoding):
            if (more := self._cross[self.step % self.block_tokens] - need) > 0:
                pool.take(more)  # for those whose KV has just come
            kv = self._base + self.step * requests
            step_s = decode_s + request_s * requests + kv * (kv_s + kv2_s * kv)
            if step_s > 0.0:
                took_s += step_s
        self._passing = True
        self.end_s = now_s + took_s

    def _prefill(self, preempted: bool) -> tuple[int, int]:
        """Put prompt tokens into this pass: how many, and the sum of their products with their contexts."""
        budget = self.times.step_tokens - len(self.decoding)
        total = products = 0
        prefilling = self.prefilling
        while prefilling and budget > 0:
            job = prefilling[0]
            before = job.computed
            tokens = job.known - before
            if tokens > budget:
                tokens = budget
            if not self._compute(job, tokens):
                self._preempt()
                preempted = True
                continue
            total += tokens
            products += tokens * before
            budget -= tokens
            if before + tokens < job.known:
                break
            self.ready.append(prefilling.pop(0))
        self.blocked = False
        if preempted or prefilling or budget <= 0 or not self.waiting:
            return total, products
        return self._admit(budget, total, products)

    def _admit(self, budget: int, total: int, products: int) -> tuple[int, int]:
        """Begin with those that wait, as long as there is room in this pass and in the pool."""
        pool, ready, prefilling, waiting = self.pool, self.ready, self.prefilling, self.waiting
        size, capacity = self.block_tokens, pool.capacity
        slots = self.times.requests_max - len(self.decoding) - len(ready)
        while waiting and budget > 0:
            job = waiting[0]
            known = job.known
            whole = known // size + 1 if job.given else -(-known // size)
            if whole > capacity:
                self.failed.append(waiting.popleft())
                continue
            found, held = pool.find(job.path)
            most = (known - 1) // size
            if found > most:
                found = most
            if held > found:
                held = found
            if slots <= 0 or whole - held > capacity - pool.active:
                self.blocked = True
                break
            waiting.popleft()
            slots -= 1
            if job.found < 0:
                job.found = found * size
            if job.fetched:
                if found < job.fetched and found >= job.fetch_from:
                    found = min(job.fetched, most)
                elif job.begun_s == inf:
                    job.fetched = 0
            if job.begun_s == inf:
                job.begun_s = self._now_s
            if job.given and not job.again:
                self._take_over(job)
                budget -= 1
                continue
            before = found * size
            tokens = known - before
            if tokens > budget:
                tokens = budget
            job.computed = after = before + tokens
            blocks = after // size
            if blocks > job.prompt:
                blocks = job.prompt
            pool.grow(job, blocks)
            if private := -(-after // size) - blocks:
                pool.take(private)
                job.private = private
            total += tokens
            products += tokens * before
            budget -= tokens
            if after < known:
                prefilling.append(job)
                break
            ready.append(job)
        return total, products

    def _take_over(self, job: Job) -> None:
        """A request whose KV has come begins to decode; the first token came with it."""
        self.pool.grow(job, job.prompt)
        job.private = -(-job.known // self.block_tokens) - job.prompt
        if job.private:
            self.pool.take(job.private)
        job.computed = job.known
        self._emit_first(job, self._now_s)

    def _compute(self, job: Job, tokens: int) -> bool:
        """Give a request the blocks for so many more tokens; False if there are not enough."""
        size, pool = self.block_tokens, self.pool
        after = job.computed + tokens
        need = -(-after // size) - job.blocks - job.private
        if need > pool.capacity - pool.active:
            return False
        whole = after // size
        if whole > job.prompt:
            whole = job.prompt
        if (private := job.private) and whole > job.blocks:
            pool.active -= private
            pool.free += private
            job.private = 0
        if whole > job.blocks:
            pool.grow(job, whole - job.blocks)
        if more := -(-after // size) - job.blocks - job.private:
            pool.take(more)
            job.private += more
        job.computed = after
        return True

    def _stretch(self, now_s: float) -> None:
        """Decode until somebody ends, or the blocks do. Whoever was preempted cannot come back before: what it needs is
        more than it had, and less than that is left."""
        requests = len(self.decoding)
        if not requests:
            self.end_s = inf
            return
        finishing = self._finishing
        while finishing[0][2].finish != finishing[0][0]:
            heappop(finishing)
        steps = finishing[0][0] - self.step
        left = self.pool.capacity - self.pool.active
        if steps * requests // self.block_tokens + requests > left and self._crossings(steps) > left:
            low, high = 1, steps
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._crossings(middle) <= left else (low, middle)
            steps = low
        kv = self._base + self.step * requests
        most = kv + steps * requests
        if most > self._sure_kv:
            times = self.times
            if min(times.decode_s(requests, kv), times.decode_s(requests, most)) <= 0.0:
                steps = 1
        self._take = steps
        self.end_s = now_s + max(self._seconds(steps), 0.0)  # beyond what was fitted, a step takes no time

    def _seconds(self, steps: int) -> float:
        """How long so many passes take that only decode: the sum of the polynomial over their growing lengths."""
        _, _, _, _, fixed_s, request_s, kv_s, kv2_s = self._seconds_of
        requests = len(self.decoding)
        kv = self._base + self.step * requests
        pairs = steps * (steps - 1) // 2
        whole = steps * (fixed_s + request_s * requests)
        whole += kv_s * (steps * kv + requests * pairs)
        if kv2_s:
            squares = pairs * (2 * steps - 1) / 3
            whole += kv2_s * (steps * kv * kv + 2 * kv * requests * pairs + requests * requests * squares)
        return whole

    def _shorten(self, now_s: float) -> None:
        """End the stretch with the pass that is under way now."""
        take = self._take
        if not take or self.end_s <= now_s:
            return
        seconds = self._seconds
        past_s = now_s - self._now_s
        low = int(past_s * take / (self.end_s - self._now_s))
        low_s = seconds(low)
        while low < take and low_s < past_s:
            low += 1
            low_s = seconds(low)
        while low > 0 and (before_s := seconds(low - 1)) >= past_s:
            low -= 1
            low_s = before_s
        if low < take:
            self._take = low
            self.end_s = self._now_s + low_s

    def clear(self) -> list[Job]:
        """The engine dies: everything that it held is gone. The requests that it had, in no state."""
        for job in self.decoding.values():
            job.generated += self.step - job.first
        lost = [*self.decoding.values(), *self.ready, *self.prefilling, *self.waiting]
        self.pool.clear()
        self.waiting.clear()
        self.prefilling.clear()
        self.ready = []
        self.decoding.clear()
        self._finishing.clear()
        self._base = 0
        self._cross = [0] * self.block_tokens
        self.end_s = inf
        self.blocked = False
        return lost


def _sure_kv(times: EngineTimes, capacity_tokens: int) -> int:
    """With how much KV a decode step takes some time for sure, whoever asks: fits may be negative somewhere. A concave
    curve is above 0 between two points where it is."""
    bends_down = times.decode_kv2_s <= 0 <= times.decode_request_s
    is_sure = bends_down and min(times.decode_s(1, 0), times.decode_s(1, capacity_tokens)) > 0
    return capacity_tokens if is_sure else -1
