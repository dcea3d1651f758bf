"""What a server says, read over real sockets; and every way in which it can fail, as an error that says what to do."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from headwater.calibrate.calibration import Options, calibrate
from headwater.calibrate.probe import Effort
from headwater.calibrate.server import Dialect, EngineServer, Served, words
from headwater.errors import ConfigError, HeadwaterError, ProtocolError, RefusedError, UnavailableError
from tests.calibrate.conftest import Handler, HttpServer, tokens

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="128",cache_dtype="auto",kv_cache_size_tokens="23296",num_gpu_blocks="182"} 1.0
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:prefix_cache_hits_total{engine="0"} 256.0
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
"""
KEY = "sk-very-secret"


def test_what_it_says_of_itself(http: HttpServer) -> None:
    server = EngineServer(http.url + "/v1/")
    assert server.describe() == Served("m", 4096)
    assert server.hit_tokens() is None
    http.pages["/metrics"] = METRICS
    assert server.describe() == Served("m", 4096, 128, 23_296, 3)
    assert server.hit_tokens() == 256
    http.pages["/metrics"] = METRICS.replace('kv_cache_size_tokens="23296",', "")
    assert server.describe().capacity_tokens == 128 * 182
    http.pages["/v1/models"] = json.dumps({"data": [{"id": "a"}, {"id": "b"}]})
    assert EngineServer(http.url).describe().model == "a"
    assert EngineServer(http.url, model="b").describe().length_max is None


def test_a_stream_is_read_token_by_token(http: HttpServer) -> None:
    def reply(handler: Handler, body: dict[str, Any]) -> None:
        one: dict[str, Any] = {"choices": [{"text": "a", "token_ids": [7]}]}
        two: dict[str, Any] = {"choices": [{"text": "", "token_ids": [8, 9]}]}
        end: dict[str, Any] = {"choices": [{"text": "", "token_ids": []}]}
        usage = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
        handler.stream(one, two, end, {"choices": [], "usage": usage})

    http.reply = reply
    answer = EngineServer(http.url).complete([1, 2, 3, 4], 3)
    assert len(answer.token_s) == 3
    assert answer.sent_s < answer.token_s[0] <= answer.token_s[1] == answer.token_s[2]
    assert (answer.prompt_tokens, answer.cached_tokens) == (4, 2)
    assert http.seen[-1][2]["prompt"] == [1, 2, 3, 4]
    assert http.seen[-1][2]["ignore_eos"] is True


def test_a_server_that_only_knows_text_is_asked_in_text(http: HttpServer) -> None:
    def reply(handler: Handler, body: dict[str, Any]) -> None:
        if "ignore_eos" in body or not isinstance(body["prompt"], str):
            handler.say(400, "unknown field")
        else:
            texts: list[object] = [{"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}]
            handler.stream(*texts, {"choices": [], "usage": {"prompt_tokens": len(body["prompt"].split())}})

    http.reply = reply
    server = EngineServer(http.url)
    answer = server.learn([1, 2, 1])
    assert server.dialect == Dialect(token_ids=False, extensions=False)
    assert (len(answer.token_s), answer.prompt_tokens, answer.cached_tokens) == (1, 3, None)
    first, second, third = words([1, 2, 1]).split()
    assert first == third != second


def test_text_without_a_count_of_tokens_is_refused(http: HttpServer) -> None:
    http.reply = lambda handler, body: handler.stream({"choices": [{"text": "a"}]})
    server = EngineServer(http.url)
    assert server.complete([1, 2], 1).prompt_tokens == 2, "of token ids the number is known"
    server.dialect = Dialect(token_ids=False)
    with pytest.raises(RefusedError, match="usage"):
        server.complete([1, 2], 1)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "not one as in"),
        ("ftp://host", "not one as in"),
        ("http://", "not one as in"),
        ("http://host:port", "Port"),
        ("http://user:hidden@host", "api-key-env"),
        ("http://host/v1?key=1", "leave out"),
    ],
)
def test_wrong_urls_are_the_users(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        EngineServer(url)
    assert "hidden" not in str(refused.value)


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UnavailableError, match="refused"):
            EngineServer(url).describe()


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (None, "404"),
        ("<html>hello</html>", "hello"),
        ('{"data": []}', "model"),
        ('{"data": [{}]}', "model"),
        ('{"data": ["x"]}', "model"),
        ("[]", "model"),
    ],
)
def test_other_kinds_of_servers_are_refused(http: HttpServer, page: str | None, said: str) -> None:
    http.pages = {} if page is None else {"/v1/models": page}
    with pytest.raises(RefusedError, match=said) as refused:
        EngineServer(http.url).describe()
    assert refused.value.field == "URL"


def test_a_model_that_it_does_not_have(http: HttpServer) -> None:
    with pytest.raises(RefusedError, match="expected m, given other"):
        EngineServer(http.url, model="other").describe()


