"""Sinks for what instances answer: an answer in one piece, a stream, a stream that goes on for another, and the small
requests beside them. Each tells its owner what came of it, once; what the owner then does is in `relay`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from headwater._kernels.events import TokenEvents
from headwater.conductor import tokenids
from headwater.conductor.http.exchange import Exchange, Headers, Quick
from headwater.conductor.http.parsing import passed_lines
from headwater.conductor.job import Job, Kind
from headwater.conductor.replay import EngineError, Story, Translator, Unmovable
from headwater.conductor.sse import Events, EventTooLong, each, payload
from headwater.fleetfile.model import Limits

SMALL_BYTES = 1 << 20
"""Of answers that only we read."""
_END = b"\n\n"
_NOT_OURS = frozenset({401, 403})
"""An instance that does not take our key: nothing that the client could change."""


class Details(msgspec.Struct):
    """Of a prompt."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What an engine counted."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: Details | None = None


class Answer(msgspec.Struct):
    """What we read of an answer or of an event; `error` and `choices` as they are."""

    usage: Usage | None = None
    error: Any = None
    choices: msgspec.Raw = msgspec.Raw()
    object: str = ""
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


_read_answer = msgspec.json.Decoder(Answer).decode


class Owner(Protocol):
    """Whose answer it is."""

    job: Job
    exchange: Exchange
    limits: Limits

    def begin(self) -> None:
        """The first token is here: the stream's head is sent."""

    def resumed(self) -> None:
        """The first of it that another instance says is here."""

    def progressed(self) -> None:
        """`job.answered_tokens` has grown."""

    def counted(self, usage: Usage) -> None:
        """What the engine says about the whole request."""

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """The whole answer for the client; lines of its headers, as they are sent."""

    def finished(self) -> None:
        """The stream was sent to its [DONE]."""

    def failed(self, why: str) -> None:
        """Nothing of an answer that could be passed on."""

    def cut(self, why: str) -> None:
        """The stream broke off; whatever of it was sent is in `Stream.story`."""

    def stuck(self, reason: str) -> None:
        """A stream cannot go on anywhere."""

    def too_long(self) -> None:
        """The instance sends more than we hold."""


class Body:
    """A body in one piece, up to a limit."""

    __slots__ = ("_limit_bytes", "_parts", "headers", "size_bytes", "status")

    def __init__(self, status: int, headers: Headers, limit_bytes: int) -> None:
        self.status, self.headers = status, headers
        self._limit_bytes = limit_bytes
        self._parts: list[bytes] = []
        self.size_bytes = 0

    def add(self, data: bytes) -> bool:
        """Take more; false if it gets too long."""
        self.size_bytes += len(data)
        self._parts.append(data)
        return self.size_bytes <= self._limit_bytes

    def whole(self) -> bytes:
        """All of it."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def settle(self, owner: Owner) -> None:
        """Tell what it is."""
        settle(owner, self.status, passed_lines(self.headers), self.whole())


def settle(owner: Owner, status: int, lines: bytes, body: bytes) -> None:
    """Tell what a body in one piece is: an answer, the client's error, or nothing that a client should see."""
    if status != 200:
        if 400 <= status < 500 and status not in _NOT_OURS:
            owner.answer(status, lines, body)
        else:
            owner.failed("status")
        return
    try:
        answer = _read_answer(body)
    except msgspec.ValidationError:
        # JSON, but not as we know it: the engine's business.
        owner.answer(status, lines, body)
        return
    except msgspec.MsgspecError:
        owner.failed("malformed")
        return
    if answer.error or answer.object == "error":
        owner.failed("error")
        return
    if answer.usage is not None:
        owner.counted(answer.usage)
    if answer.kv_transfer_params or answer.ec_transfer_params:
        body = _without_transfer(body)
    owner.answer(status, lines, body)


class Whole:
    """An answer in one piece: held until it is whole, so that another instance can be asked for all of it."""

    __slots__ = ("_body", "_owner")

    quick = None

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._body: Body | None = None

    def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """See `Sink`: nearly always."""
        owner = self._owner
        if len(body) > owner.limits.answer_bytes:
            owner.too_long()
        else:
            settle(owner, status, lines, body)

    def head(self, status: int, headers: Headers) -> None:
        """See `Sink`."""
        self._body = Body(status, headers, self._owner.limits.answer_bytes)

    def data(self, data: bytes) -> None:
        """See `Sink`."""
        if self._body is not None and not self._body.add(data):
            self._owner.too_long()

    def end(self) -> None:
        """See `Sink`."""
        assert self._body is not None, "an answer has a head"
        self._body.settle(self._owner)

    def lost(self, why: str, *, sent: bool) -> None:
        """See `Sink`."""
        self._owner.failed(why)


