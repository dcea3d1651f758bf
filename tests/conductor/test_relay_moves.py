"""Streams that outlive their instance: killed after every token, twice, in every kind of request."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from headwater.conductor.http.exchange import Origin
from headwater.conductor.job import Kind, Refusal
from tests.conductor.engine import Gate, Script, events_of
from tests.conductor.relays import TIMES, Client, House, house, run, small, straight
from tests.conductor.toy import Bytes, Words

USAGE = {"include_usage": True}
LENGTH = 14
ASKS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "chat": (Kind.CHAT, {"max_tokens": LENGTH}),
    "completion": (Kind.COMPLETION, {"max_tokens": LENGTH}),
    "ids": (Kind.COMPLETION, {"prompt": [104, 105], "max_tokens": LENGTH, "return_token_ids": True}),
    "stop": (Kind.CHAT, {"max_tokens": 34, "stop": ["文文", "zzz"]}),
    "echo": (Kind.COMPLETION, {"max_tokens": LENGTH, "echo": True}),
    "endless": (Kind.CHAT, {}),
    "continuous": (Kind.CHAT, {"max_tokens": LENGTH, "stream_options": {**USAGE, "continuous_usage_stats": True}}),
}


async def killed(fields: dict[str, Any], kind: Kind, *scripts: Script, **options: Any) -> tuple[House, Client]:
    async with house(len(scripts) + 1, toy=Bytes(), length=50, retries=5, **options) as it:
        for engine, script in zip(it.engines, scripts, strict=False):
            engine.script(script)
        client = it.ask(kind, stream=True, **{"stream_options": USAGE, **fields})
        await client.ended()
        await it.settled()
        return it, client


def same(client: Client, expected: Client) -> None:
    """The client cannot tell."""
    assert client.ended_well
    assert client.text == expected.text
    events, others = client.events(), expected.events()
    assert {(it["id"], it["object"], it["created"], it["model"]) for it in events} == {
        (it["id"], it["object"], it["created"], it["model"]) for it in others
    }
    ids = [[i for it in side for c in it["choices"] for i in c.get("token_ids") or ()] for side in (events, others)]
    assert ids[0] == ids[1]
    finishes = [
        [c["finish_reason"] for it in side for c in it["choices"] if c["finish_reason"]] for side in (events, others)
    ]
    assert finishes[0] == finishes[1]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][name] == others[-1]["usage"][name]
    assert [sorted(it["choices"][0]) for it in events[1:2]] == [sorted(it["choices"][0]) for it in others[1:2]]


@pytest.mark.parametrize("name", list(ASKS))
def test_an_instance_dies_after_each_token(name: str) -> None:
    kind, fields = ASKS[name]

    async def test() -> None:
        expected = await straight(Bytes(), kind, {"stream": True, "stream_options": USAGE, **fields}, length=50)
        last = expected.events()[-1]["usage"]["completion_tokens"]
        assert last > 8
        assert "stop" not in fields or expected.events()[-2]["choices"][0]["finish_reason"] == "stop"
        for token in range(last + 1):
            it, client = await killed(fields, kind, Script(close_at=token, torn=bool(token % 2)))
            same(client, expected)
            assert it.counted("moved") == ({"": 1} if 0 < token < last else {})
            assert it.jobs[0].answered_tokens == last
            assert it.brain.told.count("finished whole") == 1

    run(test())


@pytest.mark.parametrize("name", ["chat", "ids", "stop"])
def test_two_die_in_a_row(name: str) -> None:
    kind, fields = ASKS[name]

    async def test() -> None:
        expected = await straight(Bytes(), kind, {"stream": True, "stream_options": USAGE, **fields}, length=50)
        for first in (1, 3, 6):
            for second in (0, 1, 2, 4):
                it, client = await killed(fields, kind, Script(close_at=first), Script(close_at=second))
                same(client, expected)
                assert it.counted("moved") == {"": 2}
                assert it.jobs[0].lost == ["i0", "i1"]

    run(test())


BROKEN = {
    "error-event": Script(error_at=4),
    "end": Script(end_at=4),
    "torn-bytes": Script(close_at=4, split=3),
    "refused": Script(status=503),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_the_second_fails_in_other_ways(name: str) -> None:
    async def test() -> None:
        kind, fields = ASKS["chat"]
        expected = await straight(Bytes(), kind, {"stream": True, "stream_options": USAGE, **fields}, length=50)
        same((await killed(fields, kind, Script(error_at=5), BROKEN[name]))[1], expected)

    run(test())


def test_the_request_that_goes_on() -> None:
    async def test() -> None:
        fields = {"max_completion_tokens": 30, "temperature": 0, "seed": 7, "stop": ["zzz"], "min_tokens": 20}
        spec = {"flags": ("--scheduling-policy", "priority"), "environment": {"VLLM_API_KEY": "own"}}
        async with house(2, toy=Words(), spec=spec) as it:
            it.engines[0].script(Script(close_at=10))
            client = it.ask(stream=True, salt="s", priority=3, user="u", **fields)
            await client.ended()
            first, second = it.engines[0].asked[0], it.engines[1].asked[0]
            assert second.path == "/v1/completions"
            sent = len(second.fields["prompt"]) - len(first.ids)
            assert 0 < sent < 10
            assert second.fields["max_tokens"] == 30 - sent
            assert second.fields["min_tokens"] == 20 - sent
            assert (second.fields["temperature"], second.fields["seed"], second.fields["stop"]) == (0, 7, ["zzz"])
            assert (second.fields["cache_salt"], second.fields["priority"]) == ("s", 3)
            assert second.headers["authorization"] == "Bearer own"
            assert "messages" not in second.fields
            assert it.counted("ended") == {"whole": 1}

    run(test())


# ---- what cannot go on ends with an error


def ends_with(client: Client, code: str) -> None:
    """A stream that says why it ends."""
    assert client.ended_well
    assert client.status == 200
    assert client.events()[-1]["error"]["code"] == code
    assert all("error" not in it for it in client.events()[:-1])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STUCK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "choices": ({"n": 2}, {}),
    "tools": ({"tools": [TOOL]}, {}),
    "structured": ({"response_format": {"type": "json_object"}}, {}),
    "logprobs": ({"logprobs": True}, {}),
    "long": ({}, {"limits": small(replay_bytes=400)}),
    "off": ({}, {"migrate": False}),
}


@pytest.mark.parametrize("reason", list(STUCK))
def test_a_stream_that_cannot_move_ends_with_an_error(reason: str) -> None:
    fields, options = STUCK[reason]

    async def test() -> None:
        it, client = await killed({"max_tokens": 20, **fields}, Kind.CHAT, Script(close_at=5), **options)
        ends_with(client, "stream_lost")
        assert it.counted("unmoved") == {reason: 1}
        assert it.brain.told == ["started", "finished"]
        assert not it.engines[1].asked

    run(test())


def test_nobody_is_left_to_go_on() -> None:
    async def test() -> None:
        async with house(1) as it:
            it.engines[0].script(Script(close_at=5))
            client = it.ask(stream=True, max_tokens=20)
            await client.ended()
            await it.settled()
            ends_with(client, "stream_lost")
            assert it.counted("unmoved") == {"refused": 1}

    run(test())


def test_an_engine_that_takes_no_such_prompt() -> None:
    async def test() -> None:
        it, client = await killed({"max_tokens": 20}, Kind.CHAT, Script(close_at=5), Script(status=400))
        ends_with(client, "stream_lost")
        assert it.counted("unmoved") == {"refused": 1}

    run(test())


def test_an_engine_that_says_something_else() -> None:
    async def test() -> None:
        async with house(2) as it:
            it.engines[0].noise, it.engines[1].noise = 0, 0xFFFF
            it.engines[0].script(Script(close_at=9))
            client = it.ask(Kind.COMPLETION, stream=True, max_tokens=20, temperature=1, stop=["zzz"])
            await client.ended()
            await it.settled()
            ends_with(client, "stream_lost")
            assert it.counted("unmoved") == {"differs": 1}

    run(test())


def test_sampling_goes_on_with_what_the_second_draws() -> None:
    async def test() -> None:
        async with house(2) as it:
            it.engines[1].noise = 0xFFFF
            it.engines[0].script(Script(close_at=9))
            client = it.ask(Kind.COMPLETION, stream=True, max_tokens=20, temperature=1, seed=3)
            await client.ended()
            await it.settled()
            assert client.ended_well
            assert len(client.text.split()) == 20
            second = it.engines[1].asked[0].fields
            assert second["seed"] == 3
            rest = events_of(it.engines[1], second, chat=False)
            own = [json.loads(event[6:])["choices"] for event in rest[:-1]]
            assert client.text.endswith("".join(it[0]["text"] for it in own if it))

    run(test())


def test_an_instance_that_does_not_know_its_length() -> None:
    async def test() -> None:
        async with house(3, length=60) as it:
            it.engines[0].script(Script(close_at=5))
            client = it.ask(stream=True)
            await it.engines[1].stop()  # cannot be asked: the third is
            await client.ended()
            await it.settled()
            assert client.ended_well
            assert it.jobs[0].lost == ["i0", "i1"]
            assert [received.path for received in it.engines[2].requests] == ["/v1/models", "/v1/completions"]

    run(test())


# ---- clients that leave in the middle of it


@pytest.mark.parametrize("phase", ["waiting", "asking", "resumed"])
def test_a_client_that_leaves_while_its_stream_moves(phase: str) -> None:
    async def test() -> None:
        async with house(2) as it:
            it.brain.holds = phase == "waiting"
            it.engines[0].script(Script(close_at=3))
            it.engines[1].script(Script(gate=Gate(2 if phase == "resumed" else 0)))
            client = it.ask(stream=True, max_tokens=40)
            async with asyncio.timeout(10):
                while not (it.brain.waiting or it.engines[1].running):
                    await asyncio.sleep(0)
            if phase == "resumed":
                await client.until(lambda: it.jobs[0].answered_tokens > 4)
            client.leave()
            await it.settled()
            assert it.engines[1].aborted == (phase != "waiting")
            assert it.counted("ended") == {"left": 1}
            for sent, refused in it.brain.waiting:
                sent(it.jobs[0], it.brain.targets[0])
                refused(it.jobs[0], Refusal(503, "x", "x"))
            assert it.brain.told[-1] == "finished"

    run(test())


# ---- fleets with roles


def test_prefill_goes_before_decode() -> None:
    async def test() -> None:
        for stream in (True, False):
            async with house(2, prefill=0) as it:
                fields = {"n": 1, "min_tokens": 2, "logprobs": False, "stop": ["zz"]}
                client = it.ask(stream=stream, max_completion_tokens=6, salt="s", **fields)
                await client.ended()
                await it.settled()
                first, second = it.engines[0].asked[0].fields, it.engines[1].asked[0].fields
                assert (first["max_tokens"], first["max_completion_tokens"], first["stream"]) == (1, 1, False)
                assert not {"min_tokens", "stop", "n", "stream_options", "return_token_ids"} & first.keys()
                assert first["messages"] == second["messages"]
                assert first["cache_salt"] == second["cache_salt"] == "s"
                assert second["max_completion_tokens"] == 6
                assert it.jobs[0].answered_tokens == 6
                assert client.status == 200
                assert not it.counted("prefill_lost")
                assert it.brain.told[0] == "prefilled"

    run(test())


@pytest.mark.parametrize(
    ("script", "why"),
    [(Script(status=500), "status"), (Script(close_at=0), "closed"), (Script(error_body=True), "error")],
    ids=["500", "cut", "error"],
)
def test_without_prefill_decode_computes_it(script: Script, why: str) -> None:
    async def test() -> None:
        async with house(2, prefill=0) as it:
            it.engines[0].script(script)
            client = it.ask(stream=True, max_tokens=6)
            await client.ended()
            await it.settled()
            assert client.ended_well
            assert it.counted("prefill_lost") == {why: 1}
            assert it.brain.told == [f"prefilled {why}", "started", "finished whole"]
            assert it.jobs[0].cached_tokens == 0, "the second leg's own word"
            assert it.jobs[0].found_tokens is None

    run(test())


def test_a_prefill_instance_that_never_answers_is_given_up() -> None:
    """After the brain's patience, or `first_s` where that is shorter."""

    async def test() -> None:
        for patient_s, first_s in ((0.2, 60.0), (60.0, 0.2)):
            async with house(2, prefill=0, times=replace(TIMES, first_s=first_s, silent_s=0.2)) as it:
                it.brain.patient_s = patient_s
                it.engines[0].script(Script(gate=Gate(0)))
                client = it.ask(stream=True, max_tokens=6)
                await client.ended()
                await it.settled()
                assert client.ended_well
                assert it.engines[0].aborted == 1
                assert it.counted("prefill_lost") == {"late": 1}
                assert it.brain.told == ["prefilled late", "started", "finished whole"]

    run(test())


