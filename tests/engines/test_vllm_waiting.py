"""Requests that wait for lower tiers: they hold nothing, hold nobody up, and always come to an end."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.core.cost import PrefillSpeed
from headwater.engines.vllm.asking import POLL_S, Questions, StepTimes
from headwater.engines.vllm.stats import CopySums
from headwater.errors import HeadwaterError, UnavailableError
from headwater.node.client import fetch_status
from headwater.node.messages import Matched
from tests.engines.harness import Engine, Shape
from tests.engines.oracle import continuation
from tests.engines.served import CHUNK, DENSE, MODES, ON_CPU, WAIT_S, WINDOW, Below, Served, decider, leftovers
from tests.engines.test_vllm_metrics import total
from tests.engines.workload import words

CHUNKS = 5
PROMPT = words(CHUNKS * CHUNK + 7, 3)


def begin(served: Served, mode: dict[str, Any], shape: Shape = DENSE, **extra: Any) -> Engine:
    """An engine that has nothing of a prompt that the node holds."""
    other = served.engine(shape, mode)
    other.add("saved", PROMPT)
    other.run()
    return served.engine(shape, mode, **extra)


def steps(engine: Engine, count: int = 30) -> None:
    for _ in range(count):
        assert engine.step(), "nothing to do while a request waits"


def computed(engine: Engine, name: str) -> int:
    return engine.computed_tokens.get(name, 0)


def check(engine: Engine, name: str, count: int, loaded_chunks: int) -> None:
    """Right output, with so many chunks loaded and the rest computed once."""
    assert engine.outputs[name] == continuation(PROMPT, count)
    assert engine.loaded_tokens(name) == loaded_chunks * CHUNK
    assert computed(engine, name) == len(PROMPT) + count - 1 - loaded_chunks * CHUNK


# ---- the ways in which a wait ends ---------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("shape", [DENSE, WINDOW, Shape(tp=2)], ids=["dense", "window", "tp2"])
@pytest.mark.parametrize("here", [0, 2])
def test_what_comes_from_below_is_loaded(served, mode, shape, here) -> None:
    engine = begin(served, mode, shape)
    below = Below(served, here)
    engine.add("a", PROMPT, max_tokens=5)
    engine.add("other", words(100, 8), max_tokens=9)
    free = engine.pool.get_num_free_blocks()
    engine.run(until=lambda: "other" in engine.finished)
    assert engine.outputs["other"] == continuation(words(100, 8), 9)
    steps(engine)
    assert computed(engine, "a") == 0
    assert engine.pool.get_num_free_blocks() == free
    below.came(3, waiting=True)
    steps(engine)
    assert computed(engine, "a") == 0
    below.came(CHUNKS)
    engine.run()
    check(engine, "a", 5, CHUNKS)
    sums = total(engine)
    assert (sums["waits"], sums["cut_waits"]) == (1, 0)
    assert (sums["host_tokens"], sums["disk_tokens"]) == (here * CHUNK, (CHUNKS - here) * CHUNK)
    assert 0 < sums["wait_seconds"][0] < WAIT_S


@MODES
@pytest.mark.parametrize("chunks", [0, 2])
def test_what_the_node_gives_up_is_computed(served, mode, chunks) -> None:
    engine = begin(served, mode)
    below = Below(served)
    engine.add("a", PROMPT, max_tokens=5)
    steps(engine)
    below.came(chunks)
    engine.run()
    check(engine, "a", 5, chunks)
    assert (total(engine)["waits"], total(engine)["cut_waits"]) == (1, 0)


@MODES
def test_nobody_waits_longer_than_a_load_may_take(served, mode) -> None:
    engine = begin(served, mode, load_s=0.1)
    below = Below(served, here=1)
    engine.add("a", PROMPT, max_tokens=5)
    engine.run()
    check(engine, "a", 5, 1)
    sums = total(engine)
    assert (sums["waits"], sums["cut_waits"]) == (1, 1)
    assert 0.05 < sums["wait_seconds"][0] < WAIT_S / 2
    assert below.forgotten == ["a"]


@MODES
def test_a_request_that_is_cut_stays_cut_while_it_has_no_blocks(served, mode) -> None:
    engine = begin(served, mode, load_s=0.02)
    below = Below(served, here=1)
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 2)
    engine.add("a", PROMPT, max_tokens=5)
    engine.run(until=lambda: below.forgotten)
    asked = len(below.asked)
    steps(engine)
    assert len(below.asked) == asked
    engine.pool.free_blocks(taken)
    engine.run()
    check(engine, "a", 5, 1)
    assert below.forgotten == ["a"]


@MODES
def test_an_abort_while_waiting_leaves_nothing(served, mode) -> None:
    engine = begin(served, mode)
    below = Below(served, here=1)
    engine.add("a", PROMPT, max_tokens=5)
    engine.add("b", PROMPT, max_tokens=5)
    steps(engine)
    engine.abort("a")
    assert below.forgotten == ["a"]
    engine.step(abort=["b"])
    assert below.forgotten == ["a", "b"]
    engine.run()
    assert not leftovers(engine)
    assert (total(engine)["waits"], engine.load_log) == (2, [])


@MODES
def test_a_request_that_is_aborted_before_it_was_scheduled_is_forgotten(served, mode) -> None:
    engine = begin(served, mode)
    below = Below(served)
    engine.add("a", PROMPT)
    engine.abort("a")
    assert below.forgotten == ["a"]
    engine.run()
    assert total(engine)["waits"] == 0


@MODES
def test_a_node_that_dies_is_not_waited_for(served, mode) -> None:
    engine = begin(served, mode)
    Below(served, here=2)
    engine.add("a", PROMPT, max_tokens=5)
    steps(engine)
    served.stop()
    engine.run()
    check(engine, "a", 5, 0)
    assert (total(engine)["waits"], total(engine)["cut_waits"]) == (1, 1)


@MODES
def test_a_node_that_falls_silent_is_not_waited_for(served, mode) -> None:
    engine = begin(served, mode, metadata_s=0.2, connect_s=0.2)
    Below(served, here=2)
    engine.add("a", PROMPT, max_tokens=5)
    steps(engine)
    with served.paused():
        engine.run()
    check(engine, "a", 5, 0)
    assert total(engine)["cut_waits"] == 1


def test_a_preempted_request_may_wait_again(served) -> None:
    engine = begin(served, ON_CPU)
    below = Below(served)
    engine.add("a", PROMPT, max_tokens=30)
    steps(engine)
    below.came(CHUNKS)
    engine.run(until=lambda: len(engine.outputs["a"]) > 3)
    engine.preempt("a")
    engine.forget()
    below.came(0, waiting=True)
    steps(engine, 10)
    below.came(CHUNKS)
    engine.run()
    assert engine.outputs["a"] == continuation(PROMPT, 30)
    assert total(engine)["waits"] == 2
    assert [load.external_tokens for _, load in engine.load_log] == [CHUNKS * CHUNK] * 2


# ---- when the node is asked ----------------------------------------------------------------------------


@MODES
def test_the_node_is_asked_when_a_request_arrives(served, mode) -> None:
    shape = Shape(max_requests=1)
    engine = begin(served, mode, shape)
    engine.add("first", words(40, 9), max_tokens=60)
    engine.step()
    before = fetch_status(served.address)["namespaces"][0]["lookup_tokens"]
    below = Below(served)
    engine.add("a", PROMPT, max_tokens=5)
    assert [it.request for it in below.asked] == ["a"]
    below.came(CHUNKS)
    engine.run()
    check(engine, "a", 5, CHUNKS)
    # It queued for longer than it had to wait.
    assert (total(engine)["waits"], total(engine)["disk_tokens"]) == (0, CHUNKS * CHUNK)
    after = fetch_status(served.address)["namespaces"][0]["lookup_tokens"]
    assert after - before == CHUNKS * CHUNK


@MODES
def test_the_node_brings_nothing_up_that_the_engine_has_itself(served, mode) -> None:
    engine = begin(served, mode)
    engine.add("a", PROMPT)
    engine.run()
    below = Below(served)
    engine.add("again", PROMPT)
    engine.run()
    assert not below.asked
    assert computed(engine, "again") == len(PROMPT) % 16


@MODES
def test_the_node_brings_nothing_up_that_would_not_be_loaded(served, mode) -> None:
    engine = begin(served, mode, min_load_tokens=10 * CHUNK)
    below = Below(served)
    for name, fields in (("short", {}), ("skip", {"skip_reading": True}), ("out", {"transfer": {"headwater.skip": 1}})):
        engine.add(name, PROMPT, **fields)
        engine.run()
        engine.forget()
    assert not below.asked


@MODES
def test_vllm_is_told_which_tier_a_hit_came_from(served, mode) -> None:
    engine = begin(served, mode)
    found: list[dict[str, int]] = []
    sources = engine.connector.get_external_cache_hit_sources

    def note(request: Any, external_tokens: int) -> dict[Any, int]:
        split = sources(request, external_tokens)
        found.append({source.value: tokens for source, tokens in split.items()})
        assert sum(split.values()) == external_tokens
        return split

    engine.connector.get_external_cache_hit_sources = note
    for name, tier in (("a", "disk"), ("b", "remote")):
        below = Below(served, here=2, tier=tier)
        engine.add(name, PROMPT)
        steps(engine, 5)
        below.came(CHUNKS)
        engine.run()
        engine.forget()
    assert found == [
        {"host": 2 * CHUNK, "disk": 3 * CHUNK},
        {"host": 2 * CHUNK, "external_unspecified": 3 * CHUNK},
    ]
    assert total(engine)["remote_tokens"] == 3 * CHUNK


@MODES
def test_the_node_is_told_how_fast_the_engine_is(served, mode) -> None:
    engine = begin(served, mode)
    below = Below(served)
    below.came(0)
    engine.add("first", words(200, 1))
    engine.run()
    assert below.asked[-1].tokens_s == 0
    assert decider(engine).speed.steps >= 200 // DENSE.max_batch_tokens
    engine.add("second", words(200, 2))
    engine.run()
    rate = below.asked[-1].tokens_s
    assert rate > 0
    # Half of it is in the engine: to the node it is as if that half took no time.
    engine.add("third", words(200, 2)[:96] + words(96, 4))
    expected = 192 / decider(engine).speed.seconds(96)
    assert below.asked[-1].tokens_s == pytest.approx(expected, rel=1e-6)
    engine.run()


# ---- how often -----------------------------------------------------------------------------------------


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


@dataclass
class FakeSession:
    """A session that answers what the test says, and takes its time."""

    clock: Clock
    answer: Matched = field(default_factory=lambda: Matched(0, True))
    took_s: float = 0.0
    asked: list[tuple[str, bool, float]] = field(default_factory=list)
    forgotten: list[list[str]] = field(default_factory=list)
    broken: bool = False

    def match(self, keys: Sequence[bytes], *, counts: bool, request: str, tokens_s: float) -> Matched:
        if self.broken:
            raise UnavailableError("gone")
        self.asked.append((request, counts, tokens_s))
        self.clock.at_s += self.took_s
        return self.answer

    def forget(self, names: list[str]) -> int:
        self.forgotten.append(list(names))
        return len(names)


class Scene:
    """Questions, a fake node, and a clock."""

    def __init__(self, wait_s: float = 5.0, step_tokens: int = 512) -> None:
        self.clock = Clock()
        self.session = FakeSession(self.clock)
        self.node: Any = SimpleNamespace(session=self.session)
        self.sums, self.speed = CopySums(), PrefillSpeed(step_tokens)
        self.questions = Questions(self.node, self.speed, CHUNK, wait_s, self.lost, self.sums, self.clock)

    def lost(self, session: Any, error: HeadwaterError) -> None:
        self.node.session = None

    def ask(self, name: str = "a", chunks: int = 4, local: int = 0) -> Matched:
        keys: Any = [bytes(16)] * chunks
        answer = self.questions.ask(name, keys, local, counts=True, fetches=True)
        if answer.waiting:
            self.questions.told_to_wait(name)
        return answer


def test_polls_are_few_however_often_vllm_asks() -> None:
    it = Scene()
    for _ in range(1000):
        it.clock.at_s += 0.0001
        assert it.ask().waiting
    assert len(it.session.asked) <= 0.1 / POLL_S + 1
    assert len(it.session.asked) >= 0.1 / POLL_S / 2


def test_long_questions_are_asked_less_often() -> None:
    it = Scene(wait_s=100.0)
    it.session.took_s = 0.003
    for _ in range(1000):
        it.clock.at_s += 0.001
        assert it.ask().waiting
    busy_s = len(it.session.asked) * 0.003
    assert 1.0 / 40 < busy_s < (1.0 + busy_s) / 9


def test_many_that_wait_are_asked_for_in_turn_and_not_all_the_time() -> None:
    it = Scene(wait_s=100.0)
    it.session.took_s = 0.0001
    names = [f"{number}" for number in range(60)]
    for _ in range(400):
        it.clock.at_s += 0.001
        for name in names:
            assert it.ask(name).waiting
    lasted_s = it.clock.at_s - 100.0
    assert len(it.session.asked) * it.session.took_s < 0.15 * lasted_s
    times = [sum(asked == name for asked, _, _ in it.session.asked) for name in names]
    assert min(times) >= 5
    assert max(times) - min(times) <= 3


def test_a_slow_node_does_not_make_the_deadline_late() -> None:
    it = Scene(wait_s=1.0)
    it.session.took_s = 0.4
    begun_s = it.clock.at_s
    while it.ask().waiting:
        it.clock.at_s += 0.001
    assert it.clock.at_s - begun_s < 2.5


def test_a_final_answer_is_asked_for_again_when_it_is_old() -> None:
    it = Scene()
    it.session.answer = Matched(2)
    assert it.ask() == Matched(2)
    it.session.answer = Matched(3)
    assert it.ask() == Matched(2)
    it.clock.at_s += 2 * POLL_S
    assert it.ask() == Matched(3)
    it.clock.at_s += 2 * POLL_S
    it.session.answer = Matched(4)
    assert it.ask(chunks=5) == Matched(4)


def test_a_longer_prompt_is_a_new_question() -> None:
    it = Scene()
    it.ask(chunks=4)
    it.ask(chunks=5)
    assert len(it.session.asked) == 2


def test_time_is_over_at_the_deadline_and_stays_over() -> None:
    it = Scene(wait_s=1.0)
    waits = 0
    while it.ask().waiting:
        waits += 1
        it.clock.at_s += 0.01
    assert 99 <= waits <= 102
    assert it.session.forgotten == [["a"]]
    it.clock.at_s += 1.0
    it.session.answer = Matched(1)
    assert it.ask() == Matched(1)
    assert it.session.asked[-1][0] == ""
    it.questions.end("a")
    assert it.session.forgotten == [["a"]]
    assert (it.sums.waits, it.sums.cut_waits) == (1, 1)
    assert it.sums.wait_seconds[0] == pytest.approx(1.0, abs=0.05)


def test_the_node_forgets_finished_questions_many_at_a_time() -> None:
    it = Scene()
    it.session.answer = Matched(1)
    for number in range(100):
        it.ask(f"{number}")
        it.questions.end(f"{number}")
    assert 1 <= len(it.session.forgotten) <= 4
    it.questions.close()
    assert sorted(itertools.chain.from_iterable(it.session.forgotten)) == sorted(map(str, range(100)))
    assert it.sums.waits == 0


def test_a_lost_node_holds_nothing() -> None:
    it = Scene()
    assert it.ask().waiting
    it.session.broken = True
    it.clock.at_s += 1.0
    assert it.ask() == Matched(0)
    assert it.ask() == Matched(0)
    assert len(it.questions) == 0
    assert (it.sums.waits, it.sums.cut_waits) == (1, 1)


def test_a_node_that_came_back_is_asked_anew() -> None:
    it = Scene(wait_s=1.0)
    assert it.ask().waiting
    it.clock.at_s += POLL_S / 2
    it.node.session = FakeSession(it.clock)
    assert it.ask().waiting
    assert len(it.node.session.asked) == 1
    it.clock.at_s += 1.0
    assert not it.ask().waiting


def test_long_names_are_shortened_and_stay_different() -> None:
    it = Scene()
    names = ["x" * 2000 + end for end in ("a", "b", "a")]
    for name in names:
        it.ask(name)
        it.questions.end(name)
    told = [name for name, _, _ in it.session.asked]
    assert told[0] == told[2] != told[1]
    assert all(len(name) <= 512 for name in told)


# ---- how fast the engine is ----------------------------------------------------------------------------


@dataclass
class Steps:
    """An engine's steps at a made-up speed: 10 ms each, 1 ms for a decode, 0.2 ms for a prompt token."""

    clock: Clock
    times: StepTimes
    ahead: int
    flying: list[tuple[int, float]] = field(default_factory=list)
    busy_until_s: float = 0.0

    def run(self, scheduled: dict[str, int], drafts: dict[str, list[int]] | None = None) -> None:
        output = SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=drafts or {})
        number = self.times.began(output)
        decodes = sum(count == 1 for count in scheduled.values())
        prefill = sum(count for count in scheduled.values() if count > 1)
        start_s = max(self.clock.at_s, self.busy_until_s)
        self.busy_until_s = start_s + 0.010 + 0.001 * decodes + 0.0002 * prefill
        self.flying.append((number, self.busy_until_s))
        while len(self.flying) > self.ahead:
            self.finish()

    def finish(self) -> None:
        number, end_s = self.flying.pop(0)
        self.clock.at_s = max(self.clock.at_s, end_s)
        self.times.ended(number)