class Stream:
    """A stream as its instance sends it. Its first events are held until the first token is there: up to then nothing
    was sent, and any other instance can be asked instead. From then on nearly all of it goes by `quick`."""

    whole = None

    __slots__ = (
        "_answering", "_body", "_done", "_events", "_held", "_job", "_obstacle", "_owner", "_run", "_strips", "_wired",
    )  # fmt: skip

    def __init__(self, owner: Owner, obstacle: str) -> None:
        """`obstacle`: why it could not be moved; '' if it can, and then its ids were asked for."""
        self._owner, self._job, self._obstacle = owner, owner.job, obstacle
        self._events = Events(owner.limits.event_bytes)
        self._body: Body | None = None
        self._strips = not owner.job.parsed.wants_ids
        keep_bytes = 0 if obstacle else owner.limits.replay_bytes
        self._run = TokenEvents(owner.job, strips=self._strips, keep_bytes=keep_bytes)
        self._held: list[bytes] = []
        self._answering = self._wired = self._done = False

    @property
    def quick(self) -> Quick | None:
        """See `Sink`."""
        return self._run if self._answering and not self._done and not self._events.parts else None

    def head(self, status: int, headers: Headers) -> None:
        """See `Sink`."""
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if status != 200 or not kind.startswith(b"text/event-stream"):
            self._body = Body(status, headers, self._owner.limits.answer_bytes)

    def data(self, data: bytes) -> None:
        """See `Sink`."""
        if not data:
            self._report()
            return
        if self._body is not None:
            if not self._body.add(data):
                self._owner.too_long()
            return
        if self._done:
            return
        try:
            events = self._events.feed(data)
        except EventTooLong:
            self._owner.too_long()
            return
        if events:
            self._pass_each(events)

    def _pass_each(self, events: bytes) -> None:
        out: list[bytes] = []
        broken = False
        try:
            for event in each(events):
                taken = self._run.take(event) if self._answering and not self._done else None
                out.append(self._one(event) if taken is None else taken)
        except EngineError:
            broken = True
        said = b"".join(out)
        if said:
            self._owner.exchange.send(said)
        if broken:
            self._owner.cut("error")
        elif self._done:
            self._owner.finished()
        else:
            if self._answering and not self._wired:
                self._wire()
            self._report()

    def _wire(self) -> None:
        """What comes next may go to the client's connection by itself."""
        self._wired = True
        channel = self._owner.exchange.channel()
        if channel is not None:
            self._run.begin(channel)

    def _report(self) -> None:
        """The brain hears of an answer's progress now and then."""
        if self._run.report():
            self._owner.progressed()

    def _one(self, event: bytes) -> bytes:
        """What is sent for one event. Raises EngineError."""
        if self._done:
            return b""
        data = payload(event)
        if not data:
            # A comment, as some send to keep connections alive.
            return event if self._answering else b""
        said = self._look(data)
        if self._done or said is None:
            out = event if said is not None else b""
        else:
            self._run.add(event, said)
            out = tokenids.without(event) if self._strips else event
        if self._answering:
            return out
        self._held.append(out)
        return self._open() if said or self._done else b""

    def _look(self, data: bytes) -> int | None:
        """How many tokens an event brings; None if it is not for the client. Raises EngineError."""
        if data == b"[DONE]":
            self._done = True
            return 0
        count = tokenids.count(data)
        if count:
            return count
        try:
            answer = _read_answer(data)
        except msgspec.ValidationError:
            return 1
        except msgspec.MsgspecError:
            raise EngineError from None
        if answer.error or answer.object == "error":
            raise EngineError
        if answer.usage is not None and not bytes(answer.choices).strip(b"[] "):
            self._owner.counted(answer.usage)
            return 0 if self._job.parsed.include_usage else None
        return int(_says(data))

    def _open(self) -> bytes:
        self._answering = True
        self._owner.begin()
        held = b"".join(self._held)
        self._held.clear()
        return held

    def end(self) -> None:
        """See `Sink`."""
        if self._body is not None:
            self._body.settle(self._owner)
        elif not self._done:
            rest = self._events.rest().strip()
            if rest == b"data: [DONE]":
                self._pass_each(rest + _END)
            else:
                self._owner.cut("ended")

    def lost(self, why: str, *, sent: bool) -> None:
        """See `Sink`."""
        if self._done:
            return
        if self._body is not None:
            self._owner.failed(why)
        else:
            self._owner.cut(why)

    def story(self) -> Story:
        """What the client was told. Raises Unmovable."""
        if self._obstacle or not self._run.keeps:
            raise Unmovable(self._obstacle or "long")
        story = Story(self._job.parsed)
        story.read(self._run.kept())
        return story

    def is_said(self) -> bool:
        """Whether all was sent but [DONE], as far as one sees of the last event of the only answer."""
        parsed = self._job.parsed
        one = parsed.kind is Kind.CHAT or parsed.ids is not None or parsed.text is not None
        return one and parsed.n == 1 and not parsed.include_usage and self._run.ends


