"""From an instance to a client: whatever instances, clients and the brain do, each request ends once and well."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headwater._kernels.events import REPORTED
from headwater.conductor.http.exchange import Headers
from headwater.conductor.job import Kind, Phase, Refusal
from headwater.conductor.legs import room_of
from headwater.fleetfile.model import Times
from tests.conductor.engine import Engine, Gate, Script, events_of
from tests.conductor.relays import DEADLINE_S, Client, House, house, run, small, straight
from tests.conductor.toy import Bytes, Words

KINDS = pytest.mark.parametrize("kind", list(Kind))
USAGE = {"include_usage": True}
QUICK = Times(connect_s=2.0, first_s=0.3, silent_s=0.3)


async def until(seen: Callable[[], object]) -> None:
    """Let the loop go round until it is so."""
    async with asyncio.timeout(DEADLINE_S):
        while not seen():
            await asyncio.sleep(0)


# ---- what goes well


@KINDS
def test_a_stream_is_what_the_engine_says_byte_for_byte(kind: Kind) -> None:
    async def test() -> None:
        fields = {"stream": True, "max_tokens": 20, "stream_options": USAGE}
        async with house(1, toy=Bytes()) as it:
            client = it.ask(kind, **fields)
            await client.ended()
            await it.settled()
            prompt = {"prompt": "hello there", "messages": [{"role": "user", "content": "hello there"}]}
            asked = {"model": "toy", **fields, **prompt}
            assert client.body == b"".join(events_of(Engine(toy=Bytes()), asked, chat=kind is Kind.CHAT, name="r0"))
            assert it.brain.told == ["started", "finished whole"]
            assert it.jobs[0].answered_tokens == 20
            assert it.jobs[0].cached_tokens == 0
            assert it.jobs[0].phase is Phase.DONE
            assert it.tenants.tokens == len(it.engines[0].asked[0].ids) + 20
        names = dict(client.headers)
        assert names[b"x-request-id"] == b"r0"
        assert names[b"x-headwater-instance"] == b"i"
        assert names[b"content-type"].startswith(b"text/event-stream")

    run(test())


@KINDS
def test_the_engine_is_asked_for_usage_and_ids_and_the_client_gets_neither(kind: Kind) -> None:
    async def test() -> None:
        async with house(1) as it:
            client = it.ask(kind, stream=True, max_tokens=5)
            await client.ended()
            asked = it.engines[0].asked[0].fields
            assert asked["return_token_ids"] is True
            assert asked["stream_options"] == USAGE
            assert it.jobs[0].answered_tokens == 5
            assert client.ended_well
            assert all(not event.get("usage") and event["choices"] for event in client.events())
            assert b'token_ids":[' not in client.body

    run(test())


@KINDS
def test_a_client_that_wants_ids_gets_them(kind: Kind) -> None:
    async def test() -> None:
        async with house(1) as it:
            client = it.ask(kind, stream=True, max_tokens=5, return_token_ids=True)
            await client.ended()
            ids = [i for event in client.events() for i in event["choices"][0].get("token_ids") or ()]
            assert len(ids) == 5
            assert b'prompt_token_ids":[' in client.body

    run(test())


@KINDS
def test_an_answer_in_one_piece(kind: Kind) -> None:
    async def test() -> None:
        async with house(1) as it:
            client = it.ask(kind, max_tokens=5)
            await client.ended()
            await it.settled()
            assert client.status == 200
            assert json.loads(client.body)["usage"]["completion_tokens"] == 5
            assert it.brain.told == ["finished whole"]
            assert (it.jobs[0].answered_tokens, it.jobs[0].cached_tokens) == (5, 0)
            assert (b"x-request-id", b"r0") in client.headers
            assert (b"content-type", b"application/json") in client.headers
            assert b"server" not in dict(client.headers)
            assert "return_token_ids" not in it.engines[0].asked[0].fields

    run(test())


def test_several_choices_and_tools_are_counted_though_they_cannot_move() -> None:
    async def test() -> None:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        for fields in ({"n": 3}, {"tools": [tool]}):
            async with house(1) as it:
                client = it.ask(stream=True, max_tokens=4, **fields)
                await client.ended()
                assert client.ended_well
                assert it.jobs[0].answered_tokens == 4 * fields.get("n", 1)
                assert "return_token_ids" not in it.engines[0].asked[0].fields

    run(test())


# ---- streams that are cut in odd places


@pytest.mark.parametrize("split", [1, 2, 7, 64])
@KINDS
def test_events_may_be_cut_anywhere(kind: Kind, split: int) -> None:
    async def test() -> None:
        fields = {"stream": True, "max_tokens": 6}
        expected = await straight(Bytes(), kind, fields)
        async with house(1, toy=Bytes()) as it:
            it.engines[0].script(Script(split=split))
            client = it.ask(kind, **fields)
            await client.ended()
            assert client.body == expected.body
            assert all(piece.endswith(b"\n\n") for piece in client.sent), "a torn event was passed on"

    run(test())


def test_a_huge_event_goes_through_and_one_beyond_the_limit_does_not() -> None:
    async def test() -> None:
        async with house(1) as it:
            it.engines[0].script(Script(huge_bytes=10 << 20))
            client = it.ask(stream=True, max_tokens=2)
            await client.ended()
            assert client.ended_well
            assert len(client.text) > 10 << 20
        async with house(2, limits=small(event_bytes=1 << 20)) as it:
            it.engines[0].script(Script(huge_bytes=2 << 20))
            client = it.ask(stream=True, max_tokens=2)
            await client.ended()
            await it.settled()
            assert client.status == 502
            assert json.loads(client.body)["error"]["code"] == "answer_too_long"
            assert it.brain.told == ["finished"]
            assert not it.engines[1].asked

    run(test())


def test_an_answer_beyond_the_limit_is_refused() -> None:
    async def test() -> None:
        async with house(1, limits=small(answer_bytes=300)) as it:
            client = it.ask(max_tokens=500)
            await client.ended()
            await it.settled()
            assert client.status == 502
            assert len(client.body) < 300

    run(test())


# ---- instances that fail before the first token

FAILURES = {
    "500": (Script(status=500), "status"),
    "503": (Script(status=503), "status"),
    "redirect": (Script(status=302), "status"),
    "not-our-key": (Script(status=401), "status"),
    "200-with-error": (Script(error_body=True), "error"),
    "closed": (Script(close_at=0), "closed"),
    "silent": (Script(silent=True), "late"),
    "headers-then-silence": (Script(hang_at=0), "silent"),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", list(FAILURES))
def test_before_the_first_token_another_is_asked(name: str, stream: bool) -> None:
    script, why = FAILURES[name]

    async def test() -> None:
        expected = await straight(Words(), Kind.CHAT, {"max_tokens": 5, "stream": stream})
        async with house(2, times=QUICK) as it:
            it.engines[0].script(script)
            client = it.ask(max_tokens=5, stream=stream)
            await client.ended()
            await it.settled()
            assert client.status == 200
            assert client.body == expected.body
            assert it.brain.told == [f"lost {why}", *(["started"] if stream else []), "finished whole"]
            assert it.jobs[0].lost == ["i0"]
            assert it.jobs[0].answered_tokens == 5

    run(test())


def test_a_dead_instance_is_not_waited_for() -> None:
    async def test() -> None:
        async with house(2) as it:
            await it.engines[0].stop()
            client = it.ask(max_tokens=5)
            await client.ended()
            assert it.brain.told == ["lost refused", "finished whole"]

    run(test())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (Script(error_at=0), "error"),
        (Script(end_at=0), "ended"),
        (Script(close_at=0, torn=True), "closed"),
        (Script(status=500), "status"),
    ],
    ids=["error-event", "end", "torn", "500"],
)
def test_a_stream_that_says_nothing_is_asked_for_elsewhere(script: Script, why: str) -> None:
    async def test() -> None:
        async with house(2) as it:
            it.engines[0].script(script)
            client = it.ask(stream=True, max_tokens=5)
            await client.ended()
            await it.settled()
            assert it.brain.told == [f"lost {why}", "started", "finished whole"]
            assert client.ended_well
            assert not it.counted("moved")
            # The first one's role event was not sent: the answer is the second's alone.
            assert [it["choices"][0]["delta"].get("role") for it in client.events()].count("assistant") == 1

    run(test())


@pytest.mark.parametrize("script", [Script(short=True), Script(close_at=1)], ids=["short", "cut"])
def test_half_an_answer_is_asked_for_again(script: Script) -> None:
    async def test() -> None:
        async with house(2) as it:
            it.engines[0].script(script)
            client = it.ask(max_tokens=5)
            await client.ended()
            assert json.loads(client.body)["usage"]["completion_tokens"] == 5
            assert it.brain.told == ["lost closed", "finished whole"]

    run(test())


def test_when_nobody_is_left_the_client_is_told() -> None:
    async def test() -> None:
        for stream in (True, False):
            async with house(3, retries=1) as it:
                for engine in it.engines:
                    engine.otherwise = Script(status=503)
                client = it.ask(stream=stream, max_tokens=5)
                await client.ended()
                await it.settled()
                assert (client.status, json.loads(client.body)["error"]["code"]) == (502, "instance_lost")
                assert (b"x-request-id", b"r0") in client.headers
                assert [len(engine.asked) for engine in it.engines] == [1, 1, 0]

    run(test())


@pytest.mark.parametrize("status", [400, 404, 422, 429])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_the_clients_errors_are_passed_on_as_they_are(status: int, stream: bool) -> None:
    async def test() -> None:
        async with house(2) as it:
            it.engines[0].script(Script(status=status))
            client = it.ask(stream=stream, max_tokens=5)
            await client.ended()
            await it.settled()
            assert client.status == status
            assert json.loads(client.body)["error"]["message"] == "scripted"
            assert it.brain.told == ["finished"]
            assert not it.engines[1].asked

    run(test())


# ---- clients that leave


@pytest.mark.parametrize("phase", ["connecting", "silent", "opening", "answering", "slowly", "whole", "waiting"])
def test_a_client_that_leaves_ends_it_everywhere(phase: str) -> None:
    async def test() -> None:
        gate = Gate(3 if phase in ("answering", "slowly") else 0)
        async with house(2) as it:
            silent = phase in ("silent", "connecting")
            it.engines[0].script(Script(status=503) if phase == "waiting" else Script(silent=silent, gate=gate))
            it.brain.holds = phase == "waiting"
            client = it.ask(stream=phase != "whole", max_tokens=50)
            if phase == "waiting":
                await until(lambda: it.brain.waiting)
            elif phase != "connecting":
                await until(lambda: it.engines[0].running)
            if phase in ("answering", "slowly"):
                await client.until(lambda: it.jobs[0].answered_tokens >= 3)
            if phase == "slowly":
                assert client.listener is not None
                client.listener.full()
            sent = len(client.sent)
            client.leave()
            await it.settled()
            assert it.pool.connections == 0 or phase in ("waiting", "connecting")
            assert it.engines[0].aborted == (0 if phase in ("connecting", "waiting") else 1)
            assert it.counted("ended") == {"left": 1}
            assert it.brain.told[-1] == "finished"
            assert ("drop" in it.brain.told) == (phase == "waiting")
            if phase == "waiting":
                it.brain.waiting[0][0](it.jobs[0], it.brain.targets[0])  # comes too late
                it.brain.waiting[0][1](it.jobs[0], Refusal(503, "x", "x"))
            assert len(client.sent) == sent
            assert not it.engines[1].asked

    run(test())


def test_a_client_that_was_gone_before_it_began() -> None:
    async def test() -> None:
        async with house(1) as it:
            client = it.ask(stream=True, max_tokens=5)
            client.leave()
            gone = it.jobs[0]
            it.relay.start(gone, it.brain.targets[0])
            assert it.brain.told == ["finished", "finished"]
            await until(lambda: True)
            assert it.relay.under_way == 0

    run(test())


def test_a_client_that_leaves_after_the_end_changes_nothing() -> None:
    async def test() -> None:
        async with house(1) as it:
            client = it.ask(stream=True, max_tokens=5)
            await client.ended()
            client.leave()
            await it.settled()
            assert it.counted("ended") == {"whole": 1}

    run(test())


# ---- back-pressure


def test_a_slow_reader_stops_its_own_engine_only() -> None:
    async def test() -> None:
        async with house(1, interval=50, length=200_000) as it:
            slow = it.ask(stream=True, max_tokens=100_000)
            await slow.until(lambda: slow.sent)
            assert slow.listener is not None
            slow.listener.full()
            got = slow.size_bytes
            quick = it.ask(stream=True, max_tokens=50)
            await quick.ended()
            assert quick.ended_well
            assert slow.size_bytes == got
            slow.listener.drained()
            await slow.ended()
            assert slow.ended_well
            assert it.jobs[0].answered_tokens == 100_000
            await it.settled()

    run(test())


def test_a_pause_is_kept_over_the_move_to_another() -> None:
    async def test() -> None:
        async with house(2) as it:
            it.brain.holds = True
            it.engines[0].script(Script(close_at=4))
            client = it.ask(stream=True, max_tokens=30)
            await until(lambda: it.brain.waiting)
            assert client.listener is not None
            client.listener.full()
            sent = len(client.sent)
            it.brain.waiting[0][0](it.jobs[0], it.brain.targets[0])
            await until(lambda: it.engines[1].finished)
            assert len(client.sent) == sent
            client.listener.drained()
            await client.ended()
            assert client.ended_well
            await it.settled()

    run(test())


# ---- clients that leave, and calls that come, at the worst moment


class Leaver(Client):
    """Leaves within the call that sends it a certain word, as a connection that turns out to be closed."""

    word = b""

    def start(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        super().start(status, headers, lines)
        if not self.word:
            self.leave()

    def send(self, data: bytes) -> None:
        super().send(data)
        if self.word and self.word in data and not self.closed:
            self.leave()


class Stopper(Client):
    """Is full from the moment on in which it gets the end of its stream."""

    def send(self, data: bytes) -> None:
        super().send(data)
        if b"[DONE]" in data and self.listener is not None:
            self.listener.full()


@pytest.mark.parametrize(
    "word", [b"", b'"content":" w', b"stream_lost", b"[DONE]"], ids=["head", "token", "error", "end"]
)
def test_a_client_that_leaves_while_it_is_sent_something(monkeypatch: pytest.MonkeyPatch, word: bytes) -> None:
    """All is told once, and nothing after it."""

    async def test() -> None:
        async with house(1, interval=REPORTED) as it:
            monkeypatch.setattr("tests.conductor.relays.Client", Leaver)
            monkeypatch.setattr(Leaver, "word", word)
            if word == b"stream_lost":
                it.engines[0].script(Script(close_at=20))
            it.ask(stream=True, max_tokens=60)
            await it.settled()
            assert it.tenants.left == 1 and sum(it.counted("ended").values()) == 1
            assert it.brain.told[-1].startswith("finished"), it.brain.told

    run(test())


def test_a_client_that_leaves_with_the_first_words_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with house(2) as it:
            monkeypatch.setattr("tests.conductor.relays.Client", Leaver)
            monkeypatch.setattr(Leaver, "word", b"never said")
            it.engines[0].script(Script(close_at=4))
            it.brain.holds = True
            it.ask(stream=True, max_tokens=30)
            await until(lambda: it.brain.waiting)
            monkeypatch.setattr(Leaver, "word", b" w")
            it.brain.waiting[0][0](it.jobs[0], it.brain.targets[0])
            await it.settled()
            assert it.brain.told == ["started", "lost closed", "started", "finished"]

    run(test())


def test_what_the_brain_says_too_late_asks_nobody() -> None:
    async def test() -> None:
        async with house(2) as it:
            it.brain.holds = True
            it.engines[0].script(Script(status=503))
            client = it.ask(stream=True, max_tokens=5)
            await until(lambda: it.brain.waiting)
            client.leave()
            sent, refused = it.brain.waiting[0]
            sent(it.jobs[0], it.brain.targets[0])
            refused(it.jobs[0], Refusal(503, "x", "x"))
            other = it.ask(stream=True, max_tokens=5)
            await other.ended()
            await it.settled()
            assert len(it.engines[1].asked) == 1 and not client.started
            assert it.counted("ended") == {"left": 1, "whole": 1}

    run(test())


def test_a_paused_call_stays_paused_while_others_are_served() -> None:
    async def test() -> None:
        async with house(2) as it:
            it.brain.holds = True
            it.engines[0].script(Script(close_at=4))
            client = it.ask(stream=True, max_tokens=30)
            await until(lambda: it.brain.waiting)
            assert client.listener is not None
            client.listener.full()
            sent = len(client.sent)
            it.brain.waiting[0][0](it.jobs[0], it.brain.targets[0])
            await until(lambda: it.engines[1].finished)
            for _ in range(3):
                other = it.ask(stream=True, max_tokens=30)
                await other.ended()
            assert len(client.sent) == sent
            client.listener.drained()
            await client.ended()
            assert client.ended_well
            await it.settled()

    run(test())


def test_who_was_slow_once_is_not_held_up_after_a_move() -> None:
    async def test() -> None:
        async with house(2) as it:
            gate = Gate(3)
            it.engines[0].script(Script(close_at=4, gate=gate))
            client = it.ask(stream=True, max_tokens=30)
            await client.until(lambda: it.jobs[0].answered_tokens >= 3)
            assert client.listener is not None
            client.listener.full()
            client.listener.drained()
            gate.open()
            await client.ended()
            assert client.ended_well
            await it.settled()

    run(test())


def test_the_connection_of_a_client_that_was_full_at_its_end_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with house(1) as it:
            monkeypatch.setattr("tests.conductor.relays.Client", Stopper)
            for _ in range(3):
                it.engines[0].script(Script(split=1))
                client = it.ask(stream=True, max_tokens=5)
                await client.ended()
                await it.settled()
                await until(lambda: it.pool._idle.get(it.relay.registry.origin(0)))
            assert it.engines[0].connections == 1

    run(test())


# ---- ends of streams


def test_an_engine_that_never_ends_its_body_does_not_keep_the_client() -> None:
    async def test() -> None:
        async with house(1, times=QUICK) as it:
            it.engines[0].script(Script(no_end=True))
            client = it.ask(stream=True, max_tokens=5)
            await client.ended()
            assert client.ended_well
            assert it.brain.told == ["started", "finished whole"]
            await until(lambda: it.pool.connections == 0)

    run(test())


@pytest.mark.parametrize("migrate", [True, False], ids=["moves", "stays"])
def test_a_stream_that_was_finished_needs_no_done_of_its_engine(migrate: bool) -> None:
    async def test() -> None:
        for script in (Script(no_done=True), Script(close_at=5)):
            async with house(1, migrate=migrate) as it:
                it.engines[0].script(script)
                client = it.ask(stream=True, max_tokens=5)
                await client.ended()
                await it.settled()
                assert client.ended_well
                assert client.events()[-1]["choices"][0]["finish_reason"] == "length"
                assert it.brain.told == ["started", "finished whole"]

    run(test())


# ---- beside


@pytest.mark.parametrize(
    ("body", "room"),
    [
        (b'{"data":[{"max_model_len":2048}]}', 2048),
        (b'{"data":[{"max_model_len":"2048"}]}', None),
        (b'{"data":[]}', None),
        (b'{"data":[{}]}', None),
        (b"[]", None),
        (b"x", None),
    ],
)
def test_a_models_length(body: bytes, room: int | None) -> None:
    assert room_of(body) == room


def test_transfer_parameters_of_answers_stay_between_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with house(1) as it:
            client = it.ask(max_tokens=5)
            await client.ended()
            assert "kv_transfer_params" in json.loads(client.body)

    run(test())
    body: dict[str, Any] = {"choices": [], "kv_transfer_params": {"remote_host": "x"}, "usage": None}

    async def other() -> None:
        async with house(1) as it:
            monkeypatch.setattr("tests.conductor.engine._Answer.whole", lambda _: msgspec.json.encode(body))
            client = it.ask(max_tokens=5)
            await client.ended()
            assert json.loads(client.body) == {"choices": [], "usage": None}

    run(other())


def test_a_relay_tells_what_is_under_way() -> None:
    async def test() -> None:
        async with house(1) as it:
            await _leaves_in_the_middle(it)
            assert repr(it.relay) == "Relay(0 under way)"

    run(test())


async def _leaves_in_the_middle(it: House) -> None:
    it.engines[0].script(Script(gate=Gate(2)))
    client = it.ask(stream=True, max_tokens=50)
    await client.until(lambda: client.sent)
    assert repr(it.relay) == "Relay(1 under way)"
    client.leave()
    await it.settled()