@pytest.mark.parametrize(
    ("status", "kind", "field"),
    [
        (401, RefusedError, "API key"),
        (403, RefusedError, "API key"),
        (400, RefusedError, "request"),
        (422, RefusedError, "request"),
        (404, RefusedError, "URL"),
        (302, RefusedError, "URL"),
        (429, UnavailableError, None),
        (500, UnavailableError, None),
        (503, UnavailableError, None),
    ],
)
def test_refusals_say_whose_they_are(http: HttpServer, status: int, kind: type[HeadwaterError], field: str) -> None:
    http.reply = lambda handler, body: handler.say(status, f"no, {handler.headers['Authorization']}")
    server = EngineServer(http.url, KEY)
    with pytest.raises(kind) as refused:
        server.learn([1])
    assert http.seen[-1][1]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(refused.value), "the server repeats it, we do not"
    assert KEY not in repr(Options(KEY))
    assert getattr(refused.value, "field", None) == field


@pytest.mark.parametrize(
    ("events", "kind", "said"),
    [
        ((), UnavailableError, "without a token"),
        (({"choices": []},), UnavailableError, "without a token"),
        (({"error": {"message": "out of memory"}},), UnavailableError, "out of memory"),
        (({"error": {"message": "out of vocabulary", "code": 400}},), RefusedError, "out of vocabulary"),
        (("{broken",), ProtocolError, "broken"),
        (("[1]",), ProtocolError, "not a completion"),
        (({"choices": [3]},), ProtocolError, "not a completion"),
    ],
)
def test_streams_that_are_none(http: HttpServer, events: Any, kind: type[HeadwaterError], said: str) -> None:
    http.reply = lambda handler, body: handler.stream(*events)
    with pytest.raises(kind, match=said):
        EngineServer(http.url).complete([1], 1)


def test_a_connection_that_breaks_within_an_answer(http: HttpServer) -> None:
    def reply(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"20\r\ndata: {}")
        handler.close_connection = True

    http.reply = reply
    with pytest.raises(UnavailableError):
        EngineServer(http.url).complete([1], 1)


def test_a_server_that_says_nothing_is_late(http: HttpServer) -> None:
    http.reply = lambda handler, body: _wait(http)
    with pytest.raises(UnavailableError, match="no whole answer in time"):
        EngineServer(http.url, timeout_s=0.05).complete([1], 1)


def test_a_server_that_goes_on_for_ever_is_late(http: HttpServer) -> None:
    """Every read is in time, the whole is not."""
    endless = _Endless(http)
    http.reply = endless.reply
    with pytest.raises(UnavailableError, match="no whole answer in time"):
        EngineServer(http.url, timeout_s=0.1).complete([1], 1)
    assert endless.ended.wait(10), "the server is told by a closed connection"


def test_close_ends_what_is_under_way(http: HttpServer) -> None:
    arrived = threading.Event()

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        arrived.set()
        _wait(http)

    http.reply = reply
    server = EngineServer(http.url)
    failed: list[UnavailableError] = []

    def ask() -> None:
        try:
            server.complete([1], 1)
        except UnavailableError as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert arrived.wait(10)
    server.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "ended by the caller" in str(failed[0])
    with pytest.raises(UnavailableError, match="ended by the caller"):
        server.describe()


def test_the_first_failure_ends_all_of_several(http: HttpServer) -> None:
    """Two wait for ever, one is refused as soon as they are there: its error comes out, and nobody waits any more."""
    waiting = threading.Semaphore(0)

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        if body["prompt"] == [3]:
            assert waiting.acquire(timeout=10)
            assert waiting.acquire(timeout=10)
            handler.say(400, "too many")
        else:
            waiting.release()
            _wait(http)

    http.reply = reply
    with pytest.raises(RefusedError, match="too many"):
        EngineServer(http.url).together([[1], [2], [3]], [1, 1, 1])


def test_several_at_their_times_in_their_order(http: HttpServer) -> None:
    done: list[int] = []
    answers = EngineServer(http.url).together([[1], [1, 2], [1, 2, 3]], [3, 2, 1], [0.03, 0.0, 0.015], done.append)
    assert [it.prompt_tokens for it in answers] == [1, 2, 3]
    assert [len(it.token_s) for it in answers] == [3, 2, 1]
    assert answers[1].sent_s < answers[2].sent_s < answers[0].sent_s
    assert done[-1] == 3


def test_a_server_that_fails_while_it_is_measured(http: HttpServer) -> None:
    def reply(handler: Handler, body: dict[str, Any]) -> None:
        if len(http.seen) < 12:
            tokens(handler, body)
        else:
            handler.say(500, "engine is dead")

    http.reply = reply
    with pytest.raises(UnavailableError, match="engine is dead"):
        calibrate(http.url, Options(effort=Effort(seconds=5)), lambda done, what: None)


@pytest.mark.parametrize(
    "effort", [Effort(seconds=1), Effort(concurrency=1), Effort(seconds=float("nan")), Effort(step_tokens=256)]
)
def test_what_cannot_be_measured_is_refused(effort: Effort) -> None:
    with pytest.raises(ConfigError):
        calibrate("http://127.0.0.1:1", Options(effort=effort), lambda done, what: None)


def _wait(http: HttpServer) -> None:
    http.released.wait(30)


class _Endless:
    """Sends tokens until the client has gone."""

    def __init__(self, http: HttpServer) -> None:
        self.http, self.ended = http, threading.Event()

    def reply(self, handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not self.http.released.is_set():
                handler.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        except OSError:
            self.ended.set()