class Moved:
    """The rest of a stream, from another instance."""

    __slots__ = ("_body", "_events", "_owner", "_says", "_story", "_translator")

    quick = whole = None

    def __init__(self, owner: Owner, story: Story, translator: Translator) -> None:
        self._owner, self._story, self._translator = owner, story, translator
        self._events = Events(owner.limits.event_bytes)
        self._body: Body | None = None
        self._says = False

    def head(self, status: int, headers: Headers) -> None:
        """See `Sink`."""
        if status != 200:
            self._body = Body(status, headers, SMALL_BYTES)

    def data(self, data: bytes) -> None:
        """See `Sink`."""
        owner, translator = self._owner, self._translator
        if self._body is not None or translator.done:
            return
        try:
            events = self._events.feed(data)
        except EventTooLong:
            owner.too_long()
            return
        said, broken = self._translated(events)
        if said and not self._says:
            self._says = True
            owner.resumed()
        if said:
            owner.exchange.send(said)
        owner.job.answered_tokens = len(self._story.ids)
        owner.job.cached_tokens = self._story.cached
        if isinstance(broken, Unmovable):
            owner.stuck(broken.reason)
        elif broken is not None:
            owner.cut("error")
        elif self._translator.done:
            owner.finished()
        else:
            owner.progressed()

    def _translated(self, events: bytes) -> tuple[bytes, Unmovable | EngineError | None]:
        """What can be sent of these events, and what broke it off."""
        out: list[bytes] = []
        try:
            for event in each(events):
                out.append(self._translator.said(event))  # noqa: PERF401, what came before an error is kept
        except (Unmovable, EngineError) as error:
            return b"".join(out), error
        return b"".join(out), None

    def end(self) -> None:
        """See `Sink`."""
        if self._body is not None and 400 <= self._body.status < 500:
            self._owner.stuck("refused")
        elif not self._translator.done:
            self._owner.cut("ended" if self._body is None else "status")

    def lost(self, why: str, *, sent: bool) -> None:
        """See `Sink`."""
        if not self._translator.done:
            self._owner.cut(why)


class Small:
    """A request beside: its answer is for us. `done` gets the status and the body; 0 and b'' if it was lost, and then
    `why` says why."""

    __slots__ = ("_body", "_done", "why")

    quick = whole = None

    def __init__(self, done: Callable[[int, bytes], None]) -> None:
        self._done = done
        self.why = ""
        self._body = Body(0, [], SMALL_BYTES)

    def head(self, status: int, headers: Headers) -> None:
        """See `Sink`."""
        self._body.status = status

    def data(self, data: bytes) -> None:
        """See `Sink`. What is too long is not kept."""
        if self._body.size_bytes <= SMALL_BYTES:
            self._body.add(data)

    def end(self) -> None:
        """See `Sink`."""
        self._done(self._body.status, self._body.whole())

    def lost(self, why: str, *, sent: bool) -> None:
        """See `Sink`."""
        self.why = why
        self._done(0, b"")


def usage_of(body: bytes) -> Usage | None:
    """What an engine counted, from its answer in one piece, if it says so; None if it is no answer."""
    try:
        answer = _read_answer(body)
    except msgspec.MsgspecError:
        return None
    return None if answer.error or answer.object == "error" else answer.usage or Usage()


def room_of(body: bytes) -> int | None:
    """The length of the model that an instance serves, from its /v1/models."""
    try:
        cards = msgspec.json.decode(body)["data"]
        length = cards[0]["max_model_len"]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None
    return length if isinstance(length, int) and length > 0 else None


def _says(data: bytes) -> bool:
    """Whether an event without ids brings anything of an answer."""
    body = msgspec.json.decode(data)
    for choice in body.get("choices") or ():
        delta: Mapping[str, Any] = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(v for k, v in delta.items() if k != "role"):
            return True
    return False


def _without_transfer(body: bytes) -> bytes:
    """An answer without what engines tell each other."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    return msgspec.json.encode({name: it for name, it in fields.items() if not name.endswith("_transfer_params")})