def stepping() -> tuple[Steps, PrefillSpeed]:
    clock, speed = Clock(), PrefillSpeed(512)
    return Steps(clock, StepTimes(speed, clock), 0), speed


def prompt(steps: Steps, tokens: int, decodes: int = 0) -> None:
    for start in range(0, tokens, 512):
        others = {f"d{n}": 1 for n in range(decodes)}
        steps.run({"a": min(512, tokens - start), **others})


def test_the_rate_of_prompts_is_learned() -> None:
    it, speed = stepping()
    for tokens in (100, 700, 2000, 300) * 5:
        prompt(it, tokens)
        for _ in range(20):
            it.run({"a": 1, "b": 1})
        it.clock.at_s += 3.0  # nothing to do
    assert speed.steps == 40
    assert speed.seconds(2048) == pytest.approx(4 * (0.010 + 0.0002 * 512), rel=0.02)
    assert speed.seconds(100) == pytest.approx(0.010 + 0.0002 * 100, rel=0.05)


def test_decoding_beside_prompts_is_part_of_their_price() -> None:
    it, speed = stepping()
    for tokens in (100, 700, 2000, 300) * 5:
        prompt(it, tokens, decodes=40)
    assert speed.seconds(2048) == pytest.approx(4 * (0.050 + 0.0002 * 512), rel=0.05)


