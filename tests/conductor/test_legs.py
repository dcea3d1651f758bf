"""What a stream knows of itself when it breaks off, and who takes its next bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headwater._kernels.events import REPORTED
from headwater.conductor import bodies
from headwater.conductor.http.exchange import Request
from headwater.conductor.job import Job
from headwater.conductor.legs import Stream
from headwater.fleetfile.model import Limits, TenantSpec
from tests.conductor.relays import Client

HEAD = [(b"content-type", b"text/event-stream")]


class Owner:
    """Notes what it is told."""

    def __init__(self, **fields: Any) -> None:
        body = b'{"model":"toy","stream":true,%b' % msgspec.json.encode(fields)[1:]
        request = Request("POST", "/v1/completions", "", [], body, "", {})
        self.limits = Limits()
        self.exchange = Client(request)
        self.job = Job("r", self.exchange, TenantSpec(""), bodies.read(request, self.limits), 0.0)
        self.told: list[str] = []

    def begin(self) -> None:
        self.exchange.start(200, [])

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self.told.append(name)


def event(index: int = 0, finish: str = "null", ids: str = "[1]") -> bytes:
    return (
        f'data: {{"choices":[{{"index":{index},"text":"a","finish_reason":{finish},"token_ids":{ids}}}]}}\n\n'.encode()
    )


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def streaming(**fields: Any) -> tuple[Owner, Stream]:
    owner = Owner(**fields)
    stream = Stream(owner, "")
    stream.head(200, HEAD)
    return owner, stream


@pytest.mark.parametrize(
    ("prompt", "said"), [("one", True), ([1, 2], True), (["one"], True), (["one", "two"], False)],
    ids=["text", "ids", "a list of one", "two"],
)  # fmt: skip
@pytest.mark.parametrize("quick", [False, True])
def test_all_was_said_when_the_only_answer_has_said_why_it_ends(prompt: Any, said: bool, quick: bool) -> None:
    _, stream = streaming(prompt=prompt)
    stream.data(event())
    assert not stream.is_said()
    last = event(finish='"stop"')
    if quick:
        assert stream.quick is not None and stream.quick(chunk(last))
    else:
        stream.data(last)
    assert stream.is_said() is said


def test_who_takes_what_comes_next() -> None:
    owner, stream = streaming(prompt="one")
    assert stream.quick is None, "nothing was sent yet"
    stream.data(event())
    assert stream.quick is not None
    stream.data(event()[:-1])
    assert stream.quick is None, "an event is not whole yet"
    stream.data(b"\n")
    assert stream.quick is not None
    stream.data(b"data: [DONE]\n\n")
    assert stream.quick is None and owner.told == ["finished"]


def test_the_brain_hears_of_what_went_by_quickly() -> None:
    owner, stream = streaming(prompt="one")
    stream.data(event())
    quick = stream.quick
    assert quick is not None
    answers = [quick(chunk(event())) for _ in range(REPORTED - 1)]
    assert answers == [1] * (REPORTED - 2) + [2] and owner.told == []
    stream.data(b"")
    assert owner.told == ["progressed"] and stream.quick is not None, "nothing is held"
    assert owner.job.answered_tokens == REPORTED