def test_what_the_first_leg_computed_is_not_taken_for_reused() -> None:
    async def test() -> None:
        async with house(2, prefill=0) as it:
            it.engines[0].found = lambda ids, salt: 2  # type: ignore[method-assign]
            it.engines[1].found = lambda ids, salt: len(ids) - 1  # type: ignore[method-assign]
            for stream in (True, False):
                client = it.ask(stream=stream, max_tokens=6, **({"stream_options": USAGE} if stream else {}))
                await client.ended()
                usage = client.events()[-1]["usage"] if stream else json.loads(client.body)["usage"]
                assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] - 1}
                assert it.jobs[-1].cached_tokens == 2
                assert it.jobs[-1].found_tokens == usage["prompt_tokens"] - 1
            await it.settled()

    run(test())


def test_the_second_leg_waits_for_the_brain() -> None:
    async def test() -> None:
        for leaves in (False, True):
            async with house(2, prefill=0) as it:
                it.brain.hands_over = False
                client = it.ask(stream=True, max_tokens=6)
                async with asyncio.timeout(10):
                    while not it.brain.told:
                        await asyncio.sleep(0)
                assert not it.engines[1].asked and it.brain.waiting_to_hand_over is not None
                calls: list[Origin] = []
                send = it.pool.call

                def call(origin: Origin, *words: Any, send: Any = send, calls: Any = calls, **named: Any) -> Any:
                    calls.append(origin)
                    return send(origin, *words, **named)

                it.pool.call = call  # type: ignore[method-assign]
                if leaves:
                    client.leave()
                it.brain.waiting_to_hand_over()
                await it.settled()
                assert len(calls) == (0 if leaves else 1)
                assert client.ended_well is not leaves

    run(test())


def test_a_client_that_leaves_during_prefill() -> None:
    async def test() -> None:
        async with house(2, prefill=0) as it:
            it.engines[0].script(Script(gate=Gate(0)))
            client = it.ask(stream=True, max_tokens=6)
            async with asyncio.timeout(10):
                while not it.engines[0].running:
                    await asyncio.sleep(0)
            client.leave()
            await it.settled()
            assert it.engines[0].aborted == 1
            assert not it.engines[1].asked

    run(test())


def test_a_stream_of_a_decode_instance_goes_on_at_another_without_prefill() -> None:
    async def test() -> None:
        async with house(3, prefill=0) as it:
            it.engines[1].script(Script(close_at=3))
            client = it.ask(stream=True, max_tokens=12)
            await client.ended()
            await it.settled()
            assert client.ended_well
            assert len(client.text.split()) == 12
            assert len(it.engines[0].asked) == 1

    run(test())