def test_two_prompts_in_a_step_share_it() -> None:
    it, speed = stepping()
    for _ in range(20):
        it.run({"a": 256, "b": 256})
        it.run({"a": 50, "b": 40})
    assert speed.seconds(512) == pytest.approx(0.010 + 0.0002 * 512, rel=0.02)


def test_drafts_are_not_prompts() -> None:
    it, speed = stepping()
    for _ in range(5):
        it.run({"a": 4, "b": 3}, drafts={"a": [1, 2, 3], "b": [1, 2]})
    assert speed.steps == 0


@pytest.mark.parametrize("empty", [False, True])
def test_steps_that_are_decided_ahead_are_timed_one_by_one(empty: bool) -> None:
    clock, speed = Clock(), PrefillSpeed(512)
    it = Steps(clock, StepTimes(speed, clock), ahead=1)
    for tokens in (100, 700, 2000, 300) * 5:
        prompt(it, tokens)
        if empty:
            it.run({})
        it.run({"a": 1})
        it.finish()
        clock.at_s += 1.0
    assert speed.seconds(2048) == pytest.approx(4 * (0.010 + 0.0002 * 512), rel=0.1)


def test_steps_whose_end_nobody_reports_are_left_out() -> None:
    clock, speed = Clock(), PrefillSpeed(512)
    times = StepTimes(speed, clock)
    output = SimpleNamespace(num_scheduled_tokens={"a": 100})
    for _ in range(1000):
        times.began(output)
    clock.at_s += 50.0
    last = times.began(output)
    clock.at_s += 0.25
    times.ended(last)
    times.ended(last)
    assert speed.steps == 1
    assert speed.seconds(100) == pytest.approx(0.25)
