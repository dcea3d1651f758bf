"""The probe on engines whose step times are known: what it measures is what they have, within its time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.calibrate.fit import fit
from headwater.calibrate.observations import Observations
from headwater.calibrate.probe import Effort, Probe, common_gaps
from headwater.calibrate.server import Answer, Dialect
from headwater.enginetimes import EngineTimes
from tests.calibrate.conftest import VirtualEngine

QUICK = EngineTimes(0.0165, 1.52e-5, 4.2e-10, 8.4e-10, 5.7e-3, 2e-5, 5e-8, step_tokens=4096)
SLOW = EngineTimes(0.08, 3.1e-3, 1.3e-6, 3.6e-6, 0.063, 8.8e-3, 1.3e-5, step_tokens=2048)


def probe(engine: VirtualEngine, effort: Effort, length_max: int = 4096) -> Observations:
    told: list[float] = []
    seen = Probe(engine, engine.served(length_max), effort, lambda done, _: told.append(done), engine.clock).run()
    assert told == sorted(told), "progress never goes back"
    assert told[-1] == 1.0
    return seen


@pytest.mark.parametrize("truth", [QUICK, SLOW])
def test_an_engine_is_recognised(truth: EngineTimes, seed: int) -> None:
    engine = VirtualEngine(truth, noise=0.02, seed=seed, outliers=0.03)
    seen = probe(engine, Effort(seconds=240, concurrency=8, seed=seed))
    times = fit(seen).times
    assert times.step_tokens == truth.step_tokens
    longest = max(it.tokens for it in seen.prefills)
    for tokens, context in ((100, 0), (longest // 2, 0), (longest, 0), (200, longest // 2)):
        assert times.prefill_s(tokens, context) == pytest.approx(truth.prefill_s(tokens, context), rel=0.1)
    for requests, kv in ((1, 100), (4, 1000), (8, 2000)):
        assert times.decode_s(requests, kv) == pytest.approx(truth.decode_s(requests, kv), rel=0.1)


def test_every_measured_number_is_the_engines(seed: int) -> None:
    """Lengths, contexts and KV are those that the engine saw, not those that were wished for."""
    seen = probe(VirtualEngine(QUICK, seed=seed), Effort(seconds=60, seed=seed))
    assert {it.context > 0 for it in seen.prefills} == {True, False}
    for prefill in seen.prefills:
        assert prefill.seconds == pytest.approx(QUICK.prefill_s(prefill.tokens, prefill.context), rel=1e-6)
    assert {it.requests for it in seen.decodes} == {1, 2, 4, 8}
    for decode in seen.decodes:
        assert decode.seconds == pytest.approx(QUICK.decode_s(decode.requests, decode.kv_tokens), rel=1e-3)
    assert not seen.notes


def test_it_ends_in_time_and_says_what_it_left_out(seed: int) -> None:
    engine = VirtualEngine(SLOW, noise=0.02, seed=seed)
    seen = probe(engine, Effort(seconds=60, seed=seed), length_max=32_768)
    assert engine.now_s < 66
    assert any("were not measured: no time" in it for it in seen.notes)
    assert fit(seen).measured.prefill_tokens[1] < 32_768 // 2


def test_an_engine_without_a_cache_is_measured_without_contexts(seed: int) -> None:
    seen = probe(VirtualEngine(QUICK, seed=seed, caches=False), Effort(seconds=60, seed=seed))
    assert {it.context for it in seen.prefills} == {0}
    assert any("no cached prefix" in it for it in seen.notes)
    assert fit(seen).times.prefill_context_s == pytest.approx(QUICK.prefill_context_s, rel=0.05)


def test_hits_are_counted_where_answers_do_not_tell(seed: int) -> None:
    """Of answers that say nothing, the engine's own count tells; without either there are no contexts."""

    class Counts(VirtualEngine):
        def together(self, *arguments: object) -> list[Answer]:
            return [replace(it, cached_tokens=None) for it in super().together(*arguments)]  # type: ignore[arg-type]

    seen = probe(Counts(QUICK, seed=seed), Effort(seconds=60, seed=seed))
    assert max(it.context for it in seen.prefills) > 3000
    silent = probe(VirtualEngine(QUICK, seed=seed, tells=False), Effort(seconds=60, seed=seed))
    assert {it.context for it in silent.prefills} == {0}


def test_no_prompt_was_sent_by_an_earlier_run(seed: int) -> None:
    """Else an engine that was measured before would have it, and seem quicker than it is."""
    engine = VirtualEngine(QUICK, seed=seed)
    first = probe(engine, Effort(seconds=60, seed=seed))
    again = probe(engine, Effort(seconds=60, seed=seed))
    assert [it.tokens for it in first.prefills if not it.context] == [
        it.tokens for it in again.prefills if not it.context
    ]


def test_what_the_user_says_is_not_measured(seed: int) -> None:
    engine = VirtualEngine(QUICK, seed=seed)
    seen = probe(engine, Effort(seconds=60, seed=seed, length_max=512, step_tokens=1000, concurrency=2))
    assert seen.step_tokens is not None
    assert seen.step_tokens.tokens == 1000
    assert max(map(len, engine.asked)) <= 512
    assert max(it.requests for it in seen.decodes) == 2


def test_text_is_counted_in_the_servers_tokens(seed: int) -> None:
    """A server that takes text only makes three tokens of each of our words."""

    class Text(VirtualEngine):
        dialect = Dialect(token_ids=False)

        def together(self, prompts: object, answer_tokens: object) -> list[Answer]:
            tripled = [[token for token in it for _ in range(3)] for it in prompts]  # type: ignore[attr-defined]
            return super().together(tripled, answer_tokens)  # type: ignore[arg-type]

    engine = Text(QUICK, seed=seed)
    engine.dialect = Dialect(token_ids=False)
    seen = probe(engine, Effort(seconds=60, seed=seed))
    assert max(map(len, engine.asked)) <= 4096
    assert max(it.tokens for it in seen.prefills) > 4000
    assert fit(seen).times.prefill_token_s == pytest.approx(QUICK.prefill_token_s, rel=0.05)


def test_gaps_count_only_while_all_decode() -> None:
    """The first stream is alone for its first three gaps, which are shorter."""
    early = Answer(0.0, (1.0, 1.1, 1.2, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8), 100, None)
    late = Answer(0.0, (1.3, 1.6, 1.9, 2.2, 2.5, 2.8, 2.9, 3.0), 50, None)
    found = common_gaps([early, late])
    assert found is not None
    assert found.times == pytest.approx([0.3] * 10)
    assert found.kv_tokens == pytest.approx(100 + 5.5 + 50 + 2.5)
    assert common_gaps([early, replace(late, token_s=(2.5, 2.8, 3.1))]) is None


@pytest.mark.parametrize("apart_s", [0.0, 0.001])
def test_tokens_that_come_in_bursts_count_by_their_mean(apart_s: float) -> None:
    pairs = Answer(0.0, tuple(1 + 0.2 * (number // 2) + apart_s * (number % 2) for number in range(12)), 10, None)
    found = common_gaps([pairs])
    assert found is not None
    assert found.seconds == pytest.approx((1.0 + apart_s) / 11)


def test_one_token_that_is_late_does_not_count() -> None:
    times = [1 + 0.1 * number + (0.9 if number > 5 else 0.0) for number in range(12)]
    found = common_gaps([Answer(0.0, tuple(times), 10, None)])
    assert found is not None
    assert found.seconds == pytest.approx(0.1)
