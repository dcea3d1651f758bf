"""An engine that jumps from event to event against one that does every pass and every token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.enginetimes import EngineTimes
from headwater.sim.fleet.engine import Engine, Job
from headwater.sim.fleet.pool import Held, Path, Pool

SIZE = 4
TIMES = EngineTimes(0.01, 0.001, 1e-6, 2e-7, 0.005, 0.0003, 1e-5, -1e-9, step_tokens=24, requests_max=5)
PATHS: tuple[Path, ...] = (((0, 2), (1, 5)), ((0, 2), (2, 3)), ((3, 6),), ((0, 2),))


class Slow:
    """Passes one after another, as the theory of operation says it; lengths and blocks counted anew in each."""

    def __init__(self, blocks: int) -> None:
        self.pool = Pool(blocks)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def left(self) -> int:
        return self.pool.capacity - self.pool.active

    def grow(self, job: Job, until: int) -> bool:
        need = -(-until // SIZE) - job.blocks - job.private
        if need > self.left():
            return False
        whole = min(until // SIZE, job.prompt)
        if whole > job.blocks and job.private:
            self.pool.active -= job.private
            self.pool.free += job.private
            job.private = 0
        self.pool.grow(job, whole - job.blocks)
        more = -(-until // SIZE) - job.blocks - job.private
        self.pool.take(more)
        job.private += more
        job.computed = until
        return True

    def release(self, job: Job) -> None:
        done = job.computed >= job.known
        self.pool.release(job, job.computed // SIZE - job.prompt if done else 0)

    def one_pass(self, now: float) -> float:
        preempted = False
        lengths = []
        for job in list(self.running):
            if job in self.running and job.generated and job.computed >= job.tokens and job.first:
                while job in self.running and not self.grow(job, job.computed + 1):
                    victim = self.running.pop()
                    self.release(victim)
                    victim.computed, victim.first = 0, 0
                    victim.known = victim.tokens + victim.generated
                    self.waiting.insert(0, victim)
                    preempted = True
        lengths = [job.computed for job in self.running if job.first]
        decoding = [job for job in self.running if job.first]
        budget = TIMES.step_tokens - len(decoding)
        total = products = 0
        for job in list(self.running):
            if not job.first and budget:
                tokens = min(job.known - job.computed, budget)
                if not self.grow(job, job.computed + tokens):
                    self.running.remove(job)
                    self.release(job)
                    job.computed = 0
                    self.waiting.insert(0, job)
                    preempted = True
                    continue
                total, products, budget = total + tokens, products + tokens * (job.computed - tokens), budget - tokens
        prefilling = any(not job.first and job.computed < job.known for job in self.running)
        while self.waiting and budget and not preempted and not prefilling and len(self.running) < TIMES.requests_max:
            job = self.waiting[0]
            found, held = self.pool.find(job.path)
            found = min(found, (job.known - 1) // SIZE)
            if -(-job.known // SIZE) - min(held, found) > self.left():
                break
            self.waiting.pop(0)
            self.running.append(job)
            self.pool.grow(job, found)
            job.computed = found * SIZE
            tokens = min(job.known - job.computed, budget)
            assert self.grow(job, job.computed + tokens)
            total, products, budget = total + tokens, products + tokens * (job.computed - tokens), budget - tokens
            prefilling = job.computed < job.known
        took = 0.0
        if total:
            took += TIMES.prefill_fixed_s + total * (TIMES.prefill_token_s + TIMES.prefill_token2_s * total)
            took += TIMES.prefill_context_s * products
        took += TIMES.decode_s(len(decoding), sum(lengths))
        end = now + took
        for job in decoding:
            job.generated += 1
        ended = [job for job in decoding if job.generated >= job.output]
        for job in self.running:
            if not job.first and job.computed >= job.known:
                job.first = 1
                job.generated += 1
                self.first.setdefault(job.number, end)
                if job.generated >= job.output:
                    ended.append(job)
        for job in sorted(ended, key=lambda it: (it not in decoding, it.number)):
            self.running.remove(job)
            self.release(job)
            self.last[job.number] = end
        return end


def jobs(rows: list[tuple[int, int, int, int]]) -> list[tuple[float, Job]]:
    now = 0.0
    found = []
    for number, (gap, which, tail, output) in enumerate(rows):
        now += gap / 50
        path = PATHS[which]
        blocks = sum(count for _, count in path)
        found.append((now, Job(number, blocks * SIZE + tail, output, path, blocks)))
    return found


def fast(rows: list[tuple[int, int, int, int]], blocks: int) -> tuple[Engine, dict[int, float], dict[int, float]]:
    engine = Engine(0, TIMES, blocks, SIZE)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    todo = jobs(rows)
    while todo or engine.end_s < math.inf:
        now = engine.end_s
        if todo and todo[0][0] <= now:
            now = todo[0][0]
            while todo and todo[0][0] == now:
                engine.waiting.append(todo.pop(0)[1])
            engine.wake(now)
        else:
            engine.fire()
        first |= {job.number: job.first_s for job in engine.started}
        last |= {job.number: now for job in engine.ended}
        engine.started.clear()
        engine.ended.clear()
    return engine, first, last


def slow(rows: list[tuple[int, int, int, int]], blocks: int) -> Slow:
    engine = Slow(blocks)
    todo = jobs(rows)
    now = 0.0
    while todo or engine.running or engine.waiting:
        if not engine.running and not engine.waiting:
            now = max(now, todo[0][0])
        while todo and todo[0][0] <= now:
            engine.waiting.append(todo.pop(0)[1])
        now = engine.one_pass(now)
    return engine


Row = st.tuples(st.integers(0, 9), st.integers(0, len(PATHS) - 1), st.integers(0, SIZE - 1), st.integers(1, 30))


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(Row, min_size=1, max_size=12), blocks=st.integers(17, 60))
def test_jumps_end_where_steps_do(rows: list[tuple[int, int, int, int]], blocks: int) -> None:
    engine, first, last = fast(rows, blocks)
    reference = slow(rows, blocks)
    assert set(first) == set(last) == set(range(len(rows)))
    assert first == pytest.approx(reference.first, rel=1e-9)
    assert last == pytest.approx(reference.last, rel=1e-9)
    assert engine.pool.active == 0
    assert [engine.pool.find(path) for path in PATHS] == [reference.pool.find(path) for path in PATHS]


def test_preemption_happens_in_these_tests() -> None:
    rows = [(0, 2, 0, 30), (0, 2, 1, 30), (0, 0, 2, 30)]
    engine, _, last = fast(rows, 17)
    assert engine.preemptions > 0
    assert last == pytest.approx(slow(rows, 17).last, rel=1e-9)


def test_what_never_fits_fails_and_the_next_one_runs() -> None:
    engine = Engine(0, TIMES, 4, SIZE)
    engine.waiting += [Job(0, 24, 3, ((3, 6),), 6), Job(1, 8, 2, ((0, 2),), 2)]
    engine.wake(0.0)
    assert [job.number for job in engine.failed] == [0]
    while engine.end_s < math.inf:
        engine.fire()
    assert [job.number for job in engine.ended] == [1]


def test_an_answer_that_outgrows_the_pool_fails() -> None:
    engine = Engine(0, TIMES, 4, SIZE)
    engine.waiting.append(Job(0, 8, 30, ((0, 2),), 2))
    engine.wake(0.0)
    while engine.end_s < math.inf:
        engine.fire()
    assert [job.number for job in engine.failed] == [0]
    assert engine.pool.active == 0


def test_held_is_given_back_whole() -> None:
    pool = Pool(8)
    held = Held(((0, 5),))
    pool.grow(held, 3)
    pool.release(held)
    assert (held.blocks, held.deepest, held.spans) == (0, 0, [])


def test_who_comes_with_its_kv_decodes_beside_a_prompt() -> None:
    engine = Engine(0, TIMES, 20, SIZE)
    given, other = Job(0, 8, 6, ((0, 2),), 2), Job(1, 24, 2, ((3, 6),), 6)
    given.given = True
    engine.waiting += [given, other]
    engine.wake(1.0)
    assert given.first_s == 1.0
    step_s = TIMES.prefill_fixed_s + 23 * (TIMES.prefill_token_s + TIMES.prefill_token2_s * 23)
    assert engine.end_s == pytest.approx(1.0 + step_s + TIMES.decode_s(1, 9))
    while engine.end_s < math.inf:
        engine.fire()
    assert sorted(job.number for job in engine.ended) == [0, 1]
    assert engine.pool.active == 0
