"""A fake OpenAI engine: vLLM 0.32's answers, byte for byte where it matters, from a toy model, with faults to order.

    with serving(toy=Bytes()) as engine:          # in a thread of its own
        engine.script(Script(close_at=3))         # the next request is cut after three tokens
        ... http://127.0.0.1:{engine.port}/v1/chat/completions ...
        assert engine.aborted == 1

    async with Engine() as engine: ...            # in the running loop

A request gets the next of the scripts that were queued, or `engine.otherwise`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.conductor.toy import Toy, Words, Writer, chat_ids

CREATED = 1_700_000_000
JSON = "application/json"
STREAM = "text/event-stream; charset=utf-8"


@dataclass(frozen=True)
class Script:
    """What goes wrong with one request. Tokens are counted within its own answer."""

    status: int | None = None
    """Answer with this status and OpenAI's error body."""
    silent: bool = False
    """Not even a status comes."""
    error_body: bool = False
    """200 with an error body."""
    error_at: int | None = None
    """An error event, then [DONE], after so many tokens."""
    close_at: int | None = None
    """The connection is cut after so many tokens; of an answer that is not streamed, in its middle."""
    torn: bool = False
    """With `close_at`: half of the next event is sent before."""
    end_at: int | None = None
    """A proper end of the body without [DONE] after so many tokens."""
    hang_at: int | None = None
    """Nothing comes any more after so many tokens; 0: after the headers."""
    no_done: bool = False
    """A proper end without [DONE], when all was said."""
    no_end: bool = False
    """[DONE], but no end of the body."""
    short: bool = False
    """The body is shorter than its Content-Length."""
    split: int = 0
    """Writes are of so many bytes at most."""
    huge_bytes: int = 0
    """So much more text in the first token's event."""
    large_bytes: int = 0
    """So many more bytes in each token's event, which cost no time."""
    gate: Gate | None = None
    """Each token waits for it."""
    token_s: float = 0.0
    prefill_s: float = 0.0


class Gate:
    """Lets so many tokens pass; opened from any thread."""

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    def open(self, tokens: int = 1 << 30) -> None:
        """So many more."""
        with self._lock:
            self.tokens += tokens
            while self.tokens and self._waiting:
                self.tokens -= 1
                loop, future = self._waiting.popleft()
                loop.call_soon_threadsafe(lambda it=future: it.done() or it.set_result(None))

    async def passed(self) -> None:
        """Wait for one."""
        with self._lock:
            if self.tokens:
                self.tokens -= 1
                return
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, future))
        await future


@dataclass
class Received:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    names: list[str]
    body: bytes
    fields: dict[str, Any] = field(default_factory=dict)
    ids: Sequence[int] = ()


class Engine:
    """One engine and its counters; all of them may be read from any thread."""

    def __init__(
        self,
        *,
        toy: Toy | None = None,
        model: str = "toy",
        length: int = 2048,
        block_tokens: int = 16,
        blocks: int = 4096,
        interval: int = 1,
        eos_in: int = 0,
        noise: int = 0,
        details: bool = True,
        slots: int = 0,
        prefill_token_s: float = 0.0,
        port: int = 0,
    ) -> None:
        self.toy = toy or Words()
        self.model, self.length, self.interval = model, length, interval
        self.block_tokens, self.blocks = block_tokens, blocks
        self.eos_in = eos_in
        """One id in so many ends an answer; 0: none does."""
        self.noise = noise
        """What sampling at a temperature does to this engine's answers."""
        self.details = details
        """--enable-prompt-tokens-details."""
        self.slots, self.prefill_token_s = slots, prefill_token_s
        """How many are served at a time, the others wait; 0: any number. Prompts are computed one after the other, and
        each token that is not cached takes so long."""
        self.port = port
        self.reply: Callable[[Received], bytes | None] | None = None
        """What is written for a request instead of all else, head included; None: as if it were not there."""
        self.compute_s = 0.0
        """For each token of a prompt that is not found, of answers in one piece."""
        self.otherwise = Script()
        self.requests: list[Received] = []
        self.running = self.waiting = self.aborted = self.finished = self.connections = 0
        self.computed: Counter[tuple[int, ...]] = Counter()
        """How often each whole prompt was computed rather than found."""
        self.computed_tokens = 0
        self.missed: list[int] = []
        """Of each request, how many tokens were not found."""
        self.stored: Callable[[Sequence[int], int, str], None] | None = None
        """Told of each prompt's ids, how many of them were found, and its salt."""
        self._known: set[tuple[str, int, int]] = set()
        self._scripts: deque[Script] = deque()
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._seats = asyncio.Semaphore(slots or 1 << 30)
        self._step = asyncio.Lock()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked(self) -> list[Received]:
        """The requests for answers, without probes."""
        return [it for it in self.requests if it.path.endswith("completions")]

    def script(self, *scripts: Script) -> None:
        """What becomes of the next requests for answers."""
        self._scripts.extend(scripts)

    def next_script(self) -> Script:
        """The next of them."""
        return self._scripts.popleft() if self._scripts else self.otherwise

    def found(self, ids: Sequence[int], salt: str) -> int:
        """How many leading tokens are cached (whole blocks, never all); those that are not are from now on."""
        size, crc, found, unbroken = self.block_tokens, 0, 0, True
        for end in range(size, len(ids) + 1, size):
            crc = hash((crc, *ids[end - size : end]))
            if unbroken and (salt, end, crc) in self._known and end < len(ids):
                found = end
            else:
                unbroken = False
                self._known.add((salt, end, crc))
        self.computed_tokens += len(ids) - found
        if found < len(ids) // size * size - size or not found:
            self.computed[tuple(ids)] += 1
        if self.stored is not None:
            self.stored(ids, found, salt)
        return found

    def forget(self) -> None:
        """An empty cache."""
        self._known.clear()

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[None]:
        """One of the slots."""
        self.waiting += 1
        try:
            await self._seats.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._seats.release()

    async def prefill(self, answer: _Answer) -> None:
        """Compute its prompt when it is its turn, if that takes any time."""
        if self.prefill_token_s:
            async with self._step:
                answer.cached()
                await _later(answer.missed * self.prefill_token_s)

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after `stop`, on the same port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Link(self), "127.0.0.1", self.port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: all connections are cut, and new ones refused."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        for link in list(self._links):
            link.cut()
        while self._links:
            await asyncio.sleep(0)


@contextmanager
def serving(**options: Any) -> Iterator[Engine]:
    """An engine in a thread of its own; `engine.call(engine.stop())` runs something there."""
    engine = _Threaded(**options)
    thread = threading.Thread(target=engine.loop.run_forever, name="fake-engine")
    thread.start()
    try:
        engine.call(engine.start())
        yield engine
    finally:
        engine.call(engine.stop())
        engine.loop.call_soon_threadsafe(engine.loop.stop)
        thread.join()
        engine.loop.close()


class _Threaded(Engine):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.loop = asyncio.new_event_loop()

    def call(self, coroutine: Any) -> Any:
        """What it gives, from its own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)


class _Link(asyncio.Protocol):
    """One connection: requests one after the other, each answered by a task that ends with the connection."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.engine._links.add(self)
        self.engine.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if self._task is not None:
            self._task.cancel()
        else:
            self.engine._links.discard(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def cut(self) -> None:
        """As a process that dies."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._begin()

    def _begin(self) -> None:
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        line, *lines = head.decode("latin-1").split("\r\n")
        names = [it.partition(":")[0] for it in lines]
        headers = {it.partition(":")[0].lower(): it.partition(":")[2].strip() for it in lines}
        size = int(headers.get("content-length", 0))
        if len(rest) < size:
            return
        self._buffer = rest[size:]
        method, path, _ = line.split(" ")
        received = Received(method, path, headers, names, rest[:size])
        self.engine.requests.append(received)
        self._task = asyncio.get_running_loop().create_task(self._serve(received))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is not None:
            self.transport.abort()
            raise task.exception()  # type: ignore[misc]
        if self.transport.is_closing():
            self.engine._links.discard(self)
        elif self._buffer:
            self._begin()

    async def _serve(self, received: Received) -> None:
        path = received.path.partition("?")[0]
        said = self.engine.reply(received) if self.engine.reply is not None else None
        if said is not None:
            await self._write(said)
            return
        if received.method == "GET":
            status, kind, body = _read(self.engine, path)
            await self._whole(status, body, kind)
            return
        chat = path == "/v1/chat/completions"
        if not chat and path != "/v1/completions":
            await self._whole(404, error_body(404, "Not Found"))
            return
        script = self.engine.next_script()
        answer = _Answer(self.engine, received, chat, script)
        try:
            async with self.engine.seat():
                await self.engine.prefill(answer)
                await self._answer(answer, script)
            self.engine.finished += 1
        except asyncio.CancelledError:
            self.engine.aborted += 1
            raise

    async def _answer(self, answer: _Answer, script: Script) -> None:
        if script.silent:
            await asyncio.get_running_loop().create_future()
        if script.status is not None:
            await self._whole(script.status, error_body(script.status, "scripted"))
        elif script.error_body:
            await self._whole(200, error_body(500, "scripted"))
        elif (problem := answer.problem()) is not None:
            await self._whole(400, error_body(400, problem))
        elif answer.fields.get("stream"):
            await self._stream(answer, script)
        else:
            await _later(script.prefill_s)
            for _ in range(answer.limit if script.gate or script.token_s else 0):
                await _pace(script)
            body, missed = answer.whole(), answer.missed
            if self.engine.compute_s:
                await _later(self.engine.compute_s * missed)
            await self._body(body, script)

    async def _body(self, body: bytes, script: Script) -> None:
        if script.hang_at is not None:
            await self._write(_head(200, JSON, len(body)))
            await asyncio.get_running_loop().create_future()
        if script.close_at is not None or script.short:
            await self._write(_head(200, JSON, len(body)) + body[: len(body) // 2])
            self.transport.close() if script.short else self.transport.abort()
            return
        await self._write(_head(200, JSON, len(body)) + body, script.split)

    async def _whole(self, status: int, body: bytes, kind: str = JSON) -> None:
        await self._write(_head(status, kind, len(body)) + body)

    async def _stream(self, answer: _Answer, script: Script) -> None:
        if script.prefill_s:
            await _later(script.prefill_s)
        await self._write(_head(200, STREAM, None))
        said = 0
        for tokens, event in answer.events():
            if tokens:
                await _pace(script)
            if script.error_at is not None and said >= script.error_at:
                await self._chunk(b"data: " + error_body(500, "scripted") + b"\n\n", script)
                break
            if script.hang_at is not None and said >= script.hang_at:
                await asyncio.get_running_loop().create_future()
            if script.close_at is not None and said >= script.close_at:
                if script.torn:
                    await self._chunk(event[: len(event) // 2], script)
                self.transport.close() if script.torn else self.transport.abort()
                return
            if script.end_at is not None and said >= script.end_at:
                await self._write(b"0\r\n\r\n", script.split)
                return
            await self._chunk(event, script)
            said += tokens
        if not script.no_done:
            await self._chunk(b"data: [DONE]\n\n", script)
        if script.no_end:
            await asyncio.get_running_loop().create_future()
        await self._write(b"0\r\n\r\n", script.split)

    async def _chunk(self, event: bytes, script: Script) -> None:
        await self._write(b"%x\r\n%b\r\n" % (len(event), event), script.split)

    async def _write(self, data: bytes, split: int = 0) -> None:
        step = split or len(data) or 1
        for at in range(0, len(data), step):
            await self._writable.wait()
            if self.transport.is_closing():  # its task is ended by `connection_lost`, which has no turn while we write
                await asyncio.get_running_loop().create_future()
            self.transport.write(data[at : at + step])
            if split:
                await asyncio.sleep(0)


class _Answer:
    """What the toy model says to one request, in vLLM's words."""

    def __init__(self, engine: Engine, received: Received, chat: bool, script: Script) -> None:
        self.engine, self.chat, self.script = engine, chat, script
        self.fields: dict[str, Any] = json.loads(received.body)
        received.fields = self.fields
        fields, toy = self.fields, engine.toy
        self.prompts = self._prompts(toy)
        self._found: int | None = None
        self.missed = 0
        received.ids = self.prompts[0]
        self.n = fields.get("n") or 1
        longest = max(map(len, self.prompts))
        asked = fields.get("max_completion_tokens") or fields.get("max_tokens") if chat else fields.get("max_tokens")
        self.asked = asked if asked is not None or chat else 16
        self.limit = max(min(self.asked or engine.length, engine.length - longest), 0)
        self.stop = [fields["stop"]] if isinstance(fields.get("stop"), str) else list(fields.get("stop") or ())
        mark = received.headers.get("x-request-id", "unnamed")
        self.head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + mark,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": CREATED,
            "model": fields.get("model", engine.model),
        }
        self.with_ids = bool(fields.get("return_token_ids"))
        options = fields.get("stream_options") or {}
        self.with_usage = bool(options.get("include_usage"))
        self.continuously = bool(options.get("continuous_usage_stats"))

    def problem(self) -> str | None:
        """Why it cannot be answered."""
        if self.fields.get("model") not in (None, self.engine.model):
            return "The model does not exist."
        if max(map(len, self.prompts)) + (self.asked or 1) > self.engine.length:
            return "This model's maximum context length is exceeded."
        return None

    def events(self) -> Iterator[tuple[int, bytes]]:
        """(tokens in it, event) up to, but without, [DONE]."""
        cached = self.cached()
        total = 0
        if self.chat:
            for index in range(self.n):
                yield 0, self._event(self._role(index))
        for index in range(self.n * len(self.prompts)):
            for ids, text, finish, stop, logprobs in self._steps(index):
                if self.script.huge_bytes and not total:
                    text += "x" * self.script.huge_bytes
                total += len(ids)
                event = self._event(self._step(index, ids, text, finish, stop, logprobs, first=total == len(ids)))
                if more := self.script.large_bytes:
                    event = b'data: {"more":"%b",%b' % (b"x" * more, event.removeprefix(b"data: {"))
                yield len(ids), event
        if self.with_usage:
            event = {**self.head, "choices": [], "usage": self._usage(total, cached)}
            yield 0, b"data: " + _dump(event) + b"\n\n"

    def whole(self) -> bytes:
        """The answer in one piece."""
        cached, total, choices = self.cached(), 0, []
        for index in range(self.n * len(self.prompts)):
            ids: list[int] = []
            text, finish, stop, marks = "", "stop", None, []
            for new, more, finish, stop, logprobs in self._steps(index):  # noqa: B007
                ids += new
                text += more
                marks.append(logprobs)
            total += len(ids)
            choice: dict[str, Any] = {"index": index}
            choice |= {"message": self._message(text)} if self.chat else {"text": text}
            choice |= {"logprobs": _joined(marks, self.chat), "finish_reason": finish, "stop_reason": stop}
            choice["token_ids"] = ids if self.with_ids else None
            if not self.chat:
                choice |= {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(index)}
            choices.append(choice)
        head = {**self.head, "object": "chat.completion"} if self.chat else self.head
        body = {**head, "choices": choices, "service_tier": None, "system_fingerprint": None}
        body["usage"] = self._usage(total, cached)
        if self.chat:
            body |= {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(0)}
        return _dump({**body, "kv_transfer_params": None})

    def _prompts(self, toy: Toy) -> list[list[int]]:
        if self.chat:
            tools = self.fields.get("tools") or () if self.fields.get("tool_choice") != "none" else ()
            return [chat_ids(toy, self.fields["messages"], tools)]
        prompt = self.fields["prompt"]
        if isinstance(prompt, str):
            return [toy.encode(prompt)]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return [toy.encode(it) if isinstance(it, str) else it for it in prompt]

    def cached(self) -> int:
        """How much of its prompts was found; from now on all of it is."""
        if self._found is None:
            self._found = sum([self.engine.found(ids, self.fields.get("cache_salt") or "") for ids in self.prompts])
            self.missed = sum(map(len, self.prompts)) - self._found
            self.engine.missed.append(self.missed)
        return self._found

    def _steps(self, index: int) -> Iterator[tuple[list[int], str, str | None, str | None, Any]]:
        """(ids, text, finish reason, stop reason, logprobs) of each chunk."""
        mix = index % self.n * 7919
        if self.fields.get("temperature"):
            mix ^= self.engine.noise
        prompt = self.prompts[index // self.n]
        writer = Writer(self.engine.toy, prompt, self.stop, self.fields, mix)
        start = "".join(self.engine.toy.token_bytes(it).decode(errors="replace") for it in prompt)
        start = start if self.fields.get("echo") and not self.chat else ""
        ids: list[int] = []
        for count in range(1, self.limit + 1):
            token = writer.next()
            ids.append(token)
            stop, finish = writer.stopped(), None
            if stop is not None or self._is_last(token, count):
                finish = "stop"
            elif count == self.limit:
                finish = "length"
            if finish or count == 1 or len(ids) == self.engine.interval:
                text = start + writer.delta(finished=finish is not None)
                start = ""
                yield ids, text, finish, stop, self._logprobs(ids, count)
                ids = []
            if finish:
                return

    def _is_last(self, token: int, count: int) -> bool:
        if not self.engine.eos_in or self.fields.get("ignore_eos"):
            return False
        return token * 2654435761 % self.engine.eos_in == 0 and count > (self.fields.get("min_tokens") or 0)

    def _logprobs(self, ids: list[int], count: int) -> Any:
        if not self.fields.get("logprobs"):
            return None
        words = [self.engine.toy.token_bytes(it).decode(errors="replace") for it in ids]
        marks = [-(it % 100) / 100 for it in ids]
        if self.chat:
            rows = zip(words, marks, strict=True)
            return {
                "content": [{"token": w, "logprob": m, "bytes": list(w.encode()), "top_logprobs": []} for w, m in rows]
            }
        offsets = [5 * (count - len(ids) + it) for it in range(len(ids))]
        top = [{w: m} for w, m in zip(words, marks, strict=True)]
        return {"text_offset": offsets, "token_logprobs": marks, "tokens": words, "top_logprobs": top}

    def _event(self, body: dict[str, Any]) -> bytes:
        return b"data: " + _dump(body) + b"\n\n"

    def _role(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        event = {**self.head, "choices": [choice], "prompt_token_ids": self._prompt_ids(0), "prompt_text": None}
        return {**event, "usage": self._counted(0)} if self.continuously else event

    def _step(
        self, index: int, ids: list[int], text: str, finish: str | None, stop: str | None, logprobs: Any, *, first: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": self._delta(text, first=first)} if self.chat else {"text": text}
        choice |= {"logprobs": logprobs, "finish_reason": finish}
        if finish or not self.chat:
            choice["stop_reason"] = stop
        if finish and self._calls():
            choice["finish_reason"] = "tool_calls"
        if not self.chat:
            choice["prompt_token_ids"] = self._prompt_ids(index // self.n) if first else None
        choice["token_ids"] = ids if self.with_ids else None
        event = {**self.head, "choices": [choice]}
        self._said = len(ids) if first else self._said + len(ids)
        return {**event, "usage": self._counted(self._said)} if self.continuously else event

    def _calls(self) -> bool:
        return self.chat and bool(self.fields.get("tools")) and self.fields.get("tool_choice", "auto") != "none"

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        if not self._calls():
            return {"content": text}
        function: dict[str, Any] = {"arguments": text}
        if not first:
            return {"tool_calls": [{"index": 0, "function": function}]}
        function["name"] = self.fields["tools"][0]["function"]["name"]
        return {"tool_calls": [{"id": "call-0", "type": "function", "index": 0, "function": function}]}

    def _message(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, "reasoning": None}
        if self._calls():
            function = {"name": self.fields["tools"][0]["function"]["name"], "arguments": text}
            message |= {"content": None, "tool_calls": [{"id": "call-0", "type": "function", "function": function}]}
        return message

    def _prompt_ids(self, which: int) -> list[int] | None:
        return list(self.prompts[which]) if self.with_ids else None

    def _counted(self, answered: int) -> dict[str, Any]:
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "total_tokens": prompt + answered, "completion_tokens": answered}

    def _usage(self, answered: int, cached: int) -> dict[str, Any]:
        usage = self._counted(answered)
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}} if self.engine.details else usage


def events_of(engine: Engine, fields: dict[str, Any], *, chat: bool, name: str = "unnamed") -> list[bytes]:
    """The events of a stream, [DONE] included, without any connection."""
    received = Received("POST", "", {"x-request-id": name}, [], json.dumps(fields).encode())
    answer = _Answer(engine, received, chat, Script())
    assert answer.problem() is None, answer.problem()
    return [*(event for _, event in answer.events()), b"data: [DONE]\n\n"]


def error_body(status: int, message: str) -> bytes:
    """vLLM's."""
    name = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return _dump({"error": {"message": message, "type": name, "param": None, "code": status}})


async def _later(seconds: float) -> None:
    """An engine's own time, where a test or a benchmark gives it some."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, future.set_result, None)
    try:
        await future
    finally:
        timer.cancel()


async def _pace(script: Script) -> None:
    if script.gate is not None:
        await script.gate.passed()
    if script.token_s:
        await _later(script.token_s)


def _read(engine: Engine, path: str) -> tuple[int, str, bytes]:
    if path == "/health":
        return 200, JSON, b""
    if path == "/v1/models":
        card = {"id": engine.model, "object": "model", "created": CREATED, "owned_by": "vllm", "root": engine.model}
        return 200, JSON, _dump({"object": "list", "data": [{**card, "parent": None, "max_model_len": engine.length}]})
    if path == "/metrics":
        name = f'model_name="{engine.model}"'
        config = f'block_size="{engine.block_tokens}",num_gpu_blocks="{engine.blocks}",enable_prefix_caching="True"'
        text = f"vllm:num_requests_running{{{name}}} {engine.running}.0\n"
        text += f"vllm:num_requests_waiting{{{name}}} {engine.waiting}.0\nvllm:cache_config_info{{{config}}} 1.0\n"
        return 200, "text/plain; version=0.0.4; charset=utf-8", text.encode()
    return 404, JSON, error_body(404, "Not Found")


def _head(status: int, kind: str, length: int | None) -> bytes:
    size = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    return b"HTTP/1.1 %d X\r\nserver: uvicorn\r\ncontent-type: %b\r\n%b\r\n\r\n" % (status, kind.encode(), size)


def _joined(marks: list[Any], chat: bool) -> Any:
    marks = [it for it in marks if it is not None]
    if not marks:
        return None
    return {name: [row for it in marks for row in it[name]] for name in marks[0]}


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
